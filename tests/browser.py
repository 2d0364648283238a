"""A real headless browser, for what only a browser can show.

Chromium (Debian's package, or whatever ``MXNORM_CHROMIUM`` names) through playwright. Where there
is none, tests skip; with ``MXNORM_REQUIRE_BROWSER=1``, as in CI, they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


def executable() -> str:
    """Path of Chromium; skips or fails where there is none."""
    named = os.environ.get("MXNORM_CHROMIUM")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        missing = f"no Chromium: none of {', '.join(names)} is on the path"
        if os.environ.get("MXNORM_REQUIRE_BROWSER", "0") not in ("", "0"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page, and what went on in it besides."""

    page: Any
    url: str
    seconds: float = 0.0
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def assert_quiet(self) -> None:
        """Nothing on the console, and the file itself was all that was asked for."""
        assert self.console == []
        assert {url.partition("#")[0] for url in self.requests} <= {self.url}

    def shown(self) -> list[str]:
        """The sites in the table, from top to bottom."""
        rows = self.page.locator("tr.site-row").all()
        return [row.get_attribute("data-key") for row in rows]

    def open(self, key: str) -> Any:
        """Open a site by the keyboard and wait for its pictures; its detail row."""
        row = self.page.locator(f"tr.site-row[data-key={_quoted(key)}]")
        row.press("Enter")
        detail = self.page.locator("tr.site-row[aria-expanded=true] + tr.detail")
        for canvas in detail.locator(".canvas").all():
            canvas.locator("svg").wait_for(timeout=30_000)
        return detail


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isalnum() else f"\\{ord(c):x} " for c in text) + '"'


def open_page(browser: Any, path: Path, *, fragment: str = "", width: int = 1280) -> Opened:
    """Load a file, and wait until its table can be used; ``seconds`` is how long that took."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    opened = Opened(page, path.as_uri())
    page.on("console", lambda message: opened.console.append(message.text))
    page.on("pageerror", lambda error: opened.console.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("dialog", lambda dialog: (opened.console.append("dialog"), dialog.dismiss()))
    page.goto(opened.url + fragment)
    page.locator("html[data-ready]").wait_for(timeout=30_000)
    # From the start of the navigation to the last line of the page's script.
    opened.seconds = float(page.locator("html").get_attribute("data-ready")) / 1000
    return opened
