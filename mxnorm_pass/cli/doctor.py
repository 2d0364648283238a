"""``mxnorm doctor``: versions, chip, which paths are live, and why not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

import mxnorm_pass
from mxnorm_pass import compat
from mxnorm_pass.cli.errors import NOT_MET, OK, brief
from mxnorm_pass.cli.output import Output
from mxnorm_pass.cli.show import wrap
from mxnorm_pass.config import ids_in
from mxnorm_pass.ops import kernels

Status = Literal["ok", "note", "bad"]
LEAST = {"torch": (2, 11), "torchao": (0, 18)}
BACKENDS = ("mxnorm", "mxnorm_exact")
_FORMATS = {
    "mxfp8": "e4m3 and e5m2 by the chip's instructions from sm_90, scales from sm_100",
    "mxfp6": "by the chip's instructions from sm_100, by integer arithmetic on sm_90",
    "mxfp4": "by the chip's instructions from sm_100, by integer arithmetic on sm_90",
    "nvfp4": "by the chip's instructions from sm_100, by integer arithmetic on sm_90",
}


@dataclass
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: ``ok``; ``note``: as it has to be here, but worth knowing; ``bad``: something that
            is expected to be live is not.
        detail: what was found, and what to do.
    """

    name: str
    status: Status
    detail: str


def run(args: argparse.Namespace, out: Output) -> int:
    """Exit status of ``mxnorm doctor``: 1 where a finding is ``bad``."""
    findings: list[Finding] = []
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _chip,
        _hook,
        _backends,
        _environment,
        _compiler,
        _caches,
    ]
    if not args.quick:
        checks.append(_self_check)
    with out.quiet():
        for check in checks:
            try:
                findings.extend(check())
            except Exception as error:
                findings.append(Finding(check.__name__.strip("_"), "bad", brief(error)))
    bad = [f for f in findings if f.status == "bad"]
    verdict = (
        "healthy"
        if not bad
        else f"{len(bad)} finding(s) to mend: " + ", ".join(f.name for f in bad)
    )
    lines = []
    for finding in findings:
        mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[finding.status]
        lines += wrap(f"{mark}  {finding.name}: {finding.detail}", out.width, 6)
    content = {"healthy": not bad, "findings": [asdict(f) for f in findings]}
    out.result(lambda: json.dumps(content, indent=1), "\n".join([*lines, verdict]))
    return NOT_MET if bad else OK


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())
    yield Finding("mxnorm_pass", "ok", mxnorm_pass.__version__)
    for name, needed in (
        ("torch", "bad"),
        ("torchao", "bad"),
        ("triton", "bad" if torch.cuda.is_available() else "note"),
        ("transformers", "note"),
    ):
        found = _version(name)
        if found is None:
            why = {
                "triton": "the kernels need it; without it the op runs as its decomposition",
                "transformers": "explain --config needs it",
            }.get(name, "needed")
            yield Finding(name, needed, f"not installed: {why}")  # type: ignore[arg-type]
            continue
        least = LEAST.get(name)
        numbers = tuple(int(p) for p in found.split("+")[0].split(".")[:2] if p.isdecimal())
        if least is not None and numbers < least:
            yield Finding(name, "bad", f"{found}: {'.'.join(map(str, least))} or newer is needed")
        else:
            yield Finding(name, "ok", found)
    yield Finding("cuda", "ok" if torch.version.cuda else "note", _cuda())


def _version(name: str) -> str | None:
    if name == "torch":
        return torch.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cuda() -> str:
    if torch.version.hip is not None:
        return f"this torch is built for ROCm {torch.version.hip}"
    return torch.version.cuda or "this torch is built without CUDA"


