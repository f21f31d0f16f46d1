"""Recompute only the rows that a perturbation affects: the same numbers as a full forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, LayerAttention, Layerwise, find_layers, prepared, stages_of
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.graph.change import both_ways
from fgai.graph.graph import extend_encoding
from fgai.models.layer import AttentionLayer
from fgai.ops import aggregate, edge_softmax
from fgai.ops.capture import first_rows
from fgai.ops.segments import row_max, row_sum
from fgai.sparse import Adjacency, Features, edge_keys, key_ends
from fgai.sparse.adjacency import set_active_rows
from fgai.sparse.valid import check_index, row_entries
from fgai.typed import typed

WORTHWHILE = 0.6  # largest share of a full pass's work that is recomputed: patches take time to build
Sides = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _Edit:
    new: int  # number of new nodes, which are N, N + 1, ...
    added: Tensor  # [2, K] new edges (source, destination), those of the new nodes included
    removed: Tensor  # [R] positions of removed edges in the clean graph
    rows: Tensor  # [C] old nodes whose features changed

    @classmethod
    def of(cls, change: GraphChange, graph: Graph) -> _Edit:
        none = torch.zeros(0, dtype=torch.long, device=graph.device)
        rows = none if change.rows is None else change.rows.to(graph.device)
        if change.endpoints is not None and change.endpoints.numel():
            endpoints = change.endpoints.to(graph.device)
            nodes = torch.arange(graph.num_nodes, graph.num_nodes + endpoints.shape[0], device=graph.device)
            new, old = nodes[:, None].expand_as(endpoints).flatten(), endpoints.flatten()
            loops = nodes if graph.has_loops else none
            added = torch.stack([torch.cat([new, old, loops]), torch.cat([old, new, loops])])
            return cls(int(endpoints.shape[0]), added, none, rows)
        removed, added = none, none.expand(2, 0)
        if change.removed is not None and change.removed.numel():
            removed = both_ways(graph, change.removed.to(graph.device))
        if change.edges is not None and change.edges.numel():
            pairs = torch.cat([change.edges, change.edges.flip(0)], dim=1).to(graph.device)
            keys = torch.unique(edge_keys(pairs[0], pairs[1]))
            old = torch.searchsorted(graph.keys, keys).clamp(max=max(0, graph.num_edges - 1))
            exists = graph.keys[old] == keys if graph.num_edges else torch.zeros_like(keys, dtype=torch.bool)
            added = torch.stack(key_ends(keys[~exists | torch.isin(old, removed)]))
        return cls(0, added, removed, rows)

    def affected(self, adjacency: Adjacency, changed: Tensor) -> Tensor:
        """The other rows, sorted, whose output of a layer changes if its input changes at `changed` [S]."""
        mask = torch.zeros(adjacency.num_nodes + self.new, dtype=torch.bool, device=changed.device)
        mask[adjacency.destination[_outgoing(adjacency, changed)]] = True
        mask[self.added[1]] = True
        mask[adjacency.destination[self.removed]] = True
        mask[changed] = False
        return mask.nonzero().flatten()


def incoming(adjacency: Adjacency, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the edges into `nodes` [n], which new nodes lack, and of each the index in `nodes`."""
    old = (nodes < adjacency.num_nodes).nonzero().flatten()
    positions, index = row_entries(adjacency.rowptr, nodes[old])
    return positions, old[index]


def _outgoing(adjacency: Adjacency, nodes: Tensor) -> Tensor:
    return adjacency.csc[row_entries(adjacency.colptr, nodes[nodes < adjacency.num_nodes])[0]]


