"""mxnorm_pass: RMSNorm -> MX cast -> matmul, rewritten to MXNorm inside torch.compile."""

from mxnorm_pass import reference, theory
from mxnorm_pass.backend import backend, explain, inductor_options, last_report
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.graph_pass import MXNormPass
from mxnorm_pass.recognise.opaque import CastOp, register_cast_op
from mxnorm_pass.report import Report, RewriteError
from mxnorm_pass.trust import (
    Calibration,
    Fidelity,
    FoldedGains,
    Settings,
    SettingsError,
    ToRMSNorm,
    calibrate,
    fidelity,
    fold_gains,
    load_settings,
    save_settings,
    to_rmsnorm,
)

__all__ = [
    "Calibration",
    "CastOp",
    "Fidelity",
    "FoldedGains",
    "MXNormConfig",
    "MXNormPass",
    "Report",
    "RewriteError",
    "Settings",
    "SettingsError",
    "ToRMSNorm",
    "backend",
    "calibrate",
    "explain",
    "fidelity",
    "fold_gains",
    "inductor_options",
    "last_report",
    "load_settings",
    "reference",
    "register_cast_op",
    "save_settings",
    "theory",
    "to_rmsnorm",
]
__version__ = "0.1.0"
