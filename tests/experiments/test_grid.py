"""Grids, cells, records and the runner: nothing lost, nothing twice, nothing overwritten."""

from __future__ import annotations

import json
import multiprocessing as mp
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import (
    Cell,
    Status,
    Store,
    cells,
    only,
    read_grid,
    read_record,
    run_cell,
    run_grid,
    shard,
    status,
    trained,
)
from experiments.fingerprint import EARLIER, change_of, fingerprint, is_older, searches
from experiments.grid import Pace, _spread
from experiments.run import INJECTED
from experiments.validation import short_attack
from fgai.attacks import EnsembleInjection
from fgai.errors import CheckpointError, InputError
from fgai.records import plain
from fgai.training import FaithfulSettings
from support import bench_cases as cases
from support.cli_cases import processes

DATA = Path(__file__).parent / "data"

GRID = """
[[cells]]
method = ["vanilla", "ln"]
seed = [0, 1, 2]
settings = { epochs = 2 }
threats = []
"""


def grid_file(folder: Path, text: str = GRID) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def named(cell: Cell) -> str:
    return f"{cell.model} {cell.row} {cell.dataset} seed {cell.seed}"


def brief(method: str, *_: str) -> dict[str, Any]:
    """Instead of presets: a vanilla model that is hardly trained."""
    return {"epochs": 10} if method == "vanilla" else {}


def lasting(value: Any) -> Any:
    """A record without times and memory."""
    moving = ("seconds", "epoch_seconds", "peak_memory", "base_memory", "about")
    if isinstance(value, dict):
        return {name: lasting(part) for name, part in value.items() if name not in moving}
    return [lasting(part) for part in value] if isinstance(value, list) else value


