"""`NodeExplanation`: why one node was classified as it was, and how far that can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fgai.records import Cell, Column, Table, TabledDocument, data_frame
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

_NO_NEIGHBOURS = "It has no neighbours, so it attends to nothing."
_BAR = 24
_SHOWN = 10
_ROOM = 51  # columns that everything but the bars takes
_LEAST = 4  # columns below which bars are left out


def _show(values: dict[str, Any], console: Console) -> None:
    node, rest = _heading(values)
    console.print(f"[bold]{escape(node)}[/]{escape(rest)}", highlight=False)
    if values["neighbours"]:
        console.print(_drawn(values, min(_BAR, console.width - _ROOM)))
    else:
        console.print(_NO_NEIGHBOURS)
    hidden = len(values["neighbours"]) - max(values["k"], _SHOWN)
    if hidden > 0:
        console.print(f"and {hidden} others", style="dim", highlight=False)
    for line in _attack_sentences(values):
        console.print(line, markup=False, highlight=False)
    for line in _certified_sentences(values):
        style = "dim" if line == values["certified"]["promise"] else None
        console.print(line, style=style, markup=False, highlight=False)


def _heading(values: dict[str, Any]) -> tuple[str, str]:
    """Return the node, and the rest of the sentence that says its class."""
    truth = "" if values["label"] < 0 else f" (truth: {values['label']})"
    share = f"{100 * values['confidence']:.0f} %"
    return f"node {values['name']}", f" of {values['dataset']}: class {values['predicted']}, {share}{truth}"


def _neighbour_table(values: dict[str, Any]) -> Table:
    """Return all neighbours by falling attention, with notes on the attack and the certificates."""
    attacked, truth = values["attacked"], _has_truth(values)
    columns = [Column("neighbour"), Column("attention")]
    columns += [Column("explains")] * truth + ([Column("attacked"), Column("stays")] if attacked else [])
    rows: list[list[Cell]] = []
    for rank, entry in enumerate(values["neighbours"]):
        name, explains, stays = _words(values, rank, entry)
        row: list[Cell] = [name, entry["attention"], *[explains] * truth]
        rows.append([*row, entry["attacked"], stays] if attacked else row)
    notes = [] if rows else [_NO_NEIGHBOURS]
    notes += [*_attack_sentences(values), *_certified_sentences(values)]
    return Table("".join(_heading(values)), columns, rows, notes)


def _has_truth(values: dict[str, Any]) -> bool:
    return any(entry["informative"] is not None for entry in values["neighbours"])


def _words(values: dict[str, Any], rank: int, entry: dict[str, Any]) -> tuple[str, str, str]:
    """Return a neighbour's name, whether it truly explains the class, and whether it stays in the top-k."""
    stays = ""
    if values["attacked"] and rank < values["k"]:
        stays = "yes" if entry["node"] in values["attacked"]["kept"] else "no"
    return "itself" if entry["itself"] else str(entry["name"]), "yes" if entry["informative"] else "", stays


def _drawn(values: dict[str, Any], longest: int) -> RichTable:
    attacked, k = values["attacked"], values["k"]
    truth, bars = _has_truth(values), longest >= _LEAST
    headings = ["neighbour", "attention"] + [""] * bars
    headings += ["explains"] * truth + (["attacked", "stays"] if attacked else [])
    table = RichTable(box=None, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("attention", "attacked") else "left")
    most = max(entry["attention"] for entry in values["neighbours"]) or 1.0
    for rank, entry in enumerate(values["neighbours"][: max(k, _SHOWN)]):
        name, explains, stays = _words(values, rank, entry)
        bar = "█" * max(1, round(longest * entry["attention"] / most))
        cells = [escape(name), f"{entry['attention']:.3f}", *[bar] * bars, *[explains] * truth]
        if attacked:
            cells += ["–" if entry["attacked"] is None else f"{entry['attacked']:.3f}", stays]
        table.add_row(*cells, style="" if rank < k else "dim")
    return table


def _attack_sentences(values: dict[str, Any]) -> list[str]:
    attacked = values["attacked"]
    if not attacked:
        return []
    top = min(values["k"], len(values["neighbours"]))
    chance = (
        f" (by chance {top * attacked['chance']:.1f})" if top < len(values["neighbours"]) else ", all it has"
    )
    moved = "" if attacked["predicted"] == values["predicted"] else ", another one"
    lines = [
        f"under the {attacked['threat']} attack: class {attacked['predicted']}"
        f" ({100 * attacked['confidence']:.0f} %){moved}; {len(attacked['kept'])} of the top {top}"
        f" stay{chance}"
    ]
    new = attacked["new_neighbours"]
    if new:
        share = 100 * attacked["new_attention"]
        lines.append(f"{new} injected neighbour{'s' if new > 1 else ''} took {share:.0f} % of its attention")
    return lines


