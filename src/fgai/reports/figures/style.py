"""The style of all figures, with colours that are distinct in grey and to the colour-blind; `save`."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fgai.errors import InputError
from fgai.files import write_atomic
from fgai.typed import typed

# Okabe and Ito's colours, ordered so that neighbours also differ in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, FAINT, PAPER = "#1a1a1a", "#b3b3b3", "#ffffff"
INJECTED = "#D55E00"

_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.grid", "legend.frameon"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.7),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), PAPER),
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "fgai",
}

_STAMPS = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}  # metadata left out, by format


def attention_colours() -> Colormap:
    """Light to dark blue, visible on white paper and monotone in grey."""
    shades = mpl.colormaps["Blues"](np.linspace(0.22, 1.0, 256))
    return LinearSegmentedColormap.from_list("attention", [tuple(shade) for shade in shades])


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """Give an empty figure of the given inches, to draw on with the settings of this module."""
    with mpl.rc_context(_SETTINGS):
        yield Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.06))


def footnote(figure: Figure, text: str) -> None:
    """Write small text below a figure, as wide as it is."""
    lines = textwrap.wrap(text, int(20 * figure.get_figwidth()))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6.5, color="#555555")


def hide_axes(axes: Axes) -> None:
    """Remove ticks and frame."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


@typed
def save(figure: Figure, path: Path | str, *, dpi: int = 200) -> Path:
    """Write a figure as PNG, PDF or SVG, by the ending of `path`; equal figures give equal bytes.

    `InputError` for another ending.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _STAMPS:
        raise InputError(f"`path` must end in .{', .'.join(_STAMPS)}, got {path.name!r}")
    content = io.BytesIO()
    with mpl.rc_context(_SETTINGS):
        figure.savefig(content, format=kind, dpi=dpi, metadata={_STAMPS[kind]: None})
    write_atomic(path, content.getvalue())
    return path
