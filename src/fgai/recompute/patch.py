"""`_Patch`: the part of one attention layer that a perturbation makes it compute again."""

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

Sides = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _Edit:
    """The edges of a change of a graph of N nodes."""

    new: int  # number of new nodes: N, N + 1 and so on
    added: Tensor  # [2, K] new edges (source, destination), those of the new nodes included
    removed: Tensor  # [R] positions of removed edges in the clean graph
    rows: Tensor  # [C] old nodes whose features changed

    @classmethod
    def of(cls, change: GraphChange, graph: Graph) -> _Edit:
        """Read the edit off a change, without a pass over the edges of the graph."""
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
            spot = torch.searchsorted(graph.keys, keys).clamp(max=max(0, graph.num_edges - 1))
            there = graph.keys[spot] == keys if graph.num_edges else torch.zeros_like(keys, dtype=torch.bool)
            keys = keys[~there | torch.isin(spot, removed)]
            added = torch.stack(key_ends(keys))
        return cls(0, added, removed, rows)

    def start(self, num_nodes: int) -> Tensor:
        """The nodes whose input is not the clean one: changed rows, then the new nodes."""
        new = torch.arange(num_nodes, num_nodes + self.new, device=self.rows.device)
        return torch.cat([self.rows, new])

    def reached(self, adjacency: Adjacency, changed: Tensor) -> Tensor:
        """The other rows that a layer whose input differs at `changed` [S] computes differently, sorted.

        They are the ends of edges out of `changed`, and the ends of added and removed edges.
        """
        mask = torch.zeros(adjacency.num_nodes + self.new, dtype=torch.bool, device=changed.device)
        mask[adjacency.destination[_outgoing(adjacency, changed)]] = True
        mask[self.added[1]] = True
        mask[adjacency.destination[self.removed]] = True
        mask[changed] = False
        return mask.nonzero().flatten()


def incoming(adjacency: Adjacency, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the edges into `nodes` [n], node after node, and which of the nodes each belongs to."""
    return _ranges(adjacency.rowptr, nodes, adjacency.num_nodes)


def _outgoing(adjacency: Adjacency, nodes: Tensor) -> Tensor:
    """Positions of the edges out of `nodes` [n], node after node."""
    return adjacency.csc[_ranges(adjacency.colptr, nodes, adjacency.num_nodes)[0]]


def _ranges(pointer: Tensor, nodes: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The positions `pointer[i]:pointer[i + 1]` of every node i; a node not in the structure has none."""
    inside = nodes.clamp(max=max(0, num_nodes - 1))
    first = pointer[inside]
    count = torch.where(nodes < num_nodes, pointer[inside + 1] - first, 0) if num_nodes else 0 * nodes
    owner = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), count)
    before = torch.cumsum(count, 0) - count
    return torch.arange(owner.numel(), device=nodes.device) + (first - before)[owner], owner


