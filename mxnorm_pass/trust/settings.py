"""``mxnorm.json`` beside a checkpoint: the p, the c and the eps that its weights were made with.

The file is a calibration file as well: ``MXNormConfig(correction="checkpoint/mxnorm.json")``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxnorm_pass.config import MXNormConfig
from mxnorm_pass.files import check_writable
from mxnorm_pass.report import Report

SCHEMA = "mxnorm-settings/1"
NAME = "mxnorm.json"
_OPTIONS = ("rms", "p", "gain", "gradient", "include", "exclude", "exact", "off", "tensor_scale")
"""Options that say which numbers come out; the others say how a compile goes."""


class SettingsError(ValueError):
    """A checkpoint's settings cannot be read, or are not those of the model at hand."""


@dataclass
class Settings:
    """What :func:`save_settings` wrote.

    Attributes:
        path: the file.
        package: version of this package that wrote it.
        options: fields of :class:`mxnorm_pass.MXNormConfig`.
        sites: c by norm path, of the norms that are estimated.
        blocks: elements per block, by norm path.
        eps: by norm path; None where it was a tensor.
        rms: ``p1``, ``p2`` or ``exact`` by norm path.
        formats: cast by norm path, such as ``MXFP8 e4m3 rceil_log2``.
    """

    path: str
    package: str
    options: dict[str, Any]
    sites: dict[str, float]
    blocks: dict[str, int]
    eps: dict[str, float | None]
    rms: dict[str, str]
    formats: dict[str, str]

    def config(self, **changes: Any) -> MXNormConfig:
        """The options of the checkpoint, its constants included.

        Args:
            changes: fields of :class:`mxnorm_pass.MXNormConfig` to take from here instead.

        Raises:
            ValueError: for an unknown field or a value that is not allowed.
        """
        options = {name: _tupled(value) for name, value in self.options.items()}
        if self.sites and options["rms"] != "exact":
            options["correction"] = self.path
        unknown = sorted(changes.keys() - {f.name for f in dataclasses.fields(MXNormConfig)})
        if unknown:
            raise ValueError(f"unknown options {', '.join(unknown)}")
        return MXNormConfig(**{**options, **changes})

    def check(self, report: Report) -> None:
        """Whether a compile did what the settings say: compare with ``explain(...)`` or a report.

        Raises:
            SettingsError: naming every norm that is missing, new, or was rewritten with another
                eps, RMS, constant, block size or format.
        """
        try:
            there = _numbers(report)
        except ValueError as error:
            raise SettingsError(f"{self.path}: {error}") from error
        wrong = [
            f"{norm}: in the settings, not rewritten in this model"
            for norm in self.rms
            if norm not in there["rms"]
        ]
        wrong += [
            f"{norm}: rewritten in this model, not in the settings"
            for norm in there["rms"]
            if norm not in self.rms
        ]
        for what in ("rms", "eps", "blocks", "formats", "sites"):
            mine: dict[str, Any] = getattr(self, what)
            for norm, value in there[what].items():
                if norm in mine and not _same(mine[norm], value):
                    name = {"sites": "c", "blocks": "block size", "formats": "cast"}.get(what, what)
                    wrong.append(f"{norm}: {name} is {value}, the settings have {mine[norm]}")
        if wrong:
            shown = [*wrong[:20], *([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])]
            raise SettingsError(
                f"the model is not what {self.path} (mxnorm_pass {self.package}) was written for:\n"
                + "\n".join(f"  {line}" for line in shown)
            )


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        # eps may have gone through float32.
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return bool(a == b)


def settings_file(where: str | Path) -> Path:
    """``mxnorm.json`` in a folder, or the file itself."""
    path = Path(where)
    return path if path.suffix == ".json" else path / NAME


def save_settings(where: str | Path, config: MXNormConfig, report: Report) -> Path:
    """Write p, and c and eps of every rewritten norm, beside a checkpoint.

    Args:
        where: the checkpoint's folder (the file is called ``mxnorm.json``), or a ``.json`` file.
        config: the options that the model was trained or is served with.
        report: what they did: ``backend.report``, or ``explain(model, ..., config=config)``.

    Returns:
        The file.

    Raises:
        ValueError: where nothing was rewritten, or a norm has two constants.
        OSError: where the file cannot be written, naming the folder.
    """
    from mxnorm_pass import __version__

    path = settings_file(where)
    check_writable(path)
    numbers = _numbers(report)
    if not numbers["rms"]:
        raise ValueError(f"nothing was rewritten, so there is nothing to write\n{report}")
    described = config.describe()
    content = {
        "schema": SCHEMA,
        "package": __version__,
        # What makes it a calibration file.
        "p": config.p,
        **numbers,
        "options": {name: described[name] for name in _OPTIONS},
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path


def _numbers(report: Report) -> dict[str, dict[str, Any]]:
    """Per norm path what the rewritten sites of a report were made with."""
    found: dict[str, dict[str, Any]] = {
        "sites": {},
        "blocks": {},
        "eps": {},
        "rms": {},
        "formats": {},
    }
    for site in report.sites:
        if site.status != "rewritten":
            continue
        spec = site.spec
        eps = spec["eps"] if isinstance(spec["eps"], float) else None
        values: dict[str, Any] = {
            "blocks": spec["block_size"],
            "eps": eps,
            "rms": spec["rms"],
            "formats": f"{spec['format']} {spec['element']} {spec['scale_rule']}",
        }
        if spec["rms"] != "exact":
            values["sites"] = spec["correction"]
        if not site.norm:
            raise ValueError("a rewritten norm has no module path to be named by")
        for what, value in values.items():
            # A norm may be seen in several graphs, and cast twice in one.
            known = found[what].setdefault(site.norm, value)
            if known is None:
                found[what][site.norm] = value
            elif what != "formats" and value is not None and not _same(known, value):
                raise ValueError(f"{site.norm} has two values of {what}: {known} and {value}")
    return found


def load_settings(where: str | Path) -> Settings:
    """Read what :func:`save_settings` wrote.

    Args:
        where: the checkpoint's folder, or the file.

    Raises:
        SettingsError: where there is none, or it is none of this format.
    """
    path = settings_file(where)
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise SettingsError(
            f"no settings beside the checkpoint: {error}; save_settings writes them"
        ) from error
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        schema = content.get("schema") if isinstance(content, dict) else None
        raise SettingsError(f"{path} has schema {schema!r}: expected {SCHEMA!r}")
    kinds: dict[str, type] = {"package": str, "options": dict}
    kinds |= {name: dict for name in ("sites", "blocks", "eps", "rms", "formats")}
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise SettingsError(f"{path}: {name!r} is missing, or no {kind.__name__}")
    # Written before there was a choice.
    content["options"].setdefault("gradient", "straight_through")
    unknown = sorted(content["options"].keys() ^ set(_OPTIONS))
    if unknown:
        raise SettingsError(
            f"{path}: options {', '.join(unknown)} are unknown or missing: expected "
            f"{', '.join(_OPTIONS)}"
        )
    if content.get("p") != content["options"]["p"]:
        raise SettingsError(
            f"{path}: p={content.get('p')!r} here and {content['options']['p']!r} in its options"
        )
    settings = Settings(str(path), **{name: content[name] for name in kinds})
    try:
        settings.config()
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from error
    return settings
