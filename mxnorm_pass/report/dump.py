"""What the pass did to a graph, for people to read: files under ``dump_dir``, and artifacts in
torch's structured trace (``TORCH_TRACE``), which tlparse shows beside Inductor's own.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._logging._internal import trace_structured
from torch.fx import Graph

from mxnorm_pass import compat
from mxnorm_pass.report.report import GraphReport, Report

log = logging.getLogger(__name__)

VARIABLE = "MXNORM_DUMP"

# Where a value is last used says nothing about what was rewritten, and moves with every edit.
_FREED = re.compile(r";  (\w+ = )+None$", re.MULTILINE)

_INDEX_HEAD = """# Graphs that mxnorm_pass saw

| graph | kind | sites | rewritten | declined | pass | files |
|---|---|---|---|---|---|---|
"""


def folders(configured: str | None) -> list[Path]:
    """Where to write: what the option names, and what the variable ``MXNORM_DUMP`` does."""
    return [Path(f) for f in dict.fromkeys((configured, os.environ.get(VARIABLE))) if f]


class Dump:
    """One graph before and after, its report and the difference.

    ``DIR/rank_<r>/graph_<n>/`` holds ``before.py``, ``after.py``, ``changes.diff`` and
    ``sites.json``; ``DIR/rank_<r>/index.md`` lists the graphs. Nothing is formatted where neither a
    folder nor torch's structured trace asks for it, and nothing that goes wrong here reaches the
    compile.
    """

    def __init__(self, configured: str | None, graph: Graph) -> None:
        self.roots = folders(configured)
        self.before = ""
        if self.roots or compat.structured_trace():
            self.before = _guarded(lambda: _code(graph)) or ""

    def after(self, graph: Graph, result: GraphReport) -> None:
        """Write and trace; ``graph`` is the rewritten one."""
        if self.before:
            _guarded(lambda: self._after(graph, result))

    def _after(self, graph: Graph, result: GraphReport) -> None:
        after = _code(graph)
        lines = difflib.unified_diff(
            _FREED.sub("", self.before).splitlines(),
            _FREED.sub("", after).splitlines(),
            "before.py",
            "after.py",
            lineterm="",
        )
        changes = "\n".join(lines) + "\n"
        trace(result, {"before": self.before, "after": after, "changes": changes})
        if self.roots:
            files = {"before.py": self.before, "after.py": after, "changes.diff": changes}
            files["sites.json"] = Report([result]).to_json()
            for root in self.roots:
                _guarded(functools.partial(_write, root, files, result))


def _write(root: Path, files: dict[str, str], result: GraphReport) -> None:
    rank = root / f"rank_{_rank()}"
    name = _new_folder(rank)
    for path, text in files.items():
        (rank / name / path).write_text(text, encoding="utf-8")
    index = rank / "index.md"
    kind = "training" if result.training else "inference"
    links = ", ".join(f"[{path}]({name}/{path})" for path in files)
    row = (
        f"| {name} | {kind} | {len(result.sites)} | {result.rewritten} | {result.declined} "
        f"| {result.seconds * 1e3:.0f} ms | {links} |\n"
    )
    # One write each, so that processes of one rank do not tear each other's rows.
    head = "" if index.exists() else _INDEX_HEAD
    with index.open("a", encoding="utf-8") as file:
        file.write(head + row)


def trace(result: GraphReport, graphs: dict[str, str] | None = None) -> None:
    """The report, and the graphs where they are known, as artifacts of the structured trace."""
    for name, text in (graphs or {}).items():
        _artifact(f"mxnorm_{name}", "string", text)
    _artifact("mxnorm_sites", "json", Report([result]).to_json())


def _artifact(name: str, encoding: str, text: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: text,
    )


def _code(graph: Graph) -> str:
    """The graph as code with shapes, strides and the lines of the model that it came from."""
    code: str = graph.python_code(
        "self", verbose=True, include_stride=True, include_device=True
    ).src
    return code


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _new_folder(rank: Path) -> str:
    """The next ``graph_<n>``; made by one process alone, whoever else writes here."""
    rank.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in rank.glob("graph_*"))
    while True:
        name = f"graph_{number:03d}"
        try:
            (rank / name).mkdir()
        except FileExistsError:
            number += 1
        else:
            return name


def _guarded(action: Callable[[], Any]) -> Any:
    """A full disk or a graph that cannot be printed must not break a compile."""
    try:
        return action()
    except Exception as error:
        log.warning(
            "the dump of a graph failed: %s", error, exc_info=not isinstance(error, OSError)
        )
        return None
