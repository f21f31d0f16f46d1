"""`fgai.report`: one call gives what the steps give, on the page and beside it."""

from __future__ import annotations

import html
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from fgai.attacks import Attack, AttackResult
from fgai.errors import FgaiWarning, InputError
from fgai.reports import Report, make_report
from fgai.reports.results import certify_injections
from support import task_cases
from support.report_cases import GRAPH, THREAT, K, attacks, comparison, models


class TestOneCall:
    """`fgai.report` attacks, measures, certifies and writes the page."""

    def made(self, path: Path | None = None, **options: Any) -> Report:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FgaiWarning)  # numbers on so small a graph are rightly doubted
            return fgai.report(models(), GRAPH, path, threat=THREAT, k=K, **options)

    def test_it_is_what_the_steps_give(self, tmp_path: Path) -> None:
        steps: list[str] = []
        made = self.made(tmp_path / "page", node=3, class_names=["a", "b", "c"], on_step=steps.append)
        assert steps == ["comparing", "certifying", "certifying against injection", "making the page"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page.json"]
        assert Report.load(tmp_path / "page.json") == made
        proofs = {n: fgai.certify_attention(m, GRAPH, vanilla=models()["GAT"], radius=0.01, k1=K, k2=K)
                  for n, m in models().items()}  # fmt: skip
        same = make_report(
            comparison(), models=models(), data=GRAPH, certificates=proofs, attacks=attacks(), node=3,
            injections=certify_injections(models(), GRAPH, K), class_names=["a", "b", "c"],
        )  # fmt: skip
        for part in (
            "title",
            "reference",
            "histories",
            "distribution",
            "subgraph",
            "explorer",
            "notes",
            "injections",
        ):
            assert getattr(made, part) == getattr(same, part), part
        assert [r["metrics"] for r in made.records] == [r["metrics"] for r in same.records]
        page = html.unescape((tmp_path / "page.html").read_text()).replace("\u00a0", " ")
        assert "<h3>Nodes where Definition 1 holds" in page
        for name, proof in proofs.items():
            last = made.certificates[name]["layers"][-1]
            wanted = {"counted": int(proof.counted().sum()), **proof.shares()}
            assert last["definition"] == wanted and None not in wanted.values()
            assert last["sentences"] == proof.sentences()
            assert all(f"<li>{text}</li>" in page for text in proof.sentences())
            share = f"{100 * wanted['all_four']:.1f} %"
            assert f'<span class="bar-name">{name}</span><span class="bar-value">{share}</span>' in page

    def test_it_shows_the_attacks_it_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs, run = [], Attack.run

        def counted(attack: Attack, *args: Any, **options: Any) -> AttackResult:
            runs.append(attack.objective.name)
            return run(attack, *args, **options)

        monkeypatch.setattr(Attack, "run", counted)
        self.made()
        assert sorted(runs) == ["explanation", "explanation", "prediction", "prediction"]

    def test_without_a_path_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert self.made().names == ["GAT", "FGAI"] and not list(tmp_path.iterdir())

    def test_bad_input_before_any_work(self) -> None:
        with pytest.raises(InputError, match="`models` must hold at least one model"):
            fgai.report({}, GRAPH)
        with pytest.raises(InputError, match=r"`node` must be in 0\.\.39, got 40"):
            self.made(node=40, on_step=lambda step: pytest.fail(step))


@pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")
@pytest.mark.parametrize("task", ["graph", "link"])
def test_pages_of_other_tasks_hold_no_certificate_of_other_rows(task: str) -> None:
    """Classes of links and graphs are not those of nodes; nodes of graphs under attack have new numbers."""
    data, model = task_cases.data(task), task_cases.trained(task)
    page = fgai.report({"GAT": model}, data, threat="random", nodes=1, edges=3, k=2)
    assert page.explorer is not None
    radii = page.explorer["models"][0]["radii"] or []
    assert all(layer["class"] is None for layer in radii)
    assert bool(radii) is (task == "link") and ("left out" in " ".join(page.notes)) is (task == "graph")
    nodes = page.explorer["nodes"]
    assert page.explorer["classes"] == (["no link", "link"] if task == "link" else None)
    if task == "link":
        assert data.links is not None
        pairs = list(zip(*data.links.pairs.tolist(), data.links.y.tolist(), strict=True))
        for node, label in zip(nodes["id"], nodes["label"], strict=True):
            assert label in {y for a, b, y in pairs if node in (a, b)} or label == -1
        assert set(nodes["label"]) >= {0, 1}
    else:
        assert data.graph_y is not None and data.batch is not None
        assert len(nodes["id"]) == len(nodes["label"]) and set(nodes["label"]) == {0, 1}


def test_a_counterfactual_that_is_no_switch_is_refused() -> None:
    with pytest.raises(TypeError, match="`counterfactual` must be True or False, got Tensor"):
        fgai.report(models(), GRAPH, counterfactual=torch.ones(3))  # type: ignore[arg-type]
