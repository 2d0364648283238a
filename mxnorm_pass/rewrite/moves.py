"""Rows picked between norm and cast: the op runs once per row before, and codes and scales are
picked instead, at half the bytes or less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.moves import chunk, picks_rows, source_of
from mxnorm_pass.rewrite.edit import Edit, view_last

_aten = torch.ops.aten


def replay(edit: Edit, path: tuple[Node, ...], stored: Node, sizes_from: Node) -> Node:
    """``stored`` (codes or scales, one row per row of the norm) after the same picks."""
    if not path:
        return stored
    dtype = aten.dtype(stored)
    current = stored
    if dtype is not torch.uint8:
        # Bytes can be picked on every device and by every backend; not every float8 can.
        current = edit.call(aten.VIEW_DTYPE, (stored, torch.uint8), like=stored, after=stored)
    first = source_of(path[0])
    current = view_last(edit, current, first, sizes_from, after=current)
    for node in path:
        if aten.is_widening(node):
            continue
        if picks_rows(node):
            target, args = _again(node, current)
            current = edit.call(target, args, like=node, after=current)
        else:
            current = view_last(edit, current, node, sizes_from, after=current)
    if dtype is not torch.uint8:
        current = edit.call(aten.VIEW_DTYPE, (current, dtype), like=current, after=current)
    return current


def _again(node: Node, current: Node) -> tuple[Any, tuple[Any, ...]]:
    """The move as a call that reads ``current``, whose rows have another length."""
    piece = chunk(node) if aten.is_getitem(node) else None
    if piece is not None:
        return _aten.slice.Tensor, (current, *piece)
    args: list[Any] = [current, *node.args[1:]]
    if node.target in aten.EXPAND:
        args[1] = [*args[1][:-1], -1]
    return node.target, tuple(args)
