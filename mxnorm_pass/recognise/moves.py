"""Rows that are picked, joined or sent between norm and cast: mixture-of-experts dispatch, the last
token of a sequence, sequence parallel's gather. Norm and cast work row by row, so they commute.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import SymInt
from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.lift import MAX_PIECE

_aten = aten.aten
_ALONG_AXIS = {
    _aten.index_select.default: 1,
    _aten.select.int: 1,
    _aten.slice.Tensor: 1,
    _aten.flip.default: 1,
    aten.prims.rev.default: 1,
    _aten.roll.default: 2,
}
"""Op -> position of its axis, or axes."""


SPLITS = frozenset({_aten.split.Tensor, _aten.split_with_sizes.default})
_SENDS = frozenset({"all_gather_into_tensor", "all_to_all_single", "wait_tensor"})
"""Collectives that move whole slices of the first axis."""


def sends_rows(node: Node) -> bool:
    """A collective, or the wait for one, that takes rows to other ranks and changes none."""
    return _is(node, *_SENDS) and len(aten.shape(node)) > 1


def first_sent(path: tuple[Node, ...]) -> Node | None:
    """The first collective of a path."""
    return next((node for node in path if sends_rows(node)), None)


def sent_again(path: tuple[Node, ...]) -> bool:
    """Activation checkpointing runs the collective of a path once more for the backward: nothing
    behind it is kept.
    """
    sent = first_sent(path)
    if sent is None or aten.is_backward(sent):
        return False
    # A piece of a split has no tags of its own.
    behind = (node for node in path[path.index(sent) :] if not aten.is_getitem(node))
    return all(map(aten.is_recomputed, behind))


@dataclass(frozen=True)
class Gather:
    """The rows of all ranks of a group, joined along one axis of ``[..., K]``.

    Attributes:
        sent: the collective.
        ranks: how many ranks send.
        group: their group, by the name that torch's collectives take.
        outer: rows of one rank in front of the axis; in the result, ranks alternate within each.
        run: rows of one rank that stay behind one another.
    """

    sent: Node
    ranks: int
    group: str
    outer: int | SymInt
    run: int | SymInt

    @property
    def key(self) -> tuple[object, ...]:
        """The same for gathers that do the same; symbolic sizes have no hash of their own."""
        return (self.ranks, self.group, str(self.outer), str(self.run))


def gather_of(path: tuple[Node, ...]) -> Gather | None:
    """The gather that a path of moves comes to; None where it is, or does, anything else.

    Along the first axis that is the collective alone, along another one what arrives is split by
    rank and joined there.
    """
    nodes = [n for n in path if not aten.is_widening(n)]
    while nodes and aten.keeps_order(nodes[0]):
        del nodes[0]
    while nodes and aten.keeps_order(nodes[-1]):
        del nodes[-1]
    if len(nodes) < 2 or not (_is(nodes[0], "all_gather_into_tensor") and sends_rows(nodes[0])):
        return None
    sent, wait, *rest = nodes
    if not _is(wait, "wait_tensor") or wait.args[0] is not sent:
        return None
    _, ranks, group = sent.args[:3]
    if not isinstance(ranks, int) or not isinstance(group, str):
        return None
    lead = aten.shape(sent.all_input_nodes[0])[:-1]
    axis = _joined_by_rank(wait, rest, ranks, lead[0]) if rest else 0
    if axis is None:
        return None
    return Gather(sent, ranks, group, prod(lead[:axis]), prod(lead[axis:]))


def _is(node: Node, *names: str) -> bool:
    return aten.is_collective(node) and str(node.target).split(".")[1] in names


def _joined_by_rank(wait: Node, rest: list[Node], ranks: int, each: int | SymInt) -> int | None:
    """The axis along which what came from each rank is joined, in the order of the ranks."""
    *pieces, join = rest
    if join.target is not _aten.cat.default or len(pieces) != ranks:
        return None
    joined: Any = join.args[0]
    if len(joined) != ranks or set(joined) != set(pieces):
        return None
    for rank, piece in enumerate(joined):
        split = piece.all_input_nodes[0]
        place = chunk(piece) if aten.is_getitem(piece) else None
        mine = (0, rank * each, (rank + 1) * each)
        if place is None or not aten.same_shape(place, mine) or split.args[0] is not wait:
            return None
    axis: Any = join.args[1] if len(join.args) > 1 else 0
    return int(axis) % len(aten.shape(join))


def picks_rows(node: Node) -> bool:
    """Each row of the output is a whole row of the input, maybe another rank's."""
    if not aten.is_call(node) or aten.tensor(node) is None:
        return False
    if aten.is_getitem(node):
        return chunk(node) is not None
    if node.target is _aten.cat.default:
        return _joins_rows(node)
    if sends_rows(node):
        return True
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is None or node.args[0] is not source:
        return False
    size, given = aten.shape(node), aten.shape(source)
    if not size or not given or not aten.same_size(size[-1], given[-1]):
        return False
    last = len(given) - 1
    if node.target is _aten.index.Tensor:
        indices = node.args[1]
        # A mask takes up several axes and gives a size that only the data knows.
        return isinstance(indices, (list, tuple)) and all(
            i is None or (j < last and isinstance(i, Node) and aten.dtype(i) in aten.INDEX_DTYPES)
            for j, i in enumerate(indices)
        )
    if node.target in _ALONG_AXIS:
        position = _ALONG_AXIS[node.target]
        axes = node.args[position] if len(node.args) > position else 0
        axes = [axes] if isinstance(axes, int) else axes
        return isinstance(axes, (list, tuple)) and all(
            isinstance(a, int) and a % len(given) != last for a in axes
        )
    if node.target is _aten.permute.default:
        order = node.args[1]
        return isinstance(order, (list, tuple)) and order[-1] in (last, -1)
    if node.target is _aten.transpose.int:
        return all(isinstance(a, int) and a % len(given) != last for a in node.args[1:3])
    if node.target in aten.EXPAND:
        return True
    repeats: Any = node.args[1] if len(node.args) > 1 else None
    return node.target is _aten.repeat.default and bool(repeats[-1] == 1)


