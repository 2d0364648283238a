"""Graph -> sites: every forward cast that a norm feeds, with its specs or the reason it is left
alone.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.formats import ELEMENT_OF_DTYPE, Cast
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten, moves, opaque
from mxnorm_pass.recognise.cast import CastSite, anchors, cast_site, check_rows, whole
from mxnorm_pass.recognise.cast_spec import CastSpec, recognise_cast
from mxnorm_pass.recognise.columns import SiteColumns, find_columns
from mxnorm_pass.recognise.consumers import (
    Consumers,
    WeightCast,
    consumers,
    foldable_weights,
    readers,
)
from mxnorm_pass.recognise.moves import source_of
from mxnorm_pass.recognise.norm import NormSpec
from mxnorm_pass.recognise.norm_search import find_norm, norm_behind
from mxnorm_pass.recognise.paths import module_path
from mxnorm_pass.recognise.tensor_scale import tensor_scaling
from mxnorm_pass.recognise.walk import upwards


@dataclass
class Site:
    """One norm and one distinct cast of it, however many linears read them.

    Attributes:
        tensor_scale: NVFP4's per-tensor scale, a 0-d node; None for other formats.
    """

    norm: NormSpec
    cast: Cast
    k: int
    path: str
    id: str
    """``<norm path>#<n>``, the same in every process; see :class:`Found`."""
    tensor_scale: Node | None = None
    casts: list[_Recognised] = field(default_factory=list)
    """Casts of the same function of the same norm."""
    claimed: frozenset[Node] = frozenset()
    """Nodes of all casts of the graph, whatever became of them."""
    columns: SiteColumns = field(default_factory=SiteColumns)
    """Casts of the norm's output along tokens; of several sites of one output, at the first."""

    @property
    def readers(self) -> list[Reader]:
        """Each cast, and who reads it."""
        return [cast.reader for cast in self.casts]

    @property
    def maxima(self) -> list[Node]:
        """Nodes ``max(|y|)`` over the whole tensor that per-tensor scales are computed from."""
        return list(dict.fromkeys(m for cast in self.casts for m in cast.maxima))

    @property
    def weights(self) -> list[WeightCast] | None:
        """Weight casts that a gain can be folded into, None where it cannot."""
        found: dict[Node, WeightCast] = {}
        for cast in self.casts:
            if cast.weights is None:
                return None
            for weight in cast.weights:
                found.setdefault(weight.site.anchor, weight)
        return list(found.values())

    @property
    def consumers(self) -> list[str]:
        """Module paths of the matmuls that read the cast."""
        found = (module_path(m) for reader in self.readers for m in reader.read.matmuls)
        return list(dict.fromkeys(found))

    @property
    def also_read_by(self) -> list[str]:
        """Module paths of forward matmuls that read the norm's output without this cast."""
        mine = {m for reader in self.readers for m in reader.read.matmuls}
        sources = tuple(dict.fromkeys(reader.source for reader in self.readers))
        found = readers(sources, skip=self.claimed)
        paths = (module_path(m) for m in found.matmuls if m not in mine and not aten.is_backward(m))
        return [path for path in dict.fromkeys(paths) if path]


@dataclass(frozen=True)
class Reader:
    """One cast of a norm's output: who reads it, and the nodes that pick rows in front of it."""

    cast: CastSite
    read: Consumers
    moves: tuple[Node, ...] = ()

    @property
    def source(self) -> Node:
        """The norm's output, before rows are picked."""
        return source_of(self.moves[0]) if self.moves else self.cast.source


@dataclass(frozen=True)
class _Recognised:
    """What was found around one cast."""

    k: int
    norm: NormSpec
    spec: CastSpec
    reader: Reader
    scaling: object
    """Identifies the per-tensor scale."""
    maxima: list[Node]
    weights: list[WeightCast] | None


@dataclass
class Declined:
    """A cast that a norm feeds and that is left as it is."""

    id: str
    path: str
    consumers: list[str]
    reason: str
    detail: str
    node: str = ""
    computed: str = ""
    expected: str = ""
    anchor: Node | None = None
    """Of the cast, where one was found."""


@dataclass
class Found:
    """All that recognition has to say about one graph.

    A site's id is the norm's module path (``?`` where it has none) and a count of what was found at
    that path, in graph order: names to switch a site off by, which hold from process to process.
    """

    sites: list[Site] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)
    plain_casts: int = 0
    """Forward activation or weight casts with no norm before them."""
    _counts: Counter[str] = field(default_factory=Counter)

    def new_id(self, path: str) -> str:
        """The next id at a path."""
        name = path or "?"
        self._counts[name] += 1
        return f"{name}#{self._counts[name] - 1}"

    def decline(
        self, path: str, consumers: list[str], reason: str, detail: str, node: str = ""
    ) -> Declined:
        """Note something that stays as it is."""
        declined = Declined(self.new_id(path), path, consumers, reason, detail, node)
        self.declined.append(declined)
        return declined


