"""`make_faithful`: from a trained attention model to one whose attention stays put."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fgai.attacks import Budget
from fgai.attention import AttentionMap, LayerAttention, evaluating, observe, prepared
from fgai.checks import at_least
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.sparse import EdgeMap
from fgai.tasks import task_of
from fgai.topk import frozen_topk
from fgai.training.adversary import InjectionAdversary, reach_shares
from fgai.training.assurance import TRIAL, helped, moved, warn_unless_helped
from fgai.training.capture import Drawn, replayable
from fgai.training.loop import PROBE, epoch_seed, fit
from fgai.training.presets import preset
from fgai.training.resume import run_label
from fgai.training.settings import FaithfulConfig
from fgai.training.terms import (
    attention_distance,
    contrast,
    margin_loss,
    prediction_distance,
    spread,
    weighted_sum,
)
from fgai.training.train import copied, history_of, set_history

M = TypeVar("M", bound=nn.Module)
RETRY = 7_001
"""Between the seeds of two tries."""
FLATTEST = 0.01
"""Layers with less contrast, relative to the sharpest, are uniform up to rounding and get no more weight."""


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
        self.injects = config.adversary != "attention"
        budget = Budget(
            nodes=config.nodes, edges=config.edges, box=config.box, step_size=config.step_size, targets="fit"
        )
        self.adversary = InjectionAdversary(graph, budget)
        self.seed = 0

    def start(self, model: nn.Module, seed: int) -> None:
        """Freeze the vanilla targets and measure the size of every term."""
        self.seed = seed
        config = self.config
        with evaluating(self.vanilla, freeze=True):
            seen = observe(self.vanilla, self.graph, heads="mean")
            logits, attention, chosen = seen.logits, seen.attention, seen.attention.select(config.layers)
            self.target_logits, self.target_layers = logits, chosen.layers
            self.target = [layer.heads() for layer in chosen]
            self.rowptrs = [layer.rowptr for layer in chosen]
            self.leaders = [
                frozen_topk(w, ptr, config.k2, config.scope)
                for w, ptr in zip(self.target, self.rowptrs, strict=True)
            ]
            contrasts = [contrast(w, ptr) for w, ptr in zip(self.target, self.rowptrs, strict=True)]
            self.contrasts = [max(value / max(contrasts), FLATTEST) ** config.contrast for value in contrasts]
            self.scale = float(spread(self.target_logits))
            self.shares, self.share = [1.0] * len(self.target), 1.0
            if self.injects:
                generator = self._generator(-1)
                self.adversary.start(generator)
                self.shares, self.share = self._reach(self.adversary.attacked(generator)[0], len(attention))
                self.probe = self.adversary.restarted()
                targets = task_of(self.graph).nodes(self.graph, "val")
                self.probe_endpoints = self.probe.draw(self._generator(-2), targets).to(self.graph.device)
                self.probe_shares, self.probe_share = self.shares, self.share
                if self.graph.batch is not None:  # the probe joins the validation graphs alone, a few of all
                    self.probe_shares, self.probe_share = self._reach(
                        self.probe.joined(self.probe_endpoints)[0], len(attention)
                    )
                for _ in range(PROBE):
                    endpoints = self.adversary.draw(generator).to(self.graph.device)
                    terms = self._stability(self.vanilla, logits, chosen.layers, endpoints)
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
        if not self.injects or (alone and epoch % 2 == 0):
            return Drawn("clean")
        generator, rising = self._generator(epoch), config.ramp * config.train.epochs
        endpoints = torch.stack([self.adversary.draw(generator) for _ in range(config.steps)])
        rise = torch.tensor(min(1.0, (epoch + 1) / max(1.0, rising)), dtype=self.target_logits.dtype)
        return Drawn("attacked" if alone else "both", {"endpoints": endpoints, "rise": rise})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then the stability terms, whose clean side is held fixed.

        Closeness and similarity already tie the clean side to the vanilla model, so stability only has to
        pull the perturbed side to it; with one graph's activations alive at a time memory stays vanilla's.
        """
        config = self.config
        _set_mode(model, config.dropout)
        logits, layers = self.target_logits, self.target_layers
        if drawn.kind != "attacked":
            seen = observe(model, self.graph, heads="mean", grad=True)
            logits, layers = seen.logits, seen.attention.select(config.layers).layers
            yield self._with_total(self._clean(logits, layers))
            logits, layers = logits.detach(), tuple(layer.detach() for layer in layers)
            del seen
        if drawn.kind == "clean":
            return
        *earlier, last = drawn.tensors["endpoints"].unbind()
        for endpoints in earlier:
            with evaluating(model, freeze=True):
                self._total(self._stability(model, logits, layers, endpoints)).backward()  # type: ignore[no-untyped-call]
        terms = self._stability(model, logits, layers, last)
        total = self._total(terms)
        yield {**terms, "total": total * drawn.tensors["rise"]}

    def score(self, model: nn.Module) -> float:
        """Return minus the same total under a fresh attack on validation nodes; needs no labels."""
        return float(self.measure(model))

    def measure(self, model: nn.Module) -> Tensor:
        """See `score`; nothing waits for the device."""
        with evaluating(model, freeze=True):
            seen = observe(model, self.graph, heads="mean")
            logits, layers = seen.logits, seen.attention.select(self.config.layers).layers
            total = self._total(self._clean(logits, layers))
            if not self.injects:
                return -total.detach()
            self.probe.restart()
            for step in range(PROBE + 1):
                terms = self._stability(model, logits, layers, self.probe_endpoints, self.probe)
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

    def _reach(self, attacked: Graph, layers: int) -> tuple[list[float], float]:
        """Return the shares of nodes in reach at the layers that count, and that of predictions."""
        shares, share = reach_shares(self.graph, attacked, layers)
        return shares[-len(self.target) :], share

    def _clean(self, logits: Tensor, layers: Sequence[LayerAttention]) -> dict[str, Tensor]:
        """Return closeness, similarity and margin on the clean graph."""
        config = self.config
        values = [layer.heads() for layer in layers]
        terms = {
            "closeness": prediction_distance(logits, self.target_logits, "relative", self.scale),
            "similarity": attention_distance(
                self.target, values, self.rowptrs, config.k1, config.scope, self.contrasts
            ),
        }
        if config.adversary != "injection" and config.weights.margin > 0:
            terms["margin"] = margin_loss(values, self.rowptrs, config.k2 or 5, config.radius)
        return terms

    def _stability(
        self,
        model: nn.Module,
        logits: Tensor,
        layers: Sequence[LayerAttention],
        endpoints: Tensor,
        adversary: InjectionAdversary | None = None,
    ) -> dict[str, Tensor]:
        """Return both stability terms under the injection adversary, averaged over the nodes in reach."""
        config, shares, share = self.config, self.shares, self.share
        if adversary is not None:
            shares, share = self.probe_shares, self.probe_share
        attacked, edge_map = (adversary or self.adversary).joined(endpoints)
        seen = observe(model, attacked, heads="mean", grad=True)
        now, moved = seen.logits, seen.attention.select(config.layers)
        before, after, grown = _paired(layers, moved, self.graph, attacked, edge_map)
        known = self.leaders if layers is self.target_layers else None
        return {
            "prediction_stability": prediction_distance(
                logits, now[: logits.shape[0]], config.divergence, self.scale, share
            ),
            "explanation_stability": attention_distance(
                before, after, self.rowptrs, config.k2, config.scope, shares, known, grown
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


def make_faithful(
    model: M,
    data: Any,
    config: FaithfulConfig | None = None,
    *,
    seed: int = 0,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 25,
    tries: int = 2,
    **changes: Any,
) -> M:
    """Return a faithful twin of a trained attention model; the given one is untouched.

    After training both are attacked on the validation nodes. Where the twin's predictions still move by more
    than half of what its parent's do, it is trained once more with a distance that cannot saturate (see
    `FaithfulConfig.again`), and the steadier twin is returned; if that did not help either, a
    `ReliabilityWarning` says so. Trainings of less than 100 epochs, and other tasks than node classification,
    are not judged.

    Args:
        model: trained; fgai's GAT, GATv2, GT or any PyG model the recorder supports.
        data: what it was trained on, a `Graph` or PyG `Data`. Labels are not used.
        config: see `FaithfulConfig`; None takes the preset of this model and dataset, or the defaults.
        seed: of the adversary's draws.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        checkpoint_every: epochs between saves.
        tries: trainings at most; 1 trains once, whatever comes out.
        **changes: single settings by name, e.g. `epochs=50`, `similarity=4.0`.

    Returns:
        A model of the same class, in eval mode, with its `history` (`history.tries`: trainings it took).
    """
    given = as_graph(data)
    task = task_of(given)
    graph = prepared(model, task.view(given, "fit"))
    graph = task.epoch(graph, torch.Generator().manual_seed(epoch_seed(seed, -3)))
    if config is None:
        config = FaithfulConfig().replace(**preset("fgai", type(model).__name__, graph.name, task.name))
    config = config.replace(**changes)
    at_least(tries, "tries", 1)

    def trained(config: FaithfulConfig, folder: Path | str | None, seed: int) -> M:
        twin, recipe = copied(model), Faithful(model, graph, config)
        label = run_label(model, graph, recipe.name, config, seed, weights=True) if folder else ""
        history = fit(
            twin,
            recipe,
            config.train,
            seed=seed,
            progress=progress,
            checkpoint=folder,
            checkpoint_every=checkpoint_every,
            fingerprint=label,
        )
        set_history(twin, history)
        return twin

    twin = trained(config, checkpoint, seed)
    steady = config.adversary != "attention" and config.weights.prediction_stability > 0
    if not steady or config.train.epochs < TRIAL:
        return twin
    parent, best = moved(model, graph, seed), moved(twin, graph, seed)
    for count in range(2, tries + 1):
        if helped(best, parent):
            break
        config, folder = config.again(), None if checkpoint is None else Path(checkpoint) / f"try-{count}"
        other = trained(config, folder, seed + RETRY * (count - 1))
        found = moved(other, graph, seed)
        history_of(other).tries = history_of(twin).tries = count
        if found is not None and best is not None and found < best:
            twin, best = other, found
    warn_unless_helped(best, parent)
    return twin
