"""Training on several ranks: real processes under torchrun, over loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fgai
from fgai.errors import InputError, RanksError
from fgai.large import Batches, NeighbourSampler, StoredGraph, evaluate_store, write_store
from fgai.large.processes import _take_own_gpu, process_group
from fgai.processes import ProcessGroup, current
from fgai.training import history_of, load_model
from support.graph_cases import small_data
from support.rank_work import MODELS, SHORT, passes, small_blocks
from support.training_cases import Calling, assert_same_weights

WORK = Path(__file__).parents[1] / "support" / "rank_work.py"
STEPS_OF_AN_EPOCH = 3
"""Of the training that is killed: twelve training nodes, in batches of two, on two ranks."""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
SCENES: dict[str, Any] = {"name": "scenes", "work": "scenes"}
COMMANDS: dict[str, Any] = {"name": "commands", "work": "commands"}
SINGLE: dict[str, Any] = {"name": "single", "work": "single", "how": {"ranks": 1}}


def killed(name: str, *moments: list[float], restarts: int = 3) -> dict[str, Any]:
    """A job whose ranks are killed: which one, in which step, how many seconds later; one in each life."""
    return {"name": name, "work": "killed", "given": [moments], "how": {"restarts": restarts}}


# In the fourth epoch nothing is saved yet; in the seventh a training goes on from the fifth.
RESTARTED = killed("restarted", [1, 10, 0], [0, 6 * STEPS_OF_AN_EPOCH + 2, 0])
ENDED = killed("ended", [1, 4, 0], restarts=0)


def run(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with one thread and on the CPU if nothing else is said."""
    quiet = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **quiet, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class Scenes:
    """What two ranks left behind."""

    def __init__(self, stored: StoredGraph, folder: Path) -> None:
        self.stored, self.jobs = stored, folder
        self.launch(SCENES, SINGLE, COMMANDS, RESTARTED, ENDED)
        self.folder = folder / "scenes"
        assert self.failed(SCENES) == ""
        self.found = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(2)]

    def launch(self, *jobs: dict[str, Any]) -> None:
        """Let one process launch jobs, see `rank_work`."""
        done = run(WORK, self.stored.path, self.jobs, json.dumps(jobs))
        assert done.returncode == 0, done.stderr

    def failed(self, job: dict[str, Any]) -> str:
        """What the launcher said of a job that did not end well."""
        return (self.jobs / job["name"] / "failed.txt").read_text()

    def of(self, name: str) -> list[Any]:
        """What both ranks found."""
        return [found[name] for found in self.found]

    def model(self, name: str, rank: int = 0) -> torch.nn.Module:
        return load_model(self.folder / f"{name}-{rank}.safetensors")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    folder = tmp_path_factory.mktemp("ranks")
    return Scenes(write_store(small_data(nodes=90, width=7), folder / "graph"), folder)


class TestTogether:
    def test_all_ranks_are_there_inside_the_block_alone(self, scenes: Scenes) -> None:
        assert scenes.of("size") == [2, 2] and scenes.of("after") == [1, 1]

    # Twelve nodes in batches of four: in the second step the second rank has none. Of seven: it has five.
    @pytest.mark.parametrize(("name", "size"), [("vanilla", 4), ("uneven", 7)])
    def test_two_ranks_take_the_steps_of_one_with_batches_twice_as_large(
        self, name: str, size: int, scenes: Scenes
    ) -> None:
        one = fgai.train("GAT", scenes.stored, batch_size=2 * size, fan_out=-1, **SHORT)
        two = scenes.model(name)
        mine, theirs = history_of(one), history_of(two)
        assert [terms["total"] for terms in theirs.terms] == pytest.approx(
            [terms["total"] for terms in mine.terms], rel=1e-5
        )
        assert [score for _, score in theirs.scores] == pytest.approx(
            [score for _, score in mine.scores], abs=1e-5
        )
        assert mine.terms[0]["total"] > 1.01 * mine.terms[-1]["total"]
        for name, value in one.state_dict().items():
            torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("name", ["vanilla", "faithful", "long"])
    def test_ranks_have_the_same_weights_bit_by_bit(self, name: str, scenes: Scenes) -> None:
        first, second = (scenes.model(name, rank) for rank in range(2))
        assert_same_weights(first, second)
        assert history_of(first).terms == history_of(second).terms
        assert history_of(first).scores == history_of(second).scores

    def test_a_group_of_one_trains_as_no_group_does(self, scenes: Scenes) -> None:
        assert scenes.failed(SINGLE) == ""
        one = fgai.train("GAT", scenes.stored, batch_size=7, fan_out=-1, **SHORT)
        two = load_model(scenes.jobs / "single" / "model.safetensors")
        for name, value in one.state_dict().items():  # gradients are multiplied by the seeds and divided
            torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-3, atol=1e-5)

    def test_faithful_training_has_all_its_terms_and_learns(self, scenes: Scenes) -> None:
        terms = history_of(scenes.model("faithful")).terms
        assert {"closeness", "similarity", "prediction_stability"} <= terms[0].keys()
        vanilla, faithful = scenes.model("vanilla"), scenes.model("faithful")
        pairs = zip(vanilla.parameters(), faithful.parameters(), strict=True)
        assert any((one - two).abs().max() > 1e-3 for one, two in pairs)

    def test_ranks_of_one_machine_listen_on_loopback_alone(self, scenes: Scenes) -> None:
        for addresses in scenes.of("listening"):
            assert set(addresses) == {"0100007F"}  # 127.0.0.1


