"""Modes of torch, threads and numba's settings: the same numbers, or a refusal in words."""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

import fgai
from fgai.attacks import Budget, PGDInjection, Threat
from fgai.attention import observe, prepared, record
from fgai.cli import data as doctor
from fgai.errors import AttentionError, FgaiWarning
from fgai.graph import Graph
from support.cli_cases import processes
from support.graph_cases import small_data

ROOT = Path(__file__).parent.parent
SMALL = Threat("small", PGDInjection, Budget(nodes=4, edges=4, steps=4, step_size=0.2), "for tests")


@cache
def trained() -> tuple[fgai.GAT, Graph]:
    graph = small_data()
    return fgai.train(fgai.GAT.for_data(graph), graph, epochs=20, progress=False), graph


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


NEEDS: dict[str, Callable[[fgai.GAT, Graph], Any]] = {
    "attack": lambda model, graph: PGDInjection(SMALL.budget).run(model, graph).value,
    "certify": lambda model, graph: fgai.certify_attention(model, graph, radius=0.1).layers[0].costs,
    "evaluate": lambda model, graph: fgai.evaluate(model, graph, SMALL).metrics["f1"],
    "explain": lambda model, graph: fgai.explain(model, graph, 3, threat=SMALL).attacked,
    "limit": lambda model, graph: fgai.limit(model, graph, 0.0, shrink=0.0)(graph).detach(),
    "make_faithful": lambda model, graph: weights(
        fgai.make_faithful(model, graph, epochs=2, nodes=3, edges=3, check=False, progress=False)
    ),
    "train": lambda model, graph: weights(fgai.train("GAT", graph, epochs=2, progress=False)),
}


@pytest.mark.many
@pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NEEDS)
def test_gradients_are_there_where_they_are_needed(name: str, mode: Callable[[], Any]) -> None:
    model, graph = trained()
    wanted = NEEDS[name](model, graph)
    with mode():
        found = NEEDS[name](model, small_or(graph))
        assert not torch.is_grad_enabled()
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def small_or(graph: Graph) -> Graph:
    """The same graph, without what was derived from it before."""
    return graph.replace()


def test_a_graph_used_in_inference_mode_can_be_trained_on() -> None:
    graph = small_data(seed=3)
    with torch.inference_mode():
        fgai.GAT.for_data(graph).eval()(graph)
    assert weights(fgai.train("GAT", graph, epochs=2, progress=False)).isfinite().all()


class TestThreads:
    def test_trainings_leave_each_other_alone(self) -> None:
        graph = small_data()
        alone = [weights(train(graph, seed)) for seed in range(3)]
        found: dict[int, Tensor] = {}
        in_threads([lambda seed=seed: found.update({seed: weights(train(graph, seed))}) for seed in range(3)])
        for seed, wanted in enumerate(alone):
            assert torch.equal(found[seed], wanted)

    @pytest.mark.parametrize("heads", ["each", "mean"])
    def test_observations_of_one_model_do_not_mix(self, heads: str) -> None:
        model, graph = trained()
        graph = prepared(model, graph)
        shifts = [0.0, 0.25, 0.5]
        wanted = [seen(model, graph, heads, shift) for shift in shifts]
        found: dict[int, list[Tensor]] = {k: [] for k in range(len(shifts))}

        def look(k: int) -> None:
            for _ in range(15):
                found[k].append(seen(model, graph, heads, shifts[k]))

        in_threads([lambda k=k: look(k) for k in found])
        for k, outs in found.items():
            assert all(torch.equal(out, wanted[k]) for out in outs)

    def test_a_recorded_model_is_refused_to_other_threads(self) -> None:
        model, graph = trained()
        wanted, errors = model(graph), []

        def call() -> None:
            try:
                model(graph)
            except AttentionError as error:
                errors.append(str(error))

        with record(model, perturb=by(0.1)) as tape:
            in_threads([call])
            inside = model(graph)
        assert len(errors) == 1 and "deepcopy" in errors[0]
        assert len(tape.attention) == 2 and not torch.equal(inside, wanted)
        assert torch.equal(model(graph), wanted) and torch.equal(copy.deepcopy(model)(graph), wanted)


def train(graph: Graph, seed: int) -> torch.nn.Module:
    return fgai.train("GAT", graph, seed=seed, epochs=15, progress=False)


