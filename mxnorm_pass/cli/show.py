"""The result of ``mxnorm explain --config`` as text."""

from __future__ import annotations

import textwrap
from itertools import groupby

from mxnorm_pass.cli.groups import SiteGroup
from mxnorm_pass.cli.layers import Kind
from mxnorm_pass.cli.savings import duration, size
from mxnorm_pass.cli.total import Total
from mxnorm_pass.cli.whole import Whole
from mxnorm_pass.reasons import REASONS
from mxnorm_pass.report import SiteReport
from mxnorm_pass.report.text import consumers_text, spec_text


def show_whole(whole: Whole, width: int) -> list[str]:
    """What was built, what is rewritten in the whole model, and what is not."""
    lines = wrap(
        f"{whole.name}: {whole.cls}, {_count(whole.parameters)} parameters, none allocated", width
    )
    lines += wrap(f"{whole.mode}, {whole.tokens} tokens; {whole.cast}", width)
    lines += _layers(whole.layers.kinds, width)
    left = [f"{g.count} without: {g.why} ({_short(g.example)})" for g in whole.left]
    lines += wrap("; ".join([f"linears: {whole.quantised} with a cast", *left]), width)
    lines.append("")
    traced = len(whole.report.sites)
    lines += wrap(
        f"mxnorm: {whole.rewritten + whole.declined} site(s) in the whole model, {whole.rewritten} "
        f"rewritten, {whole.declined} declined ({traced} traced)",
        width,
    )
    if not whole.sites:
        lines += wrap("Nothing to rewrite: no MX cast in this model is fed by an RMSNorm.", width)
    places = dict.fromkeys((g.stack, g.kind) for g in whole.sites)
    for place in places:
        found = [g for g in whole.sites if (g.stack, g.kind) == place]
        lines += _table(found, _heading(whole, *place), width)
    lines += _declined(whole.sites, width)
    if whole.without:
        lines += ["", "norms without a site:"]
        for unread in whole.without:
            lines += wrap(f"{unread.count:>4} x {unread.norm}: {unread.why}", width, 9)
    for note in whole.notes:
        lines += wrap(f"note: {note}", width)
    lines.append(f"traced in {whole.seconds:.0f} s")
    return lines


def _layers(kinds: list[Kind], width: int) -> list[str]:
    lines: list[str] = []
    for stack, found in groupby(kinds, key=lambda k: k.stack):
        said = [f"{len(k.members)} {k.label} (traced {_numbers(k.traced)})" for k in found]
        lines += wrap(f"layers: {stack}: {', '.join(said)}", width)
    return lines


def _numbers(positions: list[int]) -> str:
    if len(positions) > 3:
        return f"{positions[0]} to {positions[-1]}"
    return ", ".join(map(str, positions))


def _heading(whole: Whole, stack: str, label: str) -> str:
    kinds = [k for k in whole.layers.kinds if (k.stack, k.label) == (stack, label)]
    if not kinds:
        return "outside the layers"
    return f"{plural(len(kinds[0].members), 'layer')} of {stack}: {label}"


