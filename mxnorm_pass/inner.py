"""How the graphs behind the joint passes are run: Inductor's code, or eagerly.

Inductor's C++ backend has no E8M0 and no FP4 type, so on CPU some MX graphs cannot be compiled,
rewritten or not. Such graphs go through the same pipeline with ATen calls instead of C++, and the
log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.fx import GraphModule, Node

from mxnorm_pass.compat import TORCH_VERSION
from mxnorm_pass.recognise import aten

log = logging.getLogger(__name__)

_CONVERT, _TO_COPY = torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default
_NO_CPP_TYPE = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def run_eagerly(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """In the place of Inductor's ``compile_fx_inner``: the graph itself, no code generated."""
    # prims are written in Python, and a cast has dozens of conversions: 160 us each, ATen's 9.
    for node in gm.graph.find_nodes(op="call_function", target=_CONVERT):
        node.target, node.args, node.kwargs = _TO_COPY, node.args[:1], {"dtype": node.args[1]}
    gm.recompile()
    boxed: Callable[..., Any] = make_boxed_func(gm.forward)
    return boxed


def compile_inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's ``compile_fx_inner``, without C++ where that could not type the graph."""
    from torch._inductor.compile_fx import compile_fx_inner

    node = needs_aten(gm)
    if node is None:
        return compile_fx_inner(gm, example_inputs, **kwargs)
    log.info(
        "C++ code generation has no type for %s (node %s): this CPU graph calls ATen instead",
        aten.dtype(node),
        node.name,
    )
    with torch._inductor.config.patch(disable_cpp_codegen=True):
        return compile_fx_inner(gm, example_inputs, **kwargs)


def needs_aten(gm: GraphModule) -> Node | None:
    """The first CPU node that Inductor's C++ backend cannot compile; None where it can.

    A scale that is only viewed as E8M0 between two uint8 nodes vanishes in code generation from
    torch 2.12 on; as an input, an output, or an operand of anything else it has no C++ type.
    """
    for node in gm.graph.nodes:
        if aten.dtype(node) not in _NO_CPP_TYPE or node.meta["val"].device.type != "cpu":
            continue
        if TORCH_VERSION < (2, 12) or not _vanishes(node):
            return node  # type: ignore[no-any-return]
    return None


def _vanishes(node: Node) -> bool:
    viewed = (
        aten.keeps_order(node) or node.target in aten.PERMUTES or node.target is aten.VIEW_DTYPE
    )
    return viewed and all(
        user.op == "call_function"
        and (
            user.target is aten.VIEW_DTYPE or aten.keeps_order(user) or user.target in aten.PERMUTES
        )
        for user in node.users
    )
