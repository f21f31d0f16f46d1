"""Fields of a graph: values on edges, `Links`, and the fields that are read from a PyG `Data`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.typed import typed

FILL = {"edge_truth": 0, "edge_attr": 0, "edge_weight": 1}  # fields per edge, and their values on new edges
VALUES = ("edge_attr", "edge_weight")  # values on edges that models may read


def _check_values(values: Any, name: str, num_edges: int) -> Tensor:
    """Return `values`; `InputError` unless they are finite, [E], or for `edge_attr` also [E, D]."""
    if not isinstance(values, Tensor) or values.is_sparse:
        raise InputError(f"`{name}` must be a dense tensor, got {type(values).__name__}")
    dims = 2 if name == "edge_attr" else 1
    if not 1 <= values.dim() <= dims or values.shape[0] != num_edges:
        expected = f"[{num_edges}]" + (f" or [{num_edges}, D]" if dims == 2 else "")
        shape = f"shape {expected}, got {tuple(values.shape)}"
        raise InputError(f"`{name}` must have one entry per column of `edge_index`, {shape}")
    return checks.finite(values, name)


def _merge_values(values: Tensor, name: str, inverse: Tensor, num_edges: int) -> Tensor:
    """Return one value per distinct edge; `inverse` [E] has its index. Values of duplicates must be equal."""
    positions = torch.arange(len(inverse), device=inverse.device)
    first = positions.new_zeros(num_edges).scatter_reduce(0, inverse, positions, "amin", include_self=False)
    merged = values[first]
    differs = values != merged[inverse]
    differs = differs.any(1) if differs.dim() == 2 else differs
    if bool(differs.any()):
        raise InputError(
            f"{int(differs.sum())} duplicate edges have different `{name}`, but a graph has one edge between"
            " two nodes; merge them, e.g. `torch_geometric.utils.coalesce("
            f'edge_index, {name}, reduce="mean")`'
        )
    return merged


_NODE_FIELDS = ("y", "train_mask", "val_mask", "test_mask")


def arguments_from_data(data: Any) -> dict[str, Any]:
    """Return the arguments of `Graph.from_edges` for a PyG `Data`; `InputError` for typed edges."""
    kind = type(data).__name__
    # PyG takes seconds to import; while it is not imported, `data` cannot be one of its datasets.
    pyg = sys.modules.get("torch_geometric.data")
    if pyg is not None and isinstance(data, pyg.Dataset):
        raise InputError(f"`data` must be one graph, got the dataset {kind}; give its graph: `dataset[0]`")
    if not hasattr(data, "edge_index") or kind == "HeteroData":
        hint = "; see `fgai.hetero.HeteroView`" if kind == "HeteroData" else ""
        raise InputError(f"expected a homogeneous PyG `Data` with `edge_index`, got {kind}{hint}")
    if data.edge_index is None:
        raise InputError("`data.edge_index` must be a tensor, got None; `adj_t` is not read, convert it")
    if getattr(data, "edge_type", None) is not None:
        raise InputError(
            "`data.edge_type` would be lost: fgai reads only `edge_attr` and `edge_weight` of edges. Put the"
            " types into `data.edge_attr`, see `fgai.wrap`, and set `data.edge_type = None`"
        )
    fields = {name: getattr(data, name, None) for name in (*_NODE_FIELDS, *FILL)}
    labels = fields["y"]
    if labels is not None and labels.dim() == 2 and labels.shape[1] == 1:
        fields["y"] = labels.flatten()
    return {
        "edge_index": data.edge_index,
        "num_nodes": int(data.num_nodes or 0),
        "features": getattr(data, "x", None),
        **fields,
    }


PARTS = ("train", "val", "test")


@typed
@dataclass(frozen=True, eq=False)
class Links:
    """Pairs of nodes [2, L] that a link predictor scores, each in one order only.

    `y` [L] is 1 for a link, 0 for none, -1 for unknown; `part` [L] is 0 for training, 1 for validation, 2 for
    test. All are integers.

    Example:
        >>> links = Links(torch.tensor([[0, 1], [2, 3]]), torch.tensor([1, 0]), torch.tensor([0, 2]))
        >>> links.rows("test").tolist(), len(links)
        ([1], 2)
    """

    pairs: Tensor
    y: Tensor
    part: Tensor

    def __post_init__(self) -> None:
        if self.pairs.dim() != 2 or self.pairs.shape[0] != 2:
            raise InputError(f"`pairs` must have shape [2, links], got {tuple(self.pairs.shape)}")
        count = self.pairs.shape[1]
        for name, part in (("pairs", self.pairs[0]), ("y", self.y), ("part", self.part)):
            if part.shape != (count,):
                raise InputError(f"`{name}` must have one entry per pair ({count}), got {tuple(part.shape)}")
            if part.is_floating_point():
                raise InputError(f"`{name}` must hold integers, got {part.dtype}")

    def __len__(self) -> int:
        return int(self.pairs.shape[1])

    def rows(self, targets: str) -> Tensor:
        """Return the positions of the pairs in the part `train`, `val`, `test` or `fit` (the first two)."""
        in_part = self.part < 2 if targets == "fit" else self.part == PARTS.index(targets)
        return in_part.nonzero().flatten()

    def ends(self, targets: str) -> Tensor:
        """Return the distinct nodes of the pairs in a part, see `rows`."""
        return torch.unique(self.pairs[:, self.rows(targets)])  # type: ignore[no-any-return]

    def take(self, rows: Tensor) -> Links:
        """Return the pairs at positions `rows` [R]."""
        return Links(self.pairs[:, rows], self.y[rows], self.part[rows])

    def join(self, other: Links) -> Links:
        """Return these pairs followed by those of `other`."""
        return Links(
            torch.cat([self.pairs, other.pairs], dim=1),
            torch.cat([self.y, other.y]),
            torch.cat([self.part, other.part]),
        )

    @property
    def device(self) -> torch.device:
        """Device of the pairs."""
        return self.pairs.device

    def to(self, device: torch.device | str) -> Links:
        """Return the pairs on `device`."""
        device = checks.device(device)
        return Links(self.pairs.to(device), self.y.to(device), self.part.to(device))
