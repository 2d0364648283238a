"""Compile on the eager route and look at what came out: values, gradients, graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from mxnorm_pass import MXNormConfig, MXNormPass, Report
from mxnorm_pass.backend import MXNormBackend
from mxnorm_pass.ops import OPS


@dataclass
class Run:
    """One forward (and backward) of a compiled model."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    report: Report = field(default_factory=Report)


def _flat(out: Any) -> tuple[Tensor, ...]:
    if isinstance(out, Tensor):
        return (out,)
    if isinstance(out, (tuple, list)):
        return tuple(out)
    return (out.logits,)


def run(
    model: Callable[..., Any],
    *inputs: Any,
    config: MXNormConfig | None = None,
    training: bool = True,
    off: bool = False,
    dynamic: bool | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Run:
    """Compile with ``inner="eager"``, run, and with ``training`` go backward from fixed tangents.

    ``off`` takes the same route with nothing rewritten: what bitwise comparisons are made with.
    """
    torch._dynamo.reset()
    fields = {**(config or MXNormConfig(strict=True)).__dict__, "inner": "eager"}
    if off:
        fields["exclude"] = ("*",)
    tracer = MXNormBackend(MXNormConfig(**fields))
    inputs = tuple(
        i.detach().clone().requires_grad_(training and i.is_floating_point())
        if isinstance(i, Tensor)
        else i
        for i in inputs
    )
    if isinstance(model, nn.Module):
        model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        out = _flat(torch.compile(model, backend=tracer, dynamic=dynamic)(*inputs, **kwargs))
    gradients = {}
    if training:
        generator = torch.Generator().manual_seed(seed)
        wanted = [o for o in out if o.requires_grad]
        tangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in wanted]
        torch.autograd.backward(wanted, tangents)
        for i, tensor in enumerate(inputs):
            if isinstance(tensor, Tensor) and tensor.grad is not None:
                gradients[f"input{i}"] = tensor.grad
        if isinstance(model, nn.Module):
            for name, p in model.named_parameters():
                if p.grad is not None:
                    gradients[name] = getattr(p.grad, "_data", p.grad).detach().clone()
    return Run(tuple(o.detach() for o in out), gradients, tracer.report)


class Capture(MXNormPass):
    """The pass, with every graph kept before and after, and idempotence checked."""

    def __init__(self, config: MXNormConfig | None = None) -> None:
        super().__init__(config or MXNormConfig(strict=True))
        self.before: list[Graph] = []
        self.after: list[Graph] = []

    def __call__(self, graph: Graph) -> None:
        self.before.append(copy.deepcopy(graph))
        self.owner = graph.owning_module
        super().__call__(graph)
        self.after.append(copy.deepcopy(graph))


def graphs(
    model: Callable[..., Any],
    *inputs: Any,
    config: MXNormConfig | None = None,
    training: bool = True,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Capture:
    """Joint (or inference) graphs of a model before and after the pass; nothing is generated."""
    from torch._inductor.compile_fx import compile_fx

    from mxnorm_pass.inner import run_eagerly

    torch._dynamo.reset()
    capture = Capture(config)

    def backend(gm: Any, example_inputs: Any) -> Any:
        patches = {"joint_custom_pre_pass": capture}
        return compile_fx(gm, example_inputs, inner_compile=run_eagerly, config_patches=patches)

    with torch.set_grad_enabled(training):
        torch.compile(model, backend=backend, dynamic=dynamic)(*inputs, **kwargs)
    return capture


def calls(graph: Graph, target: Any) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=target))


def ops(graph: Graph) -> list[Any]:
    """What stands for the rewritten sites, with and without the residual add."""
    return [node for target in OPS for node in calls(graph, target)]


def listing(graph: Graph) -> str:
    """A graph as text for golden files: name, dtype and shape, op and arguments."""
    lines = []
    for node in graph.nodes:
        val = node.meta.get("val")
        kind = ""
        if isinstance(val, Tensor):
            kind = f": {str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
        if node.op == "call_function":
            is_op = isinstance(node.target, torch._ops.OpOverload)
            target = str(node.target) if is_op else node.target.__name__
            named = (f"{k}={_text(v)}" for k, v in node.kwargs.items())
            args = ", ".join([*map(_text, node.args), *named])
            lines.append(f"{node.name}{kind} = {target}({args})")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        else:
            lines.append(f"{node.name}{kind} = {node.op}")
    return "\n".join(lines) + "\n"


def _text(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(map(_text, arg)) + "]"
    if isinstance(arg, float):
        return f"{arg:.9g}"
    return str(arg).removeprefix("torch.") if isinstance(arg, torch.dtype) else str(arg)
