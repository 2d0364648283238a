"""FP4 packing: two codes to a byte. Slices pick elements, so it is matched by structure, and what
joins the halves is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.lift import LiftError, lift

_HALVES = (aten.aten.slice.Tensor, aten.aten.select.int)


def is_part(node: Node) -> bool:
    """A slice or selection that could pick one half of each byte."""
    return aten.is_call(node) and node.target in _HALVES


def _same_elements(code: Node) -> list[Node]:
    """The code and its reshaped forms."""
    found = [code]
    for node in found:
        found.extend(u for u in node.users if aten.keeps_order(u))
    return found


def _half(node: Node) -> int | None:
    """0 or 1 for a node that picks every second element of its input, counted along rows."""
    source = node.all_input_nodes[0]
    rank = len(aten.shape(source))
    if node.target is aten.aten.select.int:
        # select(view(codes, [..., K / 2, 2]), -1, half)
        _, axis, index = node.args[:3]
        last = isinstance(axis, int) and axis % rank == rank - 1 and aten.shape(source)[-1] == 2
        return index if last and index in (0, 1) else None  # type: ignore[return-value]
    given: Any = (*node.args, *(None, 0, 0, None, 1)[len(node.args) :])
    _, axis, start, end, step = given
    start = start or 0
    if not isinstance(axis, int) or axis % rank != rank - 1 or step != 2 or start not in (0, 1):
        return None
    size = aten.shape(source)[-1]
    to_the_end = end is None or (
        isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end >= size))
    )
    return int(start) if to_the_end else None


def packed(code: Node, per_byte: int) -> list[Node]:
    """Nodes that hold ``code`` packed, low half first; empty where it is stored otherwise."""
    if per_byte != 2:
        return []
    found: dict[Node, None] = {}
    halves = [(u, _half(u)) for n in _same_elements(code) for u in n.users if is_part(u)]
    lows = [n for n, half in halves if half == 0]
    highs = [n for n, half in halves if half == 1]
    for low in lows:
        for joined in (u for n in _same_elements(low) for u in n.users):
            if aten.dtype(joined) is torch.uint8 and any(_joins(joined, low, h) for h in highs):
                found[joined] = None
    return list(found)


def _joins(node: Node, low: Node, high: Node) -> bool:
    """``low | high << 4``, by value over all pairs of codes."""
    try:
        piece = lift(node, stops={low, high})
    except LiftError:
        return False
    if piece.sides or set(piece.leaves) != {low, high}:
        return False
    codes = torch.arange(16, dtype=torch.uint8)
    first, second = codes.repeat(16), codes.repeat_interleave(16)
    try:
        got = piece.evaluate({low: first, high: second})
    except (RuntimeError, TypeError):
        return False
    return got.dtype is torch.uint8 and torch.equal(got, first | (second << 4))


def between(codes: Iterable[Node], stored: Iterable[Node]) -> set[Node]:
    """The nodes on the way from unpacked codes to stored bytes."""
    ends = set(codes)
    found: set[Node] = set()
    stack = list(stored)
    while stack:
        node = stack.pop()
        if node in found or node in ends:
            continue
        found.add(node)
        stack.extend(n for n in node.all_input_nodes if aten.tensor(n) is not None)
    return found
