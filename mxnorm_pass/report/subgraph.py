"""What a site looks like before and after its rewrite, taken from the graph while it is compiled.

The cost is linear in the nodes of the sites, and a failure in here costs a picture, never the
compile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from mxnorm_pass.recognise.paths import module_path
from mxnorm_pass.report.extent import LIMIT, Extent, around, of_site, put_in
from mxnorm_pass.report.picture import Interned, Mark, Picture, PictureNode, Role, Sources, View

if TYPE_CHECKING:
    from mxnorm_pass.recognise.sites import Declined, Site
    from mxnorm_pass.report.report import GraphReport, SiteReport

log = logging.getLogger(__name__)

# Their own story is not the site's: no code lines, no module, so that equal layers look equal.
_OUTSIDE: tuple[Role, ...] = ("input", "row", "gain")


@dataclass(frozen=True)
class _Taken:
    """A node as it was when it was looked at: a rewrite empties what it erases."""

    name: str
    inputs: tuple[Node, ...]
    op: str
    value: str
    module: str
    stack: int | None


class Camera:
    """Takes the pictures of one graph: :meth:`before` the rewrite, and :meth:`after` it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sources = Sources()
        self._table = Interned(self._sources)
        self._order: dict[Node, int] = {}
        self._extents: dict[str, Extent] = {}
        self._taken: dict[Node, _Taken] = {}
        self._modules: dict[str, str] = {}

    def before(self, sites: Iterable[Site], declined: Iterable[Declined]) -> None:
        """Look at every site, the graph being as it was found."""
        self._order = _places(self._graph)
        for site in sites:
            _guarded(partial(self._look, site.id, partial(of_site, site)))
        named: dict[str, Node] = {}
        for entry in declined:
            named = named or {node.name: node for node in self._graph.nodes}
            failed = named.get(entry.node)
            anchor = entry.anchor or failed
            if anchor is not None:
                _guarded(partial(self._look, entry.id, partial(around, anchor, failed)))

    def after(self, result: GraphReport) -> None:
        """Give every entry of the report its pictures; the graph is the rewritten one."""
        order = _places(self._graph)
        for entry in result.sites:
            extent = self._extents.get(entry.id)
            if extent is not None:
                _guarded(partial(self._develop, entry, extent, order))
        result.sources = self._sources

    def _look(self, key: str, extent: Callable[[], Extent]) -> None:
        found = extent()
        for node in found.roles:
            if node not in self._taken:
                self._taken[node] = self._take(node)
        self._extents[key] = found

    def _take(self, node: Node) -> _Taken:
        return _Taken(
            node.name,
            tuple(node.all_input_nodes),
            _op(node),
            self._value(node.meta.get("val")),
            self._module(node),
            self._table.stack(node.meta.get("stack_trace")),
        )

    def _module(self, node: Node) -> str:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return ""
        innermost = next(reversed(stack))
        path = self._modules.get(innermost)
        if path is None:
            path = self._modules[innermost] = module_path(node)
        return path

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{dtype}[{', '.join(map(str, value.shape))}]"
        if isinstance(value, (list, tuple)):
            return ", ".join(map(self._value, value))
        return "" if value is None else str(value)[:80]

    def _develop(self, entry: SiteReport, extent: Extent, order: dict[Node, int]) -> None:
        roles, then = _in_play(entry, extent, self._taken), self._taken
        marks: dict[Node, Mark] = {}
        now: dict[Node, _Taken] = {}
        if entry.status == "rewritten":
            for node, role in roles.items():
                if node._erased:
                    marks[node] = "removed"
                    continue
                now[node] = self._take(node)
                changed = (now[node].value, now[node].inputs) != (
                    then[node].value,
                    then[node].inputs,
                )
                if changed and role not in _OUTSIDE:
                    marks[node] = "changed"
        else:
            failed = [n for n in roles if n is extent.failed or then[n].name == entry.node]
            marks.update(dict.fromkeys(failed, "failed"))
        owner = entry.norm.rpartition(".")[0]
        entry.before = self._view(then, roles, marks, self._order, owner)
        if entry.status != "rewritten":
            return
        survivors = {node: role for node, role in roles.items() if node in now}
        new, touched = put_in(survivors, self._order)
        after = dict(survivors)
        after.update(dict.fromkeys(new, "rewrite"))
        after.update(dict.fromkeys(touched, "reader"))
        for node in new:
            for source in node.all_input_nodes:
                after.setdefault(source, "input")
        for node in after:
            if node not in now:
                now[node] = self._take(node)
        marks_after = {node: mark for node, mark in marks.items() if node in survivors}
        marks_after.update(dict.fromkeys(new, "new"))
        marks_after.update(dict.fromkeys(touched, "changed"))
        entry.after = self._view(now, after, marks_after, order, owner)

    def _view(
        self,
        taken: dict[Node, _Taken],
        roles: dict[Node, Role],
        marks: dict[Node, Mark],
        order: dict[Node, int],
        owner: str,
    ) -> View:
        chosen = sorted(roles, key=order.__getitem__)
        shown = chosen[:LIMIT]
        place = {node: i for i, node in enumerate(shown)}
        nodes = []
        for node in shown:
            it, role = taken[node], roles[node]
            outside = role in _OUTSIDE
            nodes.append(
                PictureNode(
                    it.op,
                    it.value,
                    # Where an input of the site comes from is not the site's.
                    tuple(place[n] for n in it.inputs if n in place) if role != "input" else (),
                    role,
                    marks.get(node, ""),
                    "" if outside else _relative(it.module, owner, role),
                    None if outside else it.stack,
                )
            )
        picture = Picture(tuple(nodes), len(chosen) - len(shown))
        names = [taken[node].name for node in shown]
        return View(self._table.put(self._sources.pictures, picture), names)


def _in_play(entry: SiteReport, extent: Extent, taken: dict[Node, _Taken]) -> dict[Node, Role]:
    """Without the casts of weights, where no gain was folded into them."""
    if entry.spec.get("gain_at") == "fold":
        return extent.roles
    roles = {node: role for node, role in extent.roles.items() if role != "weight cast"}
    read = [n for node, role in roles.items() if role == "matmul" for n in taken[node].inputs]
    for source in read:
        if extent.roles.get(source) == "weight cast":
            roles[source] = "input"
    # Nobody in the picture reads what only those casts read.
    used = {n for node, role in roles.items() if role != "input" for n in taken[node].inputs}
    return {node: role for node, role in roles.items() if role != "input" or node in used}


def _guarded(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        log.warning("a site of the report has no picture", exc_info=True)


def _places(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _relative(module: str, owner: str, role: Role) -> str:
    if owner and module.startswith(f"{owner}."):
        return "~" + module.removeprefix(owner)
    # The sum of a residual stream is another layer's: which, equal sites would differ in.
    return "" if role in ("rewrite", "reader") else module


def _op(node: Node) -> str:
    target = node.target
    if node.op != "call_function":
        return node.op
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))
