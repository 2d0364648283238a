"""Train a small Llama on text with and without the pass: does the curve stay within the seeds'?

    python benchmarks/training.py --seed 0

A byte-level Llama (``examples/titan.py``) on the English of SciPy's docstrings, blocks in
torchao's emulated MXFP8, activation checkpointing and compile per block, FSDP2 over two processes
with bfloat16 parameters and float32 reductions; AdamW. A seed decides weights and batches.
Unrewritten runs of several seeds say where a run of one more seed would be; a rewritten run has the
weights and batches of its unrewritten twin.

Exits with 1 unless all sites were rewritten in the rewritten runs and none in the others, the model
learnt, and each rewritten run is where a run of another seed would be with 95% probability, at the
end and at nine points in ten on the way.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import ranks  # noqa: E402
import titan  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cpu_bfloat16 import speed_up_bfloat16  # noqa: E402
from scipy import stats  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

import mxnorm_pass  # noqa: E402

SIZES = titan.Sizes(dim=128, ffn=384, heads=4, kv_heads=2, layers=2, vocab=256)
GAINS = 0.0  # standard deviation of the gains around 1, at the start
WORLD, BATCH, SEQ = 2, 8, 32  # BATCH rows a step, of all ranks
LEARNING_RATE, WARMUP = 3e-3, 20
WINDOW = 25  # steps that a curve is smoothed over, and a row of the table
WITHIN = 0.9  # of a rewritten run's points in the band where 95% are expected
LEARNT = 0.6  # the last window's loss must be below this share of the first step's
SITES = 2  # of a block; all blocks share one compiled graph
KINDS = ("unrewritten", "rewritten")


def read_text() -> Tensor:
    """The docstrings of ``scipy.stats`` as bytes: 1.3 MB of English (BSD-3-Clause)."""
    spec = importlib.util.find_spec("scipy.stats")
    assert spec is not None and spec.submodule_search_locations
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found: dict[str, None] = {}
    for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        if "tests" not in path.parts:
            nodes = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds))
            found |= dict.fromkeys(filter(None, map(ast.get_docstring, nodes)))
    return torch.frombuffer(bytearray("\n\n".join(found).encode()), dtype=torch.uint8).long()


def make_batches(text: Tensor, steps: int, seed: int = 0) -> Tensor:
    """Windows of the text, ``[steps, BATCH, SEQ + 1]``, the same for the same seed."""
    generator = torch.Generator().manual_seed(1234 + seed)
    starts = torch.randint(0, len(text) - SEQ, (steps, BATCH, 1), generator=generator)
    return text[starts + torch.arange(SEQ + 1)]


def train(
    seed: int, batches: Tensor, backend: Any, args: Any, mesh: DeviceMesh, after: Any = None
) -> tuple[list[float], nn.Module]:
    """Losses, nats per byte, and the model that they led to.

    A step's rows are cut into ``WORLD`` parts. With as many ranks each takes its own; a mesh of one
    rank takes them all, one after the other, and adds up their gradients.
    """
    whole = args.whole_model
    model: nn.Module = titan.parallelise(
        titan.build(SIZES, seed, GAINS), dp=mesh, ac=args.ac, backend=None if whole else backend
    )
    if whole:
        model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / len(batches))
        return min(1, (step + 1) / WARMUP) * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for step, tokens in enumerate(batches):
        parts = tokens.chunk(WORLD)
        mine = parts[mesh.get_local_rank() :: mesh.size()]
        total = torch.zeros(())
        for part in mine:
            loss = titan.loss_of(model, part) / len(mine)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(total, group=mesh.get_group())
        losses.append(total.item() / mesh.size())
        if after is not None:
            after(step, losses[-1])
    return losses, model


def order(args: argparse.Namespace) -> list[tuple[str, int]]:
    """The first seed both ways, the other unrewritten ones, then the rest."""
    seeds = range(args.seed, args.seed + args.seeds)
    made = [(kind, seeds[0]) for kind in KINDS]
    made += [("unrewritten", seed) for seed in seeds[1:]]
    return made + [("rewritten", seed) for seed in seeds[1 : args.rewritten]]


def run_all(
    rank: int, args: argparse.Namespace, text: Tensor, out: Path
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Every run, in one pair of processes: seeds share what was compiled.

    Returns:
        The trained models by run, and the backends by kind.
    """
    mesh = init_device_mesh("cpu", (WORLD,))
    models: dict[str, nn.Module] = {}
    curves: dict[str, list[float]] = {}
    start = time.perf_counter()
    make = functools.partial(mxnorm_pass.backend, inner="eager", strict=True)
    backends = {"unrewritten": make(exclude=("*",)), "rewritten": make()}
    for kind, seed in order(args):
        name = f"{kind} {seed}"
        batches = make_batches(text, args.steps, seed)
        backend = backends[kind]

        def say(step: int, loss: float, name: str = name) -> None:
            if rank == 0 and (step + 1) % WINDOW == 0:
                seconds = time.perf_counter() - start
                print(f"{name:<14} step {step + 1:>4}: {loss:.4f}  [{seconds:.0f} s]", flush=True)

        curves[name], models[name] = train(seed, batches, backend, args, mesh, say)
        sites = {k: _count(b.report) for k, b in backends.items()}
        print(f"rank {rank}: {sites}", flush=True)
        everywhere: list[Any] = [None] * WORLD
        dist.all_gather_object(everywhere, sites)
        if rank == 0:
            write_curves(curves, out)
            write_about(args, everywhere, out.with_suffix(".json"))
    return models, backends


