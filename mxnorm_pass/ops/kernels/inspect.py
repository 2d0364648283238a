"""What a chip would run: kernels compiled for a named architecture, without having one.

Triton and the assembler that comes with it need no GPU. :func:`compile_row_kernel` compiles what
:func:`.launch.rmsnorm_mxquant` would launch, :func:`compile_kernel` any Triton kernel; both return
the PTX, the machine code, and what can be read off it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mxnorm_pass.formats import Cast
from mxnorm_pass.ops import colwise
from mxnorm_pass.ops.kernels.constants import MAX_COLUMNS
from mxnorm_pass.ops.rmsnorm_mxquant import Options, check, check_residual, parse_rounding

ARCHITECTURES: dict[int, tuple[int, int]] = {90: (64, 32), 100: (64, 32), 120: (48, 24)}
"""Compute capability -> warps and blocks that a multiprocessor holds (CUDA programming guide).

Each is compiled with its own features: for sm_90a, sm_100a, sm_120a.
"""
REGISTERS = 65536
"""32-bit registers of a multiprocessor, on all of these."""

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
}
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_RESOURCE = re.compile(r"(REG|STACK|SHARED|LOCAL):(\d+)")


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture."""

    arch: int
    warps: int
    ir: str = field(repr=False)
    """Triton's IR before any layout was chosen (TTIR): inline assembly stands in it as written."""
    ptx: str = field(repr=False)
    sass: str = field(repr=False)
    registers: int
    """Per thread."""
    spills: int
    """Bytes of local memory per thread: registers that were spilled, and nothing else here."""
    shared: int
    """Bytes of shared memory."""
    elements: int
    """Elements that one program reads; 0 where it was not said."""

    @cached_property
    def counts(self) -> Counter[str]:
        """Instructions by name, each once: a loop's body counts once.

        Left out are NOP behind the end, the branch to itself there, and subroutines, which are the
        slow paths of division.
        """
        return count_instructions(self.sass)

    @property
    def instructions(self) -> int:
        """Instructions of one thread."""
        return self.counts.total()

    @property
    def instructions_per_element(self) -> float:
        """Instructions of all threads per element of a row."""
        return self.instructions * self.warps * 32 / self.elements

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's warps that its registers and its block limit allow."""
        most_warps, most_blocks = ARCHITECTURES[self.arch]
        # Registers are given out to a warp in units of 256.
        per_warp = -(-self.registers * 32 // 256) * 256
        blocks = min(REGISTERS // per_warp // self.warps, most_blocks, most_warps // self.warps)
        return blocks * self.warps / most_warps

    def matching(self, pattern: str) -> int:
        """How many instructions have names that start with what the expression says."""
        return sum(n for name, n in self.counts.items() if re.match(pattern, name))


def count_instructions(sass: str) -> Counter[str]:
    """Instructions by name in a listing of nvdisasm: see :attr:`Compiled.counts`."""
    counts: Counter[str] = Counter()
    for line in sass.splitlines():
        if re.match(r"\$\S*__internal_\S*:", line):
            # Subroutines stand behind the kernel.
            break
        found = _INSTRUCTION.match(line)
        if found and found[1] != "NOP":
            counts[found[1]] += 1
    # The branch to itself behind the last EXIT.
    if counts["BRA"]:
        counts["BRA"] -= 1
    return +counts


def _check_arch(arch: int) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(map(str, ARCHITECTURES))}")


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int,
    *,
    divisible: tuple[str, ...] = (),
    elements: int = 0,
    **options: Any,
) -> Compiled:
    """Compile a Triton kernel for ``arch``.

    Args:
        kernel: what ``@triton.jit`` returned.
        signature: Triton's type of every argument by name, ``constexpr`` for ``constants``.
        constants: values of the arguments that are compile-time constants.
        arch: a key of :data:`ARCHITECTURES`.
        divisible: arguments known to be divisible by 16 (pointers: aligned to 16 bytes).
        elements: elements that one program reads, for :attr:`Compiled.instructions_per_element`.
        options: Triton's own, such as ``num_warps`` (by default 4) and ``num_stages``.

    Raises:
        ImportError: if triton is not installed.
        ValueError: for an architecture or a kernel that cannot be compiled here.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise ImportError("looking at kernels needs triton: pip install triton") from error
    _check_arch(arch)
    if not isinstance(kernel, JITFunction):
        raise ValueError(
            f"{kernel!r} is a {type(kernel).__name__}: expected a kernel of @triton.jit, defined "
            "without TRITON_INTERPRET"
        )
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        dict(signature),
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        sass = _output(tools / "nvdisasm", "-c", cubin)
        usage = _output(tools / "cuobjdump", "-res-usage", cubin)
    resources = {name: int(value) for name, value in _RESOURCE.findall(usage)}
    return Compiled(
        arch=arch,
        warps=built.metadata.num_warps,
        ir=built.asm["ttir"],
        ptx=built.asm["ptx"],
        sass=sass,
        registers=resources["REG"],
        spills=resources["STACK"] + resources["LOCAL"],
        shared=built.metadata.shared,
        elements=elements,
    )


def _output(tool: Path, *args: str | Path) -> str:
    done = subprocess.run([tool, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def compile_row_kernel(
    arch: int,
    cast: str,
    k: int,
    *,
    rms: str = "p2",
    rounding: str = "f32->f32",
    x: torch.dtype = torch.bfloat16,
    gain: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    tensor_scale: bool = False,
    rows: int = 4096,
    hw: int | None = None,
) -> Compiled:
    """Compile what is launched for contiguous rows ``[rows, k]``.

    Args:
        arch: a key of :data:`ARCHITECTURES`.
        cast: a :class:`mxnorm_pass.formats.Cast` as text.
        k: elements of a row.
        rms: ``p1``, ``p2`` or ``exact``.
        rounding: such as ``bf16->bf16``, see :func:`mxnorm_pass.ops.rmsnorm_mxquant`.
        x: dtype of the rows.
        gain: dtype of the gain, None for no gain.
        residual: dtype of the residual, None for none.
        tensor_scale: whether NVFP4's per-tensor scale is given.
        rows: only whether it is divisible by 16 matters.
        hw: which instructions to use; by default those that ``arch`` has, see :mod:`.convert`.

    Raises:
        ValueError: for what is never launched, naming what is allowed.
        ImportError: without Triton.
    """

    def tensor(dtype: torch.dtype | None, *shape: int) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")

    try:
        from mxnorm_pass.ops.kernels import launch
        from mxnorm_pass.ops.kernels.rows import rmsnorm_mxquant_kernel
    except ImportError as error:
        raise ImportError("looking at kernels needs triton: pip install triton") from error
    _check_arch(arch)
    hw = _instructions(arch, hw)
    if not (0 < k <= MAX_COLUMNS and rows > 0):
        raise ValueError(f"rows [{rows}, {k}]: expected at least one, of 1 to {MAX_COLUMNS}")
    recorder = _Recorder(rmsnorm_mxquant_kernel)
    given, weight = tensor(x, rows, k), tensor(gain, k)
    added, outer = tensor(residual, rows, k), tensor(torch.float32) if tensor_scale else None
    assert given is not None
    check(given, Options(weight, None, outer, 1e-6, rms, 0.4, rounding, cast))
    if added is not None:
        check_residual(given, added)
    # The launch itself says what it launches, so that nothing here can differ from it.
    with mock.patch.object(launch, "rmsnorm_mxquant_kernel", recorder):
        launch.rmsnorm_mxquant(
            given,
            added,
            weight,
            None,
            outer,
            1e-6,
            rms,
            0.4,
            parse_rounding(rounding),
            Cast.parse(cast),
            hw,
        )
    signature, constants, divisible = recorder.specialised()
    return compile_kernel(
        recorder.kernel,
        signature,
        constants,
        arch,
        divisible=divisible,
        elements=k,
        **recorder.options,
    )


def compile_column_kernel(
    arch: int,
    cast: str,
    k: int,
    *,
    rounding: str = "f32->f32",
    x: torch.dtype = torch.bfloat16,
    gain: torch.dtype | None = None,
    tensor_scale: bool = False,
    rows: int = 16384,
    hw: int | None = None,
) -> Compiled:
    """Compile what the cast along tokens launches for contiguous rows ``[rows, k]``.

    Arguments and errors are those of :func:`compile_row_kernel`.
    """
    try:
        from mxnorm_pass.ops.kernels import cols_launch
        from mxnorm_pass.ops.kernels.cols import rmsnorm_mxquant_colwise_kernel
    except ImportError as error:
        raise ImportError("looking at kernels needs triton: pip install triton") from error
    _check_arch(arch)
    hw = _instructions(arch, hw)
    if k % 2:
        raise ValueError(f"rows [{rows}, {k}]: an odd number of elements is never launched")

    def tensor(dtype: torch.dtype | None, *shape: int) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")

    given, rstd = tensor(x, rows, k), tensor(torch.float32, rows, 1)
    weight, outer = tensor(gain, k), tensor(torch.float32) if tensor_scale else None
    assert given is not None and rstd is not None
    spec = colwise.check(given, rstd, colwise.ColumnOptions(weight, outer, rounding, cast))
    recorder = _Recorder(rmsnorm_mxquant_colwise_kernel)
    how = parse_rounding(rounding)
    with mock.patch.object(cols_launch, "rmsnorm_mxquant_colwise_kernel", recorder):
        cols_launch.rmsnorm_mxquant_colwise(given, rstd, weight, outer, how, spec, hw)
    signature, constants, divisible = recorder.specialised()
    tile = cols_launch.tile_of(spec.block_size, x, how[1])
    return compile_kernel(
        recorder.kernel,
        signature,
        constants,
        arch,
        divisible=divisible,
        elements=tile.columns * tile.blocks * spec.block_size,
        **recorder.options,
    )


def _instructions(arch: int, hw: int | None) -> int:
    most = 2 if arch >= 100 else 1
    if hw is not None and hw not in range(most + 1):
        raise ValueError(f"hw {hw!r}: allowed on arch {arch} are 0 to {most}")
    return most if hw is None else hw


class _Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> _Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        names = self.kernel.arg_names
        self.arguments = dict(zip(names, args, strict=False))
        self.arguments |= {name: v for name, v in kwargs.items() if name in names}
        self.options = {name: v for name, v in kwargs.items() if name not in names}

    def specialised(self) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
        """Signature, constants and arguments divisible by 16, as a launch would infer them."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible: list[str] = []
        for param in self.kernel.params:
            name, value = param.name, self.arguments[param.name]
            special = not param.do_not_specialize
            if (
                param.is_constexpr
                or value is None
                or (special and type(value) is int and value == 1)
            ):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = _POINTERS[value.dtype]
                # What an allocator returns is aligned.
                divisible.append(name)
            elif isinstance(value, int):
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if special and value % 16 == 0:
                    divisible.append(name)
            else:
                signature[name] = "fp32"
        return signature, constants, tuple(divisible)
