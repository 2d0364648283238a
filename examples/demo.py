"""Train a small Llama in MXFP8 three ways and compare the losses: ``make demo``.

The decoder linears of a transformers Llama (hidden 768, 2 layers) train on torchao's MXFP8 path
with emulated casts, on English text that every CPython carries, from one seed and the same batches:

* ``baseline``: compiled as it is, nothing rewritten;
* ``exact``: norm and cast are one op, which takes the true RMS;
* ``mx p=2``: the same op, which estimates the RMS from the block absmax.

Exits with 1 unless the final loss of ``exact`` is within 0.5% and that of ``mx p=2`` within 2% of
the baseline's, and all four norm -> cast -> linear sites were rewritten in both.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics

# Threads that spin while they wait make every small op several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Imports write a page of warnings: about CUDA libraries, which a CPU does without, and about enums
# that torchao registers in a way that torch is about to drop.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

import torch  # noqa: E402
from cpu_bfloat16 import speed_up_bfloat16  # noqa: E402
from rich import progress as bars  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchao.prototype.moe_training import config as mxfp8  # noqa: E402
from torchao.quantization import quantize_  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import mxnorm_pass  # noqa: E402
from mxnorm_pass import MXNormConfig, Report, reference, theory  # noqa: E402

# Width matters more than depth: an estimate over few blocks is noisier than a real model's.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 768, 1024, 12, 4, 2
BATCH, SEQ, BLOCK = 12, 32, 32
LEARNING_RATE, WARMUP = 1e-3, 8
SITES_PER_LAYER = 2  # the norm before q, k, v and the norm before gate and up
TAIL = 8  # steps that a final loss is the mean of
BOUNDS = {"exact": 0.005, "mx p=2": 0.02}  # relative, of the final loss
LEARNT = 0.7  # the baseline's final loss must be below this share of its first one
ROUTE_BOUND = 0.01  # relative, of a loss through C++ code against one on the eager route

console = Console(width=100, highlight=False)


@dataclass
class Run:
    """A training run and what is left of it."""

    name: str
    model: nn.Module
    report: Report
    losses: list[float] = field(default_factory=list)

    @property
    def final(self) -> float:
        tail = self.losses[-TAIL:]
        return sum(tail) / len(tail)


def read_text() -> Tensor:
    """The language reference behind ``help()``, as bytes: some 460,000 tokens of English."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def make_batches(text: Tensor, steps: int, seed: int) -> list[Tensor]:
    """Random windows of the text, ``[BATCH, SEQ]`` each; every run gets these, in this order."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - SEQ, (steps, BATCH, 1), generator=generator)
    return list(text[starts + torch.arange(SEQ)])


def build_model(
    seed: int, layers: int = LAYERS, plain: Sequence[str] = (), **config: int
) -> nn.Module:
    """A bfloat16 Llama, the same for the same seed; decoder linears in MXFP8 but ``plain`` ones."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 256,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": SEQ,
        **config,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # With gains of 1, as models begin with, a mistake in the gain would not show.
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
    recipe = mxfp8.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
    bfloat16 = {"lm_head", *plain}

    def quantised(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and path.rpartition(".")[2] not in bfloat16

    quantize_(model, mxfp8.MXFP8TrainingOpConfig.from_recipe(recipe), filter_fn=quantised)
    return model


def fingerprint(model: nn.Module) -> str:
    """Hash of all parameters' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        plain = getattr(parameter, "_data", parameter)  # torchao wraps the weights it trains
        digest.update(plain.detach().view(torch.uint8).numpy())
    return digest.hexdigest()


def compile_model(model: nn.Module, config: MXNormConfig) -> tuple[nn.Module, Report]:
    """The model behind the backend, and the report that compiling it will fill."""
    # All models share the code of one class: what Dynamo kept of the last one must not be asked.
    torch._dynamo.reset()
    backend = mxnorm_pass.backend(config)
    return torch.compile(model, backend=backend, dynamic=False), backend.report


def train(name: str, model: nn.Module, config: MXNormConfig, batches: Sequence[Tensor]) -> Run:
    """AdamW over the batches, a progress bar on screen."""
    compiled, report = compile_model(model, config)
    run = Run(name, model, report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / len(batches))
        return min(1.0, (step + 1) / WARMUP) * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    columns = (
        bars.TextColumn("{task.description:<8}"),
        bars.BarColumn(bar_width=32),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[status]}"),
    )
    ticks = [time.perf_counter()]
    with bars.Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=len(batches), status="compiling")
        for tokens in batches:
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.losses.append(loss.item())
            ticks.append(time.perf_counter())
            progress.update(bar, advance=1, status=f"loss {run.losses[-1]:.4f}")
    per_step = (ticks[-1] - ticks[1]) / max(len(batches) - 1, 1)
    console.print(
        f"{'':<8} {report.rewritten} sites rewritten; compiling and first step "
        f"{ticks[1] - ticks[0]:.1f} s, then {per_step:.2f} s a step"
    )
    return run


def print_losses(runs: Sequence[Run]) -> None:
    steps = len(runs[0].losses)
    table = Table("step", *(run.name for run in runs), title="Loss, nats per byte")
    for i in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        table.add_row(str(i + 1), *(f"{run.losses[i]:.4f}" for run in runs))
    table.add_section()
    table.add_row("final", *(f"{run.final:.4f}" for run in runs))
    table.add_row("", "", *(f"{run.final / runs[0].final - 1:+.3%}" for run in runs[1:]))
    console.print(table)
    console.print(
        f"final: mean of the last {min(TAIL, steps)} steps. A batch is {BATCH * SEQ} bytes, and "
        "which bytes moves its loss by more than the bounds; all runs see the same ones.\n"
    )


def print_rows_within(run: Run, batches: Sequence[Tensor], bound: float = 0.05) -> None:
    """Per rewritten norm, how many rows of its input the estimate gets right to ``bound``.

    The activations are those of the trained model, run uncompiled: there a hook can see them.
    """
    counts: dict[str, Tensor] = {}

    def look(path: str, x: Tensor) -> None:
        exact = x.float().square().mean(-1, keepdim=True).sqrt()
        good = (reference.rms_estimate(x, BLOCK, p=2) / exact - 1).abs() <= bound
        counts[path] = counts.get(path, 0) + torch.tensor([int(good.sum()), good.numel()])

    for path in {site.norm for site in run.report.sites if site.status == "rewritten"}:
        run.model.get_submodule(path).register_forward_pre_hook(
            lambda module, args, path=path: look(path, args[0])
        )
    with torch.no_grad():
        for tokens in batches:
            run.model(input_ids=tokens)
    if not counts:
        return  # nothing was rewritten: the verdict says so
    gaussian = math.erf(bound / theory.error_sd(2, BLOCK, HIDDEN) / math.sqrt(2))
    console.print(
        f"Rows whose estimated RMS is within {bound:.0%} of the true one, at the input of each "
        f"rewritten norm, on text run through the model trained with {run.name} "
        f"(Gaussian rows of this width: {gaussian:.1%}):"
    )
    for path, (good, rows) in {**counts, "all": sum(counts.values())}.items():
        console.print(f"  {path:<44}{good / rows:6.1%} of {rows}")


def write_files(runs: Sequence[Run], out: Path) -> None:
    """``losses.csv`` and ``losses.png``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    steps = range(1, len(runs[0].losses) + 1)
    with (out / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(run.name for run in runs)])
        writer.writerows(zip(steps, *(run.losses for run in runs), strict=True))
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[2, 1], layout="constrained"
    )
    for run, style in zip(runs, ("k-", "C0--", "C1-"), strict=True):
        top.plot(steps, run.losses, style, label=f"{run.name}: final {run.final:.4f}")
        pairs = zip(run.losses, runs[0].losses, strict=True)
        bottom.plot(steps, [100 * (a / b - 1) for a, b in pairs], style)
    top.set(ylabel="loss, nats per byte", title=f"Llama, hidden {HIDDEN}, {LAYERS} layers, MXFP8")
    top.legend()
    bottom.set(xlabel="step", ylabel="against baseline, %")
    figure.savefig(out / "losses.png", dpi=120)
    plt.close(figure)
    console.print(f"\nWrote {out / 'losses.csv'} and {out / 'losses.png'}.\n")


