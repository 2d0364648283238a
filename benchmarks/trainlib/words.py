"""What finished runs say, in words and tables of Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from mxnorm_pass import theory
from trainlib import results
from trainlib.figures import STATISTICS, label, main_rate
from trainlib.loop import SIZES
from trainlib.results import FEWEST, Difference, final, held_out, of_images, paired
from trainlib.runs import RISE, Folder, diverged, first_divergence, mean_final, over_depth

CHINCHILLA = 20  # tokens a parameter, arXiv 2203.15556
HERE = Path(__file__).parent
TITLES = {  # of the sections, by folder
    "125m": "125M parameters",
    "125m-tables": "125M parameters, an earlier text",
    "15m": "The gradient's part, at 15M parameters",
    "15m-rates": "Learning rates at 15M parameters",
    "1b": "1B parameters, the first steps",
    "15m-open": "Open questions at 15M parameters",
    "moe": "Mixture of experts",
    "vit": "Vision transformer",
}

Lines = list[str]


def text(name: str) -> str:
    """A piece of the prose, ``train.md`` beside this file; rules in it are those of the code."""
    pieces = (HERE / "train.md").read_text().split("\n%% ")
    found = dict(piece.split("\n", 1) for piece in pieces[1:])
    return found[name].strip("\n").format(
        chinchilla=CHINCHILLA, rise=RISE, window=results.WINDOW, spike=results.SPIKE,
        tail=results.TAIL, fewest=FEWEST,
    )  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def seeds_of(there: Iterable[int]) -> str:
    some = sorted(there)
    return f"seed{'s' * (len(some) > 1)} {listed([str(s) for s in some])}"


def seeds(folder: Folder) -> str:
    return seeds_of(folder.seeds)


def signed(value: float, digits: int = 4) -> str:
    """With its sign, and no minus in front of what rounds to zero."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def said(gap: Difference) -> str:
    """A paired difference in words."""
    n = len(gap.values)
    if not n:
        return "no pair"
    if not math.isfinite(gap.mean):
        return "no number, since a run diverged"
    if n == 1:
        return f"{signed(gap.mean)} nats in one pair, which has no interval: undecided"
    if n < FEWEST:
        each = ", ".join(map(signed, gap.values))
        return (
            f"{signed(gap.mean)} nats in the mean of {n} pairs ({each}), too few for an interval: "
            "undecided"
        )
    zero = "excludes" if gap.excludes_zero else "holds"
    verdict = {
        "undecided": f"undecided, the interval {zero} zero",
        "no difference seen": "no difference seen, the interval holds zero",
        "differs": "a difference, the interval excludes zero",
    }[gap.verdict]
    return f"{signed(gap.mean)} ± {gap.half_width:.4f} nats over {n} pairs: {verdict}"


def gaps(folder: Folder, also: str = "") -> Lines:
    """One line per variant that has a pair."""
    rate = main_rate(folder)
    lines = []
    for variant in folder.variants:
        gap = paired(folder.at(rate), variant)
        if variant == "rmsnorm" or not gap.values:
            continue
        held = held_out(folder.at(rate), variant)
        if of_images(folder.about):
            lines.append(f"- **{label(variant)} minus RMSNorm, on held-out images**: {said(held)}.")
            continue
        sign = "" if len(held.values) < FEWEST else f" ± {held.half_width:.4f}"
        known = also and folder.has_held_out and math.isfinite(gap.mean + held.mean)
        beside = f" On held-out {also}: {signed(held.mean)}{sign}." if known else ""
        lines.append(f"- **{label(variant)} minus RMSNorm**: {said(gap)}.{beside}")
    return lines


OTHER_PAIRS = (
    ("p2", "exact"),
    ("p1", "exact"),
    ("p1", "p2"),
    ("p2-own", "p2"),
    ("p2-projected", "p2"),
    ("p2-own", "p2-projected"),
    ("p2-straight", "p2"),
    ("p2-pass-own", "p2-own"),
    ("p2-pass-projected", "p2-projected"),
)


def other_gaps(folder: Folder) -> Lines:
    """Estimates against each other and against what computes the true RMS by their route."""
    curves = folder.at(main_rate(folder))
    return [
        f"- **{label(one)} minus {label(other)}**: {said(gap)}."
        for one, other in OTHER_PAIRS
        if (gap := paired(curves, one, other)).values
    ]


def size_of(folder: Folder) -> str:
    count = folder.parameters
    return "?" if count is None else f"{count / 1e6:,.1f}M"


def machines(folders: Iterable[Folder]) -> str:
    seen: dict[str, None] = {}
    for folder in folders:
        m = folder.about["machine"]
        seen[f"{m['device']}, torch {m['torch']}, torchao {m['torchao']}"] = None
    return "; ".join(seen)


