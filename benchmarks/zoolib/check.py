"""One architecture, one kind: what the oracle says against what the pass did."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from zoolib.build import Built, build
from zoolib.oracle import Oracle, Truth
from zoolib.quantise import HAS_WRAPPER, quantise_, select
from zoolib.trace import Compared, Graph, Tracer

KINDS = ("infer", "train")
DEVICE = "MXNORM_ZOO_DEVICE"
"""Environment variable with the device that models run on, for the worker processes."""
Pair = tuple[str, str]


@dataclass
class Outcome:
    """The result of one architecture and kind.

    Attributes:
        cls: name of the class that was built.
        linears: number of quantised linears.
        norms: number of modules that behave as an RMSNorm.
        norm_paths: where they are.
        trivial: norms with one gain for all columns.
        pairs: (norm, linear) that the oracle saw.
        rewritten: those of them that the pass rewrote.
        declined: those that it declined, with the reason's code.
        missed: those it did neither with.
        false: pairs that it rewrote and the oracle lacks.
        sites: what the pass reported, with paths in the model.
        outputs: forward outputs of the graph as it was and rewritten.
        gradients: the same for the joint graph's gradients.
        graphs: number of graphs; more than one means graph breaks.
        nodes: number of nodes of all graphs.
        seconds: time it took.
    """

    name: str
    kind: str
    cls: str
    linears: int = 0
    norms: int = 0
    norm_paths: list[str] = field(default_factory=list)
    trivial: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    rewritten: list[Pair] = field(default_factory=list)
    declined: list[tuple[str, str, str, str]] = field(default_factory=list)
    missed: list[Pair] = field(default_factory=list)
    false: list[Pair] = field(default_factory=list)
    sites: list[dict[str, Any]] = field(default_factory=list)
    outputs: Compared = field(default_factory=Compared)
    gradients: Compared = field(default_factory=Compared)
    graphs: int = 0
    nodes: int = 0
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        """Something was missed, or rewritten that should not be."""
        return bool(self.missed or self.false)

    def to_json(self) -> dict[str, Any]:
        """As plain data; NaN and infinity become text."""
        content = dataclasses.asdict(self)
        content["where"] = where()
        for compared in (content["outputs"], content["gradients"]):
            worst = compared["worst"]
            if worst is not None and not math.isfinite(worst):
                compared["worst"] = str(worst)
        return content


def where() -> str:
    """What a check runs on: versions decide what graphs look like."""
    device = os.environ.get(DEVICE, "cpu")
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"torch {torch.__version__.split('+')[0]}, {chip}"


# Outputs are compared bit for bit with the unrewritten graph: the op in ATen, which sums alike.
@mock.patch.dict(os.environ, MXNORM_KERNEL="aten")
def check(name: str, kind: str, seed: int = 0) -> Outcome:
    """Build, quantise, watch eagerly, compile once, and compare.

    Args:
        name: a model type of transformers.
        kind: ``infer`` or ``train``.
        seed: of parameters and inputs.
    """
    start = time.perf_counter()
    training = kind == "train"
    try:
        # torchao's training module wants its rows contiguous; its weights mostly do not mind.
        strict = training and not HAS_WRAPPER
        built, paths, truth = prepare(name, training, seed, contiguous=strict)
    except (NotImplementedError, AssertionError):
        # Torch expands the weight of a linear whose input is transposed, and torchao's do not.
        built, paths, truth = prepare(name, training, seed, contiguous=True)
    outcome = Outcome(name, kind, built.cls, linears=len(paths))
    outcome.norms = len(truth.norms)
    outcome.norm_paths = sorted(truth.norms)
    outcome.trivial = sorted(truth.trivial)
    outcome.pairs = sorted(truth.pairs)
    # A model without an RMSNorm too: what the pass rewrites there is false.
    if paths:
        graphs = trace(built, training)
        settle(outcome, truth, graphs, built.model)
    outcome.seconds = time.perf_counter() - start
    return outcome


def prepare(
    name: str, training: bool, seed: int, contiguous: bool
) -> tuple[Built, list[str], Truth]:
    """A quantised model, the paths of its quantised linears, and what the oracle saw."""
    built = build(name, seed)
    device = os.environ.get(DEVICE, "cpu")
    built.model.to(device)
    built.inputs = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), built.inputs)
    built.model.train(training)
    paths = select(built.model, built.inputs, training, contiguous)
    if training and not HAS_WRAPPER:
        # Linears that are replaced hide their products from the oracle: it watches before.
        truth = Oracle(built.model, paths).watch(built.inputs)
        quantise_(built.model, paths, training)
        return built, paths, truth
    quantise_(built.model, paths, training)
    return built, paths, Oracle(built.model, paths).watch(built.inputs)


def trace(built: Built, training: bool) -> list[Graph]:
    """The graphs of one compiled forward, each already compared with its rewritten copy."""
    torch._dynamo.reset()
    tracer = Tracer(built.model)
    limit = torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024)
    with torch.set_grad_enabled(training), limit:
        torch.compile(built.model, backend=tracer, dynamic=False)(**built.inputs)
    torch._dynamo.reset()
    return tracer.graphs


def settle(outcome: Outcome, truth: Truth, graphs: list[Graph], model: nn.Module) -> None:
    """Fill in what became of each pair of the oracle."""
    same = {alias: main for main, paths in truth.aliases.items() for alias in paths}
    known = {path for path, _ in model.named_modules()}
    rewritten: Counter[Pair] = Counter()
    declined: dict[str, tuple[str, str]] = {}
    for graph in graphs:
        outcome.graphs += 1
        outcome.nodes += graph.nodes
        merge(outcome.outputs, graph.outputs)
        merge(outcome.gradients, graph.gradients)
        for roots in graph.calls:
            for site in graph.report.sites:
                norm = place(site.norm, roots, known)
                consumers = [place(c, roots, known) for c in site.consumers]
                outcome.sites.append(
                    {
                        "norm": norm,
                        "consumers": consumers,
                        "status": site.status,
                        "reason": site.reason,
                        "detail": site.detail,
                    }
                )
                if site.status == "rewritten":
                    rewritten.update((same.get(norm, norm), c) for c in consumers)
                else:
                    for c in consumers or [norm]:
                        declined[c] = (str(site.reason), site.detail)
    for (norm, linear), calls in sorted(truth.pairs.items()):
        # One site per call of the norm: a module that is used twice is two sites.
        if rewritten[norm, linear] >= calls:
            outcome.rewritten.append((norm, linear))
        elif linear in declined or norm in declined:
            reason, detail = declined.get(linear) or declined[norm]
            outcome.declined.append((norm, linear, reason, detail))
        else:
            outcome.missed.append((norm, linear))
    outcome.false = sorted(set(rewritten) - set(truth.pairs))


def merge(into: Compared, other: Compared) -> None:
    """Add the counts of another graph."""
    into.total += other.total
    into.different += other.different
    into.nonfinite += other.nonfinite
    if other.worst is not None and (into.worst is None or not other.worst >= into.worst):
        into.worst = other.worst


def place(path: str, roots: list[str], known: set[str]) -> str:
    """A path of a frame as a path of the model."""
    for root in roots:
        full = f"{root}.{path}".strip(".")
        if full in known:
            return full
    return path
