"""The row kernel compiled for chips that are not here: what is read off its PTX and machine code.

Assembled, never executed. Numbers are tested under the interpreter and by the emulator of PTX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from mxnorm_pass.formats import E8M0_RULES, ELEMENTS, Cast

pytest.importorskip("triton")

from mxnorm_pass.ops.kernels.constants import row_config
from mxnorm_pass.ops.kernels.inspect import (
    ARCHITECTURES,
    Compiled,
    compile_kernel,
    compile_row_kernel,
    count_instructions,
)

BF16, F32 = torch.bfloat16, torch.float32
NEW = ("e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "f32x2")
"""Parts of names of instructions that sm_90 lacks."""

LATENCY_S = 700e-9
IN_FLIGHT = {
    90: 4.8e12 * LATENCY_S / 132,
    100: 8.0e12 * LATENCY_S / 148,
    120: 1.8e12 * LATENCY_S / 188,
}
"""Bytes that a multiprocessor must have asked for to keep memory busy (Little's law): bandwidth of
H200, B200 and RTX PRO 6000 by their datasheets, a generous latency, over the multiprocessors. A
program asks for its whole row at once, so that rows and not warps are what has to be resident: a
few registers more than half of the warps allow cost nothing, a spill would.
"""


@dataclass(frozen=True)
class Variant:
    """A row kernel; the fields are arguments of ``compile_row_kernel``."""

    cast: str
    k: int
    rms: str = "p2"
    rounding: str = "f32->f32"
    x: torch.dtype = BF16
    gain: torch.dtype | None = None
    residual: torch.dtype | None = None
    tensor_scale: bool = False

    def __str__(self) -> str:
        rest = [self.rms, self.rounding.replace("->", "-")]
        rest += ["f32"] * (self.x is F32) + ["gain"] * (self.gain is not None)
        rest += ["residual"] * (self.residual is not None) + ["scaled"] * self.tensor_scale
        return "-".join([self.cast.replace("/", "-"), str(self.k), *rest])

    @property
    def spec(self) -> Cast:
        return Cast.parse(self.cast)


MXFP8 = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
VARIANTS = (
    Variant("e4m3/b32/rceil_log2/reciprocal/clamp/plain", 2048),
    Variant(
        "e4m3/b32/rceil_exact/reciprocal/clamp/swizzled", 5120, "exact", "bf16->bf16", gain=BF16
    ),
    Variant("e4m3/b32/rceil_exact/reciprocal/clamp/swizzled", 16384, residual=BF16),
    Variant("e5m2/b32/floor/divide/clamp/plain", 3584, "p1", residual=BF16),
    Variant("e2m1/b32/even/divide/clamp/swizzled", 2048, x=F32),
    Variant("e2m1/b16/e4m3/reciprocal/clamp/swizzled", 5120, tensor_scale=True),
    Variant("e2m3/b32/ceil/divide/clamp/plain", 3584, gain=F32),
    Variant("e3m2/b32/rceil_exact/reciprocal/bare/plain", 2048, "p1", "bf16->bf16"),
)
WIDTHS = (2048, 3584, 5120, 16384)
MORE = tuple(
    Variant(f"{element}/b{16 if rule == 'e4m3' else 32}/{rule}/{apply}/clamp/{layout}", k, **rest)
    for i, (element, rule) in enumerate(
        [*((e, r) for e in ELEMENTS for r in E8M0_RULES), ("e2m1", "e4m3")]
    )
    for k, rest in list(
        zip(
            WIDTHS,
            (
                {"rms": "p2", "residual": BF16, "gain": BF16, "rounding": "bf16->bf16"},
                {"rms": "exact", "x": F32, "gain": F32},
                {"rms": "p1", "gain": BF16, "rounding": "f32->bf16"},
                {"rms": "p2"},
            ),
            strict=True,
        )
    )[i // 2 % 2 :: 2]
    for apply, layout in [(("reciprocal", "plain"), ("divide", "swizzled"))[i % 2]]
)


@cache
def compiled(arch: int, variant: Variant) -> Compiled:
    return compile_row_kernel(
        arch, variant.cast, variant.k, rms=variant.rms, rounding=variant.rounding, x=variant.x,
        gain=variant.gain, residual=variant.residual, tensor_scale=variant.tensor_scale,
    )  # fmt: skip


def conversions(variant: Variant, arch: int) -> set[str]:
    """Instructions that must be there."""
    element, fp8 = variant.spec.element, not ELEMENTS[variant.spec.element].sub_byte
    wanted = set()
    if fp8 or arch >= 100:
        wanted.add(f"cvt.rn.satfinite.{element}x2.f32")
    if arch >= 100:
        wanted.add("mul.rn.f32x2")
        if variant.spec.rule == "rceil_exact":
            wanted.add("cvt.rp.satfinite.ue8m0x2.f32")
    if "bf16" in variant.rounding:
        wanted.add("cvt.rn.bf16x2.f32")
    if variant.residual is variant.x is BF16:
        wanted.add("add.rn.bf16x2")
    return wanted


def faults(arch: int, variant: Variant) -> Iterator[str]:
    """What is wrong with a kernel, all of it."""
    built = compiled(arch, variant)
    # The chip's own instructions, and none that it lacks.
    if f".target sm_{arch}a" not in built.ptx:
        yield "other target"
    yield from (f"no {name}" for name in conversions(variant, arch) if name not in built.ptx)
    if arch < 100:
        yield from (f"{name} on sm_90" for name in NEW if name in built.ptx)
    # Subnormals count: nothing but the approximate root may flush them, which is given none.
    flushing = {line.split()[0] for line in built.ptx.splitlines() if ".ftz" in line}
    yield from (name for name in flushing - {"rsqrt.approx.ftz.f32"})

    # Rows and gains are loaded in full 16 bytes; codes leave in as many as a thread has of a tile.
    threads, bits = built.warps * 32, 128
    sizes = [d.itemsize for d in (variant.x, variant.residual, variant.gain) if d is not None]
    loads = built.matching(rf"LDG\.E\.(\w\w\.)?{bits}")
    if loads < sum(variant.k * size // (threads * 16) for size in sizes):
        yield f"{loads} loads of 128 bits"
    narrow = built.matching("LDG") - loads
    if narrow > variant.tensor_scale:
        yield f"{narrow} narrower loads"
    block = variant.spec.block_size
    tile = row_config(variant.k, block, variant.gain is not None).tile * block // threads
    wide = min(tile // ELEMENTS[variant.spec.element].per_byte, 16)
    if not built.matching(r"STG\.E" + {16: r"\.(\w\w\.)?128", 8: r"\.(\w\w\.)?64", 4: "$"}[wide]):
        yield f"no store of {wide} bytes"
    if built.spills or built.matching("LDL|STL"):
        yield f"{built.spills} bytes of local memory"
    if built.matching("UBLKCP|UTMA"):
        yield "bulk copies"
    resident = built.occupancy * ARCHITECTURES[arch][0] / built.warps
    asked = resident * variant.k * sum(d.itemsize for d in (variant.x, variant.residual) if d)
    if asked < IN_FLIGHT[arch]:
        yield (
            f"{asked:.0f} bytes in flight, {IN_FLIGHT[arch]:.0f} wanted: occupancy "
            f"{built.occupancy:.2f}, {built.registers} registers on {built.warps} warps"
        )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code(arch: int, variant: Variant) -> None:
    assert not list(faults(arch, variant))


@pytest.mark.slow
@pytest.mark.parametrize("variant", MORE, ids=str)
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a == 100 else pytest.mark.long) for a in ARCHITECTURES]
)
def test_machine_code_of_all_casts(arch: int, variant: Variant) -> None:
    assert not list(faults(arch, variant))


@pytest.mark.parametrize("arch", (100, 120))
@pytest.mark.parametrize("variant", (VARIANTS[0], VARIANTS[5], VARIANTS[6]), ids=str)
def test_new_instructions_save_some(arch: int, variant: Variant) -> None:
    """Integer arithmetic takes more instructions than the conversions of the chip."""
    integers = compile_row_kernel(
        arch, variant.cast, variant.k, rms=variant.rms, gain=variant.gain,
        tensor_scale=variant.tensor_scale, hw=0,
    )  # fmt: skip
    saved = integers.instructions_per_element - compiled(arch, variant).instructions_per_element
    assert saved > 4
    assert not re.search(r"cvt\.\S*(e4m3x2|e2m1x2|e2m3x2)", integers.ptx)


def test_counts_leave_out_padding_and_subroutines() -> None:
    listing = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R16, desc[UR12][R26.64] ;
        /*0020*/             @P0 LDG.E.128 R12, desc[UR12][R26.64+0x1000] ;
        /*0030*/              @UP1 UIADD3 UR5, UR5, UR7, URZ ;
        /*0040*/                   BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_9:
        /*0060*/                   BRA `(.L_x_9) ;
        /*0070*/                   NOP ;
        /*0080*/                   NOP ;
$kernel$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*0090*/                   FADD R1, R1, R1 ;
"""
    counts = count_instructions(listing)
    assert counts == {"LDC": 1, "LDG.E.128": 2, "UIADD3": 1, "BRA": 1, "EXIT": 1}


def test_occupancy() -> None:
    def share(arch: int, warps: int, registers: int) -> float:
        return Compiled(arch, warps, "", "", "", registers, 0, 0, 0).occupancy

    assert share(90, 4, 32) == 1.0
    # 40 registers are 1280 a warp: 12 blocks of 4 warps in 65536.
    assert share(90, 4, 33) == share(90, 4, 40) == 48 / 64
    assert share(120, 4, 40) == 1.0
    assert share(100, 1, 16) == 0.5
    assert share(100, 16, 128) == 0.25


def test_errors_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="arch 80 is not one of 90, 100, 120"):
        compile_row_kernel(80, VARIANTS[0].cast, 2048)
    for arguments, message in (
        ((90, MXFP8, 100), "last axis must be a multiple of the block size 32"),
        ((90, MXFP8, 0), "expected at least one, of 1 to 32768"),
        (("90", MXFP8, 128), "arch '90' is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_row_kernel(*arguments)
    for options, message in (
        ({"rms": "p3"}, "rms 'p3' is not one of p1, p2, exact"),
        ({"x": torch.float16}, "x is torch.float16; allowed are"),
        ({"residual": torch.float64}, "residual is torch.float64; allowed are"),
        ({"hw": 2}, "hw 2: allowed on arch 90 are 0 to 1"),
        ({"tensor_scale": True}, "only the rule 'e4m3'"),
        ({"rows": 0}, "expected at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_row_kernel(90, MXFP8, 128, **options)
    with pytest.raises(ValueError, match=r"is a int: expected a kernel of @triton\.jit"):
        compile_kernel(3, {}, {}, 90)
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        compile_kernel(3, {}, {}, 90)
