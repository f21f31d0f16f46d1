"""What counts as better, as before or worse, and the words made of it."""

from __future__ import annotations

from typing import Any

import pytest

from fgai.evaluation.summary import BETTER, SAME, WORSE, sentences, summary_table, verdict
from fgai.reports.words import _changes, _kinds_of, _verdict, balance_words, table


def record(name: str, **values: Any) -> dict[str, Any]:
    """A record with the metrics named; `f1__clean` stands for `f1.clean`."""
    metrics: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split("__")
        level = metrics
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return {"name": name, "config": {"k": 7}, "metrics": metrics}


@pytest.mark.parametrize(
    ("path", "key", "before", "after", "kind"),
    [
        ("f1__attacked", "attacked", 0.5, 0.53, BETTER),
        ("f1__attacked", "attacked", 0.5, 0.52, SAME),
        ("f1__attacked", "attacked", 0.5, 0.48, SAME),
        ("f1__attacked", "attacked", 0.5, 0.47, WORSE),
        ("g_tvd__rel", "moved", 11.0, 10.0, SAME),
        ("g_tvd__rel", "moved", 11.0, 9.9, BETTER),
        ("g_tvd__rel", "moved", 0.0, 0.0, SAME),
        ("g_tvd__rel", "moved", 0.0, 0.1, WORSE),
        ("f_slope__node__attacked__gap", "slope_attacked", -0.19, 0.63, BETTER),
        ("intruders__explanation__mass__all", "taken", 0.46, 0.15, BETTER),
        ("intruders__explanation__mass__all", "taken", 0.15, 0.46, WORSE),
        ("intruders__explanation__mass__all", "taken", 0.15, 0.16, SAME),
    ],
)
def test_kinds(path: str, key: str, before: float, after: float, kind: str) -> None:
    found = _changes(record("A", **{path: before}), record("B", **{path: after}))
    assert [change.key for change in found] == [key] and _kinds_of(found)[key] == kind
    assert "unheard of" not in _kinds_of(found)


@pytest.mark.parametrize(
    ("attacked", "kept", "aimed", "clean", "words"),
    [
        (0.8, 0.7, 0.9, 0.9, "than A, and so do its explanations"),
        (0.8, 0.9, None, 0.9, "than A, and so do its explanations"),
        (0.8, 0.9, 0.7, 0.9, "than A, and so do its explanations unless they are the target"),
        (0.8, 0.7, 0.7, 0.9, "than A; its explanations hold as well as before"),
        (0.8, 0.9, 0.5, 0.9, "than A, but its explanations hold less well when they are the target"),
        (0.8, 0.5, 0.9, 0.9, "than A, but its explanations hold less well"),
        (0.8, None, None, 0.8, "B holds up better under attack than A; without attack it predicts worse"),
        (0.3, 0.7, 0.9, 0.9, "Predictions hold alike; the explanations of B hold better"),
        (0.3, 0.5, 0.9, 0.9, "B made no clear difference here"),
        (0.1, 0.9, 0.9, 0.9, "B did not help here: A holds better under attack"),
        (None, 0.9, 0.9, 0.9, "B beside A"),
    ],
)
def test_verdict(
    attacked: float | None, kept: float | None, aimed: float | None, clean: float, words: str
) -> None:
    both = [f"overlap_touched__{key}__all" for key in ("prediction", "explanation")]
    reference = record("A", f1__attacked=0.3, f1__clean=0.9, **dict.fromkeys(both, 0.7))
    other = record("B", f1__attacked=attacked, f1__clean=clean, **dict(zip(both, (kept, aimed), strict=True)))
    assert _verdict(_changes(reference, other), "A", "B").endswith(words)


def test_table_and_words() -> None:
    proofs = {name: {"layers": [{}, {"topk_share": share}]} for name, share in (("A", 0.3), ("B", 0.25))}
    reference = record("A", f1__attacked=0.296, f1__clean=0.891, f1__chance=0.2, g_tvd__rel=14.3)
    other = record("B", f1__attacked=0.58, f1__clean=0.878, g_tvd__rel=1.14)
    found = _changes(reference, other, proofs)
    rows = {row[0]: list(row[1:]) for row in table(found, "A", "B").texts()}
    assert rows["right under attack (F1 attacked)"] == ["29.6\u00a0%", "58.0\u00a0%", "20.0\u00a0%", "better"]
    assert rows["how far predictions move (g-TVD)"] == ["14", "1.1", "–", "better"]
    assert rows["top 7 proved to stay (certified)"] == ["30.0\u00a0%", "25.0\u00a0%", "–", "worse"]
    said = balance_words(found).replace("\u00a0", " ")
    assert said == (
        "2 of 4 measures got better. As before: right without attack (89.1 % → 87.8 %)."
        " Worse: top 7 proved to stay (30.0 % → 25.0 %)."
    )


def test_attention_taken_by_injected_nodes_stands_beside_uniform_attention() -> None:
    reference = record(
        "A", intruders__explanation__mass__all=0.456, null__uniform__intruders__mass__all=0.083
    )
    other = record("B", intruders__explanation__mass__all=0.148)
    (said,) = sentences([reference, other])
    assert said.replace("\u00a0", " ") == (
        "Injected nodes take 46 % (A) and 15 % (B) of the attention of the nodes they are joined to when the"
        " attack aims at explanations (uniform attention: 8 %)."
    )
    (change,) = _changes(reference, other)
    assert change.chance == 0.083 and change.texts == ("45.6\u00a0%", "14.8\u00a0%")
    assert sentences([record("A")]) == []


@pytest.mark.parametrize(
    ("threat", "ledgers", "aims"),
    [
        ("ensemble", {"prediction": {"value": 1.0}, "explanation": {"value": 2.0}}, True),
        ("random", {"prediction": {"steps": 0}, "explanation": {"steps": 0}}, False),
        ("random", {"prediction": {"steps": 0}}, False),
        ("preserving", {"prediction": {"steps": 50}}, False),
        ("ensemble", {"prediction": {"steps": 50}}, True),
    ],
)
def test_an_attack_that_counts_for_both_has_no_aim(threat: str, ledgers: dict[str, Any], aims: bool) -> None:
    paths = [f"overlap_touched__{key}__all" for key in ledgers]
    if "explanation" in ledgers:
        paths.append("intruders__explanation__mass__all")
    measured = {**record("A", **dict.fromkeys(paths, 0.7)), "threat": {"name": threat}, "ledgers": ledgers}
    said, names = sentences([measured]), [row[0] for row in summary_table([measured]).rows]
    assert any("aims at" in sentence for sentence in said) == aims
    assert any("attack on" in str(name) for name in names) == aims
    assert names.count("top 7 kept, under attack") == (not aims)


def test_verdict_of_a_score_that_is_no_share() -> None:
    for after, words in (
        (0.8, "can lower ROC-AUC from 90 % to 80 %."),
        (0.95, "did not lower ROC-AUC of 90 %."),
    ):
        made = record("A", roc_auc__clean=0.9, roc_auc__attacked=after)
        assert verdict(made).replace("\u00a0", " ") == f"The attack {words}"
