"""RMSNorm and MXFP8 cast in every form that is compared, and whether each is right."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from mxnorm_pass import reference
from mxnorm_pass.ops import rmsnorm_mxquant
from mxnorm_pass.theory import correction

EPS = 1e-5
CAST = "e4m3/b32/rceil_log2/reciprocal/clamp/plain"
BLOCK = 32
# How far below the reference's own cast a variant may lie. Orders of summation and of rounding to
# bfloat16 differ between variants and move codes by one step, and here and there a block's scale;
# a scale that is wrong throughout costs 6 dB.
SQNR_SLACK_DB = 1.0
CHECKED_ROWS = 8

ESTIMATES = ("ours_p2", "ours_p2_folded")
OURS = ("ours_exact", *ESTIMATES)
TITLES = {
    "compile": "torch.compile: nn.RMSNorm + torchao's to_mx",
    "nested": "the same with TORCHINDUCTOR_NESTED_REDUCTION=1",
    "eager": "eager: nn.RMSNorm + torchao's to_mx",
    "liger": "Liger RMSNorm + torchao's Triton cast",
    "inductor_exact": "our op left to Inductor (MXNORM_KERNEL=aten), true RMS, gain",
    "inductor_p2_folded": "our op left to Inductor, estimate p=2, gain folded",
    "ours_exact": "ours, true RMS, gain in the kernel",
    "ours_p2": "ours, estimate p=2, gain in the kernel",
    "ours_p2_folded": "ours, estimate p=2, gain folded into the weight",
}


class Unavailable(RuntimeError):
    """Why a variant cannot be run here."""


class WrongResult(RuntimeError):
    """A variant's output is not what it should be."""


@dataclass
class Variant:
    """One way to compute a norm and its cast.

    Attributes:
        name: a key of ``TITLES``.
        call: ``(x, residual or None) -> (qdata, scale, ...)``; with a residual the sum is last.
        rms: what the reference has to compute.
        gain: whether the gain is applied.
    """

    name: str
    call: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    rms: str = "exact"
    gain: bool = True
    notes: list[str] = field(default_factory=list)


