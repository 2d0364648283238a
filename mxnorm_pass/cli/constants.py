"""``mxnorm constants`` and ``mxnorm reasons``: what the package knows without a model."""

from __future__ import annotations

import argparse
import json

from mxnorm_pass import theory
from mxnorm_pass.cli.errors import OK, UsageError
from mxnorm_pass.cli.output import Output
from mxnorm_pass.reasons import REASONS

_NOTES = {
    "c": "rms_hat = c * (mean m^p)^(1/p)",
    "inverse_c": "the same constant as some write it: rho = C * (mean m^p)^(-1/p)",
    "error_sd": "relative error of a {dist} row of {hidden}",
    "ratio_low": "least estimate / true RMS that any row can have",
    "ratio_high": "largest",
    "output_bound": "largest |x * rho| that any row can have",
}


def run(args: argparse.Namespace, out: Output) -> int:
    """Exit status of ``mxnorm constants``."""
    c = theory.correction(args.p, args.block, args.dist)
    hidden = 128 * args.block if args.hidden is None else args.hidden
    if hidden <= 0 or hidden % args.block:
        raise UsageError(f"--hidden {hidden}: allowed are multiples of the block size {args.block}")
    blocks = hidden // args.block
    low, high = theory.ratio_bounds(args.p, args.block, blocks)
    rows = {
        "c": c,
        "inverse_c": 1 / c,
        "error_sd": theory.error_sd(args.p, args.block, hidden, args.dist),
        "ratio_low": low,
        "ratio_high": high,
        "output_bound": theory.output_bound(args.p, args.block, blocks),
    }
    lines = [f"p={args.p}, block {args.block}, {args.dist} rows"]
    for name, value in rows.items():
        note = _NOTES[name].format(dist=args.dist, hidden=hidden)
        lines.append(f"{name:>13} = {value:<14.10g} {note}")
    out.result(lambda: json.dumps(rows), "\n".join(lines))
    return OK


def reasons(_: argparse.Namespace, out: Output) -> int:
    """Exit status of ``mxnorm reasons``."""
    content = {code: {"what": what, "advice": advice} for code, (what, advice) in REASONS.items()}
    lines = []
    for code, (what, advice) in REASONS.items():
        lines.append(f"{code}\n    {what}\n    what you can do: {advice}")
    out.result(lambda: json.dumps(content, indent=1), "\n".join(lines))
    return OK
