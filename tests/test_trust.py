"""Fidelity and calibration: what the estimate does on a model's own rows, against hooks and the
oracle, which see the same rows by another way.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from models import HandLinear, hand_model, inference_block, rows
from torch import Tensor, nn

import mxnorm_pass
from mxnorm_pass import (
    Calibration,
    Fidelity,
    MXNormConfig,
    calibrate,
    explain,
    fidelity,
    fold_gains,
    reference,
)
from mxnorm_pass.formats import Cast
from mxnorm_pass.theory import correction

K = 512
CHANNEL = 77
PLANTED = "1.norm2"


def batches(n: int = 3) -> list[Tensor]:
    """Sequences of 16 rows; the first row is the same in all, as of a token that begins a text."""
    found = [rows(4, 16, K, seed=s, dtype=torch.float32) for s in range(n)]
    for batch in found:
        batch[:, 0] = rows(K, seed=99, dtype=torch.float32)
    return found


@functools.cache
def planted() -> nn.Module:
    """Four norms; the first row of a text gets a massive channel in front of the last one alone."""
    model = hand_model(K)
    with torch.no_grad():
        model[1].mix.weight[CHANNEL] = 0.15 * rows(K, seed=99, dtype=torch.float32)
    return model


@functools.cache
def found() -> Fidelity:
    return fidelity(planted(), batches(), bound=0.2, loss_fn=lambda out, _: out.square().mean())


@functools.cache
def hooked() -> dict[str, list[Tensor]]:
    """The rows of each norm per batch, seen by hooks on the model as it is."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0])
        )
        for name, module in planted().named_modules()
        if isinstance(module, nn.RMSNorm)
    ]
    with torch.no_grad():
        for batch in batches():
            planted()(batch)
    for handle in handles:
        handle.remove()
    return seen


def true_ratio(x: Tensor, eps: float = 1e-5) -> Tensor:
    square = x.double().square().mean(-1)
    estimate = reference.rms_estimate(x, 32, 2).double().squeeze(-1)
    return ((estimate.square() + eps) / (square + eps)).sqrt()


