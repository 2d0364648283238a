"""Tables and figures of ``docs/theory.md`` from the measurements."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import Any

from mxnorm_pass import theory
from theorylib.measure import Row

LABELS = {
    "gaussian": "Gaussian",
    "laplace": "Laplace",
    "student_t5": "Student t(5)",
    "lognormal": "lognormal(0.5) channel scales",
}
MARKS = {"gaussian": "C0o", "laplace": "C1s", "student_t5": "C2^", "lognormal": "C3D"}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a number, seven digits: more than the statistics give."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(Row)])
        for row in rows:
            values = asdict(row).values()
            writer.writerow([f"{v:.7g}" if isinstance(v, float) else v for v in values])


def read_csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [
            Row(
                r["table"],
                r["dist"],
                int(r["p"]),
                int(r["block"]),
                int(r["k"]),
                r["name"],
                *(float(r[n]) for n in ("measured", "stderr", "predicted")),
            )
            for r in csv.DictReader(file)
        ]


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose fields are as wanted, in their order."""
    return [r for r in rows if all(getattr(r, name) == v for name, v in wanted.items())]


# --- tables ---------------------------------------------------------------------------------------


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in body]
    return "\n".join(lines)


def constants(rows: Sequence[Row]) -> str:
    """c(p, B), computed and drawn."""
    found = pick(rows, table="constant")
    body = []
    for dist, block in dict.fromkeys((r.dist, r.block) for r in found):
        cells = [LABELS[dist], str(block)]
        for r in pick(found, dist=dist, block=block):
            off = (r.measured - r.predicted) / r.stderr
            cells += [f"{r.predicted:.6f}", f"{r.measured:.5f} ± {r.stderr:.5f} ({off:+.1f})"]
        body.append(cells)
    head = ["rows", "B", "c, p=1", "drawn (standard errors off)", "c, p=2", "drawn"]
    return _markdown(head, body)


def errors(rows: Sequence[Row]) -> str:
    """Spread of the estimate against row length."""
    found = pick(rows, table="error", p=2, block=32)
    body = []
    for k in (1, 8, 32, 128, 256, 512):
        cells = [str(k), str(32 * k)]
        for dist in LABELS:
            (r,) = pick(found, dist=dist, k=k)
            predicted = "" if math.isnan(r.predicted) else f" ({r.predicted:.2%})"
            cells.append(f"{r.measured:.2%} ± {r.stderr:.2%}{predicted}")
        body.append(cells)
    return _markdown(["K", "D", *LABELS.values()], body)


def biases(rows: Sequence[Row]) -> str:
    """What the Gaussian constant is off by on other rows."""
    body = []
    for dist in LABELS:
        cells = [LABELS[dist]]
        for p in (1, 2):
            (r,) = pick(rows, table="mean", dist=dist, p=p, k=512, name="Gaussian c")
            cells += [f"{r.predicted - 1:+.2%}", f"{r.measured - 1:+.2%} ± {r.stderr:.2%}"]
        body.append(cells)
    head = ["rows", "p=1, predicted", "p=1, measured", "p=2, predicted", "p=2, measured"]
    return _markdown(head, body)


def bounds(rows: Sequence[Row]) -> str:
    """Rows that reach the bounds."""
    body = []
    for r in pick(rows, table="bound"):
        what = {"ratio": f"{r.dist} ratio", "output": r"greatest \|x\| · rho"}[r.name]
        body.append(
            [str(r.p), str(r.block), str(r.k * r.block), what, f"{r.predicted:.5g}",
             f"{r.measured:.5g}"]
        )  # fmt: skip
    return _markdown(["p", "B", "D", "bound", "by formula", "a row that has it"], body)


def spikes(rows: Sequence[Row]) -> str:
    """One massive channel."""
    body = []
    for name in dict.fromkeys(r.name for r in pick(rows, table="spike")):
        one, two = (pick(rows, table="spike", name=name, p=p)[0] for p in (1, 2))
        body.append([name, f"{one.measured:.3f}", f"{two.measured:.3f}"])
    return _markdown(["channel of A sigma, A =", "ratio, p=1", "ratio, p=2"], body)


def casts(rows: Sequence[Row]) -> str:
    """What the estimate changes behind the cast."""
    body = []
    for r in pick(rows, table="cast", name="r2"):
        if r.k not in (1, 2, 8, 32, 128, 256):
            continue
        key = {"table": "cast", "dist": r.dist, "k": r.k}
        (residual,) = pick(rows, **key, name="1 - SSE/SST")
        (same,) = pick(rows, **key, name="same scale")
        predicted = "" if math.isnan(same.predicted) else f"{same.predicted:.1%}"
        body.append(
            [r.dist, str(r.k), f"{r.measured:.4f}", f"{residual.measured:.4f}",
             f"{same.measured:.1%}", predicted]
        )  # fmt: skip
    head = ["cast", "K", "r²", "1 - SSE/SST", "same block scale", "predicted"]
    return _markdown(head, body)


TABLES = {
    "constants": constants,
    "errors": errors,
    "biases": biases,
    "bounds": bounds,
    "spikes": spikes,
    "casts": casts,
}


