"""What fidelity finds: per site, all of it, and which sites are beyond the bounds."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.report import Report
from mxnorm_pass.trust.statistics import Channel, Worst
from mxnorm_pass.trust.tables import flagged_lines, site_table, unmeasured_lines

SCHEMA = "mxnorm-fidelity/1"


def as_glob(path: str) -> str:
    """The glob that matches ``path`` and nothing else."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)


@dataclass
class SiteFidelity:
    """One site on the rows it read; all numbers are dimensionless unless said otherwise.

    Attributes:
        id: as in reports; where graphs call several norms alike (layers that are compiled one by
            one), with the gain, the width and the cast behind it.
        norm: module path of the norm.
        consumers: module paths of the linears that read the cast.
        format: MXFP8, MXFP6, MXFP4 or NVFP4.
        k: elements per row.
        block_size: elements per block.
        rms: ``p1`` or ``p2``; ``exact`` where the options keep the true RMS (its ratios are 1).
        correction: the c that the estimate was made with.
        rows: rows that the ratios are of.
        zero_rows: rows of zeros, not counted.
        nonfinite_rows: rows with NaN or Inf, not counted.
        quantiles: of estimate/true RMS (eps inside both, as the op has it), by their share.
        median: the 0.5 quantile.
        mean: of the ratio.
        sd: its standard deviation.
        gaussian_sd: what Gaussian rows of this width would have.
        least: smallest ratio of all rows.
        greatest: largest.
        within: share of the rows within 5% of the true RMS.
        beyond: share of the rows that are off by more than the bound.
        beyond_calibrated: the same once the median is brought to 1.
        worst: the rows that are furthest off.
        channels: outlier channels.
        estimate_error: ``|difference| / |output|`` of the linears' outputs, estimate against true
            RMS, both through the MX cast, in the Euclidean norm over sampled rows.
        cast_error: the same of the cast alone: true RMS cast, against uncast.
        by_consumer: both errors and their SQNR in dB per linear.
        measured_at: ``outputs``, or ``rows`` where no linear's weight could be had (matmuls of
            codes, experts): then the errors are those of the dequantised rows.
        reasons: what is beyond the bounds; empty for a site that is not flagged.
        advice: ``calibrate``, ``exact``, ``exclude``, ``keep``, or ``measure`` where the batches
            had no row to measure.
    """

    id: str
    norm: str
    consumers: list[str]
    format: str
    k: int
    block_size: int
    rms: str
    correction: float
    rows: int
    zero_rows: int
    nonfinite_rows: int
    quantiles: dict[str, float]
    median: float
    mean: float
    sd: float
    gaussian_sd: float
    least: float
    greatest: float
    within: float
    beyond: float
    beyond_calibrated: float
    worst: list[Worst]
    channels: list[Channel]
    estimate_error: float
    estimate_sqnr: float
    cast_error: float
    cast_sqnr: float
    by_consumer: dict[str, dict[str, float]]
    measured_at: str
    reasons: list[str] = field(default_factory=list)
    advice: str = "keep"

    @property
    def flagged(self) -> bool:
        """Beyond the bounds, or estimated and not measured: in both cases not to be trusted."""
        return bool(self.reasons)

    @property
    def measured(self) -> bool:
        """Whether there was a row to compare."""
        return self.rows > 0


