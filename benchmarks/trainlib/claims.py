"""What the paper claims and what was measured here: the rows of ``docs/reproduce.md``."""

from __future__ import annotations

import math
import re
from typing import Any

from kernellib.sass import seconds
from theorylib.figures import pick

from mxnorm_pass import theory
from trainlib import gradients, runs
from trainlib.figures import label, main_rate
from trainlib.loop import SIZES
from trainlib.results import FEWEST, Difference, held_out, paired
from trainlib.sources import H200_BANDWIDTH, H200_ISSUE, REPORTED, SHAPE, Sources
from trainlib.words import CHINCHILLA, TITLES, signed

Row = tuple[str, str, str, str, str, str]


def convergence(s: Sources) -> Row:
    found = [r.measured for r in pick(s.theory, table="mean", name="own c", k=512)]
    dists = len({r.dist for r in pick(s.theory, table="mean", name="own c", k=512)})
    return (
        "The estimate converges to the RMS as blocks K grow",
        "theorem (R)",
        f"over true RMS at K = 512: {min(found):.4f} to {max(found):.4f}, {dists} distributions, "
        "p = 1 and 2",
        "same",
        "each distribution needs its own constant",
        "[theory.py](../benchmarks/theory.py)",
    )


def constants(s: Sources) -> Row:
    found = pick(s.theory, table="constant")
    off = max(abs(r.measured - r.predicted) / r.stderr for r in found)
    ours = theory.inverse_correction(2, 32)
    return (
        "c(p, B)",
        f"1/c = {REPORTED['constant']} for p = 2, B = 32 (R)",
        f"{ours:.4f} by quadrature; {len(found)} constants within {off:.2f} standard errors of "
        "Monte Carlo",
        "same" if abs(ours - REPORTED["constant"]) < 1e-3 else "no",
        "quadrature instead of drawing",
        "[theory.py](../benchmarks/theory.py)",
    )


def agreement(s: Sources) -> Row:
    parts, same, off = [], [], []
    for k, wanted in REPORTED["r2"].items():
        key = {"table": "cast", "dist": "MXFP8 RCEIL", "k": k}
        (r2,) = pick(s.theory, **key, name="r2")
        (explained,) = pick(s.theory, **key, name="1 - SSE/SST")
        parts.append(f"{r2.measured:.4f} ({explained.measured:.4f}) at K = {k}")
        same.append(abs(explained.measured - wanted) < 1e-3)
        off.append(abs(r2.measured - wanted))
    return (
        "r² behind the cast",
        ", ".join(f"{v:.3f} at K = {k}" for k, v in REPORTED["r2"].items()) + " (R)",
        ", ".join(parts),
        "same as explained variance" if all(same) else "no",
        "squared correlation, which is up to "
        f"{max(off):.3f} off; in brackets the share of explained variance",
        "[theory.py](../benchmarks/theory.py)",
    )


def width(s: Sources) -> Row:
    found = {r.k: r for r in pick(s.theory, table="error", dist="gaussian", p=2, block=32)}
    return (
        "Error against width",
        "none known to us",
        ", ".join(f"{found[k].measured:.2%} at {32 * k}" for k in (32, 128, 512))
        + f" columns; formula {found[128].predicted:.2%} at 4096",
        "–",
        "standard deviation of a Gaussian row's estimate, p = 2",
        "[theory.py](../benchmarks/theory.py)",
    )


def compare(gap: Difference, reported: float) -> str:
    """Whether our interval agrees with a reported difference; undecided as the training page is."""
    if not gap.values or not math.isfinite(gap.mean):
        return "–"
    if gap.verdict == "undecided":
        return "undecided"
    holds = abs(gap.mean - reported) <= gap.half_width
    if gap.verdict == "no difference seen":
        return "undecided" if holds else "no: none seen"
    if gap.mean * reported < 0:
        return "no: other sign"
    if holds:
        return "same"
    return f"same sign, {'smaller' if abs(gap.mean) < abs(reported) else 'larger'}"


