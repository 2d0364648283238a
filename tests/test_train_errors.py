"""What a user gets wrong with ``benchmarks/train.py`` and ``reproduce.py``: said, and status 2."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import reproduce
import train
from test_train_script import markov
from trainlib import corpus, logs, loop, results, runs
from trainlib.loop import Batches, Curve, Plan

ROOT = Path(__file__).parents[1]
MACHINE = {"device": "a chip", "torch": "2.11.0", "torchao": "0.18.0"}
STEPS = 60
Main = Callable[[list[str]], int]


def save(folder: Path, steps: int = STEPS, seeds: tuple[int, ...] = (0,), **machine: str) -> None:
    """Runs of two variants, those of p = 2 broken off at step 50 as the loop does."""
    text = corpus.Corpus(np.zeros(9, np.uint16), "a.tar", 40, 300, "ab" * 32, 40, 40)
    made = []
    for seed in seeds:
        for variant, count in (("rmsnorm", steps), ("p2", 50)):
            loss = [3.0 + 1 / (i + 1) for i in range(count)]
            if variant == "p2":
                loss[40:] = [math.nan] * 10
            one = Curve(variant, seed, 1e-3, loss, [0.5] * count, 3.0, 2, 1.0)
            one.norms = [
                {"norm": name, "channel": 2.0, "kurtosis": 3.0, "ratio_mean": 1.0, "ratio_sd": 0.03}
                for name in ("0.attention_norm", "0.ffn_norm")
            ]
            made.append(one)
    plan = Plan("tiny", steps, 2, 32, 1e-3, 6, "cpu")
    results.save(folder, plan, text, made, {**MACHINE, **machine})


def refused(main: Main, argv: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said where a command refuses: by argparse, behind its usage, or in one line."""
    try:
        status: object = main([str(a) for a in argv])
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), (status, out, err)
    *usage, said = err.strip().splitlines()
    assert not usage or usage[0].startswith("usage: ")
    assert ": error: " in said
    return said


# --- folders of runs ------------------------------------------------------------------------------


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
        line("curves.csv", 111, lambda s: s.replace("nan", "3.1")),
        "line 111: p2, seed 0, rate 0.001 ends after 50 steps, expected 60, by its plan; fewer on",
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


def test_machines_that_note_more(kept: Path, tmp_path: Path, capsys) -> None:
    """What only newer runs note is no difference; of drivers each is kept, of tritons none."""
    notes = [{"triton": "3.6.0", "driver": f"580.{i}"} for i in (1, 2)]
    for i, more in enumerate([*notes, {"triton": "3.7.1", "driver": "580.1"}, {}]):
        save(tmp_path / str(i), seeds=(i + 1,), **more)
    a, b, other, plain = (tmp_path / str(i) for i in range(4))

    def merged(*folders: Path) -> dict[str, str]:
        out = tmp_path / "out"
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


# --- arguments, corpora, archives -----------------------------------------------------------------

