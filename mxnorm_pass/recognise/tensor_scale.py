"""NVFP4's per-tensor scale: where it comes from, and which casts share one."""

from __future__ import annotations

from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.cast import CastSite
from mxnorm_pass.recognise.cast_spec import CastSpec
from mxnorm_pass.recognise.lift import LiftError, lift


def tensor_scaling(site: CastSite, spec: CastSpec) -> tuple[object, list[Node]]:
    """What identifies the per-tensor scale, and the maxima over the cast's input behind it.

    The scale is static (a graph input, a constant), or a scalar function of ``max(|y|)`` over the
    whole of the cast's input: that maximum has to be taken by the op, since y itself vanishes. Two
    casts share a scale where the node is the same, or where both compute the same function of the
    same maximum.
    """
    scale = spec.tensor_scale
    if scale is None:
        return None, []
    maxima = []
    seen = {scale}
    queue = [scale]
    for node in queue:
        if not aten.is_call(node) or _is_constant(node):
            continue
        if _is_maximum(node):
            if _behind(node) is not site.source:
                raise Decline("scale_rule", "the per-tensor scale is that of another tensor", node)
            maxima.append(node)
            continue
        if not (aten.is_pointwise(node) or aten.keeps_order(node)) or aten.shape(node):
            raise Decline(
                "scale_rule", "the per-tensor scale is no scalar function of max(|y|)", node
            )
        fresh = [n for n in node.all_input_nodes if n not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    if len(maxima) != 1:
        return scale, maxima
    try:
        piece = lift(scale, stops=set(maxima))
    except LiftError:
        return scale, maxima
    return (scale if piece.sides else (site.source, piece.key)), maxima


def _is_constant(node: Node) -> bool:
    return node.op == "get_attr" or node.target in aten.FILLS


def _is_maximum(node: Node) -> bool:
    """``max(|.|)`` over all axes."""
    if node.target is aten.aten.max.default:
        return True
    if node.target is not aten.aten.amax.default:
        return False
    axes = node.args[1] if len(node.args) > 1 else []
    rank = len(aten.shape(node.all_input_nodes[0]))
    return isinstance(axes, (list, tuple)) and len(axes) in (0, rank)


def _behind(maximum: Node) -> Node | None:
    """The tensor whose absolute values are reduced, before it is reshaped or widened."""
    magnitudes = aten.origin(maximum.all_input_nodes[0])
    if magnitudes.target is not aten.aten.abs.default:
        return None
    return aten.origin(magnitudes.all_input_nodes[0])
