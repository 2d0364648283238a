"""Pre-training runs: one model per variant, trained again from each seed."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import moe
import titan
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxnorm_pass
from mxnorm_pass import MXNormConfig
from trainlib.corpus import VALIDATION, Corpus
from trainlib.inputs import BadInput
from trainlib.norms import replace_norms

VOCAB = 16384
SIZES = {
    "125m": titan.Sizes(dim=768, ffn=2048, heads=12, kv_heads=4, layers=16, vocab=VOCAB),
    "15m": titan.Sizes(dim=256, ffn=768, heads=4, kv_heads=2, layers=8, vocab=VOCAB),
    "1b": titan.Sizes(dim=2048, ffn=8192, heads=32, kv_heads=8, layers=16, vocab=VOCAB),
    "tiny": titan.Sizes(dim=64, ffn=128, heads=2, kv_heads=1, layers=2, vocab=512),
    # Two experts of eight: as many parameters for a token as "15m" has.
    "moe": moe.Sizes(dim=256, ffn=384, heads=4, kv_heads=2, layers=8, vocab=VOCAB),
    "moe-tiny": moe.Sizes(
        dim=64, ffn=64, heads=2, kv_heads=1, layers=2, vocab=512, experts=4, slack=1.0
    ),
}
# The same experts as linears of their own: five times as many nodes, for comparison.
SIZES["moe-linears"] = dataclasses.replace(SIZES["moe"], grouped=False)
SITES_PER_BLOCK = 2
BLOCK = 32  # torchao casts along tokens too, in blocks of as many
LOOK = 50  # steps between looks at whether the loss is a number still
RATES = {"125m": 1e-3, "15m": 2e-3, "1b": 3e-4, "tiny": 3e-3}
RATES |= {"moe": 2e-3, "moe-linears": 2e-3, "moe-tiny": 3e-3}

# Backends of torch.compile, and norms in plain PyTorch (power, constant, gradient) that it does not
# rewrite. ``p2-straight`` is ``p2`` but for the route, ``p2-pass-*`` are ``p2-*`` but for it.
REWRITTEN: dict[str, dict[str, Any]] = {
    "exact": {"rms": "exact"},
    "p1": {"p": 1},
    "p2": {"p": 2},
    "p2-pass-projected": {"p": 2, "gradient": "projected"},
    "p2-pass-own": {"p": 2, "gradient": "own"},
}
MODULES: dict[str, tuple[Any, ...]] = {
    "p2-calibrated": (2, "calibrated"),
    "p2-running": (2, "running"),
    "p2-learnt": (2, "learnt"),
    "p2-straight": (2, "gaussian", "straight"),
    "p2-projected": (2, "gaussian", "projected"),
    "p2-own": (2, "gaussian", "own"),
    "p4": (4, "gaussian"),
}
VARIANTS = ("rmsnorm", *REWRITTEN, *MODULES)


@dataclass(frozen=True)
class Plan:
    """Of all runs of a command.

    Attributes:
        size: key of ``SIZES``.
        steps: optimizer steps.
        batch: sequences a step.
        seq: tokens a sequence.
        rate: peak learning rate; linear warm-up, then a cosine down to a tenth.
        warmup: steps.
        inner: what compiles: ``inductor``, or ``eager`` without a compiler.
    """

    size: str
    steps: int
    batch: int
    seq: int
    rate: float
    warmup: int
    device: str
    inner: str = "inductor"

    def rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass
class Curve:
    """What one run left.

    Attributes:
        loss, grad_norm: per step; nats per token, and the norm before clipping to 1.
        validation: mean loss over the held-out tokens at the end.
        sites: rewritten sites of a block, the least of its graphs; blocks share them.
        seconds: of the training steps alone.
        accuracy: share of held-out images that get their class; None for text.
    """

    variant: str
    seed: int
    rate: float
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    validation: float = math.nan
    sites: int = 0
    seconds: float = 0.0
    norms: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float | None = None


class Batches:
    """Windows of the corpus in an order that the seed fixes, without repeats while they last.

    Raises:
        BadInput: where the corpus has ids that the model has not, or tokens for no batch.
    """

    def __init__(self, corpus: Corpus, plan: Plan) -> None:
        vocab, step = SIZES[plan.size].vocab, plan.batch * plan.seq
        shape = f"--batch {plan.batch} --seq {plan.seq}"
        if corpus.vocab > vocab:
            fit = ", ".join(name for name, s in SIZES.items() if s.vocab >= corpus.vocab)
            raise BadInput(
                f"--corpus: it has {corpus.vocab:,} ids, and size {plan.size} takes {vocab:,}; "
                f"as many or more: {fit or 'none'}"
            )
        if step % BLOCK:
            raise BadInput(f"{shape}: {step:,} tokens a step, expected a multiple of {BLOCK}")
        if step >= VALIDATION:
            raise BadInput(
                f"{shape}: {step:,} tokens a step, expected fewer than the {VALIDATION:,} held out"
            )
        if len(corpus.tokens) <= VALIDATION + step:
            raise BadInput(
                f"--corpus: it has {len(corpus.tokens):,} tokens, too few for one step of {step:,} "
                f"beside the {VALIDATION:,} held out"
            )
        self.tokens = torch.from_numpy(corpus.tokens.astype("int32")).to(plan.device)
        self.plan = plan
        self.windows = (len(corpus.tokens) - VALIDATION - 1) // plan.seq
        self.held_out = len(corpus.tokens) - VALIDATION

    def take(self, starts: Tensor) -> Tensor:
        """``[len(starts), seq + 1]``, int64."""
        offsets = torch.arange(self.plan.seq + 1, device=self.tokens.device)
        return self.tokens[starts.to(self.tokens.device)[:, None] + offsets].long()

    def training(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(10_000 + seed)
        while True:
            order = torch.randperm(self.windows, generator=generator)
            for i in range(0, self.windows - self.plan.batch + 1, self.plan.batch):
                yield self.take(order[i : i + self.plan.batch] * self.plan.seq)

    def validation(self, most: int = 8) -> Iterator[Tensor]:
        plan = self.plan
        starts = torch.arange(self.held_out, len(self.tokens) - plan.seq, plan.seq)
        for i in range(0, min(len(starts) - plan.batch + 1, most * plan.batch), plan.batch):
            yield self.take(starts[i : i + plan.batch])


def head_loss(norm: nn.Module, head: nn.Module, h: Tensor, targets: Tensor) -> Tensor:
    """Of the last hidden states ``[batch, sequence, K]``; logits in float32."""
    return F.cross_entropy(head(norm(h)).flatten(0, 1).float(), targets.flatten())


class Trainer:
    """One variant of one size: compiled once, trained from many seeds."""

    def __init__(self, plan: Plan, variant: str) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r}: allowed are {', '.join(VARIANTS)}")
        self.plan, self.variant = plan, variant
        self.report: Callable[[], int] = lambda: 0
        self.model = self._fresh(0)
        for p in self.model.parameters():
            p.data = p.data.bfloat16()
        backend: Any = plan.inner
        if variant in REWRITTEN:
            backend = mxnorm_pass.backend(
                MXNormConfig(inner=plan.inner, strict=True, **REWRITTEN[variant])
            )
            self.report = lambda: min(g.rewritten for g in backend.report.graphs)
        if plan.inner == "eager" and variant not in REWRITTEN:
            # The same route through AOTAutograd, so that curves can be compared bit for bit.
            backend = mxnorm_pass.backend(MXNormConfig(exclude=("*",), inner="eager"))
        for block in self.model.layers.values():
            block.compile(backend=backend, fullgraph=True, dynamic=False)
        # Apart from the blocks, whose own compile a compile around them would replace.
        self.tail = head_loss
        if plan.inner == "inductor":
            self.tail = torch.compile(head_loss, dynamic=False)
        # Weights in float32; the model computes with their bfloat16 roundings.
        self.masters = [p.detach().float().clone() for p in self.model.parameters()]

    def _fresh(self, seed: int) -> Any:
        """The model in float32 as it starts from a seed."""
        sizes = SIZES[self.plan.size]
        build = moe.build if isinstance(sizes, moe.Sizes) else titan.build
        with torch.device(self.plan.device):  # a billion draws take their time on a CPU
            return self._with_norms(build(sizes, seed, device=self.plan.device))

    def _with_norms(self, model: Any) -> Any:
        """The variant's norms in the blocks, where it has some of its own."""
        if self.variant in MODULES:
            replace_norms(model.layers, *MODULES[self.variant])
        return model

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the next token, nats; ``tokens`` is ``[batch, sequence + 1]``."""
        h = self.model.tok_embeddings(tokens[:, :-1])
        for block in self.model.layers.values():
            h = block(h)
        return self.tail(self.model.norm, self.model.lm_head, h, tokens[:, 1:])

    def _start(self, seed: int) -> torch.optim.Optimizer:
        """Weights of ``seed`` in the compiled model, and an optimizer that knows nothing yet."""
        fresh = self._fresh(seed)
        with torch.no_grad():
            for master, p, new in zip(
                self.masters, self.model.parameters(), fresh.parameters(), strict=True
            ):
                master.copy_(new)
                p.copy_(new)
            for buffer, new in zip(self.model.buffers(), fresh.buffers(), strict=True):
                buffer.copy_(new)
        for master in self.masters:
            master.requires_grad_(True)
            master.grad = None
        matrices = [m for m in self.masters if m.dim() > 1]
        vectors = [m for m in self.masters if m.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.plan.rate,
            betas=(0.9, 0.95),
            fused=self.plan.device == "cuda",
        )

    def train(self, seed: int, batches: Batches, rate: float | None = None) -> Curve:
        """One run; the curve's ``loss`` ends early where it is no number any more."""
        plan = self.plan
        curve = Curve(self.variant, seed, plan.rate if rate is None else rate)
        optimizer = self._start(seed)
        self.model.train()
        parameters = list(self.model.parameters())
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        begin = time.perf_counter()
        for step, tokens in zip(range(plan.steps), batches.training(seed), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = plan.rate_at(step) * curve.rate / plan.rate
            loss = self.loss(tokens)
            loss.backward()
            for master, p in zip(self.masters, parameters, strict=True):
                assert p.grad is not None
                master.grad, p.grad = p.grad.float(), None
            norms.append(nn.utils.clip_grad_norm_(self.masters, 1.0).detach())
            losses.append(loss.detach())
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, self.masters)
            if step % LOOK == LOOK - 1 and not math.isfinite(losses[-1].item()):
                break
        curve.loss = torch.stack(losses).tolist()
        curve.grad_norm = torch.stack(norms).tolist()
        curve.seconds = time.perf_counter() - begin
        # Still in training mode and with gradients: another mode is another graph to compile.
        found = [self.loss(tokens).item() for tokens in batches.validation()]
        curve.validation = sum(found) / len(found) if found else math.nan
        curve.sites = self.report()
        curve.norms = self._norms(next(batches.training(seed)))
        return curve

    def _some(self, batch: Any) -> Any:
        """Enough of a batch for the statistics of norms, as the model takes it."""
        return batch[:2, :-1]

    def _norms(self, batch: Any) -> list[dict[str, Any]]:
        """Per norm of a block, on one batch: how far its rows are from Gaussian ones."""
        found: list[dict[str, Any]] = []
        kinds = {n: m for n, m in self.model.layers.named_modules() if n.endswith("_norm")}
        hooks = [
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.append({"norm": name, **row_statistics(args[0])})
            )
            for name, module in kinds.items()
        ]
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.model(self._some(batch))
        finally:
            for hook in hooks:
                hook.remove()
        return found


def row_statistics(x: Tensor) -> dict[str, float]:
    """Of rows ``[..., K]``: outliers, and the estimate over the true RMS.

    ``channel``: the largest channel's RMS over the median channel's; ``peak``: the largest element
    over its row's RMS; ``kurtosis``: mean over rows, 3 for Gaussian ones; ``ratio_*``: mean,
    standard deviation and extremes of the p = 2 estimate over the true RMS.
    """
    rows = x.float().flatten(0, -2)
    rms = rows.square().mean(-1, keepdim=True).sqrt()
    unit = rows / rms
    channels = rows.square().mean(0).sqrt()
    ratio = (mxnorm_pass.reference.rms_estimate(rows, 32, 2) / rms).squeeze(-1)
    return {
        "channel": float(channels.max() / channels.median()),
        "peak": float(unit.abs().max()),
        "kurtosis": float(unit.pow(4).mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_sd": float(ratio.std()),
        "ratio_least": float(ratio.min()),
        "ratio_most": float(ratio.max()),
    }
