"""The residual add in front of a norm: the op forms the sum, and everybody else reads it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import calls, graphs, listing, ops, run
from models import (
    HAS_WEIGHT_WRAPPER,
    Block,
    inference_block,
    llama,
    llama_form,
    rows,
    tokens,
    training_block,
    wrap_training_,
)
from numerics import assert_same_bytes
from test_casts import Straight, torchao_dequantised
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tracing import Rewritten, assert_fake_values, rewrite, trace

from mxnorm_pass import MXNormConfig, MXNormPass, graph_pass
from mxnorm_pass.ops import ADD_OP, OP

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
EXACT = MXNormConfig(rms="exact", strict=True)
M, K = 32, 64


def mxfp8(y: Tensor) -> Tensor:
    return torchao_dequantised(y, "e4m3", "RCEIL")


def nvfp4(y: Tensor) -> Tensor:
    return torchao_dequantised(y, "nvfp4", "dynamic")


def product(y: Tensor, w: Tensor, cast: Callable[[Tensor], Tensor] = mxfp8) -> Tensor:
    """An MX linear, straight through in the backward."""
    return Straight.apply(y, w, w, lambda t, _: cast(t))


def traced(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    training: bool = False,
    dtypes: tuple[torch.dtype, ...] = (),
    config: MXNormConfig = EXACT,
) -> tuple[Rewritten, list[Tensor]]:
    """``fn(x, r, g, w, ...)`` rewritten, checked against itself, and its inputs."""
    sizes = [(M, K), (M, K), (K,), (16, K), *shapes]
    kinds = [*dtypes, *(torch.bfloat16,) * (len(sizes) - len(dtypes))]
    values = [rows(*s, seed=i).to(d) for i, (s, d) in enumerate(zip(sizes, kinds, strict=True))]
    got = rewrite(trace(fn, *(v.clone().requires_grad_(training) for v in values)), config)
    assert_fake_values(got.after)
    if config.rms == "exact":
        tangents = [n.meta["val"] for n in got.placeholders if n.name.startswith("tangents")]
        extra = [rows(*t.shape, seed=9 + i).to(t.dtype) for i, t in enumerate(tangents)]
        before, after = got.runs(*values[: len(got.placeholders) - len(extra)], *extra)
        assert before.outputs
        for a, b in zip(after.outputs, before.outputs, strict=True):
            assert_same_bytes(a, b)
    return got, values


def absorbed(got: Rewritten) -> list[bool]:
    """What the report says of each site, which must be what the graph says."""
    flags = [site.spec["residual"] for site in got.sites]
    assert sum(flags) == len(calls(got.after, ADD_OP))
    assert flags.count(False) == len(calls(got.after, OP))
    return flags


def sums(got: Rewritten) -> list[Any]:
    """Additions of rows that are left in the forward."""
    found = calls(got.after, aten.add.Tensor)
    return [
        n
        for n in found
        if n.meta["val"].shape == (M, K) and n.meta.get("partitioner_tag") != "is_backward"
    ]


# --- right, and gone ------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=["bf16", "f32", "f32+bf16", "bf16+f32"],
)
def test_sum_is_absorbed(training: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """The stream and the backward read the op's sum, in the dtype that torch gives it."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        y = llama_form(h, g, 1e-6)
        return product(y, w.to(y.dtype)), h * 2

    got, _ = traced(fn, training=training, dtypes=dtypes)
    assert absorbed(got) == [True] and sums(got) == []
    (op,) = calls(got.after, ADD_OP)
    (total,) = (n for n in op.users if n.args[1] == 3)
    assert total.meta["val"].dtype is torch.promote_types(*dtypes)
    assert [n.meta["val"].dtype for n in op.args[:2]] == list(dtypes)
    assert "+add" in str(got.report)
    if training:
        reached = [total]
        for node in reached:
            reached += [u for u in node.users if u.target is CONVERT and u not in reached]
        tags = {u.meta["partitioner_tag"] for node in reached for u in node.users}
        assert tags == {"is_forward", "is_backward"}


def test_a_sum_that_nobody_else_reads_is_no_output() -> None:
    got, _ = traced(lambda x, r, g, w: product(llama_form(x + r, g, 1e-6), w))
    assert absorbed(got) == [True]
    (op,) = calls(got.after, ADD_OP)
    assert {n.args[1] for n in op.users} == {0, 1}


def test_doubled_row() -> None:
    """``x + x``: one tensor twice."""
    got, _ = traced(lambda x, r, g, w: product(llama_form(x + x, g, 1e-6), w) + r[:, :16])
    assert absorbed(got) == [True]
    (op,) = calls(got.after, ADD_OP)
    assert op.args[0] is op.args[1]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_one_of_several_readers_forms_the_sum(training: bool) -> None:
    """Two norms of one row, and one of them cast in two ways: one addition for three ops."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        h = x + r
        y = llama_form(h, g, 1e-6)
        floor = product(y, w, lambda t: torchao_dequantised(t, "e5m2", "FLOOR"))
        return product(y, w), floor, product(llama_form(h, other, 1e-5), w), h

    got, _ = traced(fn, (K,), training=training)
    assert sorted(absorbed(got)) == [False, False, True] and sums(got) == []
    (op,) = calls(got.after, ADD_OP)
    for reader in calls(got.after, OP):
        assert reader.args[0].args == (op, 3)


def test_gain_that_comes_later_than_the_sum() -> None:
    """Ordered afterwards: the op waits for it, and the readers of the sum for the op."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        stream = h.relu()
        return product(llama_form(h, (1 + g.float()).bfloat16(), 1e-6), w), stream

    got, _ = traced(fn)
    assert absorbed(got) == [True] and sums(got) == []


