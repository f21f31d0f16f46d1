"""One small good file of every kind fgai reads, how it is read, and what reading it must give."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import fgai
from experiments import Cell, Store, read_grid, read_record
from fgai.certificates import BudgetCertificate, CertificateRecord, InjectionCertificate, VotingCertificate
from fgai.datasets import fingerprint, load_graph, planted
from fgai.datasets.own import FIELDS
from fgai.datasets.readers import (
    _read_ground_truth,
    _read_npz,
    _read_ogbn_arxiv,
    _read_planetoid,
    _read_tape,
    _read_tu,
)
from fgai.errors import FgaiWarning
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.hub import from_pretrained, save_pretrained
from fgai.large import StoredGraph, StoredObservation, convert, observe_store, write_store
from fgai.records import read_json
from fgai.reports import read_report
from fgai.reports.cards import Card, Listing, card, write_page
from fgai.reports.page import render
from fgai.training import load_model, save_model, train
from support import dataset_cases
from support.graph_cases import small_data
from support.report_cases import (
    budget_certificate,
    certificates,
    comparison,
    injection_certificate,
    voting_certificate,
    whole_report,
)
from support.store_cases import loaded_attention
from support.training_cases import GRAPH, fresh

GRID = """
[[cells]]
method = ["vanilla", "ln"]
dataset = "planted"
seed = [0, 1, 2]
settings = { epochs = 2, hidden_channels = 4 }
threats = ["standard"]
label = "row"
"""
WIDTH = 4
CELL = Cell(method="ln", seed=1, settings={"epochs": 2})


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        write: fills a folder; returns the files that may be damaged.
        read: reads that folder. What it returns must be what the files say.
        content: of what `read` returns, where the files have checksums: no damage may change it silently.
    """

    write: Callable[[Path], list[Path]]
    read: Callable[[Path], Any]
    content: Callable[[Any], Any] | None = None


def _document(kind: Any, make: Callable[[], Any]) -> Kind:
    def read(folder: Path) -> Any:
        found = kind.load(folder / "file.json")
        told = read_json(folder / "file.json")
        given = {name: value for name, value in found.to_dict().items() if name != "summary"}
        told.setdefault("provenance", {})
        assert given == {name: value for name, value in told.items() if name in given}
        return found

    return Kind(
        lambda folder: [make().save(folder / "file.json")],
        read,
        content=lambda record: record.to_dict(),
    )


def _report(folder: Path) -> str:
    return render(read_report(sorted(folder.glob("*.json"))), "")


def _written(write: Callable[[Path], Any]) -> Callable[[Path], list[Path]]:
    def into(folder: Path) -> list[Path]:
        write(folder)
        return sorted(path for path in folder.rglob("*") if path.is_file())

    return into


def _dataset(write: Callable[[Path], Any], read: Callable[[list[Path]], Any], *names: str) -> Kind:
    def reading(folder: Path) -> Any:
        return read([folder / name for name in names])

    return Kind(_written(write), reading)


def _planetoid(folder: Path) -> Any:
    return _read_planetoid([folder / f"ind.tiny.{part}" for part in PLANETOID])


PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@cache
def model_bytes() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return save_model(train(fresh(), GRAPH, epochs=2, progress=False), Path(folder) / "m").read_bytes()


def _model(folder: Path) -> Any:
    model = load_model(folder / "model.safetensors")
    whole = folder / "whole.safetensors"
    whole.write_bytes(model_bytes())
    first, second = model.state_dict(), load_model(whole).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in second)
    return model


OPTIONS: dict[str, Any] = {"epochs": 2, "progress": False}


def _state(folder: Path) -> Any:
    """Go on with a training that is done: what comes out is what the file holds."""
    model = train(fresh(), GRAPH, checkpoint=folder, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), _trained(), strict=True))
    return model


@cache
def _trained() -> list[torch.Tensor]:
    return list(train(fresh(), GRAPH, **OPTIONS).state_dict().values())


