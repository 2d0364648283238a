"""From a cast forward to the matmuls that read it, and to the weight casts a gain can be folded
into.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mxnorm_pass.formats import E8M0_BIAS, ELEMENT_OF_DTYPE, Element, decode
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.cast import CastSite, body, cast_site, is_anchor
from mxnorm_pass.recognise.cast_spec import check_closed, recognise_cast
from mxnorm_pass.recognise.coding import stored_scale
from mxnorm_pass.recognise.lift import MAX_PIECE, LiftError, lift

_LHS_RHS: dict[Any, tuple[int, int]] = {
    aten.aten.mm.default: (0, 1),
    aten.aten.addmm.default: (1, 2),
}


@dataclass(frozen=True)
class WeightCast:
    """A weight ``[N, K]`` that is cast inside the graph, for matmuls of one site only."""

    weight: Node
    site: CastSite


@dataclass(frozen=True)
class Consumers:
    """``matmuls`` read the cast; ``others`` are further readers that are no matmul."""

    matmuls: tuple[Node, ...]
    others: tuple[Node, ...]


def _passes(node: Node) -> bool:
    return (
        aten.is_pointwise(node)
        or aten.keeps_order(node)
        or aten.moves(node)
        or node.target in aten.COPIES
    )


def readers(starts: tuple[Node, ...], *, skip: frozenset[Node] = frozenset()) -> Consumers:
    """Matmuls and other non-pointwise readers downstream of ``starts``, in order of discovery."""
    seen = set(starts)
    matmuls: dict[Node, None] = {}
    others: dict[Node, None] = {}
    queue = list(starts)
    for node in queue:
        for user in node.users:
            if user in seen or user in skip:
                continue
            seen.add(user)
            if user.target in aten.MATMULS:
                matmuls[user] = None
            elif _passes(user) and len(seen) < 2 * MAX_PIECE:
                queue.append(user)
            elif user.target not in aten.SYM_SIZE and user.target not in aten.METADATA_ASSERTS:
                others[user] = None
    return Consumers(tuple(matmuls), tuple(others))


def consumers(site: CastSite) -> Consumers:
    """Readers of what the cast stores, apart from the cast itself, which reads its own scale."""
    found = readers((*site.codes, *site.scales), skip=site.region)
    if not found.matmuls:
        raise Decline("no_matmul", "no matmul reads the cast", site.anchor)
    return found


def foldable_weights(site: CastSite, found: Consumers, k: int) -> list[WeightCast] | None:
    """The weight casts to fold a gain into; None where folding would change anything else.

    Folding is right only if every reader of the cast is a matmul over K of the plainly dequantised
    activation with a weight that this graph casts along K for nobody else.
    """
    if found.others:
        return None
    weights: dict[Node, WeightCast] = {}
    for matmul in found.matmuls:
        sides = _LHS_RHS.get(matmul.target)
        if sides is None:
            return None
        lhs, rhs = (matmul.args[i] for i in sides)
        if not isinstance(lhs, Node) or not isinstance(rhs, Node):
            return None
        if not _is_dequantised(lhs, site):
            return None
        cast = _weight_cast(rhs)
        if cast is None or not _is_dequantised(rhs, cast):
            return None
        if not _transposed(rhs, cast.codes[0]):
            return None
        size = aten.shape(cast.source)
        if len(size) != 2 or not aten.same_size(size[1], k):
            return None
        try:
            if not recognise_cast(cast).wide:
                return None
            # The values too: what widens them for this cast must widen them for nobody else.
            check_closed(cast, body(cast))
        except Decline:
            return None
        weights[cast.anchor] = WeightCast(cast.source, cast)
    ours = set(found.matmuls)
    for weight in weights.values():
        read = consumers(weight.site)
        if read.others or not ours.issuperset(read.matmuls):
            return None
    return list(weights.values())


def _weight_cast(rhs: Node) -> CastSite | None:
    """Back from a matmul operand to the one cast it is dequantised from."""
    seen = {rhs}
    queue = [rhs]
    for node in queue:
        if is_anchor(node):
            site = cast_site(node)
            return site if site is not None and site.codes and site.scales else None
        for source in node.all_input_nodes:
            if source not in seen and len(seen) < MAX_PIECE and aten.is_call(source):
                seen.add(source)
                queue.append(source)
    return None


def _transposed(rhs: Node, code: Node) -> bool:
    """An odd number of 2-D transposes between the stored code and the operand."""
    odd = False
    node = rhs
    for _ in range(MAX_PIECE):
        if node is code:
            return odd
        if node.target in aten.PERMUTES:
            odd = not odd
        sources = [n for n in node.all_input_nodes if aten.tensor(n) is not None]
        if not sources:
            return False
        # Of a product value * scale, follow the operand that the code reaches.
        node = next((s for s in sources if _reaches(s, code)), sources[0])
    return False


def _reaches(node: Node, code: Node) -> bool:
    seen = {node}
    queue = [node]
    for n in queue:
        if n is code:
            return True
        if (
            aten.dtype(n) in ELEMENT_OF_DTYPE
            and n.target not in aten.PERMUTES
            and not aten.keeps_order(n)
        ):
            continue
        for source in n.all_input_nodes:
            if source not in seen and len(seen) < 64:
                seen.add(source)
                queue.append(source)
    return False


_cache: dict[object, bool] = {}


def _is_dequantised(operand: Node, site: CastSite) -> bool:
    """``operand`` is code times the block's scale, rounded to its dtype at the most."""
    if len(site.codes) != 1 or len(site.scales) != 1 or site.element is None:
        return False
    code, scale = site.codes[0], site.scales[0]
    try:
        # The caller checks transposes by themselves.
        piece = lift(operand, stops={code, scale}, through=lambda n: n.target in aten.PERMUTES)
    except LiftError:
        return False
    out, stored = aten.dtype(operand), aten.dtype(scale)
    if piece.sides or set(piece.leaves) != {code, scale} or out is None or stored is None:
        return False
    key = (piece.key, tuple(leaf is code for leaf in piece.leaves), out, stored, site.element.name)
    if key not in _cache:
        codes, byte = _code_probes(site.element)
        got = piece.evaluate({code: codes, scale: stored_scale(byte, stored)})
        values = decode(codes, site.element).double()
        expected = (values * torch.exp2(byte.double() - E8M0_BIAS)).to(out)
        _cache[key] = got.dtype is out and torch.equal(got.float(), expected.float())
    return _cache[key]


@cache
def _code_probes(element: Element) -> tuple[Tensor, Tensor]:
    """Every finite code with scales whose product is a normal bfloat16."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    if element.sub_byte:
        codes = codes[: 2 * element.sign_bit]
    else:
        codes = codes.view(element.dtype)
        codes = codes[codes.float().isfinite()].view(torch.uint8)
    scale = torch.arange(40, 200, 8, dtype=torch.int32).to(torch.uint8)
    return (
        codes.repeat_interleave(len(scale)).view(element.dtype),
        scale.repeat(len(codes)),
    )
