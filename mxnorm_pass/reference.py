"""MXNorm in readable eager PyTorch: the oracle of the tests.

Nothing here shares code with the op: scales come from ``frexp`` or comparison in float64, elements
from a search in the table of all codes. Slow, and meant to be checked by eye against the formulas.

The method is arXiv 2603.13180. Notation: ``x`` a row of K elements, ``m_k`` the absmax of block k,
``rho = rsqrt(rms^2 + eps)`` (called rstd in code), ``g`` the gain, ``W`` ``[N, K]`` the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass.formats import E8M0_BIAS, E8M0_NAN, ELEMENTS, Cast, Element
from mxnorm_pass.theory import correction as gaussian_correction

DEFAULT_CAST = Cast("e4m3", 32, "rceil_log2", "reciprocal", "clamp")


def rms_estimate(x: Tensor, block_size: int, p: int, correction: float | None = None) -> Tensor:
    """``c * (mean_k m_k^p)^(1/p)``, float32 ``[..., 1]``: the estimator of arXiv 2603.13180.

    Args:
        x: ``[..., K]``, K a multiple of ``block_size``.
        block_size: elements per block.
        p: power of the mean.
        correction: c(p, block_size); by default the constant of Gaussian rows.
    """
    c = gaussian_correction(p, block_size) if correction is None else correction
    blocks = x.float().unflatten(-1, (x.shape[-1] // block_size, block_size))
    absmax = blocks.abs().amax(-1)
    power_mean: Tensor = absmax.pow(p).mean(-1, keepdim=True).pow(1 / p)
    return c * power_mean


def rstd(
    x: Tensor, eps: float, rms: str = "p2", block_size: int = 32, correction: float | None = None
) -> Tensor:
    """``rsqrt(rms^2 + eps)``, float32 ``[..., 1]``.

    eps stands inside the root, as in RMSNorm (the authors' earlier code has it outside: a stated
    deviation that matters for rows whose rms is near ``sqrt(eps)``).

    Args:
        x: rows ``[..., K]``, any floating dtype; computed in float32.
        eps: in units of ``x`` squared.
        rms: ``p1`` or ``p2``, the estimate; ``exact``, the mean of squares.
        block_size: elements per block, a divisor of K; ignored by ``exact``.
        correction: c(p, block_size); by default the constant of Gaussian rows.
    """
    if rms == "exact":
        square = x.float().square().mean(-1, keepdim=True)
    else:
        square = rms_estimate(x, block_size, int(rms[1:]), correction).square()
    return torch.rsqrt(square + eps)


def input_gradient(
    x: Tensor,
    u: Tensor,
    eps: float,
    rms: str = "p2",
    block_size: int = 32,
    gradient: str = "straight_through",
    correction: float | None = None,
) -> Tensor:
    """Gradient towards ``x`` of ``x * rho``, from what reaches it: float64 ``[..., K]``.

    ``straight_through`` is RMSNorm's formula with the estimate's rho (the paper's); ``projected``
    is RMSNorm's own gradient times the estimate's rho over the true one; ``own`` goes through the
    estimate, and equal maxima of a block share.

    Args:
        x: rows ``[..., K]``.
        u: gradient of ``x * rho``, the same shape.
        eps: in units of ``x`` squared.
        rms: ``p1``, ``p2`` or ``exact``, with which all three are one.
        block_size: elements per block.
        gradient: which.
        correction: c(p, block_size); by default the constant of Gaussian rows.
    """
    rho = rstd(x, eps, rms, block_size, correction).double()
    x, u = x.detach().double(), u.double()
    along = (x * u).mean(-1, keepdim=True)
    if rms != "exact" and gradient == "projected":
        return rho * (u - x * along / (x.square().mean(-1, keepdim=True) + eps))
    if rms != "exact" and gradient == "own":
        p = int(rms[1:])
        c = gaussian_correction(p, block_size) if correction is None else correction
        with torch.enable_grad():
            row = x.requires_grad_()
            absmax = row.unflatten(-1, (-1, block_size)).abs().amax(-1)
            square = (c * absmax.pow(p).mean(-1, keepdim=True).pow(1 / p)).square()
            (found,) = torch.autograd.grad(row * torch.rsqrt(square + eps), row, u)
        return found
    return rho * u - x * rho.pow(3) * along


def normalise(
    x: Tensor,
    rho: Tensor,
    gain: Tensor | None,
    norm_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x * rho``, rounded to ``norm_dtype``, times the gain, rounded to ``out_dtype``.

    Args:
        x: rows ``[..., K]``.
        rho: reciprocal RMS, float32 ``[..., 1]``.
        gain: ``[K]``, or None.
        norm_dtype: what is rounded to ahead of the gain: bfloat16 for transformers' Llama.
        out_dtype: of the result ``[..., K]``; by default that of ``x``.
    """
    h = (x.float() * rho).to(norm_dtype)
    y = h if gain is None else h.float() * gain.float()
    return y.to(out_dtype or x.dtype)


def scale_exponent(absmax: Tensor, element: Element, rule: str) -> Tensor:
    """Biased E8M0 exponent, by the definition of the rule (OCP MX specification, torchao).

    Args:
        absmax: largest magnitude of each block, float32, any shape.
        element: what the block is stored in.
        rule: ``floor``, ``ceil``, ``even``, ``rceil_log2`` or ``rceil_exact``.

    Returns:
        int64 of the same shape: 0 to 254, and 255 for NaN.

    Raises:
        ValueError: for another rule.
    """
    a = absmax.double()
    if rule in ("floor", "ceil", "even"):
        mantissa, exponent = torch.frexp(a)  # a = mantissa * 2**exponent, mantissa in [1/2, 1)
        e = exponent.long() - 1
        if rule == "ceil":
            e += (mantissa > 0.5).long()
        if rule == "even":
            e += (2 * mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1)).long()
        e = torch.where(a.isinf(), 128, torch.where(a == 0, -E8M0_BIAS, e))
        byte = (e - element.max_exponent).clamp(-E8M0_BIAS, E8M0_BIAS + 1) + E8M0_BIAS
    elif rule == "rceil_log2":
        # By definition of the rule the logarithm is taken in float32.
        e32 = torch.ceil(torch.log2(absmax / element.max)).clamp(-E8M0_BIAS, E8M0_BIAS)
        byte = torch.where(e32.isnan(), 0.0, e32).long() + E8M0_BIAS
        byte = torch.where(absmax.isinf(), 254, byte)
    elif rule == "rceil_exact":
        powers = torch.exp2(torch.arange(-E8M0_BIAS, E8M0_BIAS + 1, dtype=torch.float64))
        byte = torch.searchsorted(powers, (absmax / element.max).double()).clamp(max=254)
    else:
        raise ValueError(f"rule {rule!r}: allowed are floor, ceil, even, rceil_log2, rceil_exact")
    return torch.where(a.isnan(), E8M0_NAN, byte)


