"""Which RMSNorm feeds which linear, from running a model eagerly: no graph, no name, no class.

A module is an RMSNorm when it behaves as one, on its own input and on probes that centring,
another mean, a shift or an epsilon elsewhere would show on. A module of several inputs (a norm
that applies a gate first) is one when, on noise, its output rows over a gain that it holds have a
mean square of 1 and neither a mean of 0 nor parts that have a mean square of 1 each. A norm feeds
a linear when the linear's input rows are, bit for bit, rows that it put out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# bfloat16 keeps 8 bits: x * rstd, the gain and their product are each rounded once.
TOLERANCE = 2.0**-6
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps")


@dataclass
class Call:
    """One call of a module or function that may be an RMSNorm."""

    path: str
    x: Tensor | None
    """Its input; None where it has several."""
    y: Tensor
    eps: float | None = None
    again: Callable[[Tensor], Tensor] | None = None
    """Calls it on another input; None where what it does is known."""
    gains: list[Tensor] = field(default_factory=list)
    """Where it has several inputs: what it holds that can be a gain."""


@dataclass
class Use:
    """One use of a linear's weight."""

    path: str
    x: Tensor
    before: int
    """How many calls of norms there had been."""


@dataclass
class Truth:
    """What the oracle found.

    Attributes:
        pairs: norm path and linear path, for each linear that reads a norm, and in how many calls
            of the norm.
        aliases: paths that name the same norm as another one, a module in a module.
        norms: RMSNorms by behaviour, and how often each was called.
        linears: linears and how often each was used.
        trivial: norms whose gain is the same number for every column.
        unexplained: linears whose input no norm gave.
    """

    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    aliases: dict[str, set[str]] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    linears: dict[str, int] = field(default_factory=dict)
    trivial: set[str] = field(default_factory=set)
    unexplained: list[str] = field(default_factory=list)


class Oracle(TorchFunctionMode):
    """Watches one eager forward of a model."""

    def __init__(self, model: nn.Module, linears: list[str]) -> None:
        super().__init__()
        self.model = model
        self.weights = {id(model.get_submodule(p).weight): p for p in linears}
        self.paths = set(linears)
        self.calls: list[Call] = []
        self.uses: list[Use] = []
        self.stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is nn.functional.linear:
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            # Two linears may share a weight: the module at work says which one it is.
            here = self.stack[-1] if self.stack else ""
            path = here if here in self.paths else self.weights.get(id(weight))
            if path is not None:
                self.uses.append(Use(path, x.detach().clone(), len(self.calls)))
        elif func is nn.functional.rms_norm and len(args[1]) == 1:
            path = self.stack[-1] if self.stack else ""
            self.calls.append(Call(path, args[0].detach().clone(), out.detach().clone()))
        return out

    def watch(self, inputs: dict[str, Any]) -> Truth:
        """Run the model once and say what was seen."""
        handles = []
        for path, module in self.model.named_modules():
            enter, leave = self._hooks(path)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        try:
            with torch.no_grad(), self:
                self.model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        return self._judge()

    def _hooks(self, path: str) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(path)

        def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.stack.pop()
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if not isinstance(out, Tensor) or out.dim() < 2 or not out.is_floating_point():
                return
            if len(tensors) > 1:
                gains = held_gains(module, out.shape[-1])
                if gains:
                    probe = random_call(module, args, kwargs)
                    self.calls.append(Call(path, None, out.detach().clone(), None, probe, gains))
                return
            if not tensors:
                return
            (x,) = tensors
            if not x.is_floating_point() or x.shape != out.shape or x.dim() < 2:
                return
            # A gated norm without its gate is called with what it was called with here.
            rest = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor)}
            named = [k for k, v in kwargs.items() if isinstance(v, Tensor)]
            others = args[1:]

            def again(t: Tensor) -> Tensor:
                call = module.forward
                out = call(**{named[0]: t}, **rest) if named else call(t, *others, **rest)
                assert isinstance(out, Tensor)
                return out

            eps = epsilon(module)
            self.calls.append(Call(path, x.detach().clone(), out.detach().clone(), eps, again))

        return enter, leave

    def _judge(self) -> Truth:
        truth = Truth()
        known: dict[str, bool] = {}
        position: dict[int, int] = {}
        norms: list[Call] = []
        for i, call in enumerate(self.calls):
            position[i] = len(norms)
            if call.path not in known:
                known[call.path] = is_rmsnorm(call)
            if known[call.path]:
                norms.append(call)
                truth.norms[call.path] = truth.norms.get(call.path, 0) + 1
                if constant_gain(call):
                    truth.trivial.add(call.path)
        position[len(self.calls)] = len(norms)
        tables: dict[tuple[int, torch.dtype], set[bytes]] = {}
        found: dict[tuple[str, str], set[int]] = defaultdict(set)
        for use in self.uses:
            truth.linears[use.path] = truth.linears.get(use.path, 0) + 1
            call_number, source = feeding(norms[: position[use.before]], use.x, tables)
            if source:
                # The outermost first: modules in modules name the same norm.
                main = min(source, key=len)
                truth.aliases.setdefault(main, set()).update(source)
                found[main, use.path].add(call_number)
            elif use.path not in truth.unexplained:
                truth.unexplained.append(use.path)
        truth.pairs = {pair: len(calls) for pair, calls in found.items()}
        return truth


