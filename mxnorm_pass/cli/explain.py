"""``mxnorm explain``: from the command line to a report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from mxnorm_pass.backend import explain
from mxnorm_pass.cli import target
from mxnorm_pass.cli.errors import NOT_MET, OK, ModelError, UsageError, brief
from mxnorm_pass.cli.from_config import DTYPES, build, longest, read_config
from mxnorm_pass.cli.output import Output
from mxnorm_pass.cli.quantise import FORMATS, check
from mxnorm_pass.cli.savings import CHIPS
from mxnorm_pass.cli.show import show_savings, show_whole
from mxnorm_pass.cli.total import Total
from mxnorm_pass.cli.whole import Whole, explain_config
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.files import check_writable
from mxnorm_pass.report import Report

SCHEMA = 1
_OF_CONFIG = ("format", "dtype", "batch", "seq", "tokens", "chip", "skip", "also")


def run(args: argparse.Namespace, out: Output) -> int:
    """Exit status of ``mxnorm explain``."""
    if (args.target is None) == (args.config is None):
        raise UsageError("explain takes either script.py:function or --config config.json")
    if args.train and args.infer:
        raise UsageError("--train and --infer exclude each other")
    _check_page(args)
    options = _options(args)
    if args.config is not None:
        return _config(args, options, out)
    given = [name for name in _OF_CONFIG if getattr(args, name)]
    if given:
        raise UsageError(f"--{given[0]} goes with --config; {args.target} brings its own model")
    with out.quiet():
        report = _target(args, options)
    out.result(report.to_json, str(report))
    _html(args, report, out)
    return _required(args, report.rewritten, out)


def _options(args: argparse.Namespace) -> MXNormConfig:
    chosen: dict[str, Any] = {
        "rms": args.rms,
        "p": args.p,
        "gain": args.gain,
        "gradient": args.gradient,
        "tensor_scale": args.tensor_scale,
        "correction": args.correction,
    }
    for name in ("include", "exclude", "exact", "off"):
        if getattr(args, name):
            chosen[name] = tuple(getattr(args, name))
    return MXNormConfig(**chosen)


def _target(args: argparse.Namespace, options: MXNormConfig) -> Report:
    training = True if args.train else False if args.infer else None
    model, inputs = target.load(args.target)
    try:
        if isinstance(inputs, dict):
            return explain(model, training=training, config=options, **inputs)
        values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return explain(model, *values, training=training, config=options)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{args.target} cannot be traced: {brief(error)}") from error


def _config(args: argparse.Namespace, options: MXNormConfig, out: Output) -> int:
    if args.tokens and (args.batch or args.seq):
        raise UsageError("--tokens N is --batch 1 --seq N: give either")
    fmt = FORMATS[args.format or "mxfp8"]
    dtype = DTYPES[args.dtype or "bf16"]
    path = Path(args.config)
    content = read_config(path)
    with out.quiet():
        whole = _whole(args, options, path, content, fmt, dtype)
    total = Total(whole, CHIPS[args.chip or "b200"])
    out.result(
        lambda: json.dumps(
            {
                "schema": SCHEMA,
                **whole.describe(),
                "options": {
                    "format": fmt.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    **options.describe(),
                },
                "savings": total.describe(),
                "report": json.loads(whole.report.to_json()),
            },
            indent=1,
        ),
        "\n".join([*show_whole(whole, out.width), "", *show_savings(total, out.width)]),
    )
    _html(args, whole.report, out)
    return _required(args, whole.rewritten, out)


def _whole(
    args: argparse.Namespace,
    options: MXNormConfig,
    path: Path,
    content: dict[str, Any],
    fmt: Any,
    dtype: torch.dtype,
) -> Whole:
    # Training is what the estimate is for; a config says nothing either way.
    training = not args.infer
    batch = args.batch or 1
    seq = args.tokens or args.seq
    if seq is not None:
        check(fmt, training, dtype, batch * seq)
    built = build(content, dtype)
    limit = longest(built.config)
    if seq is None:
        seq = min(4096, limit or 4096)
        check(fmt, training, dtype, batch * seq)
    elif limit is not None and seq > limit:
        built.notes.append(f"{seq} tokens are more than max_position_embeddings {limit}")
    return explain_config(
        built,
        str(path),
        fmt,
        options,
        training=training,
        batch=batch,
        seq=seq,
        dtype=dtype,
        skip=args.skip,
        also=args.also,
    )


def _check_page(args: argparse.Namespace) -> None:
    """Before the trace, which takes its time: can the page be written?"""
    if args.html is None:
        return
    try:
        check_writable(Path(args.html))
    except OSError as error:
        raise UsageError(f"--html {args.html}: {error}") from error


def _html(args: argparse.Namespace, report: Report, out: Output) -> None:
    if args.html is None:
        return
    path = Path(args.html)
    with out.quiet():
        report.to_html(path)
    out.note(f"wrote {path}")


def _required(args: argparse.Namespace, rewritten: int, out: Output) -> int:
    if args.require is None or rewritten >= args.require:
        return OK
    out.note(f"{rewritten} of {args.require} required sites are rewritten")
    return NOT_MET
