"""The oracle itself: against hand-made values, torchao's linear, torch's gradients and float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_bytes, assert_same_cast, differing, is_nan_scale, sqnr
from torch import Tensor
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from mxnorm_pass import theory
from mxnorm_pass.formats import APPLIES, E8M0_RULES, ELEMENTS, SATURATES, Cast
from mxnorm_pass.reference import (
    DEFAULT_CAST,
    MXNorm,
    MXNormLinear,
    dequantize,
    fake_quantize,
    normalise,
    quantize,
    rms_estimate,
    round_to_element,
    rstd,
    scale_exponent,
)

EPS = 1e-5
INF, NAN = float("inf"), float("nan")
# torchao's names of the elements.
TORCHAO = {e.name: e.dtype for e in ELEMENTS.values()}
TORCHAO |= {"e2m3": DTYPE_FP6_E2M3, "e3m2": DTYPE_FP6_E3M2, "e2m1": torch.float4_e2m1fn_x2}
NVFP4 = Cast("e2m1", 16, "e4m3", "reciprocal", "clamp")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm, in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


# --- values made by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("absmax", "floor", "ceil", "even", "rceil"),
    [
        # e4m3: max 448 = 1.75 * 2^8; FLOOR, CEIL and EVEN subtract 8, so 2^0 is byte 127 - 8.
        (1.0, 119, 119, 119, 119),
        (1.5, 119, 120, 119, 119),
        (1.75, 119, 120, 119, 119),  # 1.75 / 448 is 2^-8 itself
        (1.78125, 119, 120, 119, 120),
        (1.9296875, 119, 120, 119, 120),
        (1.9375, 119, 120, 120, 120),  # halfway between 1.875 and 2
        (2.0, 120, 120, 120, 120),
        (448.0, 127, 128, 127, 127),
        (0.0, 0, 0, 0, 0),
        (2.0**-149, 0, 0, 0, 0),
        (3e38, 246, 247, 246, 247),  # 1.76 * 2^127
        (INF, 247, 247, 247, 254),
        (NAN, 255, 255, 255, 255),
    ],
)
def test_scale_exponents_by_hand(
    absmax: float, floor: int, ceil: int, even: int, rceil: int
) -> None:
    expected = {"floor": floor, "ceil": ceil, "even": even}
    expected |= {"rceil_log2": rceil, "rceil_exact": rceil}
    got = {r: int(scale_exponent(torch.tensor(absmax), ELEMENTS["e4m3"], r)) for r in E8M0_RULES}
    assert got == expected


@pytest.mark.parametrize(
    ("element", "absmax", "floor", "ceil", "even", "rceil"),
    [
        # e2m3: max 7.5 = 1.875 * 2^2; EVEN goes up from 1.9375.
        ("e2m3", 4.0, 127, 127, 127, 127),
        ("e2m3", 7.5, 127, 128, 127, 127),
        ("e2m3", 7.625, 127, 128, 127, 128),
        ("e2m3", 7.75, 127, 128, 128, 128),
        # e3m2: max 28 = 1.75 * 2^4; EVEN goes up from 1.875.
        ("e3m2", 16.0, 127, 127, 127, 127),
        ("e3m2", 28.0, 127, 128, 127, 127),
        ("e3m2", 29.0, 127, 128, 127, 128),
        ("e3m2", 30.0, 127, 128, 128, 128),
        # e2m1: max 6 = 1.5 * 2^2; EVEN goes up from 1.75.
        ("e2m1", 4.0, 127, 127, 127, 127),
        ("e2m1", 6.0, 127, 128, 127, 127),
        ("e2m1", 6.5, 127, 128, 127, 128),
        ("e2m1", 7.0, 127, 128, 128, 128),
        ("e2m1", INF, 253, 253, 253, 254),  # 2^128 less 2^2
    ],
)
def test_sub_byte_scale_exponents_by_hand(
    element: str, absmax: float, floor: int, ceil: int, even: int, rceil: int
) -> None:
    values = torch.tensor([absmax, NAN])
    got = [scale_exponent(values, ELEMENTS[element], r).tolist() for r in E8M0_RULES]
    assert got == [[e, 255] for e in (floor, ceil, even, rceil, rceil)]


def test_unknown_rule_names_the_allowed() -> None:
    with pytest.raises(ValueError, match=r"'up'.*floor, ceil, even, rceil_log2, rceil_exact"):
        scale_exponent(torch.ones(1), ELEMENTS["e4m3"], "up")


@pytest.mark.parametrize(
    ("element", "value", "expected"),
    [
        ("e4m3", 17.0, 16.0),  # steps of 2: a tie, to the even code
        ("e4m3", 19.0, 20.0),
        ("e4m3", 17.01, 18.0),
        ("e4m3", -19.0, -20.0),
        ("e4m3", 449.0, 448.0),
        ("e4m3", -1e9, -448.0),
        ("e4m3", 2.0**-10, 0.0),  # half of the least subnormal
        ("e4m3", 1.01 * 2.0**-10, 2.0**-9),
        ("e4m3", 3 * 2.0**-10, 2.0**-8),
        ("e5m2", 9.0, 8.0),
        ("e5m2", 11.0, 12.0),
        ("e5m2", 1e9, 57344.0),
        ("e5m2", 2.0**-17, 0.0),
        ("e5m2", INF, 57344.0),
    ],
)
def test_rounding_by_hand(element: str, value: float, expected: float) -> None:
    got = round_to_element(torch.tensor([value]).double(), ELEMENTS[element], "clamp")
    assert got.float().tolist() == [expected]


@pytest.mark.parametrize(
    ("element", "values", "codes"),
    [
        # e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives from 8.
        ("e2m1", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ("e2m1", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [0, 2, 2, 4, 4, 6, 6]),  # ties
        ("e2m1", [0.26, 0.74, 4.9, 5.1, 9.0, -INF, -0.0, -3.0], [1, 1, 6, 7, 7, 15, 8, 13]),
        # e2m3: eighths to 2, quarters to 4, halves to 7.5; code 8 is 1, 16 is 2, 24 is 4.
        ("e2m3", [0.125, 0.875, 1.0, 2.0, 4.0, 7.5, -7.5], [1, 7, 8, 16, 24, 31, 63]),
        ("e2m3", [0.0625, 0.1875, 1.0625, 4.25, 7.25, 100.0, -0.0], [0, 2, 8, 24, 30, 31, 32]),
        # e3m2: sixteenths to .5, then four steps to each power of two; code 4 is .25, 28 is 16.
        ("e3m2", [0.0625, 0.1875, 0.25, 1.0, 16.0, 28.0, -28.0], [1, 3, 4, 12, 28, 31, 63]),
        ("e3m2", [0.03125, 0.09375, 1.125, 18.0, 26.0, 1e9, -0.0], [0, 2, 12, 28, 30, 31, 32]),
    ],
)
def test_sub_byte_codes_by_hand(element: str, values: list[float], codes: list[int]) -> None:
    for saturate in SATURATES:
        got = round_to_element(torch.tensor(values).double(), ELEMENTS[element], saturate)
        assert got.dtype is torch.uint8 and got.tolist() == codes


def test_fp4_blocks_by_hand() -> None:
    """Two codes in a byte, the first in the low half: 6, 3 are codes 7, 5, so 0x57."""
    y = torch.tensor([[6.0, 3.0, -1.5, 0.5] + [0.0] * 12, [24.0, 12.0, -6.0, 2.0] + [0.0] * 12])
    packed = [0x57, 0x1B] + [0] * 6
    qdata, scale = quantize(y, Cast("e2m1", 16, "floor", "divide", "clamp"))
    assert qdata.tolist() == [packed, packed] and scale.tolist() == [[127], [129]]
    assert scale.dtype is torch.uint8
    assert_same_bytes(dequantize(qdata, scale, torch.float32, ELEMENTS["e2m1"]), y)
    # e2m3 holds the same values in a byte each: 6 is 4 * 1.5, code 24 + 4, and 3 is 16 + 4.
    qdata, scale = quantize(y, Cast("e2m3", 16, "floor", "divide", "clamp"))
    assert qdata.tolist() == [[28, 20, 44, 4] + [0] * 12] * 2 and scale.tolist() == [[127], [129]]
    assert_same_bytes(dequantize(qdata, scale, torch.float32, ELEMENTS["e2m3"]), y)


@pytest.mark.parametrize("apply", APPLIES)
def test_nvfp4_blocks_by_hand(apply: str) -> None:
    """Scales of 1, 4 and 448 are bytes 0x38, 0x48 and 0x7E; of a zero block 2^-6, 0x08."""
    y = torch.tensor([[6.0, 3.0, -1.5, 0.5] + [0.0] * 12]) * torch.tensor([[1], [4], [1000], [0]])
    cast = Cast("e2m1", 16, "e4m3", apply, "clamp")
    packed = [0x57, 0x1B] + [0] * 6
    qdata, scale = quantize(y, cast)
    assert scale.dtype is torch.float8_e4m3fn and qdata.dtype is torch.uint8
    assert scale.view(torch.uint8).flatten().tolist() == [0x38, 0x48, 0x7E, 0x08]
    # In units of 448 the third row is 13.4, 6.7, -3.3, 1.1: codes 7, 7, 8 + 5, 2. -0 is code 8.
    assert qdata.tolist() == [packed, packed, [0x77, 0x2D] + [0] * 6, [0x00, 0x08] + [0] * 6]
    # Half of each scale under a tensor's scale of 2, and what was too large fits under 16.
    halved, scale = quantize(y, cast, 2.0)
    assert scale.view(torch.uint8).flatten().tolist() == [0x30, 0x40, 0x7E, 0x08]
    assert halved[:2].tolist() == [packed, packed]
    y[2] *= 0.448
    qdata, scale = quantize(y, cast, 16.0)
    assert scale.float().flatten().tolist() == [2.0**-4, 0.25, 28.0, 2.0**-6]
    back = dequantize(qdata, scale, torch.float32, ELEMENTS["e2m1"], 16.0)
    assert_same_bytes(back, y)
    assert_same_bytes(dequantize(qdata, scale, torch.float32, ELEMENTS["e2m1"]), back / 16)


def test_nvfp4_scales_of_nan_and_inf() -> None:
    y = torch.full((2, 16), 0.5)
    y[0, 3], y[1, 3] = NAN, -INF
    qdata, scale = quantize(y, NVFP4)
    assert is_nan_scale(scale).tolist() == [[True], [False]] and float(scale[1, 0]) == 448.0
    back = dequantize(qdata, scale, torch.float32, ELEMENTS["e2m1"])
    assert back[0].isnan().all()
    assert back[1].tolist() == [0.0] * 3 + [-6 * 448.0] + [0.0] * 12


def test_rounding_keeps_nan_and_the_sign_of_zero() -> None:
    got = round_to_element(torch.tensor([NAN, -0.0, 0.0]).double(), ELEMENTS["e4m3"], "clamp")
    assert got.view(torch.uint8).tolist() == [0x7F, 0x80, 0x00]


def test_estimate_by_hand() -> None:
    x = torch.zeros(2, 64)
    x[0, 3], x[0, 40] = -3.0, 4.0  # block maxima 3 and 4
    assert rms_estimate(x, 32, 2, 0.5)[0].item() == pytest.approx(0.5 * 12.5**0.5, rel=1e-6)
    assert rms_estimate(x, 32, 1, 0.5)[0].item() == pytest.approx(0.5 * 3.5, rel=1e-6)
    assert rms_estimate(x, 64, 2, 0.5)[0].item() == pytest.approx(0.5 * 4.0, rel=1e-6)
    assert rms_estimate(x, 32, 2)[0].item() == pytest.approx(0.4185051047 * 12.5**0.5, rel=1e-6)
    assert rms_estimate(x, 32, 1)[0].item() == pytest.approx(0.4260614642 * 3.5, rel=1e-6)
    assert rstd(x, EPS, "exact")[0].item() == pytest.approx((25 / 64 + EPS) ** -0.5, rel=1e-6)
    assert rstd(x, EPS, "p2", 32, 0.5)[0].item() == pytest.approx((3.125 + EPS) ** -0.5, rel=1e-6)
    assert rstd(x, EPS, "p1", 32, 0.5)[0].item() == pytest.approx((1.75**2 + EPS) ** -0.5, rel=1e-6)


@pytest.mark.parametrize("rms", ["p1", "p2", "exact"])
def test_eps_stands_inside_the_root(rms: str) -> None:
    """A row whose rms is sqrt(eps) is scaled by 1 / (sqrt(2) rms); eps outside would not show."""
    x = torch.ones(1, 64) * EPS**0.5
    root = rstd(x, EPS, rms, correction=1.0)
    assert root.item() == pytest.approx((2 * EPS) ** -0.5, rel=1e-6)
    assert rstd(torch.zeros(1, 64), EPS, rms).item() == pytest.approx(EPS**-0.5, rel=1e-6)


def test_normalise_rounds_where_it_says() -> None:
    x, rho = torch.tensor([[1.0]]), torch.tensor([[1.0 + 2.0**-9]])
    gain = torch.tensor([1.0 + 2.0**-8])
    f32, bf16 = torch.float32, torch.bfloat16
    product = (1 + 2.0**-9) * (1 + 2.0**-8)
    # bf16 steps by 2^-7 above 1; 1 + 2^-9 rounds to 1, and 1 + 2^-8 is a tie, to 1.
    for norm, out, expected in [
        (f32, f32, product),
        (bf16, f32, 1 + 2.0**-8),
        (f32, bf16, 1 + 2.0**-7),
        (bf16, bf16, 1.0),
    ]:
        y = normalise(x, rho, gain, norm, out)
        assert y.dtype is out and y.item() == expected
    assert normalise(x.bfloat16(), rho, None).dtype is bf16
    assert normalise(x, rho, None, bf16).item() == 1.0


# --- quantise and dequantise ----------------------------------------------------------------------


def rows_of_many_scales() -> Tensor:
    x = randn(40, 128) * torch.exp2(torch.arange(-30, 50, 2).float())[:, None]
    x[:, 32:64] *= 2.0 ** torch.linspace(-12, 4, 32)  # down to subnormal codes and below
    x[3, 64:96] = 0.0
    return x


@pytest.mark.parametrize("mode", ["FLOOR", "CEIL", "EVEN", "RCEIL"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_dequantize_equals_torchao(element: str, mode: str) -> None:
    x = rows_of_many_scales()
    x[5, 40] = NAN
    for dtype in (torch.float32, torch.bfloat16):
        t = MXTensor.to_mx(x.to(dtype), TORCHAO[element], 32, ScaleCalculationMode[mode])
        got = dequantize(t.qdata, t.scale.view(torch.uint8), dtype, ELEMENTS[element])
        assert got[5, 32:64].isnan().all() and int(got.isnan().sum()) == 32
        assert_same_bytes(got, t.dequantize(dtype), f"{mode} {dtype}")


@pytest.mark.parametrize("tensor_scale", [None, 0.0371, 2.0**-9])
def test_dequantize_nvfp4_equals_torchao(tensor_scale: float | None) -> None:
    x = rows_of_many_scales()
    x[5, 40] = NAN
    outer = None if tensor_scale is None else torch.tensor(tensor_scale)
    for dtype in (torch.float32, torch.bfloat16):
        t = NVFP4Tensor.to_nvfp4(x.to(dtype), per_tensor_scale=outer)
        rest = (ELEMENTS["e2m1"],) if outer is None else (ELEMENTS["e2m1"], float(outer))
        got = dequantize(t.qdata, t.scale, dtype, *rest)
        expected = t.dequantize(dtype)
        assert got[5, 32:48].isnan().all() and int(got.isnan().sum()) == 16
        if dtype is torch.float32 and outer is not None:
            # torchao rounds the product of the scales to float32 first: an ulp and a half.
            torch.testing.assert_close(got, expected, rtol=2.0**-23, atol=0, equal_nan=True)
        else:
            assert_same_bytes(got, expected, f"{dtype}")


def test_dequantize_by_hand() -> None:
    qdata = torch.tensor([[448.0, -1.0, 2.0**-9, 0.0] * 8]).repeat(1, 3).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 130, 255]], dtype=torch.uint8)
    got = dequantize(qdata, scale, torch.float32)
    assert got[0, :4].tolist() == [448.0, -1.0, 2.0**-9, 0.0]
    assert got[0, 32:36].tolist() == [3584.0, -8.0, 2.0**-6, 0.0]
    assert got[0, 64:].isnan().all()
    assert dequantize(qdata, scale).dtype is torch.bfloat16


@pytest.mark.parametrize("rule", E8M0_RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_quantising_again_changes_nothing(element: str, rule: str) -> None:
    """Values stay. So do bytes under FLOOR and EVEN; CEIL and RCEIL may halve the scale.

    There the block's maximum may round down onto a power of two (448/2), for which the next smaller
    scale does: the same values by other codes.
    """
    x, e = rows_of_many_scales(), ELEMENTS[element]
    for apply in APPLIES:
        cast = Cast(element, 32, rule, apply, "clamp")
        qdata, scale = quantize(x, cast)
        once = dequantize(qdata, scale, torch.float32, e)
        qdata2, scale2 = quantize(once, cast)
        assert torch.equal(dequantize(qdata2, scale2, torch.float32, e), once)
        if rule in ("floor", "even"):
            assert_same_bytes(scale2, scale)
            assert_same_bytes(qdata2, qdata)
        else:
            halved = scale.int() - scale2.int()
            assert set(halved.unique().tolist()) <= {0, 1}


@pytest.mark.parametrize("tensor_scale", [1.0, 0.0371, 2.0**-9])
@pytest.mark.parametrize("apply", APPLIES)
def test_quantising_nvfp4_again_changes_nothing(apply: str, tensor_scale: float) -> None:
    """Bytes too: rounded by a sixteenth at most, a scale leaves the maximum above 5, at code 6.

    A block below the least scale or above the largest keeps that one.
    """
    x = randn(200, 128) * torch.exp2(torch.linspace(-8, 10, 200))[:, None] * tensor_scale
    x = torch.cat([x, rows_of_many_scales()])
    cast = Cast("e2m1", 16, "e4m3", apply, "clamp")
    qdata, scale = quantize(x, cast, tensor_scale)
    assert len(scale.float().unique()) == 15 * 8 - 1, "all normal scales up to 448"
    once = dequantize(qdata, scale, torch.float32, ELEMENTS["e2m1"], tensor_scale)
    assert_same_cast(quantize(once, cast, tensor_scale), (qdata, scale))


@pytest.mark.parametrize(
    ("element", "rule"), [*itertools.product(ELEMENTS, ["ceil", "rceil_exact"]), ("e2m1", "e4m3")]
)
def test_error_of_a_cast_that_never_clamps(element: str, rule: str) -> None:
    """Half a step: 2^-(m+1) relative, or half the least subnormal times the scale.

    NVFP4, whose scale may round down, clamps at 6 what is below 6 * 17/16: a sixteenth, where half
    a step is 1.
    """
    x = rows_of_many_scales()
    e = ELEMENTS[element]
    cast = Cast(element, 32, rule, "divide", "clamp")
    outer = 1.0 if rule != "e4m3" else float(x.abs().max() / (448 * 6))
    qdata, scale = quantize(x, cast, outer)
    error = (dequantize(qdata, scale, torch.float64, e, outer) - x.double()).abs()
    least = 2.0 ** (1 - e.bias - e.mantissa_bits)
    power = scale.double() * outer if rule == "e4m3" else torch.exp2(scale.double() - 127)
    power = power.repeat_interleave(32, -1)
    bound = torch.maximum(x.double().abs() * 2.0 ** -(e.mantissa_bits + 1), least / 2 * power)
    # rceil_exact: the float32 quotient may place the maximum an ulp above 448, clamped by that ulp.
    assert bool((error <= bound).all())
    # Tight: just above a power of two the error is the bound over 1 + 2^-(m+1), and between two
    # subnormal codes it is the bound.
    assert float((error / bound.clamp(min=1e-300)).max()) > 0.85


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=16, max_size=16),
    st.integers(-40, 40),
    st.sampled_from(E8M0_RULES),
    st.sampled_from(APPLIES),
)
@settings(max_examples=100, deadline=None)
def test_casts_commute_with_powers_of_two_and_signs(values, shift, rule, apply) -> None:
    """Scale-free, which is why one rstd per row is all that a norm adds to its cast."""
    x = torch.tensor([values])
    x = torch.where(x.abs() < 2.0**-20, 0.0, x)
    for element in ELEMENTS:
        cast = Cast(element, 16, rule, apply, "clamp")
        qdata, scale = quantize(x, cast)
        moved, moved_scale = quantize(x * 2.0**shift, cast)
        # log2 in float32 is not shift-invariant next to powers of two: rceil_log2 by value only.
        if rule != "rceil_log2" and x.any():
            assert_same_bytes(moved, qdata)
            assert (moved_scale.int() - scale.int()).tolist() == [[shift]]
        flipped, flipped_scale = quantize(-x, cast)
        assert_same_bytes(flipped_scale, scale)
        sign = {"e2m1": 0x88}.get(element, ELEMENTS[element].sign_bit)
        assert_same_bytes(flipped.view(torch.uint8) ^ sign, qdata.view(torch.uint8))
    # NVFP4: the tensor's scale takes the power of two, the blocks' scales stay.
    cast = Cast("e2m1", 16, "e4m3", apply, "clamp")
    qdata, scale = quantize(x, cast, 0.0371)
    moved = quantize(x * 2.0**shift, cast, 0.0371 * 2.0**shift)
    assert_same_cast(moved, (qdata, scale))
    flipped, flipped_scale = quantize(-x, cast, 0.0371)
    assert_same_cast((flipped ^ 0x88, flipped_scale), (qdata, scale))


def test_fake_quantize_is_both_steps_in_one_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = randn(4, 64).to(dtype)
        got = fake_quantize(x)
        assert got.dtype is dtype
        assert_same_bytes(got, dequantize(*quantize(x, DEFAULT_CAST), dtype))
        # Uniform noise of half a step of 2^-3, relative to mantissas in [1, 2): 31 to 33 dB.
        assert 29 < sqnr(x, got) < 35


@pytest.mark.parametrize(
    ("element", "rule"), [*((e, "rceil_exact") for e in ELEMENTS), ("e2m1", "e4m3")]
)
def test_noise_of_a_cast_is_uniform_in_its_steps(element: str, rule: str) -> None:
    """d^2 / 12 for a step of d, in the mean over Gaussian rows.

    Steps are 2^(n-m) on [2^n, 2^(n+1)) and the least code below the least normal value, in units of
    the scale. NVFP4's own scale puts a block's maximum at 6, with next to no noise.
    """
    x, e = randn(64, 512), ELEMENTS[element]
    cast = Cast(element, 16 if rule == "e4m3" else 32, rule, "divide", "clamp")
    scale = quantize(x, cast)[1]
    power = scale.double() if rule == "e4m3" else torch.exp2(scale.double() - 127)
    power = power.repeat_interleave(cast.block_size, -1)
    n = torch.floor(torch.log2(x.double().abs() / power)).clamp(min=1 - e.bias)
    step = power * torch.exp2(n - e.mantissa_bits)
    if rule == "e4m3":
        blocks = x.abs().unflatten(-1, (-1, 16))
        step[(blocks == blocks.amax(-1, keepdim=True)).flatten(-2)] = 0
    # Within 0.3 dB: the density falls within a step, most in the coarse steps of e2m1.
    predicted = 10 * torch.log10(x.double().square().sum() / (step.square() / 12).sum())
    assert sqnr(x, fake_quantize(x, cast)) == pytest.approx(float(predicted), abs=0.3)


@pytest.mark.parametrize("saturate", SATURATES)
def test_nan_fills_its_block_alone(saturate: str) -> None:
    x = randn(2, 96)
    x[0, 40] = NAN
    # Bare overflow of e4m3 may itself be NaN, by version of torch; that of e5m2 is Inf.
    elements = [e for e in ELEMENTS if e != "e4m3" or saturate == "clamp"]
    casts = [
        Cast(e, 32, *c, saturate) for e in elements for c in itertools.product(E8M0_RULES, APPLIES)
    ]
    for cast in [*casts, Cast("e2m1", 32, "e4m3", "divide", saturate)]:
        qdata, scale = quantize(x, cast)
        assert is_nan_scale(scale).tolist() == [[False, True, False], [False, False, False]]
        nan = dequantize(qdata, scale, torch.float32, ELEMENTS[cast.element]).isnan()
        assert nan[0, 32:64].all() and int(nan.sum()) == 32


# --- the module -----------------------------------------------------------------------------------


def module_gradients(norm: MXNorm, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(dy)
    assert x.grad is not None and norm.weight.grad is not None
    return y.detach(), x.grad, norm.weight.grad


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("rms", ["p1", "p2", "exact"])
def test_module_gradient_is_the_formula(rms: str, block: int) -> None:
    """Float64 with the module's own root; 1e-6 is some eight roundings of float32."""
    x, dy, gain = randn(24, 512), randn(24, 512, seed=1), 1 + 0.3 * randn(512, seed=2)
    # Along x too: without it the projection term would be lost among the rest.
    dy = dy + 0.5 * x
    norm = MXNorm(512, EPS, rms, block)
    norm.weight.data = gain
    y, dx, dgain = module_gradients(norm, x, dy)

    rho = rstd(x, EPS, rms, block).double()
    x64, u = x.double(), gain.double() * dy.double()
    expected = rho * u - x64 * rho**3 * (x64 * u).mean(-1, keepdim=True)
    assert relative_error(y, x64 * rho * gain.double()) < 1e-6
    assert relative_error(dx, expected) < 1e-6
    assert relative_error(dgain, (dy.double() * x64 * rho).sum(0)) < 1e-6
    if rms != "exact":
        true = rstd(x, EPS, "exact").double()
        other = true * u - x64 * true**3 * (x64 * u).mean(-1, keepdim=True)
        assert relative_error(dx, other) > 1e-3, "the estimate shows"


