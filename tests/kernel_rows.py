"""Rows for the row kernel, and its comparison with the op's decomposition on CPU.

Sums run in another order than on CPU. Where they are exact, in rows of small integers, everything
must be equal bit for bit. Elsewhere rstd may be ``ulp`` off (two orders of a float32 sum over up to
a hundred terms), and all else must be, bit for bit, what the decomposition makes of the kernel's
own rstd. That holds for NaN in FP6 and FP4 too, where the kernel gives the largest code.
"""

from __future__ import annotations

from unittest import mock

import torch
from interpreted import Interpreter
from numerics import assert_same_bytes, bits, ulp_distance
from torch import Tensor

from mxnorm_pass import formats
from mxnorm_pass.formats import Cast, Element, swizzle
from mxnorm_pass.ops.rmsnorm_mxquant import absmax_decomposition, decomposition, parse_rounding

DIRT = 0xA5
"""What ``interpreted_kernels.py`` fills output buffers with."""
MXFP8 = "e4m3/b32/floor/reciprocal/clamp/plain"
F32 = torch.float32


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows of sizes from about 2^-6 to 2^6."""
    size = torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=seeded(seed)))
    return (torch.randn(shape, generator=seeded(seed + 1)) * size).to(dtype)


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows of -8 to 8 times a power of two: every sum over them is exact in float32."""
    lead = torch.Size(shape[:-1])
    powers = torch.exp2(torch.arange(lead.numel()) % 9 - 4.0).view(*lead, 1)
    return (torch.randint(-8, 9, shape, generator=seeded(seed)) * powers).to(dtype)


def special(k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of zeros, NaN, Inf, subnormals, huge values, one zero block, and an ordinary one."""
    x = gaussian(8, k, dtype=dtype)
    x[0] = 0.0
    x[1, 3] = float("nan")
    x[2, k - 1] = float("-inf")
    x[3] *= 1e-39
    x[4] *= 1e36
    x[5, : k // 2] = 0.0
    x[6, 0] = 1e4
    return x


def tokens(block: int, k: int, dtype: torch.dtype = torch.bfloat16, count: int = 8) -> Tensor:
    """Blocks of ``block`` tokens: each of the special rows in one of them, so that columns hold
    ordinary blocks too; in one column a block of zeros.
    """
    x, rows = gaussian(count * block, k, dtype=dtype), special(k, dtype)
    for i in range(min(count, len(rows))):
        x[i * block + (3 * i) % block] = rows[i]
    x[-block:, k // 3] = 0.0
    return x


_encode = formats._encode_sub_byte


def encode_with_nan(scaled: Tensor, element: Element) -> Tensor:
    """NaN as the kernel and the chip give it: formats.py leaves it open."""
    return _encode(scaled, element).masked_fill(scaled.isnan(), element.sign_bit - 1)


def check(
    interpreter: Interpreter,
    x: Tensor,
    *,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    eps_tensor: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    eps: float = 1e-5,
    rms: str = "p2",
    correction: float = 0.41,
    rounding: str = "f32->f32",
    cast: str = MXFP8,
    hw: int = 0,
    padded: int | None = None,
    ulp: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run, compare, and return what the decomposition gives in the plain layout."""
    spec = Cast.parse(cast)
    plain = str(Cast.parse(cast.replace("swizzled", "plain")))
    qdata, scale, rstd, total = interpreter.call(
        "rmsnorm_mxquant", x, residual, gain, eps_tensor, tensor_scale, eps, rms, correction,
        parse_rounding(rounding), hw, cast=cast, padded=padded,
    )  # fmt: skip
    what = f"{cast} {tuple(x.shape)} {rms} {rounding} hw={hw}"
    if residual is None:
        assert total is None
        rows = x
    else:
        rows = x + residual
        assert_same_bytes(total, rows, f"{what}: sum")
    options = (gain, eps_tensor, tensor_scale, eps, rms, correction, rounding, plain)
    expected_rstd = decomposition(rows, *options)[2]
    assert bool((rstd.isnan() == expected_rstd.isnan()).all()), f"{what}: NaN of rstd"
    off = ulp_distance(rstd, expected_rstd).masked_fill(rstd.isnan(), 0)
    assert off.numel() == 0 or int(off.max()) <= ulp, f"{what}: rstd is {int(off.max())} ulp off"

    with (
        mock.patch.object(torch, "rsqrt", lambda _: rstd),
        mock.patch.object(formats, "_encode_sub_byte", encode_with_nan),
    ):
        expected = decomposition(rows, *options)
    assert_same_bytes(qdata, expected[0], f"{what}: codes")
    if spec.layout == "plain":
        assert_same_bytes(scale, expected[1], f"{what}: scales")
        return expected
    blocks = x.shape[-1] // spec.block_size
    wanted = swizzle(expected[1].reshape(-1, blocks))
    if padded is not None:
        # Rows that were not padded to keep what was there.
        columns = -(-blocks // 4) * 4
        ran = torch.arange(len(wanted) // columns)[:, None] < padded
        raw = torch.where(swizzle(ran.expand(-1, columns).byte()) > 0, bits(wanted), DIRT)
        wanted = raw.byte().view(scale.dtype)
    assert_same_bytes(scale, wanted, f"{what}: swizzled scales")
    return expected


def check_absmax(
    interpreter: Interpreter,
    x: Tensor,
    *,
    gain: Tensor | None = None,
    rms: str = "p2",
    hw: int = 0,
    programs: int = 4,
    ulp: int = 4,
) -> None:
    """The absmax kernel, with rounding to bfloat16 behind the gain unless sums are inexact."""
    rounding = "f32->f32" if ulp else "f32->bf16"
    options = (gain, None, 1e-5, rms, 0.41)
    got = interpreter.call(
        "rmsnorm_absmax", x, *options, parse_rounding(rounding), 16, hw, programs=programs
    )
    expected = torch.zeros(())
    if x.numel():
        expected = absmax_decomposition(x, *options, rounding, 16)
    assert got.shape == () and got.dtype is F32
    assert bool(got.isnan()) == bool(expected.isnan())
    assert bool(expected.isnan()) or int(ulp_distance(got, expected)) <= ulp
