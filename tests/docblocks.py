"""Runs the code blocks of a document, by Sybil: it finds the blocks, knows the directives that
leave some out, and gives tracebacks the document's own line numbers.

* ``python`` blocks of a document run in order and share their names; with ``title="file.py"`` they
  are written to that file instead.
* ``bash`` blocks run line by line: ``mxnorm`` in this process, ``python`` in another one, ``make``
  as a dry run, which says whether the target exists. A comment ``# exits with 1`` says so.
* A ``text`` block right after one of those is what it prints; ``...`` stands for anything.
* ``json`` blocks are parsed.
* ``<!-- skip: next if(not gpu, reason="needs a GPU") -->`` leaves the next block out.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

import mxnorm_pass
from mxnorm_pass.cli import main

ROOT = Path(__file__).parent.parent
LANGUAGES = ("python", "bash", "text", "json", "")
_FENCE = re.compile(r'[ ]?(?P<language>[^\s`]*)(?:[ ]+title="(?P<title>[^"]+)")?[^\n]*\n')
_OUTPUT, _END = "_printed", "_printed_by"
_run_python = PythonEvaluator()


def evaluate(example: Example) -> None:
    language = example.region.lexemes["language"]
    if language not in LANGUAGES:
        allowed = ", ".join(filter(None, LANGUAGES))
        raise AssertionError(f"a block of {language!r}: allowed are {allowed}")
    title = example.region.lexemes["title"]
    if language in ("text", ""):
        compare(example)
    elif language == "json":
        json.loads(example.parsed)
    elif title:
        Path(title).write_text(example.parsed)
        importlib.invalidate_caches()
    else:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            (_run_python if language == "python" else run_bash)(example)
        example.namespace[_OUTPUT] = printed.getvalue()
        example.namespace[_END] = example.end


def compare(example: Example) -> None:
    """With what the block before printed, where nothing but empty lines stands between."""
    end = example.namespace.get(_END)
    if end is None or example.document.text[end : example.start].strip():
        return
    seen = example.namespace[_OUTPUT]
    seen = "\n".join(line.rstrip() for line in seen.strip().splitlines()) + "\n"
    wanted = example.parsed.strip() + "\n"
    if not doctest.OutputChecker().check_output(wanted, seen, doctest.ELLIPSIS):
        raise AssertionError(f"shown:\n{wanted}\nprinted:\n{seen}")


def run_bash(example: Example) -> None:
    for line in example.parsed.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition(" #")
        words = shlex.split(command, comments=True)
        if not words:
            continue
        expected = re.search(r"exits with (\d+)", comment)
        code = run_command(words, command)
        assert code == int(expected[1] if expected else 0), f"{line!r} exits with {code}"


def run_command(words: list[str], line: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        while "=" in words[0]:
            patch.setenv(*words.pop(0).split("=", 1))
        if words[0] == "mxnorm" and not set(line) & set("|<>$&;"):
            try:
                return main(words[1:])
            except SystemExit as leave:
                return int(leave.code or 0)
        if words[0] == "make":
            words = ["make", "-n", "-C", str(ROOT), *words[1:]]
        elif words[0] == "python":
            words[0] = sys.executable
        elif words[0] != "mxnorm":
            raise AssertionError(f"{line!r}: allowed are mxnorm, python and make")
        # Paths of the repository are written as seen from its root.
        words = [str(ROOT / w) if w.startswith(("examples/", "benchmarks/")) else w for w in words]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        print(done.stdout)
        print(done.stderr, file=sys.stderr)
        return done.returncode


def _blocks(document: Document) -> Iterator[Region]:
    for region in RawFencedCodeBlockLexer(_FENCE)(document):
        region.parsed = region.lexemes["source"]
        region.evaluator = evaluate
        yield region


def parse(path: Path) -> Document:
    return Sybil(parsers=[_blocks, SkipParser()], path=str(path.parent)).parse(path)


@contextlib.contextmanager
def fresh_module(name: str) -> Iterator[types.ModuleType]:
    """A module to run in: Dynamo looks names up in the module that a function says it is of.

    The current folder is on the path, as at a prompt. Afterwards, what was imported from it is as
    if it had never been.
    """
    module = types.ModuleType(name)
    sys.modules[name], path = module, list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield module
    finally:
        sys.path[:] = path
        here = str(Path.cwd())
        for key, other in list(sys.modules.items()):
            if key == name or str(getattr(other, "__file__", None)).startswith(here + "/"):
                del sys.modules[key]


def run(path: Path, left_out: Callable[[int, str], None] = lambda line, why: None) -> int:
    """Run all blocks of a document; how many ran. ``left_out`` is told of the others."""
    document = parse(path)
    for name in ("mxnorm", "mxnorm_exact"):
        # The backends by name report on the whole process.
        mxnorm_pass.last_report(name).graphs.clear()
    count = 0
    with fresh_module("document_" + re.sub(r"\W", "_", path.stem).lower()) as module:
        document.namespace = vars(module)
        document.namespace["gpu"] = torch.cuda.is_available()
        for example in document.examples():
            try:
                example.evaluate()
                count += "language" in example.region.lexemes
            except SkipTest as skip:
                left_out(example.line, str(skip))
    return count
