"""``mxnorm::rmsnorm_mxquant``: RMSNorm and microscaling cast in one functional op.

The op returns what three users of a norm need: the quantised activation, its block scales, and the
reciprocal root that the norm's other users (the backward among them) are recomputed from.

``mxnorm::rmsnorm_absmax`` is its companion for NVFP4 with a dynamic per-tensor scale: the absmax of
the whole normalised tensor, which the scale of every block depends on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxnorm_pass.formats import BLOCK_SIZES, ELEMENTS, Cast, quantize, swizzle, swizzled_size

_LIB = torch.library.Library("mxnorm", "DEF")
_LIB.define(
    "rmsnorm_mxquant(Tensor x, Tensor? gain, Tensor? eps_tensor, Tensor? tensor_scale, float eps, "
    "str rms, float correction, str rounding, str cast) "
    "-> (Tensor qdata, Tensor scale, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "rmsnorm_absmax(Tensor x, Tensor? gain, Tensor? eps_tensor, float eps, "
    "str rms, float correction, str rounding, int block_size) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

RMS_KINDS = ("p1", "p2", "exact")
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def rounding_name(norm: torch.dtype, out: torch.dtype) -> str:
    """Name of a rounding order: dtype of ``x * rstd`` before the gain, and of the result."""
    return f"{_DTYPE_NAMES[norm]}->{_DTYPE_NAMES[out]}"


def parse_rounding(text: str) -> tuple[torch.dtype, torch.dtype]:
    """Inverse of :func:`rounding_name`; ValueError names the allowed dtypes."""
    norm, arrow, out = text.partition("->")
    if not arrow or norm not in _DTYPES or out not in _DTYPES:
        raise ValueError(f"rounding {text!r}: expected A->B with A, B of {', '.join(_DTYPES)}")
    return _DTYPES[norm], _DTYPES[out]


def _check(
    x: Tensor, gain: Tensor | None, eps_tensor: Tensor | None, rms: str, rounding: str, block: int
) -> None:
    parse_rounding(rounding)
    if rms not in RMS_KINDS:
        raise ValueError(f"rms {rms!r} is not one of {', '.join(RMS_KINDS)}")
    if block not in BLOCK_SIZES:
        raise ValueError(f"block size {block} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if x.dim() < 1 or x.shape[-1] == 0 or x.shape[-1] % block != 0:
        raise ValueError(
            f"x of shape {tuple(x.shape)}: the last axis must be a multiple of the block size "
            f"{block}"
        )
    if x.dtype not in _DTYPE_NAMES:
        raise ValueError(f"x is {x.dtype}; allowed are {', '.join(map(str, _DTYPE_NAMES))}")
    if eps_tensor is not None and eps_tensor.dim() != 0:
        raise ValueError(f"eps_tensor of shape {tuple(eps_tensor.shape)}: expected a 0-d tensor")
    if gain is not None and tuple(gain.shape) != (x.shape[-1],):
        raise ValueError(f"gain of shape {tuple(gain.shape)}: expected ({x.shape[-1]},)")


def _check_cast(cast: str, tensor_scale: Tensor | None) -> Cast:
    spec = Cast.parse(cast)
    if tensor_scale is None:
        return spec
    if spec.rule != "e4m3":
        raise ValueError(f"tensor_scale with cast {cast!r}: only the rule 'e4m3' (NVFP4) has one")
    if tensor_scale.dim() != 0 or tensor_scale.dtype is not torch.float32:
        raise ValueError(
            f"tensor_scale {tensor_scale.dtype} of shape {tuple(tensor_scale.shape)}: "
            "expected a 0-d float32 tensor"
        )
    return spec


def _normalise(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y`` float32 ``[..., K / block, block]``, its block absmax ``[..., K / block, 1]``, rstd."""
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

    y = (x32 * rstd).to(norm_dtype)
    if gain is not None:
        y = y.to(torch.float32) * gain.to(torch.float32)
    y = y.to(out_dtype).to(torch.float32).view(*lead, blocks, block)
    if gain is None and block_absmax is not None:
        # Rounding is monotone and even, so the absmax of the rounded block is the rounded absmax:
        # no second pass over the block.
        absmax = (block_absmax * rstd).to(norm_dtype).to(out_dtype).to(torch.float32).unsqueeze(-1)
    else:
        absmax = y.abs().amax(-1, keepdim=True)
    return y, absmax, rstd


