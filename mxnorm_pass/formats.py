"""Element dtypes, scale rules and casts: the one table that knows a format.

The probes that recognise a cast, the op that performs it and the report that names it all read this
table. Formats follow the OCP Microscaling Formats (MX) v1.0 specification, sections 5.3 and 5.4;
the scale rules are those of torchao's ``ScaleCalculationMode`` and of cuBLAS' 1-D block scaling.
NVFP4 is E2M1 in blocks of 16 whose scales are E4M3 (rule ``e4m3``), over one float32 scale for the
whole tensor.

A cast of a block of ``B`` values takes three steps, and :class:`Cast` names the choice made in
each:

1. ``rule``: block absmax -> stored scale (:func:`block_scale`);
2. ``apply``: value, scale -> value in units of the scale (:func:`apply_scale`);
3. ``saturate``: clamp to the largest finite element or not, then round to nearest even
   (:func:`encode`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

E8M0_BIAS = 127
E8M0_NAN = 255
F32_MANTISSA_BITS = 23
F32_EXPONENT_BIAS = 127
F32_MIN_NORMAL = 2.0**-126
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
"""Least NVFP4 block scale that torchao stores, so that no block divides by zero."""

Rule = Literal["floor", "ceil", "even", "rceil_log2", "rceil_exact", "e4m3"]
Apply = Literal["reciprocal", "divide"]
Saturate = Literal["clamp", "bare"]
Layout = Literal["plain", "swizzled"]
Infinite = Literal["rule", "nan"]

E8M0_RULES: tuple[Rule, ...] = ("floor", "ceil", "even", "rceil_log2", "rceil_exact")
RULES: tuple[Rule, ...] = (*E8M0_RULES, "e4m3")
APPLIES: tuple[Apply, ...] = ("reciprocal", "divide")
SATURATES: tuple[Saturate, ...] = ("clamp", "bare")
LAYOUTS: tuple[Layout, ...] = ("plain", "swizzled")
BLOCK_SIZES: tuple[int, ...] = (16, 32, 64, 128)
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4


@dataclass(frozen=True)
class Element:
    """One element dtype of the MX specification (table 1).

    ``dtype`` is what its codes are stored in; elements narrower than a byte are uint8 codes,
    ``per_byte`` of them in each, the first in the low bits.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite value."""
    per_byte: int = 1

    @property
    def max_exponent(self) -> int:
        """``floor(log2(max))``, which FLOOR, CEIL and EVEN take off the absmax' exponent."""
        return math.floor(math.log2(self.max))

    @property
    def bias(self) -> int:
        """Exponent bias, ``2**(exponent_bits - 1) - 1``."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def sub_byte(self) -> bool:
        """FP6 and FP4: finite values only, and no torch dtype of one code each."""
        return self.dtype is torch.uint8

    @property
    def sign_bit(self) -> int:
        """The code of -0."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element("e4m3", torch.float8_e4m3fn, 4, 3, 448.0),
        Element("e5m2", torch.float8_e5m2, 5, 2, 57344.0),
        Element("e2m3", torch.uint8, 2, 3, 7.5),
        Element("e3m2", torch.uint8, 3, 2, 28.0),
        Element("e2m1", torch.uint8, 2, 1, 6.0, per_byte=2),
    )
}
ELEMENT_OF_DTYPE: dict[torch.dtype, Element] = {
    e.dtype: e for e in ELEMENTS.values() if not e.sub_byte
}
SUB_BYTE: tuple[Element, ...] = tuple(e for e in ELEMENTS.values() if e.sub_byte)