def number(gap: Difference) -> str:
    if not gap.values:
        return "not measured"
    if not math.isfinite(gap.mean):
        return "a run diverged"
    if len(gap.values) < FEWEST:
        return f"{signed(gap.mean)}, {gap.pairs}, no interval"
    return f"{signed(gap.mean)} ± {gap.half_width:.4f}, {gap.pairs}"


def losses(s: Sources, size: str, name: str) -> list[Row]:
    plain, *others = REPORTED["losses"][size]
    folder = s.train.get(name)
    rows = []
    for variant, value in zip(("p1", "p2"), others, strict=True):
        claim = f"{size}: {label(variant)} minus RMSNorm, final loss"
        told = f"{value - plain:+.3f} ({value:.3f} - {plain:.3f}, R)"
        if folder is None:
            ours, same, why = "not measured", "–", f"no runs in `docs/data/train/{name}`"
        else:
            curves, text = folder.at(main_rate(folder)), "other text"
            gap, held = paired(curves, variant), held_out(curves, variant)
            earlier = s.train.get(f"{name}-tables")
            if not gap.values and earlier is not None:
                gap = paired(earlier.at(main_rate(earlier)), variant)
                text = "other text (the earlier one)"
            ours, same = number(gap), compare(gap, value - plain)
            if held.values and folder.has_held_out and math.isfinite(held.mean):
                ours += f"; held out {signed(held.mean)}"
            why = f"{tokens(folder)}, {text}"
            if share(folder) < EARLY:
                why += "; so few steps decide no sign"
        rows.append((claim, told, ours, same, why, "[train.py](../benchmarks/train.py)"))
    return rows