@dataclass(frozen=True, eq=False)
class _Patch:
    """A small graph on which the layer computes the rows that change exactly as on the full perturbed graph.

    Its nodes are, in this order: the changed ones, whose input differs from the clean one; the affected rows,
    whose output changes; other sources, clean; and summaries. All but the changed ones are constants.

    An affected row keeps its edges from clean sources with their scores s_e and values v_e in one constant
    neighbour, the summary,

        score  log Σ_e exp(s_e),      value  Σ_e exp(s_e) v_e / Σ_e exp(s_e),

    and softmax over {edges from changed nodes, summary} gives the same as softmax over all edges.
    """

    changed: int  # number of changed nodes
    recomputed: int  # number of changed nodes and affected rows
    constant: Tensor  # [n] clean nodes: affected rows, then other sources
    adjacency: Adjacency  # the small graph
    positions: Tensor  # [E'] of its edges in the clean graph; -1 for new edges and those of summaries
    summarised: Tensor  # [V] affected rows (0 for the first) that have a summary
    summary_edges: Tensor  # [V] the summaries' edges in `adjacency`
    rest: Tensor  # [R] positions in the clean graph of the edges they replace, row after row
    counts: Tensor  # [V] how many edges each replaces

    @classmethod
    def build(
        cls, clean: Adjacency, edit: _Edit, changed: Tensor, affected: Tensor, rows: Tensor, *, all_rows: bool
    ) -> _Patch:
        """Collect the edges into the `changed` nodes [S] and the `affected` rows [P, sorted].

        `rows` bool [N + new] marks the rows whose output is needed; with `all_rows` there are no summaries.
        """
        total, s, device = clean.num_nodes + edit.new, changed.numel(), changed.device
        position = torch.full((total,), -1, dtype=torch.long, device=device)
        position[changed] = torch.arange(s, device=device)
        position[affected] = s + torch.arange(affected.numel(), device=device)
        full = changed[rows[changed]]
        if all_rows:
            old_edges = incoming(clean, torch.cat([full, affected]))[0]
        else:
            into, out_of = incoming(clean, full)[0], _outgoing(clean, changed)
            old_edges = torch.cat([into, out_of[position[clean.destination[out_of]] >= s]])
        if edit.removed.numel():
            old_edges = old_edges[~torch.isin(old_edges, edit.removed)]
        added = edit.added[:, rows[edit.added[1]] & (position[edit.added[1]] >= 0)]
        source = torch.cat([clean.source[old_edges], added[0]])
        destination = torch.cat([clean.destination[old_edges], added[1]])
        other = torch.zeros(total, dtype=torch.bool, device=device)
        other[source] = True
        other &= position < 0
        constant = torch.cat([affected, other.nonzero().flatten()])
        position[constant] = s + torch.arange(constant.numel(), device=device)

        rest, row = incoming(clean, affected[:0] if all_rows else affected)
        from_clean = position[clean.source[rest]]
        replaced = (from_clean < 0) | (from_clean >= s)
        if edit.removed.numel():
            replaced &= ~torch.isin(rest, edit.removed)
        rest, row = rest[replaced], row[replaced]
        summarised, counts = torch.unique_consecutive(row, return_counts=True)
        nodes = s + constant.numel()
        summaries = nodes + torch.arange(summarised.numel(), device=device)
        edge_index = torch.stack(
            [torch.cat([position[source], summaries]), torch.cat([position[destination], s + summarised])]
        )
        adjacency, order = Adjacency.build(edge_index, nodes + summarised.numel())
        set_active_rows(adjacency, with_grad=s, with_edges=s + affected.numel())
        none = old_edges.new_full((added.shape[1] + summarised.numel(),), -1)
        return cls(
            changed=s,
            recomputed=s + affected.numel(),
            constant=constant,
            adjacency=adjacency,
            positions=torch.cat([old_edges, none])[order],
            summarised=summarised,
            summary_edges=(order >= source.numel()).nonzero().flatten(),  # one per row, in order
            rest=rest,
            counts=counts,
        )

    def constants(self, layer: AttentionLayer, clean: Adjacency, sides: Sides) -> tuple[Sides, Tensor | None]:
        """Sides and values of unchanged nodes; scores [V, H] of the summaries where no side gives them."""
        source, destination, values = (t[self.constant] for t in sides)
        count = self.summarised.numel()
        if not count:
            return (source, destination, values), None
        score, value = self._summaries(layer, clean, sides)
        side = layer.source_for(score, destination[self.summarised])
        zeros = source.new_zeros(count, *source.shape[1:])
        source, destination = torch.cat([source, zeros]), torch.cat([destination, zeros])
        if side is not None:
            source[-count:] = side
        return (source, destination, torch.cat([values, value])), score if side is None else None

    def _summaries(self, layer: AttentionLayer, clean: Adjacency, sides: Sides) -> tuple[Tensor, Tensor]:
        affected = self.constant[self.summarised]
        nodes, inverse = torch.unique(torch.cat([affected, clean.source[self.rest]]), return_inverse=True)
        rows = torch.repeat_interleave(inverse[: affected.numel()], self.counts)
        # Both are in the order of the nodes, so the edges stay sorted by destination.
        rowptr = torch.searchsorted(rows, torch.arange(nodes.numel() + 1, device=rows.device))
        small = Adjacency(nodes.numel(), inverse[affected.numel() :], rows, rowptr, rowptr[:0], rows[:0])
        source, destination, values = (t[nodes] for t in sides)
        scores = layer.score_edges(source, destination, small)
        pointers = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0))
        top = row_max(scores, pointers)
        top_of_edge = torch.repeat_interleave(top, self.counts, dim=0)
        total = top + row_sum(torch.exp(scores - top_of_edge), pointers).log()
        return total, aggregate(edge_softmax(scores, small), values, small)[inverse[: affected.numel()]]

    def forward(self, layer: AttentionLayer, sides: Sides, score: Tensor | None) -> Tensor:
        """The aggregated values of the recomputed rows [T, H, C] from the sides of all nodes."""
        source, destination, values = sides
        if score is None:
            out, _ = layer.fused(source, destination, values, self.adjacency, written=False)
        else:
            scores = layer.score_edges(source, destination, self.adjacency)
            scores = scores.index_copy(0, self.summary_edges, score)
            out = aggregate(edge_softmax(scores, self.adjacency), values, self.adjacency)
        return first_rows(out, self.recomputed)


