"""How models are prepared and called, and their stages: fgai's own, PyG models, tapped and hooked ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fgai
from experiments.defences import GNNGuard, ProGNN
from fgai.attacks import PGDInjection
from fgai.attention import GraphModel, call_model, observe, prepared, record, stages_of
from fgai.attention.interface import graph_model
from fgai.certificates import certify_attention
from fgai.errors import InputError
from fgai.explanations import explain
from fgai.graph import Graph
from fgai.models import GAT, GCN, GT, AttentionModel, GATv2
from fgai.ops import use_backend
from fgai.recompute import Recompute
from support import attack_cases as cases
from support.graph_cases import small_data
from support.task_cases import batch_of_graphs

OWN = ("gat", "gatv2", "gt", "gcn")


@pytest.fixture(autouse=True)
def no_kernels() -> Iterator[None]:
    """How models are called does not depend on the kernels, which take long to compile."""
    with use_backend("reference"):
        yield


def own(name: str = "gat") -> AttentionModel:
    model = cases.untrained(name).eval()
    assert isinstance(model, AttentionModel)
    return model


class TestCalls:
    @pytest.mark.parametrize("name", [*OWN, "pyg"])
    def test_prepare_is_idempotent_and_call_gives_logits(self, name: str) -> None:
        model, graph = cases.untrained(name).eval(), cases.tiny_graph()
        ready = prepared(model, graph)
        assert prepared(model, ready) is ready
        assert ready.device == next(model.parameters()).device
        logits = call_model(model, ready)
        assert logits.shape == (graph.num_nodes, graph.num_classes) and logits.requires_grad
        expected = model(ready) if name != "pyg" else model(ready.features.to_dense(), ready.edge_index)  # type: ignore[union-attr]
        assert torch.equal(logits, expected)

    def test_only_models_that_read_weights_take_them(self) -> None:
        graph = cases.tiny_graph()
        for name in (*OWN, "pyg"):
            model = cases.untrained(name).eval()
            ready = prepared(model, graph)
            weighted = ready.replace(edge_weight=torch.full((ready.num_edges,), 0.5))
            if name != "pyg":
                assert call_model(model, weighted).isfinite().all()
            else:
                with pytest.raises(InputError, match="`edge_weight` of the graph is no argument of"):
                    call_model(model, weighted)

    def test_an_output_that_is_no_tensor_is_refused(self) -> None:
        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = cases.untrained("pyg")

            def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
                return self.inner(x, edge_index), x

        with pytest.raises(InputError, match="Pair must return one tensor"):
            call_model(Pair(), cases.tiny_graph())

    def test_compiled_models_are_called_as_their_originals(self) -> None:
        model = own()
        compiled: Any = torch.compile(model, backend="eager")
        graph = model.prepare(cases.tiny_graph())
        assert graph_model(compiled) is model and prepared(compiled, cases.tiny_graph()) is graph
        assert stages_of(compiled) is not None
        torch.testing.assert_close(observe(compiled, graph).logits, model(graph))
        torch.compiler.reset()


class TestStages:
    """`stages_of` returns stages only while they describe what the model does."""

    @pytest.mark.parametrize(
        ("name", "count"), [("gat", 2), ("gatv2", 2), ("gt", 2), ("gcn", None), ("pyg", None)]
    )
    def test_which_models_have_some(self, name: str, count: int | None) -> None:
        stages = stages_of(cases.untrained(name).eval())
        assert (None if stages is None else len(stages.stages)) == count

    def test_not_in_training_mode(self) -> None:
        model = own()
        assert stages_of(model.train()) is None
        assert stages_of(model.eval()) is not None

    def test_not_while_tapped(self) -> None:
        model = own()
        with record(model):
            assert stages_of(model) is None
        assert stages_of(model) is not None

    @pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
    def test_not_while_hooked(self, register: str) -> None:
        model: Any = own()
        handle = getattr(model.convs[1], f"register_{register}")(lambda *_: None)
        assert stages_of(model) is None
        handle.remove()
        assert stages_of(model) is not None

    def test_not_while_guarded(self) -> None:
        model = own()
        model.guard = lambda x, graph: torch.ones(graph.num_edges)
        assert stages_of(model) is None and not model.can_capture
        model.guard = None
        assert stages_of(model) is not None and model.can_capture

    def test_not_behind_a_defence(self) -> None:
        graph = cases.tiny_graph()
        guarded, learned = (kind.for_data(graph, base="GAT").eval() for kind in (GNNGuard, ProGNN))
        assert stages_of(guarded) is None and stages_of(learned) is None
        assert guarded.can_capture and not learned.can_capture

    def test_not_for_other_tasks(self) -> None:
        graph = batch_of_graphs()
        for kind in (GAT, GT):
            assert stages_of(kind.for_data(graph).eval()) is None

    @pytest.mark.parametrize("part", sorted(AttentionModel.forward_parts))
    @pytest.mark.parametrize("kind", [GAT, GT])
    def test_not_in_a_subclass_that_changes_the_forward_pass(
        self, kind: type[AttentionModel], part: str
    ) -> None:
        def changed(self: Any, *given: Any, **named: Any) -> Any:
            return getattr(kind, part)(self, *given, **named)

        graph = cases.tiny_graph()
        same: Any = type("Same", (kind,), {})
        bent: Any = type("Bent", (same,), {part: changed})
        mixed: Any = type("Mixed", (type("Part", (), {part: changed}), kind), {})
        below: Any = type("Below", (bent,), {})
        assert stages_of(same.for_data(graph).eval()) is not None
        for other in (bent, mixed, below):
            model = other.for_data(graph).eval()
            assert stages_of(model) is None
            assert not Recompute.fits(model, model.prepare(graph))

    def test_a_subclass_may_declare_its_own(self) -> None:
        class Twice(GAT):
            """Logits times two, and says so."""

            def embed(self, graph: Graph) -> Tensor:
                return 2 * super().embed(graph)

            def layerwise(self) -> Any:
                found = super().layerwise()
                return None if found is None else found._replace(leave=lambda state: 2 * state)

        graph = small_data(nodes=90)
        model = Twice.for_data(graph).eval()
        ready = model.prepare(graph)
        torch.testing.assert_close(Recompute(model, ready).clean_logits, model(ready))

    def test_other_graph_models_have_none(self) -> None:
        class Plain(GraphModel):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, graph: Graph) -> Tensor:
                return self.model(graph)  # type: ignore[no-any-return]

        model, graph = Plain(own()).eval(), cases.tiny_graph()
        assert stages_of(model) is None and not model.can_capture and graph_model(model) is model
        assert prepared(model, graph) is graph


class Count:
    """How often a function was called, while it is in the place of another."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls = 0
        original = getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            self.calls += 1
            return original(*given, **named)

        patch.setattr(owner, name, counted)


