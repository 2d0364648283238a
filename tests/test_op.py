"""The op against the oracle: bytes given the reciprocal root, the root against float64."""

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_bytes, differing, sqnr
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from mxnorm_pass import reference, theory
from mxnorm_pass.formats import APPLIES, ELEMENTS, RULES, SATURATES, Cast
from mxnorm_pass.ops import OP, rmsnorm_mxquant
from mxnorm_pass.ops.rmsnorm_mxquant import RMS_KINDS, decomposition, parse_rounding, rounding_name

RCEIL = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
FLOOR = "e4m3/b32/floor/divide/clamp/plain"
ROUNDINGS = [f"{a}->{b}" for a, b in itertools.product(("f32", "bf16"), repeat=2)]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
EPS = 1e-5
# The root: float32 sums of up to 16,384 squares in torch's pairwise order, some ten roundings of
# 2^-24 each, halved by the root.
ROOT_RTOL = 1e-6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def root64(x: Tensor, eps: float, rms: str, block: int, correction: float) -> Tensor:
    """The formula of the method, in float64."""
    x = x.double()
    m = x.unflatten(-1, (-1, block)).abs().amax(-1)
    if rms == "exact":
        square = (x * x).mean(-1, keepdim=True)
    elif rms == "p2":
        square = correction**2 * (m * m).mean(-1, keepdim=True)
    else:
        square = (correction * m.mean(-1, keepdim=True)) ** 2
    return 1 / torch.sqrt(square + eps)


