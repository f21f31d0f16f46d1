"""The defences against dense formulas on small graphs, and attacks through them."""

# mypy: disable-error-code="assignment, func-returns-value, index, no-any-return, no-untyped-call, operator"
# mypy: disable-error-code="union-attr"

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from experiments import low_rank as low_rank_module
from experiments.defences import (
    GNNSVD,
    RUNG,
    Defended,
    GNNGuard,
    ProGNN,
    SoftMedian,
)
from experiments.low_rank import low_rank, reconstruct
from fgai.attacks import Budget, PGDInjection
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GCN, MODELS, register_model
from fgai.sparse.features import as_features
from support.forward import seen_by
from support.graph_cases import small_data

GRAPH = small_data()
SMALL: dict[str, Any] = {"hidden_channels": 3, "heads": 2}
BASES: dict[str, dict[str, Any]] = {
    "GAT": SMALL,
    "GATv2": SMALL,
    "GT": {"hidden_channels": 8, "heads": (4, 1), "encodings": 0},
    "GCN": {"hidden_channels": 5},
}
DEFENCES: dict[str, type[Defended]] = {
    "guard": GNNGuard,
    "svd": GNNSVD,
    "pro": ProGNN,
    "median": SoftMedian,
    "rung": RUNG,
}
OWN: dict[str, dict[str, Any]] = {
    "guard": {"threshold": 0.3},
    "svd": {"rank": 4},
    "pro": {"rank": 4},
    "median": {"temperature": 0.3},
    "rung": {"steps": 4},
}
PAIRS = [(kind, base) for kind in DEFENCES for base in BASES if kind != "median" or base == "GCN"]


def defended(kind: str, base: str = "GAT", graph: Graph = GRAPH, **changes: Any) -> Defended:
    torch.manual_seed(0)
    model = DEFENCES[kind].for_data(graph, base=base, **{**BASES[base], **OWN[kind], **changes})
    for name, value in model.named_parameters():
        if name in ("gates", "correction"):
            nn.init.uniform_(value, -0.3, 0.4)
    return model.eval()


def dense(graph: Graph, values: Tensor) -> Tensor:
    """[N, N] with the value of the edge j → i at (i, j)."""
    n = graph.num_nodes
    out = torch.zeros(n, n, dtype=values.dtype)
    return out.index_put((graph.adjacency.destination, graph.adjacency.source), values)


def on_edges(graph: Graph, matrix: Tensor) -> Tensor:
    return matrix[graph.adjacency.destination, graph.adjacency.source]


def guarded(x: Tensor, adjacency: Tensor, threshold: float) -> Tensor:
    """α of GNNGuard as dense matrices, row by row."""
    n = x.shape[0]
    similar = torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=2, eps=1e-6)
    out = torch.zeros(n, n)
    for i in range(n):
        row = torch.zeros(n)
        for j in range(n):
            if adjacency[i, j] and i != j and similar[i, j] >= threshold:
                row[j] = similar[i, j]
        left = int((row > 0).sum())
        if left:
            out[i] = row / row.sum() * left / (left + 1)
        if adjacency[i, i]:
            out[i, i] = 1 / (left + 1)
    return out


