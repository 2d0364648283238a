"""The cast of a norm's output along tokens, which the weight gradient reads, against torch.compile.

The column kernel reads x, rstd and the gain; torch.compile is given the same (what the backward of
an unrewritten model does), and the norm from scratch. Both casts of a site are the row kernel and
the column kernel, one behind the other. ``docs/colwise.md`` has the results.

    python benchmarks/colwise.py --out colwise.json
    python benchmarks/colwise.py --results colwise.json --write docs/colwise.md
    python benchmarks/colwise.py --device cpu --tiny          # a smoke test, no figures

Exits with 1 where a result was wrong; a missed target is reported, no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paths  # noqa: F401

SHAPES = ((16384, 4096), (8192, 4096), (16384, 8192), (16384, 5120), (4096, 4096))
COMPILED = {(16384, 4096)}
TARGET_MS, TARGET_SHARE = 0.060, 0.29
"""Of the column kernel at 16384 x 4096, and of both casts over torch.compile's."""
SWIZZLED = "e4m3/b32/rceil_exact/reciprocal/clamp/swizzled"
NVFP4 = "e2m1/b16/e4m3/reciprocal/clamp/swizzled"
TITLES = {
    "compile_rows": "torch.compile: nn.RMSNorm and torchao's cast along rows",
    "compile_columns": "torch.compile: norm from rstd, transpose, torchao's cast",
    "compile_norm_columns": "torch.compile: nn.RMSNorm, transpose, torchao's cast",
    "compile_both": "torch.compile: nn.RMSNorm and both of torchao's casts in one graph",
    "compile_plain_columns": "torch.compile: norm from rstd, transpose, the cast in plain ops",
    "compile_plain_norm_columns": "torch.compile: norm, transpose, the cast in plain ops",
    "rows": "ours: norm (true RMS) and cast along rows",
    "columns": "ours: cast along tokens",
    "columns_swizzled": "ours: cast along tokens, scales swizzled",
    "columns_nvfp4": "ours: the same in NVFP4",
    "both": "ours: both casts, one kernel behind the other",
}

Call = Callable[..., Any]


def calls(gain: Any, device: Any) -> dict[str, Call]:
    """Every variant as a function of rows and their rstd."""
    import torch
    import torch.nn.functional as F
    from kernellib.variants import BLOCK, CAST, EPS, compiled
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    from mxnorm_pass.ops import rmsnorm_mxquant, rmsnorm_mxquant_colwise

    def cast(y: Any) -> Any:
        return to_mx(y, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)

    def norm(x: Any, gain: Any) -> Any:
        return F.rms_norm(x, (x.shape[-1],), gain, EPS)

    def compile_rows(x: Any, rstd: Any, gain: Any) -> Any:
        return cast(norm(x, gain))

    def compile_columns(x: Any, rstd: Any, gain: Any) -> Any:
        return cast((x.float() * rstd * gain).to(x.dtype).t().contiguous())

    def compile_norm_columns(x: Any, rstd: Any, gain: Any) -> Any:
        return cast(norm(x, gain).t().contiguous())

    def compile_both(x: Any, rstd: Any, gain: Any) -> Any:
        y = norm(x, gain)
        return *cast(y), *cast(y.t().contiguous())

    def compile_plain_columns(x: Any, rstd: Any, gain: Any) -> Any:
        return plain_cast((gain * (x.float() * rstd).to(x.dtype)).t().contiguous())

    def compile_plain_norm_columns(x: Any, rstd: Any, gain: Any) -> Any:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return plain_cast((gain * h.to(x.dtype)).t().contiguous())

    found: dict[str, Call] = {}
    for function in (
        compile_rows,
        compile_columns,
        compile_norm_columns,
        compile_both,
        compile_plain_columns,
        compile_plain_norm_columns,
    ):
        made = compiled(function, device)
        found[function.__name__] = lambda x, rstd, made=made: made(x, rstd, gain)

    def rows(x: Any, rstd: Any) -> Any:
        return rmsnorm_mxquant(x, gain, eps=EPS, rms="exact", rounding="f32->bf16", cast=CAST)

    def columns(x: Any, rstd: Any, cast: str = CAST) -> Any:
        return rmsnorm_mxquant_colwise(x, rstd, gain, rounding="f32->bf16", cast=cast)

    found |= {
        "rows": rows,
        "columns": columns,
        "columns_swizzled": lambda x, rstd: columns(x, rstd, SWIZZLED),
        "columns_nvfp4": lambda x, rstd: columns(x, rstd, NVFP4),
        "both": lambda x, rstd: (*(given := rows(x, rstd)), *columns(x, given[2])),
    }
    return found