@dataclass
class Fidelity:
    """What :func:`fidelity` found; ``print`` it.

    Attributes:
        sites: one entry per site, in the order of the model.
        config: the options that were judged.
        bound: allowed deviation of the ratio from 1.
        tail: allowed share of rows beyond it.
        worst_bound: allowed deviation of any row.
        batches: how many were run.
        loss_exact: mean loss with the true RMS at every site; None where there is no loss.
        loss_estimate: with the estimate at every site that the options give it to.
        report: which sites the pass found, and what it left alone.
    """

    sites: list[SiteFidelity]
    config: MXNormConfig
    bound: float
    tail: float
    worst_bound: float
    batches: int
    loss_exact: float | None
    loss_estimate: float | None
    report: Report

    @property
    def flagged(self) -> list[SiteFidelity]:
        """Sites beyond the bounds, and those that are estimated and were not measured."""
        return [site for site in self.sites if site.flagged]

    @property
    def unmeasured(self) -> list[SiteFidelity]:
        """Sites of which the batches had no row, or none but zeros, NaN and Inf."""
        return [site for site in self.sites if not site.measured]

    def exact_where(self) -> MXNormConfig:
        """The options with the true RMS kept at every flagged norm: "exact where fidelity says so".
        Where nothing was measured it does not say otherwise, so that is exact too.

        A flagged norm that has no module path cannot be named: then all norms keep it.
        """
        norms = list(dict.fromkeys(as_glob(site.norm) for site in self.flagged))
        if not all(norms):
            return dataclasses.replace(self.config, rms="exact", gain="auto")
        new = (norm for norm in norms if norm not in self.config.exact)
        return dataclasses.replace(self.config, exact=(*self.config.exact, *new))

    def __str__(self) -> str:
        lines = [
            f"mxnorm fidelity: {len(self.sites)} site(s), {self.batches} batch(es), "
            f"{len(self.flagged)} flagged (median off by more than {self.bound:.0%},",
            f"more than {self.tail:.1%} of the rows off by that, or one row off by "
            f"{self.worst_bound:.0%})",
            *unmeasured_lines(self.unmeasured),
            *site_table(self.sites),
            *flagged_lines(self.sites),
        ]
        if self.loss_exact is not None and self.loss_estimate is not None:
            change = self.loss_estimate / self.loss_exact - 1 if self.loss_exact else math.nan
            lines.append(
                f"loss: {self.loss_exact:.5g} with the true RMS, {self.loss_estimate:.5g} with the "
                f"estimate ({change:+.2%})"
            )
        return "\n".join(lines)

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON (docs/pretrained.md describes it), also written to ``path``.

        Numbers that JSON does not have (no rows, no error) become null.
        """
        content = {
            "schema": SCHEMA,
            "bound": self.bound,
            "tail": self.tail,
            "worst_bound": self.worst_bound,
            "batches": self.batches,
            "loss_exact": self.loss_exact,
            "loss_estimate": self.loss_estimate,
            "config": self.config.describe(),
            "flagged": [site.id for site in self.flagged],
            "unmeasured": [site.id for site in self.unmeasured],
            "sites": [dataclasses.asdict(site) for site in self.sites],
        }
        text = json.dumps(_finite(content), indent=1, allow_nan=False)
        if path is not None:
            Path(path).write_text(text)
        return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def nothing_but(site: SiteFidelity) -> str:
    """What the batches had for a site without a row to measure."""
    kinds = {"rows of zeros": site.zero_rows, "rows with NaN or Inf": site.nonfinite_rows}
    return " and ".join(f"{n} {kind}" for kind, n in kinds.items() if n) or "no rows"


def judge(site: SiteFidelity, bound: float, tail: float, worst_bound: float) -> None:
    """What is beyond the bounds, and what helps: one constant, or the true RMS."""
    if site.nonfinite_rows:
        site.reasons.append(f"{site.nonfinite_rows} rows hold NaN or Inf")
    elif not site.measured and site.rms != "exact":
        site.reasons.append(f"nothing was measured: {nothing_but(site)}")
        site.advice = "measure"
        return
    if site.measured:
        if abs(site.median - 1) > bound:
            site.reasons.append(f"the median ratio is {site.median:.3f}")
        if site.beyond > tail:
            alone = math.erfc(bound / site.gaussian_sd / math.sqrt(2)) if site.gaussian_sd else 0.0
            note = f" ({alone:.1%} of Gaussian rows of {site.k} would be)" if alone > tail else ""
            site.reasons.append(
                f"{site.beyond:.1%} of the rows are off by more than {bound:.0%}{note}"
            )
        limits = (1 / (1 + worst_bound), 1 + worst_bound)
        if not limits[0] <= site.least or not site.greatest <= limits[1]:
            far = site.worst[0].ratio
            site.reasons.append(f"one row is off by a factor of {max(far, 1 / far):.2f}")
    if not site.reasons:
        return
    if site.nonfinite_rows:
        site.advice = "exclude"
        return
    # What one constant can do: bring the median to one. What it leaves is the rows' own spread.
    calibrated = (site.least / site.median, site.greatest / site.median)
    helps = (
        site.beyond_calibrated <= tail
        and 1 / (1 + worst_bound) <= calibrated[0]
        and calibrated[1] <= 1 + worst_bound
    )
    site.advice = "calibrate" if helps else "exact"
