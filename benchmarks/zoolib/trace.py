"""One compile of a model: each graph as it is and rewritten, both run on the same real inputs."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from mxnorm_pass import MXNormConfig, MXNormPass
from mxnorm_pass.report import GraphReport

CONFIG = MXNormConfig(rms="exact", gain="kernel", strict=True)
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Compared:
    """Tensors of two graphs: how many, how many differ in a bit, the worst of those in dB."""

    total: int = 0
    different: int = 0
    nonfinite: int = 0
    worst: float | None = None

    def add(self, expected: Tensor, got: Tensor) -> None:
        """Compare one pair."""
        self.total += 1
        if expected.is_floating_point() and not bool(expected.float().isfinite().all()):
            self.nonfinite += 1
        if same_bits(expected, got):
            return
        self.different += 1
        ratio = sqnr(expected, got)
        if self.worst is None or not ratio >= self.worst:
            self.worst = ratio


@dataclass
class Graph:
    """One graph that torch.compile handed over.

    ``calls`` says for each call which modules of the model the frame's module paths begin at: the
    model itself, or parts of it after a graph break, and others where a graph serves two layers.
    """

    training: bool
    report: GraphReport
    nodes: int
    calls: list[list[str]] = field(default_factory=list)
    outputs: Compared = field(default_factory=Compared)
    gradients: Compared = field(default_factory=Compared)


class Tracer:
    """A backend that runs each graph as it was, and beside it the rewritten one."""

    def __init__(self, model: nn.Module) -> None:
        self.graphs: list[Graph] = []
        self.owners: dict[int, str] = {}
        for path, module in model.named_modules():
            for name, value in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                self.owners.setdefault(id(value), f"{path}.{name}".lstrip("."))

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        sources = [source_of(n) for n in gm.graph.find_nodes(op="placeholder")]
        first = len(self.graphs)
        job = _Job(self)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            compiled = aot_autograd(
                fw_compiler=job.forward,
                bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
                inference_compiler=job.inference,
                partition_fn=job.partition,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )(gm, example_inputs)
        mine = self.graphs[first:]

        def call(*args: Any) -> Any:
            for graph in mine:
                graph.calls.append(self._roots(sources, args))
            return compiled(*args)

        return call

    def _roots(self, sources: list[str], args: Any) -> list[str]:
        """Paths of the modules that this frame's names begin at, by the tensors it is given."""
        roots: dict[str, None] = {}
        for source, arg in zip(sources, args, strict=False):
            owner = self.owners.get(id(arg))
            if owner is None or not source:
                continue
            if owner == source:
                roots[""] = None
            elif owner.endswith("." + source):
                roots[owner[: -len(source) - 1]] = None
        return list(roots) or [""]


class _Job:
    """The compilers of one Dynamo graph: AOTAutograd calls them in its own order."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.joint: GraphModule | None = None
        self.rewritten: GraphModule | None = None
        self.graph: Graph | None = None
        self.num_outputs = 0

    def _rewrite(self, gm: GraphModule, training: bool) -> tuple[GraphModule, GraphModule]:
        """A copy of the graph as it is and one that went through the pass."""
        copies = copy.deepcopy(gm.graph), copy.deepcopy(gm.graph)
        report = MXNormPass(CONFIG).apply(copies[1])
        for graph in copies:
            # A joint graph takes (primals, tangents) as two lists: plain inputs instead.
            graph.set_codegen(CodeGen())
        before, after = GraphModule(gm, copies[0]), GraphModule(gm, copies[1])
        self.graph = Graph(training, report, len(gm.graph.nodes))
        self.tracer.graphs.append(self.graph)
        return before, after

    def partition(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.num_outputs = kwargs["num_fwd_outputs"]
        self.joint, self.rewritten = self._rewrite(joint, training=True)
        return default_partition(joint, joint_inputs, **kwargs)

    def forward(self, gm: GraphModule, _: Any) -> Callable[..., Any]:
        names = [n.name for n in gm.graph.find_nodes(op="placeholder")]

        def run(*args: Any) -> Any:
            self._compare_joint(dict(zip(names, args, strict=True)))
            return gm(*args)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    def inference(self, gm: GraphModule, _: Any) -> Callable[..., Any]:
        before, after = self._rewrite(gm, training=False)
        graph = self.graph
        assert graph is not None

        def run(*args: Any) -> Any:
            if not graph.outputs.total:
                compare(graph.outputs, evaluate(before, args), evaluate(after, args))
            return gm(*args)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    def _compare_joint(self, primals: dict[str, Any]) -> None:
        graph, joint, rewritten = self.graph, self.joint, self.rewritten
        assert graph is not None and joint is not None and rewritten is not None
        if graph.outputs.total:
            return
        generator = torch.Generator().manual_seed(0)
        args = []
        for node in joint.graph.find_nodes(op="placeholder"):
            if node.name in primals:
                args.append(primals[node.name])
                continue
            like = node.meta["val"]
            tangent = torch.randn(tuple(like.shape), generator=generator)
            args.append(tangent.to(like.device, like.dtype))
        expected, got = evaluate(joint, args), evaluate(rewritten, args)
        count = self.num_outputs
        compare(graph.outputs, expected[:count], got[:count])
        compare(graph.gradients, expected[count:], got[count:])


def evaluate(gm: GraphModule, args: Any) -> list[Any]:
    """A graph's flat outputs; it may write to its inputs, so it gets copies."""
    copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    torch.manual_seed(0)
    with torch.no_grad(), same_order(any(isinstance(a, Tensor) and a.is_cuda for a in args)):
        out = gm(*copies)
    return list(torch.utils._pytree.tree_leaves(out, is_leaf=lambda o: o is None))


@contextmanager
def same_order(cuda: bool) -> Iterator[None]:
    """Sums on a GPU in one order: with atomics, two runs of one graph differ."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if cuda:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def compare(into: Compared, expected: list[Any], got: list[Any]) -> None:
    """Every tensor of two lists."""
    assert len(expected) == len(got), f"{len(got)} outputs, not {len(expected)}"
    for a, b in zip(expected, got, strict=True):
        if isinstance(a, Tensor):
            into.add(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    width = _INTEGER[a.element_size()]
    different = a.contiguous().view(width) != b.contiguous().view(width)
    if a.is_floating_point():
        different &= ~(a.float().isnan() & b.float().isnan())
    return not bool(different.any())


def sqnr(expected: Tensor, got: Tensor) -> float:
    """Signal to noise in dB, in float64; NaN where a NaN is on one side only."""
    if expected.shape != got.shape:
        return math.nan
    a, b = expected.double(), got.double()
    noise = torch.where(a == b, 0.0, a - b).square().sum()
    return float(10 * torch.log10(a.square().sum() / noise))


_ROOT = re.compile(r"^L\[['\"]\w+['\"]\](\[['\"]?\w+['\"]?\])*")
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
_CONTAINER = re.compile(r"\b(_modules|_parameters|_buffers|_orig_mod)\b\.?")


def source_of(placeholder: torch.fx.Node) -> str:
    """What Dynamo calls a graph input, as a path below the frame's own variable; "" if nothing."""
    grapharg = placeholder.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return ""
    name = source.name() if callable(source.name) else source.name
    name = _INDEX.sub(r".\1", _ROOT.sub("", str(name)))
    return re.sub(r"\.+", ".", _CONTAINER.sub("", name)).strip(".")
