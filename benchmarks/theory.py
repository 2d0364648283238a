"""The estimate's constant, error and bounds, measured: tables and figures of ``docs/theory.md``.

    python benchmarks/theory.py                      # figures and tables from docs/data/theory.csv
    python benchmarks/theory.py --measure --seed 0   # measure again first; a minute or two
    python benchmarks/theory.py --check              # exit 1 where the documents are not up to date

The measurement is Monte Carlo on the CPU, the same for the same seed, size and numpy.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import paths  # noqa: F401
from theorylib import figures
from theorylib.measure import measure

DOCS = Path(__file__).parents[1] / "docs"


def outputs(data: Path, document: Path) -> dict[Path, str]:
    """Every generated file and its text."""
    rows = figures.read_csv(data)
    made = {document: figures.fill(document.read_text(), rows)}
    made.update({document.parent / "img" / name: text for name, text in figures.draw(rows).items()})
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure, and write the CSV file")
    parser.add_argument("--seed", type=int, default=0, help="of the measurement (default 0)")
    parser.add_argument(
        "--elements", type=int, default=2**24, help="drawn per distribution (default 2**24)"
    )
    parser.add_argument("--data", type=Path, default=DOCS / "data" / "theory.csv", help="CSV file")
    parser.add_argument("--doc", type=Path, default=DOCS / "theory.md", help="document to fill")
    parser.add_argument("--check", action="store_true", help="write nothing, name what is stale")
    args = parser.parse_args()
    if args.elements < 2**18:
        parser.error("--elements: at least 2**18, for rows of 512 blocks of 64")
    if args.measure:
        start = time.perf_counter()
        figures.write_csv(measure(args.seed, args.elements), args.data)
        print(f"measured in {time.perf_counter() - start:.0f} s, wrote {args.data}")
    stale = False
    for path, text in outputs(args.data, args.doc).items():
        if path.exists() and path.read_text() == text:
            continue
        stale = True
        print(f"{'stale' if args.check else 'wrote'}: {path}")
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return int(args.check and stale)


if __name__ == "__main__":
    sys.exit(main())
