"""Whether a file can be written, known before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise unless ``path`` can be written: a file in a folder that exists.

    Raises:
        OSError: naming the folder, or the file, and what is wrong with it.
    """
    folder = path.parent
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        error = NotADirectoryError if folder.exists() else FileNotFoundError
        raise error(f"cannot write {path.name}: the folder {folder} {what}")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise PermissionError(f"cannot write {path}: no permission to change the file")
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {path.name}: no permission in the folder {folder}")
