"""Folders of runs that are damaged, are none, or do not fit together: said by file and line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import reproduce
import train
from test_train_errors import MACHINE, ROOT, refused, save
from trainlib import logs, runs
from trainlib.loop import Curve


def line(name: str, number: int, change: Callable[[str], str]) -> Callable[[Path], None]:
    """A change of one line (from 1) of a file."""

    def damage(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        lines[number - 1] = change(lines[number - 1])
        (folder / name).write_text("".join(lines))

    return damage


def about(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "runs.json").read_text())
        change(found)
        (folder / "runs.json").write_text(json.dumps(found))

    return damage


def cut(name: str, left_out: int) -> Callable[[Path], None]:
    return lambda f: (f / name).write_bytes((f / name).read_bytes()[:-left_out]) and None


def to(name: str, text: bytes) -> Callable[[Path], None]:
    return lambda f: (f / name).write_bytes(text) and None


# Line 62 of curves.csv is step 0 of p2, 111 its last; norms.csv has two lines a run.
DAMAGED = {
    "no file": (lambda f: (f / "norms.csv").unlink(), ": norms.csv missing; a run writes all"),
    "no plan": (lambda f: (f / "runs.json").unlink(), ": runs.json missing; a run writes all"),
    "a folder for a file": (
        lambda f: ((f / "norms.csv").unlink(), (f / "norms.csv").mkdir()),
        "norms.csv: Is a directory",
    ),
    "bytes": (to("curves.csv", b"variant\xff\n"), "curves.csv: no text in UTF-8 from byte 7"),
    "empty": (to("curves.csv", b""), "curves.csv, line 1: cut off"),
    "no table": (to("curves.csv", b"\n"), "curves.csv: no line of rmsnorm, seed 0, rate 0.001"),
    "float": (
        line("curves.csv", 7, lambda s: s.replace(",0.5", ",oops")),
        "curves.csv, line 7: grad_norm is 'oops', expected a number",
    ),
    "whole": (
        line("curves.csv", 7, lambda s: s.replace(",5,", ",5.5,")),
        "curves.csv, line 7: step is '5.5', expected a whole number",
    ),
    "column": (
        line("curves.csv", 1, lambda s: s.replace("grad_norm", "norm")),
        "curves.csv, line 1: column grad_norm missing, expected variant, seed, rate, step, loss, g",
    ),
    "short row": (
        line("curves.csv", 9, lambda s: s.rpartition(",")[0] + "\n"),
        "curves.csv, line 9: 5 values, expected 6: variant, seed, rate, step, loss, grad_norm",
    ),
    "empty row": (line("curves.csv", 9, lambda s: "\n"), "curves.csv, line 9: 0 values, expected"),
    "quote": (line("curves.csv", 9, lambda s: '"' + s), "curves.csv, line 111: no CSV: "),
    "cut": (cut("curves.csv", 3), "curves.csv, line 111: cut off, the line has no end"),
    "row left out": (
        line("curves.csv", 9, lambda s: ""),
        "curves.csv, line 9: step 8 of rmsnorm, seed 0, rate 0.001, expected step 7",
    ),
    "row twice": (line("curves.csv", 9, lambda s: s + s), "line 10: step 7 of rmsnorm, seed 0, ra"),
    "last row left out": (
        line("curves.csv", 61, lambda s: ""),
        "curves.csv, line 60: rmsnorm, seed 0, rate 0.001 ends after 59 steps, expected 60, by its",
    ),
    "broken off elsewhere": (
        line("curves.csv", 111, lambda s: ""),
        "curves.csv, line 110: p2, seed 0, rate 0.001 ends after 49 steps, expected 60, by its pla",
    ),
    "broken off with a number": (
        lambda f: to("curves.csv", (f / "curves.csv").read_bytes().replace(b"nan", b"3.1"))(f),
        "line 111: p2, seed 0, rate 0.001 ends after 50 steps, expected 60, by its plan; fewer on",
    ),
    "no number in between": (
        line("curves.csv", 9, lambda s: s.replace(",3.125,", ",nan,")),
        "curves.csv, line 10: loss is 3.11111 in rmsnorm, seed 0, rate 0.001 after one that is no ",
    ),
    "below zero": (
        line("curves.csv", 9, lambda s: s.replace(",3.125,", ",-3.125,")),
        "curves.csv, line 9: loss is -3.125 in rmsnorm, seed 0, rate 0.001, expected 0 or more",
    ),
    "longer than planned": (
        about(lambda a: a["plan"].update(steps=55)),
        "curves.csv, line 57: step 55 of rmsnorm, seed 0, rate 0.001, expected at most 54",
    ),
    "unknown run": (
        line("curves.csv", 62, lambda s: s.replace("p2,0", "p2,7")),
        "curves.csv, line 62: no run p2, seed 7, rate 0.001 in runs.json, which has rmsnorm, seed ",
    ),
    "run not in runs.json": (
        about(lambda a: a["runs"].pop()),
        "curves.csv, line 62: no run p2, seed 0, rate 0.001 in runs.json, which has rmsnorm, seed ",
    ),
    "run not in curves.csv": (
        about(lambda a: a["runs"].append({**a["runs"][0], "seed": 5})),
        "curves.csv: no line of rmsnorm, seed 5, rate 0.001, a run in runs.json",
    ),
    "run twice": (
        about(lambda a: a["runs"].append({**a["runs"][0], "rate": 0.0010000001})),
        "runs.json: runs[2] is rmsnorm, seed 0, rate 0.001, which is there",
    ),
    "cut json": (cut("runs.json", 30), "cut off or no JSON: "),
    "json": (to("runs.json", b"[]"), "runs.json: a list, expected an object"),
    "field": (
        about(lambda a: a["plan"].pop("steps")),
        "runs.json: plan.steps missing, expected a whole number above zero",
    ),
    "unknown field": (
        about(lambda a: a["plan"].update(stepps=4)),
        "runs.json: plan.stepps is unknown; allowed are size, steps, batch, seq, rate, warmup, dev",
    ),
    "kind of field": (
        about(lambda a: a["plan"].update(batch="32")),
        "runs.json: plan.batch is '32', expected a whole number above zero",
    ),
    "driver": (
        about(lambda a: a["machine"].update(driver=580)),
        "runs.json: machine.driver is 580, expected text",
    ),
    "group": (about(lambda a: a.pop("machine")), "runs.json: machine missing, expected an object"),
    "corpus": (
        about(lambda a: a["corpus"].pop("longest")),
        "runs.json: corpus.longest missing, expected a whole number above zero",
    ),
    "kind of group": (
        about(lambda a: a.update(plan=[])),
        "runs.json: plan is [], expected an object",
    ),
    "no runs": (about(lambda a: a["runs"].clear()), "runs.json: runs is [], expected a list of"),
    "a run": (about(lambda a: a["runs"].append(3)), "runs.json: runs[2] is 3, expected an object"),
    "of a run": (
        about(lambda a: a["runs"][1].pop("validation")),
        "runs.json: runs[1].validation missing, expected a number",
    ),
    "statistic": (
        line("norms.csv", 4, lambda s: s.replace("0.03", "0.o3")),
        "norms.csv, line 4: ratio_sd is '0.o3', expected a number",
    ),
    "column of norms": (
        line("norms.csv", 1, lambda s: s.replace("kurtosis", "k")),
        "norms.csv, line 1: column kurtosis missing, expected variant, seed, rate, norm, channel",
    ),
    "norm left out": (
        line("norms.csv", 5, lambda s: ""),
        "norms.csv: no line of p2, seed 0, rate 0.001, norm 0.ffn_norm",
    ),
    "norm twice": (
        line("norms.csv", 5, lambda s: s + s),
        "norms.csv, line 6: norm 0.ffn_norm of p2, seed 0, rate 0.001 is there twice",
    ),
    "norms of an unknown run": (
        line("norms.csv", 5, lambda s: s.replace("p2", "p3")),
        "norms.csv, line 5: no run p3, seed 0, rate 0.001 in runs.json, which has rmsnorm, seed 0",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "125m"
    save(folder)
    return folder


def test_a_folder_that_is_whole(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that is damaged below is read; also the run that was broken off."""
    found, curves = logs.load(kept)
    assert found["machine"] == MACHINE
    assert [(c.variant, len(c.loss), len(c.norms)) for c in curves] == [
        ("rmsnorm", 60, 2), ("p2", 50, 2),
    ]  # fmt: skip
    assert train.main(["show", str(kept)]) == 0
    assert "| p2 | 0.001 | 1 | nan " in capsys.readouterr().out


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_folders(
    kind: str, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by file and line, in the same words by every command that reads them."""
    damage, words = DAMAGED[kind]
    folder = tmp_path / "data" / "125m"
    shutil.copytree(kept, folder)
    damage(folder)
    out = tmp_path / "out"
    page = tmp_path / "train.md"
    said = {
        refused(train.main, ["show", folder], capsys),
        refused(train.main, ["merge", folder, "--out", out], capsys),
        refused(train.main, ["document", "--data", folder.parent, "--out", page], capsys),
    }
    assert len(said) == 1 and words in said.pop()
    said_there = refused(reproduce.main, ["--train", folder.parent, "--out", page], capsys)
    assert words in said_there and said_there.startswith("reproduce.py: error: ")
    assert not out.exists() and not page.exists()


def test_folders_that_are_none(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written, and no figure deleted."""
    gone, file = tmp_path / "gone", kept / "runs.json"
    old = tmp_path / "img" / "train-old.svg"
    old.parent.mkdir()
    old.write_text("<svg/>")
    expected = ", expected a folder with curves.csv, norms.csv, runs.json"
    for command, out in (("show", ()), ("merge", ("--out", tmp_path / "out"))):
        said = refused(train.main, [command, kept, gone, *out], capsys)
        assert said == f"train.py: error: {gone}: no such folder{expected}"
        assert f"runs.json: a file{expected}" in refused(train.main, [command, file, *out], capsys)
    for main, argv in ((train.main, ["document", "--data"]), (reproduce.main, ["--train"])):
        for data, words in (
            (gone, "gone: no such folder, expected the folder around folders of finished runs"),
            (file, "runs.json: a file, expected the folder around folders of finished runs"),
            (kept, "125m: a folder of runs, expected the folder around it"),
            (old.parent, "img: no folder of finished runs in it"),
        ):
            page = tmp_path / "page.md"
            assert words in refused(main, [*argv, data, "--out", page], capsys)
            assert not page.exists()
    for main, argv in ((train.main, ["document", "--data"]), (reproduce.main, ["--train"])):
        for page, words in (
            (tmp_path / "no" / "page.md", f"no/page.md: no folder {tmp_path / 'no'}"),
            (tmp_path, "a folder, expected the name of a file"),
        ):
            assert words in refused(main, [*argv, kept.parent, "--out", page], capsys)
    assert "runs.json: " in refused(train.main, ["merge", kept, "--out", file], capsys)
    assert old.exists() and not (tmp_path / "out").exists()


def test_other_committed_results(kept: Path, tmp_path: Path, capsys) -> None:
    """Those that reproduce.py reads beside the runs."""
    argv = ["--train", kept.parent, "--out", tmp_path / "page.md", "--docs"]
    said = refused(reproduce.main, [*argv, tmp_path / "typo"], capsys)
    assert said.endswith("typo: no data/theory.csv in it, expected the folder of documents")
    docs = tmp_path / "docs"
    names = ["data/theory.csv", "kernels.json", "layer.json", "blackwell.md"]
    for name in names:
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "docs" / name, docs / name)
    assert reproduce.main([str(a) for a in [*argv, docs]]) == 0
    assert capsys.readouterr().out == f"wrote: {tmp_path / 'page.md'}\n"
    for name in names:
        text = (docs / name).read_text()
        (docs / name).write_text(text[:300])
        said = refused(reproduce.main, [*argv, docs], capsys)
        assert f"{docs / name}" in said and ("damaged" in said or "cut off" in said)
        (docs / name).write_text(text)


