"""bfloat16 products on CPUs without instructions for them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")  # what it registers lives as long as it does


def speed_up_bfloat16() -> bool:
    """On a CPU without bfloat16 instructions, take bfloat16 products in float32, rounded once.

    That is what such instructions do. ATen's own loop for these CPUs takes 30 times as long, and a
    training run would spend its minutes there. True where it was needed.
    """
    try:
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
    except (AttributeError, RuntimeError):
        pass  # a torch without oneDNN makes no use of such instructions either

    def mm(a: Tensor, b: Tensor) -> Tensor:
        # bmm and not mm, which would call this again.
        if a.dtype is torch.bfloat16:
            return torch.bmm(a.float()[None], b.float()[None])[0].to(a.dtype)
        return torch.bmm(a[None], b[None])[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel of its own is replaced
        _library.impl("mm", mm, "CPU", allow_override=True)
        _library.impl("mm.out", lambda a, b, out: out.copy_(mm(a, b)), "CPU", allow_override=True)
    return True
