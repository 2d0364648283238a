"""``mxnorm::rmsnorm_mxquant``: RMSNorm and microscaling cast in one functional op.

The op returns what three users of a norm need: the quantised activation, its block scales, and the
reciprocal root that the norm's other users (the backward among them) are recomputed from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, Cast, quantize

_LIB = torch.library.Library("mxnorm", "DEF")
_LIB.define(
    "rmsnorm_mxquant(Tensor x, Tensor? gain, Tensor? eps_tensor, float eps, str rms, "
    "float correction, str rounding, str cast) -> (Tensor qdata, Tensor scale, Tensor rstd)",
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
    x: Tensor, gain: Tensor | None, eps_tensor: Tensor | None, rms: str, rounding: str, cast: str
) -> Cast:
    spec = Cast.parse(cast)
    parse_rounding(rounding)
    if rms not in RMS_KINDS:
        raise ValueError(f"rms {rms!r} is not one of {', '.join(RMS_KINDS)}")
    if x.dim() < 1 or x.shape[-1] % spec.block_size != 0:
        raise ValueError(
            f"x of shape {tuple(x.shape)}: the last axis must be a multiple of the block size "
            f"{spec.block_size}"
        )
    if x.dtype not in _DTYPE_NAMES:
        raise ValueError(f"x is {x.dtype}; allowed are {', '.join(map(str, _DTYPE_NAMES))}")
    if eps_tensor is not None and eps_tensor.dim() != 0:
        raise ValueError(f"eps_tensor of shape {tuple(eps_tensor.shape)}: expected a 0-d tensor")
    if gain is not None and tuple(gain.shape) != (x.shape[-1],):
        raise ValueError(f"gain of shape {tuple(gain.shape)}: expected ({x.shape[-1]},)")
    return spec


def decomposition(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in aten, for every device without a kernel of its own.

    No E8M0 or FP4 dtype appears inside (Inductor's C++ backend has none): scales stay uint8. With
    ``rms="exact"`` and the graph's own rounding, operations and results are those of the
    norm and cast that the op replaces.
    """
    spec = Cast.parse(cast)
    norm_dtype, out_dtype = parse_rounding(rounding)
    k = x.shape[-1]
    blocks = k // spec.block_size
    lead = x.shape[:-1]
    x32 = x.contiguous().to(torch.float32)

    block_absmax = None
    if rms == "exact":
        mean_square = x32.pow(2).mean(-1, keepdim=True)
    else:
        block_absmax = x32.view(*lead, blocks, spec.block_size).abs().amax(-1)
        if rms == "p2":
            mean_square = block_absmax.pow(2).mean(-1, keepdim=True) * (correction * correction)
        else:
            mean_square = (block_absmax.mean(-1, keepdim=True) * correction).pow(2)
    rstd = torch.rsqrt(mean_square + (eps if eps_tensor is None else eps_tensor))

    y = (x32 * rstd).to(norm_dtype)
    if gain is not None:
        y = y.to(torch.float32) * gain.to(torch.float32)
    y = y.to(out_dtype).to(torch.float32).view(*lead, blocks, spec.block_size)
    if gain is None and block_absmax is not None:
        # Rounding is monotone and even, so the absmax of the rounded block is the rounded absmax:
        # no second pass over the block.
        absmax = (block_absmax * rstd).to(norm_dtype).to(out_dtype).to(torch.float32).unsqueeze(-1)
    else:
        absmax = y.abs().amax(-1, keepdim=True)
    qdata, scale = quantize(y, absmax, spec)
    return qdata.view(x.shape), scale.squeeze(-1), rstd


def _kernel(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, gain, eps_tensor, rms, rounding, cast)
    return decomposition(x, gain, eps_tensor, eps, rms, correction, rounding, cast)


def _fake(
    x: Tensor,
    gain: Tensor | None,
    eps_tensor: Tensor | None,
    eps: float,
    rms: str,
    correction: float,
    rounding: str,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = _check(x, gain, eps_tensor, rms, rounding, cast)
    lead = x.shape[:-1]
    return (
        x.new_empty(x.shape, dtype=ELEMENTS[spec.element].dtype),
        x.new_empty((*lead, x.shape[-1] // spec.block_size), dtype=torch.uint8),
        x.new_empty((*lead, 1), dtype=torch.float32),
    )


_LIB.impl("rmsnorm_mxquant", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("mxnorm::rmsnorm_mxquant", _fake, lib=_LIB)

OP = torch.ops.mxnorm.rmsnorm_mxquant.default


def rmsnorm_mxquant(
    x: Tensor,
    gain: Tensor | None = None,
    *,
    eps: float = 1e-6,
    rms: str = "p2",
    correction: float | None = None,
    rounding: str = "f32->f32",
    cast: str = "e4m3/b32/rceil_log2/reciprocal/clamp/plain",
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

    Returns:
        ``qdata`` ``[..., K]`` in the element dtype, ``scale`` uint8 ``[..., K / block_size]``
        (biased E8M0), ``rstd`` float32 ``[..., 1]``.

    Raises:
        ValueError: for a shape, dtype or name that is not allowed, naming those that are.
    """
    if correction is None:
        from mxnorm_pass.theory import correction as gaussian_correction

        p = {"p1": 1, "p2": 2}.get(rms)
        correction = 1.0 if p is None else gaussian_correction(p, Cast.parse(cast).block_size)
    result: tuple[Tensor, Tensor, Tensor] = OP(x, gain, None, eps, rms, correction, rounding, cast)
    return result
