"""The column kernel under Triton's interpreter against the op's decomposition on CPU, and compiled
for chips that are not here.

Nothing is summed: everything is equal bit for bit, NaN in FP6 and FP4 included (``kernel_rows.py``
says how).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import Interpreter
from kernel_rows import encode_with_nan, gaussian, seeded, tokens
from numerics import assert_same_bytes, bits
from torch import Tensor

from mxnorm_pass import formats
from mxnorm_pass.formats import APPLIES, BLOCK_SIZES, E8M0_RULES, ELEMENTS, LAYOUTS, SATURATES, Cast
from mxnorm_pass.ops.colwise import decomposition
from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding

pytest.importorskip("triton")

from mxnorm_pass.ops.kernels import cols_launch
from mxnorm_pass.ops.kernels.cols_launch import Tile, tile_of
from mxnorm_pass.ops.kernels.inspect import ARCHITECTURES, Compiled, compile_column_kernel

BF16, F32 = torch.bfloat16, torch.float32
CASTS = [(e, r) for e in ELEMENTS for r in E8M0_RULES] + [("e2m1", "e4m3")]
ROUNDINGS = ("f32->f32", "bf16->bf16", "f32->bf16", "bf16->f32")
MXFP8 = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
SMALL = Tile(16, 4, 2, 4, 2)
"""A tile of few columns, so that a small tensor has several and the last one is masked."""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as running:
        yield running


def check(
    interpreter: Interpreter,
    x: Tensor,
    cast: str = MXFP8,
    *,
    gain: Tensor | None = None,
    rounding: str = "bf16->bf16",
    tensor_scale: Tensor | None = None,
    hw: int = 0,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run, compare, and return what the decomposition gives."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    args = (x, rstd, gain, tensor_scale, parse_rounding(rounding))
    got = interpreter.call("rmsnorm_mxquant_colwise", *args, cast=cast, hw=hw, tile=tile)
    with mock.patch.object(formats, "_encode_sub_byte", encode_with_nan):
        expected = decomposition(x, rstd, gain, tensor_scale, rounding, cast)
    what = f"{cast} {tuple(x.shape)} {rounding} hw={hw}"
    assert_same_bytes(got[1], expected[1], f"{what}: scales")
    assert_same_bytes(got[0], expected[0], f"{what}: codes")
    return expected


@pytest.mark.parametrize(("element", "rule"), CASTS)
def test_every_cast(interpreter: Interpreter, element: str, rule: str) -> None:
    """By integers and by the chip's instructions (emulated by ``ptx.py``), special rows."""
    block = 16 if rule == "e4m3" else 32
    gain = torch.linspace(-2, 2, 14)
    # What sm_90 has are conversions to eight bits.
    for i, hw in enumerate((0, 2) if ELEMENTS[element].sub_byte else (0, 1, 2)):
        apply, saturate = APPLIES[(i + len(rule)) % 2], SATURATES[(i + len(element)) % 2]
        cast = f"{element}/b{block}/{rule}/{apply}/{saturate}/{LAYOUTS[i % 2]}"
        x = tokens(block, 14, (BF16, F32)[i % 2], count=4)
        given = (None, gain, gain.bfloat16())[(i + len(rule)) % 3]
        codes, scale = check(interpreter, x, cast, gain=given, hw=hw, tile=SMALL)
        assert len(bits(codes).unique()) > 8
        assert len(bits(scale).unique()) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_the_table_s_tiles(
    interpreter: Interpreter, block: int, dtype: torch.dtype, layout: str
) -> None:
    """Blocks and columns that are no multiple of the tile's; outputs were dirty before."""
    cast = f"e4m3/b{block}/floor/divide/clamp/{layout}"
    rounding = "bf16->bf16" if dtype is BF16 else "f32->f32"
    rows = 5 * block if block > 32 else 9 * block
    check(interpreter, gaussian(rows, 74, dtype=dtype), cast, rounding=rounding, hw=1)


