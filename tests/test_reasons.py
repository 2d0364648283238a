"""Every reason code is produced by a graph of its own, which stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from compiling import graphs
from models import llama_form, rows
from test_opaque import OPS
from torch import Tensor, nn
from tracing import rewrite, trace

from mxnorm_pass import MXNormConfig, explain
from mxnorm_pass.choices import GAUSSIAN
from mxnorm_pass.reasons import REASONS
from mxnorm_pass.recognise import sites

K = 128


def cast(
    y: Tensor,
    block: int = 32,
    *,
    shift: int = 8,
    limit: float = 448.0,
    narrow: Any = None,
    maxima: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """MXFP8 FLOOR by hand: codes and scale of blocks in a row."""
    blocks = y.float().unflatten(-1, (-1, block))
    absmax = blocks.abs().amax(-1, keepdim=True)
    if maxima is not None:
        maxima.append(absmax)
    byte = ((absmax.view(torch.int32) >> 23) - shift).clamp(min=0)
    scale = (byte << 23).view(torch.float32).clamp(min=2.0**-126)
    return (blocks / scale).clamp(-limit, limit).to(narrow or torch.float8_e4m3fn), scale


def product(codes: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return (codes.float() * scale).flatten(-2).bfloat16() @ w.t()


def after(norm: Callable[[Tensor, Tensor], Tensor], **how: Any) -> Callable[..., Any]:
    """norm -> cast -> matmul."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return product(*cast(norm(x, g), **how), w)

    return fn


def llama(x: Tensor, g: Tensor) -> Tensor:
    return llama_form(x, g, 1e-6)


def heads(x: Tensor, g: Tensor) -> Tensor:
    """Norms of half rows, cast in blocks that lie across both."""
    halves = F.rms_norm(x.view(-1, 8, 16), (16,), g[:16], 1e-6)
    return halves.flatten(-2)


