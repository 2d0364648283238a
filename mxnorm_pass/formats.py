"""Element dtypes, scale rules and casts: the one table that knows a format.

The probes that recognise a cast, the op that performs it and the report that names it all read this
table. Formats follow the OCP Microscaling Formats (MX) v1.0 specification, sections 5.3 and 5.4;
the scale rules are those of torchao's ``ScaleCalculationMode`` and of cuBLAS' 1-D block scaling.

A cast of a block of ``B`` values takes three steps, and :class:`Cast` names the choice made in
each:

1. ``rule``: block absmax -> biased E8M0 exponent (:func:`scale_byte`);
2. ``apply``: value, scale -> value in units of the scale (:func:`apply_scale`);
3. ``saturate``: clamp to the largest finite element or not, then round to nearest even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E8M0_BIAS = 127
E8M0_NAN = 255
F32_MANTISSA_BITS = 23
F32_MIN_NORMAL = 2.0**-126

Rule = Literal["floor", "ceil", "even", "rceil_log2", "rceil_exact"]
Apply = Literal["reciprocal", "divide"]
Saturate = Literal["clamp", "bare"]

RULES: tuple[Rule, ...] = ("floor", "ceil", "even", "rceil_log2", "rceil_exact")
APPLIES: tuple[Apply, ...] = ("reciprocal", "divide")
SATURATES: tuple[Saturate, ...] = ("clamp", "bare")
BLOCK_SIZES: tuple[int, ...] = (16, 32, 64, 128)


@dataclass(frozen=True)
class Element:
    """One element dtype of the MX specification (table 1)."""

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite value."""

    @property
    def max_exponent(self) -> int:
        """``floor(log2(max))``, which FLOOR, CEIL and EVEN take off the absmax' exponent."""
        return math.floor(math.log2(self.max))

    @property
    def bias(self) -> int:
        """Exponent bias, ``2**(exponent_bits - 1) - 1``."""
        return int(2 ** (self.exponent_bits - 1)) - 1


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element("e4m3", torch.float8_e4m3fn, 4, 3, 448.0),
        Element("e5m2", torch.float8_e5m2, 5, 2, 57344.0),
    )
}
ELEMENT_OF_DTYPE: dict[torch.dtype, Element] = {e.dtype: e for e in ELEMENTS.values()}


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
    layout: Literal["plain"] = "plain"

    def __str__(self) -> str:
        return "/".join(
            (self.element, f"b{self.block_size}", self.rule, self.apply, self.saturate, self.layout)
        )

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
        element, block, rule, apply, saturate, layout = fields
        allowed: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("element", element, tuple(ELEMENTS)),
            ("block", block, tuple(f"b{b}" for b in BLOCK_SIZES)),
            ("rule", rule, RULES),
            ("apply", apply, APPLIES),
            ("saturate", saturate, SATURATES),
            ("layout", layout, ("plain",)),
        )
        for name, value, choices in allowed:
            if value not in choices:
                raise ValueError(
                    f"cast {text!r}: {name} {value!r} is not one of {', '.join(choices)}"
                )
        return cls(element, int(block[1:]), rule, apply, saturate)  # type: ignore[arg-type]


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
        bits = (absmax / element.max).view(torch.int32)
        exponent = bits >> F32_MANTISSA_BITS
        mantissa = bits & ((1 << F32_MANTISSA_BITS) - 1)
        # In the subnormal range the first half lies at or below 2**-127, which is byte 0.
        half = 1 << (F32_MANTISSA_BITS - 1)
        up = torch.where(exponent == 0, mantissa > half, mantissa > 0)
        exponent = torch.clamp(exponent + up.to(torch.int32), max=254)
        return torch.where(nan, E8M0_NAN, exponent).to(torch.uint8)
    bits = absmax.view(torch.int32)
    if rule == "even":
        # Round the absmax itself at the element's mantissa: a carry moves it to the next power.
        bits = bits + (1 << (F32_MANTISSA_BITS - element.mantissa_bits - 1))
    exponent = ((bits >> F32_MANTISSA_BITS) & 0xFF) - E8M0_BIAS
    if rule == "ceil":
        exponent = exponent + ((bits & ((1 << F32_MANTISSA_BITS) - 1)) > 0).to(torch.int32)
    exponent = torch.clamp(exponent - element.max_exponent, -E8M0_BIAS, E8M0_BIAS + 1) + E8M0_BIAS
    return torch.where(nan, E8M0_NAN, exponent).to(torch.uint8)


def apply_scale(values: Tensor, absmax: Tensor, byte: Tensor, apply: Apply) -> Tensor:
    """Values in units of their block's scale, not yet rounded to the element.

    Args:
        values: float32.
        absmax: float32, broadcast against ``values``; only its NaN is used.
        byte: uint8 biased exponent, broadcast likewise.
        apply: ``reciprocal`` multiplies by ``2**(127 - byte)``, except that byte 0 multiplies by 1
        (a
            zero block stays zero) and byte 254 by ``2**-127``; torchao's RCEIL. ``divide`` divides
            by ``2**(byte - 127)``, at least the smallest normal float32; torchao's other modes.
    """
    if apply == "reciprocal":
        factor = torch.exp2(E8M0_BIAS - byte.to(torch.float32))
        factor = torch.where(byte == 0, 1.0, factor)
        factor = torch.where(byte == 254, 2.0**-127, factor)
        return values * torch.where(byte == E8M0_NAN, absmax, factor)
    scale = (byte.to(torch.int32) << F32_MANTISSA_BITS).view(torch.float32)
    return values / torch.clamp(scale, min=F32_MIN_NORMAL)


def encode(scaled: Tensor, element: Element, saturate: Saturate) -> Tensor:
    """Round to the element dtype, ties to even.

    ``bare`` leaves overflow to the platform's own conversion, as the graph does: e4m3 on CPU gives
    448 from torch 2.12 and NaN before, e5m2 gives Inf.
    """
    if saturate == "clamp":
        scaled = torch.clamp(scaled, min=-element.max, max=element.max)
    return scaled.to(element.dtype)


def quantize(values: Tensor, absmax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """The whole cast of values that are already cut into blocks.

    Args:
        values: float32 ``[..., blocks, block_size]``.
        absmax: float32 ``[..., blocks, 1]``.
        cast: block size, rule, element and the rest.

    Returns:
        ``qdata`` in the element dtype, shaped like ``values``; ``scale`` uint8, shaped like
        ``absmax``.
    """
    element = ELEMENTS[cast.element]
    byte = scale_byte(absmax, element, cast.rule)
    scaled = apply_scale(values, absmax, byte, cast.apply)
    return encode(scaled, element, cast.saturate), byte
