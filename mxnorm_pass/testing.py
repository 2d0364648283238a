"""For the tests of models that rely on the pass: assert what it rewrites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxnorm_pass.backend import explain
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.report import Report


def assert_rewrites(
    model: Callable[..., Any],
    inputs: Any,
    n: int,
    *,
    training: bool | None = None,
    config: MXNormConfig | None = None,
) -> Report:
    """Assert that exactly ``n`` sites of a model are rewritten; no code is generated.

    Args:
        model: a module or function.
        inputs: a mapping of keyword inputs, a sequence of positional inputs, or a single input.
        n: the number of rewritten sites over all graphs.
        training: see :func:`mxnorm_pass.explain`.
        config: options.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: with the table of sites, where the number differs.
    """
    if isinstance(inputs, Mapping):
        report = explain(model, training=training, config=config, **inputs)
    elif isinstance(inputs, Sequence):
        report = explain(model, *inputs, training=training, config=config)
    else:
        report = explain(model, inputs, training=training, config=config)
    if report.rewritten != n:
        raise AssertionError(f"{report.rewritten} sites were rewritten, expected {n}\n{report}")
    return report
