"""Where the norm of a site and its readers are, and how many layers a traced one stands for.

Of a kind of layers one or two are traced. What happens within a layer happens in each of the kind;
what joins a layer with the next happens once per pair of neighbours; what joins the last layer with
the rest of the model happens once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mxnorm_pass.cli.layers import Kind, Layers
from mxnorm_pass.report import SiteReport

Home = tuple[Kind, int, str]
"""Kind and position of a layer, and a path within it."""


@dataclass
class Parts:
    """Paths of readers by where they are.

    Attributes:
        own: in the layer of the norm, or all of them where the norm is in no layer.
        following: in the layer behind it.
        outside: elsewhere.
    """

    own: list[str] = field(default_factory=list)
    following: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@dataclass
class Counts:
    """How often each part of a site occurs in the whole model."""

    own: int
    following: int
    outside: int

    def of(self, parts: Parts) -> int:
        """Of the site: as often as the part that occurs most."""
        if parts.own:
            return self.own
        if parts.following:
            return self.following
        return self.outside if parts.outside else self.own


def inside(home: Home | None) -> str:
    """The path within the layer."""
    return "" if home is None else home[2]


def home_of(layers: Layers, site: SiteReport) -> Home | None:
    """The layer of a site; None outside the layers.

    A norm that is computed outside of modules is where its readers are, unless it is an entry that
    the pass made of all casts of one path.
    """
    found = layers.find(site.norm)
    if found is not None or (site.norm and site.status == "declined"):
        return found
    homes = [layers.find(path) for path in site.consumers]
    places = {(h[0].stack, h[1]) for h in homes if h is not None}
    if len(places) != 1 or homes[0] is None or None in homes:
        return None
    return homes[0][0], homes[0][1], site.norm


def split(layers: Layers, home: Home | None, paths: Iterable[str]) -> Parts:
    """Sort readers by where they are."""
    if home is None:
        return Parts(list(paths))
    kind, position, _ = home
    parts = Parts()
    behind = min((p for p in _traced(layers, kind.stack) if p > position), default=None)
    for path in paths:
        found = layers.find(path)
        if found is None or found[0].stack != kind.stack or found[1] not in (position, behind):
            parts.outside.append(path)
        elif found[1] == position:
            parts.own.append(path)
        else:
            parts.following.append(path)
    return parts


def _traced(layers: Layers, stack: str) -> list[int]:
    return sorted(p for kind in layers.kinds if kind.stack == stack for p in kind.traced)


def ends(layers: Layers, home: Home) -> bool:
    """The last of the traced layers of its stack: the next thing is what follows the stack."""
    return home[1] == _traced(layers, home[0].stack)[-1]


def with_next(layers: Layers, kind: Kind) -> int:
    """How many layers of a kind have one behind them."""
    last = max(max(k.members) for k in layers.kinds if k.stack == kind.stack)
    return len(kind.members) - (last in kind.members)


def untraced_next(layers: Layers, stack: str) -> bool:
    """A kind has layers with one behind them, and none of these is traced."""
    last = _traced(layers, stack)[-1]
    return any(
        kind.stack == stack and kind.traced == [last] and with_next(layers, kind) > 0
        for kind in layers.kinds
    )


def followed(layers: Layers, home: Home) -> int:
    """How many pairs of neighbours the traced layer and the one behind it stand for."""
    kind, position, _ = home
    last = _traced(layers, kind.stack)[-1]
    ahead = [p for p in kind.traced if p != last]
    if position not in ahead:
        return 0
    return with_next(layers, kind) - len(ahead) + 1 if position == ahead[-1] else 1


def counts(layers: Layers, home: Home | None, leaving: set[tuple[str, int]]) -> Counts:
    """How often the parts of a site occur.

    Args:
        layers: the stacks.
        home: its layer.
        leaving: stacks and positions of traced layers with readers outside of the stack. Where the
            last one alone has them, they read what the stack puts out; where others do too, each
            layer feeds them.
    """
    if home is None:
        return Counts(1, 0, 1)
    kind, position, _ = home
    weight = kind.weight(position)
    alone = {p for stack, p in leaving if stack == kind.stack} <= {position}
    once = ends(layers, home) and alone
    return Counts(weight, followed(layers, home), 1 if once else weight)


def collapse(layers: Layers, paths: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Readers in equal layers as one each, ``decoder.block.*.k``, and by stack in how many layers.

    A path whose layer stands for itself alone stays as it is.
    """
    names: dict[str, list[Home]] = {}
    plain: dict[str, str] = {}
    for path in paths:
        found = layers.find(path)
        name = path if found is None else f"{found[0].stack}.*.{found[2]}"
        plain.setdefault(name, path)
        names.setdefault(name, [])
        if found is not None and found not in names[name]:
            names[name].append(found)
    said: list[str] = []
    spread: dict[str, int] = {}
    for name, homes in names.items():
        number = sum(kind.weight(position) for kind, position, _ in homes)
        if number > 1:
            stack = homes[0][0].stack
            spread[stack] = max(number, spread.get(stack, 0))
        said.append(name if number > 1 else plain[name])
    return said, spread


def within(layers: Layers, paths: Iterable[str]) -> list[str]:
    """Paths within their layers, each once."""
    return list(dict.fromkeys(inside(layers.find(p)) or p for p in paths))


def named(layers: Layers, home: Home | None, paths: Sequence[str]) -> list[str]:
    """Readers in words: those in the layer by their path in it."""
    parts = split(layers, home, paths)
    if home is None:
        return collapse(layers, parts.own)[0]
    own = [inside(layers.find(path)) for path in parts.own]
    behind = [inside(layers.find(path)) for path in parts.following]
    said = [path or "the layer" for path in own]
    said += [f"the next layer's {path}" if path else "the next layer" for path in behind]
    return list(dict.fromkeys([*said, *collapse(layers, parts.outside)[0]]))