class TestPreparedOnce:
    """A graph is converted and prepared once, whoever is called."""

    @pytest.mark.parametrize("name", ["gat", "gt", "gcn"])
    def test_a_prepared_graph_is_not_prepared_again(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, graph = own(name), cases.tiny_graph().replace(name="fresh")
        ready = prepared(model, graph)
        replaced = Count(monkeypatch, Graph, "replace")
        looped = Count(monkeypatch, Graph, "add_self_loops")
        assert prepared(model, ready) is ready and ready.to("cpu") is ready
        model(ready)
        observe(model, ready, heads="mean")
        observe(model, ready)
        if name != "gcn":
            assert Recompute(model, ready).graph is ready
        assert (replaced.calls, looped.calls) == (0, 0)

    def test_calls_with_a_raw_graph_prepare_it_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = cases.tiny_graph().replace(name="raw")
        looped = Count(monkeypatch, Graph, "add_self_loops")
        model = own()
        assert torch.equal(model(graph), model(graph))
        assert model.prepare(graph) is model.prepare(graph)
        assert GCN.for_data(graph).prepare(graph) is model.prepare(graph)
        assert looped.calls == 1

    def test_edge_weights_keep_their_gradients(self) -> None:
        graph, model = cases.tiny_graph(), own()
        weight = torch.full((graph.num_edges,), 0.5, requires_grad=True)
        weighted = graph.replace(edge_weight=weight)
        for _ in range(2):  # a graph of values that was kept could not be walked back twice
            model(weighted).sum().backward()
        assert weight.grad is not None and weight.grad.isfinite().all()

    @pytest.mark.parametrize("what", ["evaluate", "attack", "certify", "explain"])
    def test_each_call_converts_and_prepares_once(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = small_data(nodes=150).to_data()
        model, other = (kind.for_data(data).eval() for kind in (GAT, GATv2))
        converted = Count(monkeypatch, Graph, "from_data")
        looped = Count(monkeypatch, Graph, "add_self_loops")
        with cases.quiet():
            if what == "evaluate":
                fgai.evaluate(model, data, "random", vanilla=other, curves=False)
            elif what == "attack":
                cases.attack(PGDInjection, nodes=2, edges=3).run(model, data)
            elif what == "certify":
                certify_attention(model, data, vanilla=other, radius=0.1)
            else:
                explain(model, data, 3, threat="random")
        assert (converted.calls, looped.calls) == (1, 1)

    def test_partial_recomputation_wants_a_prepared_graph(self) -> None:
        with pytest.raises(InputError, match="must be prepared"):
            Recompute(own(), cases.tiny_graph().replace(name="raw"))
