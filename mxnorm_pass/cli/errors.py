"""How a command ends: exit statuses, and errors that carry one."""

from __future__ import annotations

OK = 0
NOT_MET = 1
"""What was asked for does not hold: fewer sites than ``--require``, an unhealthy installation."""
USAGE = 2
"""The command line, or a file it names, is not what it has to be."""
NO_MODEL = 3
"""The model could not be built or traced, or a script failed."""


class ShellError(Exception):
    """Said in one line on stderr; ends the command with ``status``."""

    status = USAGE


class UsageError(ShellError):
    """Names what was wrong and what is allowed."""


class ModelError(ShellError):
    """Names what could not be built, traced or run, and why."""

    status = NO_MODEL


def brief(error: BaseException) -> str:
    """Kind and first line of an error that comes from elsewhere; of a wrapper, what it wraps."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line that ends in a colon says nothing by itself.
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    if len(text) > 300:
        text = text[:299] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
