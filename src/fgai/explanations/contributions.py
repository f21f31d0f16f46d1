"""Signed contributions: how much each neighbour adds to the margin of the predicted class over the second."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fgai.attention import Observation, find_layers
from fgai.certificates.linear import linear_read_out
from fgai.tasks import task_of
from fgai.threads import exclusive

ROUNDING = 1e-5  # rounding error of float32, relative to the values: smaller differences have no sign


@dataclass(frozen=True, eq=False)
class SignedMargin:
    """The margin between one node's two largest logits, split into a sum over the edges e into it.

        y_top − y_second = rest + Σ_e c_e,   c_e = Σ_h w_eh d_eh,   d_eh = z_eh,top − z_eh,second

    with the last attention w and the values z that it weighs, read out as logits. Radii are for changes of w
    with z fixed, as in `certify_attention`: each head in an l1 ball, its weights never negative. Vectors are
    float64 [K]; `edge_contributions` is the part of c_e that comes from the features of the edge through z_e,
    None where there is none, as in GAT and GATv2, which use them in scores only.
    """

    top: int
    second: int
    margin: float
    rest: float  # what does not pass through the last attention: bias, residual
    sources: Tensor  # int64 [K], the node itself among them if it has a self-loop
    contributions: Tensor  # c_e
    edge_contributions: Tensor | None
    # c_e keeps its sign while each head moves by less; infinite if d_eh has one sign in all heads.
    radii: Tensor
    pair_radius: float  # `top` and `second` stay first and second while each head moves by less


class SignedMargins:
    """The signed margins of an observation made with `inputs=True`; `reason` says why there are none."""

    def __init__(self, model: nn.Module, observation: Observation) -> None:
        self.observation, self.reason = observation, _unsupported(observation)
        read_out = self.reason or linear_read_out(model, observation)
        if isinstance(read_out, str):
            self.reason = read_out
        else:
            self.read_out, self.edges = read_out, _edge_values(model, observation, read_out.values)

    def of(self, node: int) -> SignedMargin:
        """Return the margin of one node; only if `reason` is None."""
        last, read_out = self.observation.attention.last, self.read_out
        first, end = last.rowptr[node : node + 2].tolist()
        weights = last.values[first:end].detach().cpu().double()
        values = read_out.values[read_out.index[first:end]]
        logits = self.observation.logits[node].detach().cpu().double()
        top, second = logits.argsort(descending=True, stable=True)[:2].tolist()
        lead = values[:, :, top] - values[:, :, second]
        contributions, edge_contributions = (weights * lead).sum(1), None
        if self.edges is not None:
            of_edges = self.edges[first:end]
            edge_contributions = (weights * (of_edges[:, :, top] - of_edges[:, :, second])).sum(1)
        margin = float(logits[top] - logits[second])
        sizes = lead.abs().sum(1).clamp(min=torch.finfo(lead.dtype).tiny)
        clear = lead.abs() > ROUNDING * values.abs().amax(2)
        fixed = (clear & (lead > 0)).all(1) | (clear & (lead < 0)).all(1)
        radii = torch.where(fixed, torch.inf, contributions.abs() / sizes)
        others = [(ahead, c) for ahead in (top, second) for c in range(len(logits)) if c not in (top, second)]
        pairs = [(top, second), *others]
        pair_radius = min(_order_radius(logits, values, ahead, behind) for ahead, behind in pairs)
        return SignedMargin(
            top=top,
            second=second,
            margin=margin,
            rest=margin - float(contributions.sum()),
            sources=last.source[first:end].cpu(),
            contributions=contributions,
            edge_contributions=edge_contributions,
            radii=radii,
            pair_radius=pair_radius,
        )


def _unsupported(observation: Observation) -> str | None:
    task = task_of(observation.graph)
    if not task.row_per_node:
        return f"contributions exist only for node classification; this model classifies {task.rows_are}"
    if any(layer.edge_type is not None for layer in observation.attention):
        return "the graph has several types of edges; contributions are computed for one only"
    return None


def _edge_values(model: nn.Module, observation: Observation, values: Tensor) -> Tensor | None:
    """[E, H, C]: the part of a PyG layer's values that its `lin_edge` makes; None if there is none."""
    layers = find_layers(model)
    encode = getattr(layers.get(observation.attention.last.name), "lin_edge", None)
    if observation.graph.edge_attr is None or encode is None or len(layers) != len(observation.attention):
        return None
    with exclusive():
        hook = encode.register_forward_hook(lambda layer, inputs, output: torch.zeros_like(output))
        try:
            rest = linear_read_out(model, observation)
        finally:
            hook.remove()
    if isinstance(rest, str) or bool(((values - rest.values).abs() <= ROUNDING * values.abs().max()).all()):
        return None
    return values - rest.values


def _order_radius(logits: Tensor, values: Tensor, ahead: int, behind: int) -> float:
    """Radius below which one class stays ahead of another: lead / Σ_h max_e |z_eh,ahead − z_eh,behind|."""
    apart = (values[:, :, ahead] - values[:, :, behind]).abs()
    rate = float(apart.amax(0).sum()) if len(apart) else 0.0
    lead = float(logits[ahead] - logits[behind])
    if rate > 0:
        return lead / rate
    return torch.inf if lead > 0 else 0.0
