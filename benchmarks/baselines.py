"""Vanilla, layer norm and adversarial training on one graph, attacked equally, in one table.

Cells whose records lie in the results folder are not run again. Run:

    python benchmarks/baselines.py --results results                       # from the stored records
    python benchmarks/baselines.py --results fresh --device cuda           # everything anew
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import show

from experiments import Cell, Store, run_cell
from fgai.evaluation import EvaluationRecord

COLUMNS = [
    "row", "F1 clean", "standard", "strong", "g-TVD rel", "g-JSD last", "top-5 kept, touched", "sharpness",
    "F-slope gap", "training s", "evaluation s", "peak MiB",
]  # fmt: skip


def number(value: Any, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def null_row(name: str, record: EvaluationRecord) -> list[str]:
    """Return a ranking that knows nothing, measured on the same predictions."""

    def get(path: str) -> Any:
        return record.get(f"null.{name}.{path}")

    kept, sharp, gap = (get(p) for p in ("overlap_touched.all", "sharpness.all", "f_slope.node.clean.gap"))
    return [f"  {name} (null)", "", "", "", "", "", number(kept), number(sharp), number(gap), "", "", ""]


def model_row(label: str, body: dict[str, Any]) -> list[str]:
    found = {name: EvaluationRecord.from_dict(value) for name, value in body["evaluations"].items()}
    one, training = found["standard"], body["training"]
    seconds = sum(record.seconds["total"] for record in found.values())
    return [
        label,
        number(one.get("f1.clean")),
        number(one.get("f1.attacked")),
        number(found["strong"].get("f1.attacked")),
        number(one.get("g_tvd.rel")),
        number(one.get("g_jsd.last"), ".1e"),
        number(one.get("overlap_touched.prediction.all")),
        number(one.get("sharpness.clean.all")),
        number(one.get("f_slope.node.clean.gap")),
        number(training["seconds"], ".1f"),
        number(seconds, ".1f"),
        number(training.get("peak_memory", 0) / 2**20 or None, ".0f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="amazon-photo")
    parser.add_argument("--models", nargs="+", default=["GAT", "GATv2", "GT"])
    parser.add_argument("--methods", nargs="+", default=["vanilla", "ln", "at"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--cache", type=Path, default=None, help="folder for trained vanilla models")
    args = parser.parse_args()
    store, rows = Store(args.results), []
    for model in args.models:
        for method in args.methods:
            cell = Cell(
                model=model,
                dataset=args.dataset,
                method=method,
                seed=args.seed,
                threats=("standard", "strong"),
            )
            body = store.read(cell)
            if body is None or body["status"] != "done":
                body = run_cell(cell, store, device=args.device, cache=args.cache)
            if body["status"] != "done":
                rows.append([f"{model} {method}", body["error"], *[""] * 10])
                continue
            rows.append(model_row(f"{model} {method}", body))
            if method == args.methods[0]:
                record = EvaluationRecord.from_dict(body["evaluations"]["standard"])
                rows += [null_row(name, record) for name in ("uniform", "random")]
    show(f"{args.dataset}, seed {args.seed}: equal budgets, equal endpoints", COLUMNS, rows)


if __name__ == "__main__":
    main()
