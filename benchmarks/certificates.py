"""Seconds and memory that certifying takes.

`seconds` certifies barely trained models, whose certificates cost the same, after one call that compiles the
kernels. `budget` bounds what 20 new nodes with 20 edges each can change of such models behind limits. Run:

    python benchmarks/certificates.py seconds --datasets coauthor-physics arxiv-tape --models GAT
    python benchmarks/certificates.py budget --datasets coauthor-physics --models GAT
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from common import Peak, arguments, show
from torch import nn

import fgai
from fgai.certificates import certify_attention
from fgai.graph import Graph
from fgai.topk import NORMS
from fgai.training import train_method


def cases(args: argparse.Namespace) -> Iterator[tuple[list[str], nn.Module, Graph]]:
    """Yield the first words of a row, a barely trained model and its graph."""
    for dataset in args.datasets:
        graph = fgai.load_dataset(dataset)
        for name in args.models:
            model = train_method("vanilla", name, graph, progress=False, settings={"epochs": 2})
            yield [f"{name} {dataset}", f"{graph.num_nodes:,}"], model, graph


def seconds(args: argparse.Namespace) -> None:
    rows = []
    for words, model, graph in cases(args):
        certify_attention(model, graph, radius=0.01)
        for norm in NORMS:
            with Peak("cpu") as memory:
                began = time.perf_counter()
                record = certify_attention(model, graph, radius=0.01, norm=norm)
                took = time.perf_counter() - began
            peak = f"{memory.above / 2**30:.2f} GiB"
            rows.append([*words, norm, f"{record.seconds['forward']:.2f}", f"{took:.2f}", peak])
    title = f"Seconds to certify every node and layer, {args.threads} threads"
    show(title, ["model", "nodes", "norm", "forward", "in all", "peak memory"], rows)


def budget(args: argparse.Namespace) -> None:
    rows = []
    for words, model, graph in cases(args):
        model = fgai.limit(model, graph, 0.0, shrink=0.0)  # looser limits leave the program more to do
        with Peak("cpu") as memory:
            record = fgai.certify_budget(model, graph, budgets=[(20, 20)])
        changed = f"{record.budgets[0]['changed']} of {int(record.counted.sum())}"
        rows.append([*words, changed, f"{record.seconds:.1f}", f"{memory.above / 2**30:.2f} GiB"])
    title = f"Seconds to bound 20 new nodes with 20 edges each, {args.threads} threads"
    show(title, ["model", "nodes", "can change", "seconds", "peak memory"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=("seconds", "budget"))
    parser.add_argument("--datasets", nargs="+", default=["coauthor-physics", "arxiv-tape"])
    parser.add_argument("--models", nargs="+", default=["GAT"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"seconds": seconds, "budget": budget}[args.what](args)


if __name__ == "__main__":
    main()
