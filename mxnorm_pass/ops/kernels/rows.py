"""The row kernel: RMSNorm, residual add and microscaling cast in one read of the row.

A program keeps a row in registers between the two things that need all of it: the root and the
cast. A row is cut into ``CHUNKS`` tiles of ``TILE`` blocks, so that widths that are no power of two
waste little; only the last tile can be partly masked. Elements travel as pairs (even, odd): loads,
conversions and codes of the narrow formats all come in pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxnorm_pass.ops.kernels.convert import (
    add_bf16x2,
    block_absmax,
    e4m3_scale,
    e8m0_byte,
    e8m0_factor,
    encode_pairs,
    largest_of,
    load_words,
    pairs_of,
    scaled_pairs,
    scaled_words,
    store,
    store_words,
    words_absmax,
    words_of,
)
from mxnorm_pass.ops.kernels.normed import normed, rounded


@triton.jit
def _row_offset(row, inner, outer_stride, inner_stride, SPLIT: tl.constexpr):
    """Where a row starts, in elements: rows lie at one stride, or at two (``SPLIT``)."""
    if SPLIT:
        offset = (row // inner) * outer_stride + (row % inner) * inner_stride
    else:
        offset = row * inner_stride
    return offset


@triton.jit
def _mask(pairs, live, END: tl.constexpr, LAST: tl.constexpr, PADDED: tl.constexpr):
    """None where a tile that ends at ``LAST`` lies in the row, which ends at ``END``."""
    mask = None
    if LAST > END:
        mask = pairs < END
        if PADDED:
            mask = mask & live
    elif PADDED:
        mask = live
    return mask


@triton.jit
def _root(total, correction, eps, eps_ptr, RMS: tl.constexpr, COUNT: tl.constexpr):
    """``1 / sqrt(mean square + eps)`` from the sum over ``COUNT`` squares or block absmax.

    ``correction`` and ``eps`` come as float32 or, from Inductor, as float64.
    """
    if COUNT & (COUNT - 1) == 0:
        mean = total * (1.0 / COUNT)
    else:
        mean = tl.div_rn(total, tl.full((), COUNT, tl.float32))
    if RMS != "exact":
        mean = mean * tl.full((), correction, tl.float32)
    if RMS == "p1":
        mean = mean * mean
    if eps_ptr is not None:
        eps = tl.load(eps_ptr)
    mean = mean + tl.full((), eps, tl.float32)
    # The chip's reciprocal square root takes subnormals for zero.
    small = mean < 1.1754943508222875e-38
    return tl.rsqrt(tl.where(small, mean * 16777216.0, mean)) * tl.where(small, 4096.0, 1.0)


@triton.jit
def _added(a, b, sum_row, HW: tl.constexpr):
    """Words of the sum, in the dtype that it is stored in."""
    if HW >= 1 and sum_row.dtype.element_ty == tl.bfloat16:
        words = add_bf16x2(a, b)
    else:
        a_low, a_high = pairs_of(a)
        b_low, b_high = pairs_of(b)
        F32: tl.constexpr = sum_row.dtype.element_ty == tl.float32
        low, high = rounded(a_low + b_low, a_high + b_high, not F32, HW)
        words = words_of(low, high, F32)
    return words


@triton.jit
def _load_tiles(
    ptr, pairs, live,
    HALF_K: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Tiles of a row as words; where there is none, anything."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        here = pairs + i * SPAN
        words = here
        if ptr is not None:
            mask = _mask(here, live, HALF_K, (i + 1) * SPAN, PADDED)
            words = load_words(ptr, here, mask, EVICT)
        tiles = tiles + (words,)
    return tiles


@triton.jit
def _row_pairs(
    words, others, sum_row, pairs, live,
    HALF_K: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """Even and odd elements of tiles of the row, or of its sum with another, then stored."""
    lows = ()
    highs = ()
    for i in tl.static_range(CHUNKS):
        here = pairs + i * SPAN
        tile = words[i]
        if sum_row is not None:
            tile = _added(tile, others[i], sum_row, HW)
            store_words(sum_row, here, tile, _mask(here, live, HALF_K, (i + 1) * SPAN, PADDED))
        low, high = pairs_of(tile)
        lows = lows + (low,)
        highs = highs + (high,)
    return lows, highs


@triton.jit
def _row_root(
    lows, highs, correction, eps, eps_ptr,
    RMS: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, CHUNKS: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """The reciprocal root, and the block absmax of each tile where the estimate needs them."""
    # Over tiles first, per place: threads add up what they hold before they exchange anything.
    peaks = ()
    if RMS == "exact":
        acc = tl.zeros_like(lows[0])
    else:
        acc = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(CHUNKS):
        if RMS == "exact":
            peak = acc
            acc = acc + lows[i] * lows[i]
            acc = acc + highs[i] * highs[i]
        else:
            peak = block_absmax(lows[i], highs[i], HW)
            acc = acc + (peak * peak if RMS == "p2" else peak)
        peaks = peaks + (peak,)
    if RMS == "exact":
        total = tl.sum(acc)
    else:
        total = tl.sum(acc, axis=0)
    count: tl.constexpr = K if RMS == "exact" else BLOCKS
    return _root(total, correction, eps, eps_ptr, RMS, count), peaks


@triton.jit
def _cast_input(
    low, high, peak, rstd, gain, GAIN: tl.constexpr, RMS: tl.constexpr,
    NORM_BF16: tl.constexpr, OUT_BF16: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """One tile normalised and rounded as the graph does it, and its block absmax."""
    low, high = normed(low, high, rstd, gain, GAIN, NORM_BF16, OUT_BF16, HW)
    if not GAIN and RMS != "exact":
        # Rounding is monotone and even: the absmax of the rounded is the rounded absmax.
        absmax, _ = rounded(peak * rstd, peak, NORM_BF16, HW)
        absmax, _ = rounded(absmax, absmax, OUT_BF16, HW)
    elif HW >= 1 and OUT_BF16:
        absmax = words_absmax(low)
    else:
        absmax = block_absmax(low, high, HW)
    return low, high, absmax


@triton.jit
def _scaled_e8m0(low, high, factor, HW: tl.constexpr):
    """Pairs times a power of two for each block; words of pairs are taken apart."""
    if low.dtype == tl.int32:
        low, high = pairs_of(scaled_words(low, factor))
    else:
        low, high = scaled_pairs(low, high, factor, HW)
    return low, high


@triton.jit
def _scaled_e4m3(
    low, high, absmax, tensor_scale, one, MAX: tl.constexpr, APPLY: tl.constexpr, HW: tl.constexpr
):  # fmt: skip
    """Pairs in units of their block's scale under NVFP4's rule, and that scale's code.

    ``one`` is the reciprocal of the per-tensor scale.
    """
    if low.dtype == tl.int32:
        low, high = pairs_of(low)
    code, wide = e4m3_scale(absmax, tensor_scale, MAX)
    if APPLY == "reciprocal":
        low, high = scaled_pairs(low, high, tl.div_rn(one, wide)[:, None], HW)
    else:
        unit = (wide * tensor_scale)[:, None]
        low, high = tl.div_rn(low, unit), tl.div_rn(high, unit)
    return low, high, code


@triton.jit
def _store_scales(
    scale_ptr, row, block, byte, live,
    BLOCKS: tl.constexpr, LAST: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """The scales of one tile; in the swizzled layout padding rows and columns are zero."""
    if SWIZZLED:
        # Within a tile of 128 rows x 4 columns: as formats.swizzle.
        wide: tl.constexpr = (BLOCKS + 3) // 4
        tile = (row // 128) * wide + block // 4
        where = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
        byte = tl.where(live & (block < BLOCKS), byte, 0)
        mask = _mask(block, live, wide * 4, LAST, False)
    else:
        where = row * BLOCKS + block
        mask = _mask(block, live, BLOCKS, LAST, False)
    code = byte.to(tl.uint8).to(scale_ptr.dtype.element_ty, bitcast=True)
    store(scale_ptr + where, code, mask)


@triton.jit
def rmsnorm_mxquant_kernel(
    x_ptr, residual_ptr, gain_ptr, eps_ptr, tensor_scale_ptr,
    qdata_ptr, scale_ptr, rstd_ptr, sum_ptr,
    rows, x_inner, x_outer_stride, x_stride, r_inner, r_outer_stride, r_stride,
    eps, correction,
    K: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
    X_SPLIT: tl.constexpr, R_SPLIT: tl.constexpr,
    RMS: tl.constexpr, NORM_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr, MAX_BITS: tl.constexpr,
    RULE: tl.constexpr, LATE: tl.constexpr, LEAST: tl.constexpr, INFINITE_NAN: tl.constexpr,
    APPLY: tl.constexpr, CLAMP: tl.constexpr, SWIZZLED: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """One row: see :func:`mxnorm_pass.ops.rmsnorm_mxquant` for what is computed."""
    BLOCKS: tl.constexpr = K // BLOCK
    HALF: tl.constexpr = BLOCK // 2
    SPAN: tl.constexpr = TILE * HALF
    row = tl.program_id(0).to(tl.int64)
    live = row < rows
    x_row = x_ptr + _row_offset(row, x_inner, x_outer_stride, x_stride, X_SPLIT)
    r_row = None
    sum_row = None
    if residual_ptr is not None:
        r_row = residual_ptr + _row_offset(row, r_inner, r_outer_stride, r_stride, R_SPLIT)
        sum_row = sum_ptr + row * K
    blocks = tl.arange(0, TILE)
    pairs = blocks[:, None] * HALF + tl.arange(0, HALF)[None, :]

    # First all loads, then stores of the sum and what the root is made from: the whole row is in
    # flight at once. Every row reads the same gain: kept in the multiprocessor's own cache, it
    # costs nothing beside the row, and asked for together with it, it is there when the root is.
    words = _load_tiles(x_row, pairs, live, K // 2, SPAN, CHUNKS, SWIZZLED, "")
    others = _load_tiles(r_row, pairs, live, K // 2, SPAN, CHUNKS, SWIZZLED, "")
    gains = _load_tiles(gain_ptr, pairs, True, K // 2, SPAN, CHUNKS, False, "evict_last")
    lows, highs = _row_pairs(
        words, others, sum_row, pairs, live, K // 2, SPAN, CHUNKS, SWIZZLED, HW
    )
    rstd, peaks = _row_root(lows, highs, correction, eps, eps_ptr, RMS, K, BLOCKS, TILE, CHUNKS, HW)
    tl.store(rstd_ptr + row, rstd, mask=live)
    tensor_scale = tl.full((), 1.0, tl.float32)
    if tensor_scale_ptr is not None:
        tensor_scale = tl.load(tensor_scale_ptr)
    one = tl.div_rn(tl.full((), 1.0, tl.float32), tensor_scale)

    for i in tl.static_range(CHUNKS):
        here = pairs + i * SPAN
        low, high, absmax = _cast_input(
            lows[i], highs[i], peaks[i], rstd, gains[i], gain_ptr is not None, RMS,
            NORM_BF16, OUT_BF16, HW,
        )  # fmt: skip
        if RULE == "e4m3":
            low, high, byte = _scaled_e4m3(low, high, absmax, tensor_scale, one, MAX, APPLY, HW)
        else:
            byte = e8m0_byte(absmax, RULE, MANTISSA_BITS, MAX_BITS, 1.0 / MAX, LATE, HW)
            if LEAST > 0:
                byte = tl.maximum(byte, LEAST)
            if INFINITE_NAN:
                byte = tl.where(absmax == float("inf"), 255, byte)
            low, high = _scaled_e8m0(low, high, e8m0_factor(byte, absmax, APPLY)[:, None], HW)
        block = blocks + i * TILE
        _store_scales(scale_ptr, row, block, byte, live, BLOCKS, (i + 1) * TILE, SWIZZLED)
        codes = encode_pairs(low, high, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP, HW)
        # Two codes make one word of 16 bits, or one byte for FP4.
        out = qdata_ptr.to(tl.pointer_type(codes.dtype)) + row * (K // 2) + here
        store(out, codes, _mask(here, live, K // 2, (i + 1) * SPAN, SWIZZLED))


@triton.jit
def rmsnorm_absmax_kernel(
    x_ptr, gain_ptr, eps_ptr, partial_ptr,
    rows, x_inner, x_outer_stride, x_stride, eps, correction,
    K: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
    X_SPLIT: tl.constexpr, RMS: tl.constexpr,
    NORM_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    PROGRAMS: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """Absmax of the normalised rows that a program takes, every ``PROGRAMS``-th; zero for none."""
    BLOCKS: tl.constexpr = K // BLOCK
    HALF: tl.constexpr = BLOCK // 2
    SPAN: tl.constexpr = TILE * HALF
    first = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, TILE)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    gains = _load_tiles(gain_ptr, pairs, True, K // 2, SPAN, CHUNKS, False, "evict_last")
    largest = tl.full((), 0.0, tl.float32)
    for row in range(first, rows, PROGRAMS):
        x_row = x_ptr + _row_offset(row, x_inner, x_outer_stride, x_stride, X_SPLIT)
        words = _load_tiles(x_row, pairs, True, K // 2, SPAN, CHUNKS, False, "")
        lows, highs = _row_pairs(words, words, None, pairs, True, K // 2, SPAN, CHUNKS, False, HW)
        rstd, peaks = _row_root(
            lows, highs, correction, eps, eps_ptr, RMS, K, BLOCKS, TILE, CHUNKS, HW
        )
        for i in tl.static_range(CHUNKS):
            _, _, absmax = _cast_input(
                lows[i], highs[i], peaks[i], rstd, gains[i], gain_ptr is not None, RMS,
                NORM_BF16, OUT_BF16, HW,
            )  # fmt: skip
            largest = largest_of(absmax, largest, HW)
    tl.store(partial_ptr + first, largest)
