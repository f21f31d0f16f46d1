"""What `explainers` cells measure: every explainer of one model on the same nodes and the same attacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from experiments.cells import Cell
from experiments.threats import grid_threat
from fgai import Graph, explanations, metrics
from fgai.attacks import AttackResult, make_attack
from fgai.attention import Observation, call_model, evaluating, observe, prepared, touched_rows
from fgai.errors import InputError
from fgai.records import plain
from fgai.topk import topk_mask

K = 5
NODES = 8
"""Explained in a cell: test nodes with more than K neighbours, chosen by the seed."""
FEWER_ON = {"amazon-photo": 5}
"""The same on graphs whose receptive fields are large."""
FEWER = {"graph-mask": 2}
"""At most, of explainers that take seconds for every node."""
EPOCHS = {"gnn-explainer": 100, "pg-explainer": 10, "graph-mask": 2, "integrated-gradients": 20}
"""Of each search; GNNExplainer's are PyG's own number."""
ON_TWIN = ("saliency", "propagated-attention", "attention-mean", "attention-log", "signed-contributions")
"""Explainers of models made faithful: their attention, what it contributes, and a rival that reads none."""


def names_for(cell: Cell) -> tuple[str, ...]:
    """The explainers a cell compares."""
    return tuple(explanations.EDGE_EXPLAINERS) if cell.method == "vanilla" else ON_TWIN


def check_ready(cells: Iterable[Cell]) -> None:
    """Raise `MissingExtraError` unless everything that cells explain with is installed."""
    for cell in cells:
        if cell.kind == "explainers":
            for name in names_for(cell):
                explanations.EDGE_EXPLAINERS[name].check()


@dataclass(frozen=True, eq=False)
class Rows:
    """The incoming edges of some nodes on the clean graph, self-loops left out."""

    nodes: list[int]  # whose edges they are
    keys: Tensor  # [E] of the edges, node by node
    rowptr: Tensor  # [len(nodes) + 1]
    truth: Tensor | None  # bool [E], where it is known

    @classmethod
    def of(cls, graph: Graph, nodes: Sequence[int]) -> Rows:
        """Collect them; `graph` as it was loaded."""
        source, destination = graph.edge_index
        held = [((destination == node) & (source != destination)).nonzero().flatten() for node in nodes]
        return cls._at(nodes, held, graph.keys, graph.edge_truth)

    @classmethod
    def _at(cls, nodes: Sequence[int], held: list[Tensor], keys: Tensor, truth: Tensor | None) -> Rows:
        """The edges at the positions `held`, node by node, among those of `keys` and `truth`."""
        spots = torch.cat([*held, torch.zeros(0, dtype=torch.long, device=keys.device)])
        sizes = torch.tensor([0, *map(len, held)], device=keys.device)
        return cls(list(nodes), keys[spots], sizes.cumsum(0), None if truth is None else truth[spots])

    def some(self, count: int, seed: int) -> Rows:
        """The same of at most so many nodes, chosen by a seed; low numbers may mean old hubs."""
        drawn = torch.randperm(len(self.nodes), generator=torch.Generator().manual_seed(seed))[:count]
        chosen, ends = drawn.sort().values.tolist(), self.rowptr.tolist()
        held = [torch.arange(ends[p], ends[p + 1], device=self.keys.device) for p in chosen]
        return self._at([self.nodes[p] for p in chosen], held, self.keys, self.truth)

    def read(self, scores: Sequence[explanations.EdgeScores]) -> Tensor:
        """[E], what an explainer says of these edges; explanations in the order of `nodes`."""
        parts = [
            one.on(self.keys[int(self.rowptr[place]) : int(self.rowptr[place + 1])]).double()
            for place, one in enumerate(scores)
        ]
        return torch.cat([*parts, torch.zeros(0, dtype=torch.double, device=self.keys.device)])


@dataclass(frozen=True, eq=False)
class Setting:
    """One model, the nodes to explain and the attacks on it, the same for all explainers."""

    model: nn.Module  # whose predictions are explained
    graph: Graph  # as it was loaded
    seed: int  # of sample, attacks and explainers
    seen: Observation  # the model on the clean graph
    rows: Rows  # the edges into the nodes to explain
    meant: Rows | None  # the edges into the nodes the truth is compared at; None without a truth
    attacks: dict[str, AttackResult]  # by threat
    touched: dict[str, Tensor]  # by threat, bool [N], the nodes in reach


def explained(model: nn.Module, graph: Graph, cell: Cell) -> dict[str, Any]:
    """Compare explainers on a sample of nodes.

    Returns:
        For a record: the nodes, what the attacks spent, and a row per explainer; an explainer that does not
        run on the model has its `error` there.
    """
    setting = _setting(model, graph, cell)
    rows: dict[str, Any] = {}
    for name in names_for(cell):
        try:
            rows[name] = _measured(setting, name)
        except InputError as error:
            rows[name] = {"error": str(error)}
    attacks = {
        threat: {"value": hit.value, "start": hit.start, "seconds": hit.ledger.seconds}
        for threat, hit in setting.attacks.items()
    }
    return {
        "k": K,
        "nodes": setting.rows.nodes,
        "truth_nodes": None if setting.meant is None else setting.meant.nodes,
        "attacks": plain(attacks),
        "rows": plain(rows),
    }


def sampled(graph: Graph, seed: int, count: int = NODES, k: int = K) -> tuple[list[int], list[int] | None]:
    """The nodes to explain: test ones with more than k neighbours; and those the truth is compared at.

    The latter have true and other edges. They are the same nodes where enough nodes are both, else others,
    of the whole graph; None without a truth.
    """
    assert graph.test_mask is not None
    source, destination = graph.edge_index
    real = source != destination
    degree = torch.bincount(destination[real], minlength=graph.num_nodes)
    fits = graph.test_mask & (degree > k)
    generator = torch.Generator().manual_seed(seed)

    def drawn(among: Tensor) -> list[int]:
        chosen = among.nonzero().flatten().cpu()
        return sorted(chosen[torch.randperm(chosen.numel(), generator=generator)[:count]].tolist())

    if graph.edge_truth is None:
        return drawn(fits), None
    true = torch.bincount(destination[real & graph.edge_truth], minlength=graph.num_nodes)
    both = (true > 0) & (true < degree)
    if int((fits & both).sum()) >= count:
        nodes = drawn(fits & both)
        return nodes, nodes
    return drawn(fits), drawn(both)


def _setting(model: nn.Module, graph: Graph, cell: Cell) -> Setting:
    nodes, meant = sampled(graph, cell.seed, FEWER_ON.get(cell.dataset, NODES))
    seen = observe(model, prepared(model, graph))
    attacks, touched = {}, {}
    for threat in cell.threats:
        attack = make_attack(grid_threat(threat), k=K)
        attacks[threat] = attack.run(model, graph, seed=cell.seed)
        after = observe(model, prepared(model, attacks[threat].graph))
        touched[threat] = touched_rows(seen.attention, after.attention)[-1]
    meant_rows = None if meant is None else Rows.of(graph, meant)
    return Setting(model, graph, cell.seed, seen, Rows.of(graph, nodes), meant_rows, attacks, touched)


def _measured(setting: Setting, name: str) -> dict[str, Any]:
    """One explainer: how it does on every count."""
    known = explanations.EDGE_EXPLAINERS[name]
    rows = setting.rows.some(FEWER.get(name, NODES), setting.seed)

    def made(seed: int) -> explanations.EdgeExplainer:
        return explanations.edge_explainer(
            name, setting.model, setting.graph, seed=seed, epochs=EPOCHS.get(name)
        )

    began = perf_counter()
    explain = made(setting.seed)
    clean = rows.read(explain(setting.graph, rows.nodes))
    seconds = (perf_counter() - began) / max(1, len(rows.nodes))
    found: dict[str, Any] = {
        "nodes": len(rows.nodes),
        "epochs": EPOCHS.get(name),
        "seconds": seconds,
        "tied": metrics.tied_share(clean, rows.rowptr, K),
        "chance": metrics.overlap_chance(rows.rowptr, K),
        "again": 1.0,
        "kept": {},
    }
    if known.draws:
        other = rows.read(made(setting.seed + 1)(setting.graph, rows.nodes))
        found["again"] = metrics.mean_over(kept(clean, other, rows.rowptr))
    for threat, hit in setting.attacks.items():
        after = rows.read(explain(hit.graph, rows.nodes))
        reached = setting.touched[threat][torch.tensor(rows.nodes, device=after.device)]
        share = kept(clean, after, rows.rowptr)
        found["kept"][threat] = {
            "all": metrics.mean_over(share),
            "touched": metrics.mean_over(share, reached),
            "chance": metrics.overlap_chance(rows.rowptr, K, nodes=reached),
            "nodes": int(reached.sum()),
        }
    found["fidelity"] = _fidelity(setting, rows, clean)
    if setting.meant is not None:
        meant = setting.meant.some(FEWER.get(name, NODES), setting.seed)
        same = meant.nodes == rows.nodes
        values = clean if same else meant.read(explain(setting.graph, meant.nodes))
        assert meant.truth is not None
        found["truth"] = metrics.truth_auc(values, meant.truth, meant.rowptr, "node")
    return found


def kept(before: Tensor, after: Tensor, rowptr: Tensor, k: int = K) -> Tensor:
    """[N], the share of each node's top k that is the same; NaN for nodes without more than k neighbours.

    Ties are broken at random, otherwise before than after: scores that are all the same say nothing, and keep
    what chance keeps.
    """
    generator = torch.Generator().manual_seed(0)
    return metrics.overlap_per_node(_ordered(before, generator), _ordered(after, generator), rowptr, k)


def _ordered(values: Tensor, generator: torch.Generator) -> Tensor:
    """Places of the values in ascending order, from 0 up; equal ones in random order."""
    shuffled = torch.randperm(values.numel(), generator=generator).to(values.device)
    order = shuffled[values[shuffled].argsort(stable=True)]
    places = torch.empty(values.numel(), dtype=torch.double, device=values.device)
    places[order] = torch.arange(values.numel(), dtype=torch.double, device=values.device)
    return places


def _fidelity(setting: Setting, rows: Rows, values: Tensor) -> dict[str, float]:
    """What taking the top k neighbours of all explained nodes away changes, and what leaving only them does.

    Self-loops, and the edges of other nodes, stay.
    """
    top = topk_mask(_ordered(values, torch.Generator().manual_seed(0)), rows.rowptr, K)
    before = setting.seen.logits[rows.nodes]
    without, only = (_logits_without(setting, rows.keys[gone])[rows.nodes] for gone in (top, ~top))
    return {"plus": metrics.fidelity_plus(before, without), "minus": metrics.fidelity_minus(before, only)}


def _logits_without(setting: Setting, keys: Tensor) -> Tensor:
    """What the model says when some edges are gone."""
    graph = setting.seen.graph
    left, _ = graph.remove(torch.isin(graph.keys, keys))
    with evaluating(setting.model), torch.no_grad():
        return call_model(setting.model, left)
