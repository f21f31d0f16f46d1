"""What the bench suites share: synthetic records whose numbers are known, and cells that take no time."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from experiments import Cell, Store, read_grid
from experiments.again import ANOTHER
from experiments.explained import names_for
from experiments.fingerprint import fingerprint
from experiments.results import Results
from experiments.run import CONFIDENCE, GROUPS, INJECTED, VOTED
from experiments.trained import settings_of
from fgai.certificates import BUDGETS, WHERE

GOOD = {"vanilla": 0.4, "ln": 0.6, "at": 0.7, "at-limits": 0.88, "fgai": 0.9, "fgai-injection": 0.8}
"""Attacked F1 of seed 0; every further seed adds 0.01."""
HARDER = {"strong": 0.2, "ensemble-strong": 0.03}
"""What further threats take away."""


def tiny(**changes: Any) -> Cell:
    """A cell that trains two epochs and attacks nothing."""
    values: dict[str, Any] = {"settings": {"epochs": 2}, "threats": (), **changes}
    return Cell(**values)


def layered(value: float) -> dict[str, Any]:
    return {"layers": [value, value], "last": value, "all": value, "sharpest": value}


def slopes(plus: float, minus: float) -> dict[str, Any]:
    curves = {"curve_plus": [1.0, 0.9, 0.8, 0.7, 0.6, 0.5], "curve_minus": [1.0, 1.0, 1.0, 0.9, 0.9, 0.9]}
    return {"plus": plus, "minus": minus, "gap": minus - plus, **curves}


def metrics_of(cell: Cell, attacked: float) -> dict[str, Any]:
    """Everything the tables read, made from one number."""
    moved, both = 1.0 - attacked, ("clean", "attacked")
    f_slope = {
        scope: {when: slopes(-1.0 - 0.1 * (when == "clean"), -0.1) for when in both}
        for scope in ("graph", "node")
    }
    flat = {scope: {when: slopes(-0.5, -0.4) for when in both} for scope in ("graph", "node")}
    overlaps = {"prediction": layered(0.5 + attacked / 2), "explanation": layered(0.4 + 0.6 * attacked)}
    if cell.method == "fgai":
        overlaps["explanation"]["layers"] = [1.0, 2 * overlaps["explanation"]["all"] - 1.0]
    null = {
        "overlap_touched": layered(1.0),
        "sharpness": layered(0.0),
        "similarity": {"overlap": layered(0.5)},
        "f_slope": flat,
    }
    return {
        "f1": {
            "clean": 0.92,
            "attacked": attacked,
            "attacked_explanation": attacked,
            "attacked_random": attacked + 0.01,
            "attacked_chosen": attacked,
        },
        "lost": {"explanation": dict.fromkeys(("random", "cover", "defects"), 0.6 - 0.6 * attacked)},
        "g_tvd": {"logits": 50 * moved, "probs": moved**4, "rel": moved**4},
        "g_jsd": layered(moved**4 / 100),
        "overlap": {"chance": layered(0.25)},
        "overlap_touched": {**overlaps, "chance": layered(0.3)},
        "sharpness": {"clean": layered(0.2), "attacked": layered(0.2), "vanilla": layered(0.2)},
        "similarity": {"overlap": layered(1.0 if cell.method == "vanilla" else 0.95)},
        "f_slope": f_slope,
        "null": {"uniform": null, "random": null},
    }


def explainers_of(cell: Cell) -> dict[str, Any]:
    """Every explainer keeps 0.5, and 0.9 of a model made faithful; every further seed adds 0.01."""
    kept = 0.5 + 0.4 * (cell.method == "fgai") + 0.01 * cell.seed
    row = {
        "nodes": 16, "epochs": None, "seconds": 0.25, "tied": 0.0, "chance": 0.4, "again": 0.75,
        "kept": {"standard": {"all": 1.0, "touched": kept, "chance": 0.375, "nodes": 12}},
        "fidelity": {"plus": 0.3, "minus": 0.1},
    }  # fmt: skip
    if cell.task == "truth":
        row["truth"] = 0.625
    return {
        "k": 5,
        "nodes": [3, 7],
        "truth_nodes": None,
        "attacks": {},
        "rows": dict.fromkeys(names_for(cell), row),
    }


def body_of(cell: Cell) -> dict[str, Any]:
    """A record as `run_cell` would write it, without training anything."""
    attacked = GOOD.get(cell.method, 0.5) + 0.01 * cell.seed
    slow = {"vanilla": 1.0, "fgai": 1.5}.get(cell.method, 2.0)
    training = {
        "seconds": 10.0 * slow,
        "epoch_seconds": 0.004 * slow,
        "epochs": 3,
        "best_epoch": 2,
        "peak_memory": int(200e6 + 100e6 * (0.9 + 0.1 * slow)),
        "base_memory": int(200e6),
        **settings_of(cell),
    }
    about = {"fgai": "0.1.0", "torch": "2", "python": "3", "device": "cpu"}
    body: dict[str, Any] = {
        "status": "done", "seconds": 12.0, "warnings": [], "training": training, "about": about,
        "fingerprint": fingerprint(cell),
    }  # fmt: skip
    if cell.kind == "search":
        clean, hit = 0.9, 0.5 + float(cell.settings.get("lr", 0.0))
        kept = {"all": 0.95, "sharpest": 0.95}
        body["validation"] = {"clean": clean, "attacked": hit, "criterion": (clean + hit) / 2}
        body["validation"] |= {"similarity": kept, "sharpness": kept}
    if cell.kind == "certify":
        share = 0.1 + 0.3 * (cell.method == "fgai")
        layer = {
            "name": "layers.0",
            "trivial_share": 0.25,
            "sharpness": 0.125,
            "topk": {
                "share": share, "median_radius": 0.002, "mean_beta2": 0.7, "curve": [share] * 17,
                "table": [share + 0.2, share + 0.1, share, share / 2, share / 4],
            },
            "class": {
                "share": None, "median_radius": None, "status": "unknown", "curve": [None] * 17,
                "table": [None] * 5,
            },
        }  # fmt: skip
        body["certificate"] = {"radius": 0.01, "norm": "l1", "k2": 5, "layers": [layer, layer]}
        body["scores"] = {"f1": 0.9}
    if cell.kind == "inject":
        known = cell.method not in ("vanilla", "at")
        body["injection"] = [
            {
                "where": where, "neighbours": count, "known": known, "seconds": 1.0,
                "share": known * (0.5 + 0.2 * (where == "direct")) / count,
                "right": known * (0.4 + 0.2 * (where == "direct")) / count,
                "order": [1.0, None], "status": ["invariant", "unknown"],
            }
            for where in WHERE
            for count in INJECTED
        ]  # fmt: skip
        body |= {"alone": 0.6, "sharpness": [0.25, 0.5], "scores": {"f1": 0.9}}
    if cell.kind == "collective":
        known = cell.method != "vanilla"
        budgets = [
            {
                "nodes": m,
                "edges": e,
                "changed": 5 * m if known else None,
                "right": 90 - 4 * m if known else None,
            }
            for m, e in BUDGETS
        ]
        counts = {"nodes": 100, "budgets": budgets, "known": known, "harmless": [90, 10] if known else []}
        body |= {"collective": {**counts, "seconds": 1.0}, "scores": {"f1": 0.9}}
    if cell.kind == "vote":
        body["votes"] = [
            {
                "groups": groups, "confidence": confidence, "seconds": 1.0,
                "right": [(0.8 + confidence / 10) / (1 + m) for m in VOTED],
                "kept": [1 / (1 + m) for m in VOTED],
            }
            for groups in GROUPS
            for confidence in CONFIDENCE
        ]  # fmt: skip
        body["scores"] = {"f1": 0.9}
    if cell.kind == "alone":
        body["alone"] = {"accuracy": 0.7 + 0.1 * (cell.model == "MLP")}
    if cell.kind == "again":
        shared = 0.5 + 0.2 * (cell.method == "fgai")
        alike = {"overlap": layered(shared), "rank_correlation": layered(shared - 0.1)}
        chance, sharp = {"chance": layered(0.25)}, {"vanilla": layered(0.2)}
        held = {"similarity": alike, "overlap": chance, "sharpness": sharp}
        body["evaluations"] = {ANOTHER: {"metrics": held}}
    if cell.kind == "explainers":
        body["explainers"] = explainers_of(cell)
    if cell.kind in ("evaluate", "attack"):
        body["evaluations"] = {
            threat: {
                "kind": "evaluation", "schema": 1, "name": cell.row, "model": {}, "version": {},
                "data": {"name": cell.dataset}, "threat": {"name": threat}, "config": {"k": 5},
                "seed": cell.seed, "device": "cpu", "seconds": {"total": 1.0}, "peak_memory": {"bytes": 1},
                "ledgers": {}, "warnings": [], "per_node": {},
                "metrics": metrics_of(cell, attacked - HARDER.get(threat, 0.0)),
            }
            for threat in cell.threats
        }  # fmt: skip
    return body


def fill(store: Store, cells: Iterable[Cell]) -> Store:
    """Write a synthetic record for every cell."""
    with patch("os.fsync"):  # records that need not outlive the test
        for cell in cells:
            store.write(cell, body_of(cell))
    return store


def everything(store: Store) -> Store:
    """Every grid that comes with fgai, run; of the search, whose cells are many, two graphs."""
    with patch("experiments.store.to_text", json.dumps):  # two thousand records that nobody looks at
        for name in (
            "node",
            "ablation",
            "cost",
            "defences",
            "definition",
            "injection",
            "explainers",
            "seeds",
        ):
            fill(store, read_grid(name))
        return fill(store, (cell for cell in read_grid("search") if cell.dataset.startswith("amazon")))


@functools.cache
def _photo() -> list[tuple[Cell, dict[str, Any]]]:
    """The node grid for GAT on Photo, each cell with its record."""
    cells = (cell for cell in read_grid("node") if (cell.model, cell.dataset) == ("GAT", "amazon-photo"))
    return [(cell, {"key": cell.key, "cell": cell.to_dict(), **body_of(cell)}) for cell in cells]


def photo_results(path: str, value: float, threat: str = "ensemble", seeds: int = 5) -> Results:
    """All methods for GAT on Photo; one number of FGAI replaced for all seeds, or for the first few."""
    *parents, name = path.split(".")
    records = []
    for cell, known in _photo():
        record = known
        if cell.method == "fgai" and cell.seed < seeds:
            record = copy.deepcopy(known)
            held: Any = record
            if parents[0] != "training":
                held = record["evaluations"].get(threat, {}).get("metrics")
            for parent in parents if held else ():
                held = held[parent]
            if held:
                held[int(name) if name.isdigit() else name] = value
                if name == "all":
                    held["layers"] = [value, value]
        records.append(record)
    return Results(records)
