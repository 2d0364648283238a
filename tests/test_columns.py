"""The cast along tokens for the weight gradient: found in the backward, and made by the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import calls, run
from models import FORMS, rows, training_block
from numerics import assert_same_bytes
from test_casts import EPS, torchao_dequantised
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint
from tracing import Rewritten, assert_fake_values, rewrite, trace

from mxnorm_pass import MXNormConfig, graph_pass
from mxnorm_pass.ops import ADD_OP, COLWISE_OP, OP
from mxnorm_pass.recognise import sites

aten = torch.ops.aten
EXACT = MXNormConfig(rms="exact", strict=True)
M, K, N = 64, 96, 32
Turn = Callable[[Tensor], Tensor]


def turned(y: Tensor) -> Tensor:
    return y.reshape(-1, y.shape[-1]).t().contiguous()


class Both(torch.autograd.Function):
    """A linear that casts y along rows, and along tokens for the weight's gradient, as torchao's
    does; of the other operands w in the forward alone, which costs less to trace.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor, cast: Any) -> Tensor:
        ctx.save_for_backward(y, w)
        ctx.cast = cast
        return cast(y) @ cast(w).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, w = ctx.saved_tensors
        dout = grads[0].reshape(-1, grads[0].shape[-1])
        return grads[0] @ w, dout.t() @ ctx.cast(turned(y)).t(), None


def mxfp8(y: Tensor) -> Tensor:
    return torchao_dequantised(y, "e4m3", "RCEIL")


def traced(
    form: str = "llama",
    cast: Any = mxfp8,
    *,
    config: MXNormConfig = EXACT,
    lead: tuple[int, ...] = (M,),
    linears: int = 1,
    fn: Any = None,
) -> tuple[Rewritten, list[Tensor]]:
    """norm -> linears with both casts as a joint graph, rewritten; the inputs and tangents."""

    def model(x: Tensor, g: Tensor, *ws: Tensor) -> list[Tensor]:
        y = FORMS[form](x, None if form == "bare" else g, EPS)
        return [Both.apply(y, w, cast) for w in ws]

    weights = [0.1 * rows(N, K, seed=2 + i) for i in range(linears)]
    inputs = [rows(*lead, K), 1 + 0.3 * rows(K, seed=1), *weights]
    got = rewrite(trace(fn or model, *(i.clone().requires_grad_() for i in inputs)), config)
    tangents = [n.meta["val"] for n in got.placeholders if n.name.startswith("tangents")]
    return got, [*inputs, *(rows(*t.shape, seed=9 + i) for i, t in enumerate(tangents))]


