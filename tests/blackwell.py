"""The graphs that torchao emits on sm_100, traced on a machine without a GPU.

The tensors are fake CUDA tensors and the capability is reported as (10, 0): nothing is run. A graph
is taken where Inductor calls ``joint_custom_pre_pass``, behind Dynamo, AOTAutograd and Inductor's
decompositions, so it is the one that a pass on this hook sees: in training the joint graph of
forward and backward with the partitioner's tags, in inference the forward graph.

    module = inference_graph(norm_block("nn.RMSNorm"), mx_config())
    module = training_graph(mxfp8_training_block("llama"), cast="hop")

A pass given as ``hook`` runs on the graph right there, with all that surrounds it in a compilation;
``compiling.Capture`` keeps what it found and what it left. Run later, it has to run inside
``blackwell()`` and the fake mode of the graph's values.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import heapq
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.export._trace
import torchao.utils
from models import Block, make_norm
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torchao.core.config import AOBaseConfig
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats import kernels, mx_tensor, utils
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.inference_workflow import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
)
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

Cast = Literal["hop", "op"]
Hook = Callable[[Graph], None]

CAPABILITY = (10, 0)
DEVICE = torch.device("cuda:0")
HAS_TRITON = importlib.util.find_spec("triton") is not None
SHAPE = (2, 64, 256)


class NeedsTriton(RuntimeError):
    """The graph asked for holds a Triton kernel, and triton is not installed."""


class CannotTrace(RuntimeError):
    """This build of torch or torchao cannot trace what was asked for."""


# -- what is traced -------------------------------------------------------------------------------


def norm_block(
    form: str, k: int = 256, widths: Sequence[int] = (128,), bias: bool = False
) -> Block:
    """A norm before linears in bfloat16; ``form`` is one of ``models.FORMS`` or ``nn.RMSNorm``."""
    if form == "nn.RMSNorm":
        norm: nn.Module = nn.RMSNorm(k, eps=1e-6, dtype=torch.bfloat16)
    else:
        norm = make_norm(form, k)
    return Block(norm, [nn.Linear(k, n, bias=bias, dtype=torch.bfloat16) for n in widths])


def mxfp8_training_block(
    form: str,
    k: int = 256,
    widths: Sequence[int] = (128,),
    mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    wgrad_with_hp: bool = False,
) -> Block:
    """A norm before torchao's ``MXFP8Linear`` with the kernels of sm_100."""
    block = norm_block(form, k, ())
    for n in widths:
        linear = MXFP8Linear(
            k,
            n,
            bias=False,
            kernel_preference=KernelPreference.AUTO,
            scale_calculation_mode=mode,
            wgrad_with_hp=wgrad_with_hp,
        )
        block.linears.append(linear.to(torch.bfloat16))
    return block


def mx_config(
    element: torch.dtype = torch.float8_e4m3fn,
    mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
) -> AOBaseConfig:
    """MX inference: ``_scaled_mm`` for float8_e4m3fn, ``_scaled_mm_v2`` for float4_e2m1fn_x2.

    torch checks the scales of MXFP4 against the packed columns, which fits up to K = 128 only.
    """
    return MXDynamicActivationMXWeightConfig(
        kernel_preference=KernelPreference.AUTO,
        scaling_mode=mode,
        activation_dtype=element,
        weight_dtype=element,
    )


def nvfp4_config(triton_kernel: bool, per_tensor_scale: bool = True) -> AOBaseConfig:
    """NVFP4 inference: the cast is ``ao.mslk_quantize_nvfp4`` or, without the kernel, ATen ops."""
    return NVFP4DynamicActivationNVFP4WeightConfig(
        use_triton_kernel=triton_kernel, use_dynamic_per_tensor_scale=per_tensor_scale
    )


def mxfp8_training_config(
    recipe: MXFP8TrainingRecipe = MXFP8TrainingRecipe.MXFP8_RCEIL,
) -> AOBaseConfig:
    """torchao's weight wrapper for training; Dynamo traces it on torch 2.12 and later."""
    return MXFP8TrainingOpConfig.from_recipe(recipe)


# -- tracing --------------------------------------------------------------------------------------


def inference_graph(
    model: nn.Module,
    config: AOBaseConfig | None,
    *shapes: Sequence[int],
    dynamic: bool = False,
    hook: Hook | None = None,
) -> GraphModule:
    """The forward graph of a model whose linears ``config`` quantises.

    Args:
        model: a module on the CPU, in bfloat16; it is not changed.
        config: for ``torchao.quantize_``; None leaves the model as it is.
        shapes: of the bfloat16 inputs, by default one of ``SHAPE``.
        dynamic: trace with symbolic sizes.
        hook: a pass to run on the graph before it is returned.
    """
    traced = _Traced(model, config, shapes or (SHAPE,), training=False, dynamic=dynamic)
    return traced.graph("op", hook)