def test_merging_what_was_not_made_alike(kept: Path, tmp_path: Path, capsys) -> None:
    save(tmp_path / "short", steps=50, device="another", seeds=(1,))
    said = refused(train.main, ["merge", kept, tmp_path / "short", "--out", tmp_path / "o"], capsys)
    assert said.endswith(
        f"short: not made as {kept}: plan.steps 50 against 60; machine.device another against a "
        "chip"
    )
    said = refused(train.main, ["merge", kept, kept, "--out", tmp_path / "o"], capsys)
    assert said.endswith("there more than once: rmsnorm, seed 0, rate 0.001; p2, seed 0, rate 0.00"
                         "1")  # fmt: skip
    save(tmp_path / "many", seeds=tuple(range(5)))
    again = [tmp_path / "many"] * 2
    said = refused(train.main, ["merge", *again, "--out", tmp_path / "o"], capsys)
    assert said.endswith("; rmsnorm, seed 3, rate 0.001; p2, seed 3, rate 0.001; and 2 more")
    before = (kept / "curves.csv").read_bytes()
    said = refused(train.main, ["merge", kept, tmp_path / "many", "--out", kept], capsys)
    assert "125m: has runs already (curves.csv, norms.csv, runs.json), expected another" in said
    assert (kept / "curves.csv").read_bytes() == before


