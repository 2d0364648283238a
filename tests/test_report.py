"""The report as text and JSON, the reasons, and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import HandLinear, hand_model, inference_block, rows

from mxnorm_pass import Report, backend, explain, theory
from mxnorm_pass.cli import main
from mxnorm_pass.reasons import REASONS, Decline
from mxnorm_pass.report import GraphReport, SiteReport, generated
from mxnorm_pass.report.picture import Picture, PictureNode, Sources, View
from mxnorm_pass.report.schema import schema

SPEC = {
    "eps": 1e-6,
    "gain": "1+w",
    "k": 128,
    "block_size": 32,
    "element": "e4m3",
    "scale_rule": "rceil_exact",
    "saturate": "clamp",
    "layout": "plain",
    "gain_at": "kernel",
    "rms": "exact",
    "correction": 1.0,
    "rounding": "bf16->bf16",
    "kernel": "aten",
    "kernel_reason": "no kernel for cpu",
    "tensor_scale": "none",
    "residual": True,
}
paths = st.lists(st.text("abc_0123", min_size=1, max_size=30), max_size=6).map(".".join)
sites = st.builds(
    lambda norm, consumers, reason, detail: SiteReport(
        f"{norm}#0",
        norm,
        consumers,
        "declined" if reason else "rewritten",
        reason,
        detail,
        {} if reason else SPEC,
    ),
    paths,
    st.lists(paths, max_size=4),
    st.sampled_from([None, *REASONS]),
    st.text(max_size=300),
)
reports = st.builds(
    lambda graphs, warnings: Report(graphs, warnings),
    st.lists(st.builds(GraphReport, st.booleans(), st.lists(sites, max_size=4)), max_size=3),
    st.lists(st.text(max_size=200), max_size=2),
)


@given(reports)
def test_text_fits_100_columns_and_json_comes_back(report: Report) -> None:
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    for site in report.sites:
        if site.reason:
            assert REASONS[site.reason][1].split()[0] in text
    assert Report.from_json(report.to_json()) == report


hostile = st.one_of(
    st.text(max_size=150), st.text("a.\n\x85\u2028\x1b[31m", min_size=90, max_size=300)
)
hostile_reports = st.builds(
    lambda norm, other, kind, spec: Report(
        [
            GraphReport(
                True,
                [
                    SiteReport(
                        f"{norm}#{i}",
                        f"{norm}.{other}",
                        [other, norm],
                        "declined" if kind else "rewritten",
                        kind,
                        other,
                        {"element": spec, "scale_rule": norm, "rms": other},
                        [other],
                        norm,
                        other,
                        norm,
                    )
                    for i in range(2)
                ],
                failure=f"{other}\n  {norm}",
            )
        ],
        [norm],
    ),
    hostile,
    hostile,
    st.sampled_from([None, *REASONS]),
    hostile,
)


@given(hostile_reports)
def test_hostile_text_fits_100_columns(report: Report) -> None:
    """Long paths, line breaks and control characters in every place: no line is longer, none is
    forged.
    """
    lines = str(report).split("\n")
    assert max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("mxnorm: 1 graph(s) seen, 2 site(s)")
    assert Report.from_json(report.to_json()) == report


SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "report.schema.json"


def test_schema_in_the_docs_is_that_of_the_classes() -> None:
    written = json.loads(SCHEMA_FILE.read_text())
    assert written == schema()
    # Every field of every class says what it is.
    for name, content in [("Report", written), *written["$defs"].items()]:
        for field, said in content["properties"].items():
            told = "description" in said or field == "schema"
            assert told or name in ("Line", "Kernel", "View", "Launch", "Picture"), (name, field)


@given(st.one_of(reports, hostile_reports))
@settings(max_examples=30)
def test_reports_fit_the_schema(report: Report) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
    content = json.loads(report.to_json())
    validator.validate(content)
    for site in [s for g in content["graphs"] for s in g["sites"]]:
        site["stranger"] = 1
        assert not validator.is_valid(content)


def test_real_reports_fit_the_schema() -> None:
    report = explain(inference_block("llama", widths=(64,)), rows(32, 128), training=False)
    jsonschema.validate(json.loads(report.to_json()), schema())
    assert report.graphs[0].sources.pictures and report.sites[0].after is not None


@pytest.mark.slow
@pytest.mark.inductor
def test_kernels_of_a_compile_and_of_a_cache_hit(tmp_path: Path) -> None:
    """Each site has the kernel that holds its op and its call, also where torch had it cached."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), HandLinear(64, 32, bias=False))
    x = rows(32, 64, dtype=torch.float32)
    found = []
    caches = torch._inductor.config.patch(fx_graph_cache=True)
    for _ in range(2):
        torch._dynamo.reset()
        ours = backend(strict=True)
        with torch.no_grad(), caches, torch._functorch.config.patch(enable_autograd_cache=True):
            torch.compile(model, backend=ours)(x)
        (graph,) = ours.report.graphs
        (site,) = graph.sites
        kernels = [(graph.sources.kernels[launch.kernel], launch.call) for launch in site.kernels]
        assert kernels, graph.from_cache
        for kernel, call in kernels:
            assert kernel.language == "c++" and call.startswith(f"{kernel.name}(")
        # The constant of the estimate, squared, is in the code that was kept.
        assert any("0.1751465" in kernel.code for kernel, _ in kernels)
        found.append((graph.from_cache, kernels))
    assert [cached for cached, _ in found] == [False, True]
    assert found[0][1] == found[1][1]


