"""Living with others: torch's caches, other passes, other compiles, varying lengths, one compile
for equal layers, compiled autograd.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import run
from models import (
    HAS_WEIGHT_WRAPPER,
    Block,
    TrainedHandLinear,
    make_norm,
    rows,
    training_block,
    wrap_training_,
)
from numerics import assert_same_bytes, bits
from test_backend import NO_CPP, Counting, python
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mxnorm_pass
from mxnorm_pass import MXNormConfig, MXNormPass, backend, graph_pass, inductor_options
from mxnorm_pass.report import store

EAGER = {"mxnorm.inner": "eager"}


@contextlib.contextmanager
def caches() -> Iterator[None]:
    """Torch's caches on, as they are for a user; the other tests switch them off."""
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


def cached_step(**options: Any) -> dict[str, Any]:
    """Compile a training step through Inductor with its caches on: hits, report, and bytes."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    block = wrap_training_(Block(make_norm("llama", 128), [nn.Linear(128, 64, bias=False)]))
    block.bfloat16()
    ours = backend(**options)
    x = rows(2, 32, 128).requires_grad_()
    with caches():
        out = torch.compile(block, backend=ours, options=NO_CPP)(x)[0]
        out.float().sum().backward()
    digest = hashlib.sha256()
    for tensor in (out.detach(), x.grad, block.norm.weight.grad):
        digest.update(bits(tensor).numpy().tobytes())
    return {
        "whole": counters["aot_autograd"]["autograd_cache_hit"],
        "graphs": counters["inductor"]["fxgraph_cache_hit"],
        "missed": counters["aot_autograd"]["autograd_cache_miss"],
        "report": [[g.from_cache, g.training, g.rewritten] for g in ours.report.graphs],
        "sites": [[s.norm, s.consumers, s.spec["gain_at"]] for s in ours.report.sites],
        "bytes": digest.hexdigest(),
    }


def changed_step(folder: Path) -> dict[str, Any]:
    """A :func:`cached_step` with one source of the package changed, in a copy below ``folder``."""
    copied = folder / "mxnorm_pass"
    shutil.copytree(Path(mxnorm_pass.__file__).parent, copied)
    unchanged = MXNormPass().uuid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_pass, "__file__", str(copied / "graph_pass.py"))
        graph_pass._sources.cache_clear()
        assert MXNormPass().uuid() == unchanged, "a copy of the same sources"
        # Any file, however deep: here the one that all the others use.
        with (copied / "recognise" / "aten.py").open("a") as file:
            file.write("# changed\n")
        graph_pass._sources.cache_clear()
        return cached_step()


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.skipif(not HAS_WEIGHT_WRAPPER, reason="torchao's weight wrapper needs torch 2.12")
def test_second_process_takes_a_training_step_from_torchs_caches(tmp_path: Path) -> None:
    """Forward and backward from AOTAutograd's cache, reported as what they are: the rewritten ones.

    A changed source file of the package misses it (``test_backend.py`` has options). Processes of
    their own: the key holds more of a process than a test can put back.
    """

    def steps(*calls: str) -> list[dict[str, Any]]:
        made = ", ".join(f"test_living.{call}" for call in calls)
        script = f"import json, pathlib, test_living; print(json.dumps([{made}]))"
        done = python("-c", script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    (first,) = steps("cached_step()")
    assert first["missed"] == 1 and first["whole"] == first["graphs"] == 0
    assert first["report"] == [[False, True, 1]]
    second, changed = steps("cached_step()", f"changed_step(pathlib.Path({str(tmp_path)!r}))")
    # One entry for the whole; its forward and its backward are two of Inductor's.
    assert second["whole"] == 1 and second["missed"] == 0 and second["graphs"] == 2
    assert second["report"] == [[True, True, 1]]
    assert second["sites"] == first["sites"]
    assert second["bytes"] == first["bytes"]
    assert changed["missed"] == 1 and changed["whole"] == changed["graphs"] == 0
    assert changed["report"] == [[False, True, 1]] and changed["bytes"] == first["bytes"]


class Either(nn.Module):
    """Two norms without a gain, of which one is used: the graphs differ in no character."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = make_norm("bare", 128), make_norm("bare", 128)
        self.linear = TrainedHandLinear(128, 32, bias=False).bfloat16()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(getattr(self, self.name)(x))


