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
from fgai.attention import Observation, observe, prepared, touched_rows, warn_coupled, warn_unread
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


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroAttack(Tabled):
    """Results of an attack within one type of edges.

    Attributes:
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
        lower = [("TVD", ".3f"), ("g-JSD", ".2e"), ("to new nodes", ".3f")]
        overlap = Column(f"top-{self.k} overlap", better="higher")
        rows = [[" ".join(kind), *map(plain, figures.values())] for kind, figures in self.stability.items()]
        changed, clean, attacked = (100 * self.prediction[key] for key in ("changed", "clean", "attacked"))
        note = f"{changed:.0f} % of the classes changed; right were {clean:.0f} %, now {attacked:.0f} %"
        title = f"Under the {self.threat} attack on {' '.join(self.edge_type)}"
        columns = [Column("edges of type"), overlap, Column("by chance")]
        columns += [Column(name, form, "lower") for name, form in lower]
        return [Table(title, columns, rows, [note])]


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

    The nodes that `edge_type` ends at need labels; without `test_mask` all of them are attacked. For small
    graphs, `nodes` and `edges` set how many nodes are injected, and the edges of each. The attack maximises
    `objective`: `prediction` by default, `explanation`, ... `call`: see `HeteroView.wrap`.

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

    `data` is what it was trained on, with labels and masks of the nodes that `edge_type` ends at; `options`
    are arguments of `fgai.make_faithful` and single settings, e.g. `seed=1`, `epochs=50`; `call`: see
    `HeteroView.wrap`. The result is of the same class, in eval mode, with its `history`. `InputError` for
    data that cannot be read, an unknown type or setting, `AttentionError` for no attention that can be
    recorded.
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
    touched, count = touched_rows(clean, attacked), clean[0].num_nodes
    compared = metrics.AttentionPair(clean, attacked, k, touched)
    overlaps = overlap_layers(compared)["overlap_touched"]
    by_layer = []
    for pair, layer, rows, overlap in zip(compared.layers, attacked, touched, overlaps, strict=True):
        shift = row_tvd(pair.before.double(), pair.after.double(), pair.rowptr)
        chance = metrics.overlap_chance(pair.rowptr, k, nodes=rows)
        tvd = metrics.mean_over(torch.where(pair.rowptr.diff() > 0, shift, torch.nan), rows)
        old = torch.arange(layer.num_nodes, device=layer.values.device) < count
        mass = metrics.intruder_mass(layer.values[:, 0], layer.source >= count, layer.rowptr, nodes=old)
        by_layer.append((overlap, chance, tvd, metrics.g_jsd(pair.before, pair.after), mass))
    stability = {}
    for kind in kinds:
        own = [values for values, layer in zip(by_layer, clean, strict=True) if layer.edge_type == kind]
        stability[kind] = {
            name: metrics.mean_of_defined(values[column] for values in own)
            for column, name in enumerate(("overlap", "chance", "tvd", "g_jsd", "new"))
        }
    return stability


def _prediction(before: Observation, after: Observation) -> dict[str, float]:
    rows = task_of(before.graph).rows(before.graph, "test")
    logits = [before.logits[rows], after.logits[rows]]
    classes = [one.argmax(1) for one in logits]
    assert before.graph.y is not None
    labels = before.graph.y[rows]
    right = [(own == labels)[labels >= 0].double().mean() for own in classes]  # NaN without labels
    changed = float((classes[0] != classes[1]).double().mean())
    clean, attacked = map(float, right)
    return {"changed": changed, "g_tvd": metrics.g_tvd_prob(*logits), "clean": clean, "attacked": attacked}


def _attacked(view: HeteroView, result: AttackResult) -> HeteroData:
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
