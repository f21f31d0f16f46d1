"""Results in notebooks and in pandas: names are text, numbers are those of the result."""

from __future__ import annotations

import math
import sys
import warnings
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import fgai
from fgai.attention import AttentionMap, LayerAttention
from fgai.certificates import vote
from fgai.datasets import planted
from fgai.errors import FgaiWarning, MissingExtraError
from fgai.graph import Graph
from fgai.records import Column, Table, Tabled
from fgai.training import untrained_model

EVIL = "<script>alert('x')</script> & \"co\""
SIZES = {"hidden_channels": 3, "heads": 2}


class Reader(HTMLParser):
    """What a browser reads: tags, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return planted(seed=1, num_nodes=60, num_classes=3)


@pytest.fixture(scope="module")
def results(graph: Graph) -> dict[str, Tabled]:
    """One of each kind, small, with a name that wants to be markup wherever a name can be given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)  # of untrained models and small budgets
        torch.manual_seed(0)
        models = {
            EVIL: untrained_model("GAT", graph, **SIZES),
            "other": untrained_model("GATv2", graph, **SIZES),
        }
        model = models[EVIL]
        quick: dict[str, Any] = {"curves": False, "nodes": 2, "edges": 3, "k": 2}
        compared = fgai.compare(models, graph, "random", **quick)
        with fgai.record(model) as recording, torch.no_grad():
            model(graph)
        names = [f"{EVIL} {node}" for node in range(graph.num_nodes)]
        return {
            "comparison": compared,
            "evaluation": compared[EVIL],
            "certificate": fgai.certify_attention(
                model, graph, vanilla=models["other"], radius=0.01, k1=2, k2=2
            ),
            "injection": fgai.certify_injection(
                fgai.limit(model, graph, 0.0, shrink=0.0), graph, neighbours=1, where="direct"
            ),
            "votes": vote(model, graph, groups=5),
            "explanation": fgai.explain(model, graph, 7, names=names, threat="random", nodes=2, edges=3),
            "attention": recording.attention,
        }


def test_tables_escape_every_text() -> None:
    table = Table(EVIL, (Column(EVIL), Column("F1", ".2f", "higher")), [[EVIL, 0.925], ["a", None]], (EVIL,))
    read = Reader(table._repr_html_())
    assert "script" not in read.tags and read.words.count(EVIL) == 4
    assert {"F1 ↑", "0.93", "–"} <= set(read.words)


@pytest.mark.parametrize(
    "kind", ["comparison", "evaluation", "certificate", "injection", "votes", "explanation", "attention"]
)
def test_every_result_shows_its_tables_in_a_notebook(results: dict[str, Tabled], kind: str) -> None:
    read = Reader(results[kind]._repr_html_())
    tables = results[kind].tables()
    assert read.tags.count("table") == len(tables) and "script" not in read.tags
    shown = set(read.words)
    for table in tables:
        assert {table.title, *table.notes} <= shown
        assert {text for row in table.texts() for text in row if text} <= shown


def test_names_of_models_and_nodes_are_text(results: dict[str, Tabled]) -> None:
    for kind in ("comparison", "explanation"):
        assert any(EVIL in word for word in Reader(results[kind].to_html()).words), kind


class TestPandas:
    @pytest.fixture(autouse=True)
    def pandas(self) -> Any:
        return pytest.importorskip("pandas")

    def test_tables(self) -> None:
        frame = Table("t", (Column("model"), Column("F1", ".1f")), [["a", 0.123], ["b", None]]).to_pandas()
        assert (
            list(frame.columns) == ["model", "F1"] and frame["F1"][0] == 0.123 and math.isnan(frame["F1"][1])
        )

    def test_comparisons_have_a_column_per_model(self, results: dict[str, Any]) -> None:
        frame = results["comparison"].to_pandas()
        assert list(frame.columns) == [EVIL, "other"]
        for name in frame.columns:
            assert frame.loc["f1.attacked", name] == results["comparison"][name].value("f1.attacked")
        alone = results["evaluation"].to_pandas()
        assert list(alone.columns) == [EVIL]
        assert alone.loc["g_jsd.last", EVIL] == results["evaluation"].value("g_jsd.last")

    def test_certificates_have_a_row_per_layer_and_node(self, results: dict[str, Any]) -> None:
        record = results["certificate"]
        frame = record.to_pandas()
        assert len(frame) == 2 * 60
        for layer, part in zip(record.layers, (frame[:60], frame[60:]), strict=True):
            assert set(part["layer"]) == {layer.name} and list(part["node"]) == list(range(60))
            assert list(part["topk_radius"]) == layer.topk_radius.tolist()
            assert list(part["class_radius"]) == layer.prediction.class_radius.tolist()

    def test_certificates_of_links_say_nothing_of_single_nodes(self, graph: Graph) -> None:
        links = fgai.datasets.link_split(graph, seed=0)
        model = untrained_model("GAT", links, **SIZES)
        frame = fgai.certify_attention(model, links, radius=0.01).to_pandas()
        assert frame["class_radius"].isna().all() and frame["topk_radius"].notna().all()

    def test_injection_and_votes_have_a_row_per_node(self, results: dict[str, Any]) -> None:
        record, votes = results["injection"], results["votes"]
        frame = record.to_pandas()
        assert (
            list(frame["class certified"]) == record.certified.tolist()
            and list(frame["degree"]) == record.degree.tolist()
        )
        assert f"top {record.k} of {record.layers[0].name}" in frame.columns
        frame = votes.to_pandas()
        assert list(frame["node radius"]) == votes.node_radius.tolist() and (frame["votes"] <= 5).all()

    def test_explanations_have_a_row_per_neighbour(self, results: dict[str, Any]) -> None:
        found = results["explanation"]
        frame = found.to_pandas()
        assert list(frame["attention"]) == [entry["attention"] for entry in found.neighbours]

    def test_attention_has_a_row_per_layer_edge_and_head(self) -> None:
        values = torch.tensor([[0.5, 0.125], [0.5, 0.875], [1.0, 1.0]])
        layers = (
            LayerAttention.from_edges(values, [0, 1, 0], [1, 1, 2], 3, "first"),
            LayerAttention.from_edges(values[:2, 1:], [2, 0], [0, 0], 3),
        )
        frame = AttentionMap(layers).to_pandas()
        rows = [tuple(row) for row in frame.itertuples(index=False)]
        assert rows == [
            ("first", 0, 1, 0, 0.5), ("first", 0, 1, 1, 0.125),
            ("first", 1, 1, 0, 0.5), ("first", 1, 1, 1, 0.875),
            ("first", 0, 2, 0, 1.0), ("first", 0, 2, 1, 1.0),
            ("1", 0, 0, 0, 0.875), ("1", 2, 0, 0, 0.125),
        ]  # fmt: skip


def test_attention_tables_average_over_nodes_that_attend() -> None:
    values = torch.tensor([[0.5, 0.125], [0.5, 0.875], [1.0, 1.0]])
    layer = LayerAttention.from_edges(values, [0, 1, 0], [1, 1, 2], 4, "first")
    (table,) = AttentionMap((layer,)).tables()
    assert table.rows == [["first", 4, 3, 2, pytest.approx((0.6875 + 1.0) / 2)]]
    empty = LayerAttention.from_edges(values[:0], [], [], 4)
    assert AttentionMap((empty,)).tables()[0].rows == [["0", 4, 0, 2, None]]


def test_without_pandas_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for kind, result in results.items():
        with pytest.raises(MissingExtraError, match=r"pip install 'fgai\[pandas\]'"):
            result.to_pandas()
        assert result.to_html(), kind
