"""What a cast computes, found by evaluation: block absmax -> scale, (value, absmax) -> code.

A piece of the graph is run on the probes and compared with every function that
:mod:`mxnorm_pass.formats` can perform. Where none agrees, the nearest one is named together with
the first value on which it differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mxnorm_pass.formats import (
    APPLIES,
    E8M0_BIAS,
    E8M0_NAN,
    E8M0_RULES,
    SATURATES,
    SUB_BYTE,
    Apply,
    Element,
    Infinite,
    Rule,
    Saturate,
    apply_scale,
    block_scale,
    bounded,
    encode,
)
from mxnorm_pass.recognise import aten, probes
from mxnorm_pass.recognise.lift import LiftError, Piece, lift

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
POWERS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Miss:
    """Nothing agreed. ``computed`` and ``expected`` tell what the nearest candidate missed by."""

    computed: str
    expected: str


@dataclass(frozen=True)
class Operands:
    """The nodes that a cast's functions are functions of.

    ``values`` are the cast's input and its reshaped or widened forms.
    """

    absmax: Node
    values: frozenset[Node]
    tensor_scale: Node | None = None

    def lift(self, node: Node) -> Piece:
        """The piece from these operands to ``node``."""
        stops = {self.absmax, *self.values}
        if self.tensor_scale is not None:
            stops.add(self.tensor_scale)
        return lift(node, stops=stops)

    def with_scale(self, scale: Node) -> Operands:
        """With the per-tensor scale that ``scale`` is computed from, where there is one."""
        try:
            sides = self.lift(scale).sides
        except LiftError:
            return self
        if len(sides) != 1:
            return self
        (side,) = sides
        is_scalar = not aten.shape(side) and aten.dtype(side) is torch.float32
        return Operands(self.absmax, self.values, side) if is_scalar else self


@dataclass(frozen=True)
class Function:
    """A piece of a cast with its operands named.

    ``dtype`` is that of the cast's input: probes of this dtype decide, float32 ones refine.
    """

    piece: Piece
    operands: Operands
    dtype: torch.dtype

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal functions, whatever graph they came from."""
        role = {self.operands.absmax: "absmax", self.operands.tensor_scale: "tensor_scale"}
        roles = tuple(role.get(leaf, "value") for leaf in self.piece.leaves)
        return (self.piece.key, roles, self.dtype)

    @property
    def scaled(self) -> bool:
        """Depends on a per-tensor scale."""
        return self.operands.tensor_scale in self.piece.leaves

    def __call__(
        self, values: Tensor | None, absmax: Tensor, tensor_scale: Tensor, *, wide: bool
    ) -> Tensor | None:
        """Evaluate on one vector per operand; None where the piece cannot take them.

        Each leaf gets its own dtype, or float32 throughout where ``wide``.
        """
        given: dict[Node, Tensor] = {}
        for leaf in self.piece.leaves:
            if leaf is self.operands.tensor_scale:
                given[leaf] = tensor_scale
                continue
            source = absmax if leaf is self.operands.absmax else values
            if source is None:
                return None
            dtype = aten.dtype(leaf)
            given[leaf] = source if wide or dtype is None else source.to(dtype)
        try:
            return self.piece.evaluate(given)
        except (RuntimeError, TypeError):
            # Written for the narrow dtype only (integer views of it), or for another device.
            return None


_cache: dict[tuple[Any, ...], Any] = {}
"""Results by structural key: a model of 100 equal layers pays once."""


def _widths(dtype: torch.dtype) -> list[torch.dtype]:
    return list(dict.fromkeys((dtype, torch.float32)))


def _tensor_scales(function: Function) -> tuple[float, ...]:
    return probes.TENSOR_SCALES if function.scaled else (1.0,)


# --- scales ---------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class ScaleRule:
    """A rule with its ends: the least exponent, and what an infinite absmax gives."""

    rule: Rule
    least: int = 0
    infinite: Infinite = "rule"

    def __call__(self, absmax: Tensor, element: Element, tensor_scale: Tensor | None) -> Tensor:
        """The stored scale, uint8 or E4M3."""
        scale = block_scale(absmax, element, self.rule, tensor_scale)
        return bounded(scale, absmax, self.least, self.infinite)

    def __str__(self) -> str:
        return self.rule


def scale_rule(function: Function, element: Element) -> tuple[ScaleRule, bool] | Miss:
    """The rule by which a block absmax becomes a stored scale, and whether float32 input takes it.

    A scale may be stored as E8M0, as an integer exponent, as a power of two in floating point, or
    (NVFP4) as E4M3. bfloat16 cannot tell ``rceil_log2`` from ``rceil_exact``; the same chain fed
    with float32 can.
    """
    key = ("scale", element.name, function.key)
    if key not in _cache:
        _cache[key] = _match_rule(function, element)
    found: tuple[ScaleRule, bool] | Miss = _cache[key]
    return found


