"""Every public function and class, called as nobody planned: no crash, no hang, no foreign exception."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch_geometric.data import HeteroData

import fgai
import fgai.reports.figures
from fgai.attacks import Budget
from fgai.errors import FgaiError
from support import fuzz
from support.graph_cases import small_data

FEW, MANY, PIECES = 2, 20_000, 20
"""Calls of each function; in all where there is time, and in how many pieces."""
LIMITS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls may write files."""
    monkeypatch.chdir(tmp_path)


def check(call: tuple[fuzz.Door, dict[str, Any]]) -> None:
    door, arguments = call
    found = fuzz.foreign(door, arguments)
    shown = ", ".join(f"{name}={value!r:.120}" for name, value in arguments.items())
    assert found is None, f"{door.home}.{door.name}({shown}) {found}"


def make_calls(
    count: int, number: int, among: tuple[fuzz.Door, ...] | None = None, *, plain: bool = True
) -> int:
    """Draw calls from a seed and make them; the first one, in which all fits, only if `plain`."""
    drawn = made = 0

    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], **LIMITS)
    @given(fuzz.calls(among))
    def calls(call: tuple[fuzz.Door, dict[str, Any]]) -> None:
        nonlocal drawn, made
        drawn += 1
        if plain or drawn > 1:
            made += 1
            check(call)

    calls()
    return made


def test_every_function_is_called() -> None:
    """With arguments drawn at random; what fits is tested elsewhere."""
    made = [make_calls(FEW, number, (door,), plain=False) for number, door in enumerate(fuzz.doors())]
    assert sum(made) > 250


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_twenty_thousand_calls(piece: int) -> None:
    assert make_calls(MANY // PIECES, piece) == MANY // PIECES


GRAPH = small_data(nodes=30, width=5)
FOUND: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (fgai.attention.duplicate, {"model": ()}),
    (fgai.reports.figures.certified_curves, {"records": "node"}),
    (fgai.limit, {"model": torch.ones(3), "data": small_data()}),
    (fgai.attacks.ShortEnsemble, {"budget": "ab"}),
    (fgai.topk.swap_costs, {"values": torch.ones(3) > 0, "rowptr": torch.tensor([0, 3]), "k": 1}),
    (fgai.limit, {"model": fgai.GAT(5, 3), "data": small_data(), "nodes": torch.rand(30)}),
    (fgai.attacks.make_attack, {"threat": "standard", "objective": torch.ones(2)}),
    (fgai.training.HardenSettings, {"attack_weight": -(2**70)}),
    (fgai.ops.row_sum, {"values": torch.ones(3), "rowptr": torch.tensor([0, 2, 1])}),
    (fgai.metrics.chance_score, {"name": "f1", "target": torch.tensor([0.5, 1.0])}),
    (fgai.metrics.chance_score, {"name": "f1", "target": torch.tensor([0, 2 * 10**15])}),
    (fgai.report, {"models": {}, "data": small_data(), "on_step": torch.ones(2)}),
    (fgai.report, {"models": {}, "data": small_data(), "node": torch.ones(2)}),
    (fgai.attacks.Budget, {"box": torch.ones(2, 3)}),
    (fgai.attacks.EnsembleInjection, {"budget": fgai.attacks.Budget(), "members": [None]}),
    (fgai.metrics.random_ranking, {"num_edges": 10**12, "seed": 1}),
    (
        fgai.reports.figures.ExplainerDot,
        {"name": "a", "kept": torch.ones(2, 3), "again": None, "chance": 0.5},
    ),
    (fgai.tasks.check_logits, {"logits": "l1", "graph": small_data()}),
    (fgai.metrics.recall, {"prediction": torch.tensor([0, 1]), "target": torch.tensor([0, 10**9])}),
    (fgai.certificates.full_promise, {"promise": None, "explanation": ""}),
    (fgai.records.provenance_line, {"block": "node"}),
    (fgai.save_model, {"model": fgai.GAT(3, 2), "path": ""}),
    (fgai.metrics.shown_numbers, {"records": HeteroData()}),
    (fgai.metrics.shown_numbers, {"records": GRAPH}),
    (fgai.attention.AttentionMap, {"layers": HeteroData()}),
    (fgai.training.HardenSettings, {"box": torch.ones(2, 3)}),
    (fgai.metrics.mean_of_defined, {"values": torch.ones(2, 3)}),
    (fgai.records.data_frame, {"values": torch.ones(4), "columns": ("author", "writes", "paper")}),
]


