"""Instructions per element: counted in the machine code, and by the chip where ncu may."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NCU_TIMEOUT_S = 60
METRICS = {
    "smsp__inst_executed.sum": "warp_instructions",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "gpu__time_duration.sum": "ns",
}
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1.0, "us": 1e3, "ms": 1e6}
_UNITS |= {"nsecond": 1.0, "usecond": 1e3, "msecond": 1e6, "inst": 1.0}


def static_counts(arch: int, widths: Sequence[int]) -> list[dict[str, Any]] | str:
    """Registers, spills and instructions per element of the row kernel; or why there are none.

    Needs Triton but no GPU.
    """
    import torch

    from .variants import CAST, OURS

    try:
        from mxnorm_pass.ops.kernels.inspect import compile_row_kernel
    except ImportError as error:
        return f"mxnorm_pass.ops.kernels.inspect does not import: {error}"
    bf16 = torch.bfloat16
    results: list[dict[str, Any]] = []
    for k in widths:
        for name in OURS:
            folded = name == "ours_p2_folded"
            for residual in (False, True):
                try:
                    kernel = compile_row_kernel(
                        arch,
                        CAST,
                        k,
                        rms="exact" if name == "ours_exact" else "p2",
                        rounding="f32->f32" if folded else "bf16->bf16",
                        gain=None if folded else bf16,
                        residual=bf16 if residual else None,
                    )
                except ImportError as error:
                    return str(error)
                results.append(
                    {
                        "arch": arch,
                        "k": k,
                        "variant": name,
                        "residual": residual,
                        "instructions_per_element": kernel.instructions_per_element,
                        "registers": kernel.registers,
                        "spills": kernel.spills,
                        "warps": kernel.warps,
                        "occupancy": kernel.occupancy,
                        "counts": dict(kernel.counts),
                    }
                )
    return results


def hardware_counts(script: Path, m: int, k: int) -> list[dict[str, Any]] | str:
    """Counters of one launch of each variant, by ncu in a process of its own; or why not."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not on the PATH"
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS), sys.executable]
    command += [str(script), "--ncu-child", str(m), str(k)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {NCU_TIMEOUT_S} s"
    rows = read_ncu(done.stdout)
    if not rows:
        tail = (done.stdout + done.stderr).strip().splitlines()[-3:]
        return f"exit status {done.returncode}: " + " / ".join(tail)
    for row in rows:
        executed = row.get("warp_instructions")
        if executed:
            row["instructions_per_element"] = executed * 32 / (m * k)
    return rows


def read_ncu(text: str) -> list[dict[str, Any]]:
    """One dictionary per launch from ncu's CSV, in which other output may stand."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        return []
    launches: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines[starts[0] :]))):
        name = METRICS.get(line.get("Metric Name") or "")
        if name is None:
            continue
        row = launches.setdefault(line["ID"], {"kernel": line.get("Kernel Name", "")})
        try:
            value = float((line.get("Metric Value") or "").replace(",", ""))
        except ValueError:
            continue
        row[name] = value * _UNITS.get(line.get("Metric Unit") or "", 1.0)
    return list(launches.values())


def ncu_child(m: int, k: int) -> None:
    """What ncu looks at: every variant once, warmed up before the profiler starts."""
    import torch

    from .variants import OURS, Variants, allow_many_shapes

    torch.set_grad_enabled(False)
    allow_many_shapes()
    device = torch.device("cuda")
    variants = Variants(k, device)
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    chosen = [variants.get(name) for name in ("compile", *OURS)]
    for variant in chosen:
        variant.call(x, None)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for variant in chosen:
        variant.call(x, None)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
