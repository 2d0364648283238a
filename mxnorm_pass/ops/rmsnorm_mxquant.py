"""``mxnorm::rmsnorm_mxquant``: RMSNorm and microscaling cast in one functional op.

The op returns what three users of a norm need: the quantised activation, its block scales, and the
reciprocal root that the norm's other users (the backward among them) are recomputed from.

``mxnorm::add_rmsnorm_mxquant`` forms the row first, as the sum of two tensors: the residual stream
of a pre-norm transformer. It returns the sum as well, for those who read the stream.

``mxnorm::rmsnorm_absmax`` is their companion for NVFP4 with a dynamic per-tensor scale: the absmax
of the whole normalised tensor, which the scale of every block depends on.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from mxnorm_pass.formats import BLOCK_SIZES, ELEMENTS, Cast, output_shapes, quantize, swizzle
from mxnorm_pass.ops import kernels

# In the order of NormOptions and Options below.
_NORM = "Tensor? gain, Tensor? eps_tensor, float eps, str rms, float correction, str rounding"
_OPTIONS = _NORM.replace("eps_tensor,", "eps_tensor, Tensor? tensor_scale,") + ", str cast"
_CAST = "Tensor qdata, Tensor scale, Tensor rstd"

_LIB = torch.library.Library("mxnorm", "DEF")
for _schema in (
    f"rmsnorm_mxquant(Tensor x, {_OPTIONS}) -> ({_CAST})",
    f"add_rmsnorm_mxquant(Tensor x, Tensor residual, {_OPTIONS}) -> ({_CAST}, Tensor sum)",
    f"rmsnorm_absmax(Tensor x, {_NORM}, int block_size) -> Tensor",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

RMS_KINDS = ("p1", "p2", "exact")
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
ROW_DTYPES = tuple(_DTYPE_NAMES)
"""Dtypes of the rows that the ops take."""


class NormOptions(NamedTuple):
    """What ``rmsnorm_absmax`` takes behind its row, in the order of its schema."""

    gain: Tensor | None
    eps_tensor: Tensor | None
    eps: float
    rms: str
    correction: float
    rounding: str
    block_size: int


class Options(NamedTuple):
    """What the two casting ops take behind their rows, in the order of their schemas."""

    gain: Tensor | None
    eps_tensor: Tensor | None
    tensor_scale: Tensor | None
    eps: float
    rms: str
    correction: float
    rounding: str
    cast: str

    def norm(self, block_size: int) -> NormOptions:
        """The norm's part."""
        return NormOptions(
            self.gain,
            self.eps_tensor,
            self.eps,
            self.rms,
            self.correction,
            self.rounding,
            block_size,
        )


def rounding_name(norm: torch.dtype, out: torch.dtype) -> str:
    """Name of a rounding order: dtype of ``x * rstd`` before the gain, and of the result."""
    return f"{_DTYPE_NAMES[norm]}->{_DTYPE_NAMES[out]}"


def parse_rounding(text: str) -> tuple[torch.dtype, torch.dtype]:
    """Inverse of :func:`rounding_name`; ValueError names the allowed dtypes."""
    norm, arrow, out = text.partition("->")
    if not arrow or norm not in _DTYPES or out not in _DTYPES:
        raise ValueError(f"rounding {text!r}: expected A->B with A, B of {', '.join(_DTYPES)}")
    return _DTYPES[norm], _DTYPES[out]


# --- checks ---------------------------------------------------------------------------------------


def check_dtype(name: str, x: Tensor) -> None:
    """bfloat16 or float32; ValueError names them."""
    if x.dtype not in _DTYPE_NAMES:
        raise ValueError(f"{name} is {x.dtype}; allowed are {', '.join(map(str, _DTYPE_NAMES))}")


def check_device(name: str, given: Tensor | None, x: Tensor, *more: str) -> None:
    """On the device of ``x``, its number included, or of the types given; ValueError says which."""
    if given is not None and given.device != x.device and given.device.type not in more:
        raise ValueError(f"{name} is on {given.device}, x on {x.device}: expected one device")


def check_gain(x: Tensor, gain: Tensor | None) -> None:
    """One float number per column of ``x``, on its device; ValueError says what is wrong."""
    if gain is not None and tuple(gain.shape) != (x.shape[-1],):
        raise ValueError(f"gain of shape {tuple(gain.shape)}: expected ({x.shape[-1]},)")
    if gain is not None and not gain.dtype.is_floating_point:
        raise ValueError(f"gain is {gain.dtype}: expected a float dtype")
    check_device("gain", gain, x)


