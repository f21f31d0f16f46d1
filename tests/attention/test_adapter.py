"""What adapters say of models: fgai's own, users' PyG models, subclasses, tapped and hooked ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fgai
from experiments.defences import GNNGuard, ProGNN
from fgai.attacks import PGDInjection
from fgai.attention import GraphModel, adapter_of, observe, prepared, record
from fgai.attention.calls import _GraphModelAdapter, _PyGAdapter
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


class TestContract:
    """Both adapters do the same for their models."""

    @pytest.mark.parametrize("name", [*OWN, "pyg"])
    def test_prepare_is_idempotent_and_call_gives_logits(self, name: str) -> None:
        model, graph = cases.untrained(name).eval(), cases.tiny_graph()
        adapter = adapter_of(model)
        ready = adapter.prepare(graph)
        assert adapter.prepare(ready) is ready and prepared(model, ready) is ready
        assert ready.device == next(model.parameters()).device
        logits = adapter.call(ready)
        assert logits.shape == (graph.num_nodes, graph.num_classes) and logits.requires_grad
        expected = model(ready) if name != "pyg" else model(ready.features.to_dense(), ready.edge_index)  # type: ignore[union-attr]
        assert torch.equal(logits, expected)

    @pytest.mark.parametrize(
        ("name", "kind", "weights", "capture", "stages"),
        [
            ("gat", _GraphModelAdapter, True, True, 2),
            ("gatv2", _GraphModelAdapter, True, True, 2),
            ("gt", _GraphModelAdapter, True, True, 2),
            ("gcn", _GraphModelAdapter, True, True, None),
            ("pyg", _PyGAdapter, False, False, None),
        ],
    )
    def test_what_is_declared(
        self, name: str, kind: type, weights: bool, capture: bool, stages: int | None
    ) -> None:
        adapter = adapter_of(cases.untrained(name).eval())
        assert type(adapter) is kind
        assert (adapter.reads_weights, adapter.can_capture) == (weights, capture)
        found = adapter.layerwise()
        assert (None if found is None else len(found.stages)) == stages

    def test_only_models_that_read_weights_take_them(self) -> None:
        graph = cases.tiny_graph()
        for name in (*OWN, "pyg"):
            model = cases.untrained(name).eval()
            adapter, ready = adapter_of(model), prepared(model, graph)
            weighted = ready.replace(edge_weight=torch.full((ready.num_edges,), 0.5))
            if adapter.reads_weights:
                assert adapter.call(weighted).isfinite().all()
            else:
                with pytest.raises(InputError, match="`edge_weight` of the graph is no argument of"):
                    adapter.call(weighted)

    def test_an_output_that_is_no_tensor_is_refused(self) -> None:
        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = cases.untrained("pyg")

            def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
                return self.inner(x, edge_index), x

        with pytest.raises(InputError, match="Pair must return one tensor"):
            adapter_of(Pair()).call(cases.tiny_graph())

    def test_compiled_models_keep_their_adapter(self) -> None:
        model = own()
        compiled: Any = torch.compile(model, backend="eager")
        adapter, graph = adapter_of(compiled), model.prepare(cases.tiny_graph())
        assert isinstance(adapter, _GraphModelAdapter) and adapter.bare is model
        assert adapter.prepare(cases.tiny_graph()) is graph
        assert adapter.layerwise() is not None
        torch.testing.assert_close(observe(compiled, graph).logits, model(graph))
        torch.compiler.reset()


class TestStages:
    """`layerwise` holds only while it describes what the model does."""

    def test_not_in_training_mode(self) -> None:
        model = own()
        assert adapter_of(model.train()).layerwise() is None
        assert adapter_of(model.eval()).layerwise() is not None

    def test_not_while_tapped(self) -> None:
        model = own()
        with record(model):
            assert adapter_of(model).layerwise() is None
        assert adapter_of(model).layerwise() is not None

    @pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
    def test_not_while_hooked(self, register: str) -> None:
        model: Any = own()
        handle = getattr(model.convs[1], f"register_{register}")(lambda *_: None)
        assert adapter_of(model).layerwise() is None
        handle.remove()
        assert adapter_of(model).layerwise() is not None

    def test_not_while_guarded(self) -> None:
        model = own()
        model.guard = lambda x, graph: torch.ones(graph.num_edges)
        assert adapter_of(model).layerwise() is None and not adapter_of(model).can_capture
        model.guard = None
        assert adapter_of(model).layerwise() is not None and adapter_of(model).can_capture

    def test_not_behind_a_defence(self) -> None:
        graph = cases.tiny_graph()
        guarded, learned = (kind.for_data(graph, base="GAT").eval() for kind in (GNNGuard, ProGNN))
        assert adapter_of(guarded).layerwise() is None and adapter_of(learned).layerwise() is None
        assert adapter_of(guarded).can_capture and not adapter_of(learned).can_capture

    def test_not_for_other_tasks(self) -> None:
        graph = batch_of_graphs()
        for kind in (GAT, GT):
            assert adapter_of(kind.for_data(graph).eval()).layerwise() is None

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
        assert adapter_of(same.for_data(graph).eval()).layerwise() is not None
        for other in (bent, mixed, below):
            model = other.for_data(graph).eval()
            assert adapter_of(model).layerwise() is None
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

        adapter = adapter_of(Plain(own()).eval())
        assert adapter.layerwise() is None and not adapter.can_capture and adapter.reads_weights
        graph = cases.tiny_graph()
        assert adapter.prepare(graph) is graph


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
