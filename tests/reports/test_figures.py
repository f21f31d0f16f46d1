"""Figures: drawn from real models and records, the same bytes every time, and what they read is right."""

from __future__ import annotations

import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from fgai.attacks import Budget, PGDInjection, RandomInjection, Threat
from fgai.certificates import PROMISE, certify_attention
from fgai.errors import FgaiError, FgaiWarning, InputError
from fgai.evaluation import Comparison, compare
from fgai.reports import figures
from fgai.reports.figures import Case, style
from fgai.reports.nodes import _around, _between, _spring, _surroundings
from fgai.training import History, train, untrained_model
from support.forward import seen_by, view_of
from support.graph_cases import build, small_data

GRAPH = small_data()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    attack = PGDInjection(Budget(nodes=3, edges=4, steps=2, step_size=0.5))
    out = []
    for name in ("GAT", "GATv2"):
        model = train(
            untrained_model(name, GRAPH, hidden_channels=2, heads=2), GRAPH, epochs=8, progress=False
        )
        out.append(Case(name, model, attack.run(model, GRAPH)))
    return out


@pytest.fixture(scope="module")
def comparison(cases: list[Case]) -> Comparison:
    threat = Threat("few", RandomInjection, Budget(nodes=3, edges=4), "for a tiny graph")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)  # numbers on so small a graph are rightly doubted
        return compare({case.name: case.model for case in cases}, GRAPH, threat, k=2, nulls=False)


def words(figure: Figure) -> str:
    """All text in a figure."""
    return "\n".join(text.get_text() for text in figure.findobj(Text))  # type: ignore[attr-defined]


class TestViews:
    def test_a_node_is_read_as_the_attention_says(self, cases: list[Case]) -> None:
        model = cases[0].model
        view = view_of(model, GRAPH).node(3)
        _, attention = seen_by(model, model.prepare(GRAPH))
        attention = attention.detach()
        wanted = {}
        first, last = attention[0].rowptr[3:5].tolist()
        for edge in range(first, last):
            source = int(attention[0].source[edge])
            wanted[source] = sum(float(layer.heads("log")[edge]) for layer in attention) / 2
        found = dict(zip(view.neighbours, view.weights, strict=True))
        assert found == pytest.approx(wanted, abs=1e-6)
        assert list(view.weights) == sorted(view.weights, reverse=True)
        assert sum(view.weights) == pytest.approx(1.0, abs=1e-5)
        assert view.predicted == int(model(GRAPH)[3].argmax())

    def test_layers(self, cases: list[Case]) -> None:
        model = cases[0].model
        assert view_of(model, GRAPH, layer="last").node(3).weights == pytest.approx(
            view_of(model, GRAPH, layer=1).node(3).weights
        )
        with pytest.raises(InputError, match="`layer` must be one of"):
            view_of(model, GRAPH, layer="first")
        with pytest.raises(InputError, match=r"0..39, got 40"):
            view_of(model, GRAPH).node(40)

    def test_names(self, cases: list[Case]) -> None:
        attacked = view_of(cases[0].model, cases[0].attack.graph, original=40)
        assert cases[0].attack.change.endpoints is not None
        node = int(cases[0].attack.change.endpoints[1, 0])
        view = attacked.node(node)
        assert view.name(41) == "new 1" and view.name(node) == "itself" and view.name(5) in ("5", "itself")

    def test_truth_is_told(self, cases: list[Case]) -> None:
        truth = GRAPH.adjacency.source % 2 == 0
        view = view_of(cases[0].model, GRAPH.replace(edge_truth=truth)).node(3)
        assert view.informative is not None
        for neighbour, good in zip(view.neighbours, view.informative, strict=True):
            assert good == (neighbour % 2 == 0 and neighbour != 3)


class TestLayout:
    def test_places_are_the_same_every_time_and_apart(self) -> None:
        edges = np.array([[0, 1], [1, 2], [2, 0], [2, 3], [3, 3], [4, 5]])
        places = _spring(7, edges)
        np.testing.assert_array_equal(places, _spring(7, edges))
        assert np.abs(places).max() == pytest.approx(1.0)
        distance = np.linalg.norm(places[:, None] - places[None], axis=-1) + np.eye(7)
        assert distance.min() > 0.05
        joined = np.linalg.norm(places[0] - places[1])
        assert joined < np.linalg.norm(places[0] - places[5])

    def test_odd_sizes(self) -> None:
        assert _spring(1, np.zeros((0, 2), dtype=int)).shape == (1, 2)
        assert _spring(3, np.zeros((0, 2), dtype=int)).shape == (3, 2)
        assert _around(0).shape == (0, 2)
        new = _between(_spring(4, np.array([[0, 1], [2, 3]])), [[0], [0], []])
        assert len(np.unique(new.round(3), axis=0)) == 3

    def test_surroundings_walk_outwards(self) -> None:
        chain = build(6, [(0, 1), (1, 2), (2, 3), (3, 4)], undirected=True)
        assert _surroundings(chain, 2, 4) == [2, 1, 3, 0]
        assert _surroundings(chain, 5, 4) == [5]
        with pytest.raises(InputError, match=r"0..5"):
            _surroundings(chain, 6, 4)


