"""Activation checkpointing: what is recomputed is bitwise what the forward had, and nothing more is
saved than without the pass, under every policy.

A model is traced once; each policy answers what torch asked while tracing (``memorylib``).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import EMULATED, MXFP8Linear, llama, rows
from numerics import assert_same_bytes
from test_casts import torchao_dequantised
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from mxnorm_pass import MXNormConfig
from mxnorm_pass.ops import COLWISE_OP, OPS

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from memorylib import policies
from memorylib.graphs import Halves, Traced, halves, size_of, trace

aten = torch.ops.aten
CONFIGS = {"exact": MXNormConfig(rms="exact", strict=True), "estimate": MXNormConfig(strict=True)}
K = 64


class Linear(torch.autograd.Function):
    """As torchao's: casts along rows, and along tokens for the weight's gradient. The backward's
    other casts cost time to trace and change nothing here.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(y, w)
        return mxfp8(y) @ mxfp8(w).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, w = ctx.saved_tensors
        turned = y.reshape(-1, y.shape[-1]).t().contiguous()
        return grad @ w, grad.reshape(-1, grad.shape[-1]).t() @ mxfp8(turned).t()


def mxfp8(y: Tensor) -> Tensor:
    return torchao_dequantised(y, "e4m3", "RCEIL")


