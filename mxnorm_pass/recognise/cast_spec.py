"""Which :class:`~mxnorm_pass.formats.Cast` a cast in a graph is, or why it is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mxnorm_pass.formats import ELEMENTS, Cast, Element, swizzled_size
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.cast import CastSite
from mxnorm_pass.recognise.coding import INTEGERS, POWERS, Function, Miss, coding, scale_rule
from mxnorm_pass.recognise.lift import LiftError
from mxnorm_pass.recognise.opaque import CastOp

_SCALE_DTYPES = (*INTEGERS, *POWERS, torch.float8_e8m0fnu, torch.float8_e4m3fn)


@dataclass(frozen=True)
class CastSpec:
    """A recognised cast. ``wide``: the same chain of ops is known to do the same on float32
    input. ``tensor_scale``: the 0-d node of NVFP4's per-tensor scale.
    """

    cast: Cast
    wide: bool
    tensor_scale: Node | None = None


def check_closed(site: CastSite, nodes: frozenset[Node]) -> None:
    """Nothing but codes and scales may leave ``nodes``: all else must vanish with the cast."""
    edges = {*site.codes, *site.scales}
    for node in (site.anchor, *nodes):
        if node in edges or node in site.derived:
            continue
        for user in node.users:
            if user not in nodes and user is not site.anchor and not aten.is_inert(user):
                raise Decline("scale_escapes", f"{user.name} reads it", node)


def recognise_cast(site: CastSite) -> CastSpec:
    """Evaluate a cast and name it, or decline with the reason."""
    if site.known is not None:
        if not site.codes or not site.scales:
            raise Decline(
                "scale_escapes", "codes or scales of the op are read by nobody", site.anchor
            )
        _check_outputs(site, site.known)
        return CastSpec(site.known.cast, wide=False, tensor_scale=site.known.tensor_scale)
    if site.element is None or any(aten.dtype(n) is not site.element.dtype for n in site.codes):
        raise Decline("element_dtype", "stored in no known element dtype", site.anchor)
    if not site.codes:
        raise Decline(
            "element_dtype",
            f"{site.element.name} codes are not packed {site.element.per_byte} to a byte",
            site.anchor,
        )
    if not site.scales:
        raise Decline("scale_rule", "no scale is stored", site.anchor)
    rules = {_rule(site, site.element, node) for node in site.scales}
    rule, wide_rule = _only(rules, "scale_rule", site)
    check_closed(site, site.region)
    codings = {
        _named(site, node, "element_rounding", coding, site.element, rule) for node in site.unpacked
    }
    (apply, saturate), wide_coding = _only(codings, "element_rounding", site)
    cast = Cast(
        site.element.name,
        site.block_size,
        rule.rule,
        apply,
        saturate,
        least=rule.least,
        infinite=rule.infinite,
    )
    return CastSpec(cast, wide_rule and wide_coding, site.operands.tensor_scale)


def _check_outputs(site: CastSite, known: CastOp) -> None:
    """An opaque op's outputs have the sizes that its description says."""
    cast, size = known.cast, aten.shape(site.source)
    k = size[-1]
    if not isinstance(k, int) or not all(isinstance(s, int) for s in size):
        return
    rows = math.prod(size[:-1])
    blocks = k // cast.block_size
    codes = rows * k // ELEMENTS[cast.element].per_byte
    scales = rows * blocks if cast.layout == "plain" else swizzled_size(rows, blocks)
    for node, expected in ((site.codes[0], codes), (site.scales[0], scales)):
        given = aten.shape(node)
        is_scale = node is site.scales[0]
        in_rows = blocks in (given[-1], given[-2] if given[-1] == 1 else 0)
        if math.prod(given) != expected or (is_scale and cast.layout == "plain" and not in_rows):
            raise Decline(
                "opaque_cast",
                f"{site.anchor.target} is registered as {cast}, and returns {list(given)}",
                node,
                computed=f"{list(given)}",
                expected=f"{expected} elements, {blocks} scales a row",
            )


def _rule(site: CastSite, element: Element, node: Node) -> Any:
    if aten.dtype(node) not in _SCALE_DTYPES:
        raise Decline("scale_escapes", f"{aten.dtype(node)} computed from the absmax is read", node)
    try:
        return _named(site, node, "scale_rule", scale_rule, element)
    except Decline as decline:
        outside = [u for u in node.users if u not in site.inside]
        if outside and all(map(aten.is_backward, outside)):
            # A cast that autograd sees through: its gradient needs more than what is stored.
            raise Decline(
                "scale_escapes", f"the backward ({outside[0].name}) reads it", node
            ) from decline
        raise


def _only(found: set[Any], reason: str, site: CastSite) -> Any:
    if len(found) != 1:
        raise Decline(
            reason, f"one block is stored by several functions: {sorted(found)}", site.anchor
        )
    return next(iter(found))


def _named(site: CastSite, node: Node, reason: str, match: Any, *args: Any) -> Any:
    """What ``match`` finds for the piece that ends in ``node``; declines where it is a miss."""
    try:
        piece = site.operands.lift(node)
    except LiftError as error:
        raise Decline(reason, str(error), error.node) from error
    if piece.sides:
        side = min(piece.sides, key=lambda n: n.name)
        detail = "depends on more than the block"
        if not aten.shape(side):
            detail += "; dynamic=True makes a cast's constants inputs, mark_dynamic does not"
        raise Decline(reason, detail, side)
    dtype = aten.dtype(site.source)
    if dtype not in (torch.bfloat16, torch.float32):
        raise Decline("unsupported_dtype", f"the cast reads {dtype}", site.source)
    found = match(Function(piece, site.operands, dtype), *args)
    if isinstance(found, Miss):
        what = "rule" if reason == "scale_rule" else "rounding"
        raise Decline(
            reason,
            f"no known {what} agrees on all probes",
            node,
            computed=found.computed,
            expected=found.expected,
        )
    return found
