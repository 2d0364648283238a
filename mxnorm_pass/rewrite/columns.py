"""The cast along tokens: one op per distinct cast in the backward, which reads the row and rstd.

Where autograd casts rows that were gathered from all ranks, each rank casts its own and sends codes
and scales, in the backward: nothing of what was gathered is kept from the forward.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from mxnorm_pass.compat import is_contiguous_or_false
from mxnorm_pass.formats import ELEMENTS
from mxnorm_pass.ops import COLWISE_OP
from mxnorm_pass.ops.rmsnorm_mxquant import rounding_name
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import Site, aten
from mxnorm_pass.recognise.columns import Columns
from mxnorm_pass.recognise.moves import Gather
from mxnorm_pass.rewrite.edit import Chain, Edit, release_sizes, view_as
from mxnorm_pass.rewrite.site import stored_scale

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def rewrite_columns(edit: Edit, site: Site, columns: Columns, op: Node) -> None:
    """Let one op make what all casts of ``columns`` store; the caller rolls back if this raises.

    Autograd's y has the gain also where the cast along rows leaves it to the weight, and is rounded
    as the graph rounds it.

    Args:
        edit: what records the changes.
        site: the site whose norm is cast.
        columns: the casts.
        op: the site's own op, whose rstd is read.
    """
    norm = site.norm
    like = columns.readers[0].anchor
    rstd = next(user for user in op.users if aten.is_getitem(user, 2))
    gain = norm.gain
    if gain is not None and len(aten.shape(gain)) != 1:
        gain = edit.call(_aten.view.default, (gain, [site.k]), like=like, after=like)
    rounding = rounding_name(norm.norm_dtype, norm.out_dtype)
    args = (norm.x, rstd, gain, columns.tensor_scale, rounding, str(columns.cast))
    made = edit.call(COLWISE_OP, args, like=like, after=like, name="rmsnorm_mxquant_colwise")
    qdata, scale = (
        edit.call(operator.getitem, (made, i), like=like, after=made, name=name)
        for i, name in enumerate(("qdata_columns", "scale_columns"))
    )
    own = (qdata, scale)
    sent: dict[tuple[object, ...], tuple[Node, Node]] = {}
    for reader in columns.readers:
        gather = reader.gather
        if gather is not None:
            if gather.key not in sent:
                codes = _gathered(edit, own[0], gather, ELEMENTS[columns.cast.element].per_byte)
                scales = _gathered(edit, own[1], gather, columns.cast.block_size)
                sent[gather.key] = (codes, scales)
            qdata, scale = sent[gather.key]
        else:
            qdata, scale = own
        for old in reader.codes:
            if reader.transposed:
                new = edit.call(_aten.permute.default, (qdata, [1, 0]), like=qdata, after=qdata)
            else:
                size = _plainly(aten.shape(old), columns.cast.block_size, reader.block)
                new = view_as(edit, qdata, size, old, norm.x, qdata)
            edit.replace(old, new)
        for old in reader.scales:
            edit.replace(old, stored_scale(edit, _ordered(edit, scale, old), old, norm.x))
        release_sizes(edit, (norm.x, qdata, scale), reader.behind)


def _gathered(edit: Edit, stored: Node, gather: Gather, tokens: int) -> Node:
    """Codes or scales ``[K, M / tokens]`` of this rank's rows -> those of the rows of all ranks, in
    the order in which these were joined.

    Ranks arrive one behind the other, ``[ranks * K, M / tokens]``; along the tokens, each rank's
    come in runs.
    """
    k, dtype = aten.shape(stored)[0], aten.dtype(stored)
    call = Chain(edit, like=stored, after=stored)
    # Bytes can be sent by every backend; not every float8 can.
    node = stored if dtype is torch.uint8 else call(aten.VIEW_DTYPE, stored, torch.uint8)
    for target, args in (
        (_c10d.all_gather_into_tensor.default, (gather.ranks, gather.group)),
        (_c10d.wait_tensor.default, ()),
    ):
        node = call(target, node, *args)
        # It depends on the forward alone, and a wait counts as impure: the partitioner would run
        # it there, and keep what arrives for the backward.
        node.meta["partitioner_tag"] = "must_be_in_backward"
    outer = gather.outer if isinstance(gather.outer, int) else -1
    run = gather.run // tokens if isinstance(gather.run, int) else -1
    node = call(_aten.view.default, node, [gather.ranks, k, outer, run])
    node = call(_aten.permute.default, node, [1, 2, 0, 3])
    dense = {"memory_format": torch.contiguous_format}
    node = edit.call(_aten.clone.default, (node,), like=stored, after=node, kwargs=dense)
    call = Chain(edit, like=stored, after=node)
    node = call(_aten.view.default, node, [k, -1])
    return node if dtype is torch.uint8 else call(aten.VIEW_DTYPE, node, dtype)


def _plainly(
    size: tuple[int | torch.SymInt, ...], block: int, written: int | torch.SymInt
) -> tuple[int | torch.SymInt, ...]:
    """A shape with the length of a block as a number where torch has it as an expression."""
    if isinstance(written, int):
        return size
    return tuple(block if aten.same_size(s, written) else s for s in size)


def _ordered(edit: Edit, scale: Node, old: Node) -> Node:
    """``scale`` in the memory order of ``old``: torchao's CUDA op keeps its scales column-major,
    and what comes behind counts on it.
    """
    made, wanted = scale.meta["val"], old.meta["val"]
    if is_contiguous_or_false(wanted) or not aten.same_shape(made.shape, wanted.shape):
        return scale
    if wanted.dim() != 2 or wanted.stride(0) != 1:
        raise Decline("opaque_cast", f"scales at strides {tuple(wanted.stride())}", old)
    turned = edit.call(_aten.permute.default, (scale, [1, 0]), like=scale, after=scale)
    dense = {"memory_format": torch.contiguous_format}
    copied = edit.call(_aten.clone.default, (turned,), like=scale, after=turned, kwargs=dense)
    return edit.call(_aten.permute.default, (copied, [1, 0]), like=scale, after=copied)
