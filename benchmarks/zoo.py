"""The pass on a tiny model of every architecture of transformers, against an oracle.

The oracle runs each model eagerly and finds by behaviour which RMSNorm feeds which quantised
linear; each graph of one compile is run as it was and rewritten, on the same inputs, and every
output and gradient compared. ``docs/zoo.md`` has the results and says how they are made.

    python benchmarks/zoo.py --subset
    python benchmarks/zoo.py --jobs 2 --write docs/zoo.md
    python benchmarks/zoo.py --only llama qwen3 --kinds infer --fresh

Results are kept per architecture, so that a run can be taken up again. Exits with 1 where a site
was missed, or rewritten that is none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from zoolib import names, run

RESULTS = Path(tempfile.gettempdir()) / "mxnorm_zoo"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types")
    parser.add_argument("--subset", action="store_true", help="one architecture per form of norm")
    parser.add_argument("--kinds", default="infer,train", help="infer, train or both")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one architecture")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--write", type=Path, help="write the results as a document")
    parser.add_argument("--also", type=Path, help="folder of another run, for its totals")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run.worker(args.results, args.limit)
        return 0

    wanted = args.only or (names.SUBSET if args.subset else names.candidates())
    unknown = [n for n in wanted if n not in names.candidates()]
    if unknown:
        parser.error(f"no architecture with an RMSNorm in its source: {', '.join(unknown)}")
    kinds = args.kinds.split(",")
    todo = [(name, kind) for kind in kinds for name in wanted]
    done = {} if args.fresh else run.load(args.results)
    if args.retry:
        done = {job: result for job, result in done.items() if "error" not in result}
    run.run_all([job for job in todo if job not in done], args.results, args.jobs, args.limit)

    results = run.load(args.results)
    chosen = [results[job] for job in todo if job in results]
    if args.write:
        from zoolib.document import document

        others = list(run.load(args.also).values()) if args.also else []
        args.write.write_text(document(list(results.values()), others))
    checked = [r for r in chosen if "error" not in r]
    missed = sum(len(r["missed"]) for r in checked)
    false = sum(len(r["false"]) for r in checked)
    true = sum(len(r["pairs"]) for r in checked)
    print(
        f"{len(checked)} of {len(chosen)} checks ran: {true} true sites, "
        f"{sum(len(r['rewritten']) for r in checked)} rewritten, "
        f"{sum(len(r['declined']) for r in checked)} declined, {missed} missed, {false} false"
    )
    return int(bool(missed or false))


if __name__ == "__main__":
    sys.exit(main())
