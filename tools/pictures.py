"""Take the pictures of docs/report.md: python -m tools.pictures PAGE LARGER_PAGE [FOLDER].

PAGE (Amazon-Photo) and LARGER_PAGE (Coauthor-Physics) are written by `fgai report … --threat ensemble`.
Needs playwright and a Chromium on the path, or named by $FGAI_BROWSER.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

WIDTH, HEAD = 1072, 1128
"""Of a screen: its width, and how much of it the head of a page takes."""
PHONE, SCREEN = 375, 1500
GAP = 24
STILL = "html { scroll-behavior: auto !important } nav { position: static !important }"
"""No bar over what is pictured, and no waiting for a scroll."""


def take(page: Path, larger: Path, folder: Path) -> None:
    """Write all pictures to a folder."""
    from playwright.sync_api import sync_playwright

    browser = os.environ.get("FGAI_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--hide-scrollbars"])
        with opened(launched, page, WIDTH, HEAD) as seen:
            seen.screenshot(path=folder / "report-headline.png")
            part(seen, "#network").save(folder / "report-neighbourhood.png")
            joined([part(seen, "#distribution"), part(seen, "#curves")], below=True).save(
                folder / "report-curves.png"
            )
        with opened(launched, page, WIDTH, HEAD, dark=True) as seen:
            part(seen, "#explorer").save(folder / "report-node-dark.png")
        with opened(launched, larger, WIDTH, HEAD, dark=True) as seen:
            seen.screenshot(path=folder / "report-physics-dark.png")
        with opened(launched, page, PHONE, SCREEN, dark=True) as seen:
            screens = []
            for name in ("h1", "#neighbourhood", "#node"):
                seen.evaluate("name => document.querySelector(name).scrollIntoView()", name)
                screens.append(image(seen.screenshot()))
            joined(screens).save(folder / "report-phone.png")
        launched.close()


@contextmanager
def opened(browser: Any, page: Path, width: int, height: int, *, dark: bool = False) -> Iterator[Any]:
    """A page from disk, once it is drawn."""
    size = {"width": width, "height": height}
    seen = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")
    seen.goto(page.resolve().as_uri())
    seen.wait_for_selector("html[data-ready=true]", timeout=60_000)
    seen.add_style_tag(content=STILL)
    yield seen
    seen.close()


def part(seen: Any, name: str) -> Image.Image:
    """The picture of one part of a page, with what is left and right of it."""
    box = seen.locator(name).first.bounding_box()
    width = seen.viewport_size["width"]
    top = box["y"] + seen.evaluate("scrollY")
    return image(
        seen.screenshot(full_page=True, clip={"x": 0, "y": top, "width": width, "height": box["height"]})
    )


def image(data: bytes) -> Image.Image:
    """A screenshot as a picture."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def joined(pictures: list[Image.Image], *, below: bool = False) -> Image.Image:
    """Pictures side by side with a gap between them, or one below the other."""
    gap = 0 if below else GAP
    sizes = [(one.height, one.width) if below else (one.width, one.height) for one in pictures]
    length, across = sum(size for size, _ in sizes) + gap * (len(sizes) - 1), max(size for _, size in sizes)
    whole = Image.new("RGB", (across, length) if below else (length, across), "white")
    start = 0
    for one, (size, _) in zip(pictures, sizes, strict=True):
        whole.paste(one, (0, start) if below else (start, 0))
        start += size + gap
    return whole


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    given = [Path(name) for name in (*sys.argv[1:], "docs/images")]
    take(given[0], given[1], given[2])
