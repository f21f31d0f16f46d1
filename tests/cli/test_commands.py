"""The command line: every command through a real subprocess, and many small cases in this process.

A subprocess spends seconds on imports, so only what needs one gets one: clean streams, exit codes,
interrupts, terminals.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fgai as root
from fgai.attacks import THREATS
from fgai.errors import InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.models import MODELS
from fgai.objectives import OBJECTIVES
from fgai.training import METHODS, load_model, read_header, untrained_model
from support.cli_cases import answer, commands, fgai, here, processes, refused

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model and the faithful one."""
    folder = tmp_path_factory.mktemp("cli")
    made = answer("train", "--epochs", 3, "-o", "gat.safetensors", cwd=folder)
    assert made["output"] == "gat.safetensors" and made["epochs"] == 3 and 0 < made["f1"]["test"] <= 1
    faithful = answer("faithful", "gat.safetensors", "--epochs", 1, "-o", "faithful.safetensors", cwd=folder)
    assert faithful["method"] == "fgai" and faithful["vanilla"] == "gat.safetensors"
    return folder


class TestModels:
    def test_files_know_their_data(self, workshop: Path) -> None:
        header = read_header(workshop / "gat.safetensors")
        assert header["about"]["dataset"] == "planted" and len(header["data_fingerprint"]) == 32
        assert type(load_model(workshop / "faithful.safetensors")).__name__ == "GAT"
        assert not list(workshop.glob("*.partial"))

    def test_words_for_people(self, tmp_path: Path) -> None:
        words = (
            "train",
            "-m",
            "GATv2",
            "--epochs",
            1,
            "--set",
            "hidden_channels=2",
            "--set",
            "heads=2",
            "-s",
            3,
        )
        done = here(*words, cwd=tmp_path)
        assert done.exit_code == 0, done.stderr
        assert done.stdout.startswith("F1: train ") and "vanilla-gatv2-planted.safetensors" in done.stdout
        assert done.stderr.startswith("training GATv2 (vanilla) on Graph('planted'")
        header = read_header(tmp_path / "vanilla-gatv2-planted.safetensors")
        assert header["config"]["hidden_channels"] == 2 and header["about"]["split_seed"] == 3

    def test_early_stopping_and_the_kept_epoch_are_told(self, tmp_path: Path) -> None:
        small = ("--set", "hidden_channels=2", "--set", "heads=2", "--set", "patience=2")
        told = here("train", "--epochs", 60, *small, cwd=tmp_path).stdout
        found = re.search(r"(\d+) epochs in .*, stopped early, no better .* for 2 epochs .*epoch (\d+)", told)
        assert found and int(found[1]) == int(found[2]) + 2 < 60
        again = json.loads(
            here("train", "--epochs", 60, *small, "--json", "-q", "--force", cwd=tmp_path).stdout
        )
        assert again["kept_epoch"] == int(found[2]) and "best_epoch" not in again

    def test_same_seed_same_file(self, workshop: Path, tmp_path: Path) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the subprocess had; sums are rounded otherwise on more
        done = here("train", "--epochs", 3, "-o", "again.safetensors", "--quiet", "--json", cwd=tmp_path)
        torch.set_num_threads(threads)
        assert done.exit_code == 0 and done.stderr == ""
        first, second = load_model(workshop / "gat.safetensors"), load_model(tmp_path / "again.safetensors")
        for name, value in first.state_dict().items():
            assert value.equal(second.state_dict()[name]), name


