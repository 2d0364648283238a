"""``docs/train.md`` and its figures from the folders of finished runs.

Sentences with a number are made of the runs; the rest is prose that holds whatever they say. A
folder that is missing leaves a line in the place of its section.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import reproduce

from trainlib import corpus, figures, gradients, results
from trainlib.figures import main_rate
from trainlib.inputs import BadInput
from trainlib.loop import MODULES, Curve
from trainlib.results import Difference, compared, final, of_images, paired
from trainlib.runs import Folder, join, pool, read
from trainlib.words import (
    CHINCHILLA,
    TITLES,
    Lines,
    accuracies,
    by_rate,
    every_run,
    floor,
    gaps,
    in_table,
    later,
    listed,
    machines,
    other_gaps,
    outliers,
    said,
    seeds,
    seeds_of,
    signed,
    size_of,
    spikes,
    table,
    text,
)

MOST_BYTES = 2_000_000  # of logs in the repository
SOURCES = {
    "linux-source-": "the sources and documents of the Linux kernel, GPL-2.0, from Debian's "
    "package of that name",
}


def shown(name: str, found: dict[str, Folder]) -> Folder:
    """A folder with the runs of others that its section takes in."""
    folder, rates = found[name], found.get("15m-rates")
    if name == "15m":
        return pool(folder, rates, found.get("15m-open"))
    if name == "15m-open":
        both = join(folder, rates)
        kept = [c for c in both.curves if c.variant in ("rmsnorm", "p2", *MODULES)]
        return Folder(folder.path, folder.about, kept)
    return folder


def tabled(folder: Folder) -> Lines:
    """Losses by variant; their differences stand in front of it."""
    return results.table(folder.about, folder.curves, gaps=False)[2:]


# --- sections -------------------------------------------------------------------------------------


def setup(found: dict[str, Folder]) -> Lines:
    lines = [text("setup"), ""]
    said_of: dict[str, None] = {}
    for folder in found.values():
        about = folder.about["corpus"]
        source = str(about["source"])
        what = next((v for k, v in SOURCES.items() if source.startswith(k)), None)
        what = about.get("licence", what) or "of a licence that the run did not note"
        parts = [f"`{source}`: {what}"]
        if "text_bytes" in about:
            parts.append(
                f"{about['text_bytes'] / 1e6:.1f} MB of it, {about['tokens'] / 1e6:.2f}M tokens of "
                f"a byte-level BPE of {about['vocab']:,} ids, of which the last "
                f"{corpus.VALIDATION:,} are held out; SHA-256 of the ids `{about['sha256'][:16]}`"
            )
            if not folder.has_held_out:
                parts.append(
                    "with files of any length, so that much of it is tables of registers that a "
                    "program wrote; the held-out tokens are the end of one whose beginning is "
                    "trained on and measure nothing: no validation losses are given"
                )
        if "images" in about:
            parts.append(f"{about['images']:,} images, {about['held_out']:,} of them held out")
        said_of[f"- {'; '.join(parts)}."] = None
    lines += ["**Data**", "", *said_of, ""]
    rows = []
    for name, folder in found.items():
        count, about = folder.parameters, folder.about["corpus"]
        # Tokens of images are not worth what those of text are.
        text_tokens = about["tokens"] - corpus.VALIDATION if "text_bytes" in about else None
        ratio = folder.tokens / count if count and text_tokens else None
        share = folder.tokens / text_tokens if text_tokens else None
        rows.append(
            [
                f"`{name}`",
                size_of(folder),
                f"{folder.plan['steps']:,}",
                f"{folder.tokens / 1e6:.2f}M",
                "" if ratio is None else f"{ratio:.3g}",
                "" if ratio is None else f"{ratio / CHINCHILLA:.2%}",
                f"{share:.2f}" if share else "",
            ]
        )
    head = ["runs", "parameters", "steps", "tokens a run", "tokens a parameter"]
    head += [f"of {CHINCHILLA} a parameter", "passes over the text"]
    several = [text("several")] if len(said_of) > 1 else []
    return [*lines, *table(head, rows), "", text("tokens"), *several]


def main_runs(folder: Folder, found: dict[str, Folder]) -> Lines:
    rate = main_rate(folder)
    lines = [
        f"{len(folder.at(rate))} runs at a peak rate of {rate:g}, {seeds(folder)}.",
        "",
        *gaps(folder, "tokens"),
        *other_gaps(folder),
        *same_seeds(folder),
        *both_texts(folder, found.get("125m-tables")),
        "",
        text("exact"),
        "",
        f"![Loss curves and paired differences](img/train-{folder.name}.svg)",
        "",
        *tabled(folder),
        "",
        f"![Final losses by seed, and gradient norms](img/train-{folder.name}-spread.svg)",
        "",
        spikes(folder, rate),
        "",
        "### Rows that the norms see",
        "",
        text("norms"),
        "",
        *outliers(folder, rate),
        "",
        f"![Outlier statistics over depth](img/train-{folder.name}-norms.svg)",
    ]
    return lines


def both_texts(folder: Folder, earlier: Folder | None) -> Lines:
    """The pairs of both folders at this size as one sample."""
    if earlier is None:
        return []
    rate = main_rate(folder)
    both = [f.at(rate) for f in (folder, earlier)]
    values = [v for curves in both for v in paired(curves, "p2").values]
    first, second = ({c.seed for c in curves if c.variant == "p2"} for curves in both)
    again = first & second
    beside = f"; {seeds_of(again)} {'is' if len(again) == 1 else 'are'} in both" if again else ""
    return [
        f"- **p = 2 minus RMSNorm, over both texts**: {said(Difference(tuple(values)))}. It "
        f"takes one difference for both texts{beside}."
    ]


def same_seeds(folder: Folder) -> Lines:
    gap = gradients.on_the_seeds_of(folder.at(main_rate(folder)), "p2-own")
    which = f"the seeds of {figures.label('p2-own')}"
    return [] if gap is None else [f"- **p = 2 minus RMSNorm, on {which}**: {said(gap)}."]


def earlier_text(folder: Folder, found: dict[str, Folder]) -> Lines:
    return [
        text("125m-tables"),
        "",
        *gaps(folder, "tokens"),
        *other_gaps(folder),
        "",
        f"![Loss curves and paired differences](img/train-{folder.name}.svg)",
        "",
        *tabled(folder),
    ]


def cause(folder: Folder, found: dict[str, Folder]) -> Lines:
    """Same estimate, other gradients: what each leaves of the difference."""
    rate = main_rate(folder)
    curves = folder.at(rate)
    open_ones = shown("15m-open", found) if "15m-open" in found else None
    return [
        f"{seeds(folder).capitalize()} at a peak rate of {rate:g}. {text('cause')}",
        "",
        *gaps(folder, "tokens"),
        *other_gaps(folder),
        "",
        *gradients.what_is_left(curves),
        *gradients.without_pooled(folder, found[folder.name], found),
        *gradients.route(rate, found, open_ones),
        *gradients.rows_seen(folder, rate),
        f"![Losses and paired differences](img/train-{folder.name}.svg)",
        "",
        *tabled(folder),
    ]


def sweep(folder: Folder, found: dict[str, Folder]) -> Lines:
    lines = [text("rates"), "", *by_rate(folder), ""]
    if not in_table(folder):
        lines += [f"At {main_rate(folder):g}:", "", *gaps(folder, "tokens"), ""]
    if len(folder.rates) > 1:
        lines += [f"![Final loss against the learning rate](img/train-{folder.name}.svg)"]
    else:
        lines += [*tabled(folder), ""]
        lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)"]
    return lines


def first_steps(folder: Folder, found: dict[str, Folder]) -> Lines:
    return [
        f"{folder.plan['steps']} steps of {folder.plan['batch'] * folder.plan['seq']:,} tokens, "
        f"{seeds(folder)}; {text('1b')}",
        "",
        *gaps(folder, "tokens"),
        "",
        later(folder),
        "",
        f"![The first steps at 1B](img/train-{folder.name}.svg)",
        "",
        *tabled(folder),
    ]


def open_questions(folder: Folder, found: dict[str, Folder]) -> Lines:
    lines = [*gradients.constants(folder), text("open"), ""]
    if not in_table(folder):
        lines += [*gaps(folder, "tokens"), ""]
    lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)"]
    if len(folder.rates) > 1:
        lines += ["", *by_rate(folder), ""]
        lines += [f"![Against the learning rate](img/train-{folder.name}-rates.svg)"]
    return lines


def example(folder: Folder, found: dict[str, Folder]) -> Lines:
    lines = [text(folder.name), ""] if folder.name in ("moe", "vit") else []
    lines += [floor(folder), ""] * of_images(folder.about)
    lines += [*gaps(folder, "data"), ""]
    lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)", ""]
    lines += tabled(folder)
    rows = accuracies(folder)
    if rows:
        head = ["variant", "seeds", "accuracy", "minus RMSNorm, points (95%)"]
        lines += ["", *table(head, rows)]
    return lines


SECTIONS: dict[str, Callable[[Folder, dict[str, Folder]], Lines]] = {
    "125m": main_runs,
    "125m-tables": earlier_text,
    "15m": cause,
    "15m-rates": sweep,
    "1b": first_steps,
    "15m-open": open_questions,
    "moe": example,
    "vit": example,
}


def by_section(found: dict[str, Folder]) -> list[str]:
    """Folders as the page has them."""
    return [name for name in dict.fromkeys([*SECTIONS, *found]) if name in found]


def pairs(curves: Sequence[Curve]) -> set[tuple[int, float, float]]:
    """What tells pairs of p = 2 and RMSNorm apart, wherever they are from."""
    ends = {(c.variant, c.seed, c.rate): final(c) for c in curves}
    return {
        (seed, end, ends["rmsnorm", seed, rate])
        for (variant, seed, rate), end in ends.items()
        if variant == "p2" and ("rmsnorm", seed, rate) in ends
    }


def in_short(found: dict[str, Folder]) -> Lines:
    """What p = 2 costs, each pair in one line alone, and what is not measured."""
    lines: Lines = []
    seen: set[tuple[int, float, float]] = set()
    for name in by_section(found):
        folder = shown(name, found)
        rate, title = main_rate(folder), TITLES.get(name, name)
        gap = {r: compared(folder.about, folder.at(r), "p2") for r in folder.rates}
        new = {r: not pairs(folder.at(r)) <= seen for r in folder.rates}
        of = " on held-out images" if of_images(folder.about) else ""
        if new[rate]:
            lines.append(
                f"- {title}, peak rate {rate:g}: p = 2 minus RMSNorm{of} {said(gap[rate])}."
            )
        rest = [r for r in folder.rates if new[r] and r != rate]
        if rest and all(math.isfinite(gap[r].mean) and len(gap[r].values) == 1 for r in rest):
            some = listed([f"{signed(gap[r].mean)} at {r:g}" for r in rest])
            others = f"{some}, one pair each: undecided"
        else:
            others = "; ".join(f"at {r:g} {gap[r]}" for r in rest)
        if others:
            lines.append(f"- {title}, other peak rates: p = 2 minus RMSNorm{of} {others}.")
        seen |= pairs(folder.curves)
    without = [title for name, title in TITLES.items() if name not in found]
    return [*lines, *([f"- Not measured: {'; '.join(without)}."] if without else [])]


def page(found: dict[str, Folder]) -> str:
    """The document."""
    lines = [text("head"), "", *in_short(found), ""]
    if found:
        lines += [f"Machine: {machines(found.values())}.", ""]
    lines += ["## What is run", "", *(setup(found) if found else [text("setup")]), ""]
    order = [*SECTIONS, *(name for name in found if name not in SECTIONS)]
    for name in order:
        lines += [f"## {TITLES.get(name, name)}", ""]
        if name in found:
            lines += [*SECTIONS.get(name, example)(shown(name, found), found), ""]
        else:
            lines += [f"Not measured: there are no runs in `docs/data/train/{name}`.", ""]
    lines += ["## Make it again", "", text("again"), ""]
    if found:
        lines += ["## Every run", "", text("runs"), "", *every_run(found)]
    return "\n".join(lines).rstrip() + "\n"


def pictures(found: dict[str, Folder]) -> dict[str, figures.Figure]:
    """By file name."""
    made: dict[str, figures.Figure] = {}
    for name in found:
        folder, stem = shown(name, found), f"train-{name}"
        if name == "15m-rates" and len(folder.rates) > 1:
            made[f"{stem}.svg"] = figures.rates(folder)
            continue
        if name == "15m-open" and len(folder.rates) > 1:
            made[f"{stem}-rates.svg"] = figures.rates(folder)
        made[f"{stem}.svg"] = figures.curves(folder)
        if name == "125m":
            made[f"{stem}-spread.svg"] = figures.spread(folder)
            made[f"{stem}-norms.svg"] = figures.norms(folder)
    return made


def outputs(data: Path, document: Path) -> dict[Path, str | None]:
    """Every generated file and its text; None for a figure of runs that are gone.

    Raises:
        BadInput: where the logs take more than ``MOST_BYTES``, or a folder is incomplete.
    """
    size = sum(p.stat().st_size for p in data.glob("*/*") if p.is_file())
    if size > MOST_BYTES:
        raise BadInput(
            f"{data}: {size:,} bytes of logs, and at most {MOST_BYTES:,} belong into the "
            "repository: leave seeds out, or make shorter runs"
        )
    found = read(data)
    # Claim by claim, which sets these runs beside the other committed results.
    made: dict[Path, str | None] = {
        document: page(found),
        document.parent / "reproduce.md": reproduce.page(reproduce.DOCS, data),
    }
    images = document.parent / "img"
    made.update({old: None for old in images.glob("train-*.svg")})
    made.update({images / n: svg for n, svg in figures.render(pictures(found)).items()})
    return made


def update(data: Path, document: Path, check: bool) -> int:
    """Writes what is not up to date; with ``check`` names it, and the status is 1."""
    stale = False
    for path, made in outputs(data, document).items():
        if (path.read_text() if path.exists() else None) == made:
            continue
        stale = True
        print(f"{'stale' if check else 'wrote' if made is not None else 'removed'}: {path}")
        if check:
            continue
        if made is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made)
    return int(check and stale)
