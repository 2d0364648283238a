"""Ways in: options, hooks, caches, and bad input."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import run
from models import inference_block, make_norm, rows, training_block
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import mxnorm_pass
from mxnorm_pass import (
    MXNormConfig,
    MXNormPass,
    RewriteError,
    backend,
    explain,
    inductor_options,
    last_report,
)
from mxnorm_pass.backend import MXNormBackend, mxnorm, mxnorm_exact

EAGER = {"mxnorm.inner": "eager"}
# Inductor's pipeline with ATen calls instead of C++: seconds instead of half a minute.
NO_CPP = {"disable_cpp_codegen": True}


class Counting(CustomGraphPass):
    """Somebody else's pass."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return "counting"


@pytest.mark.parametrize(("name", "rms"), [("mxnorm", "p2"), ("mxnorm_exact", "exact")])
def test_backends_by_name(name: str, rms: str) -> None:
    """Found without an import of ours by the entry point; options by their prefixed names."""
    assert name in torch._dynamo.list_backends()
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    seen = len(last_report(name).graphs)
    with torch.no_grad():
        out = torch.compile(block, backend=name, options=EAGER)(x)
    (site,) = last_report(name).graphs[seen].sites
    assert site.spec["rms"] == rms
    config = MXNormConfig(rms="exact" if rms == "exact" else "mx")
    assert torch.equal(out[0], run(block, x, training=False, config=config).outputs[0])


def test_last_report_names_the_backends() -> None:
    with pytest.raises(ValueError, match="mxnorm, mxnorm_exact"):
        last_report("nobody")


def test_options_with_a_backend_given_by_name() -> None:
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    seen = len(last_report().graphs)
    options = {**EAGER, "mxnorm.p": 1, "mxnorm.exclude": "other"}
    with torch.no_grad():
        torch.compile(block, backend="mxnorm", options=options)(x)
    assert last_report().graphs[seen].sites[0].spec["rms"] == "p1"


def test_mode_and_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """max-autotune's settings and the user's own arrive in compile_fx, beside our pass."""
    from torch._inductor import compile_fx

    seen: dict[str, Any] = {}
    original = compile_fx.compile_fx

    def spy(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.update(kwargs.get("config_patches") or {})
        return original(gm, inputs, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    options = {**EAGER, "epilogue_fusion": False}
    with torch.no_grad():
        torch._dynamo.reset()
        gm_backend = mxnorm
        torch.compile(
            block,
            backend=lambda gm, i: gm_backend(
                gm, i, mode="max-autotune-no-cudagraphs", options=options
            ),
        )(x)
    assert seen["max_autotune"] is True and seen["epilogue_fusion"] is False
    assert isinstance(seen["joint_custom_pre_pass"], MXNormPass)
    assert "mxnorm.inner" not in seen


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"p": 3}, "1, 2"),
        ({"rms": "approximate"}, "'mx', 'exact'"),
        ({"gain": "none"}, "'auto', 'fold', 'kernel'"),
        ({"inner": "triton"}, "'inductor', 'eager'"),
        ({"tensor_scale": 1}, "'dynamic', 'bound'"),
        ({"rms": "exact", "gain": "fold"}, "'auto', 'kernel'"),
        ({"require_rewrites": -1}, "int >= 0"),
        ({"require_rewrites": True}, "int >= 0"),
        ({"strict": "yes"}, "True, False"),
        ({"include": (1,)}, "globs"),
        ({"correction": "/no/such/file.json"}, "'gaussian'"),
        ({"correction": 3}, "'gaussian'"),
    ],
)
def test_bad_values_name_the_allowed_ones(fields: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed) as error:
        backend(**fields)
    assert next(iter(fields)) in str(error.value) or "gain" in str(error.value)


def test_unknown_option_names_the_known_ones() -> None:
    block = inference_block("llama", widths=(64,))
    with pytest.raises(Exception, match=r"unknown option 'mxnorm\.power': allowed are mxnorm\.rms"):
        torch.compile(block, backend="mxnorm", options={"mxnorm.power": 1})(rows(64, 128))


def test_inductor_options_refuse_the_eager_route() -> None:
    with pytest.raises(ValueError, match="inner='eager'"):
        inductor_options(MXNormConfig(inner="eager"))


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"p": 2}', '{"p": 2, "sites": {"a": 0}}', '{"p": 1, "sites": {}}']
)
def test_bad_calibration_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="calibration file"):
        MXNormConfig(correction=str(path))


