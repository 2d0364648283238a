"""From a block absmax to a :class:`~mxnorm_pass.formats.Cast`: what is stored, and by which
rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mxnorm_pass.formats import (
    APPLIES,
    BLOCK_SIZES,
    ELEMENT_OF_DTYPE,
    RULES,
    SATURATES,
    Cast,
    Rule,
    apply_scale,
    encode,
    scale_byte,
)
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, probes
from mxnorm_pass.recognise.lift import MAX_PIECE, LiftError, Piece, lift

_BLOCK_MAX = (aten.aten.amax.default,)


@dataclass(frozen=True)
class CastSite:
    """A cast found in a graph, before its functions are known.

    ``chain`` runs from the cast's input ``source`` (excluded) to the block view: nodes that reshape
    or widen. ``region`` is all that is computed from the absmax; of it ``codes`` (elements in their
    storage dtype) and ``bytes`` (uint8 scales) are read from outside.
    """

    absmax: Node
    source: Node
    chain: tuple[Node, ...]
    region: frozenset[Node]
    codes: tuple[Node, ...]
    bytes: tuple[Node, ...]
    block_size: int


@dataclass(frozen=True)
class CastSpec:
    """A recognised cast. ``wide``: the same chain of ops is known to do the same on float32
    input.
    """

    cast: Cast
    wide: bool


def block_maxima(graph: Graph) -> list[Node]:
    """Anchors: ``amax(abs(view), -1)`` over blocks of a known size, in graph order."""
    found = []
    for target in _BLOCK_MAX:
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            if source.target is not aten.aten.abs.default or not aten.reduces_last_axis(node):
                continue
            if aten.shape(source)[-1] in BLOCK_SIZES:
                found.append(node)
    return found


def cast_site(absmax: Node) -> CastSite | None:
    """The cast around an anchor; None where nothing is stored in an element dtype or E8M0."""
    blocks = absmax.args[0].args[0]  # type: ignore[union-attr]
    assert isinstance(blocks, Node)
    block_size = aten.shape(blocks)[-1]
    assert isinstance(block_size, int)
    chain: list[Node] = []
    source = blocks
    while aten.keeps_order(source) or aten.is_widening(source):
        chain.append(source)
        source = source.all_input_nodes[0]

    region: set[Node] = set()
    codes: list[Node] = []
    scales: list[Node] = []
    queue = [absmax]
    for node in queue:
        for user in node.users:
            if user in region or not (aten.keeps_order(user) or aten.is_pointwise(user)):
                continue
            region.add(user)
            if len(region) > MAX_PIECE:
                return None
            if aten.dtype(user) in ELEMENT_OF_DTYPE:
                codes.append(user)
            elif user.target is aten.VIEW_DTYPE and aten.dtype(user) is torch.float8_e8m0fnu:
                scales.append(user.all_input_nodes[0])
            else:
                queue.append(user)
    if not codes and not scales:
        return None
    return CastSite(
        absmax=absmax,
        source=source,
        chain=tuple(chain),
        region=frozenset(region),
        codes=tuple(codes),
        bytes=tuple(dict.fromkeys(scales)),
        block_size=block_size,
    )


def check_rows(site: CastSite) -> int:
    """Row length K of the cast's input; declines where a block would straddle two rows."""
    k = aten.shape(site.source)[-1] if aten.shape(site.source) else 0
    if not isinstance(k, int) or k == 0 or k % site.block_size:
        raise Decline(
            "k_not_multiple", f"row length {k}, block size {site.block_size}", site.source
        )
    return k


def body(site: CastSite) -> frozenset[Node]:
    """All nodes of a cast behind its chain: the region, and what widens or scales the values."""
    outside = {site.absmax, site.source, *site.chain}
    seen: set[Node] = set()
    queue = [*site.codes, *site.bytes]
    for node in queue:
        for source in node.all_input_nodes:
            if source not in outside and source not in seen:
                seen.add(source)
                queue.append(source)
    return frozenset(seen) | site.region


def check_closed(site: CastSite, nodes: frozenset[Node]) -> None:
    """Nothing but codes and scale bytes may leave ``nodes``: all else must vanish with the cast."""
    edges = {*site.codes, *site.bytes}
    for node in (site.absmax, *nodes):
        if node in edges or aten.dtype(node) is torch.float8_e8m0fnu:
            continue
        for user in node.users:
            inside = user in nodes
            harmless = user.target in aten.SYM_SIZE or user.target in aten.METADATA_ASSERTS
            if not inside and not harmless:
                raise Decline("scale_escapes", f"{user.name} reads it", node)


def recognise_cast(site: CastSite) -> CastSpec:
    """Evaluate a cast and name it, or decline with the reason."""
    if not site.codes or any(aten.dtype(n) != aten.dtype(site.codes[0]) for n in site.codes):
        raise Decline("element_dtype", "stored in no known element dtype", site.absmax)
    if not site.bytes:
        raise Decline("scale_rule", "no scale is stored as E8M0", site.absmax)
    check_closed(site, site.region)
    rules = {
        _named(
            node,
            site,
            "scale_rule",
            "no scale rule agrees on all values of the block absmax",
            _match_rule,
        )
        for node in site.bytes
    }
    rule, wide_rule = _only(rules, "scale_rule", site)
    codings = {
        _named(
            node,
            site,
            "element_rounding",
            f"not round-to-nearest-even of value / scale under {rule}",
            _match_coding(rule),
        )
        for node in site.codes
    }
    (apply, saturate), wide_coding = _only(codings, "element_rounding", site)
    element = ELEMENT_OF_DTYPE[site.codes[0].meta["val"].dtype]
    cast = Cast(element.name, site.block_size, rule, apply, saturate)
    return CastSpec(cast, wide=wide_rule and wide_coding)


