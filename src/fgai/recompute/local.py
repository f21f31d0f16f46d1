"""Recompute only the rows that a perturbation affects: the same numbers as a full forward pass.

A new node changes the rows of its neighbours in the first layer, theirs in the second, and so on. Everything
else is computed once. If a change affects almost all rows, a full pass is made instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, LayerAttention, Layerwise, find_layers, prepared, stages_of
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.graph.graph import extend_encoding
from fgai.recompute.patch import PatchScores, Sides, _Edit, _Patch
from fgai.sparse import Adjacency, Features
from fgai.sparse.adjacency import set_active_rows
from fgai.sparse.valid import check_index
from fgai.typed import typed

# A full pass is made if recomputing would take more than this share of its work: patches take time to build.
WORTHWHILE = 0.6


class PartialOutput(NamedTuple):
    """The model's output at the rows that a perturbation changes."""

    nodes: Tensor  # [T] whose logits were computed again
    logits: Tensor  # [T, C]
    ranks: list[Tensor]  # per layer the scores [E'] of its patch's edges; empty unless asked for


@typed
@dataclass(frozen=True, eq=False)
class Plan:
    """The rows to recompute after one edit, layer by layer."""

    edit: _Edit  # the edges of the change
    start: Tensor  # [S] nodes whose features differ
    patches: list[_Patch]  # one per layer
    constants: list[tuple[Sides, Tensor | None]]  # per patch, the result of `_Patch.constants`
    states: list[Tensor | None]  # per patch the input of the affected rows, if the model reads it
    keep: Tensor  # [T] the last layer's recomputed rows whose logits are needed
    nodes: Tensor  # [T] their nodes
    share: float  # of the work of a full pass, counted in edges and rows times their widths
    ranks: list[PatchScores]  # per patch the scores neighbours are ranked by; empty unless of all rows

    def copies(self, times: int) -> PlanCopies:
        """Lay `times` copies of the plan side by side."""
        device = self.start.device
        inputs = torch.arange(times * self.start.numel(), device=device).view(times, -1)
        patches, constants, positions = [], [], []
        for patch, (sides, score) in zip(self.patches, self.constants, strict=True):
            copied, numbers, edges, fixed = _copy_patch(patch, inputs, sides)
            patches.append(copied)
            constants.append((fixed, None if score is None else score.repeat(times, 1)))
            positions.append(edges)
            inputs = numbers[:, : patch.recomputed]
        ranked = zip(patches, self.ranks, strict=bool(self.ranks))
        plan = replace(
            self,
            ranks=[PatchScores.of(patch, scores.graph) for patch, scores in ranked],
            start=self.start.repeat(times),
            patches=patches,
            constants=constants,
            states=[None if state is None else state.repeat(times, 1) for state in self.states],
            keep=inputs[:, self.keep].flatten(),
            nodes=self.nodes.repeat(times),
        )
        return PlanCopies(plan, times, positions)


class PlanCopies(NamedTuple):
    """Copies of a plan side by side."""

    plan: Plan  # takes features [times · S, F] and gives logits and nodes, one copy after the other
    times: int  # number of copies
    positions: list[Tensor]  # per patch [times, E'], where edge e of the single patch is in copy b


