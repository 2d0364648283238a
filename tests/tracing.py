"""Aten graphs of plain functions, without Dynamo: a second where a compile takes ten; and a way to
run any graph on the CPU, with the operands of its matrix products on record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import decompositions, select_decomp_table
from torch._inductor.lowering import lowerings
from torch.fx import Graph, GraphModule, Interpreter, Node

from mxnorm_pass import MXNormConfig, MXNormPass, reference
from mxnorm_pass.formats import Cast, swizzle
from mxnorm_pass.recognise import emulate
from mxnorm_pass.report import GraphReport, Report

aten = torch.ops.aten


def trace(fn: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The graph of ``fn`` as Inductor's joint pre-pass gets it: joint where an input requires a
    gradient, else the forward alone.
    """
    found: list[GraphModule] = []

    def forward(gm: GraphModule, _: Any) -> GraphModule:
        found.append(gm)
        return gm

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        # The graph alone: a constant on the module may be fake, and a fake one cannot be copied.
        found.append(GraphModule(joint, copy.deepcopy(joint.graph)))
        return default_partition(joint, joint_inputs, **kwargs)

    with torch.set_grad_enabled(any(i.requires_grad for i in inputs)):
        aot_function(
            fn,
            fw_compiler=forward,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )(*inputs)
    return found[0]


@dataclass
class Ran:
    """What a graph gave: its outputs, and the operands of every matrix product, in order."""

    outputs: tuple[Tensor, ...]
    operands: list[tuple[Tensor, ...]] = field(default_factory=list)


class OnCPU(Interpreter):
    """Runs a graph that was traced for another device, its opaque casts by the oracle.

    Scaled matrix products are not computed: their operands are what a cast is judged by.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.operands: list[tuple[Tensor, ...]] = []

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        if n.target is aten._assert_tensor_metadata.default:
            return None
        name = str(n.target)
        if name in _OPAQUE:
            return _OPAQUE[name](*args, **kwargs)
        if n.target in emulate.FUNCTIONS:
            return emulate.FUNCTIONS[n.target](*args, **kwargs)
        if name.startswith(("aten._scaled_mm", "aten._scaled_grouped_mm")):
            self._record(args)
            size = (args[0].shape[0], args[1].shape[-1])
            return torch.zeros(size, dtype=n.meta["val"].dtype)
        if n.target in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            self._record(args)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _record(self, args: Any) -> None:
        flat = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Tensor)]
        self.operands.append(tuple(a.detach().clone() for a in flat))


def run(graph: Graph, owner: Any, *inputs: Tensor) -> Ran:
    """Run on real inputs, one per placeholder."""
    interpreter = OnCPU(GraphModule(owner, graph))
    with torch.no_grad():
        outputs = interpreter.run(*inputs)
    flat = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, Tensor)]
    return Ran(tuple(flat), interpreter.operands)


def example_inputs(graph: Graph, seed: int = 0) -> list[Tensor]:
    """Random values for every placeholder, in its shape and dtype."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        size = [int(s) for s in val.shape]
        if val.dtype in (torch.float32, torch.bfloat16, torch.float64):
            t = torch.randn(size, generator=generator).to(val.dtype)
            made.append(t if size else t.abs() + 0.01)
        elif val.dtype.is_floating_point:
            byte = torch.randint(100, 120, size, generator=generator, dtype=torch.uint8)
            made.append(byte.view(val.dtype))
        else:
            high = max(size) if val.dtype is torch.int64 else 100
            made.append(torch.randint(0, high, size, generator=generator).to(val.dtype))
    return made


