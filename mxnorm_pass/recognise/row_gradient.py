"""Where the backward goes through a norm's mean of squares: the terms of dx that lie along the row.

With g what reaches ``x * rho``, autograd writes dx as ``rho * g`` plus ``-x rho^3 mean(x g)``. Both
are looked for near the row, from the sum of ``x * g`` on, and confirmed by evaluation: pieces of
the graph between x, the root, g and that sum. Whatever else of the backward reads the root is not
understood, and neither is a backward that sums up such products without ending in those terms.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from mxnorm_pass.compat import unset_fake_temporarily
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.lift import LiftError, lift
from mxnorm_pass.recognise.norm import NormSpec
from mxnorm_pass.recognise.walk import upwards

_SCALED = (*aten.MULTIPLIES, *aten.DIVIDES)
_SUMS = (aten.aten.sum.dim_IntList, aten.aten.mean.dim)
_NEAR = 2.0**-6
"""Relative: forms that work in bfloat16 round each factor by 2^-9. A root in the place of another,
a factor that is missing or a wrong power are further off."""
_PROBES = 512
_STEPS = 8  # nodes behind the terms, at the most

Values = dict[Node, Tensor]


def row_terms(norm: NormSpec) -> list[Node]:
    """The terms of dx along the row; empty where the row takes no gradient.

    Raises:
        Decline: ``gradient_form``, where the backward cannot be told to be that of ``x * rho``.
    """
    if norm.fused:
        if any(map(aten.is_backward, _readers(norm.mean))):
            raise Decline("gradient_form", "the backward of the fused op is one call", norm.mean)
        return []
    if not any(user.users for user in norm.shifted.users):
        # A norm that two sites share: the first has taken all readers.
        return []
    # The hook runs under FakeTensorMode; probes are real numbers.
    with unset_fake_temporarily(), torch.no_grad():
        return _Search(norm).terms()


def _readers(node: Node) -> Iterator[Node]:
    """What reads a call's outputs."""
    for user in node.users:
        yield from user.users if aten.is_getitem(user) else (user,)