def test_calibration_file_gives_the_constant(tmp_path: Path) -> None:
    """The listed norm gets its own constant; twice the constant halves the normalised row."""
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"p": 2, "sites": {"norm": 2 * 0.4185051047}}))
    block, x = inference_block("bare", widths=(64,)), rows(64, 128)
    once = run(block, x, training=False)
    twice = run(block, x, training=False, config=MXNormConfig(correction=str(path)))
    assert twice.report.sites[0].spec["correction"] == pytest.approx(2 * 0.4185051047)
    # A power of two passes through every rounding, but for eps.
    assert torch.allclose(
        once.outputs[0].float(), 2 * twice.outputs[0].float(), rtol=2**-6, atol=1e-2
    )


def test_require_rewrites() -> None:
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    assert explain(block, x, training=False, config=MXNormConfig(require_rewrites=1)).rewritten == 1
    with pytest.raises(RewriteError, match="1 of 2 required sites") as error:
        explain(block, x, training=False, config=MXNormConfig(require_rewrites=2))
    assert "norm" in str(error.value) and "rewritten" in str(error.value)
    plain = nn.Sequential(make_norm("llama", 128), nn.Linear(128, 64).bfloat16())
    with pytest.raises(Exception, match="0 of 1 required sites"), torch.no_grad():
        torch.compile(plain, backend=backend(inner="eager", require_rewrites=1))(x)
    with pytest.raises(Exception, match="1 of 2 required sites"), torch.no_grad():
        options = inductor_options(MXNormConfig(require_rewrites=2))
        torch.compile(block, options={**options, **NO_CPP})(x)


def test_nothing_to_rewrite_compiles_as_before() -> None:
    model = nn.Sequential(make_norm("llama", 128), nn.Linear(128, 64).bfloat16())
    x = rows(64, 128)
    result = run(model, x, training=False)
    assert "Nothing to rewrite" in str(result.report)
    assert torch.equal(result.outputs[0], run(model, x, training=False, off=True).outputs[0])


