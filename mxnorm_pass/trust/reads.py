"""Reads of a model's parameters that no graph shows.

Between graphs (a graph break, a call that Dynamo is told to leave alone) a model runs op by op, and
numbers can leave torch altogether. Whoever changes a parameter has to know of those reads too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def memory(tensor: Any) -> int | None:
    """Where the memory lies that a plain tensor is a part of; None for what has none."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage().data_ptr() or None


class Reads:
    """Who reads which parameter.

    Attributes:
        by_name: name of a parameter -> the ops that read it or a view of it, in order.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            place = memory(tensor)
            if place is not None:
                self._names.setdefault(place, []).append(name)
        self.by_name: dict[str, list[str]] = {}

    def sharing(self, tensor: Any) -> list[str]:
        """Names of the parameters whose memory a tensor is a part of, in any shape."""
        place = memory(tensor)
        return [] if place is None else self._names.get(place, [])

    def note(self, op: str, inputs: Any) -> None:
        """``op`` was called on ``inputs``, a tree."""
        for leaf in torch.utils._pytree.tree_leaves(inputs):
            for name in self.sharing(leaf):
                seen = self.by_name.setdefault(name, [])
                if op not in seen:
                    seen.append(op)


class OutsideGraphs(TorchDispatchMode):
    """Notes what eager ops read while a model runs through torch.compile. Ops that are compiled do
    not come here: the mode is off while Dynamo traces, and has to be off while a graph runs.
    """

    supports_higher_order_operators = True

    def __init__(self, reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """With any other mode Dynamo would trace nothing."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._reads.note(str(func), (args, kwargs))
        return func(*args, **(kwargs or {}))


_RAW = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in ("numpy", "__array__", "tolist", "data_ptr", "__dlpack__", "storage")
}
"""Ways out of torch that are no ops."""


class _RawReads(TorchFunctionMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RAW:
            self._reads.note(_RAW[func], args)
        return func(*args, **(kwargs or {}))


@contextmanager
def raw_reads(reads: Reads) -> Iterator[None]:
    """Notes parameters whose numbers are taken out of torch. All runs eagerly meanwhile, regions
    that are compiled on their own included.
    """
    with torch.compiler.set_stance("force_eager"), _RawReads(reads):
        yield
