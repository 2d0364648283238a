"""See the rows of every site while a model runs, with the true RMS or with the estimate in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.formats import Cast
from mxnorm_pass.graph_pass import MXNormPass
from mxnorm_pass.ops import ABSMAX_OP, OP
from mxnorm_pass.ops.rmsnorm_mxquant import NormOptions, Options
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.consumers import readers
from mxnorm_pass.recognise.paths import module_path
from mxnorm_pass.report import GraphReport, Report, SiteReport
from mxnorm_pass.trust.estimated import other_reads
from mxnorm_pass.trust.nodes import source_of_gain
from mxnorm_pass.trust.tracing import Traced, evaluating, original

SITE = "mxnorm_site"
"""Key of a node's metadata: the :class:`SiteReport` that the op stands for."""
Flow = Literal["exact", "estimate"]


@dataclass(frozen=True)
class Rows:
    """What one site read in one batch.

    Attributes:
        site: the site's entry in the report.
        x: the rows ``[..., K]``, before the norm.
        options: what the op was given, as the configured pass decided it.
        eps: the number added to the mean square.
        gains: names of the parameter that the gain is made of; none where it is no parameter.
    """

    site: SiteReport
    x: Tensor
    options: Options
    eps: float
    gains: list[str]

    @property
    def cast(self) -> Cast:
        """The site's cast."""
        return Cast.parse(self.options.cast)


class Observer(Protocol):
    """Who looks on; called in the order of the graph."""

    def rows(self, rows: Rows) -> Any:
        """A site's rows; what this returns comes back with the site's matmuls."""

    def matmul(self, handed: Any, consumer: str, weight: Tensor) -> None:
        """A linear that reads the site, and its weight ``[K, N]`` as the matmul takes it."""


class _TapPass(MXNormPass):
    """The pass, with each op told which site it stands for."""

    # That is for those who compile.
    advises = False

    def _absorb(self, graph: Graph, op: Node, edits: Sequence[Any]) -> bool:
        """Called once per rewritten site: the sum in front stays outside, so that the op's own
        operand is the row.
        """
        self._ops.append(op)
        return False

    def apply(self, graph: Graph) -> GraphReport:
        self._ops: list[Node] = []
        own = set(graph.nodes)
        result = super().apply(graph)
        self.other_reads = other_reads(graph, own)
        rewritten = [site for site in result.sites if site.status == "rewritten"]
        for op, site in zip(self._ops, rewritten, strict=result.failure is None):
            op.meta[SITE] = site
        return result


class Tapped(AbstractContextManager["Tapped"]):
    """A model in evaluation, without gradients, whose sites are looked at batch by batch.

    Args:
        model: a module with MX casts; as it is, or compiled.
        config: options; the gain stays in the op and nothing is required or dumped.
    """

    def __init__(self, model: nn.Module, config: MXNormConfig) -> None:
        self.model = original(model)
        config = dataclasses.replace(
            config, inner="eager", gain="auto", require_rewrites=None, dump_dir=None
        )
        self._pass = _TapPass(config)
        self._traced = Traced(self.model, self._pass, self._inner)
        self.parameters = self._traced.parameters
        self._stack = ExitStack()
        self._reads: dict[str, dict[str, None]] = {}
        self.flow: Flow = "exact"
        self.observer: Observer | None = None

    def __enter__(self) -> Tapped:
        self._stack.enter_context(evaluating(self.model))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def report(self) -> Report:
        """What was found, one entry per traced graph."""
        return self._pass.report

    def other_reads(self, name: str) -> list[str]:
        """Who reads the parameter ``name`` in any graph or outside of all, but as the gain of a
        norm that is estimated. Only what has run is known.
        """
        ops = self._traced.outside.by_name.get(name, [])
        return [*self._reads.get(name, {}), *(f"{op} outside of every graph" for op in ops)]

    def run(self, batch: Any, flow: Flow, observer: Observer | None = None) -> Any:
        """The model's output, with the true RMS or with the estimate (where the options have it).

        Raises:
            ValueError: where the model has no site.
        """
        self.flow, self.observer = flow, observer
        try:
            output = self._traced(batch)
        finally:
            self.observer = None
        if not self.report.rewritten:
            raise ValueError(
                "no RMSNorm -> MX cast -> matmul was rewritten in this model: quantise its linears "
                f"first (torchao.quantization.quantize_)\n{self.report}"
            )
        return output

    def _inner(self, gm: GraphModule) -> Callable[[list[Any]], Any]:
        matmuls: dict[Node, list[Node]] = {}
        for op in gm.graph.find_nodes(op="call_function", target=OP):
            if SITE not in op.meta:
                continue
            stored = tuple(u for u in op.users if aten.is_getitem(u) and u.args[1] in (0, 1))
            for matmul in readers(stored).matmuls:
                matmuls.setdefault(matmul, []).append(op)
        reads = self._pass.other_reads

        def run(args: list[Any]) -> Any:
            for value, said in zip(args, reads, strict=True):
                whole = self.parameters.find(value)
                for name in whole or self._traced.outside.sharing(value):
                    # Whoever is given a part of a gain does not see a norm scaled by it.
                    found = said if whole else ["something that takes a part of it"]
                    self._reads.setdefault(name, {}).update(dict.fromkeys(found))
            return _Run(gm, self, matmuls).run(*args)

        return run


