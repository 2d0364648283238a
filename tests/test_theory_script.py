"""benchmarks/theory.py: what it measures agrees with the theory, and docs/theory.md with it."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mxnorm_pass import theory

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "theory.py"
DATA = ROOT / "docs" / "data" / "theory.csv"
DOC = ROOT / "docs" / "theory.md"


@pytest.fixture(scope="module")
def lib() -> Iterator[ModuleType]:
    """``theorylib`` with its parts, and the script as its attribute ``script``."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        importlib.import_module("theorylib.figures")
        module = importlib.import_module("theorylib")
        spec = importlib.util.spec_from_file_location("theory_script", SCRIPT)
        module.script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module.script)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def committed(lib):
    return lib.figures.read_csv(DATA)


@pytest.fixture(scope="module")
def fresh(lib):
    """A small measurement with another seed than the committed one."""
    return lib.measure.measure(seed=7, elements=2**20)


def check(rows, pick):
    """Measured and predicted numbers against each other, within what the statistics allow."""
    constants = pick(rows, table="constant")
    assert len(constants) == 24
    for r in constants:
        assert abs(r.measured - r.predicted) < 5 * r.stderr, r
    for r in pick(rows, table="bound"):
        assert r.measured == pytest.approx(r.predicted, rel=1e-6), r
    spread = [r for r in pick(rows, table="error") if r.dist in ("gaussian", "laplace")]
    for r in spread:
        if r.k >= 32:
            # First order in 1/K: a few percent of the spread at 32 blocks, less above.
            assert abs(r.measured - r.predicted) < 5 * r.stderr + 0.05 * r.predicted, r
    for r in pick(rows, table="spike"):
        if not math.isnan(r.predicted):
            assert r.measured == pytest.approx(r.predicted, rel=0.01), r


def test_committed_measurement_agrees_with_theory(lib, committed):
    check(committed, lib.figures.pick)
    for r in lib.figures.pick(committed, table="error", dist="gaussian", p=2):
        assert r.predicted == pytest.approx(theory.error_sd(2, 32, 32 * r.k), rel=1e-6)


def test_fresh_measurement_agrees_with_theory_and_with_the_committed(lib, fresh, committed):
    pick = lib.figures.pick
    check(fresh, pick)
    assert [(r.table, r.dist, r.p, r.block, r.k, r.name) for r in fresh] == [
        (r.table, r.dist, r.p, r.block, r.k, r.name) for r in committed
    ]
    for a, b in zip(pick(fresh, table="cast"), pick(committed, table="cast"), strict=True):
        tolerance = 0.05 if a.name == "same scale" else 0.002
        assert a.measured == pytest.approx(b.measured, abs=tolerance)


def test_agreement_behind_the_cast(lib, fresh):
    """r2 from about .978 for rows of one block to .999 for rows of 128; scales that agree."""
    pick = lib.figures.pick
    for cast in ("MXFP8 FLOOR", "MXFP8 RCEIL"):
        r2 = {r.k: r.measured for r in pick(fresh, table="cast", dist=cast, name="r2")}
        residual = {
            r.k: r.measured for r in pick(fresh, table="cast", dist=cast, name="1 - SSE/SST")
        }
        assert residual[1] < 0.979 < r2[1] < 0.983
        assert r2[128] == pytest.approx(0.999, abs=0.0003)
        assert all(r2[k] < r2[2 * k] for k in (1, 2, 4, 8, 16, 32))
        for r in pick(fresh, table="cast", dist=cast, name="same scale"):
            if r.k >= 8:
                assert r.measured == pytest.approx(r.predicted, abs=0.012), r


def test_lognormal_constant_by_another_quadrature(lib):
    """c of the mixture from its own density, drawn: no formula in common."""
    rng = np.random.default_rng(3)
    m = np.abs(lib.measure.SAMPLERS["lognormal"](rng, 2**21)).reshape(-1, 32).max(-1)
    assert lib.measure.constant(1, 32, "lognormal") == pytest.approx(1 / m.mean(), rel=0.01)
    assert np.square(lib.measure.SAMPLERS["lognormal"](rng, 2**20)).mean() == pytest.approx(
        1, abs=0.02
    )


def test_same_seed_same_numbers(lib):
    runs = [lib.measure._bounds, lambda: lib.measure._spikes(np.random.default_rng(5))]
    for run in runs:
        assert [r.measured for r in run()] == [r.measured for r in run()]


def run_script(lib, *args: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["theory.py", *args])
        return lib.script.main()


def test_document_and_figures_are_those_of_the_committed_csv(lib, capsys):
    """Byte for byte: a number in the page that the CSV file does not have fails here."""
    if not version("matplotlib").startswith("3.11."):
        pytest.skip("figures are compared with those of the pinned matplotlib, 3.11")
    assert run_script(lib, "--check") == 0, capsys.readouterr().out


def test_stale_document_is_named_and_made_anew(lib, tmp_path, capsys, monkeypatch):
    kept = {"theory-spikes.svg": lib.figures.FIGURES["theory-spikes.svg"]}
    monkeypatch.setattr(lib.figures, "FIGURES", kept)
    document = tmp_path / "theory.md"
    document.write_text(DOC.read_text().replace("| 0.418505 |", "| 0.418506 |"))
    assert run_script(lib, "--check", "--doc", str(document)) == 1
    assert f"stale: {document}" in capsys.readouterr().out
    assert run_script(lib, "--doc", str(document)) == 0
    assert document.read_text() == DOC.read_text()
    assert (tmp_path / "img" / "theory-spikes.svg").exists()


def test_unknown_table_is_an_error(lib, committed):
    with pytest.raises(ValueError, match="no table 'nothing': there are constants, errors"):
        lib.figures.fill("<!-- table: nothing -->\n<!-- end -->", committed)
