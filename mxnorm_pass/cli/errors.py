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
    """An error that comes from elsewhere in a line: kind and text, first cause, and notes.

    Of a wrapper, what it wraps; of a text, its first line.
    """
    notes = [*getattr(error, "__notes__", ())]
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
        notes += getattr(error, "__notes__", ())
    said = _first_line(error)
    first, seen = error, {id(error)}
    # An error may be raised from itself.
    while (cause := _cause(first)) is not None and id(cause) not in seen:
        first = cause
        seen.add(id(first))
    if first is not error and str(first) and str(first) not in said:
        said += f" (from {_first_line(first)})"
    return "; ".join([said, *(" ".join(str(note).split()) for note in notes)])


def _cause(error: BaseException) -> BaseException | None:
    inner = getattr(error, "inner_exception", None) or error.__cause__
    if isinstance(inner, BaseException):
        return inner
    # Dynamo raises its errors anew, the last of them with no word of where it came from.
    context = error.__context__
    of_dynamo = type(context).__module__.startswith("torch._dynamo")
    return context if of_dynamo and type(error).__module__.startswith("torch._dynamo") else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line that ends in a colon says nothing by itself.
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    if len(text) > 300:
        text = text[:299] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
