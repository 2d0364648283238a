"""What the child process of ``interpreted.py`` runs: kernels under Triton's interpreter.

``TRITON_INTERPRET`` must be set before this module is imported. Inline assembly, which the
interpreter does not have, is run by the emulator in ``ptx.py``: that covers ``HW`` 1 and 2.
"""

from __future__ import annotations

import os
import types
from typing import Any
from unittest import mock

import numpy as np
import ptx
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from mxnorm_pass.formats import ELEMENTS, Cast
from mxnorm_pass.ops.kernels import cols_launch, convert, launch
from mxnorm_pass.ops.kernels.constants import bits_of, late_limits

assert os.environ.get("TRITON_INTERPRET") == "1"

DIRT = 0xA5
"""Byte that fills output buffers before a launch: what a kernel leaves unwritten shows."""


# --- the interpreter's gaps -----------------------------------------------------------------------


def _inline_asm(
    self: Any, text: str, constraints: str, args: Any, types_: Any, pure: bool, pack: int
) -> Any:
    dtypes = [interpreter._get_np_dtype(t.scalar) for t in types_]
    arrays = [np.asarray(a.data) for a in args]
    results = ptx.run(text, constraints, arrays, [np.dtype(d) for d in dtypes], pack)
    handles = [interpreter.TensorHandle(r, t.scalar) for r, t in zip(results, types_, strict=True)]
    return types.SimpleNamespace(get_result=handles.__getitem__)


interpreter.InterpreterBuilder.create_inline_asm = _inline_asm

_reduce = interpreter.ReduceOps.apply_impl


def _apply_reduce(self: Any, given: Any) -> Any:
    """The maxima that keep NaN, at once and not by one Python call an element."""
    if self.combine_fn.__name__ == convert.max_bf16x2.__name__:
        words = np.ascontiguousarray(given[0].handle.data)
        # As integers NaN is above Inf, Inf above all else.
        halves = words.view(np.uint16).reshape(*words.shape, 2) & 0x7FFF
        largest = np.ascontiguousarray(np.max(halves, axis=self.axis)).view(np.int32)[..., 0]
        return self.to_tensor(largest, given[0].dtype)
    if self.combine_fn.__name__ == convert.nan_max.__name__:
        return self.to_tensor(np.max(given[0].handle.data, axis=self.axis), given[0].dtype)
    return _reduce(self, given)


interpreter.ReduceOps.apply_impl = _apply_reduce

# Every call of a device function patches triton.language anew: done here once for all modules whose
# functions are called. Nor does anybody read the checks of overflow. Both take half of the time.
for _function in (convert.round_bf16.fn, tl.zeros.fn):
    interpreter._patch_lang(_function)
interpreter._patch_lang = lambda _: types.SimpleNamespace(restore=lambda: None)
TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


# --- parts of convert.py --------------------------------------------------------------------------


@triton.jit
def _load(x, pairs):
    return convert.pairs_of(convert.load_words(x, pairs, None, ""))