def seen(model: torch.nn.Module, graph: Graph, heads: str, shift: float) -> Tensor:
    return observe(model, graph, heads=heads, perturb=by(shift) if shift else None).logits


def by(shift: float) -> Callable[..., Tensor]:
    return lambda layer, attention, source, destination: attention + shift


def in_threads(works: list[Callable[[], object]]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    with often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


@contextmanager
def often() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_a_compiled_model_gives_the_same() -> None:
    model, graph = trained()
    model = copy.deepcopy(model).double()  # of which no kernel was compiled yet
    assert graph.features is not None
    graph = graph.replace(features=graph.features.to("cpu", torch.float64))
    try:
        found = torch.compile(model, backend="eager")(graph)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(found, model(graph))


FORWARD = """
import torch, fgai
from fgai import topk
graph = fgai.datasets.planted(num_nodes=60)
torch.manual_seed(0)
model = fgai.GAT.for_data(graph).eval()
grown = graph.inject(torch.tensor([[0, 3]]))[0]
print(round(float(model(graph).sum()), 4), round(float(model(grown).sum()), 4))
print(topk.topk_mask(torch.tensor([0.1, 0.5, 0.2]), torch.tensor([0, 3]), 1).tolist())
"""
ASKED = "from fgai.ops import use_backend\nwith use_backend('numba'): model(graph)\n"


def run(code: str, **settings: str) -> tuple[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **settings}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    return done.stdout, done.stderr


def test_without_numba_the_reference_runs(tmp_path: Path) -> None:
    wanted = processes().run("-c", FORWARD, cwd=tmp_path).out
    found, said = run(FORWARD + ASKED, NUMBA_DISABLE_JIT="1")
    assert found == wanted and "[False, True, False]" in wanted
    assert "InputError" in said and 'forbids the backend "numba"' in said


TOPK = """
import torch
from fgai import topk
from fgai.compiled import REBUILT
values, rows = torch.tensor([0.1, 0.5, 0.2]), torch.tensor([0, 3])
topk.swap_margin(values, rows, 1, 1.0)
print(topk.topk_mask(values, rows, 1).tolist(), len(REBUILT))
"""


KERNELS = """
from fgai.compiled import compiled
double = compiled(lambda x: 2 * x)
triple = compiled(lambda x: 3 * x)
"""


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_code_is_compiled_again(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rebuilt = list[str]()
    monkeypatch.setattr("fgai.compiled.REBUILT", rebuilt)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "kernels.py").write_text(KERNELS)

    def results() -> tuple[int, int]:
        kernels = runpy.run_path(str(tmp_path / "kernels.py"))
        return kernels["double"](5), kernels["triple"](5)

    assert results() == (10, 15) and rebuilt == []
    files = sorted(tmp_path.rglob(f"*.{ending}"))
    for place, file in enumerate(files):
        file.write_bytes(file.read_bytes()[:20] if place else b"no code" * 9)
    with pytest.warns(FgaiWarning, match="damaged") as caught:
        assert results() == (10, 15)
    assert len(caught) == 1 and len(rebuilt) == len(files) == 2  # told once, not for every kernel
    assert results() == (10, 15) and len(rebuilt) == 2


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_kernels_are_compiled_again_by_another_process(ending: str, tmp_path: Path) -> None:
    run(TOPK, NUMBA_CACHE_DIR=str(tmp_path))
    files = sorted(tmp_path.rglob(f"*.{ending}"))
    for place, file in enumerate(files):
        file.write_bytes(file.read_bytes()[:20] if place else b"no code" * 9)
    found, said = run(TOPK, NUMBA_CACHE_DIR=str(tmp_path))
    assert found == f"[False, True, False] {len(files)}\n" and len(files) > 1
    assert said.count("damaged") == 1  # told once, not for every kernel
    assert run(TOPK, NUMBA_CACHE_DIR=str(tmp_path)) == ("[False, True, False] 0\n", "")


def test_doctor_tells_of_damaged_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "can be read" in doctor._stored()
    monkeypatch.setattr(doctor, "REBUILT", ["fgai.topk.cpu._lead_rows"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "fgai.topk.cpu._lead_rows" in doctor._stored()
