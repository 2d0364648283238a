"""Tables of at most 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxnorm_pass.trust.findings import SiteFidelity

WIDTH = 100


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of cells, the first row a heading; the first ``left`` columns are flush left, and the
    first gives way where all do not fit.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    spare = WIDTH - sum(widths) - 2 * (len(widths) - 1)
    widths[0] = max(8, widths[0] + min(0, spare))
    lines = []
    for number, row in enumerate(rows):
        cells = [fit(row[0], widths[0]), *row[1:]]
        lines.append(
            "  ".join(
                cell.ljust(width) if i < left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
        )
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return lines


def fit(text: str, width: int) -> str:
    """The end of a path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def wrap(text: str) -> list[str]:
    """Lines of 100 columns, continued with an indent."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ")


def number(value: float, form: str) -> str:
    """``value`` as ``form`` has it, ``-`` where there is none."""
    return "-" if math.isnan(value) else format(value, form)


def decibel(value: float) -> str:
    """dB, ``-`` where there is no number, ``inf`` where there is no error."""
    return "inf" if math.isinf(value) else number(value, ".1f")


def scope(paths: Sequence[str]) -> str:
    """What all paths begin with, up to the last dot that they share."""
    parents = [path.split(".")[:-1] for path in paths]
    shared: list[str] = []
    for names in zip(*parents, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) if len(paths) > 1 else ""


def site_table(sites: Sequence[SiteFidelity]) -> list[str]:
    """One line per site."""
    under = scope([site.norm for site in sites])
    head = ["site", "median", "1%", "99%", "sd%", "<5%", "worst"]
    head += ["channel", "est.", "cast", "advice"]
    rows = [head]
    alone = all(site.id == f"{site.norm}#0" for site in sites)
    for site in sites:
        name = site.norm if alone else site.id
        channel = site.channels[0] if site.channels else None
        rows.append(
            [
                name.removeprefix(f"{under}.") if under else name,
                number(site.median, ".3f"),
                number(site.quantiles["0.01"], ".3f"),
                number(site.quantiles["0.99"], ".3f"),
                number(100 * site.sd, ".1f"),
                number(100 * site.within, ".0f"),
                number(site.worst[0].ratio if site.worst else math.nan, ".3f"),
                f"{channel.index}: {channel.peak:.0%}" if channel else "",
                decibel(site.estimate_sqnr),
                decibel(site.cast_sqnr) + ("*" if site.measured_at == "rows" else ""),
                site.advice.upper() if site.flagged else "",
            ]
        )
    lines = [f"norms under {under}:"] if under else []
    lines += table(rows)
    lines += wrap(
        "Estimate/true RMS over the rows: median, quantiles, spread, rows within 5%, furthest row. "
        "The leading outlier channel and the most that it has of a row's energy. Signal to noise "
        "of the linears' outputs in dB: what the estimate adds, what the MX cast alone makes."
    )
    if any(site.measured_at == "rows" for site in sites):
        lines += wrap("*: of the dequantised rows, since no linear's plain weight could be had.")
    return lines


def unmeasured_lines(sites: Sequence[SiteFidelity]) -> list[str]:
    """Where the batches had no row that could be measured."""
    if not sites:
        return []
    return wrap(f"nothing was measured at: {', '.join(site.id for site in sites)}")


def flagged_lines(sites: Sequence[SiteFidelity]) -> list[str]:
    """What is wrong with the flagged sites, where, and what to do."""
    lines = []
    for site in sites:
        if not site.flagged:
            continue
        lines += wrap(f"{site.id}: {'; '.join(site.reasons)}. {ADVICE[site.advice]}.")
        if site.worst:
            worst = ", ".join(
                f"{w.ratio:.2f} (batch {w.batch}, row {list(w.row)})" for w in site.worst[:3]
            )
            lines += wrap(f"    worst rows: {worst}")
        if site.channels:
            channels = ", ".join(
                f"{c.index} ({c.share:.1%} of the energy, up to {c.peak:.0%} of a row)"
                for c in site.channels[:3]
            )
            lines += wrap(f"    outlier channels: {channels}")
    return lines


ADVICE = {
    "calibrate": "Calibrate: mxnorm_pass.calibrate(model, batches) brings the median to 1",
    "exact": "Exact: one constant does not mend this; keep the true RMS, "
    "MXNormConfig(exact=...) or exact_where()",
    "exclude": "Exclude, or mend the model: nothing can be said of such rows",
    "measure": "Measure: give batches with rows that reach it; until then keep the true RMS, as "
    "exact_where() does",
    "keep": "Keep",
}
