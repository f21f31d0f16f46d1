"""The check after a training: a short attack on validation nodes, and a comparison with vanilla."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fgai.attacks import EnsembleInjection, make_attack
from fgai.attacks.search.members import Member
from fgai.attention import call_model, evaluating, observe
from fgai.divergence import tvd
from fgai.errors import BudgetError, ReliabilityWarning, collect_warnings, warn
from fgai.graph import Graph
from fgai.metrics import UNIFORM_SHARPNESS, overlap, sharpness
from fgai.progress import stage
from fgai.tasks import task_of

MAX_RATIO = 0.5  # largest shift of the predictions, divided by the shift of the vanilla model's
MIN_SHIFT = 0.02  # a vanilla model whose predictions shift less than this counts as stable
MIN_AGREEMENT = 0.9  # least share of the validation rows that keep the vanilla class
MIN_OVERLAP = 0.85  # least share of the vanilla top neighbours that are kept in the sharpest layer
TOP_K = 5  # number of top neighbours compared
MIN_EPOCHS = 60  # trainings of fewer epochs are not checked
ATTACK_STEPS = 20  # of each member of the attack
CHECK_MEMBERS = (
    Member(name="sign", start="middle", space="box", optimiser="sign", rate=0.1),
    Member(name="adam", start="small", rate=0.1),
)


@dataclass(frozen=True)
class StabilityReport:
    """Result of a short attack on the validation nodes; None where something cannot be measured."""

    shift: float | None = None  # mean total variation of the model's predictions under the attack
    vanilla_shift: float | None = None  # of the vanilla model, under its own attack
    agreement: float | None = None  # share of the validation rows in the vanilla class, without an attack
    overlap: float | None = None  # share of the vanilla top neighbours kept, see `_explanation_overlap`
    must_match_vanilla: bool = True  # whether to keep its predictions and explanations, too

    @property
    def is_stable(self) -> bool:
        """Whether predictions shift at most half as much as the vanilla model's, or this is unknown."""
        if self.shift is None or self.vanilla_shift is None:
            return True
        return self.vanilla_shift < MIN_SHIFT or self.shift <= MAX_RATIO * self.vanilla_shift

    @property
    def is_close(self) -> bool:
        """Whether `MIN_AGREEMENT` of the rows keep the vanilla model's class, or this is unknown."""
        return self.agreement is None or self.agreement >= MIN_AGREEMENT

    @property
    def is_similar(self) -> bool:
        """Whether the model keeps `MIN_OVERLAP` of the vanilla top neighbours, or this is unknown."""
        return self.overlap is None or self.overlap >= MIN_OVERLAP

    @property
    def passed(self) -> bool:
        """Whether no further training is needed."""
        return self.is_stable and (not self.must_match_vanilla or (self.is_close and self.is_similar))

    def is_better_than(self, other: StabilityReport) -> bool:
        """Whether this model is the better one, by predictions kept, then explanations kept, then shift."""
        if self.is_close != other.is_close:
            return self.is_close
        if self.is_stable and other.is_stable and self.is_similar != other.is_similar:
            return self.is_similar
        return self.shift is not None and other.shift is not None and self.shift < other.shift

    def warn(self) -> None:
        """Warn of every requirement that is not met."""
        faithful, texts = self.must_match_vanilla, {}
        kind, setting = ("faithful", "prediction_stability") if faithful else ("hardened", "attack_weight")
        if not self.is_stable:
            texts["not-steadier"] = (
                f"under attack on validation nodes the {kind} model's predictions shift by {self.shift:.3f}"
                f" (total variation), the vanilla model's by {self.vanilla_shift:.3f}, so it is hardly"
                f" more stable; raise `{setting}`, `shrink` or `epochs`"
            )
        if faithful and not self.is_close:
            texts["not-close"] = (
                f"the faithful model agrees with the vanilla one on {self.agreement:.0%} of the validation"
                " nodes only; raise `closeness`, or lower `lr`, `clip_share` or `shrink`"
            )
        if faithful and not self.is_similar:
            texts["not-alike"] = (
                f"the faithful model keeps {self.overlap:.0%} of the vanilla one's top {TOP_K} neighbours in"
                " the sharpest layer; raise `similarity`, or lower `clip_share` or `shrink`"
            )
        for code, text in texts.items():
            warn(ReliabilityWarning(code, text))


@dataclass
class _StabilityCheck:
    """A function that compares a model with the vanilla model that it was trained from."""

    vanilla: nn.Module
    graph: Graph
    seed: int
    box: tuple[float, float] | None = None
    must_match_vanilla: bool = True

    @cached_property
    def vanilla_shift(self) -> float | None:
        return _prediction_shift(self.vanilla, self.graph, self.seed, self.box)

    def __call__(self, model: nn.Module) -> StabilityReport:
        rows, must_match = _validation_rows(self.graph), self.must_match_vanilla
        if rows is None:
            return StabilityReport(must_match_vanilla=must_match)
        with torch.no_grad(), evaluating(model), evaluating(self.vanilla):
            new, old = (call_model(each, self.graph)[rows].argmax(1) for each in (model, self.vanilla))
        return StabilityReport(
            vanilla_shift=self.vanilla_shift,
            shift=_prediction_shift(model, self.graph, self.seed, self.box),
            agreement=float((new == old).double().mean()),
            overlap=_explanation_overlap(model, self.vanilla, self.graph) if must_match else None,
            must_match_vanilla=must_match,
        )


def _explanation_overlap(model: nn.Module, vanilla: nn.Module, graph: Graph) -> float | None:
    """Mean share of the vanilla top five neighbours kept in its sharpest layer; None without a ranking."""
    after, before = (observe(each, graph, heads="mean").attention for each in (model, vanilla))
    if [layer.keys.shape for layer in after] != [layer.keys.shape for layer in before]:
        return None
    values = [sharpness(layer.heads(), layer.rowptr) for layer in before]
    highest = max((value for value in values if not math.isnan(value)), default=0.0)
    if highest <= UNIFORM_SHARPNESS:
        return None
    old, new = (attention.layers[values.index(highest)] for attention in (before, after))
    kept = overlap(old.ranking(), new.ranking(), old.rowptr, TOP_K)
    return None if math.isnan(kept) else kept


def _prediction_shift(
    model: nn.Module, graph: Graph, seed: int, box: tuple[float, float] | None = None
) -> float | None:
    """Mean total variation ½ Σ_c |p_c − p̃_c| of validation nodes under a short attack, or None."""
    rows = _validation_rows(graph)
    if rows is None or graph.features is None:
        return None
    budget = make_attack("ensemble", targets="val").budget
    attack = EnsembleInjection(
        replace(budget, steps=ATTACK_STEPS, box=box), members=CHECK_MEMBERS, rules=("random",), baselines=()
    )
    unlabelled = graph.replace(y=None)
    try:
        with collect_warnings(), stage("checking"):  # warnings of the search are not about the training
            attacked = attack.run(model, unlabelled, seed=seed).graph
    except BudgetError:
        return None
    with evaluating(model), torch.no_grad():
        before, after = (call_model(model, each)[rows] for each in (graph, attacked))
    return float(tvd(before, after, "probabilities").mean())


def _validation_rows(graph: Graph) -> Tensor | None:
    task = task_of(graph)
    if not task.checks_stability or graph.val_mask is None:
        return None
    return task.rows(graph, "val")
