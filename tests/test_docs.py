"""What the documentation shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mxnorm_pass

ROOT = Path(__file__).parent.parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_example_prints_what_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    shown = blocks("text")[0]
    seen = len(mxnorm_pass.last_report().graphs)
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert capsys.readouterr().out.strip() == shown.strip()
    y = scope["y"]
    assert isinstance(y, torch.Tensor) and y.shape == (64, 512)
    assert mxnorm_pass.last_report().graphs[seen].rewritten == 1


def test_design_names_every_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    package = ROOT / "mxnorm_pass"
    for path in package.rglob("*.py"):
        if path.name.startswith("__") or path.parent.name in ("ops", "report"):
            continue
        assert path.name in text, path.name
    for path in package.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"{path.name}/" in text, path.name
