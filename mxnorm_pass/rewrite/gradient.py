"""Another gradient of the estimate than the straight-through one: a factor on the terms along x."""

from __future__ import annotations

import torch
from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.norm import NormSpec
from mxnorm_pass.recognise.row_gradient import row_terms
from mxnorm_pass.recognise.walk import upwards
from mxnorm_pass.rewrite.edit import Chain, Edit, view_as

_aten = torch.ops.aten
_LEAST = torch.finfo(torch.float32).tiny
_FAR = 1e-30  # below the mean of maxima a block is one of zeros


def change_gradient(
    edit: Edit, norm: NormSpec, rstd: Node, gradient: str, rms: str, constant: float, block: int
) -> bool:
    """Multiply the terms of dx along the row by what ``gradient`` wants there instead.

    Autograd's are ``-x rho^3 mean(x u)``, the gradient of a mean of squares whose root happens to
    be the estimate e. The factors::

        projected   (e^2 + eps) / (mean(x^2) + eps), after which dx has no part along x
        own         d(e^2)/dx_i over 2 x_i / K: at the largest element of a block
                    B c^2 M^(2/p - 1) m^(p - 2), elsewhere 0

    with B elements in a block, m its maximum and M the mean of m^p; equal maxima share. To be
    called while the root's readers are those that autograd wrote.

    Returns:
        Whether there are any: a row that takes no gradient has none.

    Raises:
        Decline: ``gradient_form``, where those terms cannot be told apart.
    """
    terms = row_terms(norm)
    if not terms:
        return False
    k, like = aten.shape(norm.x)[-1], terms[0]
    assert isinstance(k, int)
    row = edit.call(aten.CONVERT, (norm.x, torch.float32), like=like, after=like)
    if gradient == "projected":
        factor = _projected(Chain(edit, like=like, after=row), row, norm, rstd)
    else:
        blocks = view_as(edit, row, (-1, k // block, block), row, row, row)
        factor = _own(Chain(edit, like=like, after=blocks), blocks, rms, block * constant**2)
    given = [node for node in (norm.x, rstd, norm.eps_node) if node is not None]
    for term in terms:
        leading, last = aten.shape(term)[:-1], 1 if gradient == "projected" else k
        sized = view_as(edit, factor, (*leading, last), term, norm.x, factor)
        # It depends on the forward alone. Computed there, a number of every block would be saved,
        # which the row, that is there anyway, can tell.
        for node in upwards([sized], known=given):
            node.meta["partitioner_tag"] = "must_be_in_backward"
        product = edit.call(_aten.mul.Tensor, (term, sized), like=term, after=sized)
        made, dtype = product, aten.dtype(term)
        if dtype is not torch.float32:
            made = edit.call(aten.CONVERT, (product, dtype), like=term, after=product)
        edit.replace(term, made, [user for user in term.users if user is not product])
    return True


def _projected(call: Chain, row: Node, norm: NormSpec, rstd: Node) -> Node:
    """``[..., 1]``."""
    root = call(_aten.mean.dim, call(_aten.mul.Tensor, row, row), [-1], True)
    root = call(_aten.add.Tensor, root, norm.eps if norm.eps_node is None else norm.eps_node)
    both = call(_aten.mul.Tensor, call(_aten.mul.Tensor, rstd, rstd), root)
    return call(_aten.reciprocal.default, both)


def _own(call: Chain, blocks: Node, rms: str, scale: float) -> Node:
    """``[rows, K / B, B]`` of rows in as many blocks; ``scale`` is B c^2."""
    sizes = call(_aten.abs.default, blocks)
    most = call(_aten.amax.default, sizes, [-1], True)
    largest = call(aten.CONVERT, call(_aten.eq.Tensor, sizes, most), torch.float32)
    share = call(_aten.div.Tensor, largest, call(_aten.sum.dim_IntList, largest, [-1], True))
    if rms == "p2":
        return call(_aten.mul.Tensor, share, scale)
    mean = call(_aten.mean.dim, most, [-2], True)
    # A block of zeros has no gradient to hand on, whatever finite number stands here.
    least = call(_aten.add.Tensor, call(_aten.mul.Tensor, mean, _FAR), _LEAST)
    over = call(_aten.div.Tensor, mean, call(_aten.maximum.default, most, least))
    return call(_aten.mul.Tensor, share, call(_aten.mul.Tensor, over, scale))
