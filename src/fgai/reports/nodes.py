"""The nodes the page carries, from models and records or from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fgai.explanations.node import Names
from fgai.graph import Graph
from fgai.reports import choose
from fgai.reports.explorer import facts, neighbourhoods, predictions, radii, recorded
from fgai.reports.injections import of_nodes
from fgai.reports.parts import Part
from fgai.reports.subgraph import subgraph
from fgai.reports.views import UNIT, Seen


def nodes_of_models(
    parts: Sequence[Part],
    graph: Graph,
    seen: Sequence[Seen],
    node: int | None,
    node_names: Names | None,
) -> dict[str, Any]:
    """The nodes the page carries, with their neighbourhoods; the one it opens with comes first.

    Args:
        parts: records and certificates.
        graph: the clean one.
        seen: the models before and after the attack.
        node: to open with; None picks one.
        node_names: by number, or None.
    """
    k = parts[0].k
    degree = graph.adjacency.degree.numpy()
    label = None if graph.y is None else graph.y.numpy()
    mask = graph.test_mask
    scored = np.arange(graph.num_nodes) if mask is None else mask.nonzero().flatten().numpy()
    centre = choose.telling_node(seen, degree, label, scored, k) if node is None else node
    close = [int(n) for n in subgraph(seen, graph, centre)["nodes"] if n < graph.num_nodes]
    priorities: list[tuple[str, list[int]]] = [
        ("around the one drawn above", [centre, *close]),
        ("that the attack changed directly", choose.attacked_nodes(seen)),
    ]
    priorities += [(f"that {one.name} predicts otherwise", choose.flipped_nodes(one, scored)) for one in seen]
    priorities += [(f"whose explanation {p.name} loses most", p.worst(choose.WORST)) for p in parts]
    choice = choose.choose(graph.num_nodes, priorities, degree, models=len(seen))
    around = neighbourhoods(seen, choice.nodes, k)
    joined = {int(n) for one in seen for n in one.ends}
    models = []
    for spot, one in enumerate(seen):
        part = next(p for p in parts if p.name == one.name)
        changed = np.isin(choice.nodes, one.changed).astype(int).tolist() if one.changed.size else None
        models.append(
            {
                "name": one.name,
                **recorded(part.arrays, choice.nodes),
                **predictions(one, choice.nodes),
                **around["models"][spot],
                "changed": changed,
                "radii": radii(part.layers, choice.nodes) if part.layers else None,
                "injections": of_nodes(part.injections, choice.nodes),
            }
        )
    listed = {n for row in around["neighbours"] for n in row if n < graph.num_nodes}
    return {
        "k": k,
        "unit": UNIT,
        "total": graph.num_nodes,
        "words": choice.words(graph.num_nodes),
        "nodes": {
            **facts(graph, choice.nodes, node_names),
            "neighbours": around["neighbours"],
            "rest": around["rest"],
            "truth": _truth(graph, choice.nodes, around["neighbours"]),
            "joined": [int(n in joined) for n in choice.nodes],
        },
        "around": _around(graph, sorted(listed | set(close)), node_names),
        "models": models,
    }


def nodes_of_records(parts: Sequence[Part], node: int | None) -> dict[str, Any] | None:
    """What can be said of single nodes without models: predictions and overlaps, no neighbours.

    None where the records carry no per-node values.
    """
    k = parts[0].k
    told = [part for part in parts if "degree" in part.arrays]
    if not told:
        return None
    first = told[0].arrays
    degree = first["degree"].astype(np.int64)
    priorities: list[tuple[str, list[int]]] = [("asked for", [] if node is None else [node])]
    priorities += [(f"whose explanation {p.name} loses most", p.worst(choose.WORST)) for p in told]
    choice = choose.choose(degree.size, priorities, np.zeros_like(degree))
    index = np.asarray(choice.nodes)
    return {
        "k": k,
        "unit": UNIT,
        "total": int(degree.size),
        "words": choice.words(int(degree.size)),
        "nodes": {
            "id": choice.nodes,
            "name": None,
            "label": first["label"][index].tolist() if "label" in first else None,
            "degree": degree[index].tolist(),
        },
        "models": [
            {
                "name": part.name,
                **recorded(part.arrays, choice.nodes),
                "radii": radii(part.layers, choice.nodes) if part.layers else None,
            }
            for part in told
        ],
    }


def _around(graph: Graph, nodes: list[int], names: Names | None) -> dict[str, Any]:
    """Names and classes of all nodes the page mentions, by number."""
    known = facts(graph, nodes, names)
    return {
        "id": nodes,
        "name": known["name"],
        "label": known["label"],
    }


def _truth(graph: Graph, nodes: Sequence[int], neighbours: list[list[int]]) -> list[list[int]] | None:
    """Per listed neighbour, whether the edge belongs to the true explanation."""
    if graph.edge_truth is None:
        return None
    rowptr, source = graph.adjacency.rowptr.numpy(), graph.adjacency.source.numpy()
    truth = graph.edge_truth.numpy()
    out = []
    for node, listed in zip(nodes, neighbours, strict=True):
        part = slice(int(rowptr[node]), int(rowptr[node + 1]))
        good = set(source[part][truth[part]].tolist())
        out.append([int(n in good) for n in listed])
    return out
