"""Inductor lowering of the op: its decomposition, inlined, so that the scheduler can fuse it.

A custom op that a pass inserts is opaque to Inductor: AOTAutograd's decompositions have run
already. The decomposition is traced once per call site and its nodes are lowered in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallback_handler, process_subgraph_nodes, register_lowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from mxnorm_pass.ops.rmsnorm_mxquant import (
    ABSMAX_OP,
    OP,
    absmax_decomposition,
    decomposition,
)

_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    OP: decomposition,
    ABSMAX_OP: absmax_decomposition,
}


def register() -> None:
    """Idempotent; called when the package is imported."""
    for op in _DECOMPOSITIONS:
        register_lowering(op, type_promotion_kind=None)(partial(_lower, op))


def _lower(op: Any, *args: Any) -> Any:
    node = V.graph.current_node
    device = args[0].get_device()
    if device.type == "cpu" and config.disable_cpp_codegen:
        # A graph that C++ cannot type runs on ATen calls, this op as one of them.
        return fallback_handler(op, add_to_fallback_set=False)(*args)
    tensors = [i for i, a in enumerate(node.args) if isinstance(a, torch.fx.Node)]
    constants: list[Any] = list(node.args)

    def only_tensors(*given: torch.Tensor) -> Any:
        for i, tensor in zip(tensors, given, strict=True):
            constants[i] = tensor
        return _DECOMPOSITIONS[op](*constants)

    fakes = [constants[i].meta["val"] for i in tensors]
    with V.fake_mode:
        traced = make_fx(only_tensors, decomposition_table=select_decomp_table())(*fakes)
    return process_subgraph_nodes(traced, [args[i] for i in tensors])
