"""What the graph looks like afterwards, and that a failed rewrite leaves it as it was."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from compiling import calls, graphs, listing, ops, run
from models import inference_block, llama, rows, tokens, training_block, wrap_training_
from numerics import assert_same_bytes, sqnr
from torch import Tensor, nn
from torch.fx import Graph, Node

from mxnorm_pass import MXNormConfig, MXNormPass
from mxnorm_pass.ops import COLWISE_OP, OP
from mxnorm_pass.recognise.aten import shape as aten_shape
from mxnorm_pass.rewrite import fold, site

aten = torch.ops.aten


def row_reductions(graph: Graph, k: int) -> list[Node]:
    """Means over rows of length k: what MXNorm does away with."""
    return [
        n for n in calls(graph, aten.mean.dim) if n.all_input_nodes[0].meta["val"].shape[-1] == k
    ]


@pytest.mark.parametrize("form", ["torch", "reciprocal_sqrt", "sqrt_division", "gemma4"])
def test_no_row_mean_is_left(form: str) -> None:
    """rsqrt, 1/sqrt, sqrt+div and pow(-0.5): forward and backward read the op's rstd only."""
    capture = graphs(training_block(form, widths=(64,)), rows(2, 32, 128).requires_grad_())
    assert len(row_reductions(capture.before[0], 128)) == 1
    assert row_reductions(capture.after[0], 128) == []
    for target in (aten.rsqrt.default, aten.sqrt.default):
        assert calls(capture.after[0], target) == []
    (op,) = calls(capture.after[0], OP)
    (rstd,) = (g for g in op.users if g.args[1] == 2)
    reached = [rstd]
    for node in reached:
        per_row = (u for u in node.users if aten_shape(u)[-1:] == (1,))
        reached.extend(u for u in per_row if u not in reached)
    assert {u.meta["partitioner_tag"] for n in reached for u in n.users} == {
        "is_forward",
        "is_backward",
    }


@pytest.mark.parametrize("form", ["torch", "gemma", "gemma4", "t5", "bare", "sqrt_division"])
def test_estimate_and_its_gradients_against_float64(form: str) -> None:
    """Every root is cut over right: row and gain gradients follow the straight-through formula.

    With the linear's own error taken out (both sides read the gradient that reaches the norm), what
    is left is bfloat16 rounding: 2^-9 relative per element, some 50 dB.
    """

    class Probe(nn.Module):
        """The MX linear's output is ignored but for keeping the site; the norm's own is
        returned."""

        def __init__(self) -> None:
            super().__init__()
            self.block = training_block(form, k=768, widths=(64,))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.block.norm(x)
            return y, self.block.linears[0](y).detach()

    model, x = Probe(), rows(64, 768)
    torch.manual_seed(0)
    result = run(model, x, off=False)
    assert result.report.rewritten == 1

    from mxnorm_pass import reference

    rho = reference.rstd(x, 1e-6).double()
    weight = model.block.norm.weight
    gain = torch.ones(768).double() if weight is None else weight.detach().double()
    gain = gain + 1 if form == "gemma" else gain
    x64 = x.double()
    assert sqnr(x64 * rho * gain, result.outputs[0]) > 45
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(64, 768, generator=generator).to(torch.bfloat16).double()
    u = dy * gain
    dx = rho * u - x64 * rho**3 * (x64 * u).mean(-1, keepdim=True)
    assert sqnr(dx, result.gradients["input0"]) > 40
    if weight is not None:
        dgain = (dy * x64 * rho).sum(0)
        assert sqnr(dgain, result.gradients["block.norm.weight"]) > 40


def test_idempotent_and_deterministic() -> None:
    """A second pass finds and changes nothing; two passes over equal graphs give one text."""
    capture = graphs(training_block("llama"), rows(2, 32, 128).requires_grad_())
    once = capture.after[0]
    again = copy.deepcopy(capture.before[0])
    MXNormPass(MXNormConfig(strict=True))(again)
    assert listing(again) == listing(once)
    second = MXNormPass(MXNormConfig(strict=True))
    second(again)
    assert second.report.sites == []
    assert listing(again) == listing(once)