def test_kernels_on_aten_calls() -> None:
    block, x = inference_block("llama", widths=(64,)), rows(64, 128)
    ours = backend()
    with torch.no_grad():
        torch.compile(block, backend=ours)(x)
    (site,) = ours.report.sites
    (launch,) = site.kernels
    assert "torch.ops.mxnorm.rmsnorm_mxquant.default(" in launch.call and "'p2'" in launch.call


@pytest.mark.cuda
def test_kernels_on_a_gpu() -> None:
    """Our Triton kernel with its launch, for each of two sites its own."""
    model = hand_model(512).cuda()[0]
    ours = backend(strict=True)
    with torch.no_grad():
        torch.compile(model, backend=ours)(rows(64, 512, dtype=torch.float32).cuda())
    (graph,) = ours.report.graphs
    assert [site.spec["kernel"] for site in graph.sites] == ["triton", "triton"]
    calls = []
    for site in graph.sites:
        found = [(graph.sources.kernels[k.kernel], k.call) for k in site.kernels]
        ((kernel, call),) = [f for f in found if "rmsnorm_mxquant_kernel" in f[0].name]
        assert kernel.language == "triton" and "def rmsnorm_mxquant_kernel(" in kernel.code
        assert f"{kernel.name}.run(" in call
        calls.append(call)
    assert calls[0] != calls[1]


def test_triton_kernels_are_found() -> None:
    """Inductor's text for a user's Triton kernel: its definition, its launch over two lines."""
    source = (
        "rmsnorm_mxquant_kernel_0 = async_compile.triton('rmsnorm_mxquant_kernel', '''\n"
        "import triton\ndef rmsnorm_mxquant_kernel(x):\n    pass\n''', device_str='cuda')\n"
        "def call(args):\n"
        "    # Topologically Sorted Source Nodes: [], Original ATen: []\n"
        "    # [Provenance debug handles] rmsnorm_mxquant_kernel_0:1\n"
        "    stream0 = get_raw_stream(0)\n"
        "    rmsnorm_mxquant_kernel_0.run(arg0_1, buf0,\n        stream=stream0)\n"
    )
    node = PictureNode("mxnorm.rmsnorm_mxquant.default", "", (), "rewrite", "new")
    other = PictureNode("mxnorm.rmsnorm_mxquant.default", "", (), "rewrite", "new")
    view, second = View(0, ["rmsnorm_mxquant_1"]), View(0, ["rmsnorm_mxquant_12"])
    sites = [
        SiteReport(f"n#{i}", "n", [], "rewritten", after=v) for i, v in enumerate((view, second))
    ]
    graph = GraphReport(True, sites, sources=Sources([Picture((node,)), Picture((other,))]))
    generated.attach([graph], [(source, {"rmsnorm_mxquant_kernel_0:1": ["rmsnorm_mxquant_12"]})])
    assert sites[0].kernels == []
    (launch,) = sites[1].kernels
    kernel = graph.sources.kernels[launch.kernel]
    assert kernel.language == "triton" and kernel.code.startswith("import triton\ndef rms")
    assert launch.call == (
        "stream0 = get_raw_stream(0)\nrmsnorm_mxquant_kernel_0.run(arg0_1, buf0,\nstream=stream0)"
    )


