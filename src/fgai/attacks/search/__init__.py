"""Pieces of a search for the worst features: start × space × optimiser × loss, and the climb they make."""

from fgai.attacks.search.members import MEMBERS, Member

__all__ = ["MEMBERS", "Member"]
