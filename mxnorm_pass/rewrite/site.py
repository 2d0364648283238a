"""One site: insert the op, hand its outputs to the cast's readers, cut the norm over to rstd."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mxnorm_pass.config import Constants, MXNormConfig
from mxnorm_pass.formats import E8M0_BIAS, E8M0_NAN
from mxnorm_pass.ops import ABSMAX_OP, OP
from mxnorm_pass.ops.rmsnorm_mxquant import rounding_name
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import Site, aten
from mxnorm_pass.recognise.coding import POWERS
from mxnorm_pass.recognise.norm import NormSpec
from mxnorm_pass.rewrite.bound import peak_bound
from mxnorm_pass.rewrite.edit import (
    INHERITED,
    Chain,
    Edit,
    kept,
    not_kept,
    release_sizes,
    scalar,
    view,
)
from mxnorm_pass.rewrite.fold import fold_gain
from mxnorm_pass.rewrite.gradient import change_gradient
from mxnorm_pass.rewrite.moves import Moved, leave_to_backward
from mxnorm_pass.theory import correction as gaussian_correction

_aten = torch.ops.aten


@dataclass(frozen=True)
class Applied:
    """What was decided for a site while rewriting it."""

    op: Node
    gain_at: str
    """``fold``, ``kernel`` or ``none``."""
    rms: str
    """``p1``, ``p2`` or ``exact``."""
    correction: float
    rounding: str
    tensor_scale: str
    """NVFP4's per-tensor scale: ``static``, ``dynamic``, ``bound`` or ``none``."""
    gradient: str
    """Of the estimate: ``straight_through``, ``projected`` or ``own``; else ``none``."""


def rewrite_site(
    edit: Edit, site: Site, config: MXNormConfig, *, training: bool, calibration: Constants
) -> Applied:
    """Rewrite one site; the caller rolls the edit back if this raises."""
    norm = site.norm
    root = norm.shifted
    _tag(root, norm.mean)
    tags = _decides(site)
    # torch 2.11 does not number the region of what an autograd.Function runs, as torchao's casts
    # do: without a number the op would be in another region than the sum in front of the norm.
    region = root.meta.get("ac_graph_id")
    if region is not None and "ac_graph_id" not in tags.meta:
        edit.tag(tags, "ac_graph_id", region)
    rms = config.rms_of(site.path)
    fold = (
        norm.gain is not None
        and site.weights is not None
        and rms != "exact"
        and (training if config.gain == "auto" else config.gain == "fold")
    )
    gain_at = "none" if norm.gain is None else "fold" if fold else "kernel"
    constant = 1.0
    if rms != "exact":
        block = site.cast.block_size
        fitted = calibration.blocks.get(site.path, block)
        if site.path in calibration and fitted != block:
            raise Decline("calibration_block", f"fitted for blocks of {fitted}, cast in {block}")
        constant = calibration.get(site.path) or gaussian_correction(config.p, block)
    # Folded, the product x * rstd is the cast's input itself: it stays float32, since a rounding to
    # bfloat16 in between would only add an error that the unfolded graph had to make.
    rounding = "f32->f32" if fold else rounding_name(norm.norm_dtype, norm.out_dtype)

    after = root
    gain = None
    if norm.gain is not None and not fold:
        gain = norm.gain
        if len(aten.shape(gain)) != 1:
            gain = edit.call(_aten.view.default, (gain, [site.k]), like=root, after=gain)
    normed = (norm.x, gain, norm.eps_node)
    how = (norm.eps, rms, constant, rounding)
    scaling = "none" if site.tensor_scale is None else "static"
    if site.maxima:
        scaling = config.tensor_scale
        if scaling == "bound":
            peak = peak_bound(edit, site, gain, rms, constant, rounding)
        else:
            # The scale of every block depends on the largest value of all: one pass ahead.
            block = site.cast.block_size
            peak = edit.call(
                ABSMAX_OP, (*normed, *how, block), like=root, after=after, tags=site.maxima[0]
            )
        for old in site.maxima:
            edit.replace(old, _converted(edit, peak, old))
    op = edit.call(
        OP,
        (*normed, site.tensor_scale, *how, str(site.cast)),
        like=root,
        after=after,
        name="rmsnorm_mxquant",
        tags=tags,
    )
    qdata, scale, rstd = (
        edit.call(operator.getitem, (op, i), like=root, after=op, name=name, tags=tags)
        for i, name in enumerate(("qdata", "scale", "rstd"))
    )

    moved_qdata, moved_scale = (Moved(edit, stored, norm.x) for stored in (qdata, scale))
    for reader in site.readers:
        codes, scales = moved_qdata.by(reader.moves), moved_scale.by(reader.moves)
        made = [view(edit, codes, old, norm.x, after=codes) for old in reader.cast.codes]
        for old, new in zip(reader.cast.codes, made, strict=True):
            edit.replace(old, new)
        for old in reader.cast.scales:
            edit.replace(old, stored_scale(edit, scales, old, norm.x))
        behind = (reader.cast.source, *reader.cast.chain, *reader.moves)
        # A size is no reason to send rows: those of rows that moved are those of the codes.
        release_sizes(edit, (norm.x, *(made if reader.moves else ())), behind)
    moved_qdata.release_sizes()
    for reader in site.readers:
        leave_to_backward(edit, reader.moves)
    if fold:
        assert site.weights is not None and norm.gain is not None
        for weight in site.weights:
            fold_gain(edit, weight, norm.gain)
    if rms == "exact":
        has_gradient = False
    elif config.gradient == "straight_through":
        has_gradient = training
    else:
        # In inference as well: torch.func.grad leaves a backward without a mark.
        wanted = (config.gradient, rms, constant, site.cast.block_size)
        has_gradient = change_gradient(edit, norm, rstd, *wanted)
    gradient = config.gradient if has_gradient else "none"
    if norm.fused:
        _replace_fused(edit, norm, rstd)
    else:
        _cut_over(edit, root, rstd)
    return Applied(op, gain_at, rms, constant, rounding, scaling, gradient)


