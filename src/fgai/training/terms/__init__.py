"""Loss terms of faithful training, one file each, and the decorator for your own."""

from collections.abc import Sequence

from fgai.errors import InputError
from fgai.training.settings import FaithfulSettings
from fgai.training.terms.base import StepContext, Term, WeightedTerms, term
from fgai.training.terms.certified import certified
from fgai.training.terms.closeness import closeness
from fgai.training.terms.margin import margin
from fgai.training.terms.prediction_stability import prediction_stability
from fgai.training.terms.sharpness import sharpness
from fgai.training.terms.similarity import similarity

__all__ = ["BUILT_IN", "StepContext", "Term", "WeightedTerms", "certified", "term", "weighted_terms"]

BUILT_IN = (closeness, similarity, margin, sharpness, prediction_stability)
"""Terms whose weights are settings."""


def weighted_terms(settings: FaithfulSettings, extra: Sequence[Term] = ()) -> WeightedTerms:
    """Return the built-in terms and a user's, which replace built-in ones of the same name.

    Raises:
        InputError: something else than a term, a name twice, or nothing to train.
    """
    for each in extra:
        if not isinstance(each, Term):
            raise InputError(f"`terms` must be functions decorated with `fgai.training.term`, got {each!r}")
    names = [each.name for each in extra]
    if len(set(names)) < len(names):
        raise InputError(f"`terms` must have different names, got {', '.join(names)}")
    terms = {each.name: each for each in (*BUILT_IN, *extra)}
    settable = {each.name for each in BUILT_IN}
    weights = {
        each: getattr(settings, each.name) if each.name in settable else each.weight
        for each in terms.values()
    }
    active = {each: weight for each, weight in weights.items() if weight > 0}
    if not active:
        raise InputError(
            "all weights are zero: there is nothing to train; give at least one a positive value"
        )
    return WeightedTerms(active)
