"""Where the norm of a cast stands: right in front, behind rows that were moved, or behind what the
pass does not take a norm through, which is then the reason.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, fused_norm, moves, opaque
from mxnorm_pass.recognise.lift import MAX_PIECE
from mxnorm_pass.recognise.norm import NormSpec, recognise_norm
from mxnorm_pass.recognise.statistics import MEANS, is_of_squares, row_statistics
from mxnorm_pass.recognise.walk import upwards


def find_norm(source: Node, k: int) -> tuple[NormSpec, tuple[Node, ...]] | None:
    """The norm whose rows a cast reads, and the nodes that pick rows in between."""
    repeated: Decline | None = None
    try:
        norm = recognise_norm(source, k)
    except Decline as decline:
        if decline.reason != "reordered":
            raise
        norm, repeated = None, decline
    if norm is not None:
        return norm, ()
    y, path = moves.rows_behind(source)
    if path:
        norm = recognise_norm(y, k)
        if norm is not None:
            return norm, path
    if repeated is not None:
        raise repeated
    blocked = moves.check_not_moved(source)
    if blocked is None:
        producer = fused_norm.producer(source)
        if opaque.is_opaque_norm(producer):
            raise Decline("opaque_norm", f"{producer.target}", producer)
        _over_ranks(source)
        _behind_scatter(source)
        return None
    first, origin = blocked
    size = aten.shape(origin)
    try:
        norm = recognise_norm(origin, size[-1]) if size and isinstance(size[-1], int) else None
    except Decline:
        # Not a norm that could have been rewritten, wherever its rows go.
        return None
    if norm is not None:
        raise moves.moved(first, origin)
    return None


def norm_behind(node: Node, known: Collection[Node]) -> Node | None:
    """The mean of squares that a stored value comes from by pointwise ops, moves and maxima, past
    no node that is ``known`` to belong to a cast.
    """

    def passes(n: Node) -> bool:
        return aten.carries(n) or n.target in aten.MAXIMA

    for top in upwards([node], passes, known=known, most=MAX_PIECE):
        if top.target in MEANS and aten.reduces_last_axis(top) and is_of_squares(top):
            return top
    return None


def _over_ranks(source: Node) -> None:
    """Declines where the squares of a row are added up over ranks, each of which has a part."""

    def adds_up(n: Node) -> bool:
        return aten.is_collective(n) and "reduce" in str(n.target)

    def passes(n: Node) -> bool:
        return aten.carries(n) and not adds_up(n)

    for node in filter(adds_up, upwards([source], passes, most=MAX_PIECE)):
        for statistic in row_statistics(node.all_input_nodes[0]):
            if is_of_squares(statistic):
                raise Decline("sharded_row", f"{node.target} of {statistic.target}", node)


def _behind_scatter(source: Node) -> None:
    """Declines where a norm's output is overwritten, or looked up, in front of the cast."""

    def scatters(n: Node) -> bool:
        return n.target in aten.SCATTERS and not aten.is_pointwise(n)

    def passes(n: Node) -> bool:
        return aten.carries(n) or scatters(n)

    blocking: Node | None = None
    for node in upwards([source], passes, most=MAX_PIECE):
        if scatters(node):
            blocking = blocking or node
        elif blocking is not None and node.target in MEANS and is_of_squares(node):
            raise Decline("reordered", f"{blocking.target} between norm and cast", blocking)
