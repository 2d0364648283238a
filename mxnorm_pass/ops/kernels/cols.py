"""The column kernel: norm, transpose and microscaling cast along tokens in one read of the rows.

A program takes a tile of tokens times columns. A thread loads 16 bytes of one row at a time, and
has four consecutive tokens of each of its columns: their codes make one word, which is what is
transposed, by shared memory, when everything is quantised. The lanes of one warp hold whole blocks,
so that a block's absmax never leaves the warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxnorm_pass.ops.kernels.convert import (
    e4m3_scale,
    e8m0_byte,
    e8m0_factor,
    encode_pairs,
    load_words,
    max_bf16x2,
    mul_bf16x2,
    nan_max,
    pairs_of,
    words_of,
)
from mxnorm_pass.ops.kernels.normed import normed

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _load_rows(x_ptr, offset, pairs, mask, EVICT: tl.constexpr):
    """Words of two columns each; what is masked is anything: nothing is made of it."""
    if x_ptr.dtype.element_ty == tl.float32:
        ptrs = (x_ptr + offset).to(tl.pointer_type(tl.int64)) + pairs
    else:
        ptrs = (x_ptr + offset).to(tl.pointer_type(tl.int32)) + pairs
    return tl.load(ptrs, mask=mask, eviction_policy=EVICT)


@triton.jit
def _magnitude(values, HW: tl.constexpr):
    """As integers NaN is above Inf, Inf above all else; the interpreter's maximum drops NaN."""
    if HW == 0:
        found = values.to(tl.int32, bitcast=True) & _MAGNITUDE
    else:
        found = tl.abs(values)
    return found


@triton.jit
def _larger(a, b, HW: tl.constexpr):
    if HW == 0:
        found = tl.maximum(a, b)
    else:
        found = nan_max(a, b)
    return found


@triton.jit
def _over_lanes(peak, HW: tl.constexpr):
    """``[BLOCKS, LANES, PAIRS]`` magnitudes -> the largest of each block and column, float32."""
    if HW == 0:
        found = tl.max(peak, axis=1).to(tl.float32, bitcast=True)
    else:
        found = tl.reduce(peak, 1, nan_max)
    return found


@triton.jit
def _block_absmax(lows, highs, COUNT: tl.constexpr, HW: tl.constexpr):
    """``[BLOCKS, PAIRS]`` for the even and the odd columns, from all tokens of the blocks."""
    if lows[0].dtype == tl.int32:
        words = lows[0]
        for i in tl.static_range(1, COUNT):
            words = max_bf16x2(words, lows[i])
        low, high = pairs_of(tl.reduce(words, 1, max_bf16x2))
        low, high = tl.abs(low), tl.abs(high)
    else:
        low, high = _magnitude(lows[0], HW), _magnitude(highs[0], HW)
        for i in tl.static_range(1, COUNT):
            low = _larger(low, _magnitude(lows[i], HW), HW)
            high = _larger(high, _magnitude(highs[i], HW), HW)
        low, high = _over_lanes(low, HW), _over_lanes(high, HW)
    return low, high


@triton.jit
def _e8m0(
    absmax, RULE: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX: tl.constexpr,
    MAX_BITS: tl.constexpr, LATE: tl.constexpr, LEAST: tl.constexpr, INFINITE_NAN: tl.constexpr,
    APPLY: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """Bytes of blocks, and what their values are multiplied by."""
    byte = e8m0_byte(absmax, RULE, MANTISSA_BITS, MAX_BITS, 1.0 / MAX, LATE, HW)
    if LEAST > 0:
        byte = tl.maximum(byte, LEAST)
    if INFINITE_NAN:
        byte = tl.where(absmax == float("inf"), 255, byte)
    return byte, e8m0_factor(byte, absmax, APPLY)


@triton.jit
def _e4m3(absmax, tensor_scale, one, MAX: tl.constexpr, APPLY: tl.constexpr):
    """Codes of NVFP4's block scales, and what values are multiplied or divided by."""
    code, wide = e4m3_scale(absmax, tensor_scale, MAX)
    if APPLY == "reciprocal":
        unit = tl.div_rn(one, wide)
    else:
        unit = wide * tensor_scale
    return code, unit


@triton.jit
def _scaled(
    low, high, unit_low, unit_high, words, DIVIDE: tl.constexpr, WORDS: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """Two columns in units of their blocks' scales; ``words``: both units as one word."""
    if low.dtype == tl.int32:
        if WORDS:
            low, high = pairs_of(mul_bf16x2(low, words))
        else:
            low, high = pairs_of(low)
    if not WORDS or HW == 0:
        if DIVIDE:
            low, high = tl.div_rn(low, unit_low), tl.div_rn(high, unit_high)
        else:
            low, high = low * unit_low, high * unit_high
    return low, high


@triton.jit
def _quad(
    a, b, c, d, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr,
    CLAMP: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """Codes of four tokens, the first lowest: int32, or int16 for FP4."""
    first = encode_pairs(a, b, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP, HW)
    second = encode_pairs(c, d, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP, HW)
    if EXPONENT_BITS + MANTISSA_BITS == 3:
        word = first.to(tl.int16) | (second.to(tl.int16) << 8)
    else:
        word = first.to(tl.int32) | (second.to(tl.int32) << 16)
    return word


@triton.jit
def _joined(
    parts, REPS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """``REPS`` tensors ``[BLOCKS, LANES, PAIRS]`` -> ``[BLOCKS, LANES, PAIRS, REPS]``."""
    if REPS == 1:
        whole = parts[0]
    elif REPS == 2:
        whole = tl.join(parts[0], parts[1])
    elif REPS == 4:
        whole = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        tl.static_assert(REPS == 8)
        whole = tl.join(
            tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6])),
            tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7])),
        )
    return tl.reshape(whole, (BLOCKS, LANES, PAIRS, REPS))


