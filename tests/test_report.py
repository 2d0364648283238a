"""The report as text and JSON, the reasons, and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxnorm_pass import Report, theory
from mxnorm_pass.cli import main
from mxnorm_pass.reasons import REASONS, Decline
from mxnorm_pass.report import GraphReport, SiteReport

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


def test_json_is_written_and_foreign_json_refused(tmp_path: Path) -> None:
    report = Report([GraphReport(True, [SiteReport("n#0", "n", ["a"], "rewritten", spec=SPEC)])])
    report.to_json(tmp_path / "report.json")
    assert Report.from_json((tmp_path / "report.json").read_text()) == report
    for text in ("[]", '{"schema": 0}'):
        with pytest.raises(ValueError, match="schema 3"):
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
