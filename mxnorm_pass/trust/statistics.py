"""Streaming statistics: the memory they take does not depend on how many rows they see."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BINS = 8192


class LogHistogram:
    """Distribution of positive numbers that lie between known ends, by their logarithm.

    The ratio estimate/true RMS cannot leave the ends that
    :func:`mxnorm_pass.theory.ratio_bounds` gives, so bins of one width hold every row and none is
    sampled: quantiles are right to half a bin, 1.1e-4 of the ratio for ``p=2`` and blocks of 32
    (``log(sqrt(32)) / 8192 / 2``). Mean and standard deviation are exact sums (float64).
    """

    def __init__(self, low: float, high: float) -> None:
        # A hair wider: float32 rows may round past the ends.
        self.low, self.high = math.log(low) - 1e-3, math.log(high) + 1e-3
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.count = 0
        self._sum = self._square = 0.0
        self.least, self.greatest = math.inf, -math.inf

    def add(self, values: Tensor) -> None:
        """Count finite positive values of any shape."""
        if values.numel() == 0:
            return
        values = values.detach().double().flatten()
        width = (self.high - self.low) / BINS
        index = ((values.log() - self.low) / width).long().clamp(0, BINS - 1)
        self.counts += torch.bincount(index, minlength=BINS).cpu()
        self.count += values.numel()
        # Ratios are near one: taken off, the squares do not cancel.
        self._sum += float((values - 1).sum())
        self._square += float((values - 1).square().sum())
        self.least = min(self.least, float(values.min()))
        self.greatest = max(self.greatest, float(values.max()))

    @property
    def mean(self) -> float:
        """Mean of the values; nan without any."""
        return 1 + self._sum / self.count if self.count else math.nan

    @property
    def sd(self) -> float:
        """Standard deviation; nan without values."""
        if not self.count:
            return math.nan
        mean = self._sum / self.count
        return math.sqrt(max(0.0, self._square / self.count - mean * mean))

    def quantile(self, q: float) -> float:
        """The value that a share ``q`` of the values does not exceed, linear within a bin."""
        if not self.count:
            return math.nan
        target = q * self.count
        below = self.counts.cumsum(0)
        index = int(torch.searchsorted(below, torch.tensor(max(target, 1.0)), right=False))
        index = min(index, BINS - 1)
        inside = int(self.counts[index])
        before = int(below[index]) - inside
        part = (target - before) / inside if inside else 0.5
        width = (self.high - self.low) / BINS
        value = math.exp(self.low + (index + min(max(part, 0.0), 1.0)) * width)
        return min(max(value, self.least), self.greatest)

    def within(self, low: float, high: float) -> float:
        """Share of the values between two numbers, to a bin's width."""
        if not self.count:
            return math.nan
        width = (self.high - self.low) / BINS
        centres = torch.exp(self.low + (torch.arange(BINS, dtype=torch.float64) + 0.5) * width)
        return float(self.counts[(centres >= low) & (centres <= high)].sum()) / self.count


@dataclass(frozen=True)
class Worst:
    """A row far off.

    Attributes:
        off: ``|log(ratio)|``.
        batch: number of the batch.
        row: index of the row in the tensor that the norm reads, without its last axis.
        ratio: estimate over true RMS.
    """

    off: float
    batch: int
    row: tuple[int, ...]
    ratio: float


@dataclass
class WorstRows:
    """The ``size`` rows that are furthest off; of equal ones those of the first batches."""

    size: int
    _heap: list[tuple[float, int, int, Worst]] = field(default_factory=list)

    def add(self, ratio: Tensor, batch: int) -> None:
        """Ratios ``[...]`` of one batch's rows; those that are not finite are not looked at."""
        off = ratio.double().log().abs().flatten()
        off = torch.where(off.isfinite(), off, -1.0)
        values, places = off.topk(min(self.size, off.numel()))
        flat = ratio.flatten()
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            if value < 0:
                continue
            row = []
            rest = place
            for size in reversed(ratio.shape):
                rest, at = divmod(rest, size)
                row.append(at)
            worst = Worst(value, batch, tuple(reversed(row)), float(flat[place]))
            entry = (value, -batch, -place, worst)
            if len(self._heap) < self.size:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heappushpop(self._heap, entry)

    def sorted(self) -> list[Worst]:
        """Furthest off first."""
        return [worst for *_, worst in sorted(self._heap, reverse=True)]


@dataclass(frozen=True)
class Channel:
    """A channel that carries far more than its part of a row.

    Attributes:
        index: position along the row.
        share: its part of a row's energy ``x^2``, averaged over all rows; 1/K would be even.
        peak: the largest part that it has of any row.
    """

    index: int
    share: float
    peak: float


class Channels:
    """Each channel's part of the rows' energy: mean and largest, two vectors of K numbers.

    A channel counts as an outlier where on average it carries 16 times its even part (an amplitude
    of four times the row's RMS), or where it makes a quarter of some row's energy (and 64 times its
    even part). In a row of 4096 that pulls the estimate up by 46%.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.rows = 0
        self._sum = torch.zeros(k, dtype=torch.float64)
        self._peak = torch.zeros(k, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Rows ``[N, K]``, finite and none zero."""
        if not len(x):
            return
        # Over the row's largest first: squares of float32 rows may overflow.
        energy = (x.float() / x.float().abs().amax(-1, keepdim=True)).square()
        share = energy / energy.sum(-1, keepdim=True)
        self._sum += share.sum(0, dtype=torch.float64).cpu()
        self._peak = torch.maximum(self._peak, share.amax(0).double().cpu())
        self.rows += len(x)

    def outliers(self, most: int = 8) -> list[Channel]:
        """Those that are, the largest first."""
        if not self.rows:
            return []
        share = self._sum / self.rows
        often = share >= min(16 / self.k, 0.5)
        once = self._peak >= min(max(64 / self.k, 0.25), 0.9)
        found = torch.nonzero(often | once).flatten()
        weight = torch.maximum(share, self._peak / 4)[found]
        order = found[weight.argsort(descending=True, stable=True)][:most]
        return [Channel(int(i), float(share[i]), float(self._peak[i])) for i in order]


@dataclass
class Noise:
    """Energy of a signal and of the difference to it, summed."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, got: Tensor) -> None:
        """Two tensors of one shape; values that are not finite are left out."""
        a, b = expected.double(), got.double()
        good = a.isfinite() & b.isfinite()
        a, b = torch.where(good, a, 0.0), torch.where(good, b, 0.0)
        self.signal += float(a.square().sum())
        self.noise += float((a - b).square().sum())

    @property
    def seen(self) -> bool:
        """Whether there was any signal."""
        return self.signal > 0

    @property
    def relative(self) -> float:
        """``|difference| / |signal|`` in the Euclidean norm; nan without a signal."""
        return math.sqrt(self.noise / self.signal) if self.seen else math.nan

    @property
    def sqnr(self) -> float:
        """Signal to noise in dB; inf where there is no difference, nan without a signal."""
        if not self.seen:
            return math.nan
        return 10 * math.log10(self.signal / self.noise) if self.noise else math.inf
