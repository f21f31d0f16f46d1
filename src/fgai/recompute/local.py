"""Recompute only the rows that a perturbation reaches: the same numbers as a full forward pass.

A new node changes the rows of its neighbours in the first layer, theirs in the second, and so on. Everything
else is computed once. Where the change reaches almost everything, a full pass is taken. Training cannot use
this, since every row moves with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, LayerAttention, Layerwise, adapter_of, find_layers
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.graph.graph import extend_encoding
from fgai.recompute.patch import Ranks, Sides, _Edit, _Patch
from fgai.sparse import Adjacency, Features
from fgai.sparse.adjacency import set_active_rows
from fgai.sparse.valid import check_index
from fgai.typed import typed

WORTHWHILE = 0.6  # share of the work above which a full pass is taken: building patches costs something


class Touched(NamedTuple):
    """The rows that a perturbation changes."""

    nodes: Tensor  # [T] whose logits were computed again
    logits: Tensor  # [T, C]
    ranks: list[Tensor]  # per layer [E'] on its patch's edges; empty unless asked for


@typed
@dataclass(frozen=True, eq=False)
class Plan:
    """The rows to recompute after one edit, layer by layer."""

    edit: _Edit  # the edges of the change
    start: Tensor  # [S] nodes whose input differs
    patches: list[_Patch]  # one per layer
    constants: list[tuple[Sides, Tensor | None]]  # per patch, the result of `_Patch.constants`
    states: list[Tensor | None]  # per patch, of the fresh rows before the layer, where the model reads them
    keep: Tensor  # [T] the last layer's touched rows whose logits are needed
    nodes: Tensor  # [T] their nodes
    share: float  # of the work of a full pass, counted in edges and rows times their widths
    ranks: list[Ranks]  # per patch of a plan of all rows, what neighbours are ranked by; else empty

    def repeated(self, times: int) -> Repeated:
        """Lay `times` copies of the plan side by side."""
        device = self.start.device
        inputs = torch.arange(times * self.start.numel(), device=device).view(times, -1)
        patches, constants, states, positions = [], [], [], []
        for patch, (sides, score), before in zip(self.patches, self.constants, self.states, strict=True):
            copied, numbers, spots, fixed = _repeat_patch(patch, inputs, sides)
            patches.append(copied)
            constants.append((fixed, None if score is None else score.repeat(times, 1)))
            states.append(None if before is None else before.repeat(times, 1))
            positions.append(spots)
            inputs = numbers[:, : patch.touched]
        ranked = zip(self.ranks, patches, positions, strict=True) if self.ranks else ()
        plan = replace(
            self,
            ranks=[ranks.repeated(patch, spots) for ranks, patch, spots in ranked],
            start=self.start.repeat(times),
            patches=patches,
            constants=constants,
            states=states,
            keep=inputs[:, self.keep].flatten(),
            nodes=self.nodes.repeat(times),
        )
        return Repeated(plan, times, positions)


class Repeated(NamedTuple):
    """Copies of a plan side by side."""

    plan: Plan  # for features [times · S, F], copy after copy; its logits and nodes come copy after copy
    times: int  # number of copies
    positions: list[Tensor]  # per patch [times, E'], where edge e of the single patch is in copy b


@typed
class Recompute:
    """A model and a graph with the results of the clean forward pass, ready to be perturbed.

    The results equal a full forward pass on the perturbed graph, gradients to the changed features included,
    up to the order of summation.

    Args:
        model: fgai's GAT, GATv2 or GT for nodes, in eval mode, not tapped.
        graph: prepared for the model (see `fgai.attention.prepared`).

    Raises:
        InputError: the model is another one (see `Recompute.fits`), or the graph is not prepared for it.

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

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        adapter = adapter_of(model)
        stages = adapter.layerwise() if _plain(graph) else None
        if stages is None:
            raise InputError(
                f"{type(model).__name__} cannot be recomputed in part: it must be one of fgai's attention"
                " models for nodes, in eval mode and without taps, on a graph with plain features"
            )
        if adapter.prepare(graph) is not graph:
            raise InputError(f"{graph.name!r} must be prepared for the model; use `fgai.attention.prepared`")
        self.stages: Layerwise = stages
        self.graph = graph
        self._pass(list(find_layers(model)))

    @staticmethod
    def fits(model: nn.Module, graph: Graph) -> bool:
        """Whether this model on this graph can be computed in part."""
        return _plain(graph) and adapter_of(model).layerwise() is not None

    @torch.no_grad()
    def _pass(self, names: list[str]) -> None:
        """Run the clean forward pass and keep the input of each layer."""
        graph, stages = self.graph, self.stages
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

        Args:
            change: its edges and rows; the features do not matter.
            nodes: [T] the nodes whose logits are needed; all by default.
            all_rows: also give the full ranking of every touched row.
            limit: share of the work of a full pass that is still worthwhile.
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
            fresh = edit.reached(clean, changed)
            if last:
                fresh = fresh[rows[fresh]]
            patch = _Patch.build(clean, edit, changed, fresh, rows if last else everywhere, all_rows=all_rows)
            width = layer.heads * layer.channels
            spent += width * (patch.adjacency.num_edges + patch.adjacency.num_nodes)
            full += width * (clean.num_edges + edit.added.shape[1] + total)
            changed = torch.cat([changed, fresh])
            patches.append(patch)
        if spent > limit * full:
            return None
        keep = rows[changed].nonzero().flatten()
        fixed = [
            patch.constants(layer, clean, sides)
            for patch, (layer, _), sides in zip(patches, self.stages.stages, self._sides, strict=True)
        ]
        states = [
            None if before is None else before[patch.constant[: patch.touched - patch.changed]]
            for patch, before in zip(patches, self._states, strict=True)
        ]
        before = self.clean_attention.layers if all_rows else ()
        ranks = [Ranks.of(patch, layer.ranking()) for patch, layer in zip(patches, before, strict=all_rows)]
        share = spent / max(1.0, full)
        return Plan(edit, start, patches, fixed, states, keep, changed[keep], share, ranks)

    def forward(
        self, plan: Plan, features: Features, positional: Tensor | None = None, *, logits: bool = True
    ) -> Touched:
        """Compute the touched rows again; gradients reach the changed and the new features.

        Args:
            plan: of the edit.
            features: of the perturbed graph: those of the clean one with rows appended or deltas.
            positional: [S, P] encodings of `plan.start`, where the model reads them.
            logits: also those; without, only the ranks of a plan of all rows, the rest is empty.
        """
        moved = None if features.delta is None else features.select(plan.edit.rows) + features.delta
        parts = [part for part in (moved, features.appended) if part is not None]
        rows = torch.cat(parts) if parts else features.select(plan.start)
        state = self.stages.enter(Features.dense(rows), positional)
        outputs: list[Tensor] = []
        steps = zip(plan.patches, plan.constants, plan.states, self.stages.stages, strict=True)
        for index, (patch, (fixed, score), before, (layer, update)) in enumerate(steps):
            sides, last = patch.joined(layer.sides(state), fixed), index == len(plan.patches) - 1
            if plan.ranks:
                outputs.append(plan.ranks[index](layer, sides))
            if last and not logits:
                return Touched(plan.nodes[:0], self.clean_logits[:0], outputs)
            out = patch.forward(layer, sides, score)
            joined = torch.cat([state, before]) if isinstance(state, Tensor) and before is not None else None
            if last:
                out = out.index_select(0, plan.keep)
                joined = None if joined is None else joined.index_select(0, plan.keep)
            state = update(joined, layer.join(out))
        assert isinstance(state, Tensor)
        return Touched(plan.nodes, self.stages.leave(state), outputs)

    def logits(self, change: GraphChange, nodes: Tensor | None = None) -> Touched:
        """Return the logits `change` can move; all others are those of `clean_logits`.

        Args:
            change: e.g. one new node, or another feature vector of one node.
            nodes: [T] the nodes of interest; all by default.
        """
        plan = self.plan(change, nodes, limit=float("inf"))
        features = change.features_on(self.graph)
        assert plan is not None and features is not None
        return self.forward(plan, features, self.encodings(plan, change))

    def encodings(self, plan: Plan, change: GraphChange) -> Tensor | None:
        """Return the positional encodings of the rows a change begins at, new nodes included."""
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


