"""One decoder layer of Llama 3 8B with MXFP8 linears: torch.compile with the pass and without.

Hidden 4096, feed-forward 14336, 32 heads over 8, bfloat16, one sequence of 8192 tokens, random
weights. Training: torchao's ``MXFP8Linear``; inference: torchao's MX weights; both emulated, since
only sm_100 has the matmuls: what is multiplied here is bfloat16, so the matmuls take a larger share
of the time than they would there.

    python benchmarks/layer.py --out layer.json --code layer_code
    python benchmarks/layer.py --results layer.json --write docs/layer.md
    python benchmarks/layer.py --device cpu --tiny             # a smoke test, no figures

Exits with 1 where something failed or a site was not rewritten.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from kernellib import warm

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS, TINY_TOKENS = 8192, 32
BACKENDS = ("inductor", "mxnorm", "mxnorm_exact")
SITES = 2
ROUNDS, ITERATIONS = 3, 10


def build(kind: str, sizes: dict[str, int], device: Any) -> Any:
    """The layer, its linears replaced; it takes hidden states and rotary embeddings."""
    import torch
    from torch import nn
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=256, use_cache=False)
    config._attn_implementation = "sdpa"

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, 0)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            return self.layer(x, position_embeddings=(cos, sin))

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Layer()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.02)
    emulated = KernelPreference.EMULATED
    if kind == "inference":
        mx = MXDynamicActivationMXWeightConfig(
            kernel_preference=emulated,
            scaling_mode=ScaleCalculationMode.RCEIL,
            activation_dtype=torch.float8_e4m3fn,
            weight_dtype=torch.float8_e4m3fn,
        )
        quantize_(model, mx)
        return model.requires_grad_(False)
    # torchao's wrapper of weights needs torch 2.12; these linears do the same.
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, nn.Linear):
                new = MXFP8Linear(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    kernel_preference=emulated,
                    scale_calculation_mode=ScaleCalculationMode.RCEIL,
                    device="meta",
                    dtype=torch.bfloat16,
                )
                new.weight = linear.weight
                setattr(parent, name, new)
    return model


def inputs(sizes: dict[str, int], tokens: int, device: Any) -> tuple[Any, ...]:
    """Hidden states and Llama 3's rotary embeddings."""
    import torch

    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    x = torch.randn(1, tokens, sizes["hidden_size"], dtype=torch.bfloat16, device=device)
    frequency = 5e5 ** -(torch.arange(0, head, 2, device=device) / head)
    angle = torch.arange(tokens, device=device)[:, None] * frequency[None, :]
    angle = torch.cat((angle, angle), -1)[None]
    return x, angle.cos().bfloat16(), angle.sin().bfloat16()


class Runner:
    """One backend on one kind of layer.

    Attributes:
        steps: what is timed, by name.
    """

    def __init__(self, kind: str, backend: str, args: argparse.Namespace, x: Any) -> None:
        import torch

        from mxnorm_pass.backend import mxnorm, mxnorm_exact

        self.kind, self.backend = kind, backend
        self.device = torch.device(args.device)
        self.model = build(kind, TINY if args.tiny else SIZES, self.device)
        # By function: names of backends need the package installed.
        chosen = {"inductor": "inductor", "mxnorm": mxnorm, "mxnorm_exact": mxnorm_exact}[backend]
        options = {} if self.device.type == "cuda" else {"disable_cpp_codegen": True}
        self.compiled = torch.compile(
            self.model, backend=chosen, dynamic=False, fullgraph=True, options=options
        )
        self.x = x
        self.leaf = x[0].clone().requires_grad_(kind == "training")
        self.grad = torch.randn_like(x[0])
        self.steps: dict[str, Callable[[], Any]] = {"forward": self.forward}
        if kind == "training":
            self.steps["forward and backward"] = self.both

    def forward(self) -> Any:
        return self.compiled(self.leaf, *self.x[1:])

    def forget_gradients(self) -> None:
        self.leaf.grad = None
        for parameter in self.model.parameters():
            parameter.grad = None

    def both(self) -> None:
        self.forget_gradients()
        self.forward().backward(self.grad)

    def prepare(self) -> dict[str, Any]:
        """Compile and warm up: seconds, generated code, sites, SQNR is left to the caller."""
        from kernellib import code

        import mxnorm_pass

        before = 0
        if self.backend != "inductor":
            before = len(mxnorm_pass.last_report(self.backend).graphs)
        start = time.perf_counter()
        with code.generated() as codes:
            for step in self.steps.values():
                step()
        seconds = time.perf_counter() - start
        for _ in range(2):
            for step in self.steps.values():
                step()
        found: dict[str, Any] = {"compile_s": seconds, "codes": codes}
        if self.backend != "inductor":
            graphs = mxnorm_pass.last_report(self.backend).graphs[before:]
            found["rewritten"] = sum(g.rewritten for g in graphs)
            found["declined"] = [
                f"{s.norm}: {s.reason} {s.detail}"
                for g in graphs
                for s in g.sites
                if s.status != "rewritten"
            ]
            found["specs"] = [s.spec for g in graphs for s in g.sites]
        return found

    def time(self, step: Callable[[], Any], iterations: int) -> list[float]:
        """Milliseconds of each iteration."""
        import torch

        if self.device.type != "cuda":
            times = []
            for _ in range(iterations):
                start = time.perf_counter()
                step()
                times.append((time.perf_counter() - start) * 1e3)
            return times
        pairs = []
        for _ in range(iterations):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def peak(self, step: Callable[[], Any]) -> int:
        """Most bytes allocated during a step, beyond what was there: weights and input."""
        import torch

        if self.device.type != "cuda":
            return 0
        self.forget_gradients()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before


