"""The report as a table of at most 100 columns."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING, Any

from mxnorm_pass.reasons import REASONS

if TYPE_CHECKING:
    from mxnorm_pass.report.report import Report, SiteReport

WIDTH = 100


def render(report: Report) -> str:
    """Summary line, one row per site, then the reasons that occur and what to do about each."""
    sites = report.sites
    rewritten = report.rewritten
    lines = [
        f"mxnorm: {len(report.graphs)} graph(s) seen, {len(sites)} site(s), {rewritten} rewritten, "
        f"{len(sites) - rewritten} declined"
    ]
    if not report.graphs:
        lines.append(
            "No graph was compiled yet. A backend of your own, mxnorm_pass.backend(...), has a\n"
            "report of its own: backend.report."
        )
    elif not sites and not any(graph.failure for graph in report.graphs):
        lines.append("Nothing to rewrite: no MX cast in these graphs is fed by an RMSNorm.")
    cached = sum(graph.from_cache for graph in report.graphs)
    if cached:
        lines.append(f"{cached} graph(s) came compiled from torch's cache.")
    scope = _scope(sites)
    if scope:
        lines += _wrap(f"norms under {scope}:")
    rows = [("norm", "consumers", "status", "spec"), *(_row(site, scope) for site in sites)]
    if sites:
        lines += _table(rows)
    for site in sites:
        if site.status == "declined":
            lines += _wrap(f"{site.norm or '?'}: {site.reason}: {_brief(site.detail)}")
            if site.computed:
                lines += _wrap(f"  computed: {site.computed}")
                lines += _wrap(f"  expected: {site.expected}")
        elif site.also_read_by:
            readers = ", ".join(site.also_read_by)
            lines += _wrap(f"{site.norm}: also read, unquantised, by {readers}")
    for reason in sorted({site.reason for site in sites if site.reason}):
        what, advice = REASONS[reason]
        lines += _wrap(f"{reason}: {what}. What you can do: {advice}.")
    for graph in report.graphs:
        if graph.failure:
            lines.append("the pass failed on a graph, which stays as it was:")
            for line in graph.failure.splitlines():
                lines += textwrap.wrap(_plain(line), WIDTH, **_VERBATIM) or [""]
    for warning in report.warnings:
        lines += _wrap(f"warning: {warning}")
    return "\n".join(lines)


def _scope(sites: list[SiteReport]) -> str:
    """What all norm paths begin with, to be said once: ``model.layers``."""
    parents = [site.norm.split(".")[:-1] for site in sites]
    if len(sites) < 2:
        return ""
    return ".".join(names[0] for names in itertools.takewhile(_equal, zip(*parents, strict=False)))


def _equal(names: tuple[str, ...]) -> bool:
    return len(set(names)) == 1


def _row(site: SiteReport, scope: str) -> tuple[str, str, str, str]:
    status = "rewritten" if site.status == "rewritten" else f"declined: {site.reason}"
    norm = site.norm.removeprefix(f"{scope}.") if scope else site.norm
    return norm or "?", consumers_text(site), status, spec_text(site)


def spec_text(site: SiteReport) -> str:
    """The spec in a few words: ``e4m3/32 rceil p2 w fold +add``."""
    spec = site.spec
    if not spec:
        return ""
    # rceil_log2 is what everybody calls RCEIL; only the exact variant needs to be told apart.
    rule = str(spec.get("scale_rule", "?")).removesuffix("_log2")
    parts = [f"{spec.get('element', '?')}/{spec.get('block_size', '?')}", rule]
    if "rms" in spec:
        gain = spec.get("gain", "?")
        parts.append(str(spec["rms"]))
        parts.append("no gain" if gain == "none" else f"{gain} {spec.get('gain_at', '')}")
    if spec.get("gradient") in ("projected", "own"):
        parts.append(f"{spec['gradient']} gradient")
    if spec.get("residual"):
        parts.append("+add")
    return " ".join(parts)


def consumers_text(site: SiteReport) -> str:
    """Relative to the norm's parent, what they share said once: ``self_attn.{q,k,v}_proj``."""
    scope = site.norm.rpartition(".")[0] + "."
    paths = [p.removeprefix(scope) for p in site.consumers]
    parents = {p.rpartition(".")[0] for p in paths}
    if len(paths) > 1 and len(parents) == 1:
        parent = parents.pop()
        names = [p.rpartition(".")[2] for p in paths]
        endings = {name.rpartition("_")[1] + name.rpartition("_")[2] for name in names}
        ending = endings.pop() if len(endings) == 1 and all("_" in n for n in names) else ""
        listed = ",".join(name.removesuffix(ending) for name in names)
        return f"{parent}.{{{listed}}}{ending}" if parent else f"{{{listed}}}{ending}"
    return ", ".join(paths) or "?"


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    fixed = [min(max(len(row[i]) for row in rows), 36) for i in (2, 3)]
    # What status and spec leave is shared by the two columns of paths.
    room = WIDTH - sum(fixed) - 6
    norm = min(max(len(row[0]) for row in rows), max(room // 2, 10))
    consumers = min(max(len(row[1]) for row in rows), max(room - norm, 10))
    widths = [norm, consumers, *fixed]
    lines = []
    for i, row in enumerate(rows):
        cells = (_fit(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
        if i == 0:
            lines.append("  ".join("-" * w for w in widths))
    return lines


def _fit(text: str, width: int) -> str:
    """The end of a path says more than its beginning."""
    text = _plain(text)
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _brief(detail: str) -> str:
    """Of a traceback, its last line; the whole is in the report's ``detail``."""
    lines = detail.strip().splitlines()
    return lines[-1] if lines else ""


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(_plain(text), WIDTH, subsequent_indent="  ")


_VERBATIM: Any = {"replace_whitespace": False, "drop_whitespace": False}


def _plain(text: str) -> str:
    """One line, whatever a path or a message holds."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
