"""Lifting: cut a pointwise piece out of a graph and evaluate it on probe vectors.

A piece is everything between some leaves and one output. Ops that only reshape are skipped, so that
a probe is a plain vector whatever the sizes in the graph; :func:`lift` checks that skipping is
right, that is, that every operand lines up with the axes it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from mxnorm_pass.recognise import aten, emulate

MAX_PIECE = 256
"""Nodes. torchao's largest cast (FP4) has about 90; beyond this a walk has left the site."""


class LiftError(Exception):
    """The piece is not pointwise, too large, or misaligned; ``node`` is where.

    ``operand`` is the input that does not line up, where it comes from outside the piece.
    """

    def __init__(self, message: str, node: Node, operand: Node | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.operand = operand


@dataclass(frozen=True)
class _Ref:
    """Position of a value: leaves first, then steps."""

    index: int


@dataclass(frozen=True)
class Piece:
    """A straight-line pointwise program.

    ``leaves`` are graph nodes whose values :meth:`evaluate` takes; ``sides`` are those among them
    that do not depend on any stop given to :func:`lift`. ``key`` identifies the function: equal
    keys mean equal functions of the leaves, whatever graph they came from.
    """

    output: Node
    leaves: tuple[Node, ...]
    sides: frozenset[Node]
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    result: _Ref
    key: tuple[Any, ...]

    def evaluate(self, values: Mapping[Node, Tensor]) -> Tensor:
        """Run on vectors (or 0-d tensors for 0-d leaves), one per leaf."""
        env: list[Tensor] = [values[leaf] for leaf in self.leaves]

        def resolve(arg: Any) -> Any:
            if isinstance(arg, _Ref):
                return env[arg.index]
            if isinstance(arg, (list, tuple)):
                return [resolve(a) for a in arg]
            return arg

        for target, args, kwargs in self.steps:
            function = emulate.FUNCTIONS.get(target, target)
            env.append(function(*resolve(args), **{k: resolve(v) for k, v in kwargs.items()}))
        return env[self.result.index]


def _constant(node: Node, depth: int = 6) -> Tensor | None:
    """The value of a node that is the same number everywhere; 0-d only where the node is.

    A tensor of one dimension takes part in type promotion, one of none does not. ``depth`` bounds
    the walk through a constant's own little expression, such as ``lift_fresh_copy(get_attr)``.
    """
    val = aten.tensor(node)
    if val is None:
        return None
    number: Any
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for atom in str(node.target).split("."):
            owner = getattr(owner, atom, None)
        if not isinstance(owner, Tensor) or owner.numel() != 1:
            return None
        number = owner.detach().reshape(())
    elif node.target in aten.FILLS:
        position = 0 if node.target is aten.aten.scalar_tensor.default else 1
        number = node.args[position]
        if isinstance(number, Node):
            return None
    elif depth and (
        aten.keeps_order(node) or node.target in aten.EXPAND or node.target is aten.CONVERT
    ):
        number = _constant(node.all_input_nodes[0], depth - 1)
        if number is None:
            return None
        number = number.reshape(())
    elif depth and node.target is aten.VIEW_DTYPE:
        # torchao writes float32 constants as the integers of their bits.
        number = _constant(node.all_input_nodes[0], depth - 1)
        if number is None or number.element_size() != val.element_size():
            return None
        number = number.reshape(1).view(val.dtype).reshape(())
    else:
        return None
    shape = () if val.dim() == 0 else (1,)
    return torch.as_tensor(number, dtype=val.dtype, device="cpu").reshape(shape)


def _inputs(node: Node) -> list[Node]:
    """Tensor inputs; a fill's template and symbolic sizes carry no values."""
    if node.target in aten.FILLS:
        return []
    if aten.keeps_order(node) or node.target in aten.EXPAND:
        return node.all_input_nodes[:1]
    return [n for n in node.all_input_nodes if aten.tensor(n) is not None]


def _check_aligned(node: Node, dependent: Collection[Node]) -> None:
    """Each operand is the output's shape, a value per row or block, one per column, or a scalar."""
    out = aten.shape(node)
    for arg in _inputs(node):
        given = aten.shape(arg)
        padded: tuple[int | SymInt, ...] = (1,) * (len(out) - len(given)) + given
        if aten.same_shape(padded, out):
            continue
        if all(isinstance(s, int) and s == 1 for s in padded):
            continue
        if aten.same_shape(padded, (*out[:-1], 1)):
            continue
        column = (1,) * (len(out) - 1) + out[-1:]
        if arg not in dependent and aten.same_shape(padded, column):
            continue
        outside = None if arg in dependent else arg
        raise LiftError(f"operand of shape {list(given)} against {list(out)}", node, outside)


def lift(
    output: Node,
    stops: Collection[Node],
    *,
    through: Callable[[Node], bool] = lambda node: False,
) -> Piece:
    """The piece between ``stops`` and ``output``.

    Args:
        output: the node whose function is wanted.
        stops: nodes that are leaves wherever they are met.
        through: further ops to skip as if they only reshaped (the caller vouches for them).

    Raises:
        LiftError: where the walk meets an op that is not pointwise and depends on a stop, an
        operand
            that does not line up, or more than :data:`MAX_PIECE` nodes.
    """
    order: list[Node] = []
    foreign: set[Node] = set()
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(output, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > MAX_PIECE:
            raise LiftError(f"more than {MAX_PIECE} nodes", output)
        stack.append((node, True))
        if node in stops or _constant(node) is not None:
            continue
        skips = aten.keeps_order(node) or node.target in aten.EXPAND or through(node)
        if not (skips or aten.is_pointwise(node)):
            foreign.add(node)
            continue
        stack.extend((n, False) for n in reversed(_inputs(node)))

    dependent: set[Node] = set()
    for node in order:
        if node in stops or (node not in foreign and any(n in dependent for n in _inputs(node))):
            dependent.add(node)
    if output not in dependent:
        raise LiftError("does not depend on the expected inputs", output)

    refs: dict[Node, _Ref] = {}
    leaves: list[Node] = []
    sides: set[Node] = set()
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for node in order:
        if node in dependent:
            if node in stops:
                leaves.append(node)
            else:
                for n in _inputs(node):
                    if n not in dependent and _constant(n) is None and n not in sides:
                        sides.add(n)
                        leaves.append(n)
    position = {leaf: _Ref(i) for i, leaf in enumerate(leaves)}
    refs.update(position)
    program: list[tuple[Any, ...]] = []

    def push(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> _Ref:
        steps.append((target, args, kwargs))
        program.append(key)
        return _Ref(len(leaves) + len(steps) - 1)

    def ref(node: Node) -> _Ref:
        if node not in refs:
            const = _constant(node)
            assert const is not None, node
            number = const.detach().clone()
            key = ("const", str(number.dtype), number.dim(), str(number.reshape(()).tolist()))
            refs[node] = push(lambda: number, (), {}, key)
        return refs[node]

    # map_arg is typed for graph arguments, and a reference is none.
    to_ref: Any = ref
    for node in order:
        if node not in dependent or node in refs:
            continue
        if node.target in aten.EXPAND:
            _check_aligned(node, dependent)
        if aten.keeps_order(node) or node.target in aten.EXPAND or through(node):
            refs[node] = ref(_inputs(node)[0])
            continue
        if node.target is not aten.aten.index_put.default:
            _check_aligned(node, dependent)
        args = map_arg(node.args, to_ref)
        # Probes live on the CPU, whatever device and layout the graph asks for.
        kwargs = {
            k: map_arg(v, to_ref)
            for k, v in node.kwargs.items()
            if k not in ("device", "layout", "pin_memory", "memory_format")
        }
        refs[node] = push(
            node.target, args, kwargs, (str(node.target), repr(args), repr(sorted(kwargs.items())))
        )
    leaf_key = tuple((str(aten.dtype(n)), n in sides, len(aten.shape(n)) == 0) for n in leaves)
    return Piece(
        output=output,
        leaves=tuple(leaves),
        sides=frozenset(sides),
        steps=tuple(steps),
        result=refs[output],
        key=(leaf_key, tuple(program), refs[output].index),
    )
