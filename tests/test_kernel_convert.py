"""The parts of the kernels' conversions, one by one, against ``formats`` on every boundary.

``HW`` 0 is integer arithmetic; 1 and 2 are inline assembly, run by the emulator in ``ptx.py``:
there, what is tested is that the text gives what integer arithmetic and ``formats`` give, if the
instructions do what the PTX ISA says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from interpreted import Interpreter
from numerics import assert_same_bytes, bits
from torch import Tensor

from mxnorm_pass.formats import (
    APPLIES,
    E8M0_RULES,
    ELEMENTS,
    SATURATES,
    Apply,
    Rule,
    Saturate,
    apply_scale,
    block_scale,
    decode,
    encode,
    pack,
    scale_byte,
)

pytest.importorskip("triton")

INF, NAN = 0x7F800000, 0x7FC00000
HARDWARE = (0, 1, 2)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as running:
        yield running


def padded(words: Tensor) -> Tensor:
    """To a power of two, which Triton's shapes are, and as float32."""
    size = 1 << (len(words) - 1).bit_length()
    return torch.nn.functional.pad(words.to(torch.int32), (0, size - len(words))).view(
        torch.float32
    )


def magnitudes() -> Tensor:
    """All bfloat16 values, and 80 ulp around every power of two times the elements' maxima."""
    words = [torch.arange(0x8000) << 16, torch.tensor([0x7F800001, 0x7FFFFFFF, NAN])]
    for mantissa in (1.0, 1.25, 1.5, 1.75, 1.875):
        middle = (mantissa * torch.exp2(torch.arange(-149, 128).double())).float()
        near = middle.view(torch.int32)[:, None].long() + torch.arange(-80, 81)
        words.append(near.clamp(0, INF).reshape(-1))
    return padded(torch.cat(words))


def signed() -> Tensor:
    """Of both signs, and neighbours of different size: a mix-up of the halves of a pair shows."""
    both = torch.cat([magnitudes(), -magnitudes()])
    return both[torch.randperm(len(both), generator=torch.Generator().manual_seed(0))]


def dense(element: str) -> Tensor:
    """Every representable value, every tie between two, and what lies 2 ulp around both."""
    codes = torch.arange(256, dtype=torch.uint8)
    e = ELEMENTS[element]
    if e.sub_byte:
        values = decode(codes[: 2 * e.sign_bit], e)
    else:
        values = codes.view(e.dtype).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, middles, values[-1:] * 2]).view(torch.int32)[:, None]
    return padded((near + torch.arange(-2, 3)).reshape(-1))