def _certified_sentences(values: dict[str, Any]) -> list[str]:
    certified = values["certified"]
    if not certified:
        return []
    k, norm, radius, lines = values["k"], certified["norm"], certified.get("shown_radius"), []
    if values["layer"] == "max":
        lines.append(f"the maximum over layers has no certificate; below, each layer's own top-{k}")
    elif values["layer"] == "mean" and radius is not None:
        vector = "while the explanation vector of each layer moves by less than"
        lines.append(f"shown top-{k}, {norm} ball: cannot change {vector} {radius:.4f}")
    for layer in certified["layers"]:
        lines.append(f"{layer['layer']}, {norm} ball: {_radii(layer, values)}")
        if layer.get("properties"):
            lines.append(f"{layer['layer']}, {_properties(layer['properties'], certified)}")
    return [*lines, certified["promise"], *_injection_words(certified.get("injection") or {})]


def _properties(held: dict[str, bool | None], certified: dict[str, Any]) -> str:
    """Which properties of Definition 1 the node has in a layer, in words."""
    words = []
    for name, value in held.items():
        unmeasured = name.startswith("same") and not certified["compared"]
        answer = "not measured" if unmeasured else "unknown" if value is None else "yes" if value else "no"
        words.append(f"{name.replace('_', ' ')}: {answer}")
    return f"Definition 1 at radius {certified['radius']:g}: {'; '.join(words)}"


def _radii(layer: dict[str, Any], values: dict[str, Any]) -> str:
    top, kind, k = layer["topk_radius"], layer["class_radius"], values["certified"]["k"]
    names = {entry["node"]: str(entry["name"]) for entry in values["neighbours"]}
    own = layer.get("topk") or []
    listed = "" if set(own) == set(list(names)[:k]) else f" ({', '.join(names.get(n, str(n)) for n in own)})"
    order = (
        f"its top-{k}{listed} cannot change while its explanation vector moves by less than {top:.4f}"
        if top is not None
        else f"top-{k}: no other neighbour to swap in"
    )
    if kind is not None:
        return f"{order}; class not while each head moves by less than {kind:.4f} ({layer['class_status']})"
    known = layer["class_status"] != "unknown"
    return f"{order}; {'class: attention has no say' if known else 'class: unknown'}"


def _injection_words(proof: dict[str, Any]) -> list[str]:
    condition = f", {proof['condition']}" if proof.get("condition") else ""
    order = f"injected nodes cannot reorder its neighbours{condition}"
    lines = [f"{name}: {order}" for name in proof.get("invariant", ())]
    holds = proof.get("class_holds") or {}
    if holds.get("any"):
        lines.append("class: holds if every node gains an injected neighbour, whatever it says")
    elif holds.get("direct"):
        lines.append("class: holds if the node gains an injected neighbour, whatever it says")
    elif holds.get("direct") is not None:
        lines.append("class: not proved to hold against an injected neighbour")
    return lines


@typed
@dataclass(frozen=True, kw_only=True)
class NodeExplanation(TabledDocument):
    """The neighbours one node attends to, under attack too, and what is proved about them.

    Attributes:
        dataset: name of the graph.
        node: its number.
        name: its name or number.
        layer: `mean`, `last` or `max` over layers, or a layer's number.
        k: neighbours in the explanation.
        predicted: class with the largest logit.
        confidence: its probability.
        label: true class, -1 if unknown.
        neighbours: by falling weight, each with `node`, `name`, `attention` (its weight), `itself`,
            `injected` (False here), `informative` (None if unknown) and `attacked`, its weight under attack.
        attacked: `threat`, `predicted`, `confidence`, `kept` (nodes of the top-k that stay), `overlap`,
            `chance` (the overlap of a random order), `new_neighbours` and `new_attention`, their share; None
            without an attack.
        certified: `norm`, `k`, `shown_radius` (of the shown top-k where layers are averaged), `layers` (each
            with `topk`, its radius, that of the class, its status, and `properties`: True, False or None for
            each property of Definition 1 at `radius`, `alpha` and `beta`), `compared` (whether there is a
            vanilla model), `promise` and `injection` (layers that injected nodes cannot reorder, the
            `condition`, and whether the class holds); or None.
    """

    KIND: ClassVar[str] = "explanation"

    dataset: str
    node: int
    name: str
    layer: str
    k: int
    predicted: int
    confidence: float
    label: int
    neighbours: list[dict[str, Any]]
    attacked: dict[str, Any] | None = None
    certified: dict[str, Any] | None = None

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal."""
        _show(self.to_dict(), console or Console())

    def tables(self) -> list[Table]:
        """Return the neighbours, with notes on the attack and the certificates."""
        return [_neighbour_table(self.to_dict())]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the neighbours by falling attention as a `DataFrame` (needs pandas)."""
        return data_frame(self.neighbours)
