"""``benchmarks/train.py``: what a run leaves, and the statistics that are read off it."""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import train
from trainlib import corpus, logs, loop, norms, results
from trainlib.loop import Curve, Plan

from mxnorm_pass import reference, theory


def test_an_estimated_norm_is_the_reference() -> None:
    """Value and gradient of p = 2 with the Gaussian constant."""
    x = torch.randn(7, 96, dtype=torch.float64).float().requires_grad_()
    norm = nn.RMSNorm(96, eps=1e-5)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    got = norms.EstimatedNorm(norm, 2, "gaussian")(x)
    rho = reference.rstd(x.detach(), 1e-5, "p2")
    torch.testing.assert_close(got, x * rho * norm.weight, rtol=2e-6, atol=1e-6)
    dy = torch.randn_like(got)
    (dx,) = torch.autograd.grad(got, x, dy)
    u = dy * norm.weight
    expected = rho * u - x * rho**3 * (x * u).mean(-1, keepdim=True)
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-6)


def test_gradients_that_leave_the_length_of_a_row_alone() -> None:
    """Projected and own ones do; the straight-through one does not, by the docstring's formula."""
    x = torch.randn(5, 64, dtype=torch.float64).float().requires_grad_()
    x.data[0, 3] = 20.0
    norm = nn.RMSNorm(64, eps=0.0)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    dy = torch.randn(5, 64)
    kinds = ("straight", "projected", "own")
    ys = [norms.EstimatedNorm(norm, 2, "gaussian", kind)(x) for kind in kinds]
    for y in ys[1:]:
        torch.testing.assert_close(y, ys[0], rtol=2e-6, atol=1e-6)
    along = [(x * torch.autograd.grad(y, x, dy)[0]).sum(-1) for y in ys]
    rho = reference.rstd(x.detach(), 0.0, "p2")
    shrink = 1 - rho.square() * x.square().mean(-1, keepdim=True)
    expected = (rho * (x * dy * norm.weight).sum(-1, keepdim=True) * shrink).squeeze(-1)
    torch.testing.assert_close(along[0], expected, rtol=1e-4, atol=1e-4)
    assert float(expected.detach()[0].abs()) > 0.1
    assert float(torch.stack(along[1:]).detach().abs().max()) < 1e-4
    # The own one by the chain rule: d(estimate^2)/dx is 2 c^2/K m_k at the largest of each block.
    u, flat = dy * norm.weight, x.detach()
    largest = torch.zeros(5, 2, 32).scatter_(
        -1, flat.unflatten(-1, (2, 32)).abs().argmax(-1, keepdim=True), 1.0
    )
    at = (largest.flatten(1) * flat) * theory.correction(2, 32) ** 2 / 2
    (own,) = torch.autograd.grad(norms.EstimatedNorm(norm, 2, "gaussian", "own")(x), x, dy)
    chain = rho * u - rho**3 * (flat * u).sum(-1, keepdim=True) * at
    torch.testing.assert_close(own, chain, rtol=1e-4, atol=1e-5)


def test_constants_that_follow_the_rows() -> None:
    """Rows of equal elements have a ratio of 1, which a Gaussian constant does not."""
    x = torch.ones(4, 64)
    for constant in ("calibrated", "running", "learnt"):
        norm = norms.EstimatedNorm(nn.RMSNorm(64, eps=0.0), 2, constant)
        y = norm(x)
        if constant == "learnt":
            y.sum().backward()
            # A larger constant makes a smaller output: all 256 elements fall by their value.
            assert norm.log_c.grad is not None
            assert float(norm.log_c.grad) == pytest.approx(-float(y.detach().sum()), rel=1e-5)
            continue
        assert float(norm.log_c) == pytest.approx(0, abs=1e-6)
        norm(2 * x + torch.tensor([0.0, 1.0]).repeat(32))
        moved = abs(float(norm.log_c))
        assert moved == 0 if constant == "calibrated" else 0 < moved < 0.01


def curve(variant: str, seed: int, losses: list[float]) -> Curve:
    return Curve(variant, seed, 1e-3, losses, [1.0] * len(losses))


def test_paired_difference() -> None:
    """Against an interval computed by hand: differences .01, .02, .03; t(2) is 4.303."""
    curves = [curve("rmsnorm", s, [3.0 + s]) for s in range(3)]
    curves += [curve("p2", s, [3.0 + s + 0.01 * (s + 1)]) for s in range(3)]
    gap = results.paired(curves, "p2")
    assert gap.values == pytest.approx((0.01, 0.02, 0.03))
    assert gap.half_width == pytest.approx(4.3027 * 0.01 / math.sqrt(3), rel=1e-4)
    assert gap.verdict == "undecided"
    assert results.Difference((0.0101, 0.0102, 0.0103, 0.0102)).verdict == "differs"
    assert results.Difference((0.001, -0.001, 0.0, 0.0)).verdict == "no difference seen"
    # Two that agree by chance decide nothing.
    assert results.Difference((0.0101, 0.0102, 0.0103)).verdict == "undecided"
    assert results.Difference((0.5,)).verdict == "undecided"
    lost = results.Difference((0.01, math.nan))
    assert (str(lost), lost.verdict) == ("a run diverged", "undecided")


