"""What the rows of ``docs/reproduce.md`` are made of: reported figures and committed results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernellib.figures import Figures
from theorylib.figures import read_csv

from trainlib import runs
from trainlib.inputs import BadInput, read_json

# The abstract of arXiv 2603.13180 (A), and figures that others report from the paper and that were
# not checked against it (R).
REPORTED: dict[str, Any] = {
    "losses": {  # R: RMSNorm, p = 1, p = 2
        "125M": (3.090, 3.113, 3.116),
        "1B": (2.692, 2.684, 2.691),
        "8B": (2.132, 2.175, 2.126),
    },
    "constant": 2.389,  # R: p = 2, B = 32; multiplies (mean m^p)^(-1/p)
    "r2": {1: 0.978, 128: 0.999},  # R: K
    "kernel": 2.4,  # A: up to, GB200
    "layer": {"MXFP8": 0.013, "NVFP4": 0.026},  # A
}
SHAPE = (16384, 4096, False)
# NVIDIA's figures of an H200: 132 multiprocessors with 4 schedulers, at most 1.98 GHz.
H200_BANDWIDTH, H200_CLOCK = 4.8e12, 1.98e9
H200_ISSUE = 132 * 4 * H200_CLOCK


class Sources:
    """Everything that the page is made of.

    Raises:
        BadInput: where a file of ``docs`` or a folder of ``train`` is missing or damaged.
    """

    def __init__(self, docs: Path, train: Path) -> None:
        def read(name: str, parse: Callable[[Path], Any]) -> Any:
            path = docs / name
            if not path.is_file():
                raise BadInput(f"--docs {docs}: no {name} in it, expected the folder of documents")
            try:
                return parse(path)
            except BadInput:
                raise
            except (KeyError, TypeError, ValueError, StopIteration) as error:
                raise BadInput(f"{path}: damaged, {error!r}") from None

        self.theory = read("data/theory.csv", read_csv)
        self.kernels = read("kernels.json", lambda path: Figures(read_json(path)))
        self.layer = read("layer.json", read_json)
        self.blackwell = read("blackwell.md", blackwell_row)
        self.train = runs.read(train)


def blackwell_row(path: Path) -> dict[str, float]:
    """Instructions per element and milliseconds of ``SHAPE`` from the prediction's own table."""
    lines = path.read_text().splitlines()
    head = next(line for line in lines if line.startswith("| K | residual | form |"))
    row = next(line for line in lines if line.startswith(f"| {SHAPE[1]} | no | its cast |"))
    cells = ([c.strip() for c in line.strip("|").split("|")] for line in (head, row))
    return {name: float(c) for name, c in zip(*cells, strict=True) if c.replace(".", "").isdigit()}
