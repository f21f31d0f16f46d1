"""The report document and the page: numbers are those of models and records, text stays text, sizes hold."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fgai.attacks import THREATS, Budget, FeaturePGD, RandomEdges
from fgai.attention import LayerAttention
from fgai.errors import FgaiError, InputError, MissingExtraError
from fgai.evaluation import Comparison
from fgai.explanations import GraphView
from fgai.reports import Report, make_report, page, render, write_report
from fgai.reports.nodes import ANY, MOST_NEIGHBOURS, UNIT, _choose, _ModelViews, _neighbourhoods
from fgai.reports.page import _embedded, _trimmed
from fgai.reports.results import _over_layers
from fgai.reports.words import attack_words
from support.forward import view_of
from support.report_cases import (
    EVIL,
    GRAPH,
    NAMES,
    K,
    attacks,
    certificates,
    comparison,
    models,
    report,
    whole_report,
)

LIBRARY = "/* plotly */"


def test_features_and_weights_can_be_left_out() -> None:
    assert [report(what_if=what_if).whatif is None for what_if in (True, False)] == [False, True]


class Reader(HTMLParser):
    """Collects tags, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data = ""
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag if tag in ("script", "style") else ""
        if dict(attrs).get("id") == "data":
            self._open = "data"

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "data":
            self.data += data
        elif not self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def whole() -> Report:
    return whole_report()


class TestDocument:
    def test_neighbours_and_attention_are_the_models(self, whole: Report) -> None:
        explorer = whole.explorer
        assert explorer is not None and sorted(explorer["nodes"]["id"]) == list(range(40))
        for entry in explorer["models"]:
            clean = view_of(models()[entry["name"]], GRAPH)
            attacked = view_of(models()[entry["name"]], attacks()[entry["name"]].graph, original=40)
            for spot, node in enumerate(explorer["nodes"]["id"]):
                listed = explorer["nodes"]["neighbours"][spot]
                for key, view in (("before", clean.node(node)), ("after", attacked.node(node))):
                    wanted = dict(zip(view.neighbours, view.weights, strict=True))
                    found = {n: w for n, w in zip(listed, entry[key][spot], strict=True) if w is not None}
                    assert found.keys() == wanted.keys()
                    for n, w in found.items():
                        assert w * UNIT == pytest.approx(wanted[n], abs=1e-6)
                assert entry["predicted"][spot] == clean.node(node).predicted
                assert entry["predicted_after"][spot] == attacked.node(node).predicted
                assert entry["confidence"][spot] == pytest.approx(1000 * clean.node(node).confidence, abs=0.6)

    def test_radii_are_those_of_the_certificates(self, whole: Report) -> None:
        assert whole.explorer is not None
        for entry in whole.explorer["models"]:
            for layer, wanted in zip(entry["radii"], certificates()[entry["name"]].layers, strict=True):
                for spot, node in enumerate(whole.explorer["nodes"]["id"]):
                    radius = float(wanted.topk_radius[node])
                    found = layer["topk"][spot]
                    assert found == (ANY if np.isinf(radius) else pytest.approx(radius, rel=6e-3))

    def test_distribution_counts_the_nodes_in_reach(self, whole: Report) -> None:
        assert whole.distribution is not None
        for attack in whole.distribution["attacks"]:
            for entry in attack["models"]:
                record = comparison()[entry["name"]]
                overlap = record.node_values(f"overlap_{attack['key']}")
                reach = record.node_values("touched")
                counts = np.zeros((2, K + 1))
                for layer in range(2):
                    for node in range(40):
                        share = float(overlap[layer, node])
                        if reach[layer, node] and not np.isnan(share):
                            counts[layer, round(K * share)] += 1
                wanted = (counts / counts.sum(1, keepdims=True)).mean(0)
                assert entry["shares"] == pytest.approx(wanted, abs=1e-5)
                assert entry["mean"] == pytest.approx(record.value(f"overlap_touched.{attack['key']}.all"))

    def test_subgraph_shows_the_stronger_direction(self, whole: Report) -> None:
        drawn = whole.subgraph
        assert drawn is not None and whole.explorer is not None
        assert drawn["centre"] == whole.explorer["nodes"]["id"][0] == drawn["nodes"][0]
        view = view_of(models()["GAT"], GRAPH)
        for (a, b), weight in zip(drawn["edges"], drawn["models"][0]["before"], strict=True):
            one, other = drawn["nodes"][a], drawn["nodes"][b]
            if weight is None:
                assert max(one, other) >= 40
                continue
            rows = [view.node(n) for n in (one, other)]
            both = [
                dict(zip(row.neighbours, row.weights, strict=True)).get(n, 0.0)
                for row, n in zip(rows, (other, one), strict=True)
            ]
            assert weight * UNIT == pytest.approx(max(both), abs=1e-6)
        assert any(node >= 40 for node in drawn["nodes"])

    def test_losses_and_settings(self, whole: Report) -> None:
        assert whole.histories["GAT"]["epochs"] == 8 == len(whole.histories["GAT"]["terms"]["total"])
        assert whole.reference == "GAT" and whole.names == ["GAT", "FGAI"]
        assert all("per_node" not in record for record in whole.records)

    def test_json_reads_back(self, whole: Report, tmp_path: Path) -> None:
        assert Report.load(whole.save(tmp_path / "report.json")) == whole

    def test_node_can_be_asked_for(self) -> None:
        asked = report(node=11)
        assert asked.subgraph is not None and asked.subgraph["centre"] == 11
        with pytest.raises(InputError, match=r"0..39, got 40"):
            report(node=40)

    def test_bad_input(self) -> None:
        with pytest.raises(InputError, match="at least one evaluation"):
            make_report([])
        with pytest.raises(InputError, match="`data` must be given"):
            make_report(comparison(), models=models())
        assert [note for note in report(models={"GAT": models()["GAT"]}).notes if "'FGAI'" in note]
        alone = report(attacks=None)
        assert alone.subgraph is None and any("no attack on the row 'GAT'" in note for note in alone.notes)

    def test_single_record_without_models(self) -> None:
        alone = make_report(comparison()["FGAI"])
        assert alone.subgraph is None and alone.explorer is not None and alone.reference == "FGAI"
        assert "neighbours" not in alone.explorer["nodes"]
        assert alone.explorer["models"][0]["predicted"] == [
            int(comparison()["FGAI"].node_values("predicted_clean")[n]) for n in alone.explorer["nodes"]["id"]
        ]


