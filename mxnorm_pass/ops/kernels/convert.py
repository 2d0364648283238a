"""float32 -> scale and element codes inside a Triton kernel, by integer arithmetic or by the chip.

``HW`` chooses: 0, integer arithmetic alone (any chip, and Triton's interpreter); 1, what sm_90 has
(float8 conversions, arithmetic on pairs of bfloat16); 2, what sm_100 and later have (FP4, FP6 and
E8M0 conversions, products of pairs of float32) as well. All give the same bytes, and those of
:mod:`mxnorm_pass.formats`, which says what each rule means.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MANTISSA = tl.constexpr(0x7FFFFF)
_INF = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def nan_max(a, b):
    """The larger of two floats, NaN where one is (on the chip: the interpreter drops it)."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_words(ptr, pairs, mask, EVICT: tl.constexpr):
    """Elements ``2 * pairs`` and ``2 * pairs + 1`` as one word: int32, or int64 for float32.

    ``mask`` is None, or False where zero is read. ``EVICT`` is Triton's eviction policy.
    """
    if ptr.dtype.element_ty == tl.float32:
        ptrs = ptr.to(tl.pointer_type(tl.int64)) + pairs
    else:
        ptrs = ptr.to(tl.pointer_type(tl.int32)) + pairs
    if mask is None:
        words = tl.load(ptrs, eviction_policy=EVICT)
    else:
        words = tl.load(ptrs, mask=mask, other=0, eviction_policy=EVICT)
    return words


@triton.jit
def pairs_of(words):
    """The two elements of words, float32: one shift or mask each for bfloat16."""
    if words.dtype == tl.int64:
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    else:
        low, high = words << 16, words & -65536
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def words_of(low, high, F32: tl.constexpr):
    """The reverse of :func:`pairs_of`; for bfloat16 the values must have been rounded before."""
    if F32:
        words = (_bits(low).to(tl.int64) & 0xFFFFFFFF) | (_bits(high).to(tl.int64) << 32)
    else:
        words = ((_bits(low) >> 16) & 0xFFFF) | (_bits(high) & -65536)
    return words


@triton.jit
def store(ptrs, values, mask):
    """``tl.store``, where the mask may be None."""
    if mask is None:
        tl.store(ptrs, values)
    else:
        tl.store(ptrs, values, mask=mask)


@triton.jit
def store_words(ptr, pairs, words, mask):
    """The reverse of :func:`load_words`."""
    store(ptr.to(tl.pointer_type(words.dtype)) + pairs, words, mask)


@triton.jit
def add_bf16x2(a, b):
    """Sums of pairs of bfloat16 in words (sm_90).

    The one rounding gives what a sum in float32 rounded to bfloat16 gives: that sum is exact, or
    one term lies so far below the other that both round to the larger.
    """
    return tl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def mul_bf16x2(a, b):
    """Products of pairs of bfloat16 in words (sm_90).

    The one rounding gives what a product in float32 rounded to bfloat16 gives, since that product
    is exact; only below 2^-126, where float32 has fewer bits, can the last bit differ.
    """
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def max_bf16x2(a, b):
    """The larger magnitudes of pairs of bfloat16 in words, NaN where one is; the sign is any."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def block_absmax(low, high, HW: tl.constexpr):
    """Pairs ``[N, B / 2]`` float32 -> ``[N]``: the largest magnitude, NaN where one occurs."""
    if HW == 0:
        # As integers NaN is above Inf, Inf above all else; the interpreter's maximum drops NaN.
        bits = tl.maximum(_bits(low) & _MAGNITUDE, _bits(high) & _MAGNITUDE)
        largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    else:
        largest = tl.reduce(nan_max(tl.abs(low), tl.abs(high)), 1, nan_max)
    return largest


@triton.jit
def words_absmax(words):
    """:func:`block_absmax` of pairs of bfloat16 in words (sm_90)."""
    low, high = pairs_of(tl.reduce(words, 1, max_bf16x2))
    return nan_max(tl.abs(low), tl.abs(high))


@triton.jit
def largest_of(absmax, peak, HW: tl.constexpr):
    """The largest of ``[N]`` magnitudes and one more, NaN where one occurs."""
    if HW == 0:
        bits = tl.maximum(tl.max(_bits(absmax) & _MAGNITUDE, axis=0), _bits(peak))
        peak = bits.to(tl.float32, bitcast=True)
    else:
        peak = nan_max(tl.reduce(absmax, 0, nan_max), peak)
    return peak


@triton.jit
def round_bf16(low, high, HW: tl.constexpr):
    """Pairs rounded to bfloat16, ties to even, and widened again."""
    if HW == 0:
        low, high = _round_bits(low), _round_bits(high)
    else:
        low, high = pairs_of(cvt_bf16x2(low, high))
    return low, high


@triton.jit
def cvt_bf16x2(low, high):
    """Pairs of float32 rounded to bfloat16, as words (sm_80)."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _round_bits(values):
    bits = _bits(values)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    nan = (bits & _MAGNITUDE) > _INF
    return tl.where(nan, bits | 0x400000, even).to(tl.float32, bitcast=True)


