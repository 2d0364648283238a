"""Compile ahead of the measurements, in parallel, into the caches on disk.

72 compiles of the baseline one after the other would take minutes. Worker processes compile them
without running them: configurations are chosen by timing, which belongs on a GPU that does nothing
else, so that is left to the process that measures.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIGER_PARTS = 4
LIMIT_S = 110
"""When to go on without what is not compiled: a pool waits for ever for a worker that died."""


@dataclass(frozen=True)
class Job:
    """One compile: a variant at a shape. ``part`` cuts long jobs."""

    variant: str
    m: int
    k: int
    residual: bool
    part: int = 0


def set_caches(folder: Path | None) -> Path:
    """Name the caches in the environment; before torch is imported, and inherited by workers."""
    chosen = folder or Path(tempfile.mkdtemp(prefix="mxnorm_kernels_"))
    chosen.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(chosen)
    os.environ["TRITON_CACHE_DIR"] = str(chosen / "triton")
    # Every process compiles by itself: no pool inside a pool.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    return chosen


def run(jobs: list[Job], workers: int, device: str) -> dict[str, Any]:
    """Compile all jobs; seconds, and what failed (the measurement will meet it again)."""
    start = time.perf_counter()
    if not jobs or workers < 1:
        return {"seconds": 0.0, "jobs": 0, "failed": {}}
    failed = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers, len(jobs)), _prepare, (device,)) as pool:
        results = pool.imap_unordered(_compile, jobs, chunksize=1)
        for done in range(len(jobs)):
            left = LIMIT_S - (time.perf_counter() - start)
            try:
                job, error = results.next(timeout=max(1.0, left))
            except multiprocessing.TimeoutError:
                failed["time"] = f"{done} of {len(jobs)} jobs after {LIMIT_S} s"
                break
            if error:
                failed[str(job)] = error
    return {"seconds": time.perf_counter() - start, "jobs": len(jobs), "failed": failed}


_DEVICE: list[str] = []


def _prepare(device: str) -> None:
    import torch
    from torch._inductor import config
    from torch._inductor.runtime import triton_heuristics

    from . import variants

    _DEVICE.append(device)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    variants.allow_many_shapes()
    config.autotune_local_cache = False
    if device == "cuda":
        # Compiled and loaded, not run: nothing is timed, nothing chosen.
        triton_heuristics.CachingAutotuner.run = _not_run


def _not_run(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _compile(job: Job) -> tuple[Job, str]:
    import torch

    from . import variants

    try:
        device = torch.device(_DEVICE[0])
        if job.variant == "liger" and device.type == "cuda":
            _one_part_of_the_cast(job.part)
        x = torch.randn(job.m, job.k, dtype=torch.bfloat16, device=device)
        other = torch.randn_like(x) if job.residual else None
        variants.Variants(job.k, device).get(job.variant).call(x, other)
        if device.type == "cuda":
            torch.cuda.synchronize()
            del x, other
            torch.cuda.empty_cache()
    except variants.Unavailable:
        return job, ""
    except Exception:
        return job, traceback.format_exc(limit=-3)
    return job, ""


def _one_part_of_the_cast(part: int) -> None:
    """The cast of torchao tries 24 configurations: leave some of them to other workers."""
    from . import variants

    cast, _ = variants.triton_cast()
    module = (cast.__closure__ or ())[0].cell_contents
    kernel = module.to_mxfp8_dim0_kernel
    kernel.configs = kernel.configs[part::LIGER_PARTS]
