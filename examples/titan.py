"""A small Llama built and parallelised as torchtitan builds and parallelises its own.

Names (``layers.0.attention_norm``, ``attention.qkv_linear.wqkv``, ``feed_forward.w1``), order
(tensor parallel, activation checkpointing, compile per block, FSDP2) and plans are those of
torchtitan 0.3's Llama 3, in some lines of plain PyTorch, so that it runs anywhere:

    python examples/titan.py                                  # one process
    torchrun --nproc-per-node 2 examples/titan.py --tp 2      # tensor and sequence parallel
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import mxnorm_pass

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """Of the model; ``SIZES["8b"]`` are those of a Llama-3-8B layer."""

    dim: int = 128
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    vocab: int = 256

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class FusedQKVLinear(nn.Module):
    """q, k and v of a group of heads side by side: sharding rows of wqkv shards groups."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head_dim, self.group = s.head_dim, s.heads // s.kv_heads
        self.wqkv = nn.Linear(s.dim, s.kv_heads * (self.group + 2) * s.head_dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.wqkv(x)
        y = y.view(*y.shape[:2], -1, self.group + 2, self.head_dim)
        q, k, v = y.split([self.group, 1, 1], dim=3)
        return tuple(t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head_dim = s.head_dim
        self.qkv_linear = FusedQKVLinear(s)
        self.wo = nn.Linear(s.dim, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_linear(x)
        q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, theta: float = 5e5) -> Tensor:
    """Rotary position embedding of ``[batch, heads, sequence, head_dim]``, halves as pairs."""
    half = x.shape[-1] // 2
    rate = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rate
    a, b = x.float().chunk(2, -1)
    sin, cos = angle.sin(), angle.cos()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.dim, s.ffn, bias=False)
        self.w2 = nn.Linear(s.ffn, s.dim, bias=False)
        self.w3 = nn.Linear(s.dim, s.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(s), FeedForward(s)
        self.attention_norm = nn.RMSNorm(s.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(s.dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    block: Callable[[Any], nn.Module] = TransformerBlock

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleDict({str(i): self.block(s) for i in range(s.layers)})
        self.norm = nn.RMSNorm(s.dim, eps=1e-5)
        self.lm_head = nn.Linear(s.dim, s.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.lm_head(self.norm(h))


def build(
    s: Sizes,
    seed: int = 0,
    gains: float = 0.0,
    device: str = "cpu",
    kind: Callable[[Any], Llama] = Llama,
) -> Llama:
    """A float32 Llama whose blocks hold MXFP8 linears, the same for the same seed.

    Args:
        s: sizes.
        seed: of the weights.
        gains: standard deviation of the norms' gains around 1, where they begin.
        device: ``cpu`` and chips before sm_100 emulate MXFP8.
        kind: the model's class.
    """
    torch.manual_seed(seed)
    model = kind(s)
    for i, layer in enumerate(model.layers.values()):
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                std = 0.02 if name.endswith(("wqkv", "w1")) else 0.02 / (2 * (i + 1)) ** 0.5
                nn.init.trunc_normal_(linear.weight, std=std)
    nn.init.trunc_normal_(model.lm_head.weight, std=s.dim**-0.5)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.normal_(module.weight, 1.0, gains)
    quantise(model, device)
    return model.to(device)


def quantise(model: nn.Module, device: str = "cpu") -> None:
    """As MXFP8LinearConverter with ``fqns=["layers"]``: every linear of a block but a router."""
    native = device == "cuda" and torch.cuda.get_device_capability() >= (10, 0)
    preference = KernelPreference.AUTO if native else KernelPreference.EMULATED
    for parent in list(model.layers.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, nn.Linear) and name != "router":
                k, n = linear.in_features, linear.out_features
                made = MXFP8Linear(k, n, bias=False, kernel_preference=preference)
                made.weight = linear.weight
                setattr(parent, name, made)


def wait(module: nn.Module, args: Any, out: Any) -> None:
    """A forward hook: nothing reads the output before the collective that makes it has ended.

    Kernels of a compiled block do not wait for what comes in (torch 2.11 and 2.13,
    pytorch/pytorch#180614): unrewritten or not, they read what is not there yet.
    """
    local = out.to_local() if isinstance(out, DTensor) else out
    if isinstance(local, AsyncCollectiveTensor):
        local.trigger_wait()


def apply_tp(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel: between blocks every rank has a part of the rows."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
            ),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    model.tok_embeddings.register_forward_hook(wait)
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**gathered),
                "attention.qkv_linear.wqkv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**gathered),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


SAVED = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten.max.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
MATMULS = {aten.mm.default, aten.linear.default}


def selective() -> Any:
    """Attention, reductions across ranks and every second matmul are saved."""
    count = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            mode = "recompute" if ctx.is_recompute else "forward"
            count[mode] += 1
            keep = count[mode] % 2 == 1
        else:
            keep = op in SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


AC: dict[str, dict[str, Any] | None] = {
    "none": None,
    "full": {},
    "selective": {"context_fn": selective},
}


def apply_ac(model: Llama, policy: str) -> None:
    """Wrap every block; ``none``, ``full`` or ``selective``."""
    arguments = AC[policy]
    if arguments is not None:
        for name, layer in model.layers.items():
            model.layers[name] = checkpoint_wrapper(layer, early_stop=False, **arguments)


def parallelise(
    model: Llama,
    *,
    dp: DeviceMesh | None = None,
    tp: DeviceMesh | None = None,
    ac: str = "selective",
    backend: str | Callable[..., Any] | None = "mxnorm",
) -> Llama:
    """In torchtitan's order: tensor parallel, checkpointing, compile per block, FSDP2.

    With ``tp`` goes a ``dp``, if of one rank: without FSDP2 the backward of torch 2.13's compiled
    DTensors fails. So it does with ``tp`` and ``ac="full"``.
    """
    if tp is not None:
        apply_tp(model, tp)
    apply_ac(model, ac)
    if backend is not None:
        for layer in model.layers.values():
            layer.compile(backend=backend, fullgraph=True)
    if dp is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model.tok_embeddings, mesh=dp, mp_policy=policy)
        for layer in model.layers.values():
            fully_shard(layer, mesh=dp, mp_policy=policy)
        fully_shard([model.norm, model.lm_head], mesh=dp, mp_policy=policy)
        fully_shard(model, mesh=dp, mp_policy=policy)
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, nats; ``tokens`` is ``[batch, sequence + 1]``."""
    logits = model(tokens[:, :-1])
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallel (default 1)")
    parser.add_argument("--ac", choices=sorted(AC), default="selective")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.tp < 1 or ranks % args.tp:
        parser.error(f"--tp {args.tp}: expected a divisor of the number of ranks, {ranks}")
    if args.tp > 1 and args.ac == "full":
        parser.error("--tp with --ac full fails in torch 2.13 itself: selective or none")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: expected at least one")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_torchelastic_launched():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(
        device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )
    # Without a GPU, Inductor's C++ would take minutes: the same graphs run eagerly.
    backend = mxnorm_pass.backend(inner="inductor" if device == "cuda" else "eager")
    model = parallelise(
        build(Sizes(), gains=0.3, device=device),
        dp=mesh["dp"],
        tp=mesh["tp"] if args.tp > 1 else None,
        ac=args.ac,
        backend=backend,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    tokens = torch.randint(0, 256, (4, 65), generator=generator).to(device)
    for _ in range(args.steps):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(backend.report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
