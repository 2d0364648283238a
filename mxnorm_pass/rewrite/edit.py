"""Graph edits that can be taken back, and that keep metadata right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from mxnorm_pass.compat import FakeTensor, FakeTensorMode, is_contiguous_or_false
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import aten

# Which half of the joint graph a node is in, and what activation checkpointing decided. Without
# these the partitioner saves what it was told to recompute.
TAGS = ("partitioner_tag", "recompute", "ac_graph_id")
# What a new node inherits from the node it stands for: where the user's code was, and the tags.
INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "seq_nr",
    "fwd_source_fn_stack",
    "custom",
    *TAGS,
)


def kept(node: Node) -> bool:
    """Whether a policy of activation checkpointing asks for the node's value to be saved."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def not_kept(node: Node) -> None:
    """Have a node computed again whose tags come from one that a policy has saved."""
    if kept(node):
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


class Edit:
    """A set of changes to one graph: :meth:`rollback` takes all back, :meth:`finish` tidies up."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._undo: list[Callable[[], None]] = []
        self._stale: list[Node] = []
        self._mode = _fake_mode(graph)
        self._last_placeholder = [n for n in graph.nodes if n.op == "placeholder"][-1]

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        *,
        like: Node,
        after: Node,
        name: str | None = None,
        kwargs: dict[str, Any] | None = None,
        tags: Node | None = None,
        step: bool = False,
    ) -> Node:
        """A new call, with its fake value computed and the other metadata taken from ``like``.

        Args:
            target: what is called.
            args: with these,
            kwargs: and these.
            like: the node whose metadata it takes.
            after: the node behind which it stands.
            name: its name.
            tags: the node whose :data:`TAGS` it takes, where that is not ``like``.
            step: it is only on the way to what ``like`` is: where a policy has ``like`` saved,
                this one is computed again.
        """
        # Placeholders stay together at the top, as AOTAutograd's partitioner expects.
        spot = self._last_placeholder if after.op == "placeholder" else after
        with self.graph.inserting_after(spot):
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        self._undo.append(lambda: self.graph.erase_node(node))
        node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
        if tags is not None:
            for key in TAGS:
                node.meta.pop(key, None)
                if key in tags.meta:
                    node.meta[key] = tags.meta[key]
        if step:
            not_kept(node)
        self._infer(node)
        return node

    def clone(self, node: Node, source: Node, *, after: Node) -> Node:
        """``node`` again, reading ``source`` in the place of its first input."""
        args = map_arg(node.args, lambda n: source if n is node.all_input_nodes[0] else n)
        return self.call(node.target, args, like=node, after=after)

    def replace(self, old: Node, new: Node, users: Iterable[Node] | None = None) -> None:
        """Let ``users`` (all, unless given) read ``new`` instead of ``old``."""
        for user in list(old.users if users is None else users):
            args, kwargs = user.args, user.kwargs

            def undo(user: Node = user, args: Any = args, kwargs: Any = kwargs) -> None:
                user.args, user.kwargs = args, kwargs

            self._undo.append(undo)
            user.replace_input_with(old, new)
        self._stale.append(old)

    def tag(self, node: Node, key: str, value: object) -> None:
        """Change what one node says of itself."""
        before = node.meta.get(key)

        def undo() -> None:
            if before is None:
                node.meta.pop(key, None)
            else:
                node.meta[key] = before

        self._undo.append(undo)
        node.meta[key] = value

    def refresh(self, nodes: Iterable[Node]) -> None:
        """Recompute fake values, in the order given, after an input changed its dtype."""
        for node in nodes:
            before = node.meta.get("val")

            def undo(node: Node = node, before: Any = before) -> None:
                node.meta["val"] = before

            self._undo.append(undo)
            self._infer(node)

    def rollback(self) -> None:
        """Leave the graph as it was found."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._stale.clear()

    def finish(self) -> None:
        """Erase what the edits left without users; what was dead before stays, it is not ours."""
        stack = list(dict.fromkeys(self._stale))
        erased: set[Node] = set()
        while stack:
            node = stack.pop()
            # Sites of one norm let go of the same nodes: another edit may have been here before.
            if node in erased or node._erased or node.op in ("placeholder", "output"):
                continue
            # Export-style graphs assert the dtype of intermediates: impure, and pointless once
            # their subject has no other reader.
            if all(user.target in aten.METADATA_ASSERTS for user in node.users):
                for user in list(node.users):
                    self.graph.erase_node(user)
                    erased.add(user)
            # Ranks compile the same graph, so each lets go of the same collectives.
            if node.users or (node.is_impure() and not aten.is_collective(node)):
                continue
            stack.extend(node.all_input_nodes)
            self.graph.erase_node(node)
            erased.add(node)
        self._undo.clear()
        self._stale.clear()

    def _infer(self, node: Node) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta.pop("tensor_meta", None)


