"""Folders of finished runs, and what is read off several curves at once."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from trainlib import logs, results
from trainlib.inputs import BadInput
from trainlib.logs import LATER
from trainlib.loop import SIZES, Curve, Plan
from trainlib.results import final

RISE = 0.5  # nats above its own lowest twentieth at which a run that ends counts as diverged
POINTS = 160  # of a line in a figure


@dataclass(frozen=True)
class Folder:
    """What :func:`results.save` left in one folder."""

    path: Path
    about: dict[str, Any]
    curves: list[Curve]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = self.about["plan"]
        return plan

    @property
    def tokens(self) -> int:
        """Of a run that was not broken off."""
        count: int = self.plan["steps"] * self.plan["batch"] * self.plan["seq"]
        return count

    @property
    def variants(self) -> list[str]:
        """See :func:`results.in_order`."""
        return results.in_order(self.curves)

    @property
    def seeds(self) -> list[int]:
        return sorted({c.seed for c in self.curves})

    @property
    def rates(self) -> list[float]:
        return sorted({c.rate for c in self.curves})

    @property
    def parameters(self) -> int | None:
        """As the run says, else of the Llama of this size; None where neither is known.

        Of a mixture of experts all of them, whatever part a token goes through.
        """
        if "parameters" in self.about:
            return int(self.about["parameters"])
        s = SIZES.get(self.plan["size"])
        if s is None:
            return None
        attention = s.dim * (2 * s.heads + 2 * s.kv_heads) * s.head_dim
        experts = getattr(s, "experts", 0)
        forward = 3 * s.dim * s.ffn * max(1, experts) + s.dim * experts  # with the router
        block = attention + forward + 2 * s.dim
        return 2 * s.vocab * s.dim + s.layers * block + s.dim

    @property
    def has_held_out(self) -> bool:
        """See :func:`results.has_held_out`."""
        return results.has_held_out(self.about)

    def at(self, rate: float) -> list[Curve]:
        return [c for c in self.curves if c.rate == rate]

    def of(self, variant: str, rate: float | None = None) -> list[Curve]:
        """Curves of a variant, by seed."""
        found = [c for c in self.curves if c.variant == variant and rate in (None, c.rate)]
        return sorted(found, key=lambda c: (c.rate, c.seed))

    @property
    def missing(self) -> list[tuple[str, int, float]]:
        """Runs that the command makes and that are not among these: variant, seed, rate."""
        there = {(c.variant, c.seed, c.rate) for c in self.curves}
        wanted = itertools.product(self.variants, self.seeds, self.rates)
        return [key for key in wanted if key not in there]

    def commands(self) -> list[str]:
        """What makes these runs, from the archive of their text on."""
        out = shlex.join(["--out", f"docs/data/train/{self.name}"])
        if "command" in self.about:
            return [f"{command} {out}" for command in str(self.about["command"]).split("; ")]
        about = self.about["corpus"]
        first = ["python", "benchmarks/train.py", "corpus", f"usr/src/{about['source']}"]
        first += ["--bytes", str(about["limit"]), "--longest", str(about["longest"])]
        first += ["--out", "corpus.npz"]
        plan = self.plan
        words = ["python", "benchmarks/train.py", "run", "--size", plan["size"], "--variants"]
        words += [*self.variants, "--seeds", *map(str, self.seeds), "--rates"]
        words += [*(f"{r:g}" for r in self.rates), "--tokens", str(self.tokens)]
        words += ["--batch", str(plan["batch"]), "--seq", str(plan["seq"])]
        words += ["--corpus", "corpus.npz"]
        return [shlex.join(first), f"{shlex.join(words)} {out}"]


def folders(data: Path) -> list[Path]:
    """Folders of finished runs below ``data``, by name.

    Raises:
        BadInput: where it does not exist, or is such a folder itself.
    """
    if not data.is_dir():
        what = "a file" if data.exists() else "no such folder"
        raise BadInput(f"{data}: {what}, expected the folder around folders of finished runs")
    if any((data / name).exists() for name in logs.FILES):
        raise BadInput(f"{data}: a folder of runs, expected the folder around it")
    return [p for p in sorted(data.glob("*")) if any((p / name).exists() for name in logs.FILES)]


def some(data: Path) -> None:
    """Refuses a folder without finished runs below it, of which there is nothing to write."""
    if not folders(data):
        raise BadInput(f"{data}: no folder of finished runs in it")


def read(data: Path) -> dict[str, Folder]:
    """Every folder of finished runs below ``data``, by its name.

    Raises:
        BadInput: where ``data`` is no folder of such, or one of them is damaged.
    """
    return {path.name: Folder(path, *logs.load(path)) for path in folders(data)}


def unlike(one: Folder, other: Folder, *also: str) -> list[str]:
    """What plan, data, machine and ``also`` of two folders differ in, in words.

    Without the rate of a plan, which is the first of a command's (each run says its own), the
    driver, and what only one of them notes of ``LATER``.
    """

    def facts(folder: Folder) -> dict[str, Any]:
        groups = {name: folder.about[name] for name in ("plan", "corpus", "machine")}
        found = {f"{group}.{k}": v for group, about in groups.items() for k, v in about.items()}
        found.setdefault("plan.inner", "inductor")
        return found | {name: folder.about[name] for name in also if name in folder.about}

    a, b = facts(one), facts(other)
    left_out = {"plan.rate", "machine.driver"}
    left_out |= {f"machine.{k}" for k in LATER if not {f"machine.{k}"} <= a.keys() & b.keys()}
    return [
        f"{name} {b.get(name, 'not noted')} against {a.get(name, 'not noted')}"
        for name in dict.fromkeys([*a, *b])
        if name not in left_out and a.get(name) != b.get(name)
    ]


def machine_of(found: Sequence[Folder]) -> dict[str, Any]:
    """Of folders that are not :func:`unlike`: what all of them note, and each driver."""
    machines = [folder.about["machine"] for folder in found]
    made = {k: v for k, v in machines[0].items() if all(k in m for m in machines)}
    if "driver" in made:
        drivers = (d for m in machines for d in m["driver"].split("; "))
        made["driver"] = "; ".join(dict.fromkeys(drivers))
    return made


def join(one: Folder, other: Folder | None) -> Folder:
    """Runs of ``other`` added where both were made alike, so that more of them have a pair."""
    pairs = {(c.seed, c.rate) for c in one.curves}
    return _with(one, [other], lambda c: (c.seed, c.rate) in pairs)


def pool(one: Folder, *others: Folder | None) -> Folder:
    """``one`` with those seeds of ``others`` at its rates that were made alike, of its variants."""
    variants, rates = one.variants, one.rates
    return _with(one, others, lambda c: c.variant in variants and c.rate in rates)


def _with(one: Folder, others: Sequence[Folder | None], wanted: Callable[[Curve], bool]) -> Folder:
    there = {(c.variant, c.seed, c.rate): c for c in one.curves}
    for other in others:
        if other is None or unlike(one, other):
            continue
        for c in filter(wanted, other.curves):
            there.setdefault((c.variant, c.seed, c.rate), c)
    return Folder(one.path, one.about, list(there.values()))


def merge(paths: Sequence[Path], out: Path) -> int:
    """Runs of one kind from several commands, written as one folder; how many they are.

    Raises:
        BadInput: where plans, data or machines differ, a run is there twice, or ``out`` has runs.
    """
    logs.folder_to_write(out)
    found = [Folder(path, *logs.load(path)) for path in paths]
    first = found[0]
    for other in found[1:]:
        differ = unlike(first, other, "parameters")
        if differ:
            raise BadInput(f"{other.path}: not made as {first.path}: {'; '.join(differ)}")
    curves = [c for folder in found for c in folder.curves]
    keys = [(c.variant, c.seed, c.rate) for c in curves]
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise BadInput(f"there more than once: {logs.several(twice)}")
    known = {k: v for k, v in first.about.items() if k == "parameters"}
    commands = [f.about["command"] for f in found if "command" in f.about]
    if commands:
        known["command"] = "; ".join(dict.fromkeys(commands))
    results.save(out, Plan(**first.plan), Known(first.about["corpus"]), curves,
                 machine_of(found), **known)  # fmt: skip
    return len(curves)


@dataclass(frozen=True)
class Known:
    """Data that is described already."""

    about: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return self.about


# --- curves ---------------------------------------------------------------------------------------


def smooth(values: Sequence[float], window: int) -> Any:
    """Mean over the last ``window`` steps, from the first step that has as many; ``[n - w + 1]``.

    A window with a number that is none has none.
    """
    window = min(window, len(values))
    return np.convolve(np.asarray(values, dtype=float), np.full(window, 1 / window), "valid")


def window(plan: dict[str, Any]) -> int:
    """Steps that figures smooth over."""
    return max(1, int(plan["steps"]) // 40)


def diverged(curve: Curve) -> bool:
    """Whether the loss ends as no number, or ``RISE`` above the run's own lowest twentieth."""
    end = final(curve)
    if not math.isfinite(end):
        return True
    width = max(1, round(len(curve.loss) * results.TAIL))
    return bool(end > np.nanmin(smooth(curve.loss, width)) + RISE)