def _match_rule(function: Function, element: Element) -> tuple[ScaleRule, bool] | Miss:
    candidates: list[ScaleRule] = []
    for width in _widths(function.dtype):
        probe = probes.absmax(width)
        got = _over_scales(function, None, probe, wide=width is torch.float32)
        if got is None:
            if width is function.dtype:
                return Miss("a function of more than the block absmax", "a scale rule")
            return candidates[0], False
        candidates = candidates or _scale_candidates(got, probe)
        expected = {
            r: _expected_scale(width, element, r, _tensor_scales(function), got.dtype)
            for r in candidates
        }
        # Where codes can be NaN, they say it as well as the scale: a scale that does not is no
        # other function.
        nan = None if element.sub_byte else probe.isnan().repeat(len(_tensor_scales(function)))
        agree = [r for r in candidates if _agreement(got, expected[r]).all()] or [
            r for r in candidates if _agreement(got, expected[r], nan).all()
        ]
        if not agree:
            if width is not function.dtype:
                return candidates[0], False
            return _nearest(got, expected, probe, "absmax", nan)
        candidates = agree
    return candidates[0], True


def _scale_candidates(got: Tensor, probe: Tensor) -> list[ScaleRule]:
    """Rules to compare with; the ends are read off the value at zero and at infinity."""
    if got.dtype is torch.float8_e4m3fn:
        return [ScaleRule("e4m3")]
    at_zero = float(got[: len(probe)][probe == 0][0].float())
    at_infinity = float(got[: len(probe)][probe.isinf()][0].float())
    least, infinite = 0, "rule"
    if got.dtype in POWERS or got.dtype is torch.float8_e8m0fnu:
        mantissa, exponent = math.frexp(at_zero)
        if mantissa == 0.5 and exponent - 1 + E8M0_BIAS > 0:
            least = exponent - 1 + E8M0_BIAS
        # exp2(log2(inf)) is Inf: the block comes out as NaN, which 255 says.
        infinite = "rule" if math.isfinite(at_infinity) else "nan"
    elif 0 < at_zero < E8M0_NAN:
        least = int(at_zero)
    return [ScaleRule(r, least, infinite) for r in E8M0_RULES]  # type: ignore[arg-type]


@cache
def _expected_scale(
    width: torch.dtype,
    element: Element,
    rule: ScaleRule,
    tensor_scales: tuple[float, ...],
    stored: torch.dtype,
) -> Tensor:
    absmax = probes.absmax(width).to(torch.float32)
    if rule.rule == "e4m3":
        return torch.cat([rule(absmax, element, torch.tensor(t)) for t in tensor_scales])
    expected = stored_scale(rule(absmax, element, None), stored)
    if stored in POWERS and rule.infinite == "nan":
        expected = torch.where(absmax.isinf(), torch.inf, expected)
    return expected.repeat(len(tensor_scales))


def stored_scale(byte: Tensor, stored: torch.dtype) -> Tensor:
    """A biased exponent in the dtype that a graph keeps it in."""
    if stored is torch.float8_e8m0fnu:
        return byte.view(stored)
    if stored in POWERS:
        power = torch.exp2(byte.to(torch.float32) - E8M0_BIAS)
        return torch.where(byte == E8M0_NAN, torch.nan, power).to(stored)
    return byte.to(stored)


# --- codes ----------------------------------------------------------------------------------------


def coding(
    function: Function, element: Element, rule: ScaleRule
) -> tuple[tuple[Apply, Saturate], bool] | Miss:
    """How values are scaled and saturated before they are rounded to the element."""
    key = ("code", element.name, rule, function.key)
    if key not in _cache:
        _cache[key] = _match_coding(function, element, rule)
    found: tuple[tuple[Apply, Saturate], bool] | Miss = _cache[key]
    return found


def _match_coding(
    function: Function, element: Element, rule: ScaleRule
) -> tuple[tuple[Apply, Saturate], bool] | Miss:
    candidates = list(product(APPLIES, SATURATES[:1] if element.sub_byte else SATURATES))
    for width in _widths(function.dtype):
        values, absmax = probes.block_values(width, fine=rule.rule == "e4m3")
        got = _over_scales(function, values, absmax, wide=width is torch.float32)
        if got is None:
            if width is function.dtype:
                return Miss("no function of the block's values", "an element code")
            return candidates[0], False
        scales = _tensor_scales(function)
        expected = {c: _expected_code(width, element, rule, *c, scales) for c in candidates}
        # The op's scale of a NaN block is NaN, whatever the codes beside the NaN itself: they
        # decide nothing, unless a candidate gives the very same.
        ignore = absmax.isnan() | (absmax.isinf() & (rule.infinite == "nan"))
        if not element.sub_byte:
            ignore &= ~values.isnan()
        ignore = ignore.repeat(len(scales))
        agree = [c for c in candidates if _agreement(got, expected[c]).all()] or [
            c for c in candidates if _agreement(got, expected[c], ignore).all()
        ]
        if not agree:
            if width is not function.dtype:
                return candidates[0], False
            named = {f"{a}/{s} under {rule}": e for (a, s), e in expected.items()}
            return _nearest(got, named, values, "value", ignore)
        candidates = agree
    return candidates[0], True


