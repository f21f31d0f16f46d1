"""PyG models on stored graphs and in mini-batches: the same numbers as on the whole graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GPSConv,
    GraphNorm,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)

import fgai
from fgai.attention import add_limits, call_model, limits_of, observe, prepared
from fgai.errors import FgaiError, InputError
from fgai.graph import Graph
from fgai.large import (
    Batches,
    NeighbourSampler,
    StoredGraph,
    evaluate_store,
    observe_store,
    write_store,
)
from fgai.large.streaming import _measure_store
from fgai.large.training import _FaithfulBatches, _HardenBatches, _VanillaBatches, stored_source
from fgai.training import (
    AdversarialRecipe,
    FaithfulRecipe,
    FaithfulSettings,
    HardenSettings,
    VanillaRecipe,
    harden,
    make_faithful,
    train,
    untrained_model,
)
from support.graph_cases import small_data
from support.store_cases import loaded_attention, slow
from support.training_cases import Calling, assert_same_weights, close, gradients, nudged

WIDTH, CLASSES, EDGE_DIM = 7, 3, 2
QUICK: dict[str, Any] = {"epochs": 3, "nodes": 3, "edges": 4, "progress": False}


class Net(nn.Module):
    """Two layers of one kind, with what else users have: batch norm, a skip connection, a head."""

    def __init__(self, conv: type[nn.Module] = GATv2Conv, **options: Any) -> None:
        super().__init__()
        self.first = conv(WIDTH, 4, heads=2, **options)
        self.norm = nn.BatchNorm1d(8)
        self.second = conv(8, 4, heads=2, **options)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        more = () if isinstance(self.first, SuperGATConv) else (edge_attr,)
        h = elu(self.norm(self.first(x, edge_index, *more)))
        return self.head(elu(self.second(h, edge_index, *more)) + h)


class Mixed(nn.Module):
    """Attention and another layer of one hop, behind one another and beside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(WIDTH, 4, heads=2)
        self.mean = SAGEConv(8, 6)
        self.second, self.beside = GATConv(6, CLASSES), SAGEConv(6, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = elu(self.mean(elu(self.first(x, edge_index)), edge_index))
        return self.second(h, edge_index) + self.beside(h, edge_index)


class Twice(nn.Module):
    """One layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv = nn.Linear(WIDTH, 6), GATConv(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(elu(self.conv(self.enter(x), edge_index)), edge_index)[:, :CLASSES]


def by_hand(model: nn.Module, data: Any) -> Tensor:
    return model(data.x, data.edge_index, data.edge_attr)


def directed(nodes: int = 90, *, covered: bool = False, attributes: bool = True) -> Graph:
    """A graph with one-way edges, a few self-loops, and values on edges."""
    graph = small_data(nodes=nodes, width=WIDTH, covered=covered)
    generator = torch.Generator().manual_seed(7)
    if not covered:  # there every node must have a seed among its neighbours
        graph = graph.remove(torch.rand(graph.num_edges, generator=generator) < 0.3)[0]
    data = graph.to_data()
    data.edge_index = torch.cat([data.edge_index, torch.arange(0, nodes, 9).repeat(2, 1)], 1)
    if attributes:
        data.edge_attr = torch.rand(data.num_edges, EDGE_DIM, generator=generator)
    return Graph.from_data(data)


def own_net(name: str) -> nn.Module:
    """A model whose weights are always the same, in evaluation mode, with statistics in its batch norm."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made: nn.Module = {
            "GATConv": lambda: Net(GATConv, edge_dim=EDGE_DIM),
            "GATv2Conv": lambda: Net(GATv2Conv, edge_dim=EDGE_DIM),
            "TransformerConv": lambda: Net(TransformerConv, edge_dim=EDGE_DIM),
            "no loops": lambda: Net(GATConv, edge_dim=EDGE_DIM, add_self_loops=False),
            "mean of loops": lambda: Net(GATConv, edge_dim=EDGE_DIM, fill_value=0.3),
            "SuperGATConv": lambda: Net(SuperGATConv),
            "wrapped": lambda: fgai.wrap(Net(GATv2Conv, edge_dim=EDGE_DIM), by_hand),
            "Mixed": Mixed,
            "Twice": Twice,
        }[name]()
        for module in made.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 2.0)
    return made.eval()


