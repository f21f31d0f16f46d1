"""Every bar, on both sides of its limit, from synthetic records."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from experiments import Cell, Store, bars, read_grid
from experiments.one_setting import FAITHFUL, Methods
from fgai.certificates import ALL_FOUR, PROPERTIES
from support import bench_cases as cases

PAIR = ("GAT", "amazon-photo")
GRIDS, PARENTS = ("methods", "definition", "whole", "cost"), ("endpoints", "node")
RULE, STRONG = "ensemble-weakest", "ensemble-strong"


def proof(share: float) -> dict[str, Any]:
    """A record of `certify` in which every property holds at the same share of the nodes."""
    held = {name: [share, share] for name in (*PROPERTIES, ALL_FOUR)}
    layers = [{"topk": {"share": share}}] * 2
    return {"certificate": {"layers": layers}, "definition": {"r001": held, "r01": held}}


def body(cell: Cell, changes: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """A record that meets every bar, with some numbers of some rows replaced."""
    made: dict[str, Any] = cases.body_of(cell)
    ours = cell.method == "fgai"
    if cell.kind == "certify":
        return made | proof(changes.get((cell.row, "proof"), 0.8 if ours else 0.5))
    if cell.kind == "cost":
        made["whole_seconds"] = changes.get((cell.row, "whole"), 3.0 if ours else 1.0)
        made["training"] |= {"epoch_seconds": 0.01, "peak_memory": 3e8, "base_memory": 2e8}
        made["training"] |= {path: value for (row, path), value in changes.items() if row == cell.row}
    for threat, evaluation in made.get("evaluations", {}).items():
        metrics = evaluation["metrics"]
        metrics["f1"]["attacked"] = {"vanilla": 0.3, "fgai": 0.91, "harden": 0.912}.get(cell.method, 0.9)
        kept = {"overlap": cases.layered(0.95 if ours else 0.7)}
        metrics["endpoints"] = {"cover": {"explanation": kept}}
        for (row, path), value in changes.items():
            place, _, only = path.partition("@")
            if row == cell.row and only in ("", threat) and place not in ("proof", "whole"):
                *parents, last = place.split(".")
                held: Any = metrics
                for parent in parents:
                    held = held[parent]
                held[int(last) if last.isdigit() else last] = value
    return made


def filled(root: Path, dataset: str = PAIR[1], changes: dict[tuple[str, str], Any] | None = None) -> Store:
    """A store with every cell of one graph and GAT, seeds 0 and 1, that bars read."""
    store = Store(root)
    cells = [cell for name in GRIDS for cell in read_grid(name)]
    cells += [cell for name in PARENTS for cell in read_grid(name) if cell.method == "vanilla"]
    with patch("os.fsync"):  # records that need not outlive the test
        for cell in cells:
            if (cell.model, cell.dataset) == ("GAT", dataset) and cell.seed < 2:
                store.write(cell, body(cell, changes or {}))
    return store


def judged(store: Store, name: str, dataset: str) -> bars.Bar:
    found = [bar for bar in bars.check(store) if bar.name == name]
    return next((bar for bar in found if bar.pair == f"GAT {dataset}"), found[0])


CASES = [
    ("clean F1", "f1.clean", 0.9151, 0.9149, PAIR[1]),
    ("`ensemble` F1", f"f1.attacked@{RULE}", 0.8751, 0.8749, PAIR[1]),
    ("`ensemble` F1, small graphs", f"f1.attacked@{RULE}", 0.891, 0.889, "cora"),
    ("same top 5, every layer that is not flat", "similarity.overlap.layers.0", 0.85, 0.849, PAIR[1]),
    ("same top 5, sharpest layer", "similarity.overlap.sharpest", 0.9, 0.899, PAIR[1]),
    ("sharpness", "sharpness.clean.all", 0.1901, 0.1899, PAIR[1]),
]
"""Names of bars with the number they read, a good and a bad value."""


@pytest.mark.many
@pytest.mark.parametrize(("name", "path", "good", "bad", "dataset"), CASES)
def test_bars_of_a_pair(tmp_path: Path, name: str, path: str, good: float, bad: float, dataset: str) -> None:
    for value, met in ((good, True), (bad, False)):
        change: dict[tuple[str, str], Any] = {(FAITHFUL, path): value}
        if path == "sharpness.clean.all":
            change[(FAITHFUL, "sharpness.clean.layers")] = [value, value]
        found = judged(filled(tmp_path / str(met), dataset, changes=change), name, dataset)
        assert found.met is met and found.found != "–"


def test_a_flat_layer_is_left_out(tmp_path: Path) -> None:
    change = {
        (row, path): value
        for row in (FAITHFUL, "vanilla", "harden", "limits, one setting")
        for path, value in (("sharpness.vanilla.layers.0", 1e-9), ("similarity.overlap.layers.0", 0.1))
    }
    found = judged(filled(tmp_path, changes=change), "same top 5, every layer that is not flat", PAIR[1])
    assert found.met is True and found.found == "0.950"


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "row", "path", "good", "bad"),
    [
        ("mean `ensemble` F1", FAITHFUL, f"f1.attacked@{RULE}", 0.9001, 0.8999),
        ("mean `ensemble` F1 beside harden", FAITHFUL, f"f1.attacked@{RULE}", 0.9071, 0.9069),
        ("mean `ensemble-strong` F1", FAITHFUL, f"f1.attacked@{STRONG}", 0.85, 0.849),
        ("Definition 1, output layer, mean gain", FAITHFUL, "proof", 0.531, 0.529),
        ("whole call ÷ training, two CPU threads", "fgai, whole call", "whole", 4.0, 4.1),
        ("seconds per epoch ÷ vanilla's", "fgai", "epoch_seconds", 0.02, 0.0201),
        ("peak memory ÷ vanilla's", "fgai", "peak_memory", 3.5e8, 3.6e8),
    ],
)
def test_means_and_costs(tmp_path: Path, name: str, row: str, path: str, good: float, bad: float) -> None:
    for value, met in ((good, True), (bad, False)):
        store = filled(tmp_path / str(met), changes={(row, path): value})
        methods = Methods(store)
        found = [*bars._means(methods, [PAIR]), *bars._definition(methods, [PAIR]), *bars._cost(store)]
        bar = next(b for b in found if b.name == name and b.pair in ("mean of 1 pairs", "GAT amazon-photo"))
        assert bar.met is met


def test_counts_over_pairs() -> None:
    def count(held: list[bool]) -> bool | None:
        return bars._count("name", "wanted", held, 12, 10).met

    assert count([True] * 10) is True and count([True] * 10 + [False] * 2) is True
    assert count([True] * 9) is None, "three pairs are still to come"
    assert count([True] * 9 + [False] * 3) is False


def test_tables_show_what_is_missed(tmp_path: Path) -> None:
    found = bars.check(filled(tmp_path, changes={(FAITHFUL, "f1.clean"): 0.9}))
    text = bars.summary(found).to_markdown()
    assert "GAT amazon-photo (0.900, 0.920)" in text and "20 without a number" in text
    rows = bars.table(found, every=False).rows
    assert ["clean F1", "≥ vanilla − 0.005", "GAT amazon-photo", "0.900, 0.920", "missed"] in rows


def test_without_records_nothing_is_met_or_missed(tmp_path: Path) -> None:
    found = bars.check(Store(tmp_path))
    assert {bar.met for bar in found} == {None}
    assert f"0 met, 0 missed, {len(found)} no number" in bars.table(found).to_markdown()
