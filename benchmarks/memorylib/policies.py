"""What activation checkpointing keeps: policies as training code has them, and the question that a
policy is asked, on record.

A policy is asked op by op while the unrewritten model is traced. Here the questions are kept on the
nodes of one traced graph, so that every policy can answer them later: tracing takes minutes,
answering none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mxnorm_pass.ops import OP

aten = torch.ops.aten
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
KEY = "recompute"


@dataclass(frozen=True)
class Question:
    """``policy(context, op, *args, **kwargs)``, without the operands."""

    op: Any
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """Where a graph is printed, torch prints the name of the tag."""
        return str(self.op)


Policy = Callable[[Question], CheckpointPolicy]


def _ask(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of a policy: torch puts what this returns on the op's nodes."""
    return Question(op, kwargs.get("dtype"))


recording = partial(create_selective_checkpoint_contexts, _ask)
"""A ``context_fn`` for ``checkpoint``."""


def answering(make: Callable[[], Policy]) -> Callable[[], Any]:
    """A ``context_fn`` that asks a policy while the model is traced, as training code has it."""

    def contexts() -> Any:
        policy = make()
        return create_selective_checkpoint_contexts(
            lambda context, op, *args, **kwargs: policy(Question(op, kwargs.get("dtype")))
        )

    return contexts


def saving(*ops: Any) -> Callable[[], Policy]:
    """Save what these ops return, compute the rest again."""
    return lambda: lambda question: SAVE if question.op in ops else AGAIN


def every_other_matmul() -> Policy:
    """torchtitan's: of the matmuls every second one is computed again."""
    count = 0

    def policy(question: Question) -> CheckpointPolicy:
        nonlocal count
        if question.op is not aten.mm.default:
            return SAVE if question.op in _TITAN else AGAIN
        count += 1
        return AGAIN if count % 2 == 0 else SAVE

    return policy


def codes() -> Policy:
    """What a cast stores as float8."""
    narrow = (torch.float8_e4m3fn, torch.float8_e5m2)
    return lambda question: SAVE if question.dtype in narrow else AGAIN


# What torchtitan saves besides matmuls, of what runs on one device.
_TITAN = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten.max.default,
)

POLICIES: dict[str, Callable[[], Policy] | None] = {
    "none": None,
    "full": saving(),
    "save every matmul": saving(aten.mm.default, *_TITAN),
    "save every other matmul": every_other_matmul,
}
"""By name; None: no region is checkpointed."""

NAMING: dict[str, Callable[[], Policy]] = {
    "names our op": saving(OP),
    "saves sums": saving(aten.add.Tensor),
    "saves reductions": saving(aten.mean.dim, aten.rsqrt.default, aten.amax.default),
    "saves codes": codes,
    "saves all": lambda: lambda question: SAVE,
}
"""Policies that name a part of a site, or think they do."""

BUDGETS = (0.0, 0.5, 1.0)
"""``torch._functorch.config.activation_memory_budget``, without regions."""


def asked() -> Policy:
    """For :func:`answer`: the graph was traced under a policy, whose answers stand."""
    raise AssertionError("a question that nobody answered")


def answer(graph: Graph, make: Callable[[], Policy] | None) -> None:
    """Let a policy answer what is on record in the graph; each region gets a policy of its own."""
    policies: dict[int, tuple[Policy, dict[int, Any]]] = {}
    region = 0
    for node in graph.nodes:
        if make is None:
            node.meta.pop(KEY, None)
            node.meta.pop("ac_graph_id", None)
        elif isinstance(question := node.meta.get(KEY), Question):
            # torch 2.11 does not number the nodes of an autograd.Function: they are in the region
            # of those in front.
            region = node.meta.get("ac_graph_id", region)
            if region not in policies:
                policies[region] = (make(), {})
            policy, answers = policies[region]
            # The nodes of one op share their question, which is asked once.
            if id(question) not in answers:
                answers[id(question)] = policy(question)
            node.meta[KEY] = answers[id(question)]
