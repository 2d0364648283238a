"""For inference: move each norm's gain into the weights of the linears that read it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mxnorm_pass.config import hit, strings, unmatched
from mxnorm_pass.trust.changes import Changes, OutputNoise, Rounding
from mxnorm_pass.trust.linears import find_gains
from mxnorm_pass.trust.reads import Reads, raw_reads
from mxnorm_pass.trust.tables import decibel, scope, table, wrap
from mxnorm_pass.trust.tracing import Parameters, call, evaluating, original, repeatable
from mxnorm_pass.trust.trial import Product, not_by_product
from mxnorm_pass.trust.uses import GainUse


@dataclass(frozen=True)
class FoldedLinear:
    """A weight that took a gain in.

    Attributes:
        linear: module path of the linear.
        weight: name of the weight.
        gain: name of the gain.
        rounding: what storing ``W * g`` in the weight's dtype added.
    """

    linear: str
    weight: str
    gain: str
    rounding: Rounding


@dataclass
class FoldedGain:
    """A gain, and what became of it.

    Attributes:
        gain: name of the parameter.
        norms: module paths of the norms that it scales.
        kind: ``w`` (set to ones) or ``1+w`` (set to zeros); empty where no graph shows the norm.
        linears: the linears that read the norm; none where there is none.
        why_left: empty where it was folded.
    """

    gain: str
    norms: list[str]
    kind: str
    linears: list[str]
    why_left: list[str] = field(default_factory=list)


class FoldedGains(Changes):
    """What :func:`fold_gains` did; ``print`` it. :meth:`undo`, or leaving the context, restores.

    Attributes:
        gains: every gain of an RMSNorm that the batches reach, folded or left.
        bare: module paths of RMSNorms with no parameter for a gain.
        linears: every weight that was changed, with its rounding.
        idle: globs that match no norm with a gain, as ``exclude='final'``.
        output_sqnr: outputs on the batches before, over their change, in dB (the rounding of all
            weights, through the whole model); inf for no change, nan where it was not asked for.
        tried: whether a trial confirmed that outputs depend on the gains and weights that were
            folded by their product alone; False where two equal runs differ, so that only the
            graphs say so.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.gains: list[FoldedGain] = []
        self.bare: list[str] = []
        self.linears: list[FoldedLinear] = []
        self.idle: list[str] = []
        self.output_sqnr = math.nan
        self.tried = True

    @property
    def folded(self) -> list[FoldedGain]:
        """Gains that are in the weights now."""
        return [gain for gain in self.gains if not gain.why_left]

    @property
    def left(self) -> list[FoldedGain]:
        """Gains that stay where they were, each with its reasons."""
        return [gain for gain in self.gains if gain.why_left]

    def __str__(self) -> str:
        state = "" if self.active or not self.folded else " (undone)"
        lines = [
            f"mxnorm fold_gains: {len(self.folded)} gain(s) folded into {len(self.linears)} "
            f"weight(s), {len(self.left)} left{state}"
        ]
        if self.linears:
            under = scope([line.linear for line in self.linears])
            rows = [("linear", "max ulp", "SQNR dB")]
            rows += [
                (
                    line.linear.removeprefix(f"{under}.") if under else line.linear,
                    f"{line.rounding.max_ulp:.2f}",
                    decibel(line.rounding.sqnr),
                )
                for line in self.linears
            ]
            lines += [f"linears under {under}:"] if under else []
            lines += table(rows)
        for gain in self.left:
            lines += wrap(f"{gain.gain}: left: {'; '.join(gain.why_left)}")
        for glob in self.idle:
            lines += wrap(f"warning: {glob} matches no norm with a gain")
        if not self.tried:
            lines += wrap(
                "warning: two equal runs give different outputs, so no trial could confirm that "
                "nothing else reads these gains and weights; only the graphs say so"
            )
        if not self.gains and self.bare:
            names = ", ".join(path or "?" for path in self.bare)
            lines += wrap(f"nothing to fold: no parameter is the gain of an RMSNorm here ({names})")
        elif not self.gains:
            lines += wrap("nothing to fold: the batches reach no RMSNorm in this model")
        if self.linears and not math.isnan(self.output_sqnr):
            lines.append(f"outputs before over their change: {decibel(self.output_sqnr)} dB")
        return "\n".join(lines)


def example_batches(model: nn.Module, batches: Any) -> Sequence[Any]:
    """The batches given, or those that a transformers model brings along.

    Raises:
        ValueError: where there are neither.
    """
    if batches is None:
        dummy = getattr(original(model), "dummy_inputs", None)
        if not dummy:
            raise ValueError("give batches to trace the model on: it brings no dummy_inputs")
        return [dummy]
    found = repeatable(batches)
    if not len(found):
        raise ValueError("batches is empty")
    return found


