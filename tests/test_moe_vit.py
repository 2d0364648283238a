"""The mixture of experts and the vision transformer of examples/, and their runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import moe
import train
import vit
from test_train_script import markov
from trainlib import digits, logs
from trainlib.loop import Curve, Plan

SMALL = moe.Sizes(dim=64, ffn=32, heads=2, kv_heads=1, layers=1, vocab=64, experts=4, slack=0.6)


def by_token(mixture: moe.MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """What a mixture makes of ``[T, K]``, token by token; its balance; choices with a place."""
    s = mixture.sizes
    odds = (x @ mixture.router.weight.t()).softmax(-1)
    wants: list[list[tuple[float, int]]] = [[] for _ in range(s.experts)]
    weights = {}
    for t in range(len(x)):
        chosen = odds[t].argsort(descending=True)[: s.top].tolist()
        for e in chosen:
            weights[t, e] = odds[t, e] / odds[t, chosen].sum()
            wants[e].append((weights[t, e].item(), t))
    y, kept = [torch.zeros(x.shape[1]) for _ in x], 0
    for e, tokens in enumerate(wants):
        for _, t in sorted(tokens, reverse=True)[: s.capacity(len(x))]:
            y[t] = y[t] + weights[t, e] * mixture.experts[e](x[t])
            kept += 1
    shares = torch.tensor([len(tokens) / len(x) / s.top for tokens in wants])
    return torch.stack(y), s.experts * (shares * odds.mean(0)).sum(), kept


def test_dispatch_is_that_of_a_loop_over_tokens() -> None:
    """Values and gradients in float32, some choices over capacity, the balance among the losses."""
    torch.manual_seed(0)
    sizes = moe.Sizes(**{**vars(SMALL), "grouped": False, "balance": 0.5})
    mixture = moe.MixtureOfExperts(sizes)
    x = torch.randn(2, 64, 64, requires_grad=True)
    y = mixture(x)
    expected, unevenness, kept = by_token(mixture, x.flatten(0, 1))
    assert sizes.capacity(128) == 64 and moe.Sizes().capacity(32 * 1024) == 10240
    assert 160 < kept < 256, "of 256 choices some are dropped"
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(y)
    leaves = [x, *mixture.parameters()]
    got = torch.autograd.grad(y, leaves, dy)
    loss = (expected * dy.flatten(0, 1)).sum() + 0.5 * unevenness
    for g, e in zip(got, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_grouped_experts_are_linears_of_their_own() -> None:
    """Bit for bit, forward and gradients: two ways to the same products of the same codes."""
    grouped = moe.build(SMALL).bfloat16().layers["0"].feed_forward.experts
    sizes = moe.Sizes(**{**vars(SMALL), "grouped": False})
    separate = moe.build(sizes).bfloat16().layers["0"].feed_forward.experts
    with torch.no_grad():
        for i, expert in enumerate(separate):
            for name in ("w1", "w2", "w3"):
                getattr(expert, name).weight.copy_(getattr(grouped, name)[i])
    rows = torch.randn(4, 64, 64).bfloat16().requires_grad_()
    dy = torch.randn(4, 64, 64).bfloat16()
    one, other = grouped(rows), separate(rows)
    assert torch.equal(one, other)
    one_by_name = torch.autograd.grad(one, [rows, grouped.w1, grouped.w2, grouped.w3], dy)
    for i, expert in enumerate(separate):
        ours = [expert.w1.weight, expert.w2.weight, expert.w3.weight]
        for mine, all_of_them in zip(
            torch.autograd.grad(other, ours, dy, retain_graph=True), one_by_name[1:], strict=True
        ):
            assert torch.equal(mine, all_of_them[i])
    assert torch.equal(torch.autograd.grad(other, rows, dy)[0], one_by_name[0])


def check_runs(out: Path, norms: int) -> dict[str, Curve]:
    """Exact is RMSNorm bit for bit, the estimate near it and not it; two sites of a block."""
    _, curves = logs.load(out)
    found = {c.variant: c for c in curves}
    assert {v: c.sites for v, c in found.items()} == {"rmsnorm": 0, "exact": 2, "p2": 2}
    plain, exact, p2 = (found[v] for v in ("rmsnorm", "exact", "p2"))
    assert (exact.loss, exact.grad_norm) == (plain.loss, plain.grad_norm)
    assert exact.validation == plain.validation
    assert p2.loss != plain.loss and p2.loss == pytest.approx(plain.loss, rel=0.02)
    assert plain.loss[-1] < plain.loss[0] - 0.05
    assert len(p2.norms) == norms
    return found


RUN = ["--inner", "eager", "--device", "cpu", "--variants", "rmsnorm", "exact", "p2"]


@pytest.mark.long
def test_paired_runs_of_a_mixture_of_experts(tmp_path: Path) -> None:
    markov(tmp_path / "corpus.npz")
    out = tmp_path / "moe"
    argv = ["run", "--size", "moe-tiny", "--corpus", str(tmp_path / "corpus.npz"), *RUN]
    argv += ["--out", str(out), "--tokens", "512", "--batch", "2", "--seq", "32", "--rates", "1e-2"]
    assert train.main(argv) == 0
    check_runs(out, norms=4)


@pytest.mark.slow
def test_paired_runs_of_a_vision_transformer(tmp_path: Path) -> None:
    out = tmp_path / "vit"
    argv = ["vit", "--size", "vit-tiny", "--epochs", "1", "--out", str(out)]
    assert train.main([*argv, *RUN]) == 0
    found = check_runs(out, norms=2)
    assert found["exact"].accuracy == found["rmsnorm"].accuracy
    about = json.loads((out / "runs.json").read_text())
    right = [r["accuracy"] * digits.HELD_OUT for r in about["runs"]]
    assert all(r == int(r) for r in right) and min(right) > 0.15 * digits.HELD_OUT
    assert about["parameters"] == sum(
        p.numel() for p in vit.build(digits.SIZES["vit-tiny"]).parameters()
    )
    assert about["command"].startswith("python benchmarks/train.py vit --size vit-tiny --variants")


def test_digits_are_split_once_and_shuffled_by_seed() -> None:
    plan = Plan("vit-tiny", 9, 128, 16, 1e-3, 1, "cpu")
    images = digits.Digits(plan)
    held_out = torch.cat([x for x, _ in images.validation()])
    stream = images.training(3)
    epoch = [next(stream) for _ in range(digits.epoch(128))]
    seen = torch.cat([x for x, _ in epoch])
    assert (len(held_out), len(seen)) == (640, 1152)
    assert held_out.min() == -1 and held_out.max() == 1
    rows = {tuple(x.flatten().tolist()) for x in held_out}
    assert sum(tuple(x.flatten().tolist()) in rows for x in seen) == 0
    again, other = next(digits.Digits(plan).training(3)), next(images.training(4))
    assert torch.equal(again[0], epoch[0][0]) and torch.equal(again[1], epoch[0][1])
    assert not torch.equal(other[0], again[0])
    with pytest.raises(ValueError, match="--batch 100: expected one of 2, 4, 8, 10,"):
        digits.Digits(Plan("vit-tiny", 1, 100, 16, 1e-3, 1, "cpu"))


def test_patches_are_cut_in_the_order_of_reading() -> None:
    model = vit.build(vit.Sizes(dim=32, heads=1, layers=1))
    x = torch.arange(64.0).view(1, 8, 8)
    token = model.embed(x)[0, 5] - model.positions[5]
    expected = model.patches.weight @ torch.tensor([18.0, 19.0, 26.0, 27.0])
    torch.testing.assert_close(token, expected)
