"""Which linears read which norm, found in the graphs of a model that need not be quantised yet;
and of every other norm with a gain, what reads it instead.

A gain may be multiplied into weights only if everything that is computed from it, and everything
that is computed from those weights, is a product of the two. Both are followed through all graphs
from the parameters on, once every graph is there: one graph alone does not tell whether another
takes a parameter for a gain. Whatever else they meet is a reason to leave them alone, and so is
every read outside of the graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from mxnorm_pass.compat import CustomGraphPass
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, find_sites
from mxnorm_pass.recognise.norm import NormSpec
from mxnorm_pass.recognise.norm_function import gain_kind
from mxnorm_pass.recognise.norm_search import find_norm
from mxnorm_pass.recognise.paths import module_path
from mxnorm_pass.recognise.walk import downwards
from mxnorm_pass.trust.nodes import is_same, source_of_gain, who
from mxnorm_pass.trust.scaled import Norms, Scaled, is_whole
from mxnorm_pass.trust.tracing import (
    Traced,
    as_batches,
    evaluating,
    original,
    placeholders,
)
from mxnorm_pass.trust.uses import Gains, GainUse, Reader, place

_PRODUCTS: dict[Any, tuple[int, int]] = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
}
"""Matmuls with one weight -> positions of rows and weight."""


class _Look(CustomGraphPass):
    """Keeps a copy of each graph, as it is before other passes pad or reorder its matmuls."""

    def __call__(self, graph: Graph) -> None:
        again = copy.deepcopy(graph)
        # Constants are attributes of the module around the graph.
        owner = graph.owning_module
        self.graph = again if owner is None else GraphModule(owner, again).graph

    def uuid(self) -> Any | None:
        """None: no cache may stand in for looking."""
        return None


def find_gains(model: nn.Module, batches: Any) -> Gains:
    """Every gain of an RMSNorm, in front of a linear or not.

    The model runs on the batches, in evaluation: what they do not reach is not seen.
    """
    found = _Finder(original(model))
    with evaluating(found.model):
        for batch in as_batches(batches):
            found.traced(batch)
    return found.result()


@dataclass
class _Call:
    """A graph as it was called: what it shows of its parameters."""

    graph: Graph
    names: dict[Node, str]
    readers: dict[Node, str] = field(default_factory=dict)
    missed: dict[Node, str] = field(default_factory=dict)
    scaled: list[Scaled] = field(default_factory=list)


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.look = _Look()
        self.traced = Traced(model, self.look, self.inner)
        self.parameters = self.traced.parameters
        self.gains: dict[str, GainUse] = {}
        self._bare: list[str] = []
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._parts: dict[str, None] = {}
        """Parameters that a graph reads a part of."""
        self._weights: dict[str, list[tuple[str, str]]] = {}
        """Weight name -> (gain that reaches it, or "", and who reads it)."""

    def inner(self, gm: GraphModule) -> Callable[[list[Any]], Any]:
        graph = self.look.graph

        def run(args: list[Any]) -> Any:
            # Only a call shows which input is which parameter, and the next one may show others.
            self._note(graph, args)
            return gm(*args)

        return run

    def _note(self, graph: Graph, args: list[Any]) -> None:
        inputs = dict(zip(placeholders(graph), args, strict=True))
        inputs |= {n: _attribute(graph, n) for n in graph.nodes if n.op == "get_attr"}
        names: dict[Node, str] = {}
        for node, value in inputs.items():
            found = self.parameters.find(value)
            if found:
                names[node] = found[0]
            else:
                self._parts |= dict.fromkeys(self.traced.outside.sharing(value))
        self._calls.setdefault((id(graph), *names.items()), _Call(graph, names))

    def _examine(self, call: _Call) -> None:
        """The norms of a graph, and the linears that read them."""
        declined = self._quantised(call.graph, call.names)
        for matmul in call.graph.nodes:
            if matmul.target in aten.MATMULS:
                gain = self._reader(matmul, call.names, call.missed)
                if gain is not None:
                    call.readers[matmul] = gain
        call.scaled = self._scaled(call.graph, call.names, declined)

    def _follow(self, call: _Call) -> None:
        """All reads of what any graph takes for a gain, or for the weight of a linear that takes
        one.
        """
        weights = {r.weight for use in self.gains.values() for r in use.readers}
        for node, name in call.names.items():
            use = self.gains.get(name)
            if use is not None:
                if name not in call.readers.values():
                    products = {n for s in call.scaled if s.source is node for n in s.products}
                    said = self._no_linear(node, products, use, call.missed)
                    if said:
                        continue
                self._follow_gain(node, use, call.readers)
            if name in weights:
                self._follow_weight(node, name, call.readers)

    def _use(self, norm: NormSpec, names: dict[Node, str]) -> GainUse | None:
        """The entry of a norm's gain; None where it is no parameter."""
        source = source_of_gain(norm.gain) if norm.gain is not None else None
        if source is None or source not in names:
            return None
        use = self.gains.setdefault(names[source], GainUse(names[source]))
        use.scales(module_path(norm.mean))
        use.kinds.add(norm.gain_kind)
        return use

    def _scaled(
        self, graph: Graph, names: dict[Node, str], declined: dict[str, list[str]]
    ) -> list[Scaled]:
        """Notes the gains of all norms, those that no linear reads included."""
        norms = Norms(graph)
        found = list(norms.scaled_by(names))
        for scaled in found:
            name, path = names[scaled.source], module_path(scaled.norm)
            if name not in self.gains:
                self.gains[name] = GainUse(name, kinds={gain_kind(scaled.gain)})
            use = self.gains[name]
            use.scales(path)
            if path in declined:
                use.quantised.extend(c for c in declined[path] if c not in use.quantised)
        gained = {scaled.norm for scaled in found}
        self._bare += [module_path(norm) for norm in norms.all if norm not in gained]
        return found

    def _quantised(self, graph: Graph, names: dict[Node, str]) -> dict[str, list[str]]:
        """Norms whose linears cast already: their weights hold no plain numbers to multiply.

        Returns the linears of those that the pass leaves alone, by the norm's path.
        """
        sites = find_sites(graph, MXNormConfig())
        for site in sites.sites:
            use = self._use(site.norm, names)
            if use is not None:
                use.linears.extend(c for c in site.consumers if c not in use.linears)
                found = site.consumers or ["a matmul"]
                use.quantised.extend(c for c in found if c not in use.quantised)
        declined: dict[str, list[str]] = {}
        for left in sites.declined:
            if left.path:
                declined.setdefault(left.path, []).extend(left.consumers or ["a matmul"])
        return declined

    def _reader(self, matmul: Node, names: dict[Node, str], missed: dict[Node, str]) -> str | None:
        """Notes a linear that reads a norm; returns the gain's name. Where it does not, notes what
        is in the way, should a norm be there: ``missed``.
        """
        sides = _PRODUCTS.get(matmul.target, (0, 1))
        rows = matmul.args[sides[0]]
        if not isinstance(rows, Node) or not aten.shape(rows):
            return None
        k = aten.shape(rows)[-1]
        missed[matmul] = f"{who(matmul)} reads no RMSNorm that is understood"
        try:
            norm = find_norm(rows, k) if isinstance(k, int) else None
        except Decline as decline:
            if aten.dtype(rows) not in (torch.float32, torch.bfloat16):
                missed[matmul] += f": only float32 and bfloat16 are, not {aten.dtype(rows)}"
            else:
                missed[matmul] += f" ({decline.reason}: {decline.detail})"
            return None
        use = None if norm is None else self._use(norm[0], names)
        if use is None:
            return None
        weight = self._weight(matmul.args[sides[1]], names)
        path = module_path(matmul)
        if weight is not None:
            path = place(path, weight[0])
        if path not in use.linears:
            use.linears.append(path)
        if matmul.target not in _PRODUCTS or weight is None:
            missed[matmul] = (
                f"{path or matmul.name}: not a linear with one weight ({matmul.target})"
            )
            use.block(missed[matmul])
            return None
        reader = Reader(path, *weight)
        if reader not in use.readers:
            use.readers.append(reader)
        return use.gain

    def _weight(self, operand: Any, names: dict[Node, str]) -> tuple[str, int] | None:
        """Name of the parameter behind a matmul's right operand, and the axis it is contracted
        over.
        """
        node, axis = operand, 0
        while isinstance(node, Node) and node not in names:
            if node.target in aten.PERMUTES:
                axis = 1 - axis
            elif node.target is not aten.CONVERT:
                return None
            node = node.all_input_nodes[0]
        if not isinstance(node, Node) or len(aten.shape(node)) != 2:
            return None
        return names[node], axis

    def _follow_gain(self, start: Node, use: GainUse, readers: dict[Node, str]) -> None:
        for node, user in _reached(start):
            ours = (
                readers.get(user) == use.gain
                and user.args[_PRODUCTS.get(user.target, (0, 1))[0]] is node
            )
            if not ours:
                use.block(f"also read by {who(user)}, which is no linear of this norm")

    def _no_linear(
        self, start: Node, products: set[Node], use: GainUse, missed: dict[Node, str]
    ) -> bool:
        """What reads a norm that no linear of this graph reads: the nearest, not all that is made
        of it. Returns whether there is any.
        """

        def is_still_the_norm(n: Node) -> bool:
            same = is_same(n) or aten.moves(n)
            return n in products or same or source_of_gain(n) is start

        said = False
        for node in downwards([start], lambda n: is_still_the_norm(n) and not is_whole(n)):
            if is_whole(node):
                use.block(f"its norm is {node.target}, an op that is not looked into")
            elif aten.is_inert(node) or is_still_the_norm(node):
                continue
            elif node in missed:
                use.block(missed[node])
            else:
                use.block(f"read by {who(node)}, which is no linear")
            said = True
        return said

    def _follow_weight(self, start: Node, name: str, readers: dict[Node, str]) -> None:
        seen = self._weights.setdefault(name, [])
        for node, user in _reached(start):
            sides = _PRODUCTS.get(user.target)
            as_weight = sides is not None and user.args[sides[1]] is node
            seen.append((readers.get(user, "") if as_weight else "", who(user)))

    def result(self) -> Gains:
        """All graphs taken together, and what was read outside of them."""
        calls = list(self._calls.values())
        with torch.no_grad():
            for call in calls:
                self._examine(call)
        for call in calls:
            self._follow(call)
        for use in self.gains.values():
            self._finish(use)
        self._unshown()
        bare = list(dict.fromkeys(self._bare))
        return Gains(list(self.gains.values()), bare, self.parameters)

    def _finish(self, use: GainUse) -> None:
        """What only all graphs together, and the parameters' names, can tell."""
        if use.quantised:
            # The cast's own ops read the gain as well: no news to who quantised the model.
            use.blockers = [f"{', '.join(use.quantised)}: quantised already; fold before quantize_"]
            return
        if use.kinds - {"w", "1+w"} or len(use.kinds) > 1:
            use.block(
                f"the gain is {' and '.join(sorted(use.kinds))} of the parameter, not w or 1+w"
            )
        shared = self._others(use.gain)
        if shared:
            use.block(f"{use.gain} is {', '.join(shared)} as well")
        self._unseen(use, use.gain)
        axes: dict[str, int] = {}
        for reader in use.readers:
            tied = self._others(reader.weight)
            if tied:
                use.block(f"{reader.weight} is tied to {', '.join(tied)}")
            if axes.setdefault(reader.weight, reader.axis) != reader.axis:
                use.block(f"{reader.weight} is multiplied with the norm along both of its axes")
            for gain, said in self._weights.get(reader.weight, []):
                if gain != use.gain:
                    other = f" with the gain {gain}" if gain else ""
                    use.block(f"{reader.weight} is also read by {said}{other}")
            self._unseen(use, reader.weight)

    def _others(self, name: str) -> list[str]:
        """Other names of the same memory, in any shape: tied weights."""
        sharing = self.traced.outside.sharing(self.parameters.tensors[name])
        return [other for other in sharing if other != name]

    def _unseen(self, use: GainUse, name: str) -> None:
        """Reads of a parameter that no graph shows whole."""
        ops = self.traced.outside.by_name.get(name)
        if ops:
            use.block(f"{name} is read outside of every graph, by {', '.join(ops[:3])}")
        if name in self._parts:
            use.block(f"a part of {name} is read by itself")

    def _unshown(self) -> None:
        """Norms between graphs, or in a part of one that is not looked into (a nested region):
        there is only a class's name to know them by.
        """
        seen = {name for call in self._calls.values() for name in call.names.values()}
        seen |= self.traced.outside.by_name.keys()
        for path, module in self.model.named_modules():
            if "RMSNorm" not in type(module).__name__:
                continue
            own = [f"{path}.{name}" if path else name for name in module._parameters]
            if any(name in self.gains for name in own):
                continue
            for name in (n for n in own if n in seen):
                use = self.gains[name] = GainUse(name, [path])
                self._unseen(use, name)
                if not use.blockers:
                    use.block("no graph shows what its norm does")


def _attribute(graph: Graph, node: Node) -> Any:
    """A constant of a graph; None where it has none."""
    value: Any = graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _reached(start: Node) -> list[tuple[Node, Node]]:
    """Where values made of ``start`` element by element end: (last such node, its reader)."""
    seen = {start}
    queue = [start]
    ends: list[tuple[Node, Node]] = []
    for node in queue:
        for user in node.users:
            if user.target in aten.SYM_SIZE or user.target in aten.METADATA_ASSERTS:
                continue
            if aten.carries(user) and user.target not in aten.MATMULS:
                if user not in seen:
                    seen.add(user)
                    queue.append(user)
            else:
                ends.append((node, user))
    return ends
