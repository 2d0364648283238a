"""Which site's rewrite makes a check fail: delta debugging over the sites of a script.

The check runs in a process of its own each time, with some sites switched off through
``MXNORM_OFF``; nothing of the script has to change. The switches of the caller's environment would
hide sites from the search, so no run inherits them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mxnorm_pass.choices import DISABLE, OFF, disabled

# How far it came goes into a file: a status or a line of output could be the script's own.
_CHECK = """
import importlib.util, os, pathlib, sys
script, name, folder = sys.argv[1:]
stage = pathlib.Path(os.environ.pop("_MXNORM_STAGE", os.devnull))
sys.argv[:] = [script]
spec = importlib.util.spec_from_file_location("__mxnorm_check__", script)
module = importlib.util.module_from_spec(spec)
sys.modules["__mxnorm_check__"] = module
sys.path[0] = folder
try:
    spec.loader.exec_module(module)
except (Exception, SystemExit) as error:
    stage.write_text(f"raised {type(error).__name__}: {error}", errors="replace")
    raise
function = getattr(module, name, None)
stage.write_text("called" if callable(function) else "missing")
result = function()
sys.exit(0 if result is None or result else 1)
"""


class BisectError(RuntimeError):
    """The check does not fail because of a site, so there is nothing to find."""


class ScriptError(RuntimeError):
    """The script is no Python, or fails before its check is called."""


@dataclass
class Bisection:
    """What :func:`bisect` found.

    Attributes:
        sites: ids of the least set of sites found with which the check fails while all others are
            off: leave out any one of them and it passes.
        tried: how often the check was run.
        all_sites: ids of all sites that the script rewrites.
    """

    sites: list[str]
    tried: int
    all_sites: list[str] = field(default_factory=list)

    @property
    def advice(self) -> str:
        """What to do with it."""
        off = ", ".join(map(repr, self.sites))
        return (
            f"switch off: MXNormConfig(off=({off},)) or MXNORM_OFF={','.join(self.sites)}; keep "
            "the true RMS instead: MXNormConfig(exact=(norm path, ...))"
        )


def bisect(
    target: str,
    args: Sequence[str] = (),
    *,
    timeout: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Bisection:
    """The sites whose rewrite makes a check fail.

    Args:
        target: ``script.py``, which fails by its exit status, or ``script.py:check``, a function
            without arguments, which fails by raising or by returning something false other than
            None. It compiles the model itself, with any of this package's ways in.
        args: command-line arguments of the script; none for a function.
        timeout: seconds after which a run counts as failed; None waits.
        progress: called with a line per run, and with one for ``MXNORM_DISABLE`` or ``MXNORM_OFF``
            in the environment, which the runs do not get. What ``MXNormConfig(off=...)`` names in
            the script stays off.

    Returns:
        The sites, by halving (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing
        input", 2002): about ``2 log2(n)`` runs for one bad site among n.

    Raises:
        ValueError: where the script or its function is missing, the function's name is empty, or a
            function is given arguments.
        ScriptError: where the script has a syntax error, or fails before its function is called.
        BisectError: where the check fails with the pass off as well, passes with it on, or no site
            is rewritten; the message holds the end of the output of a check that fails.
    """
    return _Search(target, list(args), timeout, progress).run()


class _Search:
    def __init__(
        self,
        target: str,
        args: list[str],
        timeout: float | None,
        progress: Callable[[str], None],
    ) -> None:
        self.script, self.function = _target(target, args)
        self.command = _command(self.script, self.function, args)
        self.timeout = timeout
        self.progress = progress
        self.known: dict[frozenset[str], bool] = {}
        self.tried = 0
        self.output = ""

    def run(self) -> Bisection:
        for name, value in _switches().items():
            self.progress(f"{name}={value} of the environment is left out: every site takes part")
        with tempfile.TemporaryDirectory() as folder:
            stage = Path(folder, "stage")
            stage.touch()
            passes = self._passes({DISABLE: "1", "_MXNORM_STAGE": str(stage)}, "the pass off")
            self._check_called(stage.read_text(errors="replace"))
        if not passes:
            raise BisectError(f"the check fails with the pass off as well:\n{self.output}")
        with tempfile.TemporaryDirectory() as folder:
            passes = self._passes({"MXNORM_DUMP": folder}, "every site on")
            self.sites, declined = _sites(Path(folder))
        if passes and self.sites:
            raise BisectError(f"the check passes with all {len(self.sites)} sites rewritten")
        if passes:
            raise BisectError(
                f"no site was rewritten, {len(declined)} declined: "
                f"{', '.join(sorted(set(declined.values())))}"
                if declined
                else "no site was rewritten: does the check compile with backend mxnorm?"
            )
        if not self.sites:
            raise BisectError(
                f"the check fails and no site is rewritten before it does:\n{self.output}"
            )
        if self._fails(frozenset()):
            raise BisectError(
                f"the check fails with all {len(self.sites)} sites off, by whatever else the "
                f"backend does:\n{self.output}"
            )
        self.known[frozenset(self.sites)] = True
        found = self._minimise(self.sites)
        return Bisection(found, self.tried, self.sites)

    def _check_called(self, stage: str) -> None:
        """Raise where a function was not called, so that the run says nothing of it."""
        if stage == "missing":
            raise ValueError(f"{self.script} has no function {self.function!r}")
        if stage.startswith("raised"):
            raise ScriptError(f"{self.script} {' '.join(stage.split())[:400]}")

    def _minimise(self, sites: list[str]) -> list[str]:
        """ddmin: halves, then their complements, then finer parts."""
        parts = 2
        while len(sites) > 1:
            size = -(-len(sites) // parts)
            pieces = [sites[i : i + size] for i in range(0, len(sites), size)]
            rests = [[s for s in sites if s not in piece] for piece in pieces]
            for smaller in (*pieces, *(rests if len(pieces) > 2 else ())):
                if self._fails(frozenset(smaller)):
                    parts = 2 if smaller in pieces else max(parts - 1, 2)
                    sites = smaller
                    break
            else:
                if size == 1:
                    break
                parts = min(2 * parts, len(sites))
        return sites

    def _fails(self, on: frozenset[str]) -> bool:
        if on not in self.known:
            # A line end behind the last one too: an id may hold a comma.
            off = "\n".join((*(site for site in self.sites if site not in on), ""))
            what = f"{len(on)} of {len(self.sites)} sites on"
            self.known[on] = not self._passes({OFF: off}, what)
        return self.known[on]

    def _passes(self, changes: dict[str, str], what: str) -> bool:
        # A graph taken from a cache calls no pass, and would leave no dump.
        caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        outside = {k: v for k, v in os.environ.items() if k not in (DISABLE, OFF)}
        self.tried += 1
        try:
            done = subprocess.run(
                self.command,
                env={**outside, **caches, **changes},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=self.timeout,
                check=False,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            status, output = -1, f"no end after {self.timeout} s"
        self.output = output[-2000:]
        self.progress(f"run {self.tried}: {what}: {'passes' if status == 0 else 'fails'}")
        return status == 0


def _target(target: str, args: list[str]) -> tuple[Path, str]:
    """The script and its function, "" for none; what is wrong without running it is said."""
    # A path may hold colons itself: a function is what stands behind the script's name.
    script, colon, function = target.rpartition(":")
    whole = not colon or Path(target).is_file()
    path = Path(target if whole else script)
    if not path.is_file() or not (whole or function):
        raise ValueError(
            f"{target!r}: expected script.py or script.py:check with a readable script"
        )
    if function and not whole and args:
        raise ValueError(f"{target!r} is a function and takes no arguments: {args}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ScriptError(f"{path} raised {type(error).__name__}: {error}") from error
    return path, "" if whole else function


def _command(script: Path, function: str, args: list[str]) -> list[str]:
    if not function:
        return [sys.executable, str(script), *args]
    return [sys.executable, "-c", _CHECK, str(script), function, str(script.parent.resolve())]


def _switches() -> dict[str, str]:
    """Those of the environment that switch sites off."""
    found = {DISABLE: os.environ[DISABLE]} if disabled() else {}
    return {**found, OFF: os.environ[OFF]} if os.environ.get(OFF) else found


def _sites(folder: Path) -> tuple[list[str], dict[str, str]]:
    """From a dump: ids of the rewritten sites; those of the others with the reason."""
    ids: list[str] = []
    declined: dict[str, str] = {}
    for path in sorted(folder.glob("rank_*/graph_*/sites.json")):
        for graph in json.loads(path.read_text())["graphs"]:
            for site in graph["sites"]:
                if site["status"] == "rewritten":
                    ids.append(site["id"])
                else:
                    declined[site["id"]] = str(site["reason"])
    return list(dict.fromkeys(ids)), declined
