r"""Pre-train small Llamas in MXFP8 with RMSNorm and with MXNorm, from paired seeds.

The Llama of ``examples/titan.py``: torchao's emulated MXFP8 in forward, dgrad and wgrad of every
linear of a block, bfloat16 weights over float32 masters, AdamW; the text is the source and the
documents of the Linux kernel (Debian's ``linux-source-6.1``, GPL-2.0), behind a BPE of 16,384 ids.
Variants: ``rmsnorm`` (torch.compile as it is), ``exact``, ``p1``, ``p2`` and ``p2-pass-*`` (the
pass), and norms in plain PyTorch for other estimates and gradients (``trainlib/norms.py``). A seed
decides weights and batches, the same in every variant. ``--size moe`` has mixtures of experts
(``examples/moe.py``); ``vit`` trains a vision transformer (``examples/vit.py``) on scikit-learn's
digits.

    apt-get download linux-source-6.1 && dpkg -x linux-source-6.1*.deb .
    python benchmarks/train.py corpus usr/src/linux-source-6.1.tar.xz --out corpus.npz
    python benchmarks/train.py run --size 125m --variants rmsnorm p2 exact p1 --seeds 0 1 2 \
        --tokens 30e6 --corpus corpus.npz --out out/125m
    python benchmarks/train.py run --size 15m --variants rmsnorm p2 --seeds 0 \
        --rates 1e-3 4e-3 16e-3 64e-3 --tokens 8e6 --corpus corpus.npz --out out/15m
    python benchmarks/train.py vit --variants rmsnorm exact p1 p2 --seeds 0 1 2 3 4 --out out/vit
    python benchmarks/train.py show out/125m
    python benchmarks/train.py merge out/first out/second --out docs/data/train/125m
    python benchmarks/train.py document   # docs/train.md from the runs in docs/data/train

A folder that has runs already is not written to. Exits with 1 where a run that the pass is to
rewrite has no rewritten site, or no run was made; with 2 for a mistake in what it was given, before
anything is trained or written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paths  # noqa: F401
from trainlib import inputs
from trainlib.inputs import BadInput

if TYPE_CHECKING:
    from trainlib.loop import Plan, Trainer

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DOCS = Path(__file__).parents[1] / "docs"


def make_corpus(args: argparse.Namespace) -> int:
    from trainlib import corpus
    from trainlib.loop import VOCAB

    inputs.file_to_write(args.out)
    made = corpus.build(args.archive, args.bytes, VOCAB, args.longest)
    corpus.save(made, args.out)
    print(json.dumps(made.describe(), indent=1))
    return 0


def run(args: argparse.Namespace) -> int:
    from trainlib import corpus
    from trainlib.loop import RATES, SIZES, Batches, Trainer

    step = args.batch * args.seq
    if args.tokens < step:
        raise BadInput(f"--tokens {args.tokens}: expected {step:,} or more, one step's")
    plan = plan_of(args, args.tokens / step, args.seq, RATES[args.size])
    text = corpus.load(args.corpus)
    batches = Batches(text, plan)
    print(SIZES[args.size])
    return train(args, plan, Trainer, batches, text)


def run_vit(args: argparse.Namespace) -> int:
    from trainlib import digits

    size, words = digits.SIZES[args.size], ["python", "benchmarks/train.py", "vit"]
    plan = plan_of(
        args, args.epochs * digits.epoch(args.batch), size.tokens, digits.RATES[args.size]
    )
    words += ["--size", args.size, "--variants", *args.variants]
    words += ["--seeds", *map(str, args.seeds), "--rates", *map(str, args.rates or [plan.rate])]
    words += ["--epochs", str(args.epochs), "--batch", str(args.batch)]
    images = digits.Digits(plan)
    print(size)
    return train(args, plan, digits.VisionTrainer, images, images, command=shlex.join(words))


def plan_of(args: argparse.Namespace, steps: float, seq: int, rate: float) -> Plan:
    from trainlib import logs
    from trainlib.loop import Plan

    logs.folder_to_write(args.out)
    steps = max(1, round(steps))
    rate = args.rates[0] if args.rates else rate
    warmup = max(1, min(100, steps // 10))
    return Plan(args.size, steps, args.batch, seq, rate, warmup, args.device, args.inner)


def train(
    args: argparse.Namespace, plan: Plan, kind: type[Trainer], batches: Any, data: Any, **more: Any
) -> int:
    """Seed by seed, so that what a short time limit leaves is still paired."""
    import torch
    from trainlib import results
    from trainlib.loop import REWRITTEN, SITES_PER_BLOCK, Curve

    if args.device == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        from cpu_bfloat16 import speed_up_bfloat16

        speed_up_bfloat16()
    torch.set_float32_matmul_precision("high")
    # Variants and blocks are graphs of the same code, told apart by backends and guards.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.reset()
    begin = time.perf_counter()
    trainers: dict[str, Trainer] = {}
    curves: list[Curve] = []
    longest = 0.0
    rates = args.rates or [plan.rate]
    about = machine(args.device)
    wanted = [(s, r, v) for s in args.seeds for r in rates for v in args.variants]
    for seed, rate, variant in wanted:
        if time.perf_counter() - begin + longest > args.budget:
            print(f"left out, out of time: {variant}, seed {seed}, rate {rate:g}", flush=True)
            continue
        started = time.perf_counter()
        trainer = trainers.get(variant) or trainers.setdefault(variant, kind(plan, variant))
        curve = trainer.train(seed, batches, rate)
        curves.append(curve)
        took = time.perf_counter() - started
        longest = max(longest, took)
        speed = len(curve.loss) * plan.batch * plan.seq / curve.seconds
        print(
            f"{variant}, seed {seed}, rate {rate:g}: loss {results.final(curve):.4f}, "
            f"validation {curve.validation:.4f}, {curve.sites} sites, "
            + ("" if curve.accuracy is None else f"{curve.accuracy:.2%} right, ")
            + f"{speed:,.0f} tokens/s, {took:.0f} s",
            flush=True,
        )
        more["parameters"] = sum(p.numel() for p in trainer.model.parameters())
        results.save(args.out, plan, data, curves, about, **more)
    if not curves:
        print(f"no run was made in --budget {args.budget:g} seconds", file=sys.stderr)
        return 1
    print(f"{more['parameters']:,} parameters; {args.out}")
    silent = [c.variant for c in curves if c.variant in REWRITTEN and c.sites != SITES_PER_BLOCK]
    if silent:
        print(f"not {SITES_PER_BLOCK} sites per block: {sorted(set(silent))}", file=sys.stderr)
    return 1 if silent else 0


def machine(device: str) -> dict[str, Any]:
    """What it takes to repeat a run besides the code; triton and a driver where there are any."""
    import torch
    import torchao

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    found = {"device": name, "torch": torch.__version__, "torchao": torchao.__version__}
    with contextlib.suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        # A machine without the tool leaves it out.
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            told = subprocess.run(query, check=True, capture_output=True, text=True).stdout
            found["driver"] = told.splitlines()[0].strip()
    return found


def show(args: argparse.Namespace) -> int:
    from trainlib import logs, results

    tables = [results.table(*logs.load(folder)) for folder in args.folders]
    print("\n".join(line for table in tables for line in table))
    return 0


def merge(args: argparse.Namespace) -> int:
    from trainlib import runs

    print(f"{runs.merge(args.folders, args.out)} runs; {args.out}")
    return 0


def write_document(args: argparse.Namespace) -> int:
    from trainlib import document, runs

    # A name that is mistyped has no runs either, and the pages of none say so.
    runs.some(args.data)
    inputs.file_to_write(args.out)
    return document.update(args.data, args.out, args.check)


def parser() -> argparse.ArgumentParser:
    import torch
    from trainlib import corpus, digits
    from trainlib.loop import SIZES, VARIANTS

    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = made.add_subparsers(required=True)
    one = commands.add_parser("corpus", help="tokenise the archive")
    one.add_argument("archive", type=Path)
    one.add_argument(
        "--bytes", type=inputs.whole, default=110_000_000, help="of text (default 110e6)"
    )
    one.add_argument(
        "--longest", type=inputs.whole, default=corpus.LONGEST,
        help=f"bytes of a file; longer ones are left out (default {corpus.LONGEST})",
    )  # fmt: skip
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(command=make_corpus)
    two = commands.add_parser("run", help="train every variant from every seed at every rate")
    two.add_argument("--size", choices=SIZES, required=True)
    two.add_argument(
        "--tokens", type=inputs.whole, default=30_000_000, help="per run (default 30e6)"
    )
    two.add_argument("--batch", type=inputs.whole, default=32, help="sequences a step (default 32)")
    two.add_argument(
        "--seq", type=inputs.whole, default=1024, help="tokens a sequence (default 1024)"
    )
    two.add_argument("--corpus", type=Path, required=True)
    two.set_defaults(command=run)
    five = commands.add_parser("vit", help="the same with a vision transformer on digits")
    five.add_argument("--size", choices=digits.SIZES, default="vit")
    five.add_argument("--epochs", type=inputs.whole, default=40)
    five.add_argument("--batch", type=inputs.whole, default=128, help="images a step (default 128)")
    five.set_defaults(command=run_vit)
    for both in (two, five):
        several: dict[str, Any] = {"nargs": "+", "action": inputs.Distinct}
        both.add_argument("--variants", **several, choices=VARIANTS, default=["rmsnorm", "p2"])
        both.add_argument("--seeds", **several, type=inputs.seed, default=[0])
        both.add_argument("--rates", **several, type=inputs.rate, help="peak learning rates")
        both.add_argument("--out", type=Path, required=True, help="folder without runs")
        both.add_argument(
            "--budget", type=inputs.duration, default=3e6, help="seconds; no run begun after"
        )
        both.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
        both.add_argument(
            "--device", type=inputs.device, choices=("cpu", "cuda"),
            default="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip
    three = commands.add_parser("show", help="tables of finished runs")
    three.add_argument("folders", type=Path, nargs="+")
    three.set_defaults(command=show)
    six = commands.add_parser("merge", help="runs of several commands as one folder")
    six.add_argument("folders", type=Path, nargs="+")
    six.add_argument("--out", type=Path, required=True, help="folder without runs")
    six.set_defaults(command=merge)
    four = commands.add_parser("document", help="page and figures from committed runs")
    four.add_argument("--data", type=Path, default=DOCS / "data" / "train", help="their folders")
    four.add_argument("--out", type=Path, default=DOCS / "train.md", help="figures go to img/")
    four.add_argument("--check", action="store_true", help="write nothing, name what is stale")
    four.set_defaults(command=write_document)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return inputs.told(Path(__file__).name, lambda: args.command(args))


if __name__ == "__main__":
    sys.exit(main())
