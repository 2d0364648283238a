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

from mxnorm_pass.compat import is_contiguous_or_false
from mxnorm_pass.ops import ADD_OP, OP
from mxnorm_pass.ops.rmsnorm_mxquant import ROW_DTYPES
from mxnorm_pass.recognise import aten
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
    # What is computed from the sum cannot be an input of the op that forms it: a per-tensor scale
    # of the tensor's own maximum, a gain made of activations.
    others = [n for n in (gain, eps, tensor_scale) if isinstance(n, Node)]
    return None if _depend(others, x) else x


def absorb(edit: Edit, op: Node, total: Node) -> Node:
    """Put an op that forms the sum in the place of ``op``; the caller rolls back if this raises."""
    # Where the sum stood: its other readers may come before the norm.
    new = edit.call(
        ADD_OP, (*total.args, *op.args[1:]), like=op, after=total, name="add_rmsnorm_mxquant"
    )
    again = edit.call(operator.getitem, (new, 3), like=total, after=new, name="sum")
    edit.replace(op, new)
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


def _depend(nodes: Iterable[Node], source: Node) -> bool:
    """Whether any of the nodes is computed from ``source``."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is source:
            return True
        fresh = [n for n in node.all_input_nodes if n not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return False