def anchor(title: str) -> str:
    """Of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def narrow(s: Sources) -> Row:
    """The widest gap of the small model, which the paper has no claim about."""
    claim, told = "15M, 256 columns: p = 2 minus RMSNorm, final loss", "none known to us"
    script = "[train.py](../benchmarks/train.py)"
    found = [s.train[name] for name in ("15m", "15m-rates", "15m-open") if name in s.train]
    if not found:
        return (claim, told, "not measured", "–", "no runs in `docs/data/train/15m`", script)
    folder = runs.pool(*found)
    rate = main_rate(folder)
    others = [
        f"{label(v)} {number(gap)}"
        for v in folder.variants
        if v not in ("rmsnorm", "p2") and (gap := paired(folder.at(rate), v)).values
    ]
    sd = theory.error_sd(2, 32, SIZES[folder.plan["size"]].dim)
    ours = f"{number(paired(folder.at(rate), 'p2'))}, at a peak rate of {rate:g}"
    curves = folder.at(rate)
    why = f"a Gaussian row's estimate is off by {sd:.1%}"
    saved, left = paired(curves, "p2-projected", "p2"), paired(curves, "p2-projected")
    if gradients.explains(curves, "p2-projected") and abs(left.mean) < abs(saved.mean):
        link = f"[pre-training](train.md#{anchor(TITLES['15m'])})"
        why = f"of the gradient more than of the estimate: {link}; {why}"
    return (claim, told, "; ".join([ours, *others]), "–", why, script)


EARLY = 1e-3  # of Chinchilla's tokens: runs of fewer are their first steps


def share(folder: runs.Folder) -> float:
    """Tokens of a run over those that Chinchilla gives its model; NaN where it is not known."""
    count = folder.parameters
    return math.nan if count is None else folder.tokens / count / CHINCHILLA


def tokens(folder: runs.Folder) -> str:
    of = share(folder)
    beside = f", {of:.2%} of Chinchilla's" if math.isfinite(of) else ""
    return f"{folder.tokens / 1e6:.1f}M tokens a run{beside}"


def eight() -> Row:
    plain, one, two = REPORTED["losses"]["8B"]
    return (
        "8B: p = 1 and p = 2 minus RMSNorm",
        f"{one - plain:+.3f}, {two - plain:+.3f} (R)",
        "not measured",
        "–",
        "an 8B run is beyond one GPU here",
        "–",
    )


def stability(s: Sources) -> Row:
    low, high = (
        next(
            r.predicted
            for r in pick(s.theory, table="bound", p=p, block=32, k=128, name="output")
        )
        for p in (2, 1)
    )  # fmt: skip
    why = f"an output's bound grows as K for p = 1 ({high:.0f} at 4096 columns, p = 2: {low:.0f})"
    claim, told = "p = 1 is unstable at 8B, p = 2 is not", "R"
    folder = s.train.get("15m-rates")
    if folder is None:
        ours, same = "not measured: no runs in `docs/data/train/15m-rates`", "–"
    elif len(folder.rates) < 2:
        ours = f"not measured: one peak rate at 15M, {folder.rates[0]:g}, where "
        lost = [label(v) for v in folder.variants if runs.first_divergence(folder, v) is not None]
        ours += f"{', '.join(lost) or 'none'} diverged"
        same = "–"
    else:
        first = {
            v: runs.first_divergence(folder, v)
            for v in ("rmsnorm", "p1", "p2")
            if v in folder.variants
        }
        rate = {v: math.inf if r is None else r for v, r in first.items()}
        both, most = {"p1", "p2"} <= rate.keys(), f"{folder.rates[-1]:g}"
        same = "–"
        if min(rate.values()) == math.inf:
            ours = f"at 15M none of {', '.join(map(label, first))} diverged"
            same = f"not tested: nothing diverged up to {most}" if both else same
        else:
            ours = (
                "lowest diverging peak rate at 15M: "
                + ", ".join(
                    f"{label(v)} {'none' if r is None else f'{r:g}'}" for v, r in first.items()
                )
                + f"; tried up to {most}"
            )
            if both:
                order = (rate["p1"] > rate["p2"]) - (rate["p1"] < rate["p2"])
                words = {-1: "p = 1 diverges earlier", 0: "not seen at 15M", 1: "no: p = 2 does"}
                same = words[order]
    return (claim, told, ours, same, why, "[train.py](../benchmarks/train.py)")


def rounded() -> Row:
    return (
        "An estimate from the rounded E8M0 scales is unstable at 8B",
        "R",
        "not measured",
        "–",
        "not ours: the op reads the block maxima before they are rounded",
        "–",
    )


def speedups(s: Sources, variant: str) -> dict[tuple[int, int, bool], float]:
    found = {}
    for shape in s.kernels.shapes:
        ours, base = s.kernels.ms(shape, variant), s.kernels.ms(shape, "compile")
        if ours and base:
            found[shape] = base / ours
    return found


def kernel(s: Sources) -> list[Row]:
    folded, exact = speedups(s, "ours_p2_folded"), speedups(s, "ours_exact")
    inductor = speedups(s, "inductor_p2_folded")
    large = {
        residual: [
            v for shape, v in folded.items() if shape[0] >= SHAPE[0] and shape[2] == residual
        ]
        for residual in (False, True)
    }
    chip = s.kernels.result["machine"]["device"]
    alone = inductor[SHAPE]
    by = "that size" if alone >= REPORTED["kernel"] else "less"
    claim = f"Kernel up to {REPORTED['kernel']}x over torch.compile's RMSNorm"
    first = (
        claim,
        f"{REPORTED['kernel']}x, GB200, by torch.compile alone (A)",
        f"by torch.compile alone {alone:.2f}x at 16384 x 4096; our kernel {folded[SHAPE]:.2f}x, "
        f"from 16384 rows on {min(large[False]):.2f} to {max(large[False]):.2f}, with residual "
        f"{min(large[True]):.2f} to {max(large[True]):.2f}; {chip}",
        f"{by} by torch.compile alone; up to {max(large[False]):.2f}x by our kernel, on another "
        "chip",
        f"fusion makes it, not the estimate: with the true RMS our kernel has {exact[SHAPE]:.2f}x",
        "[kernels.py](../benchmarks/kernels.py)",
    )
    b = prediction(s)
    second = (
        "The same on a Blackwell GPU",
        "as above",
        f"predicted, not measured: {b['bytes_ratio']:.2f}x by bytes alone, "
        f"{b['ratio']:.2f}x with instructions",
        "–",
        "arithmetic below, which is no bound",
        "[blackwell.py](../benchmarks/blackwell.py), [kernels.py](../benchmarks/kernels.py)",
    )
    return [first, second]


def layer(s: Sources) -> list[Row]:
    found = {(e["kind"], e["backend"]): e["steps"] for e in s.layer["entries"]}

    def gain(kind: str, step: str, backend: str = "mxnorm") -> float:
        return float(found[kind, "inductor"][step]["ms"] / found[kind, backend][step]["ms"] - 1)

    def range_of(kind: str, step: str) -> str:
        """Tenth to ninetieth percentile without and with the pass, milliseconds."""
        ends = [found[kind, backend][step] for backend in ("inductor", "mxnorm")]
        return " and ".join(f"{e['p10']:.2f} to {e['p90']:.2f}" for e in ends)

    both = "forward and backward"
    return [
        (
            "Llama 3 8B layer, MXFP8",
            f"{REPORTED['layer']['MXFP8']:+.1%} (A)",
            f"{gain('training', both):+.1%} in training, "
            f"{gain('inference', 'forward'):+.1%} in inference "
            f"({gain('inference', 'forward', 'mxnorm_exact'):+.1%} with the true RMS); "
            f"{s.layer['machine']}",
            "not comparable",
            "no MXFP8 matmul on this chip: emulation dequantises our codes in one more kernel. "
            "Times spread as widely: p10 to p90 without and with the pass "
            f"{range_of('training', both)} ms, in inference {range_of('inference', 'forward')}",
            "[layer.py](../benchmarks/layer.py)",
        ),
        (
            "The same, NVFP4",
            f"{REPORTED['layer']['NVFP4']:+.1%} (A)",
            "not measured",
            "–",
            "no FP4 matmul on this chip",
            "–",
        ),
    ]


def rows(s: Sources) -> list[Row]:
    return [
        convergence(s),
        constants(s),
        agreement(s),
        width(s),
        *losses(s, "125M", "125m"),
        *losses(s, "1B", "1b"),
        narrow(s),
        eight(),
        stability(s),
        rounded(),
        *kernel(s),
        *layer(s),
    ]


def prediction(s: Sources) -> dict[str, Any]:
    """Times on a B200 of ``SHAPE``, milliseconds: the longer of bytes and instructions.

    Bytes are those that have to move. Instructions of ours are of the code compiled for that chip,
    those of torch.compile's two kernels of a run on sm_90. ``h200`` is the ratio that the same
    arithmetic gives for the chip of that run, and ``measured`` what was measured there.
    """
    rows, elements = SHAPE[0], SHAPE[0] * SHAPE[1]
    ncu = s.kernels.result["ncu"]
    base = [r["instructions_per_element"] for r in ncu if r["kernel"].startswith("triton_")]
    # Of ours on sm_90 the last is the estimate with a folded gain.
    own = ncu[-1]["instructions_per_element"]
    moved = float(s.kernels.rows[(*SHAPE, "ours_p2_folded")]["bytes"])
    # The first kernel reads the rows and leaves their roots; the second moves what ours does.
    reads = 2.0 * elements + 4 * rows
    parts = [("ours, p = 2 folded", moved, s.blackwell["instr., p2, folded"])]
    parts += [("torch.compile, norm", reads, base[0]), ("torch.compile, cast", moved, base[1])]
    lines, times = [], []
    for name, size, each in parts:
        memory, issue = (1e3 * t for t in seconds(size, each * elements / 32))
        times.append(max(memory, issue))
        lines.append([name, f"{size / 1e6:.1f}", f"{memory:.4f}", f"{each:.2f}", f"{issue:.4f}",
                      f"{times[-1]:.4f}"])  # fmt: skip
    there = [
        max(seconds(size, each * elements / 32, H200_BANDWIDTH, H200_ISSUE))
        for size, each in zip((moved, reads, moved), (own, *base), strict=True)
    ]
    return {
        "lines": lines,
        "ratio": sum(times[1:]) / times[0],
        "bytes_ratio": (reads + moved) / moved,
        "h200": sum(there[1:]) / there[0],
        "measured": speedups(s, "ours_p2_folded")[SHAPE],
    }
