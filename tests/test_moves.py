"""Rows picked between norm and cast: mixture-of-experts dispatch, last tokens, other batch orders.

The op runs once per token, in front of the pick; codes and scales are picked instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, inference_block, rows, training_block
from numerics import assert_same_bytes
from test_casts import Straight, torchao_dequantised, traced
from torch import Tensor, nn
from tracing import assert_fake_values, rewrite, trace

import mxnorm_pass
from mxnorm_pass import MXNormConfig
from mxnorm_pass.ops import OP

M, K = 64, 128
ORDER = torch.randperm(M, generator=torch.Generator().manual_seed(0))

PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda y, i: y[i],
    "top-2 dispatch": lambda y, i: y[torch.cat([i, i]) // 2],
    "index_select": lambda y, i: y.index_select(0, i),
    "slice": lambda y, i: y[16:48],
    "strided slice": lambda y, i: y[::2],
    "last token": lambda y, i: y.view(2, 32, K)[:, -1].repeat(16, 1),
    "batch first": lambda y, i: y.view(2, 32, K).transpose(0, 1).reshape(M, K),
    "two picks": lambda y, i: y[i].view(2, 32, K)[1],
    "expand": lambda y, i: y.unsqueeze(1).expand(-1, 2, -1).reshape(2 * M, K),
    "doubled": lambda y, i: torch.cat([y, y]),
    "chunk": lambda y, i: y.chunk(2)[1],
    "split": lambda y, i: y.split([16, 48])[1],
    "repeat_interleave": lambda y, i: y.repeat_interleave(2, 0),
    "flip rows": lambda y, i: y.flip(0),
    "joined": lambda y, i: torch.cat([y[i], y.flip(0)]),
    "joined, of the norm itself": lambda y, i: torch.cat([y, y.flip(0)]),
    "split and joined elsewhere": lambda y, i: torch.cat(y.view(2, 32, K).split(1), 1)[0],
    "split, turned and joined": lambda y, i: torch.cat([c.flip(0) for c in y.split([16, 48])]),
}
STAY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flip columns": lambda y, i: y.flip(-1),
    "roll columns": lambda y, i: y.roll(1, -1),
    "column slice": lambda y, i: y[:, :64].repeat(1, 2),
    "joined columns": lambda y, i: torch.cat([y[:, 64:], y[:, :64]], 1),
    "joined with others": lambda y, i: torch.cat([y, torch.zeros_like(y)]),
}


def graph(pick: Callable[[Tensor, Tensor], Tensor], training: bool, cast: Any = None) -> Any:
    """norm -> pick -> cast -> matmul, and a second matmul that reads every row."""
    cast = cast or (lambda y, outer: torchao_dequantised(y, "e4m3", "RCEIL"))

    def fn(x: Tensor, g: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float()
        y = g * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        outer = torch.tensor(1.0)
        return Straight.apply(pick(y, i), w, outer, cast), Straight.apply(y, w, outer, cast)

    inputs = [rows(M, K), 1 + 0.3 * rows(K, seed=1), rows(32, K, seed=2)]
    leaves = [t.clone().requires_grad_(training) for t in inputs]
    return rewrite(trace(fn, *leaves, ORDER)), [*inputs, ORDER]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PICKS)
def test_codes_and_scales_are_picked(name: str, training: bool) -> None:
    got, inputs = graph(PICKS[name], training)
    assert [s.status for s in got.sites] == ["rewritten"], got.report
    assert len(got.after.find_nodes(op="call_function", target=OP)) == 1, "once per token"
    assert_fake_values(got.after)
    tangents = [n for n in got.placeholders if n.name.startswith("tangents")]
    sizes = [tuple(n.meta["val"].shape) for n in tangents]
    values = [*inputs[: len(got.placeholders) - len(tangents)]]
    values += [rows(*size, seed=4 + j) for j, size in enumerate(sizes)]
    before, after = got.runs(*values)
    for a, b in zip(after.outputs, before.outputs, strict=True):
        assert_same_bytes(a, b, name)


@pytest.mark.parametrize("name", STAY)
def test_other_moves_stay(name: str) -> None:
    got, _ = graph(STAY[name], False)
    status = {(s.status, s.reason) for s in got.sites}
    assert status == {("rewritten", None), ("declined", "reordered")}, got.report


def test_half_the_bytes_are_picked() -> None:
    """Of the rows that move, one byte per element and one per block do, not two per element."""
    got, _ = graph(PICKS["index"], False)
    moved = [
        n.meta["val"]
        for n in got.after.nodes
        if n.target is torch.ops.aten.index.Tensor and n.meta["val"].dim() == 2
    ]
    assert sorted((str(t.dtype), tuple(t.shape)) for t in moved) == [
        ("torch.uint8", (M, K // 32)),
        ("torch.uint8", (M, K)),
    ]


def test_per_tensor_scale_of_picked_rows() -> None:
    """NVFP4's dynamic scale is that of the picked rows: another number, so the cast stays."""
    cast = lambda y, outer: torchao_dequantised(y, "nvfp4", "dynamic", outer)  # noqa: E731
    got, _ = graph(PICKS["slice"], False, cast)
    assert {(s.status, s.reason) for s in got.sites} == {
        ("rewritten", None),
        ("declined", "reordered"),
    }


