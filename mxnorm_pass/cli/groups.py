"""Sites, norms and linears of the traced layers, counted for all layers that are like them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from mxnorm_pass.cli.layers import Layers
from mxnorm_pass.cli.places import (
    Counts,
    Home,
    Parts,
    collapse,
    counts,
    ends,
    followed,
    home_of,
    inside,
    named,
    split,
    untraced_next,
    within,
)
from mxnorm_pass.cli.quantise import Verdict
from mxnorm_pass.cli.readers import Output, Reader, Readers
from mxnorm_pass.cli.savings import Traffic, traffic
from mxnorm_pass.report import Report, SiteReport


@dataclass
class SiteGroup:
    """Equal sites of equal layers.

    Attributes:
        kind: label of their layers; "" outside the layers.
        stack: path of the list of layers; "" outside.
        norm: module path within the layer.
        consumers: module paths within the layer; outside the layers whole paths, with ``*`` for
            equal layers.
        norms: the modules that ``norm`` names: where casts read a sum, those that go into it.
        count: how many there are in the whole model.
        following: consumers in the layer behind, by their path in it.
        following_count: how many of them have those.
        outside: consumers elsewhere.
        outside_count: how many of them have those.
        spread: by stack, in how many of its layers the consumers of a norm outside are.
        residual: how many of them have the residual add in the op.
        rows: rows of the norm's output, None where it is no module.
        traffic: bytes of one of them, None where they are not known.
        also: what else reads the norm's output, in words.
        ids: ids of those that were traced.
    """

    kind: str
    stack: str
    norm: str
    consumers: list[str]
    status: str
    reason: str | None
    detail: str
    spec: dict[str, Any]
    norms: list[str] = field(default_factory=list)
    count: int = 0
    following: list[str] = field(default_factory=list)
    following_count: int = 0
    outside: list[str] = field(default_factory=list)
    outside_count: int = 0
    spread: dict[str, int] = field(default_factory=dict)
    residual: int = 0
    rows: int | None = None
    traffic: Traffic | None = None
    also: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """As JSON types."""
        moved = None if self.traffic is None else self.traffic.describe()
        return {**asdict(self), "traffic": moved}


@dataclass
class Unread:
    """Norms without a site, and why; ``kinds`` are the labels of their layers."""

    norm: str
    count: int
    why: str
    kinds: list[str] = field(default_factory=list)


@dataclass
class Left:
    """Linears without a cast: why, how many, and one of them."""

    why: str
    count: int
    example: str


def representative(layers: Layers, path: str) -> str:
    """The traced module that the one at ``path`` is like."""
    found = layers.find(path)
    if found is None:
        return path
    kind, position, rest = found
    return path if position in kind.traced else f"{kind.stack}.{kind.traced[-1]}.{rest}"


def used(layers: Layers, verdicts: dict[str, Verdict], reached: set[str]) -> set[str]:
    """Paths of the linears, in all layers, that are quantised and that the inputs reach."""
    return {
        path
        for path, verdict in verdicts.items()
        if verdict.chosen and representative(layers, path) in reached
    }


def left_alone(
    layers: Layers, verdicts: dict[str, Verdict], quantised: set[str], reached: set[str]
) -> list[Left]:
    """Linears without a cast by reason, in order of first occurrence."""
    groups: dict[str, Left] = {}
    for path, verdict in verdicts.items():
        if path in quantised:
            continue
        why = verdict.why
        if verdict.chosen or representative(layers, path) not in reached:
            why = "not called with these inputs"
        groups.setdefault(why, Left(why, 0, path)).count += 1
    return list(groups.values())


@dataclass
class _Seen:
    """A site of the trace, in its layer."""

    site: SiteReport
    home: Home | None
    parts: Parts
    counts: Counts
    norms: dict[str, Parts]
    """The norm modules it is of, and which of the consumers each of them feeds."""

    @property
    def stack(self) -> str:
        return "" if self.home is None else self.home[0].stack

    @property
    def label(self) -> str:
        return "" if self.home is None else self.home[0].label


def _seen(report: Report, layers: Layers, readers: Readers) -> list[_Seen]:
    split_up = []
    leaving: set[tuple[str, int]] = set()
    for site in report.sites:
        home = home_of(layers, site)
        parts = split(layers, home, site.consumers)
        split_up.append((site, home, parts))
        if home is not None and parts.outside:
            leaving.add((home[0].stack, home[1]))
    return [
        _Seen(site, home, parts, counts(layers, home, leaving), _norms(site, home, layers, readers))
        for site, home, parts in split_up
    ]


def _norms(
    site: SiteReport, home: Home | None, layers: Layers, readers: Readers
) -> dict[str, Parts]:
    """Of a cast of a sum, the norms that go into the sum."""
    feeding: dict[str, list[str]] = {}
    if site.norm in readers.norms:
        feeding[site.norm] = site.consumers
    else:
        for path, output in readers.outputs.items():
            fed = [c for c in site.consumers if c in output.sums]
            if fed:
                feeding[path] = fed
    return {path: split(layers, home, fed) for path, fed in feeding.items()}


def site_groups(
    report: Report, layers: Layers, readers: Readers, quantised: set[str]
) -> list[SiteGroup]:
    """The sites of a trace, equal ones in one group, in order of first occurrence."""
    groups: dict[object, SiteGroup] = {}
    for seen in _seen(report, layers, readers):
        site, home = seen.site, seen.home
        if home is None:
            consumers, spread = collapse(layers, seen.parts.own)
        else:
            consumers, spread = within(layers, seen.parts.own), dict[str, int]()
        output = readers.outputs.get(site.norm)
        moved = _traffic(site, output, quantised)
        residual = bool(site.spec.get("residual"))
        spec = {
            k: v for k, v in site.spec.items() if k != "residual" and not k.startswith("kernel")
        }
        what = (site.status, site.reason, sorted(map(repr, spec.items())))
        norm = site.norm if home is None else inside(home)
        key = repr((seen.stack, seen.label, norm, consumers, what, moved))
        if key not in groups:
            groups[key] = SiteGroup(
                seen.label,
                seen.stack,
                "",
                consumers,
                site.status,
                site.reason,
                site.detail.strip().splitlines()[-1] if site.detail.strip() else "",
                spec,
                spread=spread,
                rows=None if output is None else output.rows,
                traffic=moved,
                also=[words(reader, layers, home) for reader in _others(output, quantised)],
            )
        _count(groups[key], seen, layers)
        groups[key].residual += seen.counts.of(seen.parts) * residual
        groups[key].ids.append(site.id)
    return list(groups.values())


def _count(group: SiteGroup, seen: _Seen, layers: Layers) -> None:
    """Add a site of the trace, and whatever its layer stands for, to a group."""
    norms = named(layers, seen.home, list(seen.norms))
    group.norms += [norm for norm in norms if norm not in group.norms]
    path = seen.site.norm if seen.home is None else inside(seen.home)
    # What a layer computes by itself has the path of the layer.
    unnamed = "?" if seen.home is None else "(the layer itself)"
    group.norm = ", ".join(group.norms) or path or unnamed
    group.count += seen.counts.of(seen.parts)
    if seen.parts.following:
        group.following += [
            c for c in within(layers, seen.parts.following) if c not in group.following
        ]
        group.following_count += seen.counts.following
    if seen.parts.outside:
        outside, _ = collapse(layers, seen.parts.outside)
        group.outside += [c for c in outside if c not in group.outside]
        group.outside_count += seen.counts.outside


def linking(report: Report, layers: Layers, readers: Readers) -> list[str]:
    """Norms of sites that join two layers of a stack where the layers behind those of a kind were
    not traced: their number is a lower bound.
    """
    return [
        ", ".join(seen.norms) or seen.site.norm or "?"
        for seen in _seen(report, layers, readers)
        if seen.parts.following and not seen.parts.own and untraced_next(layers, seen.stack)
    ]


def _others(output: Output | None, quantised: set[str]) -> list[Reader]:
    """Readers of a norm's output that are no linear with a cast."""
    readers = [] if output is None else output.readers
    return [r for r in readers if not (r.kind == "linear" and r.path in quantised)]