def weight(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(0.1 * rows(*shape, seed=seed))


class Half(nn.Module):
    """norm -> MX linear -> plain linear, without the residual add."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, eps=1e-5).bfloat16()
        self.norm.weight = nn.Parameter(1 + 0.3 * rows(K, seed=seed))
        self.up, self.down = weight(K, K, seed=seed + 1), weight(K, K, seed=seed + 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(Linear.apply(self.norm(x), self.up)) @ self.down.t()


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Half(seed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    """A layer of two halves in a region of activation checkpointing."""

    def __init__(self, contexts: Any = policies.recording) -> None:
        super().__init__()
        self.layer = nn.Sequential(Residual(0), Residual(10))
        self.contexts = contexts

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=self.contexts)


def start(dynamic: bool = False) -> Tensor:
    x = rows(3, 32, K).requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return x


@functools.cache
def traced(dynamic: bool) -> Traced:
    return trace(Model(), start(dynamic))


SITES = 2
ALL = {**policies.POLICIES, **policies.NAMING}


@functools.cache
def cut(dynamic: bool, policy: str, config: str | None, budget: float = 1.0) -> Halves:
    chosen = None if config is None else CONFIGS[config]
    return halves(traced(dynamic), ALL[policy], chosen, budget)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert_same_bytes(a, b)


def stands_for(node: Any) -> set[int]:
    """Which outputs of an op of ours a saved node is: 0 codes, 1 scales, 2 root, 3 sum."""
    while node.target in (aten.view.default, aten.view.dtype):
        node = node.args[0]
    ours = node.target is operator.getitem and node.args[0].target in OPS
    return {node.args[1]} if ours else set()


def check(on: Halves, plain: list[Tensor], sites: int) -> set[int]:
    """Every site is rewritten; what is computed again is bitwise what it was; outputs and gradients
    are those given. Returns which outputs of our ops are saved.
    """
    assert on.report is not None and on.report.rewritten == len(on.report.sites) == sites
    columns = [n for n in on.backward.graph.nodes if n.target is COLWISE_OP]
    assert len(columns) == on.ops()[0] == sites
    ran = on.run(watch=True)
    assert len(ran.forward) == sites and ran.backward.keys() <= ran.forward.keys()
    assert len(ran.backward) == on.ops()[1]
    for name, again in ran.backward.items():
        for a, b in zip(again, ran.forward[name], strict=True):
            assert_same_bytes(a, b, name)
    assert_same([*ran.outputs, *ran.gradients], plain)
    return set().union(*map(stands_for, on.saved))


def result(config: str, dynamic: bool) -> list[Tensor]:
    """Without checkpointing: with the true RMS what the unrewritten model gave."""
    ran = cut(dynamic, "none", None if config == "exact" else config).run()
    return [*ran.outputs, *ran.gradients]


def tags(halves: Halves) -> set[Any]:
    """How our ops and their outputs are tagged."""
    ours = [n for n in halves.joint.nodes if n.target in OPS]
    assert all(n.meta["partitioner_tag"] == "is_forward" for n in ours)
    return {n.meta.get("recompute") for op in ours for n in (op, *op.users)}


@pytest.mark.parametrize(
    ("policy", "config", "dynamic"),
    [
        *((policy, "estimate", False) for policy in policies.POLICIES),
        ("full", "exact", False),
        ("save every matmul", "exact", False),
        ("names our op", "estimate", False),
        ("none", "exact", True),
        ("full", "exact", True),
        ("save every other matmul", "exact", True),
    ],
)
def test_every_policy(policy: str, config: str, dynamic: bool) -> None:
    """Without regions a site hands on its root and its row, the stream's; in a region nothing."""
    off, on = cut(dynamic, policy, None), cut(dynamic, policy, config)
    kept = check(on, result(config, dynamic), SITES)
    assert on.saved_bytes <= off.saved_bytes
    if policy == "none":
        assert tags(on) == {None} and on.ops()[1] == 0 and kept == {2, 3}
        roots = [n for n in on.saved if stands_for(n) == {2}]
        assert len(roots) == SITES
    else:
        assert tags(on) == {policies.AGAIN} and on.ops()[1] == SITES and kept == set()
    assert_same(off.run().gradients, traced(dynamic).gradients)


@pytest.mark.parametrize("policy", ["saves sums", "saves reductions", "saves codes", "saves all"])
def test_policies_that_name_a_part_of_a_site(policy: str) -> None:
    """A root, a maximum or a sum that is asked for brings no codes with it; codes that are asked
    for bring their scales and root, and the op is not run again.
    """
    off, on = cut(False, policy, None), cut(False, policy, "estimate")
    kept = check(on, result("estimate", False), SITES)
    if policy == "saves codes":
        assert kept == {0, 1, 2} and tags(on) == {policies.SAVE} and on.ops()[1] == 0
        beside = sum(size_of(n) for n in on.saved if stands_for(n) & {1, 2})
        assert on.saved_bytes <= off.saved_bytes + beside
        return
    assert on.saved_bytes <= off.saved_bytes
    if policy == "saves all":
        assert kept == {2, 3} and tags(on) == {policies.SAVE}
    else:
        assert kept == set() and tags(on) == {policies.AGAIN} and on.ops()[1] == SITES


def test_a_cast_without_the_number_of_its_region() -> None:
    """torch 2.11 tags what an autograd.Function runs and does not number it: the norm says where
    the cast is, and the op takes the sum in as it does elsewhere.
    """
    whole = traced(False)
    joint = GraphModule(whole.joint, copy.deepcopy(whole.joint.graph))
    tagged = [n for n in joint.graph.nodes if policies.KEY in n.meta]
    in_function = [n for n in tagged if "mxfp8(y) @ mxfp8(w)" in n.meta["stack_trace"]]
    assert 100 < len(in_function) < len(tagged)
    for node in in_function:
        node.meta.pop("ac_graph_id", None)
    bare = dataclasses.replace(whole, joint=joint)
    on = halves(bare, ALL["saves all"], CONFIGS["estimate"])
    assert check(on, result("estimate", False), SITES) == {2, 3}
    assert [s.spec["residual"] for s in on.report.sites] == [False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_memory_budgets(budget: float) -> None:
    """torch's own choice of what to compute again; 1.0 is no budget."""
    off, on = (cut(False, "none", config, budget) for config in (None, "estimate"))
    kept = check(on, result("estimate", False), SITES)
    assert on.saved_bytes <= off.saved_bytes and kept <= {2, 3}
    assert on.ops()[1] >= (SITES if budget == 0 else 1)


def test_a_policy_asked_while_tracing_says_the_same() -> None:
    """What this file does otherwise: answer questions on record."""
    policy = ALL["save every other matmul"]
    assert policy is not None
    model = trace(Model(policies.answering(policy)), start())
    told = cut(False, "save every other matmul", "estimate")
    on = halves(model, policies.asked, CONFIGS["estimate"])
    assert [n.name for n in on.saved] == [n.name for n in told.saved]
    assert check(on, result("estimate", False), SITES) == set()


class Streams(nn.Module):
    """Each region hands on the stream and what is to be added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Half(0), Half(10)])

    def forward(self, x: Tensor) -> Tensor:
        r = x.flip(0)
        for half in self.halves:

            def layer(x: Tensor, r: Tensor, half: Any = half) -> tuple[Tensor, Tensor]:
                h = x + r
                return h, half(h)

            x, r = checkpoint(layer, x, r, use_reentrant=False, context_fn=policies.recording)
        return x + r


def test_what_a_region_hands_on_is_saved() -> None:
    """The partitioner saves no output of an op that it computes again: a sum that the next region
    reads is no output of ours, or the backward would begin with the whole forward again.
    """
    model = trace(Streams(), start())
    off, on = (halves(model, ALL["full"], c) for c in (None, CONFIGS["exact"]))
    sums = [n.name for n in off.saved if n.meta["val"].dim()]
    assert len(sums) == 1
    assert [n.name for n in on.saved if n.meta["val"].dim()] == sums
    check(on, [*off.run().outputs, *model.gradients], 2)
    assert [s.spec["residual"] for s in on.report.sites] == [False, True]  # type: ignore[union-attr]


class Sandwich(nn.Module):
    """Norms in front of the halves and one behind, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Half(0), Half(10)])
        self.post = nn.RMSNorm(K, eps=1e-5).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post(self.halves[0](x))
        return x + self.halves[1](x)