def decomposition(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    tensor_scale: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in aten, for every device without a kernel of its own.

    No E8M0 or FP4 dtype appears inside (Inductor's C++ backend has none): those stay uint8. With
    ``rms="exact"`` and the graph's own rounding, operations and results are those of the
    norm and cast that the op replaces.
    """
    spec = Cast.parse(cast)
    y, absmax, rstd = _normalise(
        x, gain, eps_tensor, eps, rms, correction, rounding, spec.block_size
    )
    qdata, scale = quantize(y, absmax, spec, tensor_scale)
    scale = scale.squeeze(-1)
    if spec.layout == "swizzled":
        scale = swizzle(scale.reshape(-1, scale.shape[-1]))
    per_byte = ELEMENTS[spec.element].per_byte
    return qdata.reshape(*x.shape[:-1], x.shape[-1] // per_byte), scale, rstd


def absmax_decomposition(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    block_size: int,
) -> Tensor:
    """The companion op in aten."""
    _, absmax, _ = _normalise(x, gain, eps_tensor, eps, rms, correction, rounding, block_size)
    return absmax.amax()


def _kernel(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    tensor_scale: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = _check_cast(cast, tensor_scale)
    _check(x, gain, eps_tensor, rms, rounding, spec.block_size)
    return decomposition(x, gain, eps_tensor, tensor_scale, eps, rms, correction, rounding, cast)


def _fake(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    tensor_scale: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = _check_cast(cast, tensor_scale)
    _check(x, gain, eps_tensor, rms, rounding, spec.block_size)
    element = ELEMENTS[spec.element]
    lead, k = x.shape[:-1], x.shape[-1]
    blocks = k // spec.block_size
    scale_shape: tuple[int | torch.SymInt, ...] = (*lead, blocks)
    if spec.layout == "swizzled":
        scale_shape = (swizzled_size(x.numel() // k, blocks),)
    return (
        x.new_empty((*lead, k // element.per_byte), dtype=element.dtype),
        x.new_empty(scale_shape, dtype=spec.scale_dtype),
        x.new_empty((*lead, 1), dtype=torch.float32),
    )


def _absmax_kernel(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    block_size: int,
) -> Tensor:
    _check(x, gain, eps_tensor, rms, rounding, block_size)
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return absmax_decomposition(x, gain, eps_tensor, eps, rms, correction, rounding, block_size)


def _absmax_fake(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    block_size: int,
) -> Tensor:
    _check(x, gain, eps_tensor, rms, rounding, block_size)
    return x.new_empty((), dtype=torch.float32)


_LIB.impl("rmsnorm_mxquant", _kernel, "CompositeExplicitAutograd")
_LIB.impl("rmsnorm_absmax", _absmax_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("mxnorm::rmsnorm_mxquant", _fake, lib=_LIB)
torch.library.register_fake("mxnorm::rmsnorm_absmax", _absmax_fake, lib=_LIB)

OP = torch.ops.mxnorm.rmsnorm_mxquant.default
ABSMAX_OP = torch.ops.mxnorm.rmsnorm_absmax.default


def rmsnorm_mxquant(
    x: Tensor,
    gain: Tensor | None = None,
    *,
    eps: float = 1e-6,
    rms: str = "p2",
    correction: float | None = None,
    rounding: str = "f32->f32",
    cast: str = "e4m3/b32/rceil_log2/reciprocal/clamp/plain",
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm (estimated or exact) and microscaling cast of ``x`` along its last axis.

    Args:
        x: ``[..., K]`` bfloat16 or float32, any strides; K a multiple of the block size.
        gain: ``[K]`` or None, multiplied into the normalised row before the cast; any float dtype.
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
        layout), ``rstd`` float32 ``[..., 1]``.

    Raises:
        ValueError: for a shape, dtype or name that is not allowed, naming those that are.
    """
    if correction is None:
        from mxnorm_pass.theory import correction as gaussian_correction

        p = {"p1": 1, "p2": 2}.get(rms)
        correction = 1.0 if p is None else gaussian_correction(p, Cast.parse(cast).block_size)
    result: tuple[Tensor, Tensor, Tensor] = OP(
        x, gain, None, tensor_scale, eps, rms, correction, rounding, cast
    )
    return result
