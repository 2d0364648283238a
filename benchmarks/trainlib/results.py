"""Curves on disk, and what is read off them."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from trainlib.corpus import LONGEST
from trainlib.loop import VARIANTS, Curve, Plan

TAIL = 0.05  # of a run: the steps that a final loss is the mean of
FEWEST = 4  # pairs: two that agree by chance have an interval as narrow as one likes
SPIKE = 6.0  # median absolute deviations above the median of the steps before
WINDOW = 50


def write_curves(path: Path, curves: Iterable[Curve]) -> None:
    """One line a step, six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "seed", "rate", "step", "loss", "grad_norm"])
        for c in curves:
            for step, (loss, norm) in enumerate(zip(c.loss, c.grad_norm, strict=True)):
                writer.writerow(
                    [c.variant, c.seed, f"{c.rate:g}", step, f"{loss:.6g}", f"{norm:.6g}"]
                )


def final(curve: Curve, share: float = TAIL) -> float:
    """Mean loss of the last twentieth, or another share; NaN where the run diverged."""
    tail = curve.loss[-max(1, round(len(curve.loss) * share)) :]
    return statistics.fmean(tail)


def before(curve: Curve) -> Iterator[tuple[int, float, float]]:
    """By step from ``WINDOW`` on: the median of the steps before it, and a spike's least height."""
    for i in range(WINDOW, len(curve.loss)):
        some = curve.loss[i - WINDOW : i]
        median = statistics.median(some)
        yield i, median, SPIKE * max(statistics.median(abs(v - median) for v in some), 1e-6)


def spike_steps(curve: Curve) -> list[int]:
    """Steps whose loss stands out of the ``WINDOW`` before them; a run of them counts once."""
    found, inside = [], False
    for i, median, least in before(curve):
        out = not curve.loss[i] <= median + least
        if out and not inside:
            found.append(i)
        inside = out
    return found


def spikes(curve: Curve) -> int:
    """How many there are of :func:`spike_steps`."""
    return len(spike_steps(curve))


def deviation(values: Sequence[float]) -> float:
    """Standard deviation; NaN with one of them, where ``statistics.stdev`` raises."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with its 95% interval (Student's t).

    Undecided while the half-width is over .01, and of fewer than ``FEWEST`` pairs.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float:
        n = len(self.values)
        if n < 2:
            return math.inf
        return float(stats.t.ppf(0.975, n - 1)) * deviation(self.values) / math.sqrt(n)

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "a run diverged"
        if len(self.values) < FEWEST:
            return f"{self.mean:+.4f} ({self.pairs}), undecided"
        beside = ", without zero" if self.only_size_is_open else ""
        return f"{self.mean:+.4f} ± {self.half_width:.4f}, {self.verdict}{beside}"

    @property
    def pairs(self) -> str:
        """How many they are, in words."""
        return "one pair" if len(self.values) == 1 else f"{len(self.values)} pairs"

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval of enough pairs does, however wide it is."""
        return len(self.values) >= FEWEST and abs(self.mean) > self.half_width

    @property
    def only_size_is_open(self) -> bool:
        """Whether there is a difference that is undecided for the width of its interval alone."""
        return self.excludes_zero and self.verdict == "undecided"

    @property
    def verdict(self) -> str:
        if len(self.values) < FEWEST or not self.half_width <= 0.01:
            return "undecided"
        return "differs" if self.excludes_zero else "no difference seen"


def paired(
    curves: Sequence[Curve],
    variant: str,
    against: str = "rmsnorm",
    of: Callable[[Curve], float] = final,
) -> Difference:
    """Final losses of ``variant`` minus those of ``against``, of equal seeds and rates."""
    found = {(c.variant, c.seed, c.rate): of(c) for c in curves}
    return Difference(
        tuple(
            value - found[against, seed, rate]
            for (name, seed, rate), value in sorted(found.items())
            if name == variant and (against, seed, rate) in found
        )
    )