def feeding(
    norms: list[Call], x: Tensor, tables: dict[tuple[int, torch.dtype], set[bytes]]
) -> tuple[int, set[str]]:
    """The latest call of a norm whose output holds all rows of ``x``, -1 where there is none, and
    the norm's paths, several where one is in another.
    """
    wanted = rows(x)
    if len(wanted) < 2:
        return -1, set()
    for i in range(len(norms) - 1, -1, -1):
        if norms[i].y.shape[-1] != x.shape[-1]:
            continue
        if not wanted <= table(norms, i, x.dtype, tables):
            continue
        same = {norms[i].path}
        for j in range(i - 1, max(-1, i - 4), -1):
            inner = norms[j].path
            nested = any(inner.startswith(p + ".") or p.startswith(inner + ".") for p in same)
            if not nested or norms[j].y.shape[-1] != x.shape[-1]:
                continue
            if wanted <= table(norms, j, x.dtype, tables):
                same.add(inner)
        return i, same
    return -1, set()


def table(
    norms: list[Call],
    i: int,
    dtype: torch.dtype,
    tables: dict[tuple[int, torch.dtype], set[bytes]],
) -> set[bytes]:
    """Rows of a norm's output, in the dtype that the linear reads."""
    key = (i, dtype)
    if key not in tables:
        tables[key] = rows(norms[i].y.to(dtype))
    return tables[key]


def rows(t: Tensor) -> set[bytes]:
    """The distinct rows of a tensor's last axis as bytes, zero rows left out."""
    flat = t.detach().reshape(-1, t.shape[-1]).contiguous()
    flat = flat[flat.abs().amax(-1) > 0]
    return {row.tobytes() for row in flat.view(torch.uint8).cpu().numpy()}


def epsilon(module: nn.Module) -> float | None:
    """The module's epsilon by its usual names; None where it has none."""
    for name in _EPS:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
    return None


def is_rmsnorm(call: Call) -> bool:
    """Whether a call, and calls like it on probes, are ``x * rsqrt(mean(x^2) + eps) * g``."""
    if call.x is None:
        return call.again is not None and normalises(call.again, call.y, call.gains)

    if call.y.shape[-1] < 2 or not fits(call.x, call.y, call.eps):
        return False
    if call.again is None:
        return True
    generator = torch.Generator().manual_seed(0)
    shape = (*call.x.shape[:-1], call.x.shape[-1])
    count = call.x.numel() // shape[-1]
    # Rows of several sizes, small ones of about the size of eps, each with a mean of its own.
    scale = 10.0 ** torch.linspace(-3.0, 1.0, max(count, 2))[:count].reshape(*shape[:-1], 1)
    shift = torch.randn(*shape[:-1], 1, generator=generator)
    probe = scale * (torch.randn(shape, generator=generator) + shift)
    probe = probe.to(call.x.device, call.x.dtype)
    try:
        with torch.no_grad():
            out = call.again(probe.clone())
    except Exception:
        return False
    return out.shape == probe.shape and fits(probe, out, call.eps)


