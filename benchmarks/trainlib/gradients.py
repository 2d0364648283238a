"""What the runs say about the gradient of the estimate: the same norms with another backward."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainlib.figures import label, main_rate
from trainlib.loop import MODULES, Curve
from trainlib.results import Difference, paired
from trainlib.runs import Folder, over_depth
from trainlib.words import Lines, listed, seeds_of, signed, table, text

OTHERS = ("projected", "own")
# Each differs from one that has run in the route alone, or in the gradient alone.
APART = ("p2-straight", "p2-pass-projected", "p2-pass-own")


def straight(variant: str) -> bool:
    """Whether it is a plain norm with the straight-through gradient."""
    return variant in MODULES and MODULES[variant][2:] in ((), ("straight",))


def explains(curves: Sequence[Curve], variant: str) -> bool:
    """Whether p = 2 is apart from RMSNorm, and another gradient brings it back by some of that."""
    whole, saved = paired(curves, "p2"), paired(curves, variant, "p2")
    return whole.excludes_zero and saved.excludes_zero and whole.mean * saved.mean < 0


def what_is_left(curves: Sequence[Curve]) -> Lines:
    """Of the difference of p = 2, by each other gradient."""
    left = [
        f"the *{kind}* gradient leaves {paired(curves, f'p2-{kind}')}"
        for kind in OTHERS
        if explains(curves, f"p2-{kind}")
    ]
    whole = paired(curves, "p2")
    return [f"Of p = 2's {signed(whole.mean)} nats {'; '.join(left)}.", ""] if left else []


def without_pooled(folder: Folder, own: Folder, found: dict[str, Folder]) -> Lines:
    """The same differences without the seeds that other folders lend."""
    rate = main_rate(folder)
    there = {id(c) for c in own.curves}
    lent = [c for c in folder.at(rate) if id(c) not in there]
    ids = {id(c) for c in lent}
    lenders = [n for n, f in found.items() if any(id(c) in ids for c in f.curves)]
    parts = [
        f"{label(v)} {gap}"
        for v in ("p2", *(f"p2-{kind}" for kind in OTHERS))
        if (gap := paired(own.at(rate), v)).values
    ]
    if not lent or not parts:
        return []
    which = {c.seed for c in lent}
    return [
        f"{seeds_of(which).capitalize()} {'is' if len(which) == 1 else 'are'} of the runs in "
        f"{listed([f'`{name}`' for name in lenders])}, pooled here. Without, minus RMSNorm: "
        f"{'; '.join(parts)}.",
        "",
    ]


def route(rate: float, found: dict[str, Folder], others: Folder | None) -> Lines:
    """Whether the way through the pass could make the difference: ``others`` has plain norms."""
    lines = [text("route")]
    curves = [] if others is None else others.at(rate)
    plain = {
        v: gap
        for v in (() if others is None else others.variants)
        if straight(v) and v.startswith("p2") and (gap := paired(curves, v)).values
    }
    there = {c.seed for c in curves if c.variant in plain}
    whole = paired([c for c in curves if c.seed in there], "p2")
    if plain and whole.values:
        ends = sorted(gap.mean for gap in plain.values())
        span = " to ".join(dict.fromkeys(map(signed, (ends[0], ends[-1]))))
        lines += [
            f"On {seeds_of(there)} plain norms with the straight-through gradient "
            f"({', '.join(label(v) for v in plain)}) end {span} from RMSNorm at {rate:g}, and "
            f"p = 2 {signed(whole.mean)}"
            + (
                ": the gap is there without folding and without our op"
                if 0 < whole.mean / 2 < ends[0]
                else ""
            )
            + ("; it is one seed." if len(there) == 1 else ".")
        ]
    missing = [v for v in APART if all(v not in f.variants for f in found.values())]
    if missing:
        lines += [
            f"`train.py` has {listed([f'`{v}`' for v in missing])} to part the two; "
            f"{'it is' if len(missing) == 1 else 'they are'} not run yet."
        ]
    return [*lines, ""]


def rows_seen(folder: Folder, rate: float) -> Lines:
    """The rows that a model learns under each gradient: median over its norms."""
    names = ("ratio_mean", "ratio_sd", "kurtosis")
    found: dict[str, tuple[float, ...]] = {}
    for variant in ("rmsnorm", "p2", *(f"p2-{kind}" for kind in OTHERS)):
        values = [over_depth(folder.of(variant, rate), name).values() for name in names]
        if all(values):
            found[variant] = tuple(statistics.median(v) for v in values)
    if len(found) < 2:
        return []
    head = ["one batch after training, median over norms"]
    head += ["estimate over true RMS", "its standard deviation", "kurtosis"]
    lines = table(
        head, [[label(v), f"{m:.3f}", f"{sd:.3f}", f"{k:.2f}"] for v, (m, sd, k) in found.items()]
    )
    if {"rmsnorm", "p2-own"} <= found.keys():
        plain, own = found["rmsnorm"], found["p2-own"]
        others = [v[0] for name, v in found.items() if name != "p2-own"]
        if own[0] > max(1.0, *others) and own[1] >= plain[1]:
            lines += [
                "",
                "With its own gradient the model learns rows on which the estimate is "
                f"{own[0] - 1:.0%} too large, against {plain[0] - 1:.0%} with RMSNorm, and "
                "scatters no less: it becomes another norm than RMSNorm, no better estimate of it.",
            ]
    return [*lines, ""]


def constants(folder: Folder) -> Lines:
    """What other constants, powers and gradients leave of the difference, at the main rate."""
    rate = main_rate(folder)
    curves = folder.at(rate)

    def each(wanted: Sequence[str]) -> str:
        return "; ".join(
            f"{label(v)} {signed(gap.mean)}"
            for v in wanted
            if (gap := paired(curves, v)).values and gap.mean == gap.mean
        )

    kept = each(["p2", *filter(straight, folder.variants)])
    other = each([v for v in folder.variants if v in MODULES and not straight(v)])
    if not kept:
        return []
    there = {c.seed for c in curves}
    said = f"At {rate:g}, {seeds_of(there)}, minus RMSNorm: {kept}"
    said += f". With other gradients: {other}" if other else ""
    return [f"{said}. {'One pair each: undecided.' if len(there) == 1 else ''}".rstrip(), ""]


def on_the_seeds_of(curves: Sequence[Curve], variant: str) -> Difference | None:
    """What p = 2 costs on those alone; None where they are the same, or there is no pair."""
    there = {c.seed for c in curves if c.variant == variant}
    gap = paired([c for c in curves if c.seed in there], "p2")
    same = gap.values == paired(curves, "p2").values
    return gap if gap.values and not same else None
