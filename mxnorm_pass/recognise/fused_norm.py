"""``aten._fused_rms_norm``, where it was not decomposed (a post-grad hook, an own decomposition
table).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten

_FUSED = getattr(aten.aten, "_fused_rms_norm", None)
OP = _FUSED.default if _FUSED is not None else None
DEFAULT_EPS = torch.finfo(torch.float32).eps
"""What eps=None stands for, whatever the dtype of the row: the statistics are float32."""


def producer(y: Node) -> Node:
    """The call that ``y`` comes from, seen through reshapes, widening and getitem."""
    node = y
    while aten.keeps_order(node) or aten.is_widening(node) or aten.is_getitem(node):
        node = node.all_input_nodes[0]
    return node


def fused_call(y: Node) -> Node | None:
    """The call whose normalised output ``y`` is, seen through reshapes and widening."""
    node = aten.origin(y)
    if OP is None or not aten.is_getitem(node, 0) or node.all_input_nodes[0].target is not OP:
        return None
    return node.all_input_nodes[0]


def arguments(call: Node, k: int) -> tuple[Node, Node | None, float]:
    """Row, gain and eps of a call; declines where it normalises something else than rows of K."""
    x, normalized, gain, eps = (*call.args, None, None)[:4]
    assert isinstance(x, Node) and isinstance(normalized, (list, tuple))
    if list(normalized) != [k]:
        reason = "multi_axis" if len(normalized) > 1 else "row_mismatch"
        raise Decline(reason, f"normalized_shape {list(normalized)}, cast over {k}", call)
    return (
        x,
        gain if isinstance(gain, Node) else None,
        DEFAULT_EPS if eps is None else float(eps),  # type: ignore[arg-type]
    )
