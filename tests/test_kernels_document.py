"""``docs/kernels.md`` against the committed measurements, read afresh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from kernellib import tables

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "kernels.md").read_text()
RESULT = json.loads((DOCS / "kernels.json").read_text())


def test_the_page_is_that_of_the_committed_results() -> None:
    """Up to the instructions that are counted in code, which the results do not hold."""
    cut = "\n## Issued instructions"
    assert cut in PAGE
    assert tables.document(RESULT).split(cut)[0] == PAGE.split(cut)[0]


def test_what_the_page_says_first() -> None:
    ms = {(r["m"], r["k"], r["residual"], r["variant"]): r["ms"] for r in RESULT["rows"]}
    page = PAGE.split("\n## How")[0]

    def span(variant: str, few: bool, residual: bool | None) -> str:
        found = [
            ms[m, k, added, "compile"] / value
            for (m, k, added, name), value in ms.items()
            if name == variant
            and (m <= 256 if few else m * k >= 80e6)
            and residual in (None, added)
        ]
        return f"{min(found):.2f} to {max(found):.2f}x"

    for few, residual in ((False, False), (False, True), (True, None)):
        ours, exact = (span(v, few, residual) for v in ("ours_p2_folded", "ours_exact"))
        assert f"{ours} torch.compile's speed ({exact} with the true RMS)" in page
    # x in 2 bytes, codes in 1, a scale for each 32, a root a row; with a residual two rows more.
    shares = [
        (m * k * (7 if added else 3) + m * k // 32 + 4 * m) / RESULT["copy"]["copy"] * 1e3 / value
        for (m, k, added, name), value in ms.items()
        if name == "ours_p2_folded" and m * k >= 80e6 and not added
    ]
    assert f"{min(shares):.2f} to {max(shares):.2f} of the copy limit (wanted: 0.97)" in page
    hits, misses = (PAGE.count(f"\n- {word} ours_") for word in ("PASS", "MISS"))
    assert f"{hits} of {hits + misses} targets are met" in page and misses > 0
