"""`_Patch`: the part of one attention layer that has to be computed again after a perturbation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fgai.graph import Graph, GraphChange
from fgai.graph.change import both_ways
from fgai.models.layer import AttentionLayer
from fgai.ops import aggregate, edge_softmax
from fgai.ops.capture import first_rows
from fgai.ops.segments import row_max, row_sum
from fgai.sparse import Adjacency, edge_keys, key_ends
from fgai.sparse.adjacency import set_active_rows
from fgai.sparse.valid import row_entries

Sides = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _Edit:
    """The edges of a change of a graph of N nodes."""

    new: int  # number of new nodes, which are N, N + 1, ...
    added: Tensor  # [2, K] new edges (source, destination), those of the new nodes included
    removed: Tensor  # [R] positions of removed edges in the clean graph
    rows: Tensor  # [C] old nodes whose features changed

    @classmethod
    def of(cls, change: GraphChange, graph: Graph) -> _Edit:
        """The edit of a change, without a pass over the edges of the graph."""
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

    def start(self, num_nodes: int) -> Tensor:
        """The nodes whose features differ from the clean ones: changed rows, then the new nodes."""
        new = torch.arange(num_nodes, num_nodes + self.new, device=self.rows.device)
        return torch.cat([self.rows, new])

    def affected(self, adjacency: Adjacency, changed: Tensor) -> Tensor:
        """The other rows, sorted, whose output of a layer changes if its input changes at `changed` [S].

        They are the destinations of edges out of `changed`, and of added and removed edges.
        """
        mask = torch.zeros(adjacency.num_nodes + self.new, dtype=torch.bool, device=changed.device)
        mask[adjacency.destination[_outgoing(adjacency, changed)]] = True
        mask[self.added[1]] = True
        mask[adjacency.destination[self.removed]] = True
        mask[changed] = False
        return mask.nonzero().flatten()


def incoming(adjacency: Adjacency, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the edges into `nodes` [n], node after node, and for each its place in `nodes`.

    New nodes, which are not in the adjacency, have no edges there.
    """
    old = (nodes < adjacency.num_nodes).nonzero().flatten()
    positions, place = row_entries(adjacency.rowptr, nodes[old])
    return positions, old[place]


def _outgoing(adjacency: Adjacency, nodes: Tensor) -> Tensor:
    """Positions of the edges out of `nodes` [n], node after node."""
    return adjacency.csc[row_entries(adjacency.colptr, nodes[nodes < adjacency.num_nodes])[0]]


@dataclass(frozen=True, eq=False)
class _Patch:
    """A small graph on which the layer computes the rows that change exactly as on the full perturbed graph.

    Its nodes are, in this order: the changed ones, whose input differs from the clean one; the affected rows,
    whose input is clean but whose output changes; other sources, clean; and summaries. All but the changed
    ones are constants of the attack.

    An affected row keeps its own side of the score, so its edges from clean sources keep their scores. One
    constant neighbour, the summary, replaces them: with s_e their scores and v_e their values,

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
            full = torch.cat([full, affected])
        old_edges = incoming(clean, full)[0]
        if not all_rows:
            out_edges = _outgoing(clean, changed)
            old_edges = torch.cat([old_edges, out_edges[position[clean.destination[out_edges]] >= s]])
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
        sorted_position = torch.empty_like(order)
        sorted_position[order] = torch.arange(order.numel(), device=device)
        set_active_rows(adjacency, with_grad=s, with_edges=s + affected.numel())
        none = old_edges.new_full((added.shape[1] + summarised.numel(),), -1)
        return cls(
            changed=s,
            recomputed=s + affected.numel(),
            constant=constant,
            adjacency=adjacency,
            positions=torch.cat([old_edges, none])[order],
            summarised=summarised,
            summary_edges=sorted_position[old_edges.numel() + added.shape[1] :],
            rest=rest,
            counts=counts,
        )

    def constants(self, layer: AttentionLayer, clean: Adjacency, sides: Sides) -> tuple[Sides, Tensor | None]:
        """Both sides and values of all nodes but the changed ones, and the scores of the summaries [V, H].

        The scores are None if sides of the summaries give them, so that the fused kernels can be used.
        """
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
        """The scores [V, H] and values [V, H, C] of the summaries."""
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
        out = aggregate(edge_softmax(scores, small), values, small)
        return total, out[inverse[: affected.numel()]]

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
        scores = layer.mean_scores(*sides[:2], self.adjacency)
        return self.clean.index_copy(0, self.changing, scores)