def test_disable(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNORM_DISABLE=1: the unrewritten result, and a report that says why."""
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    plain = run(block, x, training=False, off=True)
    enabled = MXNormPass().uuid()
    monkeypatch.setenv("MXNORM_DISABLE", "1")
    result = run(block, x, training=False)
    assert [s.reason for s in result.report.sites] == ["disabled"]
    assert torch.equal(result.outputs[0], plain.outputs[0])
    assert MXNormPass().uuid() != enabled
    monkeypatch.setenv("MXNORM_DISABLE", "0")
    assert run(block, x, training=False).report.rewritten == 1


def test_gaussian_inference_warns_once(tmp_path: Path) -> None:
    """And is in the report, where a warning that was shown elsewhere, or filtered, is not lost."""
    from mxnorm_pass import choices

    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    choices.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="mxnorm_exact or a calibration"):
        assert run(block, x, training=False).report.warnings == [choices.GAUSSIAN]
    choices.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mxnorm")
        fitted = tmp_path / "c.json"
        fitted.write_text('{"p": 2, "sites": {"norm": 0.4}}')
        for config in (MXNormConfig(rms="exact"), MXNormConfig(correction=str(fitted))):
            assert not run(block, x, training=False, config=config).report.warnings
        assert not run(training_block("llama", widths=(64,)), x).report.warnings


def test_a_cleared_report_says_nothing_of_what_was_in_it() -> None:
    from mxnorm_pass import choices

    ours = backend(inner="eager")
    with torch.no_grad():
        torch.compile(inference_block("llama", widths=(64,)), backend=ours)(rows(64, 128))
    assert ours.report.warnings == [choices.GAUSSIAN]
    ours.report.graphs.clear()
    torch.compile(training_block("llama", widths=(64,)), backend=ours)(rows(64, 128))
    assert ours.report.rewritten == 1 and ours.report.warnings == []


def test_other_passes_stay_on_the_hook() -> None:
    """A pass in Inductor's config and ours both run, and theirs is there afterwards."""
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    theirs = Counting()
    with torch._inductor.config.patch(joint_custom_pre_pass=theirs), torch.no_grad():
        ours = backend(inner="eager")
        torch.compile(block, backend=ours)(x)
        assert torch._inductor.config.joint_custom_pre_pass is theirs
        assert theirs.calls == 1 and ours.report.rewritten == 1
        options = inductor_options()
    assert torch._inductor.config.joint_custom_pre_pass is None
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(block, options={**options, **NO_CPP})(x)
    assert theirs.calls == 2 and options["joint_custom_pre_pass"].report.rewritten == 1


def test_post_grad_hook_takes_inference_graphs() -> None:
    """Where other compilers take foreign passes: post-grad graphs spell views as reshapes."""
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    ours = MXNormPass(MXNormConfig(strict=True))
    with torch.no_grad():
        out = torch.compile(block, options={"post_grad_custom_pre_pass": ours, **NO_CPP})(x)
    assert ours.report.rewritten == 1
    assert torch.equal(out[0], run(block, x, training=False).outputs[0])


def test_torch_logs_shows_the_report() -> None:
    """TORCH_LOGS="+mxnorm_pass" turns the log on, table included."""
    script = (
        "import torch, mxnorm_pass; from models import inference_block, rows\n"
        "mxnorm_pass.explain(inference_block('llama', widths=(64,)), rows(64, 128), training=False)"
    )
    done = python("-c", script, TORCH_LOGS="+mxnorm_pass")
    assert "inference graph: 1 sites, 1 rewritten" in done.stderr
    assert "e4m3/32 rceil p2 w kernel" in done.stderr


def test_other_models_are_untouched() -> None:
    """A model compiled without the backend afterwards does not meet the pass."""
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    ours = backend(inner="eager")
    with torch.no_grad():
        torch.compile(block, backend=ours)(x)
        torch._dynamo.reset()
        torch.compile(block, options=NO_CPP)(x)
    assert len(ours.report.graphs) == 1


def test_backward_is_compiled_outside_any_context() -> None:
    """The backward is compiled at the first backward(): Inductor, ATen calls, no C++."""
    block, x = training_block("llama", widths=(64,)), rows(2, 32, 128).requires_grad_()
    ours = backend()
    out = torch.compile(block, backend=ours, options=NO_CPP)(x)[0]
    generator = torch.Generator().manual_seed(0)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    expected = run(block, x.detach())
    assert ours.report.rewritten == 1
    assert torch.equal(x.grad, expected.gradients["input0"])


def test_varying_lengths_compile_twice_at_the_most() -> None:
    """Row counts that are no multiple of anything, one static graph and one symbolic."""
    block = inference_block("llama", widths=(64,))
    ours = backend(inner="eager")
    compiled = torch.compile(block, backend=ours)
    with torch.no_grad():
        outputs = {m: compiled(rows(m, 128))[0] for m in (17, 64, 100, 127, 128, 129)}
    assert [g.rewritten for g in ours.report.graphs] == [1, 1]
    for m, out in outputs.items():
        assert torch.equal(out, run(block, rows(m, 128), training=False).outputs[0])


def test_pass_and_backend_pickle_and_deepcopy() -> None:
    for thing in (MXNormPass(MXNormConfig(p=1)), MXNormBackend(MXNormConfig(p=1))):
        for twin in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
            assert twin.config == thing.config
    theirs = MXNormPass(previous=(Counting(),))
    assert pickle.loads(pickle.dumps(theirs)).uuid() == theirs.uuid()


def test_uuid_covers_the_choice_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    known = MXNormPass().uuid()
    monkeypatch.setenv("MXNORM_KERNEL", "aten")
    assert MXNormPass().uuid() != known
    monkeypatch.setenv("MXNORM_KERNEL", "triton")
    assert MXNormPass().uuid() == known


def test_a_kernel_that_does_not_exist_is_an_error_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    monkeypatch.setenv("MXNORM_KERNEL", "cutlass")
    with pytest.raises(Exception, match="allowed are 'triton', 'aten'"):
        run(block, x, training=False, config=MXNormConfig(require_rewrites=0))
    monkeypatch.setenv("MXNORM_KERNEL", "")
    assert run(block, x, training=False).report.rewritten == 1


def test_uuid_covers_options_calibration_and_earlier_passes(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"p": 2, "sites": {"norm": 0.4}}))
    calibrated = MXNormPass(MXNormConfig(correction=str(path)))
    known = calibrated.uuid()
    path.write_text(json.dumps({"p": 2, "sites": {"norm": 0.5}}))
    uuids = [
        MXNormPass().uuid(),
        MXNormPass(MXNormConfig(p=1)).uuid(),
        MXNormPass(MXNormConfig(exclude=("a",))).uuid(),
        MXNormPass(previous=(Counting(),)).uuid(),
        known,
        calibrated.uuid(),
    ]
    assert len(set(uuids)) == len(uuids) and None not in uuids
    assert MXNormPass().uuid() == MXNormPass(MXNormConfig(strict=True)).uuid()
    # A plain function has no identity: torch's caches are bypassed, as they would be without us.
    assert MXNormPass(previous=(print,)).uuid() is None
    assert MXNormPass(MXNormConfig(require_rewrites=1)).uuid() is None


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the package and the test models."""
    path = [str(Path(__file__).parent), str(Path(mxnorm_pass.__file__).parent.parent)]
    command = [sys.executable, "-W", "ignore", *arguments]
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **env}
    return subprocess.run(command, env=merged, capture_output=True, text=True, check=False)


SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, mxnorm_pass
    from models import inference_block, rows
    options = json.loads(sys.argv[1])
    ours = mxnorm_pass.backend(**options)
    with torch.no_grad():
        torch.compile(inference_block("llama", widths=(64,)), backend=ours)(rows(64, 128))
    assert len(ours.report.warnings) == 1, "estimated in inference, from the cache as well"
    print(json.dumps([[g.from_cache, g.rewritten] for g in ours.report.graphs]))
    """
)


