"""`make_hetero_faithful` of heterogeneous models: same class, same predictions, attention that moves less."""

from __future__ import annotations

import pytest
import torch

import fgai
from fgai.attacks import Budget, PGDInjection, Threat
from fgai.attention import limits_of
from fgai.errors import FgaiWarning, InputError
from fgai.hetero import attack, attend, make_hetero_faithful
from support.attention_cases import assert_unchanged, snapshot
from support.hetero_cases import CITES, WRITES, WRITTEN, hetero_data, trained

DATA = hetero_data()
WIDE = Threat("wide", PGDInjection, Budget(nodes=6, edges=6, box=(-3.0, 3.0), steps=15, step_size=0.13), "-")
SETTINGS = {"nodes": 6, "edges": 6, "box": (-3.0, 3.0), "check": False, "progress": False}
QUIET = pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")


def accuracy(model, data=DATA):
    found = model(data.x_dict, data.edge_index_dict)
    logits = found["paper"] if isinstance(found, dict) else found
    test = data["paper"].test_mask
    return float((logits.argmax(1) == data["paper"].y)[test].float().mean())


@pytest.fixture(scope="module")
def pair():
    vanilla = trained("gat", DATA, epochs=40)
    before = snapshot(vanilla)
    faithful = make_hetero_faithful(vanilla, DATA, WRITES, epochs=20, **SETTINGS)
    assert_unchanged(before, vanilla)
    return vanilla, faithful


@QUIET
class TestToHeteroGAT:
    def test_it_is_a_model_like_the_given_one(self, pair):
        vanilla, faithful = pair
        assert type(faithful).__name__ == type(vanilla).__name__ and not faithful.training
        assert fgai.training.history_of(faithful).attempts == 1
        assert set(vanilla.state_dict()) < set(faithful.state_dict())

    def test_it_keeps_accuracy_and_top_neighbours(self, pair):
        vanilla, faithful = pair
        assert accuracy(vanilla) > 0.7 and accuracy(faithful) >= accuracy(vanilla) - 0.04
        one, two = (attend(model, DATA)[WRITES][0].values.mean(1) for model in pair)
        assert float(torch.corrcoef(torch.stack([one, two]))[0, 1]) > 0.9

    def test_its_attention_and_predictions_move_less_under_the_same_attack(self, pair):
        one, two = (attack(model, DATA, WRITES, threat=WIDE, k=2, seed=3) for model in pair)
        for edge_type in (WRITES, WRITTEN, CITES):
            assert two.stability[edge_type]["tvd"] < 0.8 * one.stability[edge_type]["tvd"], edge_type
        assert two.prediction["g_tvd"] < one.prediction["g_tvd"]
        assert two.prediction["attacked"] >= one.prediction["attacked"]

    def test_limits_hold_what_new_nodes_say_in_every_type(self, pair):
        _, faithful = pair
        assert len(limits_of(faithful)) == 2 * 2 * 6
        loud = DATA.clone()
        loud["author"].x = DATA["author"].x * 1000
        hidden = faithful.conv1["__".join(WRITES)]
        said = hidden.lin_src(loud["author"].x)
        assert bool((said <= hidden.limits["value"].high + 1e-4).all())


@pytest.mark.many
@QUIET
@pytest.mark.parametrize("kind", ["heteroconv", "hgt"])
def test_other_models_run(kind):
    vanilla = trained(kind, DATA, epochs=10)
    faithful = make_hetero_faithful(vanilla, DATA, CITES, epochs=2, **SETTINGS)
    assert type(faithful) is type(vanilla) or type(faithful).__name__ == type(vanilla).__name__
    assert bool(limits_of(faithful)) == (kind != "hgt")


def test_what_cannot_be_limited_is_said():
    with pytest.warns(FgaiWarning, match="cannot be limited"):
        make_hetero_faithful(trained("han", DATA, epochs=2), DATA, WRITES, epochs=2, **SETTINGS)


def test_refusals():
    model = trained("gat", DATA, epochs=1)
    with pytest.raises(InputError, match="`edge_type` must be one of"):
        make_hetero_faithful(model, DATA, ("author", "reads", "paper"))
    with pytest.raises(InputError, match="settings"):
        make_hetero_faithful(model, DATA, WRITES, colour=3)