def test_exact_module_is_rms_norm() -> None:
    x, dy, gain = randn(24, 512), randn(24, 512, seed=1), 1 + 0.3 * randn(512, seed=2)
    norm = MXNorm(512, EPS, "exact")
    norm.weight.data = gain.clone()
    y, dx, dgain = module_gradients(norm, x, dy)
    x64, g64 = x.double().requires_grad_(), gain.double().requires_grad_()
    expected = F.rms_norm(x64, (512,), g64, EPS)
    expected.backward(dy.double())
    for got, want in ((y, expected.detach()), (dx, x64.grad), (dgain, g64.grad)):
        assert want is not None and relative_error(got, want) < 1e-6


def test_module_keeps_dtype_and_defaults() -> None:
    norm = MXNorm(64)
    assert (norm.eps, norm.rms, norm.block_size) == (1e-6, "p2", 32)
    x = randn(3, 2, 64).bfloat16()
    y = norm(x)
    assert y.dtype is torch.bfloat16 and y.shape == x.shape
    expected = normalise(x, rstd(x, 1e-6, "p2"), norm.weight)
    assert_same_bytes(y.detach(), expected.detach())


def test_zero_rows_have_finite_gradients() -> None:
    x = randn(4, 64)
    x[1], x[2] = 0.0, 1e-35
    for rms in ("p1", "p2", "exact"):
        norm = MXNorm(64, EPS, rms)
        y, dx, dgain = module_gradients(norm, x, torch.ones(4, 64))
        assert y.isfinite().all() and dx.isfinite().all() and dgain.isfinite().all()
        assert bool((y[1] == 0).all())
        torch.testing.assert_close(dx[1], torch.full((64,), EPS**-0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rms", ["p1", "p2"])
def test_straight_through_points_along_the_true_gradient(rms: str) -> None:
    """Cosine of at least .9999 on Gaussian rows of 4096, for p = 2 and p = 1.

    With d the relative error of the root (sd .0135) and s the share of the gradient along x, the
    sine of the angle is about 2 d s: nothing for a gradient independent of x; for s = .2 the mean
    over rows keeps .9999, and .9997 is 4.5 sd.
    """
    x, gain = randn(64, 4096), 1 + 0.3 * randn(4096, seed=2)
    for along, mean, least in ((0.0, 0.9999, 0.9999), (0.2, 0.9999, 0.9997)):
        dy = randn(64, 4096, seed=1) + along * x
        grads = []
        for kind in (rms, "exact"):
            norm = MXNorm(4096, EPS, kind)
            norm.weight.data = gain.clone()
            grads.append(module_gradients(norm, x, dy)[1].double())
        cosine = F.cosine_similarity(*grads, dim=-1)
        assert float(cosine.mean()) >= mean and float(cosine.min()) >= least


# --- the linear -----------------------------------------------------------------------------------

M, K, N = 64, 256, 96


def operands(dtype: torch.dtype, gain_dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    x = randn(2, M // 2, K, seed=seed).to(dtype)
    gain = (1 + 0.3 * randn(K, seed=seed + 1)).to(gain_dtype)
    weight = (randn(N, K, seed=seed + 2) / K**0.5).to(dtype)
    dout = randn(2, M // 2, N, seed=seed + 3).to(dtype)
    return x, gain, weight, dout


def torchao_linear(y: Tensor, weight: Tensor) -> Tensor:
    return _to_mxfp8_then_scaled_mm(
        y, weight, KernelPreference.EMULATED, ScaleCalculationMode.RCEIL
    )


def chain(x: Tensor, gain: Tensor, weight: Tensor, dout: Tensor, norm) -> list[Tensor]:
    """Output and gradients of norm -> torchao's MXFP8 linear, all by autograd."""
    leaves = [t.clone().requires_grad_() for t in (x, gain, weight)]
    out = torchao_linear(norm(*leaves[:2]), leaves[2])
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]


def oracle(x: Tensor, gain: Tensor, weight: Tensor, dout: Tensor, **choice) -> list[Tensor]:
    layer = MXNormLinear(gain.clone(), weight.clone(), EPS, **choice)
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(dout)
    return [out.detach(), x.grad, layer.gain.grad, layer.weight.grad]


def torch_norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gain, EPS)


def llama_norm(x: Tensor, gain: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return gain * h.to(x.dtype)


NAMES = ("out", "dx", "dgain", "dweight")


@pytest.mark.parametrize(
    ("norm", "dtype", "norm_dtype", "least_db"),
    [
        # Formulas differ in the last float32 bit: the rounded bf16 differs once in 2^16 times, and
        # one such in 256 elements is 24 + 56 dB below the signal.
        (torch_norm, torch.bfloat16, torch.float32, 80.0),
        # One float32 rounding is at 152 dB; eight of them.
        (torch_norm, torch.float32, torch.float32, 143.0),
        # Autograd's backward of this spelling rounds to bf16 (one rounding: 56 dB) at the product
        # with the gain and at the norm's output, the oracle at the end only.
        (llama_norm, torch.bfloat16, torch.bfloat16, 46.0),
    ],
    ids=["torch-bf16", "torch-f32", "llama-bf16"],
)
def test_exact_unfolded_is_norm_then_torchao(norm, dtype, norm_dtype, least_db) -> None:
    """Forward and every gradient of the chain that the pass finds in a graph."""
    args = operands(dtype, dtype)
    expected = chain(*args, norm)
    got = oracle(*args, rms="exact", fold=False, norm_dtype=norm_dtype)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert a.dtype is b.dtype, name
        assert sqnr(b, a) > least_db, name
    for name, a, b in ((n, got[i], expected[i]) for i, n in ((0, "out"), (3, "dweight"))):
        # The very same casts and matmuls, and no formula of ours: equal but for a matmul that takes
        # another path for another layout.
        assert int(differing(a, b).sum()) <= a.numel() // 1000, name


def test_linear_with_other_formats() -> None:
    """Norm in the row, then a matmul of what torchao makes of both operands."""
    x, gain, weight, _ = operands(torch.bfloat16, torch.bfloat16)
    y = torch_norm(x, gain).reshape(M, K)
    for cast, pair in (
        (
            Cast("e3m2", 32, "floor", "divide", "clamp"),
            [MXTensor.to_mx(t, DTYPE_FP6_E3M2, 32) for t in (y, weight)],
        ),
        (NVFP4, [NVFP4Tensor.to_nvfp4(t) for t in (y, weight)]),
    ):
        a, b = (t.dequantize(torch.bfloat16) for t in pair)
        layer = MXNormLinear(gain, weight, EPS, "exact", fold=False, cast=cast)
        # The norm's formulas differ in float32's last bit, at times in one of bf16 (80 dB).
        with torch.no_grad():
            assert sqnr(a @ b.T, layer(x).reshape(M, N)) > 50


def test_straight_through_formula_in_float64() -> None:
    """The contract line by line, with casts by torchao and everything else in float64."""
    x, gain, weight, dout = operands(torch.float32, torch.float32)

    def cast64(t: Tensor) -> Tensor:
        mx = MXTensor.to_mx(t.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        return mx.dequantize(torch.float32).double()

    for rms, fold in itertools.product(("p1", "p2", "exact"), (True, False)):
        rho = rstd(x, EPS, rms)
        rows, g, rho64 = x.reshape(M, K).double(), gain.double(), rho.reshape(M, 1).double()
        if fold:
            out = cast64((x * rho).reshape(M, K)) @ cast64(weight * gain).T
        else:
            out = cast64((x * rho * gain).reshape(M, K)) @ cast64(weight).T
        d = dout.reshape(M, N)
        dy = cast64(d) @ cast64(weight.T).T
        u = g * dy
        dx = rho64 * u - rows * rho64**3 * (rows * u).mean(-1, keepdim=True)
        dgain = (dy * rows * rho64).sum(0)
        dweight = cast64(d.T) @ cast64((x * rho * gain).reshape(M, K).T).T
        got = oracle(x, gain, weight, dout, rms=rms, fold=fold)
        for name, a, b in zip(NAMES, got, (out, dx, dgain, dweight), strict=True):
            # float32 against float64: dot products of 256 terms of unit size.
            assert relative_error(a.reshape(b.shape), b) < 2e-6, (rms, fold, name)


def test_folding_changes_the_forward_alone() -> None:
    args = operands(torch.bfloat16, torch.float32)
    folded, unfolded = (oracle(*args, rms="p2", fold=f) for f in (True, False))
    for name, a, b in zip(NAMES[1:], folded[1:], unfolded[1:], strict=True):
        assert_same_bytes(a, b, name)
    assert int(differing(folded[0], unfolded[0]).sum()) > folded[0].numel() // 2


def test_folding_with_powers_of_two_is_bitwise() -> None:
    """Gains of 2^n per block move into the scales: nothing is rounded otherwise."""
    x, _, weight, dout = operands(torch.float32, torch.float32)
    gain = torch.exp2(torch.arange(K // 32) % 5 - 2.0).repeat_interleave(32)
    folded, unfolded = (oracle(x, gain, weight, dout, rms="p2", fold=f)[0] for f in (True, False))
    # Of each product the power of two moves from one factor to the other: equal up to summation.
    assert relative_error(folded, unfolded) < 1e-6


@pytest.mark.parametrize("rms", ["p2", "exact"])
@pytest.mark.parametrize("seed", [10, 20, 30, 40])
def test_folding_error(seed: int, rms: str) -> None:
    """Against float64 at most 1.1 times the error of the unfolded casts, gains 1 + .3 n."""
    m, k, n = 64, 1024, 256
    x = randn(m, k, seed=seed).bfloat16()
    gain = 1 + 0.3 * randn(k, seed=seed + 1)
    weight = (randn(n, k, seed=seed + 2) / k**0.5).bfloat16()
    x64 = x.double()
    if rms == "exact":
        square = x64.square().mean(-1, keepdim=True)
    else:
        absmax = x64.abs().unflatten(-1, (-1, 32)).amax(-1)
        square = theory.correction(2, 32) ** 2 * absmax.square().mean(-1, keepdim=True)
    true = x64 / (square + EPS).sqrt() * gain.double() @ weight.double().T
    error = {}
    for fold in (True, False):
        with torch.no_grad():
            out = MXNormLinear(gain, weight, EPS, rms, fold)(x)
        assert out.dtype is torch.bfloat16
        error[fold] = relative_error(out, true)
    # Two e4m3 roundings of some 2.6% each in quadrature.
    assert 0.03 < error[False] < 0.045
    assert error[True] <= 1.1 * error[False]


def test_frozen_gain_and_state() -> None:
    """A frozen gain gets no gradient, parameters are not touched, one row per token."""
    x, gain, weight, dout = operands(torch.bfloat16, torch.float32)
    layer = MXNormLinear(gain.clone(), weight.clone(), EPS)
    layer.gain.requires_grad_(False)
    layer(x).backward(dout)
    assert layer.gain.grad is None and layer.weight.grad is not None
    assert_same_bytes(layer.gain.detach(), gain)
    assert_same_bytes(layer.weight.detach(), weight)
    with torch.no_grad():
        together, alone = layer(x), layer(x[:, :1])
    # Another row count, another order of summation in the matmul: bf16 neighbours at most.
    assert relative_error(together[:, :1], alone) < 2.0**-8


def test_nan_and_inf_rows_stay_to_themselves() -> None:
    x, gain, weight, _ = operands(torch.bfloat16, torch.float32)
    x[0, 3, 7], x[1, 5, 100] = NAN, INF
    for rms, fold in itertools.product(("p1", "p2", "exact"), (True, False)):
        with torch.no_grad():
            out = MXNormLinear(gain, weight, EPS, rms, fold)(x)
        bad = out.isnan().all(-1)
        assert bad.nonzero().tolist() == [[0, 3], [1, 5]]
        assert out[~bad].isfinite().all()