def _only(found: set[Any], reason: str, site: CastSite) -> Any:
    if len(found) != 1:
        raise Decline(
            reason, f"one block is stored by several functions: {sorted(found)}", site.absmax
        )
    return next(iter(found))


_cache: dict[tuple[Any, ...], Any] = {}
"""Results by structural key: a model of 100 equal layers pays once."""


def _named(
    node: Node,
    site: CastSite,
    reason: str,
    message: str,
    match: Callable[[_Function, torch.dtype], tuple[Any, bool] | None],
) -> Any:
    try:
        piece = lift(node, stops={site.absmax, site.source, *site.chain})
    except LiftError as error:
        raise Decline(reason, str(error), error.node) from error
    if piece.sides:
        side = min(piece.sides, key=lambda n: n.name)
        detail = "depends on more than the block"
        if not aten.shape(side):
            detail += "; dynamic=True makes a cast's constants inputs, mark_dynamic does not"
        raise Decline(reason, detail, side)
    element = aten.dtype(site.codes[0])
    is_absmax = tuple(leaf is site.absmax for leaf in piece.leaves)
    key = (getattr(match, "key", match.__name__), element, is_absmax, piece.key)
    if key not in _cache:
        input_dtype = aten.dtype(site.source)
        assert element is not None and input_dtype is not None
        _cache[key] = match(_Function(piece, site.absmax, element), input_dtype)
    if _cache[key] is None:
        raise Decline(reason, message, node)
    return _cache[key]


@dataclass(frozen=True)
class _Function:
    """A piece of a cast as a function of (value, absmax), each float32 or bfloat16."""

    piece: Piece
    absmax: Node
    element: torch.dtype

    def __call__(self, values: Tensor | None, absmax: Tensor, *, wide: bool) -> Tensor:
        """Each leaf gets its own dtype, or float32 throughout where ``wide``."""
        given: dict[Node, Tensor] = {}
        for leaf in self.piece.leaves:
            source = absmax if leaf is self.absmax else values
            if source is None:
                raise LiftError("depends on more than the absmax", leaf)
            dtype = aten.dtype(leaf)
            given[leaf] = source if wide or dtype is None else source.to(dtype)
        return self.piece.evaluate(given)


def _widths(dtype: torch.dtype) -> list[torch.dtype]:
    return list(dict.fromkeys((dtype, torch.float32)))


def _match_rule(function: _Function, dtype: torch.dtype) -> tuple[Rule, bool] | None:
    """The scale rule that agrees on every probe of the graph's own dtype, float32 deciding ties.

    bfloat16 cannot tell ``rceil_log2`` from ``rceil_exact``; the same chain fed with float32 can.
    """
    element = ELEMENT_OF_DTYPE[function.element]
    candidates: list[Rule] = list(RULES)
    for width in _widths(dtype):
        probe = probes.absmax(width)
        try:
            got = function(None, probe, wide=width is torch.float32)
        except (LiftError, RuntimeError, TypeError):
            # On float32 only: the chain was written for the narrow dtype (integer views of it).
            if width is dtype:
                return None
            return candidates[0], False
        agree = [r for r in candidates if _same_bytes(got, _expected_byte(width, element.dtype, r))]
        if not agree:
            return None if width is dtype else (candidates[0], False)
        candidates = agree
    return candidates[0], True


@cache
def _expected_byte(width: torch.dtype, element: torch.dtype, rule: Rule) -> Tensor:
    return scale_byte(probes.absmax(width).to(torch.float32), ELEMENT_OF_DTYPE[element], rule)


def _match_coding(rule: Rule) -> Callable[[_Function, torch.dtype], tuple[Any, bool] | None]:
    """The way of scaling and saturating that agrees on every probe, given the scale rule."""

    def match(function: _Function, dtype: torch.dtype) -> tuple[Any, bool] | None:
        element = ELEMENT_OF_DTYPE[function.element]
        candidates = [(a, s) for a in APPLIES for s in SATURATES]
        for width in _widths(dtype):
            values, absmax = probes.block_values(width)
            try:
                got = function(values, absmax, wide=width is torch.float32)
            except (LiftError, RuntimeError, TypeError):
                return None if width is dtype else (candidates[0], False)
            values32, absmax32 = values.to(torch.float32), absmax.to(torch.float32)
            byte = scale_byte(absmax32, element, rule)
            agree = [
                (a, s)
                for a, s in candidates
                if _same_codes(got, encode(apply_scale(values32, absmax32, byte, a), element, s))
            ]
            if not agree:
                return None if width is dtype else (candidates[0], False)
            candidates = agree
        return candidates[0], True

    match.key = ("coding", rule)  # type: ignore[attr-defined]
    return match


def _same_bytes(got: Tensor, expected: Tensor) -> bool:
    return got.dtype is torch.uint8 and got.shape == expected.shape and torch.equal(got, expected)


def _same_codes(got: Tensor, expected: Tensor) -> bool:
    """Bitwise, any NaN for any NaN, and the sign of zero kept."""
    if got.dtype is not expected.dtype or got.shape != expected.shape:
        return False
    nan_got, nan_expected = got.float().isnan(), expected.float().isnan()
    bytes_equal = got.view(torch.uint8) == expected.view(torch.uint8)
    return bool(
        torch.all(torch.where(nan_got | nan_expected, nan_got == nan_expected, bytes_equal))
    )