COUNT = "expected a whole number above zero"
ARGUMENTS = {
    "--tokens abc": f"argument --tokens: abc: {COUNT}",
    "--tokens 1e999": f"argument --tokens: 1e999: {COUNT}",
    "--tokens nan": f"argument --tokens: nan: {COUNT}",
    "--tokens 2.5": f"argument --tokens: 2.5: {COUNT}",
    "--tokens 63": "--tokens 63: expected 64 or more, one step's",
    "--batch 0": f"argument --batch: 0: {COUNT}",
    "--batch 1 --seq 33": "--batch 1 --seq 33: 33 tokens a step, expected a multiple of 32",
    "--batch 12500 --tokens 1e6": "--batch 12500 --seq 32: 400,000 tokens a step, expected fewer",
    "--batch 1024 --tokens 1e6": "--corpus: it has 430,000 tokens, too few for one step of 32,768",
    "--rates 0": "argument --rates: 0: expected a number above zero",
    "--rates -1": "argument --rates: -1: expected a number above zero",
    "--rates nan": "argument --rates: nan: expected a number above zero",
    "--rates 1e39": "argument --rates: 1e39: expected a number above zero, 1e-30 to 1e30",
    "--rates inf": "argument --rates: inf: expected a number above zero",
    "--rates fast": "argument --rates: fast: expected a number above zero",
    "--rates 1e-3 0.001": "argument --rates: 0.001: there more than once",
    "--rates 1e-3 0.0010000001": "argument --rates: 0.001: there more than once",
    "--seeds 0 1 0": "argument --seeds: 0: there more than once",
    "--seeds -1": "argument --seeds: -1: expected a whole number from 0 to 2**32 - 1",
    "--seeds 4294967296": "argument --seeds: 4294967296: expected a whole number from 0 to 2**32",
    "--variants p2 p2": "argument --variants: p2: there more than once",
    "--variants p3": "argument --variants: invalid choice: 'p3' (choose from ",
    "--device foo": "argument --device: invalid choice: 'foo' (choose from ",
    "--budget nan": "argument --budget: nan: expected seconds, zero or more",
    "--budget -1": "argument --budget: -1: expected seconds, zero or more",
    "--size small": "argument --size: invalid choice: 'small' (choose from ",
}
if not torch.cuda.is_available():
    ARGUMENTS["--device cuda"] = "argument --device: cuda: torch sees no GPU here; allowed is cpu"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.npz"
    markov(path)
    return path


def run_of(text: Path, out: Path, more: str) -> list[object]:
    """A run of one step, with other arguments behind."""
    argv: list[object] = ["run", "--size", "tiny", "--inner", "eager", "--device", "cpu"]
    argv += ["--tokens", "64", "--batch", "2", "--seq", "32", "--corpus", text, "--out", out]
    return [*argv, *more.split()]


@pytest.mark.parametrize("more", ARGUMENTS)
def test_arguments_of_a_run(more: str, text: Path, tmp_path: Path, capsys) -> None:
    said = refused(train.main, run_of(text, tmp_path / "out", more), capsys)
    assert ARGUMENTS[more] in said
    assert not (tmp_path / "out").exists()


def test_runs_that_would_have_nowhere_to_go(text: Path, tmp_path: Path, capsys) -> None:
    """Before anything is trained."""
    for out in (text, text / "below"):
        said = refused(train.main, run_of(text, out, ""), capsys)
        assert said.endswith(f"{out}: {text} is a file, expected a folder or nothing yet")
    argv = ["vit", "--device", "cpu", "--budget", "0", "--out"]
    assert "is a file" in refused(train.main, [*argv, text], capsys)
    argv += [tmp_path / "out", "--batch", "2000"]
    assert "--batch 2000: expected one of 2, 4, 8, 10," in refused(train.main, argv, capsys)
    assert not (tmp_path / "out").exists()


def test_no_run_in_the_time_that_there_is(text: Path, tmp_path: Path, capsys) -> None:
    argv = [str(a) for a in run_of(text, tmp_path / "out", "--budget 0")]
    assert train.main(argv) == 1
    assert capsys.readouterr().err == "no run was made in --budget 0 seconds\n"
    assert not (tmp_path / "out").exists()


