"""Casts in a graph: where one starts, and what it stores."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from mxnorm_pass.formats import BLOCK_SIZES, ELEMENT_OF_DTYPE, Element
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, opaque, packing
from mxnorm_pass.recognise.coding import Function, Operands, sub_byte_element
from mxnorm_pass.recognise.lift import MAX_PIECE, LiftError

_STORED_DTYPES = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)

# A block absmax that leads to one of these is a cast, be its codes known or not (the fnuz elements
# are those of some accelerators before the OCP's).
_TELLING = (
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


@dataclass(frozen=True)
class CastSite:
    """A cast found in a graph, before its functions are known.

    Attributes:
        anchor: the block absmax, or the call of an opaque cast op.
        source: the cast's input.
        chain: from the source (excluded) to the block view: nodes that reshape or widen.
        region: what is computed from the absmax and vanishes with the cast.
        derived: of the region, what is computed from ``scales``: it may have other readers.
        codes: elements as they are stored; of FP4 the packed bytes.
        unpacked: for each of ``codes``, the node of one code per value.
        scales: block scales as they are read from outside.
        block_size: elements per block.
        element: None where no known element is stored.
        known: what an opaque op was registered to do; None for casts in plain ops.
    """

    anchor: Node
    source: Node
    chain: tuple[Node, ...]
    region: frozenset[Node]
    derived: frozenset[Node]
    codes: tuple[Node, ...]
    unpacked: tuple[Node, ...]
    scales: tuple[Node, ...]
    block_size: int
    element: Element | None
    operands: Operands
    known: opaque.CastOp | None = None

    @property
    def inside(self) -> frozenset[Node]:
        """All that belongs to the cast and to nobody else."""
        return frozenset({self.anchor, *self.region})


def anchors(graph: Graph) -> list[Node]:
    """Block maxima over a known block size, and opaque cast ops, in graph order."""
    return [node for node in graph.nodes if is_anchor(node)]


def is_anchor(node: Node) -> bool:
    """A cast may start here."""
    return aten.is_call(node) and (is_block_max(node) or opaque.is_registered(node))


def is_block_max(node: Node) -> bool:
    """The largest magnitude of each block of a known size along the last axis."""
    reduction = _reduction(node)
    size = None if reduction is None else block_size(node)
    return (
        reduction is not None
        and isinstance(size, int)
        and size in BLOCK_SIZES
        and aten.reduces_last_axis(reduction)
        and _magnitudes(reduction).target is aten.aten.abs.default
    )


def block_size(absmax: Node) -> int | torch.SymInt:
    """Length of the blocks of a maximum; 0 where it has no axis.

    Along a symbolic axis torch may keep the length of blocks as an expression of what was divided;
    the view itself says it.
    """
    node = reduced(absmax)
    size = aten.shape(node)
    while size and not isinstance(size[-1], int):
        wanted = node.args[1] if node.target is aten.aten.view.default else None
        if isinstance(wanted, (list, tuple)) and isinstance(wanted[-1], int):
            return wanted[-1] if wanted[-1] > 0 else size[-1]
        if not (aten.keeps_order(node) or node.target is aten.aten.abs.default):
            break
        node = node.all_input_nodes[0]
        if not (aten.shape(node) and aten.same_size(aten.shape(node)[-1], size[-1])):
            break
    return size[-1] if size else 0


def _reduction(absmax: Node) -> Node | None:
    """The call behind a maximum: ``amax`` itself, or the ``max`` whose first output it is."""
    if aten.is_getitem(absmax, 0) and absmax.all_input_nodes[0].target is aten.aten.max.dim:
        return absmax.all_input_nodes[0]
    return absmax if absmax.target is aten.aten.amax.default else None


def reduced(absmax: Node) -> Node:
    """The magnitudes in blocks that a maximum is taken of."""
    reduction = _reduction(absmax)
    assert reduction is not None
    return reduction.all_input_nodes[0]


def values_of(absmax: Node) -> Node:
    """What they are the magnitudes of."""
    return aten.origin(reduced(absmax)).all_input_nodes[0]


def _magnitudes(reduction: Node) -> Node:
    """``abs(values)`` under the reduction of an anchor, seen through reshapes and widening."""
    return aten.origin(reduction.all_input_nodes[0])


def cast_site(anchor: Node) -> CastSite | None:
    """The cast around an anchor; None where nothing that could be a cast's result is stored."""
    if opaque.is_registered(anchor):
        return _opaque_site(anchor)
    reduction = _reduction(anchor)
    assert reduction is not None
    source, chain = _back_to_source(values_of(anchor))
    size = block_size(anchor)
    assert isinstance(size, int)
    operands = Operands(anchor, frozenset({source, *chain}))
    depends = _Dependence(operands)

    reached = _downstream(anchor, depends)
    if reached is None:
        return None
    # NVFP4's scale leads to the per-tensor scale, which its codes depend on as well.
    for node in reached:
        if aten.dtype(node) is torch.float8_e4m3fn and not depends(node):
            operands = operands.with_scale(node)
            break
    codes = [n for n in reached if aten.dtype(n) in ELEMENT_OF_DTYPE and depends(n)]
    element = ELEMENT_OF_DTYPE.get(aten.dtype(codes[0])) if codes else None  # type: ignore[arg-type]
    unpacked = codes
    if not codes:
        element, unpacked = _sub_byte_codes(sorted(reached), depends, operands, source)
        codes = unpacked
        if element is not None and element.per_byte > 1:
            codes = [p for n in unpacked for p in packing.packed(n, element.per_byte)]
            unpacked = [n for n in unpacked for _ in packing.packed(n, element.per_byte)]
        reached = _downstream(anchor, depends, ends={*codes, *unpacked}) or reached
    needed = _ancestors(codes, within={*reached, *packing.between(unpacked, codes)})
    alone = {n for n in reached if not depends(n)}
    scales = _scale_exits(anchor, alone, needed)
    if element is None and not any(aten.dtype(n) in _TELLING for n in reached):
        return None
    return CastSite(
        anchor=anchor,
        source=source,
        chain=tuple(chain),
        region=frozenset(needed | alone),
        derived=frozenset(_derived(scales, anchor, alone)),
        codes=tuple(codes),
        unpacked=tuple(unpacked),
        scales=tuple(scales),
        block_size=size,
        element=element,
        operands=operands,
    )