def fill(text: str, rows: Sequence[Row]) -> str:
    """The document with every marked table made anew; ValueError for one that does not exist."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"no table {name!r}: there are {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n\n{TABLES[name](rows)}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


# --- figures --------------------------------------------------------------------------------------


def figure_error(plt: Any, rows: Sequence[Row]) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for panel, p in zip(panels, (1, 2), strict=True):
        for dist, mark in MARKS.items():
            found = pick(rows, table="error", dist=dist, p=p, block=32)
            k = [r.k for r in found]
            panel.errorbar(
                k, [r.measured for r in found], [r.stderr for r in found], fmt=mark,
                markersize=4, label=LABELS[dist],
            )  # fmt: skip
            panel.plot(k, [r.predicted for r in found], mark[:2] + "-", linewidth=1, alpha=0.7)
        panel.set(xscale="log", yscale="log", title=f"p = {p}", xlabel="K, blocks of 32 in a row")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("sd of log(estimate / true RMS)")
    panels[0].legend(fontsize=8, title="dots measured, lines predicted", title_fontsize=8)
    return figure


def figure_convergence(plt: Any, rows: Sequence[Row]) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for panel, p in zip(panels, (1, 2), strict=True):
        for dist, mark in MARKS.items():
            means = pick(rows, table="mean", dist=dist, p=p, name="Gaussian c")
            low, high = (
                pick(rows, table="quantile", dist=dist, p=p, name=n) for n in ("5%", "95%")
            )
            k = [r.k for r in means]
            limit = means[0].predicted
            colour = mark[:2]
            panel.plot(k, [r.measured for r in means], mark, markersize=3, label=LABELS[dist])
            panel.axhline(limit, color=colour, linewidth=0.8, linestyle="--")
            if dist in ("gaussian", "laplace"):
                panel.fill_between(
                    k, [limit * r.measured for r in low], [limit * r.measured for r in high],
                    color=colour, alpha=0.15, linewidth=0,
                )  # fmt: skip
        panel.set(xscale="log", title=f"p = {p}", xlabel="K, blocks of 32 in a row")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("estimate / true RMS, Gaussian constant")
    panels[1].legend(fontsize=8, title="dashed: limit; bands: 5 to 95% of rows", title_fontsize=8)
    return figure


def figure_spikes(plt: Any, rows: Sequence[Row]) -> Any:
    figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for p, mark in ((1, "C1s"), (2, "C0o")):
        found = pick(rows, table="spike", p=p)
        a = [float(r.name) for r in found]
        panel.plot(a, [r.measured for r in found], mark + "-", markersize=4, label=f"p = {p}")
        for bound in theory.ratio_bounds(p, found[0].block, found[0].k):
            panel.axhline(bound, color=mark[:2], linestyle=":", linewidth=1)
    panel.axhline(1.0, color="grey", linewidth=0.8)
    panel.set(
        xscale="log", yscale="log", xlabel="one channel of A sigma in a Gaussian row of 4096",
        ylabel="estimate / true RMS",
    )  # fmt: skip
    panel.minorticks_off()
    panel.set_yticks([0.05, 0.1, 0.25, 0.5, 1, 2], ["0.05", "0.1", "0.25", "0.5", "1", "2"])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, title="dotted: bounds for any row", title_fontsize=8)
    return figure


def figure_casts(plt: Any, rows: Sequence[Row]) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for i, dist in enumerate(dict.fromkeys(r.dist for r in pick(rows, table="cast"))):
        r2 = pick(rows, table="cast", dist=dist, name="r2")
        same = pick(rows, table="cast", dist=dist, name="same scale")
        k = [r.k for r in r2]
        left.plot(k, [1 - r.measured for r in r2], f"C{i}o-", markersize=4, label=dist)
        right.plot(k, [r.measured for r in same], f"C{i}o", markersize=4, label=dist)
        right.plot(k, [r.predicted for r in same], f"C{i}-", linewidth=1, alpha=0.7)
    left.set(xscale="log", yscale="log", xlabel="K, blocks in a row", ylabel="1 - r²")
    right.set(xscale="log", xlabel="K, blocks in a row", ylabel="blocks with the same scale")
    for panel in (left, right):
        panel.grid(alpha=0.3, which="both")
    right.legend(fontsize=8, title="lines predicted for many blocks", title_fontsize=8)
    return figure


FIGURES = {
    "theory-error.svg": figure_error,
    "theory-convergence.svg": figure_convergence,
    "theory-spikes.svg": figure_spikes,
    "theory-casts.svg": figure_casts,
}


def draw(rows: Sequence[Row]) -> dict[str, str]:
    """Every figure as SVG text, the same for the same rows and the same matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = {}
    settings = {"svg.hashsalt": "mxnorm", "svg.fonttype": "path", "axes.formatter.useoffset": False}
    with matplotlib.rc_context(settings):
        for name, function in FIGURES.items():
            figure = function(plt, rows)
            text = StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            plt.close(figure)
            made[name] = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    return made
