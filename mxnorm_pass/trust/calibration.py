"""One constant c per norm, fitted to the rows that a model really has."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.files import check_writable
from mxnorm_pass.theory import correction as gaussian_correction
from mxnorm_pass.trust.measuring import ratio_ends
from mxnorm_pass.trust.statistics import LogHistogram
from mxnorm_pass.trust.tables import number, scope, table, wrap
from mxnorm_pass.trust.taps import Rows, Tapped, mean_squares
from mxnorm_pass.trust.tracing import as_batches

SCHEMA = "mxnorm-calibration/1"


@dataclass
class NormCalibration:
    """One norm's constant and what it was fitted to.

    Attributes:
        c: the constant, ``rms_hat = c * (mean_k m_k^p)^(1/p)``.
        block_size: elements per block; c holds for no other.
        format: of the cast: MXFP8, MXFP6, MXFP4 or NVFP4.
        eps: of the norm.
        rows: how many rows it was fitted to.
        before: the median of estimate/true RMS with the constant of Gaussian rows.
        sd: standard deviation of estimate/true RMS with c: what no constant mends.
        error: standard error of c, relative: that of a median of so many rows.
    """

    c: float
    block_size: int
    format: str
    eps: float
    rows: int
    before: float
    sd: float
    error: float


@dataclass
class Calibration:
    """What :func:`calibrate` found; ``print`` it, :meth:`save` it, compile with :attr:`config`.

    Attributes:
        p: power of the mean over blocks.
        norms: by module path.
        skipped: norms without a constant, and why.
        shared: paths that stand for several norms, with the names of their gains: layers that are
            compiled one by one call their norms alike, and one constant serves all of them.
        path: the file that holds this; None before :meth:`save`.
    """

    p: int
    norms: dict[str, NormCalibration]
    skipped: dict[str, str] = field(default_factory=dict)
    path: str | None = None
    shared: dict[str, list[str]] = field(default_factory=dict)

    @property
    def config(self) -> MXNormConfig:
        """Options that use the saved file.

        Raises:
            ValueError: before :meth:`save`.
        """
        if self.path is None:
            raise ValueError("the calibration is not saved yet: save(path), or calibrate(path=...)")
        return MXNormConfig(p=self.p, correction=self.path)

    def to_json(self) -> str:
        """The calibration file's text (format in docs/design.md)."""
        from mxnorm_pass import __version__

        content: dict[str, Any] = {
            "schema": SCHEMA,
            "package": __version__,
            "p": self.p,
            "sites": {path: norm.c for path, norm in self.norms.items()},
            "blocks": {path: norm.block_size for path, norm in self.norms.items()},
            "norms": {path: asdict(norm) for path, norm in self.norms.items()},
            "skipped": self.skipped,
            "shared": self.shared,
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Calibration:
        """Write the file; returns this."""
        Path(path).write_text(self.to_json())
        self.path = str(path)
        return self

    def __str__(self) -> str:
        under = scope(list(self.norms))
        rows = [("norm", "block", "rows", "before", "c", "+-", "sd left")]
        for path, norm in self.norms.items():
            rows.append(
                (
                    path.removeprefix(f"{under}.") if under else path,
                    str(norm.block_size),
                    str(norm.rows),
                    number(norm.before, ".3f"),
                    number(norm.c, ".4f"),
                    number(100 * norm.error, ".2f") + "%",
                    number(100 * norm.sd, ".1f") + "%",
                )
            )
        lines = [f"mxnorm calibration: {len(self.norms)} norm(s), p={self.p}"]
        lines += [f"norms under {under}:"] if under else []
        lines += table(rows)
        for path, why in self.skipped.items():
            lines += wrap(f"{path or '?'}: no constant: {why}")
        for path, gains in self.shared.items():
            lines += wrap(
                f"{path or '?'}: one constant for {len(gains)} norms that the graphs call alike: "
                f"{', '.join(gains)}"
            )
        if self.path:
            lines.append(f"saved as {self.path}")
        return "\n".join(lines)


def calibrate(
    model: nn.Module,
    batches: Any,
    *,
    p: int | None = None,
    path: str | Path | None = None,
    config: MXNormConfig | None = None,
) -> Calibration:
    """Fit the constant c of every norm to the rows of ``batches``.

    The estimator is the median: ``c = 1 / median(M / rms)`` with ``M = (mean_k m_k^p)^(1/p)`` and
    ``rms`` of each row. It makes the median of estimate/true RMS one, and a tenth of rows with
    massive channels, which no constant suits, moves it by little; a mean, or least squares in the
    logarithm, would trade all other rows for them. Rows of zeros, rows with NaN or Inf and rows
    whose mean square is not above eps (the norm's scale is eps there) are left out. The model runs
    with the true RMS, as the checkpoint was trained; statistics are streamed
    (:class:`mxnorm_pass.trust.statistics.LogHistogram`), so memory does not grow with the batches.

    Args:
        model: a module whose linears cast to MX (after ``quantize_``); compiled or not.
        batches: an iterable of batches, as for :func:`mxnorm_pass.fidelity`.
        p: 1 or 2, power of the mean over blocks; by default the config's.
        path: JSON file to write; ``MXNormConfig(correction=path)`` takes it.
        config: ``include``, ``exclude`` and ``off`` say which sites to look at.

    Returns:
        The constants.

    Raises:
        ValueError: for another p, no batches, or a model without a site.
        OSError: where the file cannot be written; known before the model runs.
    """
    if path is not None:
        check_writable(Path(path))
    given = MXNormConfig.checked(config)
    chosen = dataclasses.replace(
        given, rms="mx", p=given.p if p is None else p, correction="gaussian", exact=()
    )
    watch = _Watch(chosen.p)
    seen = False
    with Tapped(model, chosen) as tapped:
        for batch in as_batches(batches):
            tapped.run(batch, "exact", watch)
            seen = True
    if not seen:
        raise ValueError("batches is empty")
    result = watch.result()
    if path is not None:
        result.save(path)
    return result


class _Watch:
    def __init__(self, p: int) -> None:
        self.p = p
        self.norms: dict[tuple[str, int, int], _NormWatch] = {}
        self.gains: dict[str, dict[str, None]] = {}

    def rows(self, rows: Rows) -> None:
        key = (rows.site.norm, rows.cast.block_size, rows.x.shape[-1])
        self.gains.setdefault(rows.site.norm, {}).update(dict.fromkeys(rows.gains[:1]))
        norm = self.norms.get(key)
        if norm is None:
            norm = self.norms[key] = _NormWatch(rows, self.p)
        norm.add(rows)

    def matmul(self, handed: Any, consumer: str, weight: Tensor) -> None:
        """Nothing that a constant depends on."""

    def result(self) -> Calibration:
        result = Calibration(self.p, {})
        widths: dict[str, int] = {}
        for (path, block, k), norm in self.norms.items():
            if not path:
                result.skipped[path] = "it has no module path to be named by"
            elif not norm.ratios.count:
                result.skipped[path] = "no row with a mean square above eps"
            elif path in result.norms:
                result.skipped[path] = (
                    f"rows of {widths[path]} in blocks of {result.norms[path].block_size} in one "
                    f"graph, rows of {k} in blocks of {block} in another; the constant is that of "
                    "the former"
                )
            else:
                result.norms[path], widths[path] = norm.result(block), k
                if len(self.gains[path]) > 1:
                    result.shared[path] = list(self.gains[path])
        unsure = [path for path, norm in result.norms.items() if norm.error > 0.005]
        if unsure:
            warnings.warn(
                f"calibrate: so few rows leave c uncertain by more than 0.5% in {len(unsure)} "
                f"norm(s), {unsure[0]} among them: give more batches",
                stacklevel=3,
            )
        return result


class _NormWatch:
    """``M / rms`` of one norm's rows."""

    def __init__(self, rows: Rows, p: int) -> None:
        self.p, self.eps, self.format = p, rows.eps, rows.cast.name
        low, high = ratio_ends(f"p{p}", 1.0, rows.x.shape[-1], rows.cast.block_size)
        self.ratios = LogHistogram(low, high)

    def add(self, rows: Rows) -> None:
        true, power = mean_squares(rows.x, rows.cast.block_size, self.p)
        good = true.isfinite() & power.isfinite() & (true > max(rows.eps, 0.0))
        self.ratios.add((power[good] / true[good]).sqrt())

    def result(self, block: int) -> NormCalibration:
        ratios = self.ratios
        median = ratios.quantile(0.5)
        # A median of n normal numbers scatters sqrt(pi / 2) as much as their mean.
        spread = math.log(ratios.quantile(0.8413) / ratios.quantile(0.1587)) / 2
        return NormCalibration(
            c=1 / median,
            block_size=block,
            format=self.format,
            eps=self.eps,
            rows=ratios.count,
            before=median * gaussian_correction(self.p, block),
            sd=ratios.sd / median,
            error=math.sqrt(math.pi / 2) * spread / math.sqrt(ratios.count),
        )
