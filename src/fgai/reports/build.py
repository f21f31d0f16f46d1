"""`Report`, the document a page is made of; `make_report` and `read_report`, which build it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from fgai.attacks import AttackResult
from fgai.certificates import CertificateRecord
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.explanations import explain
from fgai.explanations.node import Names, check_node, name_of
from fgai.files import Schema, check
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.records import Document, look_up, read_json
from fgai.reports.nodes import Case, _ModelViews, _nodes_of_models, _nodes_of_records, _shorten, subgraph
from fgai.reports.results import (
    Injections,
    _intervals_of,
    _ModelResults,
    _objects,
    _results_of,
    injection_summary,
)
from fgai.reports.whatif.answer import WhatIf, certified_neighbours, in_browser
from fgai.tasks import task_of
from fgai.training import History
from fgai.typed import typed


@typed
@dataclass(frozen=True, kw_only=True)
class Report(Document):
    """The document a page is made of. Every part but the title may be missing; the page then names it.

    Attributes:
        reference: name of the model the others are compared with.
        records: evaluation records as plain values, without their per-node arrays.
        certificates: by model: norm, radius, k, promise, and shares over radii for each layer.
        injections: by model: shares of nodes that no injected neighbour can change, threat by threat.
        intervals: by model: confidence intervals of differences, see `fgai.evaluation.summary`.
        histories: by model: loss terms per epoch, and the epoch kept.
        distribution: per-node overlap under each attack, counted in bins.
        subgraph: positions, edges and attention of one neighbourhood, before and after the attack.
        explorer: single nodes, see `fgai.reports.nodes`.
        whatif: graph and weights for the part "What if?", see `fgai.reports.whatif`.
        reproduce: commands that give the same report.
        notes: what is missing or was left out, in sentences.
    """

    KIND: ClassVar[str] = "report"

    title: str = "Attention under attack"
    reference: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    certificates: dict[str, dict[str, Any]] = field(default_factory=dict)
    injections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    intervals: dict[str, dict[str, Any]] = field(default_factory=dict)
    histories: dict[str, dict[str, Any]] = field(default_factory=dict)
    distribution: dict[str, Any] | None = None
    subgraph: dict[str, Any] | None = None
    explorer: dict[str, Any] | None = None
    whatif: dict[str, Any] | None = None
    reproduce: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The models, in order."""
        return [str(record.get("name", "model")) for record in self.records]

    def _text(self, values: dict[str, Any]) -> str:
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


@typed
def make_report(
    records: Comparison | EvaluationRecord | Sequence[EvaluationRecord],
    *,
    models: Mapping[str, nn.Module] | None = None,
    data: Any = None,
    certificates: Mapping[str, CertificateRecord] | None = None,
    injections: Injections | None = None,
    attacks: Mapping[str, AttackResult] | None = None,
    node: int | None = None,
    node_names: Names | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    reproduce: Sequence[str] = (),
    what_if: bool = True,
    counterfactual: bool = False,
) -> Report:
    """Return the document of a page; parts that are not available are left out, and the page says so.

    `records` are a `Comparison` or evaluation records, the first the reference; with `per_node=True` they
    carry the distribution of overlaps. By the names of their rows, `models` show their attention on the
    `data` they were evaluated on, `attacks` are those on predictions, and `certificates` and `injections` say
    what is proved; a model without an attack is not shown. The page opens with `node`, chosen by default;
    names by number are shown as plain text. `reproduce` are commands that give the same report. `what_if`
    puts the graph's features and the weights of GAT and GATv2 into the page, whose part "What if?" computes
    with them. `counterfactual` also says how few neighbours of the first node change its class, as
    `fgai.explain`: seconds to minutes for each model. `InputError` for no records, models without data, or a
    node the graph does not have.
    """
    rows = [records] if isinstance(records, EvaluationRecord) else list(records)
    if not rows:
        raise InputError("`records` must hold at least one evaluation, got none")
    if models and data is None:
        raise InputError("`data` must be given with `models`: the graph they were evaluated on")
    if counterfactual and not models:
        raise InputError("`counterfactual` is a search, which needs `models` and `data`")
    reference = records.reference if isinstance(records, Comparison) else rows[0].name
    notes: list[str] = []
    explorer, scored, graph, whole = None, None, None, None
    if data is not None:
        whole = as_graph(data)
        task = task_of(whole)
        graph = task.view(whole, str(rows[0].config.get("targets", "test"))).to("cpu")
        check_node(node, graph.num_nodes)
        scored = graph.test_mask
        class_names = (task.class_names or graph.class_names) if class_names is None else class_names
        if graph.num_nodes != whole.num_nodes and (certificates or injections):
            notes.append("Certificates are of all graphs, the page of those under attack: left out.")
            certificates, injections = None, None
    classes = None if class_names is None else [_shorten(str(name)) for name in class_names]
    proofs = {name: record.to_dict() for name, record in (certificates or {}).items()}
    results = _results_of([record.to_dict() for record in rows], proofs, notes, injections)
    fields: dict[str, Any] = {"reproduce": list(reproduce)}
    if models and graph is not None and whole is not None:
        fields["histories"] = _histories(models)
        if views := _attacked_views(results, models, graph, attacks or {}, notes):
            explorer = _nodes_of_models(results, graph, views, node, node_names or graph.node_names)
            start = explorer["nodes"]["id"][0]
            fields["subgraph"] = subgraph(views, graph, start)
            if counterfactual:
                _add_counterfactuals(explorer, models, whole, node_names, class_names)
            if what_if and (facts := _whatif(models, whole, injections or {}, start)):
                if node_names is not None:
                    facts["names"] = [_shorten(name_of(n, node_names)) for n in range(whole.num_nodes)]
                fields["whatif"] = {**facts, "classes": classes}
    explorer = explorer or _nodes_of_records(results, node)
    if explorer is not None:
        explorer["classes"] = classes
    return _assemble(results, reference, notes, explorer, scored, title=title, **fields)