def random_call(module: nn.Module, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor]:
    """The call again with noise in the place of every tensor, so large that no epsilon matters."""
    generator = torch.Generator().manual_seed(0)

    def noise(a: Any) -> Any:
        if not isinstance(a, Tensor) or not a.is_floating_point():
            return a
        return (4 * torch.randn(a.shape, generator=generator) + 1).to(a.device, a.dtype)

    def again(_: Tensor) -> Tensor:
        out = module.forward(*map(noise, args), **{k: noise(v) for k, v in kwargs.items()})
        assert isinstance(out, Tensor)
        return out

    return again


def normalises(again: Callable[[Tensor], Tensor], y: Tensor, gains: list[Tensor]) -> bool:
    """Whether a module of several inputs puts out normalised rows, for one of these gains."""
    try:
        with torch.no_grad():
            out = again(y)
    except Exception:
        return False
    return out.shape == y.shape and any(normal_rows(out, gain) for gain in gains)


def held_gains(module: nn.Module, width: int) -> list[Tensor]:
    """What a module can multiply a row with: its own parameters of that width, and one more."""
    own = [p.detach() for p in module.parameters(recurse=False) if p.shape == (width,)]
    return [g for p in own for g in (p, 1 + p.float())]


def normal_rows(y: Tensor, gain: Tensor) -> bool:
    """Rows of mean square 1, not centred, and not normalised in parts either."""
    flat = y.double().reshape(-1, y.shape[-1]) / gain.double()
    if len(flat) < 4 or not bool(flat.isfinite().all()):
        return False
    square = flat.square()
    half = square[:, : square.shape[-1] // 2].mean(-1)
    unit = bool(((square.mean(-1) - 1).abs() < 2 * TOLERANCE).all())
    centred = bool((flat.mean(-1).abs() < TOLERANCE).all())
    grouped = bool(((half - 1).abs() < 2 * TOLERANCE).all())
    return unit and not centred and not grouped


def fits(x: Tensor, y: Tensor, eps: float | None) -> bool:
    """One gain per column explains all rows, for the epsilon given or a usual one."""
    candidates = (1e-6, 1e-5, 1e-8, 1.1920928955078125e-07, 0.0) if eps is None else (eps,)
    return any(residual(x, y, e) < TOLERANCE for e in candidates)


def residual(x: Tensor, y: Tensor, eps: float) -> float:
    """Largest relative error over rows of ``y`` against the gain that half of the rows give."""
    normal, got = normalised(x, eps), y.double().reshape(-1, y.shape[-1])
    if not bool(got.isfinite().all()) or not bool(got.abs().sum() > 0):
        return float("inf")
    half = normal[::2]
    energy = half.square().sum(0)
    gain = (half * got[::2]).sum(0) / energy.clamp_min(1e-300)
    other = slice(1, None, 2) if len(normal) > 1 else slice(None)
    # A column that is zero in the rows that the gain is taken from tells nothing of its gain.
    error = ((got[other] - normal[other] * gain) * (energy > 0)).norm(dim=-1)
    return float((error / got[other].norm(dim=-1).clamp_min(1e-300)).max())


def normalised(x: Tensor, eps: float) -> Tensor:
    """The rows of ``x`` over their root mean square, in float64."""
    flat = x.double().reshape(-1, x.shape[-1])
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def constant_gain(call: Call) -> bool:
    """Whether the gain is one number for all columns."""
    if call.x is None:
        return False
    eps = 1e-6 if call.eps is None else call.eps
    normal, got = normalised(call.x, eps), call.y.double().reshape(-1, call.y.shape[-1])
    gain = (normal * got).sum(0) / normal.square().sum(0).clamp_min(1e-300)
    return bool(gain.std() < 0.02 * gain.abs().mean())
