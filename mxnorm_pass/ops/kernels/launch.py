"""From the op's arguments to a launch on tensors; what Inductor's launches share with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, SWIZZLE_ROWS, Cast, output_shapes
from mxnorm_pass.ops.kernels.constants import absmax_constants, constants, row_config
from mxnorm_pass.ops.kernels.rows import rmsnorm_absmax_kernel, rmsnorm_mxquant_kernel


def rows_of(size: Sequence[Any], stride: Sequence[Any]) -> tuple[Any, Any, Any] | None:
    """``(inner, outer stride, inner stride)`` of the rows of ``[..., K]``, in elements.

    Row r starts at ``(r // inner) * outer + (r % inner) * stride``. None where two strides do not
    say it, where the last axis is not dense, or where a row starts at an odd element: elements are
    loaded in pairs.
    """
    axes = [(n, s) for n, s in zip(size[:-1], stride[:-1], strict=True) if n != 1]
    merged: list[tuple[Any, Any]] = []
    for n, s in axes:
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    if stride[-1] != 1 or len(merged) > 2 or any(s % 2 != 0 for _, s in merged):
        return None
    if len(merged) == 2:
        return merged[1][0], merged[0][1], merged[1][1]
    return 1, 0, merged[0][1] if merged else size[-1]


def grid_rows(rows: Any, cast: Cast) -> Any:
    """Programs of the row kernel: padding rows of the swizzled layout have one each, to zero it."""
    if cast.layout == "swizzled":
        return (rows + SWIZZLE_ROWS - 1) // SWIZZLE_ROWS * SWIZZLE_ROWS
    return rows


PROGRAMS = 1024
"""Programs of the absmax kernel: enough for any chip, few enough to reduce in one more launch."""


def rmsnorm_mxquant(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    tensor_scale: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: tuple[torch.dtype, torch.dtype],
    cast: Cast,
    hw: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Launch the row kernel on tensors: ``qdata, scale, rstd`` and, with a residual, the sum."""
    k = x.shape[-1]
    lead, rows = x.shape[:-1], math.prod(x.shape[:-1])
    x, x_rows = loadable(x)
    r_rows: tuple[int, int, int] = (1, 0, 0)
    total = None
    if residual is not None:
        total = x.new_empty((*lead, k), dtype=torch.promote_types(x.dtype, residual.dtype))
        residual, r_rows = loadable(residual)
    shapes = output_shapes(lead, k, cast)
    qdata = x.new_empty(shapes[0], dtype=ELEMENTS[cast.element].dtype)
    scale = x.new_empty(shapes[1], dtype=cast.scale_dtype)
    rstd = x.new_empty((*lead, 1), dtype=torch.float32)
    if rows:
        split = (x_rows[0] != 1, r_rows[0] != 1)
        rmsnorm_mxquant_kernel[(grid_rows(rows, cast),)](
            x, residual, loadable_gain(gain),
            loadable_scalar(eps_tensor, x), loadable_scalar(tensor_scale, x),
            qdata.view(torch.uint8), scale.view(torch.uint8), rstd, total,
            rows, *x_rows, *r_rows, eps, factor(rms, correction),
            **constants(cast, k, rms, rounding, hw, gain=gain is not None, split=split),
            num_warps=row_config(k, cast.block_size, gain is not None).warps,
        )  # fmt: skip
    return qdata, scale, rstd, total


def rmsnorm_absmax(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: tuple[torch.dtype, torch.dtype],
    block_size: int,
    hw: int,
) -> Tensor:
    """Launch the absmax kernel on tensors and reduce what its programs found: 0-d float32."""
    k, rows = x.shape[-1], math.prod(x.shape[:-1])
    x, x_rows = loadable(x)
    partial = x.new_empty((PROGRAMS,), dtype=torch.float32)
    rmsnorm_absmax_kernel[(PROGRAMS,)](
        x, loadable_gain(gain), loadable_scalar(eps_tensor, x), partial,
        rows, *x_rows, eps, factor(rms, correction),
        **absmax_constants(
            block_size, k, rms, rounding, hw, gain=gain is not None, split=x_rows[0] != 1
        ),
        PROGRAMS=PROGRAMS, num_warps=row_config(k, block_size, gain is not None).warps,
    )  # fmt: skip
    return partial.amax()


def factor(rms: str, correction: float) -> float:
    """What the mean over blocks is multiplied by: c, or its square for p = 2."""
    return correction * correction if rms == "p2" else correction


LOADED = (torch.bfloat16, torch.float32)
"""Dtypes that the kernels load; others are converted before."""


def loadable_gain(gain: Tensor | None) -> Tensor | None:
    """The gain in a dtype and at an address that the kernel can load."""
    if gain is None:
        return None
    gain = gain if gain.dtype in LOADED else gain.to(torch.float32)
    gain = gain.contiguous()
    return gain.clone() if _odd(gain) else gain


def _odd(x: Tensor) -> bool:
    """Whether a pair of elements would straddle two words."""
    return x.data_ptr() % (2 * x.element_size()) != 0


def loadable_scalar(value: Tensor | None, x: Tensor) -> Tensor | None:
    """A 0-d tensor where the kernel can read it: scalars of a graph may live on the CPU."""
    return None if value is None else value.to(x.device)


def loadable(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """``x`` with rows that the kernel can load, copied where they are not (see :func:`rows_of`)."""
    rows = rows_of(x.shape, x.stride())
    if rows is None or _odd(x):
        x = x.clone(memory_format=torch.contiguous_format)
        rows = (1, 0, x.shape[-1])
    return x, rows
