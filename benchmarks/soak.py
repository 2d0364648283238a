"""A long training run that has to stay boring: no recompile after warm-up, no memory growth.

A small decoder (attention and feed-forward, head tied to the embedding) trains on text that every
CPython carries, in MXFP8 with emulated casts, compiled with the pass, in batches whose sequence
length changes in every step. Counted are the graphs that torch.compile makes, the resident memory
that the operating system sees, and the tensors that Python's collector sees.

Exits with 1 where a graph is compiled after warm-up, where tensors or memory grow over the second
half, where a site was not rewritten, or where the loss does not fall.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Any

# Threads that spin while they wait make every small op several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import mxnorm_pass
from mxnorm_pass import Report

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH = 256, 64, 2, 2, 2
SITES_PER_LAYER = 2
# The length of a sequence: two make a number of tokens that blocks of 32 divide.
LEAST, MOST, MULTIPLE = 32, 192, 16
WARM_UP = 20
# Resident memory may grow by this over the second half: what an allocator does by itself. One
# bfloat16 row of the model's width and the longest batch that leaked per step would be 48 MiB.
GROWTH_BOUND = 8.0  # MiB
ROUTES: dict[str, dict[str, Any]] = {
    "cpp": {},
    "aten": {"disable_cpp_codegen": True},
    "eager": {"mxnorm.inner": "eager"},
}
RUN_BY = {
    "cpp": "by Inductor's C++ code",
    "aten": "by Inductor's code with ATen calls in the place of C++ kernels",
    "eager": "without code generation",
}


class Layer(nn.Module):
    """Pre-norm attention and feed-forward; both norms feed MXFP8 linears."""

    def __init__(self) -> None:
        super().__init__()

        def linear(k: int, n: int) -> nn.Module:
            return MXFP8Linear(k, n, bias=False, kernel_preference=KernelPreference.EMULATED)

        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Bytes in, loss of the next byte out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


@dataclass
class Sample:
    """What was seen after a step."""

    step: int
    length: int
    loss: float
    graphs: int
    resident_mib: float
    tensors: int
    tensor_bytes: int


@dataclass
class Soak:
    """A run and what it showed."""

    route: str
    steps: int
    seed: int
    sites: int
    report: Report
    samples: list[Sample] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compiled_at: list[int] = field(default_factory=list)
    lengths: int = 0
    seconds: float = 0.0

    @property
    def half(self) -> list[Sample]:
        return [s for s in self.samples if s.step >= self.steps // 2]

    def growth(self) -> float:
        """Least-squares slope of resident memory over the second half, times its steps, in MiB."""
        x = torch.tensor([float(s.step) for s in self.half], dtype=torch.float64)
        y = torch.tensor([s.resident_mib for s in self.half], dtype=torch.float64)
        x -= x.mean()
        return float((x * y).sum() / x.square().sum()) * (self.steps - self.steps // 2)

    def tail(self, of: int = 50) -> tuple[float, float]:
        """Mean loss of the first and of the last steps."""
        n = min(of, self.steps // 4)
        return sum(self.losses[:n]) / n, sum(self.losses[-n:]) / n

    def problems(self) -> list[str]:
        """What is not as it must be; empty for a run that was boring."""
        found = []
        rewritten = [g.rewritten for g in self.report.graphs]
        if not rewritten or any(n != self.sites for n in rewritten):
            found.append(f"rewritten sites per graph {rewritten}, not {self.sites} each")
        late = [step for step in self.compiled_at if step >= WARM_UP]
        if late:
            found.append(f"compiled again after warm-up, at steps {late}")
        first, last = self.half[0], self.half[-1]
        if (last.tensors, last.tensor_bytes) != (first.tensors, first.tensor_bytes):
            found.append(
                f"live tensors went from {first.tensors} ({first.tensor_bytes} bytes) to "
                f"{last.tensors} ({last.tensor_bytes} bytes) over the second half"
            )
        if self.growth() > GROWTH_BOUND:
            found.append(f"resident memory grew by {self.growth():.1f} MiB over the second half")
        begin, end = self.tail()
        if not (math.isfinite(end) and end < begin):
            found.append(f"the loss went from {begin:.3f} to {end:.3f}")
        return found

    def facts(self) -> dict[str, Any]:
        """The run in numbers."""
        begin, end = self.tail()
        half = self.half
        return {
            "torch": torch.__version__,
            "device": "cpu",
            "machine": platform.machine(),
            "route": self.route,
            "seed": self.seed,
            "steps": self.steps,
            "lengths": self.lengths,
            "sites_per_graph": [g.rewritten for g in self.report.graphs],
            "compiled_at": self.compiled_at,
            "loss_first": round(begin, 4),
            "loss_last": round(end, 4),
            "resident_mib_half": round(half[0].resident_mib, 1),
            "resident_mib_end": round(half[-1].resident_mib, 1),
            "resident_growth_mib": round(self.growth(), 2),
            "tensors_half": half[0].tensors,
            "tensors_end": half[-1].tensors,
            "tensor_bytes_half": half[0].tensor_bytes,
            "tensor_bytes_end": half[-1].tensor_bytes,
            "seconds": round(self.seconds, 1),
        }


def resident_mib() -> float:
    """Resident memory of this process as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def live_tensors() -> tuple[int, int]:
    """How many tensors the collector knows, and the bytes of their storages, each once."""
    gc.collect()
    storages: dict[int, int] = {}
    count = 0
    for thing in gc.get_objects():
        # type(), since isinstance asks lazy objects for their class and wakes them.
        if not issubclass(type(thing), Tensor):
            continue
        count += 1
        if thing.device.type != "meta" and type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return count, sum(storages.values())


