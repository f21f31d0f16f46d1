"""`read_report`: a document from files, also from those of a newer fgai or with parts missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fgai.certificates import CertificateRecord
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.files import Schema, check
from fgai.records import Document, read_json
from fgai.reports.build import assemble
from fgai.reports.document import Report
from fgai.reports.parts import objects, parts_of
from fgai.typed import typed

KINDS = ("report", "comparison", "evaluation", "certificate")
# What each kind of document must be for its parts to be used at all.
_TYPES: dict[str, Any] = {
    "title": str, "reference": str, "records": list, "certificates": dict, "injections": dict,
    "intervals": dict,
    "histories": dict, "distribution": dict | None, "subgraph": dict | None, "explorer": dict | None,
    "reproduce": list, "notes": list,
}  # fmt: skip
_RECORD = EvaluationRecord.layout()
# Layers of a newer fgai may say more.
_PROOF = {**CertificateRecord.layout(), "layers": list[dict[str, Any]]}


@typed
def read_report(
    files: Path | str | Sequence[Path | str] | Mapping[str, Path | str], *, node: int | None = None
) -> Report:
    """Read a report document, or build one from records.

    A document with a newer schema is read as far as it is understood; a record with parts missing gives a
    report without them. Both are said in the notes, and on the page.

    Args:
        files: one report document; or any number of comparisons, evaluations and certificates. A certificate
            belongs to the row it is given as, in a mapping, or to the row its file is named after
            (`certificate-gat.json`).
        node: the page opens with.

    Raises:
        CheckpointError: a file is missing, damaged, or none of these.
        InputError: no files, or certificates only.
    """
    named = _named(files)
    if not named:
        raise InputError("`files` must name at least one record, got none")
    notes: list[str] = []
    records: list[dict[str, Any]] = []
    proofs: dict[str, tuple[str | None, dict[str, Any]]] = {}
    reference = ""
    for label, path in named:
        values = _json(path)
        kind = values["kind"]
        _tell_schema(values, path, notes)
        if kind == "report":
            if len(named) > 1:
                raise InputError(f"{path} is a whole report; give it alone")
            return _report(values, path, notes)
        if kind == "certificate":
            proofs[str(path)] = (label, _sound(values, _PROOF, path.name, notes))
        elif kind == "comparison":
            reference = reference or str(values.get("reference") or "")
            records += _records(values.get("records"), path, notes)
        else:
            found = _record(values, path.name, notes)
            records.append({**found, "name": label or found.get("name", "model")})
    if not records:
        raise InputError("there is no evaluation in these files; give a comparison or an evaluation record")
    owners = {
        _owner(label, Path(path), [str(r.get("name")) for r in records], notes): values
        for path, (label, values) in proofs.items()
    }
    names = [str(record.get("name", "model")) for record in records]
    parts = parts_of(records, owners, notes)
    return assemble(parts, reference=reference or names[0], histories={}, node=node, notes=notes)


def _named(
    files: Path | str | Sequence[Path | str] | Mapping[str, Path | str],
) -> list[tuple[str | None, Path]]:
    if isinstance(files, Mapping):
        return [(name, Path(path)) for name, path in files.items()]
    listed = [files] if isinstance(files, Path | str) else files
    return [(None, Path(path)) for path in listed]


def _json(path: Path) -> dict[str, Any]:
    values = read_json(path)
    kind = values.get("kind") if isinstance(values, dict) else type(values).__name__
    if kind not in KINDS:
        raise CheckpointError(f"{path} must hold a {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {kind!r}")
    assert isinstance(values, dict)
    return values


def _tell_schema(values: Mapping[str, Any], path: Path, notes: list[str]) -> None:
    kinds: tuple[type[Document], ...] = (Report, Comparison, EvaluationRecord, CertificateRecord)
    known = next(kind.SCHEMA for kind in kinds if values["kind"] == kind.KIND)
    schema = values.get("schema")
    if not isinstance(schema, int):
        notes.append(f"{path.name} does not say which schema it follows: it is read as schema {known}.")
    elif schema > known:
        notes.append(
            f"{path.name} was written by a newer fgai (schema {schema}; this one knows {known}): what it adds"
            " is not shown, and what it changed may be missing. Update fgai to see all of it."
        )


def _records(values: Any, path: Path, notes: list[str]) -> list[dict[str, Any]]:
    return [_record(entry, f"a record in {path.name}", notes) for entry in objects(values)]


def _record(values: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """An evaluation as far as it is sound; what it lacks is noted."""
    missing = [name for name in _RECORD if name not in values and name not in ("warnings", "per_node")]
    if missing:
        notes.append(f"{where[0].upper()}{where[1:]} lacks {', '.join(missing)}.")
    return _sound(values, _RECORD, where, notes)


def _sound(values: Mapping[str, Any], layout: Schema, where: str, notes: list[str]) -> dict[str, Any]:
    """The values without the parts that are not what such a file holds, which are noted."""
    sound: dict[str, Any] = {}
    for name, value in values.items():
        try:
            check(value, layout.get(name, Any), f"{name} of {where}")
        except CheckpointError as error:
            notes.append(f"Left out: {error}.")
        else:
            sound[name] = value
    return sound


def _report(values: Mapping[str, Any], path: Path, notes: list[str]) -> Report:
    fields: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        if name not in values:
            notes.append(f"{path.name} lacks {name}.")
        elif isinstance(values[name], kind):
            fields[name] = values[name]
        else:
            notes.append(f"{path.name}: {name} is not what it should be and is left out.")
    fields["records"] = _records(fields.get("records"), path, notes)
    return Report(**{**fields, "notes": [*map(str, fields.get("notes", [])), *notes]})


def _owner(label: str | None, path: Path, names: Sequence[str], notes: list[str]) -> str:
    """The row a certificate belongs to: as given, by the name of its file, or the only one."""
    wanted = (label or path.stem.removeprefix("certificate-")).lower()
    for name in names:
        if name.lower() == wanted:
            return name
    if len(names) == 1:
        return names[0]
    notes.append(
        f"{path.name} is not shown: it is unclear which of {', '.join(names)} it certifies. Give it as"
        " NAME=FILE."
    )
    return f"?{path.name}"