def test_metadata_is_right_for_every_node() -> None:
    """A fresh propagation of fake tensors gives the dtypes, shapes and strides written."""
    for model, training in ((training_block("gemma"), True), (inference_block("torch"), False)):
        x = rows(2, 32, 128)
        capture = graphs(model, x.requires_grad_(training), training=training)
        graph = capture.after[0]
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            val = node.meta["val"]
            args = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
            kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
            leaves = torch.utils._pytree.tree_leaves
            mode = next(v for v in leaves((args, val)) if isinstance(v, Tensor)).fake_mode
            with mode:
                expected = node.target(*args, **kwargs)
            for a, b in zip(leaves(val), leaves(expected), strict=True):
                if isinstance(a, Tensor):
                    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), (
                        node.name
                    )


def test_new_nodes_say_where_they_come_from() -> None:
    capture = graphs(training_block("torch", widths=(64,)), rows(2, 32, 128).requires_grad_())
    known = {n.name for n in capture.before[0].nodes}
    new = [n for n in capture.after[0].nodes if n.name not in known]
    assert len(new) > 5
    (columns,) = calls(capture.after[0], COLWISE_OP)
    for node in new:
        assert "stack_trace" in node.meta
        if node is columns or columns in node.all_input_nodes or "columns" in str(node.args):
            assert node.meta["partitioner_tag"] == "is_backward"
            assert "fwd_nn_module_stack" in node.meta
        else:
            assert node.meta["partitioner_tag"] == "is_forward"
            assert "nn_module_stack" in node.meta


def test_norm_output_is_gone_from_inference() -> None:
    """In inference nobody reads the bfloat16 norm output any more, also with symbolic sizes."""
    for dynamic in (False, True):
        capture = graphs(
            inference_block("llama"), rows(2, 32, 128), training=False, dynamic=dynamic
        )
        before, after = capture.before[0], capture.after[0]
        assert len(calls(before, aten.amax.default)) == 2
        assert calls(after, aten.amax.default) == []
        (op,) = calls(after, OP)
        row = [n for n in after.nodes if n.op == "placeholder" and n in op.all_input_nodes]
        assert all(u is op or u.target is aten.sym_size.int for n in row for u in n.users)


def test_users_dead_code_is_not_touched() -> None:
    """Only what the rewrite orphaned is erased."""
    capture = graphs(inference_block("llama"), rows(2, 32, 128), training=False)
    graph = capture.before[0]
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        dead = graph.call_function(aten.neg.default, (next(iter(graph.nodes)),))
    dead.meta["val"] = next(iter(graph.nodes)).meta["val"]
    MXNormPass(MXNormConfig(strict=True))(graph)
    assert calls(graph, OP) and dead in graph.nodes


@pytest.mark.parametrize("broken", ["_cut_over", "fold_gain"])
def test_failure_leaves_the_site_as_it_was(broken: str) -> None:
    """An internal failure is reported with its traceback, the graph untouched; strict raises."""
    capture = graphs(training_block("llama"), rows(2, 32, 128).requires_grad_())

    def fail(*args: object) -> None:
        if broken == "fold_gain":
            fold.fold_gain(*args)  # type: ignore[arg-type]
        raise RuntimeError("on purpose")

    graph = capture.before[0]
    untouched = copy.deepcopy(graph)
    with mock.patch.object(site, broken, fail):
        tolerant = MXNormPass()
        tolerant(graph)
        (entry,) = tolerant.report.sites
        assert (entry.status, entry.reason) == ("declined", "internal_error")
        assert "on purpose" in entry.detail and "Traceback" in entry.detail
        assert listing(graph) == listing(untouched)
        with pytest.raises(RuntimeError, match="on purpose"):
            MXNormPass(MXNormConfig(strict=True))(copy.deepcopy(graph))
    # And nothing was lost: the same graph is rewritten once the fault is gone.
    healthy = MXNormPass(MXNormConfig(strict=True))
    healthy(graph)
    assert healthy.report.rewritten == 1
    assert [n.target for n in graph.nodes] == [n.target for n in capture.after[0].nodes]


