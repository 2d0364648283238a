"""The pass: find -> recognise -> rewrite -> report."""

from __future__ import annotations

import hashlib
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from mxnorm_pass import compat
from mxnorm_pass.choices import Remarks, disabled, leave_alone, switched_off
from mxnorm_pass.compat import CustomGraphPass, stable_topological_sort, unset_fake_temporarily
from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.formats import Cast
from mxnorm_pass.ops import kernels
from mxnorm_pass.reasons import Decline
from mxnorm_pass.recognise import Found, Site, aten, find_sites, opaque
from mxnorm_pass.recognise.copies import read_originals
from mxnorm_pass.recognise.halves import tag_backward
from mxnorm_pass.report import GraphReport, Report, RewriteError, SiteReport
from mxnorm_pass.report.dump import Dump
from mxnorm_pass.report.subgraph import Camera
from mxnorm_pass.rewrite import (
    Applied,
    Edit,
    absorb,
    residual_sum,
    rewrite_columns,
    rewrite_site,
)

log = logging.getLogger(__name__)


class MXNormPass(CustomGraphPass):
    """Rewrites RMSNorm -> MX cast -> matmul into MXNorm on a joint or an inference graph.

    Made for Inductor's ``joint_custom_pre_pass`` (inference graphs on ``post_grad_custom_pre_pass``
    work as well). Idempotent and deterministic; its cost is linear in the graph.

    Attributes:
        config: the options.
        previous: passes that were on the hook before; they run first.
        report: what was done, one entry per graph, kept across calls.
        advises: whether to warn of what a checkpoint trained with RMSNorm wants.
        places: module paths of the graph that is about to be compiled, where somebody knows them:
            torch's keys leave them out, and choices by path depend on them.
    """

    advises = True

    def __init__(
        self,
        config: MXNormConfig | None = None,
        previous: Sequence[Callable[[Graph], None]] = (),
    ) -> None:
        self.config = MXNormConfig.checked(config)
        self.previous = tuple(previous)
        self.report = Report()
        self._remarks = Remarks(self.report, advise=self.advises)
        self.places: tuple[str, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MXNormPass:
        """The pass itself: AOTInductor copies its options, and this report is the user's."""
        return self

    def __call__(self, graph: Graph) -> None:
        """Rewrite in place.

        Raises:
            RewriteError: where ``require_rewrites`` is not met.
            ValueError: for a value of ``MXNORM_KERNEL`` that is not allowed.
        """
        # The user's to mend, so said at once: not a failure to be contained.
        kernels.chosen()
        for earlier in self.previous:
            earlier(graph)
        result = self.apply(graph)
        self._remarks.add(self.config, [result])
        self.require(result, self.config.require_rewrites)

    def apply(self, graph: Graph) -> GraphReport:
        """Rewrite one graph in place and say what was done; raises under ``strict`` only."""
        if compat.in_compiled_autograd():
            # A backward whose forward was seen before: what it casts are gradients, and what it
            # recomputes has to stay what that forward computed.
            return GraphReport(training=True)
        start = time.perf_counter()
        training = is_joint(graph)
        result = GraphReport(training=training)
        dump = Dump(self.config.dump_dir, graph)
        try:
            tag_backward(graph)
            read_originals(graph)
            # The hook runs under FakeTensorMode; probes are real numbers.
            with unset_fake_temporarily(), torch.no_grad():
                found = find_sites(graph, self.config)
            leave_alone(found, self.config)
            camera = Camera(graph)
            camera.before(found.sites, found.declined)
            self._rewrite(graph, found, result, training)
            camera.after(result)
        except Exception:
            if self.config.strict:
                raise
            log.exception("the pass failed on a whole graph, which stays as it was")
            result.failure = traceback.format_exc()
        result.seconds = time.perf_counter() - start
        dump.after(graph, result)
        self._announce(result)
        return result

    def _rewrite(self, graph: Graph, found: Found, result: GraphReport, training: bool) -> None:
        result.plain_casts = found.plain_casts
        calibration = self.config.calibration()
        edits: list[Edit] = []
        ops: list[tuple[Node, SiteReport]] = []
        for site in found.sites:
            edit = Edit(graph)
            more: list[Edit] = []
            try:
                applied = rewrite_site(
                    edit, site, self.config, training=training, calibration=calibration
                )
                entry = _rewritten_site(site, applied)
                colwise = self._columns(graph, site, applied.op, more)
            except Decline as decline:
                _roll_back(edit, *more)
                result.sites.append(_declined_site(site, decline))
                continue
            except Exception:
                _roll_back(edit, *more)
                if self.config.strict:
                    raise
                log.exception("rewriting %s failed; it stays as it was", site.path)
                why = Decline("internal_error", traceback.format_exc())
                result.sites.append(_declined_site(site, why))
                continue
            result.sites.append(entry)
            ops.append((applied.op, entry))
            edits += [edit, *more]
            entry.spec["colwise"] = colwise
            entry.spec["colwise_reason"] = _reasons(site)
        # What an op depends on is known when all are there.
        for op, entry in ops:
            entry.spec["residual"] = self._absorb(graph, op, edits)
        for declined in found.declined:
            result.sites.append(SiteReport.declined(declined))
        if edits:
            try:
                # A gain computed after its norm, or a size read off a later node, comes after the
                # op.
                stable_topological_sort(graph)
            except Exception:
                # Nothing is erased yet: take all back, and put the nodes where they were.
                _roll_back(*edits)
                stable_topological_sort(graph)
                result.sites.clear()
                raise
        # Sites may share a norm: nothing is erased before all are rewritten.
        for edit in edits:
            edit.finish()
        if self.config.strict:
            graph.lint()

    def _columns(
        self, graph: Graph, site: Site, op: Node, edits: list[Edit]
    ) -> list[dict[str, Any]] | None:
        """Rewrite the casts of the norm's output along tokens; one that fails stays as it is.

        Where its rows are sent for it, the whole site must: else codes are sent beside them.
        """
        done = []
        for columns in site.columns.found:
            edit = Edit(graph)
            try:
                rewrite_columns(edit, site, columns, op)
            except Decline as decline:
                edit.rollback()
                if columns.gathered:
                    raise
                site.columns.declined.append(decline)
                continue
            except Exception:
                edit.rollback()
                if self.config.strict or columns.gathered:
                    raise
                log.exception("the casts of %s along tokens stay as they are", site.path)
                why = Decline("internal_error", traceback.format_exc())
                site.columns.declined.append(why)
                continue
            edits.append(edit)
            done.append({**_cast_spec(columns.cast), "casts": len(columns.readers)})
        return done or None

    def _absorb(self, graph: Graph, op: Node, edits: list[Edit]) -> bool:
        """Take the residual add in front of ``op`` in; on failure the site stays without."""
        edit = None
        try:
            total = residual_sum(op)
            if total is None:
                return False
            edit = Edit(graph)
            absorb(edit, op, total)
        except Exception:
            if edit is not None:
                edit.rollback()
            if self.config.strict:
                raise
            log.exception("the row of %s stays its operand", op.name)
            return False
        edits.append(edit)
        return True

    @staticmethod
    def require(result: GraphReport, required: int | None) -> None:
        """Raise :class:`RewriteError` where the graph has fewer rewritten sites than required.

        A backward that compiled autograd hands over belongs to a graph that was checked before.
        """
        if compat.in_compiled_autograd():
            return
        if required is not None and result.rewritten < required:
            raise RewriteError(
                f"{result.rewritten} of {required} required sites were rewritten in this graph\n"
                f"{Report([result])}"
            )

    def _announce(self, result: GraphReport) -> None:
        log.info("%s", result.summary())
        log.debug("%s", Report([result]))

    def uuid(self) -> Any | None:
        """Identity for torch's compile caches: sources, options, calibration, and earlier passes.

        None, which bypasses the caches, where an earlier pass has none, and where
        ``require_rewrites`` is set: on a cache hit no pass is called, so the promise could not be
        kept.
        """
        earlier = []
        for previous in self.previous:
            identity = previous.uuid() if isinstance(previous, CustomGraphPass) else None
            if identity is None:
                return None
            earlier.append(identity)
        if self.config.require_rewrites is not None:
            return None
        return self.identity(earlier)

    def identity(self, earlier: Sequence[Any] = ()) -> str:
        """The hash behind :meth:`uuid`, whatever the options."""
        digest = hashlib.sha256(_sources())
        # Whatever these say, the rewritten graph is the same.
        relevant = {
            name: value
            for name, value in self.config.describe().items()
            if name not in ("require_rewrites", "strict", "dump_dir")
        }
        digest.update(repr(sorted(relevant.items())).encode())
        fitted = self.config.calibration()
        digest.update(repr((sorted(fitted.items()), sorted(fitted.blocks.items()))).encode())
        off = sorted(switched_off(self.config))
        if off or self.config.by_path:
            digest.update(repr(self.places).encode())
        around = (list(earlier), disabled(), off, opaque.identity(), kernels.chosen())
        digest.update(repr(around).encode())
        return digest.hexdigest()


def _roll_back(*edits: Edit) -> None:
    for edit in reversed(edits):
        edit.rollback()


def is_joint(graph: Graph) -> bool:
    """A joint graph of forward and backward, as AOTAutograd makes it for training."""
    return any(
        node.name.startswith("tangents") if node.op == "placeholder" else aten.is_backward(node)
        for node in graph.nodes
    )


def _spec(site: Site) -> dict[str, Any]:
    norm = site.norm
    return {
        "eps": "tensor" if norm.eps_node is not None else norm.eps,
        "gain": norm.gain_kind,
        "k": site.k,
        **_cast_spec(site.cast),
    }


def _cast_spec(cast: Cast) -> dict[str, Any]:
    return {
        "format": cast.name,
        "block_size": cast.block_size,
        "element": cast.element,
        "scale_rule": cast.rule,
        "saturate": cast.saturate,
        "layout": cast.layout,
    }


def _rewritten_site(site: Site, applied: Applied) -> SiteReport:
    why = kernels.unusable(site.norm.x.meta["val"].device, site.k)
    return SiteReport(
        id=site.id,
        norm=site.path,
        consumers=site.consumers,
        status="rewritten",
        spec={
            **_spec(site),
            "gain_at": applied.gain_at,
            "rms": applied.rms,
            "correction": applied.correction,
            "rounding": applied.rounding,
            "kernel": "triton" if why is None else "aten",
            "kernel_reason": why,
            "tensor_scale": applied.tensor_scale,
            "gradient": applied.gradient,
        },
        also_read_by=site.also_read_by,
    )


def _reasons(site: Site) -> str | None:
    """Why casts along tokens were left alone; None where none was."""
    said = (f"{why.reason}: {why.detail}" for why in site.columns.declined)
    return "; ".join(dict.fromkeys(said)) or None


def _declined_site(site: Site, why: Decline) -> SiteReport:
    return SiteReport(
        id=site.id,
        norm=site.path,
        consumers=site.consumers,
        status="declined",
        reason=why.reason,
        detail=why.detail,
        spec=_spec(site),
        node="" if why.node is None else why.node.name,
    )


@cache
def _sources() -> bytes:
    """Hash of this package's sources: an edit must miss the caches."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.digest()
