"""The residual add in front of a norm, taken into the op.

In a pre-norm transformer the norm's row is the residual stream, a sum ``a + b`` that was just
formed. The op then reads the two and returns the sum beside the cast; everybody else who read the
sum (the stream, the backward, sizes) reads it there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mxnorm_pass.compat import is_contiguous_or_false
from mxnorm_pass.ops import ADD_OP, OP
from mxnorm_pass.ops.rmsnorm_mxquant import ROW_DTYPES
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.walk import downwards, upwards
from mxnorm_pass.rewrite.edit import TAGS, Edit

_aten = torch.ops.aten


def residual_sum(op: Node) -> Node | None:
    """The addition that ``op`` can take in; None where its row is no such sum.

    Of several ops of one row, the first to ask gets it: the others find the row in that op's
    outputs afterwards.
    """
    x, gain, eps, tensor_scale = op.args[:4]
    if op.target is not OP or not isinstance(x, Node) or not _is_sum(x):
        return None
    # The sum moves from where it stood into the op: both must be in one half of the joint graph,
    # and in one region of activation checkpointing under one decision on what to keep.
    if any(x.meta.get(key) != op.meta.get(key) for key in TAGS) or aten.is_backward(x):
        return None
    # What one region hands to the next is saved at the border: a node of its own can be, an output
    # of an op that is computed again cannot.
    region = x.meta.get("ac_graph_id")
    if aten.is_recomputed(x) and any(
        aten.is_recomputed(user) and user.meta.get("ac_graph_id") != region for user in x.users
    ):
        return None
    # What is computed from the sum cannot be an input of the op that forms it: a per-tensor scale
    # of the tensor's own maximum, a gain made of activations.
    others = [n for n in (gain, eps, tensor_scale) if isinstance(n, Node)]
    return None if _depend(others, x) else x


def absorb(edit: Edit, op: Node, total: Node) -> Node:
    """Put an op that forms the sum in the place of ``op``; the caller rolls back if this raises."""
    apart = (
        [] if aten.is_recomputed(total) or not _formed_again(total) else _backward_readers(total)
    )
    # Where the sum stood: its other readers may come before the norm.
    new = edit.call(
        ADD_OP, (*total.args, *op.args[1:]), like=op, after=total, name="add_rmsnorm_mxquant"
    )
    again = edit.call(operator.getitem, (new, 3), like=total, after=new, name="sum")
    edit.replace(op, new)
    if apart:
        row = edit.call(_aten.add.Tensor, total.args, like=total, after=total, name="sum_again")
        row.meta["partitioner_tag"] = "is_backward"
        edit.replace(total, row, apart)
    edit.replace(total, again, [user for user in total.users if user is not op])
    return new


def _is_sum(x: Node) -> bool:
    """``a + b`` of two tensors of one shape, in the dtypes that the op takes.

    The op's sum is contiguous, and views of one that is not may not fit it.
    """
    if not is_contiguous_or_false(x.meta["val"]):
        return False
    if x.target is not _aten.add.Tensor or x.kwargs.get("alpha", 1) != 1 or len(x.args) != 2:
        return False
    dtypes = []
    for operand in x.args:
        if not isinstance(operand, Node):
            return False
        dtype = aten.dtype(operand)
        if dtype not in ROW_DTYPES or not aten.same_shape(aten.shape(operand), aten.shape(x)):
            return False
        assert dtype is not None
        dtypes.append(dtype)
    return aten.dtype(x) is torch.promote_types(*dtypes)


# How far to look up: what decides is near.
_FAR = 64
# And down: an orphaned norm with some linears' casts.
_LONG = 1024
_REDUCTIONS = (_aten.mean.dim, _aten.sum.dim_IntList, _aten.amax.default)


def _formed_again(x: Node) -> bool:
    """Whether the backward can form the sum from what it has anyway.

    The partitioner then saves its operands alone and adds in the backward, where an op's output
    would be saved besides. So it is between a norm at the end of a layer's half (Gemma's), whose
    own backward has the matmul's output, and the next norm.
    """
    size = x.meta["val"].numel()
    stack = list(x.all_input_nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or _needed(node, x):
            continue
        if statically_known_true(value.numel() * 4 <= size):
            continue
        if len(seen) > _FAR or not _passes(node):
            return False
        fresh = [n for n in node.all_input_nodes if n not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return True


def _backward_readers(x: Node) -> list[Node]:
    """Readers of the sum that the forward can do without."""
    return [user for user in x.users if not _forward_reads(user)]


def _forward_reads(reader: Node) -> bool:
    """Whether what a reader makes goes further than to the backward.

    What the rewrite orphaned is still there, and goes nowhere: the old mean and the old cast.
    """

    def goes_nowhere(node: Node) -> bool:
        return aten.is_backward(node) or _passes(node) or node.target in _REDUCTIONS

    def on(node: Node) -> bool:
        return not aten.is_backward(node)

    reached = enumerate(downwards([reader], on))
    return any(i > _LONG or not goes_nowhere(node) for i, node in reached)


def _needed(node: Node, x: Node) -> bool:
    """Whether the backward reads the node, or what follows from it element by element; ways
    through ``x`` do not count.
    """

    def on(n: Node) -> bool:
        return n is node or _passes(n)

    return any(map(aten.is_backward, downwards([node], on, known={x}, most=_LONG)))


def _passes(node: Node) -> bool:
    return aten.is_pointwise(node) or aten.keeps_order(node) or node.target in aten.PERMUTES


def _depend(nodes: Iterable[Node], source: Node) -> bool:
    """Whether any of the nodes is computed from ``source``."""
    return any(node is source for node in upwards(nodes))
