"""Every command as a process of its own: what it answers, what it refuses, and Ctrl-C.

The list of commands is read off the application, so a new one without cases here fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import Cell, Store
from fgai import card, datasets
from fgai.cli import app
from fgai.cli.files import _write_model
from fgai.training import untrained_model
from support.bench_cases import fill
from support.cli_cases import commands, here, processes
from support.cli_process import Done
from support.report_cases import comparison

FAST = ("-t", "random", "--no-curves", "--no-nulls")
LONG = ("--epochs", "100000")
Words = tuple[str, ...]

# Command → a call that works and takes a moment; None where a test elsewhere runs it, because it takes long.
GOOD: dict[str, Words | None] = {
    "demo": None,
    "explain": ("gat.safetensors", "--node", "24", "-t", "none"),
    "explore": None,
    "report": ("both.json", "--force"),
    "audit": None,
    "train": ("--epochs", "1", "-o", "new.safetensors", "--force"),
    "faithful": ("gat.safetensors", "--epochs", "1", "--set", "nodes=2", "-o", "new.safetensors", "--force"),
    "harden": ("gat.safetensors", "--epochs", "1", "--set", "nodes=2", "-o", "new.safetensors", "--force"),
    "limit": ("gat.safetensors", "--shrink", "0.1", "-o", "new.safetensors", "--force"),
    "attack": ("gat.safetensors", "-t", "random"),
    "evaluate": ("gat.safetensors", *FAST),
    "compare": ("gat.safetensors", "faithful.safetensors", *FAST),
    "certify": ("gat.safetensors",),
    "card": ("both.json", "--name", "GAT", "-o", "new.json", "--force"),
    "check": ("cards/gat.json", "--min", "f1=0"),
    "cards": ("cards", "-o", "page.html", "--force"),
    "bench run": ("grid.toml", "-r", "here"),
    "bench status": ("grid.toml", "-r", "results"),
    "bench again": None,
    "bench table": ("f1", "-r", "results"),
    "bench figure": ("f-curves", "-r", "results", "-o", "figures"),
    "bench bars": ("-r", "results"),
    "bench choose": ("-r", "results"),
    "bench pack": ("-r", "results"),
    "bench fill": ("page.md", "-r", "results"),
    "data list": (),
    "data info": ("cora",),
    "data convert": ("planted", "stored", "--force"),
    "doctor": None,
}
SLOW = ("demo", "explore", "audit", "doctor", "train", "faithful", "harden", "bench run", "bench again")
# Command → words with one bad value, and a part of what is said.
BAD: dict[str, tuple[Words, str]] = {
    "demo": (("--model", "GCM"), "`--model` must be one of"),
    "explain": (("gat.safetensors", "--node", "x"), "has no node 'x'"),
    "explore": (("gat.safetensors", "--node", "x"), "has no node 'x'"),
    "report": (("gat.safetensors", "-t", "weird"), "`--threat` must be one of"),
    "audit": (("-m", "a:b", "--data", "a.npz", "-t", "weird"), "`--threat` must be one of"),
    "train": (("--epochs", "0"), "--epochs"),
    "faithful": (("gat.safetensors", "--set", "similarity"), "NAME=VALUE"),
    "harden": (("gat.safetensors", "--set", "cut=0.1"), "`--set` must be one of"),
    "limit": (("gat.safetensors", "--clip-share", "much"), "`--clip-share` must be a number"),
    "attack": (("gat.safetensors", "--objective", "mood"), "`--objective` must be one of"),
    "evaluate": (("gat.safetensors", "-k", "0"), "--k"),
    "compare": (("gat.safetensors", "--format", "word"), "`--format` must be one of"),
    "certify": (("gat.safetensors", "--radius", "-1"), "`--radius` must be at least 0"),
    "card": (("both.json",), "`--name` must say whose card"),
    "check": (("cards/gat.json", "--min", "beauty=1"), "no quantity 'beauty'"),
    "cards": (("results",), "there is no card in results"),
    "bench run": (("grid.toml", "--shard", "6/5"), "`--shard`"),
    "bench status": (("--only", "seed=0"), "`--only` chooses among the cells of a grid"),
    "bench again": (("f-slop",), "no grid has a cell 'f-slop'"),
    "bench table": (("f-slop",), "did you mean"),
    "bench figure": (("photo",), "must be one of"),
    "bench bars": (("--format", "word"), "`--format` must be one of"),
    "bench choose": (("-r", "."), "no search records"),
    "bench pack": (("--colour",), "No such option"),
    "bench fill": ((), "Missing argument"),
    "data list": (("--colour",), "No such option"),
    "data info": (("corra",), "did you mean 'cora'?"),
    "data convert": (("planted", "new", "--undirected"), "`--undirected` are for edge lists"),
    "doctor": (("--colour",), "No such option"),
}
# Command → words that name a file or folder that is not there.
MISSING: dict[str, tuple[Words, str]] = {
    "demo": (("-d", "cora", "--root", "nowhere"), "not a folder"),
    "explain": (("nowhere", "--node", "1"), "no checkpoint at nowhere"),
    "explore": (("nowhere",), "no checkpoint at nowhere"),
    "report": (("nowhere.json", "--force"), "there is no record at nowhere.json"),
    "audit": (("-m", "a:b", "--data", "nowhere.npz"), "there is no file nowhere.npz"),
    "train": (("-d", "cora", "--root", "nowhere"), "not a folder"),
    "faithful": (("nowhere",), "no checkpoint at nowhere"),
    "harden": (("nowhere",), "no checkpoint at nowhere"),
    "limit": (("nowhere",), "no checkpoint at nowhere"),
    "attack": (("nowhere",), "no checkpoint at nowhere"),
    "evaluate": (("gat.safetensors", "--vanilla", "nowhere"), "no checkpoint at nowhere"),
    "compare": (("gat.safetensors", "nowhere"), "no checkpoint at nowhere"),
    "certify": (("gat.safetensors", "--vanilla", "nowhere"), "no checkpoint at nowhere"),
    "card": (("nowhere.json",), "there is no record at nowhere.json"),
    "check": (("nowhere.json", "--min", "f1=0"), "there is no record at nowhere.json"),
    "cards": (("nowhere",), "must be a folder of cards, got nowhere"),
    "bench run": (("nowhere.toml",), "there is no grid"),
    "bench status": (("nowhere.toml",), "there is no grid"),
    "bench again": (("5c6a81cc3bd8", "-r", "nowhere"), "no folder of records at nowhere"),
    "bench table": (("f1", "-r", "nowhere"), "no folder of records at nowhere"),
    "bench figure": (("f-curves", "-r", "nowhere"), "there are no evaluations to draw in nowhere"),
    "bench bars": (("-r", "nowhere"), "no folder of records at nowhere"),
    "bench choose": (("-r", "nowhere"), "there are no search records in nowhere"),
    "bench pack": (("-r", "nowhere"), "no folder of records at nowhere"),
    "bench fill": (("nowhere.md", "-r", "results"), "nowhere.md"),
    "data list": (("--root", "nowhere"), "not a folder"),
    "data info": (("cora", "--root", "nowhere"), "not a folder"),
    "data convert": (("nowhere.csv", "new"), "there is no file nowhere.csv"),
    "doctor": (("--root", "nowhere"), "not a folder"),
}
# Command → words that name a place below a file; it must be noticed before the work.
UNWRITABLE: dict[str, Words] = {
    "demo": (*LONG, "-o", "file/demo"),
    "explain": ("gat.safetensors", "--node", "24", "-t", "strong", "-o", "file/node.png"),
    "report": ("gat.safetensors", "-t", "strong", "-o", "file/page.html"),
    "audit": ("-m", "a:b", "--data", "a.npz", "-o", "file/page.html"),
    "train": (*LONG, "-o", "file/model.safetensors"),
    "faithful": ("gat.safetensors", *LONG, "-o", "file/model.safetensors"),
    "harden": ("gat.safetensors", *LONG, "-o", "file/model.safetensors"),
    "limit": ("gat.safetensors", "-o", "file/model.safetensors"),
    "attack": ("gat.safetensors", "-t", "strong", "-o", "file/attack.json"),
    "evaluate": ("gat.safetensors", "-t", "strong", "-o", "file/record.json"),
    "compare": ("gat.safetensors", "faithful.safetensors", "-t", "strong", "-o", "file/both.json"),
    "certify": ("gat.safetensors", "-o", "file/proof.json"),
    "card": ("both.json", "--name", "GAT", "-o", "file/card.json"),
    "cards": ("cards", "-o", "file/page.html"),
    "bench run": ("long.toml", "-r", "file/results"),
    "bench table": ("f1", "-r", "results", "-o", "file/f1.md"),
    "bench figure": ("f-curves", "-r", "results", "-o", "file/figures"),
    "bench choose": ("-r", "results", "-o", "file/presets.toml"),
    "data convert": ("planted", "file/stored"),
}
# Command → words of a long run, and what it says when it is at work.
INTERRUPTED: dict[str, tuple[Words, str]] = {
    "demo": (LONG, "1/4"),
    "explain": (("gat.safetensors", "--node", "24", "-t", "strong"), "explaining"),
    "report": (("gat.safetensors", "-t", "strong", "--force"), "comparing"),
    "train": (LONG, "training"),
    "faithful": (("gat.safetensors", *LONG), "making"),
    "harden": (("gat.safetensors", *LONG), "hardening"),
    "attack": (("gat.safetensors", "-t", "strong"), "attacking"),
    "evaluate": (("gat.safetensors", "-t", "strong"), "evaluating"),
    "compare": (("gat.safetensors", "faithful.safetensors", "-t", "strong"), "comparing"),
    "bench run": (("long.toml", "-r", "stopped"), "2 to run"),
}


def test_every_command_has_its_cases() -> None:
    known = set(commands())
    assert known == set(GOOD) == set(BAD) == set(MISSING)
    assert set(UNWRITABLE) <= known and set(INTERRUPTED) <= known


@pytest.mark.parametrize("name", GOOD)
def test_help(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=100)
    said = " ".join(done.stdout.split())
    assert done.exit_code == 0 and f"fgai {name}" in said
    assert all(word in said for word in ("Example", "--json", "--quiet"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, a comparison, records, grids and a document."""
    folder = tmp_path_factory.mktemp("place")
    graph = datasets.load_dataset("planted", seed=0)
    about: dict[str, Any] = {"dataset": "planted", "split_seed": 0, "seed": 0, "settings": {}}
    for seed, (name, method) in enumerate((("gat", "vanilla"), ("faithful", "fgai"))):
        model = untrained_model("GAT", graph, seed=seed, hidden_channels=2, heads=2)
        _write_model(model, folder / f"{name}.safetensors", graph, {**about, "method": method})
    comparison().save(folder / "both.json")
    card(comparison(), name="GAT").save(folder / "cards" / "gat.json")
    cells = [Cell(method=method) for method in ("vanilla", "fgai")]
    searched = [Cell(kind="search", seed=seed, settings={"lr": 0.01}) for seed in (0, 1)]
    fill(Store(folder / "results"), [*cells, *searched])
    (folder / "grid.toml").write_text("[[cells]]\nthreats = []\nsettings = { epochs = 2 }\n")
    long = '[[cells]]\nmethod = ["vanilla", "ln"]\nthreats = []\nsettings = { epochs = 100000 }\n'
    (folder / "long.toml").write_text(long)
    (folder / "page.md").write_text("<!-- table: f1 -->\n<!-- end -->\n")
    (folder / "file").write_text("")
    return folder


