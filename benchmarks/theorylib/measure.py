"""Monte Carlo measurements of the estimate, each beside what the theory says.

Rows are iid and of unit RMS. Everything but the casts needs two numbers per block only, its largest
magnitude and its sum of squares, and rows of any number of blocks are cut from one stream of them.
The casts are those of `mxnorm_pass.reference`, which shares no code with the op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy import integrate, special

from mxnorm_pass import reference, theory
from mxnorm_pass.formats import ELEMENTS, Cast

Array = np.ndarray
SIGMA = 0.5  # of the lognormal channel scales

# Elements of unit RMS. "lognormal" is a Gaussian row whose channels have scales exp(SIGMA * z).
SAMPLERS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(scale=math.sqrt(0.5), size=n),
    "student_t5": lambda rng, n: rng.standard_t(5, n) * math.sqrt(0.6),
    "lognormal": lambda rng, n: (
        np.exp(SIGMA * rng.standard_normal(n) - SIGMA**2) * rng.standard_normal(n)
    ),
}
POWERS = (1, 2)
BLOCKS = (16, 32, 64)
ROW_BLOCKS = tuple(2**i for i in range(10))  # K: 1 to 512
CAST_BLOCKS = tuple(2**i for i in range(9))  # K: 1 to 256
SPIKES = (1, 3, 10, 30, 100, 300, 1000, 3000)
SPIKE_ROW = (4096, 32)  # row length, block
CASTS = {
    "MXFP8 FLOOR": Cast.parse("e4m3/b32/floor/divide/clamp/plain"),
    "MXFP8 RCEIL": Cast.parse("e4m3/b32/rceil_exact/divide/clamp/plain"),
    "NVFP4": Cast.parse("e2m1/b16/e4m3/divide/clamp/plain"),
}


@dataclass
class Row:
    """One measured number and what was predicted for it.

    Attributes:
        table: group of numbers that belong together.
        dist: distribution of the elements, or what the row was made of.
        p: power of the mean; 0 where none is involved.
        block: elements per block.
        k: blocks per row; 0 where the number does not depend on it.
        name: what was measured.
        measured: the number.
        stderr: its statistical error, NaN where it has none or it was not estimated.
        predicted: what the theory says; NaN where it says nothing.
    """

    table: str
    dist: str
    p: int
    block: int
    k: int
    name: str
    measured: float
    stderr: float = math.nan
    predicted: float = math.nan


def measure(seed: int, elements: int) -> list[Row]:
    """All measurements; ``elements`` per distribution (the casts take an eighth of that)."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for dist in SAMPLERS:
        stats = {b: _block_stats(rng, dist, b, elements) for b in BLOCKS}
        for block, (absmax, squares) in stats.items():
            rows += _constants(dist, block, absmax)
            if block == 32:
                rows += _ratios(dist, block, absmax, squares)
    rows += _bounds()
    rows += _spikes(rng)
    rows += _casts(rng, elements // 8)
    return rows


def _block_stats(
    rng: np.random.Generator, dist: str, block: int, elements: int
) -> tuple[Array, Array]:
    """Largest magnitude and sum of squares of each block."""
    chunk = block * 2**15
    absmax, squares = [], []
    for start in range(0, elements, chunk):
        n = min(chunk, elements - start) // block * block
        x = SAMPLERS[dist](rng, n).reshape(-1, block)
        absmax.append(np.abs(x).max(-1))
        squares.append(np.einsum("ij,ij->i", x, x))
    return np.concatenate(absmax), np.concatenate(squares)


def constant(p: int, block: int, dist: str) -> float:
    """c(p, B) of a distribution; of the lognormal mixture by quadrature here."""
    if dist != "lognormal":
        return theory.correction(p, block, dist)
    nodes, weights = np.polynomial.hermite_e.hermegauss(101)
    weights = weights / weights.sum()
    scales = np.exp(SIGMA * nodes - SIGMA**2)

    def integrand(log_t: float) -> float:
        t = math.exp(log_t)
        tail = float((weights * special.erfc(t / scales / math.sqrt(2.0))).sum())
        return p * t**p * -math.expm1(block * math.log1p(-min(tail, 1 - 1e-16)))

    moment, _ = integrate.quad(integrand, -30.0, 8.0, limit=400, points=[-2.0, 0.0, 1.0, 2.0])
    return float(moment ** (-1.0 / p))


def _constants(dist: str, block: int, absmax: Array) -> Iterator[Row]:
    for p in POWERS:
        powers = absmax**p
        mean = powers.mean()
        c = mean ** (-1.0 / p)
        stderr = c * powers.std() / (p * mean * math.sqrt(len(powers)))
        yield Row("constant", dist, p, block, 0, "c", c, stderr, constant(p, block, dist))


def _ratios(dist: str, block: int, absmax: Array, squares: Array) -> Iterator[Row]:
    """rms_hat / rms over rows of K blocks, with the distribution's own c and with the Gaussian."""
    for p in POWERS:
        own, gaussian = constant(p, block, dist), theory.correction(p, block)
        for k in ROW_BLOCKS:
            n = len(absmax) // k * k
            power_mean = (absmax[:n].reshape(-1, k) ** p).mean(-1) ** (1.0 / p)
            rms = np.sqrt(squares[:n].reshape(-1, k).sum(-1) / (k * block))
            ratio = own * power_mean / rms
            logs = np.log(ratio)
            count = len(logs)
            sd = logs.std(ddof=1)
            # Var(sd^2) = (m4 - sd^4) / n, and sd(sd) = sd(sd^2) / (2 sd).
            fourth = ((logs - logs.mean()) ** 4).mean()
            spread = math.sqrt(max(fourth - sd**4, 0.0) / count) / (2 * sd)
            theory_sd = (
                math.nan if dist == "lognormal" else theory.error_sd(p, block, k * block, dist)
            )
            yield Row("error", dist, p, block, k, "sd of log", sd, spread, theory_sd)
            mean_error = ratio.std(ddof=1) / math.sqrt(count)
            yield Row("mean", dist, p, block, k, "own c", ratio.mean(), mean_error, 1.0)
            wrong = gaussian / own
            yield Row(
                "mean", dist, p, block, k, "Gaussian c", wrong * ratio.mean(),
                wrong * mean_error, wrong,
            )  # fmt: skip
            for name, q in (("5%", 0.05), ("95%", 0.95)):
                yield Row("quantile", dist, p, block, k, name, float(np.quantile(ratio, q)))


def _estimate(x: Array, p: int, block: int) -> tuple[float, float]:
    """``rms_hat / rms`` and the largest ``|x| / rms_hat`` of one row, written out."""
    absmax = np.abs(x).reshape(-1, block).max(-1)
    rms_hat = theory.correction(p, block) * (absmax**p).mean() ** (1.0 / p)
    return float(rms_hat / np.sqrt((x * x).mean())), float(np.abs(x).max() / rms_hat)


def _bounds() -> Iterator[Row]:
    """Rows that reach the bounds: nothing random about them."""
    for p in POWERS:
        for block, k in ((16, 256), (32, 24), (32, 128), (32, 256)):
            flat = np.ones((k, block))
            spikes = np.zeros((k, block))
            spikes[:, 0] = 1.0
            one_flat = np.zeros((k, block))
            one_flat[0] = 1.0
            one_spike = np.zeros((k, block))
            one_spike[0, 0] = 1.0
            low, high = theory.ratio_bounds(p, block, k)
            # For p = 1 a single block that holds everything is the least, for p = 2 blocks alike.
            least = one_flat if p == 1 else flat
            yield Row("bound", "least", p, block, k, "ratio", _estimate(least, p, block)[0],
                      math.nan, low)  # fmt: skip
            yield Row("bound", "greatest", p, block, k, "ratio", _estimate(spikes, p, block)[0],
                      math.nan, high)  # fmt: skip
            yield Row("bound", "greatest", p, block, k, "output", _estimate(one_spike, p, block)[1],
                      math.nan, theory.output_bound(p, block, k))  # fmt: skip


def _spikes(rng: np.random.Generator) -> Iterator[Row]:
    """A Gaussian row with one channel of ``A`` standard deviations."""
    d, block = SPIKE_ROW
    k = d // block
    x = rng.standard_normal((256, d))
    for spike in SPIKES:
        x[:, 7] = spike
        for p in POWERS:
            ratios = np.array([_estimate(row, p, block)[0] for row in x])
            # The spike is the maximum of its block, the other blocks have E[m^p] = c^-p; below some
            # 5 sigma it is no certain maximum, and this says too little.
            c = theory.correction(p, block)
            mean = ((k - 1) * c**-p + spike**p) / k
            predicted = c * mean ** (1 / p) / math.sqrt((d - 1 + spike**2) / d)
            yield Row(
                "spike", "gaussian", p, block, k, str(spike), ratios.mean(),
                ratios.std(ddof=1) / math.sqrt(len(ratios)), predicted if spike >= 10 else math.nan,
            )  # fmt: skip


def _casts(rng: np.random.Generator, elements: int) -> Iterator[Row]:
    """Dequantised codes after the estimate (p = 2) against those after the true RMS."""
    for name, cast in CASTS.items():
        element = ELEMENTS[cast.element]
        x = torch.from_numpy(rng.standard_normal(elements)).float()
        for k in CAST_BLOCKS:
            size = k * cast.block_size
            rows = x[: len(x) // size * size].view(-1, size)
            made = []
            for rms in ("p2", "exact"):
                y = rows * reference.rstd(rows, 0.0, rms, cast.block_size)
                codes, scale = reference.quantize(y, cast)
                made.append((reference.dequantize(codes, scale, torch.float32, element), scale))
            (ours, our_scale), (exact, exact_scale) = made
            a, b = ours.double().flatten(), exact.double().flatten()
            pearson = float(torch.corrcoef(torch.stack((a, b)))[0, 1] ** 2)
            residual = 1.0 - float((a - b).square().sum() / (b - b.mean()).square().sum())
            same = float((our_scale.float() == exact_scale.float()).float().mean())
            yield Row("cast", name, 2, cast.block_size, k, "r2", pearson)
            yield Row("cast", name, 2, cast.block_size, k, "1 - SSE/SST", residual)
            predicted = math.nan if cast.rule == "e4m3" else 1 - _crossing(cast, size)
            yield Row("cast", name, 2, cast.block_size, k, "same scale", same, math.nan, predicted)


def _crossing(cast: Cast, d: int) -> float:
    """How often the estimate moves a block's E8M0 exponent, for Gaussian rows of many blocks.

    log2 of a block's maximum moves by ``log2 R``, ``R = rms_hat / rms``, and the exponent changes
    where that crosses a boundary of the rule: with probability ``E|log2 R|`` times the density of
    ``log2 m`` at the boundaries (powers of two for FLOOR, 1.75 times that for RCEIL in e4m3).
    """
    boundary = 1.75 if cast.rule.startswith("rceil") else 1.0
    t = boundary * 2.0 ** np.arange(-4.0, 5.0)
    inside = special.erf(t / math.sqrt(2.0))
    pdf = cast.block_size * inside ** (cast.block_size - 1) * np.exp(-t * t / 2)
    density = float((t * math.log(2) * pdf * math.sqrt(2 / math.pi)).sum())
    moved = math.sqrt(2 / math.pi) * theory.error_sd(2, cast.block_size, d) / math.log(2)
    return moved * density
