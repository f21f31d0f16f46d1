"""`Card`: the numbers of one model; `check_card` checks them, `write_page` lists a folder of cards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypedDict

from rich.console import Console

from fgai.attacks import weak_search_note
from fgai.certificates import ALL_FOUR, PROPERTIES, CertificateRecord, InjectionCertificate
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.evaluation.definition import ALPHA, BETA, RADII
from fgai.evaluation.record import shown_paths, threat_words
from fgai.evaluation.summary import measure_names
from fgai.files import check, write_atomic
from fgai.metrics import chance_path, metric_at, quantity
from fgai.records import (
    Cell,
    Column,
    Document,
    Table,
    TabledDocument,
    look_up,
    plain,
    provenance_line,
    read_json,
)
from fgai.reports.template import asset, fill
from fgai.typed import typed
from fgai.version import __version__

Proof = CertificateRecord | InjectionCertificate  # whose shares a card can hold
ONE_RUN = "One model, one split, one seed: other trainings of the same kind may give other numbers."


class Number(TypedDict):
    """One number of a card, as its file holds it."""

    title: str
    value: float | None
    chance: float | None
    direction: Literal["higher", "lower", ""]
    parameters: dict[str, Any]


_RADIUS = "r01"
_TEXTS = ("model.class", "data.name", "data.fingerprint", "threat.name", "threat.words")
_PARTS: dict[str, Any] = dict.fromkeys(_TEXTS, str)
_PARTS |= dict.fromkeys(("model.config", "threat.budget"), dict[str, Any] | None)


@typed
@dataclass(frozen=True, kw_only=True)
class Card(TabledDocument):
    """What was measured and certified of one model on one dataset under one threat.

    Attributes:
        model: class and settings.
        data: name, fingerprint and sizes of the dataset.
        threat: name, budget, and the name with a size that is not its own, in `words`.
        protocol: task, targets, k and seed.
        numbers: by their names in records; None if undefined, chance is None where there is no such level.
        limits: of what the numbers say, a sentence each.
        definition: at how many nodes Definition 1 holds, a sentence for each property.
        warnings: code and message of everything raised while measuring.
    """

    KIND: ClassVar[str] = "card"

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    threat: dict[str, Any]
    protocol: dict[str, Any]
    numbers: dict[str, dict[str, Any]]
    limits: list[str]
    warnings: list[dict[str, str]]
    version: dict[str, str]
    definition: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; older cards have no `definition`."""
        return super().from_dict({"definition": [], **values} if isinstance(values, Mapping) else values)

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the names and types of a file's values."""
        return {**super().layout(), "numbers": dict[str, Number]}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        for path, kind in _PARTS.items():
            part, name = path.split(".")
            check(fields[part].get(name), kind, f"{name} of {part} of the card")
        return cls(**fields)

    def tables(self) -> list[Table]:
        """Return the numbers, and notes on Definition 1 and the limits."""
        rows: list[list[Cell]] = []
        for path, number in self.numbers.items():
            column = Column(number["title"], _form_of(path), number["direction"])
            cells = [column.text(number["value"]), column.text(number["chance"])]
            rows.append([path, column.heading, *cells, _settings(number["parameters"])])
        columns = [Column(name) for name in ("quantity", "what", "value", "chance", "parameters")]
        return [Table(self.title, columns, rows, [*self.definition, *self._limits()])]

    def show(self, console: Console | None = None, *, every: bool = False) -> None:
        """Print the readable numbers, at most twelve; `every` prints all instead."""
        (table,) = self.tables()
        if not every:
            words = self.readable()
            rows = [[words[str(row[0])], row[2], row[3]] for row in table.rows if row[0] in words]
            names = [Column("quantity"), Column("value"), Column("chance")]
            table = replace(table, columns=names, rows=rows, notes=[*table.notes, "Every number: --all."])
        table.show(console)

    def _limits(self) -> list[str]:
        return [*self.limits, *(entry.get("message", "") for entry in self.warnings)]

    @property
    def title(self) -> str:
        """The model, the data and the threat in one line."""
        return f"{self.name} on {self.data['name']}, threat {self.threat['words']}"

    def readable(self) -> dict[str, str]:
        """Return readable names of the main numbers by their paths, with layer, nodes and radius."""
        metrics: dict[str, Any] = {path.partition(".")[0]: {} for path in self.numbers}
        names = measure_names({"config": self.protocol, "metrics": metrics})
        words = {path: text for text, path in names.items() if path in self.numbers}
        if (proved := self.numbers.get("certificate.share")) is not None:
            k, radius = (proved["parameters"].get(name) for name in ("k", "radius"))
            words["certificate.share"] = f"top {k} proved to stay, output layer, R = {radius}"
        return words

    def to_markdown(self) -> str:
        """Return the card as Markdown in which no name is markup."""
        (table,) = self.tables()
        about = {
            "model": f"{self.model['class']} ({_settings(self.model.get('config') or {})})",
            "data": f"{self.data['name']}, fingerprint {self.data['fingerprint']}",
            "threat": f"{self.threat['words']}: {_settings(self.threat.get('budget') or {})}",
            "protocol": _settings(self.protocol),
            "versions": _settings(self.version),
            "evidence": _evidence(self),
        }
        cells = [[_literal(str(cell)) for cell in row] for row in table.rows]
        lines = [f"# {_literal(self.title)}", ""]
        lines += [f"- **{name}**: {_literal(text)}" for name, text in about.items()]
        lines += ["", "## Numbers", "", Table("", table.columns, cells).to_markdown()]
        for heading, notes in (("Definition 1", self.definition), ("Limits", self._limits())):
            if notes:
                lines += ["", f"## {heading}", "", *(f"- {_literal(note)}" for note in notes)]
        return "\n".join(lines) + "\n"

    def write(self, path: Path | str) -> tuple[Path, Path]:
        """Write the card as JSON, and as Markdown beside it."""
        saved = self.save(path)
        write_atomic(saved.with_suffix(".md"), self.to_markdown())
        return saved, saved.with_suffix(".md")


