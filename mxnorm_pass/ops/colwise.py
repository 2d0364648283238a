"""``mxnorm::rmsnorm_mxquant_colwise``: the other cast of a norm's output, along tokens.

In training a linear's weight gradient reads the same activation in blocks along tokens. The op
makes that cast from the row ``x`` and the reciprocal root that the row-wise op returned: the norm's
output ``y = x * rstd * gain`` is formed again on the way and is written nowhere.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, Cast, output_shapes, quantize, swizzle
from mxnorm_pass.ops import kernels
from mxnorm_pass.ops.rmsnorm_mxquant import (
    check_device,
    check_dtype,
    check_gain,
    check_tensor_scale,
    no_gradient,
    normed,
    parse_rounding,
)

_NAME = "rmsnorm_mxquant_colwise"
_LIB = torch.library.Library("mxnorm", "FRAGMENT")
_LIB.define(
    f"{_NAME}(Tensor x, Tensor rstd, Tensor? gain, Tensor? tensor_scale, str rounding, str cast) "
    "-> (Tensor qdata, Tensor scale)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class ColumnOptions(NamedTuple):
    """What the op takes behind ``x`` and ``rstd``, in the order of its schema."""

    gain: Tensor | None
    tensor_scale: Tensor | None
    rounding: str
    cast: str


def check(x: Tensor, rstd: Tensor, options: ColumnOptions) -> Cast:
    """Refuse what the op does not take; ValueError says what is allowed."""
    spec = Cast.parse(options.cast)
    parse_rounding(options.rounding)
    check_dtype("x", x)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected [..., K] with K of at least 1")
    if rstd.dtype is not torch.float32:
        raise ValueError(f"rstd is {rstd.dtype}: expected torch.float32")
    check_device("rstd", rstd, x)

    def differs() -> str:
        return f"rstd of shape {tuple(rstd.shape)}: expected {(*x.shape[:-1], 1)}, one per row of x"

    torch._check_value(rstd.dim() == x.dim(), differs)
    for given, expected in zip(rstd.shape, (*x.shape[:-1], 1), strict=True):
        torch._check_value(given == expected, differs)
    rows, block = math.prod(x.shape[:-1]), spec.block_size
    torch._check_value(
        rows % block == 0,
        lambda: (
            f"x of shape {tuple(x.shape)}: {rows} rows are no multiple of the block size "
            f"{block}; blocks run along them"
        ),
    )
    check_gain(x, options.gain)
    check_tensor_scale(x, options.tensor_scale, spec)
    return spec


def decomposition(x: Tensor, rstd: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The op in aten, for every device without a kernel of its own.

    The operations and results are those of the norm, the transpose and the cast that the op
    replaces; no E8M0 or FP4 dtype appears inside.

    Args:
        x: ``[..., K]``, M rows.
        rstd: float32 ``[..., 1]``.
        options: the fields of :class:`ColumnOptions`, in their order.
    """
    given = ColumnOptions(*options)
    spec = Cast.parse(given.cast)
    k, block = x.shape[-1], spec.block_size
    rows = math.prod(x.shape[:-1])
    y = normed(x.to(torch.float32), rstd, given.gain, given.rounding).reshape(rows, k)
    values = y.t().contiguous().view(k, rows // block, block).to(torch.float32)
    qdata, scale = quantize(values, values.abs().amax(-1, keepdim=True), spec, given.tensor_scale)
    scale = scale.squeeze(-1)
    if spec.layout == "swizzled":
        scale = swizzle(scale)
    return qdata.reshape(k, rows // ELEMENTS[spec.element].per_byte), scale


def _kernel(x: Tensor, rstd: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    given = ColumnOptions(*options)
    spec = check(x, rstd, given)
    if x.numel() == 0:
        return _empty(x, spec)
    if kernels.unusable_columns(x.device, x.shape[-1]) is None:
        # Imports Triton.
        from mxnorm_pass.ops.kernels import cols_launch

        how = (parse_rounding(given.rounding), spec, kernels.hardware(x.device))
        return cols_launch.rmsnorm_mxquant_colwise(x, rstd, given.gain, given.tensor_scale, *how)
    return decomposition(x, rstd, *options)


def _fake(x: Tensor, rstd: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _empty(x, check(x, rstd, ColumnOptions(*options)))


def _empty(x: Tensor, spec: Cast) -> tuple[Tensor, Tensor]:
    codes, scale = output_shapes([x.shape[-1]], math.prod(x.shape[:-1]), spec)
    return (
        x.new_empty(codes, dtype=ELEMENTS[spec.element].dtype),
        x.new_empty(scale, dtype=spec.scale_dtype),
    )


_LIB.impl(_NAME, _kernel, "CompositeExplicitAutograd")
_LIB.impl(_NAME, partial(no_gradient, _NAME), "Autograd")
torch.library.register_fake(f"mxnorm::{_NAME}", _fake, lib=_LIB)

COLWISE_OP = torch.ops.mxnorm.rmsnorm_mxquant_colwise.default


def rmsnorm_mxquant_colwise(
    x: Tensor,
    rstd: Tensor,
    gain: Tensor | None = None,
    *,
    rounding: str = "f32->f32",
    cast: str = "e4m3/b32/rceil_log2/reciprocal/clamp/plain",
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Microscaling cast of ``y = x * rstd * gain`` along the rows of ``x`` (tokens), transposed.

    Args:
        x: ``[..., K]`` bfloat16 or float32, any strides; M rows, a multiple of the block size.
        rstd: float32 ``[..., 1]``, what :func:`rmsnorm_mxquant` returned for ``x``.
        gain: ``[K]`` or None, any float dtype.
        rounding: dtype of ``x * rstd`` before the gain and dtype that the cast reads, e.g.
            ``bf16->bf16`` for transformers' Llama.
        cast: a :class:`mxnorm_pass.formats.Cast` as text.
        tensor_scale: 0-d float32, NVFP4's per-tensor scale; None stands for 1.

    Returns:
        ``qdata`` ``[K, M]`` in the element dtype (FP6: one uint8 code each; FP4: uint8
        ``[K, M / 2]``, the first of two tokens in the low half) and ``scale`` ``[K, M /
        block_size]`` (uint8 biased E8M0; float8_e4m3fn for NVFP4; flat and padded in the swizzled
        layout).

    Raises:
        ValueError: for a shape, dtype, device or name that is not allowed, naming those that are.
        RuntimeError: where an input requires a gradient, or has a tangent: the op has neither.
    """
    if not isinstance(cast, str):
        raise ValueError(f"cast {cast!r}: expected a Cast as text, str(cast)")
    result: tuple[Tensor, Tensor] = COLWISE_OP(x, rstd, gain, tensor_scale, rounding, cast)
    return result