def training_graph(
    model: nn.Module,
    *shapes: Sequence[int],
    config: AOBaseConfig | None = None,
    cast: Cast = "hop",
    dynamic: bool = False,
    hook: Hook | None = None,
) -> GraphModule:
    """The joint graph of forward and backward of a model that trains in MXFP8.

    Args:
        model: a module on the CPU, in bfloat16; it is not changed.
        shapes: of the bfloat16 inputs, by default one of ``SHAPE``.
        config: for ``torchao.quantize_``; None if the model has its training linears already.
        cast: how casts along K appear: ``hop`` is the Triton kernel in
            ``triton_kernel_wrapper_functional``, as torch.compile decomposes a triton_op; ``op`` is
            the opaque ``torchao.triton_to_mxfp8_dim0``, as an exported graph keeps it.
            A ``hop`` node's ``kernel_idx`` points into a table of torch's that
            ``torch._dynamo.reset()``, and so the next graph traced, empties: read it before.
        dynamic: trace with symbolic sizes.
        hook: a pass to run on the graph before it is returned.

    Raises:
        NeedsTriton: for ``cast="hop"`` without triton.
    """
    if cast == "hop" and not HAS_TRITON:
        raise NeedsTriton('cast="hop" needs triton; cast="op" does not')
    traced = _Traced(model, config, shapes or (SHAPE,), training=True, dynamic=dynamic)
    return traced.graph(cast, hook)


class _StopError(Exception):
    """Ends a compilation at the hook."""


class _Take(CustomGraphPass):
    """A pass that takes the graph, after another pass has seen it, and stops."""

    def __init__(self, hook: Hook | None) -> None:
        self.hook = hook
        self.module: GraphModule | None = None

    def __call__(self, graph: Graph) -> None:
        if self.hook is not None:
            self.hook(graph)
        self.module = graph.owning_module
        raise _StopError

    def uuid(self) -> None:
        """No cache."""


@dataclass
class _Traced:
    """What to trace."""

    model: nn.Module
    config: AOBaseConfig | None
    shapes: Sequence[Sequence[int]]
    training: bool
    dynamic: bool

    def graph(self, cast: Cast, hook: Hook | None) -> GraphModule:
        """Compile as far as the hook."""
        from torch._inductor.compile_fx import compile_fx

        take = _Take(hook)

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            return compile_fx(gm, example_inputs, config_patches={"joint_custom_pre_pass": take})

        torch._dynamo.reset()
        with blackwell(cast) as mode, mode, torch.set_grad_enabled(self.training):
            compiled = torch.compile(self._model(), backend=backend, dynamic=self.dynamic)
            try:
                compiled(*self._inputs())
            except Exception:
                if take.module is None:
                    raise
        assert take.module is not None
        take.module.recompile()
        return take.module

    def _model(self) -> nn.Module:
        model = _on_cuda(self.model)
        if self.config is not None:
            quantize_(model, self.config)
        return model.requires_grad_(self.training)

    def _inputs(self) -> list[Tensor]:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        return [torch.empty(tuple(s), requires_grad=self.training, **options) for s in self.shapes]


def _on_cuda(model: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are fake CUDA tensors of the mode in force.

    ``Module.to`` cannot do it: parameters of a fake mode have weak references and are not swapped.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy.deepcopy(model, memo)


# -- a machine that looks like sm_100 -------------------------------------------------------------


@contextlib.contextmanager
def blackwell(cast: Cast = "hop") -> Iterator[FakeTensorMode]:
    """Let torchao take its sm_100 paths on fake CUDA tensors; everything is put back on leaving.

    What stays are the ops that torchao would have defined on such a machine and, in a CUDA build of
    torch without a GPU, the device guard that torch itself puts there for fake tensors.

    Yields:
        The fake mode that tensors and parameters are to be made in.
    """
    ops = _sm100_ops()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cuda_guard())
        stack.enter_context(_fused_norm())
        patch = functools.partial(_patch, stack)
        patch(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
        for name, module in list(sys.modules.items()):
            if name.startswith("torchao.") and hasattr(module, "is_sm_at_least_100"):
                patch(module, "is_sm_at_least_100", lambda: True)
        for module, name in (
            (mx_tensor, "triton_to_mxfp8_dim0"),
            (utils, "triton_to_mxfp8_dim1"),
            (kernels, "triton_to_mxfp8_dim0"),
            (kernels, "triton_to_mxfp8_dim1"),
            (kernels, "mxfp8_quantize_cuda"),
        ):
            patch(module, name, getattr(ops, name))
        if not hasattr(kernels, "triton"):
            # What the fake kernels of torchao's opaque ops need of triton.
            patch(kernels, "triton", types.SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
        if cast == "op":
            patch(torch.export._trace, "custom_triton_ops_decomposition_disabled", lambda: True)
        if not torch.cuda.is_available():
            patch(torch.autograd, "grad", _grad)
            if HAS_TRITON:
                stack.enter_context(_triton_driver())
        yield FakeTensorMode()


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value, create=True))


