"""NVFP4's per-tensor maximum, replaced by what it cannot exceed: no pass ahead of the op."""

from __future__ import annotations

import torch
from torch.fx import Node

from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding
from mxnorm_pass.recognise import Site, aten
from mxnorm_pass.rewrite.edit import Chain, Edit, scalar
from mxnorm_pass.theory import computed_bound

_aten = torch.ops.aten


def peak_bound(
    edit: Edit, site: Site, gain: Node | None, rms: str, constant: float, rounding: str
) -> Node:
    """A float32 scalar that no ``|y|`` exceeds; with a gain in the op, times its largest value.

    Where the maximum is bfloat16, so is y: rounded to the nearest, the bound stays one.
    """
    norm, out = parse_rounding(rounding)
    first = norm is torch.bfloat16
    # Rounded a second time without a product in between, a value stays what it is.
    second = out is torch.bfloat16 and not (first and gain is None)
    value = computed_bound(rms, constant, site.k, site.cast.block_size, bf16=first + second)
    like = site.norm.shifted
    bound = scalar(edit, value, torch.float32, like=like, after=like)
    if gain is None:
        return bound
    call = Chain(edit, like=like, after=bound)
    largest = call(_aten.amax.default, call(_aten.abs.default, gain), [])
    if aten.dtype(largest) is not torch.float32:
        largest = call(aten.CONVERT, largest, torch.float32)
    return call(_aten.mul.Tensor, largest, bound)
