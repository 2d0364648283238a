"""``python -m mxnorm_pass``."""

import sys

from mxnorm_pass.cli import main

sys.exit(main())
