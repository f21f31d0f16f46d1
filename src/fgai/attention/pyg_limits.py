"""Limits for PyTorch Geometric: hooks on the linear maps of its attention layers, kept in their `state_dict`.

GATConv and SuperGATConv read both sides of the score off the values inside their forward pass, where no hook
that `torch.compile` knows can reach; the limits of the values bound them there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, SuperGATConv, TransformerConv

from fgai.attention.limits import Limits


class _AfterMap:
    """A hook on a linear map: what it returns goes through limits. Copied and pickled with its layer."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.limits(output)  # type: ignore[no-any-return]


def _limit_maps(layer: Any, maps: dict[str, nn.Module]) -> None:
    width = layer.heads * layer.out_channels
    found = {name: Limits(width) for name in maps}
    for name, linear in maps.items():
        linear.register_forward_hook(_AfterMap(found[name]))
    layer.limits = nn.ModuleDict(found).to(next(layer.parameters()))


def _limit_gat(layer: Any) -> None:
    maps = {"value": layer.lin} if layer.lin is not None else {"value": layer.lin_src, "right": layer.lin_dst}
    _limit_maps(layer, maps)


def _limit_gatv2(layer: Any) -> None:
    maps = {"value": layer.lin_l}
    if layer.lin_r is not layer.lin_l:
        maps["right"] = layer.lin_r
    _limit_maps(layer, maps)


def _limit_transformer(layer: Any) -> None:
    _limit_maps(layer, {"value": layer.lin_value, "query": layer.lin_query, "key": layer.lin_key})


def _limit_supergat(layer: Any) -> None:
    _limit_maps(layer, {"value": layer.lin})


PYG_LIMITERS: dict[type[nn.Module], Callable[[Any], None]] = {
    GATConv: _limit_gat,
    GATv2Conv: _limit_gatv2,
    TransformerConv: _limit_transformer,
    SuperGATConv: _limit_supergat,
}
"""Layer type → what adds limits to a layer of it, in place."""
