"""Compute again only what a change reaches: the same numbers as a full forward pass."""

from fgai.recompute.local import Plan, Recompute, Repeated, Touched, repeat_plan
from fgai.recompute.patch import Edit

__all__ = ["Edit", "Plan", "Recompute", "Repeated", "Touched", "repeat_plan"]
