"""A plan for several sets of features at once: its small graphs side by side, computed in one pass.

Copies share nothing but the constants, so row t of copy b is what the single plan gives for its features.
On a GPU the passes of a small graph cost their launches, and those are the same for one copy and for eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fgai.ops.reach import set_reach
from fgai.recompute.local import Plan
from fgai.recompute.patch import Patch, Sides
from fgai.sparse import Adjacency
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class Repeated:
    """A plan side by side with itself.

    Attributes:
        plan: for features [times · S, F], copy after copy; its logits and nodes come copy after copy.
        times: number of copies.
        places: per patch [times, E'], where edge e of the single patch stands for copy b.
    """

    plan: Plan
    times: int
    places: list[Tensor]


@typed
def repeat_plan(plan: Plan, times: int) -> Repeated:
    """Lay `times` copies of a plan side by side."""
    device = plan.start.device
    inputs = torch.arange(times * plan.start.numel(), device=device).view(times, -1)
    patches, constants, states, places = [], [], [], []
    for patch, (sides, score), before in zip(plan.patches, plan.constants, plan.states, strict=True):
        copied, numbers, spots, fixed = _repeat_patch(patch, inputs, sides)
        patches.append(copied)
        constants.append((fixed, None if score is None else score.repeat(times, 1)))
        states.append(None if before is None else before.repeat(times, 1))
        places.append(spots)
        inputs = numbers[:, : patch.touched]
    ranked = zip(plan.ranks, patches, places, strict=True) if plan.ranks else ()
    made = replace(
        plan,
        ranks=[ranks.repeated(patch, spots) for ranks, patch, spots in ranked],
        start=plan.start.repeat(times),
        patches=patches,
        constants=constants,
        states=states,
        keep=inputs[:, plan.keep].flatten(),
        nodes=plan.nodes.repeat(times),
    )
    return Repeated(made, times, places)


def _repeat_patch(patch: Patch, inputs: Tensor, sides: Sides) -> tuple[Patch, Tensor, Tensor, Sides]:
    """Return the copies, the new numbers [times, nodes], the edges' places and the constant sides.

    Nodes keep the order of their kinds: changed ones of all copies, then fresh rows of all copies, and so on.

    Args:
        patch: single.
        inputs: [times, S] the row at which copy b finds its changed node j.
        sides: of the constants and stand-ins.
    """
    times, device = inputs.shape[0], inputs.device
    fresh = patch.touched - patch.changed
    kinds = (fresh, patch.constant.numel() - fresh, patch.standins.numel())
    numbers, index, before = [inputs], [], times * patch.changed
    first = 0
    for size in kinds:
        numbers.append(before + torch.arange(times * size, device=device).view(times, size))
        index.append((first + torch.arange(size, device=device)).repeat(times))
        before, first = before + times * size, first + size
    number = torch.cat(numbers, dim=1)
    edges, count = patch.adjacency, patch.adjacency.num_edges
    both = torch.stack([number[:, edges.source].flatten(), number[:, edges.destination].flatten()])
    adjacency, order = Adjacency.build(both, times * edges.num_nodes)
    set_reach(adjacency, moving=times * patch.changed, filled=times * patch.touched)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=device)
    places = back.view(times, count)
    chosen = torch.cat(index)
    source, destination, values = (t.index_select(0, chosen) for t in sides)
    copied = Patch(
        changed=times * patch.changed,
        touched=times * patch.touched,
        constant=torch.cat([patch.constant[:fresh].repeat(times), patch.constant[fresh:].repeat(times)]),
        adjacency=adjacency,
        positions=patch.positions.repeat(times)[order],
        standins=patch.standins.repeat(times),
        spots=places[:, patch.spots].flatten(),
        rest=patch.rest.repeat(times),
        counts=patch.counts.repeat(times),
    )
    return copied, number, places, (source, destination, values)