class Layer(nn.Module):
    """A pre-norm half layer: ``x + W2 relu(W1 norm(x))``, the row one sum deep."""

    def __init__(self, block: Block, back: nn.Module):
        super().__init__()
        self.block, self.back = block, back

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        (y,) = self.block(h)
        return h, self.back(y.relu())


class Stream(nn.Module):
    """Half layers behind each other, each in a region of activation checkpointing or none."""

    def __init__(self, layers: int, regions: bool):
        super().__init__()
        self.regions = regions
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            Layer(
                training_block("llama", k=K, widths=(64,), seed=i),
                nn.Linear(64, K, bias=False).bfloat16(),
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        r = x.flip(0)
        for layer in self.layers:
            if self.regions:
                x, r = checkpoint(layer, x, r, use_reentrant=False)
            else:
                x, r = layer(x, r)
        return x + r


@pytest.mark.parametrize("regions", [False, True], ids=["plain", "checkpointed"])
def test_stream_and_all_gradients(regions: bool) -> None:
    """What one checkpointed region hands to the next is saved there, so it stays a sum; the rest is
    recomputed where it was, and every byte is kept.
    """
    model, x = Stream(3, regions), rows(M, K)
    capture = graphs(model, x.clone().requires_grad_(), config=EXACT)
    found = calls(capture.after[0], ADD_OP)
    taken = [not regions, not regions, True]
    assert len(found) == sum(taken)
    assert len(calls(capture.after[0], OP)) == 3 - sum(taken)
    assert all((n.meta.get("recompute") is not None) == regions for n in ops(capture.after[0]))
    # The last sum of the stream has no norm behind it.
    wide = [n for n in calls(capture.after[0], aten.add.Tensor) if n.meta["val"].shape == (M, K)]
    forward = [n.meta["partitioner_tag"] for n in wide].count("is_forward")
    assert forward == 1 + taken.count(False)
    for op in found:
        assert "norm" in str(op.meta["nn_module_stack"])
        for output in op.users:
            inside = "norm" in str(output.meta["nn_module_stack"])
            assert inside == (output.args[1] != 3), "the sum was formed in front of the norm"
    off, on = run(model, x, off=True), run(model, x, config=EXACT)
    assert [s.spec["residual"] for s in on.report.sites] == taken
    assert_same_bytes(on.outputs[0], off.outputs[0])
    assert on.gradients.keys() == off.gradients.keys() and len(on.gradients) == 10
    for name, gradient in off.gradients.items():
        assert_same_bytes(on.gradients[name], gradient, name)


def test_a_sum_of_another_checkpointed_region_stays() -> None:
    """What one region hands to the next is kept; the op is recomputed: not one decision."""

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = training_block("llama", k=K, widths=(64,))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = checkpoint(lambda t: t.relu() + t, x, use_reentrant=False)
            (y,) = checkpoint(self.block, h, use_reentrant=False)
            return y, h * 2

    model, x = Regions(), rows(M, K)
    off, on = run(model, x, off=True), run(model, x, config=EXACT)
    assert [s.spec["residual"] for s in on.report.sites] == [False]
    for name, gradient in off.gradients.items():
        assert_same_bytes(on.gradients[name], gradient, name)


@pytest.mark.parametrize("training", [False, True])
def test_dynamic_rows(training: bool) -> None:
    """Sizes that were read off the sum are read off the op's, and nothing is specialised.

    eps becomes an input of the graph then, and torch writes ``mean + eps`` anew without any tags:
    the op has those of the mean.
    """

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = training_block if training else inference_block
            self.block = make("llama", k=K, widths=(64,))

        def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            h = x + r
            return self.block(h)[0], h

    model = Half()
    x, r = rows(2, M, K), rows(2, M, K, seed=1)
    if training:
        x, r = x.requires_grad_(), r.requires_grad_()
    capture = graphs(model, x, r, training=training, dynamic=True, config=EXACT)
    (op,) = calls(capture.after[0], ADD_OP)
    assert op.meta.get("partitioner_tag") == ("is_forward" if training else None)
    assert any(isinstance(s, torch.SymInt) for s in op.meta["val"][3].shape)
    assert_fake_values(capture.after[0])
    on = run(model, x, r, training=training, dynamic=True, config=EXACT)
    off = run(model, x, r, training=training, dynamic=True, off=True)
    for a, b in zip(on.outputs, off.outputs, strict=True):
        assert_same_bytes(a, b)
    for name, gradient in off.gradients.items():
        assert_same_bytes(on.gradients[name], gradient, name)


@pytest.mark.long
@pytest.mark.skipif(not HAS_WEIGHT_WRAPPER, reason="torchao's weight wrapper needs torch 2.12")
def test_training_llama_and_all_gradients() -> None:
    model = wrap_training_(llama(layers=2, hidden=128), skip=("lm_head",))
    ids = tokens(1, 32)
    off, on = run(model, input_ids=ids, off=True), run(model, input_ids=ids, config=EXACT)
    assert [s.spec["residual"] for s in on.report.sites] == [False, True, True, True]
    assert_same_bytes(on.outputs[0], off.outputs[0])
    assert on.gradients.keys() == off.gradients.keys()
    for name, gradient in off.gradients.items():
        assert_same_bytes(on.gradients[name], gradient, name)


# --- left alone -----------------------------------------------------------------------------------


def of_the_sum(h: Tensor, g: Tensor) -> Tensor:
    return g * h.amax(0)


STAY: dict[str, Callable[..., Tensor]] = {
    "graph input": lambda x, r, g, w: product(llama_form(x, g, 1e-6), w),
    "no sum": lambda x, r, g, w: product(llama_form(x * r, g, 1e-6), w),
    "scalar": lambda x, r, g, w: product(llama_form(x + 0.5, g, 1e-6), w),
    "alpha": lambda x, r, g, w: product(llama_form(torch.add(x, r, alpha=2), g, 1e-6), w),
    "a vector for all rows": lambda x, r, g, w: product(llama_form(x + r[0], g, 1e-6), w),
    "a value per row": lambda x, r, g, w: product(llama_form(x + r[:, :1], g, 1e-6), w),
    "a half": lambda x, r, g, w: product(llama_form((x.half() + r), g, 1e-6), w.float()),
    "a view of a sum": lambda x, r, g, w: product(
        llama_form((x + r).view(2, M // 2, K), g, 1e-6).view(M, K), w
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_other_rows_stay_operands(name: str) -> None:
    got, _ = traced(STAY[name])
    assert [s.status for s in got.sites] == ["rewritten"], got.report
    assert absorbed(got) == [False]
    assert "+add" not in str(got.report)


def test_gain_computed_from_the_sum() -> None:
    """An input of the op that needs the sum first: no order of the two would do."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> Tensor:
        h = x + r
        return product(llama_form(h, of_the_sum(h, g), 1e-6), w)

    got, _ = traced(fn)
    assert [s.status for s in got.sites] == ["rewritten"] and absorbed(got) == [False]
    assert len(sums(got)) == 1


def test_gains_crosswise() -> None:
    """Each gain needs the other's row: the first op may form its sum, the second then may not."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> Tensor:
        a, b = x + r, x + x
        first = product(llama_form(a, of_the_sum(b, g), 1e-6), w)
        return first + product(llama_form(b, of_the_sum(a, g), 1e-6), w)

    got, _ = traced(fn)
    assert absorbed(got) == [True, False]


@pytest.mark.parametrize("scale", ["dynamic", "bound"])
def test_nvfp4_with_the_tensors_own_maximum(scale: Any) -> None:
    """The maximum needs the sum ahead of the op; with the static bound there is none."""
    config = MXNormConfig(rms="exact", strict=True, tensor_scale=scale)

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return product(llama_form(h, g, 1e-6), w, nvfp4), h

    if scale == "dynamic":
        got, _ = traced(fn, config=config)
    else:
        got = rewrite(
            trace(fn, rows(M, K), rows(M, K, seed=1), rows(K, seed=2), rows(16, K, seed=3)), config
        )
    assert absorbed(got) == [scale == "bound"]


def test_per_tensor_scale_computed_from_the_sum() -> None:
    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> Tensor:
        h = x + r
        outer = h.float().sum().abs() * 1e-4
        cast = lambda y: torchao_dequantised(y, "nvfp4", "static", outer)  # noqa: E731
        return cast(llama_form(h, g, 1e-6)) @ w.t()

    got, _ = traced(fn)
    assert [s.reason for s in got.sites] == ["scale_rule"], "declined before it comes to that"


@pytest.mark.parametrize("broken", ["residual_sum", "absorb"])
def test_failure_leaves_the_sum_where_it_was(broken: str) -> None:
    """An internal failure costs the absorption, not the site; strict raises."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return product(llama_form(h, g, 1e-6), w), h

    gm = trace(fn, rows(M, K), rows(M, K, seed=1), rows(K, seed=2), rows(16, K, seed=3))
    with mock.patch.object(graph_pass, "residual_sum", return_value=None):
        without = rewrite(gm)
    real = getattr(graph_pass, broken)

    def fail(*args: Any) -> None:
        real(*args)
        raise RuntimeError("on purpose")

    with mock.patch.object(graph_pass, broken, fail):
        got = rewrite(gm, MXNormConfig(rms="exact"))
        assert absorbed(got) == [False]
        assert listing(got.after) == listing(without.after)
        with pytest.raises(RuntimeError, match="on purpose"):
            MXNormPass(EXACT).apply(gm.graph)
