"""A copy kernel: what the chip's memory allows to a kernel that reads and writes as much."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CONFIGS = ((4096, 4), (8192, 8))
"""Bytes per program, warps."""


@triton.jit
def _copy_kernel(target, source, WORDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    words = tl.load(source.to(tl.pointer_type(tl.int32)) + at)
    tl.store(target.to(tl.pointer_type(tl.int32)) + at, words)


def copy(size: int, warps: int, target: Tensor, source: Tensor) -> None:
    """``source`` to ``target``, bytes in a multiple of ``size`` or the rest of it left out."""
    _copy_kernel[(max(1, source.numel() // size),)](target, source, size // 4, num_warps=warps)
