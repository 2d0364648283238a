"""``docs/reproduce.md``: the paper's claims one by one, beside what scripts here measured.

    python benchmarks/reproduce.py             # the page, from committed results alone
    python benchmarks/reproduce.py --check     # exit 1 where it is not up to date

Exits with 2 for a mistake in what it was given.

Nothing is measured here. Figures of others are those in ``REPORTED`` (``trainlib/sources.py``); any
other number is read from docs/data, docs/kernels.json, docs/layer.json and docs/blackwell.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import paths  # noqa: F401
from kernellib.sass import BANDWIDTH, CLOCK, ISSUE, MULTIPROCESSORS, SCHEDULERS
from trainlib import inputs, runs
from trainlib.claims import anchor, compare, number, prediction, rows
from trainlib.figures import main_rate
from trainlib.gradients import on_the_seeds_of
from trainlib.results import FEWEST, Difference, paired
from trainlib.sources import H200_BANDWIDTH, H200_CLOCK, REPORTED, Sources
from trainlib.words import TITLES, listed, said, table

DOCS = Path(__file__).parents[1] / "docs"
EPS = 1e-5

HEAD = """# Claim by claim

What [MXNorm (arXiv 2603.13180)](https://arxiv.org/abs/2603.13180) claims, and what one H200 and a
CPU say. **A**: from the paper's abstract. **R**: as others report it from the paper, not checked
against it. All other numbers come from the script in the last column, by its
committed results; `python benchmarks/reproduce.py` sets them together and measures nothing. Losses
in nats; ± is a 95% interval over paired seeds, *undecided* while it is wider than ± .01 or of fewer
than four pairs."""

COMPARABLE = """## What can be compared

- **Theory** in full: the same formulas, other ways to the numbers ([theory](theory.md)).
- **Losses** not as such: other text, another tokenizer, a small part of the tokens
  ([pre-training](train.md), also with the questions that the paper leaves open). The sign of a
  paired difference can, and its size with care: early in training it is not that of the end, and
  it depends on the learning rate. The reported differences have no interval known to us. Sizes
  of model here differ in rate, depth and tokens a parameter: they say nothing about a trend over
  width.
- **Kernels** as ratios, each over torch.compile on its own chip. Which torch, shapes and scale
  format the reported one has we do not know ([kernels](kernels.md)).
- **The layer** hardly: an H200 has no MXFP8 or NVFP4 matmul. Emulated, matmuls take a larger
  share, and our op pays for codes that are dequantised again ([layer](layer.md))."""


def seen(s: Sources) -> str:
    """The paper's own 125M runs have RMSNorm ahead of p = 2: whether ours do."""
    plain, _, two = REPORTED["losses"]["125M"]
    told = f"The reported losses have RMSNorm ahead of p = 2 by {two - plain:.3f} (R). "
    folder = s.train.get("125m")
    if folder is None:
        return f"{told}Not measured here: there are no runs in `docs/data/train/125m`."
    curves = folder.at(main_rate(folder))
    gap, exact, own = (paired(curves, variant) for variant in ("p2", "exact", "p2-own"))
    text = f"{told}Ours, p = 2 minus RMSNorm: {said(gap)}."
    if len(gap.values) >= FEWEST and math.isfinite(gap.mean):
        inside = ["the reported difference"] * (abs(gap.mean - (two - plain)) <= gap.half_width)
        inside += ["zero"] * (not gap.excludes_zero)
        text = (
            f"{told}Ours, p = 2 minus RMSNorm: {number(gap)}; the interval holds "
            f"{listed(inside or ['neither'])}: {compare(gap, two - plain)}."
        )
    earlier = s.train.get("125m-tables")
    if earlier is not None:
        both = (*gap.values, *paired(earlier.at(main_rate(earlier)), "p2").values)
        text += f" As one with the runs on an earlier text: {said(Difference(both))}."
    if exact.values:
        text += f" The same rewrite with the true RMS, minus RMSNorm: {said(exact)}."
    if own.values:
        text += (
            " The estimate with its own gradient in the place of the straight-through one, minus "
            f"RMSNorm: {said(own)}."
        )
        alike = on_the_seeds_of(curves, "p2-own")
        text += "" if alike is None else f" On the same seeds p = 2: {alike}."
    return f"{text} The gradient's part: [pre-training](train.md#{anchor(TITLES['15m'])})."


def arithmetic(s: Sources) -> list[str]:
    b = prediction(s)
    counts = s.blackwell
    head = [
        "16384 x 4096",
        "MB",
        "ms at 8 TB/s",
        "instructions an element",
        "ms to issue",
        "longer",
    ]
    return [
        f"A B200 by its maker's figures: {BANDWIDTH / 1e12:.0f} TB/s; {MULTIPROCESSORS} "
        f"multiprocessors with {SCHEDULERS} schedulers at {CLOCK / 1e9:.2f} GHz, "
        f"{ISSUE / 1e12:.3f}e12 instructions of a warp a second. A kernel takes the longer of "
        "bytes and instructions. Ours is compiled for that chip (`blackwell.py`); the two "
        "kernels of torch.compile are counted on an H200 (`kernels.py`). Bytes are those that have "
        "to move.",
        "",
        *table(head, b["lines"]),
        "",
        f"By the longer: {b['ratio']:.2f}x. By bytes alone: {b['bytes_ratio']:.2f}x. Neither is a "
        f"bound: for the H200 ({H200_BANDWIDTH / 1e12:.1f} TB/s, {H200_CLOCK / 1e9:.2f} GHz) the "
        f"same arithmetic says {b['h200']:.2f}x, and {b['measured']:.2f}x is measured. "
        "The estimate itself saves "
        f"{counts['instr., exact, gain'] - counts['instr., p2, gain']:.2f} of "
        f"{counts['instr., exact, gain']:.2f} instructions an element there, and no time "
        f"({counts['ms, exact, gain']:.4f} and {counts['ms, p2, gain']:.4f} ms): memory decides.",
    ]


def epsilon() -> str:
    """The deviation in numbers."""
    floor_in, floor_out, tiny = math.sqrt(EPS), EPS, 1e-3
    inside, outside = tiny / math.sqrt(tiny**2 + EPS), tiny / (tiny + EPS)
    return (
        f"The authors' earlier code adds eps outside the root (R); ours stands inside, as "
        f"RMSNorm's does, at 1e-5 in all runs here. At eps = {EPS:g} rows fade below an RMS of "
        f"{floor_in:.4f} with ours and of {floor_out:g} with theirs, {floor_in / floor_out:.0f} "
        f"times lower. A row of RMS {tiny:g} leaves RMSNorm and ours with an RMS of {inside:.3f}, "
        f"theirs with {outside:.3f}; at an RMS of 1 the two differ by "
        f"{abs(1 / math.sqrt(1 + EPS) - 1 / (1 + EPS)):.0e}."
    )


def page(docs: Path, train: Path) -> str:
    """The document."""
    s = Sources(docs, train)
    head = ["claim", "reported", "ours", "same?", "why, and what differs", "script"]
    lines = [HEAD, "", *table(head, rows(s)), "", "## RMSNorm ahead at 125M?", "", seen(s), ""]
    lines += [COMPARABLE, ""]
    lines += ["## The B200 prediction", "", *arithmetic(s), ""]
    lines += ["## Stated deviation: eps", "", epsilon(), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the committed results")
    parser.add_argument("--train", type=Path, default=DOCS / "data" / "train", help="of the runs")
    parser.add_argument("--out", type=Path, default=DOCS / "reproduce.md")
    parser.add_argument("--check", action="store_true", help="write nothing, say whether stale")
    args = parser.parse_args(argv)
    return inputs.told(Path(__file__).name, lambda: write(args))


def write(args: argparse.Namespace) -> int:
    """The page, or with ``--check`` whether it is stale."""
    # A name that is mistyped has no runs either, and the page of none says so.
    runs.some(args.train)
    inputs.file_to_write(args.out)
    made = page(args.docs, args.train)
    if args.out.exists() and args.out.read_text() == made:
        return 0
    if not args.check:
        args.out.write_text(made)
    print(f"{'stale' if args.check else 'wrote'}: {args.out}")
    return int(args.check)


if __name__ == "__main__":
    sys.exit(main())