def find_sites(graph: Graph, config: MXNormConfig) -> Found:
    """Recognise every site of a graph. Evaluates probes; changes nothing."""
    found = Found()
    groups: dict[tuple[object, ...], Site] = {}
    blocks: dict[Node, int] = {}
    claimed: set[Node] = set()
    for anchor in anchors(graph):
        # Casts of gradients reach forward roots too: the tag tells them apart.
        if aten.is_backward(anchor):
            continue
        site = None
        try:
            site = cast_site(anchor)
            if site is None:
                continue
            claimed |= site.inside
            result = _recognise(site, config)
            if result is None:
                found.plain_casts += 1
                continue
            norm, cast = result.norm, result.spec.cast
            if blocks.setdefault(norm.shifted, cast.block_size) != cast.block_size:
                raise Decline(
                    "block_size_conflict",
                    f"block {cast.block_size} here, {blocks[norm.shifted]} before",
                    site.anchor,
                )
        except Decline as decline:
            assert site is not None
            _decline(found, site, decline)
            continue
        except Exception:
            if config.strict:
                raise
            failed = Decline("internal_error", traceback.format_exc())
            if site is not None:
                _decline(found, site, failed)
            else:
                found.decline(module_path(anchor), [], failed.reason, failed.detail, anchor.name)
            continue
        key = (norm.shifted, norm.gain, norm.norm_dtype, norm.out_dtype, cast, result.scaling)
        group = groups.get(key)
        if group is None:
            path = module_path(norm.mean)
            group = groups[key] = Site(
                norm, cast, result.k, path, found.new_id(path), result.spec.tensor_scale
            )
            found.sites.append(group)
        group.casts.append(result)
    # A cast that could not be found by our own fault has no nodes to its name.
    incomplete = any(d.reason == "internal_error" for d in found.declined)
    for node in graph.nodes:
        _note_unknown_cast(found, node)
        if node not in claimed and not incomplete:
            _note_unanchored_cast(found, node, claimed)
    for group in found.sites:
        group.claimed = frozenset(claimed)
    # Rows that were picked have other blocks of tokens than the norm's; those sent may have the
    # same.
    outputs = [
        (reader.cast.source, reader.moves, group.columns)
        for group in found.sites
        for reader in group.readers
        if not reader.moves or moves.first_sent(reader.moves) is not None
    ]
    find_columns(graph, outputs, strict=config.strict)
    _keep_what_is_sent_anyway(found)
    return found


def _keep_what_is_sent_anyway(found: Found) -> None:
    """Decline casts of rows that other ranks sent and that somebody else reads as they are: codes
    and scales would be sent beside them, not instead.
    """
    for site in list(found.sites):
        # A cast that stays reads the rows in its turn: again until nothing changes.
        while blocked := next(filter(None, (_sent_anyway(site, c) for c in site.casts)), None):
            cast, sent, other = blocked
            site.casts.remove(cast)
            paths = list(dict.fromkeys(module_path(m) for m in cast.reader.read.matmuls))
            detail = f"{other.name} reads the rows of {sent.target} as well (at {sent.name})"
            if site.columns.declined:
                detail += f"; of a cast along tokens: {site.columns.declined[0].detail}"
            found.decline(site.path, paths, "collective_between", detail, sent.name)
            _leave_columns(site, sent, other)
        if not site.casts:
            found.sites.remove(site)
        for cast in site.casts:
            resent = moves.first_sent(cast.reader.moves)
            reader = None if resent is None else _other_reader(site, cast.reader, resent, False)
            if resent is not None and reader is not None:
                _leave_columns(site, resent, reader)


def _leave_columns(site: Site, sent: Node, other: Node) -> None:
    """The casts along tokens of rows that the backward gets anyway stay as they are."""
    detail = f"{other.name} reads the rows of {sent.name} as well"
    why = Decline("collective_between", detail, other)
    site.columns.leave(site.columns.behind(sent), why)


def _sent_anyway(site: Site, cast: _Recognised) -> tuple[_Recognised, Node, Node] | None:
    """The cast, the collective that rows go through, and who else reads them behind it."""
    sent = moves.first_sent(cast.reader.moves)
    again = moves.sent_again(cast.reader.moves)
    other = None if sent is None else _other_reader(site, cast.reader, sent, again)
    return None if sent is None or other is None else (cast, sent, other)