class TestExactPasses:
    @pytest.mark.parametrize("name", MODELS)
    def test_files_are_those_of_one_process(self, name: str, scenes: Scenes, tmp_path: Path) -> None:
        with small_blocks():
            passes(scenes.stored, tmp_path, ProcessGroup())
        wanted, found = (
            {file.name: file for file in (at / name).iterdir()} for at in (tmp_path, scenes.folder)
        )
        assert wanted.keys() == found.keys() and len(wanted) == 10
        for file, path in wanted.items():
            assert path.read_bytes() == found[file].read_bytes(), file

    @pytest.mark.filterwarnings(r"ignore:\[(flat|weak)-attention\]")
    def test_an_evaluation_is_that_of_one_process(self, scenes: Scenes) -> None:
        with small_blocks():
            model, vanilla = scenes.model("faithful"), scenes.model("vanilla")
            wanted = evaluate_store(model, scenes.stored, vanilla=vanilla).to_dict()
        assert scenes.of("evaluation") == [wanted, wanted]

    def test_other_settings_on_one_rank_are_refused(self, scenes: Scenes) -> None:
        for said in scenes.of("k"):
            assert said.startswith("RanksError") and "the same settings;" in said

    @pytest.mark.parametrize("size", [1, 3, 7])
    def test_ranks_share_in_order(self, size: int) -> None:
        shares = [ProcessGroup(rank, size).share(range(5)) for rank in range(size)]
        assert [item for share in shares for item in share] == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_a_folder_that_one_rank_does_not_see(self, tmp_path: Path) -> None:
        class Blind(ProcessGroup):
            def gather(self, value: Any) -> list[Any]:
                return [value, False]

        with pytest.raises(RanksError, match=r"all processes must see .*; set TMPDIR to a shared disk"):
            passes(write_store(small_data(), tmp_path / "graph"), tmp_path, Blind())
        assert [each.name for each in tmp_path.iterdir()] == ["graph"]


class TestRefused:
    def test_other_settings_on_one_rank(self, scenes: Scenes) -> None:
        for said in scenes.of("seed"):
            assert said.startswith("RanksError") and "the same settings, model;" in said

    def test_a_file_that_one_rank_lacks(self, scenes: Scenes) -> None:
        first, second = scenes.of("missing")
        assert second.startswith("DataError") and "nowhere holds no stored graph" in second
        assert first.startswith("RanksError: rank 1 failed:") and "nowhere holds no stored graph" in first

    def test_a_tracker_that_fails_on_the_rank_that_has_it(self, scenes: Scenes) -> None:
        assert scenes.of("halted") == ["no space left", "RanksError: rank 0 failed: no space left"]

    def test_training_on_the_whole_graph(self, scenes: Scenes) -> None:
        for said in scenes.of("whole"):
            assert said.startswith("InputError") and "give `batch_size`" in said

    def test_batch_norm(self, scenes: Scenes) -> None:
        for said in scenes.of("norm"):
            assert said.startswith("InputError") and 'norm="layer"' in said


