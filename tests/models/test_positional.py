"""Laplacian encodings: against dense eigensolvers, independent of the start vector, extended and cached."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fgai.datasets import load_dataset
from fgai.datasets.loader import _undirected_keys
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.graph import FLOOR, extend_encoding
from fgai.models import positional
from fgai.models.positional import GAP, _canonical_basis, _groups, _laplacian_encoding, _with_encoding


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    positional._memory.clear()


def uncached(edges: torch.Tensor, nodes: int, size: int, seed: int = 0) -> positional._Encoding:
    return positional._solve(_undirected_keys(edges).numpy(), nodes, size, seed)


def edges_of(graph: nx.Graph) -> tuple[torch.Tensor, int]:
    graph = nx.convert_node_labels_to_integers(graph)
    return torch.tensor(list(graph.edges), dtype=torch.long).reshape(-1, 2).T, graph.number_of_nodes()


def normalised(graph: nx.Graph) -> np.ndarray:
    dense = nx.to_numpy_array(graph)
    root = np.sqrt(dense.sum(axis=1))
    return np.asarray(dense / np.outer(root, root))


def lopsided(seed: int, nodes: int = 40) -> nx.Graph:
    """A connected random graph without symmetries worth mentioning."""
    graph = nx.gnp_random_graph(nodes, 0.18, seed=seed)
    nx.add_path(graph, range(nodes))
    return graph


SYMMETRIC = {
    "ring": nx.cycle_graph(31),
    "torus": nx.grid_2d_graph(5, 6, periodic=True),
    "cube": nx.hypercube_graph(5),
    "bipartite": nx.complete_bipartite_graph(5, 8),
    "clique": nx.complete_graph(9),
    "tree": nx.balanced_tree(3, 3),
    "star": nx.star_graph(12),
    "petersen": nx.petersen_graph(),
}


def check_against_dense(graph: nx.Graph, size: int) -> None:
    """Every complete eigenspace must have the projector of a dense solver, and partial ones lie inside."""
    matrix = normalised(graph)
    values, vectors = np.linalg.eigh(matrix)
    values, vectors = values[::-1][1:], vectors[:, ::-1][:, 1:]
    edges, nodes = edges_of(graph)
    found = uncached(edges, nodes, size)
    u, mu = found.vectors.double().numpy(), found.values.double().numpy()
    wide = min(size, nodes - 1)
    np.testing.assert_allclose(mu[:, :wide], np.tile(values[:wide], (nodes, 1)), atol=1e-6)
    np.testing.assert_allclose(matrix @ u[:, :wide], u[:, :wide] * mu[0, :wide], atol=1e-5)
    assert not u[:, wide:].any() and not mu[:, wide:].any()
    assert np.abs(u).max() <= 1 + 1e-4
    np.testing.assert_allclose(u[:, :wide].max(axis=0), 1.0, atol=1e-6)
    for start, stop in _groups(values):
        if start < wide:
            part = u[:, start : min(stop, wide)]
            part = part / np.linalg.norm(part, axis=0)
            np.testing.assert_allclose(part.T @ part, np.eye(part.shape[1]), atol=1e-5)
            if stop <= wide:
                space = vectors[:, start:stop]
                np.testing.assert_allclose(part @ part.T, space @ space.T, atol=1e-5)


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("size", [3, 7, 40])
def test_dense_solver_against_numpy(name: str, size: int) -> None:
    check_against_dense(SYMMETRIC[name], size)


@pytest.mark.many
@pytest.mark.parametrize("name", ["ring", "torus", "cube", "tree"])
@pytest.mark.parametrize("seed", [0, 5])
def test_lanczos_equals_dense_whatever_the_start(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = {
        "ring": nx.cycle_graph(180),
        "torus": nx.grid_2d_graph(12, 14, periodic=True),
        "cube": nx.hypercube_graph(8),
        "tree": nx.balanced_tree(3, 5),  # one start vector misses part of its eigenspaces
    }[name]
    edges, nodes = edges_of(larger)
    dense = uncached(edges, nodes, 5)
    monkeypatch.setattr(positional, "DENSE", 10)
    lanczos = uncached(edges, nodes, 5, seed=seed)
    torch.testing.assert_close(lanczos.vectors, dense.vectors, atol=1e-6, rtol=0)
    torch.testing.assert_close(lanczos.values, dense.values, atol=1e-7, rtol=0)
    assert bool(dense.vectors.any())


def test_lanczos_searches_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = nx.balanced_tree(3, 5)
    adjacency = sp.csr_matrix(nx.to_numpy_array(graph))
    monkeypatch.setattr(positional, "DENSE", 10)
    wanted, _ = positional._component_encodings(adjacency, 5, 0)
    search = positional._search

    def forgetful(
        matrix: object, away: np.ndarray, count: int, *rest: object
    ) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = search(matrix, away, count + (count > 1), *rest)  # type: ignore[arg-type]
        if away.shape[1] == 1:  # the first search loses one of two equal eigenvalues
            return np.delete(values, 1), np.delete(vectors, 1, axis=1)
        return values[:count], vectors[:, :count]

    monkeypatch.setattr(positional, "_search", forgetful)
    found, _ = positional._component_encodings(adjacency, 5, 0)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_an_eigenspace_too_large_to_resolve_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    edges, nodes = edges_of(nx.star_graph(150))
    dense = uncached(edges, nodes, 3)
    monkeypatch.setattr(positional, "DENSE", 10)
    lanczos = uncached(edges, nodes, 3)
    assert not bool(dense.vectors.any()) and not bool(lanczos.vectors.any())


def test_no_convergence_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positional, "DENSE", 10)
    monkeypatch.setattr(positional, "RESTARTS", 1)
    edges, nodes = edges_of(nx.path_graph(1200))
    with pytest.raises(InputError, match="component of 1200 nodes did not converge"):
        uncached(edges, nodes, 4)


@given(seed=st.integers(0, 1000), dimension=st.integers(1, 5))
def test_canonical_basis_does_not_depend_on_the_basis(seed: int, dimension: int) -> None:
    draw = np.random.default_rng(seed)
    space = np.linalg.qr(draw.normal(size=(17, dimension)))[0]
    turned = space @ np.linalg.qr(draw.normal(size=(dimension, dimension)))[0]
    one, two = _canonical_basis(space), _canonical_basis(turned)
    np.testing.assert_allclose(one, two, atol=1e-9)
    np.testing.assert_allclose(space @ (space.T @ one), one, atol=1e-9)
    np.testing.assert_allclose(np.abs(one).max(axis=0), 1.0)
    unit = one / np.linalg.norm(one, axis=0)
    np.testing.assert_allclose(unit.T @ unit, np.eye(dimension), atol=1e-9)


def test_ties_go_to_the_first_node() -> None:
    vector = np.array([[0.1], [-0.7], [0.7], [0.1]])
    np.testing.assert_allclose(_canonical_basis(vector)[:, 0], [-1 / 7, 1, -1, -1 / 7])
    noisy = vector + np.array([[0.0], [0.0], [1e-9], [0.0]])
    assert _canonical_basis(noisy)[1, 0] == 1


def test_groups() -> None:
    values = np.array([0.9, 0.9 - GAP / 2, 0.9 - GAP, 0.5, 0.5, -1.0])
    assert _groups(values) == [(0, 3), (3, 5), (5, 6)]
    assert _groups(np.array([0.3])) == [(0, 1)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 300))
def test_relabelling_and_form_of_the_edges(seed: int) -> None:
    edges, nodes = edges_of(lopsided(seed))
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(nodes, generator=draw)
    base = uncached(edges, nodes, 4)
    loops = torch.arange(7).expand(2, 7)
    messy = torch.cat([edges.flip(0), edges[:, :9], loops], dim=1)
    messy = messy[:, torch.randperm(messy.shape[1], generator=draw)]
    moved = uncached(order[messy], nodes, 4)
    torch.testing.assert_close(moved.vectors[order], base.vectors, atol=1e-4, rtol=0)


def test_every_component_has_its_own() -> None:
    pieces = [lopsided(1, 23), nx.path_graph(2), lopsided(2, 17), nx.cycle_graph(5), nx.empty_graph(1)]
    whole, nodes = edges_of(nx.disjoint_union_all(pieces))
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(0)).sort().indices
    together = uncached(whole, nodes, 6)
    shuffled = uncached(order[whole], nodes, 6)
    first = 0
    for piece in pieces:
        edges, count = edges_of(piece)
        alone = uncached(edges, count, 6)
        torch.testing.assert_close(together.vectors[first : first + count], alone.vectors, atol=1e-6, rtol=0)
        torch.testing.assert_close(together.values[first : first + count], alone.values)
        torch.testing.assert_close(shuffled.values[order[first : first + count]], alone.values)
        first += count
    assert not bool(together.vectors[-1].any())
    assert together.vectors[23:25].tolist() == [[1, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]]


def test_no_edges_no_encodings_one_node() -> None:
    none = torch.zeros((2, 0), dtype=torch.long)
    assert _laplacian_encoding(none, 5, 3).vectors.tolist() == [[0.0] * 3] * 5
    assert _laplacian_encoding(none, 1, 3).values.shape == (1, 3)
    assert _laplacian_encoding(torch.tensor([[0], [1]]), 2, 0).vectors.shape == (2, 0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 300))
def test_extension_repeats_what_is_there(seed: int) -> None:
    graph = lopsided(seed, 30)
    edges, nodes = edges_of(graph)
    vectors, values = (t.double() for t in uncached(edges, nodes, 9))
    degree = torch.tensor([graph.degree[i] for i in range(nodes)])
    solid = values[0].abs() >= FLOOR
    for node in range(nodes):
        targets = torch.tensor([list(graph.neighbors(node))])
        rows, mu = extend_encoding(vectors, values, degree, targets)
        torch.testing.assert_close(rows[0][solid], vectors[node][solid], atol=1e-4, rtol=0)
        torch.testing.assert_close(mu[0], values[0])


def test_extension_across_components_and_without_neighbours() -> None:
    graph = nx.disjoint_union_all([lopsided(1, 13), nx.cycle_graph(4), nx.empty_graph(1)])
    edges, nodes = edges_of(graph)
    vectors, values = uncached(edges, nodes, 3)
    degree = torch.tensor([graph.degree[i] for i in range(nodes)])
    targets = torch.tensor([[2, 14, 17], [17, 5, 0]])
    rows, mu = extend_encoding(vectors, values, degree, targets)
    for m, ends in enumerate(targets.tolist()):
        for p in range(3):
            total = 0.0
            for j in ends:
                value = float(values[j, p])
                gain = 1 / value if abs(value) >= FLOOR else value / FLOOR**2
                total += gain * float(vectors[j, p]) / (3 * max(int(degree[j]), 1)) ** 0.5
            assert float(rows[m, p]) == pytest.approx(total, abs=1e-5)
            assert float(mu[m, p]) == pytest.approx(float(values[ends, p].mean()), abs=1e-6)
    empty, _ = extend_encoding(vectors, values, degree, torch.zeros((2, 0), dtype=torch.long))
    assert empty.tolist() == [[0.0] * 3] * 2


def test_small_eigenvalues_are_not_amplified() -> None:
    values = torch.linspace(-0.3, 0.3, 13)[None].repeat(2, 1)
    rows, _ = extend_encoding(torch.ones(2, 13), values, torch.tensor([1, 1]), torch.tensor([[0]]))
    assert float(rows.abs().max()) <= 1 / FLOOR + 1e-5 and abs(float(rows[0, 6])) < 1e-5


def test_graphs_keep_extended_encodings() -> None:
    edges, nodes = edges_of(lopsided(4, 19))
    graph = _with_encoding(Graph.from_edges(edges, nodes, undirected=True), 5)
    assert graph.positional is not None and graph.positional.shape == (19, 5)
    assert _with_encoding(graph, 5) is graph and _with_encoding(graph, 0) is graph
    targets = torch.tensor([[3, 8, 11], [0, 1, 2]])
    larger, _ = graph.inject(targets)
    assert larger.positional is not None and larger.positional.shape == (21, 5)
    torch.testing.assert_close(larger.positional[:19], graph.positional)
    assert _with_encoding(larger, 5) is larger
    assert graph.positional_values is not None
    rows, _ = extend_encoding(
        graph.positional,
        graph.positional_values,
        graph.adjacency.degree,
        torch.tensor([[3, 8, 11], [0, 1, 2]]),
    )
    torch.testing.assert_close(larger.positional[19:], rows)
    other = _with_encoding(graph, 3)
    assert other.positional is not None
    torch.testing.assert_close(other.positional, graph.positional[:, :3])


def test_cache_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []
    leading = positional._component_encodings

    def counted(adjacency: sp.csr_matrix, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        solved.append(size)
        return leading(adjacency, size, seed)

    monkeypatch.setattr(positional, "_component_encodings", counted)
    monkeypatch.setattr(positional, "ON_DISK", 20)
    edges, nodes = edges_of(lopsided(6, 25))
    first = _laplacian_encoding(edges, nodes, 4)
    assert _laplacian_encoding(edges.flip(0), nodes, 4) is first and solved == [4]
    (file,) = (tmp_path / "cache" / "fgai" / "positional").iterdir()
    positional._memory.clear()
    torch.testing.assert_close(_laplacian_encoding(edges, nodes, 4), first)
    assert solved == [4]
    for content in (b"", file.read_bytes()[:100], b"junk"):
        file.write_bytes(content)
        positional._memory.clear()
        torch.testing.assert_close(_laplacian_encoding(edges, nodes, 4), first)
    assert solved == [4] * 4
    np.savez(file, vectors=np.full((25, 4), np.nan, np.float32), values=np.zeros((25, 4), np.float32))
    positional._memory.clear()
    torch.testing.assert_close(_laplacian_encoding(edges, nodes, 4), first)
    assert len(solved) == 5
    _laplacian_encoding(edges[:, 1:], nodes, 4)
    _laplacian_encoding(edges, nodes, 3)
    assert len(solved) == 7


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    monkeypatch.setattr(positional, "ON_DISK", 20)
    edges, nodes = edges_of(lopsided(6, 25))
    assert _laplacian_encoding(edges, nodes, 4).vectors.shape == (25, 4)


def test_memory_is_bounded() -> None:
    for nodes in range(2, 2 * positional.IN_MEMORY):
        _laplacian_encoding(torch.tensor([[0], [1]]), nodes, 2)
    assert len(positional._memory) == positional.IN_MEMORY


@pytest.mark.data
def test_cora_does_not_depend_on_the_start_vector(data_root: Path) -> None:
    graph = load_dataset("cora", data_root)
    one, two = (uncached(graph.edge_index, graph.num_nodes, 8, seed) for seed in (0, 11))
    torch.testing.assert_close(one.vectors, two.vectors, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.values, two.values, atol=1e-6, rtol=0)
