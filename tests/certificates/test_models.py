"""Certificates of whole models: perturb the attention for real, inside the ball, and nothing breaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import elu, log_softmax, relu
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SuperGATConv, TransformerConv

import fgai
from fgai.attention import call_model, prepared, record
from fgai.certificates import certify_attention
from fgai.datasets import planted
from fgai.errors import AttentionError, InputError, ReliabilityWarning
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.sparse import Features
from fgai.topk import overlap, topk_mask
from support.balls import steepest
from support.certify_cases import NORMS, OBJECTIVES, Objective, breaks, climb, swap
from support.forward import adding

K = 3


def dense(graph: Graph) -> Graph:
    """The same graph with dense float64 features."""
    assert graph.features is not None
    return graph.replace(features=Features.dense(graph.features.to_dense().double()))


@cache
def case(name: str) -> tuple[nn.Module, Graph]:
    """A model of random weights in float64, sharp enough to say something, and a graph prepared for it."""
    torch.manual_seed(len(name))
    graph = dense(planted(seed=1, num_nodes=90, num_classes=4))
    model: nn.Module
    if name == "GAT":
        model = GAT.for_data(graph, hidden_channels=3, heads=2)
    elif name == "GATv2":
        model = GATv2.for_data(graph, hidden_channels=3, heads=2)
    elif name == "deep":
        model = GAT.for_data(graph, hidden_channels=3, heads=2, num_layers=3)
    elif name.endswith("behind limits"):
        model, graph = case(name.removesuffix(" behind limits"))
        return fgai.limit(model, graph, 0.05, shrink=0.3), graph
    elif name == "GT":
        model = GT.for_data(graph, hidden_channels=12, heads=(3, 2), encodings=5)
    else:
        model = Stack(name, graph.num_features, graph.num_classes)
    model = model.double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):  # not the identity
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.weight.data.uniform_(-1.5, 1.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.eval(), prepared(model, graph)


class Stack(nn.Module):
    """A user's PyG model; `kind` says what comes after the last attention layer."""

    def __init__(self, kind: str, width: int, classes: int) -> None:
        super().__init__()
        self.kind = kind
        self.first = GATConv(width, 3, heads=2)
        last: dict[str, Callable[[], nn.Module]] = {
            "v2": lambda: GATv2Conv(6, classes, heads=2, concat=False),
            "transformer": lambda: TransformerConv(6, classes, heads=3, concat=False),
            "supergat": lambda: SuperGATConv(6, classes, heads=1),
            "concat": lambda: GATConv(6, 2, heads=2),
            "residual": lambda: GATConv(6, classes, heads=1, residual=True),
        }
        self.last = last.get(kind, lambda: GATConv(6, classes, heads=1))()
        self.norm = nn.BatchNorm1d(classes)
        self.head = nn.Linear(classes, classes)
        self.mix = GCNConv(classes, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        y = self.last(elu(self.first(x, edge_index)), edge_index)
        after: dict[str, Callable[[], Tensor]] = {
            "head": lambda: self.head(self.norm(y)) / 2,
            "softmax": lambda: log_softmax(y, 1),
            "relu": lambda: self.head(relu(y)),
            "gate": lambda: y * (y > 0),
            "square": lambda: y * y,
            "mix": lambda: self.mix(y, edge_index),
        }
        return after.get(self.kind, lambda: y)()  # type: ignore[no-any-return]


LINEAR = ("GAT", "GATv2", "deep", "plain", "v2", "transformer", "supergat", "concat", "residual", "head")


LIMITED = ("GAT behind limits", "GATv2 behind limits", "deep behind limits")
PERTURBATIONS = given(
    name=st.sampled_from([*LINEAR, *LIMITED, "GT"]),
    first=st.booleans(),
    norm=st.sampled_from(NORMS),
    radius=st.floats(1e-3, 0.5),
    objective=st.sampled_from(OBJECTIVES),
    steps=st.integers(0, 4),
    seed=st.integers(0, 1000),
)


def perturb_and_check(
    name: str, first: bool, norm: str, radius: float, objective: Objective, steps: int, seed: int
) -> None:
    """Random (no steps) or climbed perturbations, of all nodes and heads at once, each in its own ball."""
    model, graph = case(name)
    found = certify_attention(model, graph, radius=radius, k2=K, norm=norm)
    layer = 0 if first else len(found.layers) - 1
    delta = climb(model, graph, layer, objective, radius=radius, norm=norm, steps=steps, seed=seed)
    assert breaks(model, graph, found, layer, delta) == []


@settings(max_examples=20)
@PERTURBATIONS
def test_no_perturbation_inside_the_ball_breaks_a_certificate(**drawn: Any) -> None:
    perturb_and_check(**drawn)


@pytest.mark.slow
@settings(max_examples=1500)
@PERTURBATIONS
def test_thousands_of_perturbations_break_no_certificate(**drawn: Any) -> None:
    perturb_and_check(**drawn)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["GAT", "GT", "concat"])