class TestResume:
    def test_one_rank_goes_on_with_what_two_have_saved(self, scenes: Scenes) -> None:
        told: list[int] = []
        tracker = Calling(lambda epoch, _: told.append(epoch))
        place = scenes.folder / "halted"
        settings = {**SHORT, "batch_size": 4, "fan_out": -1, "checkpoint": place, "tracker": tracker}
        model = fgai.train("GAT", scenes.stored, **settings)
        assert told == [2, 3]
        assert history_of(model).terms[:2] == history_of(scenes.model("vanilla")).terms[:2]

    def lives(self, scenes: Scenes, job: dict[str, Any]) -> list[int]:
        """How often a killed training was begun anew, and the steps of its last life, which ended well."""
        assert scenes.failed(job) == ""
        place = scenes.jobs / job["name"]
        assert_same_weights(load_model(place / "killed.safetensors"), scenes.model("long"))
        return json.loads((place / "lives.json").read_text())

    def test_killed_ranks_are_started_again_to_the_same_end(self, scenes: Scenes) -> None:
        assert self.lives(scenes, RESTARTED) == [2, 3 * STEPS_OF_AN_EPOCH]

    @pytest.mark.slow
    def test_killed_at_ten_random_moments(self, scenes: Scenes) -> None:
        jobs = []
        for number in range(10):
            draw = Random(number)
            moment = [draw.randrange(2), draw.randint(1, 7 * STEPS_OF_AN_EPOCH), draw.random() / 50]
            jobs.append(killed(f"killed {number}", moment))
        scenes.launch(*jobs)
        assert [self.lives(scenes, job)[0] for job in jobs] == [1] * 10

    def test_without_restarts_the_job_ends_and_says_who_was_killed(self, scenes: Scenes) -> None:
        said = scenes.failed(ENDED)
        assert "Signal 9 (SIGKILL)" in said and "rank      : 1" in said
        assert not (scenes.jobs / "ended" / "killed.safetensors").exists()


