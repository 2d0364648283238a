"""The op against the oracle: bytes given the reciprocal root, the root against float64."""

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_bytes, assert_same_cast, differing, sqnr
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import to_blocked

from mxnorm_pass import reference, theory
from mxnorm_pass.formats import APPLIES, E8M0_RULES, ELEMENTS, RULES, Cast
from mxnorm_pass.ops import ABSMAX_OP, OP, rmsnorm_mxquant
from mxnorm_pass.ops.rmsnorm_mxquant import RMS_KINDS, decomposition, parse_rounding, rounding_name

RCEIL = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
FLOOR = "e4m3/b32/floor/divide/clamp/plain"
FP6 = "e2m3/b32/rceil_log2/reciprocal/clamp/plain"
FP4 = "e2m1/b32/ceil/divide/clamp/plain"
NVFP4 = "e2m1/b16/e4m3/reciprocal/clamp/plain"
SWIZZLED = "e4m3/b32/floor/divide/clamp/swizzled"
# Every cast in blocks of 32 (NVFP4: of 16 too); FP6 and FP4 saturate either way.
CASTS = [
    f"{e.name}/b32/{rule}/{apply}/{saturate}/plain"
    for e in ELEMENTS.values()
    for rule, apply in itertools.product(E8M0_RULES, APPLIES)
    for saturate in (("clamp",) if e.sub_byte else ("clamp", "bare"))
]
CASTS += [f"e2m1/b{b}/e4m3/{a}/clamp/plain" for b in (16, 32) for a in APPLIES]
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
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything the op returns, against the oracle (and its scales in torchao's layout)."""
    spec = Cast.parse(cast)
    if correction is None:
        correction = theory.correction({"p1": 1, "p2": 2}.get(rms, 2), spec.block_size)
    qdata, scale, rstd = OP(x, gain, None, tensor_scale, eps, rms, correction, rounding, cast)
    what = f"{rms} {rounding} {cast} gain={gain is not None} x={tuple(x.shape)} {x.dtype}"

    expected_root = root64(x, eps, rms, spec.block_size, correction)
    assert rstd.dtype is torch.float32
    torch.testing.assert_close(
        rstd.double(), expected_root, rtol=ROOT_RTOL, atol=0, equal_nan=True, msg=what
    )
    oracle_root = reference.rstd(x, eps, rms, spec.block_size, correction)
    torch.testing.assert_close(rstd, oracle_root, rtol=ROOT_RTOL, atol=0, equal_nan=True, msg=what)

    y = reference.normalise(x, rstd, gain, *parse_rounding(rounding))
    outer = 1.0 if tensor_scale is None else float(tensor_scale)
    expected, plain_scale = reference.quantize(y, spec, outer)
    if spec.layout == "swizzled":
        flat = to_blocked(plain_scale.reshape(-1, plain_scale.shape[-1]).view(torch.uint8))
        assert_same_bytes(scale, flat.view(plain_scale.dtype), f"scale, {what}")
        assert_same_cast((qdata, plain_scale), (expected, plain_scale), what)
    else:
        assert_same_cast((qdata, scale), (expected, plain_scale), what)
    return qdata, scale, rstd


# --- every choice in the schema -------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_every_cast(rms: str, rounding: str, dtype: torch.dtype) -> None:
    """All casts of all elements, with gain and without in turn, of rows over a range of sizes."""
    x = (randn(5, 96) * torch.tensor([1.0, 1e-3, 30.0, 1e6, 1.0])[:, None]).to(dtype)
    x[4, ::7] *= 100.0  # outliers, so that small codes and subnormals occur beside them
    gains = itertools.cycle((None, 1 + 0.3 * randn(96, seed=1)))
    if dtype is torch.bfloat16:
        next(gains)  # so that each cast meets both
    for cast, gain in zip(CASTS, gains, strict=False):
        check(x, gain, rms, rounding, cast)
        if "/e4m3/" in cast:
            for outer in (1.0, 2.0**-9, 0.0371):
                check(x, gain, rms, rounding, cast, tensor_scale=torch.tensor(outer))


@pytest.mark.parametrize("block", [16, 64, 128])
def test_other_block_sizes(block: int) -> None:
    x = randn(7, 384).bfloat16()
    for rms, gain in itertools.product(RMS_KINDS, (None, 1 + 0.3 * randn(384, seed=1))):
        for element, rule in (("e4m3", "rceil_exact"), ("e3m2", "even"), ("e2m1", "e4m3")):
            cast = f"{element}/b{block}/{rule}/reciprocal/clamp/plain"
            _, scale, _ = check(x, gain, rms, cast=cast)
            assert scale.shape == (7, 384 // block)


def test_tensor_scale_reaches_the_blocks() -> None:
    """Another outer scale, other block scales; none and 1 are one."""
    scales = {
        outer: check(randn(16, 128), None, "exact", cast=NVFP4, tensor_scale=outer)[1].float()
        for outer in (None, *torch.tensor([1.0, 0.5, 0.01]))
    }
    none, one, half, small = scales.values()
    assert torch.equal(none, one) and torch.equal(half, 2 * one)
    assert float((small / one).min()) > 90, "100, to a sixteenth either way"


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
    expected = packet(x, gain, None, None, 1e-4, "p1", 0.4, "bf16->f32", FLOOR)
    for a, b in zip(got, expected, strict=True):
        assert_same_bytes(a, b)
    t = torch.tensor(0.01)
    got = rmsnorm_mxquant(x, gain, rms="p1", cast=NVFP4, tensor_scale=t)
    correction = theory.correction(1, 16)
    expected = packet(x, gain, None, t, 1e-6, "p1", correction, "f32->f32", NVFP4)
    for a, b in zip(got, expected, strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("eps_dtype", [torch.float32, torch.float64])
def test_eps_as_a_tensor(eps_dtype: torch.dtype) -> None:
    x, gain = 0.01 * randn(8, 96), randn(96, seed=1)
    previous = None
    for eps in (1e-6, 1e-4, 1e-2):
        for rms in RMS_KINDS:
            # The float operand, a wrong one here, must not be read.
            eps_tensor = torch.tensor(eps, dtype=eps_dtype)
            got = OP(x, gain, eps_tensor, None, 123.0, rms, 0.4, "f32->f32", RCEIL)
            expected = OP(x, gain, None, None, eps, rms, 0.4, "f32->f32", RCEIL)
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
            *(None, None, EPS, rms, theory.correction(1 if rms == "p1" else 2, 32)),
            *("f32->f32", RCEIL),
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
@pytest.mark.parametrize("cast", [RCEIL, FLOOR, "e5m2/b32/even/divide/bare/plain", FP6, FP4, NVFP4])
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_special_rows(rms: str, cast: str, dtype: torch.dtype) -> None:
    x = special_rows(dtype)
    spec, b = Cast.parse(cast), Cast.parse(cast).block_size
    element, nvfp4 = ELEMENTS[spec.element], spec.rule == "e4m3"
    correction = theory.correction(1 if rms == "p1" else 2, b)
    # Least scale: E8M0's 2^-127, or E4M3's least normal, 2^-6; byte 255 or 0x7F is NaN.
    least, nan = (0x08, 0x7F) if nvfp4 else (0, 255)
    for gain in (None, 1 + 0.3 * randn(128, seed=1)):
        qdata, scale, rstd = check(x, gain, rms, cast=cast)
        values = reference.dequantize(qdata, scale, torch.float32, element)
        stored = scale.view(torch.uint8) & (0x7F if nvfp4 else 255)  # the sign of a NaN is any

        # eps alone: rsqrt(1e-5), to half an ulp of each of its two roundings.
        torch.testing.assert_close(
            rstd[[1, 3], 0], torch.full((2,), EPS**-0.5), rtol=2 * 2.0**-23, atol=0
        )
        assert bool((values[1] == 0).all()) and bool((stored[1] == least).all())
        assert bool(values[3].isfinite().all())
        # 1e-35 * 316 = 2^-107.9 is far above 2^-127, with any of the gains, and far below 2^-6.
        tops = values[3].view(-1, b).abs().amax(-1)
        assert bool((tops == 0 if nvfp4 else tops != 0).all())
        zero = slice(32 // b, 64 // b)
        assert bool((values[4, 32:64] == 0).all()) and bool((stored[4, zero] == least).all())
        assert bool((values[4, :32] != 0).any())

        # NaN spreads through the root to the whole row; Inf makes the root 0.
        assert bool(values[5].isnan().all()) and bool((stored[5] == nan).all())
        assert float(rstd[7]) == 0.0
        assert bool((values[7, b:] == 0).all()) and bool((stored[7, 1:] == least).all())
        assert bool(values[7, 10:12].isnan().all()) and int(stored[7, 0]) == nan
        if not element.sub_byte:  # in the codes themselves, without the scale
            assert bool(qdata[5].float().isnan().all())
            assert bool(qdata[7, 10:12].float().isnan().all())

        # What the matmul sees: NaN in those two rows, nothing in the others.
        out = values @ randn(128, 8, seed=5)
        bad = out.isnan().all(-1)
        assert bad.nonzero().flatten().tolist() == [5, 7]
        assert bool(out[~bad].isfinite().all())

        # Ordinary rows are as if alone.
        for row in (0, 2, 4, 6, 8):
            alone = OP(x[row : row + 1], gain, None, None, EPS, rms, correction, "f32->f32", cast)
            for a, b_ in zip((qdata, scale, rstd), alone, strict=True):
                assert_same_bytes(a[row : row + 1], b_, f"row {row}")


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


# --- layout, and the companion op -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (1, 96), (5, 160), (128, 128), (3, 43, 288), (300, 64)])
def test_swizzled_scales(shape: tuple[int, ...]) -> None:
    """Codes and root of the plain layout, its scales in torchao's order; padding is zero."""
    x = randn(*shape).bfloat16()
    for plain in (FLOOR, FP6, NVFP4):
        got, expected = (
            check(x, None, cast=plain.replace("plain", layout)) for layout in ("swizzled", "plain")
        )
        assert_same_bytes(got[0], expected[0])
        assert_same_bytes(got[2], expected[2])
        raw = expected[1].reshape(-1, expected[1].shape[-1]).view(torch.uint8)
        tall, wide = (n * math.ceil(m / n) for n, m in zip((128, 4), raw.shape, strict=True))
        assert got[1].shape == (tall * wide,) and got[1].dtype is expected[1].dtype
        assert int((got[1].view(torch.uint8) == 0).sum()) == tall * wide - raw.numel()
    assert rmsnorm_mxquant(x[:0].view(0, shape[-1]), cast=SWIZZLED)[1].shape == (0,)


@DTYPES
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_absmax_of_the_normalised_tensor(rms: str, rounding: str, dtype: torch.dtype) -> None:
    """Bit for bit the oracle's given the root, and near float64's."""
    x = (randn(6, 2, 96) * torch.tensor([1.0, 1e-3, 30.0, 1e4, 1.0, 0.0])[:, None, None]).to(dtype)
    norm_dtype, out_dtype = parse_rounding(rounding)
    for block, gain in itertools.product((16, 32), (None, -1 - 0.3 * randn(96, seed=1))):
        correction = theory.correction(1 if rms == "p1" else 2, block)
        got = ABSMAX_OP(x, gain, None, EPS, rms, correction, rounding, block)
        assert got.shape == () and got.dtype is torch.float32
        cast = f"e4m3/b{block}/floor/divide/clamp/plain"
        rstd = OP(x, gain, None, None, EPS, rms, correction, rounding, cast)[2]
        y = reference.normalise(x, rstd, gain, norm_dtype, out_dtype)
        assert_same_bytes(got, y.abs().max().float())
        exact = x.double() * root64(x, EPS, rms, block, correction)
        exact = (exact if gain is None else exact * gain.double()).abs().max()
        # The root's error and two float32 roundings, or half a bf16 step for each one to bf16.
        halves = (norm_dtype, out_dtype).count(torch.bfloat16)
        assert float(got) == pytest.approx(float(exact), rel=1.02 * halves * 2.0**-8 + ROOT_RTOL)
        # eps by tensor; the float operand, a wrong one, is not read.
        eps = torch.tensor(EPS)
        assert_same_bytes(ABSMAX_OP(x, gain, eps, 9.0, rms, correction, rounding, block), got)
        strided = x.transpose(0, 1)
        assert_same_bytes(
            ABSMAX_OP(strided, gain, None, EPS, rms, correction, rounding, block), got
        )


@pytest.mark.parametrize("rms", RMS_KINDS)
def test_absmax_of_special_rows(rms: str) -> None:
    rest = (None, EPS, rms, 0.4, "f32->f32", 32)
    x = special_rows(torch.float32)
    for gain in (None, torch.ones(128)):
        assert ABSMAX_OP(x, gain, *rest).isnan(), "NaN, and Inf times a root of 0"
        assert ABSMAX_OP(x[5:6], gain, *rest).isnan() and ABSMAX_OP(x[7:8], gain, *rest).isnan()
        assert float(ABSMAX_OP(x[1:2], gain, *rest)) == 0.0
        tiny = ABSMAX_OP(x[3:4], gain, *rest)
        assert float(tiny) == pytest.approx(1e-35 * EPS**-0.5, rel=1e-6)


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
# torchao's names of the elements.
TORCHAO = {e.name: e.dtype for e in ELEMENTS.values()}
TORCHAO |= {"e2m3": DTYPE_FP6_E2M3, "e3m2": DTYPE_FP6_E3M2, "e2m1": torch.float4_e2m1fn_x2}


@pytest.mark.parametrize(
    ("norm", "dtype", "gain_dtype", "rounding"),
    NORMS,
    ids=[f"{n.__name__}-{d}-{g}".replace("torch.", "") for n, d, g, _ in NORMS],
)
@pytest.mark.parametrize("k", [96, 2880])
def test_exact_is_norm_then_to_mx(norm, dtype, gain_dtype, rounding, k) -> None:
    """Bit for bit what the graph had, in all four modes for all elements, and NVFP4."""
    x = randn(32, k, seed=k).to(dtype)
    x[1] = 0.0
    x[2] *= 1e-4
    gain = None if gain_dtype is None else (1 + 0.3 * randn(k, seed=1)).to(gain_dtype)
    y = norm(x, gain)
    assert y.dtype is parse_rounding(rounding)[1]
    exact = {"eps": EPS, "rms": "exact", "rounding": rounding}
    for (mode, parts), element in itertools.product(MODES.items(), ELEMENTS):
        expected_scale, expected = to_mx(y, TORCHAO[element], 32, ScaleCalculationMode[mode])
        cast = f"{element}/b32/{parts}/clamp/plain"
        qdata, scale, _ = rmsnorm_mxquant(x, gain, cast=cast, **exact)
        assert_same_bytes(scale, expected_scale.view(torch.uint8), f"{cast} scale")
        assert_same_bytes(qdata, expected, f"{cast} codes")

    # NVFP4 with one scale, with one given, and with the tensor's own by the companion op.
    own = ABSMAX_OP(x, gain, None, EPS, "exact", 1.0, rounding, 16)
    assert_same_bytes(own, y.abs().amax().float(), "absmax")
    for outer in (None, torch.tensor(0.0371), per_tensor_amax_to_scale(own)):
        expected_scale, expected = nvfp4_quantize(y, 16, outer)
        qdata, scale, _ = rmsnorm_mxquant(x, gain, cast=NVFP4, tensor_scale=outer, **exact)
        assert_same_bytes(scale, expected_scale, f"NVFP4 {outer} scale")
        assert_same_bytes(qdata, expected, f"NVFP4 {outer} codes")


# --- no second absmax -----------------------------------------------------------------------------

float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    st.lists(float32, min_size=32, max_size=32),
    st.sampled_from(["p1", "p2"]),
    st.sampled_from(ROUNDINGS),
    st.sampled_from([RCEIL, FLOOR, "e5m2/b16/even/divide/bare/plain", FP6, NVFP4]),
    st.sampled_from([1e-12, 1e-6, 1.0, 1e30]),
)
@settings(max_examples=200, deadline=None)
def test_rounded_absmax_is_absmax_of_rounded(values, rms, rounding, cast, eps) -> None:
    """Without gain the op rounds the block's maximum; a gain of ones makes it look again.

    Rounding is monotone and even, so both are one; any float32, NaN and Inf included.
    """
    x = torch.tensor([values, values[::-1]])
    shortcut = OP(x, None, None, None, eps, rms, 0.4, rounding, cast)
    again = OP(x, torch.ones(32), None, None, eps, rms, 0.4, rounding, cast)
    assert_same_cast(shortcut[:2], again[:2])
    assert_same_bytes(shortcut[2], again[2])
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


def arguments(x: Tensor, gain: Tensor | None = None, **other) -> tuple:
    """Of the op, in order of its schema."""
    defaults = {"eps_tensor": None, "tensor_scale": None, "eps": 1e-6, "rms": "p2"}
    defaults |= {"correction": 0.4, "rounding": "f32->f32", "cast": RCEIL}
    return (x, gain, *(defaults | other).values())


OPCHECK = {
    "no_gain": lambda: arguments(randn(4, 96)),
    "gain": lambda: arguments(
        randn(2, 3, 64).bfloat16(), randn(64), rms="exact", rounding="bf16->bf16"
    ),
    "eps_tensor": lambda: arguments(
        randn(4, 64), randn(64), eps_tensor=torch.tensor(1e-5), rms="p1", cast=FLOOR
    ),
    "one_block": lambda: arguments(randn(1, 32), rounding="f32->bf16"),
    "fp6": lambda: arguments(randn(4, 64), cast=FP6),
    "fp4": lambda: arguments(randn(2, 2, 64), randn(64), cast=FP4),
    "nvfp4": lambda: arguments(
        randn(4, 64), randn(64), tensor_scale=torch.tensor(0.01), cast=NVFP4
    ),
    "nvfp4_swizzled": lambda: arguments(randn(5, 64), cast=NVFP4.replace("plain", "swizzled")),
    "swizzled": lambda: arguments(randn(2, 5, 64), cast=SWIZZLED),
    "strided": lambda: arguments(randn(64, 6).t(), cast=FLOOR),
}


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(OP, OPCHECK[name]())


@pytest.mark.parametrize("rms", RMS_KINDS)
def test_opcheck_of_absmax(rms: str) -> None:
    gain = {"p1": None, "p2": randn(64), "exact": randn(64).bfloat16()}[rms]
    eps = None if rms == "p2" else torch.tensor(1e-5)
    args = (randn(2, 3, 64).bfloat16(), gain, eps, 1e-6, rms, 0.4, "bf16->bf16", 16)
    torch.library.opcheck(ABSMAX_OP, args)


@DTYPES
@pytest.mark.parametrize(
    "make",
    [
        lambda: randn(64),
        lambda: randn(0, 64),
        lambda: randn(1, 32),
        lambda: randn(2, 70, 96),
        lambda: randn(96, 7).t(),
        lambda: randn(4, 1, 64).transpose(0, 1),
        lambda: randn(1, 64).expand(5, -1),
    ],
)
def test_fake_agrees_with_real(make, dtype: torch.dtype) -> None:
    x = make().to(dtype)
    gain = torch.ones(x.shape[-1])
    casts = [f"{e}/b32/floor/divide/bare/{t}" for e in ELEMENTS for t in ("plain", "swizzled")]
    casts += [NVFP4, NVFP4.replace("plain", "swizzled")]
    for cast, rms, g in zip(casts, 4 * RMS_KINDS, 6 * (None, gain), strict=True):
        t = torch.tensor(0.5) if cast == NVFP4 else None
        args = arguments(x, g, tensor_scale=t, rms=rms, rounding="f32->bf16", cast=cast)
        real = OP(*args)
        with FakeTensorMode() as mode:
            fake = OP(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device), cast
            assert r.stride() == f.stride() and r.storage_offset() == f.storage_offset() == 0


@pytest.mark.parametrize("cast", [RCEIL, FP6, FP4, NVFP4, SWIZZLED])
def test_fake_with_symbolic_rows(cast: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    )
    x = mode.from_tensor(randn(6, 5, 96), symbolic_context=context)
    with mode:
        qdata, scale, rstd = OP(*arguments(x, cast=cast))
        absmax = ABSMAX_OP(x, None, None, 1e-6, "p2", 0.4, "f32->f32", 32)
    assert isinstance(x.shape[0], torch.SymInt)
    rows, spec = x.shape[0], Cast.parse(cast)
    columns = 96 // spec.block_size
    assert absmax.shape == () and absmax.dtype is torch.float32
    assert qdata.shape == (rows, 5, 96 // ELEMENTS[spec.element].per_byte)
    assert rstd.shape == (rows, 5, 1)
    assert isinstance(scale.shape[0], torch.SymInt)
    assert not mode.shape_env.guards, "the row count must not be specialised"
    if cast == SWIZZLED:
        # One tile of 128 x 4 holds three columns: 512 bytes for each 128 rows begun.
        assert scale.shape[0].node.expr.subs({rows.node.expr: 60}) == 512 * math.ceil(300 / 128)
    else:
        assert scale.shape == (rows, 5, columns)


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
    "layout": ({"cast": RCEIL.replace("plain", "padded")}, "is not one of plain, swizzled"),
    "nvfp4": ({"cast": FLOOR.replace("floor", "e4m3")}, "goes with element 'e2m1' alone"),
    "tensor scale": (
        {"tensor_scale": torch.tensor(1.0)},
        f"tensor_scale with cast {RCEIL!r}: only the rule 'e4m3' (NVFP4) has one",
    ),
    "tensor scale shape": (
        {"cast": NVFP4, "tensor_scale": torch.ones(1)},
        "tensor_scale torch.float32 of shape (1,): expected a 0-d float32 tensor",
    ),
    "tensor scale dtype": (
        {"cast": NVFP4, "tensor_scale": torch.tensor(1.0).double()},
        "tensor_scale torch.float64 of shape (): expected a 0-d float32 tensor",
    ),
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


def test_absmax_op_names_what_is_allowed() -> None:
    good = {"x": randn(3, 64), "gain": None, "eps_tensor": None, "eps": 1e-6, "rms": "p2"}
    good |= {"correction": 0.4, "rounding": "f32->f32", "block_size": 32}
    mode = FakeTensorMode()
    for changed, message in (
        ({"block_size": 24}, "block size 24 is not one of 16, 32, 64, 128"),
        ({"block_size": 128}, "shape (3, 64): the last axis must be a multiple of the block size"),
        ({"x": randn(3, 64).half()}, "x is torch.float16; allowed are " + FLOATS),
        ({"eps_tensor": torch.ones(1)}, "eps_tensor of shape (1,): expected a 0-d tensor"),
        ({"rms": "p3"}, "rms 'p3' is not one of p1, p2, exact"),
    ):
        args = (good | changed).values()
        fakes = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in args]
        for given_args in (args, fakes):
            with pytest.raises(ValueError, match=re.escape(message)):
                ABSMAX_OP(*given_args)


def test_rounding_names_are_inverse() -> None:
    for text in ROUNDINGS:
        assert rounding_name(*parse_rounding(text)) == text
    assert rounding_name(torch.bfloat16, torch.float32) == "bf16->f32"


# --- through Inductor -----------------------------------------------------------------------------


def assert_near(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """C++ keeps float32 where eager rounds to bf16 and sums in another order: not bitwise."""
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(got[2], expected[2], rtol=ROOT_RTOL, atol=0)
    # The root may move by an ulp and with it the rare value at a tie: one in a thousand at most.
    assert int(differing(got[1], expected[1]).sum()) <= got[1].numel() // 1000
    assert int(differing(got[0], expected[0]).sum()) <= got[0].numel() // 1000


@pytest.mark.inductor
@pytest.mark.parametrize("through", ["op", "decomposition"])
def test_inductor_code_agrees(through: str) -> None:
    x = randn(96, 768).bfloat16()
    gain = 1 + 0.3 * randn(768, seed=1)
    rest = (None, None, EPS, "p2", theory.correction(2, 32), "f32->f32", RCEIL)
    function = OP if through == "op" else decomposition
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, gain: function(x, gain, *rest), fullgraph=True)
    got, expected = compiled(x, gain), OP(x, gain, *rest)
    assert_near(got, expected)
    # e4m3 against its own input is at 31 dB; the two routes must be far nearer to each other.
    values = [reference.dequantize(q, s, torch.float32) for q, s, _ in (got, expected)]
    assert sqnr(values[1], values[0]) > 50


@pytest.mark.inductor
def test_inductor_code_of_the_other_formats_agrees() -> None:
    """NVFP4 with the tensor's own scale, swizzled, and both other widths, in one graph."""
    x = randn(96, 768).bfloat16()
    gain = 1 + 0.3 * randn(768, seed=1)
    nvfp4 = NVFP4.replace("plain", "swizzled")

    def function(x: Tensor, gain: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        root = (None, EPS, "exact", 1.0, "f32->f32")
        absmax = ABSMAX_OP(x, gain, *root, 16)
        outer = absmax / (448.0 * 6.0)
        first = OP(x, gain, None, outer, *root[1:], nvfp4)
        return (absmax,), first, *(OP(x, gain, None, None, *root[1:], c) for c in (FP6, FP4))

    torch._dynamo.reset()
    (absmax,), *got = torch.compile(function, fullgraph=True)(x, gain)
    (expected_absmax,), *expected = function(x, gain)
    assert absmax.shape == () and absmax.dtype is torch.float32
    torch.testing.assert_close(absmax, expected_absmax, rtol=ROOT_RTOL, atol=0)
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b)