@dataclass
class Rewritten:
    """A graph before and after the pass, and what the pass says."""

    before: Graph
    after: Graph
    owner: GraphModule
    result: GraphReport

    @property
    def sites(self) -> list[Any]:
        return self.result.sites

    @property
    def placeholders(self) -> list[Node]:
        return list(self.before.find_nodes(op="placeholder"))

    @property
    def output_dtype(self) -> torch.dtype:
        """Of the first output."""
        first = torch.utils._pytree.tree_leaves(self.before.output_node().args)[0]
        return first.meta["val"].dtype  # type: ignore[no-any-return]

    @property
    def report(self) -> Report:
        return Report([self.result])

    def runs(self, *inputs: Tensor) -> tuple[Ran, Ran]:
        """Both graphs on the same inputs, by default random ones."""
        given = list(inputs) or example_inputs(self.before)
        return run(self.before, self.owner, *given), run(self.after, self.owner, *given)


def rewrite(gm: GraphModule, config: MXNormConfig | None = None) -> Rewritten:
    """Apply the pass to a copy, once and then once more: the second time finds nothing."""
    config = config or MXNormConfig(rms="exact", strict=True)
    after = copy.deepcopy(gm.graph)
    after.owning_module = gm
    result = MXNormPass(config).apply(after)
    count = len(after.nodes)
    again = MXNormPass(config).apply(after)
    assert again.rewritten == 0 and len(after.nodes) == count, "the pass is not idempotent"
    assert_lowered(gm.graph, after)
    return Rewritten(gm.graph, after, gm, result)


def assert_lowered(before: Graph, after: Graph) -> None:
    """Inductor can compile what the pass put in: ops of decompositions are gone when it runs."""
    known = {node.name for node in before.nodes}
    for node in after.nodes:
        if node.op == "call_function" and node.name not in known:
            assert node.target in lowerings or node.target not in decompositions, node.target


def assert_fake_values(graph: Graph) -> None:
    """Each node's ``meta["val"]`` is what its op makes of its inputs': shape, stride, dtype."""
    for node in graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        flat = torch.utils._pytree.tree_leaves(given)
        modes = [t.fake_mode for t in flat if isinstance(t, torch._subclasses.FakeTensor)]
        if not modes:
            continue
        with modes[0]:
            expected = node.target(*given[0], **given[1])
        got = torch.utils._pytree.tree_leaves(node.meta["val"])
        for a, b in zip(got, torch.utils._pytree.tree_leaves(expected), strict=True):
            if isinstance(a, Tensor):
                assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), node
                assert a.stride() == b.stride(), node


# --- opaque casts, by the oracle ------------------------------------------------------------------


def _dim0(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> Any:
    rule = {"rceil": "rceil_exact", "floor": "floor"}[scaling_mode]
    cast = Cast("e4m3", inner_block_size, rule, "reciprocal", "clamp")  # type: ignore[arg-type]
    qdata, scale = reference.quantize(x, cast)
    return qdata, scale.view(torch.float8_e8m0fnu)


def _mxfp8_quantize(
    x: Tensor, rowwise: bool, colwise: bool, dx: int, dy: int, element: str, mode: str
) -> Any:
    empty = torch.empty(0, dtype=torch.float8_e4m3fn)
    none = (empty, torch.empty(0, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    rows = _dim0(x, dy, mode) if rowwise else none
    columns = _dim0(x.t().contiguous(), dy, mode) if colwise else none
    return rows[0], columns[0].t() if colwise else empty, rows[1], columns[1]


def _mslk(x: Tensor, global_scale: Tensor | None = None) -> Any:
    cast = Cast("e2m1", 16, "e4m3", "reciprocal", "clamp")
    outer = 1.0 if global_scale is None else float(1.0 / global_scale)
    qdata, scale = reference.quantize(x, cast, outer)
    rows, columns = scale.reshape(-1, scale.shape[-1]).shape
    flat = swizzle(scale.reshape(rows, columns))
    wide = -(-columns // 4) * 4
    return flat.view(-1, wide), qdata


_OPAQUE: dict[str, Callable[..., Any]] = {
    "torchao.triton_to_mxfp8_dim0.default": _dim0,
    "torchao.mxfp8_quantize.default": _mxfp8_quantize,
    "ao.mslk_quantize_nvfp4.default": _mslk,
}