class Experts(nn.Module):
    """A dense mixture by hand: router, shared expert, and two experts that get their tokens."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block
        self.router = nn.Linear(K, 2, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block.norm(x)
        shared, first, second = self.block.linears
        score, order = self.router(y).float().softmax(-1).topk(1, -1)
        # Capacity routing: each expert takes the half of the tokens that score it highest.
        order = torch.argsort(order.flatten(), stable=True)
        half = len(y) // 2
        out = torch.cat([first(y[order[:half]]), second(y[order[half:]])])
        return shared(y) + out[torch.argsort(order)] * score.to(y.dtype)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_mixture_of_experts(training: bool) -> None:
    from compiling import run

    make = training_block if training else inference_block
    model = Experts(make("llama", widths=(64, 64, 64)))
    x = rows(M, K)
    off = run(model, x, off=True, training=training)
    on = run(model, x, config=MXNormConfig(rms="exact", strict=True), training=training)
    (site,) = on.report.sites
    assert site.status == "rewritten"
    assert sorted(site.consumers) == [f"block.linears.{i}" for i in range(3)]
    assert site.also_read_by == ["router"]
    for a, b in zip(on.outputs, off.outputs, strict=True):
        assert_same_bytes(a, b)
    for name, gradient in off.gradients.items():
        assert_same_bytes(on.gradients[name], gradient, name)


def test_norm_of_a_norm() -> None:
    """The row is itself a product with a row statistic; nothing is taken off it."""
    from models import bare_form, llama_form

    got, inputs = traced(
        "llama",
        lambda y, outer: torchao_dequantised(y, "e4m3", "RCEIL"),
        norm=lambda x, g, eps: llama_form(bare_form(x, None, eps), g, eps),
    )
    assert [s.status for s in got.sites] == ["rewritten"]
    before, after = got.runs(*inputs)
    assert_same_bytes(after.outputs[0], before.outputs[0])


@pytest.mark.parametrize("pick", ["index", "chunk", "none"])
def test_a_norm_that_is_left_out_goes_by_its_own_name(pick: str) -> None:
    """Not by that of the module which picks the rows, or casts them: choices are by the norm."""

    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = inference_block("llama", K, (32,))

        def forward(self, x: Tensor) -> Tensor:
            y = self.block.norm(x).float().to(x.dtype)
            return self.block.linears[0](PICKS[pick](y, ORDER) if pick in PICKS else y)

    config = MXNormConfig(exclude=("block.norm",))
    report = mxnorm_pass.explain(Picked(), rows(M, K), training=False, config=config)
    (site,) = report.sites
    assert (site.norm, site.reason) == ("block.norm", "excluded"), report
    assert "matches no norm" not in str(report)
