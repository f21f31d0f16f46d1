"""Counterfactuals: few neighbours whose removal, or injection, changes the class of a node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, combinations_with_replacement, islice

import torch
from torch import Tensor, nn

from fgai.attacks import Budget, PGDInjection
from fgai.attention import call_model, evaluating, limits_of, prepared
from fgai.certificates import certify_injection
from fgai.errors import CheckpointError, collect_warnings
from fgai.evaluation.breaking import bisect_below
from fgai.evaluation.run import eval_logits
from fgai.graph import ChangeRecord, Graph, GraphChange, InjectedNode
from fgai.graph.saved import typical_features
from fgai.recompute import Recompute

Choice = tuple[int, ...]  # of items by number, ascending
MOST_ITEMS = 20  # in a counterfactual
EXHAUSTIVE = 200  # all choices of one size, above 1, are tried if there are at most so many
BOUND_LIMIT = 5  # new neighbours up to which a bound is computed where no counterfactual was found
SHORTLIST = 30  # items that each step of the greedy search tries
ROUNDING = 1e-5  # relative error of logits recomputed in part: for smaller leads the whole model runs
TIE = 1e-30  # a class that loses a tie counts as behind by this much
COPIES = 2  # existing nodes of each other class that new neighbours may copy
STEPS, RESTARTS = 20, 2  # of the attack on the features of new neighbours


@dataclass(frozen=True)
class Counterfactual:
    """A small change of one kind that a search found; fewer neighbours may do, see `lower_bound`."""

    change: ChangeRecord | None  # changes the class when the model runs on it
    predicted: int | None  # class after the change
    size: int | None  # number of removed or injected neighbours
    lower_bound: int | None  # no fewer can change the class; None where no number can
    exhausted: bool = False  # every choice was tried and none changes the class


def removed_neighbours(model: nn.Module, graph: Graph, node: int) -> Counterfactual:
    """Search few neighbours whose removal (of the edges with `node`, in both directions) changes its class.

    Single neighbours, then all sets of 2, 3, ... while there are at most `EXHAUSTIVE` of a size, are tried
    until one changes the class. The lower bound is the smallest size not ruled out so (1 with positional
    encodings). A greedy search finds larger sets.
    """
    adjacency = graph.adjacency
    sources = adjacency.source[adjacency.destination == node]
    neighbours = sources[sources != node].tolist()

    def change(chosen: Choice) -> GraphChange:
        ends = torch.tensor([[node] * len(chosen), [neighbours[i] for i in chosen]], device=graph.device)
        return GraphChange(removed=ends)

    chosen, tried = _search(model, graph, node, change, len(neighbours), repeats=False)
    if chosen is None and tried == len(neighbours):  # also of no neighbours
        return Counterfactual(None, None, None, None, exhausted=True)
    pairs = [[node, neighbours[i]] for i in chosen or ()]
    record = ChangeRecord.of(model, graph, node, removed_edges=pairs)
    return _replay(model, graph, record, len(pairs), tried + 1)


def injected_neighbours(model: nn.Module, graph: Graph, node: int, seed: int = 0) -> Counterfactual | None:
    """Search new neighbours of `node` alone that change its class; None for a graph without features.

    A new node copies a node whose logits favour another class, or the mean of the training nodes of a class;
    then an attack searches features. The lower bound, for any features, is that of
    `certify_injection`; 1 for models without limits.
    """
    candidates = [] if graph.features is None else _candidates(model, graph, node)
    if not candidates:
        return None
    rows = torch.cat([row for _, row in candidates])

    def change(chosen: Choice) -> GraphChange:
        ends = torch.full((len(chosen), 1), node, device=graph.device)
        return GraphChange(endpoints=ends, features=rows[list(chosen)])

    chosen, _ = _search(model, graph, node, change, len(candidates), repeats=True)
    copies = [candidates[i][0] for i in chosen or ()]
    bound = _lower_bound(model, graph, node, len(copies) or BOUND_LIMIT)
    fewer = range(bound, len(copies) or MOST_ITEMS + 1)
    for injected in (_attack(model, graph, node, fewer, seed), copies):
        record = ChangeRecord.of(model, graph, node, injected=injected)
        result = _replay(model, graph, record, len(injected), bound)
        if result.change is not None:
            break
    return result


def _attack(model: nn.Module, graph: Graph, node: int, sizes: range, seed: int) -> list[InjectedNode]:
    """Few new neighbours with features that change the class, found by an attack; empty if it finds none."""
    if not sizes:
        return []
    mask = torch.arange(graph.num_nodes, device=graph.device) == node
    one = graph.replace(test_mask=mask, train_mask=None, val_mask=None)
    features = dict[int, Tensor]()
    top = _logits(model, graph)[node].argmax()

    def unchanged(count: int) -> float:
        if count < sizes.start:
            return 1.0
        budget = Budget(nodes=count, edges=1, steps=STEPS, step_size=0.1, restarts=RESTARTS)
        with collect_warnings():  # drop warnings about a weak search: a large size already shows that
            result = PGDInjection(budget, "margin").run(model, one, seed=seed)
        assert result.change.features is not None
        features[count] = result.change.features
        return float(_logits(model, result.graph)[node].argmax() == top)

    size, _ = bisect_below(unchanged, 0.5, sizes.stop - 1)
    rows = [] if size is None else features[size].tolist()
    return [InjectedNode(features=row, strength=1.0, edges=[node]) for row in rows]


@torch.no_grad()
def _search(
    model: nn.Module,
    graph: Graph,
    node: int,
    change: Callable[[Choice], GraphChange],
    count: int,
    *,
    repeats: bool,
) -> tuple[Choice | None, int]:
    """Choose few items that make the predicted class lose; see `_choose_few` for what is returned."""
    graph = prepared(model, graph)
    index = torch.tensor([node], device=graph.device)
    with evaluating(model):
        partial = Recompute(model, graph) if Recompute.fits(model, graph) else None
        top = call_model(model, graph)[index].argmax(1)

        def ahead(row: Tensor) -> float:
            return float(row[:, top] - row.index_fill(1, top, -torch.inf).amax(1))

        @cache
        def lead(chosen: Choice) -> float:
            changed = change(chosen)
            row = None if partial is None else partial.logits(changed, index).logits
            if row is None or abs(ahead(row)) <= ROUNDING * float(row.abs().max()):
                row = call_model(model, changed.apply(graph)[0])[index]
            # The smaller class wins ties.
            return ahead(row) if int(row.argmax()) == int(top) else min(ahead(row), -TIE)

        chosen, tried = _choose_few(count, lead, repeats=repeats)
    # The search reuses positional encodings that a replay recomputes, so its trials prove nothing.
    return chosen, tried if graph.positional is None else 0


def _choose_few(count: int, lead: Callable[[Choice], float], *, repeats: bool) -> tuple[Choice | None, int]:
    """Return few items with a negative lead, or None, and the size up to which no choice has one."""
    tried = 0
    for size in range(1, (MOST_ITEMS if repeats else min(MOST_ITEMS, count)) + 1):
        if math.comb(count + (size - 1) * repeats, size) > (EXHAUSTIVE if size > 1 else math.inf):
            break
        among = combinations_with_replacement if repeats else combinations
        best = min(among(range(count), size), key=lead)
        if lead(best) < 0:
            return best, tried
        tried = size
    else:
        return None, tried
    order = sorted(range(count), key=lambda item: lead((item,)))
    chosen: Choice = ()
    while len(chosen) < MOST_ITEMS:
        free = [item for item in order if repeats or item not in chosen][:SHORTLIST]
        if not free:
            break
        chosen = min((_with(chosen, item) for item in free), key=lead)
        if lead(chosen) < 0:
            return _shrink(chosen, order[:SHORTLIST], lead, tried), tried
    return None, tried


def _shrink(chosen: Choice, items: list[int], lead: Callable[[Choice], float], tried: int) -> Choice:
    """Drop items, and exchange two for one of `items`, as long as the lead stays negative."""
    while len(chosen) > tried + 1:
        # In reverse, choices without the first items come first.
        pruned, rests = (reversed([*combinations(chosen, len(chosen) - drop)]) for drop in (1, 2))
        exchanged = (_with(rest, item) for rest in rests for item in items if item not in rest)
        smaller = next((c for c in chain(pruned, islice(exchanged, EXHAUSTIVE)) if lead(c) < 0), None)
        if smaller is None:
            break
        chosen = smaller
    return chosen


def _with(chosen: Choice, item: int) -> Choice:
    return tuple(sorted((*chosen, item)))


def _candidates(model: nn.Module, graph: Graph, node: int) -> list[tuple[InjectedNode, Tensor]]:
    """New nodes that may change the class, and their features [1, F]."""
    assert graph.features is not None
    logits = _logits(model, graph)
    top = int(logits[node].argmax())
    candidates: list[tuple[InjectedNode, Tensor]] = []
    for label in (label for label in range(logits.shape[1]) if label != top):
        ahead = logits[:, label] - logits[:, top]
        for copied in ahead.topk(min(COPIES, len(ahead))).indices.tolist():
            row = graph.features.select(torch.tensor([copied], device=graph.device))
            candidates.append((InjectedNode(copy=copied, strength=1.0, edges=[node]), row))
        try:
            mean = typical_features(graph, label)
        except CheckpointError:  # no such training nodes
            continue
        candidates.append((InjectedNode(typical=label, strength=1.0, edges=[node]), mean))
    return candidates


def _lower_bound(model: nn.Module, graph: Graph, node: int, most: int) -> int:
    """A lower bound, at most `most`, of the new neighbours with any features that change the class."""
    if not limits_of(model):
        return 1
    for count in range(1, most):
        if not bool(certify_injection(model, graph, neighbours=count, where="direct").certified[node]):
            return count
    return most


def _replay(model: nn.Module, graph: Graph, record: ChangeRecord, size: int, bound: int) -> Counterfactual:
    if size:
        before, after = (_logits(model, one)[record.node] for one in (graph, record.apply(model, graph)))
        if before.argmax() != after.argmax():
            return Counterfactual(record, int(after.argmax()), size, bound)
    return Counterfactual(None, None, None, bound)


def _logits(model: nn.Module, graph: Graph) -> Tensor:
    return eval_logits(model, prepared(model, graph))
