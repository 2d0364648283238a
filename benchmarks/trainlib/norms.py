"""Norms of the open questions, in plain PyTorch: other powers, constants and gradients.

The op knows p = 1 and p = 2 with a constant that is given. These compute the estimate as any module
does: they are not rewritten, their gain is not folded, and the cast is behind them. Their gradient
is straight-through, as the op's is by itself, or one of two others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxnorm_pass import theory

BLOCK = 32
MOMENTUM = 0.01  # of the running constant, per step


class EstimatedNorm(nn.Module):
    """RMSNorm by ``rms ~ c * (mean_k m_k^p)^(1/p)`` over blocks of 32.

    Args:
        norm: the RMSNorm to stand for; its gain is used on.
        p: power of the mean of block maxima.
        constant: ``gaussian``, c(p, 32) of Gaussian rows; ``calibrated``, the mean ratio of the
            first batch, kept; ``running``, its moving average; ``learnt``, a parameter.
        gradient: ``straight``, straight-through: RMSNorm's formula with the estimated root in the
            place of the true one. Of a row whose estimate is off it keeps a part along the row's
            direction u, ``rho * (g.u) * (1 - rms^2 / (estimate^2 + eps))``, with g the gradient of
            ``x * rho`` (behind the gain) and ``rho = 1 / sqrt(estimate^2 + eps)``; but for eps, no
            scale of the row changes the output. ``projected`` is RMSNorm's gradient times estimated
            over true root and has no such part, as RMSNorm's has none. ``own``: the function's own,
            through the largest element of each block.
    """

    def __init__(self, norm: nn.RMSNorm, p: int, constant: str, gradient: str = "straight") -> None:
        super().__init__()
        assert norm.eps is not None
        self.weight, self.eps, self.p, self.constant = norm.weight, norm.eps, p, constant
        self.gradient = gradient
        start = torch.tensor(theory.correction(p, BLOCK), device=norm.weight.device).log()
        if constant == "learnt":
            self.log_c = nn.Parameter(start)
        else:
            self.register_buffer("log_c", start)
        self.register_buffer("steps", torch.zeros((), device=norm.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        square = rows.square().mean(-1, keepdim=True)
        maxima = rows if self.gradient == "own" else rows.detach()
        blocks = maxima.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
        power_mean = blocks.pow(self.p).mean(-1, keepdim=True).pow(1 / self.p)
        if self.constant in ("running", "calibrated") and self.training:
            with torch.no_grad():
                ratio = (square.detach().sqrt() / power_mean.clamp_min(1e-20)).log().mean()
                first = (self.steps == 0).float()
                later = MOMENTUM if self.constant == "running" else 0.0
                self.log_c.lerp_(ratio, first + (1 - first) * later)
                self.steps.add_(1)
        estimate = (self.log_c.exp() * power_mean).square()
        if self.gradient == "projected":
            root = torch.rsqrt(square + self.eps)
            y = rows * root * (torch.rsqrt(estimate + self.eps) / root).detach()
            return y.to(x.dtype) * self.weight
        if self.gradient == "own":
            return (rows * torch.rsqrt(estimate + self.eps)).to(x.dtype) * self.weight
        # The estimate's value; towards the row, the gradient of the true mean of squares.
        y = rows * torch.rsqrt(estimate + (square - square.detach()) + self.eps)
        return y.to(x.dtype) * self.weight


def replace_norms(blocks: nn.Module, p: int, constant: str, gradient: str = "straight") -> int:
    """Every RMSNorm below ``blocks`` by an :class:`EstimatedNorm`; how many they were."""
    found = [
        (parent, name, child)
        for parent in blocks.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.RMSNorm)
    ]
    for parent, name, child in found:
        setattr(parent, name, EstimatedNorm(child, p, constant, gradient))
    return len(found)
