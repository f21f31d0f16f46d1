"""Models, graphs and slow references shared by the attention tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, leaky_relu
from torch_geometric.nn import GATConv, GATv2Conv, SuperGATConv, TransformerConv

from fgai.attention import AttentionMap, LayerAttention

KINDS = ("gat", "gatv2", "transformer", "supergat-mx", "supergat-sd")
WITH_WEIGHTS = KINDS[:3]
"""Layers that can return their attention themselves."""

FEATURES, HIDDEN, HEADS, CLASSES, NODES = 5, 4, 3, 2, 7
# Node 6 is isolated; (3, 3) is a loop; (0, 1) and (4, 2) occur twice.
EDGES = torch.tensor([[4, 0, 3, 2, 0, 5, 4, 1, 2, 4], [2, 1, 3, 1, 1, 4, 2, 0, 5, 0]])


def assert_sums(attention: AttentionMap | LayerAttention, tolerance: float | None = None) -> None:
    """The attention of every node with an incoming edge sums to one."""
    for w in (attention,) if isinstance(attention, LayerAttention) else attention:
        slack = (1e-8 if w.values.dtype == torch.float64 else 1e-4) if tolerance is None else tolerance
        sums = w.sums().detach().double()[w.degree > 0]
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=slack)


def assert_same_edges(mine: AttentionMap, theirs: AttentionMap) -> None:
    """Both maps have the same edges, layer by layer."""
    for one, other in zip(mine, theirs, strict=True):
        one.require_same_edges(other)


def make_conv(kind: str, in_channels: int, out_channels: int, **options: Any) -> Any:
    match kind:
        case "gat":
            return GATConv(in_channels, out_channels, **options)
        case "gatv2":
            return GATv2Conv(in_channels, out_channels, **options)
        case "transformer":
            return TransformerConv(in_channels, out_channels, **options)
        case _:
            return SuperGATConv(in_channels, out_channels, attention_type=kind[-2:].upper(), **options)


class TwoLayers(nn.Module):
    """A model as a user writes it."""

    def __init__(self, kind: str, *, dropout: float = 0.0, heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.conv1 = make_conv(kind, FEATURES, HIDDEN, heads=heads, dropout=dropout, **options)
        self.conv2 = make_conv(kind, HIDDEN * heads, CLASSES, heads=1, dropout=dropout, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        extra = () if edge_attr is None else (edge_attr,)
        return self.conv2(elu(self.conv1(x, edge_index, *extra)), edge_index, *extra)


def make_model(kind: str, seed: int = 0, **options: Any) -> TwoLayers:
    torch.manual_seed(seed)
    model = TwoLayers(kind, **options).double()
    for parameter in model.parameters():  # biases start at zero, which would hide mistakes
        nn.init.normal_(parameter, std=0.7)
    return model.eval()


def make_features(num_nodes: int = NODES, width: int = FEATURES, seed: int = 1) -> Tensor:
    return torch.randn(num_nodes, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sort_edges(edge_index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Edges and values sorted by (destination, source), with Python's stable sort."""
    pairs = [(int(d), int(s)) for s, d in edge_index.T]
    order = sorted(range(len(pairs)), key=pairs.__getitem__)
    index = torch.tensor(order, dtype=torch.long)
    return edge_index[:, index], values[index]


def with_loops(kind: str, edge_index: Tensor, num_nodes: int) -> Tensor:
    """The edges a PyG layer of this kind works on, sorted: own loops are replaced by one per node."""
    if kind != "transformer":
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        edge_index = torch.cat([edge_index, torch.arange(num_nodes).expand(2, -1)], dim=1)
    return sort_edges(edge_index, torch.zeros(edge_index.shape[1]))[0]


