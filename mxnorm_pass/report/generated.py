"""The generated code of each site: which kernels of a compiled graph hold its op.

Inductor keeps, with a compiled graph, its code and which graph nodes each kernel came from
(provenance tracking); both come out of its cache as well. The op's decomposition is inlined under
names that begin with the op's own (``ops/lowering.py``), so a kernel that holds a part of it is
found by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from mxnorm_pass.ops import OPS
from mxnorm_pass.report.picture import Interned, Kernel, Launch
from mxnorm_pass.report.report import GraphReport, SiteReport

log = logging.getLogger(__name__)

# A kernel is shown whole up to this; a graph without code generation is one call an operator.
MAX_CODE = 60_000
MAX_CALL = 12
_MAPPING = "cppCodeToPost"


class Collector:
    """Inductor's inner compile, with what it generated kept.

    Attributes:
        code: per compiled graph, its code and the nodes behind each kernel.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self.code: list[tuple[str, dict[str, list[str]]]] = []

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile, and look at the result."""
        ours = any(node.target in OPS for node in gm.graph.nodes)
        with tracking() if ours else contextlib.nullcontext():
            compiled = self._inner(gm, example_inputs, **kwargs)
        try:
            source = getattr(compiled, "source_code", None)
            mapping = getattr(compiled, "inductor_provenance_mapping_str", None)
            if ours and isinstance(source, str) and isinstance(mapping, str):
                self.code.append((source, json.loads(mapping).get(_MAPPING, {})))
        except Exception:
            log.warning("the generated code could not be read", exc_info=True)
        return compiled


@contextlib.contextmanager
def tracking() -> Iterator[None]:
    """Inductor's record of which nodes a kernel came from, at least at its basic level."""
    wanted = "trace.provenance_tracking_level"
    level = torch._inductor.config.trace.provenance_tracking_level
    with torch._inductor.config.patch({wanted: level or 2}):
        yield


def attach(graphs: Iterable[GraphReport], code: Iterable[tuple[str, dict[str, list[str]]]]) -> None:
    """Give each rewritten site its kernels; without any where nothing is known."""
    for graph in graphs:
        table = Interned(graph.sources)
        for source, mapping in code:
            try:
                _attach(graph, table, source, mapping)
            except Exception:
                log.warning("the generated code could not be read", exc_info=True)


def _attach(
    graph: GraphReport, table: Interned, source: str, mapping: dict[str, list[str]]
) -> None:
    definitions = dict(_definitions(source))
    calls = dict(_calls(source))
    for site in graph.sites:
        names = _ops(graph, site)
        for kernel, nodes in mapping.items():
            if not any(_of(node, name) for node in nodes for name in names):
                continue
            name = kernel.rpartition(":")[0]
            call = calls.get(kernel, "")
            found = definitions.get(name) or Kernel(name, "python", "")
            launch = Launch(table.put(graph.sources.kernels, found), call)
            if launch not in site.kernels:
                site.kernels.append(launch)


def _ops(graph: GraphReport, site: SiteReport) -> list[str]:
    """Names of the op of a site, and of the pass ahead of it."""
    if site.after is None:
        return []
    nodes = graph.sources.pictures[site.after.picture].nodes
    return [
        name
        for name, node in zip(site.after.names, nodes, strict=True)
        if node.role == "rewrite" and node.op.startswith("mxnorm.")
    ]


def _of(node: str, op: str) -> bool:
    """``rmsnorm_mxquant_3`` itself, or what its decomposition was inlined as."""
    return node == op or node.startswith(f"{op}__")


_DEFINITION = re.compile(
    r"^(?P<name>\w+) = async_compile\.(?P<kind>\w+)\((?P<arguments>.*?)^'''(?P<rest>[^\n]*)\)$",
    re.MULTILINE | re.DOTALL,
)
_KINDS = {"cpp_pybinding": "c++", "cpp": "c++", "triton": "triton"}


def _definitions(source: str) -> Iterator[tuple[str, Kernel]]:
    for match in _DEFINITION.finditer(source):
        code = match["arguments"].partition("'''")[2].strip("\n")
        language = _KINDS.get(match["kind"], match["kind"])
        yield match["name"], Kernel(match["name"], language, _short(code))


_HANDLE = re.compile(r"^\s*# \[Provenance debug handles\] (\S+:\d+)\s*$")


def _calls(source: str) -> Iterator[tuple[str, str]]:
    """The lines behind each handle that Inductor writes in front of a call."""
    lines = source.splitlines()
    for i, line in enumerate(lines):
        match = _HANDLE.match(line)
        if match is None:
            continue
        call: list[str] = []
        for text in lines[i + 1 :]:
            text = text.strip()
            if not call and (text.startswith("#") or not text):
                continue
            call.append(text)
            # A stream may be asked for ahead of the launch, and a call may run over lines.
            joined = "".join(call)
            if match[1].rpartition(":")[0] in joined and joined.count("(") <= joined.count(")"):
                break
            if len(call) == MAX_CALL:
                break
        yield match[1], _short("\n".join(call))


def _short(code: str) -> str:
    return code if len(code) <= MAX_CODE else code[:MAX_CODE] + "\n… (cut off)"
