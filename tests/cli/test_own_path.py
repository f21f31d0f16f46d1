"""Own models on own graphs: the same options for every command, names for numbers, a card and a gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fgai
from support import own_cases as own
from support.cli_cases import answer, here, refused

SMALL = ("--nodes", 2, "--edges", 3, "-k", 2, "-t", "random")
OWN = ("--model", "mine_own:Mine", "--weights", "w.pt", "--data", "graph")
CLASSES = ("cat", "dog", "eel")


def write_tables(folder: Path) -> Path:
    """A folder with both tables of `own_data`, its nodes and classes by name."""
    data, place = own.own_data(), folder / "graph"
    place.mkdir()
    parts = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
    lines = ["node,y,split," + ",".join(f"f{i}" for i in range(data.num_features))]
    for node in range(data.num_nodes):
        split = next((part for part, mask in parts.items() if mask[node]), "")
        values = ",".join(map(repr, data.x[node].tolist()))
        lines.append(f"n<{node}>,{CLASSES[int(data.y[node])]},{split},{values}")
    (place / "nodes.csv").write_text("\n".join(lines) + "\n")
    rows = ["source,destination,same,noise"]
    for (a, b), values in zip(data.edge_index.t().tolist(), data.edge_attr.tolist(), strict=True):
        rows.append(f"n<{a}>,n<{b}>," + ",".join(map(repr, values)))
    (place / "edges.csv").write_text("\n".join(rows) + "\n")
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = own.write_own(tmp_path_factory.mktemp("own"), "mine_own")
    write_tables(place)
    return place


def test_a_folder_of_tables_holds_the_graph_with_its_names(folder: Path) -> None:
    graph, data = fgai.load_graph(folder / "graph"), own.own_data()
    assert graph.name == "graph" and graph.class_names == CLASSES
    assert graph.node_names is not None and graph.node_names[7] == "n<7>" and graph.node_index("n<7>") == 7
    assert torch.equal(graph.y, data.y) and torch.equal(graph.test_mask, data.test_mask)
    assert graph.edge_attr.shape == data.edge_attr.shape


def test_audit_card_and_gate(folder: Path) -> None:
    found = answer("audit", *OWN, *SMALL, "--card", "card.json", "--node", "n<3>", cwd=folder)
    model, data = own.own_model(), own.own_data()
    assert found["metrics"]["f1"]["clean"] == own.own_accuracy(model, data)
    assert found["card"] == "card.json" and (folder / "card.md").exists()
    page = (folder / "audit.html").read_text().partition("<nav")[0]
    assert "of the top neighbours stay." in page and "What to do next" in page and "Risk by class" in page
    assert ">eel<" in page and "n<3>" not in page  # names are escaped
    card = json.loads((folder / "card.json").read_text())
    assert card["data"]["class_names"] == list(CLASSES)
    done = here("check", "card.json", "--min", "top 2 kept=0.0", cwd=folder)
    assert done.exit_code == 0 and "attack on explanations" in done.stdout
    assert here("check", "card.json", "--min", "F1, under attack=1.01", cwd=folder).exit_code == 1
    message = refused("check", "card.json", cwd=folder)
    assert "--min" in message and "top 2 kept" in message.replace("\n", " ")
    assert "audit.html exists; add --force" in refused("audit", *OWN, *SMALL, cwd=folder)


def test_every_command_takes_an_own_model(folder: Path) -> None:
    record = answer("evaluate", *OWN, *SMALL, "--no-curves", "--no-nulls", cwd=folder)
    assert record["metrics"]["f1"]["clean"] == own.own_accuracy(own.own_model(), own.own_data())
    assert answer("certify", *OWN, "-k", 2, cwd=folder)["model"]["class"] == "Mine"
    shown = answer("explain", *OWN, "--node", "n<3>", "-k", 2, "-t", "none", cwd=folder)
    assert shown["node"] == 3 and all("n<" in entry["name"] for entry in shown["neighbours"])
    assert answer("attack", *OWN, *SMALL, cwd=folder)["dataset"] == "graph"
    quick = ("--epochs", 2, "--nodes", 2, "--edges", 3, "--no-check")
    for command, prefix in (("faithful", "faithful"), ("harden", "hardened")):
        assert answer(command, *OWN, *quick, cwd=folder)["output"] == f"{prefix}-w.safetensors"
    assert answer("limit", *OWN, cwd=folder)["output"] == "limited-w.safetensors"
    again = ("--model", "mine_own:Mine", "--weights", "faithful-w.safetensors", "--data", "graph")
    answer("certify", *again, "--vanilla", "w.pt", "-k", 2, cwd=folder)
    words = ("GAT=w.pt", "FGAI=faithful-w.safetensors", "--model", "mine_own:Mine", "--data", "graph")
    both = answer("compare", *words, *SMALL, "--no-curves", "--no-nulls", cwd=folder)
    assert [record["name"] for record in both["records"]] == ["GAT", "FGAI"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give the file of a model"),
        (("--weights", "w.pt"), "`--weights` goes with `--model"),
        (("w.pt", "--model", "mine_own:Mine", "--data", "graph"), "not both"),
        (("--model", "mine_own:Mine"), "needs `--data`"),
        (("--model", "mine_own:Mine", "--data", "nowhere"), "there is no dataset 'nowhere'"),
        (("--model", "mine_own:Mina", "--data", "graph"), "did you mean 'Mine'?"),
        (("--model", "mine_own:Mine", "--weights", "list.pt", "--data", "graph"), "must hold a `state_dict`"),
        (("--model", "mine_own:Mine", "--weights", "bomb.pt", "--data", "graph"), "was refused"),
    ],
)
def test_bad_input_is_refused_in_words(folder: Path, words: tuple[str, ...], message: str) -> None:
    torch.save([torch.ones(2)], folder / "list.pt")
    (folder / "bomb.pt").write_bytes(b"cos\nsystem\n(S'touch fgai-was-here'\ntR.")
    assert message in refused("evaluate", *words, cwd=folder).replace("\n", " ")
    assert not (folder / "fgai-was-here").exists()


def test_an_unknown_node_is_refused(folder: Path) -> None:
    words = ("explain", *OWN, "--node", "n<333>", "-t", "none")
    assert "has no node 'n<333>'; did you mean" in refused(*words, cwd=folder)


@pytest.mark.parametrize(
    ("table", "text", "message"),
    [
        ("edges", "source,destination\nn<1>,n<99999>\n", "a node of graph/nodes.csv, got 'n<99999>'"),
        ("nodes", "node,y\na,1\nb,0\na,1\n", "node 'a' is in lines 2 and 4 of graph/nodes.csv"),
        (
            "nodes",
            "node,y,split\na,x,train\nb,,val\n",
            "line 3 of graph/nodes.csv has the split 'val'",
        ),
        ("nodes", "node,label\na,1\nb,0\n", "rename it `y`"),
        ("nodes", "node,y\na,1\n\nb\n", "look at line 4"),
        ("nodes", "node,y\na,1\n,0\n", "`node` in line 3 of graph/nodes.csv is empty"),
    ],
)
def test_faults_of_tables_name_file_and_line(tmp_path: Path, table: str, text: str, message: str) -> None:
    write_tables(tmp_path)
    own.write_own(tmp_path, "mine_own")
    (tmp_path / "graph" / f"{table}.csv").write_text(text)
    found = refused("evaluate", "--model", "mine_own:Mine", "--data", "graph", cwd=tmp_path)
    assert message in found.replace("\n", " ")


def test_columns_of_tables_are_not_renamed_to_options(tmp_path: Path) -> None:
    write_tables(tmp_path)
    own.write_own(tmp_path, "mine_own")
    (tmp_path / "graph" / "nodes.csv").write_text("id,y\na,1\nb,0\n")
    words = ("explain", "--model", "mine_own:Mine", "--data", "graph", "--node", "a", "-t", "none")
    assert "has a column `id`; rename it `node`" in refused(*words, cwd=tmp_path).replace("\n", " ")


def test_a_table_without_a_split_is_trained_on_with_a_drawn_one(tmp_path: Path) -> None:
    place = write_tables(tmp_path)
    lines = [line.split(",") for line in (place / "nodes.csv").read_text().splitlines()]
    (place / "nodes.csv").write_text("\n".join(",".join([a, b, *rest]) for a, b, _, *rest in lines))
    edges = [line.split(",")[:2] for line in (place / "edges.csv").read_text().splitlines()]
    (place / "edges.csv").write_text("\n".join(map(",".join, edges)))
    found = answer("train", "--data", "graph", "--model", "gat", "--epochs", 2, cwd=tmp_path)
    assert found["output"] == "vanilla-gat-graph.safetensors" and found["model"] == "GAT"
    words = ("evaluate", found["output"], *SMALL, "--no-curves", "--no-nulls")
    assert answer(*words, cwd=tmp_path)["metrics"]["f1"]["clean"] == found["f1"]["test"]


def test_wrap_is_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    import mine_own  # type: ignore[import-not-found]

    data = fgai.load_graph(folder / "graph")
    model = fgai.wrap(mine_own.Nested(), mine_own.call)
    path = fgai.save_model(model, folder / "nested", factory=mine_own.Nested)
    again = fgai.load_model(path, factory="mine_own:Nested")
    assert torch.equal(again(data), model.eval()(data))
    other = fgai.wrap(mine_own.Nested(), lambda m, g: m(g))
    path = fgai.save_model(other, folder / "lambda", factory=mine_own.Nested)
    with pytest.raises(fgai.errors.CheckpointError, match="let `factory` return the wrapped model"):
        fgai.load_model(path, factory="mine_own:Nested")
    assert fgai.load_model(path, factory="mine_own:wrapped") is not None
