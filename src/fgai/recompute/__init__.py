"""Only what a change touches: the same numbers as a full forward pass, from fewer edges."""

from fgai.recompute.local import Plan, Recompute, Repeated, Touched, repeat_plan
from fgai.recompute.patch import Edit

__all__ = ["Edit", "Plan", "Recompute", "Repeated", "Touched", "repeat_plan"]
