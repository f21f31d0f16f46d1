"""`evaluate` and `compare`: models under one threat, measured as the protocol says, as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai import checks, divergence, metrics
from fgai.attacks import DEFAULT, Attack, AttackResult, Ledger, Threat, make_attack, threat_of
from fgai.attacks.endpoints import SHARED_RULES
from fgai.attention import (
    AttentionMap,
    call_model,
    clipped_share,
    counting,
    evaluating,
    model_name,
    observe,
    prepared,
    touched_rows,
    warn_coupled,
    warn_unread,
)
from fgai.attention.calls import device_of
from fgai.attention.interface import originals
from fgai.errors import FgaiWarning, InputError, collect_warnings, warn
from fgai.evaluation import reliability
from fgai.evaluation.record import Comparison, EvaluationRecord
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.metrics import AttentionPair, Views
from fgai.metrics.prediction import score_views
from fgai.metrics.sharpness import sharpness_by_layer
from fgai.metrics.spec import MetricSpec
from fgai.metrics.views import AttackViews, View
from fgai.models import as_graph
from fgai.progress import show_progress, stage
from fgai.records import Meter, pack_array, plain, provenance
from fgai.tasks import check_logits, task_of
from fgai.threads import with_gradients
from fgai.typed import typed
from fgai.version import adding_facts, versions

_SHARED_RULE = "cover"  # endpoints at which the explanations of several models are compared
_RANDOM_RULE = "random"


@typed
@show_progress()
@with_gradients
def evaluate(
    model: nn.Module,
    data: Any,
    threat: str | Threat = DEFAULT,
    *,
    vanilla: nn.Module | None = None,
    seed: int = 0,
    name: str | None = None,
    k: int = 5,
    targets: str = "test",
    nodes: int | None = None,
    edges: int | None = None,
    explanation_attack: bool = True,
    curves: bool = True,
    nulls: bool = True,
    per_node: bool = False,
    on_step: Callable[[str], None] | None = None,
    on_attack: Callable[[str, dict[str, AttackResult]], None] | None = None,
) -> EvaluationRecord:
    """Attack a model and measure how its predictions and its attention hold, on original nodes and edges.

    The model is attacked through its own gradients in eval mode and is left as it was. Every model meets the
    same threat. Scores are under the strongest change found; models may differ in the nodes it joins, its
    endpoints. Under an ensemble, explanations are compared at endpoints that all models with the same seed
    and `vanilla` share. Where a number may mislead, a `ReliabilityWarning` is given and kept in the record.
    docs/metrics.md defines the numbers.

    Args:
        model: fgai's, or any PyG model the recorder supports, for the task of the data.
        data: a `Graph` or PyG `Data` with labels; without `test_mask` all nodes are tested.
        threat: a name from `fgai.attacks.THREATS` or a `Threat`. The default, `ensemble-short`, takes about a
            minute on a small graph; a claim needs `ensemble` (minutes); `standard`, the paper's, is weak.
        vanilla: the model that `model` was made from, to measure their similarity.
        seed: of the attacks and of the random null row.
        name: of the model in tables; its class by default.
        k: neighbours in a node's explanation.
        targets: what is attacked and scored: `test`, or `val` while settings are still being chosen.
        nodes: how many nodes the attack injects, in place of the threat's number; fewer for a small graph.
        edges: how many edges each injected node gets, or how many change where none is injected.
        explanation_attack: also attack the explanation; a threat without gradient steps, or with its own
            objective, runs once, and its numbers count for both attacks.
        curves: remove edges by rank and measure F-slopes and fidelity; about 45 forward passes.
        nulls: also measure uniform attention and a random ranking; with `curves` about 70 more.
        per_node: keep values of every node in the record.
        on_step: called with a few words before each long step of an attack.
        on_attack: called with `name` and the result of each attack by its objective.

    Raises:
        InputError: a model for another task, no features, or the outputs do not fit the labels.
        BudgetError: the threat is impossible on this graph.
        AttentionError: the model has no attention that can be recorded.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=20, progress=False)
        >>> record = evaluate(model, data, "random", curves=False)
        >>> record.value("f1.clean") > 0.5
        True
    """
    checks.whole(k, "k", 1)
    checks.seed(seed)
    checks.one_of(targets, "targets", ("test", "val"))
    threat = threat_of(threat).sized(nodes, edges)
    model, vanilla = originals(model, vanilla)
    data = as_graph(data)
    task = task_of(data)
    if getattr(model, "task", task.name) != task.name:
        raise InputError(f"{data.name!r} holds a {task.name} task, got a model for {model.task!r} tasks")
    original = task.view(data.to(device_of(model, data)), targets)
    graph = prepared(model, original)
    meter = Meter(graph.device)
    with collect_warnings() as notes:
        run = _Run(model, original, graph, vanilla, k, seed, targets, on_step)
        options = {"explanation_attack": explanation_attack, "curves": curves, "nulls": nulls}
        measured = run.measure(threat, meter, per_node=per_node, **options)
    name = name or model_name(model)
    if on_attack is not None:
        on_attack(name, run.results)
    for note in notes:
        warn(note)
    described, config = describe(data), getattr(model, "config", None)
    return EvaluationRecord(
        name=name,
        model={
            "class": model_name(model),
            "config": plain(config) if isinstance(config, dict) else {},
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        data=described,
        config={
            "k": k,
            "task": task.name,
            "headline": run.headline,
            "targets": targets,
            **options,
            "vanilla": vanilla is not None,
        },
        seed=seed,
        version=versions(),
        device=torch.cuda.get_device_name(graph.device) if graph.device.type == "cuda" else str(graph.device),
        seconds=meter.seconds(),
        peak_memory=meter.peak_memory(),
        warnings=reliability.warning_entries(notes),
        provenance=provenance(model, described["fingerprint"], command="fgai.evaluate", seed=seed),
        **measured,
    )


@show_progress()
@with_gradients
def compare(
    models: Mapping[str, nn.Module],
    data: Any,
    threat: str | Threat = DEFAULT,
    *,
    vanilla: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Evaluate several models, by their name in tables, under the same threat; see `evaluate` for `options`.

    The others are compared with the model named `vanilla`, by default the first. No models, models without
    names, or another `vanilla` raise `InputError`.
    """
    if not isinstance(models, Mapping) or not models:
        got = "none" if isinstance(models, Mapping) else type(models).__name__
        raise InputError(f"`models` must hold at least one model by name, as {{'GAT': model}}, got {got}")
    models = dict(zip(models, originals(*models.values()), strict=True))
    reference = next(iter(models)) if vanilla is None else vanilla
    if reference not in models:
        raise InputError(f"`vanilla` must be one of {', '.join(models)}, got {reference!r}")
    records = []
    for number, (name, model) in enumerate(models.items(), start=1):
        with stage(f"{name} {number}/{len(models)}"), adding_facts(command="fgai.compare"):
            records.append(
                evaluate(model, data, threat, vanilla=models[reference], seed=seed, name=name, **options)
            )
    return Comparison(records=records, reference=reference)