@pytest.mark.slow
def test_second_process_hits_the_cache_and_reports_all_the_same(tmp_path: Path) -> None:
    """Hit: the report comes from beside the cache, or from tracing again; other options miss."""

    def compile_once(**options: Any) -> Any:
        done = python("-c", SCRIPT, json.dumps(options), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(done.stdout.strip().splitlines()[-1])

    assert compile_once() == [[False, 1]]
    assert compile_once() == [[True, 1]]
    with pytest.raises(RuntimeError, match="1 of 2 required sites"):
        compile_once(require_rewrites=2)
    for entry in (tmp_path / "mxnorm").iterdir():
        entry.unlink()
    assert compile_once() == [[True, 1]]
    assert compile_once(p=1) == [[False, 1]]


def test_exact_backend_keeps_its_promise_under_options() -> None:
    with pytest.raises(Exception, match="exact"):
        torch.compile(
            inference_block("llama", widths=(64,)),
            backend=mxnorm_exact,
            options={"mxnorm.gain": "fold"},
        )(rows(64, 128))


def test_dump_dir(tmp_path: Path) -> None:
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    run(block, x, training=False, config=MXNormConfig(dump_dir=str(tmp_path / "dump")))
    folder = tmp_path / "dump" / "rank_0" / "graph_000"
    before, after = ((folder / f"{name}.py").read_text() for name in ("before", "after"))
    assert "aten.rsqrt" in before and "rmsnorm_mxquant" not in before
    assert "aten.rsqrt" not in after and "rmsnorm_mxquant" in after
    report = json.loads((folder / "sites.json").read_text())
    assert report["graphs"][0]["sites"][0]["status"] == "rewritten"
    # A folder that cannot be written must not break the compile.
    (tmp_path / "file").write_text("")
    assert run(
        block, x, training=False, config=MXNormConfig(dump_dir=str(tmp_path / "file" / "dump"))
    ).report.rewritten


def test_explain_uses_the_module_mode_and_leaves_it_alone() -> None:
    block, x = training_block("llama", widths=(64,)), rows(2, 32, 128)
    weights = [p.detach().clone() for p in block.parameters()]
    state = torch.get_rng_state()
    assert explain(block, x).graphs[0].training
    block.eval()
    assert not explain(block, x).graphs[0].training
    assert all(torch.equal(a, b) for a, b in zip(weights, block.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in block.parameters())


def test_explain_is_not_silenced_by_the_recompile_limit() -> None:
    """More calls than Dynamo recompiles one function; each looks at a graph of its own."""
    x = rows(64, 128)

    def scaled(factor: float) -> Any:
        def call(x: Tensor) -> Tensor:
            return x * factor

        return call

    for i in range(12):
        assert len(explain(scaled(i), x, training=False).graphs) == 1


def test_explain_of_a_function_that_compiles_nothing() -> None:
    report = explain(lambda: 3, training=False)
    assert report.graphs == []
    assert "no graph" in str(report)
