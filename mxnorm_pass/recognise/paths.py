"""Module paths as the user wrote them, from the metadata that Dynamo leaves on nodes."""

from __future__ import annotations

import re

from torch.fx import GraphModule, Node

_ROOT = re.compile(r"^L\[['\"]\w+['\"]\](\[['\"]?\w+['\"]?\])*")
# A forward that somebody has wrapped, as found from the wrapper: torchtitan's sharding does it.
_WRAPPED = re.compile(
    r"(\.?\bforward)?(\.__closure__\.\d+\.cell_contents|\.__(self|func|wrapped)__)+"
)
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
_CONTAINER = re.compile(r"\b(__dict__|_modules|_orig_mod|_checkpoint_wrapped_module)\b\.?")


def module_path(node: Node) -> str:
    """``model.layers.0.input_layernorm`` for a node created there; "" where nobody knows."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _ROOT.sub("", path)
    path = _INDEX.sub(r".\1", path)
    path = _WRAPPED.sub("", path)
    path = _CONTAINER.sub("", path)
    return re.sub(r"\.+", ".", path).strip(".")


def places(gm: GraphModule) -> tuple[str, ...]:
    """The module path of every call of a Dynamo graph, in order, of its subgraphs too."""
    return tuple(
        module_path(node)
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op.startswith("call")
    )
