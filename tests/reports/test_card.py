"""Cards: what they hold, what they refuse, and bars on their numbers."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import fgai
from fgai.certificates import ALL_FOUR, PROPERTIES, certify_attention, certify_injection
from fgai.errors import CheckpointError, FgaiError, FgaiWarning, InputError
from fgai.evaluation import evaluate
from fgai.records import look_up
from fgai.reports.cards import Card, card, card_from_files, check_card
from fgai.sparse import Features
from fgai.training import train, untrained_model
from support.graph_cases import small_data
from support.report_cases import EVIL, K, certificates, comparison, injection_certificate


@pytest.fixture(scope="module")
def made() -> Card:
    return card(comparison(), [certificates()["GAT"]], name="GAT")


def changed(made: Card, **parts: Any) -> dict[str, Any]:
    """The card as its file holds it, with some parts replaced."""
    return {**made.to_dict(), **parts}


class TestContent:
    def test_numbers_are_those_of_the_record(self, made: Card) -> None:
        record = comparison()["GAT"]
        measured = [path for path in made.numbers if not path.startswith("certificate.")]
        assert {"f1.attacked", "g_tvd.rel", "overlap.prediction.all", "sharpness.clean.all"} <= set(measured)
        for path in measured:
            assert made.numbers[path]["value"] == look_up(record.metrics, path), path
        assert made.numbers["f1.clean"]["chance"] == record.metrics["f1"]["chance"]
        assert made.numbers["overlap.prediction.all"]["chance"] == record.metrics["overlap"]["chance"]["all"]
        assert made.numbers["g_tvd.rel"]["chance"] is None
        assert made.numbers["overlap.prediction.all"]["parameters"] == {"k": K}
        assert made.data["fingerprint"] == record.data["fingerprint"] and made.version == record.version
        assert made.protocol["seed"] == record.seed and made.threat["budget"] == record.threat["budget"]

    def test_certified_shares_with_what_they_are_about(self, made: Card) -> None:
        proof = certificates()["GAT"]
        found = made.numbers["certificate.share"]
        assert found["value"] == proof.layer().share("topk", proof.radius)
        assert found["parameters"] == {"radius": 0.01, "norm": "l1", "k": K}
        assert proof.promise in made.limits

    def test_the_definition_with_a_sentence_for_each_property(self, made: Card) -> None:
        record, proof = comparison()["GAT"], certificates()["GAT"]
        about = {"radius": 0.01, "alpha": 0.1, "beta": 0.8, "k": K}
        for name in (*PROPERTIES, ALL_FOUR):
            found = made.numbers[f"definition.r01.{name}.last"]
            assert found["value"] == record.value(f"definition.r01.{name}.last") is not None
            assert found["parameters"] == about and found["title"] == name.replace("_", " ")
        assert made.definition == [f"{proof.layer().name}: {text}" for text in proof.sentences()]
        assert all(f"- {text}" in made.to_markdown() for text in made.definition)
        assert any("not measured" in text for text in made.definition)  # the certificate has no vanilla model
        assert set(made.definition) <= set(made.tables()[0].notes)
        alone = card(comparison(), name="GAT")
        assert alone.definition == [] and "## Definition 1" not in alone.to_markdown()
        older = {key: value for key, value in alone.to_dict().items() if key != "definition"}
        assert Card.from_dict(older) == alone

    def test_injection_certificates_too(self) -> None:
        proof = injection_certificate()
        found = card(dataclasses.replace(comparison()["GAT"], provenance=proof.provenance), [proof])
        shares = [proof.order_share(place) for place in range(len(proof.layers))]
        known = [share for share in shares if share is not None]
        expected = min(known) if len(known) == len(shares) else None
        assert found.numbers["injection.class_share"]["value"] == (proof.share() if proof.known else None)
        assert found.numbers["injection.order_share"]["value"] == expected
        assert found.numbers["injection.class_share"]["parameters"]["neighbours"] == proof.neighbours
        assert proof.promise in found.limits

    def test_a_certificate_of_other_weights_or_data_is_refused(self, tmp_path: Path) -> None:
        """Of the same class, settings, name and size: only the hashes tell them apart."""
        graph = small_data()
        one, two = (
            train(
                untrained_model("GAT", graph, hidden_channels=2, heads=2),
                graph,
                epochs=2,
                seed=s,
                progress=False,
            )
            for s in (0, 1)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FgaiWarning)  # numbers on so small a graph are rightly doubted
            record = evaluate(one, graph, "random", nodes=2, edges=2, curves=False, nulls=False)
        good = certify_attention(one, graph, radius=0.1)
        for other_proof in (certify_attention(two, graph, radius=0.1), certify_injection(two, graph)):
            with pytest.raises(InputError, match="`certificates` must be of the same weights"):
                card(record, [other_proof])
        assert card(record, [good]).provenance == record.provenance
        other = graph.replace(features=Features.dense(graph.features.to_dense() + 1))
        with pytest.raises(InputError, match="`certificates` must be of the same data"):
            card(record, [certify_attention(one, other, radius=0.1)])
        files = [
            record.save(tmp_path / "e.json"),
            certify_attention(two, graph, radius=0.1).save(tmp_path / "c.json"),
        ]
        with pytest.raises(InputError, match="same weights"):
            card_from_files(files)
        old = dataclasses.replace(good, provenance={})
        with pytest.raises(InputError, match="does not name its weights; make it again"):
            card(record, [old])

    def test_a_certificate_of_another_model_is_refused(self) -> None:
        with pytest.raises(InputError, match="must be of the same model"):
            card(comparison(), [certificates()["FGAI"]], name="GAT")

    def test_which_model_must_be_said(self) -> None:
        with pytest.raises(InputError, match="`name` must say whose card is made: GAT, FGAI"):
            fgai.card(comparison())
        assert card(comparison()["FGAI"]).name == "FGAI"
        assert card(comparison()["FGAI"], name="mine").name == "mine"


class TestFiles:
    def test_it_comes_back_as_it_was(self, made: Card, tmp_path: Path) -> None:
        where, beside = made.write(tmp_path / "deep" / "card.json")
        assert Card.load(where) == made
        assert beside.read_text(encoding="utf-8") == made.to_markdown()

    def test_from_files_in_any_order(self, made: Card, tmp_path: Path) -> None:
        both, proof = tmp_path / "both.json", tmp_path / "proof.json"
        comparison().save(both)
        certificates()["GAT"].save(proof)
        assert card_from_files([proof, both], name="GAT") == made
        with pytest.raises(InputError, match="one evaluation or comparison, got 0"):
            card_from_files([proof])
        made.save(tmp_path / "card.json")
        with pytest.raises(CheckpointError, match="holds 'card'; a card is made of evaluation, comparison"):
            card_from_files([tmp_path / "card.json"])

    @pytest.mark.parametrize(
        ("parts", "said"),
        [
            ({"schema": 99}, "written by a newer fgai"),
            ({"schema": "1"}, "schema version is damaged"),
            ({"kind": "evaluation"}, "expected a record of kind 'card'"),
            ({"threat": {"name": "standard"}}, "words of threat of the card must be text, got None"),
            ({"data": {"name": 3, "fingerprint": ""}}, "name of data of the card must be text, got 3"),
            ({"numbers": {"f1": {"value": 1.0}}}, "f1 of numbers of the record is incomplete"),
            ({"numbers": {"f1": 0.5}}, "must be an object, got 0.5"),
            ({"extra": 1}, "unknown to this fgai"),
        ],
    )
    def test_other_content_is_refused(
        self, made: Card, tmp_path: Path, parts: dict[str, Any], said: str
    ) -> None:
        path = tmp_path / "card.json"
        path.write_text(json.dumps(changed(made, **parts)))
        with pytest.raises(CheckpointError, match=said):
            Card.load(path)

    def test_damaged_files_are_refused(self, made: Card, tmp_path: Path) -> None:
        path, text = tmp_path / "card.json", made.to_json()
        value = json.dumps(made.numbers["f1.clean"]["value"])
        damaged = {
            "truncated": text[: len(text) // 2],
            "nan": text.replace(value, "NaN", 1),
            "infinite": text.replace(value, "1e999", 1),
            "twice": text.replace('"name"', '"name": "x", "name"', 1),
            "empty": "",
        }
        for name, content in damaged.items():
            path.write_text(content)
            with pytest.raises(CheckpointError):
                Card.load(path)
            assert content != text, name

    def test_a_full_disk_leaves_the_old_card(
        self, made: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "card.json"
        made.write(path)
        before = path.read_bytes()

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FgaiError, match="No space left on device; nothing was changed"):
            dataclasses.replace(made, name="other").write(path)
        assert path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == [
            "card.json",
            "card.md",
        ]

    def test_markdown_shows_names_as_text(self, made: Card) -> None:
        said = {"code": "x", "message": f"{EVIL} | *bold* [a](http://b)\n# no heading"}
        text = dataclasses.replace(made, name=f"a|b {EVIL}\n## x", warnings=[said]).to_markdown()
        assert "<script" not in text and "&lt;script&gt;" in text
        assert "\\*bold\\* \\[a\\](http://b) # no heading" in text
        headings = [line for line in text.splitlines() if line.startswith("#")]
        assert headings[1:] == ["## Numbers", "## Definition 1", "## Limits"]


class TestBars:
    def test_names_stand_for_what_begins_with_them_or_comes_of_the_metric(self, made: Card) -> None:
        found = check_card(made, {"f1": 0.0}, {"g_tvd_rel": 1e9})
        assert [entry.path for entry in found] == ["f1.clean", "f1.attacked", "g_tvd.rel"]
        assert all(entry.met for entry in found)

    def test_the_bar_itself_is_met(self, made: Card) -> None:
        value = made.numbers["f1.clean"]["value"]
        for shift, least, most in ((0.0, True, True), (1e-9, False, True), (-1e-9, True, False)):
            bars = {"f1.clean": value + shift}
            assert [entry.met for entry in check_card(made, bars, bars)] == [least, most]

    def test_what_is_not_defined_meets_no_bar(self, made: Card) -> None:
        numbers = {"f1.clean": {**made.numbers["f1.clean"], "value": None}}
        found = check_card(dataclasses.replace(made, numbers=numbers), {"f1": -1.0}, {"f1": 2.0})
        assert [entry.met for entry in found] == [False, False]

    @pytest.mark.parametrize("name", ["beauty", "", "f1.", "f", "fidelity_plus"])
    def test_unknown_names_are_refused(self, made: Card, name: str) -> None:
        with pytest.raises(InputError, match="the card has no quantity"):
            check_card(made, {name: 0.5})

    def test_a_near_name_is_offered(self, made: Card) -> None:
        with pytest.raises(InputError, match=r"it has .*f1\.attacked"):
            check_card(made, {"f1.atacked": 0.5})

    def test_bars_must_be_there_and_finite(self, made: Card) -> None:
        with pytest.raises(InputError, match="at least one bar"):
            check_card(made)
        for bound in (float("nan"), float("inf")):
            with pytest.raises(InputError, match="must be a finite number"):
                check_card(made, {"f1": bound})
