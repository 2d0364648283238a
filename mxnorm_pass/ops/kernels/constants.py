"""From an op's arguments to a kernel's: compile-time constants, tile sizes, warps.

The table depends on the width of a row, the format and whether there is a gain, never on a timing,
on the number of rows or on who adds the residual: a recomputed forward (activation checkpointing)
sums in the same order and gives the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from mxnorm_pass.formats import ELEMENTS, Cast, Element

MAX_COLUMNS = 32768
"""Widest row that a program keeps in its registers."""


@dataclass(frozen=True)
class Config:
    """How a row is cut: ``chunks`` tiles of ``tile`` blocks, on ``warps`` warps."""

    tile: int
    chunks: int
    warps: int


def row_config(k: int, block: int, gain: bool) -> Config:
    """Tiles and warps for rows of ``k`` elements in blocks of ``block``.

    The largest tiles that reach no more than a fifth past the row, or 1024 elements: every tile
    costs the row its own handful of instructions. With a gain, which makes every element cost more,
    no more than a sixth; not in blocks of 16, where a tile costs more. On eight warps and more a
    thread has at most 16 elements of a tile. Tiles are powers of two and at least four blocks (a
    swizzled row of scales is padded to four). Measured on an H200 in blocks of 32, see
    ``docs/kernels.md``.
    """
    warps = 1 if k <= 512 else 2 if k <= 1024 else 4 if k <= 6144 else 8 if k <= 16384 else 16
    least = max(4 * block, 1024)
    span = max(4 * block, 1 << (k - 1).bit_length())
    if warps >= 8:
        span = min(span, 512 * warps)
    share = 6 if gain and block > 16 else 5
    while span > least and -(-k // span) * span * share > k * (share + 1):
        span //= 2
    return Config(span // block, -(-k // span), warps)


def bits_of(value: float) -> int:
    """The bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def late_limits(element: Element) -> int:
    """Where ``rceil_log2`` rounds up late, packed in bytes for the kernel.

    ``ceil(log2(q))`` in float32 gives n for a quotient ``q = absmax / max`` up to T ulp above 2^n,
    since float32 near n is too coarse to tell: T is 22, 11, 5, 2, 1 for ``|n|`` (less one where n
    is negative) from 64, 32, 16, 8, 4 on. In ulp of the absmax, whose quotient is rounded to
    nearest, that is ``(T + 1/2) * m``, m the mantissa of max in [1, 2). Byte i is for ``|n|`` from
    ``2^(i + 1)`` on, so that it is found by the exponent of ``|n|``; below 4 it is zero. The last
    one that is used, byte 6, is for n = -127, whose quotients are subnormal with ulp twice as
    coarse.
    """
    mantissa = element.max / 2.0**element.max_exponent
    limits = [0, *(int((late + 0.5) * mantissa) for late in (1, 2, 5, 11, 22))]
    limits.append(int(11.5 * 2 * mantissa))
    return sum(limit << (8 * i) for i, limit in enumerate(limits))


def constants(
    cast: Cast,
    k: int,
    rms: str,
    rounding: tuple[torch.dtype, torch.dtype],
    hw: int,
    *,
    gain: bool,
    split: tuple[bool, bool] = (False, False),
) -> dict[str, Any]:
    """The row kernel's compile-time constants.

    Args:
        cast: the cast, layout included.
        k: elements of a row.
        rms: ``p1``, ``p2`` or ``exact``.
        rounding: dtype of ``x * rstd`` before the gain, and dtype that the cast reads.
        hw: which instructions the chip has, see :mod:`mxnorm_pass.ops.kernels.convert`.
        gain: whether there is one.
        split: whether the rows of x, and of the residual, lie at two strides.
    """
    return {
        **_row_constants(cast.block_size, k, rms, rounding, hw, gain),
        "X_SPLIT": split[0],
        "R_SPLIT": split[1],
        **cast_constants(cast),
    }


def cast_constants(cast: Cast) -> dict[str, Any]:
    """What a kernel has to know of a cast, along rows or along tokens."""
    element = ELEMENTS[cast.element]
    return {
        "EXPONENT_BITS": element.exponent_bits,
        "MANTISSA_BITS": element.mantissa_bits,
        "MAX": element.max,
        "MAX_BITS": bits_of(element.max),
        "RULE": cast.rule,
        "LATE": late_limits(element) if cast.rule == "rceil_log2" else 0,
        "LEAST": cast.least,
        "INFINITE_NAN": cast.infinite == "nan",
        "APPLY": cast.apply,
        "CLAMP": cast.saturate == "clamp",
        "SWIZZLED": cast.layout == "swizzled",
    }


def absmax_constants(
    block_size: int,
    k: int,
    rms: str,
    rounding: tuple[torch.dtype, torch.dtype],
    hw: int,
    *,
    gain: bool,
    split: bool = False,
) -> dict[str, Any]:
    """The absmax kernel's, likewise."""
    return {**_row_constants(block_size, k, rms, rounding, hw, gain), "X_SPLIT": split}


def _row_constants(
    block_size: int,
    k: int,
    rms: str,
    rounding: tuple[torch.dtype, torch.dtype],
    hw: int,
    gain: bool,
) -> dict[str, Any]:
    config = row_config(k, block_size, gain)
    return {
        "K": k,
        "BLOCK": block_size,
        "TILE": config.tile,
        "CHUNKS": config.chunks,
        "RMS": rms,
        "NORM_BF16": rounding[0] is torch.bfloat16,
        "OUT_BF16": rounding[1] is torch.bfloat16,
        "HW": hw,
    }