def partial(x: Tensor, g: Tensor) -> Tensor:
    """Rows divided by the root mean square of their first half (pRMSNorm, arXiv 1910.07467)."""
    mean = x[:, : K // 2].float().pow(2).mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean + 1e-6)).bfloat16() * g


def read_twice(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    maxima: list[Tensor] = []
    return product(*cast(llama(x, g), maxima=maxima), w), maxima[0]


def no_matmul(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return cast(llama(x, g))


def two_blocks(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    y = llama(x, g)
    return product(*cast(y), w) + product(*cast(y, 64), w)


def by_op(op: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        codes, byte = op(llama(x, g))
        power = torch.exp2(byte.float() - 127).repeat_interleave(32, -1)
        return (codes.float() * power).bfloat16() @ w.t()

    return fn


def other_maximum(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    y = llama(x, g)
    scale = torch.exp2(y.float().abs().amax((0, -1), keepdim=True).log2().floor() - 8)
    return ((y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).bfloat16() @ w.t()


GRAPHS: dict[str, Callable[..., Any]] = {
    "centred": after(lambda x, g: F.layer_norm(x, (K,), g, None, 1e-6)),
    "multi_axis": after(lambda x, g: F.rms_norm(x, x.shape, None, 1e-6) * g),
    "norm_form": after(lambda x, g: F.rms_norm(x, (K,), g, 1e-6) + g),
    "extra_operand": after(lambda x, g: F.rms_norm(x, (K,), g, 1e-6) * x.mean(0, keepdim=True)),
    "unsupported_dtype": after(lambda x, g: F.rms_norm(x.half(), (K,), g.half(), 1e-6)),
    "graph_input": after(lambda x, g: x),
    "reordered": after(lambda x, g: torch.cat([llama(x, g), llama(x, g).flip(0)])),
    "opaque_norm": after(lambda x, g: OPS.rms_norm(x, g)),
    "opaque_cast": by_op(lambda y: OPS.to_mx(y, 32)),
    "rotated": by_op(lambda y: OPS.rht_quantize(y)),
    "k_not_multiple": after(heads),
    "row_mismatch": after(partial),
    "cast_form": other_maximum,
    "element_dtype": after(llama, narrow=torch.float8_e4m3fnuz, limit=240.0),
    "scale_rule": after(llama, shift=7),
    "element_rounding": after(llama, limit=416.0),
    "scale_escapes": read_twice,
    "no_matmul": no_matmul,
    "block_size_conflict": two_blocks,
}


def inputs() -> tuple[Tensor, ...]:
    return rows(64, K), 1 + 0.3 * rows(K, seed=1), rows(32, K, seed=2)


@pytest.mark.parametrize("reason", GRAPHS)
def test_graph(reason: str) -> None:
    got = rewrite(trace(GRAPHS[reason], *inputs()))
    declined = [s for s in got.sites if s.status == "declined"]
    assert [s.reason for s in declined] == [reason], got.report
    assert declined[0].detail and reason in str(got.report)
    # A second cast of the norm may be rewritten; one that is declined leaves no trace.
    if len(declined) == len(got.sites):
        assert str(got.before) == str(got.after)


class Hand(nn.Module):
    """A norm before a cast by hand, found by module path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.RMSNorm(K, eps=1e-6), nn.Parameter(torch.randn(32, K))

    def forward(self, x: Tensor) -> Tensor:
        return product(*cast(self.norm(x)), self.weight.bfloat16())


def by_choice(config: MXNormConfig | None = None) -> list[tuple[str | None, str]]:
    report = explain(Hand().bfloat16(), rows(64, K), training=False, config=config)
    assert set(report.warnings) <= {GAUSSIAN}
    return [(site.reason, site.id) for site in report.sites]


def excluded(folder: Path) -> list[tuple[str | None, str]]:
    return by_choice(MXNormConfig(exclude=("nor*",)))


def switched_off(folder: Path) -> list[tuple[str | None, str]]:
    return by_choice(MXNormConfig(off=("norm#0",)))


def switched_off_outside(folder: Path) -> list[tuple[str | None, str]]:
    with mock.patch.dict("os.environ", {"MXNORM_OFF": "other#0, norm#0"}):
        (site,) = explain(Hand().bfloat16(), rows(64, K), training=False).sites
    return [(site.reason, site.id)]


def disabled(folder: Path) -> list[tuple[str | None, str]]:
    with mock.patch.dict("os.environ", {"MXNORM_DISABLE": "1"}):
        return by_choice()


def calibration_block(folder: Path) -> list[tuple[str | None, str]]:
    path = folder / "c.json"
    path.write_text(json.dumps({"p": 2, "sites": {"norm": 0.4}, "blocks": {"norm": 16}}))
    return by_choice(MXNormConfig(correction=str(path)))


def internal_error(folder: Path) -> list[tuple[str | None, str]]:
    with mock.patch.object(sites, "recognise_cast", side_effect=RuntimeError("on purpose")):
        return by_choice()


CHOICES = (
    excluded,
    switched_off,
    switched_off_outside,
    disabled,
    calibration_block,
    internal_error,
)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda f: f.__name__)
def test_choice(choice: Callable[[Path], Any], tmp_path: Path) -> None:
    assert by_choice() == [(None, "norm#0")]
    reason = choice.__name__.removesuffix("_outside")
    assert choice(tmp_path) == [(reason, "norm#0")]


def test_collective_between() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        norm = after(lambda x, g: funcol.all_reduce(llama(x, g), "sum", dist.group.WORLD))
        got = rewrite(trace(norm, *inputs()))
    finally:
        dist.destroy_process_group()
    assert [s.reason for s in got.sites] == ["collective_between"], got.report
    assert str(got.before) == str(got.after)


def test_dynamic_shape() -> None:
    """Codes leave in an order of rows whose sizes can be read off no tensor that stays."""

    class Regrouped(Hand):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x).view(x.shape[0] * 2, x.shape[1] // 2, K)
            codes, scale = cast(y)
            return (codes.float() * scale).flatten(-2).flatten(0, 1).bfloat16() @ self.weight.t()

    x = rows(6, 8, K)
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x, axis)
    capture = graphs(Regrouped().bfloat16(), x, training=False, config=MXNormConfig())
    assert [s.reason for s in capture.report.sites] == ["dynamic_shape"], capture.report
    assert str(capture.before[0]) == str(capture.after[0])


def test_every_code_is_here() -> None:
    # sharded_row: tests/test_sharded.py; gradient_form: tests/test_gradient.py.
    elsewhere = {"collective_between", "dynamic_shape", "gradient_form", "sharded_row"}
    chosen = {f.__name__.removesuffix("_outside") for f in CHOICES}
    assert {*GRAPHS, *chosen, *elsewhere} == set(REASONS)