@triton.jit
def _byte_kernel(
    x, out, N: tl.constexpr, RULE: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    MAX_BITS: tl.constexpr, RECIPROCAL: tl.constexpr, LATE: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    byte = convert.e8m0_byte(tl.load(x + i), RULE, MANTISSA_BITS, MAX_BITS, RECIPROCAL, LATE, HW)
    tl.store(out + i, byte)


@triton.jit
def _factor_kernel(byte, absmax, out, N: tl.constexpr, APPLY: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, convert.e8m0_factor(tl.load(byte + i), tl.load(absmax + i), APPLY))


@triton.jit
def _e4m3_kernel(x, tensor_scale, codes, wide, N: tl.constexpr, MAX: tl.constexpr):
    i = tl.arange(0, N)
    code, value = convert.e4m3_scale(tl.load(x + i), tl.load(tensor_scale), MAX)
    tl.store(codes + i, code)
    tl.store(wide + i, value)


@triton.jit
def _encode_kernel(
    x, out, N: tl.constexpr, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    MAX_BITS: tl.constexpr, CLAMP: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    low, high = _load(x, i)
    codes = convert.encode_pairs(low, high, EXPONENT_BITS, MANTISSA_BITS, MAX_BITS, CLAMP, HW)
    tl.store(out.to(tl.pointer_type(codes.dtype)) + i, codes)


@triton.jit
def _round_kernel(x, out, N: tl.constexpr, HW: tl.constexpr):
    i = tl.arange(0, N)
    low, high = _load(x, i)
    low, high = convert.round_bf16(low, high, HW)
    convert.store_words(
        out, i, convert.words_of(low, high, out.dtype.element_ty == tl.float32), None
    )


@triton.jit
def _scaled_kernel(x, factor, out, N: tl.constexpr, HW: tl.constexpr):
    i = tl.arange(0, N)
    low, high = _load(x, i)
    low, high = convert.scaled_pairs(low, high, tl.load(factor + i), HW)
    convert.store_words(
        out, i, convert.words_of(low, high, out.dtype.element_ty == tl.float32), None
    )


@triton.jit
def _absmax_kernel(x, out, N: tl.constexpr, HALF: tl.constexpr, HW: tl.constexpr):
    i = tl.arange(0, N)
    low, high = _load(x, i[:, None] * HALF + tl.arange(0, HALF)[None, :])
    tl.store(out + i, convert.block_absmax(low, high, HW))


def e8m0_byte(x: Tensor, element: str, rule: str, hw: int) -> Tensor:
    e, out = ELEMENTS[element], torch.zeros(len(x), dtype=torch.int32)
    late = late_limits(e) if rule == "rceil_log2" else 0
    _byte_kernel[(1,)](x, out, len(x), rule, e.mantissa_bits, bits_of(e.max), 1 / e.max, late, hw)
    return out


def e8m0_factor(byte: Tensor, absmax: Tensor, apply: str) -> Tensor:
    out = torch.zeros(len(byte))
    _factor_kernel[(1,)](byte, absmax, out, len(byte), apply)
    return out


def e4m3_scale(x: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    codes, wide = torch.zeros(len(x), dtype=torch.int32), torch.zeros(len(x))
    _e4m3_kernel[(1,)](x, tensor_scale, codes, wide, len(x), ELEMENTS["e2m1"].max)
    return codes, wide


def encode_pairs(x: Tensor, element: str, clamp: bool, hw: int) -> Tensor:
    """Bytes as they are stored: FP4 two codes to a byte."""
    e = ELEMENTS[element]
    out = torch.zeros(len(x) // e.per_byte, dtype=torch.uint8)
    bits = (e.exponent_bits, e.mantissa_bits, bits_of(e.max))
    _encode_kernel[(1,)](x, out, len(x) // 2, *bits, clamp, hw)
    return out


def round_bf16(x: Tensor, dtype: torch.dtype, hw: int) -> Tensor:
    """Stored as ``dtype``, float32 or bfloat16."""
    out = torch.zeros(len(x), dtype=dtype)
    _round_kernel[(1,)](x, out, len(x) // 2, hw)
    return out


def scaled_pairs(x: Tensor, factor: Tensor, hw: int) -> Tensor:
    """``x`` times one factor per pair."""
    out = torch.zeros(len(x))
    _scaled_kernel[(1,)](x, factor, out, len(x) // 2, hw)
    return out


def block_absmax(x: Tensor, hw: int) -> Tensor:
    out = torch.zeros(len(x))
    _absmax_kernel[(1,)](x, out, len(x), x.shape[1] // 2, hw)
    return out


# --- the row kernel -------------------------------------------------------------------------------


_new_empty = Tensor.new_empty


def _dirty(self: Tensor, size: Any, **options: Any) -> Tensor:
    if not isinstance(size, (tuple, list)):
        # The interpreter's own call.
        return _new_empty(self, size, **options)
    dtype, shape = options.get("dtype", self.dtype), torch.Size(size)
    raw = torch.full((shape.numel() * dtype.itemsize,), DIRT, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def rmsnorm_mxquant(
    *args: Any, cast: str, padded: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``launch.rmsnorm_mxquant`` with dirty outputs; no more than ``padded`` rows are padded to."""
    grid_rows = launch.grid_rows

    def fewer(rows: Any, spec: Cast) -> Any:
        wanted = grid_rows(rows, spec)
        return wanted if padded is None else min(padded, wanted)

    with (
        mock.patch.object(launch, "grid_rows", fewer),
        mock.patch.object(Tensor, "new_empty", _dirty),
        np.errstate(all="ignore"),
    ):
        *rest, hw = args
        result: tuple[Tensor, Tensor, Tensor, Tensor | None] = launch.rmsnorm_mxquant(
            *rest, Cast.parse(cast), hw
        )
    return result


def rmsnorm_absmax(*args: Any, programs: int) -> Tensor:
    """``launch.rmsnorm_absmax`` by as few as ``programs`` programs, with dirty partial results."""
    with (
        mock.patch.object(launch, "PROGRAMS", programs),
        mock.patch.object(Tensor, "new_empty", _dirty),
        np.errstate(all="ignore"),
    ):
        result: Tensor = launch.rmsnorm_absmax(*args)
    return result


# --- the column kernel ----------------------------------------------------------------------------


def rmsnorm_mxquant_colwise(*args: Any, cast: str, hw: int, tile: Any) -> tuple[Tensor, Tensor]:
    """``cols_launch.rmsnorm_mxquant_colwise`` with dirty outputs."""
    with mock.patch.object(Tensor, "new_empty", _dirty), np.errstate(all="ignore"):
        result: tuple[Tensor, Tensor] = cols_launch.rmsnorm_mxquant_colwise(
            *args, Cast.parse(cast), hw, tile
        )
    return result
