"""What a user says: paths, ids, switches, files; each taken as it is meant, or refused."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import run
from models import inference_block, rows
from torch import Tensor, nn

import mxnorm_pass
from mxnorm_pass import MXNormConfig, Report, backend, choices, explain
from mxnorm_pass.report import GraphReport


def test_choices_by_a_path_or_an_id_with_any_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path means itself, also where it would be a glob; an id may hold a comma."""
    path, other = "a.['x.1*'].norm", "b,c.norm"
    assert MXNormConfig(exact=(path,)).rms_of(path) == "exact"
    assert MXNormConfig(exact=(path,)).rms_of(other) == "p2"
    assert not MXNormConfig(exclude=(path,)).selects(path)
    monkeypatch.setenv("MXNORM_OFF", f"{other}#0\n{path}#1\n")
    assert choices.switched_off(MXNormConfig(off=("z#0",))) == {
        f"{other}#0",
        f"{path}#1",
        "z#0",
    }
    monkeypatch.setenv("MXNORM_OFF", " a#0, b#1,")
    assert choices.switched_off(MXNormConfig()) == {"a#0", "b#1"}


@pytest.mark.parametrize(
    ("value", "off"), [("", False), ("0", False), ("False", False), ("no", False), ("1", True)]
)
def test_words_of_the_switch(value: str, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNORM_DISABLE", value)
    assert choices.disabled() is off


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


class Two(nn.Module):
    """Two sites with a graph break between them, at which ``look`` is called."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.left = inference_block("torch", widths=(128,))
        self.right = inference_block("torch", widths=(64,))
        self.look = torch._dynamo.disable(look)

    def forward(self, x: Tensor) -> Tensor:
        (x,) = self.left(x)
        self.look()
        (x,) = self.right(x)
        return x


def test_choices_that_no_site_of_any_graph_answers_to_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A warning of the whole report, in every form of it; gone when a later graph answers."""
    monkeypatch.chdir(tmp_path)
    file = Path("c.json")  # short, so that the text is not broken within it
    constants = dict.fromkeys(("left.norm", "right.norm", "a", "b", "c", "d"), 0.4)
    file.write_text(json.dumps({"p": 2, "sites": constants}))
    monkeypatch.setenv("MXNORM_OFF", "left.norm#3,left.norm#0")
    ours = backend(
        include=("left.*", "right.nomr", "right.norm"),
        exclude=("*.final",),
        exact=("left.norm", "lefft.norm"),
        off=("right.norm#0", "right.norm#1"),
        correction=str(file),
        inner="eager",
    )
    ours.report.warnings.append("said by somebody else")
    halfway: list[str] = []
    model = Two(lambda: halfway.extend(ours.report.warnings))
    with torch.no_grad():
        torch.compile(model, backend=ours)(rows(4, 128))
    nobody = {
        "said by somebody else",
        "include='right.nomr' matches no norm that feeds an MX cast",
        "exclude='*.final' matches no norm that feeds an MX cast",
        "exact='lefft.norm' matches no norm that feeds an MX cast",
        "off='right.norm#1': there is no such site",
        "MXNORM_OFF='left.norm#3': there is no such site",
        f"correction={str(file)!r} has constants for norms that feed no cast: a, b, c and 1 more",
    }
    assert [[s.id for s in graph.sites] for graph in ours.report.graphs] == [
        ["left.norm#0"],
        ["right.norm#0"],
    ]
    # Both are switched off, and are sites all the same.
    assert ours.report.rewritten == 0
    assert len(ours.report.warnings) == len(nobody) and set(ours.report.warnings) == nobody
    for answered in ("include='right.norm' ", "off='right.norm#0'", "and 2 more"):
        assert any(answered in warning for warning in halfway)
        assert not any(answered in warning for warning in nobody)
    again = Report.from_json(ours.report.to_json())
    printed, page = " ".join(str(again).split()), html.unescape(again.to_html())
    for warning in nobody:
        assert f"warning: {warning}" in printed and warning in page


@pytest.mark.parametrize(
    ("sites", "without"),
    [({"left.norm": 0.4}, ("right.norm",)), ({}, ("left.norm", "right.norm"))],
    ids=("half", "none"),
)
def test_norms_without_a_constant_in_the_file_are_said(
    tmp_path: Path, sites: dict[str, float], without: tuple[str, ...]
) -> None:
    """They take the Gaussian one, of which nobody would know: also a Python warning, once."""
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"p": 2, "sites": sites}))
    ours = backend(correction=str(file), inner="eager")
    choices.warn_once.cache_clear()
    with torch.no_grad(), pytest.warns(UserWarning, match="no constant for") as given:
        torch.compile(Two(lambda: None), backend=ours)(rows(4, 128))
    assert [len(graph.sites) for graph in ours.report.graphs] == [1, 1]
    (line,) = ours.report.warnings
    assert f"no constant for {len(without)} of 2 estimated norms" in line
    assert line.endswith(f"Gaussian one: {', '.join(without)}")
    assert len([w for w in given if "no constant" in str(w.message)]) == len(without)
    file.write_text(json.dumps({"p": 2, "sites": {"left.norm": 0.4, "right.norm": 0.4}}))
    assert choices.unfitted(ours.config, ours.report.graphs) == []


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    """By name, wherever one is given; an option without its place too."""
    model, x = Two(lambda: None), rows(4, 128)
    takers: list[Callable[[Any], Any]] = [
        backend,
        mxnorm_pass.inductor_options,
        lambda c: explain(model, x, config=c),
        lambda c: mxnorm_pass.fidelity(model, x, config=c),
        lambda c: mxnorm_pass.calibrate(model, x, config=c),
    ]
    for wrong in ({"p": 1}, "exact", MXNormConfig):
        for take in takers:
            with pytest.raises(TypeError, match="expected an MXNormConfig"):
                take(wrong)
    with pytest.raises(TypeError, match=r"options go into config=MXNormConfig\(p=...\)"):
        explain(model, x, p=1)
    with pytest.raises(ValueError, match="unknown option 'foo': allowed are rms, p,"):
        backend(foo=1)
    with pytest.raises(Exception, match=r"write 'mxnorm\.p'"):
        torch.compile(model, backend="mxnorm", options={"p": 1})(x)
    with pytest.raises(ValueError, match="dump_dir=5"):
        MXNormConfig(dump_dir=5)  # type: ignore[arg-type]
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"{binary}: not JSON"):
        MXNormConfig(correction=str(binary))
