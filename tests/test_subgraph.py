"""The pictures of sites against the graphs themselves: nothing missing, nothing made up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from compiling import graphs
from models import hand_model, inference_block, rows, training_block
from test_casts import block_graph
from torch import nn
from torch.fx import Graph
from tracing import rewrite

from mxnorm_pass import MXNormConfig, MXNormPass, Report, explain
from mxnorm_pass.ops import ADD_OP, OP
from mxnorm_pass.report import GraphReport, extent, subgraph
from mxnorm_pass.report.picture import Picture, parse_stack
from mxnorm_pass.report.report import SiteReport


def nodes(result: GraphReport, site: SiteReport, side: str) -> dict[str, Any]:
    """Nodes of a picture by name."""
    view = getattr(site, side)
    picture = result.sources.pictures[view.picture]
    assert len(view.names) == len(set(view.names)) == len(picture.nodes)
    return dict(zip(view.names, picture.nodes, strict=True))


def marked(result: GraphReport, side: str, mark: str) -> set[str]:
    """Names of the nodes with a mark, over all sites."""
    found: set[str] = set()
    for site in result.sites:
        if getattr(site, side) is not None:
            found |= {n for n, node in nodes(result, site, side).items() if node.mark == mark}
    return found


def assert_true_to(graph: Graph, result: GraphReport, side: str) -> None:
    """Ops, values and edges are those of the graph."""
    by_name = {node.name: node for node in graph.nodes}
    for site in result.sites:
        view = getattr(site, side)
        for name, drawn in nodes(result, site, side).items():
            node = by_name[name]
            val = node.meta["val"]
            if isinstance(val, torch.Tensor):
                dtype = str(val.dtype).removeprefix("torch.")
                assert drawn.value == f"{dtype}[{', '.join(map(str, val.shape))}]"
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                assert drawn.op == str(node.target)
            if drawn.role == "input":
                continue
            reads = {view.names[i] for i in drawn.inputs}
            inside = {n.name for n in node.all_input_nodes} & set(view.names)
            assert reads == inside, name


def names(graph: Graph) -> set[str]:
    return {node.name for node in graph.nodes}


@pytest.mark.parametrize("case", ["inference", "residual", "training"])
def test_pictures_are_the_graph(case: str) -> None:
    """Every node that the rewrite removed or put in is in a picture, marked so."""
    if case == "residual":
        got = graphs(hand_model(64), rows(32, 64, dtype=torch.float32), training=False)
    elif case == "inference":
        got = graphs(inference_block("llama", k=64, widths=(64, 32)), rows(32, 64), training=False)
    else:
        got = graphs(training_block("torch", k=64, widths=(64,)), rows(32, 64).requires_grad_())
    result, graph_before, graph_after = got.report.graphs[0], got.before[0], got.after[0]
    assert result.rewritten == len(result.sites) > 0
    before, after = names(graph_before), names(graph_after)
    assert marked(result, "before", "removed") == before - after
    assert marked(result, "after", "new") == after - before
    for side, graph in (("before", graph_before), ("after", graph_after)):
        assert_true_to(graph, result, side)
    for site in result.sites:
        old, new = nodes(result, site, "before"), nodes(result, site, "after")
        roles = {node.role for node in old.values()}
        assert {"row", "norm", "cast", "dequantise", "matmul"} <= roles
        assert sum(node.op in (str(OP), str(ADD_OP)) for node in new.values()) == 1
        assert ("weight cast" in roles) == (site.spec["gain_at"] == "fold") == (case == "training")
        if case == "training":
            assert any(node.role == "backward" for node in old.values())
        # What stays and reads the op now is marked as changed on both sides.
        for mine in (old, new):
            changed = {n for n, node in mine.items() if node.mark == "changed"}
            assert changed and changed <= before & after


def test_equal_layers_share_their_pictures() -> None:
    """Five layers take no more pictures than four, and each site keeps its own names."""
    counts = {}
    for layers in (4, 5):
        result = rewrite(block_graph(rows(32, 64), 64, layers=layers), MXNormConfig()).result
        counts[layers] = len(result.sources.pictures)
        own = [tuple(site.before.names) for site in result.sites if site.before]
        assert len(set(own)) == layers
    assert counts[4] == counts[5] < 8


def test_lines_of_code() -> None:
    """The norm's nodes lead to the line of the model that wrote them."""
    report = explain(inference_block("llama", widths=(64,)), rows(32, 128), training=False)
    result = report.graphs[0]
    sources = result.sources
    found = {}
    for name, node in nodes(result, report.sites[0], "before").items():
        if node.role == "norm":
            assert node.stack is not None, name
            line = sources.lines[sources.stacks[node.stack][-1]]
            assert line.file.endswith("models.py") and line.function == "llama_form"
            found[node.op] = line.text
    assert "mean(-1, keepdim=True)" in found["aten.mean.dim"]
    assert found["aten.mul.Tensor"] == "return w * h.to(x.dtype)"


