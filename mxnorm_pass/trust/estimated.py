"""Reads of a gain that are no read of an estimated norm.

A gain that takes a ratio in is right only where the estimate was; whatever else reads it, in any
graph, would get another number than before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch.fx import Graph, Node

from mxnorm_pass.ops import OP
from mxnorm_pass.ops.rmsnorm_mxquant import Options
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.walk import downwards
from mxnorm_pass.trust.nodes import PRODUCTS, is_same, source_of_gain, who


def other_reads(graph: Graph, own: Collection[Node]) -> list[list[str]]:
    """Per input of a rewritten graph, who reads it but the estimated norms, for people.

    Args:
        graph: as the pass leaves it.
        own: the model's own nodes, those that were there before.
    """
    return [
        list(dict.fromkeys(_other_reads(start, own)))
        for start in graph.nodes
        if start.op == "placeholder"
    ]


def _other_reads(start: Node, own: Collection[Node]) -> Iterator[str]:
    for node in downwards([start], lambda n: source_of_gain(n) is start):
        if source_of_gain(node) is start or aten.is_inert(node):
            continue
        # What the pass adds reads the gain for the site's sake (its row's bound, its maximum).
        exact = node.target is OP and not _estimates(node)
        if exact or (node in own and not _is_estimated(node, start)):
            yield _said(node)


def _estimates(op: Node) -> bool:
    options: Any = op.args[1:]
    return op.target is OP and Options(*options).rms != "exact"


def _said(node: Node) -> str:
    return who(node, "a norm that keeps the true RMS" if node.target is OP else "")


def _is_estimated(node: Node, gain: Node) -> bool:
    """The norm's output, made again of the row and an estimating op's rstd."""
    if node.target is not aten.aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return False
    for factor, row in (node.args, node.args[::-1]):
        if isinstance(factor, Node) and source_of_gain(factor) is gain:
            return isinstance(row, Node) and _is_normed(row)
    return False


def _is_normed(row: Node) -> bool:
    while is_same(row) or aten.moves(row):
        row = row.all_input_nodes[0]
    return row.target in PRODUCTS and any(_is_of_rstd(n) for n in row.all_input_nodes)


def _is_of_rstd(node: Node) -> bool:
    """One number per row, made of an estimating op's rstd alone."""
    while node.op == "call_function":
        if aten.is_getitem(node, 2) and _estimates(node.all_input_nodes[0]):
            return True
        alone = len(node.all_input_nodes) == 1
        same = node.target in aten.EXPAND or aten.keeps_order(node) or aten.is_pointwise(node)
        if not (alone and same):
            return False
        node = node.all_input_nodes[0]
    return False
