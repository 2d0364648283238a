"""``tensor_scale="bound"``: NVFP4 without a pass for the maximum, and no scale out of range."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from compiling import calls
from hypothesis import given, settings
from hypothesis import strategies as st
from models import rows
from numerics import sqnr
from test_casts import torchao_dequantised, traced
from test_op import NVFP4, ROUNDINGS
from torch import Tensor
from tracing import Rewritten, assert_fake_values, rewrite, run, trace

from mxnorm_pass import MXNormConfig, reference, theory
from mxnorm_pass.formats import ELEMENTS
from mxnorm_pass.ops import ABSMAX_OP, OP, OPS
from mxnorm_pass.ops.rmsnorm_mxquant import RMS_KINDS, parse_rounding

aten = torch.ops.aten
BLOCK = 16
DYNAMIC, BOUND = (
    MXNormConfig(strict=True, gain="kernel", tensor_scale=scale) for scale in ("dynamic", "bound")
)


def adversarial(k: int) -> Tensor:
    """Rows that each reach, or try to pass, one bound: lone spikes, flat rows, spikes in blocks."""
    x, generator = torch.zeros(8, k), torch.Generator().manual_seed(0)
    x[0, 5] = 1e4
    x[1] = 3.0
    x[2, ::BLOCK] = 7.0
    x[3] = torch.randn(k, generator=generator)
    x[4] = torch.randn(k, generator=generator) / torch.rand(k, generator=generator)
    x[5, -1], x[5, 0] = -3e30, 1e30
    x[6, 0] = 1.0039  # just above one: rounds up in bfloat16
    x[7] = 1e-3
    x[7, 9] = 1.99
    return x


def constant(rms: str, block: int = BLOCK) -> float:
    return 1.0 if rms == "exact" else theory.correction(int(rms[1]), block)


def roundings(rounding: str, gain: bool) -> int:
    """How often a value is rounded to bfloat16; a second time without a gain changes nothing."""
    count = rounding.count("bf16")
    return count if gain else min(count, 1)


@pytest.mark.parametrize("k", [16, 768, 4096])
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_no_element_passes_the_bound(rms: str, k: int) -> None:
    """By the op that measures the maximum; the lone spike comes within the margin of roundings."""
    x = adversarial(k)
    generator = torch.Generator().manual_seed(1)
    gains = (None, torch.randn(k, generator=generator), torch.linspace(-9, 4, k))
    for dtype, gain, rounding in itertools.product(
        (torch.float32, torch.bfloat16), gains, ROUNDINGS
    ):
        bf16 = roundings(rounding, gain is not None)
        bound = theory.computed_bound(rms, constant(rms), k, BLOCK, bf16=bf16)
        largest = 1.0 if gain is None else float(gain.abs().max())
        for eps in (0.0, 1e-6):
            args = (x.to(dtype), gain, None, eps, rms, constant(rms), rounding, BLOCK)
            peak = float(ABSMAX_OP(*args)) / largest
            assert 0 < peak <= bound, (rms, k, rounding, dtype)
        spike = torch.zeros(1, k)
        spike[0, 0 if gain is None else int(gain.abs().argmax())] = 1e4
        peak = float(ABSMAX_OP(spike.to(dtype), *args[1:])) / largest
        assert bound * (1 - 2.0**-15) * (1 - 2.0**-7) ** bf16 <= peak <= bound


@settings(max_examples=100, deadline=None)
@given(
    rms=st.sampled_from(RMS_KINDS),
    rounding=st.sampled_from(ROUNDINGS),
    c=st.floats(0.05, 3.0),
    blocks=st.integers(1, 40),
    spread=st.floats(0.0, 8.0),
    seed=st.integers(0, 2**31),
    gain=st.booleans(),
)
def test_bound_of_any_rows_and_constant(
    rms: str, rounding: str, c: float, blocks: int, spread: float, seed: int, gain: bool
) -> None:
    """Log-normal rows from flat to a lone spike, a calibrated constant, a gain or none."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(n, blocks * BLOCK, generator=generator) for n in (4, 1))
    x = x.sign() * torch.exp(spread * x)
    g = torch.exp(2 * g[0]) if gain else None
    peak = float(ABSMAX_OP(x, g, None, 1e-30, rms, c, rounding, BLOCK))
    bound = theory.computed_bound(rms, c, blocks * BLOCK, BLOCK, bf16=roundings(rounding, gain)) * (
        1.0 if g is None else float(g.max())
    )
    assert peak <= bound