def scores_of(kind: str, conv: Any, x: Tensor, s: int, d: int, h: int) -> Tensor:
    """The score of one edge and head, by the formula of each paper."""
    c = slice(h * conv.out_channels, (h + 1) * conv.out_channels)
    if kind == "gat":
        z = conv.lin.weight[c] @ x.T
        return leaky_relu(conv.att_src[0, h] @ z[:, s] + conv.att_dst[0, h] @ z[:, d], 0.2)
    if kind == "gatv2":
        left = conv.lin_l.weight[c] @ x[s] + conv.lin_l.bias[c]
        right = conv.lin_r.weight[c] @ x[d] + conv.lin_r.bias[c]
        return conv.att[0, h] @ leaky_relu(left + right, 0.2)
    if kind == "transformer":
        query = conv.lin_query.weight[c] @ x[d] + conv.lin_query.bias[c]
        key = conv.lin_key.weight[c] @ x[s] + conv.lin_key.bias[c]
        return query @ key / math.sqrt(conv.out_channels)
    zs, zd = conv.lin.weight[c] @ x[s], conv.lin.weight[c] @ x[d]
    if kind == "supergat-sd":
        return leaky_relu(zs @ zd / math.sqrt(conv.out_channels), 0.2)
    return leaky_relu((conv.att_l[0, h] @ zs + conv.att_r[0, h] @ zd) * torch.sigmoid(zs @ zd), 0.2)


def reference_layer(
    kind: str, conv: Any, x: Tensor, edge_index: Tensor, delta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [N, H·C] and attention [E, H] of one layer, by loops over edges, heads and nodes."""
    edges = [(int(s), int(d)) for s, d in edge_index.T]
    heads, width = conv.heads, conv.out_channels
    attention = x.new_zeros(len(edges), heads)
    for h in range(heads):
        for node in range(x.shape[0]):
            incoming = [e for e, (_, d) in enumerate(edges) if d == node]
            if incoming:
                row = torch.stack([scores_of(kind, conv, x, *edges[e], h) for e in incoming])
                attention[incoming, h] = torch.softmax(row, dim=0)
    used = attention if delta is None else attention + delta
    values = {"gat": "lin", "gatv2": "lin_l", "transformer": "lin_value"}.get(kind, "lin")
    value = getattr(conv, values)(x).view(-1, heads, width)
    out = x.new_zeros(x.shape[0], heads, width)
    for e, (s, d) in enumerate(edges):
        out[d] += used[e, :, None] * value[s]
    if kind == "transformer":
        return out.flatten(1) + conv.lin_skip(x), attention
    return out.flatten(1) + conv.bias, attention


def reference_model(
    kind: str, model: TwoLayers, x: Tensor, edge_index: Tensor, deltas: dict[int, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention of both layers; `edge_index` as `with_loops` gives it."""
    hidden, first = reference_layer(kind, model.conv1, x, edge_index, deltas.get(0))
    out, second = reference_layer(kind, model.conv2, elu(hidden), edge_index, deltas.get(1))
    return out, [first, second]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything on every module that recording could touch: attributes, hooks, modes, tensors.

    Left out is what a SuperGATConv keeps from its own training forward, for its self-supervised loss.
    """
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in ("att_x", "att_y"):
                state[f"{path}.{key}"] = dict(value) if isinstance(value, dict) else value
    state["parameters"] = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    return state


def assert_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = snapshot(model)
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    old, new = before["parameters"], after["parameters"]
    assert old.keys() == new.keys()
    for name in old:
        assert torch.equal(old[name], new[name]), name
    for key, value in before.items():
        if key == "parameters":
            continue
        same = value is after[key] or (not isinstance(value, Tensor) and value == after[key])
        assert same, (key, value, after[key])


def assert_equals_weights(layer, weights, edges=None):
    """One recorded layer equals what `return_attention_weights` gave, edge by edge, bit by bit."""
    given_edges, values = weights
    expected_edges, expected = sort_edges(given_edges if edges is None else edges, values)
    assert torch.equal(torch.stack([layer.source, layer.destination]), expected_edges)
    assert torch.equal(layer.values, expected)


def make_map(edges=EDGES, heads=(3, 1), num_nodes=NODES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for index, count in enumerate(heads):
        values = torch.rand(edges.shape[1], count, generator=generator, dtype=torch.float64)
        layers.append(LayerAttention.from_edges(values, edges[0], edges[1], num_nodes, f"layer{index}"))
    return AttentionMap(tuple(layers))