def _plain(graph: Graph) -> bool:
    """Whether a graph has features, none of them changed, and no values on edges."""
    features = graph.features
    plain = features is not None and features.appended is None and features.rows is None
    return plain and graph.edge_weight is None and graph.edge_attr is None


def _repeat_patch(patch: _Patch, inputs: Tensor, sides: Sides) -> tuple[_Patch, Tensor, Tensor, Sides]:
    """Copies for the nodes `inputs` [times, S]: patch, node numbers, positions of edges, constant sides."""
    # Nodes stay in the order of their kinds: changed ones of all copies, then all fresh rows, and so on.
    times, device = inputs.shape[0], inputs.device
    fresh = patch.touched - patch.changed
    kinds = (fresh, patch.constant.numel() - fresh, patch.standins.numel())
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
    set_active_rows(adjacency, with_grad=times * patch.changed, with_edges=times * patch.touched)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=device)
    positions, chosen = back.view(times, count), torch.cat(index)
    source, destination, values = (t.index_select(0, chosen) for t in sides)
    copied = _Patch(
        changed=times * patch.changed,
        touched=times * patch.touched,
        constant=torch.cat([patch.constant[:fresh].repeat(times), patch.constant[fresh:].repeat(times)]),
        adjacency=adjacency,
        positions=patch.positions.repeat(times)[order],
        standins=patch.standins.repeat(times),
        spots=positions[:, patch.spots].flatten(),
        rest=patch.rest.repeat(times),
        counts=patch.counts.repeat(times),
    )
    return copied, number, positions, (source, destination, values)