def _other_reader(site: Site, reader: Reader, sent: Node, again: bool) -> Node | None:
    """Who reads rows behind ``sent`` and is no cast of this site; None where nobody does.

    Where the collective is recomputed for the backward (``again``), only the forward counts: what
    the backward reads is sent again with and without us.
    """
    along_tokens = site.columns.behind(sent)
    mine = {n for r in site.readers for n in (*r.moves, *r.cast.chain)}
    mine |= {n for r in site.readers for n in whole(r.cast)}
    mine |= {n for r in along_tokens for n in (*r.behind, *r.inside)}
    path = (*reader.moves[reader.moves.index(sent) :], *reader.cast.chain)
    for node in (*path, *(n for r in along_tokens for n in r.behind)):
        for user in node.users:
            pieces = user.users if user.target in moves.SPLITS else (user,)
            for piece in pieces:
                if piece in mine or aten.is_inert(piece):
                    continue
                if not (again and aten.is_backward(piece)):
                    return piece
    return None


def _note_unknown_cast(found: Found, node: Node) -> None:
    """A norm that feeds an op which looks like a cast and is not known: said, not passed over."""
    values = None if aten.is_backward(node) else opaque.unknown_cast(node)
    size = () if values is None else aten.shape(values)
    if values is None or not size or not isinstance(size[-1], int):
        return
    try:
        if find_norm(values, size[-1]) is None:
            return
    except Decline:
        return
    reason = "rotated" if opaque.rotates(node) else "opaque_cast"
    found.decline(module_path(values), [], reason, f"{node.target} (at {node.name})", node.name)


def _note_unanchored_cast(found: Found, node: Node, claimed: set[Node]) -> None:
    """A norm's values that become E8M0 or float8 codes by no absmax of blocks in a row."""
    if aten.is_backward(node) or aten.dtype(node) not in (torch.float8_e8m0fnu, *ELEMENT_OF_DTYPE):
        return
    converts = node.target is aten.CONVERT or node.target is aten.VIEW_DTYPE
    norm = norm_behind(node, claimed) if converts else None
    if norm is None:
        return
    path = module_path(norm)
    if any((d.path, d.reason) == (path, "cast_form") for d in found.declined):
        return
    detail = f"{aten.dtype(node)} by no amax(abs(.)) over the last axis of blocks (at {node.name})"
    found.decline(path, [], "cast_form", detail, node.name)


def _recognise(site: CastSite, config: MXNormConfig) -> _Recognised | None:
    source = site.source
    if source.op == "placeholder":
        if not _is_activation(site):
            return None
        raise Decline("graph_input", "norm and cast are in different graphs", source)
    width = aten.shape(source)[-1] if aten.shape(source) else 0
    found = find_norm(source, width if isinstance(width, int) else 0)
    if found is None:
        return None
    norm, moves = found
    path = module_path(norm.mean)
    try:
        return _of_norm(site, norm, moves, path, config)
    except Decline as decline:
        # Choices name the norm, which need not be where the cast's source was made.
        decline.norm = path
        raise


def _of_norm(
    site: CastSite, norm: NormSpec, moves: tuple[Node, ...], path: str, config: MXNormConfig
) -> _Recognised:
    k = check_rows(site)
    if not config.selects(path):
        raise Decline("excluded", f"{path} is left out by include/exclude")
    spec = recognise_cast(site)
    read = consumers(site)
    scaling, maxima = tensor_scaling(site, spec)
    if moves and (maxima or spec.cast.layout != "plain"):
        raise Decline(
            "reordered",
            "the per-tensor scale, or the layout of the scales, is that of the rows picked",
            moves[0],
        )
    reader = Reader(site, read, moves)
    return _Recognised(k, norm, spec, reader, scaling, maxima, foldable_weights(site, read, k))


def _is_activation(site: CastSite) -> bool:
    """The cast is a matmul's left operand; on the right stands a weight."""
    try:
        read = consumers(site)
    except Decline:
        return False
    for matmul in read.matmuls:
        lhs = matmul.args[1 if matmul.target is aten.aten.addmm.default else 0]
        if isinstance(lhs, Node) and any(
            m in (site.anchor, *site.codes) for m in upwards([lhs], most=128)
        ):
            return True
    return False


def _decline(found: Found, site: CastSite, why: Decline) -> None:
    """Note a site that stays; casts of one norm with one reason make one entry."""
    read = readers(site.codes) if site.codes else Consumers((), ())
    names = list(dict.fromkeys(module_path(m) for m in read.matmuls))
    path = why.norm or module_path(moves.rows_behind(site.source)[0])
    for known in found.declined:
        if (known.path, known.reason) == (path, why.reason) and path:
            known.consumers.extend(n for n in names if n not in known.consumers)
            return
    node = "" if why.node is None else why.node.name
    declined = found.decline(path, names, why.reason, why.detail, node)
    declined.computed, declined.expected = why.computed, why.expected
    declined.anchor = site.anchor
