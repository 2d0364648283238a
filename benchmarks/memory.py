"""Bytes saved for the backward and peak bytes of a Llama 3 layer with MXFP8 linears, with the pass
and without, under every policy of activation checkpointing.

    python benchmarks/memory.py --out docs/memory.json --write docs/memory.md      # on a CPU
    python benchmarks/memory.py --device cuda --out memory.json                     # on a GPU
    python benchmarks/memory.py --results docs/memory.json docs/data/memory-h200.json \
        --write docs/memory.md

On a CPU graphs run op by op, at a smaller width; on a GPU each policy is compiled, at the width of
Llama 3 8B. Exits with 1 where a site was not rewritten.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paths  # noqa: F401

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SMALL_TOKENS = 512
SITES = 2
CONFIGS = (None, "exact", "estimate")


def checkpointed(layer: Any, cos: Any, sin: Any, contexts: Any) -> Any:
    """A model of one tensor: the layer in a region of its own; ``contexts`` None: in none."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            if contexts is None:
                return self.layer(x, cos, sin)
            kwargs = {} if contexts is True else {"context_fn": contexts}
            return checkpoint(self.layer, x, cos, sin, use_reentrant=False, **kwargs)

    return Model()


def config_of(name: str | None) -> Any:
    """Options of the pass."""
    from mxnorm_pass import MXNormConfig

    return None if name is None else MXNormConfig(rms="exact" if name == "exact" else "mx")