@typed
def describe(graph: Graph) -> dict[str, Any]:
    """Name, fingerprint and sizes of a graph; the fingerprint is computed once per graph object."""
    names = {} if graph.class_names is None else {"class_names": list(graph.class_names)}
    return {
        "name": graph.name,
        "fingerprint": fingerprint(graph),
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.num_features,
        "classes": graph.num_classes,
        **names,
    }


@dataclass(eq=False)
class _Run:
    """One evaluation; `original` is the graph as the task views it, `graph` is prepared for the model."""

    model: nn.Module
    original: Graph
    graph: Graph
    vanilla_model: nn.Module | None
    k: int
    seed: int
    targets: str
    on_step: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self.task = task_of(self.graph)
        self.headline = self.task.headline_for(self.graph)
        self.rows = self.task.rows(self.graph, self.targets)
        self.results: dict[str, AttackResult] = {}

    def measure(
        self,
        threat: Threat,
        meter: Meter,
        *,
        explanation_attack: bool,
        curves: bool,
        nulls: bool,
        per_node: bool,
    ) -> dict[str, Any]:
        attack = self._attack(threat, "prediction")
        self._observe()
        meter.lap("clean")
        attacked = {"prediction": self._run(attack, "prediction")}
        meter.lap("prediction attack")
        if explanation_attack:
            # Without gradients, or with an objective of its own, the threat has one attack for both.
            if attack.follows_gradients and threat.objective is None:
                attacked["explanation"] = self._run(self._attack(threat, "explanation"), "explanation")
            else:
                attacked["explanation"] = attacked["prediction"]
            meter.lap("explanation attack")
        observations = {"clean": self.clean}
        for name, each in attacked.items():
            observations["attacked" if name == "prediction" else f"attacked_{name}"] = each.worst.output
        views = Views(
            graph=self.original,
            observations=observations,
            target=self.task.labels(self.graph),
            rows=self.rows,
            k=self.k,
            measured=self.task.row_of(self.graph) if self.task.row_per_node else self.rows,
            model=self.model,
            curves=curves,
            attacks=attacked,
            vanilla_attention=self.vanilla_attention,
            vanilla_model=None if self.vanilla_attention is None else self.vanilla_model,
            sharpest=self.sharpest,
        )
        classes = [views.logits[name][self.rows].argmax(1) for name in ("clean", "attacked")]
        result = self.results["prediction"]
        reliability.check_reach(result, attack.budget.target_nodes(self.graph), *classes)
        out = self._metrics(views, meter)
        if nulls:
            out["null"] = {kind: _null_row(views.with_null(kind, self.seed)) for kind in metrics.NULLS}
            meter.lap("null rows")
        ledgers = {
            name: {"value": run.value, "start": run.start, "noise": run.noise, **run.ledger.to_dict()}
            for name, run in ((name, self.results.get(name, result)) for name in attacked)
        }
        return {
            "threat": {"name": threat.name, "budget": plain(attack.budget.to_dict())},
            "metrics": plain(out),
            "ledgers": plain(ledgers),
            "per_node": _node_arrays(views) if per_node else {},
        }

    def _observe(self) -> None:
        reliability.check_split(self.graph, self.targets)
        warn_unread(self.model)
        self.clean = observe(self.model, self.graph).averaged()
        check_logits(self.clean.logits, self.graph)
        if not bool(torch.isfinite(self.clean.logits).all()):
            raise InputError(f"the model's outputs on {self.graph.name!r} must be finite; check its weights")
        with counting(self.model) as count:
            again = eval_logits(self.model, self.graph)
        reliability.check_outputs(self.clean.logits, again)
        reliability.check_range(count[0], count[1], clipped_share(self.model))
        sharpness = sharpness_by_layer(self.clean.attention)
        reliability.check_attention(sharpness, self.clean.attention, self.k)
        self.vanilla_attention = self._vanilla_attention()
        if self.vanilla_attention is not None:
            sharpness = sharpness_by_layer(self.vanilla_attention)
        self.sharpest = metrics.sharpest_layer(sharpness)

    def _vanilla_attention(self) -> AttentionMap | None:
        """Attention of the vanilla model on the clean graph, if there is one with as many layers."""
        vanilla = self.vanilla_model
        if vanilla is None or vanilla is self.model:
            return None if vanilla is None else self.clean.attention
        attention = observe(vanilla, prepared(vanilla, self.original)).averaged().attention
        if len(attention) == len(self.clean.attention):
            return attention.to(self.graph.device)
        text = f"`vanilla` has {len(attention)} attention layers, the model {len(self.clean.attention)}"
        left_out = "similarity, and of Definition 1 `same_*` and `all_four`"
        warn(FgaiWarning(f"{text}, so numbers that compare the two are left out: {left_out}"))
        return None

    def _attack(self, threat: Threat, objective: str) -> Attack:
        """Return the attack of a threat, by its own objective if it has one."""
        chosen = objective if threat.objective is None else None
        return make_attack(threat, chosen, targets=self.targets, k=self.k, task=self.task.name)

    def _run(self, attack: Attack, name: str) -> AttackViews:
        vanilla = None if self.vanilla_model is self.model else self.vanilla_model
        result = attack.run(self.model, self.graph, seed=self.seed, vanilla=vanilla, on_step=self.on_step)
        self.results[name] = result
        worst = self._view(result.graph, result.change.rows)
        warn_coupled(self.model, self.clean, worst.output, result.change.rows)
        by_rule = {
            rule: worst if change is result.change else self._view(change.apply(self.graph)[0])
            for rule in SHARED_RULES
            if (change := result.by_rule.get(rule)) is not None
        }
        shared = by_rule.get(_SHARED_RULE, next(iter(by_rule.values()), worst))
        damage = damage_by_endpoints(result.ledger)
        return AttackViews(worst=worst, shared=shared, by_rule=by_rule, damage=damage)

    def _view(self, attacked: Graph, changed: Tensor | None = None) -> View:
        output = observe(self.model, attacked).averaged()
        touched = touched_rows(self.clean.attention, output.attention, changed)
        return View(output, AttentionPair(self.clean.attention, output.attention, self.k, touched))

    def _metrics(self, views: Views, meter: Meter) -> dict[str, Any]:
        """Return the scores of the task and every metric with a `measure`, each beside its chance level."""
        out: dict[str, Any] = score_views(views, self.headline)
        if views.target is not None:
            headline = out[self.headline]
            reliability.check_score(headline["clean"], headline["chance"], self.headline)
        done: set[object] = set()
        for spec in metrics.METRICS.values():
            if spec.measure is None:
                continue
            if spec.measure not in done:  # metrics that share a function are measured together
                for path, value in _values(spec, spec.measure, views).items():
                    _set_value(out, path, value)
                done.add(spec.measure)
            if spec.chance is not None:
                for path, level in _values(spec, spec.chance, views).items():
                    _set_value(out, f"{path}.chance", level)
            meter.lap("curves" if spec.section == "fidelity" else "metrics")
        return out


