"""Graph -> sites: every forward cast that a norm feeds, with its specs or the reason it is left
alone.
"""

from __future__ import annotations

import fnmatch
import traceback
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.formats import Cast
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.cast import (
    CastSite,
    CastSpec,
    block_maxima,
    cast_site,
    check_rows,
    recognise_cast,
)
from mxnorm_pass.recognise.consumers import (
    Consumers,
    WeightCast,
    consumers,
    foldable_weights,
    readers,
)
from mxnorm_pass.recognise.norm import NormSpec, recognise_norm
from mxnorm_pass.recognise.paths import module_path


@dataclass
class Site:
    """One norm and one distinct cast of it, however many linears read them.

    ``weights`` is the list of weight casts that a gain can be folded into, None where it cannot.
    """

    norm: NormSpec
    cast: Cast
    k: int
    path: str
    casts: list[tuple[CastSite, Consumers]] = field(default_factory=list)
    weights: list[WeightCast] | None = field(default_factory=list)

    @property
    def consumers(self) -> list[str]:
        """Module paths of the matmuls that read the cast."""
        found = (module_path(m) for _, read in self.casts for m in read.matmuls)
        return list(dict.fromkeys(found))

    @property
    def also_read_by(self) -> list[str]:
        """Module paths of forward matmuls that read the norm's output without this cast."""
        mine = {m for _, read in self.casts for m in read.matmuls}
        source = self.casts[0][0].source
        through = frozenset(n for site, _ in self.casts for n in (site.absmax, *site.region))
        found = readers((source,), skip=through)
        return list(
            dict.fromkeys(
                module_path(m) for m in found.matmuls if m not in mine and not aten.is_backward(m)
            )
        )


@dataclass
class Declined:
    """A cast that a norm feeds and that is left as it is."""

    path: str
    consumers: list[str]
    reason: str
    detail: str


@dataclass
class Found:
    """All that recognition has to say about one graph."""

    sites: list[Site] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)
    plain_casts: int = 0
    """Forward activation or weight casts with no norm before them."""


def find_sites(graph: Graph, config: MXNormConfig) -> Found:
    """Recognise every site of a graph. Evaluates probes; changes nothing."""
    found = Found()
    groups: dict[tuple[object, ...], Site] = {}
    blocks: dict[Node, int] = {}
    for absmax in block_maxima(graph):
        # Casts of gradients reach forward roots too: the tag tells them apart.
        if aten.is_backward(absmax):
            continue
        site = cast_site(absmax)
        if site is None:
            continue
        try:
            result = _recognise(site, config)
            if result is None:
                found.plain_casts += 1
                continue
            k, norm, spec, read, weights = result
            if blocks.setdefault(norm.shifted, spec.cast.block_size) != spec.cast.block_size:
                raise Decline(
                    "block_size_conflict",
                    f"block {spec.cast.block_size} here, {blocks[norm.shifted]} before",
                    site.absmax,
                )
        except Decline as decline:
            _decline(found, site, decline.reason, decline.detail)
            continue
        except Exception:
            if config.strict:
                raise
            _decline(found, site, "internal_error", traceback.format_exc())
            continue
        key = (norm.shifted, norm.gain, norm.norm_dtype, norm.out_dtype, spec.cast)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Site(norm, spec.cast, k, module_path(norm.mean))
            found.sites.append(group)
        group.casts.append((site, read))
        if weights is None or group.weights is None:
            group.weights = None
        else:
            known = {w.site.absmax for w in group.weights}
            group.weights.extend(w for w in weights if w.site.absmax not in known)
    return found


def _recognise(
    site: CastSite, config: MXNormConfig
) -> tuple[int, NormSpec, CastSpec, Consumers, list[WeightCast] | None] | None:
    source = site.source
    if source.op == "placeholder":
        if not _is_activation(site):
            return None
        raise Decline("graph_input", "norm and cast are in different graphs", source)
    width = aten.shape(source)[-1] if aten.shape(source) else 0
    norm = recognise_norm(source, width if isinstance(width, int) else 0)
    if norm is None:
        return None
    k = check_rows(site)
    path = module_path(norm.mean)
    if not _selected(path, config):
        raise Decline("excluded", f"{path} is left out by include/exclude")
    spec = recognise_cast(site)
    read = consumers(site)
    return k, norm, spec, read, foldable_weights(site, read, k)


def _is_activation(site: CastSite) -> bool:
    """The cast is a matmul's left operand; on the right stands a weight."""
    try:
        read = consumers(site)
    except Decline:
        return False
    for matmul in read.matmuls:
        lhs = matmul.args[1 if matmul.target is aten.aten.addmm.default else 0]
        if isinstance(lhs, Node) and any(m in (site.absmax, *site.codes) for m in _upstream(lhs)):
            return True
    return False


def _upstream(node: Node) -> set[Node]:
    seen = {node}
    queue = [node]
    for n in queue:
        for source in n.all_input_nodes:
            if source not in seen and len(seen) < 128:
                seen.add(source)
                queue.append(source)
    return seen


def _selected(path: str, config: MXNormConfig) -> bool:
    def hit(globs: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(path, glob) for glob in globs)

    return hit(config.include) and not hit(config.exclude)


def _decline(found: Found, site: CastSite, reason: str, detail: str) -> None:
    """Note a site that stays; casts of one norm with one reason make one entry."""
    read = readers(site.codes) if site.codes else Consumers((), ())
    names = list(dict.fromkeys(module_path(m) for m in read.matmuls))
    path = module_path(site.source)
    for known in found.declined:
        if (known.path, known.reason) == (path, reason) and path:
            known.consumers.extend(n for n in names if n not in known.consumers)
            return
    found.declined.append(Declined(path, names, reason, detail))
