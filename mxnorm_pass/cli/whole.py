"""From a trace of each kind of layer to what holds for the whole model."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from mxnorm_pass.backend import explain
from mxnorm_pass.choices import idle
from mxnorm_pass.cli.errors import ModelError, brief
from mxnorm_pass.cli.from_config import Built, make_inputs
from mxnorm_pass.cli.groups import (
    Left,
    SiteGroup,
    Unread,
    left_alone,
    linking,
    site_groups,
    unread,
    used,
)
from mxnorm_pass.cli.layers import Choice, Cut, Layers, find_layers
from mxnorm_pass.cli.quantise import Chooser, Format, quantise_
from mxnorm_pass.cli.readers import Readers
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.report import Report

MOST_LAYERS = 12
"""Layers that are traced one by one where equal ones cannot be skipped."""


@dataclass
class Whole:
    """What would be rewritten in a whole model.

    Attributes:
        name: where it was read from.
        cls: class of the model.
        parameters: their number.
        mode: ``training`` or ``inference``.
        cast: which of torchao's casts the linears have.
        tokens: rows of the model's input.
        layers: kinds of layers.
        sites: rewritten and declined sites, grouped.
        without: norms that feed no cast.
        quantised: number of linears with a cast.
        left: linears without one.
        report: of the traced layers.
        notes: what else a reader should know.
        seconds: for building and tracing.
    """

    name: str
    cls: str
    parameters: int
    mode: str
    cast: str
    tokens: int
    layers: Layers
    sites: list[SiteGroup]
    without: list[Unread]
    quantised: int
    left: list[Left]
    report: Report
    notes: list[str]
    seconds: float

    @property
    def rewritten(self) -> int:
        """Rewritten sites of the whole model."""
        return sum(g.count for g in self.sites if g.status == "rewritten")

    @property
    def declined(self) -> int:
        """Sites of the whole model that are left alone."""
        return sum(g.count for g in self.sites if g.status == "declined")

    def describe(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "model": {"config": self.name, "class": self.cls, "parameters": self.parameters},
            "mode": self.mode,
            "cast": self.cast,
            "tokens": self.tokens,
            "layers": [asdict(kind) for kind in self.layers.kinds],
            "rewritten": self.rewritten,
            "declined": self.declined,
            "sites": [group.describe() for group in self.sites],
            "norms_without_a_site": [asdict(u) for u in self.without],
            "linears": {
                "quantised": self.quantised,
                "left": [asdict(left) for left in self.left],
            },
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
        }


def explain_config(
    built: Built,
    name: str,
    fmt: Format,
    config: MXNormConfig,
    *,
    training: bool,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    skip: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Whole:
    """Quantise a model, trace each kind of its layers once, and count for all of them.

    Raises:
        ModelError: where it cannot be traced.
    """
    start = time.perf_counter()
    model = built.model.train(training)
    parameters = built.parameters
    choose = Chooser(built.config, fmt, skip, also)
    layers = find_layers(model, _choice(choose, config))
    verdicts = {
        path: choose(path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    notes = [f"no linear's path matches {glob!r}" for glob in choose.unused]
    inputs = _inputs(model, make_inputs(built, batch, seq, dtype))
    notes += _cut(model, layers, inputs)
    present = {path for path, _ in model.named_modules()}
    chosen = [path for path, verdict in verdicts.items() if verdict.chosen and path in present]
    cast = quantise_(model, chosen, fmt, training)
    readers = Readers(model)
    report = _trace(model, inputs, training, config, readers)
    _idle_in_whole(report, config, layers)
    quantised = used(layers, verdicts, readers.reached)
    return Whole(
        name=name,
        cls=type(model).__name__,
        parameters=parameters,
        mode="training" if training else "inference",
        cast=cast,
        tokens=batch * seq,
        layers=layers,
        sites=site_groups(report, layers, readers, quantised),
        without=unread(report, layers, readers, quantised),
        quantised=len(quantised),
        left=left_alone(layers, verdicts, quantised, readers.reached),
        report=report,
        notes=[*built.notes, *notes, *_warnings(report), *_lower_bound(report, layers, readers)],
        seconds=time.perf_counter() - start,
    )


def _idle_in_whole(report: Report, config: MXNormConfig, layers: Layers) -> None:
    """Warn of choices that the whole model does not meet, in place of what the trace does not."""
    paths = [site.norm for site in report.sites]
    ids = [site.id for site in report.sites]
    traced = idle(config, paths, ids)
    numbered = [i.rpartition("#") for i in ids]
    whole = idle(
        config,
        [other for path in paths for other in layers.alike(path)],
        [f"{other}#{n}" for path, _, n in numbered for other in layers.alike(path)],
    )
    report.warnings[:] = [w for w in report.warnings if w not in traced] + whole


def _lower_bound(report: Report, layers: Layers, readers: Readers) -> list[str]:
    norms = linking(report, layers, readers)
    if not norms:
        return []
    return [
        f"{len(norms)} traced site(s) join two layers ({norms[0]}) of a stack whose layers differ: "
        "what is behind the layers of one kind was not traced, so the number is a lower bound"
    ]


def _choice(choose: Chooser, config: MXNormConfig) -> Choice:
    """What the options say about a module: equal layers have to agree in it."""

    def choice(path: str, module: nn.Module) -> object:
        if isinstance(module, nn.Linear):
            return choose(path, module).chosen
        if any(module.children()):
            return None
        off = [site for site in config.off if site.rpartition("#")[0] == path]
        return config.selects(path), config.rms_of(path), [s.rpartition("#")[2] for s in off]

    return choice


def _inputs(model: nn.Module, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The first inputs with which the forward does not fail for want of one."""
    for inputs in choices[:-1]:
        try:
            with torch.no_grad():
                model(**inputs)
        except (AttributeError, TypeError, ValueError):
            continue
        except Exception:
            # Some models can be traced on the meta device, but not run there.
            return inputs
        return inputs
    return choices[-1]


