"""mxnorm_pass: RMSNorm -> MX cast -> matmul, rewritten to MXNorm inside torch.compile."""

from mxnorm_pass import reference, theory
from mxnorm_pass.backend import backend, explain, inductor_options, last_report
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.graph_pass import MXNormPass
from mxnorm_pass.recognise.opaque import CastOp, register_cast_op
from mxnorm_pass.report import Report, RewriteError

__all__ = [
    "CastOp",
    "MXNormConfig",
    "MXNormPass",
    "Report",
    "RewriteError",
    "backend",
    "explain",
    "inductor_options",
    "last_report",
    "reference",
    "register_cast_op",
    "theory",
]
__version__ = "0.1.0"