def _chip() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            "chip", "note", "no CUDA GPU: numbers change, not speed; the op is its decomposition"
        )
        for name in _FORMATS:
            yield Finding(f"kernel {name}", "note", "ATen decomposition (no CUDA GPU)")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding("chip", "ok", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        why = kernels.unusable(device, 4096)
    except ValueError as error:
        why = str(error)
    for name, how in _FORMATS.items():
        if why is None:
            level = kernels.hardware(device)
            yield Finding(f"kernel {name}", "ok", f"Triton, HW={level} ({how})")
        else:
            # A chip without a kernel is no fault; a switch or a missing package is.
            status: Status = "note" if "chips" in why or "ROCm" in why else "bad"
            yield Finding(f"kernel {name}", status, f"ATen decomposition ({why})")


def _hook() -> Iterator[Finding]:
    from mxnorm_pass.backend import HOOK

    if not hasattr(torch._inductor.config, HOOK):
        yield Finding("hook", "bad", f"this torch's Inductor has no {HOOK}; torch 2.11 has")
        return
    others = compat.passes_on_hook(getattr(torch._inductor.config, HOOK))
    names = ", ".join(type(p).__name__ for p in others)
    yield Finding("hook", "ok", f"Inductor's {HOOK}" + (f", behind {names}" if names else ""))


def _backends() -> Iterator[Finding]:
    registered = {e.name: e.value for e in metadata.entry_points(group="torch_dynamo_backends")}
    for name in BACKENDS:
        if name in registered:
            yield Finding(f'backend="{name}"', "ok", registered[name])
        else:
            yield Finding(
                f'backend="{name}"',
                "bad",
                "no entry point: install the package (pip install), or use "
                "backend=mxnorm_pass.backend()",
            )


def _environment() -> Iterator[Finding]:
    from mxnorm_pass.choices import DISABLE, OFF, disabled

    if disabled():
        yield Finding(DISABLE, "bad", f"={os.environ[DISABLE]}: the pass is switched off")
    try:
        chosen = kernels.chosen()
    except ValueError as error:
        yield Finding(kernels.VARIABLE, "bad", str(error))
    else:
        if os.environ.get(kernels.VARIABLE):
            status: Status = "ok" if chosen == "triton" else "note"
            yield Finding(kernels.VARIABLE, status, f"={chosen}")
    off = os.environ.get(OFF)
    if off:
        try:
            mxnorm_pass.MXNormConfig(off=tuple(ids_in(off)))
        except ValueError as error:
            yield Finding(OFF, "bad", str(error))
        else:
            yield Finding(OFF, "note", f"={off}: these sites are left alone")
    dump = os.environ.get("MXNORM_DUMP")
    if dump:
        why = _unwritable(Path(dump))
        yield Finding("MXNORM_DUMP", "bad" if why else "note", f"={dump}{why and f': {why}'}")


def _compiler() -> Iterator[Finding]:
    # Triton builds its launcher in C; Inductor's code for CPUs is C++.
    cc = os.environ.get("CC") or next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), "")
    cuda = torch.cuda.is_available()
    if cc and shutil.which(cc):
        yield Finding("C compiler", "ok", cc)
    else:
        status: Status = "bad" if cuda else "note"
        yield Finding("C compiler", status, "none found: Triton needs gcc or clang, or CC")
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        yield Finding("C++ compiler", "ok", str(get_cpp_compiler()))
    except Exception as error:
        yield Finding(
            "C++ compiler", "note" if cuda else "bad", f"Inductor needs one: {brief(error)}"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        yield Finding("Python.h", "bad" if cuda else "note", f"missing in {header.parent}")


def _caches() -> Iterator[Finding]:
    folder = Path(compat.cache_dir())
    why = _unwritable(folder / "mxnorm")
    yield Finding("caches", "bad" if why else "ok", f"{folder}{why and f': {why}'}")


def _unwritable(folder: Path) -> str:
    """Why no file can be made in ``folder``; "" where one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot be written to ({error.strerror or error})"


def _self_check() -> Iterator[Finding]:
    """Norm -> cast -> matmul through the backend, against the eager reference."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    from mxnorm_pass import reference
    from mxnorm_pass.choices import disabled

    if disabled():
        return
    generator = torch.Generator().manual_seed(0)
    gpu = torch.cuda.is_available() and kernels.unusable(torch.device("cuda"), 256) is None
    device = torch.device("cuda" if gpu else "cpu")
    norm, linear = torch.nn.RMSNorm(256, eps=1e-5), torch.nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(256, generator=generator))
        linear.weight.copy_(torch.randn(64, 256, generator=generator) / 16)
    model = torch.nn.Sequential(norm, linear).to(device, torch.bfloat16)
    quantize_(
        model,
        MXDynamicActivationMXWeightConfig(
            kernel_preference=KernelPreference.EMULATED, scaling_mode=ScaleCalculationMode.RCEIL
        ),
    )
    x = torch.randn(32, 256, generator=generator).bfloat16()
    # Generated code on a GPU, where it is the kernel that is to be seen working.
    backend = mxnorm_pass.backend(inner="inductor" if gpu else "eager", off=())
    with torch.no_grad(), warnings.catch_warnings():
        # The advice on checkpoints is not for this model.
        warnings.filterwarnings("ignore", message="mxnorm: this inference graph")
        got = torch.compile(model, backend=backend)(x.to(device)).cpu()
        quantised: Any = linear.weight
        weight = quantised.dequantize(torch.bfloat16).cpu()
        rho = reference.rstd(x, 1e-5)
        y = reference.normalise(x, rho, norm.weight.detach().cpu(), out_dtype=torch.bfloat16)
        rows = reference.dequantize(*reference.quantize(y))
        expected = torch.nn.functional.linear(rows, weight)
    rewritten = backend.report.rewritten
    what = f"{rewritten} of 1 site rewritten on {device.type}"
    if rewritten != 1:
        reasons = ", ".join(str(s.reason) for s in backend.report.sites) or "nothing found"
        yield Finding("self-check", "bad", f"{what}: {reasons}")
        return
    noise = (got.double() - expected.double()).square().sum()
    ratio = float(10 * torch.log10(expected.double().square().sum() / noise))
    if torch.equal(got, expected):
        yield Finding("self-check", "ok", f"{what}, bitwise what mxnorm_pass.reference gives")
    else:
        # A sum in another order moves the last bit of bfloat16: some 50 dB.
        status: Status = "ok" if ratio > 40 else "bad"
        yield Finding("self-check", status, f"{what}, {ratio:.1f} dB from mxnorm_pass.reference")
