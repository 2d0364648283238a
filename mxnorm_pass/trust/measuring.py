"""How far the estimate is from the true RMS on a model's own rows, and what that does.

The estimate supposes a distribution of the row (Gaussian, or what a calibration found). A
checkpoint that was trained with RMSNorm may be off: rows with massive channels by 2x.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass import reference
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.formats import ELEMENTS, Cast
from mxnorm_pass.ops import OP
from mxnorm_pass.ops.rmsnorm_mxquant import parse_rounding
from mxnorm_pass.report import SiteReport
from mxnorm_pass.theory import error_sd
from mxnorm_pass.trust.findings import Fidelity, SiteFidelity, judge, nothing_but
from mxnorm_pass.trust.statistics import Channels, LogHistogram, Noise, WorstRows
from mxnorm_pass.trust.taps import Rows, Tapped, mean_squares
from mxnorm_pass.trust.tracing import LossFn, as_batches, loss_of

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


def fidelity(
    model: nn.Module,
    batches: Any,
    *,
    config: MXNormConfig | None = None,
    bound: float = 0.1,
    tail: float = 0.01,
    worst_bound: float = 0.5,
    worst: int = 5,
    samples: int = 128,
    loss_fn: LossFn | None = None,
    loss: bool = True,
) -> Fidelity:
    """Compare the estimate with the true RMS at every site, on the rows of ``batches``.

    The model runs as the checkpoint is meant to: evaluation mode, no gradients, casts as they are,
    the true RMS everywhere. Statistics are streamed, so memory does not grow with the batches: a
    histogram of all ratios per site, sums per channel, and ``samples`` rows per site and batch for
    the errors of outputs (random, one from each of as many stretches of the batch, the same in
    every run).

    Args:
        model: a module whose linears cast to MX (after ``quantize_``); compiled or not.
        batches: an iterable of batches: mappings of keyword inputs, sequences of positional inputs,
            or tensors.
        config: the options to judge, with their p, calibration and ``exact``; by default those of
            the backend ``"mxnorm"``.
        bound: a site is flagged where its median ratio is further from 1 than this, or where more
            than ``tail`` of its rows are,
        tail: that share, or
        worst_bound: where any row is off by this factor: ratio above ``1 + worst_bound`` or below
            ``1 / (1 + worst_bound)``.
        worst: how many rows to keep per site.
        samples: rows per site and batch that go through the linears once more.
        loss_fn: ``loss_fn(output, batch)``; by default what the output calls ``loss``.
        loss: run each batch again with the estimate, where there is a loss to compare.

    Returns:
        The findings; ``print`` them. ``exact_where()`` is the config that keeps the true RMS at
        every flagged norm.

    Raises:
        ValueError: for options that estimate nothing, bounds and counts that are no positive
            numbers, no batches, a model without a site, or batches without a row to measure: no
            rows at all, or none but zeros.
    """
    chosen = MXNormConfig.checked(config)
    if chosen.rms == "exact":
        raise ValueError("config.rms is 'exact', which estimates nothing: give one with rms='mx'")
    for name, value in (("bound", bound), ("worst_bound", worst_bound)):
        if not (_is_number(value) and value > 0):
            raise ValueError(f"{name}={value!r}: expected a number above zero")
    for name, count in (("samples", samples), ("worst", worst)):
        if not (_is_number(count) and isinstance(count, numbers.Integral) and count > 0):
            raise ValueError(f"{name}={count!r}: expected a whole number above zero")
    if not (_is_number(tail) and 0 <= tail < 1):
        raise ValueError(f"tail={tail!r}: expected a share, 0 <= tail < 1")
    watch = _Watch(bound, worst, samples)
    exact: list[float] = []
    estimated: list[float] = []
    with Tapped(model, chosen) as tapped:
        for watch.batch, batch in enumerate(as_batches(batches)):
            found = loss_of(tapped.run(batch, "exact", watch), batch, loss_fn)
            if found is not None and loss:
                exact.append(found)
                again = loss_of(tapped.run(batch, "estimate"), batch, loss_fn)
                estimated.append(math.nan if again is None else again)
    if watch.batch < 0:
        raise ValueError("batches is empty")
    sites = watch.result(tail, worst_bound)
    if not any(site.measured or site.nonfinite_rows for site in sites):
        seen = "; ".join(f"{site.id}: {nothing_but(site)}" for site in sites)
        raise ValueError(f"nothing was measured in {watch.batch + 1} batch(es): {seen}")
    return Fidelity(
        sites,
        chosen,
        bound,
        tail,
        worst_bound,
        watch.batch + 1,
        sum(exact) / len(exact) if exact else None,
        sum(estimated) / len(estimated) if estimated else None,
        tapped.report,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class _Watch:
    """Gathers the statistics of all sites."""

    def __init__(self, bound: float, worst: int, samples: int) -> None:
        self.batch = -1
        self.sites: dict[tuple[Any, ...], _SiteWatch] = {}
        self._bound, self._worst, self._samples = bound, worst, samples

    def rows(self, rows: Rows) -> tuple[_SiteWatch, _Variants]:
        # Graphs of layers that are compiled one by one call all their norms alike.
        options = rows.options
        made = (rows.x.shape[-1], options.cast, options.rms, options.correction, rows.eps)
        key = (rows.site.id, *rows.gains, *made)
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = _SiteWatch(rows, self._worst, self._bound)
        picked = site.add(rows, self.batch, self._samples)
        variants = _variants(rows, picked)
        site.add_rows_errors(variants)
        return site, variants

    def matmul(self, handed: Any, consumer: str, weight: Tensor) -> None:
        site, variants = handed
        site.add_output_errors(variants, consumer, weight)

    def result(self, tail: float, worst_bound: float) -> list[SiteFidelity]:
        """Of all sites; where several have one id, the parameter or the cast tells them apart."""
        ids = Counter(watch.site.id for watch in self.sites.values())
        found = []
        for watch in self.sites.values():
            site = watch.result(self._bound, tail, worst_bound)
            if ids[site.id] > 1:
                gain = watch.gains[0] if watch.gains else "no gain"
                site.id += f" ({gain}, {site.k} columns, {watch.cast})"
            found.append(site)
        return found


@dataclass(frozen=True)
class _Variants:
    """Sampled rows ``[S, K]`` float32 as a linear reads them."""

    uncast: Tensor
    exact: Tensor
    estimate: Tensor


def _variants(rows: Rows, x: Tensor) -> _Variants:
    """True RMS and no cast, true RMS cast, estimate cast."""
    cast, options = rows.cast, rows.options
    plain = options._replace(cast=str(_plain(cast)))
    outer = 1.0 if options.tensor_scale is None else float(options.tensor_scale)
    element = ELEMENTS[cast.element]

    def through(rms: str) -> Tensor:
        qdata, scale, _ = OP(x, *plain._replace(rms=rms))
        read = reference.dequantize(qdata.cpu(), scale.cpu(), torch.float32, element, outer)
        return read.to(x.device)

    norm_dtype, out_dtype = parse_rounding(options.rounding)
    rho = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + rows.eps)
    uncast = reference.normalise(x, rho, options.gain, norm_dtype, out_dtype).float()
    exact = through("exact")
    return _Variants(uncast, exact, exact if options.rms == "exact" else through(options.rms))


def _plain(cast: Cast) -> Cast:
    return dataclasses.replace(cast, layout="plain")


class _SiteWatch:
    def __init__(self, rows: Rows, worst: int, bound: float) -> None:
        self.site: SiteReport = rows.site
        self.gains = rows.gains
        self.consumers: dict[str, None] = {}
        self.options, self.cast = rows.options, rows.cast
        self.k = rows.x.shape[-1]
        self.bound = bound
        ends = ratio_ends(self.options.rms, self.options.correction, self.k, self.cast.block_size)
        # With an eps the ratio is nearer to one; without spread there is nothing to bin.
        self.ratios = LogHistogram(min(ends[0], 0.99), max(ends[1], 1.01))
        self.worst = WorstRows(worst)
        self.channels = Channels(self.k)
        self.good = self.beyond = self.zero = self.nonfinite = 0
        self.estimate: dict[str, Noise] = {}
        self.of_cast: dict[str, Noise] = {}

    def add(self, rows: Rows, batch: int, samples: int) -> Tensor:
        """Statistics of one batch; returns the rows ``[S, K]`` picked for the errors."""
        x, options = rows.x, rows.options
        self.consumers |= dict.fromkeys(rows.site.consumers)
        block = self.cast.block_size
        true, power = mean_squares(x, block, 1 if options.rms == "p1" else 2)
        finite = true.isfinite() & power.isfinite()
        alive = power > 0
        good = finite & alive
        self.nonfinite += int((~finite).sum())
        self.zero += int((finite & ~alive).sum())
        if options.rms == "exact":
            ratio = torch.ones_like(true)
        else:
            ratio = ((power * options.correction**2 + rows.eps) / (true + rows.eps)).sqrt()
        kept = ratio[good]
        self.ratios.add(kept)
        self.good += int(((kept - 1).abs() <= 0.05).sum())
        self.beyond += int(((kept - 1).abs() > self.bound).sum())
        self.worst.add(torch.where(good, ratio, torch.nan), batch)
        flat = x[good]
        self.channels.add(flat)
        if len(flat) <= samples:
            return flat
        generator = torch.Generator().manual_seed(batch)
        spread = torch.arange(samples) + torch.rand(samples, generator=generator)
        picked = (spread * (len(flat) / samples)).long().clamp(max=len(flat) - 1)
        return flat[picked.to(flat.device)]

    def add_rows_errors(self, rows: _Variants) -> None:
        self.estimate.setdefault("", Noise()).add(rows.exact, rows.estimate)
        self.of_cast.setdefault("", Noise()).add(rows.uncast, rows.exact)

    def add_output_errors(self, rows: _Variants, consumer: str, weight: Tensor) -> None:
        w = weight.float()
        exact = rows.exact @ w
        self.estimate.setdefault(consumer or "?", Noise()).add(exact, rows.estimate @ w)
        self.of_cast.setdefault(consumer or "?", Noise()).add(rows.uncast @ w, exact)

    def result(self, bound: float, tail: float, worst_bound: float) -> SiteFidelity:
        hist, rms = self.ratios, self.options.rms
        names = [name for name in self.estimate if name] or [""]
        estimate = _sum(self.estimate[n] for n in names)
        of_cast = _sum(self.of_cast[n] for n in names)
        median = hist.quantile(0.5)
        block = self.cast.block_size
        p = 1 if rms == "p1" else 2
        site = SiteFidelity(
            id=self.site.id,
            norm=self.site.norm,
            consumers=list(self.consumers),
            format=self.cast.name,
            k=self.k,
            block_size=block,
            rms=rms,
            correction=self.options.correction,
            rows=hist.count,
            zero_rows=self.zero,
            nonfinite_rows=self.nonfinite,
            quantiles={str(q): hist.quantile(q) for q in QUANTILES},
            median=median,
            mean=hist.mean,
            sd=hist.sd,
            gaussian_sd=0.0 if rms == "exact" else error_sd(p, block, self.k),
            least=hist.least if hist.count else math.nan,
            greatest=hist.greatest if hist.count else math.nan,
            within=self.good / hist.count if hist.count else math.nan,
            beyond=self.beyond / hist.count if hist.count else math.nan,
            beyond_calibrated=1 - hist.within(median * (1 - bound), median * (1 + bound)),
            worst=self.worst.sorted(),
            channels=self.channels.outliers(),
            estimate_error=estimate.relative,
            estimate_sqnr=estimate.sqnr,
            cast_error=of_cast.relative,
            cast_sqnr=of_cast.sqnr,
            by_consumer={
                name: {
                    "estimate_error": self.estimate[name].relative,
                    "estimate_sqnr": self.estimate[name].sqnr,
                    "cast_error": self.of_cast[name].relative,
                    "cast_sqnr": self.of_cast[name].sqnr,
                }
                for name in names
                if name
            },
            measured_at="outputs" if names != [""] else "rows",
        )
        judge(site, bound, tail, worst_bound)
        return site


def _sum(noises: Iterable[Noise]) -> Noise:
    total = Noise()
    for noise in noises:
        total.signal += noise.signal
        total.noise += noise.noise
    return total


def ratio_ends(rms: str, correction: float, k: int, block: int) -> tuple[float, float]:
    """Least and greatest ratio that any row can have (:func:`mxnorm_pass.theory.ratio_bounds` with
    the c given).
    """
    if rms == "exact":
        return 1.0, 1.0
    p = 1 if rms == "p1" else 2
    stretch = math.pow(k / block, 0.5 - 1 / p)
    return correction * min(1.0, stretch), correction * math.sqrt(block) * max(1.0, stretch)
