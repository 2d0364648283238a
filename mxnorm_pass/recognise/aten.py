"""Classes of aten ops, by what they do to the elements of a tensor."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from mxnorm_pass.compat import node_tags
from mxnorm_pass.recognise import emulate

aten = torch.ops.aten
prims = torch.ops.prims


def _overloads(*names: str) -> frozenset[Any]:
    """Those of the named ``op.overload`` that this torch has."""
    found = []
    for name in names:
        op, overload = name.split(".")
        packet = getattr(aten, op, None)
        if packet is not None and overload in packet.overloads():
            found.append(getattr(packet, overload))
    return frozenset(found)


# The elements keep their row-major order; sizes of one may come and go.
ORDER_KEEPING = _overloads(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "unsqueeze.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "flatten.using_ints",
    "unflatten.int",
    "alias.default",
    "detach.default",
    "clone.default",
    "contiguous.default",
    "lift_fresh_copy.default",
)
MULTIPLIES = (aten.mul.Tensor, aten.mul.Scalar)
DIVIDES = (aten.div.Tensor, aten.div.Scalar)
EXPAND = _overloads("expand.default")
PERMUTES = _overloads("permute.default", "transpose.int", "t.default")
# Elements or rows are picked, moved, joined or repeated.
MOVES = (
    _overloads(
        "slice.Tensor",
        "select.int",
        "narrow.default",
        "index.Tensor",
        "index_select.default",
        "gather.default",
        "split.Tensor",
        "split_with_sizes.default",
        "unbind.int",
        "flip.default",
        "roll.default",
        "cat.default",
        "stack.default",
        "repeat.default",
        "constant_pad_nd.default",
        "as_strided.default",
    )
    | PERMUTES
    | EXPAND
    | {prims.rev.default}
)
MAXIMA = _overloads(
    "amax.default", "amin.default", "max.dim", "max.default", "topk.default", "sort.default"
)
# Elements are overwritten, or looked up by what another tensor holds.
SCATTERS = _overloads(
    "index_put.default",
    "scatter.src",
    "scatter.value",
    "scatter_add.default",
    "index_add.default",
    "embedding.default",
    "unfold.default",
    "take.default",
)
# Their values end up in a padded or a preallocated tensor.
COPIES = _overloads("copy.default", "slice_scatter.default", "select_scatter.default")
MATMULS = _overloads(
    "mm.default",
    "addmm.default",
    "bmm.default",
    "baddbmm.default",
    "linear.default",
    "matmul.default",
    "_scaled_mm.default",
    "_scaled_mm_v2.default",
    "_grouped_mm.default",
    "_scaled_grouped_mm.default",
    "_scaled_grouped_mm_v2.default",
)
# Pure functions of their arguments' elements that carry no pointwise tag.
UNTAGGED_POINTWISE = _overloads("view.dtype", "_to_copy.default", "__and__.Scalar", "__or__.Scalar")
INDEX_DTYPES = (torch.int64, torch.int32)
FILLS = _overloads("full.default", "scalar_tensor.default", "full_like.default")
CONVERT = prims.convert_element_type.default
VIEW_DTYPE = aten.view.dtype
SYM_SIZE = _overloads("sym_size.int")
METADATA_ASSERTS = _overloads("_assert_tensor_metadata.default")


def is_call(node: Node) -> bool:
    """A call of an operator."""
    return node.op == "call_function"


def is_pointwise(node: Node) -> bool:
    """A deterministic function, element by element, of its tensor arguments."""
    if not is_call(node):
        return False
    if node.target is aten.index_put.default:
        return _is_masked_fill(node)
    if node.target in UNTAGGED_POINTWISE or emulate.knows(node):
        return True
    tags = node_tags(node.target)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _is_masked_fill(node: Node) -> bool:
    """``index_put`` of one number where a mask of the tensor's own shape is set."""
    values, indices, new = node.args[:3]
    if len(node.args) > 3 and node.args[3]:
        return False
    if not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return False
    mask = indices[0]
    if not isinstance(mask, Node) or not isinstance(values, Node) or not isinstance(new, Node):
        return False
    return (
        dtype(mask) is torch.bool
        and same_shape(shape(mask), shape(values))
        and all(isinstance(s, int) and s == 1 for s in shape(new))
    )


def keeps_order(node: Node) -> bool:
    """The same elements in the same row-major order."""
    return is_call(node) and node.target in ORDER_KEEPING


def is_getitem(node: Node, index: int | str | None = None) -> bool:
    """One output of a call that has several; the given one, where an index is given."""
    if not is_call(node) or node.target is not operator.getitem:
        return False
    return index is None or node.args[1] == index


def is_inert(node: Node) -> bool:
    """Reads sizes or dtypes, no values."""
    return is_call(node) and (node.target in SYM_SIZE or node.target in METADATA_ASSERTS)


def is_collective(node: Node) -> bool:
    """An all-gather, a scatter, or the wait for one."""
    return is_call(node) and str(node.target).startswith("_c10d_functional")


def moves(node: Node) -> bool:
    """Picks, moves, joins or repeats elements of its first tensor; a getitem picks a chunk."""
    return is_getitem(node) or (is_call(node) and (node.target in MOVES or is_collective(node)))


def value(node: Node) -> Any:
    """The fake value of a node; None where it has none."""
    return node.meta.get("val")


def tensor(node: Node) -> Tensor | None:
    """The fake value, where it is a tensor."""
    val = value(node)
    return val if isinstance(val, Tensor) else None


def dtype(node: Node) -> torch.dtype | None:
    """Its dtype; None where the value is no tensor."""
    val = tensor(node)
    return None if val is None else val.dtype


def shape(node: Node) -> tuple[int | SymInt, ...]:
    """Its shape; empty where the value is no tensor."""
    val = tensor(node)
    return () if val is None else tuple(val.shape)


def same_size(a: int | SymInt, b: int | SymInt) -> bool:
    """Equal for certain. Never adds a guard, as ``==`` on symbolic sizes would."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    expr_a = a.node.expr if isinstance(a, SymInt) else a
    expr_b = b.node.expr if isinstance(b, SymInt) else b
    return bool(expr_a == expr_b)


def same_shape(a: tuple[int | SymInt, ...], b: tuple[int | SymInt, ...]) -> bool:
    """Equal for certain, axis by axis."""
    return len(a) == len(b) and all(map(same_size, a, b))


def is_widening(node: Node) -> bool:
    """A conversion to float32: exact, so it commutes with absmax, rounding and comparison."""
    return (
        is_call(node)
        and node.target is CONVERT
        and dtype(node) is torch.float32
        and dtype(node.all_input_nodes[0]) in (torch.bfloat16, torch.float16, torch.float32)
    )


def origin(node: Node) -> Node:
    """What ``node`` is reshaped or widened from: the same values in the same order."""
    while keeps_order(node) or is_widening(node):
        node = node.all_input_nodes[0]
    return node


def reduces_last_axis(node: Node) -> bool:
    """Reduction over the last axis and no other."""
    source = node.all_input_nodes[0]
    rank = len(shape(source))
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or not isinstance(dims[0], int):
        return False
    return rank > 0 and dims[0] % rank == rank - 1


def carries(node: Node) -> bool:
    """What comes out is made of what went in, element by element or moved."""
    return is_pointwise(node) or keeps_order(node) or moves(node)


def is_backward(node: Node) -> bool:
    """In the backward half of a joint graph."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_recomputed(node: Node) -> bool:
    """Whether activation checkpointing has the node computed again for the backward."""
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") in again
