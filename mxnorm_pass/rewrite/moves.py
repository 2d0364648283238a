"""Rows picked, joined or sent between norm and cast: the op runs once per row before, and codes and
scales are moved instead, at half the bytes or less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.moves import chunk, picks_rows, source_of, sources_of
from mxnorm_pass.rewrite.edit import Edit, view_last

_aten = torch.ops.aten


class Moved:
    """What the op stores (codes or scales, one row per row of the norm) after the moves that a
    cast's rows went through; casts behind the same moves share them.
    """

    def __init__(self, edit: Edit, stored: Node, sizes_from: Node) -> None:
        self._edit, self._stored, self._sizes_from = edit, stored, sizes_from
        self._moved: dict[Node, Node] = {}

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
        target, args = _again(node, self._moved)
        return self._edit.call(target, args, like=node, after=latest)


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