@typed
def card(
    record: EvaluationRecord | Comparison, certificates: Iterable[Proof] = (), *, name: str | None = None
) -> Card:
    """Make the card of one model from results of `evaluate`, `compare` and `certify`.

    A comparison needs the `name` of one of its models; else it is that of the card. `InputError` for no such
    model, or a certificate of something else.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=3, progress=False)
        >>> record = fgai.evaluate(model, data, "random", name="GAT", curves=False, nulls=False)
        >>> fgai.card(record).title
        'GAT on planted, threat random'
    """
    if isinstance(record, Comparison):
        if name is None and len(record) > 1:
            raise InputError(f"`name` must say whose card is made: {', '.join(r.name for r in record)}")
        record = record.records[0] if name is None else record[name]
    numbers = _measured_numbers(record)
    limits, definition = [ONE_RUN, weak_search_note(str(record.threat.get("name")))], list[str]()
    for proof in certificates:
        _check_same(record, proof)
        numbers |= _certified_numbers(proof)
        limits.append(proof.promise)
        if isinstance(proof, CertificateRecord):
            definition += [f"{proof.layer().name}: {text}" for text in proof.sentences()]
    names = [name for name in ("task", "targets", "k", "headline") if name in record.config]
    shared = ("model", "data", "warnings", "version", "provenance")
    return Card(
        name=record.name if name is None else name,
        threat={**record.threat, "words": threat_words(record)},
        protocol={**{name: record.config[name] for name in names}, "seed": record.seed},
        numbers=numbers,
        limits=[text for text in dict.fromkeys(limits) if text],
        definition=definition,
        **{part: getattr(record, part) for part in shared},
    )


def _evidence(card: Card) -> str:
    return provenance_line(card.provenance) or "none: the record is of an older fgai"


def _form_of(path: str) -> str:
    """Format of a number; plain if this fgai does not know it, or if it is a count."""
    try:
        form = quantity(path).form
    except InputError:
        return ".4g"
    return ".4g" if form.endswith("d") else form


def _number(path: str, value: Any, parameters: dict[str, Any], chance: Any = None) -> dict[str, Any]:
    """The entry of a number, as `Number` lists it."""
    about = quantity(path)
    values = {"title": about.title, "value": value, "chance": chance, "direction": about.better}
    return {**values, "parameters": parameters}


def _measured_numbers(record: EvaluationRecord) -> dict[str, dict[str, Any]]:
    """The metrics, and the shares of Definition 1 at the output layer for the larger radius."""
    numbers = {}
    for path in shown_paths(record.metrics):
        spec, chance = metric_at(path), chance_path(path)
        defaults = {} if spec is None else spec.defaults
        options = plain({name: record.config.get(name, value) for name, value in defaults.items()})
        level = look_up(record.metrics, chance) if chance else None
        numbers[path] = _number(path, look_up(record.metrics, path), options, level)
    shares = look_up(record.metrics, f"definition.{_RADIUS}") or {}
    about = {"radius": RADII[_RADIUS], "alpha": ALPHA, "beta": BETA, "k": record.config.get("k")}
    for path in (f"definition.{_RADIUS}.{name}.last" for name in (*PROPERTIES, ALL_FOUR) if name in shares):
        numbers[path] = _number(path, look_up(record.metrics, path), about)
    return numbers