class TestSameAsPython:
    """The same call gives the same model in Python and in the shell."""

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums are rounded otherwise on more
        yield
        torch.set_num_threads(threads)

    @pytest.mark.many
    @pytest.mark.parametrize(
        ("model", "task"),
        [
            ("GAT", "link"),
            ("GT", None),
            *(pytest.param(*each, marks=SLOW) for each in (("GAT", None), ("GT", "link"))),
        ],
    )
    def test_train_and_faithful(self, model: str, task: str | None, tmp_path: Path) -> None:
        chosen = () if task is None else ("--task", task)
        words = ("train", "-m", model, *chosen, "--epochs", 2, "--set", "heads=2", "-s", 3, "-o", "one")
        if model == "GT":
            words = (*words, "--set", "hidden_channels=16", "--set", "heads=[2,1]")
        assert here(*words, cwd=tmp_path).exit_code == 0
        sizes = {"heads": 2} if model == "GAT" else {"hidden_channels": 16, "heads": (2, 1)}
        data = root.load_dataset("planted", seed=3, task=task)
        trained = root.train(model, data, seed=3, epochs=2, progress=False, **sizes)
        assert_same(load_model(tmp_path / "one.safetensors"), trained)
        few = ("--epochs", 2, "--set", "nodes=2", "-s", 4, "-o", "two")
        assert here("faithful", "one.safetensors", *few, cwd=tmp_path).exit_code == 0
        faithful = root.make_faithful(trained, data, seed=4, epochs=2, nodes=2, progress=False)
        assert_same(load_model(tmp_path / "two.safetensors"), faithful)
        assert here("harden", "one.safetensors", *few[:-1], "three", cwd=tmp_path).exit_code == 0
        hardened = root.harden(trained, data, seed=4, epochs=2, nodes=2, progress=False)
        assert_same(load_model(tmp_path / "three.safetensors"), hardened)

    def test_limits(self, workshop: Path, tmp_path: Path) -> None:
        words = ("limit", workshop / "gat.safetensors", "--shrink", 0.1, "-o", tmp_path / "soft.safetensors")
        said = json.loads(here(*words, "--json", "-q", cwd=tmp_path).stdout)
        assert said["clipped"] > 0 and said["f1"].keys() == said["f1_before"].keys()
        model = load_model(workshop / "gat.safetensors")
        expected = root.limit(model, root.load_dataset("planted"), shrink=0.1)
        assert_same(load_model(tmp_path / "soft.safetensors"), expected)
        whole = ("--clip-share", 0, "--shrink", 0)
        plain = here("limit", workshop / "gat.safetensors", *whole, "-o", "same.safetensors", cwd=tmp_path)
        assert plain.exit_code == 0 and "\n0 of " in plain.stdout
        assert "`--clip-share` must be a number" in refused(
            "limit", workshop / "gat.safetensors", "--clip-share", "much", cwd=tmp_path
        )

    def test_an_existing_model_trains_alike(self, workshop: Path) -> None:
        data = root.load_dataset("planted")
        model = root.train(untrained_model("GAT", data), data, epochs=3, progress=False)
        assert_same(load_model(workshop / "gat.safetensors"), model)

    def test_settings_a_method_does_not_take(self, tmp_path: Path) -> None:
        said = refused("train", "--method", "at", "--set", "dropout=0.3", cwd=tmp_path)
        assert "`--set` must be one of" in said and "nodes" in said


def assert_same(first: torch.nn.Module, second: torch.nn.Module) -> None:
    one, two = first.state_dict(), second.state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.equal(two[name]), name


class TestHelp:
    """What can be chosen is listed from where it is registered."""

    @pytest.mark.parametrize(
        ("command", "option", "names"),
        [
            ("attack", "--threat", THREATS),
            ("report", "--threat", THREATS),
            ("attack", "--objective", OBJECTIVES),
            ("train", "--model", MODELS),
            ("train", "--method", METHODS),
        ],
    )
    def test_every_choice_is_listed(self, command: str, option: str, names: Iterable[str]) -> None:
        parameters = commands()[command].params
        (text,) = (found.help for found in parameters if option in found.opts)
        assert set(names) <= set(re.findall(r"[\w-]+", text))