@dataclass(frozen=True)
class Cast:
    """One microscaling cast, as found in a graph and as the op performs it.

    ``str(cast)`` and :meth:`parse` are inverse to each other; the op's schema carries the string.
    """

    element: str
    block_size: int
    rule: Rule
    apply: Apply
    saturate: Saturate
    layout: Layout = "plain"
    least: int = 0
    """Least biased exponent stored, where a hand-written cast keeps its absmax off zero."""
    infinite: Infinite = "rule"
    """``nan``: a block whose absmax is infinite counts as NaN."""

    def __str__(self) -> str:
        rule: str = self.rule
        if self.least or self.infinite == "nan":
            rule += f":{self.least}"
        if self.infinite == "nan":
            rule += ":nan"
        return "/".join(
            (self.element, f"b{self.block_size}", rule, self.apply, self.saturate, self.layout)
        )

    @property
    def name(self) -> str:
        """The field's name of the format: MXFP8, MXFP6, MXFP4 or NVFP4."""
        if self.rule == "e4m3":
            return "NVFP4"
        element = ELEMENTS[self.element]
        return f"MXFP{1 + element.exponent_bits + element.mantissa_bits}"

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the op's scales: uint8 biased exponents (E8M0), or E4M3."""
        return torch.float8_e4m3fn if self.rule == "e4m3" else torch.uint8

    @classmethod
    def parse(cls, text: str) -> Cast:
        """Inverse of ``str``.

        Raises:
            ValueError: naming the field that is wrong and what is allowed in it.
        """
        fields = text.split("/")
        if len(fields) != 6:
            raise ValueError(
                f"cast {text!r}: expected element/block/rule/apply/saturate/layout, six fields"
            )
        element, block, full_rule, apply, saturate, layout = fields
        rule, _, ends = full_rule.partition(":")
        least, _, infinite = ends.partition(":")
        allowed: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("element", element, tuple(ELEMENTS)),
            ("block", block, tuple(f"b{b}" for b in BLOCK_SIZES)),
            ("rule", rule, RULES),
            ("apply", apply, APPLIES),
            ("saturate", saturate, SATURATES),
            ("layout", layout, LAYOUTS),
        )
        for name, value, choices in allowed:
            if value not in choices:
                raise ValueError(
                    f"cast {text!r}: {name} {value!r} is not one of {', '.join(choices)}"
                )
        if (
            not (least or "0").isdecimal()
            or int(least or 0) >= E8M0_NAN
            or infinite not in ("", "nan")
        ):
            raise ValueError(
                f"cast {text!r}: expected rule, rule:least or rule:least:nan with least a biased "
                "exponent of 0 to 254"
            )
        if rule == "e4m3" and element != "e2m1":
            raise ValueError(f"cast {text!r}: rule 'e4m3' (NVFP4) goes with element 'e2m1' alone")
        return cls(
            element,
            int(block[1:]),
            rule,  # type: ignore[arg-type]
            apply,  # type: ignore[arg-type]
            saturate,  # type: ignore[arg-type]
            layout,  # type: ignore[arg-type]
            int(least or 0),
            infinite or "rule",  # type: ignore[arg-type]
        )


def block_scale(
    absmax: Tensor, element: Element, rule: Rule, tensor_scale: Tensor | None = None
) -> Tensor:
    """The stored scale of a block: uint8 biased exponent, or E4M3 under the rule ``e4m3``.

    Args:
        absmax: float32, any shape; the block's largest absolute value, NaN and Inf allowed.
        element: the element dtype whose range the block is scaled into.
        rule: how the scale is rounded.
        tensor_scale: float32 0-d, NVFP4's per-tensor scale; None stands for 1.

    ``e4m3`` is ``absmax / element.max / tensor_scale``, clamped to E4M3's normal range and rounded
    to nearest even (torchao's ``nvfp4_quantize``).
    """
    if rule != "e4m3":
        return scale_byte(absmax, element, rule)
    scale = absmax / element.max
    if tensor_scale is not None:
        scale = scale / tensor_scale
    return torch.clamp(scale, min=E4M3_MIN_NORMAL, max=E4M3_MAX).to(torch.float8_e4m3fn)


def bounded(scale: Tensor, absmax: Tensor, least: int, infinite: Infinite) -> Tensor:
    """Biased exponents with a :class:`Cast`'s ``least`` and ``infinite`` applied."""
    if least:
        scale = torch.clamp(scale, min=least)
    if infinite == "nan":
        scale = torch.where(torch.isinf(absmax), E8M0_NAN, scale)
    return scale


