"""Dumps on disk and in torch's structured trace, the latter read by tlparse."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from compiling import run
from models import inference_block, rows, training_block
from torch.fx import Graph

from mxnorm_pass import MXNormConfig, Report
from mxnorm_pass.report import GraphReport, dump

FILES = ("before.py", "after.py", "changes.diff", "sites.json")


def test_a_graph_before_after_and_what_changed(tmp_path: Path) -> None:
    config = MXNormConfig(dump_dir=str(tmp_path))
    block, x = training_block("llama", widths=(64,)), rows(2, 32, 128)
    result = run(block, x, config=config)
    rank = tmp_path / "rank_0"
    before, after, changes, sites = ((rank / "graph_000" / f).read_text() for f in FILES)
    assert "aten.rsqrt" in before and "rmsnorm_mxquant" not in before
    assert "aten.rsqrt" not in after and "rmsnorm_mxquant" in after
    # Shapes, and the model's own line, are there to read.
    assert "bf16[2, 32, 128]" in before and "torch.rsqrt(h.pow(2).mean" in before
    assert Report.from_json(sites).graphs == result.report.graphs
    # The difference, applied, gives the one from the other: nothing is hidden in it.
    lines = changes.splitlines()
    assert lines[:2] == ["--- before.py", "+++ after.py"]
    removed = [line[1:] for line in lines[2:] if line.startswith("-")]
    added = [line[1:] for line in lines[2:] if line.startswith("+")]
    assert any("aten.rsqrt" in line for line in removed)
    assert any("rmsnorm_mxquant" in line for line in added)
    bare_before, bare_after = (dump._FREED.sub("", text).splitlines() for text in (before, after))
    assert set(bare_before) - set(removed) == set(bare_after) - set(added)
    # What is only freed elsewhere is no change.
    assert not any(line.rstrip().endswith("= None") for line in (*removed, *added))
    index = (rank / "index.md").read_text()
    assert "| graph_000 | training | 1 | 1 | 0 |" in index
    for link in re.findall(r"\]\((.*?)\)", index):
        assert (rank / link).is_file()


def test_a_second_graph_gets_a_folder_and_a_row(tmp_path: Path) -> None:
    config = MXNormConfig(dump_dir=str(tmp_path))
    for training in (True, False):
        run(training_block("torch", widths=(64,)), rows(64, 128), training=training, config=config)
    index = (tmp_path / "rank_0" / "index.md").read_text()
    assert index.count("# Graphs that mxnorm_pass saw") == 1
    assert [name for name in re.findall(r"^\| (graph_\d+) ", index, re.MULTILINE)] == [
        "graph_000",
        "graph_001",
    ]
    assert "inference" in index.splitlines()[-1]


def test_the_variable_names_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNORM_DUMP", str(tmp_path / "variable"))
    monkeypatch.setenv("RANK", "3")
    block, x = inference_block("torch", widths=(64,)), rows(4, 128)
    run(block, x, training=False)
    assert (tmp_path / "variable" / "rank_3" / "graph_000" / "after.py").is_file()
    run(block, x, training=False, config=MXNormConfig(dump_dir=str(tmp_path / "option")))
    assert (tmp_path / "option" / "rank_3" / "graph_000" / "after.py").is_file()


def test_a_folder_that_cannot_be_written_is_said_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = MXNormConfig(dump_dir=str(tmp_path / "file" / "dump"))
    block, x = inference_block("torch", widths=(64,)), rows(4, 128)
    assert run(block, x, training=False, config=config).report.rewritten == 1
    assert "the dump of a graph failed" in caplog.text and "Not a directory" in caplog.text


def _write(folder: str, times: int) -> None:
    graph = Graph()
    graph.output(graph.placeholder("x"))
    for _ in range(times):
        dump.Dump(folder, graph).after(graph, GraphReport(training=False))


def test_processes_of_one_rank_do_not_overwrite_each_other(tmp_path: Path) -> None:
    workers = [
        multiprocessing.get_context("fork").Process(target=_write, args=(str(tmp_path), 20))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    folders = {f.name for f in (tmp_path / "rank_0").glob("graph_*")}
    assert folders == {f"graph_{i:03d}" for i in range(80)}
    rows_of_index = (tmp_path / "rank_0" / "index.md").read_text().splitlines()
    listed = [line.split("|")[1].strip() for line in rows_of_index if line.startswith("| graph_")]
    assert sorted(listed) == sorted(folders)


def test_rank_of_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert dump._rank() == 5
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("RANK", "not a number")
    assert dump._rank() == 0


TRACED = """
    import sys
    import torch, mxnorm_pass
    from models import inference_block, rows

    model, x = inference_block("llama", widths=(64,)), rows(64, 128)
    backend = mxnorm_pass.backend()
    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    print([(g.from_cache, g.rewritten) for g in backend.report.graphs])
"""


@pytest.mark.slow
@pytest.mark.inductor
def test_tlparse_shows_what_was_rewritten(tmp_path: Path) -> None:
    """Through a real trace, twice: compiled, and found in torch's cache by a second process."""
    tlparse = shutil.which("tlparse", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tlparse, "tlparse is missing: it comes with the extra 'test'"
    seen = []
    for attempt in ("compiled", "cached"):
        trace = tmp_path / attempt
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRACED)],
            env={
                **os.environ,
                "TORCH_TRACE": str(trace),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
                "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
                "PYTHONPATH": str(Path(__file__).parent),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        seen.append(done.stdout.strip())
        (log,) = trace.glob("*.log")
        out = tmp_path / f"{attempt}_html"
        subprocess.run(
            [tlparse, str(log), "-o", str(out), "--no-browser"], check=True, capture_output=True
        )
        index = (out / "index.html").read_text()
        (sites,) = out.glob("*/mxnorm_sites*.json")
        assert sites.name in index
        report = json.loads(sites.read_text())
        assert [s["status"] for s in report["graphs"][0]["sites"]] == ["rewritten"]
        if attempt == "compiled":
            (after,) = out.glob("*/mxnorm_after*")
            (changes,) = out.glob("*/mxnorm_changes*")
            assert after.name in index and changes.name in index
            assert "rmsnorm_mxquant" in after.read_text()
            assert "+++ after.py" in changes.read_text()
    assert seen == ["[(False, 1)]", "[(True, 1)]"]
