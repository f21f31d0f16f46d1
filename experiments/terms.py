"""The paper's loss terms: total variation of predictions, eq. 6, graph-wide top-K, output layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div

from fgai.checks import one_of
from fgai.topk import topk_l1
from fgai.training import StepContext, Term, term

DIVERGENCES = ("log", "relative", "logits", "probabilities", "kl")


def prediction_distance(
    y: Tensor, other: Tensor, divergence: str, scale: Tensor | float = 1.0, share: float = 1.0
) -> Tensor:
    """The distance D between two predictions, averaged over nodes: total variation.

    Args:
        y: [N, C] logits.
        other: [N, C] logits.
        divergence: `logits`; `relative` (logits, divided by `scale`); `log`, the logarithm of 1 + the
            relative distance per node; `probabilities` after a softmax; or `kl`, the Kullback-Leibler
            divergence KL(softmax y ‖ softmax other) instead of total variation.
        scale: the spread of the vanilla logits.
        share: of the nodes that count; the mean over all nodes is divided by it.
    """
    one_of(divergence, "divergence", DIVERGENCES)
    if divergence == "kl":
        return kl_div(other.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True) / share
    if divergence == "probabilities":
        y, other = y.softmax(1), other.softmax(1)
    size = scale if divergence in ("relative", "log") else 1.0
    distance = (y - other).abs().sum(1) / 2 / size
    return (distance.log1p() if divergence == "log" else distance).mean() / share


def paper_terms(k: int, divergence: str, weight: float, form: str = "tv") -> list[Term]:
    """Return the four terms of eq. 7 at the output layer, with injected nodes as the perturbation.

    `divergence` is that of predictions under attack, `weight` that of explanation stability, and `form` that
    of eq. 6, see `fgai.topk.topk_l1`.
    """
    one_of(divergence, "divergence", DIVERGENCES)

    @term(on="clean")
    def closeness(context: StepContext) -> Tensor:
        vanilla = context.vanilla_outputs
        return prediction_distance(vanilla.logits, context.logits, "relative", vanilla.logit_spread)

    @term(on="clean")
    def similarity(context: StepContext) -> Tensor:
        target, rowptr = context.vanilla_outputs.attention[-1], context.vanilla_outputs.rowptrs[-1]
        return topk_l1(target, context.attention[-1], rowptr, k, "graph", form=form)

    @term(on="attacked")
    def prediction_stability(context: StepContext) -> Tensor:
        assert context.attacked_logits is not None and context.reach is not None
        sizes = context.vanilla_outputs.logit_spread, context.reach.predictions
        return prediction_distance(context.logits, context.attacked_logits, divergence, *sizes)

    @term(on="attacked", weight=weight, needs_attention=True)
    def explanation_stability(context: StepContext) -> Tensor:
        assert context.attacked_attention is not None and context.reach is not None
        before, after = context.attention[-1], context.attacked_attention[-1]
        factor = 1 / context.reach.layers[-1]
        return topk_l1(
            before, after, context.vanilla_outputs.rowptrs[-1], k, "graph", form=form, factor=factor
        )

    return [closeness, similarity, prediction_stability, explanation_stability]
