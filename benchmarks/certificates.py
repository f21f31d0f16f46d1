"""Certified shares of trained models, and the seconds certifying takes.

`shares` trains every (dataset, model, method, seed) that has no record yet, certifies it, and prints the
share of nodes with more than 5 neighbours whose top-5, and whose class, provably stay at R = .001 to .1,
beside the share of trivial nodes, the median radii and the sharpness: mean ± standard deviation over seeds.
Records are those of the grid `certify`; a stopped run goes on where it was. `seconds` certifies barely
trained models, whose certificates cost the same, after one call that compiles the kernels. `budget` bounds
what 20 new nodes with 20 edges each can change of such models behind limits. Run:

    python benchmarks/certificates.py shares --datasets amazon-photo --methods vanilla fgai --seeds 0 1
    python benchmarks/certificates.py seconds --datasets coauthor-physics arxiv-tape --models GAT
    python benchmarks/certificates.py budget --datasets coauthor-physics --models GAT
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import PeakMemory, show

import fgai
from experiments import Cell, Store, run_cell
from fgai.certificates import PROMISE, TABLE_RADII, certify_attention
from fgai.records import Column, Table
from fgai.topk import NORMS
from fgai.training import train_method

METHODS = ("vanilla", "at", "fgai")


def shares(args: argparse.Namespace) -> None:
    store = Store(args.results)
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for dataset in args.datasets:
        for model in args.models:
            for method in args.methods:
                for seed in args.seeds:
                    cell = Cell(
                        kind="certify", model=model, dataset=dataset, method=method, seed=seed, threats=()
                    )
                    record = run_cell(cell, store, device=args.device, cache=args.cache)
                    if record["status"] != "done":
                        print(f"{dataset} {model} {method} seed {seed} failed: {record['error']}")
                        continue
                    found.setdefault((dataset, model, method), []).append(record["certificate"])
    table = share_table(found)
    print(table.to_markdown()) if args.markdown else table.show()


def share_table(found: dict[tuple[str, str, str], list[dict[str, Any]]]) -> Table:
    """One row per model, layer and certificate, from the summaries of its seeds."""
    rows: list[list[str | None]] = []
    for (dataset, model, method), seeds in found.items():
        for index, layer in enumerate(seeds[0]["layers"]):
            layers = [seed["layers"][index] for seed in seeds]
            for kind in ("topk", "class"):
                status = "exact" if kind == "topk" else layer["class"]["status"]
                rows.append(
                    [
                        dataset,
                        f"{model} {method}",
                        str(index + 1),
                        f"{'top-5' if kind == 'topk' else 'class'} ({status})",
                        *(_over(layers, _at(kind, place), 100, ".1f") for place in range(len(TABLE_RADII))),
                        _over(layers, lambda part, kind=kind: part[kind]["median_radius"], 1, ".2g"),
                        _over(layers, lambda part: part["trivial_share"], 100, ".1f"),
                        _over(layers, lambda part: part["sharpness"], 1, ".3f"),
                    ]
                )
    titles = ["data", "model", "layer", "what", *(f"R = {radius:g}" for radius in TABLE_RADII)]
    titles += ["median radius", "trivial", "sharpness"]
    notes = (
        "Shares in % of nodes with more than 5 neighbours, l1 ball; `trivial` is the share of the others.",
        PROMISE,
    )
    return Table("Certified shares", [Column(title) for title in titles], rows, notes)


def _at(kind: str, place: int) -> Callable[[dict[str, Any]], float | None]:
    return lambda part: part[kind]["table"][place]


def _over(
    layers: list[dict[str, Any]], read: Callable[[dict[str, Any]], float | None], scale: float, form: str
) -> str | None:
    values = [scale * value for value in map(read, layers) if value is not None]
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {spread:{form}}"


def seconds(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    rows = []
    for dataset in args.datasets:
        graph = fgai.load_dataset(dataset)
        for name in args.models:
            model = train_method("vanilla", name, graph, progress=False, settings={"epochs": 2})
            certify_attention(model, graph, radius=0.01)
            for norm in NORMS:
                with PeakMemory("cpu") as memory:
                    began = time.perf_counter()
                    record = certify_attention(model, graph, radius=0.01, norm=norm)
                    took = time.perf_counter() - began
                rows.append(
                    [
                        f"{name} {dataset}",
                        f"{graph.num_nodes:,}",
                        norm,
                        f"{record.seconds['forward']:.2f}",
                        f"{took:.2f}",
                        f"{memory.above / 2**30:.2f} GiB",
                    ]
                )
    title = f"Seconds to certify every node and layer, {args.threads} threads"
    show(title, ["model", "nodes", "norm", "forward", "in all", "peak memory"], rows)


def budget(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    rows = []
    for dataset in args.datasets:
        graph = fgai.load_dataset(dataset)
        for name in args.models:
            model = train_method("vanilla", name, graph, progress=False, settings={"epochs": 2})
            model = fgai.limit(model, graph, 0.0, shrink=0.0)  # looser limits leave the program more to do
            with PeakMemory("cpu") as memory:
                record = fgai.certify_budget(model, graph, budgets=[(20, 20)])
            changed = f"{record.budgets[0]['changed']} of {int(record.counted.sum())}"
            peak = f"{memory.above / 2**30:.2f} GiB"
            rows.append([f"{name} {dataset}", f"{graph.num_nodes:,}", changed, f"{record.seconds:.1f}", peak])
    title = f"Seconds to bound 20 new nodes with 20 edges each, {args.threads} threads"
    show(title, ["model", "nodes", "can change", "seconds", "peak memory"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("shares", "seconds", "budget"))
    parser.add_argument("--datasets", nargs="+", default=["coauthor-physics", "arxiv-tape"])
    parser.add_argument("--models", nargs="+", default=["GAT"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--cache", type=Path, help="folder for trained vanilla models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    {"shares": shares, "seconds": seconds, "budget": budget}[args.what](args)


if __name__ == "__main__":
    main()
