"""Operations for the tests: what each takes, random graphs for them, and how two results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fgai.ops.reference import ADDITIVE, DOT, DYNAMIC, Options, Score
from fgai.sparse import Adjacency

SLOPE = 0.2
KINDS = {"additive": ADDITIVE, "dynamic": DYNAMIC, "dot": DOT}
SEED = 0x1234_5678_9ABC_DEF0 % (1 << 62)
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-10}

# What each operation takes before the adjacency, as letters: Nodes, Edges, Heads, Channels.
INPUTS: dict[str, tuple[str, ...]] = {
    "edge_softmax": ("EH",),
    "aggregate": ("EH", "NHC"),
    "score_additive": ("NH", "NH"),
    "score_dynamic": ("NHC", "NHC", "HC"),
    "score_dot": ("NHC", "NHC"),
    "attend_additive": ("NH", "NH", "NHC"),
    "attend_dynamic": ("NHC", "NHC", "HC", "NHC"),
    "attend_dot": ("NHC", "NHC", "NHC"),
    "node_scores": ("NHC", "HC", "HC"),
}
FUSED = tuple(name for name in INPUTS if name.startswith("attend"))


def inputs(
    name: str, adjacency: Adjacency, heads: int, channels: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """Random inputs of the operation, each asking for its gradient."""
    sizes = {"N": adjacency.num_nodes, "E": adjacency.num_edges, "H": heads, "C": channels}
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(sizes[letter] for letter in letters) for letters in INPUTS[name]]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def call(
    kernels: Any,
    name: str,
    given: Sequence[Tensor],
    adjacency: Adjacency,
    p: float = 0.0,
    averaged: bool = False,
    written: bool = True,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Run one operation of a backend; always a tuple of results."""
    operation, _, kind = name.partition("_")
    if operation not in ("score", "attend"):
        result = getattr(kernels, name)(*given, *(() if name == "node_scores" else (adjacency,)))
        return result if isinstance(result, tuple) else (result,)
    far, near, *rest = given if kind != "dot" else (given[1], given[0], *given[2:])
    weight = rest.pop(0) if kind == "dynamic" else None
    first = KINDS[kind], near, far, weight
    if operation == "score":
        return (kernels.score(Score(*first, SLOPE), adjacency),)
    options = Options(p, SEED, written, averaged, bias)
    result = kernels.attend(Score(*first, SLOPE), *rest, adjacency, options)
    assert isinstance(result, tuple)
    return result


def results_and_gradients(
    run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]], given: Sequence[Tensor], seed: int = 1
) -> list[Tensor]:
    """Results, then the gradients of a random weighted sum of all results."""
    out = run(given)
    generator = torch.Generator().manual_seed(seed)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o)).sum() for o in out)
    assert isinstance(loss, Tensor)
    return [*(o.detach() for o in out), *torch.autograd.grad(loss, given)]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    """Equal shapes, and numbers that differ by less than `tolerance` of the largest."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if theirs.numel():
            scale = max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)


def skewed(hub_degree: int = 400) -> Adjacency:
    """23 nodes: a hub with hundreds of (parallel) incoming edges, a busy source, empty rows, loops."""
    generator = torch.Generator().manual_seed(7)
    into_hub = torch.stack(
        [torch.randint(0, 23, (hub_degree,), generator=generator), torch.full((hub_degree,), 2)]
    )
    from_busy = torch.stack([torch.full((60,), 5), torch.randint(0, 19, (60,), generator=generator)])
    others = torch.randint(0, 19, (2, 41), generator=generator)
    loops = torch.arange(8).expand(2, 8)
    return Adjacency.build(torch.cat([into_hub, from_busy, others, loops], 1), 23)[0]


@st.composite
def adjacencies(draw: st.DrawFn, max_nodes: int = 7) -> Adjacency:
    """Any small multigraph: one node, no edges, empty rows, parallel edges, loops, one crowded node."""
    nodes = draw(st.integers(1, max_nodes))
    node = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=3 * nodes))
    crowd = draw(st.sampled_from([0, 0, 9, 30]))
    edges += [(k % nodes, nodes // 2) for k in range(crowd)]
    index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()
    return Adjacency.build(index, nodes)[0]
