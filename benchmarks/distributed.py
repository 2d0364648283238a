"""A Llama sharded over ranks, with and without the pass: sites, time, bytes sent, losses.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --out docs/data/distributed.json
    python benchmarks/distributed.py            # no GPU: two processes over gloo, tiny sizes

For one process and for every plan that the ranks allow (FSDP2; tensor with sequence parallel, as in
``examples/titan.py``; both, from four ranks on), unrewritten and rewritten, with the true RMS and
with the estimate: the sites that each rank rewrote, milliseconds of a step (forward, backward,
AdamW), bytes of the tensors that a step's collectives gather or reduce on a rank, and how far the
losses of the first steps lie from those of one process. Exits with 1 where a rank rewrote another
number of sites than one process, or losses differ by more than noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import ranks  # noqa: E402
import titan  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cpu_bfloat16 import speed_up_bfloat16  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

import mxnorm_pass  # noqa: E402

CUDA = torch.cuda.is_available()
# A layer of Llama-3-8B on a GPU; elsewhere what shows that it works.
SIZES = (
    titan.Sizes(dim=4096, ffn=14336, heads=32, kv_heads=8, layers=2, vocab=4096)
    if CUDA
    else titan.Sizes(dim=64, ffn=128, heads=4, kv_heads=2, layers=2)
)
BATCH, SEQ = (4, 2048) if CUDA else (4, 64)
PASSES: dict[str, dict[str, Any]] = {
    "unrewritten": {"exclude": ("*",)},
    "exact": {"rms": "exact"},
    "estimate": {},
}
ALONE = "one process"  # the plan that the others are compared to
PLANS = ("FSDP2", "TP+SP", "FSDP2, TP+SP")
SITES = 2  # of a graph: blocks share one, but for the first behind a sharded embedding
# Relative, of a loss: sums in another order, in bfloat16, are worth 2^-8 of a term.
NOISE = 0.01


def plans(world: int) -> dict[str, tuple[int, int]]:
    """Ranks of data parallel and of tensor parallel. FSDP2 over one rank sets the precision."""
    made = {ALONE: (1, 1), "FSDP2": (world, 1), "TP+SP": (1, world)}
    if world >= 4:
        made["FSDP2, TP+SP"] = (world // 2, 2)
    return {name: p for name, p in made.items() if SIZES.kv_heads % p[1] == 0}


def meshes(dp: int, tp: int, device: str) -> tuple[DeviceMesh, DeviceMesh | None]:
    if dp * tp == 1:
        groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
        return DeviceMesh.from_group(groups[dist.get_rank()], device), None
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"] if tp > 1 else None


def sync() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def collectives(step: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes and calls by kind of collective in one step of this rank.

    The larger of a call's tensors counts: what all-gather makes, what reduce-scatter takes in.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
        sync()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    size: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        name = event.get("name", "")
        if event.get("ph") == "X" and name.startswith("c10d::") and "barrier" not in name:
            kind = name.removeprefix("c10d::").strip("_").removesuffix("_base")
            arguments = event["args"]
            dims, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
            size[kind] += max((_bytes(d, t) for d, t in zip(dims, types, strict=True)), default=0)
            calls[kind] += 1
    return dict(size), dict(calls)


def _bytes(dims: Any, kind: str) -> int:
    if not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(_bytes(d, kind) for d in dims)
    width = {"float": 4, "double": 8, "long int": 8, "c10::BFloat16": 2, "int": 4}
    narrow = 1  # uint8, float8
    count = 1
    for d in dims:
        count *= d
    return count * width.get(kind, narrow)


def measure(plan: tuple[int, int], options: dict[str, Any], args: Any, tokens: Tensor) -> Any:
    """One model, from its first step on."""
    dp, tp = plan
    device = "cuda" if CUDA else "cpu"
    torch.compiler.reset()
    inner = "inductor" if CUDA else "eager"
    backend = mxnorm_pass.backend(inner=inner, strict=True, **options)
    dp_mesh, tp_mesh = meshes(dp, tp, device)
    model: nn.Module = titan.build(args.sizes, gains=0.3, device=device)
    model = titan.parallelise(model, dp=dp_mesh, tp=tp_mesh, ac=args.ac, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mine = tokens.chunk(dp)[dp_mesh.get_local_rank() if dp * tp > 1 else 0].to(device)
    losses, times = [], []

    def step() -> Tensor:
        loss = titan.loss_of(model, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(args.steps):
        start = sync()
        loss = step()
        times.append(sync() - start)
        if dp > 1:
            dist.all_reduce(loss, group=dp_mesh.get_group())
            loss /= dp
        losses.append(loss.item())
    size, calls = collectives(step)
    report = backend.report
    found = {
        "sites": len(report.sites),
        "rewritten": report.rewritten,
        "graphs": len(report.graphs),
        "declined": sorted({s.reason for s in report.sites if s.reason}),
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {
        "ranks": everywhere,
        "losses": losses,
        # The first steps compile.
        "ms": round(1e3 * statistics.median(times[args.steps // 2 :]), 2),
        "bytes": size,
        "calls": calls,
        "peak": torch.cuda.max_memory_allocated() if CUDA else None,
    }


def run(rank: int, args: argparse.Namespace) -> None:
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.batch, args.seq + 1)
    tokens = torch.randint(0, args.sizes.vocab, shape, generator=generator)
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "CPU",
        "backend": dist.get_backend(),
        "ranks": world,
        "sizes": dataclasses.asdict(args.sizes),
        "batch": args.batch,
        "seq": args.seq,
        "ac": args.ac,
        "seed": args.seed,
    }
    results: dict[str, Any] = {}
    for name, plan in plans(world).items():
        if name not in (ALONE, *args.plans):
            continue
        for kind in args.passes:
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            results[f"{name} | {kind}"] = got = measure(plan, PASSES[kind], args, tokens)
            if rank == 0:
                line = f"{name:<13} {kind:<12} {got['ms']:9.2f} ms  loss {got['losses'][-1]:.5f}"
                print(line, [r["rewritten"] for r in got["ranks"]], flush=True)
                # After each, so that what ran is not lost with what did not.
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(
                    json.dumps({"about": about, "results": results}, indent=1) + "\n"
                )


def agreement(results: dict[str, Any], name: str) -> float:
    """Largest relative distance of a loss from that of one process, same pass."""
    alone = results[f"{ALONE} | " + name.split(" | ")[1]]["losses"]
    losses = torch.tensor([results[name]["losses"], alone], dtype=torch.float64)
    return float((losses[0] / losses[1] - 1).abs().max())  # NaN where a loss is


def table(data: dict[str, Any]) -> str:
    """Markdown."""
    about, results = data["about"], data["results"]
    s = about["sizes"]
    lines = [
        f"{about['ranks']} ranks over {about['backend']}, {about['device']}, torch "
        f"{about['torch']}; hidden {s['dim']}, feed-forward {s['ffn']}, {s['layers']} layers, "
        f"{about['batch']} x {about['seq']} tokens a step, checkpointing: {about['ac']}.",
        "",
        "| plan | pass | sites rewritten, of those in so many graphs, by rank | step, ms "
        "| collectives, MB a step and rank | losses against one process |",
        "|---|---|---|---|---|---|",
    ]
    for name, got in results.items():
        plan, kind = name.split(" | ")
        sites = ", ".join(
            f"{r['rewritten']} of {r['sites']} in {r['graphs']}" for r in got["ranks"]
        )
        sent = ", ".join(f"{k} {v / 1e6:.3g}" for k, v in sorted(got["bytes"].items())) or "none"
        away = f"{agreement(results, name):.1e}" if plan != ALONE else ""
        lines.append(f"| {plan} | {kind} | {sites} | {got['ms']} | {sent} | {away} |")
    return "\n".join(lines)


def judge(results: dict[str, Any]) -> list[str]:
    """What is wrong; empty where nothing is."""
    problems = []
    for name, got in results.items():
        wanted = 0 if name.endswith("unrewritten") else SITES
        for rank, r in enumerate(got["ranks"]):
            n = max(r["graphs"], 1)
            if (r["sites"], r["rewritten"]) != (SITES * n, wanted * n):
                problems.append(f"{name}, rank {rank}: {r}, not {wanted} of {SITES} in each graph")
        if not agreement(results, name) <= NOISE:
            problems.append(f"{name}: losses {agreement(results, name):.2%} from one process'")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(titan.Sizes):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=int, default=getattr(SIZES, field.name))
    parser.add_argument("--batch", type=int, default=BATCH, help="rows a step, of all ranks")
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--steps", type=int, default=10 if CUDA else 4)
    # Full checkpointing of a compiled block fails under tensor parallel in torch 2.13 itself.
    parser.add_argument("--ac", choices=("none", "selective"), default="none")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    text = f"beside {ALONE}, as far as the ranks allow (default all)"
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS, help=text)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="processes, where torchrun made none")
    parser.add_argument("--out", type=Path, default=ROOT / "build/distributed.json")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: expected at least one")
    args.sizes = titan.Sizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(SIZES)})
    rank = 0
    if dist.is_torchelastic_launched():
        if CUDA:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)
            speed_up_bfloat16()
        dist.init_process_group("nccl" if CUDA else "gloo")
        rank = dist.get_rank()
        run(rank, args)
        dist.destroy_process_group()
    elif CUDA:
        parser.error("on GPUs: torchrun --nproc-per-node 2 benchmarks/distributed.py")
    else:
        speed_up_bfloat16()
        ranks.fork(run, args.ranks, args)
    if rank:
        return 0
    data = json.loads(args.out.read_text())
    print(f"\n{table(data)}\n")
    problems = judge(data["results"])
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
