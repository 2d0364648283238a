"""Whether a model's outputs depend on a gain and its weights by their product alone: tried out.

Powers of two commute with every rounding. Where gains are multiplied by them, channel by channel,
and the weights divided, not one bit of the output may move, unless something else reads either:
code that no graph shows, a region compiled by somebody else, numbers that left torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Product:
    """A gain, and the weights it could go into.

    Attributes:
        gain: the parameter, K numbers.
        kind: ``w`` or ``1+w``.
        weights: each with the axis of size K.
    """

    gain: Tensor
    kind: str
    weights: Sequence[tuple[Tensor, int]]


def not_by_product(
    run: Callable[[], Any], before: Any, products: Sequence[Product]
) -> list[int] | None:
    """Which of the products the outputs of ``run`` are no function of.

    The parameters are changed meanwhile, and put back. The first trial has all of them; only where
    that fails it takes more, one for each halving.

    Args:
        run: the model on its batches.
        before: what it returned.
        products: gains of norms, each with all of its weights.

    Returns:
        Their positions; None where two equal runs differ, so that nothing can be told.
    """
    saved = [[t.detach().clone() for t in _tensors(product)] for product in products]
    with torch.no_grad():
        try:
            return _not_by_product(run, before, products, saved)
        finally:
            for product, originals in zip(products, saved, strict=True):
                _restore(product, originals)


def _tensors(product: Product) -> list[Tensor]:
    return [product.gain, *(weight for weight, _ in product.weights)]


def _restore(product: Product, originals: Sequence[Tensor]) -> None:
    for tensor, original in zip(_tensors(product), originals, strict=True):
        tensor.copy_(original)


def _not_by_product(
    run: Callable[[], Any], before: Any, products: Sequence[Product], saved: list[list[Tensor]]
) -> list[int] | None:
    generator = torch.Generator().manual_seed(0)
    factors = []
    for product in products:
        bits = torch.randint(0, 2, (product.gain.numel(),), generator=generator)
        factors.append(torch.where(bits == 1, 2.0, 0.5).to(product.gain.device))

    def level(i: int) -> None:
        """All as it was, but 1 + w exact."""
        _restore(products[i], saved[i])
        if products[i].kind == "1+w":
            products[i].gain.zero_()

    def moves(chosen: Sequence[int]) -> bool:
        for i in chosen:
            gain, factor = products[i].gain, factors[i]
            offset = 1.0 if products[i].kind == "1+w" else 0.0
            gain.copy_((gain + offset) * factor.view(gain.shape).to(gain.dtype) - offset)
            for weight, axis in products[i].weights:
                weight.div_((factor if axis == 1 else factor.unsqueeze(-1)).to(weight.dtype))
        moved = not _same(expected, run())
        for i in chosen:
            level(i)
        return moved

    everything = list(range(len(products)))
    for i in everything:
        level(i)
    expected = run() if any(p.kind == "1+w" for p in products) else before
    if not moves(everything):
        return []
    return _culprits(moves, everything) if _same(expected, run()) else None


def _culprits(moves: Callable[[Sequence[int]], bool], group: list[int]) -> list[int]:
    """Those of a group that moves the outputs which do so."""
    if len(group) == 1:
        return group
    halves = group[: len(group) // 2], group[len(group) // 2 :]
    found = [i for half in halves if moves(half) for i in _culprits(moves, half)]
    return found or group


def _same(a: Any, b: Any) -> bool:
    """Every number in two outputs, bit for bit, NaN being itself."""
    left, right = (torch.utils._pytree.tree_leaves(x) for x in (a, b))
    return len(left) == len(right) and all(map(_equal, left, right))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if x.dtype.itemsize == 1:
            x, y = x.view(torch.uint8), y.view(torch.uint8)  # float8 has no comparison
        return bool(((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, (bool, int, float)) and isinstance(y, (bool, int, float)):
        return x == y or (x != x and y != y)
    return True  # what is no number is not compared
