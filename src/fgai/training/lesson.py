"""`Lesson`: a graph, the vanilla model's answers on it, and the terms of faithful training there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import (
    AttentionMap,
    LayerAttention,
    Observation,
    evaluating,
    observe,
    straight_through,
)
from fgai.bounds.scores import worst_leads
from fgai.graph import Graph
from fgai.sparse import EdgeMap
from fgai.topk import Cut, frozen_topk
from fgai.training.adversary import InjectionAdversary, _reach_shares
from fgai.training.loop import PROBE
from fgai.training.settings import FaithfulConfig, _range_pass
from fgai.training.terms import (
    _attention_distance,
    _flattening,
    _margin_loss,
    _shortfall,
    _weighted_sum,
    contrast,
    prediction_distance,
    sharp,
    spread,
)

FLATTEST = 0.01
"""Layers with less contrast, relative to the sharpest, are uniform up to rounding and get no more weight."""


class Shares(NamedTuple):
    """Which part of the graph an adversary reaches.

    Attributes:
        layers: of the nodes, at each layer that counts.
        predictions: of the nodes, links or small graphs.
    """

    layers: list[float]
    predictions: float


@dataclass(frozen=True, eq=False)
class Targets:
    """The vanilla model's answers on the clean graph, frozen; per layer means per layer that counts.

    Of a mini-batch, N are the seeds and E the edges into them; classes and layers are of all its nodes.

    Attributes:
        logits: [N, C].
        classes: that it predicts, of all nodes of the graph.
        layers: the attention, per layer.
        attention: per layer [E], heads averaged.
        rowptrs: per layer [N + 1].
        leaders: per layer, the top-k kept under perturbation.
        contrasts: per layer, what similarity is divided by.
        sharpness: per layer.
        scale: spread of the logits.
        depths: of every layer, counting or not, see `AttentionMap.depths`.
    """

    logits: Tensor
    classes: Tensor
    layers: tuple[LayerAttention, ...]
    attention: list[Tensor]
    rowptrs: list[Tensor]
    leaders: list[Tensor | Cut]
    contrasts: list[float]
    sharpness: list[float]
    scale: float
    depths: list[int]

    @classmethod
    def of(cls, vanilla: nn.Module, graph: Graph, config: FaithfulConfig) -> Targets:
        """Read them off a model in eval mode.

        Args:
            vanilla: trained.
            graph: prepared for it.
            config: which layers count, and what of them.
        """
        seen = observe(vanilla, graph, heads="mean", ranked=False)
        logits, chosen = seen.logits, seen.attention.select(config.layers)
        values, rowptrs = [layer.heads() for layer in chosen], [layer.rowptr for layer in chosen]
        pairs = list(zip(values, rowptrs, strict=True))
        contrasts = [contrast(w, ptr) for w, ptr in pairs]
        return cls(
            logits=logits,
            classes=logits.argmax(1),
            layers=chosen.layers,
            attention=values,
            rowptrs=rowptrs,
            leaders=[frozen_topk(w, ptr, config.k2, config.scope) for w, ptr in pairs],
            contrasts=relative(contrasts, config.contrast),
            sharpness=[
                float(sharp(w, one.rowptr, one.destination)) for w, one in zip(values, chosen, strict=True)
            ],
            scale=float(spread(logits)),
            depths=seen.attention.depths,
        )

    def shares(self, graph: Graph, attacked: Graph) -> Shares:
        """Return the shares of nodes in reach at the layers that count, and that of predictions."""
        count = self.rowptrs[0].numel() - 1
        some = count if count < graph.num_nodes else None
        layers, predictions = _reach_shares(graph, attacked, self.depths, some)
        return Shares(layers[-len(self.attention) :], predictions)


def relative(contrasts: list[float], power: float) -> list[float]:
    """What similarity is divided by, per layer; see `FaithfulConfig.contrast`."""
    return [max(value / max(contrasts), FLATTEST) ** power for value in contrasts]


@dataclass(frozen=True, eq=False)
class Injection:
    """An adversary's new nodes at their endpoints.

    Attributes:
        adversary: holds the features.
        endpoints: [M, e], on the graph's device.
        shares: what they reach.
        some: [M] which of the adversary's nodes join a mini-batch; None for all, and the adversary's graph.
    """

    adversary: InjectionAdversary
    endpoints: Tensor
    shares: Shares
    some: Tensor | None = None

    def join(self, graph: Graph) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes, which take the step they have pending first."""
        if self.some is None:
            return self.adversary.joined(self.endpoints)
        return self.adversary.joined_to(graph, self.endpoints, self.some)

    def speaking(self) -> AbstractContextManager[None]:
        """A block in which the new nodes of value space speak."""
        return self.adversary.speaking(self.some)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What one step learns from: the whole graph, or a mini-batch.

    Of a mini-batch the seeds count alone. They are its first nodes and edges are sorted by destination, so
    what belongs to them stands first everywhere, and is as much as there are targets for.

    Attributes:
        graph: prepared for the model.
        targets: the vanilla model's answers on it.
        config: see `FaithfulConfig`.
        measures: limits take their ranges from the clean passes; of a mini-batch they stay as they are.
    """

    graph: Graph
    targets: Targets
    config: FaithfulConfig
    measures: bool = True

    def parts(
        self, model: nn.Module, due: str, attacks: Sequence[Injection], rise: Tensor
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then the stability terms, whose clean side is held fixed.

        Closeness and similarity already tie the clean side to the vanilla model, so stability only has to
        pull the perturbed side to it, and the activations of one graph alone are alive at a time.

        Args:
            model: in training.
            due: `clean`, `attacked` or `both`.
            attacks: the adversary at its endpoints, one for each climbing step; the last is trained on.
            rise: how far the weights of the stability terms have risen.
        """
        config = self.config
        _set_mode(model, config.dropout)
        logits, layers = self.targets.logits, self.targets.layers
        if due != "attacked":
            seen = self.seen(model, sampled=True)
            logits, layers = seen.logits, seen.attention.select(config.layers).layers
            yield self._with_total(self.clean(logits, layers))
            if config.weights.certified:
                yield self._with_total({"certified": self._certified(model, rise)})
            logits, layers = logits.detach(), tuple(layer.detach() for layer in layers)
            del seen
        if due == "clean":
            return
        *earlier, last = attacks
        for attack in earlier:
            self.climb(model, attack, logits, layers)
        terms = self._stability(model, logits, layers, last)
        yield {**terms, "total": self.total(terms) * rise}

    def climb(
        self,
        model: nn.Module,
        attack: Injection,
        logits: Tensor | None = None,
        layers: Sequence[LayerAttention] | None = None,
    ) -> None:
        """Let an adversary collect a gradient against the model; the clean side is vanilla's by default."""
        with evaluating(model, freeze=True):
            terms = self._stability(
                model,
                self.targets.logits if logits is None else logits,
                self.targets.layers if layers is None else layers,
                attack,
            )
            self.total(terms).backward()  # type: ignore[no-untyped-call]
        attack.adversary.add_up()

    def score(self, model: nn.Module, probe: Injection | None) -> Tensor:
        """Return minus the total under an attack that begins here; nothing waits for the device."""
        with evaluating(model, freeze=True):
            with torch.no_grad():
                seen = self.seen(model)
            logits, layers = seen.logits, seen.attention.select(self.config.layers).layers
            total = self.total(self.clean(logits, layers))
            if self.config.weights.certified:
                with torch.no_grad():
                    total = total + self.total({"certified": self._certified(model)})
            if probe is None:
                return -total.detach()
            probe.adversary.restart()
            for step in range(PROBE + 1):
                terms = self._stability(model, logits, layers, probe)
                if step < PROBE:
                    self.total(terms).backward()  # type: ignore[no-untyped-call]
            return -(total + self.total(terms)).detach()

    def seen(self, model: nn.Module, *, sampled: bool = False) -> Observation:
        """Run the model on the clean graph; limits take their ranges from the same pass."""
        ranges = (
            _range_pass(model, self.config.tightness, sampled=sampled) if self.measures else nullcontext()
        )
        with ranges, straight_through(model):
            return observe(model, self.graph, heads="mean", grad=True, ranked=self.config.keeps_margin)

    def clean(self, logits: Tensor, layers: Sequence[LayerAttention]) -> dict[str, Tensor]:
        """Return closeness, similarity and margin on the clean graph."""
        config, targets = self.config, self.targets
        logits, values = _first(logits, targets.logits), self._counted(layer.heads() for layer in layers)
        terms = {
            "closeness": prediction_distance(targets.logits, logits, config.closeness_by, targets.scale),
            "similarity": _attention_distance(
                targets.attention, values, targets.rowptrs, config.k1, config.scope, targets.contrasts,
                form=config.form,
            ),
        }  # fmt: skip
        if config.keeps_margin:
            shown = self._counted(layer.heads("log") for layer in layers)
            terms["margin"] = _margin_loss(shown, targets.rowptrs, config.k2 or 5, config.radius)
        if config.weights.sharpness > 0:
            now = [
                sharp(w, rowptr, _first(layer.destination, w))
                for w, rowptr, layer in zip(values, targets.rowptrs, layers, strict=True)
            ]
            terms["sharpness"] = _flattening(now, targets.sharpness)
        return terms

    def _counted(self, values: Iterator[Tensor]) -> list[Tensor]:
        """Cut values on edges, layer by layer, to those there are targets for."""
        return [_first(w, target) for w, target in zip(values, self.targets.attention, strict=True)]

    def _certified(self, model: nn.Module, heard: Tensor | float = 1.0) -> Tensor:
        """How far the vanilla model's classes are from a certificate on the clean graph.

        The mass of new neighbours rises to its full size: at once it would leave no class anywhere ahead, and
        no slope that leads back. Limits are those of the nodes at hand.
        """
        config, targets = self.config, self.targets
        leads = worst_leads(
            model,
            self.graph,
            targets.classes,
            neighbours=config.neighbours,
            cut=config.cut,
            soften=config.soften,
            heard=heard,
        )
        return _shortfall(_first(leads, targets.logits), targets.scale)

    def _stability(
        self, model: nn.Module, logits: Tensor, layers: Sequence[LayerAttention], attack: Injection
    ) -> dict[str, Tensor]:
        """Return both stability terms under an injection, averaged over the nodes in reach."""
        config, targets, shares = self.config, self.targets, attack.shares
        attacked, edge_map = attack.join(self.graph)
        with attack.speaking(), straight_through(model):
            seen = observe(model, attacked, heads="mean", grad=True, ranked=False)
        now, moved = seen.logits, seen.attention.select(config.layers)
        before, after, grown = _paired(layers, moved, self.graph, attacked, edge_map)
        known = targets.leaders if layers is targets.layers else None
        logits = _first(logits, targets.logits)
        return {
            "prediction_stability": prediction_distance(
                logits, now[: logits.shape[0]], config.divergence, targets.scale, shares.predictions
            ),
            "explanation_stability": _attention_distance(
                self._counted(iter(before)), after, targets.rowptrs, config.k2, config.scope, shares.layers,
                known, grown, config.form,
            ),
        }  # fmt: skip

    def _with_total(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms and their weighted total."""
        return {**terms, "total": self.total(terms)}

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        """Return the weighted sum of some terms."""
        weights = [getattr(self.config.weights, name) for name in terms]
        return _weighted_sum(list(terms.values()), weights)


def _first(values: Tensor, like: Tensor) -> Tensor:
    """As many of the first rows as another tensor has; all of them without a copy in the backward pass."""
    return values if len(values) == len(like) else values[: len(like)]


def _set_mode(model: nn.Module, dropout: bool) -> None:
    """Eval mode, or training mode with every batch norm still in eval: its statistics stay vanilla's."""
    model.train(dropout)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def _paired(
    before: Sequence[LayerAttention], after: AttentionMap, graph: Graph, attacked: Graph, edge_map: EdgeMap
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Head-averaged attention on the clean edges, before and after, and where the rows of the latter begin.

    New nodes have the largest numbers, so their edges stand last in every row, and where rows begin is all
    there is to know. Models that keep their edges otherwise are matched edge by edge; their rows are None.
    """
    old, new = [layer.heads() for layer in before], [layer.heads() for layer in after]
    kept = all(layer.adjacency is graph.adjacency for layer in before)
    if kept and all(layer.adjacency is attacked.adjacency for layer in after):
        return old, new, attacked.adjacency.index32.rowptr
    for index, (one, two) in enumerate(zip(before, after, strict=True)):
        same = one.adjacency is graph.adjacency and two.adjacency is attacked.adjacency
        spot = edge_map.after if same else torch.searchsorted(two.keys, one.keys)
        # `index_select` rather than brackets: its backward pass does not sort.
        new[index] = new[index].index_select(0, spot)
    return old, new, None
