"""`fgai audit`: a model and a graph of one's own from files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fgai as library
from fgai.reports import Report
from support import own_cases as own
from support.cli_cases import answer, fgai, refused

COMMON = ("--nodes", 2, "--edges", 3, "-k", 2, "-t", "random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of the user's, weights as safetensors writes them, and data in two kinds of files."""
    place, data = own.write_own(tmp_path_factory.mktemp("audit"), "mine_to_audit"), own.own_data()
    save_file(dict(own.own_model().state_dict()), place / "mine.safetensors")
    np.savez(place / "mine.npz", **{name: np.asarray(value) for name, value in data.to_dict().items()})
    torch.save(data, place / "mine.pt")
    return place


def test_an_audit_says_what_the_library_says(folder: Path) -> None:
    words = (
        "audit",
        "--model",
        "mine_to_audit:wrapped",
        "--weights",
        "mine.safetensors",
        "--data",
        "mine.npz",
    )
    found = answer(*words, *COMMON, "--output", "page.html", "--node", 3, cwd=folder)
    assert found["command"] == "audit" and found["models"] == ["Nested"] and found["nodes"] == 40
    model, data = own.own_model(), own.own_data()
    wanted = library.evaluate(model, data, "random", nodes=2, edges=3, k=2)
    assert found["metrics"]["f1"]["clean"] == wanted.metrics["f1"]["clean"] == own.own_accuracy(model, data)
    assert found["metrics"]["definition"]["r01"]["same_explanation"]["layers"] == [None, None]
    assert {name: found["metrics"][name] for name in wanted.metrics.keys() - {"null"}} == {
        name: value for name, value in wanted.to_dict()["metrics"].items() if name != "null"
    }
    made = Report.load(folder / found["document"])
    assert made.subgraph is not None and made.subgraph["centre"] == 3
    assert made.reproduce == [
        "fgai audit --model mine_to_audit:wrapped --weights mine.safetensors --data mine.npz --threat random"
        " --nodes 2 --edges 3 --k 2 --seed 0 --node 3 --output page.html"
    ]
    page = (folder / "page.html").read_text()
    assert (folder / "page.html").stat().st_size == found["bytes"]
    block = made.records[0]["provenance"]
    assert block["weights"] == library.records.weights_hash(library.wrap(model, lambda m, g: m(g)))
    assert block["command"].startswith("fgai audit --model mine_to_audit:wrapped") and block["seed"] == 0
    assert block["data"] == library.datasets.fingerprint(library.load_graph(folder / "mine.npz"))
    for text in (block["weights"], block["date"], block["data"], block["code"], "--data mine.npz"):
        assert text in page.partition("<nav")[0]
    assert "untrained" not in page.partition("<nav")[0]


def test_untrained_weights_are_said(folder: Path) -> None:
    words = (
        "audit",
        "--model",
        "mine_to_audit:wrapped",
        "--data",
        "mine.npz",
        *COMMON,
        "--output",
        "raw.html",
    )
    made = Report.load(folder / answer(*words, cwd=folder)["document"])
    assert "untrained weights" in made.records[0]["provenance"]["note"]
    page = (folder / "raw.html").read_text()
    assert "untrained weights" in page.partition("<nav")[0]
    assert any("untrained weights" in note for note in made.notes)


@pytest.mark.parametrize(("weights", "said"), [((), True), (("--weights", "mine.safetensors"), False)])
def test_every_command_says_untrained_weights(folder: Path, weights: tuple[str, ...], said: bool) -> None:
    done = fgai("certify", "--model", "mine_to_audit:wrapped", *weights, "--data", "mine.npz", cwd=folder)
    assert done.code == 0 and ("untrained weights" in done.err) == said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "nowhere:wrapped"}, "cannot import `nowhere:wrapped`"),
        ({"model": "mine_to_audit:missing"}, "no attribute 'missing'; it defines Mine"),
        ({"model": "mine_to_audit:number"}, "must return a torch.nn.Module, got int"),
        ({"model": "mine_to_audit"}, "must be of the form package.module:name"),
        ({"weights": "none.safetensors"}, "there is no checkpoint"),
        ({"weights": "cut.safetensors"}, "truncated"),
        ({"data": "none.npz"}, "there is no file none.npz"),
        ({"data": "bomb.pt"}, "was refused"),
        ({"data": "mine.safetensors"}, "must be a graph as .npz, .pt or .csv"),
        ({"data": "bare.npz"}, "'bare' has no node features"),
        ({"device": "cuda:99"}, "must exist, got cuda:99"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(folder: Path, change: dict[str, str], words: str) -> None:
    whole = (folder / "mine.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-30])
    (folder / "bomb.pt").write_bytes(b"cos\nsystem\n(S'touch fgai-was-here'\ntR.")
    data = own.own_data()
    np.savez(folder / "bare.npz", edge_index=data.edge_index.numpy(), y=data.y.numpy())
    given = {"model": "mine_to_audit:wrapped", "weights": "mine.safetensors", "data": "mine.pt", **change}
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    message = refused("audit", *options, *COMMON, cwd=folder)
    assert words in message.replace("\n", " ")
    assert not (folder / "fgai-was-here").exists()
