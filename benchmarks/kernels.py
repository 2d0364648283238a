"""The fused kernel against torch.compile, and both against what memory allows.

RMSNorm (with and without the residual add) and MXFP8 cast of bfloat16 rows, in every form that
``kernellib/variants.py`` lists, at 36 shapes: first checked against float64, then timed in CUDA
graphs. ``docs/kernels.md`` has the results and says how they are made.

    python benchmarks/kernels.py --out kernels.json
    python benchmarks/kernels.py --results kernels.json --count --write docs/kernels.md
    python benchmarks/kernels.py --results kernels.json --plot docs/kernels.svg
    python benchmarks/kernels.py --device cpu --tiny          # a smoke test, no figures

The sweep takes some minutes of one GPU; ``--budget`` bounds it, and what was left out is said.
Exits with 1 where a result was wrong or something failed; a missed target is reported, no failure.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from kernellib import warm

ROWS = (16384, 8192, 2048, 256, 16, 1)
# The widths of the models that matter most first, should time run out.
WIDTHS = (4096, 8192, 2048, 5120, 3584, 16384)
FEW = {(m, k) for m in (16384, 2048, 16) for k in (4096, 8192)}
INDUCTOR = {(16384, 4096), (16384, 8192), (16, 4096)}
TINY_ROWS, TINY_WIDTHS = (4, 1), (64, 128)
COPY_BYTES = 1 << 30
NCU_SHAPE = (16384, 4096)


def names_at(m: int, k: int, tiny: bool) -> list[str]:
    """Variants that are timed at a shape."""
    from kernellib.variants import OURS

    names = ["compile", "nested", *OURS]
    if tiny or (m, k) in FEW:
        names += ["eager", "liger"]
    if tiny or (m, k) in INDUCTOR:
        names += ["inductor_exact", "inductor_p2_folded"]
    return names


def shapes(tiny: bool, part: tuple[int, int]) -> list[tuple[int, int, bool]]:
    """Rows, width, residual; wide ones first within a width, since some kernels tune once."""
    rows, widths = (TINY_ROWS, TINY_WIDTHS) if tiny else (ROWS, WIDTHS)
    index, parts = part
    widths = widths[index - 1 :: parts]
    return [(m, k, residual) for residual in (False, True) for k in widths for m in rows]


def jobs(todo: list[tuple[int, int, bool]], tiny: bool) -> list[warm.Job]:
    """What is compiled ahead: long compiles first."""
    import torch
    from kernellib.variants import OURS

    nested = hasattr(torch._inductor.config.triton, "nested_reduction")
    compiles, kernels, cast = [], set(), []
    for m, k, residual in todo:
        for name in names_at(m, k, tiny):
            if name in OURS:
                # One row is a specialisation of its own; all other counts share one.
                kernels.add(warm.Job(name, min(m, 16), k, residual))
            elif name == "compile" or name.startswith("inductor_") or (name == "nested" and nested):
                compiles.append(warm.Job(name, m, k, residual))
            elif name == "liger" and not cast:
                cast = [warm.Job(name, m, k, residual, part) for part in range(warm.LIGER_PARTS)]
    order = sorted(kernels, key=lambda job: (-job.k, job.variant, job.m))
    return cast + [j for j in compiles if j.variant != "compile"] + order + compiles_last(compiles)


def compiles_last(compiles: list[warm.Job]) -> list[warm.Job]:
    """The baseline's compiles, all about as long."""
    return [job for job in compiles if job.variant == "compile"]