def _cells(folder: Path) -> list[Cell]:
    cells = read_grid(folder / "grid.toml")
    root = folder / "results"
    assert all(Store(root).path(cell).resolve().is_relative_to(root.resolve()) for cell in cells)
    return cells


def _packed(folder: Path) -> Any:
    return list(Store(folder).records("search"))


def _pack(folder: Path) -> list[Path]:
    store = Store(folder)
    for seed in range(3):
        cell = Cell(kind="search", seed=seed)
        store.write(cell, {"status": "done", "seconds": 1.5})
    store.pack()
    return list(folder.glob("search-*.jsonl"))


def _record(folder: Path) -> Any:
    found = read_record(Store(folder).path(CELL))
    assert found == json.loads(Store(folder).path(CELL).read_text())
    Store(folder).read(CELL)
    return found


def _written_card(folder: Path) -> list[Path]:
    return [card(comparison(), name="GAT").save(folder / "card.json")]


def _card(folder: Path) -> str:
    """Read a card, and make all that is made of it."""
    found = Card.load(folder / "card.json")
    write_page(Listing(cards={"card.json": found}, unusable={}), folder / "page.html")
    return found.to_markdown()


def graph_content(graph: Any) -> str:
    """A hash of everything a graph holds, masks included."""
    masks = [getattr(graph, f"{part}_mask") for part in ("train", "val", "test")]
    parts = [None if mask is None else mask.tolist() for mask in masks]
    return f"{fingerprint(graph)} {graph.name} {parts}"


@cache
def gat() -> Any:
    torch.manual_seed(0)
    return fgai.GAT(WIDTH, 3, hidden_channels=2, heads=2).eval()


def _observed(folder: Path) -> list[Path]:
    with TemporaryDirectory() as scratch:
        stored = write_store(small_data(nodes=20, width=WIDTH), Path(scratch) / "graph")
        observe_store(gat(), stored, folder / "seen", ranked=True)
    return sorted((folder / "seen").iterdir())


def _observation(folder: Path) -> Any:
    seen = StoredObservation(folder / "seen")
    seen.verify()
    return seen, loaded_attention(seen)


def _observation_content(found: Any) -> Any:
    seen, attention = found
    layers = [(layer.name, layer.values.tolist(), layer.ranking().tolist()) for layer in attention.layers]
    return seen.model, seen.graph, seen.logits.tolist(), layers


def _graph_file(name: str) -> Kind:
    """A graph as `load_graph` reads it."""
    data = small_data(nodes=20, width=WIDTH).to_data()
    fields = {key: value for key, value in data.to_dict().items() if key in FIELDS}

    def write(folder: Path) -> list[Path]:
        if name == "graph.npz":
            np.savez(folder / name, **{key: np.asarray(value) for key, value in fields.items()})
        elif name == "graph.pt":
            torch.save(data, folder / name)
        else:
            rows = "\n".join(f"{a},{b}" for a, b in data.edge_index.T.tolist())
            (folder / name).write_text(f"source,destination\n{rows}\n")
        return [folder / name]

    checked = name != "graph.csv"
    return Kind(write, lambda folder: load_graph(folder / name), content=graph_content if checked else None)


def _converted(folder: Path) -> Any:
    return convert(folder / "edges.txt", folder / "out", features=folder / "x.npy", overwrite=True).load()


def _convertible(folder: Path) -> None:
    (folder / "edges.txt").write_text("# remark\n0 1\n1 2\n2 0\n3 1\n")
    np.save(folder / "x.npy", np.arange(8.0).reshape(4, 2))


