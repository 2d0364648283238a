"""Folders of finished runs as :func:`results.save` writes them, read and checked.

Whatever is wrong with one is a :class:`BadInput` with file and line, or the place in ``runs.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainlib import inputs, loop
from trainlib.inputs import BadInput, Row, read_json, read_rows
from trainlib.loop import Curve, Plan

FILES = ("curves.csv", "norms.csv", "runs.json")
RUN = ("variant", "seed", "rate")  # what tells runs of a folder apart
CURVES = (*RUN, "step", "loss", "grad_norm")
# Of the statistics of norms those that pages show.
NORMS = (*RUN, "norm", "channel", "kurtosis", "ratio_mean", "ratio_sd")

Key = tuple[str, int, float]
Check = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is it


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TEXT: Check = ("text", lambda v: isinstance(v, str))
WHOLE: Check = ("a whole number", _whole)
COUNT: Check = ("a whole number above zero", lambda v: _whole(v) and v > 0)
NUMBER: Check = ("a number", _number)
RATE: Check = ("a number above zero", lambda v: _number(v) and 0 < v < math.inf)
OBJECT: Check = ("an object", lambda v: isinstance(v, dict))
NONE: dict[str, Check] = {}
LIST: Check = ("a list of runs", lambda v: isinstance(v, list) and len(v) > 0)

ABOUT = {"machine": OBJECT, "plan": OBJECT, "corpus": OBJECT, "runs": LIST}
MOST = 8  # runs that a message names
LATER = ("triton", "driver")  # what runs did not note of their machine from the beginning
MACHINE = {"device": TEXT, "torch": TEXT, "torchao": TEXT}
PLAN = {
    "size": TEXT, "steps": COUNT, "batch": COUNT, "seq": COUNT, "rate": RATE, "warmup": COUNT,
    "device": TEXT,
}  # fmt: skip
TOKENS = {
    "text_bytes": COUNT, "tokens": COUNT, "vocab": COUNT, "sha256": TEXT, "limit": COUNT,
    "longest": COUNT,
}  # fmt: skip
ONE = {
    "variant": TEXT, "seed": WHOLE, "rate": RATE, "validation": NUMBER, "sites": WHOLE,
    "seconds": NUMBER,
}  # fmt: skip


def load(folder: Path) -> tuple[dict[str, Any], list[Curve]]:
    """About the runs, and their curves.

    Raises:
        BadInput: where a file is missing or damaged, or the three do not fit together.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "no such folder"
        raise BadInput(f"{folder}: {what}, expected a folder with {', '.join(FILES)}")
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        raise BadInput(f"{folder}: {', '.join(missing)} missing; a run writes all three files")
    about = read_about(folder / "runs.json")
    known: dict[Key, Curve] = {}
    for i, run in enumerate(about["runs"]):
        # Rates as the curves have them: six digits.
        key = run["variant"], run["seed"], float(f"{run['rate']:g}")
        if key in known:
            raise BadInput(f"{folder / 'runs.json'}: runs[{i}] is {named(key)}, which is there")
        known[key] = Curve(*key, validation=run["validation"], sites=run["sites"],
                           seconds=run["seconds"], accuracy=run.get("accuracy"))  # fmt: skip
    read_curves(folder / "curves.csv", known, about["plan"]["steps"])
    read_norms(folder / "norms.csv", known)
    return about, list(known.values())


def folder_to_write(path: Path) -> None:
    """Refuses what no folder of runs can be written to, and one that has runs already."""
    inputs.folder_to_write(path)
    there = [name for name in FILES if (path / name).exists()]
    if there:
        raise BadInput(
            f"{path}: has runs already ({', '.join(there)}), expected another folder, or an empty "
            "one"
        )


def named(key: Key) -> str:
    variant, seed, rate = key
    return f"{variant}, seed {seed}, rate {rate:g}"


def several(keys: Iterable[Key]) -> str:
    """The first ``MOST`` by name, and how many more there are."""
    some = [named(key) for key in keys]
    more = [f"and {len(some) - MOST} more"] if len(some) > MOST else []
    return "; ".join([*some[:MOST], *more])