def plural(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _readers(group: SiteGroup) -> str:
    """Who reads the casts, those of other layers with their number where it is another one."""

    def listed(paths: list[str]) -> str:
        return consumers_text(SiteReport("", group.norm, paths, "declined"))

    said = [listed(group.consumers)] if group.consumers else []
    for paths, count, before in (
        (group.following, group.following_count, "next layer's "),
        (group.outside, group.outside_count, ""),
    ):
        if paths:
            often = "" if count == group.count else f" in {count}"
            said.append(f"{before}{listed(paths)}{often}")
    return "; ".join(said) or "?"


def _table(groups: list[SiteGroup], heading: str, width: int) -> list[str]:
    rows = []
    for group in groups:
        site = SiteReport("", group.norm, group.consumers, group.status, spec=group.spec)  # type: ignore[arg-type]
        status = group.status if group.reason is None else f"declined: {group.reason}"
        spec = spec_text(site)
        if group.residual:
            spec += " +add" if group.residual == group.count else f" +add in {group.residual}"
        rows.append((f"{group.count} x", group.norm, _readers(group), status, spec))
    lines = ["", *wrap(heading, width)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    if sum(widths) + 8 > width:
        # Two lines a site where one has no room.
        for row in rows:
            lines += wrap(f"{row[0].rjust(widths[0])} {row[1]} -> {row[2]}", width, 2)
            lines += wrap(f"{row[3]}  {row[4]}", width, widths[0] + 1, first=widths[0] + 1)
    else:
        for row in rows:
            cells = [row[0].rjust(widths[0])]
            cells += [cell.ljust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
    for group in groups:
        for stack, number in group.spread.items():
            lines += wrap(
                f"{group.norm} feeds {plural(number, 'layer')} of {stack}", width, 4, first=2
            )
        if group.also:
            lines += wrap(
                f"{group.norm} is also read by {', '.join(group.also)}", width, 4, first=2
            )
    return lines


def _declined(groups: list[SiteGroup], width: int) -> list[str]:
    lines: list[str] = []
    for group in groups:
        if group.reason is not None and group.detail:
            lines += wrap(f"{group.norm}: {group.reason}: {group.detail}", width, 2)
    for reason in sorted({g.reason for g in groups if g.reason}):
        what, advice = REASONS[reason]
        lines += wrap(f"{reason}: {what}. What you can do: {advice}.", width, 2)
    return lines


def show_savings(total: Total, width: int) -> list[str]:
    """Bytes and time saved on a chip, with the arithmetic, and what is left out."""
    chip = total.chip
    if not total.whole.rewritten:
        return wrap(f"predicted for {chip.name}: nothing, since nothing is rewritten", width)
    lines = wrap(
        f"predicted, not measured, for {chip.name} (sm_{chip.capability[0]}{chip.capability[1]}, "
        f"{chip.bandwidth / 1e12:g} TB/s: {chip.source}), for one forward of "
        f"{total.whole.tokens} tokens:",
        width,
    )
    lines += wrap(
        f"{size(total.bytes)} no longer moved, {total.launches} kernel launches fewer: "
        f"{duration(total.seconds)}",
        width,
        4,
        first=2,
    )
    lines += wrap(total.arithmetic, width, 4, first=2)
    for count, group in _merged(total.groups):
        assert group.traffic is not None
        each = f"{count} x {group.norm}: "
        if group.traffic.why:
            each += f"{_or_nothing(group.traffic.saved)} each; {group.traffic.why}"
        else:
            rows = f"{group.rows} rows of {group.spec['k']}"
            each += f"{size(group.traffic.saved)} each, {rows} written and read back"
        lines += wrap(each, width, 4, first=2)
    if total.unknown:
        lines += wrap(f"{total.unknown} sites whose rows are not known are left out", width, 4, 2)
    lines += wrap(
        "against torch.compile's two kernels per site; matmuls, the backward and the casts of "
        "weights are left out (docs/shell.md)",
        width,
    )
    if not chip.mx_matmul:
        lines += wrap(
            f"{chip.name} has no matmul that reads MX codes: with emulated linears a whole model "
            "gains nothing there (docs/layer.md)",
            width,
        )
    return lines


def _merged(groups: list[SiteGroup]) -> list[tuple[int, SiteGroup]]:
    """Groups that move the same bytes as one, the most first."""
    merged: dict[object, tuple[int, SiteGroup]] = {}
    for group in groups:
        key = (group.norm, group.traffic)
        count = merged[key][0] if key in merged else 0
        merged[key] = (count + group.count, group)
    total = {k: c * g.traffic.saved for k, (c, g) in merged.items() if g.traffic}
    return [merged[k] for k in sorted(merged, key=lambda k: -total[k])]


def _or_nothing(saved: int) -> str:
    """rstd, 4 bytes a row, is written by our op alone: nothing, as bytes go."""
    return "nothing" if saved <= 0 else size(saved)


def wrap(text: str, width: int, indent: int = 2, first: int = 0) -> list[str]:
    """Lines of at most ``width`` columns."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def _count(number: int) -> str:
    for unit, name in ((1e9, " billion"), (1e6, " million")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return str(number)


def _short(path: str) -> str:
    parts = path.split(".")
    return path if len(parts) < 5 else f"{parts[0]}…{'.'.join(parts[-2:])}"