def judge(runs: Sequence[Run]) -> list[str]:
    """What is wrong with the three runs; empty when nothing is."""
    problems, baseline, expected = [], runs[0], SITES_PER_LAYER * LAYERS
    for run in runs:
        wanted = expected if run.name in BOUNDS else 0
        found, rewritten = len(run.report.sites), run.report.rewritten
        if (found, rewritten) != (expected, wanted):
            sites = f"{rewritten} of {found} sites rewritten"
            problems.append(f"{run.name}: {sites}, not {wanted} of {expected}")
        difference, bound = abs(run.final / baseline.final - 1), BOUNDS.get(run.name, 0.0)
        if not difference <= bound:  # this way round, NaN fails
            problems.append(
                f"{run.name}: final loss {run.final:.4f} is {difference:.2%} away from the "
                f"baseline's {baseline.final:.4f}, allowed are {bound:.1%}"
            )
    if not baseline.final <= LEARNT * baseline.losses[0]:
        problems.append(
            f"baseline: the loss only went from {baseline.losses[0]:.4f} to {baseline.final:.4f}; "
            "a comparison that says anything needs more --steps"
        )
    return problems


def codegen_step(seed: int, tokens: Tensor) -> list[str]:
    """One step through Inductor's C++ beside the same step on the eager route; its problems."""
    from torch._inductor import metrics

    console.print(
        "One training step of a one-layer model, rewritten with mx p=2, on the eager route and "
        "through Inductor's C++ code generation (a minute or two):"
    )
    losses, problems = {}, []
    for inner in ("eager", "inductor"):
        # Linears that no norm feeds add a third to the C++ code and nothing to what it shows.
        model = build_model(seed, layers=1, plain=("o_proj", "down_proj"))
        compiled, report = compile_model(model, MXNormConfig(inner=inner))
        metrics.reset()
        start = time.perf_counter()
        # A graph out of torch's caches would show nothing of code generation.
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
        losses[inner] = loss.item()
        norm = math.hypot(*(float(p.grad.float().norm()) for p in model.parameters()))
        kernels = metrics.generated_kernel_count
        console.print(
            f"  {inner:<9}loss {losses[inner]:.5f}, norm of all gradients {norm:.4f}, "
            f"{report.rewritten} sites, {kernels} kernels, {time.perf_counter() - start:.1f} s"
        )
        if report.rewritten != SITES_PER_LAYER or (kernels > 0) != (inner == "inductor"):
            problems.append(f"{inner} step: {report.rewritten} sites, {kernels} kernels")
    difference = abs(losses["inductor"] / losses["eager"] - 1)
    console.print(f"  relative difference {difference:.3%}, allowed {ROUTE_BOUND:.0%}")
    if not difference <= ROUTE_BOUND:
        problems.append(f"inductor step: loss {difference:.2%} away from the eager route's")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--out", type=Path, default="demo-out", help="folder (default demo-out)")
    parser.add_argument("--no-inductor-step", action="store_true", help="no step through C++ code")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: at least 1")
    start = time.perf_counter()
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads. "
        f"Llama, hidden {HIDDEN}, {LAYERS} layers, bfloat16, decoder linears in torchao's emulated "
        f"MXFP8 (RCEIL); {args.steps} steps of {BATCH} x {SEQ} bytes of Python's manual."
    )
    console.print(
        "The three runs use inner='eager': the whole compile pipeline, its graphs run without code "
        "generation, which would cost minutes of C++ compilation a run and show no more. The "
        "baseline takes the same route with every norm excluded from the pass."
    )
    if speed_up_bfloat16():
        console.print(
            "This CPU has no bfloat16 instructions: products are taken in float32 and rounded once."
        )
    console.print()

    text = read_text()
    batches = make_batches(text, args.steps, args.seed)
    configs = {
        "baseline": MXNormConfig(inner="eager", exclude=("*",)),
        "exact": MXNormConfig(inner="eager", rms="exact"),
        "mx p=2": MXNormConfig(inner="eager", rms="mx", p=2),
    }
    runs, starts = [], set()
    for name, config in configs.items():
        model = build_model(args.seed)
        starts.add(fingerprint(model))
        runs.append(train(name, model, config, batches))
        if name in BOUNDS:
            print(f"{runs[-1].report}\n", flush=True)

    print_losses(runs)
    print_rows_within(runs[-1], make_batches(text, 8, args.seed + 1))
    write_files(runs, args.out)
    problems = judge(runs)
    if len(starts) != 1:
        problems.insert(0, "the runs did not start from the same weights")
    if not args.no_inductor_step:
        problems += codegen_step(args.seed, batches[0])

    console.print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes.")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if not problems:
        bounds = ", ".join(f"{name} within {bound:.1%}" for name, bound in BOUNDS.items())
        console.print(f"OK: {bounds} of the baseline's final loss; all sites rewritten in both.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
