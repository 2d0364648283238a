"""A small vision transformer with RMSNorms whose blocks hold MXFP8 linears.

Images of one channel are cut into patches; a linear and a learnt position make a token of each, and
a class comes from the mean over tokens. Embedding and head stay in high precision.

    python examples/vit.py      # what the pass finds in a block
"""

from __future__ import annotations

from dataclasses import dataclass

import titan
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxnorm_pass


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of the square images and patches that it takes, in pixels.

    torchao's casts want images a batch times ``tokens`` to be a multiple of 32.
    """

    dim: int = 128
    ffn: int = 512
    heads: int = 4
    layers: int = 4
    image: int = 8
    patch: int = 2
    classes: int = 10

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.wqkv = nn.Linear(s.dim, 3 * s.dim, bias=False)
        self.wo = nn.Linear(s.dim, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.dim, s.ffn, bias=False)
        self.w2 = nn.Linear(s.ffn, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(s), FeedForward(s)
        self.attention_norm = nn.RMSNorm(s.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(s.dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class VisionTransformer(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.patch = s.patch
        self.patches = nn.Linear(s.patch**2, s.dim, bias=False)
        self.positions = nn.Parameter(torch.empty(s.tokens, s.dim))
        self.layers = nn.ModuleDict({str(i): Block(s) for i in range(s.layers)})
        self.norm = nn.RMSNorm(s.dim, eps=1e-5)
        self.head = nn.Linear(s.dim, s.classes, bias=False)

    def embed(self, images: Tensor) -> Tensor:
        """Tokens ``[N, tokens, K]`` of images ``[N, image, image]``."""
        p = self.patch
        cut = images.unfold(1, p, p).unfold(2, p, p).flatten(3).flatten(1, 2)
        return self.patches(cut) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        h = self.embed(images)
        for block in self.layers.values():
            h = block(h)
        return self.head(self.norm(h.mean(1)))


def build(s: Sizes, seed: int = 0, device: str = "cpu") -> VisionTransformer:
    """In float32, the same for the same seed."""
    torch.manual_seed(seed)
    model = VisionTransformer(s)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.trunc_normal_(p, std=0.02)
    # Patches and positions of the same size: the mean over tokens knows nothing of places else.
    nn.init.trunc_normal_(model.patches.weight, std=1 / s.patch)
    nn.init.trunc_normal_(model.positions, std=0.5)
    titan.quantise(model, device)
    return model.to(device)


def main() -> None:
    s = Sizes(dim=64, ffn=128, heads=2, layers=1)
    model = build(s).bfloat16()
    x = model.embed(torch.randn(4, s.image, s.image, dtype=torch.bfloat16)).detach()
    print(mxnorm_pass.explain(model.layers["0"], x))


if __name__ == "__main__":
    main()