def fold_gains(
    model: nn.Module,
    batches: Any = None,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    compare: bool = True,
) -> FoldedGains:
    """Multiply each norm's gain into the weights that read it, in place, and set the gain to one.

    For a model that serves, before ``quantize_``: ``norm(x) * g @ W.T = norm(x) @ (W * g).T``. The
    model is traced on the batches; a gain is folded only if everything that is computed from it,
    in every graph, is the left side of a matmul whose weight is a parameter of two axes, stored in
    plain numbers, read by nobody else, and tied to nothing, and if nothing outside of the graphs
    reads either. Then a trial: with the gains multiplied by powers of two and the weights divided,
    which no rounding notices, no bit of the outputs may move. Else it stays, with the reason, also
    where no linear reads its norm or the norm is not understood; so does a gain of ones, as of a
    model that is folded already. Code that the batches do not reach is not seen: give batches
    that take every path.

    The model runs once more for each of these: the trial (twice; more often where it fails), and
    ``compare`` (before and after).

    Args:
        model: the module; its parameters change until :meth:`FoldedGains.undo`.
        batches: an iterable of batches, as for :func:`mxnorm_pass.fidelity`; by default the
            ``dummy_inputs`` of a transformers model.
        include: globs of norms' module paths to fold.
        exclude: globs of those to leave alone; wins over ``include``.
        compare: run the batches before and after, and report how the outputs differ.

    Returns:
        The handle: what was folded and left, the rounding added per linear, and the way back.

    Raises:
        ValueError: without batches, for something that is no module, or for globs that are no
            strings.
    """
    target = original(model)
    given = example_batches(target, batches)
    globs = {"include": strings("include", include), "exclude": strings("exclude", exclude)}
    found = find_gains(target, given)
    handle = FoldedGains(target)
    handle.bare = found.bare
    paths = [path for use in found.uses for path in use.norms]
    for name, chosen in globs.items():
        handle.idle += [f"{name}={glob!r}" for glob in unmatched(chosen, paths)]
    raw = Reads(found.parameters.tensors)
    with raw_reads(raw):
        before = _outputs(target, given)
    handle.gains = [_candidate(use, found.parameters, raw, **globs) for use in found.uses]
    kept = {e.gain: use for e, use in zip(handle.gains, found.uses, strict=True) if not e.why_left}
    _try_out(handle, lambda: _outputs(target, given), before, kept, found.parameters)
    try:
        for entry in handle.folded:
            _fold(handle, entry, kept[entry.gain], found.parameters)
        if compare:
            noise = OutputNoise()
            for old, new in zip(before, _outputs(target, given), strict=True):
                noise.add(old, new)
            handle.output_sqnr = noise.noise.sqnr
    except BaseException:
        handle.undo()
        raise
    return handle


def _outputs(model: nn.Module, batches: Sequence[Any]) -> list[Any]:
    """Of the model as it is, regions that are compiled on their own run eagerly."""
    eager = torch.compiler.set_stance("force_eager")
    with evaluating(model), eager, torch.random.fork_rng():
        return [call(model, batch) for batch in batches]


def gain_values(kind: str, stored: Tensor) -> Tensor:
    """The gain itself in float64: ``w`` or ``1 + w``."""
    return stored.detach().double() + (1.0 if kind == "1+w" else 0.0)


def _candidate(
    use: GainUse,
    parameters: Parameters,
    raw: Reads,
    include: Sequence[str],
    exclude: Sequence[str],
) -> FoldedGain:
    """The gain, with all reasons to leave it that need no trial."""
    entry = FoldedGain(use.gain, use.norms, use.kind, use.linears)
    entry.why_left.extend(use.blockers)
    for name in (use.gain, *dict.fromkeys(reader.weight for reader in use.readers)):
        if name in raw.by_name:
            entry.why_left.append(f"{name} leaves torch, by {', '.join(raw.by_name[name])}")
    if not all(hit(n, include) and not hit(n, exclude) for n in use.norms):
        entry.why_left.append("include/exclude leaves it out")
    if entry.why_left:
        return entry
    stored = parameters.tensors[use.gain]
    if bool((stored == (0.0 if entry.kind == "1+w" else 1.0)).all()):
        entry.why_left.append("nothing to fold: the gain is 1")
        return entry
    for name, product in _products(use, parameters).items():
        weight = parameters.tensors[name].detach()
        exact = product(weight)  # float64, as the gain
        if not bool((exact.to(weight.dtype).isfinite() | ~exact.isfinite()).all()):
            entry.why_left.append(f"{name} * gain overflows {weight.dtype}")
            break
    return entry


def _products(use: GainUse, parameters: Parameters) -> dict[str, functools.partial[Tensor]]:
    """By the name of each weight what makes its new values; a linear may be called twice."""
    gain = gain_values(use.kind, parameters.tensors[use.gain]).flatten()
    return {
        name: functools.partial(torch.mul, other=gain if axis == 1 else gain.unsqueeze(-1))
        for name, axis in _axes(use).items()
    }


def _axes(use: GainUse) -> dict[str, int]:
    return {reader.weight: reader.axis for reader in use.readers}


def _try_out(
    handle: FoldedGains,
    run: Callable[[], Any],
    before: Any,
    chosen: dict[str, GainUse],
    parameters: Parameters,
) -> None:
    """Leaves those gains that the outputs do not depend on as the graphs say."""
    tensors = parameters.tensors
    products = [
        Product(
            tensors[name],
            use.kind,
            [(tensors[weight], axis) for weight, axis in _axes(use).items()],
        )
        for name, use in chosen.items()
    ]
    failed = not_by_product(run, before, products) if products else []
    handle.tried = failed is not None
    names = list(chosen)
    strays = {names[i] for i in failed or []}
    for entry in handle.gains:
        if entry.gain in strays:
            entry.why_left.append(
                "the outputs change where it is doubled and its weights are halved: something "
                "that no graph shows reads one of them"
            )


def _fold(handle: FoldedGains, entry: FoldedGain, use: GainUse, parameters: Parameters) -> None:
    paths = {reader.weight: reader.path for reader in use.readers}
    for name, product in _products(use, parameters).items():
        rounding = handle.overwrite(name, parameters.tensors[name], product)
        handle.linears.append(FoldedLinear(paths[name], name, use.gain, rounding))
    neutral = 0.0 if entry.kind == "1+w" else 1.0
    handle.overwrite(
        use.gain,
        parameters.tensors[use.gain],
        lambda w: torch.full_like(w, neutral, dtype=torch.float64),
    )
