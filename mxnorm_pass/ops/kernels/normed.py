"""The norm's output as the graph rounds it, for two elements: what both kernels cast."""

from __future__ import annotations

import triton
import triton.language as tl

from mxnorm_pass.ops.kernels.convert import (
    cvt_bf16x2,
    mul_bf16x2,
    pairs_of,
    round_bf16,
    scaled_pairs,
)


@triton.jit
def rounded(low, high, BF16: tl.constexpr, HW: tl.constexpr):
    """Pairs rounded to bfloat16, where they are to be."""
    if BF16:
        low, high = round_bf16(low, high, HW)
    return low, high


@triton.jit
def normed(
    low, high, rstd, gain, GAIN: tl.constexpr,
    NORM_BF16: tl.constexpr, OUT_BF16: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """Pairs times rstd and gain. What the chip has rounded to bfloat16 stays in words, twice the
    same: half as many instructions look for the absmax there, and scale it.
    """
    low, high = scaled_pairs(low, high, rstd, HW)
    WORDS: tl.constexpr = HW >= 1 and OUT_BF16
    if WORDS and GAIN and NORM_BF16 and gain.dtype == tl.int32:
        low = mul_bf16x2(cvt_bf16x2(low, high), gain)
    else:
        if GAIN:
            low, high = rounded(low, high, NORM_BF16, HW)
            gain_low, gain_high = pairs_of(gain)
            low, high = low * gain_low, high * gain_high
        elif not WORDS:
            low, high = rounded(low, high, NORM_BF16, HW)
        if WORDS:
            low = cvt_bf16x2(low, high)
        else:
            low, high = rounded(low, high, OUT_BF16, HW)
    if WORDS:
        high = low
    return low, high