class TestCommands:
    def test_an_evaluation_is_printed_once_and_attacks_are_refused(self, scenes: Scenes) -> None:
        assert scenes.failed(COMMANDS) == ""
        first, second = (
            json.loads((scenes.jobs / "commands" / f"{rank}.json").read_text()) for rank in range(2)
        )
        said = json.loads(first["stored"])
        assert said["command"] == "evaluate" and said["f1"].keys() == {"train", "val", "test"}
        assert second["stored"] == ""
        for found in (first, second):
            assert "an attack runs in one process: leave torchrun out" in found["attack"]

    def test_the_first_rank_alone_writes_and_prints(self, scenes: Scenes) -> None:
        folder = scenes.jobs / "commands"
        first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
        assert json.loads(first["train"])["epochs"] == 2 and first["notes"].count("training GAT") == 1
        assert second["train"] == "" and "training GAT" not in second["notes"]
        files = sorted(each.name for each in (folder / "trained").iterdir())
        assert files == ["log.csv", "model.safetensors"]
        assert len((folder / "trained" / "log.csv").read_text().splitlines()) == 3

    @pytest.mark.slow
    def test_so_it_does_under_torchrun(self, scenes: Scenes, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        words = ["train", "--data", scenes.stored.path, "--output", path, "--epochs", 2, "--json"]
        torchrun = (*TORCHRUN, "--nproc-per-node=2", "-m", "--", "fgai")
        done = run(*torchrun, *words, "--batch-size", 4, "--log", tmp_path / "log.csv")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["epochs"] == 2 and done.stderr.count("training GAT") == 1
        assert sorted(each.name for each in tmp_path.iterdir()) == ["log.csv", "model.safetensors"]
        assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


class FakeRanks(ProcessGroup):
    """One of some ranks whose GPUs are known."""

    def __init__(self, rank: int, gpus: list[str | None]) -> None:
        super().__init__(rank, len(gpus))
        self.gpus = gpus

    def gather(self, value: Any) -> list[Any]:
        assert value == self.gpus[self.rank]
        return self.gpus


class TestPlaces:
    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """A machine with two GPUs, called a and b, and which of them was made the current one."""
        found: list[int] = []
        named = [SimpleNamespace(uuid=name) for name in "ab"]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: named[index])
        monkeypatch.setattr(torch.cuda, "set_device", found.append)
        return found

    def take(self, rank: int, gpus: list[str | None], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        _take_own_gpu(FakeRanks(rank, gpus), torch.device(device))

    def test_every_rank_takes_its_own(self, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        for rank in range(2):
            self.take(rank, ["a", "b"], "cuda", monkeypatch)
        self.take(0, ["b"], "cuda:1", monkeypatch)
        assert taken == [0, 1, 1]

    @pytest.mark.parametrize(
        ("gpus", "device"), [(["a", "b", None], "cuda"), (["b", "b"], "cuda:1"), ([None, None], "cuda:5")]
    )
    def test_too_few_are_refused_on_all_ranks(
        self, gpus: list[str | None], device: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for rank in range(len(gpus)):
            with pytest.raises(RanksError, match=r"needs a GPU of its own, this machine has 2"):
                self.take(rank, gpus, device, monkeypatch)
        assert taken == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheDevice:
    def train(self, scenes: Scenes, folder: Path, *before: object, **env: str) -> tuple[str, Path]:
        """Train by the command line on the first GPU; return what was said on the way, and the model."""
        path = folder / "model.safetensors"
        words = ["fgai", "train", "--data", scenes.stored.path, "--output", path, "--epochs", 4]
        sizes = ["--batch-size", 8, "--fan-out=-1", "--set", "dropout=0.0", "--set", "attention_dropout=0.0"]
        done = run(*before, "-m", *words, *sizes, "--device", "cuda", CUDA_VISIBLE_DEVICES="0", **env)
        return done.stdout + done.stderr, path

    def test_one_rank_with_nccl_trains_as_without(self, scenes: Scenes, tmp_path: Path) -> None:
        (tmp_path / "plain").mkdir()
        (tmp_path / "ranks").mkdir()
        log = tmp_path / "nccl.txt"
        said, plain = self.train(scenes, tmp_path / "plain")
        assert plain.exists(), said
        torchrun = (*TORCHRUN, "--nproc-per-node=1")
        env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        said, shared = self.train(scenes, tmp_path / "ranks", *torchrun, **env)
        assert shared.exists(), said
        assert "NCCL" in log.read_text()
        one, two = (load_model(path) for path in (plain, shared))
        for name, value in one.state_dict().items():
            torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-3, atol=1e-5)

    def test_two_ranks_on_one_gpu_are_refused_and_do_not_hang(self, scenes: Scenes, tmp_path: Path) -> None:
        said, path = self.train(scenes, tmp_path, *TORCHRUN, "--nproc-per-node=2")
        assert not path.exists() and "needs a GPU of its own" in said


class TestAlone:
    def test_without_torchrun_nothing_is_joined(self) -> None:
        with process_group() as ranks:
            assert (ranks.rank, ranks.size, ranks.is_main, ranks.is_distributed) == (0, 1, True, False)
            assert current() is ranks and not torch.distributed.is_initialized()
            assert ranks.gather(3) == [3] and ranks.broadcast("a") == "a" and not ranks.any(False)
            ranks.require_equal({"settings": 1})

    def test_a_timeout_is_positive(self) -> None:
        with pytest.raises(InputError, match="`timeout` must be above 0"), process_group(timeout=0):
            pass

    def test_a_rank_takes_the_gpu_of_its_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "3")
        second = ProcessGroup(7, 8)
        assert second.local_device(torch.device("cuda")) == torch.device("cuda", 3)
        assert second.local_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
        assert second.local_device(torch.device("cpu")) == torch.device("cpu")
        assert ProcessGroup().local_device(torch.device("cuda")) == torch.device("cuda")

    @pytest.mark.parametrize("ranks", [2, 3, 20])
    def test_batches_of_all_ranks_are_those_of_one(self, ranks: int) -> None:
        data = small_data(nodes=31)
        sampler = NeighbourSampler(data, [3, 2], seed=4)
        wanted = [batch.nodes for batch in Batches(data, sampler, batch_size=4)]
        shared = [Batches(data, sampler, batch_size=4, rank=rank, world_size=ranks) for rank in range(ranks)]
        found: list[torch.Tensor | None] = [None] * len(wanted)
        for rank, batches in enumerate(shared):
            nodes = [batch.nodes for batch in batches]
            assert len(nodes) == len(batches)
            found[rank::ranks] = nodes
        for one, two in zip(found, wanted, strict=True):
            assert one is not None and torch.equal(one, two)

    def test_ranks_are_counted_from_zero(self) -> None:
        data = small_data()
        sampler = NeighbourSampler(data, [2])
        with pytest.raises(InputError, match="`rank` must be at least 0, at most 1"):
            Batches(data, sampler, rank=2, world_size=2)