EDGES = ("GATConv", "GATv2Conv", "TransformerConv", "no loops", "mean of loops", "SuperGATConv", "wrapped")
ALL = (*EDGES, "Mixed", "Twice")
UNLIMITED: dict[str, Any] = {"limits": False}
UNCLIPPED: dict[str, Any] = {"clip_share": 0.0, "shrink": 0.0, "sharpness": 1.0}


def graph_of(name: str, **options: Any) -> Graph:
    return directed(attributes=name not in ("Mixed", "Twice"), **options)


class TestExactPass:
    @pytest.mark.many
    @pytest.mark.parametrize("name", ALL)
    def test_gives_what_the_whole_graph_gives(self, name: str, tmp_path: Path) -> None:
        graph, model = graph_of(name), own_net(name)
        stored = write_store(graph, tmp_path / "graph")
        exact = observe(model, prepared(model, graph))
        found = observe_store(model, stored, tmp_path / "seen", ranked=True, block_edges=17)
        found.verify()
        assert found.layers == [layer.name for layer in exact.attention.layers]
        torch.testing.assert_close(torch.tensor(found.logits), exact.logits, atol=1e-5, rtol=0)
        for number, layer in enumerate(exact.attention.layers):
            mine = loaded_attention(found)[number]
            assert torch.equal(mine.source, layer.source) and torch.equal(mine.destination, layer.destination)
            torch.testing.assert_close(mine.values, layer.values, atol=1e-5, rtol=0)
            torch.testing.assert_close(mine.ranking(), layer.ranking(), atol=1e-5, rtol=0)

    @pytest.mark.many
    @pytest.mark.parametrize(
        ("name", "shares"),
        [
            ("GATConv", (0.0, 0.0)),
            *((name, (0.05, 0.3)) for name in ("GATConv", "TransformerConv", "no loops", "Mixed")),
            *slow(*((name, (0.0, 0.0)) for name in ALL if name not in ("GATConv", "Twice"))),
            *slow(
                *((name, (0.05, 0.3)) for name in ("GATv2Conv", "mean of loops", "SuperGATConv", "wrapped"))
            ),
        ],
    )
    def test_limits_are_those_of_the_whole_graph(
        self, name: str, shares: tuple[float, float], tmp_path: Path
    ) -> None:
        graph, model = graph_of(name), own_net(name)
        stored = write_store(graph, tmp_path / "graph")
        exact = fgai.limit(model, graph, shares[0], shrink=shares[1])
        add_limits(model)
        _measure_store(model, stored, clip_share=shares[0], shrink=shares[1], block_edges=17)
        assert len(limits_of(model)) == len(limits_of(exact)) > 0
        for mine, theirs in zip(limits_of(model), limits_of(exact), strict=True):
            for part in ("low", "high", "radius", "usual"):
                torch.testing.assert_close(getattr(mine, part), getattr(theirs, part), atol=1e-5, rtol=1e-5)
        found = observe_store(model, stored, tmp_path / "seen", block_edges=17)
        logits = call_model(exact, prepared(exact, graph)).detach()
        torch.testing.assert_close(torch.tensor(found.logits), logits, atol=1e-5, rtol=0)

    @pytest.mark.filterwarnings(r"ignore:\[(flat|weak)-attention\]")
    def test_evaluation_without_attack(self, tmp_path: Path) -> None:
        graph, model = directed(), own_net("GATv2Conv")
        stored = write_store(graph, tmp_path / "graph")
        other = nudged(model, FaithfulSettings(limits=False))
        found = evaluate_store(other, stored, vanilla=model, k=3)
        one, two = (observe(each, prepared(each, graph)) for each in (model, other))
        right = two.logits.argmax(1)[graph.test_mask] == graph.y[graph.test_mask]
        assert found.f1["test"] == pytest.approx(float(right.double().mean()))
        same = one.logits.argmax(1) == two.logits.argmax(1)
        assert found.agreement == pytest.approx(float(same.double().mean()))
        layer = one.attention.last
        kept = fgai.metrics.overlap_per_node(
            layer.ranking(), two.attention.last.ranking(), layer.rowptr, 3
        ).nanmean()
        assert found.overlap[-1] == pytest.approx(float(kept), abs=1e-6)
        with pytest.raises(InputError, match="layers, edges and classes"):
            evaluate_store(other, stored, vanilla=own_net("TransformerConv"))


