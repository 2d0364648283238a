"""The report of a compile: sites, what became of them, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mxnorm_pass.report.picture import Launch, Sources, View
from mxnorm_pass.report.text import render

if TYPE_CHECKING:
    from mxnorm_pass.recognise.sites import Declined

SCHEMA = 5


class RewriteError(RuntimeError):
    """Fewer sites were rewritten than ``require_rewrites`` asks for; the message holds the
    table.
    """


@dataclass
class SiteReport:
    """One norm and one cast of it.

    Attributes:
        id: ``<norm path>#<n>``, what :attr:`MXNormConfig.off` and ``mxnorm bisect`` call it.
        norm: module path of the norm.
        consumers: module paths of the linears that read the cast.
        status: ``rewritten`` or ``declined``.
        reason: a key of :data:`mxnorm_pass.reasons.REASONS`; None when rewritten.
        detail: what was found instead.
        node: name of the graph node where it was found.
        computed: for a near miss, what that node computes, with a value that shows it.
        expected: what it would have to compute.
        spec: eps, gain kind and where it is applied, block size, element, scale rule, layout,
            kernel, per-tensor scale; ``residual``: the op forms the row as the sum of two tensors;
            ``colwise``: casts along tokens that an op of ours makes, ``colwise_reason``: why not.
        also_read_by: linears that read the norm's output without an MX cast.
        before: the nodes of the site as they were found; None where they are not known.
        after: the nodes that stand there since; None for a declined site.
        kernels: the generated kernels that hold the site's op, where the backend compiled it.
    """

    id: str
    norm: str
    consumers: list[str]
    status: Literal["rewritten", "declined"]
    reason: str | None = None
    detail: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    also_read_by: list[str] = field(default_factory=list)
    node: str = ""
    computed: str = ""
    expected: str = ""
    before: View | None = None
    after: View | None = None
    kernels: list[Launch] = field(default_factory=list)

    @classmethod
    def declined(cls, declined: Declined) -> SiteReport:
        """From what recognition found."""
        return cls(
            declined.id,
            declined.path,
            declined.consumers,
            "declined",
            declined.reason,
            declined.detail,
            node=declined.node,
            computed=declined.computed,
            expected=declined.expected,
        )


@dataclass
class GraphReport:
    """One graph that torch.compile handed over.

    Attributes:
        training: a joint graph of forward and backward.
        sites: rewritten and declined sites.
        plain_casts: forward MX casts (weights, other activations) that no norm feeds.
        seconds: time the pass took.
        from_cache: the compiled graph came from torch's cache, and this report from beside it.
        failure: traceback, where the pass failed on the graph as a whole and left it alone.
        sources: what the sites' pictures and kernels are made of.
    """

    training: bool
    sites: list[SiteReport] = field(default_factory=list)
    plain_casts: int = 0
    seconds: float = 0.0
    from_cache: bool = False
    failure: str | None = None
    sources: Sources = field(default_factory=Sources)

    @property
    def rewritten(self) -> int:
        """Number of rewritten sites."""
        return sum(site.status == "rewritten" for site in self.sites)

    @property
    def declined(self) -> int:
        """Number of sites left alone."""
        return len(self.sites) - self.rewritten

    def summary(self) -> str:
        """One line for the log."""
        kind = "training" if self.training else "inference"
        return (
            f"{kind} graph: {len(self.sites)} sites, {self.rewritten} rewritten, "
            f"{self.declined} declined, {self.plain_casts} casts without a norm, "
            f"{self.seconds:.3f} s"
        )


@dataclass
class Report:
    """What was rewritten, what was not, and why; ``print(report)`` gives a table.

    Attributes:
        graphs: one entry per graph that torch.compile handed over.
        warnings: what the user should know besides.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[SiteReport]:
        """Sites of all graphs."""
        return [site for graph in self.graphs for site in graph.sites]

    @property
    def rewritten(self) -> int:
        """Number of rewritten sites over all graphs."""
        return sum(graph.rewritten for graph in self.graphs)

    def __str__(self) -> str:
        return render(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained HTML page, also written to ``path`` where one is given.

        It holds the table of sites and, per site, its nodes before and after as pictures, the lines
        of code they came from, its spec or its reason, and its generated kernel.
        """
        from mxnorm_pass.report.html import render_html

        text = render_html(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text, also written to ``path`` where one is given."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        text = json.dumps(content, indent=1)
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: for what is no JSON text, or a report of another schema.
        """
        try:
            content = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected the JSON text of a report: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"not a report of schema {SCHEMA}")
        try:
            return cls([_graph(g) for g in content["graphs"]], list(content["warnings"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"not a report of schema {SCHEMA}, see docs/report.schema.json: "
                f"{type(error).__name__}: {error}"
            ) from error


def _graph(content: dict[str, Any]) -> GraphReport:
    sites: Iterable[dict[str, Any]] = content.pop("sites")
    sources = Sources.from_dict(content.pop("sources"))
    return GraphReport(**content, sites=[_site(site) for site in sites], sources=sources)


def _site(content: dict[str, Any]) -> SiteReport:
    for name in ("before", "after"):
        if content[name] is not None:
            content[name] = View(**content[name])
    content["kernels"] = [Launch(**launch) for launch in content["kernels"]]
    return SiteReport(**content)
