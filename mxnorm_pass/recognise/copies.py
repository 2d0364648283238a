"""Copies that torch makes of whole tensors, between a norm and its cast."""

from __future__ import annotations

from torch.fx import Graph

from mxnorm_pass.recognise import aten


def read_originals(graph: Graph) -> None:
    """Have readers of ``copy(empty, x)`` read ``x``, if sizes, dtypes and strides are the same.

    DTensor's asynchronous collectives arrive by one: what waits for them fills a tensor of their
    size, and all of that tensor's own values are overwritten. Copies that the graph returns stay.
    """
    for node in graph.find_nodes(op="call_function", target=aten.aten.copy.default):
        target, source = node.args[0], node.args[1]
        copied, original = aten.tensor(node), aten.tensor(source)
        if copied is None or original is None or copied.dtype is not original.dtype:
            continue
        same = aten.same_shape(copied.shape, original.shape) and aten.same_shape(
            copied.stride(), original.stride()
        )
        if not same or any(user.op == "output" for user in node.users):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        if not target.users and target.op == "call_function":
            graph.erase_node(target)