class TestCells:
    def test_every_field_enters_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base = Cell()
        changes: list[dict[str, Any]] = [
            {"kind": "search"}, {"model": "GT"}, {"dataset": "cora"}, {"method": "fgai"}, {"seed": 1},
            {"threats": ("strong",)}, {"settings": {"lr": 0.1}}, {"label": "x"},
        ]  # fmt: skip
        keys = {Cell(**change).key for change in changes} | {base.key}
        assert len(keys) == len(changes) + 1
        assert Cell().key == base.key and Cell.from_dict(json.loads(json.dumps(base.to_dict()))) == base
        monkeypatch.setattr(cells, "PROTOCOL", 2)
        assert Cell().key not in keys

    def test_lists_are_dimensions(self, tmp_path: Path) -> None:
        text = """
        [[cells]]
        method = ["vanilla", "at"]
        model = ["GAT", "GATv2", "GT"]
        settings = [{ lr = 0.1 }, { lr = 0.2 }]
        threats = ["standard", "strong"]
        [[cells]]
        method = "at"
        settings = { lr = 0.2 }
        threats = ["standard", "strong"]
        """
        found = read_grid(grid_file(tmp_path, text))
        assert len(found) == 12  # the second table repeats a cell of the first
        assert {cell.threats for cell in found} == {("standard", "strong")}
        assert {cell.settings["lr"] for cell in found} == {0.1, 0.2}

    def test_shipped_grids(self) -> None:
        node = read_grid("node")
        assert len(node) == (3 * 8 + 2) * 4 * 5 + 3 * 5 * 4 * 5
        shared = {cell.key for cell in node} & {cell.key for cell in read_grid("ablation")}
        assert len(shared) == 2 * 3 * 5  # vanilla and FGAI on Photo are run once for both
        for name in ("ablation", "search", "cost", "definition"):
            found = read_grid(name)
            assert len({cell.path for cell in found}) == len(found)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[[cells]]\nmodell = 'GAT'\n", "unknown field"),
            ("[[cells]]\nkind = 'guess'\n", "`kind` must be one of"),
            ("[cell]\n", "is not a grid"),
            ("cells = [", "is not a grid"),
        ],
    )
    def test_bad_grids(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_grid(grid_file(tmp_path, text))

    def test_unknown_grid_lists_the_known(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="node"):
            read_grid("nodes")
        with pytest.raises(InputError, match="there is no grid"):
            read_grid(tmp_path / "none.toml")


class TestShards:
    @given(count=st.integers(0, 23), parts=st.integers(1, 9))
    def test_parts_cover_a_grid_once(self, count: int, parts: int) -> None:
        every = [Cell(seed=seed) for seed in range(count)]
        split = [shard(every, f"{part}/{parts}") for part in range(1, parts + 1)]
        assert sorted(cell.seed for part in split for cell in part) == list(range(count))
        assert max(map(len, split)) - min(map(len, split)) <= 1

    @pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/2/3", ""])
    def test_bad_parts(self, text: str) -> None:
        with pytest.raises(InputError, match="shard"):
            shard([], text)


class TestRun:
    def test_a_failed_cell_stops_nothing_and_is_tried_again(self, tmp_path: Path) -> None:
        store, seen = Store(tmp_path), []
        every = [
            cases.tiny(dataset="nowhere"),
            cases.tiny(settings={"epochs": 2, "heads": "many"}),
            cases.tiny(settings={"bogus": 1}),
            cases.tiny(),
        ]
        for _ in range(2):
            found = run_grid(every, store, on_cell=lambda cell, state, _: seen.append((cell, state)))
            assert found == status(every, store) == Status(done=1, failed=3, open=0)
        assert [state for _, state in seen].count("failed") == 6
        assert [cell for cell, state in seen if state == "done"] == [every[-1]]  # done once, then skipped
        record = store.read(every[0])
        assert record is not None and "nowhere" in record["error"] and "Traceback" in record["trace"]

    def test_resumed_equals_uninterrupted(self, tmp_path: Path) -> None:
        every = read_grid(grid_file(tmp_path))
        calm, torn = Store(tmp_path / "calm"), Store(tmp_path / "torn")
        assert run_grid(every, calm).done == 6

        def stop(cell: Cell, state: str, seconds: float) -> None:
            raise KeyboardInterrupt

        for left in (5, 4):
            with pytest.raises(KeyboardInterrupt):
                run_grid(every, torn, on_cell=stop)
            assert status(every, torn).open == left
        assert run_grid(every, torn).done == 6
        for cell in every:
            assert lasting(torn.read(cell)) == lasting(calm.read(cell))

    def test_changed_settings_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store, every = Store(tmp_path), [cases.tiny(), cases.tiny(seed=1)]
        run_grid(every[:1], store)
        before = store.path(every[0]).read_bytes()
        monkeypatch.setattr(trained, "settings_for", lambda *_: {"weight_decay": 0.5})
        with pytest.raises(CheckpointError, match=r"another 'lr'|another 'weight_decay'"):
            run_grid(every, store)
        assert store.path(every[0]).read_bytes() == before
        assert store.read(every[1]) is None  # refused before any work
        assert run_grid(every, store, redo=True).done == 2
        record = store.read(every[0])
        assert record is not None and record["training"]["settings"]["weight_decay"] == 0.5

    def test_search_cells_never_see_test_nodes(self, tmp_path: Path) -> None:
        record = run_cell(cases.tiny(kind="search"), Store(tmp_path))
        scores = record["validation"]
        assert scores["criterion"] == pytest.approx((scores["clean"] + scores["attacked"]) / 2)
        assert "evaluations" not in record and "similarity" not in scores

    def test_cost_and_certificate_cells(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        assert run_cell(cases.tiny(kind="cost"), store)["training"]["epochs"] == 2
        made = run_cell(cases.tiny(kind="certify"), store)
        assert made["status"] == "done", made.get("trace")
        layers = made["certificate"]["layers"]
        assert len(layers) == 2 and len(layers[0]["topk"]["curve"]) == len(made["certificate"]["radii"])

    def test_injection_cells(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("experiments.methods.settings_for", brief)  # of the vanilla parent
        made = run_cell(cases.tiny(kind="inject", method="limits", settings={}), Store(tmp_path))
        assert made["status"] == "done", made.get("trace")
        assert len(made["injection"]) == 2 * len(INJECTED)
        assert all(one["known"] and 0 <= one["right"] <= one["share"] <= 1 for one in made["injection"])
        assert made["injection"][0]["status"] == ["invariant", "bound"]
        assert 0.2 < made["alone"] < 1 and len(made["sharpness"]) == 2

    def test_cells_of_budgets_and_votes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("experiments.methods.settings_for", brief)  # of the vanilla parent
        made = run_cell(cases.tiny(kind="collective", method="limits", settings={}), Store(tmp_path))
        assert made["status"] == "done", made.get("trace")
        found = made["collective"]
        assert found["known"] and [one["nodes"] for one in found["budgets"]] == [1, 5, 20]
        assert all(0 <= one["right"] <= found["nodes"] for one in found["budgets"])
        assert sum(found["harmless"]) <= found["nodes"]
        monkeypatch.setattr("experiments.run.GROUPS", (3,))
        made = run_cell(cases.tiny(kind="vote"), Store(tmp_path))
        assert made["status"] == "done", made.get("trace")
        assert [(one["groups"], one["confidence"]) for one in made["votes"]] == [(3, 0.0), (3, 0.5)]
        assert all(one["right"] == sorted(one["right"], reverse=True) for one in made["votes"])

    def test_a_record_says_what_made_it(self, tmp_path: Path) -> None:
        cell = cases.tiny(threats=("random",))
        made = run_cell(cell, Store(tmp_path))
        assert made["fingerprint"] == fingerprint(cell) and set(made["fingerprint"]["attacks"]) == {"random"}
        assert change_of(made, cell) is None

    def test_another_search_outdates_a_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store, cell = Store(tmp_path), cases.tiny(kind="attack", threats=("ensemble", "standard"))
        store.write(cell, cases.body_of(cell))
        assert run_grid([cell], store).done == 1
        searches.cache_clear()
        monkeypatch.setattr(EnsembleInjection, "version", EnsembleInjection.version + 1)
        try:
            record = store.read(cell)
            assert record is not None and change_of(record, cell) == "another search of `ensemble`"
            with pytest.raises(CheckpointError, match="another search of `ensemble`; nothing"):
                run_grid([cell], store)
            del record["fingerprint"]
            assert change_of(record, cell) == "searches of before they were recorded"
            assert change_of(record, cases.tiny(kind="cost")) is None, "nothing is searched"
        finally:
            searches.cache_clear()

    def test_trials_are_judged_by_a_short_ensemble_on_validation_nodes(self) -> None:
        attack = short_attack("node")
        assert isinstance(attack, EnsembleInjection) and attack.budget.targets == "val"
        assert attack.rules == ("random", "defects") and {member.steps for member in attack.members} == {100}
        assert {member.optimiser for member in attack.members} == {"sign", "momentum", "adam"}
        assert {member.gradient for member in attack.members} == {"true", "straight"}

    def test_a_default_that_is_said_is_the_same_setting(self, tmp_path: Path) -> None:
        store, cell = Store(tmp_path), cases.tiny(method="fgai")
        body = cases.body_of(cell)
        body["training"]["settings"]["margin"] = body["training"]["defaults"].pop("margin")
        store.write(cell, body)
        record = store.read(cell)
        assert record is not None and change_of(record, cell) is None
        record["training"]["settings"]["margin"] = 2.0
        assert change_of(record, cell) == f"another 'margin' (settings: 2.0, now {FaithfulSettings().margin})"

    def test_records_of_earlier_settings_stand_until_they_are_run_again(self, tmp_path: Path) -> None:
        store, cell = Store(tmp_path), cases.tiny(method="fgai")
        body = {**cases.body_of(cell), "key": cell.key, "cell": cell.to_dict()}
        body["training"]["settings"]["cut"] = 0.01
        assert "clip_share" in str(change_of(body, cell)) and is_older(body)
        body["earlier"] = True
        assert not is_older(body) and change_of(body, cell) == EARLIER
        store.write(cell, body)
        with pytest.raises(CheckpointError, match="was run with settings from before"):
            run_grid([cell], store)

    def test_baselines_never_used_the_settings_of_faithful_training(self) -> None:
        cell = cases.tiny(method="at")
        body = cases.body_of(cell)
        body["training"]["defaults"] |= {"ramp": 0.5, "similarity": 7.0, "divergence": "log"}
        assert change_of(body, cell) is None
        body["training"]["defaults"]["lean"] = 1.0
        assert "lean" in str(change_of(body, cell))

    @pytest.mark.many
    @pytest.mark.parametrize("method", ["vanilla", "ln"])
    def test_certificates_take_the_models_of_evaluations(
        self, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, cache = Store(tmp_path / "r"), tmp_path / "cache"
        assert run_cell(cases.tiny(method=method), store, cache=cache)["status"] == "done"
        models = sorted(cache.iterdir())
        assert len(models) == 1
        with monkeypatch.context() as patched:
            patched.setattr(trained, "train_method", lambda *_, **__: pytest.fail("trained again"))
            made = run_cell(cases.tiny(method=method, kind="certify"), store, cache=cache)
        assert made["status"] == "done", made.get("trace")
        assert sorted(cache.iterdir()) == models
        apart = run_cell(cases.tiny(method=method, kind="certify"), Store(tmp_path / "apart"))
        assert made["certificate"] == apart["certificate"]
        # A model of other settings, or of other code, is another model.
        settings = {"epochs": 3}
        run_cell(cases.tiny(method=method, kind="certify", settings=settings), store, cache=cache)
        monkeypatch.setattr(trained, "training_code", lambda: "other")
        run_cell(cases.tiny(method=method, kind="certify", seed=1), store, cache=cache)
        assert len(list(cache.iterdir())) == 3

    @pytest.mark.slow
    def test_two_shards_in_one_folder(self, tmp_path: Path) -> None:
        """Another process and this one at the same time; each cell is run by one of them."""
        path, folder = grid_file(tmp_path), tmp_path / "r"
        every, store, done = read_grid(path), Store(folder), []
        other = processes()
        other.start("bench", "run", path, "--results", folder, "--shard", "2/2", cwd=tmp_path)
        mine = shard(every, "1/2")
        assert run_grid(mine, store, on_cell=lambda cell, *_: done.append(named(cell))).done == 3
        ended = other.finish()
        assert ended.code == 0, ended.err
        lines = ended.err.splitlines()
        done += [line.split(" ", 1)[1].split(" done")[0] for line in lines if " done (" in line]
        assert sorted(done) == sorted(map(named, every))
        assert status(every, store) == Status(done=6, failed=0, open=0)
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert sorted(files) == sorted(store.path(cell) for cell in every)

    def test_cells_are_chosen_by_their_fields(self) -> None:
        cells = read_grid("methods")
        some = only(cells, ["kind=attack", "method=vanilla,fgai", "seed=0", "dataset=cora,planted"])
        assert len(some) == 8 and {cell.row for cell in some} == {"vanilla", "fgai, one setting"}
        assert only(cells, []) == cells
        for wrong, words in (
            ("method", "must look like"),
            ("colour=red", "by kind, model, dataset"),
            ("seed=9", "no cell left has seed '9'; there are 0, 1, 2"),
        ):
            with pytest.raises(InputError, match=words):
                only(cells, [wrong])

    def test_large_groups_are_shared_so_that_every_process_has_work(self) -> None:
        cells = [Cell(seed=number) for number in range(7)]
        groups = [cells[:5], cells[5:]]
        assert list(map(len, _spread(groups, 2))) == [5, 2]
        for jobs in (3, 4, 7, 20):
            shared = _spread(groups, jobs)
            assert [cell for group in shared for cell in group] == cells and all(shared)
            assert len(shared) == min(jobs, 7)
        assert _spread([], 3) == []

    @pytest.mark.slow
    def test_jobs_share_the_cells_and_end_in_time(self, tmp_path: Path) -> None:
        every, store, done = read_grid(grid_file(tmp_path)), Store(tmp_path / "r"), []
        late = run_grid(every, store, jobs=2, limit=0.0)
        assert late.open + late.done == len(every)
        found = run_grid(every, store, jobs=2, on_cell=lambda cell, *_: done.append(named(cell)))
        assert found == Status(done=6, failed=0, open=0)
        assert len(done) == len(set(done)) == late.open
        store.path(every[0]).write_text("{")
        with pytest.raises(CheckpointError, match="not a whole record"):
            run_grid(every, store, jobs=2)


class TestStoredRecord:
    """One record in the repository, made on a CPU, is what this code makes."""

    ABSOLUTE, RELATIVE = 5e-3, 2e-2  # eight test nodes; other processors and libraries round otherwise

    def test_no_cell_is_begun_that_would_not_end(self) -> None:
        quick, slow = cases.tiny(), cases.tiny(method="fgai")
        pace = Pace([quick, slow], monotonic() + 100, mp.get_context("spawn"))
        assert pace.allows(quick) and pace.allows(slow), "nothing is known yet"
        for seconds in (5.0, 200.0, 1.0):
            pace.note(slow, seconds)
        assert pace.allows(quick) and not pace.allows(slow)
        endless = Pace([slow], None, mp.get_context("spawn"))
        endless.note(slow, 200.0)
        assert endless.allows(slow)

    def test_recomputed(self, tmp_path: Path) -> None:
        (cell,) = read_grid(DATA / "planted.toml")
        stored = Store(DATA).read(cell)
        assert stored is not None
        made = run_cell(cell, Store(tmp_path))
        assert made["status"] == "done", made.get("trace")
        for part in ("data", "cell", "key"):
            assert made[part] == stored[part]
        assert made["training"]["settings"] == stored["training"]["settings"]
        ours, theirs = (r["evaluations"]["random"]["metrics"] for r in (made, stored))
        assert self.compare("", plain(ours), theirs) > 100

    def compare(self, path: str, ours: Any, theirs: Any) -> int:
        assert type(ours) is type(theirs), path
        if isinstance(theirs, dict):
            assert ours.keys() >= theirs.keys(), path  # later metrics are not in it
            return sum(self.compare(f"{path}.{name}", ours[name], theirs[name]) for name in theirs)
        if isinstance(theirs, list):
            assert len(ours) == len(theirs), path
            pairs = enumerate(zip(ours, theirs, strict=True))
            return sum(self.compare(f"{path}.{i}", a, b) for i, (a, b) in pairs)
        if isinstance(theirs, float):
            assert ours == pytest.approx(theirs, abs=self.ABSOLUTE, rel=self.RELATIVE), path
        else:
            assert ours == theirs, path
        return 1

    def test_it_is_whole(self) -> None:
        (path,) = (DATA / "evaluate").rglob("*.json")
        record = read_record(path)
        assert record["status"] == "done" and record["about"]["device"] != ""
