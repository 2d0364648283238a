"""The prediction of `mxnorm explain`: its arithmetic by hand, and against what an H200 measured."""

import json
import statistics
from pathlib import Path

import pytest

from mxnorm_pass.cli.savings import CHIPS, LAUNCH_SECONDS, YIELD, duration, size, traffic

KERNELS = Path(__file__).parents[1] / "docs" / "kernels.json"


def test_a_site_by_hand() -> None:
    # 16 rows of 64: 2048 bytes of bfloat16; 1024 bytes of e4m3 and 32 scales.
    moved = traffic(16, 64, 2, "e4m3", 32)
    assert moved.before == 3 * 2048 + 1024 + 32
    assert moved.after == 2048 + 1024 + 32 + 4 * 16
    assert (moved.saved, moved.launches) == (2 * 2048 - 64, 1)
    b200 = CHIPS["b200"]
    assert moved.seconds(b200) == pytest.approx(YIELD * 4032 / 8e12 + LAUNCH_SECONDS)
    # Two codes a byte, 16 elements a scale.
    assert traffic(16, 64, 2, "e2m1", 16).before == 3 * 2048 + 512 + 64


def test_what_takes_the_saving_away() -> None:
    read = traffic(16, 64, 2, "e4m3", 32, read_elsewhere=True)
    assert read.saved == -64 and read.launches == 0 and "formed all the same" in read.why
    measured = traffic(16, 64, 2, "e2m1", 16, measured_tensor_scale=True)
    assert measured.saved == 2048 - 64 and measured.launches == 0
    assert traffic(16, 65536, 2, "e4m3", 32).saved == 0


def test_words_for_bytes_and_times() -> None:
    assert [size(b) for b in (0, 999, 32256, 4.29e9, 2.5e12)] == [
        "0 B",
        "999 B",
        "32.3 kB",
        "4.29 GB",
        "2.5 TB",
    ]
    assert [duration(s) for s in (6e-6, 2.66e-3)] == ["6.0 us", "2.66 ms"]


def test_the_h200_saw_what_is_predicted() -> None:
    rows = json.loads(KERNELS.read_text())["rows"]
    times = {(r["m"], r["k"], r["residual"], r["variant"]): r["ms"] for r in rows}
    ratios = []
    for (m, k, residual, variant), before in times.items():
        if variant != "compile" or m < 2048:
            continue
        saved = before - times[m, k, residual, "ours_exact"]
        predicted = traffic(m, k, 2, "e4m3", 32).seconds(CHIPS["h200"]) * 1e3
        ratios.append(predicted / saved)
    assert len(ratios) == 36
    assert statistics.median(ratios) == pytest.approx(1, abs=0.1)
    # Launch and tail weigh for the smallest, the L2 cache for the widest.
    assert sum(0.75 < ratio < 1.3 for ratio in ratios) >= 33
