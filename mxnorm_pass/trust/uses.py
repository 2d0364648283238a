"""What is known of a model's gains: whom they scale, what reads them, what is in the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from mxnorm_pass.trust.tracing import Parameters


def place(path: str, parameter: str) -> str:
    """Where in the model the owner of ``parameter`` is that a graph calls ``path``.

    Graphs of a layer that is compiled on its own know paths from that layer on.
    """
    owner = parameter.rpartition(".")[0].replace("_orig_mod.", "").removesuffix("._orig_mod")
    return owner if not path or owner.endswith(f".{path}") else path


@dataclass(frozen=True)
class Reader:
    """A linear that reads a norm.

    Attributes:
        path: its module path.
        weight: name of its weight.
        axis: the weight's axis that the rows are contracted with.
    """

    path: str
    weight: str
    axis: int


@dataclass
class GainUse:
    """One gain of a norm, wherever the norm stands.

    Attributes:
        gain: name of the parameter.
        norms: module paths of the norms that it scales.
        kinds: ``w`` or ``1+w``, and ``other`` for what else the graph makes of it.
        readers: the linears.
        blockers: why the gain cannot be moved into their weights.
        quantised: what reads it and casts already, which is then the one reason.
        linears: all module paths that were seen to read it, whatever they do with it.
    """

    gain: str
    norms: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    readers: list[Reader] = field(default_factory=list)
    blockers: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kinds as one word."""
        return "/".join(sorted(self.kinds))

    def block(self, why: str) -> None:
        """One more reason."""
        if why not in self.blockers:
            self.blockers.append(why)

    def scales(self, path: str) -> None:
        """One more norm, by its path in a graph."""
        norm = place(path, self.gain)
        if norm not in self.norms:
            self.norms.append(norm)


@dataclass(frozen=True)
class Gains:
    """All that the graphs show.

    Attributes:
        uses: every gain of an RMSNorm, with what stands in the way of folding it.
        bare: module paths of RMSNorms that no parameter scales; some may be "".
        parameters: of the model.
    """

    uses: list[GainUse]
    bare: list[str]
    parameters: Parameters
