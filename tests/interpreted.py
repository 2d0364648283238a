"""Kernels under Triton's interpreter, in a child process.

``TRITON_INTERPRET`` decides for a whole process, when kernels are defined. So the interpreter has
a process of its own, started once per test module:

    @pytest.fixture(scope="module")
    def interpreter():
        with Interpreter() as running:
            yield running

    interpreter.call("e8m0_byte", absmax, "e4m3", "floor", 0)

calls a function of ``interpreted_kernels.py`` there. Arguments and results go through pipes as
``torch.save`` writes them: tensors with their strides. What is raised there is raised here, with
its traceback.
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch


class InterpreterFailed(Exception):
    """The kernel raised, or the process died; the text says which and where."""


def _send(pipe: BinaryIO, message: Any) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pipe.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    """The next message; EOFError where the other end is closed."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    # Both ends are this repository's own code.
    return torch.load(io.BytesIO(body), weights_only=False)


class Interpreter:
    """The child process, as a context."""

    def __enter__(self) -> Interpreter:
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                "TRITON_INTERPRET": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
        )
        return self

    def __exit__(self, *_: object) -> None:
        # The child ends at the end of its input.
        cast(BinaryIO, self._process.stdin).close()
        cast(BinaryIO, self._process.stdout).close()
        self._process.wait(60)
        self._errors.close()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """``interpreted_kernels.<name>(*args, **options)``."""
        try:
            _send(cast(BinaryIO, self._process.stdin), (name, args, options))
            failure, result = _receive(cast(BinaryIO, self._process.stdout))
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait(60)
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")[-4000:]
            raise InterpreterFailed(f"the process ended with {code}:\n{text}") from error
        if failure is not None:
            raise InterpreterFailed(failure)
        return result


def _serve() -> None:
    # What a kernel prints must not get among the answers.
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    import interpreted_kernels

    while True:
        try:
            name, args, options = _receive(requests)
        except EOFError:
            return
        try:
            answer = (None, getattr(interpreted_kernels, name)(*args, **options))
        except Exception:
            answer = (traceback.format_exc(), None)
        _send(answers, answer)


if __name__ == "__main__":
    _serve()
