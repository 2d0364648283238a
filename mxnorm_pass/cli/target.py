"""A user's own model: ``script.py:function`` or ``module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mxnorm_pass.cli.errors import ModelError, ShellError, UsageError, brief

_EXPECTED = "expected script.py:function with a readable script, or module:function"


def load(target: str) -> tuple[Any, Any]:
    """The model and its inputs, from calling the function that ``target`` names.

    Raises:
        UsageError: where there is no such file, module or function, or it returns something else.
        ModelError: where the script or the function raises.
    """
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise UsageError(f"{target!r}: {_EXPECTED}")
    module = _script(Path(file)) if Path(file).is_file() else _module(file, target)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{file} has no function {name!r}")
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{target} raised {brief(error)}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(f"{target} must return (model, inputs)")
    return result


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: {_EXPECTED}")
    module = importlib.util.module_from_spec(spec)
    # As for a script that python runs: its neighbours can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise ModelError(f"{path} raised {brief(error)}") from error
    return module


def _module(name: str, target: str) -> ModuleType:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{target!r}: {_EXPECTED}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing: ShellError = ModelError(f"{name} raised {brief(error)}")
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            missing = UsageError(f"{target!r}: {_EXPECTED}")
        raise missing from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} raised {brief(error)}") from error
