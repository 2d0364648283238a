"""Emulation of what a graph asks the chip for, so that probes can be run without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mxnorm_pass.formats import round_up_e8m0


def _cvt_rp_ue8m0x2(high: Tensor, low: Tensor) -> Tensor:
    """``cvt.rp.satfinite.ue8m0x2.f32 d, a, b``: ``a`` goes to the upper byte (PTX ISA 8.6)."""
    packed = (round_up_e8m0(high).to(torch.int32) << 8) | round_up_e8m0(low).to(torch.int32)
    return packed.to(torch.uint16)


def _e8m0_of_operand(value: Tensor) -> Tensor:
    wide = value.to(torch.float32)
    return _cvt_rp_ue8m0x2(torch.zeros_like(wide), wide)


_PTX: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;", "=h,r"): _e8m0_of_operand,
}
"""(text, constraints) -> function. A text that is not here is not guessed at."""


def _inline_asm(*inputs: Tensor, asm_str: str, constraints: str, **_: Any) -> Tensor:
    return _PTX[(" ".join(asm_str.split()), constraints)](*inputs)


_ASM = getattr(torch.ops.higher_order, "inline_asm_elementwise", None)
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {} if _ASM is None else {_ASM: _inline_asm}
"""Op -> what computes it on CPU probes."""


def knows(node: Node) -> bool:
    """A call that is emulated: inline PTX (torch >= 2.12) whose text is known."""
    if node.op != "call_function" or _ASM is None or node.target is not _ASM:
        return False
    text = " ".join(str(node.kwargs.get("asm_str")).split())
    return (text, node.kwargs.get("constraints")) in _PTX
