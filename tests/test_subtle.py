"""Functions that are nearly those of a known norm or cast: right numbers or a reason, always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import llama_form, rows
from numerics import assert_same_bytes
from test_casts import check_exact, fp4_codes, low_first, torchao_dequantised, traced
from torch import Tensor
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from tracing import Rewritten, rewrite, trace

from mxnorm_pass import formats

K = 128


def unchanged(got: Rewritten, inputs: list[Tensor], reasons: set[str | None]) -> None:
    """Declined for one of the reasons, and the graph computes what it did."""
    assert {s.reason for s in got.sites} <= reasons and got.sites, got.report
    before, after = got.runs(*inputs)
    for a, b in zip(after.outputs, before.outputs, strict=True):
        assert_same_bytes(a, b)


def mxfp8(y: Tensor, outer: Tensor) -> Tensor:
    return torchao_dequantised(y, "e4m3", "RCEIL")


# --- between norm and cast ------------------------------------------------------------------------

OVERWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    # The probes' first gains are zero: an index of one constant row must not be run on them.
    "row 0": lambda y: y.index_fill(0, torch.tensor([0]), 0.0),
    "row 5": lambda y: y.index_fill(0, torch.tensor([5]), 0.0),
    "two rows": lambda y: y.index_fill(0, torch.tensor([0, 3]), 0.0),
    "column 0": lambda y: y.index_fill(1, torch.tensor([0]), 0.0),
    "embedding": lambda y: torch.nn.functional.embedding(torch.arange(64).flip(0), y),
}


@pytest.mark.parametrize("name", OVERWRITTEN)
@pytest.mark.parametrize("form", ["llama", "bare"])
def test_overwritten_rows(name: str, form: str) -> None:
    from models import FORMS

    got, inputs = traced(
        form, mxfp8, norm=lambda x, g, eps: OVERWRITTEN[name](FORMS[form](x, g, eps))
    )
    unchanged(got, inputs, {"reordered", "norm_form"})


def test_overwritten_root() -> None:
    def norm(x: Tensor, g: Tensor, eps: float) -> Tensor:
        h = x.float()
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps).index_fill(
            0, torch.tensor([0]), 1.0
        )
        return g * (h * root).to(x.dtype)

    got, inputs = traced("llama", mxfp8, norm=norm)
    unchanged(got, inputs, {"reordered", "norm_form"})


def test_masked_fill_is_seen() -> None:
    """A mask of the values' own shape is a function of each value."""
    norm = lambda x, g, eps: llama_form(x, g, eps).masked_fill(x > 1, 0.0)  # noqa: E731
    got, inputs = traced("llama", mxfp8, norm=norm)
    unchanged(got, inputs, {"norm_form", "extra_operand"})


def test_gain_from_the_norm_s_own_output() -> None:
    """A smoothing scale per column, read off the output: the op cannot come before its operand."""

    def norm(x: Tensor, g: Any, eps: float) -> Tensor:
        h = x.float()
        y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return (y * (1 / y.abs().amax(0))).to(x.dtype)

    got, inputs = traced("bare", mxfp8, norm=norm)
    unchanged(got, inputs, {"extra_operand"})


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_others_may_add_to_the_mean(eps: float) -> None:
    """An auxiliary loss, a second norm with another eps: the addition that y is made from."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = x.float()
        mean = h.pow(2).mean(-1, keepdim=True)
        loss = (mean + 1.0).log().sum()
        other = h * torch.rsqrt(mean + 0.5)
        y = g * (h * torch.rsqrt(mean + eps)).to(x.dtype)
        return mxfp8(y, loss) @ w.t(), loss, other

    inputs = [1e-2 * rows(64, K), 1 + 0.3 * rows(K, seed=1), rows(32, K, seed=2)]
    got = rewrite(trace(fn, *inputs))
    assert [(s.status, s.spec["eps"]) for s in got.sites] == [("rewritten", eps)]
    before, after = got.runs(*inputs)
    for a, b in zip(after.outputs, before.outputs, strict=True):
        assert_same_bytes(a, b)


# --- absmax and scale -----------------------------------------------------------------------------

MAXIMA: dict[str, Callable[[Tensor], Tensor]] = {
    "kept off zero": lambda b: b.abs().clamp(min=1e-12).amax(-1, keepdim=True),
    "by two reductions": lambda b: torch.maximum(b.amax(-1), -b.amin(-1)).unsqueeze(-1),
    "in two steps": lambda b: b.abs().view(*b.shape[:-1], 4, 8).amax(-1).amax(-1, keepdim=True),
    "over rows too": lambda b: b.abs().amax((0, -1), keepdim=True).expand(len(b), -1, 1),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_other_maxima_are_said(name: str) -> None:
    """No anchor: the norm is named all the same."""

    def cast(y: Tensor, outer: Tensor) -> Tensor:
        blocks = y.float().view(len(y), -1, 32)
        byte = formats.scale_byte(MAXIMA[name](blocks), formats.ELEMENTS["e4m3"], "floor")
        power = (byte.clamp(min=1).to(torch.int32) << 23).view(torch.float32)
        codes = (blocks / power).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes.float() * power).view(y.shape).to(y.dtype)

    got, inputs = traced("llama", cast)
    unchanged(got, inputs, {"cast_form"})


GUARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "at most 2": lambda s, outer: s * outer.clamp(max=2.0),
    "at least 1e-5": lambda s, outer: s * outer.clamp(min=1e-5),
    "product at least 1e-7": lambda s, outer: (s * outer).clamp(min=1e-7),
    "a little added": lambda s, outer: s * outer + 1e-12,
}


@pytest.mark.parametrize("outer", [50.0, 1e-8])
@pytest.mark.parametrize("name", GUARDS)
def test_guards_of_the_per_tensor_scale(name: str, outer: float) -> None:
    """What keeps a division off zero is part of the function, however far out it bites."""

    def cast(y: Tensor, ts: Tensor) -> Tensor:
        blocks = y.float().view(len(y), -1, 16)
        absmax = blocks.abs().amax(-1, keepdim=True)
        scale = formats.block_scale(absmax, formats.ELEMENTS["e2m1"], "e4m3", ts)
        scaled = blocks / GUARDS[name](scale.float(), ts)
        codes = formats.encode(scaled, formats.ELEMENTS["e2m1"], "clamp").view(y.shape)
        values = f4_unpacked_to_f32(unpack_uint4(low_first(codes))).view(blocks.shape)
        return (values * (scale.float() * ts)).view(y.shape).to(y.dtype)

    got, inputs = traced("llama", cast)
    inputs[3] = torch.tensor(outer)
    before, after = got.runs(*inputs)
    assert_same_bytes(after.outputs[0], before.outputs[0])
    assert got.result.rewritten == 0 and got.result.declined == 1


def test_one_exponent_overwritten() -> None:
    def cast(y: Tensor, outer: Tensor) -> Tensor:
        codes, byte = fp4_codes(y)
        byte = byte.index_fill(0, torch.tensor([0]), 100)
        values = f4_unpacked_to_f32(unpack_uint4(low_first(codes))).view(len(y), -1, 32)
        power = (byte.to(torch.int32) << 23).view(torch.float32)
        return (values * power).view(y.shape).to(y.dtype)

    got, inputs = traced("llama", cast)
    check_exact(got, inputs, bitwise=True)
