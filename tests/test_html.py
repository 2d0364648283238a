"""The HTML report in a real browser: what a reader sees and does, and that nothing else happens."""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Opened, chromium, open_page
from models import HandLinear, llama, quantize_inference_, rows, tokens, wrap_training_
from test_subgraph import NearMiss, nodes
from torch import nn

from mxnorm_pass import MXNormConfig, Report, explain
from mxnorm_pass.reasons import REASONS
from mxnorm_pass.report import GraphReport, SiteReport
from mxnorm_pass.report import html as page_of
from mxnorm_pass.report.picture import Kernel, Launch, Line, Picture, PictureNode, Sources, View


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


class Mixed(nn.Module):
    """A site that is rewritten, one of an unknown scale rule, a LayerNorm, and one left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.good, self.near, self.off = (nn.RMSNorm(64) for _ in range(3))
        self.centred = nn.LayerNorm(64)
        self.linears = nn.ModuleDict(
            {
                "good": HandLinear(64, 32, bias=False),
                "near": NearMiss(64, 32, bias=False),
                "off": HandLinear(64, 32, bias=False),
                "centred": HandLinear(64, 32, bias=False),
            }
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [linear(getattr(self, name)(x)) for name, linear in self.linears.items()]


@pytest.fixture(scope="module")
def mixed() -> Report:
    x = rows(32, 64, dtype=torch.float32)
    return explain(Mixed(), x, training=False, config=MXNormConfig(exclude=("off",)))


@pytest.fixture
def page(browser: Any, mixed: Report, tmp_path: Path) -> Iterator[Opened]:
    mixed.to_html(tmp_path / "report.html")
    opened = open_page(browser, tmp_path / "report.html")
    yield opened
    opened.page.close()


def words(locator: Any) -> str:
    """Its text, as a line."""
    return re.sub(r"\s+", " ", locator.text_content())


def test_summary_filter_and_sort(page: Opened) -> None:
    p = page.page
    assert [
        p.locator(f"#count-{c}").text_content() for c in ("sites", "rewritten", "declined")
    ] == [
        "4",
        "1",
        "3",
    ]
    assert sorted(page.shown()) == ["centred#0", "good#0", "near#0", "off#0"]
    p.get_by_label("Search").fill("linears.near")
    assert page.shown() == ["near#0"] and p.locator("#shown").text_content() == "1 of 4 sites"
    p.get_by_label("Search").fill("no such thing")
    assert page.shown() == []
    p.get_by_role("button", name="Clear").click()
    p.locator("#shown", has_text="4 sites").wait_for()
    p.get_by_label("Status").select_option("rewritten")
    assert page.shown() == ["good#0"]
    p.get_by_label("Status").select_option("all")
    p.locator("button.reason", has_text="centred").click()
    assert page.shown() == ["centred#0"]
    p.get_by_role("button", name="Clear").click()
    p.locator("#shown", has_text="4 sites").wait_for()
    header = p.get_by_role("columnheader", name="site")
    header.get_by_role("button").click()
    assert page.shown() == ["centred#0", "good#0", "near#0", "off#0"]
    assert header.get_attribute("aria-sort") == "ascending"
    header.get_by_role("button").click()
    assert page.shown() == ["off#0", "near#0", "good#0", "centred#0"]
    p.get_by_role("columnheader", name="reason").get_by_role("button").press("Enter")
    assert page.shown() == ["good#0", "centred#0", "off#0", "near#0"]
    page.assert_quiet()


def drawn(pane: Any) -> dict[str, str]:
    """Graph nodes in a picture, each with the mark of its box."""
    found = {}
    for box in pane.locator("svg g.node").all():
        (mark,) = re.findall(r"mark-(\w+)", box.get_attribute("class"))
        for name in box.get_attribute("data-nodes").split():
            found[name] = mark
    return found


def test_a_rewritten_site(page: Opened, mixed: Report) -> None:
    """Both pictures hold every node with its mark; lines, spec and list say where and what."""
    result = mixed.graphs[0]
    site = next(s for s in result.sites if s.id == "good#0")
    detail = page.open("good#0")
    for side in ("before", "after"):
        pane = detail.locator(f".pane.{side}")
        expected = nodes(result, site, side)
        assert set(drawn(pane)) == set(expected)
    before = words(detail.locator(".pane.before svg"))
    after = words(detail.locator(".pane.after svg"))
    assert "RMSNorm (6 nodes)" in before and "MX cast" in before
    assert "mxnorm.rmsnorm_mxquant" in after and "RMSNorm" not in after
    detail.get_by_role("button", name="Every node").click()
    for side in ("before", "after"):
        pane = detail.locator(f".pane.{side}")
        pane.locator("svg g.node").nth(len(nodes(result, site, side)) - 1).wait_for()
        marks = {n: node.mark or "none" for n, node in nodes(result, site, side).items()}
        assert drawn(pane) == marks
    # A node tells what it is; the whole picture is there as text.
    name = next(
        n for n, node in nodes(result, site, "before").items() if node.op == "aten.mean.dim"
    )
    detail.locator(f".pane.before g.node[data-nodes={name}]").press("Enter")
    assert "aten.mean.dim" in words(detail.locator(".picked"))
    detail.locator(".pane.before .nodes summary").click()
    # The list is filled when the browser says that it was opened, which is after the click.
    listed = detail.locator(".pane.before .nodes tbody tr")
    listed.first.wait_for()
    assert listed.count() == len(nodes(result, site, "before"))
    source = words(detail.locator(".source"))
    assert "models.py" in source and "absmax = blocks.abs().amax(-1, keepdim=True)" in source
    spec = words(detail.locator(".spec"))
    assert "formatMXFP8" in spec and "eps" in spec and "linears.good" in spec
    assert page.page.url.endswith("#site-good%230")
    page.page.locator("tr.site-row[data-key='good#0']").press("Enter")
    assert page.page.locator("tr.detail").count() == 0
    page.assert_quiet()


def test_declined_sites(page: Opened, mixed: Report) -> None:
    """Reason, advice, nearest miss, and the node where it failed, marked."""
    site = next(s for s in mixed.sites if s.id == "near#0")
    assert site.reason == "scale_rule"
    detail = page.open("near#0")
    why = words(detail.locator(".why"))
    for text in (*REASONS["scale_rule"], site.computed, site.expected, site.detail):
        assert text in why
    assert [n for n, mark in drawn(detail).items() if mark == "failed"] == [site.node]
    page.assert_quiet()


def test_a_link_opens_its_site_at_1280_pixels(browser: Any, mixed: Report, tmp_path: Path) -> None:
    report = copy.deepcopy(mixed)
    site = report.sites[-1]
    site.norm = ".".join(["a_rather_long_name_of_a_module"] * 9)
    site.id = f"{site.norm}#0"
    site.consumers = [site.norm + ".consumer"] * 3
    site.detail = "x" * 400
    path = tmp_path / "report.html"
    report.to_html(path)
    key = site.id.replace("#", "%23")
    opened = open_page(browser, path, fragment=f"#site-{key}")
    opened.page.locator("tr.detail svg").first.wait_for()
    assert opened.page.locator("tr.site-row[aria-expanded=true]").count() == 1
    for selector in ("document.documentElement", "document.body"):
        assert opened.page.evaluate(f"{selector}.scrollWidth") <= 1280
    # On paper: black on white, nothing cut off, no controls.
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#filters").is_visible()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert len(opened.page.pdf()) > 10_000
    opened.assert_quiet()
    opened.page.close()


HOSTILE = (
    "<img src=x onerror=document.title='hacked'>",
    "</script><script>document.title='hacked'</script>",
    "<!-- <script>",
    "\"'`><svg onload=document.title='hacked'>",
    "{{ 7 * 7 }} {% raw %}",
    "&lt;b&gt; &amp;",
    "back\\slash \\N \\l C:\\new\\table",
    "line\u2028separator\u2029 \u202eright-to-left",
    "ünï — 模型 🧨",
    "javascript:document.title='hacked'",
)


def hostile_report() -> Report:
    """One site per hostile text, which stands in every place that a model or a path can fill."""
    sites, sources = [], Sources()
    for i, text in enumerate(HOSTILE):
        sources.lines.append(Line(text, i, text, text))
        sources.stacks.append((i,))
        sources.kernels.append(Kernel(text, text, text))
        picture = Picture(
            (
                PictureNode(text, text, (), "row", "", text, i),
                PictureNode(text, text, (0,), "context", "failed", text, i),
            )
        )
        sources.pictures.append(picture)
        view = View(i, [text, text + "_1"])
        sites.append(
            SiteReport(
                f"{text}#{i}",
                text,
                [text, text],
                "declined" if i % 2 else "rewritten",
                "norm_form" if i % 2 else None,
                text,
                {"element": text, "block_size": 32, "scale_rule": text, "kernel": text, text: text},
                [text],
                text,
                text,
                text,
                view,
                None if i % 2 else view,
                [Launch(i, text)],
            )
        )
    failed = GraphReport(False, failure="".join(HOSTILE))
    return Report([GraphReport(True, sites, sources=sources), failed], list(HOSTILE))


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    report = hostile_report()
    path = tmp_path / "report.html"
    text = report.to_html(path)
    assert "<img" not in text and text.count("</script>") == 3
    opened = open_page(browser, path)
    assert opened.shown() == [site.id for site in report.sites]
    for site in report.sites:
        detail = opened.open(site.id)
        assert site.norm in detail.text_content()
        # Graphviz draws the name as it is, apart from what no font can.
        label = detail.locator(".pane.before svg").text_content()
        assert re.sub(r"\s", "", site.norm)[:12] in re.sub(r"\s", "", label)
        opened.page.locator("tr.site-row[aria-expanded=true]").press("Enter")
    assert opened.page.title().startswith("mxnorm report")
    assert opened.page.locator("img, iframe, object, embed").count() == 0
    assert opened.page.locator("script").count() <= 4
    opened.assert_quiet()
    opened.page.close()


def test_lone_surrogates_can_be_written(tmp_path: Path) -> None:
    """Paths that are no UTF-8 come into Python as lone surrogates."""
    report = Report([GraphReport(False, [SiteReport("a\udcff#0", "a\udcff", [], "declined")])])
    report.to_html(tmp_path / "report.html")
    assert "udcff" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_empty_cached_and_failed_graphs(browser: Any, mixed: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    Report([GraphReport(False)]).to_html(path)
    opened = open_page(browser, path)
    assert "Nothing to rewrite" in words(opened.page.locator("header")) and opened.shown() == []
    opened.page.close()

    cached = copy.deepcopy(mixed.graphs[0])
    cached.from_cache = True
    failed = GraphReport(True, failure="Traceback\n  File x\nRuntimeError: broken")
    report = Report([mixed.graphs[0], cached, failed])
    report.to_html(path)
    opened = open_page(browser, path)
    header = words(opened.page.locator("header"))
    assert "found in torch's cache" in header and "RuntimeError: broken" in header
    # A recompiled graph has the same ids again: both can be reached.
    assert len(opened.shown()) == 8 and "good#0@2" in opened.shown()
    opened.page.locator("#filter-graph").select_option("1")
    assert sorted(opened.shown()) == ["centred#0@2", "good#0@2", "near#0@2", "off#0@2"]
    opened.open("good#0@2")
    opened.assert_quiet()
    opened.page.close()


def test_json_makes_the_same_page(mixed: Report) -> None:
    assert Report.from_json(mixed.to_json()).to_html() == mixed.to_html()


@pytest.mark.slow
def test_two_thousand_sites(browser: Any, mixed: Report, tmp_path: Path) -> None:
    """Still a table that can be used; equal pictures are in the file once."""
    graph = mixed.graphs[0]
    sites = [
        dataclasses.replace(site, id=f"layers.{i}.{site.id}", norm=f"layers.{i}.{site.norm}")
        for i in range(500)
        for site in graph.sites
    ]
    report = Report([dataclasses.replace(graph, sites=sites)])
    path = tmp_path / "report.html"
    report.to_html(path)
    assert path.stat().st_size < 5_000_000
    opened = open_page(browser, path)
    assert opened.seconds < 4
    p = opened.page
    p.locator("tr.site-row").nth(1999).wait_for()
    p.get_by_label("Search").fill("layers.499. good")
    assert opened.shown() == ["layers.499.good#0"]
    took = p.evaluate(
        "(() => { const t = performance.now();"
        " document.getElementById('filter-text').value = 'good';"
        " document.getElementById('filter-text').dispatchEvent(new Event('input'));"
        " document.body.offsetHeight; return performance.now() - t; })()"
    )
    assert took < 1000 and "500 of 2000" in p.locator("#shown").text_content()
    p.get_by_label("Search").fill("")
    p.locator("tr.site-row").nth(1999).wait_for()
    opened.open("layers.250.near#0")
    opened.assert_quiet()
    p.close()


def stretched(report: Report, layers: int) -> Report:
    """A report of two equal layers as that of many, the second one again and again."""
    graph = report.graphs[0]
    sites = [site for site in graph.sites if ".layers.0." in site.norm]

    def again(site: SiteReport, i: int) -> SiteReport:
        new = copy.deepcopy(site)
        for view in (new.before, new.after):
            assert view is not None
            view.names = [
                f"{name.rstrip('0123456789')}{i * 40 + j}" for j, name in enumerate(view.names)
            ]
        new.id, new.norm = (t.replace(".layers.1.", f".layers.{i}.") for t in (new.id, new.norm))
        new.consumers = [c.replace(".layers.1.", f".layers.{i}.") for c in new.consumers]
        return new

    later = [site for site in graph.sites if ".layers.1." in site.norm]
    sites += [again(site, i) for i in range(1, layers) for site in later]
    return Report([dataclasses.replace(graph, sites=sites)])


def assert_small_and_fast(browser: Any, report: Report, path: Path) -> None:
    """What a model of 32 layers may take: 5 MB, and 2 seconds to a table that can be used."""
    assert len(report.sites) == 64 == report.rewritten
    report.to_html(path)
    assert path.stat().st_size < 5_000_000
    opened = open_page(browser, path)
    assert opened.seconds < 2 and len(opened.shown()) == 64
    detail = opened.open(report.sites[-1].id)
    assert "rmsnorm_mxquant" in detail.locator(".pane.after svg").text_content()
    opened.assert_quiet()
    opened.page.close()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which walks a traced model of this size again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.long
def test_32_layers(browser: Any, tmp_path: Path) -> None:
    """A Llama of 32 layers, MX weights behind each of its 64 norms in front of a linear."""
    skip = ("lm_head", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    model = quantize_inference_(llama(32, hidden=64), skip=skip)
    with uncollected():
        report = explain(model, input_ids=tokens(), training=False)
    # Equal layers share their pictures.
    assert len(report.graphs[0].sources.pictures) <= 12
    assert_small_and_fast(browser, report, tmp_path / "report.html")


@pytest.mark.slow
def test_32_layers_in_training(browser: Any, tmp_path: Path) -> None:
    """A joint graph, every linear behind a norm MX: two layers, and the second 31 times over."""
    # The other two read no norm.
    skip = ("lm_head", "o_proj", "down_proj")
    model, ids = wrap_training_(llama(2, hidden=64), skip=skip), tokens()
    with uncollected():
        report = explain(model, input_ids=ids, labels=ids, training=True)
    assert_small_and_fast(browser, stretched(report, 32), tmp_path / "report.html")


def test_vendored_asset_is_what_it_says() -> None:
    """The file of the library, unmodified, with its licence beside it."""
    digest = hashlib.sha256((page_of.ASSETS / "viz-global.js").read_bytes()).hexdigest()
    assert digest in (page_of.ASSETS / "README.md").read_text()
    licence = (page_of.ASSETS / "viz-global.LICENSE.txt").read_text()
    assert "3.31.0" in licence and "Eclipse Public License" in licence