def read_text() -> Tensor:
    """The language reference behind ``help()``, as bytes."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def soak(
    steps: int, seed: int = 0, route: str = "aten", every: int = 50, layers: int = LAYERS
) -> Soak:
    """Train for ``steps`` steps and sample after every ``every``-th.

    Raises:
        ValueError: for an unknown route.
    """
    if route not in ROUTES:
        raise ValueError(f"route {route!r}: allowed are {', '.join(ROUTES)}")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(layers).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    backend = mxnorm_pass.backend(strict=True)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=backend, options=ROUTES[route])
    text = read_text()
    run = Soak(route, steps, seed, SITES_PER_LAYER * layers, backend.report)
    seen: set[int] = set()

    def step() -> tuple[int, float]:
        length = MULTIPLE * int(
            torch.randint(LEAST // MULTIPLE, MOST // MULTIPLE + 1, (), generator=generator)
        )
        starts = torch.randint(0, len(text) - length - 1, (BATCH, 1), generator=generator)
        window = text[starts + torch.arange(length + 1)]
        loss = compiled(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return length, float(loss.detach())

    start = time.perf_counter()
    graphs = 0
    for i in range(steps):
        length, loss = step()
        run.losses.append(loss)
        seen.add(length)
        if counters["stats"]["unique_graphs"] != graphs:
            graphs = counters["stats"]["unique_graphs"]
            run.compiled_at.append(i)
        if (i + 1) % every == 0:
            count, size = live_tensors()
            run.samples.append(Sample(i + 1, length, loss, graphs, resident_mib(), count, size))
            run.seconds = time.perf_counter() - start
            print(
                f"step {i + 1}: loss {loss:.3f}, {graphs} graph(s), "
                f"{run.samples[-1].resident_mib:.1f} MiB, {count} tensors, {run.seconds:.0f} s",
                flush=True,
            )
    run.lengths = len(seen)
    return run


def page(facts: dict[str, Any]) -> str:
    """docs/soak.md."""
    sites = facts["sites_per_graph"]
    return f"""# A long run

{facts["steps"]:,} training steps on a CPU ({facts["machine"]}), torch {facts["torch"]}, by
`benchmarks/soak.py --steps {facts["steps"]} --seed {facts["seed"]} --route {facts["route"]}`:
a decoder of {LAYERS} layers, {WIDTH} wide, in bfloat16, with {sites[0]} norms in front of torchao's
MXFP8 linears (emulated casts) and a head tied to the embedding, rewritten with the estimate, run
{RUN_BY[facts["route"]]}, and trained by AdamW on English text. Each step draws its
length from {LEAST}, {LEAST + MULTIPLE}, ... {MOST}, so that {facts["lengths"]} lengths take turns.
No GPU was used.

