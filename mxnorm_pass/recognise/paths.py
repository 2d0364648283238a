"""Module paths as the user wrote them, from the metadata that Dynamo leaves on nodes."""

from __future__ import annotations

import re

from torch.fx import Node

_ROOT = re.compile(r"^L\[['\"]\w+['\"]\](\[['\"]?\w+['\"]?\])*")
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
_CONTAINER = re.compile(r"\b(_modules|_orig_mod|_checkpoint_wrapped_module)\b\.?")


def module_path(node: Node) -> str:
    """``model.layers.0.input_layernorm`` for a node created there; "" where nobody knows."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _ROOT.sub("", path)
    path = _INDEX.sub(r".\1", path)
    path = _CONTAINER.sub("", path)
    return re.sub(r"\.+", ".", path).strip(".")