class TestGuard:
    @pytest.mark.parametrize("sparse", [False, True])
    def test_first_layer_equals_the_dense_formula(self, sparse: bool) -> None:
        assert GRAPH.features is not None
        model = defended("guard")
        graph = model.prepare(GRAPH)
        x = GRAPH.features.to_dense()
        if sparse:
            graph = graph.replace(features=as_features(csr_matrix(x.numpy())))
        expected = guarded(x, dense(graph, torch.ones(graph.num_edges)), 0.3)
        ours = dense(graph, model.weights(graph))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        assert 0 < int((ours > 0).sum()) < graph.num_edges
        total = ours.sum(1)
        torch.testing.assert_close(total, torch.ones_like(total))

    def test_whole_gcn_equals_dense_matrices(self) -> None:
        model = defended("guard", "GCN")
        assert isinstance(model.model, GCN) and GRAPH.features is not None
        graph = model.prepare(GRAPH)
        pattern = dense(graph, torch.ones(graph.num_edges))
        x, memory = GRAPH.features.to_dense(), None
        for index, conv in enumerate(model.model.convs):
            now = guarded(x, pattern, 0.3)
            if memory is not None:
                gate = torch.sigmoid(model.gates[index - 1])
                now = gate * memory + (1 - gate) * now
            memory = now
            scale = now.sum(1).rsqrt()
            x = (scale[:, None] * now * scale) @ (x @ conv.value.weight) + conv.bias
            x = x.relu() if index == 0 else x
        torch.testing.assert_close(model(GRAPH), x, atol=1e-4, rtol=1e-4)

    def test_exact_gradient_in_injected_features_where_nothing_is_pruned(self) -> None:
        """A threshold no edge crosses makes the whole model differentiable: gradients by differences."""
        double = GRAPH.replace(features=as_features(GRAPH.features.to_dense().double().abs() + 0.1))
        model = defended("guard", graph=double, threshold=0.0).double()
        x = torch.rand(2, double.num_features, dtype=torch.float64).requires_grad_()
        ends = torch.tensor([[1, 4, 6], [2, 5, 9]])

        def run(features: Tensor) -> Tensor:
            hit, _ = model.prepare(double).inject(ends, features)
            return model.trust(hit.features, hit.adjacency)

        assert torch.autograd.gradcheck(run, (x,), atol=1e-5)

    def test_pruned_edges_show_the_way_past_the_threshold(self) -> None:
        model = defended("guard", threshold=0.9)
        graph = model.prepare(GRAPH)
        features = torch.zeros(1, GRAPH.num_features, requires_grad=True)
        hit, _ = graph.inject(torch.tensor([[0, 3, 7]]), features)
        weight = model.weights(hit)
        new = (hit.adjacency.source == GRAPH.num_nodes) & (hit.adjacency.destination < GRAPH.num_nodes)
        assert float(weight.detach()[new].abs().max()) == 0.0
        (gradient,) = torch.autograd.grad(model(hit)[[0, 3, 7]].square().sum(), features)
        assert float(gradient.abs().max()) > 0

    def test_training_learns_the_memory_and_hidden_rows_get_no_gradient_through_weights(self) -> None:
        model = defended("guard").train()
        model.model.dropout = 0.0
        hidden = torch.randn(GRAPH.num_nodes, 4, requires_grad=True)
        assert not model.trust(hidden, model.prepare(GRAPH).adjacency).requires_grad
        model(GRAPH).square().sum().backward()
        assert model.gates.grad is not None and float(model.gates.grad.abs().max()) > 0

    def test_a_node_unlike_all_others_keeps_itself(self) -> None:
        model = defended("guard", threshold=1.0)
        graph = model.prepare(GRAPH)
        loops = graph.adjacency.source == graph.adjacency.destination
        assert torch.equal(model.weights(graph), loops.float())

    def test_guard_is_taken_off_when_the_model_raises(self) -> None:
        model = defended("guard")
        model.model.convs[1].bias = None
        model.model.convs[1].value = None
        with pytest.raises(TypeError):
            model(GRAPH)
        assert model.model.guard is None

    def test_threshold_must_be_a_cosine(self) -> None:
        with pytest.raises(InputError, match="`threshold`"):
            GNNGuard(4, 3, threshold=1.5)