def _back_to_source(node: Node) -> tuple[Node, list[Node]]:
    chain: list[Node] = []
    while aten.keeps_order(node) or aten.is_widening(node):
        chain.append(node)
        node = node.all_input_nodes[0]
    return node, chain


class _Dependence:
    """Whether a node is computed from the cast's values otherwise than through the absmax."""

    def __init__(self, operands: Operands) -> None:
        self._known: dict[Node, bool] = {operands.absmax: False}
        self._known.update((n, True) for n in operands.values)

    def __call__(self, node: Node) -> bool:
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
                continue
            sources = top.all_input_nodes if aten.carries(top) else []
            unknown = [n for n in sources if n not in self._known]
            if unknown:
                stack.extend(unknown)
                continue
            self._known[top] = any(self._known[n] for n in sources)
            stack.pop()
        return self._known[node]


def _downstream(
    absmax: Node, depends: _Dependence, ends: Container[Node] = ()
) -> list[Node] | None:
    """What is computed from the absmax, up to stored codes and E8M0 scales; None where it is too
    much.
    """
    found: dict[Node, None] = {}
    queue = [absmax]
    for node in queue:
        for user in node.users:
            if user in found or not (aten.keeps_order(user) or aten.is_pointwise(user)):
                continue
            found[user] = None
            if len(found) > 2 * MAX_PIECE:
                return None
            dtype = aten.dtype(user)
            stored = dtype is torch.float8_e8m0fnu or (dtype in ELEMENT_OF_DTYPE and depends(user))
            if not stored and user not in ends:
                queue.append(user)
    return list(found)


