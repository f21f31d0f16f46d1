"""`FaithfulLoss`: the loss terms of faithful training on one graph or mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fgai.attention import (
    AttentionMap,
    LayerAttention,
    call_model,
    evaluating,
    observe,
    straight_through,
)
from fgai.graph import Graph
from fgai.sparse import EdgeMap
from fgai.training.adversary import InjectionAdversary
from fgai.training.limiting import _range_pass
from fgai.training.loop import SCORE_STEPS
from fgai.training.settings import FaithfulSettings
from fgai.training.targets import Reach, Targets
from fgai.training.terms import StepContext, WeightedTerms, first_rows


@dataclass(frozen=True, eq=False)
class InjectedNodes:
    """Nodes of an adversary at endpoints [M, e] on the graph's device.

    `subset` [M] are those that join a mini-batch; None is all of them, on the adversary's own graph.
    """

    adversary: InjectionAdversary
    endpoints: Tensor
    reach: Reach
    subset: Tensor | None = None

    def inject(self, graph: Graph) -> tuple[Graph, EdgeMap]:
        """Return the graph with the nodes, after the ascent step that is due."""
        if self.subset is None:
            return self.adversary.inject(self.endpoints)
        return self.adversary.inject_into(graph, self.endpoints, self.subset)

    def using_points(self) -> AbstractContextManager[None]:
        """A block in which every second node has the values of its points."""
        return self.adversary.using_points(self.subset)


@dataclass(frozen=True, eq=False)
class FaithfulLoss:
    """The loss of one step on the whole graph or a mini-batch, prepared for the model.

    Only the seeds of a mini-batch have targets. They are its first nodes and edges are sorted by destination,
    so their rows and edges come first everywhere. With `sets_ranges` limits take their ranges from the clean
    passes; in a mini-batch they stay as they are.
    """

    graph: Graph
    targets: Targets
    settings: FaithfulSettings
    terms: WeightedTerms
    sets_ranges: bool = True

    def losses(
        self, model: nn.Module, on: str, attacks: Sequence[InjectedNodes], ramp: Tensor
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then the attacked terms, whose clean side is constant; see `Recipe.losses`.

        Dropout is off and the statistics of batch norms stay the vanilla model's.

        Args:
            model: in training.
            on: `clean`, `attacked` or `both`, the graphs whose terms are computed.
            attacks: one for each ascent step; the terms are computed under the last.
            ramp: factor of the attacked terms.
        """
        model.eval()
        clean = self.vanilla_context(model)
        if on != "attacked":
            clean = replace(self.clean_context(model, sampled=True), ramp=ramp)
            yield self.terms.loss(self.terms.select("clean"), clean)
            for term in self.terms.select("clean", own_pass=True):
                yield self.terms.loss([term], clean)
            layers = tuple(layer.detach() for layer in clean.layers)
            clean = replace(clean, logits=clean.logits.detach(), layers=layers)
        if on == "clean":
            return
        *earlier, last = attacks
        for attack in earlier:
            self.collect_gradient(model, attack, clean)
        values = self.attacked_terms(model, last, clean)
        yield {**values, "total": values["total"] * ramp}

    def collect_gradient(
        self, model: nn.Module, attack: InjectedNodes, clean: StepContext | None = None
    ) -> None:
        """Give an adversary a gradient against the model; the clean side is vanilla's by default."""
        with evaluating(model, freeze=True):
            total = self.attacked_terms(model, attack, clean or self.vanilla_context(model))["total"]
            total.backward()  # type: ignore[no-untyped-call]
        attack.adversary.sum_gradients()

    def score(self, model: nn.Module, attack: InjectedNodes | None) -> Tensor:
        """Return minus the total under an attack that starts anew; nothing waits for the device."""
        with evaluating(model, freeze=True):
            with torch.no_grad():
                clean = self.clean_context(model)
                terms = [*self.terms.select("clean"), *self.terms.select("clean", own_pass=True)]
                total = self.terms.loss(terms, clean)["total"]
            if attack is None:
                return -total
            attack.adversary.restart()
            for step in range(SCORE_STEPS + 1):
                attacked = self.attacked_terms(model, attack, clean)["total"]
                if step < SCORE_STEPS:
                    attacked.backward()  # type: ignore[no-untyped-call]
            return -(total + attacked).detach()

    def clean_context(self, model: nn.Module, *, sampled: bool = False) -> StepContext:
        """Run the model on the clean graph; limits take their ranges from the same pass."""
        settings, ranked = self.settings, self.terms.need_explanation
        ranges: AbstractContextManager[None] = nullcontext()
        if self.sets_ranges:
            ranges = _range_pass(model, settings.clip_share, settings.shrink, sampled=sampled)
        with ranges, straight_through(model):
            observation = observe(model, self.graph, heads="mean", grad=True, ranked=ranked)
        return replace(
            self.vanilla_context(model),
            logits=first_rows(observation.logits, self.targets.logits),
            layers=observation.attention.layers,
            has_explanations=ranked,
        )

    def vanilla_context(self, model: nn.Module) -> StepContext:
        """Return a context whose clean side is the vanilla model's."""
        targets = self.targets
        return StepContext(model, self.graph, targets, self.settings, targets.logits, targets.layers)

    def attacked_terms(
        self, model: nn.Module, attack: InjectedNodes, clean: StepContext
    ) -> dict[str, Tensor]:
        """Return the attacked terms and their total."""
        graph, edge_map = attack.inject(self.graph)
        attention = None
        with attack.using_points(), straight_through(model):
            if self.terms.need_attention:
                observation = observe(model, graph, heads="mean", grad=True, ranked=False)
                logits = observation.logits
                attention = self._on_clean_edges(clean.layers, observation.attention, graph, edge_map)
            else:
                logits = call_model(model, graph)
        logits = logits[: len(self.targets.logits)]
        context = replace(clean, attacked_logits=logits, attacked_attention=attention, reach=attack.reach)
        return self.terms.loss(self.terms.select("attacked"), context)

    def _on_clean_edges(
        self, before: Sequence[LayerAttention], after: AttentionMap, attacked: Graph, edge_map: EdgeMap
    ) -> list[Tensor]:
        """Head-averaged attention under attack on the clean edges with targets, per layer."""
        values = []
        for one, two, target in zip(before, after, self.targets.attention, strict=True):
            same = one.adjacency is self.graph.adjacency and two.adjacency is attacked.adjacency
            index = edge_map.after if same else torch.searchsorted(two.keys, one.keys)
            # `index_select` rather than brackets: its backward pass does not sort.
            values.append(first_rows(two.heads().index_select(0, index), target))
        return values
