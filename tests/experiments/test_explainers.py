"""Explainers side by side: the sample, what is measured of each, the table, the figure and the door."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Cell, Store, explained, read_grid, run_grid
from experiments.explained import Rows, kept, names_for, sampled
from experiments.explainer_tables import read_explained
from experiments.figures import Choice, figure
from experiments.run import run_cell
from experiments.subjects import Source
from experiments.tables import TABLES
from experiments.threats import grid_threat
from fgai.attacks import make_attack
from fgai.attention import observe, prepared, touched_rows
from fgai.datasets import load_dataset
from fgai.errors import InputError, MissingExtraError
from fgai.explanations import EDGE_EXPLAINERS, EdgeScores
from fgai.graph import Graph
from fgai.metrics import overlap, overlap_chance, truth_auc
from fgai.records import Table
from fgai.training import load_model
from support import bench_cases as cases

CELL = Cell(kind="explainers", task="truth", settings={"epochs": 3})
NODES, FEWER = 7, 2
NAMES = ("random", "pg-explainer", "saliency", "attention-mean", "attention-log")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A cell of some explainers, on few nodes."""
    folder = tmp_path_factory.mktemp("explained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explained, "NODES", NODES)
        patch.setattr(explained, "FEWER", {"saliency": FEWER})
        patch.setattr(explained, "names_for", lambda cell: NAMES)
        patch.setattr(explained, "EPOCHS", dict.fromkeys(explained.EPOCHS, 2))
        patch.setattr("fgai.explanations.posthoc.TRAINING_NODES", 3)
        made = run_cell(CELL, Store(folder), cache=folder)
    assert made["status"] == "done", made.get("trace")
    return {**made, "model": load_model(next(folder.glob("*.safetensors")))}


class TestCell:
    def test_every_explainer_has_its_numbers(self, record: dict[str, Any]) -> None:
        found = record["explainers"]
        assert list(found["rows"]) == list(NAMES)
        assert len(found["nodes"]) == NODES and found["truth_nodes"] == found["nodes"]
        assert found["attacks"]["standard"]["value"] > found["attacks"]["standard"]["start"]
        for name, row in found["rows"].items():
            assert "error" not in row, (name, row)
            assert row["nodes"] == (FEWER if name == "saliency" else NODES)
            part = row["kept"]["standard"]
            for share in (part["all"], row["again"], *row["fidelity"].values(), row["truth"], row["tied"]):
                assert 0 <= share <= 1
            assert row["seconds"] > 0 and 0 <= part["nodes"] <= row["nodes"]
            assert EDGE_EXPLAINERS[name].draws or row["again"] == 1.0

    @pytest.mark.parametrize(("name", "heads"), [("attention-mean", "mean"), ("attention-log", "log")])
    def test_attention_as_the_project_measures_it(
        self, record: dict[str, Any], name: str, heads: str
    ) -> None:
        """From the model, the same attack and the metrics themselves, over all edges of the graph at once."""
        graph, model = load_dataset("planted"), record["model"]
        hit = make_attack(grid_threat("standard")).run(model, graph, seed=0)
        maps = [observe(model, prepared(model, g)).attention for g in (graph, hit.graph)]
        nodes = torch.tensor(record["explainers"]["nodes"])
        touched = torch.zeros(graph.num_nodes, dtype=torch.bool)
        touched[nodes] = touched_rows(maps[0], maps[1])[-1][nodes]
        before, after = (m.heads(heads).restrict(graph.keys).over_layers("mean").values[:, 0] for m in maps)
        rowptr, row = graph.adjacency.rowptr, record["explainers"]["rows"][name]
        part = row["kept"]["standard"]
        assert part["all"] == pytest.approx(overlap(before, after, rowptr, 5, nodes=nodes))
        assert part["nodes"] == int(touched.sum()) > 0
        assert part["touched"] == pytest.approx(overlap(before, after, rowptr, 5, nodes=touched))
        assert part["chance"] == pytest.approx(overlap_chance(rowptr, 5, nodes=touched))
        assert graph.edge_truth is not None
        truth = truth_auc(before, graph.edge_truth, rowptr, "node", nodes=nodes)
        assert row["truth"] == pytest.approx(truth)

    def test_models_made_faithful_are_explained_by_attention(self) -> None:
        assert names_for(CELL) == tuple(EDGE_EXPLAINERS)
        assert names_for(Cell(kind="explainers", method="fgai")) == explained.ON_TWIN
        assert set(explained.ON_TWIN) <= set(EDGE_EXPLAINERS)

    def test_an_explainer_that_does_not_run_is_said_so(
        self, record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others go on."""
        monkeypatch.setattr(explained, "NODES", 2)
        monkeypatch.setattr(explained, "names_for", lambda cell: ("graph-mask", "attention-log"))
        made = run_cell(Cell(kind="explainers", model="GT", settings={"epochs": 1}), Store(tmp_path))
        assert made["status"] == "done", made.get("trace")
        rows = made["explainers"]["rows"]
        assert "GraphMaskExplainer does not run on this GT" in rows["graph-mask"]["error"]
        assert rows["attention-log"]["nodes"] == 2
        (found,) = TABLES["explainers"](Store(tmp_path))
        assert any("GraphMask on planted: GraphMaskExplainer does not run" in note for note in found.notes)


class TestSample:
    def test_nodes_with_neighbours_to_choose_from(self) -> None:
        graph = load_dataset("planted")
        assert graph.test_mask is not None and graph.edge_truth is not None
        nodes, meant = sampled(graph, seed=1, count=9)
        assert nodes == meant == sorted(set(nodes)) and len(nodes) == 9
        for node in nodes:
            mine = graph.adjacency.destination == node
            assert graph.test_mask[node] and int(mine.sum()) > 5
            assert 0 < int(graph.edge_truth[mine].sum()) < int(mine.sum())
        assert sampled(graph, 1, 9) == (nodes, meant) and sampled(graph, 2, 9) != (nodes, meant)
        assert sampled(graph.replace(edge_truth=None), 1, 9)[1] is None

    def test_other_nodes_where_the_truth_is_about_few_neighbours(self) -> None:
        """As on BA-Shapes: houses have fewer than five."""
        edges = [(0, 1), (2, 1), (3, 1), *((a, 9) for a in range(8))]
        ends = torch.tensor(edges).t()
        truth = torch.tensor([True] + [False] * 10)
        graph = Graph.from_edges(
            ends, 10, torch.ones(10, 2), edge_truth=truth, test_mask=torch.ones(10, dtype=torch.bool)
        )
        assert sampled(graph, 0) == ([9], [1])

    def test_rows(self) -> None:
        graph = Graph.from_edges(torch.tensor([[0, 2, 1, 3, 3], [1, 1, 1, 2, 0]]), 4, torch.ones(4, 2))
        rows = Rows.of(graph, [1, 2])
        assert rows.rowptr.tolist() == [0, 2, 3]  # the loop is left out
        scores = [EdgeScores(node, graph.keys, torch.arange(5.0) + 10 * node) for node in rows.nodes]
        destination, source = graph.adjacency.destination, graph.adjacency.source
        wanted = [10.0 + int(((destination == 1) & (source == a)).nonzero()) for a in (0, 2)]
        wanted += [20.0 + int((destination == 2).nonzero())]
        assert rows.read(scores).tolist() == wanted
        held = {1: rows.keys[:2].tolist(), 2: rows.keys[2:].tolist()}
        chosen = [rows.some(1, seed) for seed in range(9)]
        assert {one.nodes[0] for one in chosen} == {1, 2}
        for one in chosen:
            assert one.keys.tolist() == held[one.nodes[0]]
            assert one.rowptr.tolist() == [0, len(one.keys)]
        assert rows.some(5, 0).keys.tolist() == rows.keys.tolist() and rows.some(5, 0).nodes == rows.nodes


class TestKept:
    def test_as_the_metric_where_nothing_ties(self) -> None:
        generator = torch.Generator().manual_seed(0)
        before, after = torch.rand(2, 30, generator=generator)
        rowptr = torch.tensor([0, 12, 30])
        assert kept(before, after, rowptr).mean() == pytest.approx(overlap(before, after, rowptr, 5))

    def test_what_ties_keeps_what_chance_keeps(self) -> None:
        """The same score for all is no stable explanation."""
        rowptr = torch.arange(0, 4001, 10)
        flat = torch.ones(4000)
        assert overlap(flat, flat, rowptr, 5) == 1.0
        assert float(kept(flat, flat, rowptr).mean()) == pytest.approx(0.5, abs=0.03)


class TestTables:
    def test_table(self, tmp_path: Path) -> None:
        (found,) = TABLES["explainers"](cases.fill(Store(tmp_path), read_grid("explainers")))
        assert isinstance(found, Table)
        rows = {tuple(row[:3]): row[3:] for row in found.rows}
        assert len(rows) == 4 * (len(EDGE_EXPLAINERS) + len(explained.ON_TWIN))
        searched = ["0.52 ± 0.02", "0.38", "0.75 ± 0.00", "0.30 ± 0.00", "0.10 ± 0.00"]
        assert list(rows["GAT", "planted", "GNNExplainer"])[:6] == [*searched, "0.62 ± 0.00"]
        assert list(rows["GAT", "cora", "GNNExplainer"])[:6] == [*searched, None]
        assert rows["GAT", "cora", "FGAI: attention, log"][0] == "0.92 ± 0.02"
        assert rows["GAT", "cora", "saliency"][2] == "1"
        assert "All 40 cells are there." in found.notes
        (empty,) = TABLES["explainers"](Store(tmp_path / "none"))
        assert isinstance(empty, Table) and len(empty.rows) == len(rows)
        assert empty.rows[0][3:6] == [None, None, None] and "40 of 40 cells are missing." in empty.notes

    def test_figure(self, tmp_path: Path) -> None:
        store = cases.fill(Store(tmp_path), read_grid("explainers"))
        drawn = dict(figure("explainers", store, Source()))
        assert list(drawn) == ["explainers-GAT"] and len(drawn["explainers-GAT"].axes) == 4
        only = dict(figure("explainers", store, Source(), Choice(("cora",))))["explainers-GAT"]
        assert [axes.get_title(loc="left") for axes in only.axes] == ["cora, 5 seeds"]
        bold = [label for label in only.axes[0].get_yticklabels() if label.get_fontweight() == "bold"]
        assert [label.get_text() for label in bold] == ["FGAI: attention, log"]
        assert sum(row.is_ours for row in read_explained(store)) == 4
        with pytest.raises(InputError, match="no explainers to draw"):
            list(figure("explainers", Store(tmp_path / "none"), Source()))


def test_without_captum_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(MissingExtraError, match=r"fgai\[explainers\]"):
        run_grid([cases.tiny(), CELL], Store(tmp_path))
    assert not list(tmp_path.iterdir())
