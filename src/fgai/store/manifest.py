"""The one text file of a stored graph: its arrays, their shapes and types, and its fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypedDict

from fgai.errors import CheckpointError, DataError
from fgai.files import add_checksum, check, parse_json, regular, take_checksum
from fgai.sparse.valid import LARGEST
from fgai.store.arrays import ArrayInfo

MANIFEST = "graph.json"
VERSION = 2
MASKS = ("train_mask", "val_mask", "test_mask")
SPARSE = ("x_indptr", "x_indices", "x_values")
NODE_ARRAYS = ("y", *MASKS)
EDGE_ARRAYS = ("edge_attr", "edge_weight", "edge_truth")
DTYPES = {
    "rowptr": "<i8",
    "source": "<i4",
    "x": "<f4",
    **dict(zip(SPARSE, ("<i8", "<i4", "<f4"), strict=True)),
    "y": "<i8",
    **dict.fromkeys(MASKS, "|b1"),
    "edge_attr": "<f4",
    "edge_weight": "<f4",
    "edge_truth": "|b1",
}
"""Every array a store may hold, and its type on every machine."""


class Manifest(TypedDict):
    """What `graph.json` holds.

    Attributes:
        format: says what kind of folder this is.
        version: of the format.
        name: of the graph.
        num_nodes: N.
        num_edges: E.
        num_features: F.
        fingerprint: of the graph, see `fgai.datasets.fingerprint`.
        sources: hash of the files and options it was converted from; empty otherwise.
        arrays: by name; each is a file `NAME.npy`.
    """

    format: Literal["fgai graph"]
    version: int
    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    fingerprint: str
    sources: str
    arrays: dict[str, ArrayInfo]


def encode(manifest: Manifest) -> str:
    """Return the text of the file."""
    return json.dumps(add_checksum(manifest), indent=1, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check `graph.json`: names, shapes and types fit each other.

    Raises:
        DataError: there is none, it is damaged, or of a newer version.
    """
    path = folder / MANIFEST
    try:
        manifest: Manifest = read_checked(path, VERSION, Manifest)
        _check_shapes(manifest)
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no stored graph: there is no {MANIFEST}; see `fgai data convert`"
        ) from None
    except (CheckpointError, ValueError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; convert the graph again") from error
    return manifest


def read_checked(path: Path, version: int, kind: Any) -> Any:
    """Read a manifest of this version and kind, and compare it with its checksum.

    Raises:
        FileNotFoundError: there is none.
        DataError: it is of another version.
        ValueError: it is damaged.
        CheckpointError: it is not of this kind.
        OSError: it cannot be read.
    """
    values = parse_json(regular(path).read_bytes())
    number = values.get("version") if isinstance(values, dict) else None
    if isinstance(number, int) and number > version:
        raise DataError(f"{path} is of a newer version ({number}); update fgai")
    if isinstance(number, int) and number < version:
        raise DataError(f"{path} is of an older version ({number}), without checksums; make it again")
    manifest = take_checksum(values)
    if manifest is values:
        raise ValueError("it has no checksum")
    check(manifest, kind, path.name)
    return manifest


def _check_shapes(manifest: Manifest) -> None:
    arrays = manifest["arrays"]
    nodes, edges, width = (manifest[key] for key in ("num_nodes", "num_edges", "num_features"))
    if not 1 <= nodes <= LARGEST or edges < 0 or width < 0:
        raise ValueError(f"{nodes} nodes, {edges} edges and {width} features are no graph")
    if unknown := [name for name, info in arrays.items() if info["dtype"] != DTYPES.get(name)]:
        raise ValueError(f"`{unknown[0]}` is no array of this format, or of another type")
    stored = [len(SPARSE) - sum(name not in arrays for name in SPARSE), int("x" in arrays)]
    if "rowptr" not in arrays or "source" not in arrays or stored not in ([0, 0], [3, 0], [0, 1]):
        raise ValueError("edges or features are incomplete")
    entries = arrays["x_indices"]["shape"][:1] if stored[0] else [0]
    wanted = {
        "rowptr": [nodes + 1],
        "source": [edges],
        "x": [nodes, width],
        **dict(zip(SPARSE, ([nodes + 1], entries, entries), strict=True)),
        **{name: [nodes] for name in NODE_ARRAYS},
        **{name: [edges] for name in EDGE_ARRAYS},
    }
    for name, info in arrays.items():
        shape = info["shape"][:1] if name == "edge_attr" and len(info["shape"]) == 2 else info["shape"]
        if shape != wanted[name] or min(info["shape"], default=0) < 0:
            raise ValueError(f"`{name}` has shape {info['shape']}, which does not fit the rest")