def _positive_codes(element: Element) -> Tensor:
    """All finite non-negative values of an element dtype in ascending order: index = code."""
    if element.sub_byte:
        # Table 1 of the MX specification: subnormals, then each binade in equal steps.
        steps = 2**element.mantissa_bits
        binades = [
            (m + (steps if e else 0)) / steps * 2.0 ** (max(e, 1) - element.bias)
            for e in range(2**element.exponent_bits)
            for m in range(steps)
        ]
        return torch.tensor(binades, dtype=torch.float64)
    codes = torch.arange(128, dtype=torch.uint8).view(element.dtype).double()
    return codes[codes.isfinite()]


def round_to_element(scaled: Tensor, element: Element, saturate: str) -> Tensor:
    """Nearest code by search, ties to the even code.

    Args:
        scaled: values in units of their scale, float64, any shape.
        element: what they are rounded to.
        saturate: ``clamp`` to the largest finite value, or ``bare``: as torch's own conversion.

    Returns:
        The element dtype; FP6 and FP4: uint8, one code each. The shape is that of ``scaled``.
    """
    if saturate == "bare" and not element.sub_byte:
        return scaled.float().to(element.dtype)
    table = _positive_codes(element)
    magnitude = scaled.abs().clamp(max=element.max)
    upper = torch.searchsorted(table, magnitude.nan_to_num(0.0).contiguous())
    upper = upper.clamp(max=len(table) - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - table[lower], table[upper] - magnitude
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    code = torch.where(take_lower, lower, upper)
    code = code | torch.signbit(scaled).long() * element.sign_bit
    if element.sub_byte:
        # There is no NaN: what stands in a block whose scale is NaN means nothing.
        return torch.where(scaled.isnan(), 0, code).to(torch.uint8)
    return torch.where(scaled.isnan(), 0x7F, code).to(torch.uint8).view(element.dtype)


def quantize(
    y: Tensor, cast: Cast = DEFAULT_CAST, tensor_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Microscaling cast of ``y`` ``[..., K]`` along its last axis, in the plain layout.

    Args:
        y: the values.
        cast: what to do.
        tensor_scale: NVFP4's per-tensor scale, a float32 number.

    Returns:
        ``qdata`` ``[..., K]`` in the element dtype (FP6: one uint8 code each; FP4: ``[..., K / 2]``
        uint8, two codes in each) and ``scale`` ``[..., K / block_size]``, uint8 or (NVFP4) E4M3.
    """
    element = ELEMENTS[cast.element]
    blocks = y.float().unflatten(-1, (y.shape[-1] // cast.block_size, cast.block_size))
    absmax = blocks.abs().amax(-1, keepdim=True)
    if cast.rule == "e4m3":
        scale, scaled = _nvfp4_scaled(blocks, absmax, cast, tensor_scale)
    else:
        byte = scale_exponent(absmax, element, cast.rule).clamp(min=cast.least)
        if cast.infinite == "nan":
            byte = torch.where(absmax.isinf(), E8M0_NAN, byte)
        power = torch.exp2(byte.double() - E8M0_BIAS)
        if cast.apply == "reciprocal":
            power = torch.where(byte == 0, 1.0, power)
            power = torch.where(byte == E8M0_NAN, absmax.double(), power)
        else:
            power = torch.where(byte == E8M0_NAN, torch.inf, power.clamp(min=2.0**-126))
        # Dividing a float32 by a power of two is exact in float64; the graph rounds the quotient to
        # float32 once, which shows only where it is subnormal.
        scaled = (blocks.double() / power).float().double()
        scale = byte.to(torch.uint8)
    qdata = round_to_element(scaled, element, cast.saturate).reshape(y.shape)
    if element.per_byte == 2:
        qdata = qdata[..., ::2] + 16 * qdata[..., 1::2]
    return qdata, scale.squeeze(-1)


def quantize_columns(
    x: Tensor,
    rho: Tensor,
    gain: Tensor | None,
    norm_dtype: torch.dtype,
    out_dtype: torch.dtype,
    cast: Cast = DEFAULT_CAST,
    tensor_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cast of ``y = normalise(x, rho, gain)`` along tokens: ``[K, M]`` and ``[K, M / block]``.

    Args:
        x: ``[..., K]``, M rows, a multiple of the block size.
        rho: float32 ``[..., 1]``.
        gain: ``[K]`` or None.
        norm_dtype: what ``x * rho`` is rounded to before the gain.
        out_dtype: what the cast reads.
        cast: what to do, in the plain layout.
        tensor_scale: NVFP4's per-tensor scale, a float32 number.
    """
    y = normalise(x, rho, gain, norm_dtype, out_dtype)
    return quantize(y.reshape(-1, y.shape[-1]).T, cast, tensor_scale)


def _nvfp4_scaled(
    blocks: Tensor, absmax: Tensor, cast: Cast, tensor_scale: float
) -> tuple[Tensor, Tensor]:
    """Block scale (E4M3) and values in units of both scales; each step in float32, as torchao."""
    outer = torch.tensor(tensor_scale, dtype=torch.float32)
    wanted = (absmax / 6.0 / outer).clamp(2.0**-6, 448.0)
    scale = round_to_element(wanted.double(), ELEMENTS["e4m3"], "clamp")
    if cast.apply == "reciprocal":
        return scale, (blocks * ((1.0 / outer) / scale.float())).double()
    return scale, (blocks / (scale.float() * outer)).double()


def dequantize(
    qdata: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    element: Element | None = None,
    tensor_scale: float = 1.0,
) -> Tensor:
    """``qdata * 2**(scale - 127)`` (or ``qdata * scale * tensor_scale``), ``[..., K]``.

    A scale of NaN (byte 255) gives NaN.

    Args:
        qdata: codes, as :func:`quantize` gives them.
        scale: block scales, likewise.
        dtype: of the result; the product is formed in float64.
        element: has to be named for FP6 and FP4, whose codes are plain bytes.
        tensor_scale: NVFP4's per-tensor scale.
    """
    if element is None or not element.sub_byte:
        values = qdata.double()
    else:
        if element.per_byte == 2:
            qdata = torch.stack([qdata % 16, qdata // 16], -1).flatten(-2)
        magnitude = _positive_codes(element)[(qdata % element.sign_bit).long()]
        values = torch.where(qdata >= element.sign_bit, -magnitude, magnitude)
    block = values.shape[-1] // scale.shape[-1]
    if scale.dtype is torch.float8_e4m3fn:
        power = scale.double() * tensor_scale
    else:
        power = torch.exp2(scale.double() - E8M0_BIAS)
        power = torch.where(scale == E8M0_NAN, torch.nan, power)
    return (values * power.repeat_interleave(block, -1)).to(dtype)


def fake_quantize(y: Tensor, cast: Cast = DEFAULT_CAST) -> Tensor:
    """Cast and back.

    Args:
        y: ``[..., K]``, K a multiple of the block size.
        cast: what to do.

    Returns:
        The same shape and dtype.
    """
    return dequantize(*quantize(y, cast), y.dtype, ELEMENTS[cast.element])


class _MXNormLinear(torch.autograd.Function):
    """The contract of training, stated once.

    Forward: ``cast(x * rho) @ cast(W * g)^T`` (folded) or ``cast(x * rho * g) @ cast(W)^T``.
    Backward: what autograd makes of RMSNorm -> MX linear, with rho in the place of the true
    reciprocal RMS and the estimate itself treated as a mean of squares::

        dy     = cast(dout) @ cast(W along N)           # W without the gain
        u      = g * dy
        dx     = rho * u - x * rho^3 * mean(x * u)     # straight through; see input_gradient
        dgamma = sum over tokens of dy * (x * rho)
        dW     = cast(dout along tokens)^T @ cast(y along tokens),  y = x * rho * g
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        weight: Tensor,
        rho: Tensor,
        fold: bool,
        norm_dtype: torch.dtype,
        cast: Cast,
        towards_x: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, gain, weight, rho)
        ctx.norm_dtype, ctx.cast, ctx.towards_x = norm_dtype, cast, towards_x
        if fold:
            activation = fake_quantize(x.float() * rho, cast).to(x.dtype)
            operand = fake_quantize(weight.float() * gain.float(), cast).to(weight.dtype)
        else:
            activation = fake_quantize(normalise(x, rho, gain, norm_dtype), cast)
            operand = fake_quantize(weight, cast)
        return activation @ operand.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, weight, rho = ctx.saved_tensors
        dout, cast = grads[0].contiguous(), ctx.cast
        rows = dout.reshape(-1, dout.shape[-1])
        weight_along_n = fake_quantize(weight.T.contiguous(), cast)  # [K, N], blocks along N
        dy = (fake_quantize(rows, cast) @ weight_along_n.T).view(x.shape)
        y = normalise(x, rho, gain, ctx.norm_dtype).reshape(-1, x.shape[-1])
        y_along_tokens = fake_quantize(y.T.contiguous(), cast)
        dout_along_tokens = fake_quantize(rows.T.contiguous(), cast)
        dweight = dout_along_tokens @ y_along_tokens.T

        x32, dy32 = x.float(), dy.float()
        dx = ctx.towards_x(x, dy32 * gain.float())
        dgain = (dy32 * (x32 * rho)).reshape(-1, x.shape[-1]).sum(0)
        return dx.to(x.dtype), dgain.to(gain.dtype), dweight, *[None] * 5


class MXNorm(nn.Module):
    """RMSNorm whose root is estimated from block absmax values; differentiable straight through.

    Args:
        hidden: row length K.
        eps: inside the root.
        rms: ``p1``, ``p2`` or ``exact``.
        block_size: elements per block, a divisor of ``hidden``.
    """

    def __init__(
        self, hidden: int, eps: float = 1e-6, rms: str = "p2", block_size: int = 32
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps, self.rms, self.block_size = eps, rms, block_size

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` in, the same shape and dtype out."""
        true = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        estimate = rstd(x, self.eps, self.rms, self.block_size).detach()
        # In value the estimate; in gradient d(rho)/dx = -rho^3 x / K, RMSNorm's formula at rho.
        ratio = (estimate / true).detach()
        rho = estimate + (true - true.detach()) * ratio**3
        return (x.float() * rho * self.weight.float()).to(x.dtype)


class MXNormLinear(nn.Module):
    """MXNorm and an MX linear in one, emulated: ``cast(x * rho) @ cast(W * g)^T``.

    Args:
        gain: norm weight ``[K]``.
        weight: linear weight ``[N, K]``.
        eps: inside the root.
        rms: ``p1``, ``p2`` or ``exact``.
        fold: gain in the weight (training) or in the row.
        norm_dtype: what ``x * rho`` is rounded to before the gain, where the gain is in the row,
            and for dW: bfloat16 for transformers' Llama, float32 for torch's RMSNorm.
        cast: the microscaling cast of every operand.
        gradient: of the estimate, see :func:`input_gradient`.
    """

    def __init__(
        self,
        gain: Tensor,
        weight: Tensor,
        eps: float = 1e-6,
        rms: str = "p2",
        fold: bool = True,
        norm_dtype: torch.dtype = torch.float32,
        cast: Cast = DEFAULT_CAST,
        gradient: str = "straight_through",
    ) -> None:
        super().__init__()
        self.gradient = gradient
        self.gain, self.weight = nn.Parameter(gain), nn.Parameter(weight)
        self.eps, self.rms, self.fold, self.norm_dtype, self.cast = eps, rms, fold, norm_dtype, cast

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` in, ``[..., N]`` out, dtype of ``x``; K and tokens multiples of 32."""
        rho = rstd(x.detach(), self.eps, self.rms, self.cast.block_size)
        out: Tensor = _MXNormLinear.apply(  # type: ignore[no-untyped-call]
            x, self.gain, self.weight, rho, self.fold, self.norm_dtype, self.cast, self._towards_x
        )
        return out

    def _towards_x(self, x: Tensor, u: Tensor) -> Tensor:
        block = self.cast.block_size
        return input_gradient(x, u, self.eps, self.rms, block, self.gradient)
