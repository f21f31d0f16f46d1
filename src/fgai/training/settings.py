"""Settings of faithful training, their presets by method, model and dataset, and the ranges of limits."""

from __future__ import annotations

import dataclasses
import tomllib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from torch import nn

from fgai.attacks.budget import LARGEST
from fgai.attention import call_model, evaluating, limits_of, measuring
from fgai.checks import above, at_least, one_of, whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.tasks import get_task
from fgai.topk import FORMS, check_k
from fgai.training.loop import TRAIN_FIELDS, TrainConfig
from fgai.training.retry import StabilityReport
from fgai.training.terms import DIVERGENCES, TERMS, Weights
from fgai.typed import typed


@dataclass(frozen=True)
class Tightness:
    """How many honest nodes limits leave out.

    Attributes:
        cut: share of the nodes at either end of each channel, which are clipped.
        soften: share of the nodes, the loudest as a whole, which are drawn to the loudness of the rest.
    """

    cut: float = 0.0
    soften: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.cut < 0.5:
            raise InputError(f"`cut` must be at least 0 and below 0.5, got {self.cut}")
        if not 0.0 <= self.soften < 1.0:
            raise InputError(f"`soften` must be at least 0 and below 1, got {self.soften}")


def _range_pass(
    model: nn.Module, tightness: Tightness, *, sampled: bool = False
) -> AbstractContextManager[Any]:
    """A block in which limits take their ranges from the forward pass; of a model without any, nothing.

    Args:
        model: with limits or without.
        tightness: what is left out.
        sampled: estimate order statistics from some of the nodes, for steps that come often.
    """
    if not limits_of(model):
        return nullcontext()
    return measuring(model, tightness.cut, soften=tightness.soften, sampled=sampled)


def set_ranges(model: nn.Module, graph: Graph, tightness: Tightness) -> None:
    """Take the ranges of a model's limits from a graph.

    Args:
        model: with limits.
        graph: prepared for it.
        tightness: what is left out.
    """
    with evaluating(model, freeze=True), _range_pass(model, tightness):
        call_model(model, graph)


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

    def slower(self) -> FaithfulConfig:
        """Return the settings with half the learning rate."""
        return self.replace(lr=self.train.lr / 2)

    def tightened(self, report: StabilityReport) -> FaithfulConfig:
        """Return the settings of a second attempt: the same budget, more weight on the failed requirements.

        Lost predictions: more closeness, smaller steps. Unstable predictions: more prediction stability,
        tighter limits and another distance. Lost explanations, if predictions are stable: more similarity
        behind limits that clip half as much, because clipped scores lose their rank.
        """
        changes: dict[str, Any] = {}
        if not report.is_close:
            changes |= {"closeness": 5 * self.weights.closeness, "lr": self.train.lr / 2}
        if not report.is_stable:
            changes |= {
                "divergence": "kl" if self.divergence == "log" else "log",
                "prediction_stability": 2 * self.weights.prediction_stability,
                "soften": max(self.soften, FIRMER) if self.limits else self.soften,
            }
        elif not report.is_similar:
            changes |= {
                "similarity": 2 * self.weights.similarity,
                "cut": self.cut / 2,
                "soften": self.soften / 2,
            }
        return self.replace(**changes)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8"))


@typed
def preset(method: str, model: str, dataset: str, task: str = "node") -> dict[str, Any]:
    """Return the settings of a method, the special ones laid over the general ones.

    Looks up `[method]`, `[method.MODEL]` and `[method.MODEL.dataset]`, later ones winning; for link and graph
    tasks the same tables under `[link]` and `[graph]` instead. An unknown method, model or dataset simply has
    no special settings.

    Args:
        method: `vanilla`, `ln`, `at`, `fgai`, `fgai-features` for `fgai` without limits, or `fgai-certified`
            for a training towards certificates against injection.
        model: class name, e.g. `GAT`.
        dataset: e.g. `amazon-photo`.
        task: its name, e.g. `node`, `link` or `graph`.

    Example:
        >>> preset("vanilla", "GAT", "a graph nobody tuned")["epochs"]
        200
    """
    found: dict[str, Any] = {}
    for level in _levels(method, model, dataset, task):
        found |= {key: value for key, value in level.items() if not isinstance(value, dict)}
    return found


def _preset_named(name: str | None, method: str, model: str, dataset: str, task: str) -> dict[str, Any]:
    """Return the settings that a `preset` argument stands for.

    Args:
        name: `auto` for the data's own, the general ones where it has none; the name of a dataset for those
            chosen there; None for none.
        method: see `preset`.
        model: class name.
        dataset: of the data.
        task: of the data.

    Raises:
        InputError: nothing was chosen for this method and model on the dataset of that name.
    """
    if name is None:
        return {}
    if name != "auto":
        *_, last = levels = [{}, *_levels(method, model, "", task)]
        tuned = [key for key, value in last.items() if isinstance(value, dict)] if len(levels) == 3 else []
        dataset = one_of(name, "preset", ("auto", *tuned))
    return preset(method, model, dataset, task)


def _levels(*names: str) -> list[dict[str, Any]]:
    """Return the tables of a method, of its model and of the dataset, as far as there are any."""
    *path, task = names
    found: list[dict[str, Any]] = []
    own = get_task(task).presets
    level: Any = _table().get(own, {}) if own else _table()
    for name in path:
        level = level.get(name)
        if not isinstance(level, dict):
            break
        found.append(level)
    return found