def assert_same(got: Rewritten, inputs: list[Tensor]) -> None:
    """Outputs and gradients bit for bit, and so the operands of every matrix product."""
    before, after = got.runs(*inputs)
    assert len(before.operands) == len(after.operands) > 0
    for a, b in zip(after.operands, before.operands, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_same_bytes(x, y)
    for x, y in zip(after.outputs, before.outputs, strict=True):
        assert_same_bytes(x, y)


def maxima(graph: Graph) -> int:
    return len(calls(graph, aten.amax.default)) + len(calls(graph, aten.max.dim))


@pytest.mark.parametrize(
    ("element", "mode"),
    [
        ("e4m3", "RCEIL"),
        ("e5m2", "FLOOR"),
        ("e2m3", "CEIL"),
        ("e3m2", "EVEN"),
        ("e2m1", "RCEIL"),
        ("nvfp4", "dynamic"),
    ],
)
def test_every_cast(element: str, mode: str) -> None:
    """One op for all linears that cast alike; NVFP4's measured scale stays the graph's own."""
    linears = 2 if element == "e4m3" else 1
    got, inputs = traced(cast=lambda y: torchao_dequantised(y, element, mode), linears=linears)
    (site,) = got.sites
    (spec,) = site.spec["colwise"]
    assert site.spec["colwise_reason"] is None
    assert spec["casts"] == linears and spec["layout"] == "plain"
    for name in ("format", "block_size", "element", "scale_rule", "saturate"):
        assert spec[name] == site.spec[name]
    (op,) = calls(got.after, COLWISE_OP)
    assert op.meta["partitioner_tag"] == "is_backward"
    assert (op.args[3] is not None) == (element == "nvfp4")
    assert maxima(got.before) - maxima(got.after) == 2 * linears
    assert_fake_values(got.after)
    assert_same(got, inputs)


@pytest.mark.parametrize(
    ("form", "lead"),
    [
        ("torch", (M,)),
        ("llama", (2, 32)),
        ("gemma", (2, 2, 16)),
        ("t5", (M,)),
        ("bare", (2, 32)),
        ("no_keepdim", (M,)),
    ],
)
def test_every_form(form: str, lead: tuple[int, ...]) -> None:
    """The gain and the roundings of autograd's y, from rows of several axes."""
    got, inputs = traced(form, lead=lead)
    (op,) = calls(got.after, COLWISE_OP)
    root = op.args[1]
    assert root.args[1] == 2 and root.all_input_nodes[0].target is OP
    assert (op.args[2] is None) == (form == "bare")
    assert_same(got, inputs)


@pytest.mark.parametrize(("gain", "rms"), [("fold", "p2"), ("kernel", "p1")])
def test_straight_through(gain: str, rms: str) -> None:
    """Under the estimate, bit for bit what recomputing y from rstd gives: the gain folded into the
    weight is still in autograd's y.
    """
    config = MXNormConfig(p=int(rms[1:]), gain=gain, strict=True)
    fused, inputs = traced("torch", config=config)
    with mock.patch.object(sites, "find_columns"):
        plain, _ = traced("torch", config=config)
    assert len(calls(fused.after, COLWISE_OP)) == 1 and not calls(plain.after, COLWISE_OP)
    assert fused.sites[0].spec["gain_at"] == plain.sites[0].spec["gain_at"]
    a, b = fused.runs(*inputs)[1], plain.runs(*inputs)[1]
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert_same_bytes(x, y)


def test_other_readers_of_y_stay() -> None:
    """A plain linear, the gain's gradient, and an op of the residual add."""

    def model(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        total = x + x.flip(0)
        y = FORMS["llama"](total, g, EPS)
        return Both.apply(y, w, mxfp8), y @ v.t(), total

    got, inputs = traced(fn=model, linears=2)
    assert got.sites[0].spec["residual"] and len(calls(got.after, ADD_OP)) == 1
    (op,) = calls(got.after, COLWISE_OP)
    assert op.args[0].all_input_nodes[0].target is ADD_OP, "the row is read where the op forms it"
    assert_same(got, inputs)


def test_two_casts_are_two_ops() -> None:
    def model(x: Tensor, g: Tensor, *ws: Tensor) -> list[Tensor]:
        y = FORMS["llama"](x, g, EPS)
        casts = [mxfp8, lambda t: torchao_dequantised(t, "e3m2", "FLOOR")]
        return [Both.apply(y, w, cast) for w, cast in zip(ws, casts, strict=True)]

    got, inputs = traced(fn=model, linears=2)
    assert len(calls(got.after, COLWISE_OP)) == 2 and len(calls(got.after, OP)) == 2
    found = [c for site in got.sites for c in site.spec["colwise"] or ()]
    assert sorted(c["element"] for c in found) == ["e3m2", "e4m3"]
    assert_same(got, inputs)


OTHERS: dict[str, tuple[int, Turn, str | None]] = {
    "tokens left out": (M, lambda y: turned(y)[:, :32].contiguous(), None),
    "rows in another order": (M, lambda y: turned(y.flip(0)), None),
    "not turned": (M, lambda y: (y * 1).view(-1, K), None),
    # The middle one of three blocks of 32 lies in two columns.
    "straddling": (48, lambda y: turned(y).view(-1, 32), "48 tokens, block size 32"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_cast_of_y_along_tokens_stays(name: str) -> None:
    tokens, turn, reason = OTHERS[name]

    class Odd(Both):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            y, w = ctx.saved_tensors
            return grads[0] @ w, ctx.cast(turn(y)).sum() * w, None

    def model(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return Odd.apply(FORMS["llama"](x, g, EPS), w, mxfp8)

    got, inputs = traced(fn=model, lead=(tokens,))
    (site,) = got.sites
    assert site.status == "rewritten" and site.spec["colwise"] is None
    said = site.spec["colwise_reason"]
    assert said is None if reason is None else reason in said
    assert not calls(got.after, COLWISE_OP)
    assert_same(got, inputs)


@pytest.mark.parametrize("error", [RuntimeError("ours"), graph_pass.Decline("opaque_cast", "why")])
def test_a_failure_costs_the_site_nothing(error: Exception) -> None:
    """The cast along rows is rewritten, the other stays and says why."""

    def fails(edit: Any, site: Any, columns: Any, op: Any) -> None:
        edit.replace(columns.readers[0].codes[0], op)
        raise error

    with mock.patch.object(graph_pass, "rewrite_columns", fails):
        got, inputs = traced(config=MXNormConfig(rms="exact"))
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError, match="ours"):
                traced()
    (site,) = got.sites
    assert site.status == "rewritten" and site.spec["colwise"] is None
    reason = "internal_error" if isinstance(error, RuntimeError) else "opaque_cast: why"
    assert site.spec["colwise_reason"].startswith(reason)
    assert_same(got, inputs)


def halves(graph: Graph, owner: Any, outputs: int) -> tuple[Graph, Graph, int]:
    """Forward and backward as Inductor's partitioner cuts them, and bytes saved between them."""
    module = GraphModule(owner, graph)
    forward, backward = min_cut_rematerialization_partition(
        module, [], num_fwd_outputs=outputs, compiler="inductor"
    )
    (results,) = forward.graph.output_node().args
    saved = {n for n in results[outputs:]}
    return (
        forward.graph,
        backward.graph,
        sum(n.meta["val"].untyped_storage().nbytes() for n in saved),
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_more_is_saved_for_the_backward(recompute: bool) -> None:
    """The op stands in the backward and reads what was saved before: x, rstd, the gain."""

    def model(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        def part(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            y = FORMS["torch"](x * 2, g, EPS)
            return Both.apply(y, w, mxfp8), Both.apply(y, v, mxfp8)

        if recompute:
            return checkpoint(part, x, g, w, v, use_reentrant=False)
        return part(x, g, w, v)

    got, _ = traced(fn=model, linears=2)
    assert len(calls(got.after, COLWISE_OP)) == 1
    *_, before = halves(got.before, got.owner, 2)
    forward, backward, after = halves(got.after, got.owner, 2)
    assert after <= before
    assert not calls(forward, COLWISE_OP)
    (op,) = calls(backward, COLWISE_OP)
    assert calls(forward, OP) and all(n.op in ("placeholder", "call_function") for n in op.args[:3])


@pytest.mark.long
def test_mxfp8_linears_compiled() -> None:
    """torchao's module with static and symbolic sizes: gradients bit for bit."""
    block, x = training_block("torch", widths=(64, 96)), rows(2, 32, 128)
    for dynamic in (False, True):
        plain = run(block, x, off=True, dynamic=dynamic)
        exact = run(block, x, config=EXACT, dynamic=dynamic)
        (spec,) = exact.report.sites[0].spec["colwise"]
        assert spec["casts"] == 2
        assert len(plain.gradients) == 4
        for name, gradient in plain.gradients.items():
            assert_same_bytes(exact.gradients[name], gradient, name)
