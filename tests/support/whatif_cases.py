"""What the suites of the what-if page share: random changes, and a browser that computes them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import nn

from fgai.attention import observe, prepared
from fgai.graph import ChangeRecord, Graph, InjectedNode
from fgai.reports.template import asset
from fgai.reports.whatif.answer import graph_values, model_values, typical_classes

COMPUTE = """async ([script, graph, models, changes]) => {
  const file = new Blob([script], { type: "text/javascript" });
  const { Graph, Changed, Model } = await import(URL.createObjectURL(file));
  const one = new Graph(graph);
  return models.map((values) => {
    const model = new Model(values);
    const seconds = [];
    const views = changes.map((change) => {
      const began = performance.now();
      const view = model.at(change.node, new Changed(one, change));
      seconds.push(performance.now() - began);
      return view;
    });
    return { views, seconds };
  });
}"""


def random_change(graph: Graph, model: nn.Module, rng: np.random.Generator) -> ChangeRecord:
    """A few edges that go and come and nodes that are injected at and around a random node."""
    node = int(rng.integers(graph.num_nodes))
    rowptr, source = graph.adjacency.rowptr, graph.adjacency.source
    near = [node, *source[rowptr[node] : rowptr[node + 1]].tolist()]
    removed, added = set[frozenset[int]](), set[frozenset[int]]()
    for _ in range(int(rng.integers(4))):
        end = int(rng.choice(near))
        others = source[rowptr[end] : rowptr[end + 1]].tolist()
        if others and (other := int(rng.choice(others))) != end:
            removed.add(frozenset((end, other)))
    for _ in range(int(rng.integers(4))):
        end, other = int(rng.choice(near)), int(rng.integers(graph.num_nodes))
        joined = {*source[rowptr[end] : rowptr[end + 1]].tolist(), end}
        back = source[rowptr[other] : rowptr[other + 1]].tolist()
        if other not in joined and end not in back:
            added.add(frozenset((end, other)))
    injected = []
    for _ in range(int(rng.integers(4))):
        ends = list({node, *rng.choice(near, 2).tolist(), int(rng.integers(graph.num_nodes))})
        new = InjectedNode(edges=ends, strength=float(rng.uniform(-1, 3)))
        kind = rng.integers(3)
        if kind == 0:
            new["copy"] = int(rng.integers(graph.num_nodes))
        elif kind == 1:
            new["typical"] = int(rng.choice(typical_classes(graph)))
        else:
            new["features"] = rng.normal(size=graph.num_features).round(3).tolist()
        injected.append(new)
    pairs = {"removed_edges": map(sorted, removed), "added_edges": map(sorted, added)}
    lists = {name: list(values) for name, values in pairs.items()}
    return ChangeRecord.of(model, graph, node, **lists, injected=injected)


def computed(browser: Any, graph: Graph, models: list[nn.Module], changes: list[ChangeRecord]) -> list[Any]:
    """What the script computes, per model: views, and milliseconds of each."""
    page = browser.new_page()
    script = asset("recompute.js", "whatif")
    values = [model_values(model) for model in models]
    plain = [json.loads(json.dumps(change.to_dict())) for change in changes]
    out: list[Any] = page.evaluate(COMPUTE, [script, graph_values(graph), values, plain])
    page.close()
    return out


def largest_difference(model: nn.Module, graph: Graph, change: ChangeRecord, view: Any) -> float:
    """Largest difference from a full pass of PyTorch: logits, attention of every head, explanation."""
    record = ChangeRecord.from_dict({**change.to_dict(), "model": ChangeRecord.of(model, graph, 0).model})
    changed = record.apply(model, graph)
    seen = observe(model, prepared(model, changed))
    pairs = [(seen.logits[change.node], view["logits"])]
    for layer, ours in zip(seen.attention.layers, view["layers"], strict=True):
        row = slice(*layer.rowptr[change.node : change.node + 2].tolist())
        assert layer.source[row].tolist() == ours["neighbours"]
        pairs += [(layer.values[row].T, ours["heads"]), (layer.explanation()[row], ours["explanation"])]
    return max(float((torch.as_tensor(b) - a.double()).abs().max()) for a, b in pairs)
