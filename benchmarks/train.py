r"""Pre-train small Llamas in MXFP8 with RMSNorm and with MXNorm, from paired seeds.

The Llama of ``examples/titan.py``: torchao's emulated MXFP8 in forward, dgrad and wgrad of every
linear of a block, bfloat16 weights over float32 masters, AdamW; the text is the source and the
documents of the Linux kernel (Debian's ``linux-source-6.1``, GPL-2.0), behind a BPE of 16,384 ids.
Variants: ``rmsnorm`` (torch.compile as it is), ``exact``, ``p1``, ``p2`` (the pass), and norms in
plain PyTorch for other estimates (``trainlib/norms.py``). A seed decides weights and batches, the
same in every variant. ``--size moe`` has mixtures of experts (``examples/moe.py``); ``vit`` trains
a vision transformer (``examples/vit.py``) on scikit-learn's digits.

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

Exits with 1 where a run that the pass is to rewrite has no rewritten site.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paths  # noqa: F401

if TYPE_CHECKING:
    from trainlib.loop import Plan, Trainer

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DOCS = Path(__file__).parents[1] / "docs"


def whole(text: str) -> int:
    """A count, also as 30e6."""
    value = float(text)
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number above zero")
    return int(value)


def make_corpus(args: argparse.Namespace) -> int:
    from trainlib import corpus
    from trainlib.loop import VOCAB

    made = corpus.build(args.archive, args.bytes, VOCAB, args.longest)
    corpus.save(made, args.out)
    print(json.dumps(made.describe(), indent=1))
    return 0


def run(args: argparse.Namespace) -> int:
    from trainlib import corpus
    from trainlib.loop import RATES, SIZES, Batches, Trainer

    plan = plan_of(args, args.tokens / (args.batch * args.seq), args.seq, RATES[args.size])
    text = corpus.load(args.corpus)
    if len(text.tokens) < corpus.VALIDATION + args.batch * args.seq + 1:
        raise SystemExit(f"{args.corpus}: too few tokens for one batch beside the held-out ones")
    print(SIZES[args.size])
    return train(args, plan, Trainer, Batches(text, plan), text)


def run_vit(args: argparse.Namespace) -> int:
    from trainlib import digits

    size, words = digits.SIZES[args.size], ["python", "benchmarks/train.py", "vit"]
    plan = plan_of(
        args, args.epochs * digits.epoch(args.batch), size.tokens, digits.RATES[args.size]
    )
    words += ["--size", args.size, "--variants", *args.variants]
    words += ["--seeds", *map(str, args.seeds), "--rates", *map(str, args.rates or [plan.rate])]
    words += ["--epochs", str(args.epochs), "--batch", str(args.batch)]
    words += ["--out", f"docs/data/train/{args.out.name}"]
    try:
        images = digits.Digits(plan)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(size)
    return train(args, plan, digits.VisionTrainer, images, images, command=shlex.join(words))


def plan_of(args: argparse.Namespace, steps: float, seq: int, rate: float) -> Plan:
    from trainlib.loop import Plan

    steps = max(1, round(steps))
    rate = args.rates[0] if args.rates else rate
    warmup = max(1, min(100, steps // 10))
    return Plan(args.size, steps, args.batch, seq, rate, warmup, args.device, args.inner)


def train(
    args: argparse.Namespace, plan: Plan, kind: type[Trainer], batches: Any, data: Any, **more: Any
) -> int:
    """Seed by seed, so that what a short lease leaves is still paired."""
    import torch
    from trainlib import results
    from trainlib.loop import SITES_PER_BLOCK, Curve

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
        results.save(args.out, plan, data, curves, machine(args.device), **more)
    print(f"{more.get('parameters', 0):,} parameters; {args.out}")
    silent = [
        c.variant
        for c in curves
        if c.variant in ("exact", "p1", "p2") and c.sites != SITES_PER_BLOCK
    ]
    if silent:
        print(f"not {SITES_PER_BLOCK} sites per block: {sorted(set(silent))}", file=sys.stderr)
    return 1 if silent else 0


def machine(device: str) -> dict[str, Any]:
    import torch
    import torchao

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "torchao": torchao.__version__}


def show(args: argparse.Namespace) -> int:
    from trainlib import results

    for folder in args.folders:
        print("\n".join(results.table(*results.load(folder))))
    return 0


def merge(args: argparse.Namespace) -> int:
    from trainlib import runs

    try:
        print(f"{runs.merge(args.folders, args.out)} runs; {args.out}")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    return 0


def write_document(args: argparse.Namespace) -> int:
    from trainlib import document

    try:
        return document.update(args.data, args.out, args.check)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def parser() -> argparse.ArgumentParser:
    import torch
    from trainlib import corpus, digits
    from trainlib.loop import SIZES, VARIANTS

    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = made.add_subparsers(required=True)
    one = commands.add_parser("corpus", help="tokenise the archive")
    one.add_argument("archive", type=Path)
    one.add_argument("--bytes", type=whole, default=110_000_000, help="of text (default 110e6)")
    one.add_argument(
        "--longest", type=whole, default=corpus.LONGEST,
        help=f"bytes of a file; longer ones are left out (default {corpus.LONGEST})",
    )  # fmt: skip
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(command=make_corpus)
    two = commands.add_parser("run", help="train every variant from every seed at every rate")
    two.add_argument("--size", choices=SIZES, required=True)
    two.add_argument("--tokens", type=whole, default=30_000_000, help="per run (default 30e6)")
    two.add_argument("--batch", type=whole, default=32, help="sequences a step (default 32)")
    two.add_argument("--seq", type=whole, default=1024, help="tokens a sequence (default 1024)")
    two.add_argument("--corpus", type=Path, required=True)
    two.set_defaults(command=run)
    five = commands.add_parser("vit", help="the same with a vision transformer on digits")
    five.add_argument("--size", choices=digits.SIZES, default="vit")
    five.add_argument("--epochs", type=whole, default=40)
    five.add_argument("--batch", type=whole, default=128, help="images a step (default 128)")
    five.set_defaults(command=run_vit)
    for both in (two, five):
        both.add_argument("--variants", nargs="+", choices=VARIANTS, default=["rmsnorm", "p2"])
        both.add_argument("--seeds", nargs="+", type=int, default=[0])
        both.add_argument("--rates", nargs="+", type=float, help="peak learning rates")
        both.add_argument("--out", type=Path, required=True, help="folder")
        both.add_argument("--budget", type=float, default=3e6, help="seconds; no run begun after")
        both.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
        both.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    three = commands.add_parser("show", help="tables of finished runs")
    three.add_argument("folders", type=Path, nargs="+")
    three.set_defaults(command=show)
    six = commands.add_parser("merge", help="runs of several commands as one folder")
    six.add_argument("folders", type=Path, nargs="+")
    six.add_argument("--out", type=Path, required=True, help="folder")
    six.set_defaults(command=merge)
    four = commands.add_parser("document", help="page and figures from committed runs")
    four.add_argument("--data", type=Path, default=DOCS / "data" / "train", help="their folders")
    four.add_argument("--out", type=Path, default=DOCS / "train.md", help="figures go to img/")
    four.add_argument("--check", action="store_true", help="write nothing, name what is stale")
    four.set_defaults(command=write_document)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    status: int = args.command(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
