"""`EvaluationRecord`: one evaluation as a small JSON document that says everything about itself."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from fgai.errors import InputError
from fgai.evaluation.layout import class_table, explanation_table, long_table
from fgai.records import Table, TabledDocument, data_frame, unpack_array
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


@typed
@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(TabledDocument):
    """One model on one dataset under one threat.

    Numbers that are not defined (an overlap where no node has enough neighbours) are None.

    Attributes:
        name: of the row.
        model: class and settings of the model.
        data: name, fingerprint and sizes of the dataset.
        threat: name and budget.
        config: the other arguments of `evaluate`.
        seed: of the attacks and the random ranking.
        version: of fgai and torch.
        device: where it ran.
        seconds: wall-clock time, by part and in all.
        peak_memory: bytes, and how they were counted.
        metrics: nested, see docs/metrics.md.
        ledgers: what each attack spent and reached.
        warnings: code and message of everything raised on the way.
        per_node: packed arrays, or nothing; see `node_values`.
        provenance: hashes of weights, data and code, date, command and seed, see `fgai.records.provenance`;
            empty in records of before.
    """

    KIND: ClassVar[str] = "evaluation"

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    threat: dict[str, Any]
    config: dict[str, Any]
    seed: int
    version: dict[str, str]
    device: str
    seconds: dict[str, float]
    peak_memory: dict[str, Any]
    metrics: dict[str, Any]
    ledgers: dict[str, Any]
    warnings: list[dict[str, str]] = field(default_factory=list)
    per_node: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def value(self, path: str) -> Any:
        """Return one metric by its dotted name, e.g. `overlap_touched.prediction.all`.

        Raises:
            InputError: there is no such metric; lists what there is at that level.
        """
        found: Any = self.metrics
        for part in path.split("."):
            if isinstance(found, list) and part.lstrip("-").isdigit() and abs(int(part)) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                options = ", ".join(found) if isinstance(found, Mapping) else "nothing further"
                raise InputError(f"the record has no metric {path!r}: no {part!r} among {options}")
        return found

    def get(self, path: str) -> Any:
        """Return one metric by its dotted name, or None where the record lacks it."""
        try:
            return self.value(path)
        except InputError:
            return None

    def node_values(self, name: str) -> NDArray[Any]:
        """Return one array of per-node values; only there when `evaluate(..., per_node=True)`.

        Raises:
            InputError: the record does not hold it.
        """
        if name not in self.per_node:
            known = ", ".join(self.per_node) or "nothing; evaluate with `per_node=True`"
            raise InputError(f"the record holds no per-node {name!r}; it holds {known}")
        return unpack_array(self.per_node[name])

    def tables(self) -> list[Table]:
        """Return every metric, the recall by class, and the explanation metrics beside their null rows."""
        return [long_table(self), *class_table([self]), explanation_table([self], self)]

    def to_csv(self) -> str:
        """Return every number as CSV: dotted metric and value, layers and curves by position."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["metric", "value"])
        writer.writerows(self.flat().items())
        return out.getvalue()

    def flat(self) -> dict[str, Any]:
        """Return every number by its dotted metric, layers and curves by position."""
        return dict(_flat("", self.metrics))

    def to_pandas(self) -> pandas.DataFrame:
        """Return every number as a `DataFrame`: a row per dotted metric, one column of the record's name.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame({self.name: self.flat()})


def _flat(prefix: str, values: Any) -> list[tuple[str, Any]]:
    if not isinstance(values, Mapping | list):
        return [(prefix, values)]
    items = enumerate(values) if isinstance(values, list) else values.items()
    return [row for key, value in items for row in _flat(f"{prefix}.{key}" if prefix else str(key), value)]