@dataclass(frozen=True, eq=False)
class _Patch:
    """A small graph on which the layer gives the touched rows exactly as on the full perturbed graph.

    Its nodes are, in this order: the changed ones, whose input differs from the clean one; the fresh rows,
    whose input is clean but which a change reaches; other sources, clean; and stand-ins. All but the changed
    ones are constants of the attack.

    A fresh row keeps its own side of the score, so the edges from clean sources keep their scores. They are
    one constant neighbour, the stand-in: with s_e their scores and v_e their values,

        score  log Σ_e exp(s_e),      value  Σ_e exp(s_e) v_e / Σ_e exp(s_e),

    and softmax over {edges from changed nodes, stand-in} mixes what softmax over all edges would.
    """

    changed: int  # number of changed nodes
    touched: int  # number of changed and fresh nodes: the rows that are computed again
    constant: Tensor  # [n] clean nodes: fresh rows, then other sources
    adjacency: Adjacency  # the small graph
    positions: Tensor  # [E'] of its edges in the clean graph; -1 for new edges and stand-ins
    standins: Tensor  # [V] fresh rows (0 for the first) that have a stand-in
    spots: Tensor  # [V] the stand-ins' edges in `adjacency`
    rest: Tensor  # [R] positions in the clean graph of the edges they stand for, row after row
    counts: Tensor  # [V] how many each stands for

    @classmethod
    def build(
        cls, clean: Adjacency, edit: _Edit, changed: Tensor, fresh: Tensor, rows: Tensor, *, all_rows: bool
    ) -> _Patch:
        """Collect the edges into the `changed` nodes [S] and the `fresh` rows [P, sorted] to compute again.

        `rows` bool [N + new] marks those whose output is needed; with `all_rows` there are no stand-ins.
        """
        total, s, device = clean.num_nodes + edit.new, changed.numel(), changed.device
        position = torch.full((total,), -1, dtype=torch.long, device=device)
        position[changed] = torch.arange(s, device=device)
        position[fresh] = s + torch.arange(fresh.numel(), device=device)
        full = changed[rows[changed]]
        if all_rows:
            full = torch.cat([full, fresh])
        taken = incoming(clean, full)[0]
        if not all_rows:
            spread = _outgoing(clean, changed)
            taken = torch.cat([taken, spread[position[clean.destination[spread]] >= s]])
        if edit.removed.numel():
            taken = taken[~torch.isin(taken, edit.removed)]
        added = edit.added[:, rows[edit.added[1]] & (position[edit.added[1]] >= 0)]
        source = torch.cat([clean.source[taken], added[0]])
        destination = torch.cat([clean.destination[taken], added[1]])
        other = torch.zeros(total, dtype=torch.bool, device=device)
        other[source] = True
        other &= position < 0
        constant = torch.cat([fresh, other.nonzero().flatten()])
        position[constant] = s + torch.arange(constant.numel(), device=device)

        rest, owner = incoming(clean, fresh[:0] if all_rows else fresh)
        from_clean = position[clean.source[rest]]
        kept = (from_clean < 0) | (from_clean >= s)
        if edit.removed.numel():
            kept &= ~torch.isin(rest, edit.removed)
        rest, owner = rest[kept], owner[kept]
        standins, counts = torch.unique_consecutive(owner, return_counts=True)
        nodes = s + constant.numel()
        stands = nodes + torch.arange(standins.numel(), device=device)
        edge_index = torch.stack(
            [torch.cat([position[source], stands]), torch.cat([position[destination], s + standins])]
        )
        adjacency, order = Adjacency.build(edge_index, nodes + standins.numel())
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=device)
        set_active_rows(adjacency, with_grad=s, with_edges=s + fresh.numel())
        none = taken.new_full((added.shape[1] + standins.numel(),), -1)
        return cls(
            changed=s,
            touched=s + fresh.numel(),
            constant=constant,
            adjacency=adjacency,
            positions=torch.cat([taken, none])[order],
            standins=standins,
            spots=back[taken.numel() + added.shape[1] :],
            rest=rest,
            counts=counts,
        )

    def constants(self, layer: AttentionLayer, clean: Adjacency, sides: Sides) -> tuple[Sides, Tensor | None]:
        """Sides of all nodes but the changed ones, from the clean ones, and the stand-ins' scores [V, H].

        The scores are None where the stand-ins' own sides give them, so that the fused kernels can be used.
        """
        source, destination, values = (t[self.constant] for t in sides)
        count = self.standins.numel()
        if not count:
            return (source, destination, values), None
        score, value = self._stand_in(layer, clean, sides)
        pair = [torch.cat([t, t.new_zeros(count, *t.shape[1:])]) for t in (source, destination)]
        own = layer.source_for(score, destination[self.standins])
        if own is not None:
            pair[0][-count:] = own
        return (pair[0], pair[1], torch.cat([values, value])), score if own is None else None

    def _stand_in(self, layer: AttentionLayer, clean: Adjacency, sides: Sides) -> tuple[Tensor, Tensor]:
        """The scores [V, H] and values [V, H, C] of the stand-ins."""
        fresh = self.constant[self.standins]
        nodes, inverse = torch.unique(torch.cat([fresh, clean.source[self.rest]]), return_inverse=True)
        rows = torch.repeat_interleave(inverse[: fresh.numel()], self.counts)
        # Both are in the order of the nodes, so the edges stay sorted by destination.
        rowptr = torch.searchsorted(rows, torch.arange(nodes.numel() + 1, device=rows.device))
        small = Adjacency(nodes.numel(), inverse[fresh.numel() :], rows, rowptr, rowptr[:0], rows[:0])
        source, destination, values = (t[nodes] for t in sides)
        scores = layer.score_edges(source, destination, small)
        own = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0))
        top = row_max(scores, own)
        spread = torch.repeat_interleave(top, self.counts, dim=0)
        total = top + row_sum(torch.exp(scores - spread), own).log()
        mixed = aggregate(edge_softmax(scores, small), values, small)
        return total, mixed[inverse[: fresh.numel()]]

    def joined(self, sides: Sides, constants: Sides) -> Sides:
        """Both sides and values of all nodes: the changed ones' and the constants."""
        source, destination, values = (torch.cat(pair) for pair in zip(sides, constants, strict=True))
        return source, destination, values

    def forward(self, layer: AttentionLayer, joined: Sides, score: Tensor | None) -> Tensor:
        """The mixed values of the touched rows [T, H, C]."""
        source, destination, values = joined
        if score is None:
            out, _ = layer.fused(source, destination, values, self.adjacency, written=False)
        else:
            scores = layer.score_edges(source, destination, self.adjacency).index_copy(0, self.spots, score)
            out = aggregate(edge_softmax(scores, self.adjacency), values, self.adjacency)
        return first_rows(out, self.touched)


class Ranks(NamedTuple):
    """The scores of a patch's edges, mean over the heads."""

    still: Tensor  # [E'] before the change; 0 for new edges
    moved: Tensor  # [M] edges of the patch whose score may change: new ones, and those with a changed end
    adjacency: Adjacency  # these edges alone, among all nodes of the patch

    @classmethod
    def of(cls, patch: _Patch, clean: Tensor) -> Ranks:
        """Find the edges of a patch of all rows to score again; `clean` [E] are the clean graph's scores."""
        new = patch.positions < 0
        return cls._with(patch, clean[patch.positions.clamp(min=0)].masked_fill(new, 0.0))

    @classmethod
    def _with(cls, patch: _Patch, still: Tensor) -> Ranks:
        edges = patch.adjacency
        ends = torch.minimum(edges.source, edges.destination)
        moved = ((ends < patch.changed) | (patch.positions < 0)).nonzero().flatten()
        some = Adjacency.from_sorted(edges.source[moved], edges.destination[moved], edges.num_nodes)
        set_active_rows(some, with_grad=patch.changed, with_edges=patch.touched)
        return cls(still, moved, some)

    def repeated(self, copies: _Patch, positions: Tensor) -> Ranks:
        """The same for copies of the patch, whose edges are at `positions` [copies, E']."""
        still = self.still.new_empty(positions.numel())
        still[positions] = self.still
        return self._with(copies, still)

    def __call__(self, layer: AttentionLayer, joined: Sides) -> Tensor:
        """The scores [E'] from the sides of all nodes of the patch; gradients come from moved edges."""
        scores = layer.mean_scores(*joined[:2], self.adjacency)
        return self.still.index_copy(0, self.moved, scores)
