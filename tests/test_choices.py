"""What a user says: paths, ids, switches, files; each taken as it is meant, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiling import run
from models import inference_block, rows

from mxnorm_pass import MXNormConfig, Report, graph_pass
from mxnorm_pass.report import GraphReport


def test_choices_by_a_path_or_an_id_with_any_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path means itself, also where it would be a glob; an id may hold a comma."""
    path, other = "a.['x.1*'].norm", "b,c.norm"
    assert MXNormConfig(exact=(path,)).rms_of(path) == "exact"
    assert MXNormConfig(exact=(path,)).rms_of(other) == "p2"
    assert not MXNormConfig(exclude=(path,)).selects(path)
    monkeypatch.setenv("MXNORM_OFF", f"{other}#0\n{path}#1\n")
    assert graph_pass.switched_off(MXNormConfig(off=("z#0",))) == {
        f"{other}#0",
        f"{path}#1",
        "z#0",
    }
    monkeypatch.setenv("MXNORM_OFF", " a#0, b#1,")
    assert graph_pass.switched_off(MXNormConfig()) == {"a#0", "b#1"}


@pytest.mark.parametrize(
    ("value", "off"), [("", False), ("0", False), ("False", False), ("no", False), ("1", True)]
)
def test_words_of_the_switch(value: str, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNORM_DISABLE", value)
    assert graph_pass.disabled() is off


def test_a_report_of_nothing_says_where_others_are() -> None:
    assert "backend.report" in str(Report())
    assert "Nothing to rewrite" in str(Report([GraphReport(training=False)]))


@pytest.mark.parametrize(
    "foreign",
    [
        "reports/sites.json",
        Path("sites.json"),
        '{"schema": 5}',
        '{"schema": 5, "graphs": 3, "warnings": []}',
        '{"schema": 5, "graphs": [{}], "warnings": []}',
        '{"schema": 5, "graphs": [7], "warnings": []}',
    ],
)
def test_foreign_text_is_no_report(foreign: Any) -> None:
    with pytest.raises(ValueError, match="report"):
        Report.from_json(foreign)


def test_two_folders_get_a_dump_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller named, and what the variable does (which is how bisect learns of sites)."""
    monkeypatch.setenv("MXNORM_DUMP", str(tmp_path / "variable"))
    config = MXNormConfig(dump_dir=str(tmp_path / "option"))
    run(inference_block("torch", widths=(64,)), rows(4, 128), training=False, config=config)
    for name in ("variable", "option"):
        assert (tmp_path / name / "rank_0" / "graph_000" / "sites.json").is_file()
