"""Two ranks of FSDP2, for tests/test_fsdp.py: ``python fsdp_ranks.py OUT`` writes OUT/<rank>.pt.

A process of its own, which imports everything once and forks the ranks. What they run is
benchmarks/training.py, some steps of it with a smaller model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import ranks  # noqa: E402
import titan  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import training  # noqa: E402
from cpu_bfloat16 import speed_up_bfloat16  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

import mxnorm_pass  # noqa: E402

training.SIZES = titan.Sizes(dim=64, ffn=128, heads=2, kv_heads=1)
training.GAINS = 0.3  # with gains of 1, a gain that goes missing would not show
training.BATCH = 4
ARGS = argparse.Namespace(steps=4, seed=0, seeds=1, rewritten=1, ac="full", whole_model=False)


def seen(report: mxnorm_pass.Report) -> list[list[tuple[Any, ...]]]:
    """By graph, its sites."""
    fields = ("gain_at", "residual")
    return [
        [(s.norm, s.status, *(s.spec.get(f) for f in fields)) for s in graph.sites]
        for graph in report.graphs
    ]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): p.full_tensor().detach().clone()
        for name, p in model.named_parameters()
    }


def run(rank: int, out: str) -> None:
    text = training.read_text()
    batches = training.make_batches(text, ARGS.steps)
    models, backends = training.run_all(rank, ARGS, text, Path(out, "training.csv"))
    gain = next(iter(models["rewritten 0"].layers.values())).ffn_norm.weight
    found: dict[str, Any] = {
        "shard": (tuple(gain.to_local().shape), str(gain.dtype)),
        "parameters": {name: parameters(model) for name, model in models.items()},
    }
    # The same compiled blocks again: a gain that was sharded reaches them whole.
    groups = [dist.new_group([r]) for r in range(training.WORLD)]
    alone = DeviceMesh.from_group(groups[rank], "cpu")
    losses, model = training.train(0, batches, backends["rewritten"], ARGS, alone)
    found["alone"] = losses, parameters(model)
    found["seen"] = {kind: seen(backend.report) for kind, backend in backends.items()}

    torch.compiler.reset()
    whole = mxnorm_pass.backend(inner="eager", strict=True)
    args = argparse.Namespace(**{**vars(ARGS), "whole_model": True})
    mesh = init_device_mesh("cpu", (training.WORLD,))
    losses, model = training.train(0, batches, whole, args, mesh)
    found["whole"] = losses, parameters(model)
    found["seen"]["whole"] = seen(whole.report)
    torch.save(found, f"{out}/{rank}.pt")


if __name__ == "__main__":
    speed_up_bfloat16()
    ranks.fork(run, training.WORLD, sys.argv[1])
