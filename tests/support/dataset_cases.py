"""Small files in the raw formats of the real datasets, and graphs registered as datasets."""

from __future__ import annotations

import dataclasses
import gzip
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.io import read_npz as pyg_npz

from fgai.datasets import DatasetInfo, registry
from fgai.graph import Graph

NODES, WORDS, CLASSES = 23, 11, 3
PHOTO = "amazon/Photo/raw/amazon_electronics_photo.npz"


def about(graph: Graph, name: str, **more: object) -> DatasetInfo:
    """What there is to say of a graph, to register it as a dataset of this name."""
    sizes = {
        field: getattr(graph, field)
        for field in ("num_nodes", "num_edges", "num_features", "num_classes", "num_graphs")
    }
    words = dict.fromkeys(("description", "source", "citation", "licence"), "of a test")
    return DatasetInfo(name=name, **{**words, **sizes, **more})  # type: ignore[arg-type]


def unregister(name: str) -> None:
    """Remove a registered dataset."""
    del registry._INFO[name], registry._SOURCES[name]


def random_edges(draw: np.random.Generator, nodes: int = NODES, count: int = 40) -> np.ndarray:
    """[2, count] with loops, duplicates and single directions; the last two nodes stay isolated."""
    edges = draw.integers(0, nodes - 2, (2, count))
    edges[:, :2] = 4  # a loop, twice
    edges[:, 2:4] = [[5, 5], [6, 6]]  # a duplicate
    return edges


def write_npz(path: Path, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    edges = random_edges(draw)
    adjacency = sp.csr_matrix((np.ones(edges.shape[1], np.float32), tuple(edges)), shape=(NODES, NODES))
    words = sp.csr_matrix(draw.poisson(0.4, (NODES, WORDS)).astype(np.float32))
    labels = draw.permutation(np.arange(NODES) % CLASSES)
    parts = {}
    for name, matrix in (("adj", adjacency), ("attr", words)):
        parts |= {f"{name}_{key}": getattr(matrix, key) for key in ("data", "indices", "indptr")}
        parts[f"{name}_shape"] = np.array(matrix.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, labels=labels, **parts)


def write_planetoid(folder: Path, name: str, seed: int = 0, known: int = 515) -> int:
    """Write the eight files with two test nodes left out; return the number of nodes."""
    draw = np.random.default_rng(seed)
    nodes = known + 12
    test = draw.permutation([i for i in range(known, nodes) if i not in (known + 3, known + 7)])
    words = draw.poisson(0.3, (nodes, WORDS)).astype(np.float32)
    words[1] = 0
    labels = np.eye(CLASSES, dtype=np.int32)[draw.integers(0, CLASSES, nodes)]
    graph: dict[int, list[int]] = defaultdict(list)
    for i, j in draw.integers(0, nodes, (900, 2)).tolist():
        graph[i].append(j)
        graph[j].append(i)
    parts = {
        "x": sp.csr_matrix(words[:9]),
        "tx": sp.csr_matrix(words[np.sort(test)]),
        "allx": sp.csr_matrix(words[:known]),
        "y": labels[:9],
        "ty": labels[np.sort(test)],
        "ally": labels[:known],
        "graph": graph,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for part, content in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(content, protocol=4))
    (folder / f"ind.{name}.test.index").write_text("\n".join(map(str, test)) + "\n")
    return nodes


def write_tu(folder: Path, name: str, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    sizes = [4, 2, 6, 3, 5, 7, 2, 4, 3, 5]
    start = np.cumsum([0, *sizes])
    lines = []
    for first, size in zip(start[:-1], sizes, strict=True):
        for i in range(size - 1):
            lines += [f"{first + i + 1}, {first + i + 2}", f"{first + i + 2}, {first + i + 1}"]
    lines.append(lines[0])
    labels = [int(v) for v in draw.integers(2, 5, start[-1])]
    labels[0], labels[1] = 2, 4
    content: dict[str, Sequence[object]] = {
        "A": lines,
        "graph_indicator": [g + 1 for g, size in enumerate(sizes) for _ in range(size)],
        "graph_labels": [-1, 1] * 5,
        "node_labels": labels,
        "node_attributes": [f" {v:.3f}" for v in draw.normal(50, 20, start[-1])],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in content.items():
        (folder / f"{name}_{part}.txt").write_text("\n".join(map(str, rows)) + "\n")


def write_ground_truth(path: Path, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    edges = np.unique(random_edges(draw), axis=1)
    edges = edges[:, edges[0] < edges[1]]
    masks = np.arange(NODES) % 3
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        edge_index=np.hstack([edges, edges[::-1]]).astype(np.int32),
        x=draw.normal(size=(NODES, 4)).astype(np.float32),
        y=draw.permutation(np.arange(NODES) % CLASSES),
        gt_edges=edges[:, :5].astype(np.int32),
        **{f"{name}_mask": masks == i for i, name in enumerate(("train", "val", "test"))},
    )
    return edges[:, :5]


def write_tape(path: Path, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    guesses = np.stack([draw.permutation(CLASSES + 4)[:5] for _ in range(NODES)])
    guesses = np.where(guesses >= CLASSES, -1, guesses).astype(np.int8)
    guesses[0] = [1, 2, 1, -1, 0]
    order = draw.permutation(NODES).astype(np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        edge_index=random_edges(draw).astype(np.int32),
        y=(np.arange(NODES) % CLASSES).astype(np.int8),
        gpt_preds=guesses,
        train_idx=order[:9],
        valid_idx=order[9:14],
        test_idx=order[14:],
    )
    return guesses


def ogb_tables(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    order = draw.permutation(NODES)[:, None]
    return {
        "raw/edge.csv.gz": random_edges(draw).T,
        "raw/node-feat.csv.gz": draw.normal(size=(NODES, 6)).round(5),
        "raw/node-label.csv.gz": (np.arange(NODES) % CLASSES)[:, None],
        "raw/num-node-list.csv.gz": np.array([[NODES]]),
        "split/time/train.csv.gz": order[:9],
        "split/time/valid.csv.gz": order[9:14],
        "split/time/test.csv.gz": order[14:],
    }


def compress(table: np.ndarray) -> bytes:
    rows = "\n".join(",".join(str(v) for v in row) for row in table.tolist())
    return gzip.compress((rows + "\n").encode())


def write_ogb_zip(path: Path, tables: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, table in tables.items():
            archive.writestr(f"arxiv/{member}", compress(table))


def expect(monkeypatch: pytest.MonkeyPatch, name: str, **sizes: int) -> None:
    """Let `name` have other sizes than the real dataset, and files that nobody knows."""
    monkeypatch.setitem(registry._INFO, name, dataclasses.replace(registry._INFO[name], **sizes))
    unknown = dataclasses.replace(registry._SOURCES[name], sha256=(), fingerprint="")
    monkeypatch.setitem(registry._SOURCES, name, unknown)


def photo(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FGAI_DATA", raising=False)
    write_npz(root / PHOTO)
    reference = pyg_npz(str(root / PHOTO))
    expect(
        monkeypatch,
        "amazon-photo",
        num_nodes=NODES,
        num_features=WORDS,
        num_classes=CLASSES,
        num_edges=reference.edge_index.shape[1],
    )
    return root


def edge_set(edges: torch.Tensor) -> set[tuple[int, int]]:
    return set(zip(*edges.tolist(), strict=True))
