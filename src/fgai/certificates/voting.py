"""Voting over groups of nodes: a certificate against injected nodes, for any model that classifies nodes.

A hash of its number puts every node in one of T groups. In the graph of group g an edge j → i stays only if j
is in g; every node keeps its own features. The model classifies every node T times, and the majority counts.

An injected node is in one group, so whatever its features and edges, it changes at most one vote of a node.
If the leading class of a node is ahead of every other by more than 2 m votes (ties go to the smaller class),
no m injected nodes change it. Required of the model: nodes affect each other along edges, from source to
destination, and in no other way: no encodings of the graph, no norms or maxima over all nodes, no count of
nodes or of outgoing edges. To prove it, new nodes without outgoing edges are added and followed through the
forward pass, operation by operation (`fgai.certificates.locality`); whatever the size of their features, the
logits of old nodes must not change.

A T-th of every neighbourhood often gives worse classes, at worst those of the features alone; compare with
`fgai.training.features_alone`: a certificate below that protects nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fgai.attention import call_model, evaluating, model_name, prepared
from fgai.attention.interface import uncompiled
from fgai.certificates.injection import _share_of
from fgai.certificates.locality import _dependence
from fgai.checks import seed as check_seed
from fgai.checks import whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.records import Column, Table, Tabled, data_frame
from fgai.tasks import check_logits, task_of
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

MOST_GROUPS = 100_000
VOTING_PROMISE = (
    "Certified: so many injected nodes, with any features and any wiring, leave the class of the majority"
    " as it is."
)
PROBES = ((1, 1.0), (3, 1e6))
"""New nodes that are tried, and the size of their features."""
NEIGHBOURS = 16
"""Of each of them at most."""
_SAME = 1e-5
"""Rounding of logits, relative to the largest."""


@typed
@dataclass(frozen=True, eq=False)
class VotingCertificate(Tabled):
    """How many injected nodes the majority over groups of nodes tolerates.

    Attributes:
        groups: T.
        votes: int64 [N, C].
        classes: int64 [N], the class with most votes; ties go to the smaller one.
        tolerated: int64 [N], injected nodes, with any features and edges, that cannot change it.
    """

    groups: int
    votes: Tensor
    classes: Tensor
    tolerated: Tensor

    def share(self, injected: int, nodes: Tensor | None = None) -> float:
        """Share of nodes, or of those under a mask, that tolerate so many injected nodes."""
        whole(injected, "injected", 0)
        return _share_of(self.tolerated >= injected, nodes)

    def certified_accuracy(self, injected: int, y: Tensor, nodes: Tensor | None = None) -> float:
        """Share of nodes, or of those under a mask, that are right and tolerate so many injected nodes."""
        whole(injected, "injected", 0)
        return _share_of((self.tolerated >= injected) & (self.classes == y.to(self.classes.device)), nodes)

    def tables(self) -> list[Table]:
        """Return the share of nodes that tolerate so many injected nodes, up to the most any tolerates."""
        most = min(int(self.tolerated.max()), self.groups) if len(self.tolerated) else 0
        rows = [[injected, self.share(injected)] for injected in range(most + 1)]
        columns = [Column("injected nodes", "d"), Column("class stays, share of nodes")]
        return [Table(f"Majority over {self.groups} groups", columns, rows, (VOTING_PROMISE,))]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per node: class, votes for it, injected nodes tolerated."""
        leading = self.votes.amax(1)
        values = {"class": self.classes, "votes": leading, "tolerated": self.tolerated}
        return data_frame({name: tensor.numpy() for name, tensor in values.items()})


@typed
def vote(model: nn.Module, data: Any, *, groups: int = 20, seed: int = 0) -> VotingCertificate:
    """Classify nodes by a majority over groups of their neighbours, and certify it against injected nodes.

    Args:
        model: any that classifies nodes; run `groups` times in evaluation mode.
        data: a `Graph` or PyG `Data`.
        groups: T; more groups tolerate more injected nodes and keep less of each neighbourhood.
        seed: of the hash.

    Raises:
        InputError: another task, fewer than one group, or nodes that may affect each other other than along
            edges; names the operation.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5, progress=False)
        >>> certificate = vote(model, data, groups=5)
        >>> certificate.votes.sum(1).unique().tolist(), certificate.share(3)
        ([5], 0.0)
    """
    whole(groups, "groups", 1, MOST_GROUPS)
    check_seed(seed)
    graph = as_graph(data)
    if not task_of(graph).row_per_node:
        raise InputError(f"voting is for the classes of nodes, {graph.name!r} holds another task")
    group = _group_of(torch.arange(graph.num_nodes), groups, seed)
    largest = int(torch.bincount(group, minlength=groups).argmax())
    votes = torch.zeros((), dtype=torch.long)
    with evaluating(model), torch.no_grad():
        _require_local(model, graph, group == largest)
        for one in range(groups):
            part = prepared(model, _sent_by(graph, group == one))
            logits = call_model(model, part)
            check_logits(logits, part)
            votes = votes + torch.nn.functional.one_hot(logits.argmax(1).cpu(), logits.shape[1])
    return _counted(votes, groups)


