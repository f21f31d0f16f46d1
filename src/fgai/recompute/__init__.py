"""Compute again only what a change reaches: the same numbers as a full forward pass."""

from fgai.recompute.local import Plan, Recompute, Repeated, Touched

__all__ = ["Plan", "Recompute", "Repeated", "Touched"]