def test_failure_of_recognition_is_contained() -> None:
    from mxnorm_pass.recognise import sites

    capture = graphs(inference_block("llama"), rows(2, 32, 128), training=False)
    with mock.patch.object(sites, "find_norm", side_effect=RuntimeError("on purpose")):
        tolerant = MXNormPass()
        tolerant(capture.before[0])
    assert {s.reason for s in tolerant.report.sites} == {"internal_error"}
    with mock.patch.object(sites, "cast_site", side_effect=RuntimeError("on purpose")):
        tolerant = MXNormPass()
        tolerant(capture.before[0])
    assert {s.reason for s in tolerant.report.sites} == {"internal_error"}
    assert not tolerant.report.graphs[0].failure
    with mock.patch.object(sites, "anchors", side_effect=RuntimeError("on purpose")):
        tolerant = MXNormPass()
        tolerant(capture.before[0])
    assert "on purpose" in (tolerant.report.graphs[0].failure or "")
    assert "the pass failed on a graph" in str(tolerant.report)


def test_shared_weight_keeps_its_cast() -> None:
    """Two linears with one weight, of which one is no site: the gain goes into the kernel."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = training_block("torch", widths=(64,))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            from torchao.prototype.mx_formats.mx_tensor import MXTensor

            weight = MXTensor.to_mx(self.block.linears[0].weight, torch.float8_e4m3fn, 32)
            a = MXTensor.to_mx(self.block.norm(x), torch.float8_e4m3fn, 32)
            b = MXTensor.to_mx(x, torch.float8_e4m3fn, 32)
            return torch.mm(a, weight.t()), torch.mm(b, weight.t())

    model, x = Shared(), rows(64, 128)
    config = MXNormConfig(gain="fold", strict=True)
    with torch.no_grad():
        result = run(model, x, training=False, config=config)
        plain = run(model, x, training=False, off=True)
    assert [s.reason for s in result.report.sites] == [None, "graph_input"]
    assert result.report.sites[0].spec["gain_at"] == "kernel"
    assert torch.equal(result.outputs[1], plain.outputs[1])


def test_two_gains_on_one_row() -> None:
    """Three norms of one row: three ops, and no row mean."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                inference_block("torch", widths=(64,), seed=i) for i in range(3)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(b(x)[0] for b in self.blocks)

    model, x = Three(), rows(64, 128)
    capture = graphs(model, x, training=False)
    assert len(calls(capture.after[0], OP)) == 3
    assert row_reductions(capture.after[0], 128) == []
    config = MXNormConfig(rms="exact", strict=True)
    result = run(model, x, training=False, config=config)
    for got, expected in zip(
        result.outputs, run(model, x, training=False, off=True).outputs, strict=True
    ):
        assert_same_bytes(got, expected)


def test_in_place_change_between_norm_and_cast() -> None:
    """AOTAutograd makes it functional: declined where the function is another, right where it is
    not."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = inference_block("torch", widths=(64,))

        def forward(self, x: Tensor) -> Tensor:
            y = self.block.norm(x)
            y.add_(1)
            return self.block.linears[0](y)

    model, x = InPlace(), rows(64, 128)
    result = run(model, x, training=False, config=MXNormConfig(rms="exact"))
    assert [s.reason for s in result.report.sites] == ["norm_form"]
    assert_same_bytes(result.outputs[0], run(model, x, training=False, off=True).outputs[0])


@pytest.mark.long
def test_checkpointed_llama_recomputes_bitwise() -> None:
    """transformers' gradient checkpointing: recompute tags carried, gradients those without it."""
    model = wrap_training_(llama(layers=1, hidden=128), skip=("lm_head",))
    ids = tokens(1, 32)
    plain = run(model, input_ids=ids)
    assert plain.report.rewritten == 2
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    capture = graphs(model, input_ids=ids)
    tagged = [n for n in ops(capture.after[0]) if n.meta.get("recompute") is not None]
    assert len(tagged) == 2
    checkpointed = run(model, input_ids=ids)
    assert checkpointed.report.rewritten == 2
    for name, gradient in plain.gradients.items():
        assert_same_bytes(checkpointed.gradients[name], gradient, name)
