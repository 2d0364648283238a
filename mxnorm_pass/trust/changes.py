"""Parameters changed in place, with the way back."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxnorm_pass.trust.statistics import Noise


class Changes(AbstractContextManager["Changes"]):
    """Originals of parameters that were overwritten; :meth:`undo` puts them back, bit for bit.

    A context manager: leaving it undoes. The tensors themselves stay what they were (memory, ties,
    compiled graphs); only their values change. Originals lie where the parameters do.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []

    def overwrite(self, tensor: Tensor, values: Tensor) -> None:
        """Give ``tensor`` new values, keeping its own."""
        with torch.no_grad():
            self._saved.append((tensor, tensor.detach().clone()))
            tensor.copy_(values)

    @property
    def active(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._saved)

    def undo(self) -> None:
        """Put the originals back; whatever happened to the values since is lost. Safe to repeat."""
        with torch.no_grad():
            # Backwards: a tensor that was overwritten twice gets its first values.
            for tensor, original in reversed(self._saved):
                tensor.copy_(original)
        self._saved.clear()

    def __exit__(self, *error: Any) -> None:
        self.undo()


@dataclass(frozen=True)
class Rounding:
    """What storing a product in its dtype adds.

    Attributes:
        max_ulp: largest distance to the product in float64, in units in the last place of the
            stored value; at most 0.5.
        sqnr: product over that distance, in dB; inf where all products are exact.
    """

    max_ulp: float
    sqnr: float

    @classmethod
    def of(cls, exact: Tensor, stored: Tensor) -> Rounding:
        """Of ``stored`` against ``exact``, float64."""
        info = torch.finfo(stored.dtype)
        got = stored.double()
        exponent = torch.frexp(got).exponent - 1
        least = round(math.log2(info.tiny))
        ulp = torch.exp2(exponent.clamp(min=least).double()) * info.eps
        off = ((got - exact).abs() / ulp).amax() if got.numel() else torch.zeros(())
        noise = Noise()
        noise.add(exact, got)
        return cls(float(off), noise.sqnr)


@dataclass
class OutputNoise:
    """A model's outputs before and after, over batches."""

    noise: Noise = field(default_factory=Noise)

    def add(self, before: Any, after: Any) -> None:
        """Two outputs of one batch: whatever float tensors are in them."""
        for a, b in zip(floats(before), floats(after), strict=True):
            self.noise.add(a, b)


def floats(output: Any) -> list[Tensor]:
    """The float tensors in an output, in order."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
