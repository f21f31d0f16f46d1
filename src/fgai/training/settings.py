"""Settings of faithful training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fgai.attacks.budget import LARGEST
from fgai.checks import above, at_least, one_of, whole
from fgai.errors import InputError
from fgai.topk import FORMS, check_k
from fgai.training.loop import TRAIN_FIELDS, TrainConfig
from fgai.training.ranges import Tightness
from fgai.training.terms import DIVERGENCES, TERMS, Weights
from fgai.typed import typed

ADVERSARIES = ("hybrid", "injection", "attention")
SPACES = ("mixed", "values", "features")
ADVERSARY_FIELDS = ("nodes", "edges", "box", "step_size")
"""Settings of the injection adversary that adversarial training has, too."""
LIMIT_FIELDS = ("cut", "soften", "space")
"""Those of limits, likewise."""
FIRMER = 0.4
"""Share of the nodes that are softened, at least, in a further attempt at stability."""


@typed
@dataclass(frozen=True, kw_only=True)
class FaithfulConfig:
    """How `make_faithful` trains; the defaults are for a graph without a preset.

    Attributes:
        weights: of the terms, see `fgai.training.terms.Weights`.
        k1: size of the top-k kept from the vanilla attention; None keeps all of it, and so its sharpness.
        k2: size of the top-k kept under perturbation.
        scope: `node` (k per neighbourhood) or `graph` (k over all edges, the paper's experiments).
        layers: `all`, or `last` (the paper's experiments).
        form: of the distance of attentions, `tv` or `paper`, see `fgai.topk.topk_l1`.
        divergence: how perturbed predictions are compared with clean ones, see `prediction_distance`.
        closeness_by: how clean predictions are compared with the vanilla model's. `kl` keeps probabilities
            and lets logits go, which a training towards certificates needs.
        ramp: share of the epochs over which the weights of the stability terms rise to their full size. A
            vanilla model is so unstable that the full terms would throw the copy far from it at once.
        contrast: how much more flat layers count in similarity: a layer's distance is divided by its contrast
            (see `fgai.training.terms.contrast`) relative to the sharpest layer's, to this power. 0 counts all
            layers alike, 1 measures each in units of its own contrast.
        turns: train on the clean and on the attacked graph in turns, one of them an epoch (or a mini-batch),
            instead of on both (the first sees both). The attacked side is then pulled to the vanilla model's
            targets, so an epoch costs little more than a vanilla one.
        limits: give the faithful model limits (see `fgai.limit`) and train through them.
        cut: share of the nodes left out at either end of each range.
        soften: share of the nodes, the loudest, that are drawn to the loudness of the rest.
        space: where injected nodes climb: `features`; `values`, the box of what limits let a node say to the
            first layer; or `mixed`, half of either. Without limits there are features alone.
        adversary: `injection`; `attention`, the margin alone; or `hybrid`, both.
        nodes: injected per epoch.
        edges: of each injected node.
        lean: how much their endpoints lean towards nodes with few neighbours, see `InjectionAdversary`.
        box: interval of their features; None takes one for each feature from the data, see `Budget`.
        steps: climbing steps per epoch; the first of injected nodes costs nothing.
        step_size: of each, for injected nodes, in units of half the box.
        radius: of the ball in attention space, for the margin.
        neighbours: injected ones of every node, for the term `certified`.
        dropout: keep the model's dropout while training.
        train: epochs, learning rate and so on.
    """

    weights: Weights = field(default_factory=Weights)
    k1: int | None = None
    k2: int | None = 5
    scope: str = "node"
    layers: str = "all"
    form: str = "tv"
    divergence: str = "log"
    closeness_by: str = "relative"
    ramp: float = 0.5
    contrast: float = 0.5
    turns: bool = True
    limits: bool = True
    cut: float = 0.0
    soften: float = 0.0
    space: str = "mixed"
    adversary: str = "hybrid"
    nodes: int = 60
    edges: int = 20
    lean: float = 0.0
    box: tuple[float, float] | None = None
    steps: int = 2
    step_size: float = 0.1
    radius: float = 0.01
    neighbours: int = 1
    dropout: bool = False
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            epochs=200, lr=0.005, decay=1.0, weight_decay=0.0, patience=200, validate_every=20
        )
    )

    def __post_init__(self) -> None:
        one_of(self.scope, "scope", ("node", "graph"))
        one_of(self.layers, "layers", ("all", "last"))
        one_of(self.form, "form", FORMS)
        one_of(self.divergence, "divergence", DIVERGENCES)
        one_of(self.closeness_by, "closeness_by", DIVERGENCES)
        one_of(self.adversary, "adversary", ADVERSARIES)
        one_of(self.space, "space", SPACES)
        _ = self.tightness
        for name in ("k1", "k2"):
            if getattr(self, name) is not None:
                check_k(getattr(self, name), name)
            elif self.form == "paper":
                raise InputError(f'`{name}` must be given for form "paper", which divides by it, got None')
        if not 0.0 <= self.ramp <= 1.0:
            raise InputError(f"`ramp` must be between 0 and 1, got {self.ramp}")
        at_least(self.contrast, "contrast", 0.0)
        whole(self.nodes, "nodes", 1, LARGEST)
        whole(self.edges, "edges", 1, LARGEST)
        at_least(self.lean, "lean", 0.0)
        whole(self.steps, "steps", 1, LARGEST)
        above(self.step_size, "step_size", 0.0)
        above(self.radius, "radius", 0.0)
        whole(self.neighbours, "neighbours", 1, LARGEST)
        if self.weights.certified and not self.limits:
            raise InputError("`certified` needs limits: without them a new neighbour may say anything")

    @property
    def injects(self) -> bool:
        """Whether the adversary injects nodes."""
        return self.adversary in ("hybrid", "injection")

    @property
    def keeps_margin(self) -> bool:
        """Whether the margin between the top-k and the rest is trained."""
        return self.adversary in ("hybrid", "attention") and self.weights.margin > 0

    @property
    def tightness(self) -> Tightness:
        """Of the limits."""
        return Tightness(self.cut, self.soften)

    def replace(self, **changes: Any) -> FaithfulConfig:
        """Return a copy with some settings changed; those of `Weights` and `TrainConfig` by name, too.

        Raises:
            InputError: there is no such setting.
        """
        own = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            one_of(name, "settings", (*own, *TERMS, *TRAIN_FIELDS))
        weights = {k: changes.pop(k) for k in list(changes) if k in TERMS}
        train = {k: changes.pop(k) for k in list(changes) if k in TRAIN_FIELDS}
        return dataclasses.replace(
            self,
            weights=dataclasses.replace(changes.pop("weights", self.weights), **weights),
            train=changes.pop("train", self.train).replace(**train),
            **changes,
        )

    def fallback(self, *, stable: bool, close: bool, alike: bool = True) -> FaithfulConfig:
        """Return the settings of the next attempt: the same budget, and more weight on what failed.

        Predictions that were lost are held by closeness and smaller steps. Predictions that moved are held
        harder, behind tighter limits, and by another distance: probabilities of an attack that flips every
        prediction cannot get worse, so `probabilities` has no slope there, and `kl` may explode; the
        logarithmic distance of the logits pulls from everywhere. Explanations that were lost, where nothing
        else was, are held harder, behind limits that clip half as much: a clipped score has lost its rank.

        Args:
            stable: predictions stayed under attack.
            close: predictions stayed the vanilla model's.
            alike: explanations stayed the vanilla model's.
        """
        changes: dict[str, Any] = {}
        if not close:
            changes |= {"closeness": 5 * self.weights.closeness, "lr": self.train.lr / 2}
        if not stable:
            changes |= {
                "divergence": "kl" if self.divergence == "log" else "log",
                "prediction_stability": 2 * self.weights.prediction_stability,
                "soften": max(self.soften, FIRMER) if self.limits else self.soften,
            }
        elif not alike:
            changes |= {
                "similarity": 2 * self.weights.similarity,
                "cut": self.cut / 2,
                "soften": self.soften / 2,
            }
        return self.replace(**changes)