def test_a_run_that_breaks_off(text: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Ends where the loader allows it to; looked at often, so that few steps do. Not compiled."""
    monkeypatch.setattr(loop, "LOOK", 2)
    out = tmp_path / "out"
    argv = run_of(text, out, "--tokens 128 --batch 1 --variants rmsnorm --rates 2e18 3e-3")
    with torch.compiler.set_stance("force_eager"):
        assert train.main([str(a) for a in argv]) == 0
    _, curves = logs.load(out)
    assert [(c.rate, len(c.loss), c.sites) for c in curves] == [(2e18, 2, 0), (3e-3, 4, 0)]
    capsys.readouterr()
    lines = (out / "curves.csv").read_text().splitlines(keepends=True)
    (out / "curves.csv").write_text("".join(lines[:-1]))
    said = refused(train.main, ["show", out], capsys)
    assert "line 6: rmsnorm, seed 0, rate 0.003 ends after 3 steps, expected 4, by its plan" in said


def test_corpora(text: Path, tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.npz"

    def said() -> str:
        return refused(train.main, run_of(bad, tmp_path / "out", ""), capsys)

    assert said().endswith("bad.npz: No such file or directory")
    whole = text.read_bytes()
    with np.load(text) as found:
        tokens, known = found["tokens"], json.loads(str(found["about"]))
    middle = bytearray(whole)
    middle[len(whole) // 2] ^= 255
    array = io.BytesIO()
    np.save(array, tokens)
    for content in (b"", b"junk", array.getvalue(), whole[: len(whole) // 2], bytes(middle)):
        bad.write_bytes(content)
        assert "bad.npz: no corpus" in (words := said()) and "`train.py corpus` wrote" in words
    with bad.open("wb") as file:
        np.savez_compressed(file, other=tokens)
    assert "bad.npz: no corpus, or a damaged one; expected a file that `train.py corpus`" in said()
    with bad.open("wb") as file:
        np.savez_compressed(file, tokens=tokens[:-1], about=np.array(json.dumps(known)))
    assert said().endswith("bad.npz: the token ids are damaged (their sha256 differs)")
    corpus.save(corpus.Corpus(tokens, **{**known, "vocab": 600}), bad)
    assert said().endswith(
        "--corpus: it has 600 ids, and size tiny takes 512; as many or more: 125m, 15m, 1b, moe, "
        "moe-linears"
    )
    corpus.save(corpus.Corpus(tokens, **{**known, "vocab": 200}), bad)
    assert said().endswith("bad.npz: token id 299, expected fewer than its 200")
    older = {k: v for k, v in known.items() if k not in ("limit", "longest")}
    with bad.open("wb") as file:
        np.savez_compressed(file, tokens=tokens, about=np.array(json.dumps(older)))
    assert "bad.npz: limit, longest not noted, as an earlier version left it" in said()
    # As many as a step needs, and one fewer.
    plan = Plan("tiny", 1, 2, 32, 1e-3, 1, "cpu")
    enough = corpus.Corpus(tokens[: corpus.VALIDATION + 65], **known)
    assert next(Batches(enough, plan).training(0)).shape == (2, 33)
    with pytest.raises(ValueError, match="400,064 tokens, too few for one step of 64 beside"):
        Batches(corpus.Corpus(tokens[: corpus.VALIDATION + 64], **known), plan)


def test_archives(tmp_path: Path, capsys) -> None:
    archive, out = tmp_path / "a.tar.xz", tmp_path / "corpus.npz"

    def said(*more: object) -> str:
        return refused(train.main, ["corpus", archive, "--out", out, *more], capsys)

    assert said().endswith("a.tar.xz: No such file or directory")
    for content in (b"", b"junk" * 1000):
        archive.write_bytes(content)
        assert "a.tar.xz: no tar archive, or a damaged one: " in said()
    for name, size in (("a.bin", 10), ("a.c", 0), ("b.c", 200_000)):
        with tarfile.open(archive, "w:xz") as tar:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
        assert said().endswith(
            "a.tar.xz: no file of 1 to 150,000 bytes that ends in .c, .h, .rst, .S, .txt, .py"
        )
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    assert "a.tar.xz: no tar archive, or a damaged one: " in said("--longest", "1e6")
    out = tmp_path / "gone" / "corpus.npz"
    assert said().endswith(f"corpus.npz: no folder {tmp_path / 'gone'}")
    assert said("--bytes", "0").endswith(f"argument --bytes: 0: {COUNT}")
    assert not out.exists()


@pytest.mark.cuda
def test_a_gpu_is_noted_with_its_driver() -> None:
    found = train.machine("cuda")
    assert found["device"] == torch.cuda.get_device_name() and "triton" in found
    assert found["driver"].replace(".", "").isdigit()
