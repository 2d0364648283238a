"""``mxnorm::rmsnorm_mxquant_colwise`` on CPU: against the oracle, bit for bit, and its contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_rows import gaussian, seeded, tokens
from numerics import assert_same_bytes, assert_same_cast, bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mxnorm_pass import reference
from mxnorm_pass.formats import APPLIES, BLOCK_SIZES, E8M0_RULES, ELEMENTS, SATURATES, Cast, swizzle
from mxnorm_pass.ops import COLWISE_OP, rmsnorm_mxquant, rmsnorm_mxquant_colwise
from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding

BF16, F32 = torch.bfloat16, torch.float32
RCEIL = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
CASTS = [(e, r) for e in ELEMENTS for r in E8M0_RULES] + [("e2m1", "e4m3")]
ROUNDINGS = ("f32->f32", "bf16->bf16", "f32->bf16", "bf16->f32")


def root(x: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def check(
    x: Tensor,
    cast: str = RCEIL,
    gain: Tensor | None = None,
    rounding: str = "f32->f32",
    tensor_scale: float = 1.0,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The op against the oracle; what the oracle gives."""
    rstd, spec = root(x, eps), Cast.parse(cast)
    outer = torch.tensor(tensor_scale) if spec.rule == "e4m3" else None
    qdata, scale = rmsnorm_mxquant_colwise(
        x, rstd, gain, rounding=rounding, cast=cast, tensor_scale=outer
    )
    dtypes = parse_rounding(rounding)
    expected = reference.quantize_columns(x, rstd, gain, *dtypes, spec, tensor_scale)
    if spec.layout == "swizzled":
        assert_same_bytes(scale, swizzle(expected[1]), f"{cast} scale")
        scale = expected[1]
    assert_same_cast((qdata, scale), expected, cast)
    return expected


@pytest.mark.parametrize(("element", "rule"), CASTS)
def test_every_cast_of_special_rows(element: str, rule: str) -> None:
    """Rows of NaN, Inf, zeros and subnormals run across every block of a column."""
    block = 16 if rule == "e4m3" else 32
    x = tokens(block, 48)
    gain = torch.linspace(-2, 2, 48)
    for apply in APPLIES:
        for saturate in SATURATES if element in ("e4m3", "e5m2") else ("clamp",):
            for layout, eps in (("plain", 1e-5), ("swizzled", 0.0)):
                cast = f"{element}/b{block}/{rule}/{apply}/{saturate}/{layout}"
                codes, scale = check(x, cast, gain, "bf16->bf16", eps=eps)
                assert len(bits(codes).unique()) > 8
                assert len(bits(scale).unique()) > 4


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_options(data: Any) -> None:
    draw = data.draw
    element, rule = draw(st.sampled_from(CASTS))
    block = draw(st.sampled_from(BLOCK_SIZES))
    ends = draw(st.sampled_from(("", ":3", ":90:nan"))) if rule != "e4m3" else ""
    layout = draw(st.sampled_from(("plain", "swizzled")))
    saturate = draw(st.sampled_from(SATURATES)) if element in ("e4m3", "e5m2") else "clamp"
    cast = f"{element}/b{block}/{rule}{ends}/{draw(st.sampled_from(APPLIES))}/{saturate}/{layout}"
    rows, k = block * draw(st.integers(1, 5)), draw(st.integers(1, 140))
    seed = draw(st.integers(0, 1000))
    x = gaussian(rows, k, dtype=draw(st.sampled_from((BF16, F32))), seed=seed)
    if draw(st.booleans()):
        x = x.view(2, rows // 2, k)
    gain = None
    if draw(st.booleans()):
        gain = torch.randn(k, generator=seeded(seed)).to(draw(st.sampled_from((BF16, F32))))
    rounding = draw(st.sampled_from(ROUNDINGS))
    check(x, cast, gain, rounding, draw(st.sampled_from((1.0, 0.013))))


def test_strides_do_not_matter() -> None:
    wide = gaussian(2, 5, 32, 96)
    for x in (
        wide[:, 1:4, :, 3:60],
        wide.transpose(0, 2),
        wide[:1, :1].expand(4, 2, -1, -1),
        gaussian(96, 64).t(),
    ):
        check(x, gain=torch.linspace(0, 2, x.shape[-1]), rounding="bf16->bf16")


def test_it_is_the_cast_of_the_rows_transposed() -> None:
    """With the root that the row-wise op returns: codes agree where scales and values do."""
    x = gaussian(32, 64)
    _, _, rstd = rmsnorm_mxquant(x, rms="p2", cast=RCEIL)
    qdata, scale = rmsnorm_mxquant_colwise(x, rstd, cast=RCEIL)
    y = reference.dequantize(qdata, scale, F32).t()
    error = (y - x.float() * rstd).abs()
    assert float((error / (x.float() * rstd).abs().amax(0)).max()) < 2**-4


def test_no_rows() -> None:
    for cast in (RCEIL, "e2m1/b16/e4m3/reciprocal/clamp/swizzled"):
        qdata, scale = rmsnorm_mxquant_colwise(torch.ones(0, 40), torch.ones(0, 1), cast=cast)
        assert qdata.shape == (40, 0) and scale.numel() == 0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"x": torch.ones(48, 8), "rstd": torch.ones(48, 1)}, "48 rows are no multiple"),
    "one axis": ({"x": torch.ones(8), "rstd": torch.ones(1)}, "1 rows are no multiple"),
    "no columns": ({"x": torch.ones(32, 0)}, r"expected \[\.\.\., K\] with K of at least 1"),
    "dtype": ({"x": torch.ones(32, 8).half()}, "x is torch.float16; allowed are"),
    "rstd dtype": ({"rstd": torch.ones(32, 1).bfloat16()}, "rstd is torch.bfloat16: expected"),
    "rstd shape": ({"rstd": torch.ones(32)}, r"rstd of shape \(32,\): expected \(32, 1\)"),
    "rstd rows": ({"rstd": torch.ones(16, 1)}, r"rstd of shape \(16, 1\): expected \(32, 1\)"),
    "rstd device": ({"rstd": torch.ones(32, 1, device="meta")}, "rstd is on meta, x on cpu"),
    "gain": ({"gain": torch.ones(7)}, r"gain of shape \(7,\): expected \(8,\)"),
    "gain dtype": ({"gain": torch.ones(8).int()}, "gain is torch.int32: expected a float"),
    "rounding": ({"rounding": "bf16"}, "rounding 'bf16': expected A->B"),
    "cast": ({"cast": RCEIL.replace("b32", "b31")}, "block 'b31' is not one of b16"),
    "no text": ({"cast": Cast.parse(RCEIL)}, "expected a Cast as text"),
    "scale": ({"tensor_scale": torch.ones(())}, "only the rule 'e4m3'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_allowed(name: str) -> None:
    given, message = WRONG[name]
    arguments = {"x": torch.ones(32, 8), "rstd": torch.ones(32, 1), **given}
    with pytest.raises(ValueError, match=message):
        rmsnorm_mxquant_colwise(**arguments)


def test_no_gradient_is_lost() -> None:
    x, gain = torch.ones(32, 8), torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="rmsnorm_mxquant_colwise has no gradient"):
        rmsnorm_mxquant_colwise(x, torch.ones(32, 1), gain)
    with torch.no_grad():
        rmsnorm_mxquant_colwise(x, torch.ones(32, 1), gain)