class _Search:
    """Nodes around one norm, by what they are made of."""

    def __init__(self, norm: NormSpec) -> None:
        self._x, self._root = norm.x, norm.shifted
        self._rooted = self._made_of_the_root()
        self._rows = self._multiples_of_the_row()

    def terms(self) -> list[Node]:
        """See :func:`row_terms`."""
        found: list[Node] = []
        known = {*self._rooted, *self._rows}
        sums = dict(self._sums())
        for total, (product, g) in sums.items():
            terms = [n for n in self._products(total) if self._reads_the_root(n, total)]
            if not terms:
                continue
            confirmed = self._confirmed(terms, total, product, g)
            if not confirmed:
                raise Decline("gradient_form", "not that of x * rstd alone", terms[0])
            found += terms
            known.update(upwards([*terms, *confirmed], known={self._x, self._root, total, g}))
        others = [n for n in self._backward_readers() if n not in known]
        others += [n for n in sums if aten.is_backward(n) and not found]
        if others:
            raise Decline("gradient_form", "something else goes back to the row's root", others[0])
        return found

    # --- what there is ---

    def _made_of_the_root(self) -> dict[Node, None]:
        """The root and what is computed from it alone."""
        found, alone = {self._root: None}, not aten.shape(self._root)
        for node in (queue := [self._root]):
            for user in node.users:
                if user in found or not _stays_in_its_row(user):
                    continue
                # A 0-d tensor beside a root per row is an eps or the like.
                tensors = [n for n in user.all_input_nodes if aten.tensor(n) is not None]
                if all(n in found or not (alone or aten.shape(n)) for n in tensors):
                    found[user] = None
                    queue.append(user)
        return found

    def _multiples_of_the_row(self) -> dict[Node, None]:
        """The row times what the root makes, converted, negated or times a number."""
        found: dict[Node, None] = {self._x: None}
        for node in (queue := [self._x]):
            for user in node.users:
                if user in found or not aten.shape(user):
                    continue
                other = _other(user, node)
                if other in self._rooted if other is not None else _scales(user):
                    found[user] = None
                    queue.append(user)
        return found

    def _sums(self) -> Iterator[tuple[Node, tuple[Node, Node]]]:
        """Sums (or means) along the row of its product with something else: with both factors."""
        for row in self._rows:
            for product in row.users:
                g = _other(product, row)
                if (
                    product.target not in aten.MULTIPLIES
                    or g is None
                    or g in self._rows
                    or g in self._rooted
                ):
                    continue
                if not aten.same_shape(aten.shape(g), aten.shape(product)):
                    continue
                while g.target is aten.aten.neg.default or g.target is aten.CONVERT:
                    g = g.all_input_nodes[0]
                for total in _through(product):
                    if total.target in _SUMS and aten.reduces_last_axis(total):
                        yield total, (product, g)

    def _products(self, total: Node) -> list[Node]:
        """Of a multiple of the row with numbers that the sum goes into, one of each row."""
        found: dict[Node, None] = {}
        seen = {total}
        for node in (queue := [total]):
            for user in node.users:
                other = _other(user, node)
                if user.target in aten.MULTIPLIES and other in self._rows:
                    found[user] = None
                elif user not in seen and _stays_in_its_row(user):
                    tensors = [n for n in user.all_input_nodes if aten.shape(n)]
                    if all(n in seen or n in self._rooted for n in tensors):
                        seen.add(user)
                        queue.append(user)
        return list(found)

    def _reads_the_root(self, term: Node, total: Node) -> bool:
        """Rather than the root of another norm of the same row, or none at all."""
        return self._root in set(upwards([term], known={self._x, total}))

    def _backward_readers(self) -> Iterator[Node]:
        """Of what is made of the root."""
        for node in self._rooted:
            yield from (user for user in node.users if aten.is_backward(user))

    # --- by evaluation ---

    def _confirmed(self, terms: list[Node], total: Node, product: Node, g: Node) -> list[Node]:
        """Nodes that hold ``rho * g``; none where the terms are not ``-x rho^3 mean(x g)``.

        Autograd adds ``rho * g`` to the terms; simplified by hand, as torch's own decomposition of
        the fused norm is, both are times rho at the end. The sum in between parts the function in
        two pieces, each linear in what it is made of: their product on probes tells it, whatever
        factor stands in front of the sum or behind it.
        """
        values = {
            self._root: 10.0 ** (4 * torch.rand(_PROBES, generator=_seeded(1)) - 2),
            **{n: _normal(n, seed) for seed, n in enumerate((self._x, total, g), start=2)},
        }
        rho = values[self._root].double().rsqrt()
        x, s, given = (values[n].double() for n in (self._x, total, g))
        other = {**values, self._x: _normal(self._x, 5)}
        summed = _evaluate(product, (self._x, self._root, g), other)
        rows: dict[Node, Tensor] = {}
        for term in terms:
            row = _evaluate(term, (self._x, self._root, total), values)
            if row is not None:
                rows[term] = row
        if summed is None or len(rows) < len(terms):
            return []
        factor = 1.0 if total.target is aten.aten.mean.dim else 1 / aten.shape(self._x)[-1]
        wanted = -x * s * rho**3 * other[self._x].double() * given * factor

        def goes(row: Tensor) -> bool:
            return _close(row * summed, wanted)

        if goes(torch.stack([*rows.values()]).sum(0)):
            return [n for n in _through(g) if self._is_direct(n, g, values)]
        known = (self._root, g, *terms)
        zeros = {term: torch.zeros(_PROBES) for term in terms}
        for end in self._ends(terms):
            direct = _evaluate(end, known, {**values, **zeros})
            both = _evaluate(end, known, {**values, **rows})
            if direct is None or both is None or not _close(direct, rho * given):
                continue
            if goes(both - direct):
                return [end]
        return []

    def _is_direct(self, node: Node, g: Node, values: Values) -> bool:
        """Whether a product is ``rho * g``."""
        if node.target not in _SCALED or node in self._rows:
            return False
        got = _evaluate(node, (self._root, g), values)
        rho = values[self._root].double().rsqrt()
        return got is not None and _close(got, rho * values[g].double())

    def _ends(self, terms: list[Node]) -> Iterator[Node]:
        """What is made of the terms, a few steps on."""
        for node in (queue := list(terms)):
            for user in node.users:
                if aten.is_pointwise(user) and user not in queue and len(queue) < _STEPS:
                    queue.append(user)
                    yield user


def _evaluate(node: Node, stops: tuple[Node, ...], values: Values) -> Tensor | None:
    """In float64; None where the node depends on something else, or is not pointwise."""
    try:
        return lift(node, stops=stops).evaluate(values).double()
    except (LiftError, KeyError, RuntimeError, TypeError):
        return None


def _stays_in_its_row(node: Node) -> bool:
    """Element by element, reshaped, or repeated."""
    return aten.is_pointwise(node) or aten.keeps_order(node) or node.target in aten.EXPAND


def _through(node: Node) -> Iterator[Node]:
    """Readers of a node, seen through reshapes, conversions and signs."""
    for reader in (queue := list(node.users)):
        yield reader
        if aten.keeps_order(reader) or reader.target in (aten.CONVERT, aten.aten.neg.default):
            queue += reader.users


def _other(node: Node, operand: Node) -> Node | None:
    """What a product multiplies ``operand`` with, or a quotient divides it by; a tensor or None."""
    if node.target not in _SCALED or len(node.args) < 2:
        return None
    left, right = node.args[:2]
    if left is operand:
        other = right
    elif right is operand and node.target in aten.MULTIPLIES:
        other = left
    else:
        return None
    return other if isinstance(other, Node) else None


def _scales(node: Node) -> bool:
    """Converted, reshaped, negated, or times a number."""
    if node.target in (aten.CONVERT, aten.aten.neg.default) or aten.keeps_order(node):
        return True
    if node.target is aten.aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 1)
    return node.target in _SCALED and isinstance(node.args[1], (int, float))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(node: Node, seed: int) -> Tensor:
    """Values of a leaf, away from zero, where a relative distance means nothing."""
    values = torch.randn(_PROBES, generator=_seeded(seed))
    return (values + values.sign() * 0.25).to(aten.dtype(node) or torch.float32)


def _close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    return bool(((got.double() - expected).abs() <= _NEAR * expected.abs()).all())