def mean_final(curves: Sequence[Curve]) -> float:
    """Of the final losses of those that did not diverge; NaN without any."""
    good = [final(c) for c in curves if not diverged(c)]
    return statistics.fmean(good) if good else math.nan


def first_divergence(folder: Folder, variant: str) -> float | None:
    """The lowest rate at which a run of the variant diverged."""
    return min((c.rate for c in folder.of(variant) if diverged(c)), default=None)


@dataclass(frozen=True)
class Band:
    """Paired differences over training: mean and half-width of 95%, by step (from 1)."""

    steps: list[int]
    mean: list[float]
    half: list[float]
    pairs: int


def band(curves: Sequence[Curve], variant: str, width: int) -> Band | None:
    """Of smoothed losses minus those of RMSNorm; None without a pair.

    Student's t at each point. Ends where the first of the curves does.
    """
    plain = {(c.seed, c.rate): c for c in curves if c.variant == "rmsnorm"}
    pairs = [
        (c, plain[c.seed, c.rate])
        for c in curves
        if c.variant == variant and (c.seed, c.rate) in plain
    ]
    if not pairs:
        return None
    length = min(len(c.loss) for pair in pairs for c in pair)
    gaps = np.array(
        [smooth(a.loss[:length], width) - smooth(b.loss[:length], width) for a, b in pairs]
    )
    n = len(pairs)
    half = np.full(gaps.shape[1], math.inf)
    if n > 1:
        half = stats.t.ppf(0.975, n - 1) * gaps.std(axis=0, ddof=1) / math.sqrt(n)
    offset = length - gaps.shape[1] + 1
    kept = thin(gaps.shape[1])
    return Band(
        [i + offset for i in kept],
        gaps.mean(axis=0)[kept].tolist(),
        half[kept].tolist(),
        n,
    )


def thin(length: int) -> list[int]:
    """At most ``POINTS`` places of a line, the last among them."""
    step = max(1, math.ceil(length / POINTS))
    return list(range(length - 1, -1, -step))[::-1]


# --- norms ----------------------------------------------------------------------------------------


def over_depth(curves: Sequence[Curve], statistic: str) -> dict[str, float]:
    """By norm in the order of the model: the mean over runs."""
    found: dict[str, list[float]] = {}
    for curve in curves:
        for row in curve.norms:
            found.setdefault(row["norm"], []).append(float(row[statistic]))
    return {norm: statistics.fmean(values) for norm, values in found.items()}
