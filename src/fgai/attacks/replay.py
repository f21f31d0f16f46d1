"""Climbs whose steps are captured in a CUDA graph: a strong attack is one step, many times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fgai.attacks.budget import Budget
from fgai.attacks.judge import Judge, Ledger
from fgai.ops.capture import Replay
from fgai.progress import current

MIN_STEPS = 20
"""Steps from which a capture, which costs about as much as five steps, pays."""
WARM_UP = 2


def replayed_climb(
    objective: Callable[[Tensor], Tensor],
    start: Tensor,
    budget: Budget,
    radius: float,
    ledger: Ledger,
    judge: Judge,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Take the steps of `climb` on a GPU, captured once and replayed.

    Args:
        objective: calls `judge` on the point it is given, which moves in place.
        start: where the climb begins.
        budget: gives steps and step size.
        radius: no entry gets further from 0.
        ledger: steps are noted here.
        judge: told of the values of replayed steps.

    Returns:
        The last point, the best point seen before it and its value, after noting the largest gradient; None,
        with nothing done or noted, where a step cannot be captured or too few are wanted.
    """
    if not start.is_cuda or budget.steps < MIN_STEPS or not start.numel():
        return None
    point, best = start.detach().clone(), start.detach().clone()
    best_value, steepest = start.new_full((), float("-inf")), start.new_zeros(())

    def step() -> Tensor:
        moving = point.detach().requires_grad_()  # made here, so that its gradient belongs to this stream
        value = objective(moving)
        (gradient,) = torch.autograd.grad(value, moving)
        with torch.no_grad():
            better = value > best_value
            torch.where(better, point, best, out=best)
            torch.where(better, value, best_value, out=best_value)
            torch.maximum(steepest, gradient.abs().max(), out=steepest)
            point.add_(budget.step_size * gradient.sign()).clamp_(-radius, radius)
        return value.detach()

    mark = judge.mark()
    try:
        for _ in range(WARM_UP):
            step()
        share = judge.share_since(mark)
        with judge.silent():
            replay = Replay(step, start.device)
    except RuntimeError:
        judge.back_to(mark)
        return None
    for _ in range(budget.steps - WARM_UP):
        judge.replayed(replay(), share)
    ledger.steps += budget.steps
    current().advance(budget.steps)
    ledger.gradient = max(ledger.gradient, float(steepest))
    return point.detach(), best, best_value
