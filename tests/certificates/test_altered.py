"""Altered models are never certified falsely, and what changes nothing keeps its certificate."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, evaluating, observe, prepared
from fgai.certificates import CertificateRecord, certify_attention
from fgai.errors import InputError, ReliabilityWarning
from fgai.graph import Graph
from fgai.topk import topk_mask
from support.altered_cases import EXACT, REFUSED, own, pyg
from support.altered_parts import CASES
from support.balls import random_point, steepest
from support.forward import adding

K, RADIUS = 3, 0.02


def certified(model: nn.Module, graph: Graph) -> CertificateRecord:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)
        return certify_attention(model, graph, radius=RADIUS, k2=K)


def run(model: nn.Module, graph: Graph, layer: int, delta: Tensor | None) -> tuple[Tensor, AttentionMap]:
    seen = observe(model, graph, perturb=None if delta is None else adding({layer: delta}))
    return seen.logits, seen.attention


def uphill(model: nn.Module, graph: Graph, layer: int, delta: Tensor, clean: Tensor) -> Tensor | None:
    """The gradient in one layer's attention of how far other classes have come; None where there is none."""
    moving = delta.clone().requires_grad_()
    with evaluating(model, freeze=True):
        logits = observe(model, graph, grad=True, perturb=adding({layer: moving})).logits
    top = clean.argmax(1, keepdim=True)
    gain = logits.scatter(1, top, float("-inf")).amax(1) - logits.gather(1, top)[:, 0]
    if not logits.requires_grad:
        return None
    return torch.autograd.grad(gain.sum(), moving, allow_unused=True)[0]


def directions(
    model: nn.Module, graph: Graph, layer: int, clean: Tensor, attention: AttentionMap
) -> list[Tensor]:
    """Perturbations [E, H] of size 1 at every node and head: random ones, vertices, and steps uphill."""
    here, draw = attention[layer], torch.Generator().manual_seed(layer)
    rowptr, shape = here.rowptr, here.values.shape

    def spread(push: Tensor) -> Tensor:
        return torch.stack([steepest(column, rowptr, 1.0, "l1") for column in push.unbind(1)], dim=1)

    def inside() -> Tensor:
        columns = [
            random_point(rowptr, shape[0], 1.0, "l1", generator=draw, dtype=torch.float64)
            for _ in range(shape[1])
        ]
        return torch.stack(columns, dim=1)

    found = [inside()]
    found += [spread(torch.randn(shape, generator=draw, dtype=torch.float64)) for _ in range(2)]
    for start in (torch.zeros_like(found[0]), RADIUS * found[0]):
        push = uphill(model, graph, layer, start, clean)
        if push is not None:
            found.append(spread(push))
    return found


def broken(model: nn.Module, graph: Graph, found: CertificateRecord) -> tuple[int, int]:
    """How many classes and how many top-k sets changed just inside the radius they are certified for."""
    classes = sets = 0
    clean, attention = run(model, graph, 0, None)
    for layer, certificate in enumerate(found.layers):
        for way in directions(model, graph, layer, clean, attention):
            here, last = attention[layer], layer == len(found.layers) - 1
            radius = certificate.prediction.class_radius
            if radius is not None:
                # Only its own attention moves a node in the last layer: each goes to its own limit.
                size = radius.clamp(max=1.0) if last else torch.full_like(radius, RADIUS)
                moved = run(model, graph, layer, 0.999 * size[here.destination, None] * way)[0]
                held = radius > (0 if last else RADIUS)
                classes += int((held & (moved.argmax(1) != clean.argmax(1))).sum())
            size = certificate.topk_radius.clamp(max=1.0)
            shown = here.explanation()
            moved_by = 0.999 * size[here.destination] * way.mean(1)  # no head of `way` is longer than one
            masks = [topk_mask(w, here.rowptr, K) for w in (shown, shown + moved_by)]
            sets += int((masks[0] != masks[1]).sum())
    return classes, sets


@pytest.mark.filterwarnings("ignore:GAT is compiled")
@pytest.mark.parametrize("name", CASES)
def test_no_altered_model_is_certified_falsely(name: str) -> None:
    case = CASES[name]
    model, data = case.build()
    with case.during():
        if case.status == REFUSED:
            with pytest.raises(InputError):
                certified(model, data)
            return
        graph = prepared(model, data)
        found = certified(model, graph)
        assert broken(model, graph, found) == (0, 0)
    assert found.layer().prediction.class_status == case.status
    for layer in found.layers:
        assert (layer.prediction.class_radius is None) is (layer.prediction.class_status == "unknown")


@pytest.mark.parametrize(
    "name",
    [
        "hook: nothing",
        "guarded",
        "a_head_on_nodes",
        "hook_between_layers",
        "hook_before_the_first_layer",
        "weight_parametrised",
        "method_replaced",
    ],
)
def test_hidden_layers_of_altered_models_are_unknown(name: str) -> None:
    found = certified(*CASES[name].build())
    assert {layer.prediction.class_status for layer in found.layers[:-1]} == {"unknown"}
    assert all(layer.prediction.reason for layer in found.layers)


@pytest.mark.filterwarnings("ignore:GAT is compiled")
@pytest.mark.parametrize("name", ["untouched_gat", "limited", "edge_weights", "layers_shared", "compiled"])
def test_hidden_layers_of_models_as_they_are_stay_bounded(name: str) -> None:
    found = certified(*CASES[name].build())
    assert [layer.prediction.class_status for layer in found.layers[:-1]] == ["bound"] * (
        len(found.layers) - 1
    )


def test_there_are_sixty_configurations_and_many_are_certified() -> None:
    assert len(CASES) >= 60
    assert sum(case.status == EXACT for case in CASES.values()) >= 20


@pytest.mark.parametrize("build", [own, pyg])
def test_what_changes_nothing_keeps_the_numbers(build: object) -> None:
    plain, graph = build()  # type: ignore[operator]
    before = certified(plain, graph).layer().prediction
    last = list(plain.modules())[-1] if build is pyg else plain.convs[-1]
    last.register_forward_hook(lambda module, inputs, output: None)
    after = certified(plain, graph).layer().prediction
    for part in ("class_radius", "alpha2_logits", "alpha2_probabilities"):
        torch.testing.assert_close(getattr(before, part), getattr(after, part))
    assert before.class_status == after.class_status == EXACT
