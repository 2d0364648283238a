"""Comparisons that hold for NaN and for eight-bit dtypes, where ``torch.equal`` does not."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor as integers of the same width."""
    return t.contiguous().view(_INTEGER[t.element_size()])


def differing(got: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype differ bitwise; any NaN equals any NaN.

    The sign of zero counts. Works for float8, where comparison operators may be missing.
    """
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    assert got.dtype is expected.dtype, f"dtype {got.dtype}, not {expected.dtype}"
    different = bits(got) != bits(expected)
    if got.dtype.is_floating_point:
        both_nan = got.float().isnan() & expected.float().isnan()
        different = different & ~both_nan
    return different


def assert_same_bytes(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal bit for bit (see :func:`differing`); says how many are not, and the first."""
    wrong = differing(got, expected)
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {where}: "
            f"got {int(bits(got)[where]):#x}, expected {int(bits(expected)[where]):#x}"
        )


def is_nan_scale(scale: Tensor) -> Tensor:
    """Where block scales are NaN: byte 255 of E8M0 (uint8), or a NaN of E4M3."""
    return scale == 255 if scale.dtype is torch.uint8 else scale.float().isnan()


def assert_same_cast(
    got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str = ""
) -> None:
    """Equal bit for bit: pairs of codes and block scales (plain layout, uint8 or E4M3).

    FP6 and FP4 (codes in uint8) have no NaN: what stands in a block whose scale is NaN means
    nothing and is not compared. Everything else is.
    """
    (codes, scale), (expected_codes, expected_scale) = got, expected
    assert_same_bytes(scale, expected_scale, f"{what} scale")
    if codes.dtype is torch.uint8:
        nan = is_nan_scale(scale).repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)
        codes, expected_codes = codes.masked_fill(nan, 0), expected_codes.masked_fill(nan, 0)
    assert_same_bytes(codes, expected_codes, f"{what} codes")


def sqnr(expected: Tensor, got: Tensor) -> float:
    """Signal to quantisation noise in dB, in float64; inf where equal, nan where NaN occurs."""
    signal, noise = expected.double(), (expected.double() - got.double())
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Number of representable values from ``a`` to ``b`` (float32 or bfloat16), as int64.

    +0 and -0 are one value; the distance of a NaN is meaningless.
    """
    assert a.dtype is b.dtype

    def ordinal(t: Tensor) -> Tensor:
        i = bits(t).long()
        low = -(1 << (8 * t.element_size() - 1))
        return torch.where(i < 0, low - i, i)

    return (ordinal(a) - ordinal(b)).abs()
