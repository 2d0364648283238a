"""What the pass adds to a compile: its share of one, and whether it stays linear in depth.

1. The demo's model through all of Inductor, forward, backward and C++ code generation, caches off:
   the pass may take 5% of it.
2. The pass alone on the joint graphs of a 4-layer and a 32-layer Llama: a layer of the deep one may
   cost 1.3 times one of the shallow one. Each graph is traced once, which takes most of the time
   here, and the pass runs on copies of it.

Exits with 1 where a bound is missed or a site was not rewritten.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import demo
import torch
from torch._inductor import metrics
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from mxnorm_pass import MXNormConfig, MXNormPass

SHARE_BOUND = 0.05
RATIO_BOUND = 1.3
REPEATS = 5
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def full_compile(layers: int) -> list[str]:
    """Time one compile of the demo's model and the pass in it; what is wrong."""
    model = demo.build_model(0, layers=layers)
    tokens = demo.make_batches(demo.read_text(), 1, 0)[0]
    compiled, report = demo.compile_model(model, MXNormConfig())

    def step() -> float:
        start = time.perf_counter()
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        return time.perf_counter() - start

    metrics.reset()
    # No compiled graph and no object file of an earlier run.
    with (
        tempfile.TemporaryDirectory() as folder,
        torch._inductor.config.patch(force_disable_caches=True),
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        warnings.filterwarnings("ignore", "dynamo_pgo")  # says that this cache is off as well
        first = step()
        again = step()
    seconds = first - again
    inside = sum(graph.seconds for graph in report.graphs)
    share = inside / seconds
    print(
        f"full compile, hidden {demo.HIDDEN}, {layers} layer(s), forward and backward: "
        f"{seconds:.1f} s (first step {first:.1f} s less a warm one {again:.1f} s), "
        f"{metrics.generated_kernel_count} kernels generated"
    )
    print(
        f"  pass: {inside:.3f} s in {len(report.graphs)} graph(s), {report.rewritten} sites "
        f"rewritten: {share:.2%} of the compile (bound {SHARE_BOUND:.0%})",
        flush=True,
    )
    problems = []
    if report.rewritten != demo.SITES_PER_LAYER * layers:
        problems.append(f"full compile: {report.rewritten} sites rewritten\n{report}")
    if not metrics.generated_kernel_count:
        problems.append("full compile: no code was generated")
    if not share <= SHARE_BOUND:
        problems.append(f"the pass takes {share:.2%} of a compile, allowed are {SHARE_BOUND:.0%}")
    return problems


class _Captured(Exception):
    """Ends a compile once its joint graph is there: the rest of it is not needed."""


class _Capture(CustomGraphPass):
    """Keeps the joint graph as our pass would get it."""

    graph: Graph | None = None

    def __call__(self, graph: Graph) -> None:
        self.graph = graph
        raise _Captured

    def uuid(self) -> None:
        return None


def joint_graph(layers: int) -> Graph:
    """Trace a small Llama for training; the graph on Inductor's joint hook."""
    model = demo.build_model(0, layers=layers, **SMALL)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    capture = _Capture()

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(gm, inputs, config_patches={"joint_custom_pre_pass": capture})

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, dynamic=False)(input_ids=tokens, labels=tokens)
    except Exception:
        if capture.graph is None:
            raise
    assert capture.graph is not None
    return capture.graph


def forget_probes() -> None:
    """Empty every cache of the package: what a process that compiles its first model has."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "mxnorm_pass":
            continue
        for attribute, value in vars(module).items():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif attribute == "_cache":
                value.clear()


def pass_seconds(graph: Graph, layers: int, cold: bool) -> float:
    """Time of the pass on a copy of a graph; raises unless it rewrites all sites."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about copying its pytrees
        owner = GraphModule(graph.owning_module, copy.deepcopy(graph))
    if cold:
        forget_probes()
    gc.collect()
    result = MXNormPass(MXNormConfig()).apply(owner.graph)
    if result.rewritten != demo.SITES_PER_LAYER * layers:
        raise RuntimeError(f"{layers} layers: {result.summary()}")
    return result.seconds


def depth(shallow: int, deep: int) -> list[str]:
    """Time the pass per layer at two depths; what is wrong."""
    graphs: dict[int, Graph] = {}
    for layers in (shallow, deep):
        start = time.perf_counter()
        graphs[layers] = joint_graph(layers)
        print(
            f"traced {layers} layers of hidden {SMALL['hidden_size']} once: "
            f"{len(graphs[layers].nodes)} nodes, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
    seconds: dict[tuple[int, bool], list[float]] = {}
    for _ in range(REPEATS):
        # In turn, so that both depths see the same load of the machine.
        for layers, graph in graphs.items():
            for cold in (True, False):
                seconds.setdefault((layers, cold), []).append(pass_seconds(graph, layers, cold))
    per_layer = {key: statistics.median(times) / key[0] for key, times in seconds.items()}
    problems = []
    print(f"pass alone, ms per layer, median of {REPEATS}:")
    for cold in (False, True):
        caches = "cold" if cold else "warm"
        few, many = per_layer[shallow, cold], per_layer[deep, cold]
        print(
            f"  probe caches {caches}: {few * 1e3:.2f} at {shallow} layers, {many * 1e3:.2f} at "
            f"{deep}: ratio {many / few:.2f} (bound {RATIO_BOUND})",
            flush=True,
        )
        if not many / few <= RATIO_BOUND:
            problems.append(
                f"with {caches} probe caches a layer of {deep} costs {many / few:.2f} times one of "
                f"{shallow}, allowed are {RATIO_BOUND}"
            )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one layer compiled, depths 2 and 4: a smoke test"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {_cpu()}, {torch.get_num_threads()} threads",
        flush=True,
    )
    demo.speed_up_bfloat16()  # so that running the step does not pass for compile time
    problems = depth(*((2, 4) if args.quick else (4, 32)))
    problems += full_compile(1 if args.quick else demo.LAYERS)
    print(f"{time.perf_counter() - start:.0f} s in all")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "unknown CPU"


if __name__ == "__main__":
    sys.exit(main())
