"""NVFP4's per-tensor scale: by a pass over the tensor ahead of the cast, or by a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxnorm_pass import reference
from mxnorm_pass.formats import E4M3_MAX, ELEMENTS
from mxnorm_pass.ops import ABSMAX_OP, rmsnorm_mxquant
from mxnorm_pass.ops.rmsnorm_mxquant import NormOptions
from mxnorm_pass.theory import computed_bound, correction

from .timing import Clock
from .variants import EPS, normalised, sqnr

CAST = "e2m1/b16/e4m3/reciprocal/clamp/plain"
BLOCK = 16
ROUNDING = "bf16->bf16"
LARGEST = E4M3_MAX * ELEMENTS["e2m1"].max
"""What the per-tensor scale maps onto 1: the largest block scale times the largest code."""
SHAPES = ((256, 4096), (8192, 4096), (16384, 8192))
ROWS = ("gaussian", "laplace", "outlier")


def _constant(rms: str) -> float:
    return 1.0 if rms == "exact" else correction(int(rms[1:]), BLOCK)


def dynamic_scale(x: Tensor, gain: Tensor, rms: str) -> Tensor:
    """``max|y| / 2688``, a kernel over the whole tensor and the graph's own scalar division."""
    options = NormOptions(gain, None, EPS, rms, _constant(rms), ROUNDING, BLOCK)
    peak: Tensor = ABSMAX_OP(x, *options)
    return peak / LARGEST


def bound_scale(k: int, gain: Tensor, rms: str) -> Tensor:
    """The same from what ``|y|`` cannot exceed: no pass, known before the row is."""
    bound = computed_bound(rms, _constant(rms), k, BLOCK, bf16=2)
    return gain.abs().amax().float() * bound / LARGEST


def quantise(x: Tensor, gain: Tensor, rms: str, scale: Tensor) -> tuple[Tensor, ...]:
    """The op."""
    return rmsnorm_mxquant(
        x, gain, eps=EPS, rms=rms, rounding=ROUNDING, cast=CAST, tensor_scale=scale
    )


def calls(k: int, gain: Tensor) -> dict[str, Callable[[Tensor], Any]]:
    """What is timed."""
    found: dict[str, Callable[[Tensor], Any]] = {}
    for rms in ("exact", "p2"):
        static = bound_scale(k, gain, rms)

        def dynamic(x: Tensor, rms: str = rms) -> Any:
            return quantise(x, gain, rms, dynamic_scale(x, gain, rms))

        def bound(x: Tensor, rms: str = rms, scale: Tensor = static) -> Any:
            return quantise(x, gain, rms, scale)

        found[f"{rms} dynamic"] = dynamic
        found[f"{rms} bound"] = bound
    return found


def _gain(k: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    return (1 + 0.2 * torch.randn(k, generator=generator)).bfloat16().to(device)


def times(clock: Clock, shapes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Milliseconds of both at each shape; the bytes are those of the cast alone."""
    results = []
    for m, k in shapes:
        gain = _gain(k, clock.device)
        moved = 2 * m * k + m * k // 2 + m * k // BLOCK + 4 * m
        copies = clock.copies(moved)
        inputs = torch.randn(copies, m, k, dtype=torch.bfloat16, device=clock.device)
        ring = [(inputs[i],) for i in range(copies)]
        for name, call in calls(k, gain).items():
            timing = clock.measure(call, ring)
            results.append({"m": m, "k": k, "name": name, "bytes": moved, **timing.describe()})
        del inputs, ring
        clock.release()
    return results


def draw(kind: str, m: int, k: int) -> Tensor:
    """Rows of unit scale; ``outlier``: Gaussian with one column 100 times as large."""
    generator = torch.Generator().manual_seed(k + m)
    x = torch.randn(m, k, generator=generator)
    if kind == "laplace":
        uniform = torch.rand(m, k, generator=generator).clamp(1e-7, 1 - 1e-7) - 0.5
        x = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    if kind == "outlier":
        x[:, k // 3] *= 100
    return x.bfloat16()


def errors(device: torch.device, m: int = 256, k: int = 4096) -> list[dict[str, Any]]:
    """SQNR in dB of the dequantised result, against the exact norm and against its own.

    Against the exact norm the estimate's constant error on rows that are not Gaussian counts as
    noise; against the norm with its own root only the cast does, which is what the scale changes.
    """
    gain = _gain(k, device)
    results = []
    for kind in ROWS:
        x = draw(kind, m, k).to(device)
        exact = normalised(x, gain, "exact", BLOCK)
        for rms in ("exact", "p2"):
            own = normalised(x, gain, rms, BLOCK)
            for source, scale in (
                ("dynamic", dynamic_scale(x, gain, rms)),
                ("bound", bound_scale(k, gain, rms)),
            ):
                qdata, block_scale, _ = quantise(x, gain, rms, scale)
                # The op may have run on a GPU; codes are decoded on the CPU.
                got = reference.dequantize(
                    qdata.cpu(), block_scale.cpu(), torch.float64, ELEMENTS["e2m1"], float(scale)
                )
                results.append(
                    {
                        "rows": kind,
                        "rms": rms,
                        "scale": source,
                        "tensor_scale": float(scale),
                        "sqnr_exact": sqnr(exact, got),
                        "sqnr_own": sqnr(own, got),
                    }
                )
    return results
