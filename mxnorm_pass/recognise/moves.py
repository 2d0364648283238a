"""Rows that are picked between norm and cast: mixture-of-experts dispatch, the last token of a
sequence. Norm and cast work row by row, so they commute with it.
"""

from __future__ import annotations

from typing import Any

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


def picks_rows(node: Node) -> bool:
    """Each row of the output is a whole row of the input."""
    if not aten.is_call(node) or aten.tensor(node) is None:
        return False
    if aten.is_getitem(node):
        return chunk(node) is not None
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


def chunk(node: Node) -> tuple[int, int, int] | None:
    """Axis, start and end of a piece of a split along a leading axis; None for other nodes."""
    parent = node.all_input_nodes[0]
    if parent.target not in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return None
    given = aten.shape(parent.all_input_nodes[0])
    axis: Any = parent.args[2] if len(parent.args) > 2 else 0
    sizes = [v.shape[axis] for v in parent.meta["val"]]
    index = node.args[1]
    if not isinstance(index, int) or not all(isinstance(s, int) for s in sizes):
        return None
    if axis % len(given) == len(given) - 1:
        return None
    start = sum(sizes[:index])
    return axis, start, start + sizes[index]


def source_of(node: Node) -> Node:
    """What a move reads; a piece of a split, what is split."""
    source = node.all_input_nodes[0]
    return source.all_input_nodes[0] if aten.is_getitem(node) else source


def rows_behind(source: Node) -> tuple[Node, tuple[Node, ...]]:
    """The tensor whose rows ``source`` is made of, and the nodes in between, first one first."""
    path: list[Node] = []
    node = source
    for _ in range(MAX_PIECE):
        reshapes = aten.keeps_order(node) and _keeps_last(node)
        if not (reshapes or aten.is_widening(node) or picks_rows(node)):
            break
        path.append(node)
        node = source_of(node)
    # What comes before the first pick is part of the norm, as far as the norm is concerned.
    while path and not picks_rows(path[-1]):
        node = path.pop()
    return node, tuple(reversed(path))


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
