"""Rows picked, joined or sent between norm and cast: the op runs once per row before, and codes and
scales are moved instead, at half the bytes or less.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.moves import (
    SPLITS,
    chunk,
    first_sent,
    picks_rows,
    sent_again,
    source_of,
    sources_of,
)
from mxnorm_pass.rewrite.edit import TAGS, Edit, release_sizes, view_last

_aten = torch.ops.aten


def leave_to_backward(edit: Edit, path: tuple[Node, ...]) -> None:
    """Rows that activation checkpointing sends once more for the backward, and that the forward no
    longer reads: a wait counts as impure, so the partitioner would keep it in both.
    """
    sent = first_sent(path)
    if sent is not None and sent_again(path):
        for node in path[path.index(sent) :]:
            edit.tag(node, "partitioner_tag", "must_be_in_backward")


class Moved:
    """What the op stores (codes or scales, one row per row of the norm) after the moves that a
    cast's rows went through; casts behind the same moves share them.
    """

    def __init__(self, edit: Edit, stored: Node, sizes_from: Node) -> None:
        self._edit, self._stored, self._sizes_from = edit, stored, sizes_from
        self._moved: dict[Node, Node] = {}
        self._made: dict[tuple[str, ...], Node] = {}

    def by(self, path: tuple[Node, ...]) -> Node:
        """``stored`` after the moves of a path; itself where there are none."""
        if not path:
            return self._stored
        first = source_of(path[0])
        if first not in self._moved:
            self._moved[first] = self._viewed(self._bytes(), first)
        for node in path:
            if node not in self._moved:
                self._moved[node] = self._move(node)
        current, dtype = self._moved[path[-1]], aten.dtype(self._stored)
        if dtype is torch.uint8:
            return current
        return self._edit.call(aten.VIEW_DTYPE, (current, dtype), like=current, after=current)

    def _bytes(self) -> Node:
        """Bytes can be moved on every device and by every backend; not every float8 can."""
        stored = self._stored
        if aten.dtype(stored) is torch.uint8:
            return stored
        args = (stored, torch.uint8)
        return self._edit.call(aten.VIEW_DTYPE, args, like=stored, after=stored)

    def _viewed(self, current: Node, like: Node) -> Node:
        return view_last(self._edit, current, like, self._sizes_from, after=current)

    def _move(self, node: Node) -> Node:
        latest = max(self._moved[n] for n in sources_of(node))
        if aten.is_widening(node):
            return latest
        if not picks_rows(node):
            return self._viewed(latest, node)
        parent = node.all_input_nodes[0]
        if parent.target in SPLITS and not all(isinstance(n, int) for n in chunk(node) or ()):
            # A slice would want its symbolic ends as nodes; the split has them.
            args = (self._moved[source_of(node)], *parent.args[1:])
            split = self._make(parent.target, args, parent, latest)
            return self._make(operator.getitem, (split, node.args[1]), node, split)
        return self._make(*_again(node, self._moved), node, latest)

    def _make(self, target: Any, args: tuple[Any, ...], like: Node, after: Node) -> Node:
        """A call; linears that gather the same rows each for itself get them by one gather."""
        key = (str(target), str(args), *(str(like.meta.get(tag)) for tag in TAGS))
        if key not in self._made:
            self._made[key] = self._edit.call(target, args, like=like, after=after)
        return self._made[key]

    def release_sizes(self) -> None:
        """Sizes read off rows that moved are those of what was moved in their place."""
        for node, moved in self._moved.items():
            release_sizes(self._edit, (moved,), (node,))


def _again(node: Node, moved: dict[Node, Node]) -> tuple[Any, tuple[Any, ...]]:
    """The move as a call that reads what was ``moved`` already, whose rows have another length."""
    if node.target is _aten.cat.default:
        joined: Any = node.args[0]
        return node.target, ([moved[n] for n in joined], *node.args[1:])
    current = moved[source_of(node)]
    piece = chunk(node) if aten.is_getitem(node) else None
    if piece is not None:
        return _aten.slice.Tensor, (current, *piece)
    args: list[Any] = [current, *node.args[1:]]
    if node.target in aten.EXPAND:
        args[1] = [*args[1][:-1], -1]
    return node.target, tuple(args)
