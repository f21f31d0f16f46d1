"""The table of defences: how predictions hold under rising attacks, and what each defence costs."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.build import COMMON, beside_vanilla, count, flat_note, label
from experiments.cells import read_grid
from experiments.results import ROWS, Layers, Results
from experiments.sheet import Sheet
from experiments.store import Store
from experiments.training_tables import device_of, memory_above
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table

DEFENCE_ROWS = (*ROWS, "gnnguard", "gnn-svd", "pro-gnn")
KEPT = "overlap_touched.prediction.all"
THREATS = ("standard", "strong", "adaptive", "ensemble")


def defences(store: Store) -> list[Sheet | Table]:
    """Every method and defence under attacks of rising ingenuity, with seconds and memory."""
    cells = read_grid("defences")
    wanted = {(cell.model, cell.dataset, cell.row) for cell in cells}
    records = (
        record
        for record in store.records()
        if not record["cell"]["label"]
        and (record["cell"]["model"], record["cell"]["dataset"], record["cell"]["method"]) in wanted
        and record["cell"]["seed"] in {cell.seed for cell in cells}
    )
    results = Results.newest(records, cells)
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns += [quantity("f1.clean").column]
    columns += [quantity("f1.attacked", f"F1 {name}").column for name in THREATS]
    columns += [
        quantity(KEPT, "top 5 kept, standard").column,
        quantity("sharpness.clean.all").column,
        quantity("training.epoch_seconds", "ms per epoch", ".1f").column,
        quantity("training.seconds").column,
        Column("attacks s", ".1f"),
        quantity("training.peak_memory", "peak MiB", ".0f").column,
        Column("device"),
    ]
    rows: list[Sequence[Cell]] = [
        _row(results, model, dataset, row)
        for model in results.models()
        for dataset in results.datasets(model)
        for row in results.rows(model, dataset, DEFENCE_ROWS)
    ]
    notes = [
        "One seed. Every model is attacked through its own gradients, defences included. “kept”: overlap of"
        " the top 5 before and after, nodes in reach. `adaptive`: the budget of `standard`, more steps, and"
        " new nodes that pass for members of the neighbourhood they attack; `ensemble`: every search, at"
        " random and chosen endpoints. Peak memory of the training, above what data and parent hold.",
        COMMON,
        *flat_note(results, THREATS[0]),
    ]
    notes.append(count(results))
    return [Table("Defences", columns, rows, notes)]


def _row(results: Results, model: str, dataset: str, row: str) -> list[Cell]:
    def mean(path: str, threat: str = "standard", layers: Layers | None = None) -> float | None:
        found = results.estimate(model, dataset, row, path, threat, layers)
        return None if found is None else found.mean

    epoch, memory = mean("training.epoch_seconds"), memory_above(results, model, dataset, row)
    spent = [
        part.get("seconds", {}).get("total", 0.0)
        for record in results.held(model, dataset, row)
        for part in record["evaluations"].values()
    ]
    return [
        model,
        dataset,
        label(results, model, dataset, row),
        mean("f1.clean"),
        *(mean("f1.attacked", threat) for threat in THREATS),
        mean(KEPT, layers=beside_vanilla(results, model, dataset, row, KEPT, "standard")),
        mean("sharpness.clean.all"),
        None if epoch is None else 1e3 * epoch,
        mean("training.seconds"),
        sum(spent) if spent else None,
        None if memory is None else memory.mean / 2**20,
        device_of(results, model, dataset, row),
    ]
