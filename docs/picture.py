"""The picture of one rewrite: ``docs/img/rewrite.dot`` and, by Graphviz, ``rewrite.svg``.

    python docs/picture.py             # traces the model, writes both (needs the program dot)

The graphs are those that the pass saw and left behind in a real compile: a torch.nn.RMSNorm before
a linear that torchao quantised to MXFP8, in inference. What the rewrite does not touch (reading
codes back to bfloat16, which an emulated matrix product does) is drawn as one box.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch
from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import mxnorm_pass
from mxnorm_pass import Report
from mxnorm_pass.report.picture import Picture

IMAGES = Path(__file__).parent / "img"
FILL = {"removed": "#f8d0d0", "new": "#cdeccd", "changed": "#fff2c0", "": "#f0f0f0"}
SECTIONS = {"norm": "RMSNorm", "cast": "MX cast", "rewrite": "one op"}
COLLAPSED = ("dequantise",)


def trace() -> Report:
    """What the pass does to a norm and a linear."""
    torch.manual_seed(0)
    norm, linear = torch.nn.RMSNorm(4096), torch.nn.Linear(4096, 1024, bias=False)
    model = torch.nn.Sequential(norm, linear).bfloat16()
    mxfp8 = MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED)
    quantize_(model, mxfp8)
    x = torch.randn(64, 4096, dtype=torch.bfloat16)
    return mxnorm_pass.explain(model, x, training=False)


def _label(op: str, value: str) -> str:
    """``mul`` and ``float32[64, 4096]`` in small print."""
    parts = op.split(".")
    short = parts[1] if parts[0] in ("aten", "prims") and len(parts) > 1 else op
    short = short.removesuffix(".default")
    value = value.replace("float8_", "").replace("], ", "]<BR/>")
    small = f'<BR/><FONT POINT-SIZE="8">{value}</FONT>' if value else ""
    return f"<{short}{small}>"


def _column(picture: Picture, key: str, title: str) -> list[str]:
    """One side: a cluster per section, and the edges."""
    name = {i: f"{key}{i}" for i in range(len(picture.nodes))}
    boxes: dict[str, list[str]] = {}
    hidden = {i for i, n in enumerate(picture.nodes) if n.op.startswith("aten.scalar_tensor")}
    for role in COLLAPSED:
        inside = [i for i, n in enumerate(picture.nodes) if n.role == role]
        if inside:
            label = f'<{role}<BR/><FONT POINT-SIZE="8">{len(inside)} nodes</FONT>>'
            line = f'{key}_{role} [label={label}, fillcolor="{FILL[""]}"];'
            boxes.setdefault("", []).append(line)
            name.update({i: f"{key}_{role}" for i in inside})
    for i, node in enumerate(picture.nodes):
        if i in hidden or node.role in COLLAPSED:
            continue
        op = {"row": "x", "gain": "gain", "input": "weight, dequantised"}.get(node.role, node.op)
        bold = ", penwidth=2" if node.op.startswith("mxnorm.") else ""
        line = f'{name[i]} [label={_label(op, node.value)}, fillcolor="{FILL[node.mark]}"{bold}];'
        boxes.setdefault(SECTIONS.get(node.role, ""), []).append(line)
    look = 'style=rounded; color="#888888"; margin=12;'
    lines = [f"subgraph cluster_{key} {{", f'  label="{title}"; {look}']
    for place, (section, nodes) in enumerate(boxes.items()):
        if section:
            lines.append(f"  subgraph cluster_{key}_{place} {{")
            lines.append(f'    label="{section}"; style=dashed; color="#aaaaaa";')
        lines += [f"    {line}" for line in nodes]
        if section:
            lines.append("  }")
    edges = {
        (name[source], name[i]): None
        for i, node in enumerate(picture.nodes)
        for source in node.inputs
        if source not in hidden and name[source] != name[i]
    }
    lines += [f"  {a} -> {b};" for a, b in edges]
    return [*lines, "}"]


def dot(report: Report) -> str:
    """Both sides of the first site as a graph in the language of Graphviz."""
    (graph,) = report.graphs
    site = graph.sites[0]
    assert site.before is not None and site.after is not None
    sides = {"before": site.before, "after": site.after}
    lines = [
        "digraph rewrite {",
        'graph [fontname="Helvetica", fontsize=12, labeljust=l, nodesep=0.15, ranksep=0.2];',
        'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10,'
        ' height=0.2, margin="0.08,0.03"];',
        'edge [arrowsize=0.5, color="#555555"];',
    ]
    for key, view in sides.items():
        picture = graph.sources.pictures[view.picture]
        count = len(picture.nodes)
        lines += _column(picture, key, f"{key}: {count} nodes")
    return "\n".join([*lines, "}", ""])


def svg(source: str) -> str:
    """Drawn by Graphviz; the first comment says from which source."""
    command = ["dot", "-Tsvg"]
    drawn = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    text = drawn.stdout[drawn.stdout.index("<svg") :]
    lines = [line.rstrip() for line in text.splitlines()]
    return f"<!-- {digest(source)} -->\n" + "\n".join(lines) + "\n"


def digest(source: str) -> str:
    """What ties the drawing to its source."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def main() -> int:
    """Write both files."""
    source = dot(trace())
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "rewrite.dot").write_text(source)
    (IMAGES / "rewrite.svg").write_text(svg(source))
    print(f"wrote {IMAGES / 'rewrite.dot'} and {IMAGES / 'rewrite.svg'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