def _add_counterfactuals(
    explorer: dict[str, Any], models: Mapping[str, nn.Module], graph: Graph, names: Any, classes: Any
) -> None:
    """Add to each model which few neighbours of the first node change its class, in words."""
    graph, node = graph.replace(class_names=classes and tuple(classes)), explorer["nodes"]["id"][0]
    search = partial(explain, names=names, threat=None, certificate=False, counterfactual=True)
    for column in explorer["models"]:
        column["changes"] = search(models[column["name"]], graph, node).counterfactual_sentences()


def _whatif(
    models: Mapping[str, nn.Module], graph: Graph, injections: Injections, node: int
) -> dict[str, Any] | None:
    """Graph and weights for the part "What if?"; None if Python has to compute it."""
    if task_of(graph).name != "node" or not all(in_browser(model, graph) for model in models.values()):
        return None
    counts = {name: certified_neighbours(entries) for name, entries in injections.items()}
    certified = {name: most for name, most in counts.items() if most}
    facts = WhatIf(models, graph).facts(node=node, certified=certified)
    return None if facts["graph"] is None else facts


def _assemble(
    results: Sequence[_ModelResults],
    reference: str,
    notes: Sequence[str] = (),
    explorer: dict[str, Any] | None = None,
    scored: Tensor | None = None,
    title: str | None = None,
    **fields: Any,
) -> Report:
    """The document; `fields` are those that come from models alone."""
    names = " and ".join(dict.fromkeys(result.name for result in results))
    data = results[0].record.get("data") or {}
    remarks = {result.name: look_up(result.record, "provenance.note") for result in results}
    distribution = [
        {"key": key, "models": models}
        for key in ("explanation", "prediction")
        if (models := [entry for result in results if (entry := result.overlaps(key)) is not None])
    ]
    return Report(
        title=title or f"{names} on {data.get('name', 'a graph')}",
        reference=reference,
        records=[result.record for result in results],
        certificates={r.name: r.certificate for r in results if r.certificate is not None},
        injections={r.name: injection_summary(r.injections, scored) for r in results if r.injections},
        intervals=_intervals_of(results, reference),
        distribution={"k": results[0].k, "attacks": distribution} if distribution else None,
        explorer=explorer,
        notes=[*(f"{name}: {note}" for name, note in remarks.items() if note is not None), *notes],
        **fields,
    )


def _attacked_views(
    results: Sequence[_ModelResults],
    models: Mapping[str, nn.Module],
    graph: Graph,
    attacks: Mapping[str, AttackResult],
    notes: list[str],
) -> list[_ModelViews]:
    out = []
    for name in (result.name for result in results):
        if name in models and name in attacks:
            out.append(_ModelViews.of(Case(name, models[name], attacks[name]), graph))
        else:
            lacks = "attack on" if name in models else "model for"
            notes.append(f"There is no {lacks} the row {name!r}: its attention is not shown.")
    return out


