"""The table of explainers side by side: stable, the same again, faithful, true, fast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.build import name_of
from experiments.cells import Cell as Grid
from experiments.cells import read_grid
from experiments.explained import EPOCHS, FEWER, FEWER_ON, NODES, K, names_for
from experiments.fingerprint import earlier_note
from experiments.sheet import Sheet
from experiments.statistics import estimate
from experiments.store import Store
from fgai import explanations
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table, look_up

FOLDERS = ("explainers", "explainers-truth")
THREAT = "standard"
OURS = "attention-log"
SIGNS = {"plus": "+", "minus": "−"}


@dataclass(frozen=True)
class Explained:
    """One explainer of one model on one dataset."""

    model: str  # class name
    dataset: str  # name
    method: str  # how the model was trained
    name: str  # of the explainer
    seeds: list[dict[str, Any]] = field(default_factory=list)  # what was measured, a mapping per seed
    errors: list[str] = field(default_factory=list)  # of the seeds on which it did not run

    @property
    def title(self) -> str:
        """In tables and figures."""
        title = explanations.EDGE_EXPLAINERS[self.name].title
        return title if self.method == "vanilla" else f"{name_of(self.method)}: {title}"

    @property
    def is_ours(self) -> bool:
        """Whether it is what `make_faithful` is for."""
        return self.method == "fgai" and self.name == OURS

    @property
    def draws(self) -> bool:
        """Whether the explainer's seed has a say."""
        return explanations.EDGE_EXPLAINERS[self.name].draws

    def values(self, path: str) -> list[float]:
        """A number of every seed that has it."""
        found = [look_up(seed, path) for seed in self.seeds]
        return [float(value) for value in found if isinstance(value, int | float)]

    @property
    def kept(self) -> list[float]:
        """What stays of the top k under attack at nodes in its reach, by seed."""
        return self.values(f"kept.{THREAT}.touched")

    def spread(self, path: str, form: str = ".2f") -> str | None:
        """Mean ± standard deviation over seeds; None where nothing is known."""
        found = estimate(self.values(path))
        if found is None:
            return None
        return f"{found.mean:{form}} ± {found.std:{form}}" if found.seeds > 1 else f"{found.mean:{form}}"

    def mean(self, path: str) -> float | None:
        """Mean over seeds; None where nothing is known."""
        found = estimate(self.values(path))
        return None if found is None else found.mean


def read_explained(store: Store, expected: Iterable[Grid] = ()) -> list[Explained]:
    """Every explainer with records, or `expected` ones, by model and dataset; the vanilla model's first."""
    places = ((c.model, c.dataset, c.method, name) for c in expected for name in names_for(c))
    held = {key: Explained(*key) for key in places}
    for record in (record for folder in FOLDERS for record in store.records(folder)):
        cell = Grid.from_dict(record["cell"])
        for name, row in record["explainers"]["rows"].items():
            key = cell.model, cell.dataset, cell.method, name
            found = held.setdefault(key, Explained(*key))
            if "error" in row:
                found.errors.append(row["error"])
            else:
                found.seeds.append(row)
    order = list(explanations.EDGE_EXPLAINERS)
    return sorted(
        held.values(), key=lambda e: (e.model, e.dataset, e.method != "vanilla", order.index(e.name))
    )


def explainers(store: Store) -> list[Sheet | Table]:
    """What explainers of one model say, and for how long."""
    cells = read_grid("explainers")
    held = read_explained(store, cells)
    columns = [Column(name) for name in ("model", "dataset", "explainer")]
    columns += [Column(f"top {K} kept ↑"), Column("by chance"), Column("another seed ↑")]
    columns += [quantity(f"fidelity.clean.{part}", f"fidelity{sign}") for part, sign in SIGNS.items()]
    columns += [Column("truth AUC ↑"), Column("tied"), Column("seconds ↓"), Column("nodes"), Column("seeds")]
    rows: list[Sequence[Cell]] = [
        [
            row.model,
            row.dataset,
            row.title,
            row.spread(f"kept.{THREAT}.touched"),
            _number(row.mean(f"kept.{THREAT}.chance"), ".2f"),
            row.spread("again") if row.draws or not row.seeds else "1",
            row.spread("fidelity.plus"),
            row.spread("fidelity.minus"),
            row.spread("truth"),
            _number(row.mean("tied"), ".2f"),
            _number(row.mean("seconds"), ".2g"),
            _number(sum(row.values("nodes")) or None, ".0f"),
            str(len(row.seeds)),
        ]
        for row in held
    ]
    return [Table("Explainers side by side", columns, rows, _notes(store, cells, held))]


def _notes(store: Store, cells: Sequence[Grid], held: Sequence[Explained]) -> list[str]:
    fewer = [f"{count} on {name}" for name, count in FEWER_ON.items()]
    fewer += [f"{count} for {_title(name)}" for name, count in FEWER.items()]
    epochs = ", ".join(f"{_title(name)} {count}" for name, count in EPOCHS.items())
    missing = len(cells) - len(list(store.finished(cells)))
    notes = [
        f"Up to {NODES} test nodes with more than {K} neighbours per seed ({', '.join(fewer)}); the same"
        " nodes, and the same attacked graph, for all explainers of a model. Mean ± std over seeds.",
        f"“kept”: share of a node's top {K} old neighbours that still are its top {K} under the `{THREAT}`"
        " attack, nodes in its reach; ties are broken at random. “another seed”: the same on the clean graph"
        " when the explainer draws from another seed; 1 where it draws nothing.",
        f"Fidelity: how often the predicted class changes without the top {K} (+), and with nothing else but"
        " loops (−). Truth AUC: within each neighbourhood. “tied”: nodes whose fifth and sixth neighbour have"
        " the same score. Seconds per explanation; what PGExplainer learns, and attention's one pass, are"
        " shared among the nodes.",
        f"Epochs or steps of a search: {epochs}.",
        f"{missing} of {len(cells)} cells are missing." if missing else f"All {len(cells)} cells are there.",
    ]
    broken = {f"{row.title} on {row.dataset}: {row.errors[0]}" for row in held if row.errors}
    return [*notes, *earlier_note(store, cells), *sorted(broken)]


def _title(name: str) -> str:
    return explanations.EDGE_EXPLAINERS[name].title


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"