class TestChoice:
    def test_important_nodes_first_then_a_sample_within_the_budget(self) -> None:
        cost = np.full(9000, 31)
        nodes, words = _choose(9000, [("a", [5, 3]), ("b", range(3, 20))], cost, models=2)
        assert nodes[:3] == [5, 3, 4] and len(nodes) == len(set(nodes)) == 60_000 // 32
        assert "of 9,000 nodes: 2 a, 15 b and" in words
        assert nodes == _choose(9000, [("a", [5, 3]), ("b", range(3, 20))], cost, models=2)[0]

    def test_small_graphs_are_carried_whole(self) -> None:
        nodes, words = _choose(12, [], np.ones(12, dtype=int))
        assert len(nodes) == 12 and "all 12 nodes" in words

    def test_hubs_keep_their_strongest_neighbours_in_every_view(self) -> None:
        generator = np.random.default_rng(0)
        weights = [generator.dirichlet(np.full(300, concentration)) for concentration in (0.05, 50.0)]
        source, hub = torch.arange(300), torch.zeros(300, dtype=torch.int64)
        layers = [LayerAttention(torch.tensor(weight)[:, None], source, hub, 300) for weight in weights]
        views = [
            GraphView(GRAPH, layer, np.zeros(300, dtype=int), np.ones(300), num_original=300)
            for layer in layers
        ]
        model = _ModelViews("hub", *views, new=[], changed=set(), ends=set())
        found = _neighbourhoods([model], [0], 5)
        listed = found["neighbours"][0]
        assert len(listed) == MOST_NEIGHBOURS and found["rest"] == [300 - MOST_NEIGHBOURS]
        for weight in weights:
            assert set(np.argsort(-weight)[:5]) <= set(listed)
        for name, weight in zip(("before", "after"), weights, strict=True):
            rest = found["models"][0][f"rest_{name}"][0] * UNIT
            assert rest == pytest.approx(1 - weight[listed].sum(), abs=1e-5)

    def test_over_layers(self) -> None:
        nan = float("nan")
        found = _over_layers(np.array([[0.5, nan, nan], [1.0, 0.25, nan]]))
        np.testing.assert_allclose(found, [0.75, 0.25, nan])


