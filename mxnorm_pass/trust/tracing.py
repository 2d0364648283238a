"""Run a model over batches with its graphs in view: the way in of everything in this package.

The model goes through torch.compile as with ``inner="eager"``: Dynamo, AOTAutograd, the passes,
then the graph itself, node by node, so that an observer sees the rows of every site. Functional
norms, residual adds and rows that are picked for experts need no hooks that way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from mxnorm_pass.backend import HOOK, _fresh
from mxnorm_pass.compat import CustomGraphPass
from mxnorm_pass.trust.reads import OutsideGraphs, Reads

Inner = Callable[[GraphModule], Callable[[list[Any]], Any]]
"""From the graph behind the passes to what runs it on a list of inputs."""
LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(output, batch)``: a 0-d tensor."""


def as_batches(batches: Any) -> Iterable[Any]:
    """The batches; one batch alone (a mapping, a tensor, a tuple of tensors) counts as one.

    Raises:
        ValueError: for something that is no iterable of batches.
    """
    if isinstance(batches, (Mapping, Tensor)):
        return [batches]
    if isinstance(batches, tuple) and all(isinstance(b, Tensor) for b in batches):
        return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise ValueError(
            f"batches of type {type(batches).__name__}: expected an iterable of batches, each a "
            "mapping of keyword inputs, a sequence of positional inputs, or one tensor"
        )
    return batches


def repeatable(batches: Any) -> Sequence[Any]:
    """The batches in a list, for those who run over them more than once."""
    found = as_batches(batches)
    return found if isinstance(found, Sequence) else list(found)


def call(model: Callable[..., Any], batch: Any) -> Any:
    """``model`` on one batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, batch: Any, loss_fn: LossFn | None) -> float | None:
    """The loss of one batch: ``loss_fn``, or what the model itself calls ``loss``; None where
    there is neither.
    """
    if loss_fn is not None:
        return float(loss_fn(output, batch))
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def original(model: Any) -> nn.Module:
    """The module behind ``torch.compile``.

    Raises:
        ValueError: for something that is no module.
    """
    target = getattr(model, "_orig_mod", model)
    if not isinstance(target, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    return target


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``eval()``, no gradients, and what ``Module.compile`` did and ``torch.compile`` made of
    modules inside put aside, whose backends may well estimate; all comes back.
    """
    modes = {module: module.training for module in model.modules()}
    compiled = {m: m._compiled_call_impl for m in modes if m._compiled_call_impl is not None}
    wrapped = {m: m.forward for m in modes if isinstance(m, OptimizedModule)}
    model.eval()
    for module in compiled:
        module._compiled_call_impl = None
    for wrapper in wrapped:
        wrapper.forward = wrapper._orig_mod.__call__
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, call_impl in compiled.items():
            module._compiled_call_impl = call_impl
        for wrapper, forward in wrapped.items():
            wrapper.forward = forward


class Traced:
    """A model whose graphs go through ``graph_pass`` and are then run by what ``inner`` makes.

    Call it inside :func:`evaluating`. Batches of a second shape make Dynamo trace sizes as symbols,
    once; the rest runs on those graphs. One graph may serve several modules: layers that are
    compiled one by one share it, and only what it is called with tells which layer it stands for.

    Attributes:
        parameters: of the model.
        outside: what ops outside of every graph read of them.
    """

    def __init__(self, model: nn.Module, graph_pass: CustomGraphPass, inner: Inner) -> None:
        self.parameters = Parameters(model)
        self.outside = Reads(self.parameters.tensors)
        self._pass, self._inner = graph_pass, inner
        self._compiled = torch.compile(_fresh(model), backend=self._backend)

    def __call__(self, batch: Any) -> Any:
        """The model's output for one batch."""
        limit = torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)
        with limit, OutsideGraphs(self.outside):
            return call(self._compiled, batch)

    def _backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        def inner_compile(gm: GraphModule, _: Sequence[Any], **__: Any) -> Callable[..., Any]:
            run = self._inner(gm)

            def call_graph(*args: Any) -> Any:
                with _disable_current_modes():
                    return run(list(args))

            boxed: Callable[..., Any] = make_boxed_func(call_graph)
            return boxed

        patches = {HOOK: self._pass, "fx_graph_cache": False, "triton.cudagraphs": False}
        with torch._functorch.config.patch(enable_autograd_cache=False):
            compiled = compile_fx(
                gm,
                example_inputs,
                inner_compile=inner_compile,  # type: ignore[arg-type]
                config_patches=patches,
            )
        return compiled  # type: ignore[return-value]


def storage_key(tensor: Any) -> tuple[Any, ...] | None:
    """What two tensors over the same memory have in common; None for what has no memory."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return None
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


class Parameters:
    """A model's parameters, found again among the inputs of a graph by the memory they lie in."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[tuple[Any, ...], list[str]] = {}
        self.tensors: dict[str, Tensor] = {}
        named = itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            self.tensors[name] = tensor
            key = storage_key(tensor)
            if key is not None:
                self.names.setdefault(key, []).append(name)

    def find(self, tensor: Any) -> list[str]:
        """All names of the parameter that ``tensor`` is; none where it is no parameter."""
        key = storage_key(tensor)
        return [] if key is None else self.names.get(key, [])


def placeholders(graph: torch.fx.Graph) -> list[Node]:
    """The inputs of a graph, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]
