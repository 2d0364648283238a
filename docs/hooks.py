"""What the site does beyond MkDocs: files of the repository are pages, and links to them work.

README, CONTRIBUTING and CHANGELOG stand at the root, where people look for them, and become pages.
Any other file outside docs/ that a page links to is shown as a page of its source. In the
repository the same links work as they are.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
TITLES = {"readme.md": "README"}
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".txt": "text"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def repository_path(page: str, link: str) -> str | None:
    """The file that a page's relative link means, from the root; None for links elsewhere."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    origin = next((source for source, name in PAGES.items() if name == page), None)
    folder = "" if origin else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(folder, link))


def site_path(path: str) -> str | None:
    """Where the site has a file of the repository, from the site's root."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_file() and not path.startswith(".."):
        return f"source/{path}.md"
    return None


def _outside(name: str, text: str) -> set[str]:
    """Files that are no page yet and that a page links to."""
    found = set()
    for match in LINK.finditer(text):
        path = repository_path(name, match[2])
        if path and path not in PAGES and (site_path(path) or "").startswith("source/"):
            found.add(path)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of files outside docs/."""
    linked: set[str] = set()
    for source, name in PAGES.items():
        text = (ROOT / source).read_text()
        linked |= _outside(name, text)
        files.append(File.generated(config, name, content=text))
    for file in list(files.documentation_pages()):
        if file.abs_src_path and file.src_uri not in PAGES.values():
            linked |= _outside(file.src_uri, Path(file.abs_src_path).read_text())
    for path in sorted(linked):
        language = LANGUAGES.get(Path(path).suffix, "text")
        body = f"---\nsearch: {{ exclude: true }}\n---\n# {path}\n\n````` {language}\n"
        body += (ROOT / path).read_text().rstrip() + "\n`````\n"
        # Sources are reached by links, not by the navigation.
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_path(path) or "", content=body, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the site's pages."""
    name = page.file.src_uri
    if name.startswith("source/"):
        return markdown

    def link(match: re.Match[str]) -> str:
        path = repository_path(name, match[2])
        target = site_path(path) if path else None
        if target is None:
            return match[0]
        relative = posixpath.relpath(target, posixpath.dirname(name) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    if name in TITLES:
        page.meta.setdefault("title", TITLES[name])
    return LINK.sub(link, markdown)
