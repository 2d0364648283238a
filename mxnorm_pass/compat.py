"""What differs between the torch versions this package runs on, and nothing else.

Supported and tested: torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = [
    "TORCH_VERSION",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "autocast_state",
    "cache_dir",
    "in_compiled_autograd",
    "is_contiguous_or_false",
    "mode_options",
    "passes_on_hook",
    "stable_topological_sort",
    "structured_trace",
    "unset_fake_temporarily",
]

TORCH_VERSION: tuple[int, int] = tuple(int(p) for p in torch.__version__.split(".")[:2])  # type: ignore[assignment]


def passes_on_hook(hook: Any) -> list[Callable[[torch.fx.Graph], None]]:
    """The passes found on an Inductor hook: none, one, or (torch >= 2.12) a list of them."""
    if hook is None:
        return []
    if isinstance(hook, Sequence):
        return list(hook)
    return [hook]


def mode_options(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """Inductor options behind a ``torch.compile`` mode; raises what torch.compile raises."""
    if mode is None or mode == "default":
        return {}
    return dict(torch._inductor.list_mode_options(mode, dynamic))


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    """Autocast as it is around a compile: device, whether it is on, and to which dtype."""
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]


def in_compiled_autograd() -> bool:
    """Whether what is being compiled is a backward that compiled autograd captured."""
    from torch._dynamo import compiled_autograd

    return bool(compiled_autograd.in_compiled_autograd_region)


def structured_trace() -> bool:
    """Whether torch writes a structured trace (``TORCH_TRACE``)."""
    return bool(torch._logging._internal.trace_log.handlers)


def cache_dir() -> str:
    """Folder of Inductor's on-disk caches (``TORCHINDUCTOR_CACHE_DIR``)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

    return str(inductor_cache_dir())


def node_tags(op: Any) -> Iterable[torch.Tag]:
    """Tags of an operator overload; empty for anything else."""
    return op.tags if isinstance(op, torch._ops.OpOverload) else ()
