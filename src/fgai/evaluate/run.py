"""`Run`: one evaluation in progress, from the clean view to the nested metrics."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai import metrics
from fgai.attacks import AttackResult, Threat, make_attack
from fgai.attention import AttentionMap
from fgai.errors import FgaiWarning, InputError
from fgai.evaluate import measures as ms
from fgai.evaluate import reliability
from fgai.evaluate.curves import all_curves, fidelity
from fgai.evaluate.meter import Meter
from fgai.evaluate.nulls import null_rows
from fgai.evaluate.per_node import node_arrays
from fgai.evaluate.reach import touched_rows
from fgai.evaluate.record import plain
from fgai.graph import Graph
from fgai.training import prepared


@dataclass(frozen=True, eq=False)
class _Attacked:
    """One attack, the model's view of its result, and what it reached."""

    result: AttackResult
    view: ms.Observation
    agreement: ms.Agreement
    touched: list[Tensor]


class Run:
    """One evaluation in progress.

    Args:
        model: evaluated.
        original: the graph as given, on the model's device.
        graph: the same, prepared for the model.
        k: size of a node's explanation.
        seed: of the attacks.
        targets: which nodes are attacked and scored.
    """

    def __init__(
        self, model: nn.Module, original: Graph, graph: Graph, k: int, seed: int, targets: str
    ) -> None:
        self.model, self.original, self.graph = model, original, graph
        self.k, self.seed, self.targets = k, seed, targets

    def measure(
        self,
        threat: str | Threat,
        vanilla: nn.Module | None,
        explanation_attack: bool,
        curves: bool,
        nulls: bool,
        per_node: bool,
        meter: Meter,
    ) -> dict[str, Any]:
        """Attack and measure everything asked for."""
        attack = make_attack(threat, "prediction", targets=self.targets, k=self.k)
        self.nodes = attack.budget.target_nodes(self.graph)
        reliability.check_split(self.graph)
        self.clean = ms.observe(self.model, self.graph)
        _check_shape(self.clean.logits, self.graph)
        reliability.check_outputs(self.clean.logits, ms.logits_again(self.model, self.graph))
        own = ms.sharpness_by_layer(self.clean.attention)
        reliability.check_attention(own, self.clean.attention, self.k)
        parent = self._parent(vanilla)
        self.sharpest = ms.sharpest_layer(own if parent is None else ms.sharpness_by_layer(parent))
        meter.lap("clean")
        attacked = {"prediction": self._attack(threat, "prediction")}
        meter.lap("prediction attack")
        if explanation_attack:
            # A threat that does not search has no objective: both attacks are the same one.
            same = attack.budget.steps == 0
            attacked["explanation"] = attacked["prediction"] if same else self._attack(threat, "explanation")
            meter.lap("explanation attack")
        views = {"clean": self.clean, "attacked": attacked["prediction"].view}
        out = self._stability(attacked, own)
        reliability.check_reach(attacked["prediction"].result, self.nodes, *self._classes(views))
        similar = None
        if parent is not None:
            similar = ms.agreement(ms.paired(parent, self.clean.attention), self.k, self.sharpest)
            out["similarity"] = similar.metrics
        if self.original.edge_truth is not None:
            out["truth"] = ms.against_truth(self.clean.attention, self.original, self.k, self.sharpest)
        meter.lap("metrics")
        right = self._right() if curves and self.graph.y is not None else None
        if right is not None:
            out["f_slope"] = all_curves(self.model, views, self.graph, right)
            out["fidelity"] = {n: fidelity(self.model, view, self.nodes, self.k) for n, view in views.items()}
            meter.lap("curves")
        if nulls:
            changed = attacked["prediction"].result.change.rows
            options: dict[str, Any] = {"k": self.k, "seed": self.seed, "sharpest": self.sharpest}
            out["null"] = null_rows(
                self.model, views, self.original, vanilla=parent, changed=changed, right=right, **options
            )
            meter.lap("null rows")
        arrays: dict[str, Any] = {}
        if per_node:
            overlaps = {name: a.agreement.per_node for name, a in attacked.items()}
            if similar is not None:
                overlaps["vanilla"] = similar.per_node
            arrays = node_arrays(views, self.original, self.nodes, attacked["prediction"].touched, overlaps)
        return {
            "metrics": out,
            "ledgers": {name: _ledger(a.result) for name, a in attacked.items()},
            "per_node": arrays,
            "budget": plain(attack.budget.to_dict()),
        }

    def _parent(self, vanilla: nn.Module | None) -> AttentionMap | None:
        """Attention of the vanilla model on the clean graph, if there is one with as many layers."""
        if vanilla is None:
            return None
        if vanilla is self.model:
            return self.clean.attention
        attention = ms.observe(vanilla, prepared(vanilla, self.original)).attention.to(self.graph.device)
        if len(attention) == len(self.clean.attention):
            return attention
        text = f"`vanilla` has {len(attention)} attention layers, the model {len(self.clean.attention)}"
        warnings.warn(FgaiWarning(f"{text}: their similarity is left out"), stacklevel=2)
        return None

    def _attack(self, threat: str | Threat, objective: str) -> _Attacked:
        attack = make_attack(threat, objective, targets=self.targets, k=self.k)
        result = attack.run(self.model, self.graph, seed=self.seed)
        view = ms.observe(self.model, result.graph)
        touched = touched_rows(self.clean.attention, view.attention, result.change.rows)
        pairs = ms.paired(self.clean.attention, view.attention)
        return _Attacked(result, view, ms.agreement(pairs, self.k, self.sharpest, touched), touched)

    def _stability(self, attacked: dict[str, _Attacked], own: list[float]) -> dict[str, Any]:
        """Everything about predictions and attention before and after."""
        first = attacked["prediction"]
        count = self.graph.num_nodes
        pairs = ms.paired(self.clean.attention, first.view.attention)
        after = [metrics.sharpness(p.after, p.rowptr) for p in pairs]
        out: dict[str, Any] = {
            "f1": self._scores(attacked),
            "g_tvd": ms.prediction_change(self.clean.logits, first.view.logits[:count]),
            "g_jsd": first.agreement.metrics["g_jsd"],
            "sharpness": {
                "clean": ms.layered(own, self.sharpest),
                "attacked": ms.layered(after, self.sharpest),
            },
            "sharpest": self.sharpest,
        }
        for metric in ("overlap", "overlap_touched", "overlap_graph", "rank_correlation"):
            out[metric] = {name: a.agreement.metrics[metric] for name, a in attacked.items()}
        if "explanation" in attacked:
            other = attacked["explanation"]
            out["g_tvd_explanation"] = ms.prediction_change(self.clean.logits, other.view.logits[:count])
            out["g_jsd_explanation"] = other.agreement.metrics["g_jsd"]
        for metric, value in ms.chance(pairs, self.k, self.sharpest, first.touched).items():
            out[metric]["chance"] = value
        shares = [float(rows.double().mean()) for rows in first.touched]
        out["touched"] = ms.layered(shares, self.sharpest)
        return out

    def _scores(self, attacked: dict[str, _Attacked]) -> dict[str, float]:
        if self.graph.y is None:
            return {}
        truth = self.graph.y[self.nodes]
        scores = {"clean": metrics.f1(self.clean.logits[self.nodes], truth)}
        for name, a in attacked.items():
            key = "attacked" if name == "prediction" else f"attacked_{name}"
            scores[key] = metrics.f1(a.view.logits[self.nodes], truth)
        reliability.check_score(scores["clean"], truth)
        return scores

    def _classes(self, views: dict[str, ms.Observation]) -> list[Tensor]:
        return [view.logits[self.nodes].argmax(1) for view in views.values()]

    def _right(self) -> Tensor:
        """Bool [N]: the scored nodes that are right on the clean graph."""
        assert self.graph.y is not None
        right = torch.zeros(self.graph.num_nodes, dtype=torch.bool, device=self.graph.device)
        right[self.nodes] = self.clean.logits[self.nodes].argmax(1) == self.graph.y[self.nodes]
        return right


def _check_shape(logits: Tensor, graph: Graph) -> None:
    if logits.dim() != 2 or logits.shape[0] != graph.num_nodes or logits.shape[1] < graph.num_classes:
        raise InputError(
            f"the model must return logits [{graph.num_nodes}, {max(2, graph.num_classes)}] on"
            f" {graph.name!r}, got {tuple(logits.shape)}"
        )


def _ledger(result: AttackResult) -> dict[str, Any]:
    return {"value": result.value, "start": result.start, "noise": result.noise, **result.ledger.to_dict()}
