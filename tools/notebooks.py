"""Notebooks: kept as Python (`py:percent` of jupytext), run by nbclient, shown with what they printed."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient

ANSI = re.compile(r"\x1b\[[0-9;]*m")
SECONDS = 300
"""A cell may take, on a slow machine."""


def run(source: Path, folder: Path) -> Any:
    """Return the notebook with its outputs, run from top to bottom in a folder."""
    notebook = jupytext.read(source)
    place = {"metadata": {"path": str(folder)}}
    quiet = ["--IPKernelApp.log_level=40"]
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=SECONDS, resources=place, extra_arguments=quiet
    )
    return client.execute()


def write_page(source: Path, page: Path) -> None:
    """Run a notebook and write it as a Markdown page: words, code and outputs; pictures lie beside it."""
    page.parent.mkdir(parents=True, exist_ok=True)
    notebook = run(source, page.parent)
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_shown(output, page, len(parts)) for output in cell.outputs]
    note = f"*This page is the notebook `docs/notebooks/{source.name}`, run when the site was built.*"
    page.write_text("\n\n".join([*filter(None, parts), note]) + "\n", encoding="utf-8")


def _shown(output: Any, page: Path, number: int) -> str:
    """One output as Markdown: a picture, a table or text, whichever says most."""
    if output.output_type == "stream":
        return _text(output.text) if output.name == "stdout" else ""  # warnings stand below the tables, too
    data = output.data
    if "application/vnd.jupyter.widget-view+json" in data:
        return ""  # a widget needs the kernel; the notebook shows a picture of it
    if "image/png" in data:
        picture = page.with_name(f"{page.stem}-{number}.png")
        picture.write_bytes(base64.b64decode(data["image/png"]))
        return f"![Drawn by the cell above]({picture.name})"
    if "text/html" in data:
        return str(data["text/html"])
    return _text(data.get("text/plain", ""))


def _text(text: str) -> str:
    plain = ANSI.sub("", text).rstrip()
    return f"```text\n{plain}\n```" if plain else ""
