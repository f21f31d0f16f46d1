"""`NodeExplanation`: the neighbours behind the class of one node, under attack, and what is proved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fgai.explanations.counterfactual import MOST_ITEMS
from fgai.records import Cell, Column, Table, TabledDocument, data_frame
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

_NO_NEIGHBOURS = "It has no neighbours, so it attends to nothing."
_MOST_ROWS = 10
_MOST_BLOCKS = 24  # length of the longest bar
_LEAST_BLOCKS = 4  # bars that would be shorter are left out
_OTHER_COLUMNS = 65  # characters that everything but the bars takes
_NEW_FIELDS = dict.fromkeys(("class_names", "contributions", "counterfactual"))  # older records lack them


def _class_name(number: int, names: Sequence[str] | None) -> str:
    return names[number] if names and 0 <= number < len(names) else str(number)


@typed
@dataclass(frozen=True, kw_only=True)
class NodeExplanation(TabledDocument):
    """The neighbours one node attends to, under attack too, and what is proved about them.

    Attributes:
        neighbours: by falling weight, each with `node`, `name`, `attention` and `attacked` (its weight before
            and under attack), `itself`, `injected` (always False) and `informative` (None if unknown).
        attacked: `threat`, `predicted`, `confidence`, `kept` (nodes of the top-k that stay), `overlap`,
            `chance` (the overlap of a random order), `new_neighbours` (how many neighbours this node gained)
            and `new_attention` (their share); or None.
        certified: `norm`, `radius`, `alpha`, `beta` and `k` of the certificate, `compared` (whether there is
            a vanilla model) and `promise` (of the radii). `shown_radius` is that of the shown top-k; None
            with `max` over layers, with several types of edges, or with at most k neighbours. Each of
            `layers` has its name `layer`, its own `topk`, `topk_radius`, `class_radius`, `class_status`
            (`exact`, `bound` or `unknown`) and `properties`: True or False for each property of Definition 1,
            None if unknown or not measured. `injection` has `invariant` (layers in which no injected node
            reorders the node's old neighbours), `condition` (on which that depends, or None) and
            `class_holds`: whether the class provably holds if this node, `direct`, or every node, `any`,
            gains a new neighbour with any features; None if unknown.
        contributions: `reason` why there are none, else None and `top` and `second` (classes), `margin`
            between their logits, `rest` (bias, residual), `pair_radius` (below which the two classes stay
            first and second) and `neighbours` by falling `contribution`, with `node`, `name`, `itself`,
            `of_edge` (the part that the features of the edge add, or None) and `radius` (below which its sign
            stays). A radius is None where no attention can change that. See `SignedMargin`.
        counterfactual: `removed` and `injected` (which is None for graphs without features), each with
            `change` (a `ChangeRecord` as a dictionary, None if none was found), its `items` in words and its
            `size`, the class `predicted` after it, `lower_bound` (no fewer can change the class) and
            `exhausted` (no set can, all were tried: then there is no bound); or None without a search.
    """

    KIND: ClassVar[str] = "explanation"

    dataset: str
    node: int
    name: str  # or its number as text
    layer: str  # `mean`, `last` or `max` over layers, or a layer's number
    k: int  # neighbours in the explanation
    predicted: int
    confidence: float  # probability of that class
    label: int  # -1 if unknown
    neighbours: list[dict[str, Any]]
    attacked: dict[str, Any] | None = None
    certified: dict[str, Any] | None = None
    class_names: list[str] | None = None
    contributions: dict[str, Any] | None = None
    counterfactual: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; fields that older records lack are None."""
        return super().from_dict({**_NEW_FIELDS, **values} if isinstance(values, Mapping) else values)

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal."""
        console = console or Console()
        console.print(f"[bold]node {escape(self.name)}[/]{escape(self._prediction())}", highlight=False)
        if self.neighbours:
            console.print(self._bars(min(_MOST_BLOCKS, console.width - _OTHER_COLUMNS)))
        else:
            console.print(_NO_NEIGHBOURS)
        hidden = len(self.neighbours) - max(self.k, _MOST_ROWS)
        if hidden > 0:
            console.print(f"and {hidden} others", style="dim", highlight=False)
        for line in self._sentences():
            style = "dim" if self.certified and line == self.certified["promise"] else None
            console.print(line, style=style, markup=False, highlight=False)

    def tables(self) -> list[Table]:
        """Return the neighbours, with notes on the attack and the certificates."""
        truth = any(entry["informative"] is not None for entry in self.neighbours)
        signed = {e["node"]: e["contribution"] for e in (self.contributions or {}).get("neighbours", ())}
        columns = [Column("neighbour"), Column("attention"), *[Column("contribution", "+.3f")] * bool(signed)]
        columns += [Column("explains")] * truth
        columns += [Column("attacked"), Column("stays")] if self.attacked else []
        rows: list[list[Cell]] = []
        for rank, entry in enumerate(self.neighbours):
            row: list[Cell] = ["itself" if entry["itself"] else str(entry["name"]), entry["attention"]]
            row += [signed.get(entry["node"])] * bool(signed)
            row += ["yes" if entry["informative"] else ""] * truth
            if self.attacked:
                stays = "yes" if entry["node"] in self.attacked["kept"] else "no"
                row += [entry["attacked"], stays if rank < self.k else ""]
            rows.append(row)
        notes = [] if rows else [_NO_NEIGHBOURS]
        notes += self._sentences()
        return [Table(f"node {self.name}{self._prediction()}", columns, rows, notes)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the neighbours by falling attention as a `DataFrame` (needs pandas)."""
        return data_frame(self.neighbours)

    def _class(self, number: int) -> str:
        return _class_name(number, self.class_names)

    def _prediction(self) -> str:
        truth = "" if self.label < 0 else f" (truth: {self._class(self.label)})"
        predicted = f"class {self._class(self.predicted)}, {100 * self.confidence:.0f} %"
        return f" of {self.dataset}: {predicted}{truth}"

    def _bars(self, longest: int) -> RichTable:
        (table,) = self.tables()
        shown = [i for i, c in enumerate(table.columns) if longest >= 0 or c.title != "contribution"]
        drawn = RichTable(box=None, padding=(0, 1))
        bars = longest >= _LEAST_BLOCKS
        headings = [table.columns[i].title for i in shown]
        for heading in [*headings[:2], *[""] * bars, *headings[2:]]:
            right = heading in ("attention", "contribution", "attacked")
            drawn.add_column(heading, justify="right" if right else "left")
        most = max(entry["attention"] for entry in self.neighbours) or 1.0
        for rank, cells in enumerate(table.texts()[: max(self.k, _MOST_ROWS)]):
            bar = "█" * max(1, round(longest * self.neighbours[rank]["attention"] / most))
            name, *rest = (escape(cells[i]) for i in shown)
            drawn.add_row(name, rest[0], *[bar] * bars, *rest[1:], style="" if rank < self.k else "dim")
        return drawn

    def _sentences(self) -> list[str]:
        lines = [*self._contribution_sentences(), *self.counterfactual_sentences()]
        return [*lines, *self._attack_sentences(), *self._certified_sentences()]

    def _contribution_sentences(self) -> list[str]:
        signed = self.contributions
        if signed is None:
            return []
        if signed["reason"] is not None:
            return [f"contributions: not available: {signed['reason']}"]
        entries, terms, lines = signed["neighbours"], list[str](), list[str]()
        supporting = [entry for entry in entries if entry["contribution"] > 0]
        opposing = [entry for entry in reversed(entries) if entry["contribution"] < 0]
        for name, side in (("supporting", supporting), ("opposing", opposing)):
            if side:
                terms.append(f"{sum(entry['contribution'] for entry in side):+.3f} {name}")
                lines.append(f"{name}: {self._side(side)}")
        terms.append(f"{signed['rest']:+.3f} bias or residual")
        leads = f"class {self._class(signed['top'])} leads class {self._class(signed['second'])} by"
        return [f"{leads} {signed['margin']:.3f} = {' '.join(terms)}", *lines, *_sign_sentences(signed)]

    def _side(self, side: list[dict[str, Any]]) -> str:
        shown = [
            f"{'itself' if entry['itself'] else entry['name']} {entry['contribution']:+.3f}"
            + ("" if entry["of_edge"] is None else f" (edge {entry['of_edge']:+.3f})")
            for entry in side[: self.k]
        ]
        return ", ".join(shown) + (f" and {len(side) - self.k} others" if len(side) > self.k else "")

    def counterfactual_sentences(self) -> list[str]:
        """Which few neighbours, removed or injected, change the class, as far as was searched and proved."""
        searched = self.counterfactual or {}
        words = {"removed": "without {} of its neighbours", "injected": "with {} new neighbours"}
        return [self._counterfactual(words[name], entry) for name, entry in searched.items() if entry]

    def _counterfactual(self, words: str, entry: dict[str, Any]) -> str:
        size, bound = entry["size"], entry["lower_bound"]
        if entry["exhausted"]:
            return "whichever of its neighbours are removed, the class stays (all sets were tried)"
        needed = f", at least {bound} are needed" if bound > 1 else ""
        if size is None:
            return f"{words.format(f'up to {MOST_ITEMS}')}: no other class found{needed}"
        least = "no fewer do" if size == bound else f"perhaps fewer do{needed}"
        words = words.removesuffix("s") if size == 1 and words.startswith("with ") else words
        counts = Counter(entry["items"]).items()
        items = ", ".join(item if count == 1 else f"{count} × {item}" for item, count in counts)
        return f"{words.format(size)}: class {self._class(entry['predicted'])}: {items}; {least}"

    def _attack_sentences(self) -> list[str]:
        attacked, count = self.attacked, len(self.neighbours)
        if not attacked:
            return []
        top = min(self.k, count)
        chance = f" (by chance {top * attacked['chance']:.1f})" if top < count else ", all its neighbours"
        changed = "" if attacked["predicted"] == self.predicted else ", another one"
        lines = [
            f"under the {attacked['threat']} attack: class {self._class(attacked['predicted'])}"
            f" ({100 * attacked['confidence']:.0f} %){changed}; {len(attacked['kept'])} of the top {top}"
            f" stay{chance}"
        ]
        if new := attacked["new_neighbours"]:
            share = 100 * attacked["new_attention"]
            lines.append(f"{new} new neighbour{'s' * (new > 1)} took {share:.0f} % of its attention")
        return lines

    def _certified_sentences(self) -> list[str]:
        certified, k = self.certified, self.k
        if not certified:
            return []
        norm, radius, lines = certified["norm"], certified.get("shown_radius"), []
        if self.layer == "max":
            lines.append(f"the maximum over layers has no certificate; below, each layer's own top-{k}")
        elif self.layer == "mean" and radius is not None:
            vector = "while the explanation vector of each layer moves by less than"
            lines.append(f"shown top-{k}, {norm} ball: cannot change {vector} {radius:.4f}")
        for layer in certified["layers"]:
            lines.append(f"{layer['layer']}, {norm} ball: {self._radii(layer, certified['k'])}")
            if layer.get("properties"):
                lines.append(f"{layer['layer']}, {_properties(layer['properties'], certified)}")
        return [*lines, certified["promise"], *_injection_sentences(certified.get("injection") or {})]

    def _radii(self, layer: dict[str, Any], k: int) -> str:
        radius, class_radius, top = layer["topk_radius"], layer["class_radius"], layer.get("topk") or []
        names = {entry["node"]: str(entry["name"]) for entry in self.neighbours}
        listed = f" ({', '.join(names.get(n, str(n)) for n in top)})" if set(top) != set([*names][:k]) else ""
        order = (
            f"its top-{k}{listed} cannot change while its explanation vector moves by less than {radius:.4f}"
            if radius is not None
            else f"top-{k}: no other neighbour can enter"
        )
        status = layer["class_status"]
        if class_radius is not None:
            return f"{order}; class stays while each head moves by less than {class_radius:.4f} ({status})"
        return f"{order}; class: {'unknown' if status == 'unknown' else 'does not depend on attention'}"


def _sign_sentences(signed: dict[str, Any]) -> list[str]:
    if not signed["neighbours"]:
        return []
    pair, signs = "no attention of this layer changes these two classes", []
    if signed["pair_radius"] is not None:
        radius = f"{signed['pair_radius']:.4f} (l1)"
        pair = f"these two classes stay first and second while each head moves by less than {radius}"
    radii = [entry["radius"] for entry in signed["neighbours"] if entry["radius"] is not None]
    if always := len(signed["neighbours"]) - len(radii):
        which = f"{always} contributions" if radii else "a contribution"
        signs.append(f"no attention reverses the sign of {which}")
    if radii:
        signs.append(f"{len(radii)} keep their sign while each head moves by less than {min(radii):.4f}")
    return [f"proved with the values fixed: {pair}; for this pair {', '.join(signs)}"]


def _properties(properties: dict[str, bool | None], certified: dict[str, Any]) -> str:
    answers = []
    for name, value in properties.items():
        unmeasured = name.startswith("same") and not certified["compared"]
        answer = "not measured" if unmeasured else "unknown" if value is None else "yes" if value else "no"
        answers.append(f"{name.replace('_', ' ')}: {answer}")
    return f"Definition 1 at radius {certified['radius']:g}: {'; '.join(answers)}"


def _injection_sentences(proof: dict[str, Any]) -> list[str]:
    condition = f", {proof['condition']}" if proof.get("condition") else ""
    order = f"injected nodes cannot reorder its neighbours{condition}"
    lines = [f"{name}: {order}" for name in proof.get("invariant", ())]
    holds = proof.get("class_holds") or {}
    if holds.get("direct"):
        gains = "every node gains" if holds.get("any") else "the node gains"
        lines.append(f"class: holds if {gains} an injected neighbour, whatever its features")
    elif holds.get("direct") is not None:
        lines.append("class: not proved to hold against an injected neighbour")
    return lines