class Sweep:
    """Measures shape after shape; ``result`` is the file's content at any time."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from kernellib.timing import Clock

        self.args = args
        self.start = time.perf_counter()
        self.device = torch.device(args.device)
        self.clock = Clock(self.device, args.tiny)
        self.variants: dict[int, Any] = {}
        self.result: dict[str, Any] = {
            "machine": self.machine(),
            "tiny": args.tiny,
            "rows": [],
            "copies": [],
            "unavailable": {},
            "notes": [],
            "failed": [],
            "skipped": [],
        }

    def machine(self) -> dict[str, Any]:
        import torch
        import torchao

        found: dict[str, Any] = {
            "device": self.clock.name,
            "l2": self.clock.l2,
            "torch": torch.__version__,
            "torchao": getattr(torchao, "__version__", "unknown"),
            "python": platform.python_version(),
            "replays": self.clock.replays,
        }
        try:
            import triton

            found["triton"] = triton.__version__
        except ImportError:
            pass
        if self.clock.cuda:
            found["cuda"] = torch.version.cuda
            found["capability"] = list(torch.cuda.get_device_capability(self.device))
        return found

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def late(self, what: str, reserve: float = 0.0) -> bool:
        """Whether the budget is spent; then ``what`` is listed as left out."""
        if self.elapsed <= self.args.budget - reserve:
            return False
        self.result["skipped"].append(what)
        print(f"LEFT OUT, out of time: {what}", flush=True)
        return True

    def guarded(self, what: str, function: Any, *arguments: Any) -> Any:
        """Run a step; a failure is reported and listed, and the next step runs."""
        try:
            return function(*arguments)
        except Exception:
            text = traceback.format_exc()
            self.result["failed"].append({"what": what, "error": text})
            print(f"FAILED: {what}\n{text}", file=sys.stderr, flush=True)
            return None

    def save(self) -> None:
        self.result["seconds"] = self.elapsed
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.result, indent=1))

    def shape(self, m: int, k: int, residual: bool) -> None:
        """Check and time all variants at one shape."""
        import torch
        from kernellib.tables import moved_bytes
        from kernellib.variants import OURS, Checker, Unavailable, Variants

        variants = self.variants.setdefault(k, Variants(k, self.device))
        moved = moved_bytes(m, k, residual)
        clock = self.clock
        copies = clock.copies(moved)
        x = torch.randn(copies, m, k, dtype=torch.bfloat16, device=self.device)
        others = torch.randn_like(x) if residual else None
        ring = [(x[i], None if others is None else others[i]) for i in range(copies)]
        checker = Checker(*ring[-1], variants.gain)

        def one(name: str) -> None:
            if name in self.result["unavailable"]:
                return
            try:
                variant = variants.get(name)
            except Unavailable as reason:
                self.result["unavailable"][name] = str(reason)
                print(f"{name}: {reason}", flush=True)
                return
            for note in variant.notes:
                if note not in self.result["notes"]:
                    self.result["notes"].append(note)
            # Compiles for this shape, and tunes.
            right = checker.check(variant)
            if name in OURS and m == max(TINY_ROWS if self.args.tiny else ROWS):
                checker.check_rows(variant)
            timing = clock.measure(variant.call, ring)
            key = {"m": m, "k": k, "residual": residual}
            row = {**key, "variant": name, "bytes": moved, **timing.describe(), **right}
            self.result["rows"].append(row)

        copied = clock.copy_of(moved)
        key = {"m": m, "k": k, "residual": residual, "bytes": moved}
        self.result["copies"].append({**key, **copied.describe()})
        for name in names_at(m, k, self.args.tiny):
            self.guarded(f"{name} at {m} x {k}, residual {residual}", one, name)

    def count_kernels(self) -> None:
        """How many kernels each compiled variant launches; last, since the profiler stays."""
        import torch
        from kernellib.timing import gpu_work

        seen: dict[tuple[Any, ...], int | None] = {}
        for row in self.result["rows"]:
            if self.late("kernel counts"):
                return
            m, k, name, residual = row["m"], row["k"], row["variant"], row["residual"]
            key = (m if name == "compile" else 0, k, name, residual)
            if key not in seen:
                x = torch.randn(m, k, dtype=torch.bfloat16, device=self.device)
                other = torch.randn_like(x) if residual else None
                call = self.variants[k].get(name).call
                call(x, other)
                seen[key] = len(gpu_work(functools.partial(call, x, other))) or None
            row["kernels"] = seen[key]


def measure(args: argparse.Namespace) -> int:
    """Run the sweep and write the file."""
    warm.set_caches(args.caches)
    import torch
    from kernellib import counters, nvfp4, tables, variants

    torch.set_grad_enabled(False)
    variants.allow_many_shapes()
    sweep = Sweep(args)
    todo = shapes(args.tiny, args.part)
    result = sweep.result
    print(", ".join(f"{a} {b}" for a, b in result["machine"].items()), flush=True)
    result["warm"] = warm.run(jobs(todo, args.tiny), args.workers, args.device)
    print(f"compiled ahead: {result['warm']}", flush=True)
    result["copy"] = sweep.clock.copy_bandwidth(1 << 16 if args.tiny else COPY_BYTES)
    print(f"copy: {result['copy']['copy'] / 1e12:.3f} TB/s", flush=True)
    sweep.clock.release()

    for m, k, residual in todo:
        what = f"{m} x {k}{' with residual' if residual else ''}"
        if sweep.late(what, reserve=30.0):
            continue
        before = len(result["rows"])
        sweep.guarded(what, sweep.shape, m, k, residual)
        sweep.clock.release()
        for line in tables.lines(result, result["rows"][before:]):
            print(line, flush=True)
        sweep.save()

    if not sweep.late("NVFP4", reserve=20.0):
        few = ((4, 64), (8, 128)) if args.tiny else nvfp4.SHAPES
        wide = (8, 128) if args.tiny else (256, 4096)
        result["nvfp4"] = {
            "times": sweep.guarded("NVFP4 times", nvfp4.times, sweep.clock, few) or [],
            "errors": sweep.guarded("NVFP4 errors", nvfp4.errors, sweep.device, *wide) or [],
        }
    if sweep.clock.cuda:
        sweep.guarded("kernel counts", sweep.count_kernels)
        sweep.save()
        if not sweep.late("ncu"):
            result["ncu"] = sweep.guarded(
                "ncu", counters.hardware_counts, Path(__file__).resolve(), *NCU_SHAPE
            )
            print(f"ncu: {result['ncu']}", flush=True)
    sweep.save()
    print("\n".join(tables.summary(result)), flush=True)
    print(f"{sweep.elapsed:.0f} s in all; {args.out}")
    return int(bool(result["failed"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(os.environ.get("OUT") or tempfile.gettempdir())
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes: a smoke test")
    parser.add_argument("--out", type=Path, default=folder / "kernels.json")
    parser.add_argument("--budget", type=float, default=235.0, help="seconds for the sweep")
    parser.add_argument("--workers", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--caches", type=Path, help="folder for compiled code; a fresh one if none")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th width, from the i-th")
    parser.add_argument("--results", type=Path, nargs="+", help="do not measure, read these files")
    parser.add_argument("--write", type=Path, help="write the results as a document")
    parser.add_argument(
        "--count", action="store_true", help="count the kernel's instructions: Triton, no GPU"
    )
    parser.add_argument("--plot", type=Path, help="draw them (matplotlib)")
    parser.add_argument("--ncu-child", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.part = tuple(int(n) for n in args.part.split("/"))
    if args.ncu_child:
        # The caches of the sweep are in the environment.
        from kernellib import counters

        counters.ncu_child(*args.ncu_child)
        return 0
    status = 0
    if not args.results:
        status = measure(args)
        args.results = [args.out]
    if args.write or args.plot:
        from kernellib import tables

        result = tables.merge([json.loads(path.read_text()) for path in args.results])
        if args.count:
            from kernellib import counters

            arch = 10 * result["machine"].get("capability", [9, 0])[0]
            widths = sorted({k for _, k, _ in shapes(result["tiny"], (1, 1))})
            result["instructions"] = counters.static_counts(arch, widths)
        if args.write:
            args.write.write_text(tables.document(result))
        if args.plot:
            tables.plot(result, args.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
