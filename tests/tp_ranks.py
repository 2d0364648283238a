"""Two ranks of tensor and sequence parallel, for tests/test_sharded.py: ``python tp_ranks.py OUT``
writes OUT/<rank>.pt. A process of its own, which imports everything once and forks the ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import ranks  # noqa: E402
import titan  # noqa: E402
import torch  # noqa: E402
from cpu_bfloat16 import speed_up_bfloat16  # noqa: E402
from models import EMULATED, MXFP8Linear, rows  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mxnorm_pass import MXNormConfig  # noqa: E402
from mxnorm_pass.backend import MXNormBackend  # noqa: E402

K, WORLD, STEPS = 128, 2, 5
SIZES = titan.Sizes(dim=64, ffn=128, heads=4, kv_heads=2, vocab=64)


def built() -> titan.Llama:
    """The linears behind norms in MXFP8: tracing torchao's emulation of the others, whose weights
    are sharded along K, takes as long again.
    """
    model = titan.build(SIZES, gains=0.3)
    for layer in model.layers.values():
        for parent, name in ((layer.attention, "wo"), (layer.feed_forward, "w2")):
            mx = getattr(parent, name)
            plain = nn.Linear(mx.in_features, mx.out_features, bias=False)
            plain.weight = mx.weight
            setattr(parent, name, plain)
    # AOTAutograd's backward does not know the tensor that DTensor leaves in flight here.
    model.tok_embeddings.register_forward_hook(lambda module, given, out: out.clone())
    return model


def seen(backend: MXNormBackend) -> list[tuple[str, str, int]]:
    """Norms, what became of them, and casts along tokens, in all graphs."""
    sites = [site for graph in backend.report.graphs for site in graph.sites]
    return [(s.norm, s.status, sum(c["casts"] for c in s.spec["colwise"])) for s in sites]


def model_(sharded: bool, mesh: Any) -> Any:
    """Each of the two linears behind the norm gathers for itself."""

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(K, eps=1e-5)
            make = lambda: MXFP8Linear(K, 2 * K, bias=False, kernel_preference=EMULATED)  # noqa: E731
            self.w1, self.w3, self.w2 = make(), make(), nn.Linear(2 * K, K, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))

    torch.manual_seed(0)
    model = FeedForward().bfloat16()
    if sharded:
        plan = {
            "norm": SequenceParallel(),
            "w1": ColwiseParallel(input_layouts=Shard(1)),
            "w3": ColwiseParallel(input_layouts=Shard(1)),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(model, mesh, plan)
    return model


def inference(rank: int, mesh: Any) -> Any:
    x = rows(2, 64, K)
    results = []
    with torch.no_grad():
        for exclude in (("*",), ()):
            torch.compiler.reset()
            config = MXNormConfig(rms="exact", inner="eager", strict=True, exclude=exclude)
            backend = MXNormBackend(config)
            model = model_(True, mesh)
            results.append(torch.compile(model, backend=backend)(x.chunk(WORLD, 1)[rank]))
        whole = torch.compile(model_(False, mesh), backend=MXNormBackend(config))(x)
    return results, whole.chunk(WORLD, 1)[rank], backend.report.rewritten


def training(rank: int, mesh: Any) -> Any:
    """Losses as they are, and rewritten, of the sharded model and of one process; sites of both."""
    tokens = torch.randint(0, 64, (2, 65), generator=torch.Generator().manual_seed(0))
    curves, sites = {}, {}
    for sharded in (True, False):
        for rewritten in (False, True) if sharded or rank == 0 else ():
            torch.compiler.reset()
            backend = MXNormBackend(MXNormConfig(inner="eager", strict=True))
            model = titan.parallelise(
                built().bfloat16(),
                tp=mesh if sharded else None,
                ac="none",
                backend=backend if rewritten else None,
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            losses = curves[sharded, rewritten] = []
            for _ in range(STEPS):
                loss = titan.loss_of(model, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            sites[sharded] = seen(backend)
    return curves, sites


def run(rank: int, out: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    found = {"inference": inference(rank, mesh), "training": training(rank, mesh)}
    torch.save(found, f"{out}/{rank}.pt")


if __name__ == "__main__":
    speed_up_bfloat16()
    ranks.fork(run, WORLD, sys.argv[1])