def check_tensor_scale(x: Tensor, outer: Tensor | None, spec: Cast) -> None:
    """NVFP4's per-tensor scale, likewise; a scalar of the graph may live on the CPU."""
    if outer is not None and spec.rule != "e4m3":
        raise ValueError(
            f"tensor_scale with cast {str(spec)!r}: only the rule 'e4m3' (NVFP4) has one"
        )
    if outer is not None and (outer.dim() != 0 or outer.dtype is not torch.float32):
        raise ValueError(
            f"tensor_scale {outer.dtype} of shape {tuple(outer.shape)}: "
            "expected a 0-d float32 tensor"
        )
    check_device("tensor_scale", outer, x, "cpu")


def _check_norm(x: Tensor, norm: NormOptions) -> None:
    parse_rounding(norm.rounding)
    block, eps = norm.block_size, norm.eps_tensor
    if norm.rms not in RMS_KINDS:
        raise ValueError(f"rms {norm.rms!r} is not one of {', '.join(RMS_KINDS)}")
    if block not in BLOCK_SIZES:
        raise ValueError(f"block size {block} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if x.dim() < 1 or x.shape[-1] == 0 or x.shape[-1] % block != 0:
        raise ValueError(
            f"x of shape {tuple(x.shape)}: the last axis must be a multiple of the block size "
            f"{block}"
        )
    check_dtype("x", x)
    if eps is not None and eps.dim() != 0:
        raise ValueError(f"eps_tensor of shape {tuple(eps.shape)}: expected a 0-d tensor")
    check_gain(x, norm.gain)
    # A scalar of the graph may live on the CPU.
    check_device("eps_tensor", eps, x, "cpu")


def check(x: Tensor, options: Options) -> Cast:
    """Refuse what the ops do not take; ValueError says what is allowed."""
    spec = Cast.parse(options.cast)
    check_tensor_scale(x, options.tensor_scale, spec)
    _check_norm(x, options.norm(spec.block_size))
    return spec


def check_residual(x: Tensor, residual: Tensor) -> None:
    """The same of a residual."""
    check_dtype("x", x)
    check_dtype("residual", residual)
    check_device("residual", residual, x)

    def differ() -> str:
        shapes = f"residual of shape {tuple(residual.shape)}: expected that of x, {tuple(x.shape)}"
        return f"{shapes}; nothing is broadcast"

    torch._check_value(residual.dim() == x.dim(), differ)
    for a, b in zip(residual.shape, x.shape, strict=True):
        torch._check_value(a == b, differ)


# --- in aten --------------------------------------------------------------------------------------


def normed(x32: Tensor, rstd: Tensor, gain: Tensor | None, rounding: str) -> Tensor:
    """What a cast reads: ``x * rstd``, rounded, times the gain, rounded."""
    norm_dtype, out_dtype = parse_rounding(rounding)
    y = (x32 * rstd).to(norm_dtype)
    if gain is not None:
        y = y.to(torch.float32) * gain.to(torch.float32)
    return y.to(out_dtype)


def _normalise(x: Tensor, norm: NormOptions) -> tuple[Tensor, Tensor, Tensor]:
    """``y`` float32 ``[..., K / block, block]``, its block absmax ``[..., K / block, 1]``, rstd."""
    gain, eps_tensor, eps, rms, correction, rounding, block = norm
    norm_dtype, out_dtype = parse_rounding(rounding)
    lead, blocks = x.shape[:-1], x.shape[-1] // block
    x32 = x.contiguous().to(torch.float32)

    block_absmax = None
    if rms == "exact":
        mean_square = x32.pow(2).mean(-1, keepdim=True)
    else:
        block_absmax = x32.view(*lead, blocks, block).abs().amax(-1)
        if rms == "p2":
            mean_square = block_absmax.pow(2).mean(-1, keepdim=True) * (correction * correction)
        else:
            mean_square = (block_absmax.mean(-1, keepdim=True) * correction).pow(2)
    rstd = torch.rsqrt(mean_square + (eps if eps_tensor is None else eps_tensor))

    y = normed(x32, rstd, gain, rounding).to(torch.float32).view(*lead, blocks, block)
    if gain is None and block_absmax is not None:
        # Rounding is monotone and even, so the absmax of the rounded block is the rounded absmax:
        # no second pass over the block.
        absmax = (block_absmax * rstd).to(norm_dtype).to(out_dtype).to(torch.float32).unsqueeze(-1)
    else:
        absmax = y.abs().amax(-1, keepdim=True)
    return y, absmax, rstd


def decomposition(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``rmsnorm_mxquant`` in aten, for every device without a kernel of its own.

    No E8M0 or FP4 dtype appears inside (Inductor's C++ backend has none): those stay uint8. With
    ``rms="exact"`` and the graph's own rounding, operations and results are those of the
    norm and cast that the op replaces.

    Args:
        x: the rows.
        options: the fields of :class:`Options`, in their order.
    """
    given = Options(*options)
    spec = Cast.parse(given.cast)
    y, absmax, rstd = _normalise(x, given.norm(spec.block_size))
    qdata, scale = quantize(y, absmax, spec, given.tensor_scale)
    scale = scale.squeeze(-1)
    if spec.layout == "swizzled":
        scale = swizzle(scale.reshape(-1, scale.shape[-1]))
    per_byte = ELEMENTS[spec.element].per_byte
    return qdata.reshape(*x.shape[:-1], x.shape[-1] // per_byte), scale, rstd


def add_decomposition(
    x: Tensor, residual: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``add_rmsnorm_mxquant`` in aten: the sum, contiguous, then :func:`decomposition` of it."""
    total = torch.add(x, residual).contiguous()
    return *decomposition(total, *options), total


def absmax_decomposition(x: Tensor, *options: Any) -> Tensor:
    """``rmsnorm_absmax`` in aten; ``options`` are the fields of :class:`NormOptions`."""
    return _normalise(x, NormOptions(*options))[1].amax()


def _launch(x: Tensor, residual: Tensor | None, options: Options) -> tuple[Any, Any, Any, Any]:
    """The Triton kernel on tensors."""
    # Imports Triton.
    from mxnorm_pass.ops.kernels import launch

    how = (parse_rounding(options.rounding), Cast.parse(options.cast), kernels.hardware(x.device))
    return launch.rmsnorm_mxquant(x, residual, *options[:6], *how)


# --- the ops --------------------------------------------------------------------------------------


def _kernel(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    check(x, Options(*options))
    if kernels.unusable(x.device, x.shape[-1]) is None:
        return _launch(x, None, Options(*options))[:3]
    return decomposition(x, *options)


def _fake(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    spec = check(x, Options(*options))
    *lead, k = x.shape
    codes, scale = output_shapes(lead, k, spec)
    return (
        x.new_empty(codes, dtype=ELEMENTS[spec.element].dtype),
        x.new_empty(scale, dtype=spec.scale_dtype),
        x.new_empty((*lead, 1), dtype=torch.float32),
    )


def _add_kernel(
    x: Tensor, residual: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_residual(x, residual)
    check(x, Options(*options))
    if kernels.unusable(x.device, x.shape[-1]) is None:
        return _launch(x, residual, Options(*options))
    return add_decomposition(x, residual, *options)


def _add_fake(x: Tensor, residual: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_residual(x, residual)
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return *_fake(total, *options), total


def _absmax_kernel(x: Tensor, *options: Any) -> Tensor:
    _check_norm(x, NormOptions(*options))
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    if kernels.unusable(x.device, x.shape[-1]) is None:
        # Imports Triton.
        from mxnorm_pass.ops.kernels import launch

        given = NormOptions(*options)
        how = (parse_rounding(given.rounding), given.block_size, kernels.hardware(x.device))
        return launch.rmsnorm_absmax(x, *given[:5], *how)
    return absmax_decomposition(x, *options)


def _absmax_fake(x: Tensor, *options: Any) -> Tensor:
    _check_norm(x, NormOptions(*options))
    return x.new_empty((), dtype=torch.float32)


def _has_tangent(tensor: Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def no_gradient(name: str, *args: Any) -> Any:
    """Refuse to lose a gradient: the pass takes autograd's own formula, and the ops have none."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"mxnorm::{name} has no gradient: call it under torch.no_grad(), or in the forward of "
            "an autograd.Function as mxnorm_pass.reference.MXNormLinear does; compiled by the "
            "backend 'mxnorm', a model's own norm and cast get their straight-through gradient"
        )
    if torch._C._is_fwd_grad_enabled() and any(map(_has_tangent, tensors)):
        raise RuntimeError(
            f"mxnorm::{name} has no forward-mode derivative (torch.func.jvp, forward_ad): its "
            "outputs would have a tangent of zero; detach its inputs, or put the call into an "
            "autograd.Function with a jvp"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.mxnorm, name).default(*args)


for _name, _real, _meta in (
    ("rmsnorm_mxquant", _kernel, _fake),
    ("add_rmsnorm_mxquant", _add_kernel, _add_fake),
    ("rmsnorm_absmax", _absmax_kernel, _absmax_fake),
):
    _LIB.impl(_name, _real, "CompositeExplicitAutograd")
    _LIB.impl(_name, partial(no_gradient, _name), "Autograd")
    torch.library.register_fake(f"mxnorm::{_name}", _meta, lib=_LIB)

OP = torch.ops.mxnorm.rmsnorm_mxquant.default
ADD_OP = torch.ops.mxnorm.add_rmsnorm_mxquant.default
ABSMAX_OP = torch.ops.mxnorm.rmsnorm_absmax.default
OPS = (OP, ADD_OP)
"""The ops that stand for a site; outputs 0 to 2 are the same."""


# A number made of the options alone: compiled code holds it as a constant.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gaussian_correction(rms: str, cast: str) -> float:
    from mxnorm_pass.theory import correction

    p = {"p1": 1, "p2": 2}.get(rms)
    return 1.0 if p is None else correction(p, Cast.parse(cast).block_size)


@overload
def rmsnorm_mxquant(
    x: Tensor,
    gain: Tensor | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    rms: str = ...,
    correction: float | None = ...,
    rounding: str = ...,
    cast: str = ...,
    tensor_scale: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def rmsnorm_mxquant(
    x: Tensor,
    gain: Tensor | None = ...,
    *,
    residual: Tensor,
    eps: float = ...,
    rms: str = ...,
    correction: float | None = ...,
    rounding: str = ...,
    cast: str = ...,
    tensor_scale: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def rmsnorm_mxquant(
    x: Tensor,
    gain: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    rms: str = "p2",
    correction: float | None = None,
    rounding: str = "f32->f32",
    cast: str = "e4m3/b32/rceil_log2/reciprocal/clamp/plain",
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMSNorm (estimated or exact) and microscaling cast of ``x`` along its last axis.

    Args:
        x: ``[..., K]`` bfloat16 or float32, any strides; K a multiple of the block size.
        gain: ``[K]`` or None, multiplied into the normalised row before the cast; any float dtype.
        residual: bfloat16 or float32 in the shape of ``x``, or None. The rows are then those of
            ``x + residual``, rounded to the dtype that torch gives the sum.
        eps: added to the mean square, inside the root.
        rms: ``p1`` or ``p2``: root estimated as ``correction`` times the power mean of the block
            absmax (arXiv 2603.13180); ``exact``: the true mean square.
        correction: c(p, block_size); by default the value for Gaussian rows, see
            :func:`mxnorm_pass.theory.correction`. Ignored by ``exact``.
        rounding: dtype of ``x * rstd`` before the gain and dtype that the cast reads, e.g.
            ``bf16->bf16`` for transformers' Llama.
        cast: a :class:`mxnorm_pass.formats.Cast` as text.
        tensor_scale: 0-d float32, NVFP4's per-tensor scale; None stands for 1.

    Returns:
        ``qdata`` ``[..., K]`` in the element dtype (FP6: one uint8 code each; FP4: uint8
        ``[..., K / 2]``, the first of two codes in the low half), ``scale`` ``[..., K /
        block_size]`` (uint8 biased E8M0; float8_e4m3fn for NVFP4; flat and padded in the swizzled
        layout), ``rstd`` float32 ``[..., 1]``; with a ``residual`` also the sum.

    Raises:
        ValueError: for a shape, dtype, device, number or name that is not allowed, naming those
            that are.
        RuntimeError: where an input requires a gradient, or has a tangent: the op has neither.
    """
    if not isinstance(cast, str):
        raise ValueError(f"cast {cast!r}: expected a Cast as text, str(cast)")
    if not eps >= 0:
        raise ValueError(f"eps {eps!r}: expected a number not below zero")
    if correction is not None and not correction > 0:
        raise ValueError(f"correction {correction!r}: expected a number above zero")
    if correction is None:
        correction = _gaussian_correction(rms, cast)
    options = Options(gain, None, tensor_scale, eps, rms, correction, rounding, cast)
    result: tuple[Tensor, ...] = (
        OP(x, *options) if residual is None else ADD_OP(x, residual, *options)
    )
    return result
