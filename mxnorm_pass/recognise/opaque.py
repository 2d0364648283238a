"""Casts that are one opaque op: what torchao calls on the chip, and what a user registers."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from mxnorm_pass.formats import ELEMENTS, Cast, Element
from mxnorm_pass.recognise import aten


@dataclass(frozen=True)
class CastOp:
    """What one call of an opaque cast op does.

    Attributes:
        cast: the cast that it performs on each row of its input.
        values: the node that is cast; ``[..., K]``.
        qdata: which output holds the elements: the index (or key) of the ``getitem``.
        scale: which output holds the block scales.
        tensor_scale: 0-d float32 node of NVFP4's per-tensor scale; None stands for 1.
        transposed: of a cast along tokens of ``[M, K]``: elements are ``[M, K]`` in column-major
            order; else ``[K, M]``.
    """

    cast: Cast
    values: Node
    qdata: int | str = 0
    scale: int | str = 1
    tensor_scale: Node | None = None
    transposed: bool = False

    @property
    def element(self) -> Element:
        """The element of the cast."""
        return ELEMENTS[self.cast.element]


log = logging.getLogger(__name__)

Describe = Callable[[Node], CastOp | None]

_REGISTERED: dict[Any, Describe] = {}
_KERNEL_NODE = "triton_kernel_wrapper_functional"
_NARROW = {
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint8,
}


def register_cast_op(op: Any, cast: str | Cast | Describe) -> None:
    """Let the pass see through an opaque cast op.

    Args:
        op: the overload that stands in the graph, ``torch.ops.mylib.to_mx.default``.
        cast: what it does. A :class:`mxnorm_pass.formats.Cast` (or its text) for an op whose
            first argument is cast along its last axis and which returns ``(qdata, scale)``; or a
            function of the call's ``fx.Node`` that returns a :class:`CastOp`, or None for calls
            that should be left alone.

    Raises:
        TypeError: where ``op`` is no operator overload.
        ValueError: for a cast that does not exist, naming what is allowed.

    The pass takes your word for it: test the op against :func:`mxnorm_pass.reference.quantize`.
    """
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        raise TypeError(
            f"register_cast_op: {op!r} is no operator overload such as torch.ops.mylib.cast.default"
        )
    if callable(cast):
        _REGISTERED[op] = cast
        return
    if not isinstance(cast, (str, Cast)):
        raise TypeError(
            f"register_cast_op: {cast!r} is no Cast, no text of one, and no function of the call"
        )
    spec = Cast.parse(cast) if isinstance(cast, str) else cast

    def describe(node: Node) -> CastOp | None:
        values = node.args[0]
        return CastOp(spec, values) if isinstance(values, Node) else None

    describe.spec = str(spec)  # type: ignore[attr-defined]
    _REGISTERED[op] = describe


def is_registered(node: Node) -> bool:
    """A call of an op that somebody registered."""
    return aten.is_call(node) and (node.target in _REGISTERED or _torchao(node) is not None)


def describe(node: Node) -> CastOp | None:
    """What the call does; None where it was not registered for such arguments."""
    return _described(node, _REGISTERED.get(node.target) or _torchao(node))


def describe_columns(node: Node) -> CastOp | None:
    """The same of an op that casts its input ``[M, K]`` along tokens; None for other nodes."""
    return _described(node, _torchao(node, columns=True)) if aten.is_call(node) else None


def _described(node: Node, registered: Describe | None) -> CastOp | None:
    if registered is None:
        return None
    try:
        known = registered(node)
    except Exception:
        log.exception("describing %s failed; the call counts as unknown", node.target)
        return None
    if known is not None and not isinstance(known, CastOp):
        log.error("describing %s gave %r, not a CastOp or None", node.target, known)
        return None
    return known


def unknown_cast(node: Node) -> Node | None:
    """What an op casts that nobody registered (or not for such arguments); None for other nodes.

    Known by what it returns: a narrow float or packed bytes, in an op that is not ATen's.
    """
    if not _is_foreign(node):
        return None
    outputs = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    dtypes = {o.dtype for o in outputs if isinstance(o, torch.Tensor)}
    if not dtypes & _NARROW or describe(node) is not None:
        return None
    given = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    wide = (torch.bfloat16, torch.float16, torch.float32)
    return next((n for n in given if isinstance(n, Node) and aten.dtype(n) in wide), None)


def rotates(node: Node) -> bool:
    """A cast behind a Hadamard rotation: its block maxima are not the row's."""
    name = _name(node)
    return "hadamard" in name or "rht" in re.split(r"[^a-z0-9]+", name)