def _certified_numbers(proof: Proof) -> dict[str, dict[str, Any]]:
    """Certified shares under the names the metrics declare."""
    if isinstance(proof, InjectionCertificate):
        options: dict[str, Any] = {"neighbours": proof.neighbours, "where": proof.where, "k": proof.k}
        shares = [proof.order_share(layer) for layer in range(len(proof.layers))]
        known = [share for share in shares if share is not None]
        values = {
            "injection.class_share": proof.share() if proof.known else None,
            "injection.order_share": min(known) if known and len(known) == len(shares) else None,
        }
    else:
        options = {"radius": proof.radius, "norm": proof.norm, "k": proof.k2}
        last = proof.summary()["layers"][-1]
        values = {
            "certificate.share": last["topk"]["share"],
            "certificate.class_share": last["class"]["share"],
            "certificate.median_radius": last["topk"]["median_radius"],
        }
    return {path: _number(path, plain(value), options) for path, value in values.items()}


def _check_same(record: EvaluationRecord, proof: Proof) -> None:
    """Raise unless a certificate is about the model and the data of the record."""
    for what, part in (("model", "class"), ("model", "config"), ("data", "name"), ("data", "nodes")):
        ours = getattr(record, what).get(part) or None  # a model of the user's own has no config
        theirs = getattr(proof, what)
        if part in theirs and (theirs[part] or None) != ours:
            text = f"its {part} is {theirs[part]!r}, that of the record {ours!r}"
            raise InputError(f"`certificates` must be of the same {what}: {text[:300]}")
    for what in ("weights", "data"):
        ours, theirs = record.provenance.get(what), proof.provenance.get(what)
        if ours is None or theirs is None:
            which = "the record" if ours is None else "a certificate"
            text = f"and data: {which} does not name its {what}; make it again with this fgai"
            raise InputError(f"`certificates` must be of the same weights {text}")
        if ours != theirs:
            text = f"as the record: {theirs} is not {ours}"
            raise InputError(f"`certificates` must be of the same {what} {text}")


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _literal(text: str) -> str:
    """Text escaped for Markdown, on one line."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for letter in "\\`*[]":
        line = line.replace(letter, f"\\{letter}")
    return line


_RECORDS = (EvaluationRecord, Comparison, CertificateRecord, InjectionCertificate)
_KINDS: dict[str, type[Document]] = {record.KIND: record for record in _RECORDS}


@typed
def card_from_files(files: Iterable[Path | str], *, name: str | None = None) -> Card:
    """Make a card from files: one evaluation or comparison and certificates of the same model, see `card`.

    `CheckpointError` if a file is missing, damaged, from a newer fgai or of another kind.
    """
    documents: list[Any] = [_read(Path(path)) for path in files]
    records = [entry for entry in documents if isinstance(entry, EvaluationRecord | Comparison)]
    if len(records) != 1:
        raise InputError(f"a card is made of one evaluation or comparison, got {len(records)}")
    return card(records[0], [entry for entry in documents if isinstance(entry, Proof)], name=name)


def _read(path: Path) -> Document:
    values = read_json(path)
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(f"{path} holds {kind!r}; a card is made of {', '.join(_KINDS)}")
    return _KINDS[kind].load(path)


class Finding(NamedTuple):
    """The `value` at a `path` of a card, None if undefined, and a `bound`, by `side` its `min` or `max`."""

    path: str
    side: str
    bound: float
    value: float | None

    @property
    def met(self) -> bool:
        """Whether the number is on the right side of the bar, or on it; an undefined one is not."""
        value, bound = self.value, self.bound
        return value is not None and (value >= bound if self.side == "min" else value <= bound)


@typed
def check_card(
    card: Card, minimum: Mapping[str, float] | None = None, maximum: Mapping[str, float] | None = None
) -> list[Finding]:
    """Compare numbers of a card with least and largest values by name; return one finding for each.

    A bar on `f1` holds for every number below that name, `f1.clean` and `f1.attacked`; a bar on a metric's
    name, such as `g_tvd_rel`, for every number of that metric; a bar on the beginning of a readable name,
    such as `top 5 kept`, for all that begin so, see `Card.readable`. `InputError` for no bars, a bar that is
    not finite, or a name that is not on the card.

    Example:
        >>> number = {"title": "F1", "value": 0.9, "chance": 0.2, "direction": "higher", "parameters": {}}
        >>> parts = ("model", "data", "threat", "protocol", "version")
        >>> rest = {**{part: {} for part in parts}, "limits": [], "warnings": []}
        >>> check_card(Card(name="GAT", numbers={"f1.clean": number}, **rest), {"f1": 0.8})[0].met
        True
    """
    findings = []
    for side, bars in (("min", minimum or {}), ("max", maximum or {})):
        for name, bound in bars.items():
            if not abs(bound) < float("inf"):
                raise InputError(f"the bar of {name!r} must be a finite number, got {bound!r}")
            paths = _paths(card, name)
            findings += [Finding(path, side, bound, card.numbers[path]["value"]) for path in paths]
    if not findings:
        names = "; ".join(card.readable().values())
        raise InputError(f"set at least one bar, `--min NAME=NUMBER` or `--max NAME=NUMBER`, of: {names}")
    return findings


def _paths(card: Card, name: str) -> list[str]:
    """The numbers of a card that a name stands for."""
    words, start = card.readable(), name.lower()
    paths = (
        [path for path in card.numbers if path == name or path.startswith(f"{name}.")]
        or [path for path in card.numbers if (spec := metric_at(path)) and spec.name == name]
        or [path for path, text in words.items() if f"{text.lower()},".startswith(f"{start},")]
    )
    if not paths:
        names = [*words.values(), *card.numbers]
        near = get_close_matches(name, names) or names
        raise InputError(f"the card has no quantity {name!r}; it has {'; '.join(near)}")
    return paths


class Listing(NamedTuple):
    """The `cards` of a folder by the name of their file, in order, and why other files are `unusable`."""

    cards: dict[str, Card]
    unusable: dict[str, str]


@typed
def read_cards(folder: Path | str) -> Listing:
    """Read every card of a folder, one `.json` file each; other files are listed with the reason.

    `InputError` if there is no such folder, or not one card in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"`folder` must be a folder of cards, got {folder}; `fgai card` writes cards")
    cards, unusable = {}, {}
    for path in sorted(folder.glob("*.json")):
        try:
            cards[path.name] = Card.load(path)
        except CheckpointError as error:
            unusable[path.name] = str(error)
    if not cards:
        raise InputError(f"there is no card in {folder}; `fgai card` writes cards")
    return Listing(cards=cards, unusable=unusable)


