"""What Inductor generated: kept while a model compiles, taken apart afterwards."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MARK = "# ---- graph {} ----"
CONFIGS = "# chosen configurations: "
_KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.S | re.M
)
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i64": 8, "i32": 4, "i16": 2}


@contextlib.contextmanager
def generated() -> Iterator[list[str]]:
    """Output code of every graph that is compiled inside (and not found in a cache)."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", found.append):
        yield found


Configs = dict[str, dict[str, Any]]


def chosen_configs(codes: list[str]) -> list[Configs]:
    """For each generated graph: kernel name -> configuration that was chosen when it ran."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    loaded = {}
    for module in PyCodeCache.modules:
        with contextlib.suppress(OSError):
            loaded[Path(module.__file__ or "").read_text().strip()] = module
    found: list[Configs] = []
    for code in codes:
        module = loaded.get(code.strip())
        configs: Configs = {}
        for name, kernel in [] if module is None else list(vars(module).items()):
            if isinstance(kernel, CachingAutotuner) and len(kernel.launchers) == 1:
                config = kernel.launchers[0].config
                configs[name] = {
                    "kwargs": dict(config.kwargs),
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                }
        found.append(configs)
    return found


def save(path: Path, codes: list[str], configs: list[Configs]) -> None:
    """All graphs in one text, each with its kernels' configurations in front."""
    parts = []
    for i, code in enumerate(codes):
        # What the comments say of the graph is long, and not needed.
        lines = [line for line in code.splitlines() if not line.startswith("#")]
        chosen = configs[i] if i < len(configs) else {}
        parts += [MARK.format(i), CONFIGS + json.dumps(chosen, default=str), *lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, ""]))


def graphs(text: str) -> list[tuple[str, Configs]]:
    """The graphs of such a text, each with its kernels' configurations."""
    found = []
    for part in re.split(r"^# ---- graph \d+ ----$", text, flags=re.M):
        if "def call(" in part:
            line = next((x for x in part.splitlines() if x.startswith(CONFIGS)), CONFIGS + "{}")
            found.append((part, dict(json.loads(line.removeprefix(CONFIGS)))))
    return found


def triton_sources(text: str) -> dict[str, tuple[str, str]]:
    """Name -> function and source of every Triton kernel of one generated graph."""
    return {
        name: (function, str(ast.literal_eval(f"'''{literal}'''")))
        for name, function, literal in _KERNEL.findall(text)
    }


def signature(source: str) -> dict[str, str]:
    """Triton's type of every argument, from the decorator's ``triton_meta``."""
    found = re.search(r"'signature': (\{.*?\})", source)
    return {} if found is None else dict(ast.literal_eval(found[1]))


def kernel_bytes(text: str) -> list[tuple[str, int]]:
    """Each launch of a Triton kernel in generated code, and the bytes of its tensors.

    Every tensor counts once and whole: an estimate, since a kernel may read a part of one, or a
    part twice.
    """
    return [launch for part, _ in graphs(text) for launch in _launches(part, triton_sources(part))]


def arguments(launch: str) -> list[str]:
    """Arguments of a call, as text."""
    call = ast.parse(launch.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    return [ast.unparse(argument) for argument in call.args]


def _launches(code: str, sources: dict[str, tuple[str, str]]) -> list[tuple[str, int]]:
    tree = ast.parse(code)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    sizes: dict[str, int] = {}
    launches = []
    for statement in (s for call in calls for s in _in_order(call.body)):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            elements = _elements(statement.value, sizes)
            if elements is not None:
                sizes[statement.targets[0].id] = elements
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            name = ast.unparse(call.func)
            if name == "assert_size_stride" and isinstance(call.args[0], ast.Name):
                sizes[call.args[0].id] = _product(call.args[1])
            elif name.endswith(".run") and name.removesuffix(".run") in sources:
                kernel = name.removesuffix(".run")
                launches.append((kernel, _moved(call, sources[kernel][1], sizes)))
    return launches


def _in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        yield from _in_order(getattr(statement, "body", []))


def _product(node: ast.expr) -> int:
    total = 1
    for size in getattr(node, "elts", []):
        total *= size.value if isinstance(size, ast.Constant) else 1
    return total


def _elements(node: ast.expr, sizes: dict[str, int]) -> int | None:
    if isinstance(node, ast.Name):
        return sizes.get(node.id)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name.startswith("empty_strided"):
            return _product(node.args[0])
        if name == "reinterpret_tensor":
            return _product(node.args[1])
    return None


def _moved(call: ast.Call, source: str, sizes: dict[str, int]) -> int:
    """Arguments of the launch in the signature's order.

    Constants are left out of a launch, except those of a kernel that Inductor did not write:
    there the place of an argument that is None is kept.
    """
    given = list(signature(source).values())
    if "custom_kernel=True" not in source:
        given = [t for t in given if t != "constexpr"]
    total = 0
    for argument, kind in zip(call.args, given, strict=False):
        elements = _elements(argument, sizes)
        if kind.startswith("*") and elements is not None:
            total += elements * _SIZES.get(kind[1:], 1)
    return total
