"""`make_report`: from records, models and data to the document the page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fgai.attacks import THREATS, AttackResult, Threat, make_attack, threat_of
from fgai.certificates import CertificateRecord
from fgai.errors import InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.explanations.node import Names
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.reports.document import Report
from fgai.reports.explorer import clipped
from fgai.reports.injections import Injections, summary
from fgai.reports.nodes import nodes_of_models, nodes_of_records
from fgai.reports.noise import intervals_of
from fgai.reports.parts import Part, parts_of
from fgai.reports.subgraph import subgraph
from fgai.reports.views import Seen
from fgai.tasks import task_of
from fgai.training import History
from fgai.typed import typed

Records = Comparison | EvaluationRecord | Sequence[EvaluationRecord]


@typed
def make_report(
    records: Records,
    *,
    models: Mapping[str, nn.Module] | None = None,
    data: Any = None,
    certificates: Mapping[str, CertificateRecord] | None = None,
    injections: Injections | None = None,
    attacks: Mapping[str, AttackResult] | None = None,
    threat: str | Threat | None = None,
    node: int | None = None,
    node_names: Names | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    reproduce: Sequence[str] = (),
) -> Report:
    """Gather what the page shows. Every part that cannot be had is left out, and the page says so.

    Args:
        records: a `Comparison`, or one or more evaluation records; the first is the reference. With
            `per_node=True` they carry the distribution of overlaps.
        models: by the names of their rows; with `data` the page shows attention before and after.
        data: the `Graph` or PyG `Data` they were evaluated on.
        certificates: by the names of the rows.
        injections: certificates against injection, by the names of the rows.
        attacks: results of the prediction attack by the names of the rows, instead of running it again.
        threat: the attack to run; the records' own by default.
        node: the page opens with; one that tells the story by default.
        node_names: of the nodes, by number. Any text; it is shown as it is.
        class_names: of the classes, by number.
        title: of the page.
        reproduce: commands that give the same report.

    Returns:
        The document; `write_report` makes the page.

    Raises:
        InputError: no records, models without data, or a node the graph does not have.
    """
    given = [records] if isinstance(records, EvaluationRecord) else list(records)
    if not given:
        raise InputError("`records` must hold at least one evaluation, got none")
    if models and data is None:
        raise InputError("`data` must be given with `models`: the graph they were evaluated on")
    reference = records.reference if isinstance(records, Comparison) else given[0].name
    plain_certificates = {name: record.to_dict() for name, record in (certificates or {}).items()}
    graph = None
    if data is not None:
        targets = str(given[0].config.get("targets", "test"))
        whole = as_graph(data)
        graph = task_of(whole).view(whole, targets).to("cpu")
    notes: list[str] = []
    parts = parts_of([record.to_dict() for record in given], plain_certificates, notes, injections)
    seen: list[Seen] = []
    if models and graph is not None:
        seen = _look(parts, models, graph, attacks or {}, threat, notes)
    return assemble(
        parts,
        reference=reference,
        histories=_histories(models or {}),
        graph=graph,
        seen=seen,
        node=node,
        node_names=node_names,
        class_names=class_names,
        title=title,
        reproduce=reproduce,
        notes=notes,
    )


def assemble(
    parts: Sequence[Part],
    *,
    reference: str,
    histories: Mapping[str, dict[str, Any]],
    graph: Graph | None = None,
    seen: Sequence[Seen] = (),
    node: int | None = None,
    node_names: Names | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    reproduce: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Put the document together from what is there."""
    if node is not None and graph is not None and not 0 <= node < graph.num_nodes:
        raise InputError(f"`node` must be in 0..{graph.num_nodes - 1}, got {node}")
    names = [part.name for part in parts]
    about = parts[0].record.get("data") or {}
    explorer: dict[str, Any] | None
    if seen and graph is not None:
        explorer = nodes_of_models(parts, graph, seen, node, node_names)
    else:
        explorer = nodes_of_records(parts, node)
    if explorer is not None:
        explorer["classes"] = None if class_names is None else [clipped(str(name)) for name in class_names]
    drawn = None
    if seen and graph is not None and explorer is not None:
        drawn = subgraph(seen, graph, explorer["nodes"]["id"][0])
    return Report(
        title=title or f"{' and '.join(dict.fromkeys(names))} on {about.get('name', 'a graph')}",
        reference=reference,
        records=[part.record for part in parts],
        certificates={part.name: part.certificate for part in parts if part.certificate is not None},
        injections={
            part.name: summary(part.injections, None if graph is None else graph.test_mask)
            for part in parts
            if part.injections
        },
        intervals=intervals_of(parts, reference),
        histories=dict(histories),
        distribution=_distribution(parts),
        subgraph=drawn,
        explorer=explorer,
        reproduce=list(reproduce),
        notes=[*(note for part in parts if (note := part.note) is not None), *notes],
    )


def _look(
    parts: Sequence[Part],
    models: Mapping[str, nn.Module],
    graph: Graph,
    attacks: Mapping[str, AttackResult],
    threat: str | Threat | None,
    notes: list[str],
) -> list[Seen]:
    """Attack every model that has a row and look at it before and after."""
    out = []
    for part in parts:
        if part.name not in models:
            notes.append(f"There is no model for the row {part.name!r}: its attention is not shown.")
            continue
        model, result = models[part.name], attacks.get(part.name)
        if result is None:
            name = str((part.record.get("threat") or {}).get("name", "standard"))
            if threat is None and name not in THREATS:
                notes.append(f"The attack {name!r} is not a named threat, so it could not be run again.")
                continue
            config = part.record.get("config") or {}
            attack = make_attack(
                threat or _recorded(part.record, name),
                targets=str(config.get("targets", "test")),
                k=int(config.get("k", 5)),
                task=task_of(graph).name,
            )
            result = attack.run(model, graph, seed=int(part.record.get("seed", 0)))
        out.append(Seen.of(part.name, model, graph, result))
    return out


def _recorded(record: Mapping[str, Any], name: str) -> Threat:
    """Return the threat of a record with the size and the box that were used."""
    budget = (record.get("threat") or {}).get("budget") or {}
    box = budget.get("box") if budget.get("nodes") or budget.get("radius") else None
    nodes, edges = (budget.get(part) or None for part in ("nodes", "edges"))
    return threat_of(name).sized(nodes, edges, None if box is None else tuple(box))


def _histories(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Loss terms by name, one value per epoch; at most about a thousand epochs."""
    out = {}
    for name, model in models.items():
        history = getattr(model, "history", None)
        if not isinstance(history, History) or not history.terms:
            continue
        step = max(1, len(history.terms) // 1000)
        terms = {
            term: [float(f"{entry.get(term, 0.0):.5g}") for entry in history.terms[::step]]
            for term in history.terms[0]
        }
        out[name] = {
            "terms": terms,
            "step": step,
            "epochs": len(history.terms),
            "best_epoch": history.best_epoch,
            "seconds": round(history.seconds, 3),
            "stopped": history.stopped,
            "ending": history.ending,
        }
    return out


def _distribution(parts: Sequence[Part]) -> dict[str, Any] | None:
    """Shares of the nodes in reach of each attack, by how many of their top-k it left."""
    attacks = []
    for key in ("explanation", "prediction"):
        models = [entry for part in parts if (entry := part.overlaps(key)) is not None]
        if models:
            attacks.append({"key": key, "models": models})
    return {"k": parts[0].k, "attacks": attacks} if attacks else None
