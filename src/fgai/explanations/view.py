"""One node's explanation in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

BAR = 24
SHOWN = 10
ROOM = 51
"""Columns that everything but the bars takes."""
LEAST = 4
"""Columns below which bars are left out."""


def show(values: dict[str, Any], console: Console) -> None:
    """Print an explanation: the prediction, the neighbours as bars, the attack, the certificates.

    Args:
        values: of `NodeExplanation.to_dict`.
        console: where to.
    """
    truth = "" if values["label"] < 0 else f" (truth: {values['label']})"
    console.print(
        f"[bold]node {escape(values['name'])}[/] of {escape(values['dataset'])}: class {values['predicted']},"
        f" {100 * values['confidence']:.0f} %{truth}",
        highlight=False,
    )
    if values["neighbours"]:
        console.print(_table(values, min(BAR, console.width - ROOM)))
    else:
        console.print("It has no neighbours, so it attends to nothing.")
    hidden = len(values["neighbours"]) - max(values["k"], SHOWN)
    if hidden > 0:
        console.print(f"and {hidden} others", style="dim", highlight=False)
    if values["attacked"]:
        _show_attack(values, console)
    if values["certified"]:
        _show_certified(values["certified"], console)


def _table(values: dict[str, Any], longest: int) -> Table:
    attacked, k = values["attacked"], values["k"]
    told = any(entry["informative"] is not None for entry in values["neighbours"])
    bars = longest >= LEAST
    headings = ["neighbour", "attention"] + [""] * bars
    headings += ["explains"] * told + (["attacked", "stays"] if attacked else [])
    table = Table(box=None, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("attention", "attacked") else "left")
    most = max(entry["attention"] for entry in values["neighbours"]) or 1.0
    kept = set(attacked["kept"]) if attacked else set()
    for rank, entry in enumerate(values["neighbours"][: max(k, SHOWN)]):
        cells = ["itself" if entry["itself"] else escape(entry["name"]), f"{entry['attention']:.3f}"]
        if bars:
            cells.append("█" * max(1, round(longest * entry["attention"] / most)))
        if told:
            cells.append("yes" if entry["informative"] else "")
        if attacked:
            cells.append("–" if entry["attacked"] is None else f"{entry['attacked']:.3f}")
            cells.append(("yes" if entry["node"] in kept else "no") if rank < k else "")
        table.add_row(*cells, style="" if rank < k else "dim")
    return table


def _show_attack(values: dict[str, Any], console: Console) -> None:
    attacked = values["attacked"]
    top = min(values["k"], len(values["neighbours"]))
    chance = (
        f" (by chance {top * attacked['chance']:.1f})" if top < len(values["neighbours"]) else ", all it has"
    )
    moved = "" if attacked["predicted"] == values["predicted"] else ", another one"
    console.print(
        f"under the {attacked['threat']} attack: class {attacked['predicted']}"
        f" ({100 * attacked['confidence']:.0f} %){moved}; {len(attacked['kept'])} of the top {top}"
        f" stay{chance}",
        markup=False,
        highlight=False,
    )
    new = attacked["new_neighbours"]
    if new:
        share = 100 * attacked["new_attention"]
        console.print(
            f"{new} injected neighbour{'s' if new > 1 else ''} took {share:.0f} % of its attention",
            highlight=False,
        )


def _show_certified(certified: dict[str, Any], console: Console) -> None:
    for layer in certified["layers"]:
        top, kind = layer["topk_radius"], layer["class_radius"]
        words = [
            f"top-{certified['k']} cannot change below {top:.4f}"
            if top is not None
            else f"top-{certified['k']}: no other neighbour to swap in"
        ]
        if kind is not None:
            words.append(f"class not below {kind:.4f} ({layer['class_status']})")
        else:
            known = layer["class_status"] != "unknown"
            words.append("class: attention has no say" if known else "class: unknown")
        console.print(
            f"{layer['layer']}, {certified['norm']} ball: {'; '.join(words)}", markup=False, highlight=False
        )
    console.print(certified["promise"], style="dim", markup=False, highlight=False)
    for line in injection_words(certified.get("injection") or {}):
        console.print(line, markup=False, highlight=False)


def injection_words(found: dict[str, Any]) -> list[str]:
    """Say what is proved against injected nodes, a sentence each."""
    lines = [f"{name}: injected nodes cannot reorder its neighbours" for name in found.get("invariant", ())]
    held = found.get("class_holds") or {}
    if held.get("any"):
        lines.append("class: holds if every node gains an injected neighbour, whatever it says")
    elif held.get("direct"):
        lines.append("class: holds if the node gains an injected neighbour, whatever it says")
    elif held.get("direct") is not None:
        lines.append("class: not proved to hold against an injected neighbour")
    return lines