@typed
def write_page(listing: Listing, path: Path | str, *, title: str = "Explanation cards") -> Path:
    """Write the page in one step; a crash leaves the old one as it was.

    Cards share a table if they have the same data, threat, budget and protocol. Texts of cards are escaped.
    """
    groups: dict[str, dict[str, Card]] = {}
    for name, card in listing.cards.items():
        alike = [card.data["fingerprint"], card.threat["name"], card.threat.get("budget"), card.protocol]
        groups.setdefault(json.dumps(alike, sort_keys=True), {})[name] = card
    parts = {
        "title": title,
        "style": asset("style.css") + asset("cards.css", "cards"),
        "count": len(listing.cards),
        "unusable": listing.unusable,
        "sections": sorted(map(_section, groups.values()), key=lambda section: str(section["heading"])),
        "anchor": _anchor,
        "script": asset("cards.js", "cards"),
        "version": __version__,
    }
    write_atomic(Path(path), fill(asset("cards.html", "cards"), parts))
    return Path(path)


def _section(group: dict[str, Card]) -> dict[str, Any]:
    """One table of comparable cards."""
    first = next(iter(group.values()))
    options = ", ".join(f"{name} {value}" for name, value in first.protocol.items())
    columns = {
        path: Column(number["title"], _form_of(path), number["direction"])
        for card in group.values()
        for path, number in card.numbers.items()
        if number["value"] is not None
    }
    return {
        "heading": f"{first.data['name']}, threat {first.threat['words']} ({options})",
        "columns": [Column("model"), Column("class"), *columns.values()],
        "details": [(file, card, _details(file, card)) for file, card in group.items()],
        "rows": [(file, card, _cells(card, columns, "value")) for file, card in _ranked(group, columns)],
        "chance": _cells(first, columns, "chance"),  # the same for all cards of a table
    }


def _ranked(group: dict[str, Card], columns: dict[str, Column]) -> list[tuple[str, Card]]:
    """Cards by the first number under attack, the best first; those without it last."""
    path = next((path for path in columns if path.endswith(".attacked")), next(iter(columns), ""))
    sign = -1.0 if columns and columns[path].better == "higher" else 1.0

    def rank(entry: tuple[str, Card]) -> tuple[bool, float, str]:
        value = entry[1].numbers.get(path, {}).get("value")
        return value is None, sign * (value or 0.0), entry[0]

    return sorted(group.items(), key=rank)


def _cells(card: Card, columns: dict[str, Column], part: str) -> list[tuple[float | None, str]]:
    values = {path: card.numbers.get(path, {}).get(part) for path in columns}
    return [(values[path], column.text(values[path])) for path, column in columns.items()]


def _details(file: str, card: Card) -> list[str]:
    facts = {
        "file": file,
        "model": card.model,
        "fingerprint": card.data["fingerprint"],
        "versions": card.version,
        "evidence": _evidence(card),
    }
    return [*(f"{name}: {value}" for name, value in facts.items()), *card.tables()[0].notes]


def _anchor(file: str) -> str:
    """A unique identifier that is valid in addresses and attributes."""
    stem = file.removesuffix(".json")
    return "card-" + re.sub(r"[^A-Za-z0-9_-]", lambda letter: f".{ord(letter[0]):x}.", stem)