@pytest.mark.inductor
def test_choices_by_path_are_not_answered_by_the_graph_of_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's keys do not hold module paths: what is rewritten for one would serve the other."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, outputs, reports = rows(64, 128), {}, {}
    with caches(), torch.no_grad():
        for name in ("first", "second", "first"):
            torch._dynamo.reset()
            ours = backend(exclude=("second",))
            outputs[name] = torch.compile(Either(name), backend=ours, options=NO_CPP)(x)
            ((site,),) = (graph.sites for graph in ours.report.graphs)
            reports[name] = (site.norm, site.reason)
            hit = ours.report.graphs[0].from_cache
    assert hit, "the same path again is a hit"
    assert reports == {"first": ("first", None), "second": ("second", "excluded")}
    plain = run(Either("second"), x, training=False, off=True)
    assert_same_bytes(outputs["second"], plain.outputs[0])
    assert not torch.equal(outputs["first"], outputs["second"])


def test_a_kept_report_is_of_the_same_path_and_autocast() -> None:
    """Everything that a report depends on is in its key; the graph's text does not say these."""
    keys = []

    def collect(gm: Any, inputs: Any) -> Any:
        keys.append(store.key(gm, inputs, "pass"))
        return gm.forward

    for name, autocast in (("first", False), ("second", False), ("first", True), ("first", False)):
        torch._dynamo.reset()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
            torch.compile(Either(name), backend=collect)(rows(64, 128))
    assert None not in keys and len(set(keys)) == 3 and keys[0] == keys[3]


HOOKS = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


