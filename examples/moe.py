"""The small Llama of ``titan.py`` with a mixture of experts in the place of each feed-forward.

Every token chooses its two best experts; every expert takes the tokens that want it most, up to a
capacity that is fixed, so that shapes are static and a block compiles as one graph. Between
``ffn_norm`` and the experts' casts lies that pick of rows: the pass casts each token once, in front
of it, and sends codes and scales to the experts.

    python examples/moe.py      # what the pass finds in a block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import titan
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import mxnorm_pass

BLOCK = 32  # torchao casts along tokens too, in blocks of as many


@dataclass(frozen=True)
class Sizes(titan.Sizes):
    """Of the model; ``ffn`` is that of one expert.

    Attributes:
        experts: how many there are.
        top: experts that a token chooses.
        slack: places of an expert over what it gets where all get as many.
        balance: weight of the loss that asks for that.
        grouped: one product for all experts, as torchtitan trains them; else linears of their own,
            in graphs of many times as many nodes.
    """

    experts: int = 8
    top: int = 2
    slack: float = 1.25
    balance: float = 0.01
    grouped: bool = True

    def capacity(self, tokens: int) -> int:
        """Places of an expert for a batch of so many tokens: whole blocks of 32."""
        fair = self.slack * self.top * tokens / self.experts
        return min(tokens, BLOCK * -(-int(fair) // BLOCK))


class AddLoss(torch.autograd.Function):
    """``x`` itself; ``loss``, of no axis, gets the gradient of a term of the training loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


class GroupedExperts(nn.Module):
    """torchao's emulated MXFP8 in a grouped product, forward, dgrad and wgrad."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(s.experts, s.ffn, s.dim))
        self.w2 = nn.Parameter(torch.empty(s.experts, s.dim, s.ffn))
        self.w3 = nn.Parameter(torch.empty(s.experts, s.ffn, s.dim))

    def forward(self, rows: Tensor) -> Tensor:
        """Of ``[experts, capacity, K]``."""
        experts, capacity, _ = rows.shape
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=rows.device) * capacity

        def product(x: Tensor, w: Tensor) -> Tensor:
            return _to_mxfp8_then_scaled_grouped_mm(
                x, w.transpose(-2, -1), ends, kernel_preference=KernelPreference.EMULATED
            )

        x = rows.flatten(0, 1)
        return product(F.silu(product(x, self.w1)) * product(x, self.w3), self.w2).view_as(rows)


class SeparateExperts(nn.ModuleList):
    """A feed-forward of MXFP8 linears for each."""

    def __init__(self, s: Sizes) -> None:
        super().__init__(titan.FeedForward(s) for _ in range(s.experts))

    def forward(self, rows: Tensor) -> Tensor:
        """Of ``[experts, capacity, K]``."""
        return torch.stack([expert(mine) for expert, mine in zip(self, rows, strict=True)])


class MixtureOfExperts(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.router = nn.Linear(s.dim, s.experts, bias=False)
        self.experts = GroupedExperts(s) if s.grouped else SeparateExperts(s)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Who takes which of the tokens ``[T, K]``.

        Returns:
            ``[experts, capacity]``: rows, and their weights in the sum, 0 for one that did not
            choose this expert; and the loss of Switch Transformers (arXiv 2101.03961, equation 4):
            experts times the sum over them of the share of choices and the mean probability.
        """
        s = self.sizes
        odds = self.router(tokens).float().softmax(-1)
        best, chosen = odds.topk(s.top)
        weights = torch.zeros_like(odds).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        gates, picked = weights.t().topk(s.capacity(len(tokens)), sorted=False)
        share = (weights > 0).float().mean(0) / s.top
        return picked, gates, s.experts * (share * odds.mean(0)).sum()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        picked, gates, unevenness = self.route(tokens)
        weighted = self.experts(tokens[picked]) * gates[..., None].to(x.dtype)
        y = torch.zeros_like(tokens).index_add(0, picked.flatten(), weighted.flatten(0, 1))
        return AddLoss.apply(y.view_as(x), self.sizes.balance * unevenness)


class Block(titan.TransformerBlock):
    def __init__(self, s: Sizes) -> None:
        super().__init__(s)
        self.feed_forward = MixtureOfExperts(s)


class Llama(titan.Llama):
    block = Block

    def __init__(self, s: Sizes) -> None:
        super().__init__(s)
        for i, layer in enumerate(self.layers.values()):
            for name, w in layer.feed_forward.experts.named_parameters(recurse=False):
                # As titan.build does with linears.
                nn.init.trunc_normal_(w, std=0.02 if name == "w1" else 0.02 / (2 * (i + 1)) ** 0.5)


def build(s: Sizes, seed: int = 0, gains: float = 0.0, device: str = "cpu") -> Llama:
    """As :func:`titan.build`; the routers stay in high precision."""
    return titan.build(s, seed, gains, device, Llama)


def main() -> None:
    s = Sizes(dim=64, ffn=64, heads=2, kv_heads=1, layers=1)
    block = build(s).bfloat16().layers["0"]
    x = torch.randn(2, 64, s.dim, dtype=torch.bfloat16)
    print(mxnorm_pass.explain(block, x))


if __name__ == "__main__":
    main()