def _count(report: mxnorm_pass.Report) -> dict[str, int]:
    return {
        "graphs": len(report.graphs),
        "sites": len(report.sites),
        "rewritten": report.rewritten,
    }


def write_about(args: argparse.Namespace, sites: list[Any], path: Path) -> None:
    """What a reader of the curves wants to know besides."""
    about = {
        "sites": sites,
        "steps": args.steps,
        "seed": args.seed,
        "ac": args.ac,
        "parameters": sum(p.numel() for p in titan.build(SIZES).parameters()),
        "torch": torch.__version__.partition("+")[0],
        "torchao": importlib.metadata.version("torchao"),
        "scipy": importlib.metadata.version("scipy"),
    }
    path.write_text(json.dumps(about, indent=1) + "\n")


def write_curves(curves: dict[str, list[float]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        columns = zip(*curves.values(), strict=True)
        writer.writerows([i, *(f"{v:.5f}" for v in row)] for i, row in enumerate(columns, 1))


def read_curves(path: Path) -> dict[str, list[float]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(r[name]) for r in rows] for name in rows[0] if name != "step"}


def of(curves: dict[str, list[float]], kind: str) -> dict[str, list[float]]:
    """The curves of one kind, by seed."""
    named = (name.rpartition(" ") for name in curves)
    return {seed: curves[f"{k} {seed}"] for k, _, seed in named if k == kind}


def smooth(curve: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean over the last ``window`` steps, from the first step on that has as many before it."""
    total = torch.tensor(curve, dtype=torch.float64).unfold(0, min(window, len(curve)), 1)
    return total.mean(-1).tolist()


def plain_runs(curves: dict[str, list[float]]) -> list[list[float]]:
    """Smoothed, the unrewritten runs."""
    return [smooth(curve) for curve in of(curves, "unrewritten").values()]


def expected(values: Sequence[float]) -> tuple[float, float]:
    """Where one further run of the same kind lies with 95% probability: Student's t prediction
    interval, mean +- t(.975, n - 1) sd sqrt(1 + 1/n).
    """
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / n)
    mean = statistics.fmean(values)
    return mean - half, mean + half


def band(curves: dict[str, list[float]]) -> list[tuple[float, float]]:
    """:func:`expected` of the unrewritten runs at every smoothed point."""
    return [expected(values) for values in zip(*plain_runs(curves), strict=True)]


def blocks(curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Per window: where a run of another seed would be, and rewritten runs beside their twins."""
    bounds = band(curves)
    plain, ours = ({s: smooth(c) for s, c in of(curves, kind).items()} for kind in KINDS)
    length = len(bounds)
    return [
        {
            "step": i + len(next(iter(curves.values()))) - length + 1,
            "low": bounds[i][0],
            "high": bounds[i][1],
            "twin": {seed: plain[seed][i] for seed in ours},
            "ours": {seed: curve[i] for seed, curve in ours.items()},
        }
        for i in [*range(0, length - 1, WINDOW), length - 1]
    ]


def inside(curves: dict[str, list[float]]) -> dict[str, float]:
    """By rewritten seed: the share of smoothed points within the unrewritten runs' band."""
    bounds = band(curves)
    return {
        seed: statistics.fmean(
            low <= value <= high for value, (low, high) in zip(smooth(curve), bounds, strict=True)
        )
        for seed, curve in of(curves, "rewritten").items()
    }


def wrong_sites(about: dict[str, Any]) -> list[str]:
    """Ranks where not all sites were rewritten, or some in the unrewritten runs."""
    problems = []
    for rank, sites in enumerate(about["sites"]):
        for kind, wanted in zip(KINDS, (0, SITES), strict=True):
            got = sites[kind]
            if (got["sites"], got["rewritten"]) != (SITES, wanted):
                problems.append(f"rank {rank}, {kind}: {got}, not {wanted} of {SITES} rewritten")
    return problems


def judge(curves: dict[str, list[float]], about: dict[str, Any]) -> list[str]:
    """What is wrong; empty where nothing is."""
    problems = wrong_sites(about)
    for name, curve in curves.items():
        if not smooth(curve)[-1] <= LEARNT * curve[0]:
            problems.append(f"{name}: from {curve[0]:.3f} to {smooth(curve)[-1]:.3f}: not learnt")
    for seed, share in inside(curves).items():
        if not share >= WITHIN:
            problems.append(f"rewritten {seed}: {share:.0%} of its points within the band")
    last = blocks(curves)[-1]
    for seed, value in last["ours"].items():
        if not last["low"] <= value <= last["high"]:
            problems.append(
                f"rewritten {seed} ends at {value:.4f}, outside {last['low']:.4f} to "
                f"{last['high']:.4f}"
            )
    return problems


def table(curves: dict[str, list[float]]) -> str:
    """Markdown: the smoothed curves at every second window."""
    seeds = list(of(curves, "rewritten"))
    lines = [
        f"| mean of {WINDOW} steps up to | a run of another seed, 95% | "
        + " | ".join(f"seed {seed}: unrewritten | rewritten" for seed in seeds)
        + " |",
        "|---" * (2 + 2 * len(seeds)) + "|",
    ]
    rows = blocks(curves)
    for row in [*rows[:-1:2], rows[-1]]:
        pairs = " | ".join(f"{row['twin'][s]:.4f} | {row['ours'][s]:.4f}" for s in seeds)
        lines.append(f"| {row['step']} | {row['low']:.4f} to {row['high']:.4f} | {pairs} |")
    return "\n".join(lines)


def sentences(curves: dict[str, list[float]], about: dict[str, Any]) -> str:
    """What was run and how it ended."""
    ours = of(curves, "rewritten")
    last = blocks(curves)[-1]
    gaps = [last["ours"][seed] - last["twin"][seed] for seed in ours]
    ends = [run[-1] for run in plain_runs(curves)]
    site = about["sites"][0]
    ranks_ = ", ".join(str(s["rewritten"]["rewritten"]) for s in about["sites"])
    shares = ", ".join(f"{share:.0%}" for share in inside(curves).values())
    return (
        f"{about['steps']} steps, {len(ends)} unrewritten runs and {len(ours)} "
        f"rewritten, {about['parameters'] / 1e6:.2f} M parameters; torch "
        f"{about['torch']}, torchao {about['torchao']}, SciPy {about['scipy']}. Sites rewritten, "
        f"by rank: {ranks_} of {SITES} in each compiled block "
        f"({site['rewritten']['graphs']} graph for {SIZES.layers} blocks and all seeds); in the "
        f"unrewritten runs {site['unrewritten']['rewritten']} of {site['unrewritten']['sites']}. "
        f"Of the rewritten runs {shares} of the smoothed points are where a run of another seed is "
        f"with 95% probability. Over the last {WINDOW} steps rewritten runs are at "
        f"{', '.join(f'{gap:+.4f}' for gap in gaps)} nats from their twins "
        f"({statistics.fmean(gaps) / statistics.fmean(ends):+.1%} in the mean); unrewritten runs "
        f"have a standard deviation of {statistics.stdev(ends):.4f} there. Checks that fail: "
        f"{'; '.join(judge(curves, about)) or 'none'}."
    )


def fill(text: str, curves: dict[str, list[float]], about: dict[str, Any]) -> str:
    """The document with what stands between its markers made anew."""
    for name, made in (("sentences", sentences(curves, about)), ("table", table(curves))):
        text, n = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, made=made: m[1] + made + "\n" + m[2],
            text,
            flags=re.S,
        )
        assert n == 1, f"no '<!-- {name} -->' in the document"
    return text


def plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "training"
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=[2, 1], layout="constrained"
    )
    plain = plain_runs(curves)
    ours = {seed: smooth(curve) for seed, curve in of(curves, "rewritten").items()}
    twins = {seed: smooth(curve) for seed, curve in of(curves, "unrewritten").items()}
    first = plain[0]
    steps = range(len(next(iter(curves.values()))) - len(first) + 1, len(first) + WINDOW)
    low, high = map(list, zip(*band(curves), strict=True))
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    top.fill_between(steps, low, high, color="0.75", label=f"95% of {len(plain)} seeds")
    for ax, base in ((top, [0.0] * len(first)), (bottom, middle)):
        for i, (seed, curve) in enumerate(ours.items()):
            values = [a - b for a, b in zip(curve, base, strict=True)]
            ax.plot(steps, values, f"C{i}", lw=1.2, label=f"rewritten, seed {seed}")
            twin = [a - b for a, b in zip(twins[seed], base, strict=True)]
            ax.plot(steps, twin, f"C{i}--", lw=1.0, label=f"unrewritten, seed {seed}")
    bounds = [[a - b for a, b in zip(c, middle, strict=True)] for c in (low, high)]
    bottom.fill_between(steps, *bounds, color="0.75")
    top.set(ylabel=f"loss, nats per byte,\nmean of {WINDOW} steps")
    bottom.set(xlabel="step", ylabel="less the band's middle")
    top.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=5, help="unrewritten runs (default 5)")
    parser.add_argument("--rewritten", type=int, default=3, help="rewritten runs (default 3)")
    parser.add_argument("--ac", choices=sorted(titan.AC), default="full")
    parser.add_argument(
        "--whole-model", action="store_true", help="compile the sharded model, not its blocks"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/data/training.csv")
    parser.add_argument(
        "--doc", type=Path, help="write the figures into this page, the plot beside"
    )
    parser.add_argument("--no-run", action="store_true", help="from the CSV file that is there")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: at least two, or there is no spread")
    if not 1 <= args.rewritten <= args.seeds:
        parser.error("--rewritten: from 1 to --seeds, a rewritten run has an unrewritten twin")
    if not args.no_run:
        speed_up_bfloat16()
        ranks.fork(run_all, WORLD, args, read_text(), args.out)
    curves = read_curves(args.out)
    about = json.loads(args.out.with_suffix(".json").read_text())
    print(f"\n{table(curves)}\n\n{sentences(curves, about)}")
    if args.doc is not None:
        args.doc.write_text(fill(args.doc.read_text(), curves, about))
        plot(curves, args.doc.parent / "img" / "training.svg")
    problems = judge(curves, about)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
