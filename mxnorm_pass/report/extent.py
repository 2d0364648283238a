"""Which nodes make up a site, before its rewrite and after it: walks that stay near the site."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from mxnorm_pass.ops import ADD_OP, OP
from mxnorm_pass.recognise import aten
from mxnorm_pass.report.picture import Role

if TYPE_CHECKING:
    from mxnorm_pass.recognise.sites import Site

# Nodes of one picture. A norm with a cast of its own for each of three linears has about 150.
LIMIT = 600
# Around a site that was not recognised, whose extent nobody knows: so many nodes up and down.
UP = DOWN = 40


@dataclass
class Extent:
    """The nodes of a site, each with what it is to the site; ``failed`` is where it failed."""

    roles: dict[Node, Role] = field(default_factory=dict)
    failed: Node | None = None

    def add(self, nodes: Iterable[Node], role: Role) -> None:
        """Nodes that are known already keep their role."""
        for node in nodes:
            if len(self.roles) < LIMIT:
                self.roles.setdefault(node, role)


def of_site(site: Site) -> Extent:
    """From the norm's row to the matmuls; of the backward, what reads the norm's statistic."""
    found = Extent()
    norm = site.norm
    found.add((norm.x,), "row")
    if norm.x.target is aten.aten.add.Tensor:
        found.add(norm.x.all_input_nodes, "input")
    found.add((n for n in (norm.gain, norm.eps_node) if n is not None), "gain")
    outputs = [reader.source for reader in site.readers]
    _add_behind(found, (*outputs, norm.mean, norm.shifted), "norm")
    for reader in site.readers:
        cast = reader.cast
        _add_behind(found, (cast.source,), "pick")
        _add_behind(found, (*cast.codes, *cast.scales), "cast")
        found.add((cast.anchor, *cast.chain, *cast.unpacked), "cast")
        found.add(sorted(cast.region), "cast")
    for reader in site.readers:
        read = reader.read
        found.add(read.matmuls, "matmul")
        found.add(read.others, "context")
        ends = frozenset((*read.matmuls, *read.others))
        starts = (*reader.cast.codes, *reader.cast.scales)
        between = _ahead(starts, ends)
        found.add(_behind(ends, between.__contains__), "dequantise")
    # A gain may be folded into the weights: then their casts change as well.
    weights = site.weights if norm.gain is not None else None
    found.add((weight.weight for weight in weights or ()), "input")
    for matmul in [n for n, role in found.roles.items() if role == "matmul"]:
        if weights:
            _add_behind(found, (matmul,), "weight cast")
        else:
            found.add(matmul.all_input_nodes, "input")
    size = aten.shape(norm.shifted)
    for node in [n for n, role in found.roles.items() if role == "norm"]:
        if aten.same_shape(aten.shape(node), size):
            _add_backward(found, node)
    # The other casts of the norm's output, along tokens, that the backward makes.
    for column in site.columns.found:
        for along in column.readers:
            stored = (*along.codes, *along.scales)
            _add_behind(found, (*stored, along.anchor), "column cast")
            found.add((user for node in stored for user in node.users), "backward")
    return found


_COPIES = (aten.aten.alias.default, aten.aten.detach.default)


def _add_backward(found: Extent, statistic: Node) -> None:
    """What of the backward reads a row's statistic, itself or a copy of it."""
    queue = [statistic]
    for node in queue:
        backward = [u for u in node.users if aten.is_backward(u)]
        if backward:
            found.add((node,), "norm")
            found.add(backward, "backward")
        queue.extend(u for u in node.users if u.target in _COPIES and u not in backward)


def around(anchor: Node, failed: Node | None) -> Extent:
    """What is near a cast that was not understood, up and down to the next matmuls."""
    found = Extent(failed=failed)
    starts = [n for n in (anchor, failed) if n is not None]
    found.add(starts, "context")
    near = {*starts}

    def up(node: Node) -> bool:
        if len(near) >= UP or node.target in aten.MATMULS or not aten.is_call(node):
            return False
        near.add(node)
        return True

    found.add(_behind(starts, up), "context")
    queue, seen = [anchor], {anchor}
    for node in queue:
        for user in node.users:
            if user in seen or user.op == "output" or aten.is_backward(user):
                continue
            seen.add(user)
            if user.target in aten.MATMULS:
                found.add((user,), "matmul")
            elif len(seen) <= DOWN:
                found.add((user,), "context")
                queue.append(user)
    for node in list(found.roles):
        if node.target not in aten.MATMULS:
            found.add(node.all_input_nodes, "input")
    return found


def put_in(survivors: dict[Node, Role], known: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """What a rewrite put in: the new nodes of one site, and old ones beyond it that read them.

    Args:
        survivors: nodes of the site that are still in the graph.
        known: all nodes of the graph before the rewrite.
    """
    own: set[Node] = set()
    starts: list[Node] = []
    for node, role in survivors.items():
        if role in ("input", "row", "gain"):
            continue
        fresh = [n for n in node.all_input_nodes if n not in known]
        starts.extend(n for n in fresh if not _of_another(n, own))
        # What the consumers read comes out of this site's op; the backward may read another's.
        if role in ("dequantise", "matmul", "cast", "context"):
            behind = _behind((node,), lambda n: n not in known and n.target not in _OPS)
            own.update(n for b in (node, *behind) for n in b.all_input_nodes if n.target in _OPS)
    queue = [*own, *(n for n in starts if not _of_another(n, own))]
    new = dict.fromkeys(queue)
    touched: dict[Node, None] = {}
    for node in queue:
        sources = [n for n in node.all_input_nodes if not _of_another(n, own)]
        users = [n for n in node.users if n.target not in _OPS]
        for other in (*sources, *users):
            if other not in known and other not in new and len(new) < LIMIT:
                new[other] = None
                queue.append(other)
        touched.update(dict.fromkeys(u for u in users if u in known and u not in survivors))
    return list(new), [n for n in touched if n.op != "output"]


_OPS = (OP, ADD_OP)


def _of_another(node: Node, own: Collection[Node]) -> bool:
    """An op of another site, or one of its results."""
    made = node.all_input_nodes[0] if aten.is_getitem(node) else node
    return made.target in _OPS and made not in own


def _add_behind(found: Extent, ends: Iterable[Node], role: Role) -> None:
    """Everything that ``ends`` are computed from, up to what is known already."""
    inputs: list[Node] = []

    def inside(node: Node) -> bool:
        if node in found.roles:
            return False
        if not aten.is_call(node) or node.target in aten.MATMULS:
            inputs.append(node)
            return False
        return True

    ends = list(ends)
    found.add(_behind(ends, inside), role)
    found.add((n for n in ends if aten.is_call(n)), role)
    found.add(inputs, "input")


def _behind(ends: Iterable[Node], inside: Callable[[Node], bool]) -> list[Node]:
    """Upstream of ``ends``, nearest first, through nodes that are ``inside``."""
    queue = list(ends)
    count = len(queue)
    seen = set(queue)
    for node in queue:
        for source in node.all_input_nodes:
            if source not in seen and len(queue) < LIMIT:
                seen.add(source)
                if inside(source):
                    queue.append(source)
    return queue[count:]


def _ahead(starts: Iterable[Node], ends: Collection[Node]) -> frozenset[Node]:
    """Downstream of ``starts``, and those, up to ``ends``."""
    queue = list(starts)
    seen = set(queue)
    for node in queue:
        for user in node.users:
            if user not in seen and user not in ends and len(queue) < LIMIT:
                seen.add(user)
                queue.append(user)
    return frozenset(seen)
