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