class TestSVD:
    @pytest.mark.parametrize("directed", [False, True])
    @pytest.mark.parametrize("limit", [0, 256])
    def test_equals_numpy(self, directed: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(low_rank_module, "DENSE", limit)
        generator = torch.Generator().manual_seed(2)
        ends = torch.randint(30, (2, 150), generator=generator).unique(dim=1)
        graph = Graph.from_edges(ends, 30, undirected=not directed)
        weight = torch.rand(graph.num_edges, generator=generator)
        if not directed:
            weight = on_edges(graph, (dense(graph, weight) + dense(graph, weight).T) / 2)
        full = dense(graph, weight).double().fill_diagonal_(0).numpy()
        u, s, vt = np.linalg.svd(full)
        best = torch.from_numpy((u[:, :5] * s[:5]) @ vt[:5]).float()
        left, right = low_rank(graph.adjacency, 5, weight)
        torch.testing.assert_close(left @ right.T, best, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            reconstruct(graph.adjacency, 5, weight), on_edges(graph, best), atol=1e-5, rtol=1e-4
        )

    def test_more_rank_than_nodes_gives_the_graph_back(self) -> None:
        found = reconstruct(GRAPH.adjacency, 1000)
        torch.testing.assert_close(found, torch.ones_like(found), atol=1e-4, rtol=0)

    def test_the_same_edges_are_decomposed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        original = low_rank_module.low_rank
        monkeypatch.setattr(low_rank_module, "low_rank", lambda *a: calls.append(1) or original(*a))
        graph, _ = GRAPH.inject(torch.tensor([[1, 2], [6, 4]]))
        again, _ = GRAPH.inject(torch.tensor([[1, 2], [6, 4]]))
        assert torch.equal(reconstruct(graph.adjacency, 6), reconstruct(again.adjacency, 6))
        other, _ = GRAPH.inject(torch.tensor([[1, 3], [6, 4]]))
        reconstruct(other.adjacency, 6)
        assert len(calls) == 2

    @pytest.mark.parametrize("base", BASES)
    def test_weights_are_cut_and_made_anew(self, base: str) -> None:
        model = defended("svd", base)
        graph = model.prepare(GRAPH)
        full = dense(graph, torch.ones(graph.num_edges)).fill_diagonal_(0).double().numpy()
        u, s, vt = np.linalg.svd(full)
        expected = on_edges(graph, torch.from_numpy((u[:, :4] * s[:4]) @ vt[:4]).float()).clamp(0, 1)
        loops = graph.adjacency.source == graph.adjacency.destination
        weights = model.weights(graph)
        torch.testing.assert_close(weights, expected.masked_fill(loops, 1.0), atol=1e-4, rtol=1e-4)
        hit, kept = graph.inject(torch.tensor([[1, 2, 3, 5]]))
        assert not torch.allclose(model.weights(hit)[kept.after], weights)

    def test_gcn_equals_a_dense_one(self) -> None:
        model = defended("svd", "GCN")
        assert isinstance(model.model, GCN) and GRAPH.features is not None
        graph = model.prepare(GRAPH)
        matrix = dense(graph, model.weights(graph))
        scale = matrix.sum(1).rsqrt()
        x = GRAPH.features.to_dense()
        for index, conv in enumerate(model.model.convs):
            x = (scale[:, None] * matrix * scale) @ (x @ conv.value.weight) + conv.bias
            x = x.relu() if index == 0 else x
        torch.testing.assert_close(model(GRAPH), x, atol=1e-4, rtol=1e-4)


class TestProGNN:
    def terms(self, model: ProGNN, graph: Graph, w: Tensor) -> dict[str, Tensor]:
        """The terms from dense matrices: Frobenius norms, the l1 norm and a Laplacian."""
        assert graph.features is not None
        pattern = dense(graph, torch.ones(graph.num_edges)).double().fill_diagonal_(0)
        s = dense(graph, w).double().fill_diagonal_(0)
        u, sigma, vt = torch.linalg.svd(pattern)
        best = (u[:, :4] * sigma[:4]) @ vt[:4]
        unit = torch.nn.functional.normalize(graph.features.to_dense().double(), dim=1)
        both = (s + s.T) / 2
        laplacian = torch.diag(both.sum(1)) - both
        nodes = graph.num_nodes
        return {
            "fidelity": (s - pattern).square().sum() / nodes,
            "sparsity": model.sparsity * s.abs().sum() / nodes,
            "smoothness": model.smoothness * torch.trace(unit.T @ laplacian @ unit) / nodes,
            "low_rank": model.low_rank * ((s - best) * (pattern > 0)).square().sum() / nodes,
        }

    def model(self, **changes: Any) -> ProGNN:
        made = defended("pro", **changes)
        assert isinstance(made, ProGNN)
        return made

    def test_terms_equal_dense_ones(self) -> None:
        model = self.model()
        graph = model.prepare(GRAPH)
        ours = model.terms(graph)
        expected = self.terms(model, graph, model.weights(graph).detach())
        assert ours.keys() == expected.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value.double(), expected[name], atol=1e-4, rtol=1e-4)

    def test_settled_structure_is_the_best_one(self) -> None:
        model = self.model()
        nn.init.zeros_(model.correction)
        graph = model.prepare(GRAPH)
        settled = model.weights(graph).detach().double()
        loops = (graph.adjacency.source == graph.adjacency.destination).numpy()

        def loss(values: np.ndarray) -> float:
            w = torch.where(torch.from_numpy(loops), 1.0, torch.from_numpy(values))
            return float(torch.stack(list(self.terms(model, graph, w).values())).sum())

        best = minimize(
            loss, settled.numpy() * 0 + 0.5, bounds=[(0, 1)] * graph.num_edges, method="L-BFGS-B",
            options={"maxfun": 40 * graph.num_edges},
        )  # fmt: skip
        assert loss(settled.numpy()) <= best.fun + 1e-4

    def test_corrections_follow_their_edges(self) -> None:
        model = self.model(smoothness=0.0, low_rank=0.0)
        graph = model.prepare(GRAPH)
        before = model.weights(graph)
        hit, kept = graph.inject(torch.tensor([[1, 5, 9]]))
        after = model.weights(hit)
        torch.testing.assert_close(after[kept.after], before[kept.before])
        fresh = torch.ones(hit.num_edges, dtype=torch.bool).index_fill(0, kept.after, False)
        fresh &= hit.adjacency.source != hit.adjacency.destination
        torch.testing.assert_close(after[fresh], torch.full((6,), 1 - model.sparsity / 2))
        fewer, kept = graph.remove(torch.tensor([0, 4, 7]))
        torch.testing.assert_close(model.weights(fewer), before[kept.before])

    def test_cross_entropy_and_terms_reach_the_corrections(self) -> None:
        model = self.model().train()
        graph = model.prepare(GRAPH)
        for loss in (model(graph).square().sum(), *model.terms(graph).values()):
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert model.correction.grad is not None and float(model.correction.grad.abs().max()) > 0

    def test_bad_settings(self) -> None:
        for name in ("sparsity", "smoothness", "low_rank"):
            with pytest.raises(InputError, match=name):
                self.model(**{name: -1.0})


