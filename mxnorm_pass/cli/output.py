"""What a command prints: its result on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WIDEST = 100


@dataclass
class Output:
    """Where a command's result goes.

    Attributes:
        as_json: print JSON and nothing else.
    """

    as_json: bool = False

    @property
    def width(self) -> int:
        """Columns for tables: those of the terminal, from 40 to 100; 100 where there is none."""
        return max(40, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))

    def result(self, as_json: Callable[[], str], as_text: str) -> None:
        """Print the result; called once."""
        print(as_json() if self.as_json else as_text)

    def note(self, text: str) -> None:
        """A line beside the result, on stderr."""
        print(f"mxnorm: {text}", file=sys.stderr)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """What models and libraries print meanwhile goes to stderr, on whatever way they print."""
        sys.stdout.flush()
        try:
            # Not sys.stdout's own number: C code writes to the first.
            kept = os.dup(1)
            os.dup2(2, 1)
        except OSError:
            # One of them is closed.
            with contextlib.redirect_stdout(sys.stderr):
                yield
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