def test_swaps_meet_the_certified_overlap_of_the_explanation(name: str, norm: str) -> None:
    model, graph = case(name)
    radius = 0.05
    found = certify_attention(model, graph, radius=radius, k2=K, norm=norm)
    for index, certificate in enumerate(found.layers):
        with torch.no_grad(), record(model) as tape:
            call_model(model, graph)
        clean = tape.attention[index]
        shown = clean.explanation()
        delta = swap(shown, clean.rowptr, K, radius, norm)
        assert breaks(model, graph, found, index, delta) == []
        masks = [topk_mask(w, clean.rowptr, K) for w in (shown, shown + delta)]
        kept = overlap(masks[0], masks[1], clean.rowptr)
        clear = ((certificate.costs - radius).abs() > 1e-4).all(1)
        torch.testing.assert_close(kept[clear], certificate.beta2(radius)[clear])
        assert float(kept.min()) < 1


@pytest.mark.many
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LINEAR)
def test_exact_class_radii_are_attained_at_every_node(name: str, norm: str) -> None:
    # Where the logits are linear one steepest step is the worst case: beyond its radius every node flips.
    model, graph = case(name)
    found = certify_attention(model, graph, radius=0.1, k2=K, norm=norm)
    prediction, last = found.layer().prediction, len(found.layers) - 1
    assert prediction.class_status == "exact" and prediction.class_radius is not None
    with torch.no_grad(), record(model) as tape:
        clean = call_model(model, graph)
    rowptr, top = tape.attention.last.rowptr, clean.argmax(1)
    finite = prediction.class_radius.isfinite()
    radii = torch.where(finite, prediction.class_radius, 0.0)[tape.attention.last.destination, None]
    reached = torch.zeros_like(finite)
    for rival in range(clean.shape[1]):
        moving = torch.zeros_like(tape.attention.last.values).requires_grad_()
        with record(model, perturb=adding({last: moving})):
            logits = call_model(model, graph)
        gain = (logits[:, rival] - logits.gather(1, top[:, None])[:, 0]).sum()
        (gradient,) = torch.autograd.grad(gain, moving)
        worst = torch.stack([steepest(column, rowptr, 1.0, norm) for column in gradient.unbind(1)], dim=1)
        for factor, flips in ((0.999, False), (1.001, True)):
            with torch.no_grad(), record(model, perturb=adding({last: worst * radii * factor})):
                changed = call_model(model, graph).argmax(1) != top
            if flips:
                reached |= changed
            else:
                assert not bool(changed.any())
    assert bool(reached[finite].all())


def test_transformer_bound_is_tight_to_first_order() -> None:
    # Below the radius at which any ReLU can cross zero the read-out is linear: tiny radii are nearly exact.
    model, graph = case("GT")
    found = certify_attention(model, graph, radius=1e-7, k2=K).layer().prediction
    delta = climb(model, graph, 1, OBJECTIVES[1], radius=1e-7, norm="l1", steps=3, seed=0)
    with torch.no_grad(), record(model) as tape:
        before = call_model(model, graph)
    with torch.no_grad(), record(model, perturb=adding({1: delta})):
        after = call_model(model, graph)
    moved, bound = (after - before).abs().sum(1) / 2, found.alpha2_logits
    assert bound is not None and found.logits_status == "bound"
    some = (tape.attention.last.degree > 0) & (bound > 0)
    # One perturbation need not be every node's worst, but it comes close at most nodes.
    assert float((moved[some] / bound[some]).median()) > 0.5
    assert float((moved[some] / bound[some]).max()) <= 1 + 1e-5


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("softmax", "return logits"),
        ("relu", "`relu`"),
        ("gate", "`gt`"),
        ("square", "`mul`"),
        ("mix", "other nodes"),
    ],
)
def test_what_is_not_linear_is_unknown_and_says_why(kind: str, word: str) -> None:
    model, graph = case(kind)
    with pytest.warns(ReliabilityWarning, match="certificate-unknown"):
        found = certify_attention(model, graph, radius=0.01, k2=K, alpha=0.1, beta=0.5)
    prediction = found.layer().prediction
    assert prediction.class_radius is None and prediction.class_status == "unknown"
    assert word in prediction.reason
    assert found.satisfied() is None and found.layer().share("topk", 0.01) is not None
    assert prediction.reason in found.to_markdown()