def _histories(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Loss terms by name, one value per epoch; at most about a thousand epochs."""
    out = {}
    for name, model in models.items():
        history = getattr(model, "history", None)
        if isinstance(history, History) and history.terms:
            step, shown = max(1, len(history.terms) // 1000), ("best_epoch", "stopped", "ending")
            out[name] = {
                "terms": {
                    term: [float(f"{epoch.get(term, 0.0):.5g}") for epoch in history.terms[::step]]
                    for term in history.terms[0]
                },
                "step": step,
                "epochs": len(history.terms),
                **{key: getattr(history, key) for key in shown},
                "seconds": round(history.seconds, 3),
            }
    return out


_KINDS: tuple[type[Document], ...] = (Report, Comparison, EvaluationRecord, CertificateRecord)
_OPTIONAL = ("warnings", "per_node")  # keys of an evaluation that a page does without
# Layers of a newer fgai may hold more.
_CERTIFICATE = {**CertificateRecord.layout(), "layers": list[dict[str, Any]]}


@typed
def read_report(
    files: Path | str | Sequence[Path | str] | Mapping[str, Path | str], *, node: int | None = None
) -> Report:
    """Read a report document, or build one from records.

    Parts that are missing, damaged or of a newer schema are left out, which the notes and the page say.

    `files` are one report document, or any number of comparisons, evaluations and certificates. A certificate
    belongs to the row it is given as, in a mapping, or to the row its file is named after
    (`certificate-gat.json`). The page opens with `node`. `CheckpointError` if a file is missing, damaged, or
    none of these, `InputError` for no files, or certificates only.
    """
    paths = [files] if isinstance(files, Path | str) else files
    pairs = paths.items() if isinstance(paths, Mapping) else ((None, path) for path in paths)
    named = [(label, Path(path)) for label, path in pairs]
    if not named:
        raise InputError("`files` must name at least one record, got none")
    notes: list[str] = []
    records: list[dict[str, Any]] = []
    certificates: dict[Path, tuple[str | None, dict[str, Any]]] = {}
    reference = ""
    for label, path in named:
        values = _read(path, notes)
        kind = values["kind"]
        if kind == "report":
            if len(named) > 1:
                raise InputError(f"{path} is a whole report; give it alone")
            layout = Report.layout()
            parts = {name: values[name] for name in layout if name in values}
            fields = _valid(parts, layout, path.name, notes)
            fields["records"] = _records(fields.get("records"), path.name, notes)
            return Report(**{**fields, "notes": [*map(str, fields.get("notes", [])), *notes]})
        if kind == "certificate":
            certificates[path] = label, _valid(values, _CERTIFICATE, path.name, notes, optional=_CERTIFICATE)
        elif kind == "comparison":
            reference = reference or str(values.get("reference") or "")
            records += _records(values.get("records"), path.name, notes)
        else:
            record = _valid(values, EvaluationRecord.layout(), path.name, notes, optional=_OPTIONAL)
            records.append({**record, "name": label or record.get("name", "model")})
    if not records:
        raise InputError("there is no evaluation in these files; give a comparison or an evaluation record")
    rows = [str(record.get("name")) for record in records]
    owners = {_owner(label, path, rows, notes): values for path, (label, values) in certificates.items()}
    results = _results_of(records, owners, notes)
    return _assemble(results, reference or results[0].name, notes, _nodes_of_records(results, node))


def _read(path: Path, notes: list[str]) -> dict[str, Any]:
    """The values of a file of one of `_KINDS`; notes say if its schema is not known."""
    values, schemas = read_json(path), {kind.KIND: kind.SCHEMA for kind in _KINDS}
    kind = values.get("kind") if isinstance(values, dict) else type(values).__name__
    if not isinstance(values, dict) or kind not in schemas:
        *others, last = schemas
        raise CheckpointError(f"{path} must hold a {', '.join(others)} or {last}, got {kind!r}")
    schema, newest = values.get("schema"), schemas[kind]
    if not isinstance(schema, int):
        notes.append(f"{path.name} does not say which schema it follows: it is read as schema {newest}.")
    elif schema > newest:
        notes.append(
            f"{path.name} was written by a newer fgai (schema {schema}; this one knows {newest}): what it"
            " adds is not shown, and what it changed may be missing. Update fgai to see all of it."
        )
    return values


def _records(values: Any, file: str, notes: list[str]) -> list[dict[str, Any]]:
    layout, where = EvaluationRecord.layout(), f"a record in {file}"
    return [_valid(entry, layout, where, notes, optional=_OPTIONAL) for entry in _objects(values)]


def _valid(
    values: Mapping[str, Any], layout: Schema, where: str, notes: list[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    """The values that fit the layout; notes name the others, and missing keys."""
    missing = [name for name in layout if name not in {*values, *optional}]
    if missing:
        notes.append(f"{where} lacks {', '.join(missing)}.")
    valid: dict[str, Any] = {}
    for name, value in values.items():
        try:
            check(value, layout.get(name, Any), f"{name} of {where}")
        except CheckpointError as error:
            notes.append(f"Left out: {error}.")
        else:
            valid[name] = value
    return valid


def _owner(label: str | None, path: Path, rows: Sequence[str], notes: list[str]) -> str:
    """The row a certificate belongs to: as given, by the name of its file, or the only one."""
    name = (label or path.stem.removeprefix("certificate-")).lower()
    matching = [row for row in rows if row.lower() == name] or [*rows] * (len(rows) == 1)
    if matching:
        return matching[0]
    unclear = f"it is unclear which of {', '.join(rows)} it certifies"
    notes.append(f"{path.name} is not shown: {unclear}. Give it as NAME=FILE.")
    return f"?{path.name}"
