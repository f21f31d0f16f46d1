"""`Chain`: a model as attention layers with row-by-row steps, for which injections are bounded."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fgai.attention import limits_of, observe
from fgai.graph import Graph
from fgai.models import AttentionLayer
from fgai.sparse import Adjacency, Features

SAME = 1e-6  # largest relative distance of two computations of the same in float64


class _Chain(nn.Module):
    """`steps[0]`, `layers[0]`, `steps[1]`, …, `layers[-1]`, `steps[-1]`; nodes interact in layers alone.

    With `loops` the layers add self-loops; a final `log_softmax` changes no order of classes.
    """

    def __init__(
        self,
        names: list[str],
        layers: list[AttentionLayer],
        steps: list[list[nn.Module]],
        *,
        loops: bool = False,
        log_softmax: bool = False,
    ) -> None:
        super().__init__()
        self.names, self.loops, self.log_softmax = names, loops, log_softmax
        self.layers, self.steps = layers, steps
        self._layers, self._steps = nn.ModuleList(layers), nn.ModuleList(map(nn.ModuleList, steps))

    def adjacency(self, graph: Graph) -> Adjacency:
        if self.loops and not graph.has_loops:
            graph = graph.derived("self-loops", lambda graph: graph.add_self_loops()[0])
        return graph.adjacency

    def run(
        self, features: Features, adjacency: Adjacency
    ) -> tuple[list[tuple[AttentionLayer, Tensor | Features]], Tensor]:
        """Return every layer with its input, and the logits."""
        state: Tensor | Features = features
        inputs = []
        for before, layer in zip(self.steps, self.layers, strict=False):
            state = _apply(before, state)
            inputs.append((layer, state))
            state = layer(state, adjacency)
        logits = cast(Tensor, _apply(self.steps[-1], state))
        return inputs, logits.log_softmax(1) if self.log_softmax else logits

    def problem(self) -> str | None:
        if not self._layers:
            return "it has no attention layer"
        for layer in self.layers:
            if not 0 <= layer.slope <= 1:
                return f"a slope of {layer.slope} is not in [0, 1]: bounds of scores hold for no other"
            if layer.limits is None or layer.input_norm is not None:
                return "a layer has no limits, so one new neighbour may have any value; see `fgai.limit`"
            for one in limits_of(layer):
                if not one.derived and not bool(one.low.isfinite().all() & one.high.isfinite().all()):
                    return "limits were not measured; see `fgai.limit`"
                if (fault := one.fault()) is not None:
                    return f"{fault}; see `fgai.limit`"
        numbers = (*self._layers.parameters(), *self._steps.parameters(), *self._steps.buffers())
        if not all(bool(one.isfinite().all()) for one in numbers):
            return "weights that are not finite are not followed"
        return None


def _apply(steps: list[nn.Module], state: Tensor | Features) -> Tensor | Features:
    if steps and isinstance(state, Features):
        state = state.to_dense()
    for step in steps:
        state = step(state)
    return state


def _same_outputs(model: nn.Module, chain: _Chain, graph: Graph) -> bool:
    """Whether model and chain, in float64, agree on the graph and with new nodes, even of huge features."""
    count = min(3, graph.num_nodes)
    generator = torch.Generator().manual_seed(0)
    assert graph.features is not None
    dense = graph.features.to_dense()
    new = torch.randn(3, dense.shape[1], generator=generator, dtype=dense.dtype) * dense.std(0, correction=0)
    new = dense.mean(0) + new * torch.tensor([[1.0], [30.0], [1000.0]], dtype=dense.dtype)
    ends = torch.randint(graph.num_nodes, (3, count), generator=generator)
    for one in (graph, graph.inject(ends, new)[0]):
        assert one.features is not None
        adjacency, observation = chain.adjacency(one), observe(model, one)
        if len(observation.attention) != len(chain.layers):
            return False
        inputs, logits = chain.run(one.features, adjacency)
        for recorded, (layer, state) in zip(observation.attention, inputs, strict=True):
            if recorded.num_edges != adjacency.num_edges or not torch.equal(recorded.keys, adjacency.keys):
                return False
            if not _near(recorded.values, layer.attend(state, adjacency)[0]):
                return False
        if not _near(observation.logits, logits):
            return False
    return True


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one - other).abs() <= SAME * other.abs().max()).all()) if one.numel() else True
