"""Norm balls around the attention of every node: size, projection, random points, steepest steps.

A perturbation `delta` is [E], or [E, H] with every head in a ball of its own; the ball of node i holds the
entries `rowptr[i]:rowptr[i+1]` and has radius R (one number, or one per node, [N]). Norms: "l1", "l2" and
"linf". A PGD step is `project(delta + steepest(gradient, rowptr, step_size, norm), rowptr, radius, norm)`.
Nothing here is differentiated: adversaries use it between gradients.
"""

from fgai.attacks.balls.points import random_point, steepest
from fgai.attacks.balls.projection import Radius, norms, project

__all__ = ["Radius", "norms", "project", "random_point", "steepest"]
