"""Docstrings name objects by Sphinx roles; MkDocs knows cross-references in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|data|attr|mod|exc|obj):`(~?)([^`]+)`")


def markdown(text: str) -> str:
    """Roles as code, linked where the reference has what they name."""

    def reference(match: re.Match[str]) -> str:
        short, path = match.groups()
        shown = path.rpartition(".")[2] if short or path.startswith("mxnorm_pass.") else path
        if not path.startswith("mxnorm_pass."):
            return f"`{shown}`"
        return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'

    return ROLE.sub(reference, text)


class Roles(griffe.Extension):
    """Rewrite the roles of every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every object that it reads."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