class _Run(Interpreter):
    """One run of a graph."""

    def __init__(self, gm: GraphModule, tapped: Tapped, matmuls: dict[Node, list[Node]]) -> None:
        super().__init__(gm)
        self._tapped, self._matmuls = tapped, matmuls
        self._handed: dict[Node, Any] = {}
        self._gains: dict[Node, list[str]] = {}

    def run_node(self, n: Node) -> Any:
        if n.target is OP and SITE in n.meta:
            return self._site(n)
        if n.target is ABSMAX_OP:
            args, _ = self.fetch_args_kwargs_from_env(n)
            options = NormOptions(*args[1:])
            return ABSMAX_OP(args[0], *options._replace(rms=self._rms(options.rms)))
        value = super().run_node(n)
        if n.op == "placeholder":
            self._gains[n] = self._tapped.parameters.find(value)
        elif n in self._matmuls and self._tapped.observer is not None:
            self._matmul(n)
        return value

    def _rms(self, configured: str) -> str:
        return "exact" if self._tapped.flow == "exact" else configured

    def _site(self, n: Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        x, options = args[0], Options(*args[1:])
        if self._tapped.observer is not None:
            eps = options.eps if options.eps_tensor is None else float(options.eps_tensor)
            gain = n.args[1]
            source = source_of_gain(gain) if isinstance(gain, Node) else None
            names = self._gains.get(source, []) if source is not None else []
            rows = Rows(n.meta[SITE], x, options, eps, names)
            self._handed[n] = self._tapped.observer.rows(rows)
        return OP(x, *options._replace(rms=self._rms(options.rms)))

    def _matmul(self, n: Node) -> None:
        """Hands on a linear's plain weight; a matmul of codes or of several weights has none."""
        sides = (1, 2) if n.target is torch.ops.aten.addmm.default else (0, 1)
        if n.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return
        weight = self.env[n.args[sides[1]]]  # type: ignore[index]
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return
        for op in self._matmuls[n]:
            k = self._handed_k(op)
            assert self._tapped.observer is not None
            if op in self._handed and weight.shape[0] == k:
                self._tapped.observer.matmul(self._handed[op], module_path(n), weight)

    @staticmethod
    def _handed_k(op: Node) -> int:
        site: SiteReport = op.meta[SITE]
        return int(site.spec["k"])


def mean_squares(x: Tensor, block: int, p: int) -> tuple[Tensor, Tensor]:
    """Mean square ``[...]`` of rows ``[..., K]``, and the square of the power mean of their block
    absmax: times ``c^2``, the estimate's (arXiv 2603.13180). Both float32, as the op forms them.
    """
    x32 = x.float()
    blocks = x32.unflatten(-1, (x.shape[-1] // block, block)).abs().amax(-1)
    powers = blocks.square().mean(-1) if p == 2 else blocks.mean(-1).square()
    return x32.square().mean(-1), powers
