"""Reports kept on disk beside torch's compile caches.

On a cache hit torch does not call the pass, so a report of that graph must come from the time when
it was compiled. Keys cover what AOTAutograd's own key covers as far as a report depends on it; a
stale or missing entry costs the report's rows, never a wrong result.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from mxnorm_pass import compat
from mxnorm_pass.recognise.paths import places
from mxnorm_pass.report.report import GraphReport, Report

log = logging.getLogger(__name__)


def key(gm: GraphModule, example_inputs: Sequence[Any], identity: str) -> str | None:
    """Hash of a Dynamo graph, of what is known of its inputs, and of the pass.

    None where that cannot be had: a report is not worth a failing compile.
    """
    try:
        return _key(gm, example_inputs, identity)
    except Exception:
        log.warning("no key for the report of a graph; it will not be kept", exc_info=True)
        return None


def _key(gm: GraphModule, example_inputs: Sequence[Any], identity: str) -> str:
    digest = hashlib.sha256(identity.encode())
    digest.update(torch.__version__.encode())
    # What a trace depends on and the graph does not say.
    digest.update(repr((torch.is_grad_enabled(), compat.autocast_state())).encode())
    # A norm without a gain leaves its path in no parameter's name.
    digest.update(repr(places(gm)).encode())
    digest.update(gm.print_readable(print_output=False).encode())
    for value in example_inputs:
        digest.update(_describe(value).encode())
    for name, value in (*gm.named_parameters(), *gm.named_buffers()):
        digest.update(f"{name}{_describe(value)}".encode())
    return digest.hexdigest()


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}:{value}"
    parts = [
        type(value).__name__,
        str(tuple(value.shape)),
        str(value.dtype),
        str(value.device),
        str(value.requires_grad),
    ]
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        # A wrapper subclass: what it wraps, and how (torchao keeps the cast's options there).
        names, context = flatten()
        parts.append(repr(context))
        parts.extend(_describe(getattr(value, name)) for name in names)
    return "|".join(parts)


def _path(name: str) -> Path:
    return Path(compat.cache_dir()) / "mxnorm" / f"{name}.json"


def save(name: str | None, graphs: Sequence[GraphReport]) -> None:
    """Write atomically; a full or read-only disk costs the entry, not the compile."""
    if name is None:
        return
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(Report(list(graphs)).to_json())
        os.replace(temporary, path)
    except OSError as error:
        log.warning("could not keep the report of a compiled graph: %s", error)


def load(name: str | None) -> list[GraphReport]:
    """The graphs under a key; none where there is no readable entry."""
    if name is None:
        return []
    try:
        return Report.from_json(_path(name).read_text()).graphs
    except (OSError, ValueError, TypeError, KeyError):
        return []