# --- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hw", (0, 2))
@pytest.mark.parametrize("rule", E8M0_RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_scale_byte(interpreter: Interpreter, element: str, rule: Rule, hw: int) -> None:
    absmax = magnitudes()
    got = interpreter.call("e8m0_byte", absmax, element, rule, hw)
    expected = scale_byte(absmax, ELEMENTS[element], rule)
    assert_same_bytes(got, expected.int())
    assert len(expected.unique()) > 240


def test_scale_byte_of_a_negative_nan(interpreter: Interpreter) -> None:
    """Processors make NaN with the sign set; chips do not."""
    absmax = torch.tensor([0xFFC00000, 0xFF800001]).to(torch.int32).view(torch.float32)
    for rule in E8M0_RULES:
        got = interpreter.call("e8m0_byte", absmax, "e4m3", rule, 0)
        assert got.tolist() == [255, 255]


@pytest.mark.parametrize("apply", APPLIES)
def test_scale_factor(interpreter: Interpreter, apply: Apply) -> None:
    """Every byte times values of all sizes; byte 255 with NaN and (``infinite="nan"``) with Inf."""
    words = [0, 1, 0x400000, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x40490FDB, 0x7F7FFFFF]
    values = torch.tensor([*words, INF, NAN], dtype=torch.int32).view(torch.float32)
    byte = torch.arange(256)
    for nan in (NAN, INF):
        absmax = torch.where(byte == 255, nan, 0x3F800000).to(torch.int32).view(torch.float32)
        factor = interpreter.call("e8m0_factor", byte.int(), absmax, apply)
        both = torch.cat([values, -values])
        scale = byte.to(torch.uint8)[:, None]
        expected = apply_scale(both[None], absmax[:, None], scale, apply)
        assert_same_bytes(both * factor[:, None], expected)


@pytest.mark.parametrize("outer", (1.0, 0.37, 2.0**-20, 3e5, 0.0, float("inf"), float("nan")))
def test_block_scale_of_nvfp4(interpreter: Interpreter, outer: float) -> None:
    absmax, tensor_scale = magnitudes(), torch.tensor(outer)
    codes, wide = interpreter.call("e4m3_scale", absmax, tensor_scale)
    expected = block_scale(absmax, ELEMENTS["e2m1"], "e4m3", tensor_scale)
    assert_same_bytes(codes.to(torch.uint8).view(torch.float8_e4m3fn), expected, "codes")
    assert_same_bytes(wide, expected.float(), "values")
    if outer == 1.0:
        assert len(expected.float().unique()) > 90


# --- elements -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hw", HARDWARE)
@pytest.mark.parametrize("saturate", SATURATES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_encode(interpreter: Interpreter, element: str, saturate: Saturate, hw: int) -> None:
    """Bit for bit but for NaN: FP8 gives any NaN, FP6 and FP4 the largest value, positive."""
    e = ELEMENTS[element]
    scaled = torch.cat([signed(), dense(element)])
    scaled = torch.nn.functional.pad(scaled, (0, 2 * len(signed()) - len(scaled)))
    if saturate == "bare" and element == "e4m3" and torch.__version__ < (2, 12):
        scaled = scaled.clamp(-e.max, e.max)
    got = interpreter.call("encode_pairs", scaled, element, saturate == "clamp", hw)
    codes = encode(scaled, e, saturate)
    if e.sub_byte:
        codes = codes.masked_fill(scaled.isnan(), e.sign_bit - 1)
        assert_same_bytes(got, pack(codes, e))
    else:
        assert_same_bytes(got.view(e.dtype), codes)
    # Every code occurs, both zeros included.
    nans = {"e4m3": 2, "e5m2": 8 if saturate == "clamp" else 6}.get(element, 0)
    assert len(bits(codes).unique()) >= 2 * e.sign_bit - nans


@pytest.mark.parametrize("hw", HARDWARE)
def test_round_to_bfloat16(interpreter: Interpreter, hw: int) -> None:
    values = signed()
    for dtype in (torch.float32, torch.bfloat16):
        got = interpreter.call("round_bf16", values, dtype, hw)
        assert_same_bytes(got, values.bfloat16().to(dtype))
    ties = (torch.arange(1 << 16) << 16 | 0x8000).to(torch.int32).view(torch.float32)
    got = interpreter.call("round_bf16", ties, torch.bfloat16, hw)
    assert_same_bytes(got, ties.bfloat16())


@pytest.mark.parametrize("hw", HARDWARE)
def test_scaled_pairs(interpreter: Interpreter, hw: int) -> None:
    """Both values of a pair times its factor, subnormal products included."""
    values = signed()
    factors = signed().flip(0)[: len(values) // 2].contiguous()
    got = interpreter.call("scaled_pairs", values, factors, hw)
    expected = values * factors.repeat_interleave(2)
    assert_same_bytes(got, expected)
    assert int(((expected != 0) & (expected.abs() < 2.0**-126)).sum()) > 100


@pytest.mark.parametrize("hw", HARDWARE)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_block_absmax(interpreter: Interpreter, dtype: torch.dtype, hw: int) -> None:
    """Of both halves of the pairs; NaN wherever one stands, Inf otherwise."""
    seed = torch.Generator().manual_seed(1)
    blocks = torch.randn(256, 32, generator=seed)
    blocks *= torch.exp2(torch.randint(-149, 100, (256, 1), generator=seed))
    for row, column, value in (
        (0, 4, "nan"), (1, 5, "nan"), (2, 0, "inf"), (3, 31, "-inf"), (4, 1, "-nan")
    ):  # fmt: skip
        blocks[row, column] = float(value)
    blocks[4, 2] = float("inf")
    blocks[5] = 0.0
    blocks[6] = -0.0
    given = blocks.to(dtype)
    got = interpreter.call("block_absmax", given, hw)
    assert_same_bytes(got, given.float().abs().amax(1))