class TestFigures:
    def test_one_node(self, cases: list[Case]) -> None:
        figure = figures.node_attention(cases[0].model, GRAPH, 3, most=2)
        assert "Node 3" in words(figure) and "others" in words(figure)
        with pytest.raises(InputError, match="`most`"):
            figures.node_attention(cases[0].model, GRAPH, 3, most=0)

    def test_names_of_classes(self, cases: list[Case]) -> None:
        graph = GRAPH.replace(class_names=("a $x", "b$ y", "c"))
        view = view_of(cases[0].model, graph).node(3)
        name = view.class_name(view.predicted).replace("$", r"\$")
        assert f"class {name} (" in words(figures.node_attention(cases[0].model, graph, 3))
        assert f"before: class {name}" in words(figures.top_neighbours(cases, graph, 3))

    def test_isolated_node_of_a_transformer(self) -> None:
        model = untrained_model("GT", GRAPH, hidden_channels=16, heads=(2, 1)).eval()
        with pytest.raises(InputError, match="attends to nothing"):
            figures.node_attention(model, GRAPH, 39)

    def test_before_and_after(self, cases: list[Case]) -> None:
        assert cases[0].attack.change.endpoints is not None
        node = int(cases[0].attack.change.endpoints[0, 0])
        for figure in (
            figures.node_before_after(cases, GRAPH, node),
            figures.subgraph_attention(cases, GRAPH, node, size=15),
        ):
            text = words(figure)
            assert "GAT, before the attack" in text and "GATv2, after the attack" in text
        text = words(figures.top_neighbours(cases, GRAPH, node, k=3))
        assert "of 3 stay" in text and "injected" in text
        for draw in (figures.node_before_after, figures.subgraph_attention, figures.top_neighbours):
            with pytest.raises(InputError, match="at least one model"):
                draw([], GRAPH, node)

    def test_losses(self, cases: list[Case]) -> None:
        model = cases[0].model
        assert "cross entropy" in words(figures.loss_curves(model.history))
        named = {"first": model.history, "second": cases[1].model.history}
        assert "second" in words(figures.loss_curves(named))
        with pytest.raises(InputError, match="at least one epoch"):
            figures.loss_curves(History())

    def test_curves_of_records(self, cases: list[Case], comparison: Comparison) -> None:
        assert "strongest first" in words(figures.f_curves(comparison))
        assert "paper" not in words(figures.f_curves(comparison, scope="graph"))
        with pytest.raises(InputError, match="curves=True"):
            figures.f_curves(comparison, scope="edge")
        text = words(figures.four_properties(comparison))
        assert f"{comparison['GAT'].value('f1.clean'):.2f}" in text and "Same neighbours" in text
        certificates = {case.name: certify_attention(case.model, GRAPH, radius=0.01, k2=2) for case in cases}
        said = words(figures.certified_curves(certificates))
        assert "Top-2 cannot change" in said and PROMISE in " ".join(said.split())
        for draw in (figures.four_properties, figures.certified_curves):
            with pytest.raises(InputError, match="at least one"):
                draw({})  # type: ignore[operator]

    def test_saved_bytes_are_equal_and_settings_come_back(self, cases: list[Case], tmp_path: Path) -> None:
        before = dict(mpl.rcParams)
        for kind in ("png", "svg", "pdf"):
            paths = [
                figures.save(figures.node_attention(cases[0].model, GRAPH, 3), tmp_path / f"{n}.{kind}")
                for n in (1, 2)
            ]
            assert paths[0].read_bytes() == paths[1].read_bytes()
        assert dict(mpl.rcParams) == before

    def test_unknown_endings_and_folders(self, cases: list[Case], tmp_path: Path) -> None:
        figure = figures.loss_curves(cases[0].model.history)
        with pytest.raises(InputError, match=r"\.png, \.pdf, \.svg"):
            figures.save(figure, tmp_path / "loss.gif")
        (tmp_path / "file").write_text("")
        with pytest.raises(FgaiError, match="cannot write"):
            figures.save(figure, tmp_path / "file" / "loss.png")

    def test_attention_colours_are_monotone_in_grey(self) -> None:
        shades = style.attention_colours()(np.linspace(0, 1, 50))[:, :3]
        grey = torch.tensor(shades @ np.array([0.299, 0.587, 0.114]))
        assert (grey.diff() <= 1e-6).all() and grey[0] < 0.9


class TestExplainers:
    def test_what_is_drawn(self) -> None:
        """Means, seeds, chance and the hollow dot stand where their numbers are."""
        rows = [
            figures.ExplainerDot("first", [0.25, 0.75], 0.625, 0.375),
            figures.ExplainerDot("second", [1.0], None, 0.375, ours=True),
        ]
        drawn = figures.explainer_dots({"one": rows, "two": rows}, k=3)
        assert [axes.get_title(loc="left") for axes in drawn.axes] == ["one", "two"]
        axes = drawn.axes[0]
        shown = {
            (line.get_label(), int(line.get_ydata()[0])): list(line.get_xdata())
            for line in axes.get_lines()
            if not str(line.get_label()).startswith("_")
        }
        assert shown == {
            ("chance", 0): [0.375], ("one seed", 0): [0.25, 0.75], ("kept under attack", 0): [0.5],
            ("another seed, no attack", 0): [0.625],
            ("chance", 1): [0.375], ("one seed", 1): [1.0], ("kept under attack", 1): [1.0],
        }  # fmt: skip
        assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
        assert "top 3" in axes.get_xlabel() and axes.yaxis_inverted()
        assert len(drawn.legends[0].get_texts()) == 4

    def test_refusals(self) -> None:
        row = figures.ExplainerDot("first", [0.5], None, 0.25)
        for panels in ({}, {"one": []}):
            with pytest.raises(InputError, match="at least one dataset"):
                figures.explainer_dots(panels)
        with pytest.raises(InputError, match="same explainers"):
            figures.explainer_dots({"one": [row], "two": [figures.ExplainerDot("other", [0.5], None, 0.25)]})
        with pytest.raises(InputError, match="at least one seed"):
            figures.ExplainerDot("first", [], None, 0.25)
        with pytest.raises(InputError, match="finite"):
            figures.ExplainerDot("first", [0.5], float("nan"), 0.25)