def test_a_sum_that_the_backward_forms_again_is_not_saved() -> None:
    """The post-norm's backward has the matmul's output: saving the sum besides would be more."""
    model = trace(Sandwich(), start())
    for budget in (1.0, 0.5):
        off, on = (halves(model, None, c, budget) for c in (None, CONFIGS["exact"]))
        assert on.saved_bytes <= off.saved_bytes
        kept = check(on, [*off.run().outputs, *model.gradients], 2)
        assert kept <= {2}
        assert [s.spec["residual"] for s in on.report.sites] == [False, True]  # type: ignore[union-attr]


class Transformers(nn.Module):
    """transformers' Llama, its layers checkpointed by itself; MX linears behind both norms."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama(layers=1, hidden=K).model
        for part, name in (("self_attn", "q_proj"), ("mlp", "gate_proj")):
            parent = getattr(self.model.layers[0], part)
            old = getattr(parent, name)
            new = MXFP8Linear(
                old.in_features, old.out_features, bias=False, kernel_preference=EMULATED
            ).bfloat16()
            new.weight = old.weight
            setattr(parent, name, new)
        kwargs = {"use_reentrant": False, "context_fn": policies.recording}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        self.model.train()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state  # type: ignore[no-any-return]


@functools.cache
def transformers_traced() -> Traced:
    return trace(Transformers(), start(dynamic=True))


@pytest.mark.parametrize(
    "policy",
    [pytest.param("none", marks=pytest.mark.long), pytest.param("full", marks=pytest.mark.slow)],
)
def test_gradient_checkpointing_of_transformers(policy: str) -> None:
    """With a batch of any size; attention's random state is no matter of ours.

    Without torch's rule to save what ends a chain of a hundred fusible nodes: where that falls is
    chance, here on the final norm, which lies outside the regions and is not rewritten.
    """
    model = transformers_traced()
    with torch._functorch.config.patch(ban_recompute_long_fusible_chains=False):
        off, on = (halves(model, ALL[policy], c) for c in (None, CONFIGS["exact"]))
    saved = (on.saved_bytes, off.saved_bytes)
    assert saved[0] <= saved[1]
    kept = check(on, [*off.run().outputs, *model.gradients], 2)
    assert kept == ({2, 3} if policy == "none" else set())
    assert on.ops()[1] == (0 if policy == "none" else 2)
