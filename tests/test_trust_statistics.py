"""What trust in pretrained checkpoints counts with: histograms, worst rows, channels, roundings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.theory import constant_bounds, correction, ratio_bounds
from mxnorm_pass.trust.changes import Changes, Rounding
from mxnorm_pass.trust.measuring import ratio_ends
from mxnorm_pass.trust.statistics import BINS, Channels, LogHistogram, Noise, WorstRows
from mxnorm_pass.trust.taps import mean_squares

LOW, HIGH = 0.4, 2.4
BIN = math.log(HIGH / LOW) / BINS + 1e-6
ratios = st.lists(st.floats(LOW, HIGH), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(st.lists(ratios, min_size=1, max_size=4), st.floats(0, 1))
def test_quantiles_are_those_of_all_values_to_a_bin(batches: list[list[float]], q: float) -> None:
    hist = LogHistogram(LOW, HIGH)
    for batch in batches:
        hist.add(torch.tensor(batch, dtype=torch.float64))
    values = sorted(v for batch in batches for v in batch)
    # The least value that at least a share q of the values do not exceed.
    expected = values[max(0, math.ceil(q * len(values) - 1e-9) - 1)]
    assert abs(math.log(hist.quantile(q) / expected)) <= 2 * BIN
    assert hist.count == len(values)
    assert hist.mean == pytest.approx(sum(values) / len(values), rel=1e-12)
    deviation = torch.tensor(values, dtype=torch.float64).std(correction=0)
    assert hist.sd == pytest.approx(float(deviation), abs=1e-7)
    assert (hist.least, hist.greatest) == (values[0], values[-1])


def test_share_between_two_numbers() -> None:
    hist = LogHistogram(LOW, HIGH)
    hist.add(torch.tensor([0.5, 0.95, 1.0, 1.05, 1.5]))
    assert hist.within(0.9, 1.1) == pytest.approx(0.6)
    assert math.isnan(LogHistogram(LOW, HIGH).quantile(0.5))


@pytest.mark.parametrize("p", [1, 2])
def test_no_row_leaves_the_ends_of_the_histogram(p: int) -> None:
    k, block = 256, 32
    ends = ratio_ends(f"p{p}", correction(p, block), k, block)
    assert ends == pytest.approx(ratio_bounds(p, block, k // block))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=24), st.integers(1, 6))
def test_worst_rows_are_those_of_a_full_sort(values: list[float], size: int) -> None:
    worst = WorstRows(size)
    tensor = torch.tensor(values[: len(values) // 6 * 6], dtype=torch.float64)
    for number, batch in enumerate(tensor.view(-1, 2, 3)):
        worst.add(batch, number)
    flat = tensor.view(-1, 2, 3)
    off = tensor.log().abs()
    assert [w.off for w in worst.sorted()] == pytest.approx(
        off.sort(descending=True).values[:size].tolist()
    )
    for w in worst.sorted():
        assert w.ratio == float(flat[(w.batch, *w.row)])


def test_rows_that_are_not_finite_are_no_worst_rows() -> None:
    worst = WorstRows(3)
    worst.add(torch.tensor([1.5, float("nan"), 0.5]), 0)
    assert [w.row for w in worst.sorted()] == [(2,), (0,)]


def test_outlier_channels_often_and_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1024, generator=generator)
    quiet = Channels(1024)
    quiet.add(x)
    assert quiet.outliers() == []
    x[:, 3] *= 6  # six times the RMS in every row
    x[7, 500] = 1000.0  # nearly all of one row
    channels = Channels(1024)
    for half in x.chunk(2):
        channels.add(half)
    found = {c.index: c for c in channels.outliers()}
    assert set(found) == {3, 500}
    assert found[500].peak > 0.99 and found[500].share < 0.005
    energy = x.double().square()
    share = (energy / energy.sum(-1, keepdim=True)).mean(0)
    assert found[3].share == pytest.approx(float(share[3]), rel=1e-5)


def test_noise_in_decibel() -> None:
    noise = Noise()
    noise.add(torch.tensor([3.0, 4.0, float("inf")]), torch.tensor([3.0, 4.5, 1.0]))
    assert noise.relative == pytest.approx(0.1)
    assert noise.sqnr == pytest.approx(20.0)
    assert math.isnan(Noise().sqnr)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_rounding_is_half_a_unit_at_the_most(values: list[float], dtype: torch.dtype) -> None:
    exact = torch.tensor(values, dtype=torch.float64) * 1.1
    rounding = Rounding.of(exact, exact.to(dtype))
    assert rounding.max_ulp <= 0.5


def test_rounding_of_a_known_number() -> None:
    # 1 + 3/1024 lies between 1 and 1 + 1/128, bfloat16's neighbours: 0.375 units from 1.
    exact = torch.tensor([1 + 3 / 1024], dtype=torch.float64)
    assert Rounding.of(exact, exact.to(torch.bfloat16)).max_ulp == 0.375
    assert Rounding.of(exact, exact.to(torch.float32)).sqnr == math.inf


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=16))
def test_undo_restores_every_bit(patterns: list[int]) -> None:
    # Any bfloat16: NaN payloads and the sign of zero come back too.
    bits = torch.tensor(patterns, dtype=torch.int16)
    tensor = torch.nn.Parameter(bits.clone().view(torch.bfloat16), requires_grad=False)
    with Changes(torch.nn.ParameterList([tensor])) as changes:
        changes.overwrite("w", tensor, lambda w: torch.full_like(w, 2, dtype=torch.float64))
        assert changes.active and bool((tensor == 2).all())
    assert not changes.active
    assert torch.equal(tensor.detach().view(torch.int16), bits)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("block", [16, 32, None])
def test_a_constant_that_no_row_has_is_refused(p: int, block: int | None, tmp_path: Path) -> None:
    """The ends are attained by a spike per block, by equal elements, and by one block alone."""
    k, size = 4096, block or 128
    spikes, flat, alone = torch.zeros(k), torch.ones(k), torch.zeros(k)
    spikes[::size] = 3.0
    alone[:size] = 3.0
    true, power = mean_squares(torch.stack([spikes, flat, alone]), size, p)
    low, high, widest = (true / power).sqrt().tolist()
    assert low == pytest.approx(size**-0.5) and high == pytest.approx(1)
    ends = constant_bounds(p, size, k // size)
    assert ends == pytest.approx((low, widest if p == 1 else high))
    path = tmp_path / "c.json"

    def read(c: float) -> float:
        blocks = {} if block is None else {"a.norm": block}
        path.write_text(json.dumps({"p": p, "sites": {"a.norm": c}, "blocks": blocks}))
        return MXNormConfig(p=p, correction=str(path)).calibration()["a.norm"]

    for c in (low, high, *([widest] if p == 1 else [])):
        assert read(c) == c
    says = rf"c\.json: c = .* at 'a\.norm' is right for no row: with p={p} and blocks of .*{size}"
    for c in (0.99 * low, 1.01 * high if p == 2 else 1.01 * (2**20 / size) ** 0.5, 1e-6, 1e6):
        with pytest.raises(ValueError, match=says):
            read(c)