def measure_kind(kind: str, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """All backends on one kind of layer, their iterations interleaved."""
    import torch
    from kernellib import code, layers, timing
    from kernellib.variants import sqnr

    torch.set_grad_enabled(kind == "training")
    device = torch.device(args.device)
    x = inputs(*((TINY, TINY_TOKENS) if args.tiny else (SIZES, TOKENS)), device)
    runners: dict[str, Runner] = {}
    outputs: dict[str, Any] = {}
    for backend in BACKENDS:
        if time.perf_counter() - result["start"] > args.budget:
            result["skipped"].append(f"{kind}, {backend}")
            continue
        runner = Runner(kind, backend, args, x)
        entry = runner.prepare()
        codes = entry.pop("codes")
        entry |= {"kind": kind, "backend": backend, "graphs": len(codes)}
        entry["estimated"] = layers.bytes_by_class("\n".join(layers.numbered(codes)))
        outputs[backend] = runner.forward().detach().double().cpu()
        runners[backend] = runner
        result["entries"].append(entry)
        print(f"{kind}, {backend}: compiled in {entry['compile_s']:.1f} s", flush=True)
        if backend != "inductor" and entry["rewritten"] != SITES:
            what = f"{kind}, {backend}: {entry['rewritten']} sites rewritten, {entry['declined']}"
            result["failed"].append({"what": what, "error": what})
        if args.code and backend != "mxnorm_exact":
            code.save(args.code / f"{kind}_{backend}.txt", codes, code.chosen_configs(codes))
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(1 if args.tiny else ROUNDS):
        for backend, runner in runners.items():
            for name, step in runner.steps.items():
                runner.time(step, 2)
                some = runner.time(step, 2 if args.tiny else ITERATIONS)
                times.setdefault((backend, name), []).extend(some)
    for entry in result["entries"]:
        if entry["kind"] != kind or entry["backend"] not in runners:
            continue
        runner = runners[entry["backend"]]
        reference = outputs.get("inductor")
        if reference is not None:
            entry["sqnr"] = min(sqnr(reference, outputs[entry["backend"]]), 999.0)
        entry["steps"] = {}
        for name, step in runner.steps.items():
            values = sorted(times[(entry["backend"], name)])
            tenth = len(values) // 10
            step_result: dict[str, Any] = {
                "ms": statistics.median(values),
                "p10": values[tenth],
                "p90": values[-1 - tenth],
                "peak": runner.peak(step),
            }
            if device.type == "cuda":
                step_result |= layers.by_class(timing.gpu_work(step))
            entry["steps"][name] = step_result
            line = f"{step_result['ms']:.3f} ms, {step_result.get('classes')}"
            print(f"{kind}, {entry['backend']}, {name}: {line}", flush=True)


def measure(args: argparse.Namespace) -> int:
    """Run both kinds and write the file."""
    start = time.perf_counter()
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    warm.set_caches(None)
    # Here compiles come one after the other: each may use all cores.
    os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS")
    if threads:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = threads
    import torch

    result: dict[str, Any] = {
        "start": start,
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "tokens": TINY_TOKENS if args.tiny else TOKENS,
        "sizes": TINY if args.tiny else SIZES,
        "entries": [],
        "skipped": [],
        "failed": [],
    }
    for kind in ("training", "inference"):
        try:
            measure_kind(kind, args, result)
        except Exception:
            text = traceback.format_exc()
            result["failed"].append({"what": kind, "error": text})
            print(f"FAILED: {kind}\n{text}", file=sys.stderr, flush=True)
        result["seconds"] = time.perf_counter() - start
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1, default=str))
    print(f"{result['seconds']:.0f} s in all; {args.out}")
    for failure in result["failed"]:
        print(f"FAILED: {failure['what']}", file=sys.stderr)
    return int(bool(result["failed"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(os.environ.get("OUT") or tempfile.gettempdir())
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes: a smoke test")
    parser.add_argument("--out", type=Path, default=folder / "layer.json")
    parser.add_argument("--code", type=Path, default=folder / "layer_code", help="generated code")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; then compiles end")
    parser.add_argument("--results", type=Path, help="do not measure, read this file")
    parser.add_argument("--write", type=Path, help="write the results as a document")
    args = parser.parse_args()
    status = 0
    if not args.results:
        status = measure(args)
        args.results = args.out
    if args.write:
        from kernellib import layers

        args.write.write_text(layers.document(json.loads(args.results.read_text())))
    return status


if __name__ == "__main__":
    sys.exit(main())
