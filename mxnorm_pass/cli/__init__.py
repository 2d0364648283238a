"""``mxnorm`` on the command line, also ``python -m mxnorm_pass``.

Results go to stdout, everything else to stderr. Exit statuses are in :mod:`.errors`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from mxnorm_pass.cli.errors import NO_MODEL, USAGE, ShellError
from mxnorm_pass.cli.output import Output
from mxnorm_pass.cli.parser import parse

__all__ = ["main"]

_COMMANDS = {
    "explain": ("explain", "run"),
    "constants": ("constants", "run"),
    "reasons": ("constants", "reasons"),
    "doctor": ("doctor", "run"),
    "bisect": ("bisect", "run"),
}
_INTERRUPTED = 130
_TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers that warn on import of what is none of the user's: extensions for other Pythons."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status: 0 done, 1 a requirement is not met, 2 wrong usage, 3 no model.

    Raises:
        SystemExit: from argparse, for ``--help`` and wrong options.
    """
    try:
        args = parse(argv)
    except ShellError as error:
        print(f"mxnorm: {error}", file=sys.stderr)
        return error.status
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    module, function = _COMMANDS[args.command]
    try:
        command: Callable[[argparse.Namespace, Output], int] = getattr(
            importlib.import_module(f"mxnorm_pass.cli.{module}"), function
        )
        status = command(args, Output(args.json))
        # Here, not at exit: a reader that is gone has to be noticed where it can be dealt with.
        sys.stdout.flush()
        return status
    except ShellError as error:
        return _fail(args, error, error.status)
    except BrokenPipeError:
        # `mxnorm ... | head`: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (ValueError, OSError) as error:
        return _fail(args, error, USAGE)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (Exception, SystemExit) as error:
        # Our own options are read by now: what wants to exit here is a model's or library's code,
        # whose status says nothing of the command.
        return _fail(args, error, NO_MODEL)


def _fail(args: argparse.Namespace, error: BaseException, status: int) -> int:
    if getattr(args, "traceback", False):
        traceback.print_exception(error)
    text = str(error) if isinstance(error, (ShellError, ValueError, OSError)) else ""
    message = " ".join((text or f"{type(error).__name__}: {error}").split())
    from_elsewhere = error.__cause__ is not None or not isinstance(error, ShellError)
    if status == NO_MODEL and from_elsewhere and getattr(args, "traceback", None) is False:
        message += " (all of it: --traceback)"
    print(f"mxnorm: {message}", file=sys.stderr)
    return status
