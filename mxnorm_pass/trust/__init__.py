"""Trust in the estimate for checkpoints that were trained without it, and the way back."""

from mxnorm_pass.trust.calibration import Calibration, NormCalibration, calibrate
from mxnorm_pass.trust.findings import Fidelity, SiteFidelity
from mxnorm_pass.trust.gains import FoldedGain, FoldedGains, FoldedLinear, fold_gains
from mxnorm_pass.trust.measuring import fidelity
from mxnorm_pass.trust.serving import BakedGain, ToRMSNorm, to_rmsnorm
from mxnorm_pass.trust.settings import Settings, SettingsError, load_settings, save_settings

__all__ = [
    "BakedGain",
    "Calibration",
    "Fidelity",
    "FoldedGain",
    "FoldedGains",
    "FoldedLinear",
    "NormCalibration",
    "Settings",
    "SettingsError",
    "SiteFidelity",
    "ToRMSNorm",
    "calibrate",
    "fidelity",
    "fold_gains",
    "load_settings",
    "save_settings",
    "to_rmsnorm",
]