def plain_cast(y: Any) -> Any:
    """What torchao's RCEIL cast computes, with integers and constants for its bit views: torch
    2.11 compiles the transposed cast to faster kernels from this.
    """
    import torch

    blocks = y.view(y.shape[0], -1, 32)
    descale = blocks.abs().amax(-1, keepdim=True).float() / 448.0
    exponent = torch.clamp(torch.ceil(torch.log2(descale)), -127, 127) + 127
    exponent = torch.where(torch.isinf(descale), 254.0, exponent)
    byte = torch.where(torch.isnan(descale), 255.0, exponent).to(torch.uint8)
    factor = torch.exp2(127 - byte.float())
    factor = torch.where(byte == 0, 1.0, factor)
    factor = torch.where(byte == 254, 2.0**-127, factor)
    factor = torch.where(byte == 255, descale, factor)
    codes = torch.clamp(blocks.float() * factor, -448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(y.shape), byte.squeeze(-1)


def moved_bytes(name: str, m: int, k: int) -> int:
    """What must be read and written: rows, codes, scales, rstd."""
    codes, blocks = (m * k // 2, m * k // 16) if "nvfp4" in name else (m * k, m * k // 32)
    once = 2 * m * k + codes + blocks + 4 * m
    return 2 * once if "both" in name else once


def check(found: dict[str, Call], x: Any, rstd: Any, gain: Any) -> dict[str, float]:
    """Ours bit for bit the decomposition's; of torch.compile's codes, the share that differs."""
    import torch
    from kernellib.variants import CAST

    from mxnorm_pass.ops.colwise import decomposition

    some = slice(0, 256)
    got = found["columns"](x, rstd)
    expected = decomposition(x[some], rstd[some], gain, None, "f32->bf16", CAST)
    here = (got[0][:, some], got[1][:, : expected[1].shape[1]])
    wrong = [int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in
             zip(here, expected, strict=True)]  # fmt: skip
    return {"codes_wrong": wrong[0], "scales_wrong": wrong[1]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time every variant at every shape."""
    import torch
    from kernellib.timing import Clock
    from kernellib.variants import EPS, allow_many_shapes

    torch.set_grad_enabled(False)
    allow_many_shapes()
    start = time.perf_counter()
    device = torch.device(args.device)
    clock = Clock(device, args.tiny)
    result: dict[str, Any] = {
        "device": clock.name,
        "torch": torch.__version__,
        "rows": [],
        "checks": [],
        "skipped": [],
    }
    if clock.cuda:
        import triton

        result["triton"] = triton.__version__
        result["copy"] = clock.copy_bandwidth(1 << 30)
    for m, k in ((64, 64),) if args.tiny else SHAPES:
        generator = torch.Generator().manual_seed(k)
        gain = (1 + 0.2 * torch.randn(k, generator=generator)).bfloat16().to(device)
        count = clock.copies(moved_bytes("columns", m, k))
        x = torch.randn(count, m, k, dtype=torch.bfloat16, device=device)
        rstd = torch.rsqrt(x[0].float().square().mean(-1, keepdim=True) + EPS)
        ring = [(x[i], rstd) for i in range(count)]
        found = calls(gain, device)
        wrong = check(found, *ring[0], gain)
        result["checks"].append({"m": m, "k": k, **wrong})
        for name, call in found.items():
            if name.startswith("compile") and not args.tiny and (m, k) not in COMPILED:
                continue
            if time.perf_counter() - start > args.budget:
                result["skipped"].append(f"{name} at {m} x {k}")
                continue
            timing = clock.measure(call, ring)
            entry = {"m": m, "k": k, "variant": name, "bytes": moved_bytes(name, m, k)}
            result["rows"].append({**entry, **timing.describe()})
            print(f"{m} x {k} {name}: {timing.ms:.4f} ms", flush=True)
        copied = clock.copy_of(moved_bytes("columns", m, k))
        entry = {"m": m, "k": k, "variant": "copy", "bytes": moved_bytes("columns", m, k)}
        result["rows"].append({**entry, **copied.describe()})
        del x, ring
        clock.release()
        args.out.write_text(json.dumps(result, indent=1))
    result["seconds"] = time.perf_counter() - start
    args.out.write_text(json.dumps(result, indent=1))
    return result


def warm(args: argparse.Namespace) -> None:
    """Fill the compile caches, in a process that may run beside another."""
    import torch

    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    for m, k in COMPILED:
        x = torch.ones(m, k, dtype=torch.bfloat16, device=device)
        found = calls(x[0], device)
        names = [args.warm] if args.warm != "all" else list(found)
        for name in names:
            found[name](x, torch.ones(m, 1, device=device))


def document(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    times = {(r["m"], r["k"], r["variant"]): r["ms"] for r in result["rows"]}
    bandwidth = result.get("copy", {}).get("copy")
    copied = f" ({bandwidth / 1e12:.3f} TB/s in this run)" if bandwidth else ""
    lines = [
        "# The cast along tokens",
        "",
        f"{result['device']}, torch {result['torch']}, triton {result.get('triton', '–')}.",
        "Output of `benchmarks/colwise.py`; bfloat16 in, MXFP8 (e4m3, blocks of 32, RCEIL) out",
        "unless said, milliseconds; measured as `docs/kernels.md` says. `limit`: the bytes that",
        f"must move over the bandwidth of a large copy{copied}; `copy`: a copy",
        "kernel that moves as many bytes as one cast. Codes and scales of 256 tokens are compared,",
        "bit for bit, with the op's decomposition first.",
        "",
        "| M | K | limit | copy | along tokens | swizzled | NVFP4 | along rows | both | limit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    shapes = list(dict.fromkeys((r["m"], r["k"]) for r in result["rows"]))
    ours = ("columns", "columns_swizzled", "columns_nvfp4", "rows", "both")

    def limit(name: str, m: int, k: int) -> str:
        return f"{moved_bytes(name, m, k) / bandwidth * 1e3:.4f}" if bandwidth else "–"

    for m, k in shapes:
        cells = [f"{times[m, k, n]:.4f}" if (m, k, n) in times else "–" for n in ("copy", *ours)]
        cells = [limit("columns", m, k), *cells, limit("both", m, k)]
        lines.append(f"| {m} | {k} | {' | '.join(cells)} |")
    lines += ["", "A chip without FP4 instructions makes NVFP4's codes by integer arithmetic."]
    for m, k in shapes:
        get = {n: times[m, k, n] for n in TITLES if (m, k, n) in times}
        if "compile_rows" in get:
            lines += ["", f"## {m} x {k}", "", *_against(get)]
    lines += ["", *result.get("notes", ())]
    if result["skipped"]:
        lines += ["", f"Left out, for time: {', '.join(result['skipped'])}."]
    return "\n".join(lines).rstrip() + "\n"


def _against(ms: dict[str, float]) -> list[str]:
    """All that was timed at a shape, and the targets."""
    lines = ["| | ms |", "|---|---|"]
    lines += [f"| {TITLES[name]} | {value:.4f} |" for name, value in ms.items()]
    met = "met" if ms["columns"] <= TARGET_MS else "missed"
    lines += ["", f"Along tokens: {ms['columns']:.4f} ms, target {TARGET_MS:.3f}: {met}.", ""]
    lines += ["| torch.compile's two casts | ms | ours, both, of it |", "|---|---|---|"]
    for name in ms:
        if name.startswith("compile") and name not in ("compile_rows", "compile_both"):
            total = ms["compile_rows"] + ms[name]
            share = f"{ms['both'] / total:.3f} (target {TARGET_SHARE})"
            lines.append(f"| along rows, then {TITLES[name][15:]} | {total:.4f} | {share} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(os.environ.get("OUT") or tempfile.gettempdir())
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small shape: a smoke test")
    parser.add_argument("--out", type=Path, default=folder / "colwise.json")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for the sweep")
    parser.add_argument("--warm", help="compile this variant (or all), measure nothing")
    parser.add_argument("--results", type=Path, help="do not measure, read this file")
    parser.add_argument("--write", type=Path, help="write the results as a document")
    args = parser.parse_args()
    if args.warm:
        warm(args)
        return 0
    result = json.loads(args.results.read_text()) if args.results else measure(args)
    if args.write:
        args.write.write_text(document(result))
    return int(any(c["codes_wrong"] or c["scales_wrong"] for c in result["checks"]))


if __name__ == "__main__":
    sys.exit(main())
