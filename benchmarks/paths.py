"""Imported for what it does: the package beside this folder is found where none is installed.

Python has put this folder itself on the path, as that of the script it runs.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
