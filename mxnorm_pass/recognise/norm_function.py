"""What a norm computes, found by evaluation: the square, the rounding order, the gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, probes
from mxnorm_pass.recognise.coding import Miss
from mxnorm_pass.recognise.lift import LiftError, Piece, lift

NORM_DTYPES = (torch.float32, torch.bfloat16)
_ULP = 2.0**-23
_ROOT_ULPS = 4
"""rsqrt, 1/sqrt, pow and the order of two products differ by this much in float32, at the most."""


def check_square(piece: Piece, x: Node, squares: Node) -> None:
    """Declines where the piece is not the square of ``x``."""
    values = probes.rows()[0].to(aten.dtype(x) or torch.float32)
    got, expected = piece.evaluate({x: values}), values.float().square()
    # A square that overflows is Inf on both sides; one ulp is what pow and mul may differ by.
    hit = _within(got, expected, 1)
    if bool(hit.all()):
        return
    detail = "what is averaged is not the square of the row"
    if hit.shape != values.shape:
        raise Decline("norm_form", f"{detail}: {got.dtype}", squares)
    at = int((~hit).nonzero()[0])
    raise Decline(
        "norm_form",
        detail,
        squares,
        computed=f"{float(got[at]):.9g} at x = {float(values[at]):.9g}",
        expected=f"{float(expected[at]):.9g}",
    )


def gain_kind(gain: Node | None) -> str:
    """``w``, ``1+w``, ``other`` or ``none``, for the report."""
    if gain is None:
        return "none"
    source = gain
    while aten.is_pointwise(source) or aten.keeps_order(source):
        sources = [n for n in source.all_input_nodes if aten.tensor(n) is not None]
        if len(sources) != 1:
            return "other"
        source = sources[0]
    if source is gain:
        return "w"
    try:
        piece = lift(gain, stops={source})
        values = probes.rows()[2].to(aten.dtype(source) or torch.float32)
        got = piece.evaluate({source: values}).float()
    except (LiftError, RuntimeError, TypeError):
        return "other"
    if torch.equal(got, values.float()):
        return "w"
    return "1+w" if torch.allclose(got, values.float() + 1, rtol=2.0**-8, atol=0) else "other"


_cache: dict[tuple[Any, ...], torch.dtype | Miss] = {}


@dataclass(frozen=True)
class Norm:
    """What is known of a norm when its rounding is asked for."""

    piece: Piece
    x: Node
    mean: Node
    gain: Node | None
    eps: float
    eps_node: Node | None
    y: Node
    divisor: int
    """K where ``mean`` is a sum, 1 where it is a mean."""


def rounding(norm: Norm) -> torch.dtype:
    """The dtype to which ``x * rstd`` is rounded before the gain; declines where neither fits."""
    names = {norm.x: "x", norm.mean: "mean", norm.gain: "gain"}
    roles = tuple(names.get(leaf, "eps") for leaf in norm.piece.leaves)
    key = (norm.piece.key, roles, norm.eps, norm.divisor, aten.dtype(norm.y))
    if key not in _cache:
        _cache[key] = _match_rounding(norm)
    found = _cache[key]
    if isinstance(found, Miss):
        raise Decline(
            "norm_form",
            f"not x * rsqrt(mean(x^2) + {norm.eps:g}) * gain in any known rounding order",
            norm.y,
            computed=found.computed,
            expected=found.expected,
        )
    return found


def _match_rounding(norm: Norm) -> torch.dtype | Miss:
    rows, mean_square, gains = probes.rows()
    out_dtype = aten.dtype(norm.y)
    assert out_dtype is not None
    values = rows.to(aten.dtype(norm.x) or torch.float32)
    given: dict[Node, Tensor] = {norm.x: values, norm.mean: mean_square * norm.divisor}
    if norm.gain is not None:
        gains = gains.to(aten.dtype(norm.gain) or torch.float32)
        given[norm.gain] = gains
    if norm.eps_node is not None:
        given[norm.eps_node] = torch.tensor(norm.eps, dtype=aten.dtype(norm.eps_node))
    try:
        got = norm.piece.evaluate(given)
    except (RuntimeError, TypeError) as error:
        return Miss(f"nothing that could be evaluated ({error})", "RMSNorm")
    if got.dtype is not out_dtype or got.shape != values.shape:
        return Miss(f"{got.dtype} of shape {tuple(got.shape)}", f"{out_dtype}, one value each")
    # (mean * D) / D may round once more than the mean itself: the root sees half of it.
    rstd = torch.rsqrt(mean_square.double() + norm.eps).to(torch.float32)
    slack = _ROOT_ULPS * _ULP
    misses: list[tuple[int, Miss]] = []
    for norm_dtype in NORM_DTYPES:
        bounds = []
        for root in (rstd * (1 - slack), rstd, rstd * (1 + slack)):
            h = (values.float() * root).to(norm_dtype)
            if norm.gain is not None:
                h = h.float() * gains.float()
            bounds.append(h.to(out_dtype).float())
        stacked, given_back = torch.stack(bounds), got.float()
        between = (given_back >= stacked.amin(0)) & (given_back <= stacked.amax(0))
        hit = between | (given_back.isnan() & stacked.isnan().any(0))
        if bool(hit.all()):
            return norm_dtype
        at = int((~hit).nonzero()[0])
        where = f"x = {float(values[at]):.6g}, mean square {float(mean_square[at]):.6g}"
        if norm.gain is not None:
            where += f", gain {float(gains[at]):.6g}"
        name = str(norm_dtype).removeprefix("torch.")
        miss = Miss(
            f"{int(hit.sum())} of {len(hit)} values as RMSNorm rounded to {name}; at {where} it "
            f"gives {float(given_back[at]):.9g}",
            f"{float(bounds[1][at]):.9g} there",
        )
        misses.append((int(hit.sum()), miss))
    return max(misses, key=lambda m: m[0])[1]


def _within(got: Tensor, expected: Tensor, ulps: int) -> Tensor:
    if got.shape != expected.shape or got.dtype is not torch.float32:
        return torch.zeros((), dtype=torch.bool)
    near = (got - expected).abs() <= ulps * _ULP * expected.abs()
    return near | (got == expected) | (got.isnan() & expected.isnan())