def spikes(folder: Folder, rate: float) -> str:
    """Counts of spikes and gradient norms in words."""
    counts, least = [], []
    for variant in folder.variants:
        some = folder.of(variant, rate)
        late = [v for c in some for v in c.grad_norm[len(c.grad_norm) // 2 :]]
        late = [v for v in late if math.isfinite(v)]
        if not late:
            continue
        least += [above for c in some for _, _, above in results.before(c)]
        counts.append(
            f"{label(variant)} {sum(map(results.spikes, some))} in {len(some)} "
            f"{'run' if len(some) == 1 else 'runs'} (gradient norm {statistics.median(late):.3f} "
            f"in the median, {max(late):.3g} at most)"
        )
    above = (
        f" A spike of these runs is at least {statistics.median(least):.2f} nats high, in the "
        "median over steps."
        if least
        else ""
    )
    return (
        f"Spikes of the loss, and gradient norms of the second half before clipping: "
        f"{'; '.join(counts)}.{above}"
    )


def outliers(folder: Folder, rate: float) -> Lines:
    dim = SIZES[folder.plan["size"]].dim if folder.plan["size"] in SIZES else None
    lines = []
    for variant in folder.variants:
        found = {s: over_depth(folder.of(variant, rate), s) for s in STATISTICS}
        if not found["ratio_mean"]:
            continue
        ends = {s: (min(v.values()), max(v.values())) for s, v in found.items()}
        worst = max(found["channel"], key=lambda norm: found["channel"][norm])
        gauss = f" (Gaussian rows: {theory.error_sd(2, 32, dim):.4f})" if dim else ""
        lines.append(
            f"- **{label(variant)}**: estimate over true RMS {ends['ratio_mean'][0]:.3f} to "
            f"{ends['ratio_mean'][1]:.3f} in the mean, standard deviation "
            f"{ends['ratio_sd'][0]:.4f} to {ends['ratio_sd'][1]:.4f}{gauss}; largest channel "
            f"{ends['channel'][0]:.2f} to {ends['channel'][1]:.2f} times the median one, most at "
            f"`{worst}`; kurtosis {ends['kurtosis'][0]:.2f} to {ends['kurtosis'][1]:.2f}."
        )
    return lines


def excess(folder: Folder, variant: str) -> float | None:
    """Mean over the rates of the loss above the best rate's; the first loss where it diverged."""
    means = [
        statistics.fmean(c.loss[0] if diverged(c) else min(final(c), c.loss[0]) for c in some)
        for rate in folder.rates
        if (some := folder.of(variant, rate))
    ]
    return None if len(means) < 2 else statistics.fmean(means) - min(means)


def by_rate(folder: Folder) -> Lines:
    """Final losses by variant and rate, and where each diverges, in words."""
    if len(folder.rates) < 2:
        return [
            f"One peak rate so far, {folder.rates[0]:g}, {seeds(folder)}: no sweep. Which rate is "
            "best, and where a variant diverges, is not known."
        ]
    rows, lost_at = [], []
    for variant in folder.variants:
        found = [folder.of(variant, rate) for rate in folder.rates]
        means = [mean_final(some) for some in found]
        best = min((m for m in means if math.isfinite(m)), default=None)
        cells = []
        for rate, some, mean in zip(folder.rates, found, means, strict=True):
            lost = sum(map(diverged, some))
            gap = paired(folder.at(rate), variant)
            beside = variant != "rmsnorm" and gap.values and math.isfinite(gap.mean) and not lost
            parts = [f"**{mean:.4f}**" if mean == best else f"{mean:.4f}"] * math.isfinite(mean)
            parts += [f"({signed(gap.mean)})"] * bool(beside)
            parts += [f"{lost} of {len(some)} diverged"] * bool(lost)
            cells.append(" ".join(parts) or "–")
        rise = excess(folder, variant)
        rows.append([label(variant), *cells, "" if rise is None else f"{rise:.4f}"])
        first = first_divergence(folder, variant)
        if first is not None:
            lost_at.append(f"{label(variant)} diverges at {first:g}")
    head = ["final loss at a peak rate of", *(f"{r:g}" for r in folder.rates), "sensitivity"]
    others = "no other" if lost_at else "none"
    diverges = "; ".join([*lost_at, f"{others} diverged up to {folder.rates[-1]:g}"])
    return [
        f"{seeds(folder).capitalize()}; in brackets, minus RMSNorm; bold, a variant's best: "
        f"{diverges}.",
        "",
        *table(head, rows),
    ]


def in_table(folder: Folder) -> bool:
    """Whether :func:`by_rate` says all that there is of differences at the main rate."""
    curves = folder.at(main_rate(folder))
    most = max(
        (len(paired(curves, v).values) for v in folder.variants if v != "rmsnorm"), default=0
    )
    return len(folder.rates) > 1 and most < 2


def later(folder: Folder, shares: Sequence[float] = (0.1, 0.2, 0.5)) -> str:
    """Differences over longer ends of the runs, in words."""
    curves = folder.at(main_rate(folder))
    parts = []
    for variant in folder.variants:
        gaps = [
            paired(curves, variant, of=lambda c, share=share: final(c, share)) for share in shares
        ]
        if variant != "rmsnorm" and all(g.values and math.isfinite(g.mean) for g in gaps):
            parts.append(f"{label(variant)} {listed([signed(g.mean) for g in gaps])}")
    if not parts:
        return ""
    ends = listed([f"{share:.0%}" for share in shares])
    return f"Over the last {ends} of the steps, minus RMSNorm: {'; '.join(parts)}."


def floor(folder: Folder) -> str:
    """Why images are judged by those held out, and what an interval without zero is worth."""
    ends = [final(c) for c in folder.at(main_rate(folder)) if not diverged(c)]
    told = ""
    if ends:
        told = f"Training losses end at {math.ceil(1e4 * max(ends)) / 1e4:.4f} nats or less: "
    told += "differences are those of held-out images"
    exact = held_out(folder.at(main_rate(folder)), "exact")
    if exact.excludes_zero:
        told += (
            ". The interval of `exact`, which computes RMSNorm's own function, excludes zero: of "
            "intervals at 95% one in twenty does by chance"
        )
    return f"{told}."


def accuracies(folder: Folder) -> list[list[str]]:
    """By variant, percent; paired differences in points. Empty where runs have none."""
    rate = main_rate(folder)
    found = {
        (r["variant"], r["seed"]): 100 * r["accuracy"]
        for r in folder.about["runs"]
        if float(f"{r['rate']:g}") == rate and r.get("accuracy") is not None
    }
    rows = []
    for variant in folder.variants:
        mine = {seed: value for (v, seed), value in found.items() if v == variant}
        if not mine:
            continue
        gap = Difference(tuple(v - found["rmsnorm", s] for s, v in sorted(mine.items())
                               if ("rmsnorm", s) in found))  # fmt: skip
        half = f" ± {gap.half_width:.2f}" if len(gap.values) > 1 else ""
        spread = f" ± {statistics.stdev(mine.values()):.2f}" if len(mine) > 1 else ""
        beside = "" if variant == "rmsnorm" or not gap.values else signed(gap.mean, 2) + half
        mean = f"{statistics.fmean(mine.values()):.2f}%"
        rows.append([label(variant), str(len(mine)), mean + spread, beside])
    return rows


def every_run(found: dict[str, Folder]) -> Lines:
    lines: Lines = []
    for name, folder in found.items():
        rows = [
            [
                c.variant,
                str(c.seed),
                f"{c.rate:g}",
                str(len(c.loss)),
                f"{final(c):.4f}" + (", diverged" if diverged(c) else ""),
                f"{c.validation:.4f}" if folder.has_held_out else "–",
                str(results.spikes(c)),
                str(c.sites),
                f"{c.seconds:.1f}",
            ]
            for v in folder.variants
            for c in folder.of(v)
        ]
        head = ["variant", "seed", "rate", "steps", "final loss", "validation", "spikes"]
        head += ["rewritten sites of a block", "seconds"]
        links = ", ".join(
            f"[{file}](data/train/{name}/{file})"
            for file in ("curves.csv", "norms.csv", "runs.json")
        )
        lines += [f"### {name}", "", f"{machines([folder])}. {links}.", ""]
        lines += [*(f"    {command}" for command in folder.commands()), ""]
        if folder.missing and "command" not in folder.about:
            lines += [f"It also makes {left(folder)}, which are not among these.", ""]
        lines += ["<details markdown>", f"<summary>{len(rows)} runs</summary>", ""]
        lines += [*table(head, rows), "", "</details>", ""]
    return lines


def left(folder: Folder) -> str:
    """Runs that the command makes beside those that are there, in words."""
    some: dict[tuple[str, float], list[str]] = {}
    for variant, seed, rate in folder.missing:
        some.setdefault((variant, rate), []).append(str(seed))
    return listed(
        [
            f"`{variant}` of seed{'s' * (len(of) > 1)} {listed(of)} at {rate:g}"
            for (variant, rate), of in some.items()
        ]
    )