def test_figures() -> None:
    """The constants of the method at K = 4096, and what is refused."""
    margin = 1 + 2.0**-16
    assert theory.computed_bound("exact", 7.0, 4096, 16) == pytest.approx(64 * margin, rel=1e-15)
    for p in (1, 2):
        got = theory.computed_bound(f"p{p}", theory.correction(p, 16), 4096, 16, bf16=1)
        expected = theory.output_bound(p, 16, 256) * margin * (1 + 2.0**-8)
        assert got == pytest.approx(expected, rel=1e-15)
    for bad in ({"rms": "p3"}, {"k": 0}, {"block_size": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            theory.computed_bound(**{"rms": "p2", "c": 0.4, "k": 64, "block_size": 16} | bad)


# --- in a graph -----------------------------------------------------------------------------------


def nvfp4(y: Tensor, outer: Tensor) -> Tensor:
    return torchao_dequantised(y, "nvfp4", "dynamic")


def scale_of(got: Rewritten, inputs: list[Tensor]) -> tuple[Any, float]:
    """The op, and the number that its per-tensor scale is in the rewritten graph."""
    (op,) = (n for target in OPS for n in calls(got.after, target))
    graph = got.after
    (output,) = graph.find_nodes(op="output")
    before = output.args
    output.args = ([op.args[3]],)
    try:
        (scale,) = run(graph, got.owner, *inputs).outputs
    finally:
        output.args = before
    return op, float(scale)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("form", ["llama", "torch", "gemma", "bare"])
def test_no_pass_for_the_maximum(form: str, x_dtype: torch.dtype) -> None:
    """A constant, times max|g| where there is a gain; the graph's arithmetic on it stays."""
    for config, launches in ((DYNAMIC, 1), (BOUND, 0)):
        got, inputs = traced(form, nvfp4, x_dtype, x_dtype, config=config)
        (site,) = got.sites
        assert (site.status, site.spec["tensor_scale"]) == ("rewritten", config.tensor_scale)
        assert len(calls(got.after, ABSMAX_OP)) == launches
        assert_fake_values(got.after)
        assert not [
            n for n in calls(got.after, aten.max.default) if n.args[0].meta["val"].shape[0] == 64
        ]
    x, g = inputs[:2]
    op, scale = scale_of(got, inputs)
    gain = None if op.args[1] is None else g.float() + 1 if form == "gemma" else g
    _, rounding = op.args[6:8]
    k = x.shape[-1]
    bf16 = roundings(rounding, gain is not None)
    bound = theory.computed_bound("p2", theory.correction(2, BLOCK), k, BLOCK, bf16=bf16)
    bound *= 1.0 if gain is None else float(gain.abs().max())
    # Rounded to the maximum's dtype, and through the graph's own division by 448 * 6.
    assert scale * 448 * 6 == pytest.approx(bound, rel=2.0**-8 if "->bf16" in rounding else 1e-6)


@pytest.mark.parametrize("rms", ["p1", "p2", "exact"])
@pytest.mark.parametrize("what", ["gaussian", "adversarial"])
def test_no_block_scale_saturates(rms: str, what: str) -> None:
    """With the scale that the graph computes: E4M3 holds every block's, and the error is as it is
    with the maximum measured."""
    k = 1024
    x = (adversarial(k)[[0, 1, 2, 3, 6, 7]] if what == "adversarial" else rows(64, k)).bfloat16()
    inputs = [x, (1 + 0.3 * rows(k, seed=1).float()).bfloat16(), rows(32, k, seed=2)]

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        h = x.float()
        y = g * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return nvfp4(y, g) @ nvfp4(w, g).t()

    noise = {}
    for scale in ("dynamic", "bound"):
        config = MXNormConfig(
            rms="exact" if rms == "exact" else "mx",
            p=1 if rms == "p1" else 2,
            strict=True,
            tensor_scale=scale,  # type: ignore[arg-type]
        )
        got = rewrite(trace(fn, *inputs), config)
        op, outer = scale_of(got, inputs)
        eps, kind, c, rounding, cast = op.args[4:]
        assert kind == rms and cast == NVFP4
        qdata, scales, rstd = OP(
            x, inputs[1], None, torch.tensor(outer), eps, rms, c, rounding, cast
        )
        y = reference.normalise(x, rstd, inputs[1], *parse_rounding(rounding))
        wanted = y.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1) / 6 / outer
        assert float(wanted.max()) <= 448 * (1 + 2.0**-20)
        back = reference.dequantize(qdata, scales, torch.float32, ELEMENTS["e2m1"], outer)
        noise[scale] = sqnr(y, back)
    # The spare exponents of E4M3 hold what the bound is too large by.
    allowed = 0.05 if what == "gaussian" else 2.0 if rms == "p1" else 0.3
    assert math.isfinite(noise["bound"]) and noise["bound"] > noise["dynamic"] - allowed, noise


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    """The measured maximum is NaN with one row, and so is every scale; the bound is not."""
    for config in (DYNAMIC, BOUND):
        got, inputs = traced("llama", nvfp4, config=config)
        inputs[0][3, 7] = float("nan")
        out = got.runs(*inputs)[1].outputs[0]
        wrong = out.isnan().all(-1)
        assert int(wrong.sum()) == (64 if config is DYNAMIC else 1) and bool(wrong[3])
        assert bool(out[~wrong].isfinite().all())


def test_other_formats_ignore_the_option() -> None:
    got, _ = traced("llama", lambda y, _: torchao_dequantised(y, "e4m3", "RCEIL"), config=BOUND)
    static, _ = traced(
        "llama", lambda y, outer: torchao_dequantised(y, "nvfp4", "static", outer), config=BOUND
    )
    assert [g.sites[0].spec["tensor_scale"] for g in (got, static)] == ["none", "static"]
    for g in (got, static):
        known = {n.name for n in g.before.nodes}
        assert all(n.name in known for n in calls(g.after, aten.full.default))