class Chain:
    """Calls one behind the other, starting behind ``after``; metadata comes from ``like``."""

    def __init__(self, edit: Edit, *, like: Node, after: Node) -> None:
        self._edit, self._like, self._last = edit, like, after

    def __call__(self, target: Any, *args: Any) -> Node:
        """The next call."""
        like, after = self._like, self._last
        self._last = self._edit.call(target, args, like=like, after=after, step=True)
        return self._last


def scalar(edit: Edit, value: float, dtype: torch.dtype, *, like: Node, after: Node) -> Node:
    """A 0-d tensor on the device of ``like``. No ``full_like``: Inductor has no lowering for it,
    since tracing has taken it apart before.
    """
    made = {
        "dtype": dtype,
        "layout": torch.strided,
        "device": like.meta["val"].device,
        "pin_memory": False,
    }
    full = torch.ops.aten.full.default
    return edit.call(full, ([], value), like=like, after=after, kwargs=made, step=True)


def _fake_mode(graph: Graph) -> FakeTensorMode:
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, FakeTensor):
            return val.fake_mode
    raise RuntimeError("the graph has no fake tensors in node.meta['val']")


def view(edit: Edit, source: Node, like: Node, sizes_from: Node, *, after: Node) -> Node:
    """``source`` in the shape of ``like``; the same elements in the same order.

    One symbolic size is written -1. Several are read off ``sizes_from``, a tensor that stays alive.
    """
    return view_as(edit, source, aten.shape(like), like, sizes_from, after)


def view_last(edit: Edit, source: Node, like: Node, sizes_from: Node, *, after: Node) -> Node:
    """``source`` in the shape of ``like`` but for the last axis, which it keeps."""
    size = (*aten.shape(like)[:-1], aten.shape(source)[-1])
    return view_as(edit, source, size, like, sizes_from, after)


def view_as(
    edit: Edit,
    source: Node,
    size: tuple[int | torch.SymInt, ...],
    like: Node,
    sizes_from: Node,
    after: Node,
) -> Node:
    """``source`` in the given shape; see :func:`view`. ``like`` is named where it cannot be."""
    if aten.same_shape(aten.shape(source), size):
        return source
    if not is_contiguous_or_false(source.meta["val"]):
        # Picked rows may lie in another order than they are counted in.
        kwargs = {"memory_format": torch.contiguous_format}
        source = edit.call(
            torch.ops.aten.clone.default, (source,), like=source, after=after, kwargs=kwargs
        )
        after = source
    symbolic = [s for s in size if not isinstance(s, int)]
    target: list[Any] = list(size)
    for i, s in enumerate(size):
        if isinstance(s, int):
            continue
        if len(symbolic) == 1:
            target[i] = -1
            continue
        axes = (j for j, t in enumerate(aten.shape(sizes_from)) if aten.same_size(s, t))
        axis = next(axes, None)
        if axis is None:
            raise Decline("dynamic_shape", f"size {s} is none of the row's", like)
        target[i] = edit.call(
            torch.ops.aten.sym_size.int, (sizes_from, axis), like=source, after=after
        )
        after = target[i]
    return edit.call(torch.ops.aten.view.default, (source, target), like=source, after=after)


def release_sizes(edit: Edit, kept: tuple[Node, ...], nodes: tuple[Node, ...]) -> None:
    """Symbolic sizes read off what vanishes would keep it alive: take them off what stays."""
    for node in nodes:
        for user in list(node.users):
            if user.target not in aten.SYM_SIZE:
                continue
            # What the forward reads must not wait for the backward.
            for other in kept:
                if aten.is_backward(other) and not aten.is_backward(user):
                    continue
                sizes = aten.shape(other)
                axis = next(
                    (i for i, s in enumerate(sizes) if aten.same_size(user.meta["val"], s)), None
                )
                if axis is not None:
                    new = edit.call(user.target, (other, axis), like=user, after=other)
                    edit.replace(user, new)
                    break
