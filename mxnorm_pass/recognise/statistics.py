"""Row statistics: the means of squares and the variances that a value may be made of."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.lift import MAX_PIECE, LiftError, lift
from mxnorm_pass.recognise.norm_function import check_square
from mxnorm_pass.recognise.walk import upwards

MEANS = (aten.aten.mean.dim, aten.aten.sum.dim_IntList)
VARIANCES = (
    aten.aten.var_mean.correction,
    aten.aten.var.correction,
    aten.aten.native_layer_norm.default,
    aten.aten.native_group_norm.default,
)


def row_statistics(y: Node) -> Iterator[Node]:
    """Means and variances that ``y`` is made of element by element, nearest first."""
    for node in upwards([y], _within_rows, most=MAX_PIECE):
        if node.target in MEANS or node.target in VARIANCES:
            yield node


def _within_rows(node: Node) -> bool:
    passes = aten.is_pointwise(node) or aten.keeps_order(node) or node.target in aten.EXPAND
    return passes or aten.is_getitem(node)


def squared_row(statistic: Node) -> Node:
    """The row that is squared and averaged: found by structure, confirmed by value.

    Of a variance, what it is taken of; nothing is confirmed there.
    """
    squares = statistic.all_input_nodes[0]
    if statistic.target in VARIANCES:
        return squares
    root = aten.origin(squares)
    sources = root.all_input_nodes
    if not aten.is_pointwise(root) or len(sources) != 1:
        raise Decline("norm_form", "what is averaged is no function of one row", statistic)
    x = sources[0]
    while aten.is_widening(x):
        x = x.all_input_nodes[0]
    try:
        piece = lift(squares, stops={x})
    except LiftError as error:
        raise Decline("norm_form", str(error), error.node) from error
    if piece.sides or piece.leaves != (x,):
        raise Decline("norm_form", "what is averaged is no function of one row", statistic)
    check_square(piece, x, squares)
    return x


def is_of_squares(statistic: Node) -> bool:
    """Whether a statistic is a mean of squares, or a variance."""
    try:
        squared_row(statistic)
    except Decline:
        return False
    return True