@cache
def _expected_code(
    width: torch.dtype,
    element: Element,
    rule: ScaleRule,
    apply: Apply,
    saturate: Saturate,
    tensor_scales: tuple[float, ...],
) -> Tensor:
    fine = rule.rule == "e4m3"
    values, absmax = (t.to(torch.float32) for t in probes.block_values(width, fine=fine))
    found = []
    for t in tensor_scales:
        tensor_scale = torch.tensor(t) if fine else None
        scale = rule(absmax, element, tensor_scale)
        scaled = apply_scale(values, absmax, scale, apply, tensor_scale)
        found.append(encode(scaled, element, saturate))
    return torch.cat(found)


def sub_byte_element(function: Function) -> Element | None:
    """FP6 or FP4, where the piece gives such codes under any rule; None where it does not.

    uint8 says nothing of the format, so each is tried; a few hundred values dismiss most pieces.
    """
    key = ("element", function.key)
    if key not in _cache:
        _cache[key] = next(_sub_byte_matches(function), None)
    found: Element | None = _cache[key]
    return found


def _sub_byte_matches(function: Function) -> Iterator[Element]:
    rules: tuple[Rule, ...] = ("e4m3",) if function.scaled else (*E8M0_RULES, "e4m3")
    scales = _tensor_scales(function)
    for element, rule in product(SUB_BYTE, rules):
        if rule == "e4m3" and element.name != "e2m1":
            continue
        values, absmax = (t[::97] for t in probes.block_values(function.dtype, fine=rule == "e4m3"))
        got = _over_scales(function, values, absmax, wide=function.dtype is torch.float32)
        if got is None:
            continue
        # The ends of the rule are not known yet: leave out what they touch.
        ignore = (~absmax.isfinite() | (absmax < 2.0**-60)).repeat(len(scales))
        for apply in APPLIES:
            every = _expected_code(function.dtype, element, ScaleRule(rule), apply, "clamp", scales)
            sample = every.view(len(scales), -1)[:, ::97].reshape(-1)
            if _agreement(got, sample, ignore).all():
                yield element


# --- comparison -----------------------------------------------------------------------------------


def _over_scales(
    function: Function, values: Tensor | None, absmax: Tensor, *, wide: bool
) -> Tensor | None:
    """The piece on the probes, once for each per-tensor scale, end to end."""
    found = []
    for t in _tensor_scales(function):
        got = function(values, absmax, torch.tensor(t), wide=wide)
        if got is None or got.shape != absmax.shape:
            return None
        found.append(got)
    return torch.cat(found)


def _agreement(got: Tensor, expected: Tensor, ignore: Tensor | None = None) -> Tensor:
    """Elementwise: equal bit for bit, any NaN for any NaN, and the sign of zero kept."""
    if got.dtype is not expected.dtype or got.shape != expected.shape:
        return torch.zeros((), dtype=torch.bool)
    if got.dtype.is_floating_point:
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
        nan = got.float().isnan() & expected.float().isnan()
        same = (got.view(width) == expected.view(width)) | nan
    else:
        same = got == expected
    return same if ignore is None else same | ignore


def _nearest(
    got: Tensor,
    expected: dict[Any, Tensor],
    probe: Tensor,
    probe_name: str,
    ignore: Tensor | None = None,
) -> Miss:
    """Name the candidate that agrees most often, and the first probe on which it does not."""
    hits = {name: _agreement(got, e, ignore) for name, e in expected.items()}
    name = max(hits, key=lambda n: int(hits[n].sum()) if hits[n].dim() else -1)
    hit = hits[name]
    if not hit.dim():
        return Miss(f"{got.dtype}", f"{name} in {expected[name].dtype}")
    at = int((~hit).nonzero()[0])
    where = float(probe[at % len(probe)])
    total = len(hit)
    return Miss(
        f"{int(hit.sum())} of {total} values as {name}; at {probe_name} {where:.9g} "
        f"it gives {_shown(got[at])}",
        f"{_shown(expected[name][at])} there",
    )


def _shown(element: Tensor) -> str:
    if element.dtype in (torch.float32, torch.bfloat16):
        return f"{float(element):.9g}"
    if element.dtype.is_floating_point:
        return f"{float(element.float()):.9g} (code {int(element.view(torch.uint8)):#04x})"
    return str(int(element))