def test_a_variant_of_a_later_script_is_in_the_table() -> None:
    curves = [curve(variant, 0, [3.0] * 8) for variant in ("p9", "p2", "rmsnorm")]
    plan = {"size": "tiny", "steps": 8, "batch": 2, "seq": 32}
    lines = results.table({"plan": plan, "machine": {"device": "CPU"}, "corpus": {}}, curves)
    assert [row.split(" | ")[0] for row in lines[4:]] == ["| rmsnorm", "| p2", "| p9"]


def test_spikes_are_counted_once_each() -> None:
    losses = [3.0 + 0.01 * (i % 5) for i in range(200)]
    losses[120:123] = [9.0] * 3
    losses[170] = math.nan
    assert results.spikes(curve("p2", 0, losses)) == 2


def markov(path: Path) -> corpus.Corpus:
    """Ids that follow each other by chance, so that there is something to learn."""
    steps = np.random.default_rng(0).integers(0, 7, size=corpus.VALIDATION + 30_000)
    tokens = (np.cumsum(steps) % 300).astype(np.uint16)
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    made = corpus.Corpus(tokens, "test", len(tokens), 300, digest, len(tokens), 1)
    corpus.save(made, path)
    return made


def test_a_corpus_comes_back_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.npz"
    made = markov(path)
    assert np.array_equal(corpus.load(path).tokens, made.tokens)
    made.tokens[3] ^= 1
    corpus.save(made, path)
    with pytest.raises(ValueError, match="damaged"):
        corpus.load(path)


def test_a_corpus_of_files_that_are_short_enough(tmp_path: Path) -> None:
    """What it was made with is in it, as the page's commands need it."""
    archive = tmp_path / "linux-source.tar"
    with tarfile.open(archive, "w") as tar:
        for name, size in (("a.c", 90), ("b.h", 100), ("c.rst", 101), ("d.bin", 5)):
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes([ord("x")]) * size))
    out = tmp_path / "corpus.npz"
    argv = ["corpus", str(archive), "--bytes", "1e6", "--out", str(out)]
    assert train.main([*argv, "--longest", "100"]) == 0
    made = corpus.load(out)
    assert made.text_bytes == 192 and (made.limit, made.longest) == (1_000_000, 100)
    assert train.main(argv) == 0
    assert corpus.load(out).text_bytes == 294


def test_norms_of_two_rates_stay_apart(tmp_path: Path) -> None:
    curves = [curve("p2", 0, [3.0]), curve("p2", 0, [2.0])]
    curves[1].rate = 1e-2 / 3
    rest = {"channel": 2.0, "kurtosis": 3.0, "ratio_mean": 1.0, "ratio_sd": 0.03}
    for c, peak in zip(curves, (5.0, 7.0), strict=True):
        c.norms = [{"norm": "0.ffn_norm", "peak": peak, **rest}]
    made = corpus.Corpus(np.zeros(5, np.uint16), "test", 5, 300, "", 5, 5)
    plan = Plan("tiny", 1, 2, 32, 1e-3, 1, "cpu")
    results.save(tmp_path, plan, made, curves, train.machine("cpu"))
    _, found = logs.load(tmp_path)
    peaks = {c.rate: [n["peak"] for n in c.norms] for c in found}
    assert peaks == {1e-3: ["5"], 0.00333333: ["7"]}


@pytest.mark.slow
def test_paired_runs(tmp_path: Path, capsys, monkeypatch) -> None:
    """Exact is RMSNorm bit for bit, the estimate near it, and all learn from the same start.

    Every variant that the pass rewrites is asked for its sites: two, where three are wanted here.
    """
    monkeypatch.setattr(loop, "SITES_PER_BLOCK", 3)
    markov(tmp_path / "corpus.npz")
    out = tmp_path / "out"
    argv = ["run", "--size", "tiny", "--inner", "eager", "--device", "cpu"]
    argv += ["--corpus", str(tmp_path / "corpus.npz"), "--out", str(out), "--rates", "1e-2"]
    argv += ["--variants", "rmsnorm", "exact", "p2", "p2-pass-own", "--seeds", "0", "1"]
    assert train.main([*argv, "--tokens", "1024", "--batch", "2", "--seq", "32"]) == 1
    assert capsys.readouterr().err.endswith(
        "not 3 sites per block: ['exact', 'p2', 'p2-pass-own']\n"
    )
    about, curves = logs.load(out)
    assert about["corpus"]["tokens"] == corpus.VALIDATION + 30_000
    found = {(c.variant, c.seed): c for c in curves}
    assert {c.sites for c in curves if c.variant != "rmsnorm"} == {2}
    for seed in (0, 1):
        plain, exact, p2, own = (
            found[v, seed].loss for v in ("rmsnorm", "exact", "p2", "p2-pass-own")
        )
        assert exact == plain
        # Another gradient of the same function.
        assert own[0] == p2[0] and own[1:] != p2[1:] and own == pytest.approx(plain, rel=0.02)
        assert p2 != plain and p2 == pytest.approx(plain, rel=0.02)
        assert plain[-1] < plain[0] - 0.4
    assert found["rmsnorm", 0].loss[0] != found["rmsnorm", 1].loss[0]
    text = "\n".join(results.table(about, curves))
    assert "| exact | 0.01 | 2 |" in text and "+0.0000 (2 pairs), undecided" in text
    rows = json.loads((out / "runs.json").read_text())["runs"]
    assert len(rows) == 8 and len(found["p2", 0].norms) == 4