@triton.jit
def _store_scales(
    scale_ptr, low, high, first_column, tile, blocks,
    K: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Scales of a tile, ``[K, blocks]``; in the swizzled layout what pads it is zero."""
    byte = tl.permute(tl.join(low, high), (1, 2, 0))
    if SWIZZLED:
        # A tile of formats.swizzle has 128 columns of ours in 32 rows, four to a row, and four
        # blocks of each: those of one row lie together.
        ROWS: tl.constexpr = 32 if COLUMNS >= 32 else COLUMNS
        RUN: tl.constexpr = COLUMNS // ROWS * 4
        FOURS: tl.constexpr = BLOCKS // 4
        byte = tl.reshape(byte, (COLUMNS // ROWS, ROWS, FOURS, 4))
        byte = tl.reshape(tl.permute(byte, (2, 1, 0, 3)), (FOURS, ROWS, RUN))
        four = (tile * FOURS + tl.arange(0, FOURS))[:, None, None]
        row = tl.arange(0, ROWS)[None, :, None]
        run = tl.arange(0, RUN)[None, None, :]
        column = first_column + run // 4 * 32 + row
        byte = tl.where((column < K) & (four * 4 + run % 4 < blocks), byte, 0)
        wide = (blocks + 3) // 4
        start = (first_column // 128) * wide + four
        where = start * 512 + (first_column % 32 + row) * 16 + first_column % 128 // 32 * 4 + run
        mask = (four < wide) & (row >= 0) & (run >= 0)
    else:
        byte = tl.reshape(byte, (COLUMNS, BLOCKS))
        column = (first_column + tl.arange(0, COLUMNS))[:, None]
        block = (tile * BLOCKS + tl.arange(0, BLOCKS))[None, :]
        where = column.to(tl.int64) * blocks + block
        mask = (column < K) & (block < blocks)
    code = byte.to(tl.uint8).to(scale_ptr.dtype.element_ty, bitcast=True)
    tl.store(scale_ptr + where, code, mask=mask)


@triton.jit
def rmsnorm_mxquant_colwise_kernel(
    x_ptr, rstd_ptr, gain_ptr, tensor_scale_ptr, qdata_ptr, scale_ptr,
    blocks, x_inner, x_outer_stride, x_stride,
    K: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    X_SPLIT: tl.constexpr, NORM_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
    EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr, MAX_BITS: tl.constexpr,
    RULE: tl.constexpr, LATE: tl.constexpr, LEAST: tl.constexpr, INFINITE_NAN: tl.constexpr,
    APPLY: tl.constexpr, CLAMP: tl.constexpr, SWIZZLED: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """One tile: see :func:`mxnorm_pass.ops.rmsnorm_mxquant_colwise` for what is computed."""
    PAIRS: tl.constexpr = COLUMNS // 2
    REPS: tl.constexpr = BLOCK // 4 // LANES
    QUADS: tl.constexpr = BLOCK // 4
    WIDTH: tl.constexpr = (K + 127) // 128 * 128 if SWIZZLED else K
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    # Programs that run together take GROUP tiles of tokens: what they write lies together.
    down = (blocks + BLOCKS - 1) // BLOCKS
    program = tl.program_id(0)
    first_down = program // (GROUP * ACROSS) * GROUP
    group = tl.minimum(down - first_down, GROUP)
    within = program % (GROUP * ACROSS)
    tile = (first_down + within % group).to(tl.int64)
    first_column = within // group * COLUMNS

    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, LANES)
    pair = tl.arange(0, PAIRS)
    live = (block < blocks)[:, None, None]
    inside = live
    if K % COLUMNS != 0 or WIDTH != K:
        inside = live & (first_column // 2 + pair < K // 2)[None, None, :]
    pairs = pair[None, None, :]
    x_tile = x_ptr + first_column
    # First all loads, then what is made of them.
    tiles = ()
    roots = ()
    for r in tl.static_range(REPS):
        for j in tl.static_range(4):
            row = block[:, None, None] * BLOCK + ((lane * REPS + r) * 4 + j)[None, :, None]
            if X_SPLIT:
                offset = (row // x_inner) * x_outer_stride + (row % x_inner) * x_stride
            else:
                offset = row * x_stride
            tiles = tiles + (_load_rows(x_tile, offset, pairs, inside, ""),)
            roots = roots + (tl.load(rstd_ptr + row, mask=live, other=0.0),)
    gain = pairs
    if gain_ptr is not None:
        mask = None
        if K % COLUMNS != 0 or WIDTH != K:
            mask = (first_column // 2 + pair) < K // 2
        gain = load_words(gain_ptr + first_column, pair, mask, "evict_last")[None, None, :]
    tensor_scale = tl.full((), 1.0, tl.float32)
    if tensor_scale_ptr is not None:
        tensor_scale = tl.load(tensor_scale_ptr)
    one = tl.div_rn(tl.full((), 1.0, tl.float32), tensor_scale)

    lows = ()
    highs = ()
    for i in tl.static_range(4 * REPS):
        low, high = pairs_of(tiles[i])
        low, high = normed(
            low, high, roots[i], gain, gain_ptr is not None, NORM_BF16, OUT_BF16, HW
        )  # fmt: skip
        lows = lows + (low,)
        highs = highs + (high,)
    absmax_low, absmax_high = _block_absmax(lows, highs, 4 * REPS, HW)
    if RULE == "e4m3":
        byte_low, unit_low = _e4m3(absmax_low, tensor_scale, one, MAX, APPLY)
        byte_high, unit_high = _e4m3(absmax_high, tensor_scale, one, MAX, APPLY)
    else:
        byte_low, unit_low = _e8m0(
            absmax_low, RULE, MANTISSA_BITS, MAX, MAX_BITS, LATE, LEAST, INFINITE_NAN, APPLY, HW
        )
        byte_high, unit_high = _e8m0(
            absmax_high, RULE, MANTISSA_BITS, MAX, MAX_BITS, LATE, LEAST, INFINITE_NAN, APPLY, HW
        )
    # Powers of two scale words of bfloat16 exactly, but below 2^-126, where elements have zero.
    WORDS: tl.constexpr = HW >= 1 and OUT_BF16 and RULE != "e4m3"
    DIVIDE: tl.constexpr = RULE == "e4m3" and APPLY == "divide"
    units = unit_low
    if WORDS:
        units = words_of(unit_low, unit_high, False)
    evens = ()
    odds = ()
    for r in tl.static_range(REPS):
        a, e = _scaled(
            lows[4 * r], highs[4 * r], unit_low[:, None, :], unit_high[:, None, :],
            units[:, None, :], DIVIDE, WORDS, HW,
        )  # fmt: skip
        b, f = _scaled(
            lows[4 * r + 1], highs[4 * r + 1], unit_low[:, None, :], unit_high[:, None, :],
            units[:, None, :], DIVIDE, WORDS, HW,
        )  # fmt: skip
        c, g = _scaled(
            lows[4 * r + 2], highs[4 * r + 2], unit_low[:, None, :], unit_high[:, None, :],
            units[:, None, :], DIVIDE, WORDS, HW,
        )  # fmt: skip
        d, h = _scaled(
            lows[4 * r + 3], highs[4 * r + 3], unit_low[:, None, :], unit_high[:, None, :],
            units[:, None, :], DIVIDE, WORDS, HW,
        )  # fmt: skip
        evens = evens + (_quad(a, b, c, d, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP, HW),)
        odds = odds + (_quad(e, f, g, h, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP, HW),)
    _store_scales(
        scale_ptr, byte_low, byte_high, first_column, tile, blocks, K, COLUMNS, BLOCKS, SWIZZLED
    )

    codes = tl.join(
        _joined(evens, REPS, BLOCKS, LANES, PAIRS), _joined(odds, REPS, BLOCKS, LANES, PAIRS)
    )
    codes = tl.reshape(tl.permute(codes, (2, 4, 0, 1, 3)), (COLUMNS, BLOCKS * QUADS))
    column = first_column + tl.arange(0, COLUMNS)
    quad = tile * (BLOCKS * QUADS) + tl.arange(0, BLOCKS * QUADS)
    length = blocks * QUADS
    mask = (quad < length)[None, :]
    if K % COLUMNS != 0 or WIDTH != K:
        mask = mask & (column < K)[:, None]
    out = qdata_ptr.to(tl.pointer_type(codes.dtype)) + column.to(tl.int64)[:, None] * length
    tl.store(out + quad[None, :], codes, mask=mask)
