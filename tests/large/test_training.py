"""Training in mini-batches: with all neighbours it is training on the whole graph, gradient by gradient."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fgai
from fgai.attention import limits_of, prepared
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large import StoredGraph, write_store
from fgai.large.source import _StoredSource
from fgai.large.training import _FaithfulBatches, _VanillaBatches, stored_source
from fgai.progress import current_stage
from fgai.training import (
    FaithfulRecipe,
    FaithfulSettings,
    VanillaRecipe,
    certified,
    make_faithful,
    train,
    untrained_model,
)
from fgai.training.limiting import set_ranges
from support.graph_cases import small_data
from support.store_cases import slow
from support.training_cases import Calling, assert_same_weights, close, gradients, nudged

SIZES: dict[str, dict[str, Any]] = {
    "GAT": {"hidden_channels": 3, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
    "GATv2": {"hidden_channels": 3, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
    "GT": {"hidden_channels": 8, "heads": (4, 1), "encodings": 0, "dropout": 0.0, "norm": "layer"},
}
SETTINGS: list[dict[str, Any]] = [
    {"steps": 1},
    {"limits": False, "margin": 0.0},
    # Clipped nodes tie, and rounding would choose the top k among them.
    {"clip_share": 0.05, "shrink": 0.2, "steps": 1, "k": 100},
    {"certified": 1.0, "sharpness": 1.0, "steps": 3},
]
QUICK: dict[str, Any] = {"epochs": 3, "nodes": 3, "edges": 4, "progress": False}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return small_data(nodes=90, width=7)


def made(name: str, graph: Graph, seed: int = 0) -> nn.Module:
    return untrained_model(name, graph, seed=seed, **SIZES[name])


class TestGradients:
    @pytest.mark.parametrize("name", SIZES)
    def test_one_batch_of_all_is_a_step_on_the_whole_graph(self, name: str, graph: Graph) -> None:
        model = made(name, graph)
        wanted, terms = gradients(model, VanillaRecipe(prepared(model, graph)).losses(model, 0))
        assert max(float(value.abs().max()) for value in wanted.values()) > 1e-3
        with stored_source(graph, 0) as whole:
            whole.prepare(model, 1000, -1)
            (step,) = _VanillaBatches(whole).steps(model, 0)
            found, same = gradients(model, step.losses)
        close(found, wanted)
        assert same["total"] == pytest.approx(terms["total"], abs=1e-5)

    @pytest.mark.parametrize("name", SIZES)
    def test_several_batches_add_up(self, name: str, graph: Graph) -> None:
        model = made(name, graph)
        recipe = VanillaRecipe(prepared(model, graph))
        wanted, terms = gradients(model, recipe.losses(model, 0))
        with stored_source(graph, 0) as whole:
            whole.prepare(model, 4, [-1] * 2)
            batches, sums, count, loss = _VanillaBatches(whole), {}, 0, 0.0
            for step in batches.steps(model, 3):
                found, same = gradients(model, step.losses)
                sums = {key: sums.get(key, 0) + step.weight * value for key, value in found.items()}
                count, loss = count + step.weight, loss + step.weight * same["total"]
        assert count == len(recipe.train_rows) > 8  # several batches, each node once
        close({key: value / count for key, value in sums.items()}, wanted)
        assert loss / count == pytest.approx(terms["total"], abs=1e-5)

    @pytest.mark.many
    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            *(("GAT", settings) for settings in SETTINGS),
            ("GT", SETTINGS[0]),
            *slow(*(("GATv2", settings) for settings in SETTINGS)),
            *slow(*(("GT", settings) for settings in SETTINGS[1:])),
        ],
    )
    def test_all_terms_of_faithful_training(self, name: str, settings: dict[str, Any]) -> None:
        given = dict(settings)
        own = [certified] if given.pop("certified", 0) and name != "GT" else []
        # All nodes are in reach: where nothing moves, distances have a kink, and rounding chooses its side.
        graph = small_data(nodes=90, width=7, covered=True)
        config = FaithfulSettings(**{"nodes": 12, "edges": 21, "clip_share": 0.0, "shrink": 0.0, **given})
        vanilla = train(made(name, graph), graph, epochs=30, progress=False)
        on_whole, in_batches = (nudged(vanilla, config) for _ in range(2))
        full = FaithfulRecipe(vanilla, prepared(vanilla, graph), config, own)
        full.start(on_whole, 3)
        with stored_source(graph, 0) as whole:
            whole.prepare(vanilla, 1000, -1)
            batched = _FaithfulBatches(vanilla, whole, config, own)
            batched.start(in_batches, 3)
            torch.testing.assert_close(batched.reach.layers, full.reach.layers)
            # It climbs by signs, and those of gradients near zero are up to rounding.
            torch.testing.assert_close(batched.adversary.features, full.adversary.features, atol=0.5, rtol=0)
            batched.adversary.load_state(full.adversary.state())
            wanted, terms = gradients(on_whole, full.losses(on_whole, 0))
            (step,) = batched.steps(in_batches, 0)
            found, same = gradients(in_batches, step.losses)
        assert same.keys() == terms.keys() and {"closeness", "prediction_stability"} <= terms.keys()
        # Ascent steps before the last move points by signs, too.
        loose = bool(config.clip_share) or config.steps > 2
        for key, value in terms.items():
            assert same[key] == pytest.approx(value, rel=1e-4, abs=1e-4 if loose else 1e-5), key
        # Ends of a clipped range are nodes' own values, inside or outside by rounding: one node's gradient.
        close(found, wanted, 1e-3 if loose else 1e-5)

    def test_vanilla_outputs_are_those_of_the_whole_graph_whatever_is_drawn(self, graph: Graph) -> None:
        vanilla = train(made("GAT", graph), graph, epochs=5, progress=False)
        seen = fgai.attention.observe(vanilla, prepared(vanilla, graph), heads="mean")
        with stored_source(graph, 0) as whole:
            whole.prepare(vanilla, 16, 2)
            recipe = _FaithfulBatches(vanilla, whole, FaithfulSettings(nodes=3, edges=4))
            recipe.start(nudged(vanilla, recipe.settings), 0)
            for part in whole.batches(vanilla, None, 1):
                outputs = recipe.outputs.of(part)
                rows = part.nodes[: part.seeds]
                torch.testing.assert_close(outputs.logits, seen.logits[rows], atol=1e-5, rtol=0)
                for layer, exact in zip(outputs.layers, seen.attention.layers, strict=True):
                    mine = {(int(s), int(d)): float(w) for s, d, w in zip(
                        part.nodes[layer.source], part.nodes[layer.destination], layer.heads(), strict=True
                    )}  # fmt: skip
                    theirs = {(int(s), int(d)): float(w) for s, d, w in zip(
                        exact.source, exact.destination, exact.heads(), strict=True
                    )}  # fmt: skip
                    for node in part.nodes.tolist():
                        row = {edge: theirs[edge] for edge in mine if edge[1] == node}
                        for edge, value in row.items():
                            assert mine[edge] == pytest.approx(value / sum(row.values()), abs=1e-5)


class TestTraining:
    def test_learns_and_keeps_what_it_promises(self, graph: Graph, tmp_path: Path) -> None:
        stored = write_store(graph, tmp_path / "graph")
        model = made("GAT", graph)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        options: dict[str, Any] = {"epochs": 6, "batch_size": 8, "fan_out": 3, "progress": False}
        one = train(model, stored, seed=1, **options)
        same = train(model, str(tmp_path / "graph"), seed=1, **options)
        in_memory = train(model, graph, seed=1, **options)
        other = train(model, stored, seed=2, **options)
        assert_same_weights(one, same)
        assert_same_weights(one, in_memory)
        assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert one.history.terms[-1]["total"] < one.history.terms[0]["total"]
        assert len(one.history.terms) == 6 and not one.training

    def test_score_with_all_neighbours_is_that_of_the_whole_graph(self, graph: Graph) -> None:
        model = made("GATv2", graph)
        with stored_source(graph, 0) as whole:
            whole.prepare(model, 5, -1)
            found = _VanillaBatches(whole).score(model)
        assert found == pytest.approx(VanillaRecipe(prepared(model, graph)).score(model), abs=1e-5)

    def test_a_stored_graph_is_never_loaded(
        self, graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = write_store(graph, tmp_path / "graph")
        monkeypatch.setattr(StoredGraph, "load", lambda self: pytest.fail("loaded whole"))
        model = train("GAT", stored, epochs=2, batch_size=16, progress=False)
        assert model.config["in_channels"] == 7 and model.config["out_channels"] == graph.num_classes
        make_faithful(model, stored, batch_size=32, fan_out=[4, 2], **QUICK)

    def test_an_epoch_of_some_nodes_draws_others_every_time(self, graph: Graph) -> None:
        model, taken = made("GAT", graph), list[Tensor]()
        with stored_source(graph, 0) as whole:
            whole.prepare(model, 8, 2, 20)
            recipe = _FaithfulBatches(model, whole, FaithfulSettings(nodes=3, edges=4))
            assert recipe.steps_per_epoch == 3
            for epoch in range(2):
                parts = [part for part in whole.own_batches(model, None, epoch) if part is not None]
                assert [part.seeds for part in parts] == [8, 8, 4]
                taken.append(torch.cat([part.nodes[: part.seeds] for part in parts]))
            assert len(set(taken[0].tolist()) | set(taken[1].tolist())) > 25
            assert len(list(whole.batches(model, recipe.val_nodes, 0))) == -(-len(recipe.val_nodes) // 8)
            fingerprint = whole.fingerprint(model)
            whole.prepare(model, 8, 2)
            assert whole.fingerprint(model) != fingerprint
        settled = make_faithful(model, graph, batch_size=8, fan_out=2, epoch_size=20, **QUICK)
        assert len(settled.history.terms) == 3

    def test_ranges_are_those_of_the_whole_graph_in_the_end(self, graph: Graph) -> None:
        model = train(made("GAT", graph), graph, epochs=3, progress=False)
        made_so = make_faithful(model, graph, batch_size=16, fan_out=2, clip_share=0.02, shrink=0.1, **QUICK)
        found = [(limits.low.clone(), limits.high.clone()) for limits in limits_of(made_so)]
        set_ranges(made_so, prepared(made_so, graph), 0.02, 0.1)
        for (low, high), limits in zip(found, limits_of(made_so), strict=True):
            torch.testing.assert_close(low, limits.low, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(high, limits.high, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("weight", [0.0, *slow((60.0,))])
    def test_faithful_is_decided_by_the_seed(self, weight: float, graph: Graph) -> None:
        model = train(made("GAT", graph), graph, epochs=3, progress=False)
        options: dict[str, Any] = {"batch_size": 16, "fan_out": 3, "prediction_stability": weight, **QUICK}
        one, same, other = (make_faithful(model, graph, seed=seed, **options) for seed in (0, 0, 1))
        assert_same_weights(one, same)
        assert one.history.terms == same.history.terms != other.history.terms
        assert one.history.scores == same.history.scores

    def test_graphs_without_masks_get_a_split(self, graph: Graph, tmp_path: Path) -> None:
        bare = graph.replace(train_mask=None, val_mask=None, test_mask=None)
        stored = write_store(bare, tmp_path / "graph")
        whole = _StoredSource(stored, tmp_path, 4)
        split = fgai.datasets.random_split(bare.y, 4)
        assert torch.equal(whole.node_graph.val_mask, split.val)
        with_masks = graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)
        model = made("GAT", graph)
        options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "seed": 4, "progress": False}
        assert_same_weights(train(model, stored, **options), train(model, with_masks, **options))


class TestResume:
    @pytest.mark.many
    @pytest.mark.parametrize(
        ("kind", "after"), [("train", 0), ("train", 2), ("faithful", 2), *slow(("faithful", 0))]
    )
    def test_resumes_bit_by_bit(self, kind: str, after: int, graph: Graph, tmp_path: Path) -> None:
        vanilla = train(
            untrained_model("GAT", graph, hidden_channels=2, heads=2), graph, epochs=2, progress=False
        )

        class KilledError(Exception):
            pass

        def kill(epoch: int, values: Any) -> None:
            if epoch == after:
                raise KilledError

        def run(**options: Any) -> Any:
            shared: dict[str, Any] = {"batch_size": 16, "fan_out": 3, "seed": 2, **QUICK, "epochs": 4}
            shared |= options
            if kind == "faithful":
                return make_faithful(vanilla, graph, **shared)
            shared["validate_every"] = 2  # killed after an epoch that was not validated
            shared = {key: value for key, value in shared.items() if key not in ("nodes", "edges")}
            return train(vanilla, graph, **shared)

        whole = run()
        with pytest.raises(KilledError):
            run(checkpoint=tmp_path, tracker=Calling(kill))
        resumed = run(checkpoint=tmp_path)
        assert_same_weights(resumed, whole)
        assert resumed.history.terms == whole.history.terms
        assert resumed.history.scores == whole.history.scores
        with pytest.raises(fgai.errors.CheckpointError, match="another training"):
            run(checkpoint=tmp_path, batch_size=17)

    def test_interrupt_waits_for_the_end_of_the_epoch(
        self, graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {"epochs": 3, "batch_size": 4, "fan_out": 3, "progress": False}
        model, original = made("GAT", graph), _VanillaBatches._parts
        whole = train(model, graph, **options)
        seen: list[tuple[str, int, int | None]] = []

        def pressed(self: _VanillaBatches, *args: Any) -> Iterator[dict[str, Tensor]]:
            stage = current_stage()
            seen.append((stage.label, stage.done, stage.total))
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return original(self, *args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_VanillaBatches, "_parts", pressed)
            train(model, graph, checkpoint=tmp_path, **options)
        assert seen == [("epoch 1", step, len(seen)) for step in range(len(seen))] and len(seen) > 2
        assert_same_weights(train(model, graph, checkpoint=tmp_path, **options), whole)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"batch_size": 8, "fan_out": 0}, "`fan_out` must hold"),
            ({"batch_size": 8, "fan_out": [5]}, "2 attention layers"),
            ({"batch_size": 0}, "`batch_size`"),
            ({"fan_out": 5}, "give `batch_size`"),
        ],
    )
    def test_sizes(self, options: dict[str, Any], words: str, graph: Graph) -> None:
        with pytest.raises(InputError, match=words):
            train(made("GAT", graph), graph, epochs=1, progress=False, **options)
        with pytest.raises(InputError, match=words):
            make_faithful(made("GAT", graph), graph, **QUICK, **options)

    def test_sizes_of_an_epoch(self, graph: Graph) -> None:
        with pytest.raises(InputError, match="`epoch_size` is for mini-batches: give `batch_size`"):
            make_faithful(made("GAT", graph), graph, epoch_size=5, **QUICK)
        with pytest.raises(InputError, match="`epoch_size` must be at least 1"):
            make_faithful(made("GAT", graph), graph, batch_size=8, epoch_size=0, **QUICK)

    def test_models_that_see_the_whole_graph(self, graph: Graph) -> None:
        for model in (untrained_model("GCN", graph), untrained_model("GT", graph, encodings=3)):
            with pytest.raises(InputError, match=r"row by row|encodings=0"):
                train(model, graph, epochs=1, batch_size=8, progress=False)

    def test_what_has_no_nodes_to_train_on(self, graph: Graph, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no labels"):
            train(made("GAT", graph), graph.replace(y=None), epochs=1, batch_size=8, progress=False)
        with pytest.raises(InputError, match="train_mask"):
            empty = torch.zeros(graph.num_nodes, dtype=torch.bool)
            train(made("GAT", graph), graph.replace(train_mask=empty), epochs=1, batch_size=8, progress=False)
        stored = write_store(graph, tmp_path / "graph")
        for call in (
            lambda: train(made("GAT", graph), stored),
            lambda: fgai.evaluate(made("GAT", graph), stored),
        ):
            with pytest.raises(InputError, match="is on disk"):
                call()
        with pytest.raises(fgai.errors.DataError, match="no stored graph"):
            train(made("GAT", graph), tmp_path / "nothing", batch_size=8)
        with pytest.raises(InputError, match="recipe"):
            recipe = VanillaRecipe(prepared(made("GAT", graph), graph))
            train(made("GAT", graph), graph, recipe=recipe, batch_size=8)

    def test_isolated_seeds_and_batches_without_endpoints(self) -> None:
        lonely = small_data(nodes=60, width=5)
        cut = lonely.remove((lonely.adjacency.destination % 3 == 0) | (lonely.adjacency.source % 3 == 0))[0]
        fresh = untrained_model("GAT", cut, hidden_channels=2, heads=2)
        model = train(fresh, cut, epochs=2, batch_size=1, progress=False)
        found = make_faithful(model, cut, batch_size=2, fan_out=1, **{**QUICK, "epochs": 1})
        assert all(bool(torch.isfinite(value).all()) for value in found.parameters())
