"""benchmarks/training.py and distributed.py but for their runs, and the page made of the first."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("examples", "benchmarks")]

import distributed  # noqa: E402
import training  # noqa: E402

CSV = ROOT / "docs/data/training.csv"


@pytest.fixture
def run() -> tuple[dict[str, list[float]], dict[str, Any]]:
    return training.read_curves(CSV), json.loads(CSV.with_suffix(".json").read_text())


def test_the_page_is_that_of_the_committed_curves(run: Any) -> None:
    text = (ROOT / "docs/training.md").read_text()
    assert training.fill(text, *run) == text


def test_the_committed_run(run: Any) -> None:
    """300 steps, five seeds and three rewritten, both sites of a block on both ranks."""
    curves, about = run
    assert training.judge(curves, about) == []
    assert {len(c) for c in curves.values()} == {300}
    assert [len(training.of(curves, kind)) for kind in training.KINDS] == [5, 3]
    assert [s["rewritten"]["rewritten"] for s in about["sites"]] == [2, 2]


def test_what_the_script_fails_for(run: Any) -> None:
    curves, about = run
    fewer = copy.deepcopy(about)
    fewer["sites"][1]["rewritten"]["rewritten"] = 1
    assert any("rank 1, rewritten" in p for p in training.judge(curves, fewer))
    name = next(name for name in curves if name.startswith("rewritten"))
    for change, word in (
        (lambda c: [x + 0.6 for x in c], "0% of its points within"),
        (lambda c: [*c[:-25], *(x + 0.6 for x in c[-25:])], "ends at"),
        (lambda c: [c[0]] * len(c), "not learnt"),
        (lambda c: [*c[:-1], float("nan")], "ends at nan"),
    ):
        changed = {**curves, name: change(curves[name])}
        assert any(word in p for p in training.judge(changed, about)), word


def test_where_a_run_of_another_seed_is() -> None:
    """By hand: 1, 2 and 3 have mean 2 and sd 1; t(.975, 2) is 4.3027."""
    low, high = training.expected([1.0, 2.0, 3.0])
    half = 4.3027 * (1 + 1 / 3) ** 0.5
    assert (low, high) == pytest.approx((2 - half, 2 + half), rel=1e-4)


def test_text_and_batches() -> None:
    text = training.read_text()
    assert 1.2e6 < len(text) < 1.5e6
    printable = ((text >= 32) & (text < 127)) | (text == 10)
    assert float(printable.float().mean()) > 0.99
    assert float((text == ord("e")).float().mean()) > 0.06  # English
    a, b, other = (training.make_batches(text, 3, seed) for seed in (0, 0, 1))
    assert a.shape == (3, training.BATCH, training.SEQ + 1) and a.equal(b) and not a.equal(other)


def result(losses: list[float], rewritten: int) -> dict[str, Any]:
    rank = {"sites": 2, "rewritten": rewritten, "graphs": 1, "declined": []}
    return {"ranks": [rank, rank], "losses": losses, "ms": 1.0, "bytes": {"allgather": 2_000_000}}


def test_distributed_is_judged_by_sites_and_losses() -> None:
    results = {
        "one process | unrewritten": result([5.0, 4.0], 0),
        "one process | estimate": result([5.0, 4.1], 2),
        "FSDP2 | unrewritten": result([5.0, 4.0], 0),
        "FSDP2 | estimate": result([5.0, 4.11], 2),
    }
    assert distributed.judge(results) == []
    assert distributed.agreement(results, "FSDP2 | estimate") == pytest.approx(0.01 / 4.1)
    about = {
        **{"ranks": 2, "backend": "gloo", "device": "CPU", "torch": "2.13", "ac": "none"},
        **{"sizes": {"dim": 64, "ffn": 128, "layers": 2}, "batch": 4, "seq": 32},
    }
    text = distributed.table({"about": about, "results": results})
    assert "| FSDP2 | estimate | 2 of 2 in 1, 2 of 2 in 1 | 1.0 | allgather 2 | 2.4e-03 |" in text
    for name, wrong in (
        ("FSDP2 | estimate", result([5.0, 4.11], 0)),
        ("FSDP2 | estimate", result([5.0, 4.3], 2)),
        ("FSDP2 | unrewritten", result([5.0, float("nan")], 0)),
    ):
        assert distributed.judge({**results, name: wrong})[0].startswith(name)


def test_bytes_of_a_profiled_collective() -> None:
    assert distributed._bytes([2, 8], "c10::BFloat16") == 32
    assert distributed._bytes([[2, 8], [4]], "float") == 80
    assert distributed._bytes([], "") == 0
