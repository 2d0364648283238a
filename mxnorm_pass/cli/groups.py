"""Sites, norms and linears of the traced layers, counted for all layers that are like them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from mxnorm_pass.cli.layers import Layers
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
        consumers: module paths within the layer.
        count: how many there are in the whole model.
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
    count: int = 0
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


def _place(layers: Layers, path: str) -> tuple[str, str, str, int]:
    """Stack, label of the kind, path in the layer, and how many layers a traced path stands for."""
    found = layers.find(path)
    if found is None:
        return "", "", path, 1
    kind, position, rest = found
    return kind.stack, kind.label, rest, kind.weight(position)


def _within(layers: Layers, path: str, norm: str) -> str:
    """``path`` in the layer of ``norm``; as it is where it lies in another one."""
    ours, theirs = layers.find(norm), layers.find(path)
    same = ours is not None and theirs is not None and ours[:2] == theirs[:2]
    return theirs[2] if same and theirs is not None else path


def site_groups(
    report: Report, layers: Layers, outputs: dict[str, Output], quantised: set[str]
) -> list[SiteGroup]:
    """The sites of a trace, equal ones in one group, in order of first occurrence."""
    groups: dict[object, SiteGroup] = {}
    for site in report.sites:
        stack, label, norm, weight = _place(layers, site.norm)
        if (joint := _links(layers, site)) is not None:
            weight = joint
        consumers = [_within(layers, c, site.norm) for c in site.consumers]
        output = outputs.get(site.norm)
        moved = _traffic(site, output, quantised)
        residual = bool(site.spec.get("residual"))
        spec = {
            k: v for k, v in site.spec.items() if k != "residual" and not k.startswith("kernel")
        }
        what = (site.status, site.reason, sorted(map(repr, spec.items())))
        key = repr((stack, label, norm, consumers, what, moved))
        if key not in groups:
            groups[key] = SiteGroup(
                label,
                stack,
                norm or "?",
                consumers,
                site.status,
                site.reason,
                site.detail.strip().splitlines()[-1] if site.detail.strip() else "",
                spec,
                rows=None if output is None else output.rows,
                traffic=moved,
                also=[words(reader, layers, site.norm) for reader in _others(output, quantised)],
            )
        groups[key].count += weight
        groups[key].residual += weight * residual
        groups[key].ids.append(site.id)
    return list(groups.values())


def _links(layers: Layers, site: SiteReport) -> int | None:
    """How often a site whose norm ends one layer and whose linears begin the next occurs.

    Once per pair of neighbours, where all layers of the stack are alike; elsewhere once per traced
    layer. None for a site that lies within a layer.
    """
    home = layers.find(site.norm)
    if home is None:
        return None
    kind, position, _ = home
    places = [layers.find(consumer) for consumer in site.consumers]
    if all(p is not None and (p[0].stack, p[1]) == (kind.stack, position) for p in places):
        return None
    if all(p is None for p in places):
        return None
    alone = sum(other.stack == kind.stack for other in layers.kinds) == 1
    if not alone or len(kind.traced) == len(kind.members):
        return 1
    return len(kind.members) - 1


def linking(report: Report, layers: Layers) -> list[str]:
    """Norms in layers whose linears are in another one: their number is a lower bound where the
    layers of a stack differ.
    """
    return [
        site.norm
        for site in report.sites
        if _links(layers, site) is not None
        and sum(k.stack == _place(layers, site.norm)[0] for k in layers.kinds) > 1
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


def words(reader: Reader, layers: Layers, norm: str) -> str:
    """A reader in words, its path relative to the layer of the norm."""
    path = _within(layers, reader.path, norm)
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
    with_site = {site.norm for site in report.sites}
    # Of a norm that feeds the next layer, the last layer's is left.
    ends = {_place(layers, s.norm)[2] for s in report.sites if _links(layers, s) is not None}
    groups: dict[object, Unread] = {}
    for path in sorted(readers.norms & readers.reached, key=list(readers.modules).index):
        if path in with_site:
            continue
        _, label, norm, weight = _place(layers, path)
        weight = 1 if norm in ends else weight
        why = _why(readers.modules[path], readers.outputs.get(path), layers, path)
        group = groups.setdefault((norm, why), Unread(norm, 0, why))
        group.count += weight
        if label and label not in group.kinds:
            group.kinds.append(label)
    return list(groups.values())


def _why(module: nn.Module, output: Output | None, layers: Layers, path: str) -> str:
    if isinstance(module, nn.LayerNorm) or getattr(module, "bias", None) is not None:
        return "takes the mean off or adds a bias: a LayerNorm, not an RMSNorm"
    if output is None or not output.readers:
        return "nothing in the graph reads it"
    linears = [r for r in output.readers if r.kind == "linear"]
    if linears:
        names = ", ".join(_within(layers, r.path, path) for r in linears)
        return f"is read by {names}, which has no cast"
    kinds = dict.fromkeys(r.kind for r in output.readers)
    said = [_WHY[kind] for kind in kinds if kind in _WHY]
    if "experts" in kinds and "router" in kinds:
        said = ["goes to a router and to experts held as 3-D parameters, which are no nn.Linear"]
    others = [words(r, layers, path) for r in output.readers if r.kind not in _WHY]
    return "; ".join([*said, *(f"goes to {other}" for other in others)])
