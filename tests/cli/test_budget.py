"""`--nodes` and `--edges`: commands that choose a threat take a budget that fits a graph of 34 nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fgai
from fgai.attacks import DEFAULT, THREATS
from fgai.datasets import Source, register_dataset
from support.attack_cases import quiet
from support.cli_cases import commands, here, refused
from support.dataset_cases import about, unregister
from support.graph_cases import small_data

SIZES = ("--nodes", 2, "--edges", 3)
COMMANDS: dict[str, tuple[object, ...]] = {
    "attack": ("club.safetensors",),
    "evaluate": ("club.safetensors", "--no-curves"),
    "compare": ("club.safetensors", "B=club.safetensors", "--no-curves"),
    "explain": ("club.safetensors", "--node", 1),
    "report": ("club.safetensors", "-o", "club.html"),
}


@pytest.fixture(scope="module")
def club(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model of a graph as small as Zachary's: 34 nodes, 12 of them to be tested."""
    folder = tmp_path_factory.mktemp("club")
    graph = small_data(nodes=34)
    register_dataset(about(graph, "club", splits=("public",)), Source(make=lambda: graph))
    small = ("--set", "hidden_channels=2", "--set", "heads=2", "--epochs", 2, "-o", "club.safetensors")
    assert here("train", "--data", "club", *small, cwd=folder).exit_code == 0
    yield folder
    unregister("club")


def run(command: str, *words: object, cwd: Path) -> dict[str, Any]:
    done = here(command, *COMMANDS[command], *words, "--json", cwd=cwd)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_wherever_a_threat_is_chosen_it_can_be_sized() -> None:
    flags = {
        name: {flag for option in command.params for flag in option.opts}
        for name, command in commands().items()
    }
    chosen = {name for name, known in flags.items() if "--threat" in known}
    assert chosen - {"audit", "bench figure"} == set(COMMANDS)  # whose budget its own tests size
    sized = chosen - {"bench figure"}
    assert all({"--nodes", "--edges", "--box"} <= flags[name] for name in sized)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_budget_that_does_not_fit_is_refused_and_the_flag_named(club: Path, command: str) -> None:
    told = refused(command, *COMMANDS[command], cwd=club)
    assert "`--edges` must be at most 12, the number of test nodes to join, got 20" in told
    assert told.rstrip().endswith("lower `--edges`")
    assert "lower `--edges`" in refused(command, *COMMANDS[command], "--edges", 35, cwd=club)


@pytest.mark.parametrize("flag", ["--nodes", "--edges"])
@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_numbers_that_are_none_are_refused(club: Path, flag: str, count: float) -> None:
    """By one command: all have the same group of options."""
    assert flag in refused("attack", *COMMANDS["attack"], flag, count, cwd=club)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_threat_does_not_add_cannot_be_sized(club: Path, command: str) -> None:
    told = refused(command, *COMMANDS[command], "-t", "edges", "--nodes", 2, cwd=club)
    assert "the threat 'edges' has no `--nodes` to change; leave it out" in told


@pytest.mark.parametrize("box", ["1", "1,0", "1,1", "0,1,2", "a,b", "nan,1", "0,inf"])
def test_a_box_that_is_none_is_refused(club: Path, box: str) -> None:
    told = refused("attack", *COMMANDS["attack"], "--box", box, cwd=club)
    assert f"`--box` takes two numbers, the smaller first, like -1,1, got '{box}'" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_a_threat_without_features_has_no_box(club: Path, command: str) -> None:
    told = refused(command, *COMMANDS[command], "-t", "edges", "--box", "0,1", cwd=club)
    assert "the threat 'edges' changes no features; leave `--box` out" in told