class TestPage:
    def test_text_from_data_stays_text(self, whole: Report) -> None:
        made = render(whole, LIBRARY)
        found = Reader(made)
        assert made.count("<script") == 4 and EVIL not in made
        assert not [tag for tag, _ in found.tags if tag in ("i", "b")]
        carried = json.loads(found.data)
        spot = carried["explorer"]["nodes"]["id"].index(7)
        assert carried["explorer"]["nodes"]["name"][spot] == EVIL
        assert carried == json.loads(json.dumps(whole.to_dict()))

    def test_names_of_rows_and_data_are_escaped(self) -> None:
        values = comparison().to_dict()
        for record, name in zip(values["records"], ("<img src=x onerror=alert(1)>", "a&b"), strict=True):
            record["name"] = name
            record["data"] = {**record["data"], "name": "</title><script>alert(2)</script>"}
        values["reference"] = "a&b"
        made = render(make_report(Comparison.from_dict(values)), LIBRARY)
        found = Reader(made)
        assert "<img" not in made and made.count("<script") == 4
        assert "<img src=x onerror=alert(1)>" in found.text

    @pytest.mark.parametrize("text", ["</script>", "<!--", "a\u2028b", "&amp;", "ünïcode ✓"])
    def test_embedded_json_holds_anything(self, text: str) -> None:
        plain = _embedded({"name": text})
        assert json.loads(plain) == {"name": text}
        assert not set("<>&\u2028") & set(plain)

    def test_nothing_is_fetched(self, whole: Report) -> None:
        made = render(whole, LIBRARY)
        for tag, attributes in Reader(made).tags:
            assert tag not in ("link", "iframe", "img", "object", "embed", "base")
            for name in ("src", "href", "action", "srcset"):
                assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert "@import" not in made and "url(" not in made
        assert "default-src 'none'" in made

    def test_headline_numbers_are_the_records(self, whole: Report) -> None:
        text = Reader(render(whole, LIBRARY)).text.replace("\u00a0", " ")
        for record in comparison():
            before, after = (100 * record.value(f"f1.{when}") for when in ("clean", "attacked"))
            assert f"{before:.0f} % → {after:.0f} %" in text
            assert f"{K * record.value('overlap_touched.explanation.all'):.1f} of {K}" in text
            assert f"{record.value('truth.auc.all'):.3f}" in text if record.get("truth") else True
            assert f"{record.value('g_tvd.probs'):.2e}".replace("-", "−") in text
        assert "adds 3 fake nodes and joins each to 5 test nodes" in text
        assert "fingerprint " + comparison()["GAT"].data["fingerprint"] in text
        for entry in comparison()["GAT"].warnings:
            assert entry["message"] in text

    def test_warnings_show_code_and_nothing_of_theirs_is_markup(self, whole: Report) -> None:
        said = "no `<b>_mask` & `k`; give `--seeds` or --top-k, a--b, <i>x</i> and one ` more"
        records = [{**record, "warnings": [{"code": "x", "message": said}]} for record in whole.records]
        made = render(dataclasses.replace(whole, records=records, notes=["see `fgai.limit`"]), LIBRARY)
        assert (
            "no <code>&lt;b&gt;_mask</code> &amp; <code>k</code>; give <code>--seeds</code> or"
            " <code>--top-k</code>, a--b, &lt;i&gt;x&lt;/i&gt; and one ` more</li>"
        ) in made
        assert "<li>see <code>fgai.limit</code></li>" in made

    def test_what_is_not_measured_is_said_and_has_no_bar(self, whole: Report) -> None:
        """The certificates of `whole` have no vanilla model."""
        made = render(whole, LIBRARY)
        assert "<h3>Nodes where Definition 1 holds" not in made
        for name, proof in certificates().items():
            assert whole.certificates[name]["layers"][-1]["definition"]["all_four"] is None
            said = [html.escape(text, quote=True) for text in proof.sentences()]
            assert "Same explanation: not measured, because no vanilla model was given." in said
            assert all(f"<li>{text}</li>" in made for text in said)

    def test_parts_without_a_place_are_named(self) -> None:
        bare = make_report(comparison())
        text = Reader(render(bare, LIBRARY)).text
        for words in ("Attention before and after is not in this record", "Nothing was certified"):
            assert words in text
        assert "Loss curves are not" in text and "F-curves are not" not in text
        assert "What this page cannot show" not in Reader(render(whole_report(), LIBRARY)).text

    def test_real_page_is_small_and_whole(self, tmp_path: Path) -> None:
        path = write_report(whole_report(), tmp_path / "page")
        assert path.name == "page.html" and path.stat().st_size < 10_000_000
        made = path.read_text()
        assert "Plotly" in made and made.rstrip().endswith("</html>")
        assert Report.load(tmp_path / "page.json") == whole_report()

    def test_title_and_commands_are_escaped(self, tmp_path: Path) -> None:
        document = make_report(comparison(), title="A & B", reproduce=["fgai demo < x"])
        made = write_report(document, tmp_path / "a.html").read_text()
        assert "<title>A &amp; B</title>" in made and html.escape("fgai demo < x") in made
        with pytest.raises(FgaiError, match="cannot write"):
            (tmp_path / "file").write_text("")
            write_report(whole_report(), tmp_path / "file" / "b.html")

    def test_huge_documents_lose_nodes_not_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        explorer: dict[str, Any] = {
            "k": 3, "unit": UNIT, "total": 4000, "words": "all", "classes": None,
            "nodes": {"id": list(range(400)), "neighbours": [[1] * 50] * 400, "name": None},
            "models": [{"name": "GAT", "before": [[5] * 50] * 400, "radii": [{"topk": [1] * 400}]}],
        }  # fmt: skip
        monkeypatch.setattr(page, "LIMIT", 60_000)
        made = render(Report(records=whole_report().records, explorer=explorer), LIBRARY)
        carried = json.loads(Reader(made).data)["explorer"]
        count = len(carried["nodes"]["id"])
        assert 50 <= count < 400 and len(carried["models"][0]["radii"][0]["topk"]) == count
        assert f"carries {count:,} of 4,000 nodes" in Reader(made).text
        assert _trimmed(explorer, 60)["models"][0]["name"] == "GAT"
        monkeypatch.setattr(page, "LIMIT", 10)
        assert json.loads(Reader(render(whole_report(), LIBRARY)).data)["explorer"] is None

    def test_the_kept_epoch_is_one_number(self) -> None:
        text = Reader(render(whole_report(), LIBRARY)).text
        history = models()["GAT"].history
        assert re.search(rf"training kept epoch\s+{history.kept_epoch}\s", text)
        assert "best epoch" not in text and "all epochs" in text

    def test_without_plotly(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        with pytest.raises(MissingExtraError, match=re.escape("pip install 'fgai[report]'")):
            write_report(whole_report(), tmp_path / "page.html")
        assert not list(tmp_path.iterdir())

    def test_empty_document(self) -> None:
        with pytest.raises(InputError, match="nothing to show"):
            render(Report(), LIBRARY)


def test_other_threats_are_described() -> None:
    values = comparison().to_dict()
    budgets: list[tuple[dict[str, Any], str]] = [
        ({"nodes": 1, "edges": 1, "targets": "test"}, "adds 1 fake node and joins it to 1 test node."),
        ({"edges": 400, "targets": "test"}, "adds or removes 400 edges between test nodes. It does not"),
        (
            {"radius": 0.1, "rows": 0.05, "steps": 10, "targets": "val"},
            "moves the features of 5 % of the val",
        ),
        ({"nodes": 60, "edges": 40, "steps": 50, "restarts": 3, "targets": "test"}, "in 50 steps, 3 times"),
        ({}, "does not say what the attack may do"),
    ]
    for budget, words in budgets:
        for record in values["records"]:
            record["threat"] = {"name": "other", "budget": budget}
        made = render(make_report(Comparison.from_dict(values)), LIBRARY)
        assert words in Reader(made).text.replace("\u00a0", " ")


@pytest.mark.parametrize("name", THREATS)
def test_every_threat_is_told_by_what_it_may_change(name: str) -> None:
    budget = THREATS[name].budget
    words = attack_words({"threat": {"name": name, "budget": budget.to_dict()}})
    assert words.startswith(f"The {name} attack ")
    assert ("removes" in words) == (name in ("dice", "flips"))
    adds_only = name not in ("dice", "flips", "modify")
    assert ("what it adds" in words) == adds_only != ("what it changes" in words)
    drawn = name in ("standard", "random", "natural", "edges", "modify", "preserving")
    assert ("the same places" in words) == drawn != ("chosen for each" in words)


@pytest.mark.parametrize("kind", ["edges", "modify"])
def test_attacks_that_add_no_nodes(kind: str) -> None:
    budgets = {"edges": Budget(edges=9), "modify": Budget(rows=0.4, radius=0.2, steps=1, step_size=0.2)}
    attack = {"edges": RandomEdges, "modify": FeaturePGD}[kind](budgets[kind])
    result = attack.run(models()["GAT"], GRAPH)
    made = make_report(comparison()["GAT"], models=models(), data=GRAPH, attacks={"GAT": result})
    assert made.explorer is not None and made.subgraph is not None
    joined = {n for n, hit in zip(*(made.explorer["nodes"][x] for x in ("id", "joined")), strict=True) if hit}
    changed = made.explorer["models"][0]["changed"]
    if kind == "edges":
        assert result.change.edges is not None and changed is None
        assert joined == set(result.change.edges.flatten().tolist())
    else:
        assert result.change.rows is not None and not joined
        hit = {n for n, yes in zip(made.explorer["nodes"]["id"], changed, strict=True) if yes}
        assert hit == set(result.change.rows.tolist())
    render(made, LIBRARY)


def test_large_names_are_clipped() -> None:
    made = report(node_names={**NAMES, 9: "x" * 10_000})
    assert made.explorer is not None
    spot = made.explorer["nodes"]["id"].index(9)
    assert len(made.explorer["nodes"]["name"][spot]) == 80


def test_models_are_left_as_they_were() -> None:
    model = models()["GAT"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report()
    assert not model.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
