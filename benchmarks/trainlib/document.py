"""``docs/train.md`` and its figures from the folders of finished runs.

Sentences with a number are made of the runs; the rest is prose that holds whatever they say. A
folder that is missing leaves a line in the place of its section.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import reproduce

from trainlib import corpus, figures, results
from trainlib.figures import main_rate
from trainlib.inputs import BadInput
from trainlib.results import Difference, final, paired
from trainlib.runs import Folder, diverged, join, pool, read
from trainlib.words import (
    CHINCHILLA,
    TITLES,
    Lines,
    accuracies,
    by_rate,
    gaps,
    listed,
    machines,
    other_gaps,
    outliers,
    said,
    seeds,
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
    return join(folder, rates) if name == "15m-open" else folder


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
        *both_texts(folder, found.get("125m-tables")),
        "",
        text("exact"),
        "",
        f"![Loss curves and paired differences](img/train-{folder.name}.svg)",
        "",
        *results.table(folder.about, folder.curves)[2:],
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
    values = [v for f in (folder, earlier) for v in paired(f.at(rate), "p2").values]
    return [f"- **p = 2 minus RMSNorm, over both texts**: {said(Difference(tuple(values)))}."]


def earlier_text(folder: Folder, found: dict[str, Folder]) -> Lines:
    return [
        text("125m-tables"),
        "",
        *gaps(folder, "tokens"),
        *other_gaps(folder),
        "",
        f"![Loss curves and paired differences](img/train-{folder.name}.svg)",
        "",
        *results.table(folder.about, folder.curves)[2:],
    ]


def cause(folder: Folder, found: dict[str, Folder]) -> Lines:
    """Same estimate, other gradients: what each leaves of the difference."""
    rate = main_rate(folder)
    lines = [f"{seeds(folder).capitalize()} at a peak rate of {rate:g}. {text('cause')}", ""]
    lines += [*gaps(folder, "tokens"), *other_gaps(folder), ""]
    curves = folder.at(rate)
    whole = paired(curves, "p2")
    for kind in ("projected", "own"):
        left, saved = paired(curves, f"p2-{kind}"), paired(curves, f"p2-{kind}", "p2")
        if whole.excludes_zero and saved.excludes_zero and whole.mean * saved.mean < 0:
            rest = f"{signed(left.mean)} is left" if left.excludes_zero else "none is seen"
            side = "below" if saved.mean < 0 else "above"
            lines += [
                f"With the estimate as before in the forward pass, the *{kind}* gradient ends "
                f"{abs(saved.mean):.4f} nats {side} p = 2, which is {signed(whole.mean)} from "
                f"RMSNorm: of a difference from RMSNorm {rest}.",
                "",
            ]
    lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)", ""]
    return [*lines, *results.table(folder.about, curves)[2:]]


def sweep(folder: Folder, found: dict[str, Folder]) -> Lines:
    lines = [text("rates"), "", *by_rate(folder), ""]
    lines += [f"At {main_rate(folder):g}:", "", *gaps(folder, "tokens"), ""]
    if len(folder.rates) > 1:
        lines += [f"![Final loss against the learning rate](img/train-{folder.name}.svg)"]
    else:
        lines += [*results.table(folder.about, folder.curves)[2:], ""]
        lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)"]
    return lines


def first_steps(folder: Folder, found: dict[str, Folder]) -> Lines:
    return [
        f"{folder.plan['steps']} steps of {folder.plan['batch'] * folder.plan['seq']:,} tokens, "
        f"{seeds(folder)}; {text('1b')}",
        "",
        *gaps(folder, "tokens"),
        "",
        f"![The first steps at 1B](img/train-{folder.name}.svg)",
        "",
        *results.table(folder.about, folder.curves)[2:],
    ]


def open_questions(folder: Folder, found: dict[str, Folder]) -> Lines:
    lines = [text("open"), "", *gaps(folder, "tokens"), ""]
    lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)"]
    if len(folder.rates) > 1:
        lines += ["", *by_rate(folder), ""]
        lines += [f"![Against the learning rate](img/train-{folder.name}-rates.svg)"]
    return lines


def example(folder: Folder, found: dict[str, Folder]) -> Lines:
    lines = [text(folder.name), ""] if folder.name in ("moe", "vit") else []
    lines += [*gaps(folder, "data"), ""]
    lines += [f"![Losses and paired differences](img/train-{folder.name}.svg)", ""]
    lines += results.table(folder.about, folder.curves)[2:]
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
                f"{c.validation:.4f}",
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


def in_short(found: dict[str, Folder]) -> Lines:
    """What p = 2 costs in every folder, a line each, and what is not measured."""
    lines = []
    for name in found:
        folder = shown(name, found)
        rate = main_rate(folder)
        gap = paired(folder.at(rate), "p2")
        if gap.values:
            title = TITLES.get(name, name)
            lines.append(f"- {title}, peak rate {rate:g}: p = 2 minus RMSNorm {said(gap)}.")
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
