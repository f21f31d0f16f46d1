"""`Report`: everything the page shows, as one JSON document; the page can be made again from it alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fgai.records import Document
from fgai.typed import typed


@typed
@dataclass(frozen=True, kw_only=True)
class Report(Document):
    """What the page is made of. Every part but the title may be missing; the page then says so.

    Attributes:
        title: of the page.
        reference: name of the model the others are compared with.
        records: evaluation records as plain values, without their per-node arrays.
        certificates: by model: norm, radius, k, promise, and shares over radii for each layer.
        injections: by model: shares of nodes that no injected neighbour can change, threat by threat.
        intervals: by model: what its differences from the reference may be, see `fgai.reports.noise`.
        histories: by model: loss terms per epoch, and the epoch kept.
        distribution: per-node overlap under each attack, counted in bins.
        subgraph: places, edges and attention of one neighbourhood, before and after the attack.
        explorer: the nodes the page carries, see `fgai.reports.explorer`.
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
    reproduce: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The models, in order."""
        return [str(record.get("name", "model")) for record in self.records]

    def _text(self, values: dict[str, Any]) -> str:
        """In one line."""
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
