"""Figures of ``docs/train.md``, as SVG text."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from io import StringIO
from typing import Any

from trainlib import results
from trainlib.results import FEWEST, final, paired
from trainlib.runs import (
    Folder,
    band,
    diverged,
    mean_final,
    over_depth,
    smooth,
    thin,
    window,
)

LABELS = {
    "rmsnorm": "RMSNorm",
    "exact": "exact (fused)",
    "p1": "p = 1",
    "p2": "p = 2",
    "p2-calibrated": "p = 2 (calibrated c)",
    "p2-running": "p = 2 (running c)",
    "p2-learnt": "p = 2 (learnt c)",
    "p2-straight": "p = 2 (plain)",
    "p2-projected": "p = 2 (projected gradient)",
    "p2-own": "p = 2 (own gradient)",
    "p2-pass-projected": "p = 2 (projected, by the pass)",
    "p2-pass-own": "p = 2 (own, by the pass)",
    "p4": "p = 4",
}
COLOURS = {
    "rmsnorm": "black",
    "exact": "C7",
    "p1": "C1",
    "p2": "C0",
    "p2-calibrated": "C2",
    "p2-running": "C4",
    "p2-learnt": "C5",
    "p2-straight": "navy",
    "p2-projected": "C6",
    "p2-own": "C8",
    "p2-pass-projected": "purple",
    "p2-pass-own": "olive",
    "p4": "C3",
}
MARKS = "os^Dv<>PXh"
FEW = 3  # variants whose bands can be told apart
STYLES = ("-", "--", "-.", ":")
STATISTICS = {
    "ratio_mean": "estimate / true RMS, mean of rows",
    "ratio_sd": "the same, standard deviation",
    "channel": "largest channel / median channel",
    "kurtosis": "kurtosis of a row (Gaussian 3)",
}

Figure = Callable[[Any], Any]


def label(variant: str) -> str:
    return LABELS.get(variant, variant)


def colour(variant: str) -> str:
    return COLOURS.get(variant, "C9")


def main_rate(folder: Folder) -> float:
    """That of the most runs; of several, the one at which RMSNorm ends lowest, or the lowest."""

    def height(rate: float) -> float:
        mean = mean_final(folder.of("rmsnorm", rate))
        return mean if math.isfinite(mean) else math.inf

    return min(folder.rates, key=lambda rate: (-len(folder.at(rate)), height(rate), rate))


def _line(panel: Any, variant: str, series: list[float], width: int, name: str | None) -> None:
    """One run: the mean of ``width`` steps at the last of them."""
    values = smooth(series, width)
    kept = thin(len(values))
    panel.plot(
        [len(series) - len(values) + k + 1 for k in kept], values[kept],
        color=colour(variant), linewidth=0.8, alpha=0.8,
        label=name,
    )  # fmt: skip


def _losses(panel: Any, folder: Folder, rate: float) -> None:
    width = window(folder.plan)
    for variant in folder.variants:
        gap = paired(folder.at(rate), variant)
        pairs = f" ({gap.pairs})" if gap.values and variant != "rmsnorm" else ""
        for i, curve in enumerate(folder.of(variant, rate)):
            _line(panel, variant, curve.loss, width, f"{label(variant)}{pairs}" if i == 0 else None)
    # The first steps from the initial loss on would squeeze all others into one line.
    ends = [final(c) for c in folder.at(rate) if not diverged(c)]
    if ends:
        panel.set_ylim(min(ends) - 0.1, max(ends) + 2)
    panel.set(xlabel="step", ylabel=f"loss, nats; mean of {width} steps")
    panel.grid(alpha=0.3)


def _legend(figure: Any, panel: Any, title: str | None, place: str = "lower center") -> None:
    """Of a panel's lines, outside of all panels: within one it would hide lines."""
    handles, labels = panel.get_legend_handles_labels()
    columns = 1 if place.startswith("right") else min(4, max(1, len(labels)))
    made = figure.legend(
        handles, labels, loc=f"outside {place}", ncols=columns, fontsize=8, title=title,
        title_fontsize=8,
    )  # fmt: skip
    for line in made.get_lines():
        line.set(linewidth=1.5, alpha=1)


