"""Formats against torchao's cast, against the instruction's definition, and against the oracle."""

import dataclasses
import math
import re
import struct
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import assert_same_bytes, bits, differing, sqnr, ulp_distance
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from mxnorm_pass import reference
from mxnorm_pass.formats import (
    APPLIES,
    BLOCK_SIZES,
    ELEMENTS,
    F32_MIN_NORMAL,
    RULES,
    SATURATES,
    Cast,
    Element,
    apply_scale,
    encode,
    quantize,
    scale_byte,
)
from mxnorm_pass.recognise import probes

BLOCK = 32
INF, NAN = float("inf"), float("nan")
BOTH = pytest.mark.parametrize("element", list(ELEMENTS.values()), ids=list(ELEMENTS))

# torchao's mode -> the rule and the way of scaling that it stands for.
TORCHAO = {
    "FLOOR": ("floor", "divide"),
    "CEIL": ("ceil", "divide"),
    "EVEN": ("even", "divide"),
    "RCEIL": ("rceil_log2", "reciprocal"),
}

# --- inputs ---------------------------------------------------------------------------------------


def absmax_values(dtype: torch.dtype, ulps: int) -> torch.Tensor:
    """Finite non-negative block absmax values, float32, each representable in ``dtype``.

    bfloat16: all there are. float32: every boundary of every rule, ``ulps`` to each side, in every
    binade, and all powers of two down to the least subnormal.
    """
    if dtype is torch.bfloat16:
        return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    # 1 FLOOR and CEIL; 1.75 RCEIL (448 and 57344 are 1.75 * 2^n); 2 - 2^-4, 2 - 2^-3 EVEN.
    mantissas = torch.tensor([1.0, 1.75, 1.9375, 1.875, 1.3, 1.5], dtype=torch.float64)
    centres = torch.outer(torch.exp2(torch.arange(-126, 128).double()), mantissas).flatten()
    around = centres.float().view(torch.int32)[:, None] + torch.arange(-ulps, ulps + 1)
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    subnormal = torch.arange(0, 0x800000, 0x7FFF, dtype=torch.int32).view(torch.float32)
    boundary = around.flatten().to(torch.int32).view(torch.float32)
    return torch.cat([boundary[boundary.isfinite()], powers, subnormal])


