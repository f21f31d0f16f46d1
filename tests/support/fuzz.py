"""Calls nobody planned: every public function and class, with arguments that fit, nearly fit, or do not.

What may come out is a result, an `FgaiError`, or a `TypeError` for an argument of another type. Arguments are
picked by the name and the annotation of a parameter, from things that belong to one small graph and from
things that are wrong in one way.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import resource
import signal
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Data, HeteroData

import fgai
from fgai.attacks import Budget, PGDInjection, RandomInjection, Threat
from fgai.attention import observe
from fgai.errors import FgaiError
from fgai.hetero import HeteroView
from fgai.metrics import Views
from fgai.sparse import Adjacency, Features
from support.graph_cases import small_data
from support.hetero_cases import CITES, WRITES, WRITTEN, hetero_data, hetero_model

SECONDS, BYTES = 60.0, 1.5e9
"""No call on a graph of a few nodes takes longer, or more memory; the first one may compile kernels."""
NODES, WIDTH = 30, 5

# These change what the whole library knows, write where they are told, or start programs.
LEFT_OUT = {
    *(f"register_{kind}" for kind in ("adapter", "limits", "dataset", "task_split", "threat", "task")),
    *(f"register_{kind}" for kind in ("model", "defence")),
    "metric",
}


PLUMBING = ("files",)
"""Packages that only fgai calls; kinds of files have a fuzzer of their own, see tests/files."""


class Door(NamedTuple):
    """A public name: where it is found, and what it is."""

    home: str
    name: str
    call: Callable[..., Any]


class Hang(BaseException):
    """A call took longer than its size explains."""


@cache
def doors() -> tuple[Door, ...]:
    """Every public function and class of the package, each once."""
    found: dict[int, Door] = {}
    for home in ("fgai", *(f"fgai.{name}" for name in fgai._PACKAGES if name not in PLUMBING)):
        module = importlib.import_module(home)
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == home and not name.startswith("_")
        ]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if callable(value) and not isinstance(value, types.GenericAlias) and name not in LEFT_OUT:
                found.setdefault(id(value), Door(home, name, value))
    return tuple(door for door in found.values() if _parameters(door.call) is not None)


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter] | None:
    if isinstance(call, type) and issubclass(call, Exception):
        return None
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return None


class Bare(nn.Module):
    """A model without parameters."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return x[:, :3]