class Watch:
    """Bytes allocated beyond those at the start.

    Attributes:
        peak: the most.
        held: at each call of :meth:`mark`, in order.
    """

    def __init__(self, device: str) -> None:
        self.device, self.peak = device, 0
        self.held: list[int] = []
        self._marks = 0

    def mark(self) -> None:
        """Note what is held now."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            self.held.append(int(torch.cuda.memory_allocated()) - self._before)
        else:
            with torch.profiler.record_function(f"mark {self._marks}"):
                self._marks += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Measure what is inside."""
        import torch

        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = int(torch.cuda.memory_allocated())
            yield self
            torch.cuda.synchronize()
            self.peak = int(torch.cuda.max_memory_allocated()) - self._before
            return
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            yield self
        now = 0
        results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
        for event in sorted(results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                now += event.nbytes()
                self.peak = max(self.peak, now)
            elif event.name().startswith("mark "):
                self.held.append(now)


def by_graphs(args: argparse.Namespace, policies: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One trace; each policy's graphs run op by op."""
    import torch
    from layer import build, inputs
    from memorylib.graphs import halves, trace
    from memorylib.policies import recording

    x, cos, sin = inputs(args.sizes, args.tokens, args.device)
    layer = build("training", args.sizes, args.device)
    model = checkpointed(layer, cos, sin, recording)
    traced = trace(model, x.requires_grad_())
    layer.zero_grad(set_to_none=True)
    for name, (policy, budget) in policies.items():
        for config in CONFIGS:
            cut = halves(traced, policy, config_of(config), budget)
            torch.manual_seed(args.seed)
            with Watch(args.device).watching() as watch:
                ran = cut.run()
            del ran
            yield {
                "policy": name,
                "config": config,
                "saved": cut.saved_bytes,
                "saved_nodes": {n.name: list(map(str, n.meta["val"].shape)) for n in cut.saved},
                "peak": watch.peak,
                "again": cut.ops()[1],
                "rewritten": cut.report.rewritten if cut.report else None,
            }


def by_compiling(args: argparse.Namespace, policies: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each policy by torch.compile, with its regions as training code has them."""
    import torch
    from layer import build, inputs
    from memorylib.policies import answering

    import mxnorm_pass

    x, cos, sin = inputs(args.sizes, args.tokens, args.device)
    grad = torch.randn_like(x)
    options = {} if args.device == "cuda" else {"disable_cpp_codegen": True}
    for name, (policy, budget) in policies.items():
        contexts = None if policy is None else True if name == "full" else answering(policy)
        for config in CONFIGS:
            torch.manual_seed(args.seed)
            torch._dynamo.reset()
            model = checkpointed(build("training", args.sizes, args.device), cos, sin, contexts)
            ours = None if config is None else mxnorm_pass.backend(config_of(config))
            with torch._functorch.config.patch(activation_memory_budget=budget):
                run = torch.compile(
                    model, backend=ours or "inductor", fullgraph=True, options=options
                )
                leaf = x.detach().clone().requires_grad_()
                for step in range(2):
                    leaf.grad = None
                    model.zero_grad(set_to_none=True)
                    context = Watch(args.device).watching() if step else None
                    with context or contextlib.nullcontext(Watch(args.device)) as watch:
                        out = run(leaf)
                        if step:
                            watch.mark()
                        size = out.numel() * out.element_size()
                        out.backward(grad)
                        del out
            yield {
                "policy": name,
                "config": config,
                "saved": watch.held[0] - size,
                "peak": watch.peak,
                "rewritten": ours.report.rewritten if ours else None,
            }


def worse(entries: list[dict[str, Any]]) -> list[str]:
    """Where the pass saves more or peaks higher than nothing does."""
    base = {e["policy"]: e for e in entries if e["config"] is None}
    return [
        f"{e['policy']}, {e['config']}: {what} {e[what]} bytes against {base[e['policy']][what]}"
        for e in entries
        for what in ("saved", "peak")
        if e[what] > base[e["policy"]][what]
    ]


def measure(args: argparse.Namespace) -> int:
    """Run and write the file."""
    import torch
    from layer import SIZES, TOKENS
    from memorylib.policies import BUDGETS, POLICIES

    real = args.device == "cuda" and not args.small
    args.sizes, args.tokens = (SIZES, TOKENS) if real else (SMALL, SMALL_TOKENS)
    if args.tiny:
        args.tokens = 32
    route = args.route or ("compile" if args.device == "cuda" else "graphs")
    policies: dict[str, Any] = {name: (policy, 1.0) for name, policy in POLICIES.items()}
    policies |= {f"budget {b}": (None, b) for b in BUDGETS if b < 1}
    policies = {n: p for n, p in policies.items() if not args.policies or n in args.policies}
    torch.manual_seed(args.seed)
    found: Callable[..., Iterator[dict[str, Any]]] = (
        by_compiling if route == "compile" else by_graphs
    )
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "route": route,
        "sizes": args.sizes,
        "tokens": args.tokens,
        "seed": args.seed,
        "entries": [],
    }
    for entry in found(args, policies):
        result["entries"].append(entry)
        line = f"saved {entry['saved'] / 1e6:9.3f} MB, peak {entry['peak'] / 1e6:9.3f} MB"
        print(f"{entry['policy']:24} {entry['config']!s:9} {line}", flush=True)
    result["worse"] = worse(result["entries"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in result["worse"]:
        print(f"more than unrewritten: {line}", file=sys.stderr)
    return int(any(e["rewritten"] not in (None, SITES) for e in result["entries"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--route", choices=("graphs", "compile"), help="by default by the device")
    parser.add_argument("--small", action="store_true", help="on a GPU the width of the CPU's run")
    parser.add_argument("--tiny", action="store_true", help="32 tokens: a smoke test")
    parser.add_argument("--policies", nargs="*", help="names; all by default")
    parser.add_argument("--seed", type=int, default=0)
    out = Path(tempfile.gettempdir()) / "memory.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--results", type=Path, nargs="+", help="do not measure, read these files")
    parser.add_argument("--write", type=Path, help="write the results as a document")
    args = parser.parse_args()
    status = 0
    if not args.results:
        status = measure(args)
        args.results = [args.out]
    if args.write:
        from memorylib.document import document

        args.write.write_text(document([json.loads(p.read_text()) for p in args.results]))
    return status


if __name__ == "__main__":
    sys.exit(main())