def test_a_planted_outlier_is_found_at_its_norm_and_its_channel() -> None:
    assert [site.norm for site in found().sites] == ["0.norm1", "0.norm2", "1.norm1", PLANTED]
    (site,) = found().flagged
    assert site.norm == PLANTED and site.advice == "exact"
    assert [c.index for c in site.channels] == [CHANNEL]
    assert site.channels[0].peak > 0.7
    # In blocks of 32 a massive channel pulls the estimate up by 2.37 at the most.
    assert all(1.7 < w.ratio < 2.37 and w.row[1] == 0 for w in site.worst)
    assert site.median == pytest.approx(1, abs=0.05)
    assert all(not other.channels for other in found().sites if other is not site)
    shown = str(found())
    assert f"{CHANNEL}: " in shown and f"{PLANTED}#0" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_numbers_are_those_that_hooks_and_the_oracle_see() -> None:
    for site in found().sites:
        ratio = torch.stack([true_ratio(x) for x in hooked()[site.norm]])
        flat = ratio.flatten()
        assert site.rows == flat.numel() == 3 * 4 * 16
        lower = flat.sort().values[(flat.numel() - 1) // 2]
        assert site.median == pytest.approx(float(lower), rel=1e-3)
        assert site.sd == pytest.approx(float(flat.std(correction=0)), rel=1e-3)
        assert site.within == pytest.approx(float(((flat - 1).abs() <= 0.05).double().mean()))
        assert site.beyond == pytest.approx(float(((flat - 1).abs() > 0.2).double().mean()))
        worst = site.worst[0]
        assert worst.ratio == pytest.approx(float(ratio[(worst.batch, *worst.row)]), rel=1e-5)
        assert worst.off == pytest.approx(float(flat.log().abs().max()), rel=1e-4)


def test_errors_of_outputs_are_those_of_the_oracle() -> None:
    """Every row is sampled (64 of at most 128 a batch), so the sums are the same ones."""
    spec = {s.norm: s.spec for s in found().report.sites}[PLANTED]
    cast = Cast(spec["element"], 32, spec["scale_rule"], "divide", spec["saturate"])
    norm, linear = planted()[1].norm2, planted()[1].up
    x = torch.cat([x.flatten(0, 1) for x in hooked()[PLANTED]])
    weight = linear.weight.detach().double()
    outputs = {}
    for rms in ("p2", "exact"):
        y = reference.normalise(x, reference.rstd(x, 1e-5, rms), norm.weight.detach())
        outputs[rms] = reference.fake_quantize(y, cast).double() @ weight.T
        if rms == "exact":
            outputs["uncast"] = y.double() @ weight.T
    site = found().flagged[0]
    assert site.measured_at == "outputs" and set(site.by_consumer) == {"1.up"}
    for got, name, against in (
        (site.estimate_error, "exact", "p2"),
        (site.cast_error, "uncast", "exact"),
    ):
        noise = (outputs[name] - outputs[against]).norm() / outputs[name].norm()
        assert got == pytest.approx(float(noise), rel=2e-3), name
    assert site.estimate_error > 3 * site.cast_error
    assert site.estimate_sqnr == pytest.approx(-20 * math.log10(site.estimate_error))


def test_the_loss_with_the_estimate_is_that_of_the_backend() -> None:
    compiled = torch.compile(planted(), backend=mxnorm_pass.backend(inner="eager"))
    with torch.no_grad():
        losses = [float(compiled(b).square().mean()) for b in batches()]
        plain = [float(planted()(b).square().mean()) for b in batches()]
    assert found().loss_estimate == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert found().loss_exact == pytest.approx(sum(plain) / 3, rel=1e-5)


def test_exact_where_fidelity_says_so() -> None:
    config = found().exact_where()
    assert config.exact == (PLANTED,)
    again = fidelity(planted(), batches(1), config=config, bound=0.2)
    assert not again.flagged
    kept = again.sites[-1]
    assert (kept.rms, kept.median, kept.sd) == ("exact", 1.0, 0.0)
    assert kept.estimate_sqnr == math.inf and 20 < kept.cast_sqnr < 40
    # The options reach the compile.
    report = explain(planted(), batches(1)[0], config=config, training=False)
    assert {s.norm: s.spec["rms"] for s in report.sites} == {
        "0.norm1": "p2",
        "0.norm2": "p2",
        "1.norm1": "p2",
        PLANTED: "exact",
    }


@given(
    path=st.text(st.sampled_from("ab.*?[]!-#\\\n") | st.characters(), min_size=1),
    other=st.text(st.sampled_from("ab.*?[]!-"), min_size=1),
)
@example(path="experts[0].norm", other="experts0.norm")
@example(path="a*?[!b]", other="aa*?[!b]")
def test_exact_where_names_a_norm_whatever_its_path(path: str, other: str) -> None:
    """``exact`` holds globs: the flagged path matches, and no other one."""
    sites = [dataclasses.replace(found().flagged[0], id=f"{path}#{n}", norm=path) for n in (0, 1)]
    config = dataclasses.replace(found(), sites=sites).exact_where()
    (glob,) = config.exact  # one norm
    assert fnmatch.fnmatchcase(path, glob)
    assert fnmatch.fnmatchcase(other, glob) == (other == path)
    # Not twice, when it is there already.
    assert dataclasses.replace(found(), sites=sites, config=config).exact_where() == config


def test_json_is_valid_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "fidelity.json"
    text = found().to_json(path)
    content = json.loads(path.read_text())
    assert json.loads(text) == content and content["schema"] == "mxnorm-fidelity/1"
    assert content["flagged"] == [f"{PLANTED}#0"]
    assert content["sites"][3]["channels"][0]["index"] == CHANNEL
    # What JSON does not have is null.
    assert "NaN" not in text and "Infinity" not in text


class Zeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(128), HandLinear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def test_rows_of_zeros_and_nan_are_counted_apart() -> None:
    x = rows(64, 128, dtype=torch.float32)
    x[3], x[5, 7], x[6, 0] = 0.0, float("nan"), float("inf")
    result = fidelity(Zeros(), x, bound=0.5)
    (site,) = result.sites
    assert (site.rows, site.zero_rows, site.nonfinite_rows) == (61, 1, 2)
    assert site.advice == "exclude" and math.isfinite(site.median)
    assert math.isfinite(site.estimate_error) and math.isfinite(site.cast_error)


def test_one_constant_is_advised_where_it_suffices() -> None:
    x = torch.distributions.Laplace(0.0, 1.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(4096), HandLinear(4096, 32))
    result = fidelity(model, x.sample((64, 4096)))
    (site,) = result.flagged
    assert site.advice == "calibrate" and "median" in site.reasons[0]
    assert site.median == pytest.approx(correction(2, 32) / correction(2, 32, "laplace"), rel=0.01)


def test_codes_in_the_matmul_leave_the_errors_of_the_rows() -> None:
    """torchao's inference linears: bfloat16, three sites' worth of shapes, weights found."""
    block = inference_block("llama", 256)
    result = fidelity(block, rows(32, 256))
    (site,) = result.sites
    assert set(site.by_consumer) == {"linears.0", "linears.1"}
    assert site.by_consumer["linears.0"]["cast_sqnr"] == pytest.approx(site.cast_sqnr, abs=1.0)


DISTRIBUTIONS: dict[str, Any] = {
    "laplace": torch.distributions.Laplace(0.0, 1.0),
    "student_t5": torch.distributions.StudentT(5.0),
}


def sample(name: str, seed: int, n: int = 2) -> list[Tensor]:
    torch.manual_seed(seed)
    return [DISTRIBUTIONS[name].sample((3000, 1024)) for _ in range(n)]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_calibration_brings_the_median_to_one(name: str, p: int, tmp_path: Path) -> None:
    """On rows that were not seen, to 1%."""
    model = nn.Sequential(nn.RMSNorm(1024), HandLinear(1024, 32))
    path = tmp_path / "calibration.json"
    result = calibrate(model, sample(name, 0), p=p, path=path)
    assert path.read_text() == result.to_json()
    norm = result.norms["0"]
    assert norm.rows == 6000 and norm.block_size == 32
    expected = correction(p, 32) / correction(p, 32, name)
    # The constants hold for many blocks; these rows have 32, and a few heavy tails.
    assert norm.before == pytest.approx(expected, rel=0.04)
    assert norm.before > 1.15
    after = fidelity(model, sample(name, 1), config=result.config, samples=8)
    (site,) = after.sites
    assert site.correction == norm.c
    assert abs(site.median - 1) < 0.01


def test_a_tenth_of_massive_rows_moves_the_constant_little() -> None:
    model = nn.Sequential(nn.RMSNorm(1024), HandLinear(1024, 32))
    x = rows(2000, 1024, dtype=torch.float32)
    clean = calibrate(model, x)
    x[:200, 5] = 1000.0
    assert calibrate(model, x).norms["0"].c == pytest.approx(clean.norms["0"].c, rel=0.01)


def test_a_constant_for_another_block_size_declines_the_site(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    content = {"p": 2, "sites": {"norm": 0.4}, "blocks": {"norm": 16}}
    path.write_text(json.dumps(content))
    config = MXNormConfig(correction=str(path))
    report = explain(Zeros(), rows(4, 128, dtype=torch.float32), config=config, training=False)
    assert [(s.norm, s.reason) for s in report.sites] == [("norm", "calibration_block")]
    content["blocks"] = {"norm": 32}
    path.write_text(json.dumps(content))
    report = explain(Zeros(), rows(4, 128, dtype=torch.float32), config=config, training=False)
    assert report.sites[0].spec["correction"] == 0.4
    path.write_text(json.dumps({**content, "blocks": ["norm"]}))
    with pytest.raises(ValueError, match="'blocks' is no"):
        MXNormConfig(correction=str(path))


def test_block_sizes_are_part_of_the_identity_of_a_compile(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    seen = set()
    for block in (16, 32):
        path.write_text(json.dumps({"p": 2, "sites": {"n": 0.4}, "blocks": {"n": block}}))
        seen.add(mxnorm_pass.MXNormPass(MXNormConfig(correction=str(path))).identity())
    assert len(seen) == 2


def test_few_rows_are_said_to_be_few() -> None:
    with pytest.warns(UserWarning, match="give more batches"):
        result = calibrate(Zeros(), rows(20, 128, dtype=torch.float32))
    assert all(len(line) <= 100 for line in str(result).splitlines())
    with pytest.raises(ValueError, match="not saved yet"):
        _ = result.config


def test_modes_and_compiled_modules_come_back() -> None:
    model = Zeros().train()
    model.norm.eval()
    model.compile(backend=mxnorm_pass.backend(inner="eager"))
    before = model._compiled_call_impl
    result = fidelity(torch.compile(model), rows(8, 128, dtype=torch.float32), bound=0.9)
    assert result.sites[0].rows == 8
    assert (model.training, model.norm.training, model.linear.training) == (True, False, True)
    assert model._compiled_call_impl is before is not None


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"config": MXNormConfig(rms="exact")}, "rms='mx'"),
        ({"bound": 0}, "bound"),
        ({"tail": 1}, "tail"),
        ({"samples": 0}, "samples"),
        ({"samples": 1.5}, "samples=1.5: expected a whole number"),
        ({"worst": 0}, "worst=0: expected a whole number"),
        ({"bound": "x"}, "bound='x': expected a number above zero"),
        ({"bound": None}, "bound=None: expected"),
        ({"bound": True}, "bound=True: expected"),
        ({"bound": math.nan}, "bound=nan: expected"),
        ({"worst_bound": [1]}, r"worst_bound=\[1\]: expected a number above zero"),
        ({"tail": "x"}, "tail='x': expected a share"),
    ],
)
def test_what_fidelity_does_not_take(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fidelity(Zeros(), rows(4, 128, dtype=torch.float32), **kwargs)


def test_models_and_batches_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="quantise its linears"):
        fidelity(nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 8)), torch.randn(4, 64))
    for function in (fidelity, calibrate):
        with pytest.raises(ValueError, match="empty"):
            function(Zeros(), [])
        with pytest.raises(ValueError, match="iterable of batches"):
            function(Zeros(), 3)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        fidelity(lambda x: x, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="p=3"):
        calibrate(Zeros(), [], p=3)