@pytest.mark.parametrize("hw", (0, 1))
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gain_and_rounding(interpreter: Interpreter, rounding: str, hw: int) -> None:
    wide = 1 + 0.5 * torch.randn(17, 2, generator=seeded(5))
    gains = (None, wide[:16, 0], wide[1:, 1].bfloat16(), wide[:16, 1].half())
    for i, gain in enumerate(gains):
        x = gaussian(32, 16, dtype=(BF16, F32)[(i + hw) % 2])
        check(interpreter, x, gain=gain, rounding=rounding, hw=hw, tile=SMALL)


@pytest.mark.parametrize("apply", APPLIES)
def test_tensor_scale(interpreter: Interpreter, apply: str) -> None:
    cast = f"e2m1/b16/e4m3/{apply}/clamp/plain"
    for outer, hw in ((None, 0), (0.013, 0), (0.013, 1), (2.0**-12, 2)):
        scale = None if outer is None else torch.tensor(outer)
        check(interpreter, tokens(16, 24, count=3), cast, tensor_scale=scale, hw=hw, tile=SMALL)


@pytest.mark.parametrize("ends", ("floor:60", "even:0:nan", "rceil_exact:120:nan"))
def test_least_and_infinite(interpreter: Interpreter, ends: str) -> None:
    for hw in (0, 2):
        cast = f"e3m2/b32/{ends}/reciprocal/clamp/plain"
        gain = torch.ones(24)
        gain[7] = float("inf")
        _, scale = check(interpreter, tokens(32, 24), cast, gain=gain, hw=hw, tile=SMALL)
        assert (int(scale[7, -2]) == 255) == ends.endswith("nan")
        assert int(scale[8, -1]) == int(ends.split(":")[1])


def test_strides(interpreter: Interpreter) -> None:
    wide = gaussian(2, 5, 32, 60)
    for x in (
        wide[:, 2:4, :, :24],
        wide[0, 0, :, 2:26],
        wide[0, 0, :, 1:25],
        wide[:, 1, :, :24],
        wide[:1, 1:2].expand(4, 1, -1, -1)[..., :24],
        gaussian(24, 64).t(),
        gaussian(64, 25)[:, :24],
    ):
        check(interpreter, x, tile=SMALL)


@pytest.mark.parametrize("group", (1, 3, 64))
def test_every_order_of_programs_covers_every_tile(interpreter: Interpreter, group: int) -> None:
    for layout in LAYOUTS:
        cast = f"e5m2/b16/ceil/divide/clamp/{layout}"
        check(interpreter, gaussian(13 * 16, 34), cast, tile=Tile(16, 4, 4, 2, group), hw=1)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_options(interpreter: Interpreter, data: Any) -> None:
    draw = data.draw
    element, rule = draw(st.sampled_from(CASTS))
    block = draw(st.sampled_from((16, 32, 64)))
    ends = draw(st.sampled_from(("", ":3", ":90:nan"))) if rule != "e4m3" else ""
    cast = (
        f"{element}/b{block}/{rule}{ends}/{draw(st.sampled_from(APPLIES))}/"
        f"{draw(st.sampled_from(SATURATES))}/{draw(st.sampled_from(LAYOUTS))}"
    )
    floats = st.sampled_from((BF16, F32))
    seed = draw(st.integers(0, 1000))
    k = 2 * draw(st.integers(1, 40))
    gain = None
    if draw(st.booleans()):
        gain = torch.randn(k, generator=seeded(seed)).to(draw(floats))
    columns, lanes = draw(st.sampled_from((8, 16, 32))), draw(st.sampled_from((2, 4)))
    check(
        interpreter,
        gaussian(block * draw(st.integers(1, 6)), k, dtype=draw(floats), seed=seed),
        cast,
        gain=gain,
        rounding=draw(st.sampled_from(ROUNDINGS)),
        tensor_scale=torch.tensor(0.2) if rule == "e4m3" and draw(st.booleans()) else None,
        hw=draw(st.sampled_from((0, 1, 2))),
        tile=Tile(columns, draw(st.sampled_from((4, 8))), lanes, 4, draw(st.integers(1, 3))),
    )