class Halving(Counting):
    """Somebody else's pass, which does something: every matrix product is halved."""

    def __call__(self, graph: Any) -> None:
        super().__call__(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            with graph.inserting_after(node):
                half = graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
            half.meta = dict(node.meta)
            node.replace_all_uses_with(
                half, delete_user_cb=lambda user, half=half: user is not half
            )


@pytest.mark.inductor
@pytest.mark.parametrize("way", ("backend", "options"))
def test_other_passes_on_every_hook_run_and_stay(way: str) -> None:
    """Theirs and ours both take effect, with the backend and with Inductor's own, twice over."""
    model, x = Either("first"), rows(64, 128)
    alone = run(model, x, training=False).outputs[0]
    theirs = {hook: Counting() for hook in HOOKS} | {"joint_custom_pre_pass": Halving()}
    with torch._inductor.config.patch(theirs), torch.no_grad():
        if way == "backend":
            ours = backend()
            compiled = torch.compile(model, backend=ours, options=NO_CPP)
        else:
            options = {**inductor_options(), **NO_CPP}
            ours = options["joint_custom_pre_pass"]
            compiled = torch.compile(model, options=options)
        assert_same_bytes(compiled(x), alone / 2)
        assert ours.report.rewritten == 1
        assert {hook: p.calls for hook, p in theirs.items()} == dict.fromkeys(HOOKS, 1)
        for hook, one in theirs.items():
            assert getattr(torch._inductor.config, hook) is one, hook
        # A compile that raises in the middle restores the hooks too.
        torch._dynamo.reset()
        required = MXNormConfig(require_rewrites=2)
        with pytest.raises(Exception, match="1 of 2 required"):
            if way == "backend":
                torch.compile(model, backend=backend(required), options=NO_CPP)(x)
            else:
                torch.compile(model, options={**inductor_options(required), **NO_CPP})(x)
        for hook, one in theirs.items():
            assert getattr(torch._inductor.config, hook) is one, hook
    for hook in HOOKS:
        assert getattr(torch._inductor.config, hook) is None


@pytest.mark.slow
@pytest.mark.inductor
def test_no_leak_into_other_compiles() -> None:
    """Another model is compiled before, while ours waits for its backward, and after one of ours
    that raised: bitwise the same each time, and no graph of it meets the pass.
    """
    model, x = Either("first"), rows(64, 128)
    tangent = rows(64, 32, seed=1)
    met: list[Any] = []
    apply = MXNormPass.apply

    def spy(self: MXNormPass, graph: Any) -> Any:
        met.append(self)
        return apply(self, graph)

    def forward(**how: Any) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        return torch.compile(Either("first"), options=NO_CPP, **how)(leaf), leaf

    def backward(out: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
        out.backward(tangent)
        return out.detach(), leaf.grad

    with mock.patch.object(MXNormPass, "apply", spy):
        theirs = [backward(*forward())]
        torch._dynamo.reset()
        ours = backend()
        waiting = forward(backend=ours)
        theirs.append(backward(*forward()))
        rewritten = backward(*waiting)
        assert len(met) == 1 and ours.report.rewritten == 1
        failing = torch.compile(lambda y: model(y) + 1, backend=backend(require_rewrites=2))
        with pytest.raises(Exception, match="1 of 2 required"), torch.no_grad():
            failing(x)
        torch._dynamo.reset()
        theirs.append(backward(*forward()))
        assert len(met) == 2
    for pair in theirs:
        for got, expected, other in zip(pair, theirs[0], rewritten, strict=True):
            assert_same_bytes(got, expected)
            assert not torch.equal(got, other)


def train(compiled: Any, lengths: tuple[int, ...], *, mark: bool = False) -> int:
    """Forward and backward at each length; the number of graphs that were compiled."""
    torch._dynamo.reset()
    counters.clear()
    for length in lengths:
        x = rows(length, 128).requires_grad_()
        if mark:
            # Raises where a size is specialised.
            torch._dynamo.mark_dynamic(x, 0)
        out = compiled(x)[0]
        out.float().sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("mark", "graphs"),
    [
        pytest.param(False, 2, marks=pytest.mark.long, id="automatic"),
        pytest.param(True, 1, marks=pytest.mark.slow, id="marked"),
    ],
)
def test_varying_lengths_compile_as_often_as_without(mark: bool, graphs: int) -> None:
    """One static graph and one for any length, or the latter at once; then never again."""
    # 32 tokens are one block, and one is a size of its own to torch, with and without the pass.
    lengths = (64, 96, 160, 64) if mark else (32, 64, 96, 160, 64, 32)
    block = training_block("llama", widths=(64,))
    ours = backend(inner="eager", strict=True)
    plain = train(torch.compile(block, backend="aot_eager"), lengths, mark=mark)
    compiled = torch.compile(block, backend=ours)
    assert train(compiled, lengths, mark=mark) == plain == graphs
    assert [graph.rewritten for graph in ours.report.graphs] == [1] * graphs
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(rows(224, 128).requires_grad_())
    # Stances that step around a compile step around the pass.
    x = rows(32, 128).requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(compiled(x)[0], block(x)[0])


def through_one(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The same layers as one module that takes their parameters in turn."""
    torch._dynamo.reset()
    turn = training_block("llama", widths=(128,))
    compiled = torch.compile(turn, backend=backend(inner="eager"))
    for layer in layers:
        turn.load_state_dict(layer.state_dict())
        x = compiled(x)[0].detach().requires_grad_()
    return x.detach()


@pytest.mark.parametrize("how", ("object", "name"))
def test_equal_layers_share_one_compile(how: str) -> None:
    """``layer.compile()``: one compile for all; each still runs on its own parameters."""
    layers = nn.ModuleList(training_block("llama", widths=(128,), seed=i) for i in range(4))
    x = rows(2, 32, 128)
    expected = through_one(layers, x)
    torch._dynamo.reset()
    counters.clear()
    report = mxnorm_pass.last_report()
    before = len(report.graphs)
    ours = backend(inner="eager", strict=True)
    for layer in layers:
        if how == "object":
            layer.compile(backend=ours)
        else:
            layer.compile(backend="mxnorm", options=EAGER)
    y = x.clone().requires_grad_()
    for layer in layers:
        y = layer(y)[0]
    last = y.detach()
    y.float().sum().backward()
    graphs = ours.report.graphs if how == "object" else report.graphs[before:]
    assert counters["stats"]["unique_graphs"] == 1
    assert [graph.rewritten for graph in graphs] == [1]
    assert_same_bytes(last, expected)
    gradients = [layer.norm.weight.grad for layer in layers]
    assert all(g is not None and bool(g.any()) for g in gradients)


def test_compiled_autograd() -> None:
    """The backward, captured and compiled again: bitwise the same gradients, and a graph that holds
    no site does not fail what the forward's had to meet.
    """
    block, x = training_block("llama", widths=(64,)), rows(2, 32, 128)
    expected = run(block, x)
    torch._dynamo.reset()
    counters.clear()
    block.zero_grad(set_to_none=True)
    ours = backend(inner="eager", strict=True, require_rewrites=1)
    leaf = x.clone().requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=ours)):
        out = torch.compile(block, backend=ours)(leaf)[0]
        generator = torch.Generator().manual_seed(0)
        out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    assert counters["compiled_autograd"]["captures"] == 1
    # Casts of gradients are no sites that somebody missed.
    assert [(len(graph.sites), graph.rewritten) for graph in ours.report.graphs] == [(1, 1), (0, 0)]
    assert_same_bytes(out.detach(), expected.outputs[0])
    for name, gradient in expected.gradients.items():
        got = leaf.grad if name == "input0" else block.get_parameter(name).grad
        assert_same_bytes(got, gradient, name)
