"""What the documentation shows is what happens."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import docblocks
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
SLOW = ("docs/cookbook.md", "docs/serving.md", "docs/shell.md")  # over ten seconds
LONG = ("docs/pretrained.md",)
# Blocks that do not run here, with the reason that stands before them in the document.
LEFT_OUT = {
    ("docs/cookbook.md", "needs a GPU of sm_100"),
    ("docs/serving.md", "needs vLLM"),
    ("docs/theory.md", "measured by tests/test_theory_script.py"),
}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def marks(path: Path) -> list[pytest.MarkDecorator]:
    by_mark = ((pytest.mark.slow, SLOW), (pytest.mark.long, LONG))
    return [mark for mark, names in by_mark if named(path) in names]


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=named(p), marks=marks(p)) for p in DOCUMENTS if "```" in p.read_text()],
)
def test_blocks(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a document runs, in order, and prints what the document says that it prints."""
    monkeypatch.chdir(tmp_path)
    skipped: list[str] = []
    ran = docblocks.run(path, lambda line, why: skipped.append(why))
    assert ran + len(skipped) > 0
    assert {(named(path), why) for why in skipped} <= LEFT_OUT


def test_a_wrong_document_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism itself: wrong output, an error, a shell's exit code, a language nobody runs."""
    monkeypatch.chdir(tmp_path)
    right = (
        '```python\nx = 1\n```\n\n```python title="f.py"\nprint("from the file")\n```\n'
        "```bash\npython f.py\n```\n\n```text\nfrom the file\n```\n"
        "```python\nprint(x)\n```\n\n```text\n1\n```\n\n"
        "```bash\nmxnorm nothing  # exits with 2\n```\n"
        "words\n```text\nno output of the block above\n```\n"
        '<!-- skip: next "why" -->\n```python\nraise SystemError\n```\n'
    )
    document = tmp_path / "doc.md"
    document.write_text(right)
    told: list[tuple[int, str]] = []
    assert docblocks.run(document, lambda *skip: told.append(skip)) == 8
    assert [why for _, why in told] == ["why"]
    wrong = {
        "```text\n1\n```": "```text\n2\n```",
        "x = 1": "x = 1 / 0",
        "exits with 2": "exits with 0",
        '"why" -->': '"why" -->\n```python\n```\n',
        "```python\nprint(x)": "```py\nprint(x)",
        "python f.py": "rm f.py",
    }
    for before, after in wrong.items():
        assert before in right
        document.write_text(right.replace(before, after, 1))
        with pytest.raises((AssertionError, ZeroDivisionError, SystemError)):
            docblocks.run(document)


def test_design_names_every_module() -> None:
    text = (DOCS / "design.md").read_text()
    package = ROOT / "mxnorm_pass"
    for path in package.rglob("*.py"):
        if path.name.startswith("__") or path.parent.name in ("ops", "report"):
            continue
        assert path.name in text, path.name
    for path in package.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"{path.name}/" in text, path.name


# --- the site -------------------------------------------------------------------------------------


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    """``make docs``, into another folder: every page, no dead link, nothing fetched elsewhere."""
    pytest.importorskip("mkdocs")
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {p.name: p.read_text() for p in (tmp_path / "site").glob("*.html")}
    for path in DOCS.glob("*.md"):
        assert path.with_suffix(".html").name in pages
    for name, text in pages.items():
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', text)
        assert not fetched, f"{name} fetches {fetched}"
    # README's links to files of the repository lead somewhere in the site.
    for target in re.findall(r'href="([^"#:]+)["#]', pages["readme.html"]):
        assert (tmp_path / "site" / target).exists(), target
    # The reference is made from docstrings: parameters, errors, and links between names.
    api = pages["api.html"]
    for name in ("backend.backend", "explain", "MXNormConfig", "theory.correction"):
        assert f'id="mxnorm_pass.{name}"' in api, name
    assert ":class:" not in api and ":func:" not in api
    assert re.search(r"Raises.{0,400}RewriteError", api, re.DOTALL)


def test_every_public_name_is_in_the_reference() -> None:
    import mxnorm_pass

    text = (DOCS / "api.md").read_text()
    listed = re.findall(r"^::: mxnorm_pass\.([\w.]+)", text, re.MULTILINE)
    last = {name.rpartition(".")[2] for name in listed}
    assert set(mxnorm_pass.__all__) <= last


def test_reference_says_what_goes_in_and_what_can_go_wrong() -> None:
    """Every function of the reference documents its parameters, and the errors that it raises."""
    griffe = pytest.importorskip("griffe")
    package = griffe.load("mxnorm_pass", search_paths=[ROOT], docstring_parser="google")
    listed = re.findall(r"^::: mxnorm_pass\.([\w.]+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    objects = [package[name] for name in listed]
    objects = [o.final_target if o.is_alias else o for o in objects]
    objects += [m for o in objects if o.is_module for m in o.functions.values()]
    functions = [o for o in objects if o.is_function and not o.name.startswith("_")]
    assert len(functions) > 20
    for function in functions:
        assert function.docstring is not None, function.path
        sections = {s.kind.value for s in function.docstring.parsed}
        assert not list(function.parameters) or "parameters" in sections, function.path
        raising = any(line.lstrip().startswith("raise ") for line in function.lines)
        assert not raising or "raises" in sections, function.path


# --- the picture ----------------------------------------------------------------------------------


def test_picture_is_that_of_a_real_rewrite() -> None:
    """docs/img/rewrite.dot is what tracing gives today, and the SVG was drawn from it."""
    spec = importlib.util.spec_from_file_location("picture", DOCS / "picture.py")
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    source = (DOCS / "img" / "rewrite.dot").read_text()
    assert picture.dot(picture.trace()) == source, "stale: python docs/picture.py"
    svg = (DOCS / "img" / "rewrite.svg").read_text()
    assert svg.startswith(f"<!-- {picture.digest(source)} -->")
    assert "mxnorm.rmsnorm_mxquant" in svg and "amax" in svg