| | |
|---|---|
| graphs compiled | {len(sites)}, at steps {", ".join(map(str, facts["compiled_at"]))}: \
the first length, then any length |
| compiled after step {WARM_UP} | {sum(s >= WARM_UP for s in facts["compiled_at"])} |
| sites rewritten in each graph | {", ".join(map(str, sites))} |
| resident memory at half way, at the end | \
{facts["resident_mib_half"]} MiB, {facts["resident_mib_end"]} MiB |
| growth over the second half (least-squares slope) | \
{facts["resident_growth_mib"]:+.2f} MiB, allowed {GROWTH_BOUND:.0f} |
| live tensors at half way, at the end | {facts["tensors_half"]}, {facts["tensors_end"]} |
| their bytes | {facts["tensor_bytes_half"]}, {facts["tensor_bytes_end"]} |
| loss, mean of the first and of the last 50 steps | \
{facts["loss_first"]:.3f}, {facts["loss_last"]:.3f} |

Resident memory is what Linux counts for the process; tensors are what Python's collector knows
after a collection. A bfloat16 activation of the longest batch that leaked in every step would be
48 MiB over the second half, and tensors by the thousand. All samples are in
[soak.csv](data/soak.csv), the figures above in [soak.json](soak.json); tests run the same script
shortened.

## What else a training job does

Tested on CPUs, in `tests/test_training_rows.py` and `tests/test_living.py`; "bitwise" is against
the unrewritten step with the true RMS, gradients included.

| | |
|---|---|
| float32 parameters under bfloat16 autocast, norms inside and outside of it | bitwise |
| `GradScaler` | scaled by a power of two and back: the same bits; an overflow skips its step |
| gradient accumulation | two micro-steps add up to one batch, but for the order of float32 sums |
| frozen gains and weights (LoRA by hand, peft) | bitwise; gradients for the adapters alone |
| NaN, Inf, zero and subnormal rows, an empty batch | bitwise; other rows do not notice |
| `torch.use_deterministic_algorithms(True)` | nothing refuses it, nothing changes |
| AdamW with weight decay, state dicts | bitwise, moments included |
| `torch.distributed.checkpoint` | a loaded run goes on bitwise as the saved one did |
| compiled autograd | the same gradients, bit for bit; the backward is a graph without sites |
| AOTAutograd's and Inductor's caches | a second process hits both and reports the same sites |
| varying lengths | as many graphs as without the pass |
| `layer.compile()` for every layer | one compile for all that are equal, if they share a backend |

The last line is torch's own rule: give all layers one backend object, or the backend's name. A
new `mxnorm_pass.backend()` per layer is a new compile per layer, and from `recompile_limit` on
torch runs the rest of them uncompiled.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--route", choices=tuple(ROUTES), default="aten", help="how graphs are run")
    parser.add_argument("--every", type=int, default=50, help="steps between samples")
    parser.add_argument("--csv", type=Path, help="write the samples to this file")
    parser.add_argument("--results", type=Path, help="write the figures to this file (JSON)")
    parser.add_argument("--write", type=Path, help="write the document to this file")
    args = parser.parse_args()
    if args.steps < 4 * args.every:
        parser.error(f"--steps {args.steps}: four samples are needed, {4 * args.every} or more")

    run = soak(args.steps, args.seed, args.route, args.every)
    facts = run.facts()
    print(json.dumps(facts, indent=1))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([f.name for f in dataclasses.fields(Sample)])
            for s in run.samples:
                writer.writerow(
                    [
                        f"{v:.4g}" if name == "loss" else f"{v:.1f}" if isinstance(v, float) else v
                        for name, v in dataclasses.asdict(s).items()
                    ]
                )
    if args.results:
        args.results.write_text(json.dumps(facts, indent=1) + "\n")
    if args.write:
        args.write.write_text(page(facts))
    problems = run.problems()
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
