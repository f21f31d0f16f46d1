"""What an attention network behind limits can say under injection: intervals, boxes and balls, by layer."""

from fgai.bounds.leads import check_followed, worst_leads
from fgai.bounds.ranges import Range, Ranges, ranges_of
from fgai.bounds.reading import Reading, State
from fgai.bounds.scores import Scores, first_layer, scores_of, source_ends

__all__ = [
    "Range",
    "Ranges",
    "Reading",
    "Scores",
    "State",
    "check_followed",
    "first_layer",
    "ranges_of",
    "scores_of",
    "source_ends",
    "worst_leads",
]
