"""From training with the estimate to serving on plain RMSNorm; the settings beside a checkpoint."""

from __future__ import annotations

import ast
import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import HandLinear, Norm, gemma_form, rows, training_block
from torch import Tensor, nn

import mxnorm_pass
from mxnorm_pass import (
    MXNormConfig,
    Report,
    SettingsError,
    explain,
    load_settings,
    save_settings,
    to_rmsnorm,
)
from mxnorm_pass.report import GraphReport, SiteReport
from mxnorm_pass.theory import correction

K = 256


@functools.cache
def data() -> tuple[list[Tensor], Tensor]:
    """Laplace rows, on which the estimate is off by a quarter, and the weight behind the target."""
    torch.manual_seed(0)
    x = torch.distributions.Laplace(0.0, 1.0).sample((8, 128, K)).bfloat16()
    return list(x), torch.randn(64, K) / 16


def target(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (K,)) @ data()[1].T


def loss(output: Any, batch: Tensor) -> Tensor:
    return (output[0].float() - target(batch)).square().mean()


@pytest.mark.slow
def test_a_model_trained_with_the_estimate_serves_on_plain_rmsnorm() -> None:
    """Training learns the estimate's bias; baked into the gain, it is right for the true RMS."""
    batches, weight = data()
    block = training_block("llama", K, widths=(64,))
    with torch.no_grad():
        block.norm.weight.fill_(1)
        block.linears[0].weight.copy_(1.1 * weight)
    compiled = torch.compile(block, backend=mxnorm_pass.backend(inner="eager"), dynamic=False)
    optimizer = torch.optim.Adam(block.parameters(), lr=2e-3)
    losses = []
    for step in range(40):
        batch = batches[step % 6]
        value = loss(compiled(batch), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < 0.5 * losses[0]

    gain = block.norm.weight.detach().clone()
    handle = to_rmsnorm(block, batches, loss_fn=loss)
    (baked,) = handle.gains
    expected = correction(2, 32) / correction(2, 32, "laplace")
    assert baked.ratio == pytest.approx(expected, rel=0.02)
    assert torch.equal(block.norm.weight, (gain.double() / baked.ratio).bfloat16())
    assert handle.loss_estimate is not None and handle.loss_unbaked is not None
    assert handle.loss_unbaked > 4 * handle.loss_estimate
    # The rows' own spread about the ratio is gone too, so it may well be lower.
    assert handle.loss_baked is not None
    assert 0.3 * handle.loss_estimate < handle.loss_baked < 1.1 * handle.loss_estimate
    with torch.no_grad():
        served = [float(loss(block(b), b)) for b in batches]
    assert handle.loss_baked == pytest.approx(sum(served) / len(served), rel=1e-6)
    shown = str(handle)
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert "as trained" in shown and "(undone)" not in shown
    handle.undo()
    assert torch.equal(block.norm.weight, gain)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gemma = Norm(gemma_form, K)
        self.bare = nn.RMSNorm(K, elementwise_affine=False)
        self.first, self.second = nn.RMSNorm(K), nn.RMSNorm(K)
        self.second.weight = self.first.weight
        with torch.no_grad():
            self.gemma.weight.copy_(0.3 * torch.randn(K))
        self.linears = nn.ModuleList([HandLinear(K, 16) for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        norms = (self.gemma, self.bare, self.first, self.second)
        outputs = [linear(norm(x)) for norm, linear in zip(norms, self.linears, strict=True)]
        return {"loss": torch.cat(outputs).square().mean(), "first": outputs[0]}


def test_gains_of_one_plus_w_and_those_that_cannot_carry_a_ratio() -> None:
    x = torch.distributions.Laplace(0.0, 1.0)
    torch.manual_seed(1)
    batch = {"x": x.sample((64, K))}
    model = Several()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = MXNormConfig(inner="eager")
    compiled = torch.compile(model, backend=mxnorm_pass.backend(config))
    with torch.no_grad():
        estimated = compiled(**batch)["first"]
        plain = model(**batch)["first"]
        with to_rmsnorm(model, iter([batch])) as handle:
            baked = model(**batch)["first"]
            w = before["gemma.weight"].double()
            expected = ((1 + w) / handle.gains[0].ratio - 1).float()
            assert torch.equal(model.gemma.weight, expected)
    assert [g.norm for g in handle.gains] == ["gemma"]
    assert handle.left == {"bare": "it has no gain", "first, second": handle.left["first, second"]}
    assert "shared" in handle.left["first, second"]
    assert handle.loss_estimate is not None and handle.loss_baked is not None

    def distance(y: Tensor) -> float:
        return float((y - estimated).norm() / estimated.norm())

    assert distance(plain) > 0.2 and distance(baked) < 0.12
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_what_to_rmsnorm_does_not_take() -> None:
    with pytest.raises(ValueError, match="as it is"):
        to_rmsnorm(Several(), [], config=MXNormConfig(rms="exact"))
    with pytest.raises(ValueError, match="empty"):
        to_rmsnorm(Several(), [])


def test_a_gain_is_divided_once() -> None:
    """A second run is refused until the first is undone, on a copy of the model as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(K), HandLinear(K, K), nn.RMSNorm(K), HandLinear(K, 8))
    x = torch.distributions.Laplace(0.0, 1.0).sample((64, K))
    start = [p.detach().clone() for p in model.parameters()]
    first = to_rmsnorm(model, x, config=MXNormConfig(exact="2"))
    assert [g.gain for g in first.gains] == ["0.weight"]
    now = [p.detach().clone() for p in model.parameters()]
    for again in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"^0\.weight: .* already"):
            to_rmsnorm(again, x)
        assert all(torch.equal(p, q) for p, q in zip(again.parameters(), now, strict=True))
    # Norms that the first run left alone are free.
    second = to_rmsnorm(model, x, config=MXNormConfig(exact="0"))
    assert [g.gain for g in second.gains] == ["2.weight"]
    first.undo()
    second.undo()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    with to_rmsnorm(model, x) as both:
        assert [g.gain for g in both.gains] == ["0.weight", "2.weight"]
        with torch.no_grad():
            kept = model[0].weight.clone()
            model[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"undo: 0\.weight changed"):
            both.undo()
        with pytest.raises(RuntimeError, match="already"):  # the mark is there still
            to_rmsnorm(model, x)
        with torch.no_grad():
            model[0].weight.copy_(kept)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))


# --- settings beside a checkpoint -----------------------------------------------------------------


def spec(**changes: Any) -> dict[str, Any]:
    base = {"eps": 1e-6, "block_size": 32, "rms": "p2", "correction": 0.41, "format": "MXFP8"}
    return {**base, "element": "e4m3", "scale_rule": "rceil_log2", **changes}


def report(*sites: tuple[str, dict[str, Any]]) -> Report:
    entries = [SiteReport(f"{n}#0", n, [], "rewritten", spec=s) for n, s in sites]
    declined = SiteReport("other#0", "other", [], "declined", "excluded")
    return Report([GraphReport(False, [*entries, declined])])


def test_settings_of_a_model_round_trip(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.RMSNorm(K, eps=1e-5), HandLinear(K, K), nn.RMSNorm(K), HandLinear(K, 8)
    )
    x = rows(8, K, dtype=torch.float32)
    calibration = mxnorm_pass.calibrate(model, rows(3000, K, dtype=torch.float32), p=1)
    config = calibration.save(tmp_path / "c.json").config
    config = mxnorm_pass.backend(config, exact="2").config
    done = explain(model, x, config=config, training=False)
    path = save_settings(tmp_path, config, done)
    assert path == tmp_path / "mxnorm.json"
    found = load_settings(tmp_path)
    assert found.sites == {"0": calibration.norms["0"].c}
    assert found.rms == {"0": "p1", "2": "exact"}
    assert found.eps["0"] == pytest.approx(1e-5) and found.blocks == {"0": 32, "2": 32}
    assert found.package == mxnorm_pass.__version__
    loaded = MXNormConfig.from_checkpoint(tmp_path, strict=True)
    assert (loaded.p, loaded.exact, loaded.strict) == (1, ("2",), True)
    again = explain(model, x, config=loaded, training=False)
    assert [s.spec for s in again.sites] == [s.spec for s in done.sites]
    found.check(again)
    with pytest.raises(SettingsError) as error:
        found.check(explain(model, x, training=False))
    assert "0: rms is p2, the settings have p1" in str(error.value)
    assert "2: rms is p2, the settings have exact" in str(error.value)


@settings(deadline=None, max_examples=40)
@given(
    p=st.sampled_from([1, 2]),
    gain=st.sampled_from(["auto", "kernel"]),
    exact=st.lists(st.text("ab.*", min_size=1), max_size=3),
    constants=st.dictionaries(st.text("xyz.", min_size=1), st.floats(0.18, 1), min_size=1),
    eps=st.floats(0, 1e-3),
)
def test_settings_hold_any_options(
    tmp_path_factory: pytest.TempPathFactory,
    p: int,
    gain: Any,
    exact: list[str],
    constants: dict[str, float],
    eps: float,
) -> None:
    config = MXNormConfig(p=p, gain=gain, exact=tuple(exact))
    done = report(*((n, spec(rms=f"p{p}", correction=c, eps=eps)) for n, c in constants.items()))
    where = tmp_path_factory.mktemp("checkpoint") / "named.json"
    save_settings(where, config, done)
    found = load_settings(where)
    assert (found.sites, found.eps) == (constants, dict.fromkeys(constants, eps))
    loaded = found.config()
    assert dict(loaded.calibration()) == constants
    assert (loaded.p, loaded.gain, loaded.exact) == (p, gain, tuple(exact))
    found.check(done)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (report(("a", spec())), "b: in the settings, not rewritten"),
        (report(("a", spec()), ("b", spec()), ("c", spec())), "c: rewritten in this model, not in"),
        (report(("a", spec(eps=1e-5)), ("b", spec())), "a: eps is 1e-05, the settings have 1e-06"),
        (report(("a", spec(correction=0.42)), ("b", spec())), "a: c is 0.42"),
        (report(("a", spec(block_size=16)), ("b", spec())), "a: block size is 16"),
        (report(("a", spec(element="e5m2")), ("b", spec())), "a: cast is MXFP8 e5m2"),
    ],
)
def test_a_mismatch_is_named(other: Report, says: str, tmp_path: Path) -> None:
    save_settings(tmp_path, MXNormConfig(), report(("a", spec()), ("b", spec())))
    with pytest.raises(SettingsError) as error:
        load_settings(tmp_path).check(other)
    assert says in str(error.value) and "mxnorm.json" in str(error.value)


def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(x)
            return x

    def calibrate(path: Path) -> None:
        mxnorm_pass.calibrate(Counted(), torch.ones(2, K), path=path)

    def save(path: Path) -> None:
        # Before a report without sites is complained about.
        save_settings(path, MXNormConfig(), report())

    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    for write in (calibrate, save):
        with pytest.raises(FileNotFoundError, match=r"folder .*nodir does not exist"):
            write(tmp_path / "nodir" / "c.json")
        with pytest.raises(NotADirectoryError, match=r"folder .*file is a file"):
            write(tmp_path / "file" / "c.json")
        with pytest.raises(IsADirectoryError, match=r"folder\.json is a folder"):
            write(tmp_path / "folder.json")
    old = tmp_path / "old.json"
    old.write_text("kept")
    # The superuser may write everywhere, so the system's answer is stood in for.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for write in (calibrate, save):
        with pytest.raises(PermissionError, match=r"cannot write c\.json.*folder"):
            write(tmp_path / "c.json")
        with pytest.raises(PermissionError, match=r"old\.json: no permission"):
            write(old)
    assert not ran and old.read_text() == "kept"


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no settings beside the checkpoint"):
        MXNormConfig.from_checkpoint(tmp_path)
    path = save_settings(tmp_path, MXNormConfig(), report(("a", spec())))
    good = json.loads(path.read_text())
    for change, says in (
        ({"schema": "mxnorm-settings/9"}, "expected 'mxnorm-settings/1'"),
        ({"eps": None}, "'eps' is missing"),
        ({"p": 1}, "p=1 here and 2 in its options"),
        ({"options": {**good["options"], "rms": "fast"}}, "rms='fast'"),
        ({"options": {**good["options"], "more": 1}}, "options more are unknown"),
        ({"sites": {"a": -1}}, "c > 0"),
        ({"sites": {"a": 1.5}}, r"mxnorm\.json: c = 1\.5 at 'a' is right for no row"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(SettingsError, match=says):
            load_settings(tmp_path)
    for text, says in (("{", "not JSON"), ("[]", "schema None")):
        path.write_text(text)
        with pytest.raises(SettingsError, match=says):
            load_settings(tmp_path)
    with pytest.raises(ValueError, match="unknown options speed"):
        path.write_text(json.dumps(good))
        MXNormConfig.from_checkpoint(tmp_path, speed=9)
    with pytest.raises(ValueError, match="nothing was rewritten"):
        save_settings(tmp_path, MXNormConfig(), report())
    with pytest.raises(ValueError, match="two values of sites"):
        save_settings(tmp_path, MXNormConfig(), report(("a", spec()), ("a", spec(correction=1.0))))
    # Two norms that graphs call alike; an eps that is a tensor says nothing.
    with pytest.raises(ValueError, match=r"two values of eps: 1e-06 and 0\.001"):
        save_settings(tmp_path, MXNormConfig(), report(("a", spec()), ("a", spec(eps=1e-3))))
    done = report(("a", spec(eps="tensor")), ("a", spec()), ("a", spec(eps="tensor")))
    save_settings(tmp_path, MXNormConfig(), done)
    assert load_settings(tmp_path).eps == {"a": 1e-6}


def test_no_pickle_anywhere_in_the_package() -> None:
    """Nothing that is written or read can run code: no pickle, no torch.save, no torch.load."""
    root = Path(mxnorm_pass.__file__).parent
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    checked = 0
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        checked += 1
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in (("torch", "save"), ("torch", "load")), (
                    f"{path.name}:{node.lineno}"
                )
            assert not modules & set(names), f"{path.name}:{getattr(node, 'lineno', 0)}: {names}"
    assert checked > 40
