"""Gains of whatever looks like an RMSNorm, whether or not it is understood.

:mod:`mxnorm_pass.recognise` answers for norms that a linear reads, and declines the rest. Who asks
what became of each gain wants to hear of all of them: here a norm is a row times something made of
its own mean of squares, in any dtype, spelling or place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from mxnorm_pass.recognise import aten, fused_norm, opaque
from mxnorm_pass.recognise.lift import MAX_PIECE
from mxnorm_pass.recognise.statistics import MEANS, is_of_squares
from mxnorm_pass.recognise.walk import downwards, upwards
from mxnorm_pass.trust.nodes import PRODUCTS, is_same, source_of_gain

_MULTIPLY = aten.aten.mul.Tensor
_LENGTH = aten.aten.linalg_vector_norm.default
_ROOTS = (aten.aten.rsqrt.default, aten.aten.sqrt.default, aten.aten.pow.Tensor_Scalar, _LENGTH)


@dataclass(frozen=True)
class Scaled:
    """A norm and a parameter that scales it, channel by channel.

    Attributes:
        source: the parameter, an input of the graph.
        gain: what the norm is multiplied by: the parameter, converted or ``1 + w``.
        norm: the mean of squares, or the call that is the whole norm.
        products: nodes in which the parameter, the row and its root mean square come together.
    """

    source: Node
    gain: Node
    norm: Node
    products: tuple[Node, ...]


def is_whole(node: Node) -> bool:
    """One op that is a norm and shows nothing of what it does."""
    fused = fused_norm.OP is not None and node.target is fused_norm.OP
    return fused or opaque.is_opaque_norm(node)


class Norms:
    """The norms of a graph.

    Attributes:
        all: means of squares whose root is taken, and whole norms.
    """

    def __init__(self, graph: Graph) -> None:
        self.all: list[Node] = []
        self._per_row: dict[Node, Node] = {}
        """What is made of a mean of squares alone, one number per row -> the mean."""
        self._nodes = list(graph.nodes)
        for node in self._nodes:
            if is_whole(node):
                self.all.append(node)
            elif _is_mean_of_squares(node):
                made = list(_made_per_row(node))
                if any(n.target in _ROOTS for n in made):
                    self.all.append(node)
                    self._per_row |= dict.fromkeys(made, node)

    def scaled_by(self, parameters: Collection[Node]) -> Iterator[Scaled]:
        """Every product of a norm and one of the ``parameters``, inputs of the graph."""
        for node in self._nodes:
            if is_whole(node):
                for operand in node.all_input_nodes:
                    source = source_of_gain(operand)
                    if source is not None and source in parameters:
                        yield Scaled(source, operand, node, (node,))
            elif node.target is _MULTIPLY and len(node.all_input_nodes) == 2:
                for gain, row in (node.args, node.args[::-1]):
                    source = source_of_gain(gain)
                    if source is None or source not in parameters or not _is_per_channel(gain):
                        continue
                    norm = self._norm_of(row)
                    late = None if norm is not None else self._later(node)
                    if norm is not None:
                        yield Scaled(source, gain, norm, (node,))
                    elif late is not None:
                        yield Scaled(source, gain, *late)

    def _norm_of(self, row: Node) -> Node | None:
        """The nearest mean of squares that ``row`` is a product with. Sums end the way up: what a
        residual stream holds of earlier norms does not count.
        """

        def passes(n: Node) -> bool:
            same = n.target in PRODUCTS or n.target in aten.EXPAND or is_same(n)
            return same or aten.moves(n)

        found = upwards([row], passes, most=MAX_PIECE)
        return next((self._per_row[n] for n in found if n in self._per_row), None)

    def _later(self, product: Node) -> tuple[Node, tuple[Node, ...]] | None:
        """``(x * gain) * rstd``: the norm and the products."""
        for node in downwards([product], lambda n: n is product or is_same(n)):
            if node is not product and node.target in PRODUCTS:
                for other in node.all_input_nodes:
                    while other.target in aten.EXPAND or is_same(other):
                        other = other.all_input_nodes[0]
                    if other in self._per_row:
                        return self._per_row[other], (product, node)
        return None


def _is_per_channel(gain: Any) -> bool:
    """A scale of embeddings, one number, is no gain of the norm that comes next."""
    return aten.shape(gain)[-1:] not in ((), (1,))


def _is_mean_of_squares(node: Node) -> bool:
    """By its look, or where that says nothing by its values."""
    if node.target is _LENGTH:
        order, dims = (*node.args[1:], *(2, None)[len(node.args) - 1 :])[:2]
        return bool(order == 2) and _reduces_rows(node, dims)
    if node.target not in MEANS or not _reduces_rows(node, node.args[1]):
        return False
    square = aten.origin(node.all_input_nodes[0])
    if square.target is _MULTIPLY:
        return square.args[0] is square.args[1]
    if square.target is aten.aten.pow.Tensor_Scalar:
        return bool(square.args[1] == 2)
    return square.target is aten.aten.square.default or is_of_squares(node)


def _reduces_rows(node: Node, dims: Any) -> bool:
    """Over the last axis, and perhaps others."""
    rank = len(aten.shape(node.all_input_nodes[0]))
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, (list, tuple)) and any(d % rank == rank - 1 for d in dims)


def _made_per_row(statistic: Node) -> Iterator[Node]:
    """The statistic and what is made of it with one number per row."""
    rows = _per_row(statistic)

    def is_made(n: Node) -> bool:
        return n is statistic or (aten.carries(n) and aten.same_shape(_per_row(n), rows))

    return filter(is_made, downwards([statistic], is_made, most=MAX_PIECE))


def _per_row(node: Node) -> tuple[Any, ...]:
    """Its shape, with or without the row's axis."""
    size = aten.shape(node)
    while size and isinstance(size[-1], int) and size[-1] == 1:
        size = size[:-1]
    return size
