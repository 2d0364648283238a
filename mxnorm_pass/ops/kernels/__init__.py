"""The op's Triton kernels, and whether a device runs them.

``convert.py`` holds the conversions to scales and codes, ``rows.py`` the kernels along rows,
``constants.py`` their constants and the table of tile sizes, ``launch.py`` what both ways of
launching share. ``cols.py`` holds the kernel along tokens, ``cols_launch.py`` and
``cols_inductor.py`` its launches.
Importing this package does not import Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from mxnorm_pass.ops.kernels.constants import MAX_COLUMNS

VARIABLE = "MXNORM_KERNEL"
"""Environment variable: ``triton`` (default), or ``aten`` for the decomposition on every device."""


def chosen() -> str:
    """``triton`` or ``aten``, as the environment says; ValueError names what is allowed."""
    value = os.environ.get(VARIABLE) or "triton"
    if value not in ("triton", "aten"):
        raise ValueError(f"{VARIABLE}={value!r}: allowed are 'triton', 'aten'")
    return value


def unusable(device: torch.device, k: int) -> str | None:
    """Why rows of ``k`` elements on ``device`` do not run on a kernel of ours; None if they do."""
    if chosen() == "aten":
        return f"{VARIABLE}=aten"
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if torch.version.hip is not None:
        return "no kernel for ROCm"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if k > MAX_COLUMNS:
        return f"rows of more than {MAX_COLUMNS} elements"
    return None if hardware(device) else "no kernel for chips older than sm_90"


def unusable_columns(device: torch.device, k: int) -> str | None:
    """The same of the column kernel, which holds a tile of rows of any width, in pairs."""
    return unusable(device, 0) or ("rows of an odd number of elements" if k % 2 else None)


def hardware(device: torch.device) -> int:
    """What ``HW`` means in :mod:`.convert`: 2 from sm_100 on, 1 from sm_90 on, else 0."""
    # Inductor names devices without their index where there is one.
    return _hardware(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _hardware(index: int) -> int:
    capability = torch.cuda.get_device_capability(index)
    return 2 if capability >= (10, 0) else 1 if capability >= (9, 0) else 0
