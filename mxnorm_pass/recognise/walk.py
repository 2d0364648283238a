"""Up a graph, from a node to what it is computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from torch.fx import Node


def upwards(
    starts: Iterable[Node],
    passes: Callable[[Node], bool] = lambda node: True,
    *,
    known: Collection[Node] = (),
    most: int | None = None,
) -> Iterator[Node]:
    """The starts and what they are computed from, nearest first, each node once.

    Breadth first: a walk in depth would run up the residual stream and miss the norm at hand.

    Args:
        starts: where to begin.
        passes: whether to go on to a node's operands.
        known: nodes not to enter.
        most: how many nodes to enter at the most.
    """
    queue = list(starts)
    seen = {*queue, *known}
    for node in queue:
        yield node
        if not passes(node):
            continue
        for source in node.all_input_nodes:
            if source not in seen and (most is None or len(queue) < most):
                seen.add(source)
                queue.append(source)
