"""The cast along tokens: one op per distinct cast in the backward, which reads the row and rstd."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from mxnorm_pass.compat import is_contiguous_or_false
from mxnorm_pass.ops import COLWISE_OP
from mxnorm_pass.ops.rmsnorm_mxquant import rounding_name
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import Site, aten
from mxnorm_pass.recognise.columns import Columns
from mxnorm_pass.rewrite.edit import Edit, release_sizes, view_as
from mxnorm_pass.rewrite.site import stored_scale

_aten = torch.ops.aten


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
    for reader in columns.readers:
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
