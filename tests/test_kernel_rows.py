"""The row kernel under Triton's interpreter against the op's decomposition on CPU.

What is equal to what, and how far, ``kernel_rows.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import Interpreter
from kernel_rows import F32, MXFP8, check, check_absmax, gaussian, integers, seeded, special
from numerics import bits
from torch import Tensor

from mxnorm_pass.formats import APPLIES, BLOCK_SIZES, E8M0_RULES, ELEMENTS, LAYOUTS, SATURATES
from mxnorm_pass.ops.kernels.constants import Config, row_config
from mxnorm_pass.ops.rmsnorm_mxquant import RMS_KINDS, decomposition

pytest.importorskip("triton")

CASTS = [(e, r) for e in ELEMENTS for r in E8M0_RULES] + [("e2m1", "e4m3")]
ROUNDINGS = ("f32->f32", "bf16->bf16", "f32->bf16", "bf16->f32")
NVFP4 = "e2m1/b16/e4m3/reciprocal/clamp/plain"


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as running:
        yield running


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("element", "rule"), CASTS)
def test_every_cast(interpreter: Interpreter, element: str, rule: str) -> None:
    """All ways to apply a scale, to saturate and to lay out; special rows; the last tile masked."""
    block = 16 if rule == "e4m3" else (32, 16, 64)[(len(element) + len(rule)) % 3]
    k = 6 * block
    for i, (apply, saturate, layout) in enumerate(
        (a, s, la) for a in APPLIES for s in SATURATES for la in LAYOUTS
    ):
        cast = f"{element}/b{block}/{rule}/{apply}/{saturate}/{layout}"
        x = special(k)[i % 3 :: 3] if layout == "swizzled" else special(k)[i // 2 % 2 :: 2]
        padded = None if layout == "plain" else len(x) + 1
        codes, scale, _ = check(interpreter, x, cast=cast, padded=padded)
        assert len(bits(codes).unique()) > 4
        assert len(bits(scale).unique()) > 1


@pytest.mark.parametrize(
    ("element", "rule", "hw"),
    [(*c, 2) for c in CASTS] + [(*c, 1) for c in CASTS if c[0] in ("e4m3", "e5m2")],
)
def test_every_cast_by_the_chip(interpreter: Interpreter, element: str, rule: str, hw: int) -> None:
    """The same with the instructions emulated (``ptx.py``), in both ways to apply and saturate."""
    x = special(192, dtype=F32)
    for apply, saturate in zip(APPLIES, SATURATES, strict=True):
        cast = f"{element}/b32/{rule}/{apply}/{saturate}/plain"
        check(interpreter, x, cast=cast, hw=hw, rounding="bf16->bf16")


@pytest.mark.parametrize("hw", (1, 2))
@pytest.mark.parametrize(("element", "rule"), CASTS)
def test_every_cast_of_rounded_words(
    interpreter: Interpreter, element: str, rule: str, hw: int
) -> None:
    """Behind a gain, rounded to bfloat16 by the chip: absmax and scaling on words of two."""
    gain = torch.linspace(-2, 2, 192)
    for i, apply in enumerate(APPLIES):
        cast = f"{element}/b32/{rule}/{apply}/{SATURATES[(i + hw) % 2]}/plain"
        given = gain if i == hw % 2 else gain.bfloat16()
        check(interpreter, special(192), gain=given, cast=cast, hw=hw, rounding="bf16->bf16")


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_exact_sums(interpreter: Interpreter, rms: str, block: int) -> None:
    """Bit for bit, rstd included, on widths that are powers of two and not."""
    for blocks in (1, 3, 8, 13):
        x = integers(2, block * blocks, seed=blocks)
        cast = f"e4m3/b{block}/ceil/divide/clamp/plain"
        check(interpreter, x, rms=rms, cast=cast, ulp=0)


@pytest.mark.parametrize(("k", "block"), [(2880, 32), (2880, 64), (720, 16), (3072, 128)])
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_widths(interpreter: Interpreter, rms: str, k: int, block: int) -> None:
    """Wide rows in several tiles, on several warps, the last tile partly masked."""
    for make, ulp in ((gaussian, 4), (integers, 0)):
        x = make(2, k)
        cast = f"e5m2/b{block}/rceil_log2/reciprocal/clamp/swizzled"
        check(interpreter, x, rms=rms, cast=cast, padded=3, ulp=ulp)


def test_tiles_cover_a_row_and_little_else() -> None:
    """Powers of two of at least four blocks; only the last one reaches past the row."""
    for k in (32, 96, 720, 1024, 2880, 3584, 4096, 5120, 6144, 7168, 8192, 14336, 16384, 32768):
        for block in (16, 32, 128):
            for has_gain in (False, True):
                config = row_config(k, block, has_gain)
                span = config.tile * block
                assert config.tile >= 4 and config.tile & (config.tile - 1) == 0
                assert 0 <= config.chunks * span - k < span
                assert span <= max(1024, 4 * block) or config.chunks * span <= 1.2 * k
    # Measured: masked lanes cost less than tiles do, but for the gain at this width.
    assert [row_config(5120, 32, g).chunks for g in (False, True)] == [3, 5]
    # There, in blocks of 16, five tiles spill on sm_120.
    assert row_config(5120, 16, True) == row_config(5120, 16, False)
    assert row_config(3584, 32, True) == row_config(3584, 32, False) == Config(128, 1, 4)


# --- the norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("gain_dtype", (None, F32, torch.bfloat16, torch.float16))
def test_gain_and_rounding(
    interpreter: Interpreter, gain_dtype: torch.dtype | None, rounding: str
) -> None:
    """The absmax is taken behind the gain, or known without a second pass where there is none."""
    gain = None
    if gain_dtype is not None:
        gain = (1 + 0.5 * torch.randn(192, generator=seeded(5))).to(gain_dtype)
    for rms in RMS_KINDS:
        for dtype in (torch.bfloat16, F32):
            x = gaussian(3, 192, dtype=dtype)
            for hw in (0, 1):
                check(interpreter, x, gain=gain, rms=rms, rounding=rounding, hw=hw)


def test_gain_in_any_layout(interpreter: Interpreter) -> None:
    wide = 1 + 0.5 * torch.randn(193, 2, generator=seeded(6))
    x = gaussian(2, 192)
    for gain in (wide[:192, 0], wide[1:, 1].contiguous(), wide.flatten()[1:193]):
        check(interpreter, x, gain=gain)
        check(interpreter, x, gain=gain.bfloat16())


@pytest.mark.parametrize("residual_dtype", (torch.bfloat16, F32))
@pytest.mark.parametrize("x_dtype", (torch.bfloat16, F32))
def test_residual(
    interpreter: Interpreter, x_dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    """The sum rounded as torch rounds it, stored, and normalised."""
    for rms in RMS_KINDS:
        for k in (128, 192):
            x, residual = (
                gaussian(3, k, dtype=x_dtype),
                gaussian(3, k, dtype=residual_dtype, seed=9),
            )
            for hw in (0, 1):
                check(interpreter, x, residual=residual, rms=rms, hw=hw)
    x, residual = special(192, x_dtype), special(192, residual_dtype)[[7, 7, 2, 3, 4, 0, 1, 5]]
    check(interpreter, x, residual=residual, gain=torch.linspace(0.5, 2, 192))


def test_residual_swizzled_with_padding(interpreter: Interpreter) -> None:
    x, residual = gaussian(3, 192), gaussian(3, 192, seed=4)
    cast = MXFP8.replace("plain", "swizzled")
    check(interpreter, x, residual=residual, cast=cast, padded=5)


@pytest.mark.parametrize("dtype", (F32, torch.bfloat16, torch.float64))
def test_eps_tensor(interpreter: Interpreter, dtype: torch.dtype) -> None:
    eps = torch.tensor(0.03, dtype=dtype)
    expected = check(interpreter, gaussian(3, 128), eps_tensor=eps, eps=1e-6)
    other = decomposition(gaussian(3, 128), None, None, None, 1e-6, "p2", 0.41, "f32->f32", MXFP8)
    assert not torch.equal(expected[2], other[2])


@pytest.mark.parametrize("rms", RMS_KINDS)
def test_special_rows_without_eps(interpreter: Interpreter, rms: str) -> None:
    """Mean squares that are zero, subnormal or infinite."""
    for dtype in (torch.bfloat16, F32):
        for element, rule in (("e4m3", "rceil_log2"), ("e2m1", "floor"), ("e2m1", "e4m3")):
            cast = f"{element}/b16/{rule}/reciprocal/clamp/plain"
            x = special(96, dtype)
            x[7] *= 1e-20
            check(interpreter, x, cast=cast, rms=rms, eps=0.0)


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize("outer", (None, 1.0, 0.013, 2.0**-12))
def test_tensor_scale(interpreter: Interpreter, outer: float | None, apply: str) -> None:
    tensor_scale = None if outer is None else torch.tensor(outer)
    cast = NVFP4.replace("reciprocal", apply)
    for rounding in ("f32->f32", "bf16->bf16"):
        _, scale, _ = check(
            interpreter, special(96), tensor_scale=tensor_scale, cast=cast, rounding=rounding
        )
        assert len(bits(scale).unique()) > 3


@pytest.mark.parametrize("ends", ("floor:60", "ceil:1", "even:0:nan", "rceil_exact:120:nan"))
def test_least_and_infinite(interpreter: Interpreter, ends: str) -> None:
    """``least`` keeps exponents up; ``nan`` makes a block with Inf a block of NaN."""
    for apply in APPLIES:
        for element in ("e4m3", "e2m3"):
            cast = f"{element}/b32/{ends}/{apply}/bare/plain"
            x = special(192)
            _, scale, _ = check(interpreter, x, cast=cast, rms="exact")
            # An infinite sum makes rstd zero, and Inf times zero is NaN: give an Inf by the gain.
            gain = torch.ones(192)
            gain[40] = float("inf")
            _, scale, _ = check(interpreter, x, cast=cast, gain=gain)
            assert (int(scale[-1, 1]) == 255) == ends.endswith("nan")
            assert int(scale[0, 3]) == int(ends.split(":")[1])


# --- where rows lie -------------------------------------------------------------------------------


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    wide = gaussian(2, 5, 4, 200, dtype=dtype)
    return {
        "columns": wide[0, 0, :, :96],
        "offset": wide[0, 0, :, 2:98],
        "odd offset": wide[0, 0, :, 1:97],
        "odd stride": gaussian(3, 97, dtype=dtype)[:, :96],
        "rows": wide[:, 1:, 0, :96],
        "transposed": wide[0, :, :, :96].transpose(0, 1),
        "three strides": wide[:, 1:4, 1:3, :96],
        "expanded": wide[0, :2, 0, :96].unsqueeze(1).expand(2, 3, 96),
        "last axis": gaussian(96, 3, dtype=dtype).t(),
        "one axis": wide[0, 0, 0, :96],
        "four axes": wide[:1, :1, :3, 100:196],
        "one row": wide[:1, 2, :1, :96],
        "no row": wide[:0, 0, :, :96],
        "no row either": wide[0, :, :0, :96],
    }


@pytest.mark.parametrize("place", layouts(F32))
def test_strides(interpreter: Interpreter, place: str) -> None:
    for dtype in (torch.bfloat16, F32):
        x = layouts(dtype)[place]
        check(interpreter, x)
        residual = gaussian(*x.shape, seed=3)
        check(interpreter, x, residual=residual, cast=NVFP4)
        check(interpreter, residual, residual=x)
    if x.numel() == 0:
        check(interpreter, x, cast=MXFP8.replace("plain", "swizzled"))


def test_rows_are_read_in_place_where_two_strides_say_it() -> None:
    """The rest is copied, as is what starts at an odd element: loads are of whole pairs.

    A misaligned load is no fault on a processor, so numbers alone would not show it.
    """
    from mxnorm_pass.ops.kernels.launch import loadable, loadable_gain, rows_of

    places = {name: rows_of(x.shape, x.stride()) for name, x in layouts(F32).items()}
    assert places["columns"] == (1, 0, 200)
    assert places["rows"] == (4, 4000, 800)
    assert places["transposed"] == (5, 200, 800)
    assert places["expanded"] == (3, 800, 0)
    copied = set()
    for name, x in layouts(torch.bfloat16).items():
        loaded, _ = loadable(x)
        assert loaded.storage_offset() % 2 == 0 and torch.equal(loaded, x)
        if loaded.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            copied.add(name)
    assert copied == {"odd offset", "odd stride", "three strides", "last axis"}
    gain = loadable_gain(torch.arange(9.0)[1:])
    assert gain is not None and gain.storage_offset() == 0 and gain.tolist() == [*range(1, 9)]


def test_padding_of_swizzled_scales_is_zeroed(interpreter: Interpreter) -> None:
    """Padding rows and columns; the buffer was dirty before."""
    for rows, element, rule in ((3, "e4m3", "floor"), (1, "e2m1", "e4m3")):
        cast = f"{element}/b32/{rule}/reciprocal/clamp/swizzled"
        check(interpreter, integers(rows, 96), cast=cast, ulp=0)


def test_two_tiles_of_swizzled_rows(interpreter: Interpreter) -> None:
    cast = "e2m1/b16/e4m3/reciprocal/clamp/swizzled"
    check(interpreter, integers(131, 96), cast=cast, ulp=0)


# --- the absmax of the whole tensor ---------------------------------------------------------------


@pytest.mark.parametrize("hw", (0, 1, 2))
@pytest.mark.parametrize("rms", RMS_KINDS)
def test_absmax(interpreter: Interpreter, rms: str, hw: int) -> None:
    """Over more rows than programs and fewer; NaN and Inf in a row; a gain; rows apart."""
    for x in (integers(7, 96), integers(2, 80), layouts(F32)["rows"], integers(3, 96)[:0]):
        for gain in (None, torch.linspace(-3, 2, x.shape[-1])):
            ulp = 0 if x.dtype is torch.bfloat16 else 4
            check_absmax(interpreter, x, gain=gain, rms=rms, hw=hw, ulp=ulp)
    for value in ("nan", "inf"):
        x = integers(7, 96)
        x[5, 40] = float(value)
        check_absmax(interpreter, x, rms=rms, hw=hw, ulp=0)


# --- anything -------------------------------------------------------------------------------------


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_options(interpreter: Interpreter, data: Any) -> None:
    draw = data.draw
    element, rule = draw(st.sampled_from(CASTS))
    block = draw(st.sampled_from(BLOCK_SIZES))
    ends = draw(st.sampled_from(("", ":3", ":90:nan"))) if rule != "e4m3" else ""
    layout = draw(st.sampled_from(LAYOUTS))
    cast = (
        f"{element}/b{block}/{rule}{ends}/{draw(st.sampled_from(APPLIES))}/"
        f"{draw(st.sampled_from(SATURATES))}/{layout}"
    )
    k = block * draw(st.integers(1, max(6, 512 // block)))
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    floats = st.sampled_from((torch.bfloat16, F32))
    seed = draw(st.integers(0, 1000))
    make = draw(st.sampled_from((gaussian, integers)))
    residual, gain = None, None
    if draw(st.booleans()):
        residual = gaussian(*lead, k, dtype=draw(floats), seed=seed + 2)
    if draw(st.booleans()):
        gain = torch.randn(k, generator=seeded(seed)).to(draw(floats))
    exact = make is integers and residual is None
    check(
        interpreter,
        make(*lead, k, dtype=draw(floats), seed=seed),
        residual=residual,
        gain=gain,
        eps=draw(st.sampled_from((0.0, 1e-6, 1.0))),
        rms=draw(st.sampled_from(RMS_KINDS)),
        correction=draw(st.sampled_from((0.41, 1.0, 2.5))),
        rounding=draw(st.sampled_from(ROUNDINGS)),
        cast=cast,
        tensor_scale=torch.tensor(0.2) if rule == "e4m3" and draw(st.booleans()) else None,
        hw=draw(st.sampled_from((0, 1, 2))),
        padded=None if layout == "plain" else 6,
        ulp=0 if exact else 4,
    )