def _traffic(site: SiteReport, output: Output | None, quantised: set[str]) -> Traffic | None:
    if site.status != "rewritten" or output is None:
        return None
    return traffic(
        output.rows,
        output.shape[-1],
        output.dtype.itemsize,
        str(site.spec["element"]),
        int(site.spec["block_size"]),
        read_elsewhere=bool(_others(output, quantised)) or bool(site.also_read_by),
        measured_tensor_scale=site.spec.get("tensor_scale") == "dynamic",
    )


def words(reader: Reader, layers: Layers, home: Home | None) -> str:
    """A reader in words, its path relative to the layer of the norm."""
    path = ", ".join(named(layers, home, [reader.path])) if reader.path else ""
    return {
        "linear": f"{path} (a linear without a cast)",
        "router": f"{path} (a router)",
        "experts": f"{path} (experts as 3-D parameters, no nn.Linear)",
        "attention": f"{path} (attention)",
        "add": f"an addition in {path or 'the model'}",
        "norm": f"{path} (another norm)",
        "output": "the model's output",
    }.get(reader.kind, f"{reader.op} in {path or 'the model'}")


_WHY = {
    "attention": "goes into attention, not into a linear (a norm of queries or keys)",
    "add": "goes into an addition, the residual stream, not into a linear (a post-norm)",
    "experts": "goes to experts held as 3-D parameters, which are no nn.Linear",
    "router": "goes to a router",
    "output": "is the model's output",
}