def _saved(folder: Path) -> list[Path]:
    """A model with its card, as `save_pretrained` leaves them; its page and settings are for readers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)  # numbers on so small a graph are rightly doubted
        options: dict[str, Any] = {"curves": False, "nulls": False, "nodes": 2, "edges": 2}
        record = fgai.evaluate(gat(), small_data(nodes=40, width=WIDTH), "random", **options)
    save_pretrained(gat(), folder / "m", card=card(record))
    return [folder / "m" / "model.safetensors", folder / "m" / "card.json"]


def _pretrained(folder: Path) -> Any:
    return from_pretrained(folder / "m"), Card.load(folder / "m" / "card.json")


def _pretrained_content(found: Any) -> Any:
    model, about = found
    return {name: value.tolist() for name, value in model.state_dict().items()}, about.to_dict()


KINDS: dict[str, Kind] = {
    "store": Kind(
        _written(lambda folder: write_store(small_data(nodes=20, width=WIDTH), folder / "graph")),
        lambda folder: StoredGraph(folder / "graph").load(),
        content=graph_content,
    ),
    "sparse-store": Kind(
        _written(lambda folder: write_store(planted(num_nodes=30), folder / "graph")),
        lambda folder: StoredGraph(folder / "graph").load(),
        content=graph_content,
    ),
    "observation": Kind(_observed, _observation, content=_observation_content),
    "graph-npz": _graph_file("graph.npz"),
    "graph-pt": _graph_file("graph.pt"),
    "graph-csv": _graph_file("graph.csv"),
    "edges": Kind(_written(_convertible), _converted),
    "model": Kind(
        lambda folder: (
            [folder / "model.safetensors"]
            if (folder / "model.safetensors").write_bytes(model_bytes())
            else []
        ),
        _model,
    ),
    "state": Kind(_written(lambda folder: train(fresh(), GRAPH, checkpoint=folder, **OPTIONS)), _state),
    "evaluation": _document(EvaluationRecord, lambda: comparison()["GAT"]),
    "comparison": _document(Comparison, comparison),
    "certificate": _document(CertificateRecord, lambda: certificates()["GAT"]),
    "injection": _document(InjectionCertificate, injection_certificate),
    "budget": _document(BudgetCertificate, budget_certificate),
    "votes": _document(VotingCertificate, voting_certificate),
    "card": Kind(_written_card, _card, content=str),
    "report": Kind(lambda folder: [whole_report().save(folder / "report.json")], _report, content=str),
    "compared": Kind(lambda folder: [comparison().save(folder / "both.json")], _report, content=str),
    "pretrained": Kind(_saved, _pretrained, content=_pretrained_content),
    "proof": Kind(
        lambda folder: [
            comparison().save(folder / "both.json"),
            certificates()["GAT"].save(folder / "certificate-gat.json"),
        ],
        _report,
        content=str,
    ),
    "grid": Kind(_written(lambda folder: (folder / "grid.toml").write_text(GRID)), _cells),
    "record": Kind(lambda folder: [Store(folder).write(CELL, {"status": "done", "seconds": 1.5})], _record),
    "pack": Kind(_pack, _packed, content=list),
    "npz": _dataset(lambda folder: dataset_cases.write_npz(folder / "a.npz"), _read_npz, "a.npz"),
    "truth": _dataset(lambda f: dataset_cases.write_ground_truth(f / "a.npz"), _read_ground_truth, "a.npz"),
    "tape": _dataset(lambda folder: dataset_cases.write_tape(folder / "a.npz"), _read_tape, "a.npz"),
    "ogb": _dataset(
        lambda folder: dataset_cases.write_ogb_zip(folder / "arxiv.zip", dataset_cases.ogb_tables()),
        _read_ogbn_arxiv,
        "arxiv.zip",
    ),
    "planetoid": Kind(_written(lambda folder: dataset_cases.write_planetoid(folder, "tiny")), _planetoid),
    "tu": Kind(
        _written(lambda folder: dataset_cases.write_tu(folder, "TINY")),
        lambda folder: _read_tu(sorted(folder.glob("TINY_*.txt"))),
    ),
}
