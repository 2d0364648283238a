"""Pieces of graphs as data: nodes, where their code stands, and what the rewrite did to them.

A model repeats its layers, and a report of it would repeat their pictures. What equal layers share
is therefore kept once per graph, by number: a picture without names, a line of source, a stack of
lines, a kernel. A site keeps what is its own: which picture, and the names of its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar

Role = Literal[
    "input",
    "row",
    "gain",
    "norm",
    "pick",
    "cast",
    "dequantise",
    "matmul",
    "weight cast",
    "column cast",
    "backward",
    "reader",
    "rewrite",
    "context",
]
Mark = Literal["", "removed", "changed", "new", "failed"]


@dataclass(frozen=True)
class PictureNode:
    """One node of a graph.

    Attributes:
        op: what it calls (``aten.mul.Tensor``), or the kind of a node that calls nothing.
        value: dtype and shape of its result (``bfloat16[64, 128]``); several for several results.
        inputs: the nodes of the picture that it reads, by their place in it.
        role: what it is to the site.
        mark: before the rewrite ``removed`` or ``changed`` (stays, and reads or gives something
            else afterwards), after it ``new`` or ``changed``; ``failed``: where a declined site
            failed.
        module: module path, with ``~`` for the module that holds the norm; "" where unknown.
        stack: the lines of code it comes from, by their place in :attr:`Sources.stacks`; None where
            unknown.
    """

    op: str
    value: str
    inputs: tuple[int, ...] = ()
    role: Role = "context"
    mark: Mark = ""
    module: str = ""
    stack: int | None = None


@dataclass(frozen=True)
class Picture:
    """A piece of a graph, in graph order; ``left_out`` counts nodes beyond the limit of size."""

    nodes: tuple[PictureNode, ...]
    left_out: int = 0


@dataclass
class View:
    """A picture of one site: its place in :attr:`Sources.pictures`, and the nodes' names."""

    picture: int
    names: list[str]


@dataclass(frozen=True)
class Line:
    """A line of code: ``text`` is what it said when the model was traced."""

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True)
class Kernel:
    """Generated code: ``language`` is ``python``, ``triton`` or ``c++``."""

    name: str
    language: str
    code: str


@dataclass
class Launch:
    """A kernel of one site: its place in :attr:`Sources.kernels`, and the lines that call it."""

    kernel: int
    call: str


@dataclass
class Sources:
    """What the sites of one graph share.

    Attributes:
        pictures: without names.
        lines: of source code.
        stacks: lines from the outermost call to the innermost, by their place in ``lines``.
        kernels: generated code.
    """

    pictures: list[Picture] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    stacks: list[tuple[int, ...]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Sources:
        """From JSON."""
        pictures = [
            Picture(tuple(_node(node) for node in picture["nodes"]), picture["left_out"])
            for picture in content["pictures"]
        ]
        return cls(
            pictures,
            [Line(**line) for line in content["lines"]],
            [tuple(stack) for stack in content["stacks"]],
            [Kernel(**kernel) for kernel in content["kernels"]],
        )


def _node(content: dict[str, Any]) -> PictureNode:
    return PictureNode(**{**content, "inputs": tuple(content["inputs"])})


T = TypeVar("T", bound=Hashable)


class Interned:
    """Puts things into :class:`Sources`, equal ones once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._places: dict[tuple[int, Hashable], int] = {}
        self._stacks: dict[str, int | None] = {}

    def put(self, table: list[T], item: T) -> int:
        """The place of ``item`` in one of the tables."""
        key = (id(table), item)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(table)
            table.append(item)
        return place

    def stack(self, trace: object) -> int | None:
        """The place of a stack trace as torch writes it into ``node.meta``."""
        if not isinstance(trace, str) or not trace:
            return None
        if trace not in self._stacks:
            lines = parse_stack(trace)
            found = tuple(self.put(self.sources.lines, line) for line in lines)
            self._stacks[trace] = self.put(self.sources.stacks, found) if found else None
        return self._stacks[trace]


_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$')


@lru_cache(maxsize=4096)
def parse_stack(trace: str) -> tuple[Line, ...]:
    """The lines of a stack trace, outermost first. A line without its text is kept without."""
    lines: list[Line] = []
    rows = trace.split("\n")
    for i, row in enumerate(rows):
        frame = _FRAME.match(row)
        if frame is None:
            continue
        below = rows[i + 1] if i + 1 < len(rows) else ""
        text = "" if _FRAME.match(below) else below.strip()
        lines.append(Line(frame[1], int(frame[2]), frame[3], text))
    return tuple(lines)
