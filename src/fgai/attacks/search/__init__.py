"""Pieces of a search for the worst features: start × space × optimiser × loss, and the climb they make."""

from fgai.attacks.search.members import EXPLANATION_MEMBERS, PREDICTION_MEMBERS, Member

__all__ = ["EXPLANATION_MEMBERS", "PREDICTION_MEMBERS", "Member"]