def unread(report: Report, layers: Layers, readers: Readers, quantised: set[str]) -> list[Unread]:
    """Norm modules that occur in the graphs and have no site, with what reads them."""
    with_site: set[str] = set()
    # Of a norm that feeds the next layer, the last layer's is left.
    taken: Counter[tuple[str, str, str]] = Counter()
    passing: set[tuple[str, str]] = set()
    for seen in _seen(report, layers, readers):
        for path, parts in seen.norms.items():
            if path in with_site:
                continue
            with_site.add(path)
            if (home := layers.find(path)) is not None:
                taken[home[0].stack, home[0].label, home[2]] += seen.counts.of(parts)
                if parts.following and not parts.own:
                    passing.add((home[0].stack, home[2]))
    groups: dict[object, Unread] = {}
    for path in sorted(readers.norms & readers.reached, key=list(readers.modules).index):
        if path in with_site:
            continue
        home = layers.find(path)
        output = readers.outputs.get(path)
        why = _why(readers.modules[path], output, layers, home)
        norm, weight, label = path, 1, ""
        if home is not None:
            kind, position, norm = home
            label = kind.label
            parts = split(layers, home, [r.path for r in output.readers] if output else [])
            if parts.following and not parts.own:
                weight = followed(layers, home)
                passing.add((kind.stack, norm))
            elif ends(layers, home) and (kind.stack, norm) in passing:
                weight = 1
            else:
                weight = kind.weight(position)
            weight = min(weight, len(kind.members) - taken[kind.stack, label, norm])
            taken[kind.stack, label, norm] += weight
        if not weight:
            continue
        group = groups.setdefault((norm, why), Unread(norm, 0, why))
        group.count += weight
        if label and label not in group.kinds:
            group.kinds.append(label)
    return list(groups.values())


def _why(module: nn.Module, output: Output | None, layers: Layers, home: Home | None) -> str:
    if isinstance(module, nn.LayerNorm) or getattr(module, "bias", None) is not None:
        return "takes the mean off or adds a bias: a LayerNorm, not an RMSNorm"
    if output is None or not output.readers:
        return "nothing in the graph reads it"
    linears = [r for r in output.readers if r.kind == "linear"]
    if linears:
        names = named(layers, home, [r.path for r in linears])
        several = len(linears) > 1
        return f"is read by {', '.join(names)}, which {'have' if several else 'has'} no cast"
    kinds = dict.fromkeys(r.kind for r in output.readers)
    said = [_WHY[kind] for kind in kinds if kind in _WHY]
    if "experts" in kinds and "router" in kinds:
        said = ["goes to a router and to experts held as 3-D parameters, which are no nn.Linear"]
    others = [words(r, layers, home) for r in output.readers if r.kind not in _WHY]
    return "; ".join([*said, *(f"goes to {other}" for other in others)])
