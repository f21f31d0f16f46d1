"""A real Chromium for the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


def find_browser() -> str | None:
    """The browser to drive: $FGAI_BROWSER, or the first Chromium on the path."""
    return os.environ.get("FGAI_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


def unavailable(reason: str) -> None:
    """Skip where a user has no browser; fail where one is required."""
    if os.environ.get("FGAI_REQUIRE_BROWSER") == "1":
        pytest.fail(f"FGAI_REQUIRE_BROWSER=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed (pip install playwright)")
    path = find_browser()
    if path is None:
        unavailable(f"no browser was found (looked for {', '.join(NAMES)}; $FGAI_BROWSER names another)")
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield launched
        launched.close()


class Opened:
    """A page from disk, and everything it said or asked for."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.address = path.resolve().as_uri()
        page.goto(self.address)
        page.wait_for_selector("html[data-ready=true]", timeout=60_000)

    def check(self) -> None:
        """Nothing said, nothing fetched but the page itself (blobs are made by the page)."""
        assert self.said == []
        assert [url for url in self.asked if url != self.address and not url.startswith("blob:")] == []

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())


@pytest.fixture(scope="module")
def visit(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open a page: `visit(path, width=1440, dark=False)`."""
    contexts: list[Any] = []

    def open_page(path: Path, *, width: int = 1440, height: int = 900, dark: bool = False) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=width < 500,
        )
        contexts.append(context)
        context.set_default_timeout(180_000)  # the page carries its plotting library; a busy machine is slow
        return Opened(context.new_page(), path)

    yield open_page
    for context in contexts:
        context.close()