@pytest.mark.parametrize("layout", ("plain", "swizzled"))
@pytest.mark.parametrize("element", ("e4m3", "e3m2", "e2m1"))
def test_opcheck(element: str, layout: str) -> None:
    cast = f"{element}/b16/floor/divide/clamp/{layout}"
    x = gaussian(2, 48, 24)
    gain = None if element == "e4m3" else torch.ones(24)
    torch.library.opcheck(COLWISE_OP, (x, root(x), gain, None, "bf16->bf16", cast))
    outer = torch.tensor(0.5)
    cast = "e2m1/b16/e4m3/reciprocal/clamp/" + layout
    torch.library.opcheck(COLWISE_OP, (x, root(x), gain, outer, "f32->bf16", cast))


@pytest.mark.parametrize("x", [gaussian(0, 6), gaussian(3, 64, 5).transpose(0, 1), gaussian(64, 1)])
def test_fake_agrees_with_real(x: Tensor) -> None:
    for element in ELEMENTS:
        for layout in ("plain", "swizzled"):
            args = (x, root(x), None, None, "f32->f32", f"{element}/b32/even/divide/bare/{layout}")
            real = COLWISE_OP(*args)
            with FakeTensorMode() as mode:
                fake = COLWISE_OP(*map(mode.from_tensor, args[:2]), *args[2:])
            for r, f in zip(real, fake, strict=True):
                assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@pytest.mark.inductor
def test_inductor_inlines_the_decomposition() -> None:
    """On CPU, with a symbolic number of rows; uint8 codes, which every torch's C++ can type."""
    x = gaussian(64, 40)
    cast = "e2m1/b32/floor/divide/clamp/plain"

    def f(x: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm_mxquant_colwise(x, rstd, cast=cast)

    got = torch.compile(f, fullgraph=True, dynamic=True)(x, root(x))
    for a, b in zip(got, f(x, root(x)), strict=True):
        assert_same_bytes(a, b)
