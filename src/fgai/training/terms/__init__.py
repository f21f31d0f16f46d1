"""Loss terms of faithful training, one file each, and the decorator for your own.

To add a built-in term: write a function under `@term` in a new file here, import it below and add it to
`BUILT_IN`; in `FaithfulSettings` add its weight: a field of its name, this name in the tuple of
`__post_init__`, and a line of the docstring.
"""

from collections.abc import Sequence

from fgai.errors import InputError
from fgai.training.settings import FaithfulSettings
from fgai.training.terms.base import RESERVED, StepContext, Term, WeightedTerms, first_rows, term
from fgai.training.terms.certified import certified
from fgai.training.terms.closeness import closeness
from fgai.training.terms.margin import margin
from fgai.training.terms.prediction_stability import prediction_stability
from fgai.training.terms.sharpness import sharpness
from fgai.training.terms.similarity import similarity

__all__ = [
    "BUILT_IN",
    "StepContext",
    "Term",
    "WeightedTerms",
    "certified",
    "first_rows",
    "term",
    "weighted_terms",
]

BUILT_IN = (closeness, similarity, margin, sharpness, prediction_stability)
"""Terms whose weights are settings."""


def weighted_terms(settings: FaithfulSettings, extra: Sequence[Term] = ()) -> WeightedTerms:
    """Return the built-in terms and a user's, which replace built-in ones of the same name.

    Raises:
        InputError: a name twice or reserved, or nothing to train.
    """
    for each in extra:
        if each.name in RESERVED:
            raise InputError(f"a loss term cannot be named {each.name!r}; rename the function")
    names = [each.name for each in extra]
    if len(set(names)) < len(names):
        raise InputError(f"`terms` must have different names, got {', '.join(names)}")
    built_in = {each.name: each for each in BUILT_IN}
    weights = {
        each: getattr(settings, name) if name in built_in else each.weight
        for name, each in {**built_in, **{each.name: each for each in extra}}.items()
    }
    active = {each: weight for each, weight in weights.items() if weight > 0}
    if not active:
        raise InputError("all weights are zero: there is nothing to train; give one a positive value")
    return WeightedTerms(active)