def _sub_byte_codes(
    reached: Iterable[Node], depends: _Dependence, operands: Operands, source: Node
) -> tuple[Element | None, list[Node]]:
    """The first uint8 node whose values are FP6 or FP4 codes of the block's values."""
    dtype = aten.dtype(source)
    if dtype not in (torch.bfloat16, torch.float32):
        return None, []
    for node in reached:
        if aten.dtype(node) is not torch.uint8 or not depends(node) or aten.keeps_order(node):
            continue
        try:
            piece = operands.lift(node)
        except LiftError:
            continue
        if piece.sides:
            continue
        element = sub_byte_element(Function(piece, operands, dtype))
        if element is not None:
            return element, [node]
    return None, []


def _ancestors(nodes: Iterable[Node], within: Container[Node]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack.extend(n for n in node.all_input_nodes if n in within)
    return seen


def _scale_exits(absmax: Node, alone: set[Node], needed: set[Node]) -> list[Node]:
    """Where scales leave the cast: functions of the absmax ``alone`` that somebody else reads.

    What is computed from a stored scale (a dequantisation) leaves by the stored scale, and an E8M0
    view of a byte by its byte.
    """
    found: dict[Node, None] = {}
    for node in sorted(alone):
        if all(u in alone or u in needed or aten.is_inert(u) for u in node.users):
            continue
        for end in _stored_behind(node, absmax, alone) or (node,):
            is_view = end.target is aten.VIEW_DTYPE and aten.dtype(end) is torch.float8_e8m0fnu
            found[end.all_input_nodes[0] if is_view else end] = None
    return list(found)


def _stored_behind(node: Node, absmax: Node, alone: set[Node]) -> list[Node]:
    """The stored scales that ``node`` depends on, where it depends on the absmax by them only."""
    ends: dict[Node, None] = {}
    seen = {node}
    stack = [node]
    while stack:
        top = stack.pop()
        if top is absmax:
            return []
        if aten.dtype(top) in _STORED_DTYPES:
            ends[top] = None
            continue
        fresh = [n for n in top.all_input_nodes if n not in seen and (n in alone or n is absmax)]
        seen.update(fresh)
        stack.extend(fresh)
    return list(ends)


def _derived(scales: list[Node], absmax: Node, alone: set[Node]) -> set[Node]:
    """What is computed from stored scales, and so stays right when they are replaced."""
    found: set[Node] = set()
    for node in sorted(alone):
        inner = [n for n in node.all_input_nodes if n in alone or n is absmax]
        if node not in scales and inner and all(n in found or n in scales for n in inner):
            found.add(node)
    return found


def _opaque_site(call: Node) -> CastSite | None:
    """The site of a registered op; None for a call that it was not registered for."""
    known = opaque.describe(call)
    if known is None:
        return None
    source, chain = _back_to_source(known.values)
    outputs: dict[Any, Node] = {n.args[1]: n for n in call.users if aten.is_getitem(n)}
    codes = tuple(outputs[k] for k in (known.qdata,) if k in outputs)
    scales = tuple(outputs[k] for k in (known.scale,) if k in outputs)
    return CastSite(
        anchor=call,
        source=source,
        chain=tuple(chain),
        region=frozenset((*codes, *scales)),
        derived=frozenset(),
        codes=codes,
        unpacked=codes,
        scales=scales,
        block_size=known.cast.block_size,
        element=known.element,
        operands=Operands(call, frozenset({source, *chain})),
        known=known,
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
    return _behind(site, {site.anchor, site.source, *site.chain}) | site.region


def whole(site: CastSite) -> frozenset[Node]:
    """The body, and the maximum with what it is taken of."""
    return _behind(site, {site.source, *site.chain}) | body(site)


def _behind(site: CastSite, outside: set[Node]) -> frozenset[Node]:
    queue = [n for n in (site.anchor, *site.codes, *site.scales) if n not in outside]
    seen = {site.anchor} - outside
    for node in queue:
        for source in node.all_input_nodes:
            if source not in outside and source not in seen:
                seen.add(source)
                queue.append(source)
    return frozenset(seen)