def plain(done: Done) -> Done:
    """Whatever happened: no traceback, no colours or bars without a terminal."""
    for text in (done.out, done.err):
        assert "Traceback" not in text and "\x1b" not in text and "\r" not in text
    return done


def in_this_process(*words: object, cwd: Path) -> Done:
    """Run a command where a process of its own would only take longer."""
    done = here(*words, cwd=cwd)
    return Done(done.exit_code, done.stdout, done.stderr)


def refused(done: Done, message: str) -> None:
    plain(done)
    assert done.code == 2, done
    assert message in " ".join(done.err.replace("│", " ").split())


class TestGood:
    @pytest.mark.parametrize("name", [name for name, words in GOOD.items() if words is not None])
    def test_json_alone_on_standard_output(self, name: str, place: Path) -> None:
        done = plain(processes().run(*name.split(), *(GOOD[name] or ()), "--json", "--quiet", cwd=place))
        assert done.code == 0, done
        assert isinstance(json.loads(done.out), dict)
        assert all(line.startswith("warning: ") for line in done.err.splitlines())

    @pytest.mark.parametrize("name", [name for name in GOOD if name not in SLOW])
    def test_words_for_people(self, name: str, place: Path) -> None:
        done = plain(in_this_process(*name.split(), *(GOOD[name] or ()), cwd=place))
        assert done.code == 0 and done.out.strip(), done
        with pytest.raises(json.JSONDecodeError):
            json.loads(done.out)


