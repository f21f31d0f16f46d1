"""The table of layers, from the committed numbers of `benchmarks/kernels.py`."""

from __future__ import annotations

import json

from experiments import Store
from experiments.speed import FOLDER, MEASURED, kernels
from fgai.records import Table


def test_cells_are_the_measured_ratios(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tables = kernels(Store(tmp_path))
    assert len(tables) == len(MEASURED)
    for table, name in zip(tables, MEASURED, strict=True):
        assert isinstance(table, Table)
        found = {tuple(each["case"]): each for each in json.loads((FOLDER / name).read_text())}
        row = next(row for row in table.rows if row[0] == "photo, 4x64")
        one = found["photo", "4x64", "dot", "float32"]
        best = min(one["fgai"]["seconds"], one["fgai"].get("captured", 9.0))
        assert float(str(row[1]).split("/")[2]) == float(f"{best * 1e3:.3g}")
        assert float(str(row[4]).split("/")[2]) == float(
            f"{one['compiled']['bytes'] / one['fgai']['bytes']:.3g}"
        )
        assert len(table.rows) == len({case[:2] for case in found})