# --- compiled -------------------------------------------------------------------------------------

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (MXFP8, {"gain": BF16}),
    ("e4m3/b32/rceil_exact/reciprocal/clamp/swizzled", {}),
    ("e5m2/b64/floor/divide/clamp/plain", {"x": F32, "rounding": "f32->f32", "gain": F32}),
    ("e2m1/b32/even/divide/clamp/swizzled", {"k": 2880}),
    ("e2m1/b16/e4m3/reciprocal/clamp/swizzled", {"tensor_scale": True}),
    ("e3m2/b128/rceil_exact/reciprocal/clamp/plain", {"rounding": "f32->f32"}),
)


@cache
def compiled(arch: int, variant: int) -> Compiled:
    cast, options = VARIANTS[variant]
    return compile_column_kernel(arch, cast, **{"k": 4096, "rounding": "bf16->bf16", **options})


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=[v[0] for v in VARIANTS])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiled(arch: int, variant: int) -> None:
    """Wide loads and stores, the chip's conversions, nothing spilled, registers for the loads that
    have to be in flight: 32 kB a multiprocessor cover 700 ns of 4.8 TB/s over 132 of them.
    """
    cast, built = Cast.parse(VARIANTS[variant][0]), compiled(arch, variant)
    assert built.spills == 0
    fp8 = cast.element in ("e4m3", "e5m2")
    if fp8 or arch >= 100:
        assert f"cvt.rn.satfinite.{cast.element}x2.f32" in built.ptx
    if arch >= 100 and cast.rule == "rceil_exact":
        assert "cvt.rp.satfinite.ue8m0x2.f32" in built.ptx
    wide = VARIANTS[variant][1].get("x") is F32
    loads = built.elements * (4 if wide else 2) // 16 // (32 * built.warps)
    assert built.matching(r"LDG\.E\.(EF\.)?128") >= loads
    codes = built.elements // ELEMENTS[cast.element].per_byte // (32 * built.warps)
    stores = {size: built.matching(rf"STG\.E\.{size}") for size in (128, 64)}
    assert stores[128] * 16 + stores[64] * 8 >= codes
    assert stores[64] == 0 or codes < 16 or cast.block_size == 16
    resident = built.occupancy * ARCHITECTURES[arch][0] / built.warps
    assert resident * built.elements * (4 if wide else 2) >= 32 << 10


def test_compiled_for_what_is_never_launched() -> None:
    for options, message in (
        ({"arch": 80}, "arch 80 is not one of 90, 100, 120"),
        ({"k": 33}, "odd number of elements"),
        ({"rows": 33}, "33 rows are no multiple"),
        ({"hw": 2}, "hw 2: allowed on arch 90 are 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_column_kernel(**{"arch": 90, "cast": MXFP8, "k": 64, **options})


def test_one_tile_per_format() -> None:
    """From a table, never from a timing or the number of rows; threads hold at most 16 loads."""
    for block in BLOCK_SIZES:
        for x in (BF16, F32):
            for out in (BF16, F32):
                tile = tile_of(block, x, out)
                bytes_ = tile.columns * tile.blocks * block * x.itemsize
                assert bytes_ // 16 // (32 * tile.warps) <= 16
                assert tile.blocks % 4 == 0 and tile.blocks % tile.warps == 0
                # One row's part of a warp's load is as long as the lanes that do not share tokens.
                assert tile.columns * x.itemsize == 16 * (32 // tile.lanes)
    assert cols_launch.tiles(9, 4096, Cast.parse(MXFP8), Tile(64, 8, 4, 4, 4)) == 2 * 64
