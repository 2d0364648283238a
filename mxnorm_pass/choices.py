"""What a user chose by path, id or switch: whom it leaves alone, and where it meets nobody."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache

from mxnorm_pass.config import MXNormConfig, ids_in, unmatched
from mxnorm_pass.recognise import Declined, Found
from mxnorm_pass.report import GraphReport, Report, SiteReport

DISABLE = "MXNORM_DISABLE"
OFF = "MXNORM_OFF"

GAUSSIAN = (
    "Gaussian constant: a checkpoint trained with RMSNorm wants mxnorm_exact or a calibration"
)

# So many norms are named, where a calibration file has constants for more that are not there.
_NAMED = 3


def disabled() -> bool:
    """``MXNORM_DISABLE`` is set, and not to a word for no."""
    return os.environ.get(DISABLE, "").lower() not in ("", "0", "false", "no", "off")


def switched_off(config: MXNormConfig) -> frozenset[str]:
    """Ids of sites that the options or ``MXNORM_OFF`` switch off."""
    return frozenset((*config.off, *_off_outside()))


def leave_alone(found: Found, config: MXNormConfig) -> None:
    """Decline what the user switched off: every site, or those named."""
    off = switched_off(config)
    for site in list(found.sites):
        if disabled():
            reason, detail = "disabled", f"{DISABLE} is set"
        elif site.id in off:
            reason, detail = "switched_off", f"off or {OFF} names {site.id}"
        else:
            continue
        found.sites.remove(site)
        anchor = site.readers[0].cast.anchor
        found.declined.append(
            Declined(site.id, site.path, site.consumers, reason, detail, anchor=anchor)
        )


def idle(config: MXNormConfig, paths: Iterable[str], ids: Iterable[str]) -> list[str]:
    """Choices that no site answers to, a line each: a typo would go unnoticed.

    Args:
        config: the options.
        paths: module paths of the norms that sites were found at, declined ones included.
        ids: ids of those sites.
    """
    paths, ids = set(paths), set(ids)
    lines = [
        f"{name}={glob!r} matches no norm that feeds an MX cast"
        for name in ("include", "exclude", "exact")
        for glob in unmatched(getattr(config, name), paths)
    ]
    for name, chosen in (("off", config.off), (OFF, _off_outside())):
        lines += [
            f"{name}={i!r}: there is no such site" for i in dict.fromkeys(chosen) if i not in ids
        ]
    constants = config.calibration()
    strangers = sorted(constants.keys() - paths)
    if strangers:
        lines.append(
            f"correction={config.correction!r} has constants for norms that feed no cast: "
            + _named(strangers)
        )
    return lines


def unfitted(config: MXNormConfig, graphs: Sequence[GraphReport]) -> list[str]:
    """Norms that a calibration file has no constant for, and that are estimated all the same.

    Returns:
        No line or one.
    """
    if config.correction == "gaussian":
        return []
    estimated = {site.norm for graph in graphs for site in graph.sites if _estimates(site)}
    without = sorted(estimated - config.calibration().keys())
    if not without:
        return []
    return [
        f"correction={config.correction!r} has no constant for {len(without)} of {len(estimated)} "
        f"estimated norms, which take the Gaussian one: {_named(without)}"
    ]


def _named(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class Remarks:
    """Fills a report graph by graph, and keeps its warnings about the options true.

    A choice may be answered in any graph that was compiled under it, so what a report says about
    choices is what all its graphs together leave unanswered. ``advise``: of estimates in inference
    too, in the report and once as a Python warning.
    """

    def __init__(self, report: Report, *, advise: bool = True) -> None:
        self._report = report
        self._advise = advise
        self._under: dict[MXNormConfig, list[GraphReport]] = {}
        self._said: list[str] = []

    def add(self, config: MXNormConfig, graphs: Sequence[GraphReport]) -> None:
        """Append graphs that were compiled under ``config``."""
        # Of graphs that somebody took out of the report nothing is said any more.
        kept = {id(graph) for graph in self._report.graphs}
        for those in self._under.values():
            those[:] = [graph for graph in those if id(graph) in kept]
        self._report.graphs.extend(graphs)
        self._under.setdefault(config, []).extend(graphs)
        lines = [line for item in self._under.items() for line in _remarks(*item)]
        if self._advise and any(_wants_exact(*item) for item in self._under.items()):
            lines.append(GAUSSIAN)
        others = [line for line in self._report.warnings if line not in self._said]
        self._said = list(dict.fromkeys(lines))
        self._report.warnings[:] = [*others, *self._said]
        # Not by the pass, which torch does not call for a graph from its cache.
        if self._advise and _wants_exact(config, graphs):
            warn_once(f"mxnorm: this inference graph estimates the RMS. {GAUSSIAN}")
        for line in unfitted(config, graphs):
            warn_once(f"mxnorm: {line}")


def _remarks(config: MXNormConfig, graphs: Sequence[GraphReport]) -> list[str]:
    sites: list[SiteReport] = [site for graph in graphs for site in graph.sites]
    if not graphs or any(graph.failure for graph in graphs):
        # What sites a graph has that the pass failed on is not known.
        return []
    asked = idle(config, (site.norm for site in sites), (site.id for site in sites))
    return asked + unfitted(config, graphs)


def _wants_exact(config: MXNormConfig, graphs: Sequence[GraphReport]) -> bool:
    """Whether rows of a model that is in use are estimated with a constant not fitted to them."""
    return config.correction == "gaussian" and any(
        _estimates(site) for graph in graphs if not graph.training for site in graph.sites
    )


def _estimates(site: SiteReport) -> bool:
    return site.spec.get("rms") in ("p1", "p2")


@cache
def warn_once(message: str) -> None:
    """A Python warning, at the first call with this message."""
    warnings.warn(message, stacklevel=2)


def _off_outside() -> list[str]:
    return ids_in(os.environ.get(OFF, ""))