@pytest.mark.parametrize(("call", "arguments"), FOUND)
def test_what_it_has_found_stays_mended(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    check((fuzz.Door(call.__module__, call.__name__, call), arguments))


EDGES = torch.tensor([[0, 1], [1, 0]])
HUGE = 10**11
"""Of anything, more than fits into memory."""


def gat(**options: Any) -> fgai.GAT:
    return fgai.GAT(5, 3, hidden_channels=2, heads=2, **options).eval()


def attention() -> fgai.attention.AttentionMap:
    return fgai.attention.observe(gat(), GRAPH).attention


def certificate(tolerated: int) -> fgai.certificates.VotingCertificate:
    one = torch.zeros(3, dtype=torch.long)
    return fgai.certificates.VotingCertificate(
        groups=5,
        confidence=0.0,
        votes=torch.ones(3, 2, dtype=torch.long),
        classes=one,
        node_radius=torch.full((3,), tolerated),
        scores=torch.zeros(3, 5),
        group=one,
        model={"class": "GAT"},
        data={"name": "tiny"},
        version={},
        seconds=0.0,
    )


LOGITS, META = torch.rand(5, 3), torch.rand(5, 3, device="meta")
REFUSED: dict[str, Callable[[], Any]] = {
    "rows that are no numbers": lambda: fgai.attention.touched_rows(
        attention(), attention(), torch.tensor([0.5, 1.0])
    ),
    "limits of a negative size": lambda: fgai.attention.Limits(2, -1),
    "limits of a huge size": lambda: fgai.attention.Limits(HUGE),
    "links of a scalar": lambda: fgai.graph.Links(torch.tensor(1), torch.tensor(1), torch.tensor(1)),
    "links that are no numbers": lambda: fgai.graph.Links(
        torch.rand(2, 3), torch.zeros(3).long(), torch.zeros(3).long()
    ),
    "a pass over -1 features": lambda: fgai.large.pass_size(gat(), 10, 10, -1),
    "a pass over many features": lambda: fgai.large.pass_size(gat(), 10, 10, HUGE),
    "F1 without values": lambda: fgai.metrics.f1(META, torch.zeros(5).long()),
    "F1 of classes without values": lambda: fgai.metrics.f1(LOGITS, torch.zeros(5, device="meta").long()),
    "g-TVD without values": lambda: fgai.metrics.g_tvd_rel(META, META),
    "fidelity of sparse logits": lambda: fgai.metrics.fidelity_plus(LOGITS.to_sparse(), LOGITS),
    "fidelity of sparse classes": lambda: fgai.metrics.fidelity_minus(
        torch.ones(3).long().to_sparse(), torch.ones(3).long()
    ),
    "a double model": lambda: fgai.attention.call_model(gat().double(), GRAPH),
    "a half model": lambda: fgai.attention.call_model(gat().half(), GRAPH),
    **{
        f"{type(value).__name__}.to({device})": lambda value=value, device=device: value.to(device)
        for value in (GRAPH, GRAPH.adjacency, GRAPH.features, attention(), attention().layers[0])
        for device in ("x", "cpu:-1", "cuda:99")
    },
    "rows of another part": lambda: fgai.tasks.task_of(GRAPH).rows(GRAPH, "x"),
    "another part": lambda: fgai.tasks.task_of(GRAPH).has_part(GRAPH, "x"),
    "embedded data": lambda: gat().embed(GRAPH.to_data()),
    "votes of many groups": lambda: fgai.certificates.vote(gat(), GRAPH, groups=10**10),
    "a transformer of -1 features": lambda: fgai.GT(-1, 3),
    "a transformer of -1 classes": lambda: fgai.GT(5, -1),
    "a transformer of many classes": lambda: fgai.GT(5, HUGE),
    "many nodes": lambda: fgai.Graph.from_edges(EDGES, HUGE),
    "an adjacency of many nodes": lambda: fgai.sparse.Adjacency.from_sorted(EDGES[0], EDGES[1], HUGE),
    "dense features of many columns": lambda: fgai.sparse.Features.sparse(
        torch.zeros(3).long(), torch.zeros(0).long(), torch.zeros(0), HUGE
    ).to_dense(),
    "many draws": lambda: fgai.large.NeighbourSampler(GRAPH, [HUGE], replace=True).sample(torch.arange(30)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    with pytest.raises((FgaiError, TypeError)):
        REFUSED[name]()


def test_a_table_of_votes_is_no_longer_than_the_groups() -> None:
    assert len(certificate(10**12).tables()[0].rows) == 6


@pytest.mark.parametrize("call", ["digest_of", "is_stream", "write_atomic", "unpack", "read_metadata"])
def test_files_are_named_by_text_too(call: str) -> None:
    fgai.save_model(gat(), "model.safetensors")
    more = (b"x",) if call == "write_atomic" else ()
    getattr(fgai.files, call)("model.safetensors", *more)


def test_archives_are_named_by_text_too() -> None:
    np.savez("a.npz", x=np.arange(3))
    assert fgai.files.read_arrays("a.npz", ["x"])["x"].tolist() == [0, 1, 2]
    fgai.files.extract("a.npz", ["x.npy"], ".")
    assert np.load("x.npy").tolist() == [0, 1, 2]


def test_sizes_of_files_and_budgets(tmp_path: Path) -> None:
    """A number in a file, or a product of numbers, that no memory holds is refused before it is allocated."""
    (tmp_path / "edges.csv").write_text("source,destination\n0,999999999999\n")
    np.savez(tmp_path / "graph.npz", edge_index=EDGES.numpy(), num_nodes=np.array(HUGE))
    torch.save({"edge_index": EDGES, "num_nodes": HUGE}, tmp_path / "graph.pt")
    for name in ("edges.csv", "graph.npz", "graph.pt"):
        with pytest.raises(FgaiError, match=r"GB of memory|too large for 1 edges"):
            fgai.load_graph(tmp_path / name)
    wide = small_data(nodes=30, width=5).replace(
        features=fgai.sparse.Features.sparse(
            torch.zeros(31).long(), torch.zeros(0).long(), torch.zeros(0), 10**9
        )
    )
    with pytest.raises(FgaiError, match="GB of memory"):
        Budget(nodes=1000, edges=3).target_nodes(wide)


class TestTheFuzzer:
    """It would find nothing if its calls were all refused at the door."""

    def test_knows_every_public_function(self) -> None:
        known = {door.name for door in fuzz.doors()} | fuzz.LEFT_OUT
        public = [name for name in fgai.__all__ if inspect.isfunction(getattr(fgai, name))]
        assert set(public) <= known and len(known) > 250

    @pytest.mark.parametrize(
        "name",
        ["evaluate", "explain", "train", "make_faithful", "certify_attention", "certify_injection", "limit"],
    )
    def test_gets_to_the_bottom(self, name: str) -> None:
        pools = fuzz.pools.__wrapped__()
        fitting = {"model": pools["model"][0], "data": pools["graph"][0], "node": 3, "radius": 0.1}
        fitting["threat"] = pools["threat"][0]
        known = inspect.signature(getattr(fgai, name)).parameters
        wanted = {key: value for key, value in fitting.items() if key in known}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(fgai, name)(**wanted, **fuzz.SHORT.get(name, {}))

    def test_notices(self) -> None:
        def foreign() -> None:
            raise KeyError("a")

        def slow() -> None:
            while True:
                pass

        assert "KeyError" in str(fuzz.foreign(fuzz.Door("", "", foreign), {}))
        assert "hangs" in str(fuzz.foreign(fuzz.Door("", "", slow), {}, seconds=0.2))
