"""The pieces of a search for the worst features, and the climb they make."""

from fgai.attacks.search.climb import SearchResult, SearchSpec
from fgai.attacks.search.members import EXPLANATION_MEMBERS, PREDICTION_MEMBERS, Member

__all__ = ["EXPLANATION_MEMBERS", "PREDICTION_MEMBERS", "Member", "SearchResult", "SearchSpec"]
