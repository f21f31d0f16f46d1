"""Compute again only the rows that a change affects: the same numbers as a full forward pass."""

from fgai.recompute.local import PartialOutput, Plan, PlanCopies, Recompute

__all__ = ["PartialOutput", "Plan", "PlanCopies", "Recompute"]