class TestRefused:
    @pytest.mark.parametrize("name", BAD)
    def test_bad_value(self, name: str, place: Path) -> None:
        words, message = BAD[name]
        done = in_this_process(*name.split(), *words, cwd=place)
        refused(done, message)
        assert done.out == ""

    @pytest.mark.parametrize("name", BAD)
    def test_unknown_option(self, name: str, place: Path) -> None:
        refused(in_this_process(*name.split(), "--wings", cwd=place), "No such option: --wings")

    @pytest.mark.parametrize("name", MISSING)
    def test_missing_file(self, name: str, place: Path) -> None:
        words, message = MISSING[name]
        done = processes().run(*name.split(), *words, "--json", cwd=place)
        refused(done, message)
        error = json.loads(done.out)["error"]
        assert error["exit_code"] == 2 and message in error["message"]
        assert not (place / "nowhere").exists()

    @pytest.mark.parametrize("name", UNWRITABLE)
    def test_unwritable_output(self, name: str, place: Path) -> None:
        refused(processes().run(*name.split(), *UNWRITABLE[name], cwd=place), "cannot write")


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupted(name: str, place: Path, tmp_path: Path) -> None:
    words, when = INTERRUPTED[name]
    done = plain(processes().interrupt(*name.split(), *words, cwd=place, when=when))
    assert done.code == 130 and "interrupted" in done.err, done
    assert done.out == ""


def test_an_interrupted_grid_goes_on(place: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    cells = '[[cells]]\nmethod = ["vanilla", "ln"]\nseed = [0, 1]\nthreats = []\n'
    grid.write_text(f"{cells}settings = {{ epochs = 2 }}\n")
    words = ("bench", "run", grid, "-r", tmp_path / "r")
    stopped = plain(processes().interrupt(*words, cwd=tmp_path, when="1/4"))
    assert stopped.code == 130
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*.json")}
    assert 1 <= len(before) < 4
    done = processes().run(*words, cwd=tmp_path)
    assert done.code == 0 and f"4 cells, {len(before)} done, {4 - len(before)} to run" in done.err
    after = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*.json")}
    assert len(after) == 4 and before.items() <= after.items()
