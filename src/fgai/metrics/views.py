"""`Views`: the outputs of a model on the clean and attacked graphs, from which metrics are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, LayerAttention, Observation
from fgai.graph import Graph
from fgai.metrics.common import mean_of_defined, overlap_per_node, random_ranking, uniform_attention
from fgai.typed import typed

NULLS = ("uniform", "random")
"""Attentions of null rows: 1/degree, and scores drawn at random."""


class _LayerPair(NamedTuple):
    """One layer before and after, [E] each, on the same edges."""

    before: Tensor  # attention, mean over the heads
    after: Tensor
    rowptr: Tensor  # [N + 1]
    ranks: tuple[Tensor, Tensor]  # by which neighbours are ranked; see `LayerAttention.ranking`
    shown: tuple[Tensor, Tensor]  # geometric mean over heads, comparable across nodes


@typed
class AttentionPair:
    """Two head-averaged attentions on the edges of both; `touched`, bool [N] per layer: nodes in reach."""

    def __init__(
        self, before: AttentionMap, after: AttentionMap, k: int, touched: Sequence[Tensor] = ()
    ) -> None:
        self.layers = [
            _LayerPair(
                a.values[:, 0],
                b.values[:, 0],
                a.rowptr,
                ranks=(a.ranking(), b.ranking()),
                shown=(a.heads("log"), b.heads("log")),
            )
            for a, b in zip(*before.align(after), strict=True)
        ]
        self.k, self.touched = k, touched

    @cached_property
    def overlap(self) -> Tensor:
        """[L, N] top-k overlap, NaN at nodes that do not count."""
        return torch.stack([overlap_per_node(*p.ranks, p.rowptr, self.k) for p in self.layers])


class View(NamedTuple):
    """The model on an attacked graph: its output, and the clean and the attacked attention as a pair."""

    output: Observation
    pair: AttentionPair


@dataclass(frozen=True, eq=False, kw_only=True)
class AttackViews:
    """The model under one attack; explanations are compared at endpoints that every model meets."""

    worst: View  # under the strongest change, where predictions are scored
    shared: View  # at endpoints that all models share, where explanations are compared; else `worst`
    by_rule: Mapping[str, View] = field(default_factory=dict)  # for each rule that all models share
    damage: Mapping[str, float] = field(
        default_factory=dict
    )  # largest of each endpoint rule, where several were tried


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class Views:
    """A model's outputs on the clean and on the attacked graph.

    Original nodes come first on attacked graphs; edges are matched by `AttentionMap.align`. `observations`,
    `logits` and `attention` (heads averaged) have the keys `clean`, `attacked` (the attack on predictions)
    and, where run, `attacked_explanation`; `attacks` has `prediction` and `explanation`.
    """

    graph: Graph  # the original one
    observations: Mapping[str, Observation]
    target: Tensor | None  # true classes of all rows
    rows: Tensor  # [T] the rows that are scored
    k: int  # size of a node's explanation
    measured: Tensor  # [M] the rows whose outputs are compared
    model: nn.Module | None = None  # for metrics that run it again
    curves: bool = True  # whether to measure what takes many runs
    attacks: Mapping[str, AttackViews] = field(default_factory=dict)
    vanilla_attention: AttentionMap | None = None  # of the model it was made from, on the clean graph
    vanilla_model: nn.Module | None = None
    sharpest: int = 0  # number of the sharpest layer, of the vanilla model if there is one
    null: str = ""  # the attention of a null row in place of the model's: one of `NULLS`

    @property
    def logits(self) -> dict[str, Tensor]:
        """By key of `observations`, a row per node, link or small graph."""
        return {name: view.logits for name, view in self.observations.items()}

    @property
    def attention(self) -> dict[str, AttentionMap]:
        """By key of `observations`, heads averaged, [E, 1] per layer."""
        return {name: view.attention for name, view in self.observations.items()}

    @cached_property
    def similarity(self) -> AttentionPair | None:
        """The vanilla model's attention compared with the model's own, both on the clean graph."""
        clean = self.observations["clean"].attention
        vanilla = self.vanilla_attention
        return None if vanilla is None else AttentionPair(vanilla, clean, self.k)

    def by_layer(self, values: Sequence[float]) -> dict[str, Any]:
        """Return values per layer with their summaries: `last`, `all` (mean of those defined), `sharpest`."""
        mean = mean_of_defined(values)
        return {"layers": list(values), "last": values[-1], "all": mean, "sharpest": values[self.sharpest]}

    def by_attack(self, value: Callable[[View], Any]) -> dict[str, Any]:
        """Return a value by attack, at the endpoints that all models share."""
        return {name: value(attacked.shared) for name, attacked in self.attacks.items()}

    def by_endpoints(self, name: str, value: Callable[[View], Any]) -> dict[str, Any]:
        """Return a value by rule of endpoints and attack; nothing unless there are several rules."""
        rules = dict.fromkeys(rule for a in self.attacks.values() for rule in a.by_rule)
        if len(rules) < 2:
            return {}
        return {
            "endpoints": {
                rule: {
                    key: {name: value(a.by_rule[rule])}
                    for key, a in self.attacks.items()
                    if rule in a.by_rule
                }
                for rule in rules
            }
        }

    def compare_layers(self, name: str, value: Callable[[_LayerPair], float]) -> dict[str, Any]:
        """Return a number of every layer by attack, and with `vanilla` under `similarity`."""

        def layers(pair: AttentionPair) -> dict[str, Any]:
            return self.by_layer([value(layer) for layer in pair.layers])

        out: dict[str, Any] = {name: self.by_attack(lambda view: layers(view.pair))}
        if self.similarity is not None:
            out["similarity"] = {name: layers(self.similarity)}
        return out

    def with_null(self, kind: str, seed: int) -> Views:
        """Return the same with null attention, drawn anew under the attack on predictions if random."""
        worst = self.attacks["prediction"].worst
        clean, attacked = (
            replace(output, attention=_null_map(output.attention, kind, seed + drawn))
            for drawn, output in enumerate((self.observations["clean"], worst.output))
        )
        view = View(attacked, AttentionPair(clean.attention, attacked.attention, self.k, worst.pair.touched))
        return replace(
            self,
            observations={"clean": clean, "attacked": attacked},
            attacks={"prediction": AttackViews(worst=view, shared=view)},
            null=kind,
        )


def _null_map(attention: AttentionMap, kind: str, seed: int) -> AttentionMap:
    """Replace every layer's values; random ones are the same in all layers, so their mean is as random."""

    def replaced(layer: LayerAttention) -> LayerAttention:
        if kind == "uniform":
            values = uniform_attention(layer.rowptr, layer.num_edges)
        else:
            values = random_ranking(layer.num_edges, seed)
        return layer.with_values(values.to(layer.values)[:, None])

    return AttentionMap(tuple(replaced(layer) for layer in attention))
