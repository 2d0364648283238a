"""Probe vectors: the inputs on which lifted pieces are compared with known functions.

Each set is built once. Random values alone would not tell the scale rules apart: they differ at
powers of two and a few ulp above them, so those are listed one by one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mxnorm_pass.formats import ELEMENTS, block_scale

_SEED = 20260313


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _around(values: Tensor, ulps: int) -> Tensor:
    """float32 values and neighbours up to ``ulps`` away, those finite and not negative."""
    bits = values.to(torch.float32).view(torch.int32).unsqueeze(-1)
    near = (bits + torch.arange(-ulps, ulps + 1, dtype=torch.int32)).flatten()
    near = near[(near >= 0) & (near < 0x7F800000)]
    return near.view(torch.float32)


@cache
def absmax(dtype: torch.dtype) -> Tensor:
    """Block absmax values: every finite non-negative bfloat16, or float32 at and around each
    boundary.

    Inf and NaN come last. 1-D, in ``dtype``.
    """
    special = torch.tensor([float("inf"), float("nan")])
    if dtype is torch.bfloat16:
        finite = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        return torch.cat([finite, special.to(torch.bfloat16)])
    powers = torch.exp2(torch.arange(-126, 128, dtype=torch.float64))
    factors = [1.0, *{e.max / 2.0**e.max_exponent for e in ELEMENTS.values()}]
    edges = torch.cat([powers * f for f in factors])
    # EVEN's boundary: halfway between the element's largest mantissa and the next power of two.
    edges = torch.cat(
        [edges, *(powers * (2 - 2.0 ** (-e.mantissa_bits - 1)) for e in ELEMENTS.values())]
    )
    edges = edges[edges < torch.finfo(torch.float32).max].to(torch.float32)
    bits = torch.randint(0, 0x7F800000, (8192,), generator=_generator(), dtype=torch.int32)
    return torch.cat([_around(edges, 64), bits.view(torch.float32), torch.zeros(1), special])


TENSOR_SCALES: tuple[float, ...] = (
    *(1.0, 2.0**-9, 0.0371, 3.3e-4),
    *(50.0, 1e4, 3e30, 1e-5, 1e-8, 1e-12, 1e-30),
    *(0.0, float("inf"), float("nan")),
)
"""NVFP4's per-tensor scale: powers of two keep ties ties, the others round; on extremes a guard
against division by zero shows.
"""


@cache
def block_values(dtype: torch.dtype, fine: bool = False) -> tuple[Tensor, Tensor]:
    """Pairs (value, absmax of its block), both in ``dtype``: what an element code is a function of.

    The value is the absmax itself with either sign (overflow shows there only), every mantissa
    below it, ties between neighbouring codes, zero, and NaN and Inf with their absmax. ``fine`` is
    for scales that are no powers of two (NVFP4): absmax values close to 1, and values that are ties
    in units of the scale.
    """
    steps = torch.arange(-16, 17, 4) if fine else torch.arange(-120, 121, 30)
    exponents = torch.cat([steps, torch.tensor([-120, 120])]) if fine else steps
    mantissas = 1 + torch.arange(128, dtype=torch.float64) / 128
    tops = (torch.exp2(exponents.double()).unsqueeze(-1) * mantissas).flatten()
    fractions = torch.rand(12, generator=_generator(), dtype=torch.float64)
    # Multiples of 1/64 of the absmax' power of two hit the ties of 1 to 3 mantissa bits.
    grid = torch.arange(1, 64, 1 if fine else 2, dtype=torch.float64) / 64
    grid = torch.cat([grid, torch.arange(1, 16, dtype=torch.float64) / 16])
    scales = torch.exp2(torch.floor(torch.log2(tops)))
    small = torch.exp2(-torch.arange(4, 22, dtype=torch.float64))
    parts = [
        torch.stack([tops, -tops], -1),
        tops.unsqueeze(-1) * torch.cat([fractions, -fractions[:4]]),
        scales.unsqueeze(-1) * grid,
        scales.unsqueeze(-1) * torch.cat([small, small * 1.5, -small * 1.25]),
    ]
    if fine:
        stored = block_scale(tops.float(), ELEMENTS["e2m1"], "e4m3").double()
        ties = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0], dtype=torch.float64)
        parts.append(torch.minimum(stored.unsqueeze(-1) * ties, tops.unsqueeze(-1)))
    values = torch.cat(parts, -1)
    pairs = torch.stack([values, tops.unsqueeze(-1).expand_as(values)], -1).reshape(-1, 2)
    inf, nan = float("inf"), float("nan")
    special = torch.tensor(
        [[0.0, 0.0], [0.0, 1e-38], [inf, inf], [-inf, inf], [1.0, inf], [nan, nan], [1.0, nan]],
        dtype=torch.float64,
    )
    pairs = torch.cat([pairs, special]).to(torch.float32).to(dtype)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


@cache
def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Triples (x, mean square, gain), float32, of a normalised element.

    Mean squares reach from far below to far above any eps; gains are small, large, negative and
    zero. Behind the random triples come all combinations of extremes, NaN and Inf among them: a
    clamp or a nan_to_num that the norm has and the op has not shows nowhere else.
    """
    n = 16384
    generator = _generator()
    mean_square = torch.exp(torch.empty(n).uniform_(-35.0, 12.0, generator=generator))
    x = torch.randn(n, generator=generator) * mean_square.sqrt()
    gain = 1 + 0.5 * torch.randn(n, generator=generator)
    gain[: n // 8] *= torch.exp(torch.empty(n // 8).uniform_(-5.0, 5.0, generator=generator))
    gain[:8] = 0.0
    inf, nan = float("inf"), float("nan")
    sizes = torch.tensor([0.0, 1e-30, 1.0, 300.0, 7e4, 1e7, 1e12, 1e18, 1e25, inf, nan])
    extremes = torch.cartesian_prod(
        torch.cat([sizes, -sizes[1:-1]]),
        torch.tensor([0.0, 1e-38, 1e-12, 1.0, 2e5, 1e10, 1e30, inf, nan]),
        torch.tensor([1.0, 0.0, -3.0, 300.0, 7e4, -1e7, 1e20]),
    )
    parts = zip((x, mean_square, gain), extremes.T, strict=True)
    x, mean_square, gain = (torch.cat(pair) for pair in parts)
    return x, mean_square, gain