@cache
def pools() -> dict[str, list[Any]]:
    """Arguments by kind; the first ones of each fit each other."""
    graph = small_data(nodes=NODES, width=WIDTH)
    looped = graph.add_self_loops()[0]
    adjacency, rowptr, edges = looped.adjacency, looped.adjacency.rowptr, looped.num_edges
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(edges, generator=generator)
    logits = torch.randn(NODES, 3, generator=generator)
    nan = torch.tensor(float("nan"))
    model = fgai.GAT(WIDTH, 3, hidden_channels=2, heads=2).eval()
    seen = observe(model, graph)
    assert graph.features is not None and graph.y is not None
    broken = Adjacency(
        3, torch.tensor([0, 9]), torch.tensor([0, 1]), *(torch.tensor([0, 1, 2, 2]),) * 2, rowptr
    )
    numbers = [1, 2, 0.5, 0, 3, -1, 0.05, 5, float("nan"), float("inf"), 1.5, 10**12, 2**64, -(2**70), True]
    return {
        "rowptr": [
            rowptr,
            rowptr.clone(),
            torch.tensor([0, 10**9, edges]),
            rowptr[:-1],
            rowptr.flip(0),
            rowptr.int(),
        ],
        "edge values": [w, w.flip(0), w[:-1], w.double(), w * nan, -w, w.half(), w[:, None], (w * 9).long()],
        "edge mask": [w > 0.5, w > 2, (w > 0.5)[:-1], w],
        "node numbers": [
            graph.y,
            graph.y.clone(),
            graph.y - 1,
            graph.y * 10**15,
            graph.y.float(),
            graph.y[:-1],
        ],
        "node mask": [graph.test_mask, graph.y, ~graph.y, graph.test_mask[:-1], torch.tensor([10**9])],
        "logits": [
            logits,
            logits * 2,
            logits * nan,
            logits[:, :1],
            logits[:, :0],
            logits[:-1],
            logits.double(),
        ],
        "by head": [torch.rand(NODES, 2), torch.rand(NODES, 2, 3), torch.rand(edges, 2), torch.rand(2, 3)],
        "pairs": [
            graph.edge_index,
            graph.edge_index.int(),
            graph.edge_index + 10**6,
            graph.edge_index.float(),
        ],
        "targets": [
            torch.tensor([[0, 3], [1, 2]]),
            torch.tensor([[0, 0]]),
            torch.zeros(2, 0, dtype=torch.long),
        ],
        "tensor": [
            torch.zeros(0),
            torch.tensor(3.0),
            torch.zeros(2, 2, 2, 2),
            torch.ones(3, dtype=torch.complex64),
        ],
        "number": numbers,
        "text": ["node", "test", "l1", "GAT", "planted", "mean", "", "nobody", "graph", "logits"],
        "graph": [
            graph,
            looped,
            graph.replace(y=None),
            graph.to_data(),
            graph.replace(test_mask=None),
            Data(),
        ],
        "model": [model, fgai.GCN(WIDTH, 3), fgai.GAT(WIDTH + 1, 3), nn.Linear(WIDTH, 3), Bare(), "GAT"],
        "adjacency": [adjacency, graph.adjacency, broken],
        "features": [graph.features, Features.dense(torch.ones(2, 2)), Features(torch.ones(3))],
        "attention": [seen.attention, seen.attention.layers[0]],
        "budget": [Budget(nodes=2, edges=2, steps=2, step_size=0.1), Budget()],
        "threat": [
            Threat("small", PGDInjection, Budget(nodes=2, edges=2, steps=1, step_size=0.1), "-"),
            "nobody",
        ],
        "change": [fgai.graph.GraphChange(), fgai.graph.GraphChange(endpoints=torch.tensor([[0, 1]]))],
        "attack": [RandomInjection, RandomInjection(Budget(nodes=1, edges=1))],
        "views": [
            Views(
                graph=graph, observations={"clean": seen}, target=graph.y, rows=graph.y, measured=graph.y, k=5
            ),
        ],
        "generator": [torch.Generator().manual_seed(3)],
        "sequence": [
            (0.0, 0.5),
            [1.0, 0.5],
            (),
            (1,),
            "ab",
            [None],
            {"a": 1},
            {"A": model},
            [model],
            np.ones(3),
        ],
        "dtype": [torch.float32, torch.int64],
        **_hetero_pools(),
        "odd": [None, object(), len, Path("/nowhere/at/all"), b"", {}, [], "cpu", torch.device("cpu"), False],
    }


def _hetero_pools() -> dict[str, list[Any]]:
    """Of heterogeneous graphs."""
    data, bare = hetero_data(), hetero_data()
    del bare["paper"].y
    return {
        "hetero data": [data, data.clone(), bare, Data(), HeteroData()],
        "hetero model": [hetero_model("gat", data), hetero_model("hgt", data), Bare(), fgai.GCN(WIDTH, 3)],
        "edge type": [WRITES, list(CITES), WRITTEN, "writes", (1, 2, 3), ("a", "b")],
        "node type": ["paper", "author", "nobody"],
        "layout": [HeteroView(data).layout],
    }


