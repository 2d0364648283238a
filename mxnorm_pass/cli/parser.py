"""The command line: commands and options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mxnorm_pass import __version__
from mxnorm_pass.cli.errors import UsageError
from mxnorm_pass.cli.from_config import DTYPES
from mxnorm_pass.cli.quantise import FORMATS
from mxnorm_pass.cli.savings import CHIPS

STATUSES = """exit status:
  0  done
  1  what was asked for does not hold: fewer sites than --require, an unhealthy installation,
     no site to bisect
  2  wrong usage: an option or a file that is not what it has to be
  3  the model cannot be built or traced, or a script failed
"""


class Parser(argparse.ArgumentParser):
    """argparse with its errors in one line, as all others of this command."""

    def error(self, message: str) -> NoReturn:
        """Exit 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``mxnorm``."""
    parser = Parser(
        "mxnorm",
        description="RMSNorm -> MX cast -> matmul, as MXNorm",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    _explain(commands)
    _constants(commands)
    _doctor(commands)
    _bisect(commands)
    sub = commands.add_parser(
        "reasons", help="why a site is left alone, and what to do about it", epilog=STATUSES
    )
    _json(sub)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; ``script_args`` is what stands behind ``--``, for the script of bisect."""
    given = list(sys.argv[1:] if argv is None else argv)
    own = given.index("--") if "--" in given else len(given)
    args = make_parser().parse_args(given[:own])
    args.script_args = given[own + 1 :]
    if args.script_args and args.command != "bisect":
        raise UsageError(f"{args.command} takes nothing behind --")
    return args


def _json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def _add(commands: Any, name: str, help: str) -> Any:
    return commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _explain(commands: Any) -> None:
    sub = _add(commands, "explain", "what would be rewritten in a model, and why not the rest")
    sub.add_argument(
        "target",
        nargs="?",
        help="script.py:function or module:function; the function returns (model, inputs)",
    )
    sub.add_argument("--config", metavar="FILE", help="config.json of a transformers model")
    sub.add_argument(
        "--train",
        action="store_true",
        help="trace with gradients: the default with --config; a model of your own is by default "
        "traced as it is, in training or evaluation mode",
    )
    sub.add_argument("--infer", action="store_true", help="trace without gradients")

    model = sub.add_argument_group("the model of --config, built without weights")
    model.add_argument(
        "--format", choices=FORMATS, default=None, help="cast of its linears (mxfp8)"
    )
    model.add_argument("--dtype", choices=DTYPES, default=None, help="of its parameters (bf16)")
    model.add_argument("--batch", type=_positive, help="sequences (1)")
    model.add_argument(
        "--seq", type=_positive, help="tokens per sequence (4096, or as many as it takes)"
    )
    model.add_argument("--tokens", type=_positive, help="the same as --batch 1 --seq TOKENS")
    model.add_argument(
        "--skip", action="append", default=[], metavar="GLOB", help="linears that get no cast"
    )
    model.add_argument(
        "--also", action="append", default=[], metavar="GLOB", help="further ones: lm_head"
    )
    model.add_argument(
        "--chip", choices=CHIPS, default=None, help="predict bytes and time saved there (b200)"
    )

    options = sub.add_argument_group("options of the pass, as in mxnorm_pass.MXNormConfig")
    options.add_argument("--rms", default="mx", help="mx or exact")
    options.add_argument("--p", type=int, default=2, help="1 or 2")
    options.add_argument("--gain", default="auto", help="auto, fold or kernel")
    options.add_argument(
        "--gradient", default="straight_through", help="straight_through, projected or own"
    )
    options.add_argument("--tensor-scale", default="dynamic", help="NVFP4's: dynamic or bound")
    options.add_argument("--correction", default="gaussian", help="gaussian or a calibration file")
    for name, what in (
        ("include", "norms to rewrite"),
        ("exclude", "norms to leave alone"),
        ("exact", "norms that keep the true RMS"),
    ):
        options.add_argument(f"--{name}", action="append", metavar="GLOB", help=what)
    options.add_argument("--off", action="append", metavar="ID", help="sites to leave alone")

    out = sub.add_argument_group("output")
    out.add_argument("--require", type=_count, metavar="N", help="exit 1 with fewer rewritten")
    out.add_argument("--html", metavar="FILE", help="write the report of what was traced")
    _json(out)
    out.add_argument("--traceback", action="store_true", help="whole traceback of an error")


def _constants(commands: Any) -> None:
    sub = _add(commands, "constants", "c(p, B) and what the estimate can be off by")
    sub.add_argument("--block", type=int, default=32, help="block size B")
    sub.add_argument("--p", type=int, default=2, help="power of the mean")
    sub.add_argument("--dist", default="gaussian", help="gaussian, laplace or student_t5")
    sub.add_argument("--hidden", type=int, help="row length, for error and bounds (128 blocks)")
    _json(sub)


def _doctor(commands: Any) -> None:
    sub = _add(commands, "doctor", "versions, chip, which paths are live, and why not")
    sub.add_argument("--quick", action="store_true", help="compile nothing")
    _json(sub)


def _bisect(commands: Any) -> None:
    sub = _add(commands, "bisect", "find the site whose rewrite makes a check fail")
    sub.add_argument(
        "target",
        help="script.py, whose exit status is the check, or script.py:check, which fails by "
        "raising or by returning something false; arguments of the script behind --",
    )
    sub.add_argument("--timeout", type=float, help="seconds after which a run counts as failed")
    _json(sub)


def _positive(text: str) -> int:
    return _number(text, 1)


def _count(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number >= {least}")
    return value
