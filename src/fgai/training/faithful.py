"""The recipe of faithful training: predictions and attention of the vanilla model that stay put."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fgai.attacks import Budget
from fgai.attention import (
    AttentionMap,
    LayerAttention,
    Observation,
    entry_limits,
    evaluating,
    observe,
    straight_through,
)
from fgai.bounds.leads import check_followed, worst_leads
from fgai.graph import Graph
from fgai.sparse import EdgeMap
from fgai.tasks import task_of
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import Drawn, replayable
from fgai.training.loop import PROBE, epoch_seed
from fgai.training.ranges import range_pass, set_ranges
from fgai.training.settings import FaithfulConfig
from fgai.training.targets import Injection, Targets
from fgai.training.terms import (
    attention_distance,
    flattening,
    margin_loss,
    prediction_distance,
    sharp,
    shortfall,
    weighted_sum,
)
from fgai.typed import typed


@typed
@replayable
class Faithful:
    """The recipe: closeness, similarity and stability against frozen vanilla targets.

    Terms mean the same on every graph: predictions are compared in units of the vanilla logits' spread,
    attentions by total variation, and both stabilities are averages over the nodes the adversary can reach.

    Args:
        vanilla: trained; only read.
        graph: prepared for it.
        config: see `FaithfulConfig`.
    """

    name = "fgai"

    def __init__(self, vanilla: nn.Module, graph: Graph, config: FaithfulConfig) -> None:
        self.vanilla, self.graph, self.config = vanilla, graph, config
        if config.weights.certified:
            check_followed(vanilla)
        self.injects = config.adversary != "attention"
        budget = Budget(
            nodes=config.nodes, edges=config.edges, box=config.box, step_size=config.step_size, targets="fit"
        )
        self.adversary = InjectionAdversary(graph, budget, config.lean)
        self.seed = 0

    def start(self, model: nn.Module, seed: int) -> None:
        """Freeze the vanilla targets, and let the adversary climb a little before the first epoch."""
        self.seed = seed
        with evaluating(self.vanilla, freeze=True):
            self.targets = Targets.of(self.vanilla, self.graph, self.config)
        if self.injects:
            with evaluating(model, freeze=True):
                self._start_adversary(model, self._generator(-1))

    def _start_adversary(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the first features, set up the probe, and climb against the model, which is still vanilla."""
        targets, graph, config = self.targets, self.graph, self.config
        if config.limits:
            set_ranges(model, graph, config.tightness)
        self.adversary.start(generator, entry_limits(model), config.space)
        self.shares = shares = targets.shares(graph, self.adversary.attacked(generator)[0])
        adversary, endpoints = self.adversary.probe(self._generator(-2))
        if graph.batch is not None:  # the probe joins the validation graphs alone, a few of all
            shares = targets.shares(graph, adversary.joined(endpoints)[0])
        self.probe = Injection(adversary, endpoints, shares)
        for _ in range(PROBE):
            endpoints = self.adversary.draw(generator).to(graph.device)
            terms = self._stability(model, targets.logits, targets.layers, self._attack(endpoints))
            self._total(terms).backward()  # type: ignore[no-untyped-call]

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield what `replayed` does, from the epoch's own draws."""
        return self.replayed(model, self._drawn(epoch).to(self.graph.device))

    def draw(self, epoch: int) -> Drawn | None:
        """Return which terms are due, the endpoints of every step and how far stability has risen."""
        return self._drawn(epoch) if task_of(self.graph).steady else None

    def _drawn(self, epoch: int) -> Drawn:
        config = self.config
        alone = config.turns and self.injects and epoch > 0
        rising = config.ramp * config.train.epochs
        rise = torch.tensor(min(1.0, (epoch + 1) / max(1.0, rising)), dtype=self.targets.logits.dtype)
        if not self.injects or (alone and epoch % 2 == 0):
            return Drawn("clean", {"rise": rise})
        generator = self._generator(epoch)
        endpoints = torch.stack([self.adversary.draw(generator) for _ in range(config.steps)])
        return Drawn("attacked" if alone else "both", {"endpoints": endpoints, "rise": rise})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then the stability terms, whose clean side is held fixed.

        Closeness and similarity already tie the clean side to the vanilla model, so stability only has to
        pull the perturbed side to it; with one graph's activations alive at a time memory stays vanilla's.
        """
        config = self.config
        _set_mode(model, config.dropout)
        logits, layers = self.targets.logits, self.targets.layers
        if drawn.kind != "attacked":
            seen = self._seen(model, sampled=True)
            logits, layers = seen.logits, seen.attention.select(config.layers).layers
            yield self._with_total(self._clean(logits, layers))
            if config.weights.certified:
                yield self._with_total({"certified": self._certified(model, drawn.tensors["rise"])})
            logits, layers = logits.detach(), tuple(layer.detach() for layer in layers)
            del seen
        if drawn.kind == "clean":
            return
        *earlier, last = drawn.tensors["endpoints"].unbind()
        for endpoints in earlier:
            with evaluating(model, freeze=True):
                terms = self._stability(model, logits, layers, self._attack(endpoints))
                self._total(terms).backward()  # type: ignore[no-untyped-call]
        terms = self._stability(model, logits, layers, self._attack(last))
        total = self._total(terms)
        yield {**terms, "total": total * drawn.tensors["rise"]}

    def score(self, model: nn.Module) -> float:
        """Return minus the same total under a fresh attack on validation nodes; needs no labels."""
        return float(self.measure(model))

    def measure(self, model: nn.Module) -> Tensor:
        """See `score`; nothing waits for the device."""
        with evaluating(model, freeze=True):
            with torch.no_grad():
                seen = self._seen(model)
            logits, layers = seen.logits, seen.attention.select(self.config.layers).layers
            total = self._total(self._clean(logits, layers))
            if self.config.weights.certified:
                with torch.no_grad():
                    total = total + self._total({"certified": self._certified(model)})
            if not self.injects:
                return -total.detach()
            self.probe.adversary.restart()
            for step in range(PROBE + 1):
                terms = self._stability(model, logits, layers, self.probe)
                if step < PROBE:
                    self._total(terms).backward()  # type: ignore[no-untyped-call]
            return -(total + self._total(terms)).detach()

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state() if self.injects else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the adversary's features back."""
        if state:
            self.adversary.load_state(state)

    def _generator(self, epoch: int) -> torch.Generator:
        # A stream of its own: no draw here moves dropout or the evaluation's endpoints.
        return torch.Generator().manual_seed(epoch_seed(self.seed, epoch) ^ 0x5DEECE66D)

    def _attack(self, endpoints: Tensor) -> Injection:
        """Return the training's own adversary at the given endpoints."""
        return Injection(self.adversary, endpoints, self.shares)

    def _seen(self, model: nn.Module, *, sampled: bool = False) -> Observation:
        """Run the model on the clean graph; limits take their ranges from the same pass."""
        with range_pass(model, self.config.tightness, sampled=sampled), straight_through(model):
            return observe(model, self.graph, heads="mean", grad=True, ranked=False)

    def _clean(self, logits: Tensor, layers: Sequence[LayerAttention]) -> dict[str, Tensor]:
        """Return closeness, similarity and margin on the clean graph."""
        config, targets = self.config, self.targets
        values = [layer.heads() for layer in layers]
        terms = {
            "closeness": prediction_distance(targets.logits, logits, config.closeness_by, targets.scale),
            "similarity": attention_distance(
                targets.attention, values, targets.rowptrs, config.k1, config.scope, targets.contrasts
            ),
        }
        if config.adversary != "injection" and config.weights.margin > 0:
            terms["margin"] = margin_loss(values, targets.rowptrs, config.k2 or 5, config.radius)
        if config.weights.sharpness > 0:
            now = [sharp(w, one.rowptr, one.destination) for w, one in zip(values, layers, strict=True)]
            terms["sharpness"] = flattening(now, targets.sharpness)
        return terms

    def _certified(self, model: nn.Module, heard: Tensor | float = 1.0) -> Tensor:
        """How far the vanilla model's classes are from a certificate on the clean graph.

        The mass of new neighbours rises to its full size: at once it would leave no class anywhere ahead, and
        no slope that leads back.
        """
        config, targets = self.config, self.targets
        leads = worst_leads(
            model,
            self.graph,
            targets.logits.argmax(1),
            neighbours=config.neighbours,
            cut=config.cut,
            soften=config.soften,
            heard=heard,
        )
        return shortfall(leads, targets.scale)

    def _stability(
        self,
        model: nn.Module,
        logits: Tensor,
        layers: Sequence[LayerAttention],
        attack: Injection,
    ) -> dict[str, Tensor]:
        """Return both stability terms under an injection, averaged over the nodes in reach."""
        config, targets, shares = self.config, self.targets, attack.shares
        attacked, edge_map = attack.adversary.joined(attack.endpoints)
        with attack.adversary.speaking(), straight_through(model):
            seen = observe(model, attacked, heads="mean", grad=True, ranked=False)
        now, moved = seen.logits, seen.attention.select(config.layers)
        before, after, grown = _paired(layers, moved, self.graph, attacked, edge_map)
        known = targets.leaders if layers is targets.layers else None
        return {
            "prediction_stability": prediction_distance(
                logits, now[: logits.shape[0]], config.divergence, targets.scale, shares.predictions
            ),
            "explanation_stability": attention_distance(
                before, after, targets.rowptrs, config.k2, config.scope, shares.layers, known, grown
            ),
        }

    def _with_total(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms and their weighted total."""
        return {**terms, "total": self._total(terms)}

    def _total(self, terms: dict[str, Tensor]) -> Tensor:
        weights = [getattr(self.config.weights, name) for name in terms]
        return weighted_sum(list(terms.values()), weights)


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