def held_out(curves: Sequence[Curve], variant: str) -> Difference:
    """The same of losses on held-out data, minus RMSNorm."""
    return paired(curves, variant, of=lambda c: c.validation)


def of_images(about: dict[str, Any]) -> bool:
    """Whether the runs see few images again and again, so that their training loss tells little."""
    return "images" in about["corpus"]


def compared(about: dict[str, Any], curves: Sequence[Curve], variant: str) -> Difference:
    """What a variant is judged by, minus RMSNorm: final losses, of images those held out."""
    return held_out(curves, variant) if of_images(about) else paired(curves, variant)


def save(
    folder: Path,
    plan: Plan,
    data: Any,
    curves: Sequence[Curve],
    machine: dict[str, Any],
    **more: Any,
) -> None:
    """``curves.csv``, ``norms.csv`` and ``runs.json``, with ``more`` about the runs in it.

    ``data`` is what describes itself: a corpus, or images.
    """
    write_curves(folder / "curves.csv", curves)
    with (folder / "norms.csv").open("w", newline="") as file:
        rows = [
            {"variant": c.variant, "seed": c.seed, "rate": f"{c.rate:g}", **n}
            for c in curves
            for n in c.norms
        ]
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    runs = [
        {
            "variant": c.variant,
            "seed": c.seed,
            "rate": c.rate,
            "validation": c.validation,
            "sites": c.sites,
            "seconds": round(c.seconds, 2),
            **({} if c.accuracy is None else {"accuracy": c.accuracy}),
        }
        for c in curves
    ]
    about = {"machine": machine, "plan": asdict(plan), "corpus": data.describe(), **more}
    about["runs"] = runs
    (folder / "runs.json").write_text(json.dumps(about, indent=1) + "\n")


def in_order(curves: Iterable[Curve]) -> list[str]:
    """Variants that there are: in the order of :data:`VARIANTS`, others behind."""
    there = dict.fromkeys(c.variant for c in curves)
    return [v for v in VARIANTS if v in there] + [v for v in there if v not in VARIANTS]


def has_held_out(about: dict[str, Any]) -> bool:
    """Whether the held-out tokens are text of their own.

    With files of any length they are the end of one that a program wrote and that the runs train
    on.
    """
    return bool(about["corpus"].get("longest", 0) <= LONGEST)


def table(about: dict[str, Any], curves: Sequence[Curve], gaps: bool = True) -> list[str]:
    """A Markdown table: per variant and rate the losses, with ``gaps`` their paired difference."""
    plan = about["plan"]
    tokens = plan["steps"] * plan["batch"] * plan["seq"]
    of = " of held-out images" if of_images(about) else ""
    head = ["variant", "rate", "seeds", "final loss (± SD of seeds)", "validation"]
    head += [f"minus RMSNorm{of} (± 95%)"] * gaps + ["spikes", "gradient norm"]
    lines = [
        f"{plan['size']}, {tokens / 1e6:.1f}M tokens a run, {about['machine']['device']}",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for variant in in_order(curves):
        for rate in sorted({c.rate for c in curves}):
            some = [c for c in curves if (c.variant, c.rate) == (variant, rate)]
            if not some:
                continue
            finals = [final(c) for c in some]
            spread = f" ± {deviation(finals):.4f}" if len(finals) > 1 else ""
            gap = compared(about, [c for c in curves if c.rate == rate], variant)
            beside = "" if variant == "rmsnorm" or not gap.values else str(gap)
            norms = [v for c in some for v in c.grad_norm[len(c.grad_norm) // 2 :]]
            # Of the steps before a run diverged, where it did.
            norm = statistics.median([v for v in norms if math.isfinite(v)] or [math.nan])
            held = f"{statistics.fmean(c.validation for c in some):.4f}"
            held = held if has_held_out(about) else "–"
            cells = [
                variant,
                f"{rate:g}",
                str(len(some)),
                f"{statistics.fmean(finals):.4f}{spread}",
            ]
            cells += [held] + [beside] * gaps + [str(sum(map(spikes, some))), f"{norm:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines
