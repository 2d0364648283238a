"""From a model trained with the estimate to one that serves on plain RMSNorm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.trust.changes import Changes, Rounding
from mxnorm_pass.trust.gains import gain_values
from mxnorm_pass.trust.measuring import ratio_ends
from mxnorm_pass.trust.reads import Reads, raw_reads
from mxnorm_pass.trust.statistics import LogHistogram
from mxnorm_pass.trust.tables import decibel, number, scope, table, wrap
from mxnorm_pass.trust.taps import Rows, Tapped, mean_squares
from mxnorm_pass.trust.tracing import LossFn, call, evaluating, loss_of, original, repeatable
from mxnorm_pass.trust.uses import place


@dataclass(frozen=True)
class BakedGain:
    """A gain that took a ratio in.

    Attributes:
        norm: module path of the norm.
        gain: name of the parameter.
        ratio: median of estimate/true RMS over the rows; the gain was divided by it.
        sd: standard deviation of estimate/true RMS once it is divided by ``ratio``: what one number
            cannot carry.
        rows: how many rows.
        rounding: what storing the quotient in the gain's dtype added.
    """

    norm: str
    gain: str
    ratio: float
    sd: float
    rows: int
    rounding: Rounding


MARK = "_mxnorm_baked"
"""Attribute of a module: its own parameters that are baked. Copies of the module have it too."""


def baked(owner: nn.Module) -> frozenset[str]:
    """The module's parameters that hold a ratio."""
    found: frozenset[str] = getattr(owner, MARK, frozenset())
    return found


class ToRMSNorm(Changes):
    """What :func:`to_rmsnorm` did; ``print`` it. :meth:`undo`, or leaving the context, restores.

    Attributes:
        gains: those that were changed.
        left: norms that were estimated and could not be baked, and why.
        loss_estimate: mean loss as trained, with the estimate; None where there is no loss.
        loss_unbaked: of the model as it was, on plain RMSNorm.
        loss_baked: of the model as it is now, on plain RMSNorm.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.gains: list[BakedGain] = []
        self.left: dict[str, str] = {}
        self.loss_estimate: float | None = None
        self.loss_unbaked: float | None = None
        self.loss_baked: float | None = None

        self._marked: list[tuple[nn.Module, str]] = []

    def mark(self, owner: nn.Module, name: str) -> None:
        """Note on a module that its parameter ``name`` is baked; :meth:`undo` takes that away."""
        setattr(owner, MARK, baked(owner) | {name})
        self._marked.append((owner, name))

    def undo(self) -> None:
        """Put the gains back; as :meth:`Changes.undo`."""
        super().undo()
        for owner, name in self._marked:
            setattr(owner, MARK, baked(owner) - {name})
        self._marked.clear()

    def __str__(self) -> str:
        state = "" if self.active or not self.gains else " (undone)"
        lines = [
            f"mxnorm to_rmsnorm: {len(self.gains)} gain(s) baked, {len(self.left)} left{state}"
        ]
        if self.gains:
            under = scope([line.norm for line in self.gains])
            rows = [("norm", "rows", "ratio", "sd", "max ulp", "SQNR dB")]
            rows += [
                (
                    line.norm.removeprefix(f"{under}.") if under else line.norm,
                    str(line.rows),
                    number(line.ratio, ".4f"),
                    number(100 * line.sd, ".1f") + "%",
                    f"{line.rounding.max_ulp:.2f}",
                    decibel(line.rounding.sqnr),
                )
                for line in self.gains
            ]
            lines += [f"norms under {under}:"] if under else []
            lines += table(rows)
        for norm, why in self.left.items():
            lines += wrap(f"{norm or '?'}: left: {why}")
        if self.loss_estimate is not None:
            lines.append(f"{'loss with the estimate, as trained':<42}{self.loss_estimate:.5g}")
            for name, loss in (
                ("loss on plain RMSNorm, gains as they were", self.loss_unbaked),
                ("loss on plain RMSNorm, gains baked", self.loss_baked),
            ):
                if loss is not None:
                    change = loss / self.loss_estimate - 1 if self.loss_estimate else math.nan
                    lines.append(f"{name:<42}{loss:.5g} ({change:+.2%})")
        return "\n".join(lines)


def to_rmsnorm(
    model: nn.Module,
    batches: Any,
    *,
    config: MXNormConfig | None = None,
    loss_fn: LossFn | None = None,
) -> ToRMSNorm:
    """Bake the ratio of the estimate to the true RMS into the gains, in place.

    A model trained with the estimate has learnt ``x / rms_hat * g``. With ``r`` the median of
    ``rms_hat / rms`` over the rows of ``batches``, ``x / rms * (g / r)`` is the same but for the
    rows' own spread about r: plain RMSNorm kernels can serve it. Gains of the form ``1 + w`` get
    ``(1 + w) / r - 1``. The model runs with the estimate, as it was trained, in evaluation; the
    losses on plain RMSNorm are those of the model run without torch.compile. A gain that anything
    else reads, in another graph or between graphs, is left: there it would be off by r.

    Args:
        model: the trained module with its MX casts; its gains change until
            :meth:`ToRMSNorm.undo`. Do not compile it with the estimate afterwards.
        batches: an iterable of batches, as for :func:`mxnorm_pass.fidelity`.
        config: the options that it was trained with (``load_settings(...).config()``); by default
            those of the backend ``"mxnorm"``.
        loss_fn: ``loss_fn(output, batch)``; by default what the output calls ``loss``.

    Returns:
        The handle: ratios, norms left with the reason, losses, and the way back.

    Raises:
        ValueError: for ``rms="exact"``, no batches, or a model without a site.
        RuntimeError: where a gain is baked already, and was not undone: it would be divided twice.
    """
    chosen = MXNormConfig.checked(config)
    if chosen.rms == "exact":
        raise ValueError("config.rms is 'exact': such a model runs on plain RMSNorm as it is")
    target, given = original(model), repeatable(batches)
    if not len(given):
        raise ValueError("batches is empty")
    watch = _Watch()
    handle = ToRMSNorm(target)
    estimated = []
    with Tapped(target, chosen) as tapped:
        for batch in given:
            output = tapped.run(batch, "estimate", watch)
            _refuse_baked(target, watch.gains)
            estimated.append(loss_of(output, batch, loss_fn))
    handle.loss_estimate = _mean(estimated)
    raw = Reads(tapped.parameters.tensors)
    with raw_reads(raw):
        handle.loss_unbaked = _plain_loss(target, given, loss_fn)
    declined = {site.norm: site.reason for site in tapped.report.sites if site.status == "declined"}
    try:
        for name, gain in watch.gains.items():
            others = [*tapped.other_reads(name), *raw.by_name.get(name, [])]
            _bake(handle, target, name, gain, declined, list(dict.fromkeys(others)))
        for norm, why in watch.without.items():
            handle.left.setdefault(norm, why)
        if handle.loss_unbaked is not None:
            handle.loss_baked = _plain_loss(target, given, loss_fn)
    except BaseException:
        handle.undo()
        raise
    return handle


def _owner(model: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and what it calls it."""
    path, _, name = parameter.rpartition(".")
    return model.get_submodule(path), name