class TestTheSameAsInPython:
    def test_attack(self, club: Path) -> None:
        budget = run("attack", *SIZES, cwd=club)["budget"]
        steps = THREATS[DEFAULT].budget.steps
        assert (budget["nodes"], budget["edges"], budget["steps"], budget["box"]) == (2, 3, steps, None)

    @pytest.mark.many
    @pytest.mark.parametrize("words", [("--box", "-3,4"), ("--box=-3,4",)])
    def test_a_box(self, club: Path, words: tuple[str, ...]) -> None:
        assert run("attack", *SIZES, *words, cwd=club)["budget"]["box"] == [-3.0, 4.0]
        assert run("evaluate", *SIZES, *words, cwd=club)["threat"]["budget"]["box"] == [-3.0, 4.0]

    def test_evaluate(self, club: Path) -> None:
        model, data = fgai.load_model(club / "club.safetensors"), fgai.load_dataset("club")
        with quiet():
            record = fgai.evaluate(model, data, nodes=2, edges=3, curves=False)
        told = run("evaluate", *SIZES, cwd=club)
        assert told["threat"] == record.to_dict()["threat"] and told["metrics"] == record.to_dict()["metrics"]

    def test_one_of_the_two(self, club: Path) -> None:
        budget = run("evaluate", "--edges", 4, cwd=club)["threat"]["budget"]
        assert (budget["nodes"], budget["edges"]) == (20, 4)
        budget = run("evaluate", "-t", "edges", "--edges", 4, cwd=club)["threat"]["budget"]
        assert (budget["nodes"], budget["edges"]) == (0, 4)

    def test_compare(self, club: Path) -> None:
        for record in run("compare", *SIZES, cwd=club)["records"]:
            assert (record["threat"]["budget"]["nodes"], record["threat"]["budget"]["edges"]) == (2, 3)

    def test_explain(self, club: Path) -> None:
        model, data = fgai.load_model(club / "club.safetensors"), fgai.load_dataset("club")
        found = run("explain", "--nodes", 5, "--edges", 9, cwd=club)
        assert found["attacked"] == fgai.explain(model, data, 1, nodes=5, edges=9).to_dict()["attacked"]
        assert found["attacked"]["threat"] == "standard" and found["attacked"]["new_neighbours"] > 0

    def test_report_says_how_to_get_it_again(self, club: Path) -> None:
        document = json.loads((club / run("report", *SIZES, "--box=-3,4", cwd=club)["document"]).read_text())
        budget = document["records"][0]["threat"]["budget"]
        assert (budget["edges"], budget["box"]) == (3, [-3.0, 4.0])
        assert "--threat ensemble-short --nodes 2 --edges 3 --box -3,4 --k 5" in document["reproduce"][-1]


def test_faithful_training_has_a_budget_too(club: Path) -> None:
    words = ("faithful", "club.safetensors", "--epochs", 1, "-o", "faithful.safetensors")
    done = here(*words, *SIZES, "--json", cwd=club)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["settings"] == {"epochs": 1, "nodes": 2, "edges": 3}
    done = here(*words, *SIZES, "--box", "-3,4", "--json", "--force", cwd=club)
    assert done.exit_code == 0 and json.loads(done.stdout)["settings"]["box"] == [-3.0, 4.0]


def test_adversarial_training_has_a_box_and_others_have_none(club: Path) -> None:
    words = ("train", "--data", "club", "--epochs", 1, "--box", "-3,4", "-o", "at.safetensors", "-q")
    told = refused(*words, cwd=club)
    assert "`--box` is for methods that train with an adversary; vanilla has none" in told
    done = here(*words, "--method", "at", "--set", "edges=3", "--json", cwd=club)
    assert done.exit_code == 0 and json.loads(done.stdout)["settings"]["box"] == [-3.0, 4.0]


def test_a_breaking_point_searches_the_nodes_itself(club: Path) -> None:
    found = run("attack", "--breaking-point", 0.9, "--max-nodes", 2, "--edges", 3, cwd=club)
    assert found["breaking_point"]["edges"] == 3
    told = refused("attack", "club.safetensors", "--breaking-point", 0.9, "--nodes", 2, cwd=club)
    assert "`--breaking-point` searches `--nodes`" in told


def test_no_attack_has_no_size(club: Path) -> None:
    told = refused("explain", "club.safetensors", "--node", 1, "-t", "none", "--edges", 3, cwd=club)
    assert "`--threat none` is none; leave them out" in told