def test_machines_that_note_more(kept: Path, tmp_path: Path, capsys) -> None:
    """What only newer runs note is no difference; of drivers each is kept, of tritons none."""
    notes = [{"triton": "3.6.0", "driver": f"580.{i}"} for i in (1, 2)]
    for i, more in enumerate([*notes, {"triton": "3.7.1", "driver": "580.1"}, {}]):
        save(tmp_path / str(i), seeds=(i + 1,), **more)
    a, b, other, plain = (tmp_path / str(i) for i in range(4))

    def merged(*folders: Path) -> dict[str, str]:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        assert train.main(["merge", *map(str, folders), "--out", str(out)]) == 0
        found, curves = logs.load(out)
        assert len(curves) == sum(len(logs.load(folder)[1]) for folder in folders) >= 4
        machine: dict[str, str] = found["machine"]
        return machine

    both = {**MACHINE, "triton": "3.6.0", "driver": "580.1; 580.2"}
    assert merged(a, b) == both
    shutil.copytree(tmp_path / "out", tmp_path / "before")
    save(tmp_path / "c", seeds=(9,), **notes[0])
    assert merged(tmp_path / "before", tmp_path / "c") == both
    assert merged(kept, plain) == merged(kept, a) == merged(a, kept) == MACHINE
    capsys.readouterr()
    said = refused(train.main, ["merge", a, other, "--out", tmp_path / "no"], capsys)
    assert said.endswith(f"2: not made as {a}: machine.triton 3.7.1 against 3.6.0")
    # The same decides what has its pair in another folder.
    found = runs.read(tmp_path)
    assert len(runs.join(found["0"], found["3"]).curves) == 2  # other seeds
    for name, count in (("0", 3), ("2", 2)):
        one, same = found[name], runs.Folder(a, found["0"].about, [Curve("p1", 3, 1e-3)])
        one = runs.Folder(one.path, one.about, [Curve("rmsnorm", 3, 1e-3), Curve("p2", 3, 1e-3)])
        assert len(runs.join(one, same).curves) == count
