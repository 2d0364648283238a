"""Where the backward goes through a norm's mean of squares: the terms of dx that lie along the row.

Autograd's gradient of ``y = x * rho``, with ``u`` what reaches ``y`` over the gain, is ``rho * u``
plus ``row quantity * x``, since the mean of squares is one number of a row whose own gradient is
``2 x / K``. Those products are found from two sides: from what the backward makes of the root, one
number a row, to where it is multiplied with the row again; and, in forms that were simplified by
hand, from the normalised row to its product with a number per row.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.norm import NormSpec

_MUL = (aten.aten.mul.Tensor, aten.aten.mul.Scalar)
_DIV = (aten.aten.div.Tensor, aten.aten.div.Scalar)
_POW = aten.aten.pow.Tensor_Scalar


def row_terms(norm: NormSpec) -> list[Node]:
    """Products along the row through which the gradient of the mean of squares reaches ``x``.

    Empty where the row takes no gradient.

    Raises:
        Decline: ``gradient_form``, where the root takes part in the backward in another way.
    """
    if norm.fused:
        if any(map(aten.is_backward, _readers(norm.mean))):
            raise Decline("gradient_form", "the backward of the fused op is one call", norm.mean)
        return []
    return _Search(norm).terms()


def _readers(node: Node) -> Iterator[Node]:
    """What reads a call's outputs."""
    for user in node.users:
        yield from user.users if aten.is_getitem(user) else (user,)


class _Search:
    """Nodes of one norm by what they are along a row."""

    def __init__(self, norm: NormSpec) -> None:
        self._norm = norm
        self._rows = aten.tensor(norm.shifted)
        self._full = aten.tensor(norm.x)
        self._rooted = self._numbers_of_the_root()
        self._like_x = self._multiples_of_the_row()

    def terms(self) -> list[Node]:
        """See :func:`row_terms`."""
        found: dict[Node, None] = {}
        queue = [
            user
            for node in self._rooted
            for user in node.users
            if aten.is_backward(user) and user not in self._rooted and self._is_row(user)
        ]
        seen, missed = set(queue), dict[Node, None]()
        for node in queue:
            for user in node.users:
                if self._is_term(user, node):
                    found[user] = None
                elif user in seen or _adds_up_rows(user) or user.op == "output":
                    continue
                elif self._is_constant_along_rows(user, seen):
                    seen.add(user)
                    queue.append(user)
                else:
                    # Of a sum of such numbers another may come later.
                    missed[user] = None
        for user in missed:
            if user not in seen:
                raise Decline("gradient_form", "the root's gradient does not end in x alone", user)
        if queue and not found:
            raise Decline("gradient_form", "no product with x ends the root's gradient", queue[0])
        for node, rooted in self._like_x.items():
            for user in node.users if rooted else ():
                number = _other(user, node)
                if number is None or number in self._rooted:
                    continue
                if aten.is_backward(number) and self._is_row(number):
                    found[user] = None
        return list(found)

    # --- sorts of nodes ---

    def _numbers_of_the_root(self) -> set[Node]:
        """The root and what is computed from it alone, one number a row."""
        queue = [self._norm.shifted]
        known = set(queue)
        for node in queue:
            for user in node.users:
                if user in known or not (aten.is_pointwise(user) or aten.keeps_order(user)):
                    continue
                tensors = [n for n in user.all_input_nodes if aten.shape(n)]
                if self._is_row(user) and all(n in known for n in tensors):
                    known.add(user)
                    queue.append(user)
        return known

    def _multiples_of_the_row(self) -> dict[Node, bool]:
        """Rows that are the norm's times a number each; whether the root is in that number."""
        found = {self._norm.x: False}
        queue = [self._norm.x]
        for node in queue:
            for user in node.users:
                if user in found or not self._is_full(user):
                    continue
                rooted = found[node]
                number = _other(user, node)
                if number is not None:
                    if number not in self._rooted:
                        continue
                    rooted = True
                elif not (aten.keeps_order(user) or _scales(user)):
                    continue
                found[user] = rooted
                queue.append(user)
        return found

    def _is_row(self, node: Node) -> bool:
        """One number a row."""
        value = aten.tensor(node)
        return (
            value is not None
            and self._rows is not None
            and aten.same_size(value.numel(), self._rows.numel())
        )

    def _is_full(self, node: Node) -> bool:
        value = aten.tensor(node)
        return (
            value is not None
            and self._full is not None
            and value.dim() > 0
            and aten.same_size(value.numel(), self._full.numel())
            and aten.same_size(value.shape[-1], self._full.shape[-1])
        )

    def _is_term(self, node: Node, number: Node) -> bool:
        row = _other(node, number)
        return node.target in _MUL and row is not None and row in self._like_x

    def _is_constant_along_rows(self, node: Node, seen: set[Node]) -> bool:
        """Computed from the root's gradient and the root, with one value along each row."""
        if node.target in aten.EXPAND:
            return self._is_full(node)
        if not (aten.is_pointwise(node) or aten.keeps_order(node)):
            return False
        tensors = [n for n in node.all_input_nodes if aten.shape(n)]
        return all(n in seen or n in self._rooted for n in tensors)


def _other(node: Node, operand: Node) -> Node | None:
    """What a product multiplies ``operand`` with, or a quotient divides it by; a tensor or None."""
    if node.target not in (*_MUL, *_DIV) or len(node.args) < 2:
        return None
    left, right = node.args[:2]
    if left is operand:
        other = right
    elif right is operand and node.target in _MUL:
        other = left
    else:
        return None
    return other if isinstance(other, Node) and aten.shape(other) else None


def _scales(node: Node) -> bool:
    """Converted, negated, or times a number."""
    if node.target is aten.CONVERT or node.target is aten.aten.neg.default:
        return True
    if node.target is _POW:
        return bool(node.args[1] == 1)
    scaled = node.target in _MUL or node.target in _DIV
    return scaled and isinstance(node.args[1], (int, float))


def _adds_up_rows(node: Node) -> bool:
    """A sum over tokens: the gradient of an eps that is a parameter, which stays what it is."""
    return node.target in (aten.aten.sum.dim_IntList, aten.aten.sum.default)
