"""How much of an explanation changes while the class stays: vanilla against FGAI, equal budgets.

Models are trained with their presets, or read from files written by `fgai train` and `fgai faithful`. Run:

    python benchmarks/preserving.py --dataset amazon-photo
    python benchmarks/preserving.py --vanilla gat.safetensors --faithful fgai.safetensors
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import show
from torch import nn

import fgai
from fgai import objectives
from fgai.attacks import THREATS, Threat
from fgai.evaluation import EvaluationRecord, breaking_point, evaluate
from fgai.graph import Graph
from fgai.training import load_model, train_method

COLUMNS = [
    "row", "classes kept", "top-5 changed, class kept", "first layer", "last layer", "top-5 kept", "seconds",
]  # fmt: skip


def models(args: argparse.Namespace, graph: Graph) -> dict[str, nn.Module]:
    """Return the vanilla model and its faithful model, read or trained."""
    made: dict[str, nn.Module] = {}
    for name, method, path in (("vanilla", "vanilla", args.vanilla), ("FGAI", "fgai", args.faithful)):
        trained = load_model(path) if path else train_method(method, args.model, graph, seed=args.seed)
        made[name] = trained.to(args.device)
    return made


def row(label: str, record: EvaluationRecord, attack: str) -> list[str]:
    """Return what one attack did to the test nodes in its reach."""
    found = record.metrics["same_class"][attack]
    changed = found["changed"]
    shares = [found["kept"], changed["all"], changed["layers"][0], changed["last"], found["overlap"]["all"]]
    return [label, *(f"{share:.3f}" for share in shares), f"{record.ledgers[attack]['seconds']:.1f}"]


def preserving(keep: float, steps: int) -> Threat:
    """Return the threat `preserving` with another share of classes to keep, or other steps."""
    base = THREATS["preserving"]
    return replace(base, objective=objectives.preserving(keep=keep), budget=replace(base.budget, steps=steps))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="amazon-photo")
    parser.add_argument("--model", default="GAT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vanilla", type=Path, default=None, help="a trained vanilla model")
    parser.add_argument("--faithful", type=Path, default=None, help="its faithful model")
    parser.add_argument("--keep", type=float, default=0.995, help="share of the classes that must stay")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--breaking-point", type=float, default=None, help="also search it, at this overlap")
    parser.add_argument("--output", type=Path, default=None, help="write the records to this file")
    args = parser.parse_args()
    graph = fgai.load_dataset(args.dataset, seed=args.seed).to(args.device)
    rows, records, notes = [], [], []
    for name, model in models(args, graph).items():
        options: dict[str, Any] = {"seed": args.seed, "name": name, "curves": False, "nulls": False}
        plain = evaluate(model, graph, "standard", **options)
        kept = evaluate(model, graph, preserving(args.keep, args.steps), **options)
        records += [plain.to_dict(), kept.to_dict()]
        rows.append(row(f"{name}, explanation attack", plain, "explanation"))
        rows.append(row(f"{name}, preserving attack", kept, "explanation"))
        if args.breaking_point is not None:
            point = breaking_point(model, graph, threshold=args.breaking_point, seed=args.seed)
            records.append(point.to_dict())
            notes.append([name, str(point.nodes), str(point.overlap)])
    show(
        f"{args.dataset}, {args.model}, seed {args.seed}: touched test nodes, 20 × 20 injected", COLUMNS, rows
    )
    if notes:
        show(f"fewest nodes with overlap below {args.breaking_point}", ["model", "nodes", "measured"], notes)
    if args.output is not None:
        args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