def test_json_is_written_and_foreign_json_refused(tmp_path: Path) -> None:
    report = Report([GraphReport(True, [SiteReport("n#0", "n", ["a"], "rewritten", spec=SPEC)])])
    report.to_json(tmp_path / "report.json")
    assert Report.from_json((tmp_path / "report.json").read_text()) == report
    for text in ("[]", '{"schema": 0}'):
        with pytest.raises(ValueError, match="schema 5"):
            Report.from_json(text)


def test_table_of_a_layer() -> None:
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    spec = {**SPEC, "scale_rule": "rceil_log2"}
    report = Report(
        [
            GraphReport(
                True,
                [
                    SiteReport(
                        "l#0", "model.layers.0.input_layernorm", [q, k], "rewritten", spec=spec
                    ),
                    SiteReport(
                        "l#1", "model.layers.1.norm", [], "declined", "centred", "a row mean"
                    ),
                ],
            )
        ]
    )
    lines = str(report).splitlines()
    assert lines[0] == "mxnorm: 1 graph(s) seen, 2 site(s), 1 rewritten, 1 declined"
    assert lines[1] == "norms under model.layers:"
    assert re.match(
        r"0\.input_layernorm +self_attn\.\{q,k\}_proj +rewritten +"
        r"e4m3/32 rceil exact 1\+w kernel \+add",
        lines[4],
    )
    assert re.match(r"1\.norm +\? +declined: centred", lines[5])
    assert lines[6] == "model.layers.1.norm: centred: a row mean"


def test_reasons_page_is_the_table_in_the_code() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reasons.md").read_text()
    rows = [f"| `{code}` | {what} | {advice} |" for code, (what, advice) in REASONS.items()]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


def test_unknown_reasons_cannot_be_given() -> None:
    with pytest.raises(AssertionError):
        Decline("because", "no reason")


SCRIPT = """
from models import inference_block, rows

def site():
    return inference_block("llama", widths=(64,)), rows(64, 128)

def keywords():
    return inference_block("llama", widths=(64,)), {"x": rows(64, 128)}

def nothing():
    return None
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(SCRIPT)
    return path


def test_cli_explain(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{script}:site", "--infer", "--require", "1"]) == 0
    assert "1 rewritten" in capsys.readouterr().out
    assert main(["explain", f"{script}:keywords", "--infer", "--require", "2", "--json"]) == 1
    report = Report.from_json(capsys.readouterr().out)
    assert report.rewritten == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nowhere.py:f"], "script.py:function"),
        (["explain", "{script}:absent"], "no function 'absent'"),
        (["explain", "{script}:nothing"], "must return"),
        (["explain", "{script}:site", "--train", "--infer"], "exclude each other"),
        (["explain", "{script}:site", "--p", "3"], "allowed are 1, 2"),
        (["constants", "--hidden", "100"], "multiples of the block size 32"),
        (["constants", "--block", "0"], "block"),
        (["constants", "--dist", "cauchy"], "gaussian"),
    ],
)
def test_cli_names_what_is_wrong(
    script: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.replace("{script}", str(script)) for a in arguments]) == 2
    assert message in capsys.readouterr().err


def test_cli_constants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["constants", "--block", "16", "--p", "1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["c"] == pytest.approx(0.4814162543, abs=1e-10)
    assert values["inverse_c"] * values["c"] == pytest.approx(1)
    assert values["error_sd"] == theory.error_sd(1, 16, 2048)
    assert main(["constants"]) == 0
    assert "0.4185051047" in capsys.readouterr().out


def test_cli_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons"]) == 0
    out = capsys.readouterr().out
    assert all(code in out for code in REASONS)
