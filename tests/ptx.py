"""An emulator of the PTX in the kernels, written from the text of the PTX ISA (``cvt``, ``mov``).

The conversions to FP4, FP6 and E8M0 exist from sm_100 on: here they are assembled, never executed.
What they give is stated once more in this file, by search in tables of values, and shares nothing
with ``mxnorm_pass.formats`` or with the kernels' integer arithmetic. ``run`` executes the text of
an inline-assembly block as the compiler was given it.

What the ISA says of ``cvt`` with two float32 sources ``d, a, b``:

- ``a`` goes to the upper half of ``d``, ``b`` to the lower; ``d`` is ``.b16``, for e2m1x2 ``.b8``,
  for bf16x2 ``.b32``; FP6 codes stand in the low six bits of their bytes;
- ``.rn``: to nearest, ties to the even code; ``.satfinite``: beyond the largest finite value, Inf
  included, that value with the sign kept;
- NaN: the canonical NaN of the format (E4M3 and E5M2 0x7f, bfloat16 0x7fff, E8M0 0xff); formats
  without one (E2M1, E2M3, E3M2) give their largest value, positive;
- ``.rp`` to E8M0: the least power of two not below, from 2^-127 to 2^127.

``add.rn.bf16x2`` and ``mul.rn.bf16x2`` (sm_90) round the exact result once, keep subnormals, and
give the canonical NaN 0x7fff. ``max.NaN.xorsign.abs.bf16x2`` gives the larger magnitude with the
exclusive or of the signs, and the canonical NaN where one of the two is NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

# name -> exponent bits, mantissa bits, number of finite non-negative codes, code of NaN
_FLOATS = {
    "e4m3": (4, 3, 0x7F, 0x7F),
    "e5m2": (5, 2, 0x7C, 0x7F),
    "e2m3": (2, 3, 0x20, 0x1F),
    "e3m2": (3, 2, 0x20, 0x1F),
    "e2m1": (2, 1, 0x08, 0x07),
}
_REGISTERS = {"r": 32, "f": 32, "h": 16, "l": 64}
"""Constraint letter -> width."""


class UnknownPTX(Exception):
    """The text holds something that is not emulated: it is refused, not guessed at."""


def values(element: str) -> Array:
    """The finite non-negative values of a format, by code, float64."""
    exponent_bits, mantissa_bits, count, _ = _FLOATS[element]
    bias = 2 ** (exponent_bits - 1) - 1
    table = []
    for code in range(count):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if exponent == 0:
            table.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            table.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return np.array(table)


@np.errstate(all="ignore")
def to_nearest(x: Array, element: str) -> Array:
    """``cvt.rn.satfinite``: codes of float32 values, uint64."""
    exponent_bits, mantissa_bits, _, nan_code = _FLOATS[element]
    table = values(element)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    low, high = magnitude - table[above - 1], table[above] - magnitude
    # Neighbouring codes: the even one of the two is the one without the last bit.
    even = np.where(above % 2 == 0, above, above - 1)
    code = np.where(low < high, above - 1, np.where(high < low, above, even))
    sign = np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits)
    return np.where(np.isnan(x), nan_code, code | sign).astype(np.uint64)


@np.errstate(all="ignore")
def to_e8m0(x: Array) -> Array:
    """``cvt.rp.satfinite`` to E8M0: biased exponents of float32 values, uint64."""
    if bool((x < 0).any()):
        raise UnknownPTX("E8M0 has no sign: negative values are not emulated")
    powers = 2.0 ** (np.arange(255) - 127.0)
    code = np.searchsorted(powers, x.astype(np.float64)).clip(0, 254)
    return np.where(np.isnan(x), 255, code).astype(np.uint64)


@np.errstate(all="ignore")
def to_bf16(x: Array) -> Array:
    """``.rn`` to bfloat16: bits of float64 (or float32) values, uint64, rounded once."""
    wide = x.astype(np.float64)
    # Seven bits behind the first, fewer below 2^-126.
    _, exponent = np.frexp(wide)
    step = 2.0 ** (np.maximum(exponent - 1, -126) - 7)
    rounded = (np.rint(wide / step) * step).astype(np.float32)
    bits = rounded.view(np.uint32).astype(np.uint64) >> np.uint64(16)
    return np.where(np.isnan(wide), 0x7FFF, bits).astype(np.uint64)


@dataclass(frozen=True)
class _Conversion:
    convert: Callable[[Array], Array]
    half: int
    """Bits of one of the two results."""


def _nearest(element: str) -> Callable[[Array], Array]:
    return lambda x: to_nearest(x, element)


_CONVERSIONS = {
    **{
        f"cvt.rn.satfinite.{e}x2.f32": _Conversion(_nearest(e), 4 if e == "e2m1" else 8)
        for e in _FLOATS
    },
    "cvt.rp.satfinite.ue8m0x2.f32": _Conversion(to_e8m0, 8),
    "cvt.rn.bf16x2.f32": _Conversion(to_bf16, 16),
}


class _Block:
    """One run of a block: registers by name, each an array of its bits and a width."""

    def __init__(self) -> None:
        self.width: dict[str, int] = {}
        self.bits: dict[str, Array] = {}

    def read(self, operand: str, width: int) -> Array:
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", operand):
            return np.array(int(operand[2:], 16), np.uint64)
        if operand not in self.bits:
            raise UnknownPTX(f"{operand} is read before it is written, or is no register")
        if self.width[operand] != width:
            raise UnknownPTX(f"{operand} has {self.width[operand]} bits, {width} are read")
        return self.bits[operand]

    def floats(self, operand: str) -> Array:
        return self.read(operand, 32).astype(np.uint32).view(np.float32)

    def write(self, operand: str, width: int, bits: Array) -> None:
        if self.width.get(operand) != width:
            raise UnknownPTX(f"{operand} has {self.width.get(operand)} bits, {width} are written")
        self.bits[operand] = bits

    def execute(self, statement: str) -> None:
        opcode, _, rest = statement.partition(" ")
        if opcode == ".reg":
            kind, _, names = rest.strip().partition(" ")
            for name in names.split(","):
                self.width[name.strip()] = int(kind.removeprefix(".b"))
            return
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if o.strip()]
        if opcode in _CONVERSIONS:
            conversion = _CONVERSIONS[opcode]
            target, upper, lower = operands
            halves = [conversion.convert(self.floats(o)) for o in (upper, lower)]
            packed = (halves[0] << np.uint64(conversion.half)) | halves[1]
            self.write(target, 2 * conversion.half, packed)
        elif opcode in _BF16X2:
            target, *sources = operands
            a, b = (self.read(o, 32) for o in sources)
            self.write(target, 32, _packed_bf16(_BF16X2[opcode], a, b))
        elif opcode == "cvt.u32.u16":
            self.write(operands[0], 32, self.read(operands[1], 16))
        elif opcode == "mul.rn.f32x2":
            self.write(operands[0], 64, _multiply(*(self.read(o, 64) for o in operands[1:])))
        elif opcode in ("mov.b32", "mov.b64"):
            self._move(int(opcode[-2:]), *operands)
        else:
            raise UnknownPTX(f"instruction {opcode!r}")

    def _move(self, width: int, target: str, source: str) -> None:
        """Pack or unpack: the first of the parts is the lowest."""
        if source.startswith("{"):
            parts = [p.strip() for p in source.strip("{} ").split(",")]
            each = width // len(parts)
            packed = np.zeros((), np.uint64)
            for i, part in enumerate(parts):
                packed = packed | (self.read(part, each) << np.uint64(i * each))
            self.write(target, width, packed)
        elif target.startswith("{"):
            parts = [p.strip() for p in target.strip("{} ").split(",")]
            each, bits = width // len(parts), self.read(source, width)
            for i, part in enumerate(parts):
                self.write(part, each, (bits >> np.uint64(i * each)) & np.uint64(2**each - 1))
        else:
            self.write(target, width, self.read(source, width))


def _larger(a: Array, b: Array) -> Array:
    magnitude = np.maximum(np.abs(a), np.abs(b))
    return np.where(np.signbit(a) != np.signbit(b), -magnitude, magnitude)


_BF16X2: dict[str, Callable[[Array, Array], Array]] = {
    "add.rn.bf16x2": np.add,
    "mul.rn.bf16x2": np.multiply,
    "max.NaN.xorsign.abs.bf16x2": _larger,
}


def _packed_bf16(operation: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """Both halves, rounded once.

    Products are exact in float64; so are sums, or one term lies so far below the other that it
    does not count.
    """
    result = np.zeros((), np.uint64)
    for shift in (np.uint64(0), np.uint64(16)):
        halves = []
        for packed in (a, b):
            word = (((packed >> shift) & np.uint64(0xFFFF)) << np.uint64(16)).astype(np.uint32)
            halves.append(word.view(np.float32))
        with np.errstate(all="ignore"):
            exact = operation(*(h.astype(np.float64) for h in halves))
        result = result | (to_bf16(exact) << shift)
    return result


def _multiply(a: Array, b: Array) -> Array:
    """``mul.rn.f32x2``: both halves in float32, subnormals kept."""
    result = np.zeros((), np.uint64)
    for shift in (np.uint64(0), np.uint64(32)):
        x, y = (((v >> shift) & np.uint64(0xFFFFFFFF)).astype(np.uint32) for v in (a, b))
        with np.errstate(all="ignore"):
            product = x.view(np.float32) * y.view(np.float32)
        result = result | (np.asarray(product).view(np.uint32).astype(np.uint64) << shift)
    return result


def run(
    text: str,
    constraints: str,
    inputs: Sequence[Array],
    dtypes: Sequence[np.dtype[np.generic]],
    pack: int = 1,
) -> list[Array]:
    """What ``tl.inline_asm_elementwise`` gives for inputs of 32-bit dtypes and one shape.

    Args:
        text: the assembly, ``$0`` and up for its operands.
        constraints: the letters of its outputs (with ``=``), then of its inputs.
        inputs: the arguments; each fills ``pack`` registers with as many elements.
        dtypes: of the results; elements narrower than a register fill it together.
        pack: elements that one run of the block takes of every input.
    """
    letters = [c.strip() for c in constraints.split(",")]
    outputs = [c for c in letters if c.startswith("=")]
    block = _Block()
    for i, letter in enumerate(letters):
        block.width[f"${i}"] = _REGISTERS[letter.removeprefix("=")]
    shape, where = inputs[0].shape, len(outputs)
    for given in inputs:
        if given.dtype.itemsize != 4 or given.shape != shape or given.size % pack:
            raise UnknownPTX(f"an input {given.dtype} {given.shape} in packs of {pack}")
        elements = np.ascontiguousarray(given).view(np.uint32).reshape(-1, pack)
        for i in range(pack):
            block.bits[f"${where}"] = elements[:, i].astype(np.uint64)
            where += 1
    if where != len(letters):
        raise UnknownPTX(f"{len(letters)} constraints for {where} operands")
    for statement in text.strip().removeprefix("{").removesuffix("}").split(";"):
        if statement.strip():
            block.execute(" ".join(statement.split()))

    results, register = [], 0
    for dtype in dtypes:
        each, columns = dtype.itemsize * 8, []
        per_register = max(1, block.width[f"${register}"] // each)
        for _ in range(pack // per_register):
            bits = np.broadcast_to(
                block.read(f"${register}", block.width[f"${register}"]), (given.size // pack,)
            )
            for i in range(per_register):
                columns.append((bits >> np.uint64(i * each)) & np.uint64(2**each - 1))
            register += 1
        unsigned = np.stack(columns, 1).astype(f"u{dtype.itemsize}")
        results.append(unsigned.view(dtype).reshape(shape))
    if register != len(outputs):
        raise UnknownPTX(f"{len(outputs)} output registers, {register} are read")
    return results


@dataclass(frozen=True)
class InlineAssembly:
    """A block as it stands in Triton's IR."""

    text: str
    constraints: str
    pack: int
    inputs: tuple[str, ...]
    """Element types, as the IR names them."""
    results: tuple[np.dtype[np.generic], ...]

    def __call__(self, *inputs: Array) -> list[Array]:
        return run(self.text, self.constraints, inputs, self.results, self.pack)


_RESULTS = {"i8": np.uint8, "i16": np.uint16, "i32": np.int32, "f32": np.float32}
_OPERATION = re.compile(
    r'tt\.elementwise_inline_asm "((?:[^"\\]|\\.)*)" \{constraints = "([^"]*)", '
    r"packed_element = (\d+) : i32, pure = true\} [^:]* : (.*?) -> (.*?)(?: loc\(.*)?$",
    re.MULTILINE,
)


def blocks(ttir: str) -> list[InlineAssembly]:
    """The inline assembly in a text of Triton's IR, each block once."""
    found = []
    for text, constraints, pack, inputs, results in _OPERATION.findall(ttir):
        kinds = [re.findall(r"\b(?:\d+x)*([if]\d+)\b", types) for types in (inputs, results)]
        found.append(
            InlineAssembly(
                re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text),
                constraints,
                int(pack),
                tuple(kinds[0]),
                tuple(np.dtype(_RESULTS[t]) for t in kinds[1]),
            )
        )
    if len(found) != ttir.count("tt.elementwise_inline_asm"):
        raise UnknownPTX("inline assembly whose form in the IR is not known")
    return list(dict.fromkeys(found))