def _tag(root: Node, mean: Node) -> None:
    """Give ``mean + eps`` what the mean says of itself: torch writes that addition anew, without
    any metadata, where it made eps an input of the graph (dynamic shapes).
    """
    bare = "recompute" not in root.meta
    for key in INHERITED:
        if key in mean.meta:
            root.meta.setdefault(key, mean.meta[key])
    if bare:
        not_kept(root)


def _decides(site: Site) -> Node:
    """The node whose tags the op takes: whether activation checkpointing saves what the op returns
    or computes it again is one decision, since the partitioner makes none on single outputs.

    A policy that saves what the cast stores gets that. Else the op is computed again where either
    the cast or the norm is: a policy that saves a row's mean or root would otherwise have codes
    saved, which are a thousand times as large.
    """
    codes = [code for reader in site.readers for code in reader.cast.codes]
    if codes and all(kept(code) for code in codes):
        return codes[0]
    again = (node for node in (*codes, site.norm.shifted) if aten.is_recomputed(node))
    return next(again, site.norm.shifted)


def _converted(edit: Edit, new: Node, old: Node) -> Node:
    """``new`` in the dtype of ``old``."""
    if aten.dtype(new) is aten.dtype(old):
        return new
    return edit.call(aten.CONVERT, (new, aten.dtype(old)), like=new, after=new)


def stored_scale(edit: Edit, scale: Node, old: Node, sizes_from: Node) -> Node:
    """The op's scale in the shape and the form in which the graph kept it."""
    new = view(edit, scale, old, sizes_from, after=scale)
    stored = aten.dtype(old)
    if aten.dtype(new) is stored:
        return new
    if stored is torch.float8_e8m0fnu:
        return edit.call(aten.VIEW_DTYPE, (new, stored), like=new, after=new)
    if stored not in POWERS:
        return _converted(edit, new, old)
    call = Chain(edit, like=new, after=new)
    exponent = call(_aten.sub.Tensor, call(aten.CONVERT, new, torch.float32), E8M0_BIAS)
    power = call(_aten.exp2.default, exponent)
    nan = scalar(edit, float("nan"), torch.float32, like=new, after=new)
    power = call(_aten.where.self, call(_aten.eq.Scalar, new, E8M0_NAN), nan, power)
    return _converted(edit, power, old)


def _cut_over(edit: Edit, root: Node, rstd: Node) -> None:
    """Recompute every user of ``root = mean(x^2) + eps`` from rstd, the backward included.

    This is the straight-through gradient: autograd's own formula stays, with the op's rstd in it.
    For ``pow(root, -0.5)`` the backward reads ``pow(root, -1.5)``, for ``sqrt`` the root of it, and
    so on.
    """
    if not aten.same_shape(aten.shape(rstd), aten.shape(root)):
        rstd = edit.call(_aten.squeeze.dim, (rstd, -1), like=root, after=rstd)
    plain: list[Node] = []
    for user in list(root.users):
        if user is rstd:
            continue
        if user.target is _aten.rsqrt.default:
            edit.replace(user, rstd)
        elif user.target is _aten.sqrt.default:
            new = edit.call(_aten.reciprocal.default, (rstd,), like=user, after=user)
            edit.replace(user, new)
        elif user.target is _aten.pow.Tensor_Scalar:
            exponent = -2.0 * float(user.args[1])  # type: ignore[arg-type]
            if exponent == 1.0:
                edit.replace(user, rstd)
            else:
                new = edit.call(_aten.pow.Tensor_Scalar, (rstd, exponent), like=user, after=user)
                edit.replace(user, new)
        else:
            plain.append(user)
    if plain:
        square = edit.call(_aten.mul.Tensor, (rstd, rstd), like=root, after=rstd, step=True)
        again = edit.call(_aten.reciprocal.default, (square,), like=root, after=square)
        edit.replace(root, again, plain)


def _replace_fused(edit: Edit, norm: NormSpec, rstd: Node) -> None:
    """Both outputs of ``aten._fused_rms_norm``, the normalised one recomputed pointwise."""
    call = Chain(edit, like=norm.mean, after=rstd)
    y = call(_aten.mul.Tensor, call(aten.CONVERT, norm.x, torch.float32), rstd)
    if norm.gain is not None:
        y = call(_aten.mul.Tensor, y, norm.gain)
    y = call(aten.CONVERT, y, norm.out_dtype)
    for output in list(norm.mean.users):
        edit.replace(output, y if aten.is_getitem(output, 0) else rstd)
