"""One traced model, partitioned under every policy as Inductor would, with and without the pass;
both halves run op by op.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule, Interpreter, Node

from memorylib.policies import Policy, answer
from mxnorm_pass import MXNormConfig, MXNormPass
from mxnorm_pass.compat import CustomGraphPass
from mxnorm_pass.inner import run_eagerly
from mxnorm_pass.ops import OPS
from mxnorm_pass.report import GraphReport


class _Recorder(CustomGraphPass):
    """Keeps the joint graph as our pass would get it."""

    def __init__(self) -> None:
        self.joint: list[GraphModule] = []

    def __call__(self, graph: Graph) -> None:
        self.joint.append(GraphModule(graph.owning_module, copy.deepcopy(graph)))

    def uuid(self) -> None:
        return None


@dataclass
class Traced:
    """A model's joint graph, the values that it was traced with, and what compiled code gave.

    Attributes:
        joint: forward and backward, unrewritten, with the questions of checkpointing on record.
        primals: inputs of the forward.
        tangents: gradients of its outputs.
        outputs: how many outputs the model has.
        gradients: of the primals that have one, as the unrewritten graph gave them.
        fixed: positions of parameters among the primals.
    """

    joint: GraphModule
    primals: list[Any]
    tangents: list[Tensor]
    outputs: int
    gradients: list[Tensor]
    fixed: list[int]


def trace(model: torch.nn.Module, x: Tensor, *, seed: int = 0) -> Traced:
    """Trace a model of one tensor to one tensor through Dynamo and AOTAutograd, and run it once.

    Args:
        model: called on ``x``; its checkpointed regions use ``policies.recording``.
        x: requires a gradient; what is marked as dynamic stays so.
        seed: of the output's gradient.
    """
    recorder = _Recorder()
    primals: list[Any] = []

    def inner(gm: GraphModule, examples: Any, **kwargs: Any) -> Callable[..., Any]:
        forward = run_eagerly(gm, examples)

        def call(args: list[Any]) -> Any:
            if not kwargs.get("is_backward"):
                primals[:] = [a.detach() if isinstance(a, Tensor) else a for a in args]
            return forward(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(gm: GraphModule, examples: Any) -> Any:
        patches: dict[str, Any] = {"joint_custom_pre_pass": recorder, "fx_graph_cache": False}
        return compile_fx(gm, examples, inner_compile=inner, config_patches=patches)

    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        out = torch.compile(model, backend=backend, fullgraph=True)(x)
    generator = torch.Generator().manual_seed(seed)
    tangent = torch.randn(out.shape, generator=generator).to(out.dtype)
    out.backward(tangent)
    (joint,) = recorder.joint
    parameters = {p.data_ptr(): p for p in model.parameters()}
    leaves = {**parameters, x.data_ptr(): x}
    at = {i: p.data_ptr() for i, p in enumerate(primals) if isinstance(p, Tensor)}
    fixed = [i for i, place in at.items() if place in parameters]
    wanted = (leaves[place].grad for place in at.values() if place in leaves)
    gradients = [gradient for gradient in wanted if gradient is not None]
    return Traced(joint, primals, [tangent], 1, gradients, fixed)


@dataclass
class Ran:
    """Outputs and gradients, and what the ops of the pass returned in each half, by name."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    forward: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    backward: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass
class Halves:
    """A graph cut in two."""

    traced: Traced
    joint: Graph
    forward: GraphModule
    backward: GraphModule
    report: GraphReport | None

    @property
    def saved(self) -> list[Node]:
        """What the forward hands to the backward, without its own inputs and without sizes."""
        nodes = self.forward.graph.output_node().args[0][self.traced.outputs :]  # type: ignore
        handed = (n for n in nodes if isinstance(n, Node) and n.op != "placeholder")
        return [n for n in dict.fromkeys(handed) if isinstance(n.meta["val"], Tensor)]

    @property
    def saved_bytes(self) -> int:
        """Bytes of :attr:`saved`."""
        return sum(size_of(node) for node in self.saved)

    def ops(self) -> tuple[int, int]:
        """Ops of the pass in the forward and in the backward."""
        halves = (self.forward.graph, self.backward.graph)
        first, second = (sum(n.target in OPS for n in half.nodes) for half in halves)
        return first, second

    def run(self, watch: bool = False) -> Ran:
        """Both halves on the traced values, each value let go of after its last use."""
        made: list[dict[str, tuple[Tensor, ...]]] = [{}, {}]
        names = [n.name for n in self.forward.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            primals = dict(zip(names, self.traced.primals, strict=True))
            results = _run(self.forward, list(self.traced.primals), made[0] if watch else None)
            nodes: Any = self.forward.graph.output_node().args[0]
            count = self.traced.outputs
            known = {n.name: r for n, r in zip(nodes, results, strict=True) if isinstance(n, Node)}
            outputs = list(results[:count])
            wanted = [n.name for n in self.backward.graph.find_nodes(op="placeholder")]
            # States of random generators have other names in the backward, and the same order.
            states = iter([known[n.name] for n in nodes[count:] if n.name not in wanted])
            tangents = iter(self.traced.tangents)
            given: list[Any] = []
            for name in wanted:
                if name.startswith("tangents"):
                    given.append(next(tangents))
                elif name.startswith("rng_state"):
                    given.append(next(states))
                else:
                    given.append(known[name] if name in known else primals[name])
            del known, results, states
            gradients = _run(self.backward, given, made[1] if watch else None)
        return Ran(outputs, [g for g in gradients if isinstance(g, Tensor)], *made)


def size_of(node: Node) -> int:
    """Bytes of a node's value; of a symbolic size its hint."""
    value = node.meta["val"]
    numel = value.numel()
    return int(numel.node.hint if isinstance(numel, torch.SymInt) else numel) * value.itemsize


class _Watching(Interpreter):
    """Notes what the ops of the pass return; values go after their last use."""

    def __init__(self, module: GraphModule, made: dict[str, tuple[Tensor, ...]] | None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.made = made

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if self.made is not None and n.target in OPS:
            self.made[n.name] = value
        return value


def _run(module: GraphModule, args: list[Any], made: Any) -> Any:
    return _Watching(module, made).boxed_run(args)


def halves(
    traced: Traced,
    policy: Callable[[], Policy] | None,
    config: MXNormConfig | None,
    budget: float = 1.0,
) -> Halves:
    """Answer the policy's questions, apply the pass, partition.

    Args:
        traced: the model.
        policy: see ``policies.POLICIES``.
        config: of the pass; None for none.
        budget: ``activation_memory_budget``.
    """
    module = GraphModule(traced.joint, copy.deepcopy(traced.joint.graph))
    answer(module.graph, policy)
    report = None if config is None else MXNormPass(config).apply(module.graph)
    modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in module.graph.nodes)
    context = TracingContext(next(filter(None, modes)))
    with torch._functorch.config.patch(activation_memory_budget=budget), tracing(context):
        forward, backward = min_cut_rematerialization_partition(
            module,
            [],
            compiler="inductor",
            num_fwd_outputs=traced.outputs,
            static_lifetime_input_indices=traced.fixed,
        )
    return Halves(traced, module.graph, forward, backward, report)
