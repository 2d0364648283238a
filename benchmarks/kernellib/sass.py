"""Machine code of any Triton kernel for a chip that is not there, and what it would take to run."""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mxnorm_pass.ops.kernels.inspect import Compiled, compile_kernel

# A B200 by its maker's figures: bandwidth, multiprocessors, schedulers in each, clock.
BANDWIDTH = 8e12
MULTIPROCESSORS, SCHEDULERS, CLOCK = 148, 4, 1.85e9
ISSUE = MULTIPROCESSORS * SCHEDULERS * CLOCK

MIX: tuple[tuple[str, str], ...] = (
    ("loads", r"LDG|LD\b|LD\.|LDC"),
    ("stores", r"STG|ST\b|ST\."),
    ("shared", r"LDS|STS|LDSM|STSM|ATOMS"),
    ("barriers, shuffles", r"BAR|SHFL|WARPSYNC|BSSY|BSYNC|REDUX|CREDUX|MEMBAR|DEPBAR|SYNCS|VOTE"),
    ("conversions", r"F2F|F2I|I2F|F2FP|I2FP|F2IP|HADD2\.F32|HADD2\.BF16|FRND"),
    ("floating point", r"F[A-Z]|MUFU|H(ADD|MUL|FMA|MNMX|SET)|D(ADD|MUL|FMA|SETP)"),
    (
        "integer",
        r"U?I[A-Z]|U?LOP|U?SHF|U?SEL|U?PRMT|U?LEA|V(IADD|IMNMX|OTE)|U?PLOP|U?FLO|U?POPC|LOP|SGXT|BMSK|R2UR",
    ),
    ("moves, control", r"."),
)

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")


def mix(compiled: Compiled) -> dict[str, int]:
    """Instructions by kind: the first of ``MIX`` that a name starts with."""
    totals: Counter[str] = Counter()
    for name, count in compiled.counts.items():
        kind = next(k for k, pattern in MIX if re.match(pattern, name))
        totals[kind] += count
    return {kind: totals[kind] for kind, _ in MIX}


def issued(compiled: Compiled, trips: int) -> tuple[float, int]:
    """Instructions that a warp issues, each loop taken ``trips`` times; and the number of loops."""
    places: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in compiled.sass.splitlines():
        if re.match(r"\$\S*__internal_\S*:", line):
            break
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(places)
        found = _LINE.match(line)
        if not found or found[1] == "NOP":
            continue
        places.append(found[1])
        target = re.search(r"`\((\.L_x_\d+)\)", found[2])
        # The branch to itself at the end is no loop.
        if found[1].startswith("BRA") and target and target[1] in labels:
            start = labels[target[1]]
            if start < len(places) - 1:
                loops.append((start, len(places)))
    total = float(compiled.instructions)
    total += sum((end - start) * (trips - 1) for start, end in loops)
    return total, len(loops)


def seconds(
    moved: float, warp_instructions: float, bandwidth: float = BANDWIDTH, issue: float = ISSUE
) -> tuple[float, float]:
    """By memory and by issue slots, of a B200 unless said; the longer one bounds the kernel."""
    return moved / bandwidth, warp_instructions / issue


@dataclass
class Generated:
    """One kernel of Inductor's output code, compiled."""

    name: str
    compiled: Compiled
    config: str
    programs: int | None
    loops: int
    warp_instructions: float | None


def compile_generated(
    name: str,
    function: str,
    source: str,
    config: dict[str, Any] | None,
    arch: int,
    constants: dict[str, Any] | None = None,
) -> Generated:
    """Compile a kernel as Inductor would, for another chip.

    Args:
        name: for the report.
        function: the function's name in ``source``.
        source: with the decorators that Inductor gives it.
        config: what was chosen where it ran; the first of the candidates, if None.
        arch: as in ``compile_kernel``.
        constants: of its compile-time constants, those to change.
    """
    tuner = getattr(_load(source), function)
    meta = tuner.triton_meta
    chosen = tuner.configs[0]
    kwargs, warps, stages = dict(chosen.kwargs), chosen.num_warps, chosen.num_stages
    remark = "" if len(tuner.configs) == 1 else f"first of {len(tuner.configs)}"
    if config is not None:
        kwargs, warps, stages = dict(config["kwargs"]), config["num_warps"], config["num_stages"]
        remark = "as chosen"
    types = dict(meta["signature"])
    values = {**meta["constants"], **kwargs, **(constants or {})}
    values = {a: v for a, v in values.items() if types.get(a) == "constexpr"}
    names = tuner.fn.arg_names
    compiled = compile_kernel(
        tuner.fn,
        types,
        values,
        arch,
        divisible=tuple(names[index[0]] for index in meta["configs"][0]),
        num_warps=warps,
        num_stages=stages,
        debug=True,
        sanitize_overflow=False,
        enable_fp_fusion=meta.get("enable_fp_fusion", True),
    )
    programs = _programs(source, kwargs, tuner.inductor_meta.get("grid_type", ""))
    rows = re.search(r"^    r0_numel = (\d+)$", source, re.M)
    block = kwargs.get("R0_BLOCK")
    trips = math.ceil(int(rows[1]) / block) if rows and block else 1
    per_warp, loops = issued(compiled, trips)
    total = None if programs is None else per_warp * warps * programs
    text = ", ".join(f"{a} {v}" for a, v in kwargs.items())
    text = ", ".join(t for t in (text, f"{warps} warps", remark) if t)
    return Generated(name, compiled, text, programs, loops, total)


def _programs(source: str, kwargs: dict[str, Any], grid: str) -> int | None:
    """Size of the grid, where it follows from the text."""
    axes = {"Grid1D": "x", "Grid2D": "xy", "Grid2DWithYZOverflow": "xy", "Grid3D": "xyz"}.get(grid)
    if axes is None or "RSPLIT" in source:
        return None
    total = 1
    for axis in axes:
        size = re.search(rf"^    {axis}numel = (\d+)$", source, re.M)
        if size is None:
            return None
        total *= math.ceil(int(size[1]) / kwargs.get(f"{axis.upper()}BLOCK", 1))
    return total


_FOLDER = tempfile.TemporaryDirectory(prefix="mxnorm_generated_")
_loaded: list[ModuleType] = []


def _load(source: str) -> ModuleType:
    """As a module with a file: Triton reads a kernel's source from there."""
    # Asks for a GPU's driver, which only a launch needs.
    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    path = Path(_FOLDER.name) / f"kernel_{len(_loaded)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _loaded.append(module)
    return module