HETERO = {
    "data": "hetero data",
    "model": "hetero model",
    "edge_type": "edge type",
    "node_type": "node type",
    "target": "node type",
    "layout": "layout",
}
"""What arguments of `fgai.hetero` are, by name."""
KINDS = {
    name: kind
    for kind, names in {
        "rowptr": "rowptr grown",
        "edge values": "w w_other w_tilde values score scores",
        "edge mask": "mask_a mask_b truth injected keep known",
        "node numbers": "target prediction without only y",
        "node mask": "nodes right",
        "logits": "logits y_other per_node",
        "pairs": "edge_index pairs",
        "targets": "targets endpoints",
        "graph": "data graph",
        "model": "model vanilla",
        "sequence": "models",
        **{name: name for name in ("adjacency", "features", "attention", "budget", "threat", "change")},
        **{name: name for name in ("generator", "views", "attack", "dtype")},
    }.items()
    for name in names.split()
}
WORDS = (("Tensor", "by head"), ("int", "number"), ("float", "number"), ("str", "text"), ("Graph", "graph"),
         ("Module", "model"), ("Sequence", "sequence"), ("Mapping", "sequence"))  # fmt: skip
QUIET = {"progress": False, "checkpoint": None}
SHORT: dict[str, dict[str, Any]] = {
    "train": {"epochs": 2, **QUIET},
    "make_faithful": {"epochs": 2, "check": False, "nodes": 2, "edges": 2, **QUIET},
    "make_hetero_faithful": {"epochs": 2, "check": False, "nodes": 2, "edges": 2, **QUIET},
    "harden": {"epochs": 2, "check": False, "nodes": 2, "edges": 2, **QUIET},
    "fit": {"config": fgai.training.TrainConfig(epochs=2), **QUIET},
    "train_method": {"settings": {"epochs": 2}, **QUIET},
    "report": {"path": Path("/nowhere/at/all.html")},
    "load_dataset": {"root": None},
    "planted": {"num_nodes": 60},
}
"""What keeps a call that does run short."""
SMALL = ("evaluate", "compare", "explain", "report", "breaking_point", "make_report", "attack")


@st.composite
def calls(draw: st.DrawFn, among: tuple[Door, ...] | None = None) -> tuple[Door, dict[str, Any]]:
    """A public name and arguments for it; optional ones mostly keep their defaults.

    Half of the calls are wrong in one argument at most, so that they get far.
    """
    door = draw(st.sampled_from(among or doors()))
    parameters = [p for p in _parameters(door.call) or () if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    careful = draw(st.booleans())
    odd = draw(st.sampled_from([None, *(p.name for p in parameters)]))
    given: dict[str, Any] = {}
    for parameter in parameters:
        optional = parameter.default is not parameter.empty and parameter.name != odd
        if optional and (careful or draw(st.integers(0, 2))):
            continue
        known = HETERO if door.home == "fgai.hetero" else KINDS
        given[parameter.name] = draw(_argument(parameter, careful and parameter.name != odd, known))
    if door.name in SMALL and "threat" in {parameter.name for parameter in parameters}:
        given["threat"] = pools()["threat"][0]
    return door, given | SHORT.get(door.name, {})


def _argument(parameter: inspect.Parameter, careful: bool, known: dict[str, str]) -> st.SearchStrategy[Any]:
    kind = known.get(parameter.name)
    if kind is None:
        annotation = str(parameter.annotation)
        kind = next((found for word, found in WORDS if word in annotation), "odd")
    return _values(kind, careful)


@cache
def _values(kind: str, careful: bool) -> st.SearchStrategy[Any]:
    """What is given for an argument of a kind; made once, as that takes longer than most calls."""
    fitting, near = st.sampled_from(pools()[kind][:2]), st.sampled_from(pools()[kind])
    anything = st.sampled_from([value for pool in pools().values() for value in pool])
    return fitting if careful else st.one_of(fitting, near, near, anything)


def foreign(door: Door, given: dict[str, Any], seconds: float = SECONDS) -> str | None:
    """Make the call; what came out that may not, in words, or None."""
    # Some calls change the model they are given, which the next call must not see.
    given = {name: copy.deepcopy(v) if isinstance(v, nn.Module) else v for name, v in given.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _limited(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = door.call(**given)
            if isinstance(made, Iterator) or hasattr(made, "__enter__"):
                return None
    except (FgaiError, TypeError):
        pass
    except Hang:
        return f"hangs for more than {seconds:.0f} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return f"takes {grown / 1e9:.1f} GB" if grown > BYTES else None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    held = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, held)
