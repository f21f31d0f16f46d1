"""`attack` and `make_hetero_faithful`: nodes injected within one type of edges, and training against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from fgai import checks, metrics, training
from fgai.attacks import AttackResult, Threat, make_attack, threat_of
from fgai.attention import (
    LayerAttention,
    Observation,
    observe,
    prepared,
    touched_rows,
    warn_coupled,
    warn_unread,
)
from fgai.attention.interface import EdgeType
from fgai.datasets.own import MASKS
from fgai.divergence import row_tvd
from fgai.hetero.model import HeteroCall
from fgai.hetero.view import HeteroView
from fgai.metrics.ranking import overlap_layers
from fgai.objectives import Loss, Objective
from fgai.records import Column, Table, Tabled, plain
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.training import FaithfulSettings, history_of
from fgai.training.resume import set_history
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)
_FIGURES = ("overlap", "chance", "tvd", "g_jsd", "new")


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroAttack(Tabled):
    """Results of an attack within one type of edges.

    Attributes:
        edge_type: of the new edges.
        threat: its name.
        k: neighbours of each type in an explanation.
        data: the attacked graph; new nodes and edges follow the old ones of their types. New nodes have the
            label -1 and are in no mask.
        stability: by type of edges, means over layers, on the old edges: `overlap` of the top-k among old
            neighbours and the `chance` of a random order, both at nodes within reach of the change, `tvd` of
            their attention, `g_jsd` over all edges; and `new`, the attention to new nodes at their
            neighbours. NaN if undefined at all nodes.
        prediction: on test nodes: `changed`, the share of nodes whose class changed, `g_tvd` of the
            probabilities, and the accuracy, `clean` and `attacked`.
        result: of the attack on the view's graph.
    """

    edge_type: EdgeType
    threat: str
    k: int
    data: HeteroData
    stability: dict[EdgeType, dict[str, float]]
    prediction: dict[str, float]
    result: AttackResult

    def tables(self) -> list[Table]:
        """Return the stability of every type, with predictions in a note."""
        columns = [
            Column("edges of type"),
            Column(f"top-{self.k} overlap", better="higher"),
            Column("by chance"),
            Column("TVD", better="lower"),
            Column("g-JSD", ".2e", "lower"),
            Column("to new nodes", better="lower"),
        ]
        rows = [
            [" ".join(kind), *(plain(figures[name]) for name in _FIGURES)]
            for kind, figures in self.stability.items()
        ]
        prediction = self.prediction
        changed = f"{100 * prediction['changed']:.0f} % of the classes changed"
        right = f"right were {100 * prediction['clean']:.0f} %, now {100 * prediction['attacked']:.0f} %"
        title = f"Under the {self.threat} attack on {' '.join(self.edge_type)}"
        return [Table(title, columns, rows, [f"{changed}; {right}"])]


@typed
@with_gradients
def attack(
    model: nn.Module,
    data: HeteroData,
    edge_type: EdgeType,
    *,
    threat: str | Threat = "standard",
    objective: str | Objective | Loss | None = None,
    nodes: int | None = None,
    edges: int | None = None,
    k: int = 5,
    seed: int = 0,
    call: HeteroCall | None = None,
) -> HeteroAttack:
    """Inject nodes whose edges are all of one type, and measure what that changes, type by type.

    It is the attack of a homogeneous graph, on the view's graph: new nodes are of the type in which
    `edge_type` begins, their features are searched in the threat's box, and their edges go to test nodes of
    the type in which it ends. Edges of other types stay; where `edge_type` joins nodes of one type, edges go
    both ways. The model is attacked in evaluation mode; its mode is restored.

    Args:
        model: see `attend`.
        data: with labels of the nodes that `edge_type` ends at; without `test_mask` all of them are attacked.
        edge_type: of the new edges.
        threat: a name from `fgai.attacks.THREATS` that injects nodes, or a `Threat`.
        objective: that the attack maximises: `prediction` by default, `explanation`, ...
        nodes: injected ones, instead of the threat's number, for small graphs.
        edges: of each injected node, likewise.
        k: neighbours in an explanation.
        seed: of endpoints and starts.
        call: how the model is called, see `HeteroView.wrap`.

    Raises:
        InputError: data that cannot be read, an unknown type, or a threat that does not inject nodes.
        BudgetError: the threat is impossible on this graph.
        AttentionError: the model has no attention that can be recorded.
    """
    checks.whole(k, "k", 1)
    checks.seed(seed)
    chosen = threat_of(threat).sized(nodes, edges)
    view = HeteroView(data, edge_type=edge_type)
    wrapped = view.wrap(model, call)
    graph = prepared(wrapped, view.graph)
    warn_unread(wrapped)
    result = make_attack(chosen, objective, k=k).run(wrapped, graph, seed=seed)
    before, after = observe(wrapped, graph), observe(wrapped, result.graph)
    warn_coupled(wrapped, before, after, result.change.rows)
    assert view.layout.injected is not None
    return HeteroAttack(
        edge_type=view.layout.injected,
        threat=chosen.name,
        k=k,
        data=_attacked(view, result),
        stability=_stability(before, after, view.layout.edge_types, k),
        prediction=_prediction(before, after),
        result=result,
    )


@typed
def make_hetero_faithful(
    model: M,
    data: HeteroData,
    edge_type: EdgeType,
    settings: FaithfulSettings | None = None,
    *,
    call: HeteroCall | None = None,
    **options: Any,
) -> M:
    """Return a faithful version of a trained heterogeneous model, which does not change.

    It is `fgai.make_faithful` on the view's graph, with the attention of all layers and types, against nodes
    that are injected within one type and joined to training and validation nodes. Layers of GATConv,
    GATv2Conv and TransformerConv get limits in each type.

    Args:
        model: trained; made by `to_hetero` or `HeteroConv` of layers with attention.
        data: what it was trained on, with labels and masks of the nodes that `edge_type` ends at.
        edge_type: of the edges of injected nodes.
        settings: see `FaithfulSettings`.
        call: how the model is called, see `HeteroView.wrap`.
        **options: arguments of `fgai.make_faithful` and single settings, e.g. `seed=1`, `epochs=50`.

    Returns:
        A model of the same class, in eval mode, with its `history`.

    Raises:
        InputError: data that cannot be read, an unknown type, or a setting that is not known.
        AttentionError: the model has no attention that can be recorded.
    """
    view = HeteroView(data, edge_type=edge_type)
    wrapped = training.make_faithful(view.wrap(model, call), view.graph, settings, **options)
    faithful: M = wrapped.model  # type: ignore[assignment]
    set_history(faithful, history_of(wrapped))
    return faithful


def _stability(
    before: Observation, after: Observation, kinds: Sequence[EdgeType], k: int
) -> dict[EdgeType, dict[str, float]]:
    clean, attacked = before.attention.heads("mean"), after.attention.heads("mean")
    touched = touched_rows(clean, attacked)
    compared = metrics.AttentionPair(clean, attacked, k, touched)
    pairs = compared.layers
    by_entry = {
        "overlap": overlap_layers(compared)["overlap_touched"],
        "chance": [
            metrics.overlap_chance(p.rowptr, k, nodes=rows) for p, rows in zip(pairs, touched, strict=True)
        ],
        "tvd": [
            metrics.mean_over(torch.where(pair.rowptr.diff() > 0, tvd, torch.nan), rows)
            for pair, rows in zip(pairs, touched, strict=True)
            for tvd in [row_tvd(pair.before.double(), pair.after.double(), pair.rowptr)]
        ],
        "g_jsd": [metrics.g_jsd(pair.before, pair.after) for pair in pairs],
        "new": [_attention_to_new(layer, clean[0].num_nodes) for layer in attacked],
    }
    return {
        kind: {
            name: metrics.mean_of_defined(
                [v for v, w in zip(values, clean, strict=True) if w.edge_type == kind]
            )
            for name, values in by_entry.items()
        }
        for kind in kinds
    }


def _attention_to_new(layer: LayerAttention, num_old: int) -> float:
    """Return the attention of old nodes, which come first, to new ones."""
    old = torch.arange(layer.num_nodes, device=layer.values.device) < num_old
    return metrics.intruder_mass(layer.values[:, 0], layer.source >= num_old, layer.rowptr, nodes=old)


def _prediction(before: Observation, after: Observation) -> dict[str, float]:
    rows = task_of(before.graph).rows(before.graph, "test")
    one, two = before.logits[rows], after.logits[rows]
    assert before.graph.y is not None
    labels = before.graph.y[rows]
    labelled = labels >= 0
    clean, attacked = (
        float((logits.argmax(1) == labels)[labelled].double().mean()) for logits in (one, two)
    )  # NaN without labels
    changed = float((one.argmax(1) != two.argmax(1)).double().mean())
    distance = metrics.g_tvd_prob(one, two)
    return {"changed": changed, "g_tvd": distance, "clean": clean, "attacked": attacked}


def _attacked(view: HeteroView, result: AttackResult) -> HeteroData:
    """Return the data with the new nodes and edges behind those of their types."""
    layout, kind = view.layout, view.layout.injected
    assert kind is not None
    attacked, split = view.data.clone(), layout.split(result.graph.to_data())
    store: Any = attacked[kind[0]]
    store.x = split[kind[0]].x.detach().to(store.x.device)
    count = layout.counts[kind[0]]
    extra = len(store.x) - count
    for name, fill in (("y", -1), *((mask, False) for mask in MASKS)):
        values = store.get(name)
        if isinstance(values, Tensor) and values.shape == (count,):
            store[name] = torch.cat([values, values.new_full((extra,), fill)])
    edges = split[kind].edge_index
    new = edges[0] >= count
    if kind[0] == kind[2]:
        new = new | (edges[1] >= count)
    old = attacked[kind].edge_index
    attacked[kind].edge_index = torch.cat([old, edges[:, new].to(old.device)], dim=1)
    return attacked