def blocks(dtype: torch.dtype, ulps: int = 20, stride: int = 1) -> torch.Tensor:
    """``[n, 32]`` in ``dtype``: one block for each of ``absmax_values``, and blocks of Inf and NaN.

    A block holds its absmax with both signs (overflow shows there only), -0, ties of 2- and 3-bit
    mantissas and of subnormal codes in units of the block's power of two, and random fractions.
    """
    a = absmax_values(dtype, ulps)[::stride, None].double()
    generator = torch.Generator().manual_seed(0)
    fractions = torch.rand(1, 10, generator=generator, dtype=torch.float64)
    ties = [17 / 32, -19 / 32, 27 / 32, 9 / 64, -11 / 64, 5 / 16, 7 / 16, 1.0, 0.5]
    # Half the least code: e4m3 2^-10, with the block's power at 2^8 or 2^7; e5m2 2^-17 and 2^15.
    tiny = [m * 2.0**-n for m in (1, -3, 5) for n in (17, 18)] + [-(2.0**-32), 3 * 2.0**-32]
    power = torch.where(a > 0, torch.exp2(torch.frexp(a)[1].double() - 1), 0.0)
    grid = torch.tensor([ties + tiny], dtype=torch.float64)
    rest = torch.cat([-fractions[:, :5], fractions[:, 5:]], -1)
    x = torch.cat([a, -a, 0 * a, -0.0 * a, a * rest, power * grid], -1)
    x = torch.cat([x, a.expand(-1, BLOCK - x.shape[-1]) * 2**-5], -1)
    special = x[:1].clone().repeat(5, 1)
    special[:, :] = torch.linspace(-3, 3, BLOCK, dtype=torch.float64)
    for row, values in enumerate([(INF,), (-INF, INF), (NAN,), (NAN, INF), (-NAN, 1.0)]):
        special[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return torch.cat([x, special]).float().to(dtype)


def test_inputs_cover_what_they_claim() -> None:
    x = blocks(torch.bfloat16)
    absmax = x.float().abs().amax(-1)
    assert set(absmax[absmax.isfinite()].tolist()) == set(
        absmax_values(torch.bfloat16, 0).tolist()
    ), "every bf16 absmax occurs, and nothing in its block exceeds it"
    y = blocks(torch.float32)
    assert y.shape[1] == BLOCK and len(y) > 50_000
    assert int(y.isnan().any(-1).sum()) == 3 and int((y.abs() == INF).any(-1).sum()) == 3
    # Every tie of the grid is hit: scaled to [2^8, 2^9), e4m3 steps by 32 there.
    scaled = x[0x3F80].double() * 256
    assert bool(((scaled / 16) % 2 == 1).any()), "halfway between two codes of the top binade"


def test_comparisons_see_differences() -> None:
    a = torch.tensor([1.0, NAN, 0.0, -2.0])
    assert not differing(a, a.clone()).any()
    assert differing(a, torch.tensor([1.0, NAN, -0.0, -2.0])).tolist() == [
        False,
        False,
        True,
        False,
    ]
    other_nan = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert not differing(other_nan, torch.tensor([NAN, NAN])).any()
    assert differing(other_nan, torch.tensor([NAN, 1.0])).tolist() == [False, True]
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        assert_same_bytes(codes.view(dtype), codes.view(dtype))
        changed = codes.clone()
        changed[3] = 4
        with pytest.raises(AssertionError, match=r"1 of 256 .* first at \(3,\): got 0x4, expected"):
            assert_same_bytes(changed.view(dtype), codes.view(dtype))
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bytes(a, a.double())
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bytes(a, a[:, None])
    assert sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(20.0)
    assert sqnr(a[[0, 3]], a[[0, 3]]) == INF
    one = torch.tensor([1.0, -1.0, 0.0, 2.0**-149])
    after = torch.tensor([1 + 2.0**-23, -1 - 2.0**-22, -0.0, -(2.0**-149)])
    assert ulp_distance(one, after).tolist() == [1, 2, 0, 2]
    assert ulp_distance(one.bfloat16(), -one.bfloat16()).tolist()[0] == 2 * 0x3F80


# --- the table ------------------------------------------------------------------------------------


@BOTH
def test_element_table_agrees_with_torch(element: Element) -> None:
    info = torch.finfo(element.dtype)
    assert element.max == info.max
    assert element.mantissa_bits == -math.log2(info.eps)
    assert element.bias == 1 - math.log2(info.smallest_normal)
    assert element.exponent_bits + element.mantissa_bits == 7
    assert element.max_exponent == math.frexp(info.max)[1] - 1


# --- torchao --------------------------------------------------------------------------------------


def torchao_cast(x: torch.Tensor, element: Element, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale, qdata = to_mx(x, element.dtype, BLOCK, ScaleCalculationMode[mode])
    return qdata, scale.view(torch.uint8)


def ours(x: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.float().unflatten(-1, (-1, cast.block_size))
    qdata, scale = quantize(values, values.abs().amax(-1, keepdim=True), cast)
    return qdata.view(x.shape), scale.squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("mode", TORCHAO)
@BOTH
def test_equals_torchao(element: Element, mode: str, dtype: torch.dtype) -> None:
    """Bitwise on every block; eager torchao clamps."""
    x = blocks(dtype)
    rule, apply = TORCHAO[mode]
    qdata, scale = torchao_cast(x, element, mode)
    got, got_scale = ours(x, Cast(element.name, BLOCK, rule, apply, "clamp"))
    assert_same_bytes(got_scale, scale, f"{mode} scale")
    assert_same_bytes(got, qdata, f"{mode} codes")


@pytest.mark.parametrize("mode", TORCHAO)
@BOTH
def test_torchao_mode_is_no_other_cast(element: Element, mode: str) -> None:
    """The comparison above tells its answer from every neighbour, with float32 input."""
    x = blocks(torch.float32)
    rule, apply = TORCHAO[mode]
    qdata, scale = torchao_cast(x, element, mode)
    for other in RULES:
        if other != rule:
            _, byte = ours(x, Cast(element.name, BLOCK, other, apply, "clamp"))
            assert int(differing(byte, scale).sum()) > 100, other
    (other_apply,) = set(APPLIES) - {apply}
    codes, _ = ours(x, Cast(element.name, BLOCK, rule, other_apply, "clamp"))
    assert int(differing(codes, qdata).sum()) > 100, "byte 0 and 254 scale differently"


def test_torchao_clamp_depends_on_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under tracing torchao's FLOOR, CEIL and EVEN do not clamp ("bare"); RCEIL always does."""
    x = blocks(torch.bfloat16)
    monkeypatch.setattr(torch._dynamo, "is_compiling", lambda: True)
    for element, (mode, (rule, apply)) in product(ELEMENTS.values(), TORCHAO.items()):
        qdata, scale = torchao_cast(x, element, mode)
        saturate = "clamp" if mode == "RCEIL" else "bare"
        got, got_scale = ours(x, Cast(element.name, BLOCK, rule, apply, saturate))
        assert_same_bytes(got_scale, scale, mode)
        assert_same_bytes(got, qdata, f"{element.name} {mode}")
        if (element.name, mode) == ("e5m2", "FLOOR"):
            clamped, _ = ours(x, Cast(element.name, BLOCK, rule, apply, "clamp"))
            lost = differing(clamped, qdata)
            assert int(lost.sum()) > 1000 and bool(qdata.float()[lost].isinf().all()), (
                "mantissas above 1.875 overflow e5m2 to Inf without the clamp"
            )


# --- scale rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@BOTH
def test_scale_byte_equals_definition(element: Element, rule: str) -> None:
    for values in (
        probes.absmax(torch.bfloat16).float(),
        probes.absmax(torch.float32),
        absmax_values(torch.float32, 20),
    ):
        expected = reference.scale_exponent(values, element, rule)
        assert int(expected.min()) >= 0 and int(expected.max()) <= 255
        assert_same_bytes(scale_byte(values, element, rule), expected.to(torch.uint8), rule)


@BOTH
def test_rules_are_told_apart(element: Element) -> None:
    values = probes.absmax(torch.float32)
    bytes_of = {rule: scale_byte(values, element, rule) for rule in RULES}
    for one, other in combinations(RULES, 2):
        assert int((bytes_of[one] != bytes_of[other]).sum()) > 1000, (one, other)
    # bf16 absmax values cannot tell the two RCEIL apart: none lies a few ulp above a power.
    coarse = probes.absmax(torch.bfloat16).float()
    assert_same_bytes(
        scale_byte(coarse, element, "rceil_log2"), scale_byte(coarse, element, "rceil_exact")
    )


def test_rceil_log2_is_late() -> None:
    """ceil(log2(.)) in float32 misses only the first ulps above a power of two, by one."""
    element = dataclasses.replace(ELEMENTS["e4m3"], max=1.0)  # absmax is the quotient itself
    powers = torch.exp2(torch.arange(-125, 127).double()).float().view(torch.int32)
    steps = torch.arange(0, 65, dtype=torch.int32)
    values = (powers[:, None] + steps).view(torch.float32)
    late = scale_byte(values, element, "rceil_log2").int()
    exact = scale_byte(values, element, "rceil_exact").int()
    delta = exact - late
    assert set(delta.unique().tolist()) == {0, 1}
    wrong = steps[(delta == 1).any(0)].tolist()
    # 2^e(1 + n ulp): log2 = e + n 1.72e-7, lost below half an ulp of e, 3.81e-6 at |e| >= 64: n of
    # 22 and less, and a few to either side for a log2 that is not rounded correctly.
    assert wrong[0] == 1 and wrong == list(range(1, len(wrong) + 1)) and 20 <= len(wrong) <= 24


def instruction(descale: float) -> int:
    """``cvt.rp.satfinite.ue8m0x2.f32`` of one non-negative float32, from the PTX ISA's words.

    Rounded up to a power of two; NaN gives 0xFF; what exceeds the largest finite value, Inf
    included, gives 0xFE; 2^-127 is the least value.
    """
    if math.isnan(descale):
        return 0xFF
    if descale == 0.0:
        return 0
    if math.isinf(descale):
        return 0xFE
    mantissa, exponent = math.frexp(
        descale
    )  # descale = mantissa * 2^exponent, mantissa in [1/2, 1)
    power = exponent - 1 if mantissa == 0.5 else exponent
    return min(max(power + 127, 0), 0xFE)


def as_float32(value: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def test_rceil_exact_is_the_instruction() -> None:
    """Every exponent field with the mantissas where a carry could go wrong."""
    element = dataclasses.replace(ELEMENTS["e4m3"], max=1.0)
    mantissas = [0, 1, 2, 3, 16, 17, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFE, 0x7FFFFF]
    patterns = [e << 23 | m for e in range(256) for m in mantissas]
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    expected = [instruction(v) for v in values.tolist()]
    assert scale_byte(values, element, "rceil_exact").tolist() == expected
    assert {0, 1, 0xFE, 0xFF} <= set(expected)


@BOTH
def test_rceil_exact_rounds_the_float32_quotient(element: Element) -> None:
    values = absmax_values(torch.float32, 8)
    # The quotient of two float32 rounds the same through float64 (53 >= 2 * 24 + 2).
    expected = [instruction(as_float32(v / element.max)) for v in values.tolist()]
    assert scale_byte(values, element, "rceil_exact").tolist() == expected


@BOTH
def test_rceil_never_overflows_and_wastes_less_than_a_binade(element: Element) -> None:
    values = absmax_values(torch.float32, 20)
    byte = scale_byte(values, element, "rceil_exact")
    scaled = values.double() / torch.exp2(byte.double() - 127)
    # One float32 ulp: the quotient absmax / max is rounded to float32 before it is rounded up.
    assert float(scaled.max()) <= element.max * (1 + 2**-23)
    inside = (byte > 0) & (byte < 254)
    assert float(scaled[inside].min()) > element.max / 2


# --- scaling and rounding -------------------------------------------------------------------------


def test_apply_scale_is_a_product_by_a_power_of_two() -> None:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None]
    values = torch.tensor([1.0, -1.5, 1.2345678, 3e38, -1e-38, 2.0**-149, 0.0, -0.0, INF, NAN])
    absmax = torch.ones(256, 1)
    absmax[255] = NAN
    exponent = byte.double() - 127

    power = torch.exp2(-exponent)
    power[0], power[254], power[255] = 1.0, 2.0**-127, NAN
    got = apply_scale(values, absmax, byte, "reciprocal")
    assert_same_bytes(got, (values.double() * power).float(), "reciprocal")

    power = torch.exp2(exponent)
    power[0], power[255] = F32_MIN_NORMAL, INF
    got = apply_scale(values, absmax, byte, "divide")
    assert_same_bytes(got, (values.double() / power).float(), "divide")


@BOTH
def test_encode_inverts_decode(element: Element) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(element.dtype)
    for saturate in SATURATES:
        finite = codes[codes.float().isfinite()]
        assert len(finite) == {"e4m3": 254, "e5m2": 248}[element.name]
        assert_same_bytes(encode(finite.float(), element, saturate), finite, saturate)
        assert encode(torch.tensor([NAN]), element, saturate).float().isnan().all()
    top = encode(torch.tensor([INF, -INF]), element, "clamp").float()
    assert top.tolist() == [element.max, -element.max]


@BOTH
def test_encode_rounds_to_nearest_even(element: Element) -> None:
    """Against the oracle's search: all bf16 values, all ties and their neighbours."""
    codes = torch.arange(128, dtype=torch.int32).to(torch.uint8).view(element.dtype).double()
    codes = codes[codes.isfinite()]
    ties = ((codes[1:] + codes[:-1]) / 2).float()
    assert_same_bytes(ties.double(), (codes[1:] + codes[:-1]) / 2, "ties are exact in float32")
    near = ties.view(torch.int32)[:, None] + torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int32)
    near = near.view(torch.float32)
    every = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for values in (every.float(), near, -near):
        expected = reference.round_to_element(values.double(), element, "clamp")
        assert_same_bytes(encode(values, element, "clamp"), expected, "clamp")
        inside = values[values.abs() <= element.max]
        assert_same_bytes(
            encode(inside, element, "bare"),
            reference.round_to_element(inside.double(), element, "clamp"),
            "bare",
        )
    even = encode(ties, element, "clamp").view(torch.uint8)
    assert bool((even % 2 == 0).all()), "ties go to the even code"


def test_bare_overflow_is_the_platform_s() -> None:
    """e5m2 overflows to Inf; e4m3 has no Inf: 448 or NaN, by version of torch. Never a wrap."""
    big = torch.tensor([65536.0, -1e30, INF])
    assert encode(big, ELEMENTS["e5m2"], "bare").float().tolist() == [INF, -INF, INF]
    got = encode(torch.tensor([500.0, -1e30]), ELEMENTS["e4m3"], "bare").float()
    assert got.isnan().all() or got.tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@BOTH
def test_quantize_equals_oracle(element: Element, dtype: torch.dtype) -> None:
    """All twenty casts of an element; strides coprime to what the absmax values repeat by."""
    x = blocks(dtype, ulps=4, stride=37 if dtype is torch.bfloat16 else 11)
    for rule, apply, saturate in product(RULES, APPLIES, SATURATES):
        cast = Cast(element.name, BLOCK, rule, apply, saturate)
        qdata, scale = reference.quantize(x, cast)
        got, got_scale = ours(x, cast)
        assert_same_bytes(got_scale, scale, f"{cast} scale")
        assert_same_bytes(got, qdata, f"{cast} codes")


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_block_sizes(block: int) -> None:
    """A block's bytes depend on that block alone: cut out, it gives the same."""
    x = torch.randn(3, 4 * block, generator=torch.Generator().manual_seed(1))
    x *= torch.exp2(torch.arange(4.0)).repeat_interleave(block)
    cast = Cast("e4m3", block, "floor", "divide", "clamp")
    qdata, scale = ours(x, cast)
    assert scale.shape == (3, 4)
    for i in range(4):
        piece = slice(i * block, (i + 1) * block)
        alone, alone_scale = reference.quantize(x[:, piece], cast)
        assert_same_bytes(qdata[:, piece].contiguous(), alone)
        assert_same_bytes(scale[:, i : i + 1], alone_scale)


# --- names ----------------------------------------------------------------------------------------

casts = st.builds(
    Cast,
    st.sampled_from(list(ELEMENTS)),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(RULES),
    st.sampled_from(APPLIES),
    st.sampled_from(SATURATES),
)


@given(casts, casts)
def test_cast_text_round_trip(cast: Cast, other: Cast) -> None:
    assert Cast.parse(str(cast)) == cast
    assert (str(cast) == str(other)) == (cast == other)


def test_cast_text_is_stable() -> None:
    """Written into graphs and caches: a change of spelling is a change of format."""
    cast = Cast("e4m3", 32, "rceil_log2", "reciprocal", "clamp")
    assert str(cast) == "e4m3/b32/rceil_log2/reciprocal/clamp/plain"


@pytest.mark.parametrize(
    ("field", "name", "allowed"),
    [
        (0, "element", list(ELEMENTS)),
        (1, "block", [f"b{b}" for b in BLOCK_SIZES]),
        (2, "rule", list(RULES)),
        (3, "apply", list(APPLIES)),
        (4, "saturate", list(SATURATES)),
        (5, "layout", ["plain"]),
    ],
)
def test_wrong_field_names_what_is_allowed(field: int, name: str, allowed: list[str]) -> None:
    fields = str(reference.DEFAULT_CAST).split("/")
    for wrong in ("nonsense", "", "e9m9", "b33", "32", "FLOOR"):
        fields[field] = wrong
        message = f"{name} {wrong!r} is not one of {', '.join(allowed)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            Cast.parse("/".join(fields))


def test_wrong_number_of_fields() -> None:
    text = str(reference.DEFAULT_CAST)
    for wrong in ("", "e4m3", text + "/plain", text.rsplit("/", 1)[0]):
        with pytest.raises(
            ValueError, match="element/block/rule/apply/saturate/layout, six fields"
        ):
            Cast.parse(wrong)


def test_bits_keep_their_width() -> None:
    assert bits(torch.zeros(2, dtype=torch.float8_e8m0fnu)).dtype is torch.uint8
    assert bits(torch.zeros(2, dtype=torch.bfloat16)).dtype is torch.int16
