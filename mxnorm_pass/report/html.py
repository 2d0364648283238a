"""The report as one HTML file that needs nothing else: no network, no server, no other file.

The table and the pictures are made in the browser from the data in the file, a site's when it is
opened; Graphviz, compiled to WebAssembly, lays the pictures out and draws them.
"""

from __future__ import annotations

import base64
import gzip
import importlib.metadata
import json
import linecache
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mxnorm_pass.reasons import REASONS
from mxnorm_pass.report.picture import Interned, Line, Picture, PictureNode, Sources, View
from mxnorm_pass.report.text import consumers_text, spec_text

if TYPE_CHECKING:
    from mxnorm_pass.report.report import GraphReport, Report, SiteReport

ASSETS = Path(__file__).parent / "assets"
# Lines shown around a line of code, where its file is there and still says the same.
AROUND = 2


def render_html(report: Report) -> str:
    """The page, as text.

    Raises:
        ImportError: without jinja2, which torch brings.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("to_html() needs jinja2: pip install 'mxnorm_pass[report]'") from error
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    counts = Counter(site.reason for site in report.sites if site.reason)
    page: str = environment.get_template("report.html.j2").render(
        version=importlib.metadata.version("mxnorm_pass"),
        torch=torch.__version__,
        sites=len(report.sites),
        rewritten=report.rewritten,
        declined=len(report.sites) - report.rewritten,
        plain_casts=sum(graph.plain_casts for graph in report.graphs),
        seconds=sum(graph.seconds for graph in report.graphs),
        cached=any(graph.from_cache for graph in report.graphs),
        failures=any(graph.failure for graph in report.graphs),
        graphs=[_graph_row(i, graph) for i, graph in enumerate(report.graphs)],
        warnings=report.warnings,
        reasons=[
            {"code": code, "count": count, **_reason(code)} for code, count in counts.most_common()
        ],
        # Ours, or made safe by _script_json; everything else is escaped.
        css=Markup(_asset("report.css")),
        js=Markup(_script()),
        data=Markup(_script_json(payload(report))),
        viz=Markup(_viz()),
    )
    return page


def _graph_row(number: int, graph: GraphReport) -> dict[str, Any]:
    return {
        "number": number,
        "kind": "training" if graph.training else "inference",
        "sites": len(graph.sites),
        "rewritten": graph.rewritten,
        "declined": graph.declined,
        "plain_casts": graph.plain_casts,
        "seconds": graph.seconds,
        "from_cache": graph.from_cache,
        "failure": graph.failure,
    }


def _reason(code: str) -> dict[str, str]:
    # A report of another version may have reasons that this one does not know.
    what, advice = REASONS.get(code, ("a reason that this version does not know", "see the detail"))
    return {"what": what, "advice": advice}


def payload(report: Report) -> dict[str, Any]:
    """What the script of the page reads; what sites share is there once for all graphs."""
    shared = Sources()
    table = Interned(shared)
    sites = []
    keys: Counter[str] = Counter()
    for number, graph in enumerate(report.graphs):
        pictures, kernels = _merge(table, graph.sources)
        for site in graph.sites:
            # Recompiled graphs have sites of the same ids.
            keys[site.id] += 1
            key = site.id if keys[site.id] == 1 else f"{site.id}@{keys[site.id]}"
            sites.append(_site(site, key, number, pictures, kernels))
    return {
        "sites": sites,
        "graphs": ["training" if graph.training else "inference" for graph in report.graphs],
        "reasons": {s.reason: _reason(s.reason) for s in report.sites if s.reason},
        "pictures": [
            {
                "nodes": [
                    [n.op, n.value, n.inputs, n.role, n.mark, n.module, n.stack]
                    for n in picture.nodes
                ],
                "left_out": picture.left_out,
            }
            for picture in shared.pictures
        ],
        "lines": [[*_line(line), _context(line)] for line in shared.lines],
        "stacks": shared.stacks,
        "kernels": [[k.name, k.language, k.code] for k in shared.kernels],
    }


def _merge(table: Interned, own: Sources) -> tuple[list[int], list[int]]:
    """Where the pictures and the kernels of one graph are in the common tables."""
    shared = table.sources
    lines = [table.put(shared.lines, line) for line in own.lines]
    stacks = [table.put(shared.stacks, tuple(lines[i] for i in stack)) for stack in own.stacks]

    def moved(node: PictureNode) -> PictureNode:
        stack = None if node.stack is None else stacks[node.stack]
        return PictureNode(
            node.op, node.value, node.inputs, node.role, node.mark, node.module, stack
        )

    pictures = [
        table.put(shared.pictures, Picture(tuple(map(moved, p.nodes)), p.left_out))
        for p in own.pictures
    ]
    return pictures, [table.put(shared.kernels, kernel) for kernel in own.kernels]


def _site(
    site: SiteReport, key: str, graph: int, pictures: list[int], kernels: list[int]
) -> dict[str, Any]:
    def view(it: View | None) -> dict[str, Any] | None:
        return None if it is None else {"picture": pictures[it.picture], "names": it.names}

    return {
        "key": key,
        "id": site.id,
        "graph": graph,
        "norm": site.norm,
        "consumers": site.consumers,
        "readers": consumers_text(site),
        "also": site.also_read_by,
        "status": site.status,
        "reason": site.reason or "",
        "detail": site.detail,
        "node": site.node,
        "computed": site.computed,
        "expected": site.expected,
        "spec": site.spec,
        "format": spec_text(site),
        "kernel": str(site.spec.get("kernel", "")),
        "before": view(site.before),
        "after": view(site.after),
        "kernels": [{"kernel": kernels[k.kernel], "call": k.call} for k in site.kernels],
    }


def _line(line: Line) -> list[Any]:
    return [line.file, line.line, line.function, line.text]


def _context(line: Line) -> list[list[Any]]:
    """``[number, text]`` of the lines around; none where the file is gone or has changed."""
    if not line.text or linecache.getline(line.file, line.line).strip() != line.text:
        return []
    numbers = range(max(1, line.line - AROUND), line.line + AROUND + 1)
    found = [(n, linecache.getline(line.file, n)) for n in numbers]
    return [[n, text.rstrip("\n")] for n, text in found if text]


def _script_json(content: Any) -> str:
    """JSON that cannot end or comment out the script element that holds it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    # What no UTF-8 file can hold.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    parts = "\n".join(map(_asset, ("common.js", "pictures.js", "report.js")))
    return f'"use strict";\n(() => {{\n{parts}}})();'


@cache
def _viz() -> str:
    packed = gzip.compress((ASSETS / "viz-global.js").read_bytes(), mtime=0)
    return base64.b64encode(packed).decode("ascii")