def check(
    x: Tensor,
    gain: Tensor | None,
    rms: str = "p2",
    rounding: str = "f32->f32",
    cast: str = RCEIL,
    eps: float = EPS,
    correction: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything the op returns, against the oracle."""
    spec = Cast.parse(cast)
    if correction is None:
        correction = theory.correction({"p1": 1, "p2": 2}.get(rms, 2), spec.block_size)
    qdata, scale, rstd = OP(x, gain, None, eps, rms, correction, rounding, cast)
    what = f"{rms} {rounding} {cast} gain={gain is not None} x={tuple(x.shape)} {x.dtype}"

    expected_root = root64(x, eps, rms, spec.block_size, correction)
    assert rstd.dtype is torch.float32
    torch.testing.assert_close(
        rstd.double(), expected_root, rtol=ROOT_RTOL, atol=0, equal_nan=True, msg=what
    )
    oracle_root = reference.rstd(x, eps, rms, spec.block_size, correction)
    torch.testing.assert_close(rstd, oracle_root, rtol=ROOT_RTOL, atol=0, equal_nan=True, msg=what)

    y = reference.normalise(x, rstd, gain, *parse_rounding(rounding))
    expected, expected_scale = reference.quantize(y, spec)
    assert_same_bytes(scale, expected_scale, f"scale, {what}")
    assert_same_bytes(qdata, expected, f"codes, {what}")
    return qdata, scale, rstd


# --- every choice in the schema -------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_every_cast(rms: str, rounding: str, dtype: torch.dtype) -> None:
    """All casts of both elements, with and without gain, of rows over a range of sizes."""
    x = (randn(5, 96) * torch.tensor([1.0, 1e-3, 30.0, 1e6, 1.0])[:, None]).to(dtype)
    x[4, ::7] *= 100.0  # outliers, so that small codes and subnormals occur beside them
    gain = 1 + 0.3 * randn(96, seed=1)
    for parts in itertools.product(ELEMENTS, ("b32",), RULES, APPLIES, SATURATES, ("plain",)):
        for g in (None, gain):
            check(x, g, rms, rounding, "/".join(parts))


@pytest.mark.parametrize("block", [16, 64, 128])
def test_other_block_sizes(block: int) -> None:
    x = randn(7, 384).bfloat16()
    for rms, gain in itertools.product(RMS_KINDS, (None, 1 + 0.3 * randn(384, seed=1))):
        _, scale, _ = check(x, gain, rms, cast=f"e4m3/b{block}/rceil_exact/reciprocal/clamp/plain")
        assert scale.shape == (7, 384 // block)


@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gain_of_any_float_dtype(gain_dtype: torch.dtype) -> None:
    x = randn(9, 128).bfloat16()
    gain = (1 + 0.3 * randn(128, seed=1)).to(gain_dtype)
    for rounding in ROUNDINGS:
        check(x, gain, "exact", rounding)


def test_rounding_orders_differ() -> None:
    """Each order gives bytes of its own, so that the comparisons above tell them apart."""
    x, gain = randn(64, 512).bfloat16(), 1 + 0.3 * randn(512, seed=1)
    codes = {r: rmsnorm_mxquant(x, gain, rounding=r)[0] for r in ROUNDINGS}
    for one, other in itertools.combinations(ROUNDINGS, 2):
        assert int(differing(codes[one], codes[other]).sum()) > 100, (one, other)


def test_correction_and_eps_reach_the_root() -> None:
    x = randn(16, 256)
    for rms in ("p1", "p2"):
        for correction, eps in ((0.3, 1e-6), (1.0, 1e-6), (0.4, 0.5)):
            check(x, None, rms, eps=eps, correction=correction)
    roots = {rms: rmsnorm_mxquant(x, rms=rms)[2] for rms in RMS_KINDS}
    for one, other in itertools.combinations(RMS_KINDS, 2):
        assert float((roots[one] / roots[other] - 1).abs().max()) > 1e-3
    # `exact` ignores it.
    assert torch.equal(rmsnorm_mxquant(x, rms="exact", correction=7.0)[2], roots["exact"])


def test_default_correction_is_the_gaussian_one_of_its_block() -> None:
    x = randn(16, 256)
    for (rms, p), block in itertools.product((("p1", 1), ("p2", 2)), (16, 32, 64)):
        cast = f"e4m3/b{block}/floor/divide/clamp/plain"
        by_default = rmsnorm_mxquant(x, rms=rms, cast=cast, eps=EPS)
        c = theory.correction(p, block)
        given_c = rmsnorm_mxquant(x, rms=rms, cast=cast, eps=EPS, correction=c)
        for a, b in zip(by_default, given_c, strict=True):
            assert_same_bytes(a, b)
        torch.testing.assert_close(
            by_default[2].double(), root64(x, EPS, rms, block, c), rtol=ROOT_RTOL, atol=0
        )


def test_function_and_op_agree() -> None:
    x, gain = randn(4, 64), randn(64, seed=1)
    got = rmsnorm_mxquant(
        x, gain, eps=1e-4, rms="p1", correction=0.4, rounding="bf16->f32", cast=FLOOR
    )
    packet = torch.ops.mxnorm.rmsnorm_mxquant
    expected = packet(x, gain, None, 1e-4, "p1", 0.4, "bf16->f32", FLOOR)
    for a, b in zip(got, expected, strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("eps_dtype", [torch.float32, torch.float64])
def test_eps_as_a_tensor(eps_dtype: torch.dtype) -> None:
    x, gain = 0.01 * randn(8, 96), randn(96, seed=1)
    previous = None
    for eps in (1e-6, 1e-4, 1e-2):
        for rms in RMS_KINDS:
            # The float operand, a wrong one here, must not be read.
            got = OP(
                x, gain, torch.tensor(eps, dtype=eps_dtype), 123.0, rms, 0.4, "f32->f32", RCEIL
            )
            expected = OP(x, gain, None, eps, rms, 0.4, "f32->f32", RCEIL)
            assert got[2].dtype is torch.float32
            for a, b in zip(got, expected, strict=True):
                assert_same_bytes(a, b)
        assert previous is None or float((got[2] / previous - 1).abs().min()) > 1e-2
        previous = got[2]


# --- shapes and strides ---------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("m", [0, 1, 17, 64, 100, 127, 128, 129])
def test_row_counts(m: int, dtype: torch.dtype) -> None:
    x = randn(m, 96, seed=m).to(dtype)
    for rms, gain in itertools.product(RMS_KINDS, (None, randn(96, seed=1))):
        qdata, scale, rstd = check(x, gain, rms, "f32->bf16")
        assert qdata.shape == (m, 96) and scale.shape == (m, 3) and rstd.shape == (m, 1)


@DTYPES
@pytest.mark.parametrize("k", [32, 64, 96, 2880, 4096, 5120, 7168, 16384])
def test_row_lengths(k: int, dtype: torch.dtype) -> None:
    x = randn(5, k, seed=k).to(dtype)
    for rms in RMS_KINDS:
        check(x, None, rms)
        check(x, 1 + 0.3 * randn(k, seed=1), rms, "bf16->bf16")


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 64), (2, 0, 64)])
def test_ranks(shape: tuple[int, ...]) -> None:
    x, gain = randn(*shape).bfloat16(), randn(64, seed=1)
    flat = x.reshape(-1, 64)
    for rms, g in itertools.product(RMS_KINDS, (None, gain)):
        qdata, scale, rstd = check(x, g, rms)
        assert qdata.shape == shape and scale.shape == (*shape[:-1], 2)
        assert rstd.shape == (*shape[:-1], 1)
        rows = rmsnorm_mxquant(flat, g, rms=rms, eps=EPS)
        for whole, by_row in zip((qdata, scale, rstd), rows, strict=True):
            assert_same_bytes(whole.reshape(by_row.shape), by_row)


STRIDED = {
    "column_slice": lambda x: torch.cat([x + 1, x, x - 1], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "every_other_row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every_other_column": lambda x: x.repeat_interleave(2, -1)[..., 1::2],
    "permuted": lambda x: x.view(3, 4, -1).transpose(0, 1),
    "expanded": lambda x: x[:1].expand(6, -1),
    "expanded_column": lambda x: x[:, :1].expand(-1, 96),
}


@DTYPES
@pytest.mark.parametrize("name", STRIDED)
def test_strides_do_not_matter(name: str, dtype: torch.dtype) -> None:
    x = STRIDED[name](randn(12, 96).to(dtype))
    assert not x.is_contiguous()
    before = x.clone()
    gain = torch.stack([randn(96, seed=1), randn(96, seed=2)], -1)[:, 0]
    assert not gain.is_contiguous()
    for rms, g in itertools.product(RMS_KINDS, (None, gain)):
        got = check(x, g, rms)
        plain = OP(
            x.clone(memory_format=torch.contiguous_format),
            None if g is None else g.contiguous(),
            *(None, EPS, rms, theory.correction(1 if rms == "p1" else 2, 32), "f32->f32", RCEIL),
        )
        for a, b in zip(got, plain, strict=True):
            assert_same_bytes(a, b)
            assert a.is_contiguous()
    assert_same_bytes(x, before, "input")


# --- special values -------------------------------------------------------------------------------


def special_rows(dtype: torch.dtype) -> Tensor:
    """Rows 0, 2, 4, 6 and 8 are ordinary."""
    x = randn(9, 128, seed=3)
    x[1] = 0.0
    x[3] = 1e-35
    x[5, 70] = float("nan")
    x[7, 10], x[7, 11] = float("inf"), -float("inf")
    x[4, 32:64] = 0.0
    return x.to(dtype)


@DTYPES
@pytest.mark.parametrize("cast", [RCEIL, FLOOR, "e5m2/b32/even/divide/bare/plain"])
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_special_rows(rms: str, cast: str, dtype: torch.dtype) -> None:
    x = special_rows(dtype)
    for gain in (None, 1 + 0.3 * randn(128, seed=1)):
        qdata, scale, rstd = check(x, gain, rms, cast=cast)
        values = qdata.float()

        # eps alone: rsqrt(1e-5), to half an ulp of each of its two roundings.
        torch.testing.assert_close(
            rstd[[1, 3], 0], torch.full((2,), EPS**-0.5), rtol=2 * 2.0**-23, atol=0
        )
        assert bool((qdata[1].view(torch.uint8) & 0x7F == 0).all()) and bool((scale[1] == 0).all())
        assert bool(values[3].isfinite().all())
        # 2^-127 is the least scale: 1e-35 * 316 = 2^-107.9 is far above it, with any of the gains.
        assert bool((values[3] != 0).all())
        assert bool((values[4, 32:64] == 0).all()) and int(scale[4, 1]) == 0
        assert bool((values[4, :32] != 0).any())

        # NaN spreads through the root to the whole row; Inf makes the root 0.
        assert bool(values[5].isnan().all()) and bool((scale[5] == 255).all())
        assert float(rstd[7]) == 0.0
        assert bool((values[7, 32:] == 0).all()) and bool((scale[7, 1:] == 0).all())
        assert bool(values[7, 10:12].isnan().all()) and int(scale[7, 0]) == 255

        # What the matmul sees: NaN in those two rows, nothing in the others.
        out = reference.dequantize(qdata, scale, torch.float32) @ randn(128, 8, seed=5)
        bad = out.isnan().all(-1)
        assert bad.nonzero().flatten().tolist() == [5, 7]
        assert bool(out[~bad].isfinite().all())

        # Ordinary rows are as if alone.
        for row in (0, 2, 4, 6, 8):
            alone = OP(
                *(x[row : row + 1], gain, None, EPS, rms),
                *(theory.correction(1 if rms == "p1" else 2, 32), "f32->f32", cast),
            )
            for a, b in zip((qdata, scale, rstd), alone, strict=True):
                assert_same_bytes(a[row : row + 1], b, f"row {row}")


@pytest.mark.parametrize("rms", RMS_KINDS)
def test_squares_that_overflow(rms: str) -> None:
    """float32 rows above 2^64: the mean square is Inf, as in RMSNorm; 0 out, never NaN."""
    x = torch.full((2, 64), 1e25)
    x[1] = -3e38
    qdata, scale, rstd = check(x[:0], None, rms)
    qdata, scale, rstd = rmsnorm_mxquant(x, rms=rms)
    assert rstd.tolist() == [[0.0], [0.0]]
    assert bool((qdata.float() == 0).all()) and bool((scale == 0).all())


def test_zero_tensor_without_eps_is_rmsnorm_s_nan() -> None:
    x = torch.zeros(1, 64)
    assert F.rms_norm(x, (64,), eps=0.0).isnan().all()
    for rms in RMS_KINDS:
        assert rmsnorm_mxquant(x, rms=rms, eps=0.0)[1].tolist() == [[255, 255]]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_difficult_gains(rms: str, rounding: str) -> None:
    """0, negative, huge: nothing divides by the gain, and 1e30 stays finite."""
    x = randn(16, 128).bfloat16()
    gain = 1 + 0.3 * randn(128, seed=1)
    gain[::5] = 0.0
    gain[1::5] *= -1.0
    gain[96:] = 1e30
    qdata, scale, _ = check(x, gain, rms, rounding)
    assert bool(qdata.float().isfinite().all()) and int(scale.max()) < 255
    assert bool((qdata[:, :96:5].float() == 0).all())
    negated, negated_scale, _ = check(x, -gain, rms, rounding)
    assert_same_bytes(negated_scale, scale)
    assert torch.equal(negated.float(), -qdata.float())
    zero, zero_scale, _ = check(x, torch.zeros(128), rms, rounding)
    assert bool((zero.float() == 0).all()) and bool((zero_scale == 0).all())


def test_gemma_gain_is_formed_in_float32() -> None:
    """1 + w with w of 2^-8 and 15.8125 in bf16: neither sum is a bf16 number."""
    x = randn(32, 128).bfloat16()
    w = torch.tensor([0.00390625, 15.8125], dtype=torch.bfloat16).repeat(64)
    gain = 1.0 + w.float()
    assert gain[:2].tolist() == [1.00390625, 16.8125]
    assert (1 + w)[:2].tolist() == [1.0, 16.75]
    qdata, scale, rstd = check(x, gain, "exact", "f32->bf16")
    gemma = ((x.float() * rstd) * (1.0 + w.float())).type_as(x)
    expected_scale, expected = to_mx(gemma, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert_same_bytes(qdata, expected)
    assert_same_bytes(scale, expected_scale.view(torch.uint8))
    wrong, _, _ = rmsnorm_mxquant(x, 1 + w, rms="exact", eps=EPS, rounding="f32->bf16")
    assert int(differing(wrong, qdata).sum()) > 0


# --- against torch and torchao --------------------------------------------------------------------


def torch_rms_norm(x: Tensor, gain: Tensor | None) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gain, EPS)


def llama(x: Tensor, gain: Tensor | None) -> Tensor:
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return h if gain is None else gain * h


def gemma(x: Tensor, gain: Tensor | None) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h if gain is None else h * gain.float()).type_as(x)


# norm, x, gain, the rounding order that it has
NORMS = [
    (torch_rms_norm, torch.float32, None, "f32->f32"),
    (torch_rms_norm, torch.float32, torch.float32, "f32->f32"),
    (torch_rms_norm, torch.bfloat16, None, "f32->bf16"),
    (torch_rms_norm, torch.bfloat16, torch.bfloat16, "f32->bf16"),
    (llama, torch.bfloat16, torch.bfloat16, "bf16->bf16"),
    (llama, torch.bfloat16, torch.float32, "bf16->f32"),  # T5 too, by promotion
    (llama, torch.float32, torch.float32, "f32->f32"),
    (gemma, torch.bfloat16, torch.bfloat16, "f32->bf16"),
]
MODES = {"FLOOR": "floor/divide", "CEIL": "ceil/divide", "EVEN": "even/divide"}
MODES["RCEIL"] = "rceil_log2/reciprocal"


@pytest.mark.parametrize(
    ("norm", "dtype", "gain_dtype", "rounding"),
    NORMS,
    ids=[f"{n.__name__}-{d}-{g}".replace("torch.", "") for n, d, g, _ in NORMS],
)
@pytest.mark.parametrize("k", [96, 2880])
def test_exact_is_norm_then_to_mx(norm, dtype, gain_dtype, rounding, k) -> None:
    """Bit for bit what the graph had, in all four modes and for both elements."""
    x = randn(32, k, seed=k).to(dtype)
    x[1] = 0.0
    x[2] *= 1e-4
    gain = None if gain_dtype is None else (1 + 0.3 * randn(k, seed=1)).to(gain_dtype)
    y = norm(x, gain)
    assert y.dtype is parse_rounding(rounding)[1]
    for (mode, parts), element in itertools.product(MODES.items(), ELEMENTS.values()):
        expected_scale, expected = to_mx(y, element.dtype, 32, ScaleCalculationMode[mode])
        cast = f"{element.name}/b32/{parts}/clamp/plain"
        qdata, scale, _ = rmsnorm_mxquant(
            x, gain, eps=EPS, rms="exact", rounding=rounding, cast=cast
        )
        assert_same_bytes(scale, expected_scale.view(torch.uint8), f"{mode} scale")
        assert_same_bytes(qdata, expected, f"{mode} codes")


# --- no second absmax -----------------------------------------------------------------------------

float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    st.lists(float32, min_size=32, max_size=32),
    st.sampled_from(["p1", "p2"]),
    st.sampled_from(ROUNDINGS),
    st.sampled_from([RCEIL, FLOOR, "e5m2/b16/even/divide/bare/plain"]),
    st.sampled_from([1e-12, 1e-6, 1.0, 1e30]),
)
@settings(max_examples=200, deadline=None)
def test_rounded_absmax_is_absmax_of_rounded(values, rms, rounding, cast, eps) -> None:
    """Without gain the op rounds the block's maximum; a gain of ones makes it look again.

    Rounding is monotone and even, so both are one; any float32, NaN and Inf included.
    """
    x = torch.tensor([values, values[::-1]])
    shortcut = OP(x, None, None, eps, rms, 0.4, rounding, cast)
    again = OP(x, torch.ones(32), None, eps, rms, 0.4, rounding, cast)
    for a, b in zip(shortcut, again, strict=True):
        assert_same_bytes(a, b)
    y = reference.normalise(x, shortcut[2], None, *parse_rounding(rounding))
    assert_same_bytes(shortcut[1], reference.quantize(y, Cast.parse(cast))[1])


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounded_absmax_at_the_boundaries(rounding: str) -> None:
    """Rows whose normalised maximum lies within ulps of a power of two and of 1.75 times one."""
    spread = torch.arange(-75, 75).float() * 2.0**-21
    x = randn(2 * len(spread), 64).clamp(-1, 1)
    x[:, 5] = torch.cat([1 + spread, 1.75 * (1 + spread)])
    for rms, cast in itertools.product(("p1", "p2"), (RCEIL, FLOOR)):
        for target in (1.0, 2.0**-3):
            # A root of about `target`: eps dominates by choice.
            check(x, None, rms, rounding, cast, eps=target**-2, correction=1e-4)


# --- the estimate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [768, 4096])
@pytest.mark.parametrize(("rms", "p"), [("p1", 1), ("p2", 2)])
def test_estimate_on_gaussian_rows(rms: str, p: int, d: int) -> None:
    n = 2000
    x = randn(n, d, seed=d)
    roots = {r: rmsnorm_mxquant(x, rms=r, eps=0.0)[2].double() for r in (rms, "exact")}
    ratio = torch.log(roots["exact"] / roots[rms])  # log(rms_hat / rms)
    sd = theory.error_sd(p, 32, d)
    # A sample sd scatters by 1 / sqrt(2 n) = 1.6%: four sigma, and terms of order 1/K beyond.
    assert float(ratio.std()) == pytest.approx(sd, rel=4 / math.sqrt(2 * n) + 32 / d)
    # The mean: four sigma, and a bias of v^2 / (2 K) at the most (the logarithm is concave).
    bias = theory.log_sd(p, 32) ** 2 * 32 / (2 * d)
    assert abs(float(ratio.mean())) < 4 * sd / math.sqrt(n) + bias


@given(
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=64, max_size=64),
    st.sampled_from([16, 32]),
    st.sampled_from(["p1", "p2"]),
)
@settings(max_examples=100, deadline=None)
def test_estimate_within_its_bounds(values: list[float], block: int, rms: str) -> None:
    x = torch.tensor(values)
    x = torch.where(x.abs() < 2.0**-40, 0.0, x)  # squares that underflow are eps' business
    if not x.any():
        x[7] = 1.0
    low, high = theory.ratio_bounds(int(rms[1]), block, 64 // block)
    cast = f"e4m3/b{block}/floor/divide/clamp/plain"
    estimate, exact = (rmsnorm_mxquant(x, rms=r, eps=0.0, cast=cast)[2] for r in (rms, "exact"))
    ratio = float(exact / estimate)
    assert low * (1 - 4 * ROOT_RTOL) <= ratio <= high * (1 + 4 * ROOT_RTOL)


def test_bounds_are_attained() -> None:
    spike, flat, spikes = torch.zeros(128), torch.ones(128), torch.zeros(128)
    spike[3], spikes[::32] = -5.0, 2.0
    low, high = theory.ratio_bounds(2, 32, 4)
    assert (low, high) == pytest.approx((0.4185051047, 2.367), rel=3e-4)
    for x, expected in ((spike, high), (flat, low), (spikes, high)):
        got = rmsnorm_mxquant(x, rms="exact", eps=0.0)[2] / rmsnorm_mxquant(x, eps=0.0)[2]
        assert float(got) == pytest.approx(expected, rel=4 * ROOT_RTOL)


# --- fake tensors, dispatch -----------------------------------------------------------------------

OPCHECK = {
    "no_gain": lambda: (randn(4, 96), None, None, 1e-6, "p2", 0.4, "f32->f32", RCEIL),
    "gain": lambda: (
        randn(2, 3, 64).bfloat16(),
        randn(64),
        None,
        1e-6,
        "exact",
        1.0,
        "bf16->bf16",
        RCEIL,
    ),
    "eps_tensor": lambda: (
        randn(4, 64),
        randn(64),
        torch.tensor(1e-5),
        0.0,
        "p1",
        0.4,
        "f32->f32",
        FLOOR,
    ),
    "one_block": lambda: (randn(1, 32), None, None, 1e-6, "p2", 0.4, "f32->bf16", RCEIL),
    "strided": lambda: (randn(64, 6).t(), None, None, 1e-6, "p2", 0.4, "f32->f32", FLOOR),
}


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(OP, OPCHECK[name]())


@DTYPES
@pytest.mark.parametrize(
    "make",
    [
        lambda: randn(64),
        lambda: randn(0, 64),
        lambda: randn(1, 32),
        lambda: randn(2, 3, 96),
        lambda: randn(96, 7).t(),
        lambda: randn(4, 1, 64).transpose(0, 1),
        lambda: randn(1, 64).expand(5, -1),
    ],
)
def test_fake_agrees_with_real(make, dtype: torch.dtype) -> None:
    x = make().to(dtype)
    for element, rms, with_gain in itertools.product(ELEMENTS, RMS_KINDS, (False, True)):
        rest = (None, 1e-6, rms, 0.4, "f32->bf16", f"{element}/b32/floor/divide/bare/plain")
        gain = torch.ones(x.shape[-1]) if with_gain else None
        real = OP(x, gain, *rest)
        with FakeTensorMode() as mode:
            fake = OP(mode.from_tensor(x), None if gain is None else mode.from_tensor(gain), *rest)
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device)
            assert r.stride() == f.stride() and r.storage_offset() == f.storage_offset() == 0


def test_fake_with_symbolic_rows() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    )
    x = mode.from_tensor(randn(6, 5, 96), symbolic_context=context)
    with mode:
        qdata, scale, rstd = OP(x, None, None, 1e-6, "p2", 0.4, "f32->f32", RCEIL)
    assert isinstance(x.shape[0], torch.SymInt)
    rows = x.shape[0]
    assert (
        qdata.shape == (rows, 5, 96) and scale.shape == (rows, 5, 3) and rstd.shape == (rows, 5, 1)
    )
    assert isinstance(scale.shape[0], torch.SymInt)
    assert not mode.shape_env.guards, "the row count must not be specialised"


def test_dynamic_rows_compile_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, gain: rmsnorm_mxquant(x, gain, eps=EPS, correction=0.4),
        backend=counter,
        fullgraph=True,
    )
    gain = randn(96, seed=1)
    for m in (17, 64, 100, 129):
        x = randn(m, 96, seed=m)
        torch._dynamo.mark_dynamic(x, 0)  # an error if the row count is specialised
        got = compiled(x, gain)
        for a, b in zip(got, rmsnorm_mxquant(x, gain, eps=EPS, correction=0.4), strict=True):
            assert_same_bytes(a, b)
    assert counter.frame_count == 1


# --- errors ---------------------------------------------------------------------------------------

FLOATS = "torch.float32, torch.bfloat16"
BAD = {
    "row length": (
        {"x": randn(3, 80)},
        "x of shape (3, 80): the last axis must be a multiple of the block size 32",
    ),
    "scalar": ({"x": torch.tensor(1.0)}, "must be a multiple of the block size 32"),
    "fp16": ({"x": randn(3, 64).half()}, "x is torch.float16; allowed are " + FLOATS),
    "fp64": ({"x": randn(3, 64).double()}, "x is torch.float64; allowed are " + FLOATS),
    "gain length": ({"gain": randn(32)}, "gain of shape (32,): expected (64,)"),
    "gain rank": ({"gain": randn(1, 64)}, "gain of shape (1, 64): expected (64,)"),
    "rms": ({"rms": "p3"}, "rms 'p3' is not one of p1, p2, exact"),
    "rounding": ({"rounding": "f32"}, "rounding 'f32': expected A->B with A, B of f32, bf16"),
    "rounding dtype": ({"rounding": "f32->f16"}, "expected A->B with A, B of f32, bf16"),
    "cast": ({"cast": RCEIL.replace("log2", "up")}, f"is not one of {', '.join(RULES)}"),
}  # fmt: skip


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", BAD)
def test_errors_name_what_is_allowed(name: str, fake: bool) -> None:
    changed, message = BAD[name]
    given_args = {
        "x": randn(3, 64),
        "gain": None,
        "rms": "p2",
        "rounding": "f32->f32",
        "cast": RCEIL,
    }
    given_args |= changed
    if fake:
        mode = FakeTensorMode()
        given_args = {
            k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given_args.items()
        }
    with pytest.raises(ValueError, match=re.escape(message)):
        rmsnorm_mxquant(given_args.pop("x"), correction=0.4, **given_args)


def test_rounding_names_are_inverse() -> None:
    for text in ROUNDINGS:
        assert rounding_name(*parse_rounding(text)) == text
    assert rounding_name(torch.bfloat16, torch.float32) == "bf16->f32"


# --- through Inductor -----------------------------------------------------------------------------


@pytest.mark.inductor
@pytest.mark.parametrize("through", ["op", "decomposition"])
def test_inductor_code_agrees(through: str) -> None:
    """C++ keeps float32 where eager rounds to bf16 and sums in another order: not bitwise."""
    x = randn(96, 768).bfloat16()
    gain = 1 + 0.3 * randn(768, seed=1)
    rest = (None, EPS, "p2", theory.correction(2, 32), "f32->f32", RCEIL)
    function = OP if through == "op" else decomposition
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, gain: function(x, gain, *rest), fullgraph=True)
    got, expected = compiled(x, gain), OP(x, gain, *rest)
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(got[2], expected[2], rtol=ROOT_RTOL, atol=0)
    # The root may move by an ulp and with it the rare value at a tie: one in a thousand at most.
    assert int(differing(got[1], expected[1]).sum()) <= got[1].numel() // 1000
    assert int(differing(got[0], expected[0]).sum()) <= got[0].numel() // 1000
    # e4m3 against its own input is at 31 dB; the two routes must be far nearer to each other.
    values = [reference.dequantize(q, s, torch.float32) for q, s, _ in (got, expected)]
    assert sqnr(values[1], values[0]) > 50