def _differences(panel: Any, folder: Folder, rate: float) -> str:
    """Bands over training; of many variants the interval at the end alone, or none can be seen.

    What is shown in words. Of fewer pairs than ``FEWEST`` there is no interval.
    """
    width = window(folder.plan)
    found = {
        v: b
        for v in folder.variants
        if v != "rmsnorm" and (b := band(folder.at(rate), v, width)) is not None
    }
    seen = [-0.015, 0.015]
    kind = ""
    for i, (variant, b) in enumerate(found.items()):
        panel.plot(b.steps, b.mean, color=colour(variant), linewidth=1)
        half = b.half if b.pairs >= FEWEST else [math.nan] * len(b.mean)
        low = [m - h for m, h in zip(b.mean, half, strict=True)]
        high = [m + h for m, h in zip(b.mean, half, strict=True)]
        if math.isfinite(half[-1]) and len(found) > FEW:
            kind = "right, bars at the end: 95%; "
            at = b.steps[-1] * (1.03 + 0.02 * i)
            panel.errorbar(at, b.mean[-1], half[-1], color=colour(variant), capsize=2)
        elif math.isfinite(half[-1]):
            kind = "right, bands: 95%; "
            panel.fill_between(b.steps, low, high, color=colour(variant), alpha=0.2, linewidth=0)
        late = range(len(low) // 4, len(low))
        seen += [v[k] for v in (b.mean, low, high) for k in late if math.isfinite(v[k])]
    if len(seen) > 2:
        # A spike of one run would squeeze the rest into one line.
        ends = statistics.quantiles(seen, n=50)
        margin = 0.15 * (ends[-1] - ends[0])
        panel.set_ylim(min(ends[0], -0.015) - margin, max(ends[-1], 0.015) + margin)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.axhspan(-0.01, 0.01, color="0.85", zorder=0)
    panel.set(xlabel="step", ylabel="minus RMSNorm of the same seed, nats")
    panel.grid(alpha=0.3)
    return f"{kind or 'right, '}grey: ± .01"


def _plain_logs(panel: Any) -> None:
    """A logarithmic y axis with numbers as one writes them; between powers where there is room."""
    from matplotlib.ticker import LogLocator

    low, high = panel.get_ylim()
    ratio = high / low
    between = (1.0, 2.0, 5.0) if ratio > 6 else tuple(range(1, 10))
    panel.yaxis.set_major_locator(LogLocator(subs=between if ratio < 1e3 else (1.0,)))
    panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    panel.yaxis.set_minor_formatter(lambda y, _: "")


def curves(folder: Folder) -> Figure:
    """Losses, and paired differences over training."""

    def draw(plt: Any) -> Any:
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
        rate = main_rate(folder)
        _losses(left, folder, rate)
        _legend(figure, left, _differences(right, folder, rate))
        return figure

    return draw


def spread(folder: Folder) -> Figure:
    """Final loss of every seed; gradient norms, spikes marked."""

    def draw(plt: Any) -> Any:
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
        rate, width = main_rate(folder), window(folder.plan)
        for i, variant in enumerate(folder.variants):
            found = folder.of(variant, rate)
            values = [final(c) for c in found if not diverged(c)]
            left.plot(
                [i] * len(values), values, "o", color=colour(variant), markersize=5, alpha=0.8
            )
            if len(values) > 1:
                left.errorbar(i + 0.2, statistics.fmean(values), statistics.stdev(values),
                              fmt="_", color=colour(variant), capsize=4)  # fmt: skip
            for j, curve in enumerate(found):
                _line(right, variant, curve.grad_norm, width, label(variant) if j == 0 else None)
                at = results.spike_steps(curve)
                right.plot(at, [curve.grad_norm[k] for k in at], "x", color=colour(variant),
                           markersize=5)  # fmt: skip
        names = [label(v).replace(" (", "\n(") for v in folder.variants]
        left.set_xticks(range(len(folder.variants)), names)
        left.set(ylabel="final loss of each seed, nats; bars: ± sd", xlim=(-0.5, None))
        left.tick_params(axis="x", labelsize=8)
        right.set(yscale="log", xlabel="step", ylabel=f"gradient norm, mean of {width} steps")
        for panel in (left, right):
            panel.grid(alpha=0.3)
        some = any(results.spikes(c) for c in folder.at(rate))
        _legend(figure, right, "right, x: a spike of the loss" if some else None)
        _plain_logs(right)
        return figure

    return draw


def rates(folder: Folder) -> Figure:
    """Final loss against the learning rate, a line per variant."""

    def draw(plt: Any) -> Any:
        figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
        good = [final(c) for c in folder.curves if not diverged(c)]
        low, top = (min(good), max(good)) if good else (0.0, 1.0)
        step = 0.05 * max(top - low, 0.02)
        for i, variant in enumerate(folder.variants):
            points = []
            for rate in folder.rates:
                some = folder.of(variant, rate)
                mean = mean_final(some)
                if math.isfinite(mean):
                    points.append((rate, mean))
                if any(map(diverged, some)):
                    # Above each other, or one variant's mark would hide another's.
                    panel.plot(rate, top + (2 + i) * step, "X", color=colour(variant))
            panel.plot(
                [p[0] for p in points], [p[1] for p in points], MARKS[i % len(MARKS)] + "-",
                color=colour(variant), markersize=4, linewidth=1, label=label(variant),
            )  # fmt: skip
        panel.set(xscale="log", xlabel="peak learning rate", ylabel="final loss, nats")
        panel.minorticks_off()
        panel.set_xticks(folder.rates, [f"{r:g}" for r in folder.rates])
        panel.grid(alpha=0.3)
        lost = any(map(diverged, folder.curves))
        _legend(figure, panel, "X at the top: diverged" if lost else None, "right upper")
        return figure

    return draw


def norms(folder: Folder) -> Figure:
    """Outlier statistics of the norms' inputs over depth."""

    def draw(plt: Any) -> Any:
        figure, panels = plt.subplots(
            2, 2, figsize=(9, 6.3), sharex=True, layout="constrained", squeeze=True
        )
        rate = main_rate(folder)
        for panel, (name, text) in zip(panels.flat, STATISTICS.items(), strict=True):
            for i, variant in enumerate(folder.variants):
                values = list(over_depth(folder.of(variant, rate), name).values())
                panel.plot(
                    range(1, len(values) + 1), values, STYLES[i % len(STYLES)],
                    color=colour(variant), linewidth=1, label=label(variant),
                )  # fmt: skip
            panel.set_title(text, fontsize=9)
            panel.grid(alpha=0.3)
            if name in ("channel", "kurtosis"):
                panel.set_yscale("log")
                _plain_logs(panel)
        for panel in panels[1]:
            panel.set_xlabel("norm, in the order of the model")
        _legend(figure, panels[0][0], None)
        return figure

    return draw


def _hundredths(attribute: re.Match[str]) -> str:
    """Places to hundredths of a point: more than a screen shows."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])


def render(figures: dict[str, Figure]) -> dict[str, str]:
    """Every figure as SVG text, the same for the same runs and the same matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = {}
    settings = {"svg.hashsalt": "mxnorm", "svg.fonttype": "path", "axes.formatter.useoffset": False}
    with matplotlib.rc_context(settings):
        for name, function in figures.items():
            figure = function(plt)
            text = StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            plt.close(figure)
            short = re.sub(r'\b[dxy]="[^"]*"', _hundredths, text.getvalue())
            made[name] = "\n".join(line.rstrip() for line in short.splitlines()) + "\n"
    return made
