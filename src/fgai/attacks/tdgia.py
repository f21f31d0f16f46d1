"""TDGIA: new nodes at the graph's topological defects, in batches, with smooth feature optimisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fgai.attacks.base import Judge, Ledger
from fgai.attacks.budget import Budget
from fgai.attacks.endpoints import _batch_endpoints
from fgai.attacks.existing import _attacker_labels
from fgai.attacks.injection import RandomInjection
from fgai.attacks.search.climb import SearchSpec, _Space
from fgai.attacks.threats import Threat, register_threat
from fgai.attention import AttentionMap
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean, Objective

BATCHES = 5  # the new nodes come in, as in the original (a fifth each)
SMOOTH = 4.0  # cross-entropy, in nats, from which a node counts as misclassified and has no gradient
SINE = _Space(start=lambda angle, box: angle, features=lambda angle, box: box.features(torch.sin(angle)))
"""Unbounded angles, from which a climb begins; features are their sines."""


class TDGIA(RandomInjection):
    """New nodes in batches, each joined to the targets that are easiest to move, with smooth features.

    Before a batch, every target v is scored on the current graph,

        (2 + p_v) · (0.9 / d_v + 0.1 / √(e d_v)),

    p_v its probability of the clean prediction, d_v its degree plus one, e the edges of a new node. Nodes
    with few neighbours score high, those already wrong low. The best are dealt to the new nodes so that
    each gets a mixture of classes. Then the features of all new nodes so far, x = middle + half-width ·
    sin(u), climb by Adam on u. Under the `prediction` objective they climb

        -mean over targets of relu(4 - cross-entropy)²,

    which has no gradient at nodes that are misclassified already; other objectives are climbed as they
    are. The objective itself chooses the best point of each batch.

    Endpoints depend on the model, unlike those of `PGDInjection`: they are part of the attack. `steps` are
    shared by the batches, `step_size` is Adam's rate.

    Reference: Zou et al., TDGIA: Effective Injection Attacks on Graph Neural Networks, KDD 2021. Theirs ranks
    with a surrogate model's predictions and has hundreds of steps a batch; ours goes through the attacked
    model itself, within the budget.
    """

    name = "tdgia"
    endpoints_depend_on_model = True
    version = 2

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point after each batch."""
        budget, box = self.budget, self.budget.feature_box(graph)
        _attacker_labels(graph, judge.clean.logits)  # refuses tasks other than classes of nodes
        (noise,) = super().candidates(graph, nodes, generator, judge, ledger)
        yield noise
        assert noise.features is not None
        joined, angles = nodes.new_zeros(0, budget.edges), noise.features[:0]
        attacked, logits = graph, judge.clean.logits
        guide = SMOOTH_PREDICTION if self.objective.name == "prediction" else None
        size = max(1, min(-(-budget.nodes // BATCHES), nodes.numel() // max(1, budget.edges)))
        sizes = [min(size, budget.nodes - first) for first in range(0, budget.nodes, size)]
        for index, size in enumerate(sizes):
            endpoints = _batch_endpoints(
                attacked, nodes, logits, judge.clean.logits, (size, budget.edges), generator
            )
            joined = torch.cat([joined, endpoints])
            fresh = torch.randn(size, graph.num_features, generator=generator, dtype=torch.float32)
            angles = torch.cat([angles, fresh.to(angles)])
            steps = budget.steps * (index + 1) // len(sizes) - budget.steps * index // len(sizes)
            spec = SearchSpec(space=SINE, optimiser="adam", rate=budget.step_size, steps=steps)
            result = judge.climb(GraphChange(endpoints=joined), angles, spec, box, guide=guide)
            ledger.add(result)
            assert result.last is not None
            angles, change = result.last, GraphChange(endpoints=joined, features=result.features)
            yield change
            if index < len(sizes) - 1:
                attacked = change.apply(graph)[0]
                with torch.no_grad():
                    logits, attention = judge.observe(change, self.objective.reads)
                    judge.count(0, 1.0, self.objective(logits, attention, judge.clean)[None])


def _smooth_prediction(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """`-mean relu(4 - cross-entropy)²` against the clean prediction; we maximise it."""
    label = clean.logits[clean.nodes].argmax(1)
    loss = cross_entropy(logits[clean.nodes], label, reduction="none")
    return -(SMOOTH - loss).clamp(min=0).square().mean()


SMOOTH_PREDICTION = Objective("smooth prediction", _smooth_prediction, "logits", node_mean=True)


register_threat(
    Threat(
        "tdgia",
        TDGIA,
        Budget(nodes=20, edges=20, steps=50, step_size=0.3),
        "20 nodes × 20 edges where the graph is weakest, in five batches",
    )
)
