"""Walks through a graph: from a node to what it is computed from, or to what reads it.

Breadth first: a walk in depth would run up the residual stream and miss the norm at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from torch.fx import Node

Test = Callable[[Node], bool]


def _always(node: Node) -> bool:
    return True


def upwards(
    starts: Iterable[Node],
    passes: Test = _always,
    *,
    known: Collection[Node] = (),
    most: int | None = None,
) -> Iterator[Node]:
    """The starts and what they are computed from, nearest first, each node once.

    Args:
        starts: where to begin.
        passes: whether to go on from a node.
        known: nodes not to enter.
        most: how many nodes to enter at the most.
    """
    return _walk(starts, lambda node: node.all_input_nodes, passes, known, most)


def downwards(
    starts: Iterable[Node],
    passes: Test = _always,
    *,
    known: Collection[Node] = (),
    most: int | None = None,
) -> Iterator[Node]:
    """The same from the starts to what reads them."""
    return _walk(starts, lambda node: node.users, passes, known, most)


def _walk(
    starts: Iterable[Node],
    further: Callable[[Node], Iterable[Node]],
    passes: Test,
    known: Collection[Node],
    most: int | None,
) -> Iterator[Node]:
    queue = list(starts)
    seen = {*queue, *known}
    for node in queue:
        yield node
        if not passes(node):
            continue
        for other in further(node):
            if other not in seen and (most is None or len(queue) < most):
                seen.add(other)
                queue.append(other)
