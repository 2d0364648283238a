"""Which nodes of a joint graph are the backward's, where torch lost count."""

from __future__ import annotations

from torch.fx import Graph, Node

from mxnorm_pass.recognise import aten

TAG = "partitioner_tag"


def tag_backward(graph: Graph) -> None:
    """Tag nodes of the backward that have no tag.

    AOTAutograd tags a joint graph's nodes while it traces them. In a region of activation
    checkpointing the backward of an ``autograd.Function`` (torchao's linears are such) is run node
    by node with the metadata of Dynamo's nodes, and the tag is lost. What reads a node of the
    backward is the backward's, and so is what it alone reads; other nodes without a tag, which
    torch wrote anew in the forward, stay as they are.
    """
    bare = [n for n in graph.nodes if aten.is_call(n) and n.meta.get(TAG) is None]
    for node in bare:
        if any(map(_is_backward, node.all_input_nodes)):
            node.meta[TAG] = "is_backward"
    for node in reversed(bare):
        if node.meta.get(TAG) is None and _only_backward(node):
            node.meta[TAG] = "is_backward"


def _is_backward(node: Node) -> bool:
    tangent = node.op == "placeholder" and node.name.startswith("tangents")
    return tangent or aten.is_backward(node)


def _only_backward(node: Node) -> bool:
    return bool(node.users) and all(map(aten.is_backward, node.users))
