"""``mxnorm`` on the command line, also ``python -m mxnorm_pass``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxnorm_pass import theory
from mxnorm_pass.backend import explain
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.reasons import REASONS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 done, 1 fewer sites than ``--require``, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        "mxnorm", description="RMSNorm -> MX cast -> matmul, as MXNorm"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    sub = commands.add_parser(
        "explain", help="what would be rewritten in a model, and why not the rest"
    )
    sub.add_argument("target", help="script.py:function; the function returns (model, inputs)")
    sub.add_argument("--infer", action="store_true", help="trace without gradients")
    sub.add_argument("--train", action="store_true", help="trace with gradients")
    sub.add_argument("--rms", default="mx", help="mx or exact")
    sub.add_argument("--p", type=int, default=2, help="1 or 2")
    sub.add_argument("--require", type=int, default=None, help="exit 1 with fewer rewritten sites")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")

    sub = commands.add_parser("constants", help="c(p, B) and what the estimate can be off by")
    sub.add_argument("--block", type=int, default=32, help="block size B")
    sub.add_argument("--p", type=int, default=2, help="power of the mean")
    sub.add_argument("--dist", default="gaussian", help="gaussian, laplace or student_t5")
    sub.add_argument("--hidden", type=int, help="row length, for error and bounds (128 blocks)")
    sub.add_argument("--json", action="store_true", help="print JSON")

    commands.add_parser("reasons", help="why a site is left alone, and what to do about it")

    args = parser.parse_args(argv)
    try:
        return {"explain": _explain, "constants": _constants, "reasons": _reasons}[args.command](
            args
        )
    except (ValueError, OSError) as error:
        print(f"mxnorm: {error}", file=sys.stderr)
        return 2


def _explain(args: argparse.Namespace) -> int:
    if args.train and args.infer:
        raise ValueError("--train and --infer exclude each other")
    training = True if args.train else False if args.infer else None
    model, inputs = _load(args.target)
    config = MXNormConfig(rms=args.rms, p=args.p)
    if isinstance(inputs, dict):
        report = explain(model, training=training, config=config, **inputs)
    else:
        values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        report = explain(model, *values, training=training, config=config)
    print(report.to_json() if args.json else report)
    return int(args.require is not None and report.rewritten < args.require)


def _load(target: str) -> tuple[Any, Any]:
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not name or not path.is_file():
        raise ValueError(f"{target!r}: expected script.py:function with a readable script")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    result = function()
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{target} must return (model, inputs)")
    return result


def _constants(args: argparse.Namespace) -> int:
    c = theory.correction(args.p, args.block, args.dist)
    hidden = 128 * args.block if args.hidden is None else args.hidden
    if hidden <= 0 or hidden % args.block:
        raise ValueError(f"--hidden {hidden}: allowed are multiples of the block size {args.block}")
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
    if args.json:
        print(json.dumps(rows))
        return 0
    notes = {
        "c": "rms_hat = c * (mean m^p)^(1/p)",
        "inverse_c": "the same constant as some write it: rho = C * (mean m^p)^(-1/p)",
        "error_sd": f"relative error of a {args.dist} row of {hidden}",
        "ratio_low": "least estimate / true RMS that any row can have",
        "ratio_high": "largest",
        "output_bound": "largest |x * rho| that any row can have",
    }
    print(f"p={args.p}, block {args.block}, {args.dist} rows")
    for name, value in rows.items():
        print(f"{name:>13} = {value:<14.10g} {notes[name]}")
    return 0


def _reasons(_: argparse.Namespace) -> int:
    for code, (what, advice) in REASONS.items():
        print(f"{code}\n    {what}\n    what you can do: {advice}")
    return 0
