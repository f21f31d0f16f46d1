"""Only what a change touches: the same numbers as a full forward pass, from fewer edges."""

from fgai.recompute.edit import Edit
from fgai.recompute.local import Plan, Recompute, Repeated, Touched, repeat_plan
from fgai.recompute.partial import PartialObjective

__all__ = ["Edit", "PartialObjective", "Plan", "Recompute", "Repeated", "Touched", "repeat_plan"]
