"""Sequence parallel: rows that other ranks send between norm and cast.

Graphs are traced with a process group that sends nothing; numbers come from two processes over
gloo.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from models import llama_form, rows
from test_casts import Straight, torchao_dequantised
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracing import assert_fake_values, rewrite, trace

from mxnorm_pass import MXNormConfig
from mxnorm_pass.ops import OP

K, WORLD = 128, 2


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield dist.group.WORLD
    dist.destroy_process_group()


def product(y: Tensor, w: Tensor) -> Tensor:
    return torchao_dequantised(y, "e4m3", "RCEIL").bfloat16() @ w.t()


def gathered(axis: int, group: Any) -> Callable[..., Any]:
    """norm of this rank's part of [B, S, K] -> rows of all ranks -> q, k and v."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Any:
        y = funcol.wait_tensor(funcol.all_gather_tensor(llama_form(x, g, 1e-6), axis, group))
        y = y.view(-1, K)
        return product(y, w), product(y, 2 * w), product(y, 3 * w)

    return fn


def dispatched(group: Any) -> Callable[..., Any]:
    """Expert parallel: each token goes to the rank of its expert."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Any:
        y = llama_form(x, g, 1e-6).view(-1, K)
        half = [y.shape[0] // WORLD] * WORLD
        return product(funcol.wait_tensor(funcol.all_to_all_single(y, half, half, group)), w)

    return fn


def inputs(training: bool = False) -> list[Tensor]:
    made = (rows(2, 32, K), 1 + 0.3 * rows(K, seed=1), rows(32, K, seed=2))
    return [t.requires_grad_(training) for t in made]


def sent(graph: Any) -> dict[str, int]:
    """Bytes that arrive by each kind of collective."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        name = str(node.target)
        if name.startswith("_c10d_functional") and "wait" not in name:
            found[name] = found.get(name, 0) + node.meta["val"].nbytes
    return found


@pytest.mark.parametrize("axis", [0, 1])
def test_codes_and_scales_are_gathered(axis: int, group: Any) -> None:
    got = rewrite(trace(gathered(axis, group), *inputs()))
    assert [(s.status, len(s.consumers)) for s in got.sites] == [("rewritten", 1)], got.report
    assert_fake_values(got.after)
    assert len(got.after.find_nodes(op="call_function", target=OP)) == 1
    (gather,) = sent(got.before)
    elements = WORLD * 2 * 32 * K
    assert sent(got.before) == {gather: 2 * elements}
    # One byte an element and one a block of 32, once for q, k and v.
    assert sent(got.after) == {gather: elements + elements // 32}


def test_codes_and_scales_are_dispatched(group: Any) -> None:
    got = rewrite(trace(dispatched(group), *inputs()))
    assert [s.status for s in got.sites] == ["rewritten"], got.report
    (before,), (after,) = sent(got.before).values(), sent(got.after).values()
    assert after * 64 == before * 33


def also_read(reader: Callable[[Tensor], Tensor], group: Any) -> Any:
    def fn(x: Tensor, g: Tensor, w: Tensor) -> Any:
        y = funcol.wait_tensor(funcol.all_gather_tensor(llama_form(x, g, 1e-6), 0, group))
        return product(y.view(-1, K), w), reader(y)

    return fn


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a router": lambda y: y @ y.new_ones(K, 4),
    "an output": lambda y: y,
    # Other casts of the same rows that stay: one in blocks of another size, one that is unknown.
    "blocks of 64": lambda y: product_64(y.view(-1, K)),
}


def product_64(y: Tensor) -> Tensor:
    from test_reasons import cast
    from test_reasons import product as by_hand

    return by_hand(*cast(y, 64), torch.ones(32, K, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", OTHERS)
def test_rows_that_are_sent_anyway_are_not_sent_twice(name: str, group: Any) -> None:
    got = rewrite(trace(also_read(OTHERS[name], group), *inputs()))
    reasons = {s.reason for s in got.sites}
    assert "collective_between" in reasons and None not in reasons, got.report
    assert str(got.before) == str(got.after)


def straight(group: Any, axis: int = 1) -> Callable[..., Any]:
    """Training as torchao does it: the backward casts the gathered rows once more."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Any:
        y = funcol.all_gather_tensor_autograd(llama_form(x, g, 1e-6), axis, group)
        cast = lambda y, outer: torchao_dequantised(y, "e4m3", "RCEIL")  # noqa: E731
        return Straight.apply(y.view(-1, K), w, torch.tensor(1.0), cast)

    return fn


def test_training_sends_the_rows_once(group: Any) -> None:
    """The backward reads the gathered rows, saved by the forward: gathering codes comes on top."""
    got = rewrite(trace(straight(group), *inputs(training=True)))
    assert [s.reason for s in got.sites] == ["collective_between"], got.report
    assert "as well" in got.sites[0].detail


# --- two processes ------------------------------------------------------------------------------


def _model(sharded: bool, mesh: Any) -> Any:
    from models import EMULATED, MXFP8Linear
    from torch import nn
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(K, eps=1e-5)
            make = lambda k, n: MXFP8Linear(k, n, bias=False, kernel_preference=EMULATED)  # noqa: E731
            self.w1, self.w3, self.w2 = make(K, 2 * K), make(K, 2 * K), make(2 * K, K)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))

    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), FeedForward()).bfloat16()
    if sharded:
        for block in model:
            plan = {
                "norm": SequenceParallel(),
                "w1": ColwiseParallel(input_layouts=Shard(1)),
                "w3": ColwiseParallel(input_layouts=Shard(1)),
                "w2": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)
    return model


def _inference(rank: int, port: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from mxnorm_pass.backend import MXNormBackend

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    x = rows(2, 64, K)
    results = []
    with torch.no_grad():
        for exclude in (("*",), ()):
            torch.compiler.reset()
            config = MXNormConfig(rms="exact", inner="eager", strict=True, exclude=exclude)
            backend = MXNormBackend(config)
            model = _model(True, mesh)
            results.append(torch.compile(model, backend=backend)(x.chunk(WORLD, 1)[rank]))
        whole = torch.compile(_model(False, mesh), backend=MXNormBackend(config))(x)
    rewritten = backend.report.rewritten
    torch.save((results, whole.chunk(WORLD, 1)[rank], rewritten), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_inference_on_two_ranks(tmp_path: Path) -> None:
    """Bitwise the unrewritten sharded model; one process sums in another order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_inference, args=(port, str(tmp_path)), nprocs=WORLD)
    for rank in range(WORLD):
        (plain, ours), whole, rewritten = torch.load(tmp_path / f"{rank}.pt")
        assert rewritten == 2
        assert torch.equal(plain, ours)
        assert torch.allclose(ours.float(), whole.float(), atol=0.05, rtol=0.05)