def _refuse_baked(model: nn.Module, gains: Iterable[str]) -> None:
    twice = []
    for gain in gains:
        owner, name = _owner(model, gain)
        if name in baked(owner):
            twice.append(gain)
    if twice:
        raise RuntimeError(
            f"{', '.join(twice)}: to_rmsnorm has divided the gain by its ratio already, and would "
            "do it twice: undo() the first run, or load the trained checkpoint into a new model"
        )


def _mean(losses: list[float | None]) -> float | None:
    values = [loss for loss in losses if loss is not None]
    return sum(values) / len(values) if values else None


def _plain_loss(model: nn.Module, batches: Any, loss_fn: LossFn | None) -> float | None:
    with evaluating(model), torch.random.fork_rng():
        return _mean([loss_of(call(model, batch), batch, loss_fn) for batch in batches])


@dataclass
class _Gain:
    """The rows of every norm that one parameter scales."""

    kind: str
    norms: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ratios: dict[str, LogHistogram] = field(default_factory=dict)


class _Watch:
    def __init__(self) -> None:
        self.gains: dict[str, _Gain] = {}
        self.without: dict[str, str] = {}

    def rows(self, rows: Rows) -> None:
        site, options = rows.site, rows.options
        if options.rms == "exact":
            return
        if not rows.gains:
            none = site.spec["gain"] == "none"
            self.without[site.norm] = "it has no gain" if none else "its gain is no parameter"
            return
        gain = self.gains.setdefault(rows.gains[0], _Gain(site.spec["gain"]))
        gain.names = rows.gains
        if gain.kind != site.spec["gain"]:
            gain.kind = "other"
        if site.norm not in gain.norms:
            gain.norms.append(site.norm)
        block, p = rows.cast.block_size, 1 if options.rms == "p1" else 2
        if site.norm not in gain.ratios:
            ends = ratio_ends(options.rms, options.correction, rows.x.shape[-1], block)
            gain.ratios[site.norm] = LogHistogram(min(ends[0], 0.99), max(ends[1], 1.01))
        true, power = mean_squares(rows.x, block, p)
        good = true.isfinite() & power.isfinite() & (power > 0)
        square = power[good] * options.correction**2 + rows.eps
        gain.ratios[site.norm].add((square / (true[good] + rows.eps)).sqrt())

    def matmul(self, handed: Any, consumer: str, weight: Tensor) -> None:
        """Nothing that a ratio depends on."""


def _bake(
    handle: ToRMSNorm,
    model: nn.Module,
    name: str,
    gain: _Gain,
    declined: dict[str, str | None],
    others: list[str],
) -> None:
    # Graphs of layers that are compiled one by one call all their norms alike.
    norms = ", ".join(dict.fromkeys(place(norm, name) for norm in gain.norms))
    why = ""
    partly = [norm for norm in gain.norms if norm in declined]
    if len(gain.names) > 1 or len(gain.ratios) > 1:
        why = f"its gain is shared: {', '.join(gain.names)}"
    elif partly:
        why = f"it is estimated in part: {declined[partly[0]]} where it is not"
    elif gain.kind not in ("w", "1+w"):
        why = f"its gain is made of {name} in another form than w or 1+w"
    elif others:
        why = f"its gain is also read where nothing is estimated: by {', '.join(others[:3])}"
    elif not next(iter(gain.ratios.values())).count:
        why = "it saw no rows but zeros, NaN and Inf"
    if why:
        handle.left[norms] = why
        return
    ratios = next(iter(gain.ratios.values()))
    ratio = ratios.quantile(0.5)

    def divided(stored: Tensor) -> Tensor:
        return gain_values(gain.kind, stored) / ratio - (1.0 if gain.kind == "1+w" else 0.0)

    owner, own_name = _owner(model, name)
    handle.mark(owner, own_name)
    rounding = handle.overwrite(name, getattr(owner, own_name), divided)
    handle.gains.append(BakedGain(norms, name, ratio, ratios.sd / ratio, ratios.count, rounding))
