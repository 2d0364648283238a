"""Rows that break fused norms: NaN, Inf, zeros, tiny, one massive channel; and odd gains."""

from __future__ import annotations

import pytest
import torch
from compiling import run
from models import inference_block, rows, training_block
from numerics import assert_same_bytes
from torch import Tensor

from mxnorm_pass import MXNormConfig

EXACT = MXNormConfig(rms="exact", strict=True)
BAD = {
    "nan": lambda r: r.index_fill(0, torch.tensor([3]), float("nan")),
    "inf": lambda r: r.index_fill(0, torch.tensor([3]), float("inf")),
    "zero": torch.zeros_like,
    "tiny": lambda r: r * 1e-35,
    "massive": lambda r: r.index_fill(0, torch.tensor([5]), 1e4),
    "zero_block": lambda r: torch.cat([torch.zeros(32), r[32:]]),
    "subnormal": lambda r: torch.full_like(r, 1e-39),
}


def with_row(x: Tensor, kind: str) -> Tensor:
    changed = x.clone()
    changed[7] = BAD[kind](x[7].float()).to(x.dtype)
    return changed


@pytest.fixture(scope="module")
def inference() -> torch.nn.Module:
    return inference_block("torch", widths=(64,))


@pytest.mark.parametrize("kind", BAD)
def test_inference(inference: torch.nn.Module, kind: str) -> None:
    """As the exact norm: NaN where it has NaN; all other rows bit for bit what they were."""
    x = rows(64, 128)
    bad = with_row(x, kind)
    plain = run(inference, bad, training=False, off=True).outputs[0]
    exact = run(inference, bad, training=False, config=EXACT).outputs[0]
    assert_same_bytes(exact, plain)
    clean = run(inference, x, training=False).outputs[0]
    estimate = run(inference, bad, training=False).outputs[0]
    others = torch.arange(64) != 7
    assert_same_bytes(estimate[others], clean[others])
    assert (
        bool(estimate[7].isnan().all()) == bool(plain[7].isnan().all()) == (kind in ("nan", "inf"))
    )
    if kind in ("zero", "tiny", "subnormal"):
        # eps dominates: the row goes to zero, in value and in the estimate.
        assert estimate[7].abs().max() < 1e-30


def test_training_with_zero_and_tiny_rows_is_finite() -> None:
    block, x = training_block("llama", widths=(64,)), rows(64, 128)
    for kind in ("zero", "tiny", "zero_block", "massive"):
        result = run(block, with_row(x, kind))
        assert result.report.rewritten == 1
        for name, value in {"out": result.outputs[0], **result.gradients}.items():
            assert bool(value.isfinite().all()), (kind, name)


@pytest.mark.parametrize("gain", [0.0, -1.5, 1e30])
def test_gains_that_nobody_may_divide_by(gain: float) -> None:
    """A zero, a negative and a huge gain, folded and in the kernel: finite, and right in sign."""
    block, x = training_block("torch", widths=(64,)), rows(64, 128)
    with torch.no_grad():
        block.norm.weight.fill_(1.0)
        block.norm.weight[5] = gain
    for at in ("fold", "kernel"):
        result = run(block, x, config=MXNormConfig(gain=at, strict=True))
        assert result.report.sites[0].spec["gain_at"] == at
        assert bool(result.outputs[0].isfinite().all())
        assert bool(result.gradients["norm.weight"].isfinite().all())


@pytest.mark.parametrize("w", [0.00390625, 15.8125])
def test_gemma_gain_is_formed_in_float32(w: float) -> None:
    """1 + 2^-8 is no bfloat16: rounded there, the gain would be lost."""
    block, x = inference_block("gemma", widths=(64,)), rows(64, 128)
    with torch.no_grad():
        block.norm.weight.fill_(w)
    plain = run(block, x, training=False, off=True).outputs[0]
    exact = run(block, x, training=False, config=EXACT)
    assert exact.report.sites[0].spec["gain"] == "1+w"
    assert_same_bytes(exact.outputs[0], plain)


def test_tokens_that_torchao_refuses_are_refused_as_before() -> None:
    """Training needs a multiple of 32 tokens: torchao says so, with and without the pass."""
    block, x = training_block("llama", widths=(64,)), rows(1, 33, 128)
    messages = []
    for off in (True, False):
        with pytest.raises(Exception, match="divisible by block_size 32") as error:
            run(block, x, off=off)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]
