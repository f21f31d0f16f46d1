"""`HeteroModel`: a heterogeneous model that is called on one graph of all nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention.layout import HeteroLayout
from fgai.attention.wrapped import Wrapped
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.typed import typed

HeteroCall = Callable[[Any, Any], Any]
"""From a model and a PyG `HeteroData` with `x` and `edge_index` to the target's logits, or those by type."""


def call_by_type(model: Any, data: Any) -> Any:
    """Call a model as PyG's heterogeneous models are called."""
    return model(data.x_dict, data.edge_index_dict)


@typed
class HeteroModel(Wrapped):
    """A heterogeneous model together with the layout of the graph it is called on; see `fgai.hetero`.

    Taken wherever fgai takes a model, with the graph that has this layout. Its attention has an entry for
    every layer and type of edges; nodes are numbered as in that graph.

    Attributes:
        model: as given.
        layout: of the graph.
    """

    def __init__(self, model: nn.Module, layout: HeteroLayout, call: HeteroCall = call_by_type) -> None:
        super().__init__(model, call)
        self.layout = layout

    def forward(self, data: Any) -> Tensor:
        """Return logits [N, C] of a PyG `Data` or a `Graph` with the layout; 0 for nodes of other types.

        Without a target they are zeros [N, 1] throughout: attention alone is wanted.

        Raises:
            InputError: the model gives no logits of the target.
        """
        whole = data.to_data() if isinstance(data, Graph) else data
        found = self.call(self.model, self.layout.split(whole))
        target = self.layout.target
        if target is None:
            return torch.zeros_like(whole.x[:, :1])
        if isinstance(found, Mapping):
            known = ", ".join(repr(name) for name, one in found.items() if one is not None)
            found = found.get(target)
            if found is None:
                raise InputError(f"the model says nothing of the {target!r} nodes, only of {known or 'none'}")
        if not isinstance(found, Tensor):
            raise InputError(
                f"the model must return logits, or those by type of nodes, got {type(found).__name__}; say"
                " where they are with `call`"
            )
        return self.layout.spread(found, whole.num_nodes)