class TestBatches:
    @pytest.mark.many
    @pytest.mark.parametrize("dtype", [torch.float32, *slow((torch.float64,))])
    @pytest.mark.parametrize("name", ALL)
    def test_all_neighbours_give_the_whole_graphs_logits(self, name: str, dtype: torch.dtype) -> None:
        graph, model = graph_of(name), own_net(name).to(dtype)
        if dtype == torch.float64:
            data = graph.to_data()
            data.x = data.x.double()
            data.edge_attr = None if data.edge_attr is None else data.edge_attr.double()
            graph = Graph.from_data(data)
        exact = observe(model, prepared(model, graph))
        hops = 4 if name == "Mixed" else 2
        sampler, met = NeighbourSampler(graph, [-1] * hops), 0
        for batch in Batches(graph, sampler, batch_size=4):
            assert batch.graph.num_nodes <= graph.num_nodes
            met += batch.graph.num_nodes < graph.num_nodes
            seen = observe(model, prepared(model, batch.graph))
            most = 1e-5 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close(
                seen.logits[: batch.num_seeds], exact.logits[batch.seeds], atol=most, rtol=0
            )
        assert met  # batches smaller than the graph

    @pytest.mark.parametrize("name", EDGES)
    def test_one_batch_of_all_is_a_step_on_the_whole_graph(self, name: str) -> None:
        graph, model = graph_of(name), own_net(name)
        wanted, terms = gradients(model, VanillaRecipe(prepared(model, graph)).losses(model, 0))
        with stored_source(graph, 0) as whole:
            whole.prepare(model, 1000, -1)
            (step,) = _VanillaBatches(whole).steps(model, 0)
            found, same = gradients(model, step.losses)
            close(found, wanted)
            assert same["total"] == pytest.approx(terms["total"], abs=1e-5)
            whole.prepare(model, 4, -1)
            assert _VanillaBatches(whole).score(model) == pytest.approx(
                VanillaRecipe(prepared(model, graph)).score(model), abs=1e-5
            )
            sums, count = {}, 0
            for step in _VanillaBatches(whole).steps(model, 3):
                found, _ = gradients(model, step.losses)
                sums = {key: sums.get(key, 0) + step.weight * value for key, value in found.items()}
                count += step.weight
        close({key: value / count for key, value in sums.items()}, wanted)

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("GATConv", UNLIMITED),
            *((name, UNCLIPPED) for name in ("GATConv", "no loops")),
            *slow(
                *((name, UNLIMITED) for name in ("GATv2Conv", "TransformerConv", "SuperGATConv", "no loops"))
            ),
            *slow(*((name, UNCLIPPED) for name in ("GATv2Conv", "TransformerConv", "SuperGATConv"))),
        ],
    )
    def test_all_terms_of_faithful_training(self, name: str, settings: dict[str, Any]) -> None:
        graph = graph_of(name, covered=True)
        config = FaithfulSettings(**{"nodes": 12, "edges": 21, "steps": 1, **settings})
        vanilla = own_net(name)
        on_whole, in_batches = (nudged(vanilla, config) for _ in range(2))
        full = FaithfulRecipe(vanilla, prepared(vanilla, graph), config)
        full.start(on_whole, 3)
        with stored_source(graph, 0) as whole:
            whole.prepare(vanilla, 1000, -1)
            batched = _FaithfulBatches(vanilla, whole, config)
            batched.start(in_batches, 3)
            batch_scales, scales = batched.outputs, full.loss.vanilla_outputs
            assert batch_scales.logit_spread == pytest.approx(scales.logit_spread, rel=1e-5)
            assert batch_scales.contrasts == pytest.approx(scales.contrasts, rel=1e-4)
            assert batch_scales.sharpness == pytest.approx(scales.sharpness, abs=1e-5)
            torch.testing.assert_close(batched.reach.layers, full.reach.layers)
            batched.adversary.load_state(full.adversary.state())
            wanted, terms = gradients(on_whole, full.losses(on_whole, 0))
            (step,) = batched.steps(in_batches, 0)
            found, same = gradients(in_batches, step.losses)
        assert same.keys() == terms.keys() and {"closeness", "prediction_stability"} <= terms.keys()
        for key, value in terms.items():
            assert same[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        close(found, wanted)

    @pytest.mark.parametrize("name", ["GAT", "GATConv", *slow(("TransformerConv",))])
    def test_hardening_at_the_same_endpoints(self, name: str) -> None:
        graph = small_data(nodes=90, width=WIDTH) if name == "GAT" else graph_of(name)
        sizes = {"hidden_channels": 3, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
        vanilla = untrained_model("GAT", graph, **sizes) if name == "GAT" else own_net(name)
        config = HardenSettings(nodes=6, edges=4, clip_share=0.0, shrink=0.0)
        on_whole, in_batches = (nudged(vanilla, config) for _ in range(2))
        full = AdversarialRecipe(prepared(vanilla, graph), config)
        full.adversary.endpoint_pool = full.train_rows
        full.start(on_whole, 3)
        with stored_source(graph, 0) as whole:
            whole.prepare(vanilla, 1000, -1)
            batched = _HardenBatches(vanilla, whole, config)
            batched.fit = graph.train_mask
            batched.start(in_batches, 3)
            torch.testing.assert_close(batched.adversary.features, full.adversary.features)
            wanted, terms = gradients(on_whole, full.losses(on_whole, 0))
            (step,) = batched.steps(in_batches, 0)
            found, same = gradients(in_batches, step.losses)
            torch.testing.assert_close(
                batched.adversary.features.grad, full.adversary.features.grad, atol=1e-5, rtol=1e-3
            )
            assert batched.score(in_batches) == pytest.approx(full.score(on_whole), abs=0.06)
        assert same.keys() == terms.keys() == {"clean", "attacked", "total"}
        for key, value in terms.items():
            assert same[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        close(found, wanted)


class TestTraining:
    @pytest.mark.parametrize("name", ["wrapped", *slow(("Mixed",))])
    def test_every_training_takes_a_stored_graph(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph = graph_of(name)
        stored = write_store(graph, tmp_path / "graph")
        monkeypatch.setattr(StoredGraph, "load", lambda self: pytest.fail("loaded whole"))
        model = train(own_net(name), stored, epochs=3, batch_size=8, fan_out=3, progress=False)
        assert model.history.terms[-1]["total"] < model.history.terms[0]["total"]
        before = {key: value.clone() for key, value in model.state_dict().items()}
        options: dict[str, Any] = {"batch_size": 8, "fan_out": 3, "clip_share": 0.02, "shrink": 0.1, **QUICK}
        monkeypatch.undo()
        for make in (make_faithful, harden):
            one, same = (make(model, stored, seed=2, **options) for _ in range(2))
            assert_same_weights(one, same)
            assert any(not torch.equal(one.state_dict()[key], value) for key, value in before.items())
            assert len(one.history.terms) == 3 and not one.training
            exact = fgai.limit(one, graph, 0.02, shrink=0.1)
            for mine, theirs in zip(limits_of(one), limits_of(exact), strict=True):
                torch.testing.assert_close(mine.low, theirs.low, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(mine.radius, theirs.radius, atol=1e-5, rtol=1e-5)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    @pytest.mark.parametrize("own", [False, *slow((True,))])
    def test_hardening_resumes_bit_by_bit(self, own: bool, tmp_path: Path) -> None:
        graph = small_data(nodes=90, width=WIDTH) if own else directed()
        model = untrained_model("GAT", graph, hidden_channels=2, heads=2) if own else own_net("GATConv")

        class KilledError(Exception):
            pass

        def kill(epoch: int, values: Any) -> None:
            if epoch == 1:
                raise KilledError

        options: dict[str, Any] = {"batch_size": 5, "fan_out": 3, "seed": 2, **QUICK, "epochs": 4}
        whole = harden(model, graph, **options)
        with pytest.raises(KilledError):
            harden(model, graph, checkpoint=tmp_path, tracker=Calling(kill), **options)
        resumed = harden(model, graph, checkpoint=tmp_path, **options)
        assert_same_weights(resumed, whole)
        assert resumed.history.terms == whole.history.terms
        assert resumed.history.scores == whole.history.scores
        with pytest.raises(fgai.errors.CheckpointError, match="another training"):
            harden(model, graph, checkpoint=tmp_path, **{**options, "batch_size": 6})

    def test_hardening_in_batches_keeps_predictions(self) -> None:
        graph = small_data(nodes=90, width=WIDTH)
        model = train(
            untrained_model("GAT", graph, hidden_channels=4, heads=2), graph, epochs=30, progress=False
        )
        options: dict[str, Any] = {"batch_size": 6, "fan_out": -1, "nodes": 6, "edges": 4, "progress": False}
        plain = harden(model, graph, epochs=20, limits=False, **options)
        assert not limits_of(plain)
        terms = plain.history.terms
        assert sum(one["attacked"] for one in terms[-3:]) < sum(one["attacked"] for one in terms[:3])
        with pytest.raises(InputError, match="give `batch_size`"):
            harden(model, graph, fan_out=3)


class Coupled(nn.Module):
    """Attention, and something else between its layers."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first, self.second = GATConv(WIDTH, 8), GATConv(8, CLASSES)
        self.kind = between
        self.norm, self.gcn = GraphNorm(8), GCNConv(8, 8)
        self.all = GPSConv(8, GATConv(8, 8), heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x, edge_index)
        if self.kind == "tuple":
            h, _ = self.first(x, edge_index, return_attention_weights=True)
        elif self.kind == "norm":
            h = self.norm(h)
        elif self.kind == "gcn":
            h = self.gcn(h, edge_index)
        elif self.kind == "all":
            h = self.all(h, edge_index)
        elif self.kind == "mean":
            h = h + h.mean(0)
        elif self.kind == "edges":
            h = h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return self.second(elu(h), edge_index)


class TestRefusals:
    @pytest.mark.parametrize("kind", ["norm", "gcn", "all", "mean", "edges"])
    def test_nodes_that_meet_elsewhere(self, kind: str) -> None:
        graph, model = directed(attributes=False), Coupled(kind).eval()
        with pytest.raises(InputError, match="cannot be computed layer by layer"):
            train(model, graph, epochs=1, batch_size=8, progress=False)
        if kind == "gcn":
            for make in (make_faithful, harden):
                with pytest.raises(InputError, match=r"computed layer by layer.*gcn \(GCNConv\)"):
                    make(model, graph, batch_size=8, **QUICK)
        assert train(model, graph, epochs=1, progress=False).history.terms  # on the whole graph it is

    def test_layers_that_return_more_or_read_other_edges(self, tmp_path: Path) -> None:
        stored = write_store(directed(attributes=False), tmp_path / "graph")
        with pytest.raises(InputError, match="return_attention_weights"):
            evaluate_store(Coupled("tuple").eval(), stored)
        mixed = Coupled("none").eval()
        mixed.second = GATConv(8, CLASSES, add_self_loops=False)
        with pytest.raises(InputError, match="all of them with a self-loop"):
            evaluate_store(mixed, stored)
        backward = Coupled("none").eval()
        backward.second = GATConv(8, CLASSES, flow="target_to_source")
        with pytest.raises(FgaiError):
            evaluate_store(backward, stored)

    def test_a_layer_that_runs_twice_has_no_limits(self) -> None:
        graph, model = graph_of("Twice"), own_net("Twice")
        with pytest.raises(InputError, match="give `limits=False`"):
            make_faithful(model, graph, batch_size=20, **QUICK)
        make_faithful(model, graph, batch_size=20, limits=False, **QUICK)

    def test_values_and_features_that_are_not_read(self, tmp_path: Path) -> None:
        stored = write_store(directed(), tmp_path / "graph")
        with pytest.raises(InputError, match="`edge_attr` of the graph is no argument of"):
            evaluate_store(own_net("Mixed"), stored)
        bare = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        with pytest.raises(InputError, match="no node features"):
            evaluate_store(own_net("Mixed"), write_store(Graph.from_data(bare), tmp_path / "bare"))
        with pytest.raises(InputError, match="2 attention layers"):
            make_faithful(own_net("GATConv"), stored, batch_size=8, fan_out=[3], **QUICK)