def _cut(model: nn.Module, layers: Layers, inputs: dict[str, Any]) -> list[str]:
    """Leave only the layers to trace in the model; says where that cannot be done."""
    cut = Cut(model, layers)

    def run() -> object:
        with torch.no_grad():
            return model(**inputs)

    if cut.learn(run):
        return []
    cut.restore()
    count = sum(len(kind.members) for kind in layers.kinds)
    if count > MOST_LAYERS:
        raise ModelError(
            f"a layer of {type(model).__name__} returns something else than it is given, so equal "
            f"layers cannot be skipped, and {count} are too many to trace one by one; lower the "
            f"number of layers in the file to {MOST_LAYERS} or fewer"
        )
    return ["equal layers could not be skipped: each was traced"]


def _trace(
    model: nn.Module,
    inputs: dict[str, Any],
    training: bool,
    config: MXNormConfig,
    readers: Readers,
) -> Report:
    # What is on the hook runs ahead of our pass, on the same graphs. Behind it, torch would put
    # empty tensors in the place of outputs on the meta device, in front of their own readers.
    hook = torch._inductor.config.patch(
        joint_custom_pre_pass=readers, joint_graph_constant_folding=False
    )
    try:
        with hook, warnings.catch_warnings():
            # The notes have the advice on checkpoints.
            warnings.filterwarnings("ignore", message="mxnorm: this inference graph")
            return explain(model, training=training, config=config, **inputs)
    except Exception as error:
        raise ModelError(f"{type(model).__name__} cannot be traced: {brief(error)}") from error


_BIAS = re.compile(r"(.+) has a bias, which (.+)")


def _warnings(report: Report) -> list[str]:
    """The report's warnings; those on biases as one."""
    found = [_BIAS.fullmatch(w) for w in report.warnings]
    names = sorted({m[1].rpartition(".")[2] for m in found if m})
    said = [w for w, m in zip(report.warnings, found, strict=True) if m is None]
    if names:
        what = next(m[2] for m in found if m)
        said.append(f"biases of {', '.join(names)}: {what} them")
    if len(report.graphs) > 1:
        said.append(
            f"torch.compile broke the model into {len(report.graphs)} graphs: a norm and a cast on "
            "two sides of a break are no site"
        )
    return said