def scale_byte(absmax: Tensor, element: Element, rule: Rule) -> Tensor:
    """Biased E8M0 exponent of a block.

    Args:
        absmax: float32, any shape; the block's largest absolute value, NaN and Inf allowed.
        element: the element dtype whose range the block is scaled into.
        rule: how the exponent is rounded.

    Returns:
        uint8, same shape. 255 stands for NaN.

    ``floor``, ``ceil``, ``even`` take the exponent of the absmax (truncated, rounded up, or rounded
    to nearest even at the element's mantissa) less ``element.max_exponent`` (MX spec 6.3 and
    torchao). ``rceil_*`` round ``absmax / element.max`` up to a power of two (cuBLAS):
    ``rceil_log2`` by ``ceil(log2(.))`` in float32, which is up to 22 ulp late above a power of two;
    ``rceil_exact`` on the bits, as the instruction ``cvt.rp.satfinite.ue8m0x2.f32`` does.
    """
    nan = torch.isnan(absmax)
    if rule == "rceil_log2":
        descale = absmax / element.max
        exponent = torch.clamp(torch.ceil(torch.log2(descale)), -E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
        exponent = torch.where(torch.isinf(descale), 254.0, exponent)
        return torch.where(nan, float(E8M0_NAN), exponent).to(torch.uint8)
    if rule == "rceil_exact":
        return round_up_e8m0(absmax / element.max)
    bits = absmax.view(torch.int32)
    if rule == "even":
        # Round the absmax itself at the element's mantissa: a carry moves it to the next power.
        bits = bits + (1 << (F32_MANTISSA_BITS - element.mantissa_bits - 1))
    exponent = ((bits >> F32_MANTISSA_BITS) & 0xFF) - E8M0_BIAS
    if rule == "ceil":
        exponent = exponent + ((bits & ((1 << F32_MANTISSA_BITS) - 1)) > 0).to(torch.int32)
    exponent = torch.clamp(exponent - element.max_exponent, -E8M0_BIAS, E8M0_BIAS + 1) + E8M0_BIAS
    return torch.where(nan, E8M0_NAN, exponent).to(torch.uint8)


def round_up_e8m0(value: Tensor) -> Tensor:
    """The least power of two not below ``value``, as a biased exponent: uint8.

    Args:
        value: float32, not negative; NaN gives 255, Inf 254.

    This is the instruction ``cvt.rp.satfinite.ue8m0x2.f32`` (PTX ISA 8.6, one of its two halves).
    """
    bits = value.view(torch.int32)
    exponent = bits >> F32_MANTISSA_BITS
    mantissa = bits & ((1 << F32_MANTISSA_BITS) - 1)
    # In the subnormal range the first half lies at or below 2**-127, which is byte 0.
    half = 1 << (F32_MANTISSA_BITS - 1)
    up = torch.where(exponent == 0, mantissa > half, mantissa > 0)
    exponent = torch.clamp(exponent + up.to(torch.int32), max=254)
    return torch.where(torch.isnan(value), E8M0_NAN, exponent).to(torch.uint8)


def apply_scale(
    values: Tensor,
    absmax: Tensor,
    scale: Tensor,
    apply: Apply,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Values in units of their block's scale, not yet rounded to the element.

    Args:
        values: float32.
        absmax: float32, broadcast against ``values``; only its NaN is used.
        scale: what :func:`block_scale` returned, broadcast likewise.
        apply: for E8M0, ``reciprocal`` multiplies by ``2**(127 - byte)``, except that byte 0
            multiplies by 1 (a zero block stays zero) and byte 254 by ``2**-127``, torchao's RCEIL;
            ``divide`` divides by ``2**(byte - 127)``, at least the smallest normal float32,
            torchao's other modes. For E4M3, ``reciprocal`` multiplies by
            ``(1 / tensor_scale) / scale``, torchao's NVFP4; ``divide`` divides by
            ``scale * tensor_scale``.
        tensor_scale: float32 0-d, or None for 1.
    """
    if scale.dtype is torch.float8_e4m3fn:
        wide = scale.to(torch.float32)
        if apply == "reciprocal":
            one = 1.0 if tensor_scale is None else tensor_scale.reciprocal()
            return values * (one / wide)
        return values / (wide if tensor_scale is None else wide * tensor_scale)
    if apply == "reciprocal":
        factor = torch.exp2(E8M0_BIAS - scale.to(torch.float32))
        factor = torch.where(scale == 0, 1.0, factor)
        factor = torch.where(scale == 254, 2.0**-127, factor)
        return values * torch.where(scale == E8M0_NAN, absmax, factor)
    power = (scale.to(torch.int32) << F32_MANTISSA_BITS).view(torch.float32)
    return values / torch.clamp(power, min=F32_MIN_NORMAL)


def encode(scaled: Tensor, element: Element, saturate: Saturate) -> Tensor:
    """Round to the element, ties to even: float8, or one uint8 code per value for FP6 and FP4.

    ``bare`` leaves overflow to the platform's own conversion, as the graph does: e4m3 on CPU gives
    448 from torch 2.12 and NaN before, e5m2 gives Inf. FP6 and FP4 have nothing beyond their
    largest value: both saturate there. Neither has a NaN: the block's scale says it, and the code
    means nothing.
    """
    if element.sub_byte:
        return _encode_sub_byte(scaled, element)
    if saturate == "clamp":
        scaled = torch.clamp(scaled, min=-element.max, max=element.max)
    return scaled.to(element.dtype)


def _encode_sub_byte(scaled: Tensor, element: Element) -> Tensor:
    """On the bits of float32: drop mantissa bits with a carry, and shift the exponent's bias."""
    drop = F32_MANTISSA_BITS - element.mantissa_bits
    magnitude = torch.clamp(scaled.abs(), max=element.max)
    bits = magnitude.view(torch.int32)
    half = (1 << (drop - 1)) - 1
    rounded = (bits + half + ((bits >> drop) & 1)) >> drop
    normal = rounded - ((F32_EXPONENT_BIAS - element.bias) << element.mantissa_bits)
    # Below the least normal value codes are multiples of one step; round() is to even.
    step = 2.0 ** (1 - element.bias - element.mantissa_bits)
    subnormal = torch.round(magnitude * (1 / step)).to(torch.int32)
    code = torch.where(magnitude < 2.0 ** (1 - element.bias), subnormal, normal)
    sign = torch.where(torch.signbit(scaled), element.sign_bit, 0)
    return (code & (element.sign_bit - 1) | sign).to(torch.uint8)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Values of codes as :func:`encode` returns them, float32."""
    if not element.sub_byte:
        return codes.to(torch.float32)
    mantissa = codes & ((1 << element.mantissa_bits) - 1)
    exponent = ((codes & (element.sign_bit - 1)) >> element.mantissa_bits).to(torch.float32)
    step = torch.exp2(torch.clamp(exponent, min=1) - element.bias - element.mantissa_bits)
    hidden = torch.where(exponent > 0, float(1 << element.mantissa_bits), 0.0)
    magnitude = (mantissa.to(torch.float32) + hidden) * step
    return torch.where(codes >= element.sign_bit, -magnitude, magnitude)


def pack(codes: Tensor, element: Element) -> Tensor:
    """Codes as they are stored: FP4 two to a byte along the last axis, the first in the low half;
    others unchanged.
    """
    if element.per_byte == 1:
        return codes
    pairs = codes.unflatten(-1, (codes.shape[-1] // 2, 2))
    packed: Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed


def swizzled_size(rows: int | torch.SymInt, columns: int) -> int | torch.SymInt:
    """Number of scales in the swizzled layout of ``[rows, columns]``, padding included."""
    tall = (rows + SWIZZLE_ROWS - 1) // SWIZZLE_ROWS
    wide = (columns + SWIZZLE_COLUMNS - 1) // SWIZZLE_COLUMNS
    return tall * wide * SWIZZLE_ROWS * SWIZZLE_COLUMNS


def output_shapes(
    lead: Sequence[Any], k: int, cast: Cast
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes of the codes and of the scales of rows ``[*lead, k]``; sizes may be symbolic."""
    blocks = k // cast.block_size
    scale: tuple[Any, ...] = (*lead, blocks)
    if cast.layout == "swizzled":
        scale = (swizzled_size(math.prod(lead), blocks),)
    return (*lead, k // ELEMENTS[cast.element].per_byte), scale


def swizzle(scale: Tensor) -> Tensor:
    """Scales ``[M, C]`` in the order that block-scaled matmuls read (SWIZZLE_32_4_4), flat.

    Rows are padded to 128 and columns to 4 with zero. Within a tile of 128 x 4, element (r, c)
    stands at ``(r % 32) * 16 + (r // 32) * 4 + c`` (cuBLAS, "1D block scaling factors layout").
    """
    rows, columns = scale.shape
    tall = (rows + SWIZZLE_ROWS - 1) // SWIZZLE_ROWS
    wide = (columns + SWIZZLE_COLUMNS - 1) // SWIZZLE_COLUMNS
    raw = scale.view(torch.uint8)
    padded = torch.nn.functional.pad(
        raw, (0, wide * SWIZZLE_COLUMNS - columns, 0, tall * SWIZZLE_ROWS - rows)
    )
    tiles: Tensor = padded.view(tall, 4, 32, wide, SWIZZLE_COLUMNS).permute(0, 3, 2, 1, 4)
    flat: Tensor = tiles.reshape(-1).view(scale.dtype)
    return flat


def quantize(
    values: Tensor, absmax: Tensor, cast: Cast, tensor_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The whole cast of values that are already cut into blocks.

    Args:
        values: float32 ``[..., blocks, block_size]``.
        absmax: float32 ``[..., blocks, 1]``.
        cast: block size, rule, element and the rest; its layout is left to the caller.
        tensor_scale: float32 0-d, NVFP4's per-tensor scale; None stands for 1.

    Returns:
        ``qdata``: ``[..., blocks, block_size / per_byte]`` in the element's dtype, and ``scale``
        in ``cast.scale_dtype``, shaped like ``absmax``.
    """
    element = ELEMENTS[cast.element]
    scale = block_scale(absmax, element, cast.rule, tensor_scale)
    scale = bounded(scale, absmax, cast.least, cast.infinite)
    scaled = apply_scale(values, absmax, scale, cast.apply, tensor_scale)
    return pack(encode(scaled, element, cast.saturate), element), scale