@contextlib.contextmanager
def _cuda_guard() -> Iterator[None]:
    """Autograd asks the device guard of a tensor's device for a stream, of a fake tensor as well.

    A CPU build of torch has no guard for CUDA: lend it the CPU's, which does nothing.
    """
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        yield
        return
    library = next(iter((Path(torch.__file__).parent / "lib").glob("*c10.*")), None)
    try:
        registry = (ctypes.c_void_p * 2).in_dll(
            ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE"
        )
    except (OSError, ValueError) as error:
        raise CannotTrace("no table of device guards in this build of torch") from error
    cpu, cuda = 0, 1
    before = registry[cuda]
    registry[cuda] = before or registry[cpu]
    try:
        yield
    finally:
        registry[cuda] = before


@contextlib.contextmanager
def _fused_norm() -> Iterator[None]:
    """On CUDA ``F.rms_norm`` is an op with a backward of its own, where that has a CUDA kernel.

    A CPU build of torch has none and would take the norm apart before autograd sees it.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
        yield
        return
    library = torch.library.Library("aten", "IMPL", "CUDA")
    try:
        library.impl("_fused_rms_norm", _not_run)
        yield
    finally:
        library._destroy()


def _not_run(*args: Any) -> Any:
    raise CannotTrace("tensors of these graphs are fake")


def _grad(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None],
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` as AOTAutograd calls it, node by node.

    The engine asks the accelerator for its current stream as soon as a gradient lies on CUDA, which
    fails without one. The nodes run in the engine's order, so the graph traced is the same.
    """
    nodes: list[Any] = []
    wanted: dict[Any, bool] = {}
    leaves = {id(t): i for i, t in enumerate(inputs) if t.grad_fn is None}
    others = {(t.grad_fn, t.output_nr): i for i, t in enumerate(inputs) if t.grad_fn is not None}
    results: list[Tensor | None] = [None] * len(inputs)
    fed: dict[Any, dict[int, Tensor]] = {}

    def leaf(node: Any) -> int | None:
        return leaves.get(id(node.variable)) if hasattr(node, "variable") else None

    # Nodes behind their users, and which of them lead to an input.
    stack = [(o.grad_fn, False) for o in outputs if o.grad_fn is not None]
    while stack:
        node, done = stack.pop()
        if done:
            nexts = [n for n, _ in node.next_functions if n is not None]
            target = leaf(node) is not None or any(n is node for n, _ in others)
            wanted[node] = target or any(wanted[n] for n in nexts)
            nodes.append(node)
        elif node not in wanted:
            wanted[node] = False
            stack.append((node, True))
            stack.extend((n, False) for n, _ in node.next_functions if n is not None)

    waits = dict.fromkeys(nodes, 0)
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None and wanted[node]:
                waits[following] += 1

    def feed(node: Any, slot: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        held = fed.setdefault(node, {})
        held[slot] = held[slot] + grad if slot in held else grad

    with torch.no_grad():
        for out, grad in zip(outputs, grad_outputs, strict=True):
            if out.grad_fn is not None:
                feed(out.grad_fn, out.output_nr, grad)
        roots = {o.grad_fn for o in outputs if o.grad_fn is not None}
        order = {node: i for i, node in enumerate(nodes)}
        ready = [
            (-node._sequence_nr(), order[node])
            for node in roots
            if wanted[node] and waits[node] == 0
        ]
        heapq.heapify(ready)
        while ready:
            node = nodes[heapq.heappop(ready)[1]]
            held = fed.pop(node, {})
            for (producer, slot), i in others.items():
                if producer is node:
                    results[i] = held.get(slot)
            at = leaf(node)
            if at is not None:
                results[at] = held.get(0)
            if not any(n is not None and wanted[n] for n, _ in node.next_functions):
                continue
            grads = _call(node, [held.get(n) for n in range(len(node._input_metadata))])
            for (following, slot), grad in zip(node.next_functions, grads, strict=True):
                if following is None or not wanted[following]:
                    continue
                if grad is not None:
                    grad = _as_input(grad, following._input_metadata[slot])
                feed(following, slot, grad)
                waits[following] -= 1
                if waits[following] == 0:
                    heapq.heappush(ready, (-following._sequence_nr(), order[following]))
    return tuple(results)


def _call(node: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """One node, with the metadata that AOTAutograd's hooks leave for the ops it traces."""
    from torch.fx import traceback

    if all(g is None for g in grads):
        return (None,) * len(node.next_functions)
    traced = node.metadata.get("traceback_", [])
    traceback.set_stack_trace(traced)
    traceback.set_grad_fn_seq_nr(node._sequence_nr())
    getattr(traceback, "_mark_autograd_backward", lambda: None)()
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    out = node.apply(*grads) if is_python else node(*grads)
    traceback.set_stack_trace([*traced, traceback.GRADIENT_ACC_SPECIAL_STACK])
    traceback.reset_grad_fn_seq_nr()
    getattr(traceback, "_reset_autograd_backward", lambda: None)()
    out = out if isinstance(out, tuple) else (out,)
    # A Python function returns a gradient for every argument, and edges are those of its tensors.
    return tuple(out[: len(node.next_functions)]) if is_python else out


def _as_input(grad: Tensor, metadata: Any) -> Tensor:
    """A gradient in the shape and dtype of what it belongs to."""
    if tuple(grad.shape) != tuple(metadata.shape):
        grad = grad.sum_to_size(metadata.shape)
    return grad if grad.dtype == metadata.dtype else grad.to(metadata.dtype)


@contextlib.contextmanager
def _triton_driver() -> Iterator[None]:
    """An active driver: the analysis of what a kernel mutates asks it for its target."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    before = driver._active
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        driver._active = before


@functools.cache
def _sm100_ops() -> types.ModuleType:
    """torchao's kernel module as it is on sm_100.

    torchao defines these ops at import, if the machine has them. Elsewhere its source is run once
    more as a private module, with the machine's answers replaced; ops that exist stay as they are.
    """
    defined = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        defined("torchao::triton_to_mxfp8_dim0", "Meta")
        defined("torchao::mxfp8_quantize", "Meta")
        module: types.ModuleType = kernels
        return module
    except RuntimeError:
        pass
    # Of the same name, so that kernels and ops say where they are from as on sm_100.
    spec = importlib.util.spec_from_file_location(kernels.__name__, kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as stack:
        patch = functools.partial(_patch, stack)
        patch(torch.utils._triton, "has_triton", lambda: HAS_TRITON)
        patch(torch.cuda, "is_available", lambda: True)
        patch(torchao.utils, "is_sm_at_least_100", lambda: True)
        patch(torchao.utils, "is_cuda_version_at_least", lambda major, minor: True)
        for name in ("custom_op", "triton_op"):
            patch(torch.library, name, _unless_defined(getattr(torch.library, name)))
        spec.loader.exec_module(module)
    if not HAS_TRITON:
        for name, like in (
            ("triton_to_mxfp8_dim0", _dim0_like),
            ("triton_to_mxfp8_dim1", _dim1_like),
        ):
            setattr(module, name, _opaque_cast(name, like))
    return module


def _unless_defined(define: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.library.custom_op`` that leaves ops alone which exist."""

    def maybe(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in torch._library.custom_ops.OPDEFS:
            return lambda fn: mock.MagicMock()  # takes register_fake and forgets it
        return define(name, *args, **kwargs)

    return maybe


def _opaque_cast(name: str, like: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """An op of torchao's name and schema that has a fake kernel only."""

    def cast(
        x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil"
    ) -> tuple[Tensor, Tensor]:
        raise NeedsTriton(f"torchao::{name} runs on Triton")

    cast.__annotations__ = {
        "x": Tensor,
        "inner_block_size": int,
        "scaling_mode": str,
        "return": tuple[Tensor, Tensor],
    }
    op = torch.library.custom_op(f"torchao::{name}", cast, mutates_args=())
    op.register_fake(like)
    return op


def _dim0_like(
    x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil"
) -> tuple[Tensor, Tensor]:
    scale = (*x.shape[:-1], x.shape[-1] // inner_block_size)
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(scale, dtype=torch.float8_e8m0fnu),
    )


def _dim1_like(
    x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil"
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return (
        x.new_empty((columns, rows), dtype=torch.float8_e4m3fn).t(),
        x.new_empty((columns, rows // inner_block_size), dtype=torch.float8_e8m0fnu),
    )
