"""The sweep's figures as lines, as a document and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .figures import OURS, Figures, merge, moved_bytes, shape_of, short

__all__ = ["document", "lines", "merge", "moved_bytes", "plot", "summary", "table"]

SHORT = {
    "compile": "compile",
    "nested": "nested",
    "eager": "eager",
    "liger": "Liger",
    "inductor_exact": "Inductor, exact",
    "inductor_p2_folded": "Inductor, p2",
    "ours_exact": "ours exact",
    "ours_p2": "ours p2",
    "ours_p2_folded": "ours p2 folded",
}


def number(value: float | None, form: str = ".3f") -> str:
    """A figure, or a dash."""
    return "–" if value is None else format(value, form)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _cells(figures: Figures, row: dict[str, Any]) -> list[str]:
    derived = figures.derive(row)
    return [
        number(derived["ms"], ".4f"),
        number(100 * (derived["spread"] or 0.0), ".1f") + "%",
        number(derived["gb_s"], ".0f"),
        number(derived["share"]),
        number(derived["share_copy"]),
        number(derived["speedup"], ".2f"),
        number(derived["allowed"], ".2f"),
        str(row.get("kernels") or "–"),
        number(row["sqnr"], ".1f"),
    ]


def lines(result: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """One line per measurement, for the log."""
    figures = Figures(result)
    text = []
    for row in rows:
        m, k, residual = shape_of(row)
        ms, spread, rate, share, copy, speedup, allowed, _, sqnr = _cells(figures, row)
        text.append(
            f"{m:6d} x {k:5d}{' +r' if residual else '   '} {row['variant']:19s} {ms} ms "
            f"(p10-p90 {spread}) {rate} GB/s, {share} of limit, {copy} of equal copy, "
            f"x{speedup} of compile (allowed {allowed}), {sqnr} dB"
        )
    return text


def summary(result: dict[str, Any]) -> list[str]:
    """What the log ends with: missed targets, and what is missing."""
    checked = Figures(result).targets()
    missed = [text for met, text in checked if not met]
    text = [f"targets: {len(checked) - len(missed)} met, {len(missed)} missed"]
    text += [f"MISS {line}" for line in missed]
    text += [f"UNAVAILABLE {name}: {why}" for name, why in result["unavailable"].items()]
    text += [f"LEFT OUT {what}" for what in result["skipped"]]
    text += [f"FAILED {f['what']}: {f['error'].splitlines()[-1]}" for f in result["failed"]]
    return text


def _times(figures: Figures, residual: bool) -> list[str]:
    found = {r["variant"] for r in figures.rows.values() if r["residual"] == residual}
    columns = [name for name in SHORT if name in found]
    head = ["M", "K", "MB", "limit", "equal copy", *(SHORT[c] for c in columns)]
    head += ["p2 folded: share", "of copy", "speedup", "allowed"]
    rows = []
    for shape in figures.shapes:
        if shape[2] != residual:
            continue
        m, k, _ = shape
        row = figures.rows.get((*shape, OURS[-1]))
        derived = {} if row is None else figures.derive(row)
        rows.append(
            [
                str(m),
                str(k),
                number(moved_bytes(*shape) / 1e6, ".2f"),
                number(figures.limit_ms(shape), ".4f"),
                number(figures.copies[shape]["ms"], ".4f"),
                *(number(figures.ms(shape, c), ".4f") for c in columns),
                number(derived.get("share")),
                number(derived.get("share_copy")),
                number(derived.get("speedup"), ".2f"),
                number(derived.get("allowed"), ".2f"),
            ]
        )
    return table(head, rows)


def _nvfp4(result: dict[str, Any]) -> list[str]:
    found = result.get("nvfp4")
    if not found:
        return []
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in found["times"]:
        times.setdefault((row["m"], row["k"]), {})[row["name"]] = row["ms"]
    names = ("exact dynamic", "exact bound", "p2 dynamic", "p2 bound")
    rows = []
    for (m, k), ms in times.items():
        gained = [
            number(ms[f"{r} dynamic"] / ms[f"{r} bound"], ".2f")
            if f"{r} dynamic" in ms and f"{r} bound" in ms
            else "–"
            for r in ("exact", "p2")
        ]
        rows.append([str(m), str(k), *(number(ms.get(n), ".4f") for n in names), *gained])
    errors = [
        [
            e["rows"],
            e["rms"],
            e["scale"],
            number(e["tensor_scale"], ".3g"),
            number(e["sqnr_exact"], ".2f"),
            number(e["sqnr_own"], ".2f"),
        ]
        for e in found["errors"]
    ]
    return [
        "",
        "## NVFP4: a dynamic per-tensor scale, or a bound",
        "",
        "Gain in the kernel, milliseconds. `dynamic`: `rmsnorm_absmax` over the whole tensor, the",
        "graph's scalar division, then the cast. `bound`: the scale is what no value can exceed",
        "(`mxnorm_pass.theory.computed_bound`), known beforehand.",
        "",
        *table(["M", "K", *names, "exact: dynamic / bound", "p2: dynamic / bound"], rows),
        "",
        "Error of the dequantised result, SQNR in dB over 256 rows of 4096. Against the exact norm",
        "in float64, where the estimate's constant error on rows that are not Gaussian counts as",
        "noise; and against the norm with the variant's own root, where only the cast's does.",
        "",
        *table(["rows", "rms", "scale", "value", "dB, exact norm", "dB, own norm"], errors),
    ]


def _instructions(result: dict[str, Any]) -> list[str]:
    counted, measured = result.get("instructions"), result.get("ncu")
    text = ["", "## Issued instructions", ""]
    if isinstance(counted, list):
        arch = counted[0]["arch"] if counted else 0
        text += [
            f"Of all threads per element of a row, counted in the kernel's SASS for sm_{arch}",
            "(straight-line code: what stands there is issued once); registers per thread, bytes",
            "spilled per thread, and the share of a multiprocessor's warps that can be resident.",
            "",
            *table(
                [
                    "K",
                    "variant",
                    "residual",
                    "instructions / element",
                    "registers",
                    "spills",
                    "warps",
                    "occupancy",
                ],
                [
                    [
                        str(c["k"]),
                        SHORT[c["variant"]],
                        "yes" if c["residual"] else "no",
                        number(c["instructions_per_element"], ".2f"),
                        str(c["registers"]),
                        str(c["spills"]),
                        str(c["warps"]),
                        number(c["occupancy"], ".2f"),
                    ]
                    for c in counted
                ],
            ),
        ]
    else:
        text += [f"Not counted in the machine code: {counted or 'not run'}."]
    text += [""]
    if isinstance(measured, list):
        rows = [
            [
                f"`{c['kernel'][:60]}`",
                number(c.get("instructions_per_element"), ".2f"),
                number(c.get("dram_read", 0.0) / 1e6, ".1f"),
                number(c.get("dram_written", 0.0) / 1e6, ".1f"),
                number(c.get("ns", 0.0) / 1e6, ".4f"),
            ]
            for c in measured
        ]
        head = ["kernel", "instructions / element", "MB read", "MB written", "ms under ncu"]
        text += [
            "By the chip's counters (ncu) at 16384 x 4096, one launch each, cold cache and the",
            "clocks as they were; an instruction of a warp counts 32.",
            "",
            *table(head, rows),
        ]
    else:
        text += [f"No hardware counters: {measured or 'not run'}."]
    return text


def _meaning(figures: Figures) -> list[str]:
    """What of the time is the kernel, what the gain, what the estimate."""
    large = [s for s in figures.shapes if s[0] * s[1] >= 16e6]
    few = [s for s in figures.shapes if s[0] <= 256 and not s[2]]
    few_added = [s for s in figures.shapes if s[0] <= 256 and s[2]]

    def span(ratios: Iterable[float]) -> str:
        found = sorted(ratios)
        return f"{found[0]:.2f} to {found[-1]:.2f}" if found else "–"

    def over(shapes: list[tuple[int, int, bool]], slow: str, fast: str) -> str:
        pairs = [(figures.ms(s, slow), figures.ms(s, fast)) for s in shapes]
        return span(a / b for a, b in pairs if a and b)

    plain = [s for s in large if not s[2]]
    added = [s for s in large if s[2]]
    return [
        "",
        "## What buys the time",
        "",
        "Ratios of milliseconds, least to largest over the shapes.",
        "",
        *table(
            ["", "from 16M elements", "with residual", "up to 256 rows", "with residual"],
            [
                [what, *(over(shapes, slow, fast) for shapes in (plain, added, few, few_added))]
                for what, slow, fast in (
                    ("the fused kernel, exact, over torch.compile", "compile", "ours_exact"),
                    ("the estimate instead of the true RMS", "ours_exact", "ours_p2"),
                    ("the gain in the weight instead of the kernel", "ours_p2", "ours_p2_folded"),
                    ("all three: p2 folded over torch.compile", "compile", "ours_p2_folded"),
                )
            ],
        ),
        "",
        "Time is bought by the fusion: one read and one launch where torch.compile has two. The",
        "estimate takes the sum of squares off and adds nothing, since the cast needs the block",
        "absmax anyway; on a chip that waits for memory that is worth nothing by itself. What it",
        "makes possible is worth something: under the estimate the gain moves into the weight, and",
        "the kernel reads no gain and does not look for the absmax a second time (with the gain in",
        "the kernel the scale needs the absmax of the product). docs/blackwell.md has the same",
        "question for a B200, by instructions against bytes.",
    ]


def document(result: dict[str, Any]) -> str:
    """``docs/kernels.md``."""
    from .variants import TITLES

    figures = Figures(result)
    machine, copy = result["machine"], result["copy"]
    checked = figures.targets()
    replays = machine["replays"]
    spreads = sorted((figures.derive(r)["spread"] or 0.0) for r in result["rows"])
    middle = spreads[len(spreads) // 2] if spreads else 0.0
    widest = spreads[-1] if spreads else 0.0
    versions = [f"{a} {machine[a]}" for a in ("torch", "triton", "torchao") if a in machine]
    text = [
        "# The kernel",
        "",
        f"{machine['device']}, {', '.join(versions)}. Output of `benchmarks/kernels.py`; bfloat16",
        "in, MXFP8 (e4m3, blocks of 32, RCEIL) out, milliseconds.",
        "",
        *short(figures),
        "",
        "## How",
        "",
        "- **Correct first.** Every variant's codes and scales, at every shape, are dequantised",
        "  (first and last 8 rows) and compared with the norm in float64 (with the variant's own",
        "  root): SQNR within 1 dB of that of the reference's cast. Sums are compared bit for bit,",
        "  and our kernels' last rows with the same rows on their own.",
        "- **Time.** Launches captured in a CUDA graph of 2 ms (at most 1000 launches), over a",
        "  ring of inputs that overflows the L2 cache 4.5 times (1000 inputs at most), outputs",
        "  rotating too; the cache is flushed by reads between replays. Median of",
        f"  {replays} replays; their 10th to 90th percentile spans {100 * middle:.1f}% of the",
        f"  median for half of the figures, {100 * widest:.1f}% at most.",
        "- **Limit.** Bytes that must move (x, codes, scales, rstd; with a residual that and the",
        f"  sum) over the bandwidth of a copy of 1 GiB in and out: {copy['copy'] / 1e12:.3f} TB/s",
        f"  in this run (a copy kernel in a graph {copy['kernel'] / 1e12:.3f}, `Tensor.copy_`",
        f"  {copy['driver'] / 1e12:.3f}). `equal copy`: a copy kernel that moves as many bytes as",
        "  the shape, half of them in: it has the launch and the tail that the limit leaves out.",
        "  A kernel that reads two bytes for each that it writes can beat either by a little.",
        "- **Speedup** is over torch.compile; `allowed` is what a kernel at the limit would reach.",
        "",
        *(f"- `{short}`: {TITLES[name]}" for name, short in SHORT.items()),
        *(f"- {SHORT.get(n, n)} is missing: {why}." for n, why in result["unavailable"].items()),
        *(f"- {note}." for note in result["notes"]),
    ]
    for residual in (False, True):
        text += ["", f"## {'With the residual add' if residual else 'RMSNorm and cast'}", ""]
        text += _times(figures, residual)
    text += _meaning(figures) + _nvfp4(result) + _instructions(result)
    missed = sum(not met for met, _ in checked)
    text += ["", "## Targets", "", f"{len(checked) - missed} met, {missed} missed.", ""]
    text += [f"- {'PASS' if met else 'MISS'} {line}" for met, line in checked]
    for title, key in (("Left out for lack of time", "skipped"), ("Failed", "failed")):
        if result[key]:
            text += ["", f"## {title}", ""]
            text += [
                f"- {e if isinstance(e, str) else e['what'] + ': ' + e['error'].splitlines()[-1]}"
                for e in result[key]
            ]
    head = ["M", "K", "residual", "variant", "ms", "p10-p90", "GB/s", "of limit", "of equal copy"]
    head += ["speedup", "allowed", "kernels", "SQNR dB"]
    rows = [
        [
            str(r["m"]),
            str(r["k"]),
            "yes" if r["residual"] else "no",
            SHORT[r["variant"]],
            *_cells(figures, r),
        ]
        for r in sorted(
            result["rows"],
            key=lambda r: (r["residual"], r["k"], r["m"], list(SHORT).index(r["variant"])),
        )
    ]
    text += ["", "## Every figure", "", "<details>", "", *table(head, rows), "", "</details>", ""]
    return "\n".join(text)


def plot(result: dict[str, Any], path: Path) -> None:
    """Share of the limit against bytes, and speedup against the one that is allowed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = Figures(result)
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True)
    styles = {"compile": "x", "ours_exact": "s", "ours_p2": "^", "ours_p2_folded": "o"}
    colors = dict(zip(styles, ("tab:grey", "tab:blue", "tab:orange", "tab:green"), strict=True))
    for column, residual in enumerate((False, True)):
        share, gain = panels[0][column], panels[1][column]
        for variant, mark in styles.items():
            rows = [
                r for r in result["rows"] if r["variant"] == variant and r["residual"] == residual
            ]
            rows.sort(key=lambda r: r["bytes"])
            derived = [figures.derive(r) for r in rows]
            x = [r["bytes"] / 1e6 for r in rows]
            look = {"label": SHORT[variant], "alpha": 0.7, "color": colors[variant]}
            share.plot(x, [d["share"] for d in derived], mark, **look)
            if variant != "compile":
                gain.plot(x, [d["speedup"] for d in derived], mark, **look)
        shapes = [s for s in figures.shapes if s[2] == residual]
        shapes.sort(key=lambda s: moved_bytes(*s))
        x = [moved_bytes(*s) / 1e6 for s in shapes]
        copies = [figures.limit_ms(s) / figures.copies[s]["ms"] for s in shapes]
        share.plot(x, copies, "-", color="grey", label="copy of equal bytes", zorder=0)
        reached = [
            figures.derive(figures.rows[(*s, "compile")])["speedup_copy"]
            if (*s, "compile") in figures.rows
            else float("nan")
            for s in shapes
        ]
        gain.plot(x, reached, "-", color="grey", label="copy of equal bytes", zorder=0)
        gain.set_ylim(0.0, 4.0)
        share.set_title("with the residual add" if residual else "RMSNorm and cast")
        share.set_ylabel("share of the copy limit")
        gain.set_ylabel("speedup over torch.compile")
        gain.set_xlabel("MB that must move")
        for panel in (share, gain):
            panel.set_xscale("log")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        share.legend(fontsize=8)
        gain.legend(fontsize=8)
    figure.suptitle(f"{result['machine']['device']}, bfloat16 to MXFP8")
    figure.tight_layout()
    figure.savefig(path)