@triton.jit
def scaled_pairs(low, high, factor, HW: tl.constexpr):
    """Both times ``factor``, which is broadcast against them; one instruction from sm_100 on."""
    if HW == 2:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b64 pair, twice;
            mov.b64 pair, {$2, $3};
            mov.b64 twice, {$4, $4};
            mul.rn.f32x2 pair, pair, twice;
            mov.b64 {$0, $1}, pair;
            }""",
            "=f,=f,f,f,f",
            [low, high, factor],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = low * factor, high * factor
    return low, high


@triton.jit
def scaled_words(words, factor):
    """Pairs of bfloat16 in words times a power of two, as :func:`scaled_pairs` (sm_90).

    Exact but below 2^-126, where every element format has zero.
    """
    return mul_bf16x2(words, words_of(factor, factor, False))


@triton.jit
def e8m0_byte(
    absmax,
    RULE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_BITS: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    LATE: tl.constexpr,
    HW: tl.constexpr,
):
    """Biased exponent of blocks, int32 0..255, as ``formats.scale_byte``.

    ``MAX_BITS`` is the element's largest value as float32 bits, ``RECIPROCAL`` its reciprocal;
    ``LATE`` packs the limits of ``rceil_log2``, see :func:`.constants.late_limits`.
    """
    bits = _bits(absmax)
    if HW == 0:
        # A processor's NaN can be negative; the chip's is not.
        bits = bits & _MAGNITUDE
    max_exponent: tl.constexpr = (MAX_BITS >> 23) - 127
    if RULE == "rceil_exact" and HW == 2:
        # The rounded product lies above a power of two exactly when the rounded quotient does.
        byte = _cvt_e8m0(absmax * RECIPROCAL)
    elif RULE == "rceil_exact" or RULE == "rceil_log2":
        # absmax / max is above a power of two where the mantissa of absmax is above that of max,
        # which a carry says without a division. The smallest quotients are rounded as subnormals.
        exponent = bits >> 23
        smallest = exponent == max_exponent
        if RULE == "rceil_log2":
            n = exponent - (127 + max_exponent)
            n = n ^ (n >> 31)
            # As a float32 its exponent says which of eight bytes; both for 0 and for 1 that is 0.
            power = (n | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            shift = (_bits(power) >> 20) & 56
            limit = (tl.full((), LATE, tl.int64) >> shift.to(tl.int64)).to(tl.int32) & 63
            limit = tl.where(smallest, LATE >> 48, limit)
        else:
            limit = tl.where(smallest, 1, 0)
        carried = bits + (_MANTISSA - (_MANTISSA & MAX_BITS)) - limit
        byte = tl.maximum((carried >> 23) - max_exponent, 0)
        byte = tl.where(bits == _INF, 254, byte)
        byte = tl.where(bits > _INF, 255, byte)
    else:
        if RULE == "even":
            exponent = ((bits + (1 << (22 - MANTISSA_BITS))) >> 23) & 0xFF
        elif RULE == "ceil":
            exponent = (bits + _MANTISSA) >> 23
        else:
            exponent = bits >> 23
        byte = tl.maximum(exponent - max_exponent, 0)
        byte = tl.where(bits > _INF, 255, byte)
    return byte


@triton.jit
def _cvt_e8m0(values):
    """Round up to a power of two: the biased exponents, in the low byte of the instruction."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 packed;
        cvt.rp.satfinite.ue8m0x2.f32 packed, 0f00000000, $1;
        cvt.u32.u16 $0, packed;
        }""",
        "=r,f",
        [values],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def e8m0_factor(byte, absmax, APPLY: tl.constexpr):
    """What values are multiplied by, as ``formats.apply_scale``; exact, since a power of two."""
    bits = (254 - byte) << 23
    bits = tl.where(byte == 254, 1 << 22, bits)
    if APPLY == "reciprocal":
        bits = tl.where(byte == 0, 0x3F800000, bits)
        bits = tl.where(byte == 255, _bits(absmax), bits)
    else:
        bits = tl.where(byte == 0, 253 << 23, bits)
        bits = tl.where(byte == 255, 0, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_scale(absmax, tensor_scale, MAX: tl.constexpr):
    """NVFP4's block scales as E4M3 codes (int32) and as float32."""
    scale = tl.div_rn(tl.div_rn(absmax, MAX), tensor_scale)
    nan = scale != scale
    # Clamped to the normal range of E4M3: drop mantissa bits with a carry.
    bits = _bits(tl.minimum(tl.maximum(scale, 0.015625), 448.0))
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    wide = (rounded << 20).to(tl.float32, bitcast=True)
    return tl.where(nan, 0x7F, rounded - (120 << 3)), tl.where(nan, scale, wide)


