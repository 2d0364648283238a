"""What a user gives, files and arguments: read, or refused with what is wrong and allowed."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadInput(ValueError):
    """A mistake in what a command was given; its text is all that the user needs to see."""


def told(program: str, command: Callable[[], int]) -> int:
    """The status of a command; 2 and one line for a mistake, as argparse says those it finds."""
    try:
        return command()
    except BadInput as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2


# --- files ----------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system or a parser has against a file, as a :class:`BadInput` that names it."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}, line {error.lineno}: cut off or no JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: no text in UTF-8 from byte {error.start} on") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """An object.

    Raises:
        BadInput: where there is none.
    """
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise BadInput(f"{path}: a {type(found).__name__}, expected an object")
    return found


@dataclass(frozen=True)
class Row:
    """One line of a CSV file, by column."""

    path: Path
    line: int
    values: dict[str, str]

    def bad(self, what: str) -> BadInput:
        return BadInput(f"{self.path}, line {self.line}: {what}")

    def whole(self, column: str) -> int:
        try:
            return int(self.values[column])
        except ValueError:
            raise self.bad(
                f"{column} is {self.values[column]!r}, expected a whole number"
            ) from None

    def number(self, column: str) -> float:
        try:
            return float(self.values[column])
        except ValueError:
            raise self.bad(f"{column} is {self.values[column]!r}, expected a number") from None


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Lines of a CSV file that has these columns, and may have more.

    None of a file with nothing but an empty line, which is how a table without columns is written.

    Raises:
        BadInput: where a column, a value or the end of the last line is missing.
    """
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    if text == "\n":
        return
    if not text.endswith("\n"):
        last = text.count("\n") + 1
        raise BadInput(f"{path}, line {last}: cut off, the line has no end")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        head = next(reader)
        missing = [name for name in columns if name not in head]
        if missing:
            raise BadInput(
                f"{path}, line 1: column {', '.join(missing)} missing, expected "
                f"{', '.join(columns)}"
            )
        for values in reader:
            if len(values) != len(head):
                raise BadInput(
                    f"{path}, line {reader.line_num}: {len(values)} values, expected {len(head)}: "
                    f"{', '.join(head)}"
                )
            yield Row(path, reader.line_num, dict(zip(head, values, strict=True)))
    except csv.Error as error:
        raise BadInput(f"{path}, line {reader.line_num}: no CSV: {error}") from None


def file_to_write(path: Path) -> None:
    """Refuses what no file can be written to."""
    if path.is_dir():
        raise BadInput(f"{path}: a folder, expected the name of a file")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{path}: cannot be written to")


def folder_to_write(path: Path) -> None:
    """Refuses what no folder can be."""
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise BadInput(f"{path}: {part} is a file, expected a folder or nothing yet")
            if not os.access(part, os.W_OK):
                raise BadInput(f"{path}: {part} cannot be written to")
            return


# --- arguments ------------------------------------------------------------------------------------


def whole(text: str) -> int:
    """A count, also as 30e6."""
    try:
        value = float(text)
        if value == int(value) and value >= 1:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text}: expected a whole number above zero")


def seed(text: str) -> int:
    if text.isdecimal() and int(text) < 2**32:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 0 to 2**32 - 1")


def number(text: str) -> float:
    """Not a number where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def rate(text: str) -> float:
    value = number(text)
    if 1e-30 <= value <= 1e30:  # far within what torch holds in float32
        return value
    raise argparse.ArgumentTypeError(f"{text}: expected a number above zero, 1e-30 to 1e30")


def duration(text: str) -> float:
    value = number(text)
    if value >= 0:
        return value
    raise argparse.ArgumentTypeError(f"{text}: expected seconds, zero or more")


def device(text: str) -> str:
    import torch

    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda: torch sees no GPU here; allowed is cpu")
    return text


class Distinct(argparse.Action):
    """Values that are each given once; numbers as files have them, in six digits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        said = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
        twice = [v for v in dict.fromkeys(said) if said.count(v) > 1]
        if twice:
            raise argparse.ArgumentError(self, f"{', '.join(twice)}: there more than once")
        setattr(namespace, self.dest, values)