def test_layer_norm_and_other_tasks_are_unknown() -> None:
    graph = dense(planted(seed=1, num_nodes=60, num_classes=3))
    transformer = GT.for_data(graph, hidden_channels=8, heads=(2, 1), encodings=3, norm="layer").double()
    with pytest.warns(ReliabilityWarning, match="certificate-unknown"):
        certify_attention(transformer, graph, radius=0.01)
    normed = GAT.for_data(graph, hidden_channels=2, heads=2, norm="layer").double()
    found = certify_attention(normed, graph, radius=0.01)
    assert [layer.prediction.class_status for layer in found.layers] == ["unknown", "exact"]
    links = GAT.for_data(graph, hidden_channels=2, heads=2, task="link").double()
    with pytest.warns(ReliabilityWarning, match="'link'"):
        assert certify_attention(links, graph, radius=0.01).layer().share("topk", 1e-9) is not None


def test_the_model_is_left_as_it_was() -> None:
    model, graph = case("head")
    model.train()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    certify_attention(model, graph, radius=0.01)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    narrow = graph.replace(features=Features.dense(torch.ones(graph.num_nodes, 2, dtype=torch.float64)))
    with pytest.raises(InputError, match="features it reads"):
        certify_attention(model, narrow, radius=0.01)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.eval()


def test_against_vanilla_and_what_does_not_match() -> None:
    model, graph = case("GAT")
    other, _ = case("GATv2")
    same = certify_attention(model, graph, vanilla=model, radius=0.01, k1=K, k2=K, alpha=0.0, beta=1.0)
    assert same.layer().beta1.tolist() == [1.0] * graph.num_nodes  # type: ignore[union-attr]
    assert float(same.alpha1.max()) == 0.0  # type: ignore[union-attr]
    found = certify_attention(model, graph, vanilla=other, radius=0.01, k1=K, k2=K, alpha=0.3, beta=2 / 3)
    masks = found.properties()
    assert list(masks) == [
        "same_explanation",
        "stable_explanation",
        "same_prediction",
        "stable_prediction",
    ]
    degree = found.layer().degree
    held = torch.stack(list(masks.values())).all(0)[degree > K]  # type: ignore[arg-type]
    assert found.shares()["all_four"] == pytest.approx(float(held.double().mean()))
    with pytest.raises(AttentionError, match="3 attention layers, the model 2"):
        certify_attention(model, graph, vanilla=case("deep")[0], radius=0.01)
    with pytest.raises(AttentionError, match="different edges"):
        certify_attention(
            model, case("GT")[1], vanilla=case("GT")[0], radius=0.01
        )  # one of them adds self-loops


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"radius": -1.0}, "radius"),
        ({"radius": float("nan")}, "radius"),
        ({"k2": 0}, "k2"),
        ({"k1": 2.5}, "k1"),
        ({"norm": "l3"}, "norm"),
        ({"alpha": -0.1}, "alpha"),
        ({"beta": 1.5}, "beta"),
        ({"divergence": "kl"}, "divergence"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, object], word: str) -> None:
    model, graph = case("GAT")
    with pytest.raises(InputError, match=f"`{word}`"):
        certify_attention(model, graph, **{"radius": 0.01, **changes})  # type: ignore[call-overload]


SLOW = pytest.mark.slow


@pytest.mark.data
@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        ("cora", GAT),
        pytest.param("cora", GT, marks=SLOW),
        pytest.param("amazon-photo", GAT, marks=SLOW),
        pytest.param("cora", GATv2, marks=SLOW),
        pytest.param("amazon-photo", GATv2, marks=SLOW),
        pytest.param("amazon-photo", GT, marks=SLOW),
    ],
)
def test_trained_models_on_real_graphs(dataset: str, kind: type[GAT] | type[GT], data_root: Path) -> None:
    graph = fgai.load_dataset(dataset, root=data_root)
    model = fgai.train(kind.for_data(graph), graph, epochs=5, progress=False)
    graph = prepared(model, graph)
    for turn, norm in enumerate(NORMS):
        radius = (0.003, 0.03, 0.01)[turn]
        found = certify_attention(model, graph, radius=radius, norm=norm)
        for layer in range(len(found.layers)):
            objective = OBJECTIVES[(turn + layer) % 3]
            settings_ = {"radius": radius, "norm": norm, "steps": turn, "seed": turn}
            delta = climb(model, graph, layer, objective, **settings_)  # type: ignore[arg-type]
            # float32: rounding moves logits by about 1e-6 of the largest, attention by 1e-7.
            assert breaks(model, graph, found, layer, delta, slack=1e-5) == []