def chunk(node: Node) -> tuple[int, int | SymInt, int | SymInt] | None:
    """Axis, start and end of a piece of a split along a leading axis; None for other nodes."""
    parent = node.all_input_nodes[0]
    if parent.target not in SPLITS:
        return None
    given = aten.shape(parent.all_input_nodes[0])
    axis: Any = parent.args[2] if len(parent.args) > 2 else 0
    sizes = [v.shape[axis] for v in parent.meta["val"]]
    index = node.args[1]
    if not isinstance(index, int):
        return None
    if axis % len(given) == len(given) - 1:
        return None
    start = sum(sizes[:index])
    return axis, start, start + sizes[index]


def _joins_rows(node: Node) -> bool:
    """Tensors of one dtype put one behind the other along an axis that is not the last."""
    rank = len(aten.shape(node))
    axis = node.args[1] if len(node.args) > 1 else 0
    return (
        isinstance(axis, int)
        and rank > 1
        and axis % rank != rank - 1
        # torch lets a tensor of no elements and one axis be joined with any other.
        and all(len(aten.shape(n)) == rank for n in sources_of(node))
        and {aten.dtype(n) for n in sources_of(node)} == {aten.dtype(node)}
    )


def sources_of(node: Node) -> list[Node]:
    """What a move takes rows from: several for a join; for a piece of a split, what is split."""
    if node.target is _aten.cat.default:
        return list(dict.fromkeys(node.all_input_nodes))
    source = node.all_input_nodes[0]
    return [source.all_input_nodes[0] if aten.is_getitem(node) else source]


def source_of(node: Node) -> Node:
    """What the first node of a path reads."""
    return sources_of(node)[0]


def rows_behind(source: Node) -> tuple[Node, tuple[Node, ...]]:
    """The tensor whose rows ``source`` is made of, and the nodes in between, in graph order.

    Pieces that were split off and joined again lead back to one tensor; where they do not, nothing
    before the join counts.
    """
    best: tuple[Node, tuple[Node, ...]] = (source, ())
    path: list[Node] = []
    ends = {source}
    while len(path) < MAX_PIECE:
        # The last one in the graph: what is behind it may be behind the others too.
        node = max(ends)
        reshapes = aten.keeps_order(node) and _keeps_last(node)
        picks = picks_rows(node)
        if not (reshapes or aten.is_widening(node) or picks):
            break
        path.append(node)
        ends.remove(node)
        ends.update(sources_of(node))
        # What comes before the first pick is part of the norm, as far as the norm is concerned.
        if picks and len(ends) == 1:
            best = (next(iter(ends)), tuple(reversed(path)))
    return best


def _keeps_last(node: Node) -> bool:
    size, given = aten.shape(node), aten.shape(node.all_input_nodes[0])
    return bool(size and given) and aten.same_size(size[-1], given[-1])


def check_not_moved(source: Node) -> tuple[Node, Node] | None:
    """``(first mover, origin)`` where elements are picked, moved or joined in front of the cast in
    a way that norm and cast do not commute with; None where nothing is.
    """
    first: Node | None = None
    node = source
    for _ in range(MAX_PIECE):
        if aten.moves(node):
            first = first or node
        elif not (aten.keeps_order(node) or aten.is_widening(node)):
            break
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return None if first is None else (first, node)


def moved(first: Node, origin: Node) -> Decline:
    """Why a norm at ``origin`` does not reach the cast behind ``first``."""
    reason = "collective_between" if aten.is_collective(first) else "reordered"
    return Decline(reason, f"{first.target} between {origin.name} and the cast", first)
