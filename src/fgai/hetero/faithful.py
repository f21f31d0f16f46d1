"""`make_faithful`: from a trained heterogeneous model to one whose attention stays put."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch_geometric.data import HeteroData

from fgai import training
from fgai.attention.hetero import HeteroCall
from fgai.attention.tap import EdgeType
from fgai.hetero.view import HeteroView
from fgai.trackers import Tracker
from fgai.training import FaithfulConfig, history_of
from fgai.training.train import set_history
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)


@typed
def make_faithful(
    model: M,
    data: HeteroData,
    edge_type: EdgeType,
    config: FaithfulConfig | None = None,
    *,
    seed: int = 0,
    progress: bool | None = None,
    max_attempts: int = 2,
    tracker: Tracker | None = None,
    call: HeteroCall | None = None,
    **settings: Any,
) -> M:
    """Return a faithful version of a trained heterogeneous model; the given one is untouched.

    It is `fgai.make_faithful` on the view's graph: closeness, similarity and stability of the attention of
    all layers and types, against nodes that are injected within one type and joined to training and
    validation nodes. Layers of GATConv, GATv2Conv and TransformerConv get limits of what nodes may say in
    each type.

    Args:
        model: trained; made by `to_hetero` or `HeteroConv` of layers with attention.
        data: what it was trained on, with labels and masks of the nodes that `edge_type` ends at.
        edge_type: of the edges of injected nodes.
        config: see `FaithfulConfig`.
        seed: of the adversary's draws.
        progress: show a bar; None shows it on a terminal only.
        max_attempts: trainings at most; 1 trains once, whatever comes out.
        tracker: told of every epoch, see `fgai.trackers`.
        call: how the model is called, see `HeteroView.wrap`.
        **settings: single settings by name, e.g. `epochs=50`, `similarity=4.0`.

    Returns:
        A model of the same class, called as yours, in eval mode, with its `history`.

    Raises:
        InputError: data that cannot be read, an unknown type, or a setting that is not known.
        AttentionError: the model has no attention that can be recorded.
    """
    view = HeteroView(data, edge_type=edge_type)
    made = training.make_faithful(
        view.wrap(model, call),
        view.graph,
        config,
        seed=seed,
        progress=progress,
        max_attempts=max_attempts,
        tracker=tracker,
        **settings,
    )
    faithful: M = made.model  # type: ignore[assignment]
    set_history(faithful, history_of(made))
    return faithful