def is_opaque_norm(node: Node) -> bool:
    """An op that is not ATen's and calls itself a norm."""
    return _is_foreign(node) and "norm" in _name(node)


def _is_foreign(node: Node) -> bool:
    if not aten.is_call(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prims", "_c10d_functional", "mxnorm")
    return str(node.target) == _KERNEL_NODE


def _name(node: Node) -> str:
    if str(node.target) == _KERNEL_NODE:
        return _kernel_name(node).lower()
    return str(node.target).lower()


def identity() -> str:
    """A hash of what was registered, for compile caches."""
    digest = hashlib.sha256()
    for op, function in sorted(_REGISTERED.items(), key=lambda item: str(item[0])):
        code = getattr(function, "__code__", None)
        text = (str(op), getattr(function, "spec", ""), code.co_code if code else repr(function))
        digest.update(repr((*text, code.co_consts if code else ())).encode())
    return digest.hexdigest()


# --- torchao, sm_100 ------------------------------------------------------------------------------

_MODES = {"rceil": "rceil_exact", "floor": "floor"}


def _mxfp8(values: Any, block: Any, mode: Any) -> Cast | None:
    """What torchao's Triton and CUDA casts do with bfloat16 rows: scale by a reciprocal, saturate.

    They multiply by 1 / 448 where the rule divides: for bfloat16 absmax the same byte. Their FLOOR
    keeps byte 247 for a NaN block, whose codes are NaN anyway.
    """
    rule = _MODES.get(str(mode).lower())
    if rule is None or not isinstance(values, Node) or aten.dtype(values) is not torch.bfloat16:
        return None
    if block not in (16, 32):
        return None
    return Cast("e4m3", block, rule, "reciprocal", "clamp")  # type: ignore[arg-type]


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if len(node.args) > position else default


def _dim0(node: Node) -> CastOp | None:
    """``torchao::triton_to_mxfp8_dim0(x, inner_block_size=32, scaling_mode="rceil")``."""
    values: Any = _argument(node, 0, "x")
    mode = _argument(node, 2, "scaling_mode", "rceil")
    cast = _mxfp8(values, _argument(node, 1, "inner_block_size", 32), mode)
    return None if cast is None else CastOp(cast, values)


def _dim1(node: Node) -> CastOp | None:
    """``torchao::triton_to_mxfp8_dim1``, the same along tokens."""
    known = _dim0(node)
    return None if known is None else replace(known, transposed=True)


def _kernel_arguments(node: Node) -> dict[str, Any]:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    given: Any = node.kwargs["kwargs"]
    arguments = dict(given)
    constants = node.kwargs.get("constant_args_idx")
    if isinstance(constants, int):
        arguments.update(kernel_side_table.get_constant_args(constants))
    return arguments


def _dim0_kernel(node: Node) -> CastOp | None:
    """The op along rows decomposed: a Triton kernel whose outputs are named."""
    arguments = _kernel_arguments(node)
    values: Any = arguments.get("x_ptr")
    cast = _mxfp8(values, arguments.get("SCALE_BLOCK_SIZE"), arguments.get("SCALING_MODE"))
    return None if cast is None else CastOp(cast, values, "output_ptr", "scale_ptr")


def _dim1_kernel(node: Node) -> CastOp | None:
    """The op along tokens decomposed; its codes are ``[K, M]`` here."""
    arguments = _kernel_arguments(node)
    values: Any = arguments.get("x_ptr")
    cast = _mxfp8(values, arguments.get("INNER_BLOCK_SIZE"), arguments.get("SCALING_MODE"))
    if cast is None:
        return None
    return CastOp(cast, values, "output_col_major_ptr", "col_scale_ptr")


def _quantize_cuda(node: Node) -> CastOp | None:
    """``torchao::mxfp8_quantize(input, rowwise, colwise, dim_x, dim_y, format, mode)``."""
    values: Any = node.args[0]
    rowwise = node.args[1]
    cast = _mxfp8(values, node.args[4], node.args[6])
    if cast is None or not rowwise or node.args[5] != "e4m3":
        return None
    return CastOp(cast, values, 0, 2)


def _quantize_cuda_columns(node: Node) -> CastOp | None:
    """The same op with ``rowwise=False, colwise=True``: elements column-major, outputs 1 and 3."""
    values: Any = node.args[0]
    cast = _mxfp8(values, node.args[4], node.args[6])
    if cast is None or node.args[1] or not node.args[2] or node.args[5] != "e4m3":
        return None
    return CastOp(cast, values, 1, 3, transposed=True)


def _mslk_nvfp4(node: Node) -> CastOp | None:
    """``ao::mslk_quantize_nvfp4(x, global_scale) -> (scale, qdata)``, scales swizzled.

    ``global_scale`` is the reciprocal of torchao's per-tensor scale.
    """
    values, reciprocal = node.args[0], _argument(node, 1, "global_scale")
    if not isinstance(values, Node) or aten.dtype(values) not in (torch.bfloat16, torch.float32):
        return None
    tensor_scale = None
    if reciprocal is not None:
        if not isinstance(reciprocal, Node):
            return None
        if reciprocal.target is not aten.aten.reciprocal.default:
            return None
        tensor_scale = reciprocal.all_input_nodes[0]
    cast = Cast("e2m1", 16, "e4m3", "reciprocal", "clamp", "swizzled")
    return CastOp(cast, values, 1, 0, tensor_scale)


def _cutedsl(node: Node) -> CastOp | None:
    """``torchao::mxfp8_quantize_2d_1x32_cutedsl(x, block_size, scaling_mode, stages, offs)``.

    Scales are swizzled; with ``offs`` they are padded group by group, which the op does not do.
    """
    values: Any = _argument(node, 0, "x")
    if _argument(node, 4, "offs") is not None:
        return None
    mode = _argument(node, 2, "scaling_mode", "rceil")
    cast = _mxfp8(values, _argument(node, 1, "block_size", 32), mode)
    return None if cast is None else CastOp(replace(cast, layout="swizzled"), values)


def _cutedsl_columns(node: Node) -> CastOp | None:
    """``torchao::mxfp8_quantize_2d_32x1_cutedsl(x, block_size, scaling_mode, stages,
    blocked_scale_output, offs)``.
    """
    values: Any = _argument(node, 0, "x")
    blocked = _argument(node, 4, "blocked_scale_output", True)
    if _argument(node, 5, "offs") is not None or not blocked:
        return None
    mode = _argument(node, 2, "scaling_mode", "rceil")
    cast = _mxfp8(values, _argument(node, 1, "block_size", 32), mode)
    if cast is None:
        return None
    return CastOp(replace(cast, layout="swizzled"), values, transposed=True)


_TORCHAO: dict[str, Describe] = {
    "torchao.mxfp8_quantize_2d_1x32_cutedsl.default": _cutedsl,
    "torchao.triton_to_mxfp8_dim0.default": _dim0,
    "torchao.mxfp8_quantize.default": _quantize_cuda,
    "ao.mslk_quantize_nvfp4.default": _mslk_nvfp4,
}
_TORCHAO_COLUMNS: dict[str, Describe] = {
    "torchao.mxfp8_quantize_2d_32x1_cutedsl.default": _cutedsl_columns,
    "torchao.triton_to_mxfp8_dim1.default": _dim1,
    "torchao.mxfp8_quantize.default": _quantize_cuda_columns,
}
_KERNELS: dict[str, Describe] = {"to_mxfp8_dim0_kernel": _dim0_kernel}
_COLUMN_KERNELS: dict[str, Describe] = {"to_mxfp8_dim1_kernel": _dim1_kernel}


def _torchao(node: Node, *, columns: bool = False) -> Describe | None:
    """The describer of torchao's own ops, by name: most exist only where there is such a chip."""
    if isinstance(node.target, torch._ops.OpOverload):
        return (_TORCHAO_COLUMNS if columns else _TORCHAO).get(str(node.target))
    if str(node.target) == _KERNEL_NODE:
        return (_COLUMN_KERNELS if columns else _KERNELS).get(_kernel_name(node))
    return None


def _kernel_name(node: Node) -> str:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    # The index is process-global and means nothing once the table was reset; the kernel has a name.
    index: Any = node.kwargs["kernel_idx"]
    kernel: Any = kernel_side_table.id_to_kernel.get(index)
    while hasattr(kernel, "fn") and not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))