def doubled(kind: str, seed: int, **changes: Any) -> tuple[Defended, Graph, Tensor]:
    """A GCN with a defence in float64 on a small random graph, and its weights of edges, loops included."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(9, (2, 20), generator=generator)
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    graph = Graph.from_edges(ends[:, ends[0] != ends[1]], 9, x, undirected=True, y=torch.arange(9) % 3)
    model = defended(kind, "GCN", graph.replace(features=as_features(x.float())), **changes).double()
    graph = model.prepare(graph)
    return model, graph, torch.rand(graph.num_edges, generator=generator, dtype=torch.float64) + 0.1


@pytest.mark.parametrize("seed", range(4))
class TestAgainstLoops:
    """Soft-Median and RUNG, node by node, in float64."""

    def test_soft_median(self, seed: int) -> None:
        model, graph, weight = doubled("median", seed)
        a, n = dense(graph, weight), graph.num_nodes
        scale = a.sum(1).rsqrt()
        a = scale[:, None] * a * scale
        x = graph.features.to_dense()
        for index, conv in enumerate(cast(nn.ModuleList, model.model.convs)):
            z, out = x @ conv.value.weight, []
            for i in range(n):
                near = a[i].nonzero().flatten()
                middle = torch.zeros(z.shape[1], dtype=torch.float64)
                for c in range(z.shape[1]):
                    order = near[z[near, c].argsort()]
                    passed = a[i, order].cumsum(0) >= (0.5 - 1e-6) * a[i].sum()
                    middle[c] = z[order[int(passed.nonzero()[0])], c]
                apart = torch.stack([(z[j] - middle).square().sum().sqrt() for j in near])
                share = a[i, near] * torch.exp(-apart / (0.3 * z.shape[1] ** 0.5))
                out.append(a[i].sum() * (share / share.sum()) @ z[near] + conv.bias)
            x = torch.stack(out).relu() if index == 0 else torch.stack(out)
        found = model(graph.replace(edge_weight=weight))
        torch.testing.assert_close(found, x, atol=1e-10, rtol=1e-10)

    def test_rung(self, seed: int) -> None:
        model, graph, weight = doubled("rung", seed, gamma=0.6)
        a, n = dense(graph, weight), graph.num_nodes
        d = a.sum(1)
        first, second = cast(nn.ModuleList, model.model.convs)
        start = (graph.features.to_dense() @ first.value.weight + first.bias).relu()
        start = start @ second.value.weight + second.bias
        f, left_out = start, 0
        for _ in range(4):
            rows = []
            for i in range(n):
                pull, total = torch.zeros_like(f[i]), 0.0
                for j in range(n):
                    if i == j or a[i, j] == 0:
                        continue
                    y = (f[i] / d[i].sqrt() - f[j] / d[j].sqrt()).norm()
                    w = max(0.0, 1 / (2 * y.item()) - 1 / (2 * 0.6))
                    left_out += w == 0.0
                    pull = pull + w * a[i, j] / (d[i] * d[j]).sqrt() * f[j]
                    total += w * float(a[i, j] / d[i])
                rows.append((pull + start[i] / 9) / (total + 1 / 9))
            f = torch.stack(rows)
        assert left_out
        torch.testing.assert_close(model(graph.replace(edge_weight=weight)), f, atol=1e-10, rtol=1e-10)


def test_a_neighbour_that_rung_leaves_out_still_has_a_gradient() -> None:
    model = defended("rung", "GCN", gamma=1e-3)
    features = torch.full((1, GRAPH.num_features), 9.0, requires_grad=True)
    hit, _ = model.prepare(GRAPH).inject(torch.tensor([[1, 2, 3]]), features)
    out = model(hit)[1:4]
    torch.testing.assert_close(out, model(GRAPH)[1:4])
    out.sum().backward()
    assert features.grad is not None and float(features.grad.abs().max()) > 0


def test_a_hot_soft_median_is_a_gcn() -> None:
    model = defended("median", "GCN", temperature=1e9)
    plain = GCN(**{**model.model.config})
    plain.load_state_dict(model.model.state_dict())
    torch.testing.assert_close(model(GRAPH), plain.eval()(GRAPH))
    with pytest.raises(InputError, match="`base`"):
        SoftMedian.for_data(GRAPH, base="GAT")


@pytest.mark.parametrize(("kind", "base"), PAIRS)
class TestAll:
    def test_attention_is_shown_and_sums_to_one(self, kind: str, base: str) -> None:
        model = defended(kind, base)
        logits, attention = seen_by(model, model.prepare(GRAPH))
        torch.testing.assert_close(logits, model(GRAPH))
        assert len(attention) == 2 and bool(torch.isfinite(logits).all())
        sums = [w.values.new_zeros(w.num_nodes, w.num_heads).index_add(0, w.destination, w.values)
                for w in attention]  # fmt: skip
        for total in sums:  # a node all of whose neighbours are pruned attends to nothing
            assert bool((((total - 1).abs() < 1e-4) | (total == 0)).all())

    def test_attack_goes_through_the_defence(self, kind: str, base: str) -> None:
        model = defended(kind, base)
        state = copy.deepcopy(model.state_dict())
        attack = PGDInjection(Budget(nodes=2, edges=3, steps=3, step_size=0.3))
        result = attack.run(model, GRAPH, seed=3)
        assert result.ledger.gradient > 0 and result.value >= result.start
        assert result.graph.num_nodes == GRAPH.num_nodes + 2
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name])

    def test_gradients_reach_edge_weights(self, kind: str, base: str) -> None:
        model = defended(kind, base)
        graph = model.prepare(GRAPH)
        weight = torch.full((graph.num_edges,), 0.9, requires_grad=True)
        model(graph.replace(edge_weight=weight)).square().sum().backward()
        assert weight.grad is not None and bool(torch.isfinite(weight.grad).all())
        assert float(weight.grad.abs().max()) > 0

    def test_built_again_from_its_config(self, kind: str, base: str) -> None:
        model = defended(kind, base)
        again = DEFENCES[kind](**model.config)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again.eval()(GRAPH), model(GRAPH))


def test_unknown_base_is_refused() -> None:
    with pytest.raises(InputError, match="`base`"):
        GNNSVD.for_data(GRAPH, base="GIN")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "base"), PAIRS)
def test_the_gpu_says_the_same(kind: str, base: str) -> None:
    assert GRAPH.features is not None
    sparse = GRAPH.replace(features=as_features(csr_matrix(GRAPH.features.to_dense().numpy())))
    model = defended(kind, base, sparse)
    graph, _ = model.prepare(sparse).inject(torch.tensor([[1, 5, 8]]), torch.rand(1, GRAPH.num_features))
    expected = model(graph)
    torch.testing.assert_close(model.cuda()(graph.to("cuda")).cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [-1, 2**60])
def test_pro_gnn_checks_how_many_corrections_it_keeps(count: int) -> None:
    with pytest.raises(InputError, match="`num_edges`"):
        ProGNN(5, 3, num_edges=count)


def test_the_model_behind_may_be_of_a_registered_class() -> None:
    class Narrow(GAT):
        """A network of somebody's own."""

    register_model(Narrow)
    try:
        assert type(GNNGuard.for_data(GRAPH, base="Narrow").model) is Narrow
    finally:
        del MODELS["Narrow"]
