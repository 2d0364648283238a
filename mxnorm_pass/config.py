"""What a user can choose."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from mxnorm_pass.formats import BLOCK_SIZES
from mxnorm_pass.theory import constant_bounds

PREFIX = "mxnorm."

_CHOICES: dict[str, tuple[Any, ...]] = {
    "rms": ("mx", "exact"),
    "p": (1, 2),
    "gain": ("auto", "fold", "kernel"),
    "gradient": ("straight_through", "projected", "own"),
    "tensor_scale": ("dynamic", "bound"),
    "inner": ("inductor", "eager"),
}


def strings(name: str, value: Any) -> tuple[str, ...]:
    """The globs or ids that an option was given; one alone need be in no tuple."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Iterable) or not all(isinstance(v, str) for v in values):
        expected = "ids of sites" if name == "off" else "module-path globs"
        raise ValueError(f"{name}={value!r}: expected {expected} (strings)")
    return tuple(values)


class Constants(dict[str, float]):
    """Constants c by norm path.

    Attributes:
        blocks: the block size that a constant was fitted for, by norm path, where the file says it.
    """

    def __init__(self, constants: Mapping[str, float], blocks: Mapping[str, int]) -> None:
        super().__init__(constants)
        self.blocks = dict(blocks)


_WIDEST = 2**20
"""Elements of a row that a calibration file's constants are allowed to be of: it does not say."""