def test_no_path_no_constant() -> None:
    """A norm that Dynamo knows no module of cannot be named in a file."""
    result = Calibration(2, {}, {"": "it has no module path to be named by"})
    assert "?: no constant" in str(result)


@pytest.mark.cuda
def test_a_gpu_sees_what_the_cpu_sees() -> None:
    """The kernel in the place of the decomposition; statistics kept on the CPU either way."""
    model = nn.Sequential(nn.RMSNorm(1024), HandLinear(1024, 32))
    x = rows(512, 1024, dtype=torch.float32)
    x[3, 5] = 1000.0
    (cpu,) = fidelity(model, x).sites
    c = calibrate(model, x).norms["0"].c
    (gpu,) = fidelity(model.cuda(), x.cuda()).sites
    assert gpu.median == pytest.approx(cpu.median, rel=1e-4)
    assert gpu.worst[0].row == cpu.worst[0].row == (3,)
    assert [ch.index for ch in gpu.channels] == [ch.index for ch in cpu.channels] == [5]
    assert gpu.estimate_error == pytest.approx(cpu.estimate_error, rel=1e-2)
    assert gpu.cast_error == pytest.approx(cpu.cast_error, rel=1e-2)
    assert calibrate(model, x.cuda()).norms["0"].c == pytest.approx(c, rel=1e-4)
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 8)).cuda()
    nn.init.normal_(model[0].weight, 1, 0.3)
    with fold_gains(model, x[:8, :64].cuda()) as h:
        assert len(h.folded) == 1 and h.output_sqnr > 100
