"""Parameters changed in place, with the way back."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass.trust.statistics import Noise

Formula = Callable[[Tensor], Tensor]
"""From a parameter's values to the new ones in float64, the same in every call."""


@dataclass(frozen=True)
class _Change:
    """One parameter: what it was, and how its new values come of that."""

    name: str
    tensor: Tensor
    original: Tensor
    formula: Formula

    def left_alone(self) -> bool:
        """Whether the parameter holds what this change wrote, or its original again."""
        # Computed once more: a copy of what was written would take a model's memory again.
        written = self.formula(self.original).to(self.original.dtype)
        return _same_bits(self.tensor, written) or _same_bits(self.tensor, self.original)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit: NaN is itself, and -0 is not 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.detach().view(bits), b.detach().to(a.device).view(bits))


class Changes(AbstractContextManager["Changes"]):
    """Originals of parameters that were overwritten; :meth:`undo` puts them back, bit for bit.

    A context manager: leaving it undoes. The tensors themselves stay what they were (memory, ties,
    compiled graphs); only their values change. Originals lie where the parameters do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: list[_Change] = []

    def overwrite(self, name: str, tensor: Tensor, formula: Formula) -> Rounding:
        """Give ``tensor``, called ``name``, the values ``formula(tensor)`` in its dtype.

        Each tensor once. Its own values are kept; returns what the rounding added.
        """
        with torch.no_grad():
            change = _Change(name, tensor, tensor.detach().clone(), formula)
            exact = formula(change.original)
            self._saved.append(change)
            tensor.copy_(exact.to(tensor.dtype))
            return Rounding.of(exact, tensor.detach())

    @property
    def active(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._saved)

    def undo(self) -> None:
        """Put the originals back. Safe to repeat.

        Raises:
            RuntimeError: naming every parameter that something else has changed since, or put
                another in the place of; then nothing is put back, neither there nor elsewhere.
        """
        here = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        gone = [change.name for change in self._saved if id(change.tensor) not in here]
        if gone:
            raise RuntimeError(
                f"undo: {', '.join(gone)} is another tensor now, as quantize_ or "
                "load_state_dict(assign=True) leave it, so nothing was put back: load the "
                "checkpoint into a new model"
            )
        with torch.no_grad():
            strange = [change.name for change in self._saved if not change.left_alone()]
            if strange:
                raise RuntimeError(
                    f"undo: {', '.join(strange)} changed since, so nothing was put back: undo "
                    "later changes first, the last one before the others"
                )
            for change in self._saved:
                change.tensor.copy_(change.original)
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