class PatchScores(NamedTuple):
    """The scores of a patch's edges, mean over the heads."""

    graph: Tensor  # [E] of the clean graph
    clean: Tensor  # [E'] of the patch before the change; 0 for new edges
    changing: Tensor  # [M] edges of the patch whose score may change: new ones, and those with a changed end
    adjacency: Adjacency  # these edges alone, among all nodes of the patch

    @classmethod
    def of(cls, patch: _Patch, graph: Tensor) -> PatchScores:
        """Find the edges of a patch of all rows to score again; `graph` [E] are the clean graph's scores."""
        new, edges = patch.positions < 0, patch.adjacency
        clean = graph[patch.positions.clamp(min=0)].masked_fill(new, 0.0)
        ends = torch.minimum(edges.source, edges.destination)
        changing = ((ends < patch.changed) | new).nonzero().flatten()
        some = Adjacency.from_sorted(edges.source[changing], edges.destination[changing], edges.num_nodes)
        set_active_rows(some, with_grad=patch.changed, with_edges=patch.recomputed)
        return cls(graph, clean, changing, some)

    def __call__(self, layer: AttentionLayer, sides: Sides) -> Tensor:
        """The scores [E'] from the sides of all nodes of the patch; gradients come from changing edges."""
        return self.clean.index_copy(0, self.changing, layer.mean_scores(*sides[:2], self.adjacency))


def _copy_patch(patch: _Patch, inputs: Tensor, sides: Sides) -> tuple[_Patch, Tensor, Tensor, Sides]:
    """Copies for the nodes `inputs` [times, S]: patch, node numbers, positions of edges, constant sides."""
    # Nodes are ordered by kind, then by copy: the changed ones of all copies, all affected rows, and so on.
    times, device = inputs.shape[0], inputs.device
    affected = patch.recomputed - patch.changed
    kinds = [affected, patch.constant.numel() - affected, patch.summarised.numel()]
    rows = torch.arange(sum(kinds), device=device)
    chosen = torch.cat([part.repeat(times) for part in torch.split(rows, kinds)])
    copies = times * patch.changed + torch.arange(times * len(rows), device=device)
    blocks = torch.split(copies, [times * size for size in kinds])
    number = torch.cat([inputs, *(block.view(times, -1) for block in blocks)], dim=1)
    edges, count = patch.adjacency, patch.adjacency.num_edges
    both = torch.stack([number[:, edges.source].flatten(), number[:, edges.destination].flatten()])
    adjacency, order = Adjacency.build(both, times * edges.num_nodes)
    set_active_rows(adjacency, with_grad=times * patch.changed, with_edges=times * patch.recomputed)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=device)
    positions = back.view(times, count)
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
        inputs = torch.arange(times * self.start.numel(), device=self.start.device).view(times, -1)
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

    Rows computed again equal those of a full forward pass on the perturbed graph, gradients included, up to
    the order of summation. `InputError` if the model does not fit (see `Recompute.fits`), or the graph is not
    prepared for it (see `fgai.attention.prepared`).

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
        assert graph.features is not None
        state = stages.enter(graph.features, graph.positional)
        self._sides: list[Sides] = []
        self._states: list[Tensor | None] = []
        layers = []
        for name, (layer, update) in zip(find_layers(model), stages.stages, strict=True):
            sides = layer.sides(state)
            out, attention = layer.fused(*sides, graph.adjacency, written=True)
            before = state if stages.keeps_state and isinstance(state, Tensor) else None
            state = update(before, layer.join(out))
            self._sides.append(sides)
            self._states.append(before)
            ranks = layer.mean_scores(*sides[:2], graph.adjacency)
            layers.append(LayerAttention.from_adjacency(graph.adjacency, attention, name, ranks))
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

        `nodes` [T] are those whose logits are needed, by default all. `all_rows` also gives the full ranking
        of every recomputed row. `limit` is the largest share of the work of a full pass.
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
        new = torch.arange(clean.num_nodes, total, device=clean.device)
        start = changed = torch.cat([edit.rows, new])
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
    """The model layer by layer, or None without features, with changed ones, or with values on edges."""
    features = graph.features
    if features is None or features.appended is not None or features.rows is not None:
        return None
    return stages_of(model) if graph.edge_weight is None and graph.edge_attr is None else None
