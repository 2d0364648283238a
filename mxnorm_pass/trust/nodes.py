"""What is asked of single nodes of a graph, whoever looks for gains and their readers."""

from __future__ import annotations

from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.paths import module_path

PRODUCTS = (aten.aten.mul.Tensor, aten.aten.div.Tensor)


def is_same(node: Node) -> bool:
    """The same numbers in the same order, in another dtype or shape."""
    return node.target is aten.CONVERT or aten.keeps_order(node)


def who(node: Node, what: str = "") -> str:
    """A reader, for people; ``what`` stands for its op."""
    if node.op == "output":
        return "what the model returns, or another graph"
    what = what or str(node.target)
    path = module_path(node)
    return f"{path} ({what})" if path else what


def source_of_gain(gain: Node) -> Node | None:
    """The input that a gain is made of by pointwise ops and reshapes; None for several."""
    node = gain
    while node.op != "placeholder":
        sources = [n for n in node.all_input_nodes if aten.tensor(n) is not None]
        passes = aten.is_pointwise(node) or aten.keeps_order(node)
        if len(sources) != 1 or not passes:
            return None
        node = sources[0]
    return node
