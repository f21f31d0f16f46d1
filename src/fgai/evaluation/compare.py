"""`compare`: several models under one threat, side by side with null rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.console import Console
from torch import nn

from fgai.attacks import DEFAULT, Threat
from fgai.attention.interface import originals
from fgai.errors import InputError
from fgai.evaluation.record import (
    EvaluationRecord,
    _class_table,
    _explanation_table,
    _prediction_table,
    show_summary,
)
from fgai.evaluation.run import evaluate
from fgai.progress import show_progress, stage
from fgai.records import Table, TabledDocument, data_frame
from fgai.records.table import csv_text
from fgai.threads import with_gradients
from fgai.typed import typed
from fgai.version import adding_facts

if TYPE_CHECKING:
    import pandas


@typed
@dataclass(frozen=True, kw_only=True)
class Comparison(TabledDocument):
    """Records of several models under one threat, which are compared with the model named `reference`."""

    KIND: ClassVar[str] = "comparison"

    records: list[EvaluationRecord]
    reference: str

    def __getitem__(self, name: str) -> EvaluationRecord:
        names = [record.name for record in self.records]
        if name not in names:
            raise InputError(f"there is no row {name!r}; there are {', '.join(names)}")
        return self.records[names.index(name)]

    def __iter__(self) -> Iterator[EvaluationRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the schema version first."""
        records = [record.to_dict() for record in self.records]
        return {"kind": self.KIND, "schema": self.SCHEMA, "reference": self.reference, "records": records}

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the names and types of a file's values."""
        return {**super().layout(), "records": list[dict[str, Any]]}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        records = [EvaluationRecord.from_dict(values) for values in fields["records"]]
        return cls(records=records, reference=fields["reference"])

    def tables(self) -> list[Table]:
        """Return the tables: prediction and stability, recall by class, explanation."""
        base = self[self.reference]
        predicted = _prediction_table(self.records, base)
        return [predicted, *_class_table(self.records), _explanation_table(self.records, base)]

    def show(self, console: Console | None = None, *, every: bool = False) -> None:
        """Print a summary of at most twelve rows and what it means; `every` prints all tables instead."""
        if every:
            super().show(console)
        else:
            show_summary([self[self.reference], *(r for r in self if r.name != self.reference)], console)

    def to_csv(self) -> str:
        """Return one CSV, a row per model and metric; full precision."""
        rows = [(record.name, *item) for record in self.records for item in record.flat().items()]
        return csv_text([("model", "metric", "value"), *rows])

    def to_pandas(self) -> pandas.DataFrame:
        """Return every number as a `DataFrame` (needs pandas): a row per metric, a column per model."""
        return data_frame({record.name: record.flat() for record in self.records})


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
    """Evaluate several models under the same threat.

    Under an ensemble explanations are compared at endpoints that all models share. Scores are under the
    strongest change found, whose endpoints may differ between models.

    Args:
        models: by their name in tables.
        data: a `Graph` or PyG `Data`.
        threat: see `evaluate`.
        seed: of the attacks.
        vanilla: name of the reference, the model the others are compared with; the first by default.
        **options: further arguments of `evaluate`, e.g. `k=5`, `curves=False`, `nodes=2`, `edges=2`.

    Raises:
        InputError: no models, models without names, or `vanilla` names none of them.
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
