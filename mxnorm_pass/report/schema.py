"""The JSON Schema of :meth:`Report.to_json`, made from the classes themselves and their docstrings.

``python -m mxnorm_pass.report.schema > docs/report.schema.json`` writes the one in the docs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from typing import Any

from mxnorm_pass.report.picture import Kernel, Launch, Line, Picture, PictureNode, Sources, View
from mxnorm_pass.report.report import SCHEMA, GraphReport, Report, SiteReport

_CLASSES: tuple[type, ...] = (
    GraphReport,
    SiteReport,
    View,
    Launch,
    Sources,
    Picture,
    PictureNode,
    Line,
    Kernel,
)
_SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema() -> dict[str, Any]:
    """Draft 2020-12, as JSON types."""
    content = _object(Report)
    content["properties"] = {"schema": {"const": SCHEMA}, **content["properties"]}
    content["required"] = ["schema", *content["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Report of mxnorm_pass",
        **content,
        "$defs": {cls.__name__: _object(cls) for cls in _CLASSES},
    }


def _object(cls: type) -> dict[str, Any]:
    said = attributes(cls)
    hints = typing.get_type_hints(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        properties[field.name] = _type(hints[field.name])
        if field.name in said:
            properties[field.name]["description"] = said[field.name]
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def attributes(cls: type) -> dict[str, str]:
    """What the docstring of a class says of its attributes."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        start = re.match(r"    (\w+): (.*)$", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif line.startswith("     ") and name:
            found[name] += " " + line.strip()
        elif line:
            break
    return found


def _type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    if hint in _CLASSES:
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(a) for a in arguments]}
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    raise TypeError(f"no JSON Schema for {hint}")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1, ensure_ascii=False))
