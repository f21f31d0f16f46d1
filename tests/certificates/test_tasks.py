"""Certificates of links and graphs: nothing inside the ball breaks one, and the exact ones are tight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fgai.attention import prepared
from fgai.certificates import certify_attention
from fgai.certificates.record import CertificateRecord
from fgai.errors import ReliabilityWarning
from fgai.models import AttentionModel
from fgai.tasks import get_task
from support import balls
from support import task_cases as cases
from support.forward import seen_by

NORMS = ("l1", "l2", "linf")


def moved_logits(model: AttentionModel, graph: object, delta: Tensor) -> Tensor:
    """Logits with the last layer's attention moved by delta [E]."""

    def put(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        return attention + delta[:, None].to(attention) if index == 1 else attention

    with torch.no_grad():
        return seen_by(model, graph, put)[0].double()  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("task", ["link", "graph"])
def test_no_perturbation_breaks_a_certificate(task: str, norm: str) -> None:
    model, radius = cases.trained(task), 0.3
    graph = prepared(model, cases.data(task))
    record = certify_attention(model, graph, radius=radius, k1=2, k2=2, norm=norm)
    found = record.layer().prediction
    assert found.class_radius is not None and found.alpha2_logits is not None
    assert found.alpha2_probabilities is not None
    clean = moved_logits(model, graph, torch.zeros(graph.num_edges))
    assert found.class_radius.shape == (clean.shape[0],)
    safe = found.class_radius > radius
    draw = torch.Generator().manual_seed(1)
    rowptr = graph.adjacency.rowptr
    for trial in range(40):
        delta = balls.random_point(rowptr, graph.num_edges, radius, norm, generator=draw)
        if trial % 2:  # vertices and corners, where the worst case sits
            scores = torch.randn(graph.num_edges, generator=draw)
            delta = balls.steepest(scores, rowptr, radius, norm)
        now = moved_logits(model, graph, delta)
        assert torch.equal(now[safe].argmax(1), clean[safe].argmax(1))
        change = (now - clean).abs().sum(1) / 2
        assert bool((change <= found.alpha2_logits + 1e-5).all())
        shift = (now.softmax(1) - clean.softmax(1)).abs().sum(1) / 2
        assert bool((shift <= found.alpha2_probabilities + 1e-6).all())


def test_the_class_radius_of_a_graph_is_attained() -> None:
    model = cases.trained("graph")
    graph = prepared(model, cases.data("graph"))
    record = certify_attention(model, graph, radius=0.01, k1=2, k2=2)
    radius = record.layer().prediction.class_radius
    assert radius is not None and graph.batch is not None
    layer = model.convs[-1]  # type: ignore[union-attr,index]
    seen: list[tuple[object, ...]] = []
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))  # type: ignore[union-attr,operator]
    clean = moved_logits(model, graph, torch.zeros(graph.num_edges))
    hook.remove()
    values = layer.attend(*seen[-1])[1][:, 0].detach()  # type: ignore[union-attr,operator]
    top = clean.argmax(1)
    gain = values[:, 1] - values[:, 0]
    gain = (
        gain[graph.adjacency.source]
        * torch.where(top == 1, -1.0, 1.0)[graph.batch][graph.adjacency.destination]
    )
    worst = balls.steepest(gain, graph.adjacency.rowptr, 1.0, "l1")
    for factor, flips in ((0.99, False), (1.01, True)):
        size = (radius * factor)[graph.batch][graph.adjacency.destination]
        now = moved_logits(model, graph, worst * size)
        assert bool(((now.argmax(1) != top) == flips).all())


@pytest.mark.parametrize("task", ["link", "graph"])
def test_records_come_back_whole(task: str) -> None:
    model = cases.trained(task)
    record = certify_attention(
        model, cases.data(task), vanilla=model, radius=0.01, k1=2, k2=2, alpha=1.0, beta=0.5
    )
    again = CertificateRecord.from_dict(record.to_dict())
    assert again.summary() == record.summary()
    held, other = record.satisfied(), again.satisfied()
    assert held is not None and other is not None and torch.equal(held, other)
    assert held.numel() == record.layer().prediction.class_radius.numel()  # type: ignore[union-attr]
    share = record.shares()["all_four"]
    assert share is not None and 0 <= share <= 1
    assert record.to_markdown()


@pytest.mark.parametrize(("task", "change"), [("link", {"decoder": "cosine"}), ("graph", {"pooling": "max"})])
def test_other_read_outs_are_unknown_and_say_so(task: str, change: dict[str, str]) -> None:
    model = cases.untrained(task, **change)
    with pytest.warns(ReliabilityWarning, match="certificate-unknown"):
        record = certify_attention(model, cases.data(task), radius=0.01, k2=2)
    assert record.layer().prediction.class_radius is None
    assert record.layer().beta2(0.01).numel() == record.layer().num_nodes


@pytest.mark.parametrize("task", ["link", "graph"])
def test_a_hook_on_the_last_layer_is_not_overlooked(task: str) -> None:
    model = cases.untrained(task)
    last = model.convs[-1]  # type: ignore[union-attr,index]
    last.register_forward_hook(lambda module, inputs, output: torch.tanh(3 * output))  # type: ignore[union-attr,operator]
    with pytest.warns(ReliabilityWarning, match="has a hook"):
        record = certify_attention(model, cases.data(task), radius=0.01, k2=2)
    assert record.layer().prediction.class_radius is None


@pytest.mark.parametrize("task", ["link", "graph"])
def test_a_read_out_is_what_it_says_it_is(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The task claims products or means, and squashes them.
    kind = type(get_task(task))
    read_out = kind.read_out
    monkeypatch.setattr(kind, "read_out", lambda *given, **options: read_out(*given, **options).tanh())
    with pytest.warns(ReliabilityWarning, match="something other"):
        record = certify_attention(cases.untrained(task), cases.data(task), radius=0.01, k2=2)
    assert record.layer().prediction.class_radius is None