def plain(x: Tensor, residual: Tensor | None, gain: Tensor) -> tuple[Tensor, ...]:
    """A user's model: residual add, RMSNorm, torchao's emulated MXFP8 cast."""
    if residual is not None:
        x = x + residual
    y = F.rms_norm(x, (x.shape[-1],), gain, EPS)
    scale, qdata = to_mx(y, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    return (qdata, scale) if residual is None else (qdata, scale, x)


def left_to_inductor(rms: str) -> Callable[..., tuple[Tensor, ...]]:
    """Our op under torch.compile, without its kernel."""
    gain_in_op = rms == "exact"
    # Dynamo need not trace a quadrature.
    constant = 1.0 if gain_in_op else correction(int(rms[1:]), BLOCK)

    def call(x: Tensor, residual: Tensor | None, gain: Tensor) -> tuple[Tensor, ...]:
        return rmsnorm_mxquant(
            x,
            gain if gain_in_op else None,
            residual=residual,
            eps=EPS,
            rms=rms,
            correction=constant,
            rounding="bf16->bf16" if gain_in_op else "f32->f32",
            cast=CAST,
        )

    return call


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """torch.compile as users call it, one compile per shape."""
    # Inductor's C++ has no E8M0: a CPU, which is only a smoke test, runs on ATen calls.
    options = {} if device.type == "cuda" else {"disable_cpp_codegen": True}
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


def allow_many_shapes() -> None:
    """Every shape is a compile of its own: no limit may turn the baseline into an eager one."""
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10000
    torch._dynamo.config.fail_on_recompile_limit_hit = True


@contextlib.contextmanager
def kernel_off() -> Iterator[None]:
    """Our op takes its decomposition; read at each lowering and at each eager call."""
    with mock.patch.dict(os.environ, MXNORM_KERNEL="aten"):
        yield


def ours(name: str, gain: Tensor) -> Variant:
    """The fused kernel."""
    rms = "exact" if name == "ours_exact" else "p2"
    folded = name == "ours_p2_folded"
    weight = None if folded else gain
    rounding = "f32->f32" if folded else "bf16->bf16"

    def call(x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
        return rmsnorm_mxquant(
            x, weight, residual=residual, eps=EPS, rms=rms, rounding=rounding, cast=CAST
        )

    return Variant(name, call, rms, not folded)


class Variants:
    """All of them for one width; what is compiled is compiled at the first call of a shape."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(k)
        gain = 1 + 0.2 * torch.randn(k, generator=generator)
        self.gain = gain.to(torch.bfloat16).to(device)

    def get(self, name: str) -> Variant:
        """One of them.

        Raises:
            Unavailable: where it cannot run on this machine.
        """
        gain = self.gain
        if name in OURS:
            return ours(name, gain)
        if name == "eager":
            return Variant(name, lambda x, residual: plain(x, residual, gain))
        if name == "compile":
            function = compiled(plain, self.device)
            return Variant(name, lambda x, residual: function(x, residual, gain))
        if name == "nested":
            if not hasattr(torch._inductor.config.triton, "nested_reduction"):
                raise Unavailable("not in this torch")
            options = {"triton.nested_reduction": True}
            if self.device.type != "cuda":
                options["disable_cpp_codegen"] = True
            nested = torch.compile(plain, dynamic=False, fullgraph=True, options=options)
            return Variant(name, lambda x, residual: nested(x, residual, gain))
        if name.startswith("inductor_"):
            rms = "exact" if name == "inductor_exact" else "p2"
            inner = compiled(left_to_inductor(rms), self.device)

            def call(x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
                with kernel_off():
                    result: tuple[Tensor, ...] = inner(x, residual, gain)
                return result

            return Variant(name, call, rms, rms == "exact")
        if name == "liger":
            return liger(gain, self.device)
        raise ValueError(f"variant {name!r}: allowed are {', '.join(TITLES)}")


# --- Liger and torchao's Triton cast --------------------------------------------------------------


def liger(gain: Tensor, device: torch.device) -> Variant:
    """Liger's RMSNorm (fused with the add where there is one), then torchao's Triton cast.

    Raises:
        Unavailable: with the reason.
    """
    if device.type != "cuda":
        raise Unavailable("needs a GPU")
    try:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
        from liger_kernel.ops.rms_norm import rms_norm_forward
    except ImportError as error:
        raise Unavailable(f"liger_kernel does not import: {error}") from error
    cast, note = triton_cast()

    def call(x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
        if residual is None:
            y = rms_norm_forward(x, gain, EPS, 0.0, "llama", None)[0]
            return cast(y)
        y, total, *_ = fused_add_rms_norm_forward(x, residual, gain, EPS, 0.0, "llama")
        return (*cast(y), total)

    return Variant("liger", call, notes=[note] if note else [])


_CAST: list[tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = []


def triton_cast() -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]:
    """The row-wise Triton cast of torchao and a remark on how it was made to run."""
    if not _CAST:
        _CAST.append(_find_triton_cast())
    return _CAST[0]


def _find_triton_cast() -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]:
    from torchao.prototype.mx_formats import kernels

    if getattr(kernels, "_triton_kernels_available", False):
        return lambda y: kernels.triton_to_mxfp8_dim0(y, BLOCK, "rceil"), ""
    try:
        kernels.triton_to_mxfp8_dim0(torch.ones(32, 128, dtype=torch.bfloat16), BLOCK, "rceil")
        refused = "no reason given"
    except Exception as error:
        refused = _short(error)
    try:
        module = _ungated(kernels)
    except Exception as error:
        raise Unavailable(
            f"torchao's Triton cast refuses this chip ({refused}), and does not load without its "
            f"gate either ({_short(error)})"
        ) from error
    note = (
        f"torchao's Triton cast refuses this chip ({refused}). Timed is the same kernel without "
        "its gate, on the branch it has for chips that lack the E8M0 instruction"
    )
    return lambda y: module.triton_to_mxfp8_dim0(y, BLOCK, "rceil"), note


def _short(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"


def _ungated(kernels: Any) -> Any:
    """The module of torchao's kernels, run again as a private one with its gates open."""
    import torchao.utils
    import triton.language as tl

    spec = importlib.util.spec_from_file_location(kernels.__name__, kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.object(torchao.utils, "is_sm_at_least_100", lambda: True),
        mock.patch.object(torchao.utils, "is_cuda_version_at_least", lambda major, minor: True),
        # Only the cast is wanted: the module's other ops exist already.
        mock.patch.object(torch.library, "custom_op", _inert),
        mock.patch.object(torch.library, "triton_op", _inert),
        mock.patch.object(torch.library, "wrap_triton", lambda kernel: kernel),
        mock.patch.object(torch.library, "Library", mock.MagicMock()),
        mock.patch.object(torch.library, "register_fake", _inert),
        mock.patch("torch.distributed.tensor.experimental.register_sharding", _inert),
        mock.patch.object(torch.ops, "torchao", mock.MagicMock()),
    ):
        spec.loader.exec_module(module)
    # The kernel takes the instruction unless it believes itself on another maker's chip.
    module.IS_ROCM = tl.constexpr(True)
    return module


def _inert(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """A decorator that leaves its function as it is."""
    return lambda function: _Op(function)


class _Op:
    """A function with the methods of an op that decorators of its module ask for."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def register_fake(self, function: Any) -> Any:
        return function


# --- right or wrong -------------------------------------------------------------------------------


def sqnr(wanted: Tensor, got: Tensor) -> float:
    """Signal to noise in dB, over all elements, in float64."""
    noise = (wanted - got).square().sum()
    return float(10 * torch.log10(wanted.square().sum() / noise))


def normalised(total: Tensor, gain: Tensor | None, rms: str, block: int = BLOCK) -> Tensor:
    """The norm in float64, nothing rounded; on the CPU."""
    x = total.double().cpu()
    if rms == "exact":
        square = x.square().mean(-1, keepdim=True)
    else:
        p = int(rms[1:])
        absmax = x.unflatten(-1, (-1, block)).abs().amax(-1)
        square = (correction(p, block) ** p * absmax.pow(p).mean(-1, keepdim=True)).pow(2 / p)
    y = x * torch.rsqrt(square + EPS)
    return y if gain is None else y * gain.double().cpu()


class Checker:
    """Compares calls on one set of inputs with the reference, on their first and last rows."""

    def __init__(self, x: Tensor, residual: Tensor | None, gain: Tensor) -> None:
        self.x, self.residual, self.gain = x, residual, gain
        rows = list(range(x.shape[0]))
        self.rows = torch.tensor(sorted({*rows[:CHECKED_ROWS], *rows[-CHECKED_ROWS:]}))
        self.total = self._chosen(x if residual is None else x + residual)
        self._wanted: dict[tuple[str, bool], tuple[Tensor, float]] = {}

    def _chosen(self, values: Tensor) -> Tensor:
        return values.reshape(self.x.shape[0], -1)[self.rows.to(values.device)].cpu()

    def wanted(self, rms: str, gain: bool) -> tuple[Tensor, float]:
        """The norm in float64, and the SQNR of the reference's own cast of it."""
        key = (rms, gain)
        if key not in self._wanted:
            y = normalised(self.total, self.gain if gain else None, rms)
            cast = reference.dequantize(*reference.quantize(y.float()), torch.float64)
            self._wanted[key] = y, sqnr(y, cast)
        return self._wanted[key]

    def check(self, variant: Variant) -> dict[str, float]:
        """SQNR of one call and of the reference's own cast.

        Raises:
            WrongResult: where the variant is wrong.
        """
        where = f"{variant.name} at {tuple(self.x.shape)}"
        outputs = variant.call(self.x, self.residual)
        if self.residual is not None and not torch.equal(self._chosen(outputs[-1]), self.total):
            raise WrongResult(f"{where}: the sum is not x + residual")
        wanted, own = self.wanted(variant.rms, variant.gain)
        qdata = self._chosen(outputs[0].view(torch.uint8)).view(torch.float8_e4m3fn)
        scale = self._chosen(outputs[1].view(torch.uint8))
        reached = sqnr(wanted, reference.dequantize(qdata, scale, torch.float64))
        if not reached >= own - SQNR_SLACK_DB:
            raise WrongResult(
                f"{where}: SQNR {reached:.2f} dB against float64, the reference's own cast has "
                f"{own:.2f} dB"
            )
        return {"sqnr": reached, "reference": own}

    def check_rows(self, variant: Variant) -> None:
        """A row's bytes do not depend on the rows around it.

        Raises:
            WrongResult: where they do.
        """
        few = slice(-2 * CHECKED_ROWS, None)
        other = None if self.residual is None else self.residual[few]
        alone = variant.call(self.x[few], other)
        among = variant.call(self.x, self.residual)
        for a, b in zip(alone, among, strict=True):
            if not torch.equal(a.contiguous().view(torch.uint8), b[few].view(torch.uint8)):
                raise WrongResult(f"{variant.name} at {tuple(self.x.shape)}: a row differs alone")
