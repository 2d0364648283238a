"""From a cast's input back to its RMSNorm: which row, which eps, which gain, rounded where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, fused_norm
from mxnorm_pass.recognise.lift import LiftError, Piece, lift
from mxnorm_pass.recognise.norm_function import Norm, gain_kind, rounding
from mxnorm_pass.recognise.statistics import VARIANCES, row_statistics, squared_row
from mxnorm_pass.recognise.walk import upwards

_DIFFERENCES = (aten.aten.sub.Tensor, aten.aten.add.Tensor)
_FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class NormSpec:
    """A recognised RMSNorm.

    Attributes:
        x: the row, before it is widened.
        mean: the row mean of squares (or the sum of squares).
        shifted: ``mean + eps``, the node whose users the rewrite cuts over; ``mean`` where there is
            no eps.
        eps: the constant, or the value that the probes used where ``eps_node`` is given.
        eps_node: a 0-d tensor instead of a constant (``dynamic=True`` makes eps an input).
        gain: node of shape ``[K]`` (or with leading ones) that multiplies the row; None without
        gain.
        gain_kind: ``w``, ``1+w``, ``other`` or ``none``, for the report.
        norm_dtype: what ``x * rstd`` is rounded to before the gain.
        out_dtype: what the cast reads.
        fused: ``mean`` and ``shifted`` are one call of ``aten._fused_rms_norm``.
    """

    x: Node
    mean: Node
    shifted: Node
    eps: float
    eps_node: Node | None
    gain: Node | None
    gain_kind: str
    norm_dtype: torch.dtype
    out_dtype: torch.dtype
    fused: bool = False


def recognise_norm(y: Node, k: int) -> NormSpec | None:
    """The RMSNorm whose output is ``y``; None where no row statistic is near.

    Row statistics are tried from the nearest on. Where none fits, the reason is that of the nearest
    mean of squares or variance, since that is where a user would look for the norm.
    """
    call = fused_norm.fused_call(y)
    if call is not None:
        return _fused(call, y, k)
    no_square: Decline | None = None
    no_norm: Decline | None = None
    for statistic in row_statistics(y):
        try:
            x = squared_row(statistic)
        except Decline as decline:
            no_square = no_square or decline
            continue
        try:
            return _norm_at(statistic, x, y, k)
        except Decline as decline:
            no_norm = no_norm or decline
    reason = no_norm or no_square
    if reason is not None:
        raise reason
    return None


def _fused(call: Node, y: Node, k: int) -> NormSpec:
    x, gain, eps = fused_norm.arguments(call, k)
    normalised = next(n for n in call.users if aten.is_getitem(n, 0))
    out_dtype = aten.dtype(normalised)
    if aten.dtype(x) not in _FLOATS or out_dtype not in _FLOATS:
        raise Decline("unsupported_dtype", f"row {aten.dtype(x)}, cast reads {out_dtype}", y)
    assert out_dtype is not None
    return NormSpec(
        x=x,
        mean=call,
        shifted=call,
        eps=eps,
        eps_node=None,
        gain=gain,
        gain_kind=gain_kind(gain),
        norm_dtype=torch.float32,
        out_dtype=out_dtype,
        fused=True,
    )


def _norm_at(statistic: Node, x: Node, y: Node, k: int) -> NormSpec:
    if statistic.target in VARIANCES:
        raise Decline(
            "centred",
            "the row's variance, not its mean square",
            statistic,
            computed="mean((x - mean(x))^2)",
            expected="mean(x^2)",
        )
    if not aten.reduces_last_axis(statistic):
        raise Decline("multi_axis", f"reduces {statistic.args[1]}", statistic)
    width = aten.shape(statistic.all_input_nodes[0])[-1]
    if not isinstance(width, int) or width != k:
        raise Decline("row_mismatch", f"mean over {width}, cast over {k}", statistic)
    _check_not_centred(x)
    if aten.dtype(x) not in _FLOATS or aten.dtype(y) not in _FLOATS:
        raise Decline("unsupported_dtype", f"row {aten.dtype(x)}, cast reads {aten.dtype(y)}", y)
    if aten.dtype(statistic) is not torch.float32:
        raise Decline("unsupported_dtype", f"mean square in {aten.dtype(statistic)}", statistic)

    try:
        piece = lift(y, stops={x, statistic})
    except LiftError as error:
        reason = "norm_form" if error.operand is None else "extra_operand"
        if error.node.target in aten.EXPAND:
            reason = "reordered"
        raise Decline(reason, str(error), error.node) from error
    if x not in piece.leaves or statistic not in piece.leaves:
        raise Decline("norm_form", "the row is not scaled by its own mean square", y)
    divisor = k if statistic.target is aten.aten.sum.dim_IntList else 1
    missed: Decline | None = None
    # Others may add to the mean as well (a loss, a norm with another eps): the one that y is made
    # from.
    mine = set(upwards([y], known={x, statistic}))
    for shift in _shifts(statistic, k, mine):
        shifted, eps, eps_node = shift
        try:
            gain = _gain(piece, eps_node, k)
            norm_dtype = rounding(Norm(piece, x, statistic, gain, eps, eps_node, y, divisor))
            break
        except Decline as decline:
            missed = missed or decline
    else:
        assert missed is not None
        raise missed
    if gain is not None and shifted in set(upwards([gain])):
        raise Decline("extra_operand", "the gain is computed from the norm's own output", gain)
    out_dtype = aten.dtype(y)
    assert out_dtype is not None
    return NormSpec(
        x=x,
        mean=statistic,
        shifted=shifted,
        eps=eps,
        eps_node=eps_node,
        gain=gain,
        gain_kind=gain_kind(gain),
        norm_dtype=norm_dtype,
        out_dtype=out_dtype,
    )


def _check_not_centred(x: Node) -> None:
    """A row less its own mean is LayerNorm's row, not RMSNorm's."""
    node = x
    while aten.keeps_order(node) or aten.is_widening(node) or node.target is aten.CONVERT:
        node = node.all_input_nodes[0]
    # A norm of a norm is a product with a row statistic: nothing is taken off.
    if node.target not in _DIFFERENCES or not aten.shape(node):
        return
    for operand in node.all_input_nodes:
        size = aten.shape(operand)
        per_row = bool(size) and isinstance(size[-1], int) and size[-1] == 1 != aten.shape(node)[-1]
        if per_row and next(row_statistics(operand), None) is not None:
            raise Decline(
                "centred",
                "the row has a row mean taken off",
                node,
                computed="x - mean(x)",
                expected="x",
            )


def _shifts(statistic: Node, k: int, within: set[Node]) -> list[tuple[Node, float, Node | None]]:
    """``mean + eps``: the node, the constant, and the 0-d tensor if eps is one; without an eps,
    the mean itself.
    """
    mean = statistic
    if statistic.target is aten.aten.sum.dim_IntList:
        divided = (u for u in _forward_users(statistic) if u in within and _divides(u, k))
        mean = next(divided, statistic)
        if mean is statistic:
            raise Decline(
                "norm_form",
                f"a sum that is not divided by {k}",
                statistic,
                computed="sum(x^2)",
                expected=f"sum(x^2) / {k}",
            )
    found: list[tuple[Node, float, Node | None]] = []
    for user in _forward_users(mean):
        if user not in within or user.target not in (aten.aten.add.Tensor, aten.aten.add.Scalar):
            continue
        left, right = user.args[:2]
        other = right if isinstance(left, Node) and aten.shape(left) == aten.shape(user) else left
        if isinstance(other, (int, float)):
            found.append((user, float(other), None))
            continue
        given = aten.tensor(other) if isinstance(other, Node) else None
        if isinstance(other, Node) and given is not None and given.dim() == 0:
            found.append((user, 1e-3, other))
    return found or [(mean, 0.0, None)]


def _forward_users(node: Node) -> Iterator[Node]:
    """Users in the forward, seen through reshapes."""
    queue = [node]
    for source in queue:
        for user in source.users:
            if aten.is_backward(user):
                continue
            if aten.keeps_order(user):
                queue.append(user)
            else:
                yield user


def _divides(node: Node, k: int) -> bool:
    """``node`` is its input over K; evaluation confirms the exact factor later."""
    factor = node.args[1] if len(node.args) > 1 else None
    if not isinstance(factor, (int, float)):
        return False
    if node.target in aten.DIVIDES:
        return factor == k
    return node.target in aten.MULTIPLIES and factor * k == 1


def _gain(piece: Piece, eps_node: Node | None, k: int) -> Node | None:
    """The one side input that has a value per column and none per row."""
    gains = []
    for side in piece.sides:
        if side is eps_node:
            continue
        size = aten.shape(side)
        if size and aten.same_shape(size, (*(1,) * (len(size) - 1), k)) and _is_vector(side):
            gains.append(side)
        else:
            raise Decline("extra_operand", f"operand of shape {list(size)}", side)
    if len(gains) > 1:
        names = ", ".join(sorted(g.name for g in gains))
        raise Decline("norm_form", f"several operands of shape [{k}]: {names}")
    return gains[0] if gains else None


def _is_vector(node: Node) -> bool:
    """Comes from a tensor of one axis: a modulation of a batch of one, ``[1, 1, K]``, does not."""
    seen = 0
    while len(aten.shape(node)) != 1:
        if node.op in ("placeholder", "get_attr"):
            # Kept as [1, K] from the start; the sizes before K are 1, as the caller has checked.
            return True
        seen += 1
        if seen > 8 or not (
            aten.keeps_order(node) or node.target in aten.EXPAND or aten.is_pointwise(node)
        ):
            return False
        sources = [n for n in node.all_input_nodes if aten.tensor(n) is not None]
        if len(sources) != 1:
            return False
        node = sources[0]
    return True