class TestJudging:
    def test_attack(self, workshop: Path) -> None:
        found = answer("attack", "gat.safetensors", "--threat", "random", "-o", "attack.json", cwd=workshop)
        assert found["f1"].keys() == {"clean", "attacked"} and found["ledger"]["forwards"] >= 1
        assert json.loads((workshop / "attack.json").read_text()) == found

    def test_evaluate(self, workshop: Path) -> None:
        words = (
            "evaluate",
            "faithful.safetensors",
            "--vanilla",
            "gat.safetensors",
            "-t",
            "random",
            "--no-curves",
        )
        found = answer(*words, "--no-nulls", "-o", "record.json", cwd=workshop)
        record = EvaluationRecord.from_dict(found)
        assert record.value("similarity.overlap.all") > 0.3
        assert EvaluationRecord.load(workshop / "record.json").metrics == record.metrics

    def test_compare(self, workshop: Path) -> None:
        words = (
            "compare",
            "GAT=gat.safetensors",
            "faithful.safetensors",
            "-t",
            "random",
            "--no-curves",
            "--no-nulls",
        )
        found = Comparison.from_dict(answer(*words, cwd=workshop))
        assert [record.name for record in found] == ["GAT", "faithful"] and found.reference == "GAT"
        done = here(*words, "--format", "markdown", cwd=workshop)
        assert done.stdout.count("| GAT |") == 2 and "|---|" in done.stdout
        assert "| all four ↑ |" in done.stdout
        for name in ("GAT", "faithful"):
            assert f"{name}, Definition 1 at the output layer, radius 0.01, of " in done.stdout

    def test_certify(self, workshop: Path) -> None:
        found = answer("certify", "gat.safetensors", "--radius", 0.02, "-o", "proof.json", cwd=workshop)
        assert found["kind"] == "certificate" and found["radius"] == 0.02
        assert not [name for name in found if name != name.lower()]
        assert (workshop / "proof.json").stat().st_size > 1000
        assert found["summary"]["layers"][-1]["definition"]["all_four"] is None
        words = ("certify", "faithful.safetensors", "--vanilla", "gat.safetensors", "--radius", 0.02)
        found = answer(*words, cwd=workshop)
        last = found["summary"]["layers"][-1]
        assert None not in last["definition"].values() and (found["alpha"], found["beta"]) == (0.1, 0.8)
        shown = " ".join(here(*words, cwd=workshop).stdout.split())
        assert all(" ".join(text.split()) in shown for text in last["sentences"])

    def test_explain(self, workshop: Path) -> None:
        words = ("explain", "gat.safetensors", "--node", 24, "--threat", "random")
        found = answer(*words, "-o", "node.png", cwd=workshop)
        assert sum(entry["attention"] for entry in found["neighbours"]) == pytest.approx(1.0, abs=1e-4)
        assert 0 <= found["attacked"]["overlap"] <= 1 and len(found["certified"]["layers"]) == 2
        assert (workshop / "node.png").read_bytes().startswith(b"\x89PNG")
        shown = here(*words, cwd=workshop).stdout
        assert shown.startswith("node 24 of planted: class") and "of the top 5 stay" in shown
        assert "same explanation: not measured; stable explanation:" in " ".join(shown.split())
        compared = ("explain", "faithful.safetensors", "--node", 24, "-t", "none", "--vanilla")
        found = answer(*compared, "gat.safetensors", cwd=workshop)
        assert found["certified"]["compared"]
        for layer in found["certified"]["layers"]:
            assert set(layer["properties"].values()) <= {True, False} and len(layer["properties"]) == 4

    def test_models_of_different_splits_are_not_compared(self, workshop: Path) -> None:
        assert here("train", "--epochs", 1, "--seed", 1, "-o", "other", cwd=workshop).exit_code == 0
        said = refused("compare", "gat.safetensors", "other.safetensors", cwd=workshop)
        assert "different data or splits" in said
        assert "two models are called" in refused(
            "compare", "gat.safetensors", "gat.safetensors", cwd=workshop
        )


class TestAround:
    def test_data(self, tmp_path: Path) -> None:
        listed = answer("data", "list", cwd=tmp_path)["datasets"]
        assert listed[0]["name"] == "planted" and listed[0]["where"] == "built in" and len(listed) == 14
        assert json.loads(here("data", "info", "cora", "--json", cwd=tmp_path).stdout)["num_nodes"] == 2708
        assert "Cora" in here("data", "info", "cora", cwd=tmp_path).stdout

    def test_doctor(self, tmp_path: Path) -> None:
        found = answer("doctor", cwd=tmp_path)
        assert found["good"] and all(check["good"] for check in found["checks"].values())
        assert found["packages"]["torch"]

    @pytest.mark.many
    def test_kernels_can_be_compiled_ahead(self, tmp_path: Path) -> None:
        found = answer("doctor", "--compile", cwd=tmp_path)
        assert found["checks"]["compiled"]["good"], found["checks"]["compiled"]["said"]

    def test_demo_says_first_what_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        monkeypatch.setattr("fgai.cli.report.train_method", Mock(side_effect=InputError("far enough")))
        told = refused("demo", "-o", "out", cwd=tmp_path)
        assert told.index("pip install 'fgai[report]'") < told.index("1/4") < told.index("far enough")

    def test_version_and_bare_call(self, tmp_path: Path) -> None:
        assert here("--version", cwd=tmp_path).stdout.startswith("fgai 0.")
        assert "Start with: fgai demo" in here(cwd=tmp_path).output


