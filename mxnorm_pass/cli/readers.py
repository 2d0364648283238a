"""Who reads the output of each norm module, seen in the graph before the pass rewrites it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import Graph, Node

from mxnorm_pass.recognise import aten
from mxnorm_pass.recognise.paths import module_path

_NORM = re.compile(r"norm", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """A module that is named for a norm and holds at most a gain and a bias of one axis."""
    named = _NORM.search(type(module).__name__) is not None
    return (
        named
        and not any(module.children())
        and all(p.dim() <= 1 for p in module.parameters(recurse=False))
    )


@dataclass(frozen=True)
class Reader:
    """``kind`` is ``linear``, ``router``, ``experts``, ``attention``, ``add``, ``output``,
    ``norm`` or ``other``; ``op`` the operator that reads.
    """

    path: str
    kind: str
    op: str


@dataclass
class Output:
    """What a norm puts out: shape ``[..., K]`` and who reads it, in graph order.

    ``sums``: paths of the linears that read a sum which it goes into.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    readers: list[Reader] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of K elements."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count


class Readers:
    """A pass for the hook ahead of ours: changes nothing, notes the readers of every norm.

    Attributes:
        outputs: by path of the norm module; norms that the graphs do not reach are missing.
        reached: paths of all modules that a forward node came from.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.norms = {path for path, module in self.modules.items() if is_norm(module)}
        self.outputs: dict[str, Output] = {}
        self.reached: set[str] = set()

    def __call__(self, graph: Graph) -> None:
        """Called by Inductor with each joint or inference graph."""
        paths: dict[Node, str] = {}
        for node in graph.nodes:
            if aten.is_call(node) and not aten.is_backward(node):
                paths[node] = module_path(node)
        self.reached.update(paths.values())
        for node, path in paths.items():
            if path in self.norms and aten.tensor(node) is not None:
                outside = [u for u in node.users if paths.get(u, "") != path and u in paths]
                final = [u for u in node.users if u.op == "output"]
                size = aten.shape(node)
                wide = len(size) > 1 and isinstance(size[-1], int) and size[-1] > 1
                if wide and (outside or (final and not outside and self._ends(node, path, paths))):
                    self._note(node, path, paths)

    def _ends(self, node: Node, path: str, paths: dict[Node, str]) -> bool:
        """The module's last node, as opposed to a value that is saved for the backward."""
        return all(paths.get(u, "") != path for u in node.users)

    def _note(self, node: Node, path: str, paths: dict[Node, str]) -> None:
        shape = tuple(int(s) for s in aten.shape(node) if isinstance(s, int))
        dtype = aten.dtype(node) or torch.bfloat16
        output = self.outputs.setdefault(path, Output(shape, dtype))
        seen = {node}
        queue = [node]
        for source in queue:
            for user in source.users:
                if user in seen:
                    continue
                seen.add(user)
                if user.op == "output":
                    self._add(output, Reader("", "output", "output"))
                elif user in paths and paths[user] != path:
                    reader = self._reader(user, paths[user], path)
                    if reader is None:
                        queue.append(user)
                    else:
                        self._add(output, reader)
                        if reader.kind == "add":
                            self._note_sum(output, user, paths)

    def _note_sum(self, output: Output, add: Node, paths: dict[Node, str]) -> None:
        seen = {add}
        queue = [add]
        for source in queue:
            for user in source.users:
                if user in seen or user not in paths:
                    continue
                seen.add(user)
                reader = self._reader(user, paths[user], "")
                if reader is None:
                    queue.append(user)
                elif reader.kind == "linear" and reader.path not in output.sums:
                    output.sums.append(reader.path)

    @staticmethod
    def _add(output: Output, reader: Reader) -> None:
        if reader not in output.readers:
            output.readers.append(reader)

    def _reader(self, node: Node, path: str, norm: str) -> Reader | None:
        """Who reads at ``node``; None where the values only change their shape or dtype there."""
        op = str(getattr(node.target, "_opname", node.target))
        module = self.modules.get(path)
        name = type(module).__name__
        if isinstance(module, nn.Linear) or name == "MXTrainingLinear":
            return Reader(path, "linear", op)
        if module is not None and "router" in name.lower():
            return Reader(path, "router", op)
        if module is not None and any(p.dim() == 3 for p in module.parameters(recurse=False)):
            return Reader(path, "experts", op)
        if path in self.norms and path != norm:
            return Reader(path, "norm", op)
        if aten.keeps_order(node) or aten.moves(node) or node.target in aten.COPIES:
            return None
        if node.target is aten.CONVERT or node.target in aten.PERMUTES:
            return None
        if "attention" in name.lower() or "attn" in name.lower():
            return Reader(path, "attention", op)
        if op == "add":
            return Reader(path, "add", op)
        return Reader(path, "other", op)
