"""The inline assembly of the kernels, run by the emulator in ``ptx.py`` on boundary values.

Assembled, never executed: FP4, FP6 and E8M0 conversions exist from sm_100 on. The text is taken out
of the compiled kernel's IR, so it is what the assembler was given.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import ptx
import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, decode, encode, pack, round_up_e8m0

INF, NAN = float("inf"), float("nan")


# --- the emulator against numbers of the specification --------------------------------------------


def test_values() -> None:
    """Tables of the OCP MX specification, 5.3.1 to 5.3.3, and of OCP FP8."""
    assert ptx.values("e2m1").tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e2m3, e3m2 = ptx.values("e2m3"), ptx.values("e3m2")
    assert (e2m3[1], e2m3[7], e2m3[8], e2m3[-1]) == (0.125, 0.875, 1.0, 7.5)
    assert (e3m2[1], e3m2[3], e3m2[4], e3m2[-1]) == (0.0625, 0.1875, 0.25, 28.0)
    e4m3, e5m2 = ptx.values("e4m3"), ptx.values("e5m2")
    assert (e4m3[1], e4m3[8], e4m3[-1], len(e4m3)) == (2.0**-9, 2.0**-6, 448.0, 127)
    assert (e5m2[1], e5m2[4], e5m2[-1], len(e5m2)) == (2.0**-16, 2.0**-14, 57344.0, 124)


@pytest.mark.parametrize(
    ("element", "largest", "nan"),
    [
        ("e4m3", 0x7E, 0x7F),
        ("e5m2", 0x7B, 0x7F),
        ("e2m3", 0x1F, 0x1F),
        ("e3m2", 0x1F, 0x1F),
        ("e2m1", 0x7, 0x7),
    ],
)
def test_nearest_ends(element: str, largest: int, nan: int) -> None:
    """Inf and what is too large saturate with their sign; NaN of either sign gives one code."""
    sign = {"e2m1": 8, "e2m3": 32, "e3m2": 32}.get(element, 128)
    given = np.array([INF, -INF, 1e30, -1e30, NAN, -NAN, 0.0, -0.0, 1e-40, -1e-40], np.float32)
    expected = [largest, largest | sign] * 2 + [nan, nan] + [0, sign] * 2
    assert ptx.to_nearest(given, element).tolist() == expected


def test_nearest_ties_go_to_the_even_code() -> None:
    given = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5, 0.2500001], np.float32)
    assert ptx.to_nearest(given, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6, 12, 1]
    assert ptx.to_nearest(np.array([432.0, 416.0], np.float32), "e4m3").tolist() == [0x7E, 0x7D]
    assert ptx.to_bf16(np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)).tolist() == [
        0x3F80,
        0x3F82,
    ]


def test_e8m0_rounds_up() -> None:
    given = [0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 1.0000001, 2.0**127, 3e38, INF, NAN]
    assert ptx.to_e8m0(np.array(given, np.float32)).tolist() == [
        0, 0, 0, 1, 127, 128, 254, 254, 254, 255,
    ]  # fmt: skip
    with pytest.raises(ptx.UnknownPTX, match="no sign"):
        ptx.to_e8m0(np.array([-1.0], np.float32))


def one(text: str, constraints: str, *values: float, dtype: type = np.uint32) -> int:
    given = [np.array([v], np.float32) for v in values]
    return int(ptx.run(text, constraints, given, [np.dtype(dtype)])[0][0])


def test_first_source_goes_to_the_upper_half() -> None:
    fp8 = "{ .reg .b16 d; cvt.rn.satfinite.e4m3x2.f32 d, $1, $2; cvt.u32.u16 $0, d; }"
    assert one(fp8, "=r,f,f", 1.0, -2.0) == 0x38C0
    fp4 = "{.reg .b8 a, b; cvt.rn.satfinite.e2m1x2.f32 a, $1, $2; .reg .b8 z; "
    fp4 += "cvt.rn.satfinite.e2m1x2.f32 b, $2, $2; mov.b32 $0, {a, b, b, a};}"
    assert one(fp4, "=r,f,f", 6.0, -0.5) == 0x79999979
    assert one("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", 1.0, 2.0) == 0x3F804000
    swap = "{ .reg .b64 d; mov.b64 d, {$1, $2}; .reg .b32 l; mov.b64 {l, $0}, d; }"
    assert one(swap, "=r,f,f", 1.0, 2.0) == 0x40000000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cvt.rn.satfinite.e2m1x2.f32 $0, $1, $2;", "32 bits, 8 are written"),
        ("{.reg .b16 d; cvt.rn.satfinite.e4m3x2.f32 d, $1, x; cvt.u32.u16 $0, d;}", "x is read"),
        ("{.reg .b16 d; cvt.u32.u16 $0, d;}", "read before it is written"),
        ("cvt.rz.bf16x2.f32 $0, $1, $2;", "instruction 'cvt.rz.bf16x2.f32'"),
    ],
)
def test_unknown_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ptx.UnknownPTX, match=re.escape(message)):
        one(text, "=r,f,f", 1.0, 2.0)


# --- what the compiler was given ------------------------------------------------------------------


@cache
def assembly(arch: int) -> tuple[ptx.InlineAssembly, ...]:
    """Every block of the row kernel over all elements, with all roundings to bfloat16."""
    from mxnorm_pass.ops.kernels.inspect import compile_row_kernel

    found: dict[ptx.InlineAssembly, None] = {}
    for element in ELEMENTS:
        built = compile_row_kernel(
            arch, f"{element}/b32/rceil_exact/reciprocal/clamp/plain", 2048, rounding="bf16->bf16"
        )
        found |= dict.fromkeys(ptx.blocks(built.ir))
    built = compile_row_kernel(
        arch,
        "e4m3/b32/floor/divide/clamp/plain",
        2048,
        rounding="bf16->bf16",
        gain=torch.bfloat16,
        residual=torch.bfloat16,
    )
    return tuple(found | dict.fromkeys(ptx.blocks(built.ir)))


def boundaries(negative: bool = True) -> Tensor:
    """All bfloat16, and 40 ulp around every power of two times the elements' mantissas."""
    words = [torch.arange(0x8000) << 16]
    for mantissa in (1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875):
        middle = (mantissa * torch.exp2(torch.arange(-149, 128).double())).float()
        near = middle.view(torch.int32)[:, None].long() + torch.arange(-40, 41)
        words.append(near.clamp(0, 0x7F800000).reshape(-1))
    values = torch.cat(words).to(torch.int32).view(torch.float32)
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    values = values[: len(values) // 8 * 8]
    return torch.cat([values, -values]) if negative else values


def call(block: ptx.InlineAssembly, *inputs: Tensor) -> list[Tensor]:
    return [torch.from_numpy(r) for r in block(*(i.numpy() for i in inputs))]


def name(block: ptx.InlineAssembly) -> str:
    """The one instruction that the block is there for."""
    names = set(re.findall(r"\b((?:cvt\.r|mul|add|max)\S+)", block.text))
    assert len(names) == 1, names
    return names.pop()


@pytest.mark.parametrize("element", ELEMENTS)
def test_conversions_of_elements(element: str) -> None:
    pytest.importorskip("triton")
    (block,) = (b for b in assembly(100) if f".{element}x2." in name(b))
    values, e = boundaries(), ELEMENTS[element]
    pairs = values.view(-1, 2)
    (got,) = call(block, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
    codes = encode(values, e, "clamp")
    if e.sub_byte:
        codes = pack(codes.masked_fill(values.isnan(), e.sign_bit - 1), e)
        assert_same_bytes(got.view(torch.uint8), codes)
        assert len(decode(encode(values, e, "clamp"), e).unique()) == 2 * e.sign_bit - 1
    else:
        assert_same_bytes(got.view(torch.uint8).view(e.dtype), codes)


def test_conversion_to_e8m0() -> None:
    pytest.importorskip("triton")
    (block,) = (b for b in assembly(100) if "ue8m0x2" in name(b))
    values = boundaries(negative=False)
    (got,) = call(block, values)
    assert_same_bytes(got.to(torch.uint8), round_up_e8m0(values))
    assert int(got.max()) == 255


def test_products_and_rounding_to_bfloat16() -> None:
    pytest.importorskip("triton")
    (block,) = (b for b in assembly(100) if name(b) == "mul.rn.f32x2")
    low, high = boundaries().view(2, -1)
    factor = low.flip(0)
    for got, expected in zip(call(block, low, high, factor), (low, high), strict=True):
        assert_same_bytes(got, expected * factor)
    (block,) = (b for b in assembly(100) if name(b) == "cvt.rn.bf16x2.f32")
    (got,) = call(block, low, high)
    expected = torch.stack([low, high], 1).bfloat16()
    assert_same_bytes(got.view(torch.bfloat16).view(-1, 2), expected)


@pytest.mark.parametrize("operation", ("add", "mul"))
def test_arithmetic_on_pairs_of_bfloat16(operation: str) -> None:
    """As in float32 and then rounded, but for subnormal products, which are rounded once."""
    pytest.importorskip("triton")
    (block,) = (b for b in assembly(90) if name(b) == f"{operation}.rn.bf16x2")
    seed = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (2, 1 << 19), generator=seed).to(torch.int32)
    # Half of them with exponents that are near each other, where rounding happens.
    near = (words[0] & 0x7F807F80) + (words[1] & ~0x7F807F80)
    words[1] = torch.where(torch.arange(1 << 19) % 2 == 0, near, words[1])
    (got,) = call(block, *words)
    a, b = words.view(torch.bfloat16).view(2, -1)
    expected = getattr(torch, operation)(a.float(), b.float())
    tiny = (expected.abs() < 2.0**-126) & (operation == "mul")
    result = got.view(torch.bfloat16).view(-1)
    assert_same_bytes(result[~tiny], expected[~tiny].bfloat16())
    exact = a.double() * b.double()
    quantum = 2.0**-133
    once = (torch.round(exact[tiny] / quantum) * quantum).to(torch.bfloat16)
    assert_same_bytes(result[tiny], once)
    assert int(tiny.sum()) > 1000 or operation == "add"


def test_larger_magnitudes_of_pairs_of_bfloat16() -> None:
    pytest.importorskip("triton")
    (block,) = (b for b in assembly(90) if name(b) == "max.NaN.xorsign.abs.bf16x2")
    words = torch.randint(-(2**31), 2**31, (2, 1 << 19), generator=torch.Generator().manual_seed(2))
    words = words.to(torch.int32)
    # Some pairs that are equal but for the sign, and all that is special.
    words[1, ::3] = words[0, ::3] ^ -2147450880
    words[1, ::1000] = 0x7F80FFC0
    words[0, ::700] = -0x80
    (got,) = call(block, *words)
    a, b = words.view(torch.bfloat16).view(2, -1).float().abs()
    assert_same_bytes(got.view(torch.bfloat16).view(-1).abs(), torch.maximum(a, b).bfloat16())


def test_nothing_else_is_assembly() -> None:
    """Every block of the compiled kernels is one of those tested above."""
    pytest.importorskip("triton")
    elements = {f"cvt.rn.satfinite.{e}x2.f32" for e in ELEMENTS}
    pairs = {"cvt.rn.bf16x2.f32", "add.rn.bf16x2", "mul.rn.bf16x2", "max.NaN.xorsign.abs.bf16x2"}
    blackwell = elements | pairs | {"cvt.rp.satfinite.ue8m0x2.f32", "mul.rn.f32x2"}
    assert sorted(map(name, assembly(100))) == sorted(blackwell)
    hopper = {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"} | pairs
    assert sorted(map(name, assembly(90))) == sorted(hopper)