def test_stack_traces_are_read() -> None:
    text = 'File "/a b/c.py", line 3, in f\n    x = 1\n  File "d.py", line 4, in <lambda>\n'
    first, second = parse_stack(text)
    assert (first.file, first.line, first.function, first.text) == ("/a b/c.py", 3, "f", "x = 1")
    assert (second.file, second.line, second.function, second.text) == ("d.py", 4, "<lambda>", "")
    assert parse_stack("nothing of the kind") == ()


class NearMiss(nn.Linear):
    """A scale that is no known rule: floor of the absmax over 400 instead of a power of two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.float().unflatten(-1, (-1, 32))
        absmax = blocks.abs().amax(-1, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(absmax / 400.0))).clamp(min=2.0**-126)
        codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return nn.functional.linear((codes.float() * scale).flatten(-2).to(x.dtype), self.weight)


def test_declined_sites_show_where() -> None:
    """The node that the report names is marked in the picture; what was chosen has none."""
    model = nn.Sequential(nn.RMSNorm(64), NearMiss(64, 64, bias=False))
    x = rows(32, 64, dtype=torch.float32)
    result = graphs(model, x, training=False).report.graphs[0]
    (site,) = result.sites
    assert site.reason == "scale_rule" and site.after is None
    drawn = nodes(result, site, "before")
    assert [n for n, node in drawn.items() if node.mark == "failed"] == [site.node]
    assert {"aten.mean.dim", "aten.log2.default", "aten.mm.default"} <= {
        node.op for node in drawn.values()
    }
    result = rewrite(block_graph(rows(32, 64), 64, layers=1), MXNormConfig(exclude=("*",))).result
    (site,) = result.sites
    assert site.reason == "excluded"
    assert {node.mark for node in nodes(result, site, "before").values()} == {""}


def test_a_failure_costs_a_picture_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(site: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(subgraph, "of_site", broken)
    gm = block_graph(rows(32, 64), 64, layers=1)
    with caplog.at_level("WARNING", logger="mxnorm_pass"):
        result = MXNormPass(MXNormConfig(strict=True)).apply(gm.graph)
    assert result.rewritten == 1 and result.failure is None
    assert result.sites[0].before is None and result.sites[0].after is None
    assert any("no picture" in record.getMessage() for record in caplog.records)


def test_pictures_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (extent, subgraph):
        monkeypatch.setattr(module, "LIMIT", 30)
    result = rewrite(block_graph(rows(32, 64), 64, layers=1), MXNormConfig()).result
    assert result.rewritten == 1
    assert all(len(picture.nodes) <= 30 for picture in result.sources.pictures)


def test_json_brings_pictures_back() -> None:
    both = rewrite(block_graph(rows(32, 64), 64, layers=2), MXNormConfig())
    text = both.report.to_json()
    again = Report.from_json(text)
    assert again == both.report
    assert isinstance(again.graphs[0].sources.pictures[0], Picture)
    assert json.loads(again.to_json()) == json.loads(text)
