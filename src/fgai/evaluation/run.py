"""`Run`: one evaluation in progress, from the clean view to the nested metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai import metrics
from fgai.attacks import Attack, AttackResult, Threat, make_attack, threat_of
from fgai.attacks.endpoints import SHARED_RULES
from fgai.attention import (
    AttentionMap,
    Observation,
    clipped_share,
    counting,
    observe,
    prepared,
    touched_rows,
    warn_coupled,
    warn_unread,
)
from fgai.errors import FgaiWarning, InputError, warn
from fgai.evaluation import measures as ms
from fgai.evaluation import reliability
from fgai.evaluation.curves import all_curves, fidelity, removals
from fgai.evaluation.endpoints import by_endpoints
from fgai.evaluation.items import item_chance, item_overlaps
from fgai.evaluation.nulls import NULLS, null_rows
from fgai.evaluation.per_node import node_arrays
from fgai.evaluation.same_class import same_class
from fgai.graph import Graph
from fgai.progress import stage
from fgai.records import Meter, plain
from fgai.tasks import check_logits, task_of

HEADLINE_RULE = "cover"
"""Endpoints at which explanations are compared; see `_Attacked`."""


@dataclass(frozen=True, eq=False)
class _View:
    """The model on an attacked graph: its output, its agreement with the clean one, the touched nodes."""

    output: Observation
    agreement: ms.Agreement
    touched: list[Tensor]


@dataclass(frozen=True, eq=False)
class _Attacked:
    """One attack and the model's view of the strongest change.

    An ensemble may win at other endpoints against another model, so explanations are measured at endpoints
    that every model meets: `by_rule` holds the strongest change at each such rule, `compared` the one at
    `HEADLINE_RULE`. For other attacks that is the strongest change itself.
    """

    result: AttackResult
    worst: _View
    by_rule: dict[str, _View]

    @property
    def view(self) -> Observation:
        return self.worst.output

    @property
    def compared(self) -> _View:
        if not self.by_rule:
            return self.worst
        return self.by_rule.get(HEADLINE_RULE) or next(iter(self.by_rule.values()))


class Run:
    """One evaluation in progress.

    Args:
        model: evaluated.
        original: the graph as given, on the model's device, as the task views it for these targets.
        graph: the same, prepared for the model.
        k: size of a node's explanation.
        seed: of the attacks.
        targets: which nodes, links or graphs are attacked and scored.
        on_step: called with a few words before each long step of an attack.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Graph,
        graph: Graph,
        k: int,
        seed: int,
        targets: str,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self.on_step = on_step
        self.model, self.original, self.graph = model, original, graph
        self.k, self.seed, self.targets = k, seed, targets
        self.task = task_of(graph)
        self.labels, self.headline = self.task.labels(graph), self.task.headline_for(graph)

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
        attack = self._make(threat, "prediction")
        self.nodes = attack.budget.target_nodes(self.graph)
        self.rows = self.task.rows(self.graph, self.targets)
        self.measured = self.task.measured(self.graph, self.targets)
        self.vanilla_model = None if vanilla is self.model else vanilla
        self._look(vanilla)
        meter.lap("clean")
        attacked = {"prediction": self._attack(threat, "prediction")}
        meter.lap("prediction attack")
        if explanation_attack:
            # A threat that does not search, or has its own objective: both attacks are the same one.
            same = not attack.searches or threat_of(threat).objective is not None
            attacked["explanation"] = attacked["prediction"] if same else self._attack(threat, "explanation")
            meter.lap("explanation attack")
        out = self._metrics(attacked)
        meter.lap("metrics")
        views = {"clean": self.clean, "attacked": attacked["prediction"].view}
        right = self._right() if curves and self.labels is not None else None
        if right is not None and self.labels is not None:
            with stage("removing edges", removals(len(views))):
                out["f_slope"] = all_curves(self.model, views, self.labels, right)
            out["fidelity"] = {n: fidelity(self.model, view, self.rows, self.k) for n, view in views.items()}
            meter.lap("curves")
        if nulls:
            total = None if right is None else len(NULLS) * removals(len(views))
            with stage("attention that says nothing", total):
                out["null"] = self._nulls(views, attacked["prediction"], right)
            meter.lap("null rows")
        others = {spec.paths[0]: spec.measure for spec in metrics.METRICS.values() if spec.measure}
        if others:
            shown = self._views(attacked)
            for path, measured in others.items():
                place_value(out, path, measured(shown))
            meter.lap("other metrics")
        return {
            "metrics": out,
            "ledgers": {name: _ledger(a.result) for name, a in attacked.items()},
            "per_node": self._per_node(views, attacked) if per_node else {},
            "budget": plain(attack.budget.to_dict()),
        }

    def _look(self, vanilla: nn.Module | None) -> None:
        """See the clean graph through both models, and doubt what is doubtful."""
        reliability.check_split(self.graph, self.targets)
        warn_unread(self.model)
        self.clean = observe(self.model, self.graph).averaged()
        check_logits(self.clean.logits, self.graph)
        if not bool(torch.isfinite(self.clean.logits).all()):
            raise InputError(
                f"the model's outputs on {self.graph.name!r} are not finite: nothing to evaluate"
            )
        with counting(self.model) as count:
            again = ms.logits_again(self.model, self.graph)
        reliability.check_outputs(self.clean.logits, again)
        reliability.check_range(count[0], count[1], clipped_share(self.model))
        self.sharpness = ms.sharpness_by_layer(self.clean.attention)
        reliability.check_attention(self.sharpness, self.clean.attention, self.k)
        self.vanilla = self._vanilla(vanilla)
        sharpness = self.sharpness if self.vanilla is None else ms.sharpness_by_layer(self.vanilla)
        self.sharpest = ms.sharpest_layer(sharpness)
        self.similar: ms.Agreement | None = None

    def _metrics(self, attacked: dict[str, _Attacked]) -> dict[str, Any]:
        """Return what costs no further forward pass: stability, similarity, explanations, truth."""
        out = self._stability(attacked)
        views = {"clean": self.clean, "attacked": attacked["prediction"].view}
        reliability.check_reach(attacked["prediction"].result, self.nodes, *self._classes(views))
        if self.vanilla is not None:
            pairs = ms.paired(self.vanilla, self.clean.attention)
            self.similar = ms.agreement(pairs, self.k, self.sharpest)
            out["similarity"] = self.similar.metrics
            out["sharpness"]["vanilla"] = ms.layered(ms.sharpness_by_layer(self.vanilla), self.sharpest)
        if self.task.row_per_node:
            out["same_class"] = self._same_class(attacked)
        else:
            out["explanations"] = self._explanations(attacked)
        if self.original.edge_truth is not None:
            seen = {"": self.clean, **{f"_{name}": a.view for name, a in attacked.items()}}
            for suffix, view in seen.items():
                found = ms.against_truth(view.attention, self.original, self.k, self.sharpest)
                out[f"truth{suffix}"] = found
        return out

    def _nulls(
        self, views: dict[str, Observation], attacked: _Attacked, right: Tensor | None
    ) -> dict[str, Any]:
        """The same metrics of an attention that says nothing, and of a random one."""
        return null_rows(
            self.model,
            views,
            self.original,
            vanilla=self.vanilla,
            changed=attacked.result.change.rows,
            right=right,
            k=self.k,
            seed=self.seed,
            sharpest=self.sharpest,
            target=self.labels,
        )

    def _per_node(self, views: dict[str, Observation], attacked: dict[str, _Attacked]) -> dict[str, Any]:
        """Values of every node, packed."""
        overlaps = {name: a.compared.agreement.per_node for name, a in attacked.items()}
        if self.similar is not None:
            overlaps["vanilla"] = self.similar.per_node
        return node_arrays(views, self.original, self.rows, attacked["prediction"].compared.touched, overlaps)

    def _views(self, attacked: dict[str, _Attacked]) -> metrics.Views:
        """What metrics with a `measure` of their own read."""
        views = self._by_view(attacked)
        return metrics.Views(
            graph=self.original,
            logits={name: view.logits for name, view in views.items()},
            attention={name: view.attention for name, view in views.items()},
            target=self.labels,
            rows=self.rows,
            k=self.k,
        )

    def _by_view(self, attacked: dict[str, _Attacked]) -> dict[str, Observation]:
        """The views of the model by name: `clean`, `attacked`, `attacked_explanation`."""
        views = {"clean": self.clean}
        for name, a in attacked.items():
            views["attacked" if name == "prediction" else f"attacked_{name}"] = a.view
        return views

    def _vanilla(self, vanilla: nn.Module | None) -> AttentionMap | None:
        """Attention of the vanilla model on the clean graph, if there is one with as many layers."""
        if vanilla is None:
            return None
        if vanilla is self.model:
            return self.clean.attention
        theirs = observe(vanilla, prepared(vanilla, self.original)).averaged()
        attention = theirs.attention.to(self.graph.device)
        if len(attention) == len(self.clean.attention):
            return attention
        text = f"`vanilla` has {len(attention)} attention layers, the model {len(self.clean.attention)}"
        warn(FgaiWarning(f"{text}: their similarity is left out"))
        return None

    def _same_class(self, attacked: dict[str, _Attacked]) -> dict[str, Any]:
        """Explanations of nodes that keep their class, under each attack."""
        before, common = self.clean.logits, (self.rows, self.sharpest)
        return {
            name: same_class(v.agreement.per_node, v.touched, before, v.output.logits, *common)
            for name, v in ((name, a.compared) for name, a in attacked.items())
        }

    def _explanations(self, attacked: dict[str, _Attacked]) -> dict[str, Any]:
        """Overlap of the explanations of links or small graphs, attacked and with vanilla's."""
        common = (self.original, self.rows, self.k, self.sharpest)
        out: dict[str, Any] = {}
        for name, a in attacked.items():
            pairs = ms.paired(self.clean.attention, a.view.attention)
            out[name] = item_overlaps(pairs, a.worst.agreement.per_node, *common)
        out["chance"] = item_chance(pairs, *common)
        if self.vanilla is not None and self.similar is not None:
            pairs = ms.paired(self.vanilla, self.clean.attention)
            out["similarity"] = item_overlaps(pairs, self.similar.per_node, *common)
        return out

    def _make(self, threat: str | Threat, objective: str) -> Attack:
        """Return the attack of a threat, whose own objective counts where it has one."""
        chosen = objective if threat_of(threat).objective is None else None
        return make_attack(threat, chosen, targets=self.targets, k=self.k, task=self.task.name)

    def _attack(self, threat: str | Threat, objective: str) -> _Attacked:
        result = self._make(threat, objective).run(
            self.model, self.graph, seed=self.seed, vanilla=self.vanilla_model, on_step=self.on_step
        )
        worst = self._view(result.graph, result.change.rows)
        warn_coupled(self.model, self.clean, worst.output, result.change.rows)
        shared = {rule: change for rule, change in result.by_rule.items() if rule in SHARED_RULES}
        by_rule = {
            rule: worst if change is result.change else self._view(change.apply(self.graph)[0])
            for rule, change in shared.items()
        }
        return _Attacked(result, worst, by_rule)

    def _view(self, attacked: Graph, changed: Tensor | None = None) -> _View:
        output = observe(self.model, attacked).averaged()
        touched = touched_rows(self.clean.attention, output.attention, changed)
        pairs = ms.paired(self.clean.attention, output.attention)
        return _View(output, ms.agreement(pairs, self.k, self.sharpest, touched), touched)

    def _stability(self, attacked: dict[str, _Attacked]) -> dict[str, Any]:
        """Everything about predictions and attention before and after."""
        first = attacked["prediction"]
        rows, before = self.measured, self.clean.logits[self.measured]
        pairs = ms.paired(self.clean.attention, first.view.attention)
        after = [metrics.sharpness(p.after, p.rowptr) for p in pairs]
        out: dict[str, Any] = {
            **self._scores(attacked),
            "g_tvd": ms.prediction_change(before, first.view.logits[rows]),
            "g_jsd": first.worst.agreement.metrics["g_jsd"],
            "sharpness": {
                "clean": ms.layered(self.sharpness, self.sharpest),
                "attacked": ms.layered(after, self.sharpest),
            },
            "top_share": ms.top_shares(pairs, self.sharpest),
            "sharpest": self.sharpest,
        }
        compared = {name: a.compared for name, a in attacked.items()}
        for metric in (name for name in first.worst.agreement.metrics if name != "g_jsd"):
            out[metric] = {name: v.agreement.metrics[metric] for name, v in compared.items()}
        if "explanation" in attacked:
            other = attacked["explanation"]
            out["g_tvd_explanation"] = ms.prediction_change(before, other.view.logits[rows])
            out["g_jsd_explanation"] = other.worst.agreement.metrics["g_jsd"]
            if other is not first and (worst := by_endpoints(other.result.ledger)):
                out["lost"] = {"explanation": worst}
        out["intruders"] = {name: self._intruders(view) for name, view in compared.items()}
        touched = compared["prediction"].touched
        for metric, value in ms.chance(pairs, self.k, self.sharpest, touched).items():
            out[metric]["chance"] = value
        out["touched"] = ms.layered([float(rows.double().mean()) for rows in touched], self.sharpest)
        rules = {rule for a in attacked.values() for rule in a.by_rule}
        if len(rules) > 1:
            out["endpoints"] = {
                rule: {n: self._at_rule(a.by_rule[rule]) for n, a in attacked.items() if rule in a.by_rule}
                for rule in SHARED_RULES
                if rule in rules
            }
        return out

    def _intruders(self, view: _View) -> dict[str, Any]:
        return ms.intruders(view.output.attention, self.graph.num_nodes, self.k, self.sharpest)

    def _at_rule(self, view: _View) -> dict[str, Any]:
        """Explanations at the endpoints of one rule: the same nodes for every model."""
        return {"overlap": view.agreement.metrics["overlap_touched"], "intruders": self._intruders(view)}

    def _scores(self, attacked: dict[str, _Attacked]) -> dict[str, dict[str, float]]:
        """The task's scores by name, each clean and under every attack."""
        names = tuple(self.task.scores)
        if self.labels is None:
            return {name: {} for name in names}
        truth = self.labels[self.rows]
        views = self._by_view(attacked)
        found = {n: metrics.task_scores(self.task.name, v.logits[self.rows], truth) for n, v in views.items()}
        scores = {name: {view: values[name] for view, values in found.items()} for name in names}
        worst = by_endpoints(attacked["prediction"].result.ledger)
        headline = scores[self.headline]
        headline |= {f"attacked_{ends}": 1 - damage for ends, damage in worst.items()}
        for name in dict.fromkeys((self.task.headline, self.headline)):
            scores[name]["chance"] = metrics.chance_score(name, truth)
        reliability.check_score(headline["clean"], headline["chance"], self.headline)
        return scores

    def _classes(self, views: dict[str, Observation]) -> list[Tensor]:
        return [view.logits[self.rows].argmax(1) for view in views.values()]

    def _right(self) -> Tensor:
        """Bool: the scored nodes, links or graphs that are right on the clean graph."""
        assert self.labels is not None
        right = torch.zeros_like(self.labels, dtype=torch.bool)
        right[self.rows] = self.clean.logits[self.rows].argmax(1) == self.labels[self.rows]
        return right


def place_value(values: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested ones, at its dotted path.

    Example:
        >>> values = {"f1": {"clean": 0.9}}
        >>> place_value(values, "calibration.clean", 0.1)
        >>> values
        {'f1': {'clean': 0.9}, 'calibration': {'clean': 0.1}}
    """
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = value


def _ledger(result: AttackResult) -> dict[str, Any]:
    return {"value": result.value, "start": result.start, "noise": result.noise, **result.ledger.to_dict()}