@typed
class Recompute:
    """A model of fgai and a graph prepared for it, with the results of the clean forward pass.

    Rows computed again equal those of a full forward pass on the perturbed graph, gradients to the changed
    features included, up to the order of summation. `InputError` if the model does not fit (see
    `Recompute.fits`), or the graph is not prepared for it (see `fgai.attention.prepared`).

    Example:
        >>> import fgai, torch
        >>> graph = fgai.Graph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4, torch.eye(4),
        ...     undirected=True, y=torch.tensor([0, 1, 0, 1]))
        >>> model = fgai.GAT.for_data(graph).eval()
        >>> recompute = Recompute(model, model.prepare(graph))
        >>> moved = GraphChange(rows=torch.tensor([0]), delta=torch.ones(1, 4))
        >>> recompute.logits(moved).nodes.tolist()
        [0, 1, 2]
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, graph: Graph) -> None:
        stages = _layerwise(model, graph)
        if stages is None:
            raise InputError(
                f"{type(model).__name__} cannot be recomputed in part: it must be one of fgai's attention"
                " models for nodes, in eval mode and without taps, on a graph with plain features"
            )
        if prepared(model, graph) is not graph:
            raise InputError(f"{graph.name!r} must be prepared for the model; use `fgai.attention.prepared`")
        self.stages: Layerwise = stages
        self.graph = graph
        names = list(find_layers(model))
        assert graph.features is not None
        state = stages.enter(graph.features, graph.positional)
        self._sides: list[Sides] = []
        self._states: list[Tensor | None] = []
        layers = []
        for name, (layer, update) in zip(names, stages.stages, strict=True):
            sides = layer.sides(state)
            out, attention = layer.fused(*sides, graph.adjacency, written=True)
            before = state if stages.keeps_state and isinstance(state, Tensor) else None
            state = update(before, layer.join(out))
            self._sides.append(sides)
            self._states.append(before)
            ranks = layer.mean_scores(*sides[:2], graph.adjacency)
            layers.append(LayerAttention.on(graph.adjacency, attention, name, ranks))
        assert isinstance(state, Tensor)
        self.clean_logits: Tensor = stages.leave(state)
        self.clean_attention = AttentionMap(tuple(layers))

    @staticmethod
    def fits(model: nn.Module, graph: Graph) -> bool:
        """Whether this model on this graph can be computed in part."""
        return _layerwise(model, graph) is not None

    @torch.no_grad()
    def plan(
        self,
        change: GraphChange,
        nodes: Tensor | None = None,
        *,
        all_rows: bool = False,
        limit: float = WORTHWHILE,
    ) -> Plan | None:
        """Return the plan of the rows to recompute after `change`, or None if a full pass is cheaper.

        `nodes` [T] are those whose logits are needed, by default all. With `all_rows` the plan also gives the
        full ranking of every recomputed row. `limit` is the largest share of the work of a full pass.
        """
        for name in ("endpoints", "edges", "removed", "rows"):
            if (index := getattr(change, name)) is not None:
                check_index(index.flatten(), self.graph.num_nodes, name)
        clean, edit = self.graph.adjacency, _Edit.of(change, self.graph)
        total = self.graph.num_nodes + edit.new
        everywhere = torch.ones(total, dtype=torch.bool, device=clean.device)
        rows = everywhere
        if nodes is not None and not all_rows:
            rows = torch.zeros_like(everywhere).index_fill(0, nodes, True)
        start = changed = edit.start(self.graph.num_nodes)
        patches, spent, full = [], 0.0, 0.0
        for index, (layer, _) in enumerate(self.stages.stages):
            last = index == len(self.stages.stages) - 1
            affected = edit.affected(clean, changed)
            if last:
                affected = affected[rows[affected]]
            needed = rows if last else everywhere
            patch = _Patch.build(clean, edit, changed, affected, needed, all_rows=all_rows)
            width = layer.heads * layer.channels
            spent += width * (patch.adjacency.num_edges + patch.adjacency.num_nodes)
            full += width * (clean.num_edges + edit.added.shape[1] + total)
            changed = torch.cat([changed, affected])
            patches.append(patch)
        if spent > limit * full:
            return None
        keep = rows[changed].nonzero().flatten()
        fixed = [
            patch.constants(layer, clean, sides)
            for patch, (layer, _), sides in zip(patches, self.stages.stages, self._sides, strict=True)
        ]
        states = [
            None if before is None else before[patch.constant[: patch.recomputed - patch.changed]]
            for patch, before in zip(patches, self._states, strict=True)
        ]
        ranked = zip(patches, self.clean_attention.layers if all_rows else (), strict=all_rows)
        ranks = [PatchScores.of(patch, layer.ranking()) for patch, layer in ranked]
        share = spent / max(1.0, full)
        return Plan(edit, start, patches, fixed, states, keep, changed[keep], share, ranks)

    def forward(
        self, plan: Plan, features: Features, positional: Tensor | None = None, *, logits: bool = True
    ) -> PartialOutput:
        """Compute the rows of the plan again; gradients reach the changed and the new features.

        The features are those of the clean graph with rows appended or deltas, `positional` the `encodings`.
        Without `logits`, only the ranks of a plan of all rows are computed.
        """
        moved = None if features.delta is None else features.select(plan.edit.rows) + features.delta
        parts = [part for part in (moved, features.appended) if part is not None]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts or [features.select(plan.start)])
        state = self.stages.enter(Features.dense(rows), positional)
        outputs: list[Tensor] = []
        steps = zip(plan.patches, plan.constants, plan.states, self.stages.stages, strict=True)
        for index, (patch, (fixed, score), before, (layer, update)) in enumerate(steps):
            pairs = zip(layer.sides(state), fixed, strict=True)
            source, destination, values = (torch.cat(pair) for pair in pairs)
            sides, last = (source, destination, values), index == len(plan.patches) - 1
            if plan.ranks:
                outputs.append(plan.ranks[index](layer, sides))
            if last and not logits:
                return PartialOutput(plan.nodes[:0], self.clean_logits[:0], outputs)
            out = patch.forward(layer, sides, score)
            joined = torch.cat([state, before]) if isinstance(state, Tensor) and before is not None else None
            if last:
                out = out.index_select(0, plan.keep)
                joined = None if joined is None else joined.index_select(0, plan.keep)
            state = update(joined, layer.join(out))
        assert isinstance(state, Tensor)
        return PartialOutput(plan.nodes, self.stages.leave(state), outputs)

    def logits(self, change: GraphChange, nodes: Tensor | None = None) -> PartialOutput:
        """Return the logits that `change` can change, of some `nodes` [T]; all others are `clean_logits`."""
        plan = self.plan(change, nodes, limit=float("inf"))
        features = change.features_on(self.graph)
        assert plan is not None and features is not None
        return self.forward(plan, features, self.encodings(plan, change))

    def encodings(self, plan: Plan, change: GraphChange) -> Tensor | None:
        """Return the positional encodings of `plan.start`: the changed rows and the new nodes."""
        graph = self.graph
        if graph.positional is None or graph.positional_values is None:
            return None
        encodings = graph.positional[plan.edit.rows]
        if plan.edit.new and change.endpoints is not None:
            degree = graph.adjacency.degree - int(graph.has_loops)
            endpoints = change.endpoints.to(graph.device)
            new = extend_encoding(graph.positional, graph.positional_values, degree, endpoints)[0]
            encodings = torch.cat([encodings, new])
        return encodings


def _layerwise(model: nn.Module, graph: Graph) -> Layerwise | None:
    """The model layer by layer, or None if it cannot be computed in part on this graph.

    The graph must have features, none of them changed, and no values on edges.
    """
    features = graph.features
    if features is None or features.appended is not None or features.rows is not None:
        return None
    return stages_of(model) if graph.edge_weight is None and graph.edge_attr is None else None


def _copy_patch(patch: _Patch, inputs: Tensor, sides: Sides) -> tuple[_Patch, Tensor, Tensor, Sides]:
    """Copies for the nodes `inputs` [times, S]: patch, node numbers, positions of edges, constant sides."""
    # Nodes are ordered by kind, then by copy: the changed ones of all copies, all affected rows, and so on.
    times, device = inputs.shape[0], inputs.device
    affected = patch.recomputed - patch.changed
    kinds = (affected, patch.constant.numel() - affected, patch.summarised.numel())
    numbers, index, before = [inputs], [], times * patch.changed
    first = 0
    for size in kinds:
        numbers.append(before + torch.arange(times * size, device=device).view(times, size))
        index.append((first + torch.arange(size, device=device)).repeat(times))
        before, first = before + times * size, first + size
    number = torch.cat(numbers, dim=1)
    edges, count = patch.adjacency, patch.adjacency.num_edges
    both = torch.stack([number[:, edges.source].flatten(), number[:, edges.destination].flatten()])
    adjacency, order = Adjacency.build(both, times * edges.num_nodes)
    set_active_rows(adjacency, with_grad=times * patch.changed, with_edges=times * patch.recomputed)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=device)
    positions, chosen = back.view(times, count), torch.cat(index)
    source, destination, values = (t.index_select(0, chosen) for t in sides)
    copied = _Patch(
        changed=times * patch.changed,
        recomputed=times * patch.recomputed,
        constant=torch.cat([part.repeat(times) for part in patch.constant.tensor_split([affected])]),
        adjacency=adjacency,
        positions=patch.positions.repeat(times)[order],
        summarised=patch.summarised.repeat(times),
        summary_edges=positions[:, patch.summary_edges].flatten(),
        rest=patch.rest.repeat(times),
        counts=patch.counts.repeat(times),
    )
    return copied, number, positions, (source, destination, values)