def _null_row(views: Views) -> dict[str, Any]:
    """Every metric that has a null row, on uniform or random attention; a lone attack's name is dropped."""
    row: dict[str, Any] = {}
    for spec in {spec.null: spec for spec in metrics.METRICS.values()}.values():  # a shared function once
        if spec.null is not None:
            for path, value in _values(spec, spec.null, views).items():
                one_attack = isinstance(value, Mapping) and list(value) == ["prediction"]
                _set_value(row, path, value["prediction"] if one_attack else value)
    return row


def _values(spec: MetricSpec, function: Callable[[Views], Any], views: Views) -> Mapping[str, Any]:
    values = function(views)
    if spec.path:
        return {spec.path: values}
    if not isinstance(values, Mapping):
        raise InputError(f"the metric {spec.name!r} of several paths must return mappings, got {values!r}")
    return values


def _set_value(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise InputError(f"a metric with `chance` returns its values by name, got {values!r} at {path!r}")
    if isinstance(value, Mapping) and isinstance(values.get(last), dict):
        for name, part in value.items():
            _set_value(values[last], name, part)
    else:
        values[last] = value


def eval_logits(model: nn.Module, graph: Graph) -> Tensor:
    """Run the model in eval mode, without recording."""
    with evaluating(model), torch.no_grad():
        return call_model(model, graph).detach()


@typed
def damage_by_endpoints(ledger: Ledger) -> dict[str, float]:
    """Return the largest damage by endpoint rule, and that of all rules but `random` as `chosen`.

    A restart's random noise counts as `random`. Empty unless an ensemble also tried other endpoints.
    """
    worst: dict[str, float] = {}
    if any("endpoints" not in row for row in ledger.members):
        raise InputError("every member of the `ledger` must name its endpoints")
    for row, damage in ledger.proposals():
        rule = _RANDOM_RULE if row is None else row["endpoints"]
        worst[rule] = max(damage, worst.get(rule, damage))
    chosen = [damage for rule, damage in worst.items() if rule != _RANDOM_RULE]
    return {**worst, "chosen": max(chosen)} if chosen and _RANDOM_RULE in worst else {}


def _node_arrays(views: Views) -> dict[str, Any]:
    """Pack per-node values, [N] or [L, N], NaN where undefined; `item_` names those of links and graphs."""
    graph, task = views.graph, task_of(views.graph)
    first = views.attacks["prediction"]
    before, after = views.logits["clean"], views.logits["attacked"][: task.count(graph)]
    scored = torch.zeros(len(after), dtype=torch.bool, device=before.device)
    scored[views.rows] = True
    pairs = first.worst.pair.layers
    classes, classes_after = (logits.argmax(1) for logits in (before, after))
    predicted = {
        "scored": scored,
        "predicted_clean": classes.short(),
        "predicted_attacked": classes_after.short(),
        "tvd": divergence.tvd(before.double(), after.double(), "probabilities").float(),
    }
    if (labels := task.labels(graph)) is not None:
        predicted["label"] = labels.short()
        predicted["correct_clean"] = classes == labels
        predicted["correct_attacked"] = classes_after == labels
    prefix = "" if task.row_per_node else "item_"
    sharpness = metrics.sharpness_per_node
    values = {
        "degree": graph.adjacency.degree.int(),
        **{f"{prefix}{name}": value for name, value in predicted.items()},
        "touched": torch.stack(list(first.shared.pair.touched)),
        "sharpness": torch.stack([sharpness(p.before, p.rowptr) for p in pairs]).float(),
        "sharpness_attacked": torch.stack([sharpness(p.after, p.rowptr) for p in pairs]).float(),
    }
    for name, overlap in views.by_attack(lambda view: view.pair.overlap).items():
        values[f"overlap_{name}"] = overlap.float()
    if views.similarity is not None:
        values["overlap_vanilla"] = views.similarity.overlap.float()
    return {name: pack_array(tensor.cpu().numpy()) for name, tensor in values.items()}