@triton.jit
def encode_pairs(
    low,
    high,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_BITS: tl.constexpr,
    CLAMP: tl.constexpr,
    HW: tl.constexpr,
):
    """Pairs to element codes, ties to even, as ``formats.encode``: the first in the low half.

    Returns uint16, or uint8 for FP4. E4M3 saturates with and without ``CLAMP``, as Inductor's
    conversion and torch >= 2.12 do; E5M2 without it overflows to Inf. FP6 and FP4 turn NaN into
    their largest value, as the chip does.
    """
    fp8: tl.constexpr = EXPONENT_BITS + MANTISSA_BITS == 7
    overflows: tl.constexpr = EXPONENT_BITS == 5 and not CLAMP
    if (HW >= 1 and fp8 and not overflows) or (HW == 2 and not fp8):
        codes = _convert_pairs(low, high, EXPONENT_BITS, MANTISSA_BITS)
    else:
        first = _encode_bits(low, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP)
        second = _encode_bits(high, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP)
        if EXPONENT_BITS + MANTISSA_BITS == 3:
            codes = (first | (second << 4)).to(tl.uint8)
        else:
            codes = (first | (second << 8)).to(tl.uint16)
    return codes


@triton.jit
def _encode_bits(
    scaled,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_BITS: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """On the bits of float32: drop mantissa bits with a carry, and shift the exponent's bias."""
    bias: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    drop: tl.constexpr = 23 - MANTISSA_BITS
    sign_bit: tl.constexpr = 1 << (EXPONENT_BITS + MANTISSA_BITS)
    bits = _bits(scaled)
    sign = (bits >> 31) & sign_bit
    magnitude = bits & _MAGNITUDE
    nan = magnitude > _INF
    if EXPONENT_BITS == 5 and not CLAMP:
        # 2^16 rounds to Inf.
        magnitude = tl.minimum(magnitude, 143 << 23)
    else:
        magnitude = tl.minimum(magnitude, MAX_BITS)
    normal = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    normal = normal - ((127 - bias) << MANTISSA_BITS)
    # Below the least normal value codes are multiples of one step. Added to a power of two whose
    # ulp is that step, the value is rounded there by the addition itself.
    anchor: tl.constexpr = (127 + 24 - bias - MANTISSA_BITS) << 23
    power = tl.full((), anchor, tl.int32).to(tl.float32, bitcast=True)
    subnormal = _bits(magnitude.to(tl.float32, bitcast=True) + power) - anchor
    code = tl.where(magnitude < ((128 - bias) << 23), subnormal, normal) | sign
    if EXPONENT_BITS + MANTISSA_BITS == 7:
        code = tl.where(nan, 0x7F, code)
    else:
        code = tl.where(nan, sign_bit - 1, code)
    return code


@triton.jit
def _convert_pairs(low, high, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """By the chip's instruction; its first operand goes to the upper half."""
    if MANTISSA_BITS == 1:
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b8 byte0, byte1, byte2, byte3;
            cvt.rn.satfinite.e2m1x2.f32 byte0, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 byte1, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 byte2, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 byte3, $8, $4;
            mov.b32 $0, {byte0, byte1, byte2, byte3};
            }""",
            "=r,f,f,f,f,f,f,f,f",
            [low, high],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        fp6: tl.constexpr = "e2m3x2.f32" if EXPONENT_BITS == 2 else "e3m2x2.f32"
        fp8: tl.constexpr = "e4m3x2.f32" if EXPONENT_BITS == 4 else "e5m2x2.f32"
        cvt: tl.constexpr = "cvt.rn.satfinite." + (fp6 if EXPONENT_BITS < 4 else fp8)
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 pair0, pair1; "
            + cvt
            + " pair0, $3, $1; "
            + cvt
            + " pair1, $4, $2; mov.b32 $0, {pair0, pair1}; }",
            "=r,f,f,f,f",
            [low, high],
            dtype=tl.uint16,
            is_pure=True,
            pack=2,
        )
    return codes
