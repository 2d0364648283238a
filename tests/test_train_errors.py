"""What a user gets wrong with ``benchmarks/train.py`` and ``reproduce.py``: said, and status 2."""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import train
from test_train_script import markov
from trainlib import corpus, logs, loop, results
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
    there = tmp_path / "there"
    save(there)
    (there / "norms.csv").unlink()
    before = (there / "runs.json").read_bytes()
    for again in (run_of(text, there, ""), [*argv, there]):
        assert refused(train.main, again, capsys).endswith(
            f"{there}: has runs already (curves.csv, runs.json), expected another folder, or an "
            "empty one"
        )
    assert (there / "runs.json").read_bytes() == before
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
