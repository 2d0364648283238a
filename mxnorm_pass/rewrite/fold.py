"""Gain folding: ``cast(W * g)`` in the place of ``cast(W)``, for the forward matmul only.

Parameters are not touched: the product is a node of the graph, formed again in every step and fused
into the weight's cast by the compiler. The backward's own cast of W stays without the gain, as
autograd's formula wants it (docs/design.md states the contract).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.cast import body
from mxnorm_pass.recognise.consumers import WeightCast
from mxnorm_pass.rewrite.edit import Edit

_aten = torch.ops.aten


def fold_gain(edit: Edit, cast: WeightCast, gain: Node) -> None:
    """Multiply ``gain`` [K] into the weight [N, K] in float32, before the cast reads it."""
    site = cast.site
    like = site.anchor
    weight = cast.weight
    wide = _float32(edit, weight, like)
    args = (wide, _float32(edit, gain, like))
    product = edit.call(_aten.mul.Tensor, args, like=like, after=site.anchor, step=True)
    # The views between weight and cast may have other readers (the backward): the cast gets its
    # own.
    copies: dict[Node, Node] = {weight: product}
    for node in reversed(site.chain):
        copies[node] = edit.clone(node, copies[node.all_input_nodes[0]], after=product)
    magnitudes = site.anchor.all_input_nodes[0]
    inside = body(site)
    readers = {magnitudes, *inside}
    for old, new in copies.items():
        edit.replace(old, new, [u for u in old.users if u in readers])
    # What was computed in the weight's dtype is float32 now, up to where the cast widened it.
    edit.refresh([magnitudes, site.anchor, *_in_order(inside)])


def _float32(edit: Edit, node: Node, like: Node) -> Node:
    if aten.dtype(node) is torch.float32:
        return node
    return edit.call(aten.CONVERT, (node, torch.float32), like=like, after=like, step=True)


def _in_order(region: frozenset[Node]) -> list[Node]:
    """The cast's nodes, inputs before users."""
    order: list[Node] = []
    done: set[Node] = set()
    stack = [(n, False) for n in sorted(region, key=lambda n: n.name)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in done and aten.is_call(node):
            done.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n in node.all_input_nodes if n in region and n not in done)
    return order
