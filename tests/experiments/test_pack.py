"""Records on disk: compact, packed where a search is over, and those of before read as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments import Cell, Store, run_grid, status
from experiments.choose import trials
from experiments.store import slim
from experiments.tables import render
from fgai.cli import app
from fgai.errors import CheckpointError
from fgai.evaluation import EvaluationRecord
from fgai.records import to_text
from support import bench_cases as cases
from support.evaluate_cases import whole_record

SEARCH = [
    Cell(kind="search", dataset=dataset, method="fgai", task=task, settings={"lr": rate})
    for dataset in ("cora", "amazon-photo")
    for task in ("", "link")
    for rate in (0.3, 0.1, 0.2)
]
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=40
)


def as_before(store: Store, cell: Cell, **changes: Any) -> Path:
    """A record as it was written before: every number on a line of its own."""
    path = store.write(cell, {**cases.body_of(cell), **changes})
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True) + "\n")
    return path


def keys(store: Store) -> list[str]:
    """Of the trials of links, the best first."""
    return [str(trial.settings) for held in trials(store, "link").values() for trial in held]


def seconds(store: Store, cell: Cell) -> float | None:
    record = store.read(cell)
    return None if record is None else record["seconds"]


class TestText:
    @given(VALUES, st.booleans())
    def test_json_that_says_the_same(self, values: Any, sort_keys: bool) -> None:
        text = to_text(values, sort_keys=sort_keys)
        assert json.dumps(json.loads(text)) == json.dumps(values, sort_keys=sort_keys)

    def test_arrays_stand_on_one_line(self) -> None:
        curve = [step / 7 for step in range(300)]
        lines = to_text({"curve": curve, "name": "GAT", "layers": [{"values": curve}, {"b": 2}]}).splitlines()
        assert f' "curve": {json.dumps(curve)},' in lines
        assert ' "name": "GAT",' in lines and '  {"b": 2}' in lines

    def test_nothing_that_is_no_number(self) -> None:
        with pytest.raises(ValueError, match="JSON compliant"):
            to_text({"x": [float("nan")]})

    def test_documents_are_read_as_they_were_written_before(self, tmp_path: Path) -> None:
        whole = whole_record()
        old, new = tmp_path / "old.json", whole.save(tmp_path / "new.json")
        old.write_text(json.dumps(whole.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        assert EvaluationRecord.load(old) == EvaluationRecord.load(new) == whole
        assert new.stat().st_size < 0.85 * old.stat().st_size
        assert len(new.read_text().splitlines()) < len(old.read_text().splitlines()) / 4


class TestPack:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        cases.fill(Store(tmp_path), [Cell(), *SEARCH])
        return Store(tmp_path)

    def test_records_before_the_change_are_read(self, tmp_path: Path) -> None:
        store, cell = Store(tmp_path), SEARCH[0]
        path = as_before(store, cell)
        assert "\n   " in path.read_text()
        assert store.read(cell) == json.loads(path.read_text()) == next(iter(store.records("search")))

    def test_a_record_under_another_name_stays_a_file(self, store: Store) -> None:
        path = as_before(store, Cell(seed=2), schema=1)
        record = json.loads(path.read_text())
        record |= {"schema": 1, "cell": {**record["cell"], "method": "fgai-paper"}}
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        store.pack()
        assert json.loads(path.read_text()) == record

    def test_nothing_that_a_table_reads_changes(self, store: Store) -> None:
        as_before(store, Cell(seed=1))
        cells = [Cell(), Cell(seed=1), *SEARCH]
        before = {cell.key: store.read(cell) for cell in cells}
        tables = [render("search", store), render("f1", store), keys(store)]
        order = [r["key"] for kind in ("search", "search-link") for r in store.records(kind)]
        assert store.pack() == len(cells)
        assert sorted(path.name for path in store.root.iterdir()) == ["evaluate.jsonl", "search-fgai.jsonl"]
        for again in (store, Store(store.root)):
            for cell in cells:
                was = before[cell.key]
                assert was is not None and again.read(cell) == slim(was)
            assert [r["key"] for k in ("search", "search-link") for r in again.records(k)] == order
            assert [render("search", again), render("f1", again), keys(again)] == tables
            assert status(SEARCH, again).done == len(SEARCH)

    def test_what_no_table_reads_goes_and_what_members_reached_stays(self, store: Store) -> None:
        members = (("sign", "cover", 0.1), ("sign", "cover", 1 / 3), ("adam", "random", 0.2))
        rows = [{"member": name, "endpoints": rule, "seconds": 1.0} for name, rule, _ in members]
        ledger = {"curve": [0.1], "members": rows, "damages": [0.0, *(damage for *_, damage in members)]}
        evaluation = {
            "metrics": {"f1": {"clean": 2 / 3}, "intruders": 1.0},
            "ledgers": {"explanation": ledger},
            "seconds": {"total": 1.0, "attack": 0.5},
            "config": {"k": 5},
        }
        cell = Cell(method="fgai")
        body = {**cases.body_of(cell), "warnings": ["[flat-attention] It is flat.", "something else"]}
        store.write(cell, {**body, "evaluations": {"ensemble": evaluation}})
        store.pack()
        found = store.read(cell)
        assert found is not None and found["warnings"] == ["[flat-attention]"]
        lost = {"cover": 0.333333, "random": 0.2, "chosen": 0.333333}
        assert found["evaluations"]["ensemble"] == {
            "metrics": {"f1": {"clean": 0.666667}, "lost": {"explanation": lost}},
            "reached": {"explanation": {"cover": {"sign": 0.333333}, "random": {"adam": 0.2}}},
        }
        assert slim(found) == found

    def test_a_claim_stands_until_its_cell_is_run_again(self, store: Store, tmp_path: Path) -> None:
        cell, other, earlier = Cell(method="fgai"), Cell(method="fgai", seed=1), Store(tmp_path / "earlier")
        for one in (cell, other):
            earlier.write(one, {**cases.body_of(one), "seconds": 7.0, "earlier": True})
        earlier.pack()
        (earlier.root / f"{cell.kind}.jsonl").rename(store.root / "claims.jsonl")
        held = Store(store.root)
        assert seconds(held, cell) == 7.0 and len(list(held.records())) == 3
        held.write(cell, cases.body_of(cell))
        assert seconds(held, cell) == 12.0
        held.pack()
        assert seconds(held, cell) == 12.0 and seconds(held, other) == 7.0
        assert len((store.root / "claims.jsonl").read_text().splitlines()) == 2  # and the checksum

    def test_equal_records_give_equal_bytes(self, store: Store, tmp_path: Path) -> None:
        other = Store(tmp_path / "other")
        cases.fill(other, SEARCH[::-1])
        store.pack(), other.pack()
        packs = [(s.root / "search-fgai.jsonl").read_bytes() for s in (store, other)]
        assert packs[0] == packs[1] and store.pack() == 0
        assert (store.root / "search-fgai.jsonl").read_bytes() == packs[0]

    def test_new_records_are_files_and_are_added(self, store: Store) -> None:
        store.pack()
        more, again = Cell(kind="search", method="fgai", settings={"lr": 0.4}), SEARCH[0]
        cases.fill(store, [more])
        store.write(again, {**cases.body_of(again), "seconds": 99.0})  # run again: the file wins
        assert store.path(more).is_file() and seconds(store, again) == 99.0
        assert len(list(store.records("search"))) == 7
        assert Store(store.root).pack() == 2
        held = Store(store.root)
        assert seconds(held, again) == 99.0 and held.read(more) is not None
        assert len(list(held.records("search"))) == 7 and not store.path(more).exists()

    def test_failed_cells_stay_files_and_are_tried_again(self, store: Store) -> None:
        failed = cases.tiny(kind="search")
        store.write(failed, {"status": "failed", "error": "x", "seconds": 1.0})
        store.pack()
        assert store.path(failed).is_file() and status([failed], store).failed == 1
        assert run_grid([failed], store).done == 1

    def test_packed_cells_are_not_run_again(self, store: Store) -> None:
        store.pack()
        seen: list[Cell] = []
        assert run_grid(SEARCH, store, on_cell=lambda cell, *_: seen.append(cell)).done == len(SEARCH)
        assert seen == []

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda raw: b"\xff", "is damaged"),
            (lambda raw: b"", "its last line is not the checksum"),
            (lambda raw: raw[:-20], "its last line is not the checksum"),
            (lambda raw: raw.replace(b"12.0", b"13.0"), "its last line is not the checksum"),
            (lambda raw: raw[raw.index(b"\n") + 1 :], "its last line is not the checksum"),
        ],
    )
    def test_damage_is_named(self, store: Store, damage: Any, message: str) -> None:
        store.pack()
        pack = store.root / "search-fgai.jsonl"
        pack.write_bytes(damage(pack.read_bytes()))
        for work in (lambda s: s.read(SEARCH[0]), lambda s: list(s.records("search"))):
            with pytest.raises(CheckpointError, match=message) as caught:
                work(Store(store.root))
            assert str(pack) in str(caught.value)
        assert Store(store.root).read(Cell()) is not None  # other kinds are none the worse

    def test_a_damaged_record_stops_it_before_anything_changes(self, store: Store) -> None:
        store.path(Cell()).write_text("{")
        with pytest.raises(CheckpointError, match="not a whole record"):
            store.pack()
        assert not (store.root / "search-fgai.jsonl").exists() and store.path(SEARCH[0]).exists()

    def test_the_command(self, store: Store) -> None:
        done = CliRunner().invoke(app, ["bench", "pack", "-r", str(store.root), "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout)["packed"] == 1 + len(SEARCH)
        shown = CliRunner().invoke(app, ["bench", "pack", "-r", str(store.root)])
        assert "0 records packed" in shown.stdout