class TestRefused:
    CASES = (
        (("train", "--data", "corra"), "did you mean 'cora'?"),
        (("train", "--model", "GIN"), "`--model` must be one of GAT"),
        (("train", "--method", "magic"), "`--method` must be one of"),
        (("train", "--set", "drpout=1"), "did you mean 'dropout'?"),
        (("train", "--set", "dropout"), "NAME=VALUE"),
        (("train", "--epochs", "0"), "--epochs"),
        (("train", "--lr", "-1"), "`--lr` must be above 0"),
        (("train", "--wings"), "No such option"),
        (("train", "--root", "nowhere", "-d", "cora"), "which is not a folder"),
        (("data", "info", "corra"), "did you mean 'cora'?"),
        (("fly",), "No such command"),
        (("evaluate",), "give the file of a model"),
        (("evaluate", "missing.safetensors"), "no checkpoint at missing.safetensors"),
        (("faithful", "."), "damaged or not a safetensors file"),
        (("explain", "missing.safetensors"), "--node"),
    )

    @pytest.mark.parametrize(
        ("words", "message"), CASES, ids=lambda v: " ".join(v) if isinstance(v, tuple) else ""
    )
    def test_bad_arguments(self, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
        said = " ".join(refused(*words, cwd=tmp_path).replace("│", " ").split())
        assert message in said
        assert list(tmp_path.iterdir()) == []

    def test_bad_choices_with_a_good_model(self, workshop: Path) -> None:
        for words, message in (
            (("evaluate", "gat.safetensors", "--threat", "stron"), "did you mean 'strong'?"),
            (("attack", "gat.safetensors", "--objective", "mood"), "`--objective` must be one of"),
            (("certify", "gat.safetensors", "--radius", "-1"), "`--radius` must be at least 0"),
            (("certify", "gat.safetensors", "--norm", "l3"), "`--norm` must be one of"),
            (("explain", "gat.safetensors", "--node", "2000", "-t", "none"), "its nodes are 0 to 1999"),
            (("explain", "gat.safetensors", "--node", "1", "--layer", "first"), "`--layer` must be one of"),
        ):
            assert message in refused(*words, cwd=workshop)

    def test_damaged_and_foreign_models(self, workshop: Path) -> None:
        whole = (workshop / "gat.safetensors").read_bytes()
        (workshop / "cut.safetensors").write_bytes(whole[:-100])
        (workshop / "text.safetensors").write_text("a letter to the editor")
        assert "truncated" in refused("certify", "cut.safetensors", cwd=workshop)
        assert "not a safetensors file" in refused("attack", "text.safetensors", cwd=workshop)

    def test_unwritable_output_is_noticed_before_the_work(self, workshop: Path) -> None:
        (workshop / "file").write_text("")
        for words in (
            ("train", "--epochs", 100000, "-o", "file/model.safetensors"),
            ("demo", "--epochs", 100000, "-o", "file/demo"),
            ("evaluate", "gat.safetensors", "-o", "file/record.json"),
            ("faithful", "gat.safetensors", "--epochs", 100000, "-o", "file/faithful.safetensors"),
        ):
            assert "cannot write" in refused(*words, cwd=workshop)
        (workshop / "folder").mkdir()
        assert "it is a folder" in refused("certify", "gat.safetensors", "-o", "folder", cwd=workshop)

    def test_errors_as_json(self, tmp_path: Path) -> None:
        done = fgai("train", "--data", "corra", "--json", cwd=tmp_path)
        error = json.loads(done.out)["error"]
        assert done.code == error["exit_code"] == 2
        assert done.err == f"error: {error['message']}\n"
        assert error["type"] == "DataError" and "corra" in error["message"]

    def test_failures_hide_the_traceback_unless_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        words = ("train", "--epochs", 1)

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("fgai.cli.train.train_method", broken)
        done = here(*words, cwd=tmp_path)
        assert done.exit_code == 1 and "Traceback" not in done.stderr and "Please report it" in done.stderr
        monkeypatch.setenv("FGAI_DEBUG", "1")
        assert "Traceback" in here(*words, cwd=tmp_path).stderr

    def test_missing_file_and_unknown_option_from_outside(self, tmp_path: Path) -> None:
        done = fgai("evaluate", "missing.safetensors", cwd=tmp_path)
        assert (done.code, done.out) == (2, "") and "no checkpoint" in done.err


class TestTerminal:
    def test_interrupted_training_goes_on(self, workshop: Path, tmp_path: Path) -> None:
        words = ("train", "--epochs", 30, "-o", "model.safetensors")
        state = tmp_path / "model.safetensors.partial" / "training.safetensors"
        slow = ("train", "--epochs", 100000, "-o", "model.safetensors")
        running = processes().start(*slow, cwd=tmp_path)
        deadline = time.monotonic() + 120
        while not state.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(running, signal.SIGINT)
        done = processes().finish()
        assert done.code == 130, done
        assert "run the same command again to continue" in done.err and "Traceback" not in done.err
        assert state.exists() and not (tmp_path / "model.safetensors").exists()
        refusal = here(*words, cwd=tmp_path)
        assert refusal.exit_code == 2 and "another training" in refusal.stderr

    def test_progress_only_on_a_terminal(self, tmp_path: Path) -> None:
        done = processes().on_a_terminal("train", "--epochs", 2, cwd=tmp_path)
        assert done.code == 0 and "vanilla" in done.err and "2/2" in done.err
        assert done.out and "\x1b" not in done.out

    def test_a_reader_that_leaves_early(self, tmp_path: Path) -> None:
        code = (
            "import os, sys\nfrom fgai.cli import main\nreader, writer = os.pipe()\nos.close(reader)\n"
            "os.dup2(writer, 1)\nsys.argv = ['fgai', 'data', 'list']\nmain()\n"
        )
        done = fgai("-c", code, cwd=tmp_path)
        assert done.code != 99 and "Traceback" not in done.err
