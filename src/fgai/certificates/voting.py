"""Voting over groups of nodes: a certificate against injected nodes, for any model that classifies nodes.

In the graph of one of T groups an edge j → i stays only if a hash puts j in the group; nodes keep their own
features. The majority of T classifications counts; docs/budget.md has the proofs. Nodes must affect each
other along edges alone (`fgai.certificates.locality`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from fgai.attention import call_model, evaluating, model_name, prepared
from fgai.attention.interface import originals, uncompiled
from fgai.certificates.base import _Certificate, _record_fields, _share_of
from fgai.certificates.locality import _find_dependence
from fgai.checks import fraction, whole
from fgai.checks import seed as check_seed
from fgai.errors import CheckpointError, InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.records import Cell, Column, Table, data_frame
from fgai.tasks import check_logits, task_of
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

MOST_GROUPS = 100_000
VOTING_PROMISE = (
    "Certified: so many injected nodes, with any features and any wiring, leave the class of the majority"
    " as it is, and at least this share of the top groups of neighbours."
)
PROBES = ((1, 1.0), (3, 1e6))  # number of new nodes in each test of locality, and the size of their features
PROBE_NEIGHBOURS = 16  # largest number of neighbours of each
_SAME = 1e-5  # rounding of logits, relative to the largest


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class VotingCertificate(_Certificate):
    """How many injected nodes the majority over groups of nodes withstands, and the score of each group.

    Attributes:
        votes: int64 [N, C].
        classes: int64 [N], the class with most votes; ties go to the smaller one.
        node_radius: int64 [N], up to this many injected nodes cannot change it.
        scores: float32 [N, T], change of that class's margin by a group's neighbours; NaN where it has none.
        group: int64 [N], of each node.
    """

    KIND: ClassVar[str] = "voting-certificate"
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        "votes": ("<i8", 2),
        "classes": ("<i8", 1),
        "node_radius": ("<i8", 1),
        "scores": ("<f4", 2),
        "group": ("<i8", 1),
    }
    OLD_NAMES: ClassVar[dict[str, str]] = {"tolerated": "node_radius"}

    groups: int
    confidence: float
    votes: Tensor
    classes: Tensor
    node_radius: Tensor
    scores: Tensor
    group: Tensor
    seconds: float
    promise: str = VOTING_PROMISE

    def share(self, injected: int, nodes: Tensor | None = None) -> float:
        """Share of nodes, or of those under a mask, that withstand so many injected nodes."""
        whole(injected, "injected", 0)
        return _share_of(self.node_radius >= injected, nodes)

    def certified_accuracy(self, injected: int, y: Tensor, nodes: Tensor | None = None) -> float:
        """Share of nodes, or of those under a mask, that are right and withstand so many injected nodes."""
        whole(injected, "injected", 0)
        return _share_of((self.node_radius >= injected) & (self.classes == y.to(self.classes.device)), nodes)

    def top(self, k: int = 5) -> Tensor:
        """Return the groups of each node's explanation, int64 [N, k]: the k largest scores; -1 for none."""
        whole(k, "k", 1)
        ranked = self.scores.nan_to_num(nan=-torch.inf).sort(dim=1, descending=True, stable=True)
        numbers = ranked.indices.masked_fill(ranked.values == -torch.inf, -1)[:, :k]
        return pad(numbers, (0, k - numbers.shape[1]), value=-1)

    def topk_share(self, injected: int, k: int = 5, nodes: Tensor | None = None) -> float | None:
        """Mean share of the top-k groups that provably stays, over nodes with such groups; None of none.

        A node whose class may change counts as 0.
        """
        whole(injected, "injected", 0)
        count = (self.top(k) >= 0).sum(1).double()
        share = ((count - injected) / count.clamp(min=1)).clamp(min=0)
        share = share.masked_fill(self.node_radius < injected, 0)
        counted = count > 0 if nodes is None else (count > 0) & nodes.to(count.device)
        return float(share[counted].mean()) if bool(counted.any()) else None

    def tables(self) -> list[Table]:
        """Return a row per number of injected nodes, up to the largest radius."""
        most = min(int(self.node_radius.max()), self.groups) if len(self.node_radius) else 0
        rows: list[list[Cell]] = [[m, self.share(m), self.topk_share(m)] for m in range(most + 1)]
        columns = [Column("injected nodes", "d"), Column("class stays, share of nodes")]
        columns.append(Column("of its top 5 groups, at least"))
        title = f"Majority over {self.groups} groups of {self.model['class']} on {self.data['name']}"
        return [Table(title, columns, rows, (self.promise,))]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per node: class, votes for it, node radius, group."""
        values = {"class": self.classes, "votes": self.votes.amax(1), "node radius": self.node_radius}
        return data_frame({name: tensor.numpy() for name, tensor in (values | {"group": self.group}).items()})

    def _check_shapes(self) -> None:
        super()._check_shapes()
        if self.groups < 1 or self.scores.shape[1] != self.groups or self.votes.shape[1] < 1:
            raise CheckpointError("groups or classes of the record are out of range")


@typed
def vote(
    model: nn.Module, data: Any, *, groups: int = 20, confidence: float = 0.0, seed: int = 0
) -> VotingCertificate:
    """Classify nodes by a majority over groups of their neighbours, explain it and certify both.

    Any model that classifies nodes runs `groups` times in evaluation mode: more groups tolerate more injected
    nodes and keep less of each neighbourhood. A class gets a vote if its probability is at least
    `confidence`; others abstain. The `seed` is that of the hash. Raises `InputError` for another task, and
    if nodes affect each other in other ways than along edges; the error names the operation.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5, progress=False)
        >>> certificate = fgai.vote(model, data, groups=5)
        >>> certificate.votes.sum(1).unique().tolist(), certificate.share(3)
        ([5], 0.0)
    """
    began = perf_counter()
    whole(groups, "groups", 1, MOST_GROUPS)
    fraction(confidence, "confidence")
    check_seed(seed)
    graph = as_graph(data)
    if not task_of(graph).row_per_node:
        raise InputError(f"voting is for the classes of nodes, {graph.name!r} holds another task")
    group = _hash_groups(torch.arange(graph.num_nodes), groups, seed)
    largest = int(torch.bincount(group, minlength=groups).argmax())
    with evaluating(model), torch.no_grad():
        _require_local(model, graph, group == largest)
        by_group = [_logits(model, graph, group == one) for one in range(groups)]
        alone = _logits(model, graph, torch.zeros_like(group, dtype=torch.bool))
    votes = torch.zeros(alone.shape, dtype=torch.long)
    for logits in by_group:
        chance, chosen = logits.double().softmax(1).max(1)
        votes += one_hot(chosen, logits.shape[1]) * (chance >= confidence)[:, None]
    classes, radius = _majority(votes, groups)
    scores = torch.stack([_margin(logits, classes) for logits in by_group], 1)
    scores = scores - _margin(alone, classes)[:, None]
    source, destination = graph.adjacency.source.cpu(), graph.adjacency.destination.cpu()
    other = source != destination
    without_neighbour = torch.ones(scores.shape, dtype=torch.bool)
    without_neighbour[destination[other], group[source[other]]] = False
    (own,) = originals(model)
    return VotingCertificate(
        groups=groups,
        confidence=float(confidence),
        votes=votes,
        classes=classes,
        node_radius=radius,
        scores=scores.masked_fill(without_neighbour, torch.nan).float(),
        group=group,
        seconds=perf_counter() - began,
        **_record_fields(own, graph, graph, "fgai.vote"),
    )


def _logits(model: nn.Module, graph: Graph, senders: Tensor) -> Tensor:
    """Return the logits [N, C] in the graph of the edges from `senders`, bool [N], on the CPU."""
    part = prepared(model, _edges_from(graph, senders))
    logits = call_model(model, part)
    check_logits(logits, part)
    return logits.cpu()


def _margin(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the logit of each node's class less the largest other one [N]; 0 where there is one class."""
    if logits.shape[1] == 1:
        return torch.zeros(len(logits))
    own = logits.gather(1, classes[:, None])
    return (own - logits.scatter(1, classes[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]


def _hash_groups(nodes: Tensor, groups: int, seed: int = 0) -> Tensor:
    """Return the group [M] of each node by its number alone: new nodes do not move the others."""
    mixed = nodes.long() + (seed + 1) * 0x9E3779B9
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) % groups


def _edges_from(graph: Graph, senders: Tensor) -> Graph:
    """Return the graph with the edges from `senders`, bool [N], and all self-loops."""
    source, destination = graph.adjacency.source, graph.adjacency.destination
    gone = ~senders.to(source.device)[source] & (source != destination)
    return graph.remove(gone.nonzero().flatten())[0]


def _require_local(model: nn.Module, graph: Graph, senders: Tensor) -> None:
    """Raise unless new nodes without outgoing edges provably change nothing at the others."""
    part = prepared(model, _edges_from(graph, senders))
    if part.positional is not None:
        raise InputError(f"{model_name(model)} must not read encodings of the whole graph")
    if part.features is None:
        return
    plain = uncompiled(model)
    logits = call_model(plain, part)
    check_logits(logits, part)
    counts = [added for added, _ in PROBES]
    why = _nonlocal_operation(plain, graph, senders, counts)
    # Sizes may be equal by chance, so others are tried; dense features need no kernels.
    if why is not None:
        why = _nonlocal_operation(plain, graph, senders, [added + 4 for added in counts], dense=True)
    for added, size in PROBES if why is None else ():
        larger = prepared(plain, _inject_probes(graph, senders, added, size))
        change = (call_model(plain, larger)[: len(logits)] - logits).abs()
        if not bool((change <= _SAME * logits.abs().max()).all()):
            why = "new nodes that send nothing change the logits of others"
    if why is not None:
        raise InputError(
            f"in {model_name(model)} nodes affect each other in other ways than along edges: {why}, so one"
            " injected node may change every vote; leave it out, or certify with `certify_injection`"
        )


def _nonlocal_operation(
    model: nn.Module, graph: Graph, senders: Tensor, counts: Sequence[int], *, dense: bool = False
) -> str | None:
    """Say by which operation old nodes depend on new ones without outgoing edges; None if by none."""
    numbers = []
    for added in counts:
        larger = prepared(model, _inject_probes(graph, senders, added, 1.0))
        violation, scalars = _find_dependence(model, larger, added, dense=dense)
        if violation is not None:
            return f"`{violation.strip('_')}` joins nodes that no edge joins"
        numbers.append(scalars)
    for one, other in zip_longest(*numbers, fillvalue=("an operation",)):
        if one != other:
            return f"`{one[0]}` computes with the number of nodes or edges"
    return None


def _inject_probes(graph: Graph, senders: Tensor, added: int, size: float) -> Graph:
    """Add new nodes without outgoing edges, each with some of `senders` as neighbours."""
    generator = torch.Generator().manual_seed(added)
    among = senders.nonzero().flatten()
    among = among if len(among) else torch.arange(graph.num_nodes)
    some = [among[torch.randperm(len(among), generator=generator)[:PROBE_NEIGHBOURS]] for _ in range(added)]
    assert graph.features is not None
    features = size * torch.randn(added, graph.num_features, generator=generator, dtype=torch.float64)
    larger, _ = graph.inject(torch.stack(some), features.to(graph.device, graph.features.dtype))
    return _edges_from(larger, torch.cat([senders, senders.new_zeros(added)]))


def _majority(votes: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the class with most votes [N], and the number of injected nodes that cannot change it [N]."""
    classes = votes.argmax(1, keepdim=True)
    others = votes.scatter(1, classes, -1)
    # A smaller class wins ties, so it must stay behind by one vote more.
    smaller = (torch.arange(votes.shape[1])[None, :] < classes).long()
    lead = (votes.gather(1, classes) - others - smaller).masked_fill(others < 0, 2 * groups + 1)
    return classes[:, 0], (lead.amin(1) // 2).clamp(max=groups)