def _group_of(nodes: Tensor, groups: int, seed: int = 0) -> Tensor:
    """Return the group [M] of each node by its number alone: new nodes do not move the others."""
    mixed = nodes.long() + (seed + 1) * 0x9E3779B9
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) % groups


def _sent_by(graph: Graph, senders: Tensor) -> Graph:
    """Return the graph without the edges, loops excepted, whose source is not in `senders` (bool [N])."""
    adjacency = graph.adjacency
    source, destination = adjacency.source, adjacency.destination
    gone = ~senders.to(source.device)[source] & (source != destination)
    return graph.remove(gone.nonzero().flatten())[0]


def _require_local(model: nn.Module, graph: Graph, senders: Tensor) -> None:
    """Raise unless new nodes without outgoing edges provably change nothing at the others."""
    part = prepared(model, _sent_by(graph, senders))
    if part.positional is not None:
        raise InputError(
            f"{model_name(model)} must not read encodings of the whole graph, which every new node changes"
        )
    if part.features is None:
        return
    plain = uncompiled(model)
    logits = call_model(plain, part)
    check_logits(logits, part)
    counts = [added for added, _ in PROBES]
    why = _joined(plain, graph, senders, counts)
    # Sizes that happen to be equal are told apart by other ones, and dense features need no kernels.
    if why is not None and (why := _joined(plain, graph, senders, [n + 4 for n in counts], dense=True)):
        raise _not_local(model, why)
    for added, size in PROBES:
        larger = prepared(plain, _with_new(graph, senders, added, size))
        change = (call_model(plain, larger)[: len(logits)] - logits).abs()
        if not bool((change <= _SAME * logits.abs().max()).all()):
            raise _not_local(model, "new nodes that send nothing change the logits of others")


def _joined(
    model: nn.Module, graph: Graph, senders: Tensor, counts: Sequence[int], *, dense: bool = False
) -> str | None:
    """What lets old nodes depend on new ones without outgoing edges; None if nothing does."""
    numbers = []
    for added in counts:
        larger = prepared(model, _with_new(graph, senders, added, 1.0))
        culprit, scalars = _dependence(model, larger, added, dense=dense)
        if culprit is not None:
            return f"`{culprit.strip('_')}` joins what no edge joins"
        numbers.append(scalars)
    for one, other in zip_longest(*numbers, fillvalue=("an operation",)):
        if one != other:
            return f"`{one[0]}` computes with the number of nodes or edges"
    return None


def _not_local(model: nn.Module, why: str) -> InputError:
    return InputError(
        f"in {model_name(model)} nodes affect each other in other ways than along edges: {why}, so one"
        " injected node may change every vote; leave it out, or certify with `certify_injection`"
    )


def _with_new(graph: Graph, senders: Tensor, added: int, size: float) -> Graph:
    """Add new nodes without outgoing edges, each with some of `senders` as neighbours."""
    generator = torch.Generator().manual_seed(added)
    among = senders.nonzero().flatten()
    among = among if len(among) else torch.arange(graph.num_nodes)
    some = [among[torch.randperm(len(among), generator=generator)[:NEIGHBOURS]] for _ in range(added)]
    assert graph.features is not None
    features = size * torch.randn(added, graph.num_features, generator=generator, dtype=torch.float64)
    larger, _ = graph.inject(torch.stack(some), features.to(graph.device, graph.features.dtype))
    return _sent_by(larger, torch.cat([senders, senders.new_zeros(added)]))


def _counted(votes: Tensor, groups: int) -> VotingCertificate:
    classes = votes.argmax(1)
    rows = torch.arange(len(votes))
    leading = votes[rows, classes]
    others = votes.clone()
    others[rows, classes] = -1
    # A smaller class wins ties, so it must stay behind by one vote more.
    smaller = torch.arange(votes.shape[1])[None, :] < classes[:, None]
    ahead = (leading[:, None] - others - smaller.long()).masked_fill(others < 0, 2 * groups + 1)
    tolerated = ahead.amin(1) // 2
    return VotingCertificate(groups, votes, classes, tolerated.clamp(max=groups))
