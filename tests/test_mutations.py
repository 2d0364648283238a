"""A hand-written model whose every constant can be wrong: declined, or carried, never mistaken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from models import rows
from numerics import assert_same_bytes
from torch import Tensor
from tracing import Rewritten, rewrite, trace

K, M, N = 128, 32, 32


@dataclass(frozen=True)
class Constants:
    """Norm: ``x * rsqrt(total(x^2) + eps) * (one + w)``. Cast: MXFP8 FLOOR, written on the bits."""

    eps: float = 1e-5
    total: str = "mean"
    power: float = 2.0
    root: float = -0.5
    one: float = 1.0
    block: int = 32
    exponent_bias: int = 127
    stored_bias: int = 127
    max_exponent: int = 8
    mask: int = 0xFF
    shift: int = 23
    largest: float = 448.0
    rounding: str = "even"
    absolute: str = "abs"


def norm(x: Tensor, w: Tensor, c: Constants) -> Tensor:
    h = x.float()
    squares = h.pow(c.power)
    total = squares.mean(-1, keepdim=True) if c.total == "mean" else squares.sum(-1, keepdim=True)
    return (h * torch.pow(total + c.eps, c.root) * (c.one + w.float())).to(x.dtype)


def dequantised(y: Tensor, c: Constants) -> Tensor:
    """Nothing of a library: exponent by shift and mask, E8M0 by adding a bias, and back."""
    blocks = y.float().view(*y.shape[:-1], -1, c.block)
    magnitude = blocks.abs() if c.absolute == "abs" else torch.relu(blocks).abs()
    absmax = magnitude.amax(-1, keepdim=True)
    exponent = ((absmax.view(torch.int32) >> c.shift) & c.mask) - c.exponent_bias - c.max_exponent
    byte = (exponent.clamp(-126, 127) + c.stored_bias).to(torch.uint8)
    scale = (byte.to(torch.int32) << 23).view(torch.float32)
    scaled = (blocks / scale).clamp(-c.largest, c.largest)
    if c.rounding == "truncate":
        bits = scaled.view(torch.int32)
        scaled = ((bits >> 20) << 20).view(torch.float32)
    elif c.rounding == "away":
        scaled = scaled * (1 + 2.0**-8)
    return (scaled.to(torch.float8_e4m3fn).float() * scale).view(y.shape).to(y.dtype)


def traced(c: Constants) -> tuple[Rewritten, list[Tensor]]:
    def fn(x: Tensor, w: Tensor, weight: Tensor) -> Tensor:
        return dequantised(norm(x, w, c), c) @ weight.t()

    # Small rows too: eps decides there.
    size = torch.exp2(torch.arange(M).float() - 20).unsqueeze(-1)
    x = (rows(M, K).float() * size).bfloat16()
    inputs = [x, 0.3 * rows(K, seed=1), rows(N, K, seed=2)]
    return rewrite(trace(fn, *inputs)), inputs


CARRIED: dict[str, dict[str, Any]] = {
    "as it should be": {},
    "eps": {"eps": 3e-4},
    "eps 0": {"eps": 0.0},
    "block 16": {"block": 16},
    "block 64": {"block": 64},
    "w instead of 1 + w": {"one": 0.0},
    "2 + w": {"one": 2.0},
    "1 + 1e-2 + w": {"one": 1.01},
    # 447 rounds to 448: it is the same function.
    "447": {"largest": 447.0},
}
DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "sum instead of mean": ({"total": "sum"}, "norm_form"),
    "cubes": ({"power": 3.0}, "norm_form"),
    "fourth root": ({"root": -0.25}, "norm_form"),
    "not the reciprocal": ({"root": 0.5}, "norm_form"),
    "416": ({"largest": 416.0}, "element_rounding"),
    "240": ({"largest": 240.0}, "element_rounding"),
    "exponent bias 126": ({"exponent_bias": 126}, "scale_rule"),
    "exponent bias 128": ({"exponent_bias": 128}, "scale_rule"),
    "stored bias 126": ({"stored_bias": 126}, "scale_rule"),
    "max exponent 7": ({"max_exponent": 7}, "scale_rule"),
    "max exponent 15": ({"max_exponent": 15}, "scale_rule"),
    "mask 0x7F": ({"mask": 0x7F}, "scale_rule"),
    "shift 22": ({"shift": 22}, "scale_rule"),
    "truncation": ({"rounding": "truncate"}, "element_rounding"),
    "a bias before rounding": ({"rounding": "away"}, "element_rounding"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_changed_constant_is_carried(name: str) -> None:
    got, inputs = traced(replace(Constants(), **CARRIED[name]))
    assert [s.status for s in got.sites] == ["rewritten"], got.report
    before, after = got.runs(*inputs)
    # pow(mean + eps, -0.5) and the op's rsqrt may differ by an ulp, and a bfloat16 after them.
    a, b = after.outputs[0].double(), before.outputs[0].double()
    wrong = (a - b).abs() > 2.0**-6 * b.abs().amax(-1, keepdim=True)
    assert not wrong.any(), f"{int(wrong.sum())} outputs"
    spec = got.sites[0].spec
    assert spec["block_size"] == CARRIED[name].get("block", 32)
    assert spec["eps"] == CARRIED[name].get("eps", 1e-5)


@pytest.mark.parametrize("name", DECLINED)
def test_other_function_is_declined(name: str) -> None:
    """Untouched, with the reason, and what was nearest."""
    changes, reason = DECLINED[name]
    got, inputs = traced(replace(Constants(), **changes))
    assert [(s.status, s.reason) for s in got.sites] == [("declined", reason)], got.report
    site = got.sites[0]
    assert site.node in {n.name for n in got.before.nodes}
    assert site.computed and site.expected, "the nearest miss is named"
    before, after = got.runs(*inputs)
    for a, b in zip(after.outputs, before.outputs, strict=True):
        assert_same_bytes(a, b)


def test_one_sided_absmax_is_no_cast_of_this_norm() -> None:
    """``max(relu(y))`` is no block absmax: nothing may be rewritten."""
    got, _ = traced(Constants(absolute="relu"))
    assert got.result.rewritten == 0


def test_nearest_miss_says_what_and_where() -> None:
    got, _ = traced(Constants(max_exponent=7))
    (site,) = got.sites
    assert "as ceil" in site.computed or "as floor" in site.computed
    assert "at absmax" in site.computed and site.expected.endswith("there")
    text = str(got.report)
    assert f"computed: {site.computed[:40]}" in text and "expected: " in text
    assert max(map(len, text.splitlines())) <= 100