def _check(
    path: Path, where: str, found: Any, expected: dict[str, Check], later: dict[str, Check] = NONE
) -> None:
    """Whether an object of ``runs.json`` has these fields; those of ``later`` may be absent."""
    for name, (what, good) in {**expected, **later}.items():
        if name not in found:
            if name in later:
                continue
            raise BadInput(f"{path}: {where}{name} missing, expected {what}")
        if not good(found[name]):
            raise BadInput(f"{path}: {where}{name} is {found[name]!r}, expected {what}")


def read_about(path: Path) -> dict[str, Any]:
    """``runs.json``; fields that came later may be absent."""
    about = read_json(path)
    _check(path, "", about, ABOUT, {"parameters": COUNT, "command": TEXT})
    _check(path, "machine.", about["machine"], MACHINE, dict.fromkeys(LATER, TEXT))
    plan, corpus = about["plan"], about["corpus"]
    _check(path, "plan.", plan, PLAN, {"inner": TEXT})
    allowed = [f.name for f in fields(Plan)]
    unknown = [name for name in plan if name not in allowed]
    if unknown:
        raise BadInput(f"{path}: plan.{unknown[0]} is unknown; allowed are {', '.join(allowed)}")
    _check(path, "corpus.", corpus, {"source": TEXT})
    if "text_bytes" in corpus:
        _check(path, "corpus.", corpus, TOKENS)
    elif "images" in corpus:
        _check(path, "corpus.", corpus, {"images": COUNT, "held_out": COUNT})
    for i, run in enumerate(about["runs"]):
        where = f"runs[{i}]"
        if not isinstance(run, dict):
            raise BadInput(f"{path}: {where} is {run!r}, expected an object")
        _check(path, f"{where}.", run, ONE, {"accuracy": NUMBER})
    return about


def _key(row: Row, known: dict[Key, Curve]) -> Key:
    key = row.values["variant"], row.whole("seed"), row.number("rate")
    if key not in known:
        raise row.bad(f"no run {named(key)} in runs.json, which has {several(known)}")
    return key


def read_curves(path: Path, known: dict[Key, Curve], steps: int) -> None:
    """Losses and gradient norms, into the curves that ``runs.json`` knows; every step once."""
    ends: dict[Key, Row] = {}
    for row in read_rows(path, CURVES):
        key = _key(row, known)
        curve, step = known[key], row.whole("step")
        if step != len(curve.loss):
            raise row.bad(f"step {step} of {named(key)}, expected step {len(curve.loss)}")
        if step >= steps:
            raise row.bad(f"step {step} of {named(key)}, expected at most {steps - 1}, by its plan")
        loss = row.number("loss")
        if loss < 0:
            raise row.bad(f"loss is {loss:g} in {named(key)}, expected 0 or more")
        if math.isfinite(loss) and curve.loss and not math.isfinite(curve.loss[-1]):
            raise row.bad(
                f"loss is {loss:g} in {named(key)} after one that is no number, which a run does "
                "not come back from"
            )
        curve.loss.append(loss)
        curve.grad_norm.append(row.number("grad_norm"))
        ends[key] = row
    for key, curve in known.items():
        if key not in ends:
            raise BadInput(f"{path}: no line of {named(key)}, a run in runs.json")
        count = len(curve.loss)
        broken_off = not math.isfinite(curve.loss[-1]) and count % loop.LOOK == 0
        if count < steps and not broken_off:
            raise ends[key].bad(
                f"{named(key)} ends after {count} steps, expected {steps}, by its plan; fewer only "
                f"where the loss is no number any more, which is looked at every {loop.LOOK} steps"
            )


def read_norms(path: Path, known: dict[Key, Curve]) -> None:
    """Statistics of norms, into the curves; of every run the same norms, or of none any."""
    for row in read_rows(path, NORMS):
        key = _key(row, known)
        for column in row.values:
            if column not in (*RUN, "norm"):
                row.number(column)
        if row.values["norm"] in (n["norm"] for n in known[key].norms):
            raise row.bad(f"norm {row.values['norm']} of {named(key)} is there twice")
        known[key].norms.append(row.values)
    all_of_them = dict.fromkeys(n["norm"] for curve in known.values() for n in curve.norms)
    for key, curve in known.items():
        missing = all_of_them.keys() - {n["norm"] for n in curve.norms}
        if missing:
            raise BadInput(f"{path}: no line of {named(key)}, norm {min(missing)}")