def _check_constant(file: Path, site: str, c: float, p: int, block: int | None) -> None:
    """Refuses a constant that is right for no row at all."""
    size = block or max(BLOCK_SIZES)
    low, high = constant_bounds(p, size, max(1, _WIDEST // size))
    # The rows it was fitted to were float32.
    if not low * 0.999 <= c <= high * 1.001:
        of = f"blocks of {block}" if block else f"blocks of up to {size}"
        of += f" in rows of up to {_WIDEST}" if p == 1 else ""
        raise ValueError(
            f"calibration file {file}: c = {c:g} at {site!r} is right for no row: with p={p} and "
            f"{of}, rms / (mean m^p)^(1/p) lies from {low:.4g} to {high:.4g}"
        )


def ids_in(variable: str) -> list[str]:
    """Ids in ``MXNORM_OFF``: by commas, or by lines where an id holds a comma itself."""
    parts = variable.split("\n" if "\n" in variable else ",")
    return [part.strip() for part in parts if part.strip()]


def matches(path: str, glob: str) -> bool:
    """Whether a glob means a module path; a path means itself, whatever characters it holds."""
    return path == glob or fnmatch.fnmatchcase(path, glob)


def hit(path: str, globs: Iterable[str]) -> bool:
    """Whether any of the globs means a module path."""
    return any(matches(path, glob) for glob in globs)


def unmatched(globs: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The globs that mean none of the paths; that for everything aside."""
    known = set(paths)
    return [g for g in globs if g != "*" and not any(matches(path, g) for path in known)]


@dataclass(frozen=True)
class MXNormConfig:
    """Options of the pass; every one has a default that is right for training from scratch.

    Attributes:
        rms: ``mx`` estimates the root mean square from the block absmax (arXiv 2603.13180);
            ``exact`` keeps the true one in the same op, for checkpoints trained with RMSNorm.
        p: power of the mean over block absmax values, 1 or 2.
        correction: ``gaussian``, or the path of a calibration file (JSON, see docs/design.md) with
            one constant per norm; norms that it does not list get the Gaussian one.
        gain: ``fold`` multiplies the gain into the weight before the weight's cast, ``kernel`` into
            the row inside the op; ``auto`` folds in training graphs and uses the op elsewhere.
            Where folding cannot be right (the weight comes already cast, or is shared) the op
            applies the gain.
        gradient: of the estimated root, in training: ``straight_through``, the paper's, is
            RMSNorm's formula with the estimate in it; ``projected`` is that without the part along
            the row, which RMSNorm's gradient has not either; ``own`` is the estimate's own, through
            the largest element of each block. :func:`mxnorm_pass.reference.input_gradient` states
            them, docs/train.md has what each costs. A norm whose backward is not understood is left
            alone (``gradient_form``).
        include: module-path globs of norms to rewrite.
        exclude: module-path globs of norms to leave alone; wins over ``include``.
        exact: module-path globs of norms that keep the true RMS under ``rms="mx"``; their gains
            stay in the op.
        off: ids of sites to leave alone, as reports name them (``layers.0.norm#0``); the variable
            ``MXNORM_OFF`` adds to them, separated by commas or lines.
        require_rewrites: raise :class:`mxnorm_pass.RewriteError` for a graph with fewer rewritten
            sites.
        strict: raise on an internal failure instead of leaving the site alone; check the graph
            after.
        tensor_scale: NVFP4's per-tensor scale, where the graph measures it: ``dynamic`` takes the
            maximum in a pass ahead of the op; ``bound`` puts a number there that no row can exceed,
            which needs no pass, lets the op take in the residual add, and keeps a NaN in its own
            row. Block scales lose range, not precision: see
            :func:`mxnorm_pass.theory.computed_bound`.
        dump_dir: folder for each graph before and after, their difference and the report, by rank;
            the variable ``MXNORM_DUMP`` names another.
        inner: ``inductor`` generates code; ``eager`` runs the same graphs without code generation.

    Raises:
        ValueError: for a value that is not allowed, naming those that are.
    """

    rms: Literal["mx", "exact"] = "mx"
    p: int = 2
    correction: str = "gaussian"
    gain: Literal["auto", "fold", "kernel"] = "auto"
    gradient: Literal["straight_through", "projected", "own"] = "straight_through"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    require_rewrites: int | None = None
    strict: bool = False
    tensor_scale: Literal["dynamic", "bound"] = "dynamic"
    dump_dir: str | None = None
    inner: Literal["inductor", "eager"] = "inductor"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or value not in allowed:
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        if self.rms == "exact" and self.gain == "fold":
            raise ValueError(
                "gain='fold' changes what the cast sees, which rms='exact' promises not to do: "
                "allowed with rms='exact' are 'auto', 'kernel'"
            )
        for name in ("include", "exclude", "exact", "off"):
            object.__setattr__(self, name, strings(name, getattr(self, name)))
        for site in self.off:
            if not re.fullmatch(r".+#\d+", site):
                raise ValueError(
                    f"off={site!r}: expected a site's id, '<norm path>#<n>', as reports have it"
                )
        required = self.require_rewrites
        if required is not None and (
            isinstance(required, bool) or not isinstance(required, int) or required < 0
        ):
            raise ValueError(f"require_rewrites={required!r}: expected None or an int >= 0")
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict={self.strict!r}: allowed are True, False")
        if not isinstance(self.correction, (str, Path)):
            raise ValueError(
                f"correction={self.correction!r}: expected 'gaussian' or a calibration file"
            )
        if not isinstance(self.dump_dir, (str, Path, type(None))):
            raise ValueError(f"dump_dir={self.dump_dir!r}: expected a folder, or None")
        object.__setattr__(self, "correction", str(self.correction))
        if self.correction != "gaussian":
            self.calibration()

    def selects(self, path: str) -> bool:
        """Whether ``include`` and ``exclude`` let the norm at ``path`` be rewritten."""
        return hit(path, self.include) and not hit(path, self.exclude)

    @property
    def by_path(self) -> bool:
        """Whether what is done to a norm depends on its module path."""
        chosen = self.include != ("*",) or self.exclude or self.exact or self.off
        return bool(chosen) or self.correction != "gaussian"

    def rms_of(self, path: str) -> str:
        """What the op does for the norm at ``path``: ``p1``, ``p2`` or ``exact``."""
        exact = self.rms == "exact" or hit(path, self.exact)
        return "exact" if exact else f"p{self.p}"

    @classmethod
    def from_checkpoint(cls, where: str | Path, **changes: Any) -> MXNormConfig:
        """The options that :func:`mxnorm_pass.save_settings` wrote beside a checkpoint.

        Args:
            where: the checkpoint's folder, or the file.
            changes: fields to take from here instead.

        Raises:
            SettingsError: where there is no such file, or it cannot be read.
            ValueError: for an unknown field or a value that is not allowed.
        """
        from mxnorm_pass.trust.settings import load_settings

        return load_settings(where).config(**changes)

    def calibration(self) -> Constants:
        """Constants per norm path from the calibration file; empty for ``gaussian``.

        Raises:
            ValueError: where the file is missing, no JSON, made for another p, or has a constant
                that is right for no row (:func:`mxnorm_pass.theory.constant_bounds`).
        """
        if self.correction == "gaussian":
            return Constants({}, {})
        path = Path(self.correction)
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(
                f"correction={self.correction!r}: expected 'gaussian' or a file ({error})"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"calibration file {path}: not JSON ({error})") from error
        sites = content.get("sites") if isinstance(content, dict) else None
        if not isinstance(sites, dict) or not all(
            isinstance(c, (int, float)) and not isinstance(c, bool) and 0 < c < float("inf")
            for c in sites.values()
        ):
            raise ValueError(
                f"calibration file {path}: expected {{'p': ..., 'sites': {{norm path: c > 0}}}}"
            )
        if content.get("p") != self.p:
            raise ValueError(
                f"calibration file {path} is for p={content.get('p')!r}, the config has p={self.p}"
            )
        blocks = content.get("blocks", {})
        if not isinstance(blocks, dict) or not all(
            type(b) is int and b > 0 for b in blocks.values()
        ):
            raise ValueError(f"calibration file {path}: 'blocks' is no {{norm path: block size}}")
        for site, c in sites.items():
            _check_constant(path, site, float(c), self.p, blocks.get(site))
        return Constants({str(k): float(c) for k, c in sites.items()}, blocks)

    @classmethod
    def split_options(
        cls, options: Mapping[str, Any] | None, base: MXNormConfig | None = None
    ) -> tuple[MXNormConfig, dict[str, Any]]:
        """Part ``options={"mxnorm.p": 1, ...}`` into a config and what Inductor gets.

        Raises:
            ValueError: for an unknown ``mxnorm.`` option or value, naming the allowed ones, and for
                one of ours without the prefix.
        """
        import torch._inductor.config as inductor

        own: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if key.startswith(PREFIX):
                own[key.removeprefix(PREFIX)] = value
            elif key in cls.names() and not hasattr(inductor, key):
                raise ValueError(f"option {key!r} is none of Inductor's: write {PREFIX + key!r}")
            else:
                rest[key] = value
        return cls.changed(base, own, PREFIX), rest

    @classmethod
    def changed(
        cls, base: MXNormConfig | None, changes: Mapping[str, Any], prefix: str = ""
    ) -> MXNormConfig:
        """``base``, by default the defaults, with other values of some fields.

        Args:
            base: where to begin.
            changes: values by field.
            prefix: what stands before a field where the caller wrote it, for messages.

        Raises:
            TypeError: where ``base`` is no config.
            ValueError: for an unknown field or a value that is not allowed.
        """
        for name in changes:
            if name not in cls.names():
                allowed = ", ".join(prefix + k for k in cls.names())
                raise ValueError(f"unknown option {prefix + name!r}: allowed are {allowed}")
        return dataclasses.replace(cls.checked(base), **changes)

    @classmethod
    def checked(cls, config: MXNormConfig | None) -> MXNormConfig:
        """The config, or the defaults for None.

        Raises:
            TypeError: for anything else.
        """
        if config is None:
            return cls()
        if not isinstance(config, cls):
            raise TypeError(
                f"config={config!r}: expected an MXNormConfig, such as MXNormConfig(p=1)"
            )
        return config

    @classmethod
    def names(cls) -> list[str]:
        """Of the options."""
        return [field.name for field in dataclasses.fields(cls)]

    def describe(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return cast("dict[str, Any]", json.loads(json.dumps(dataclasses.asdict(self))))
