"""How cost grows with the graph: a layer, an epoch vanilla and faithful, an attack, an evaluation.

Every node has 16 neighbours on average, drawn with skewed degrees (a few nodes get thousands), and 64 dense
features; the model is a GAT of two layers, eight heads of eight. The slope of log time over log edges is
fitted over the larger sizes (`--fit-from`): 1 is linear. Run:

    python benchmarks/scaling.py --device cpu --edges 1e4 1e5 1e6 1e7
    python benchmarks/scaling.py --device cuda --edges 1e5 1e6 1e7 1e8 --figure docs/images/scaling.png
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from common import Peak, arguments, epoch_cost, growth, median_seconds, show

from fgai import evaluate
from fgai.attacks import make_attack
from fgai.graph import Graph
from fgai.models import GAT
from fgai.models.layer import AttentionLayer
from fgai.reports.figures import style
from fgai.sparse import Adjacency, Features, edge_keys
from fgai.trackers import Tracker
from fgai.training import FaithfulSettings, VanillaRecipe
from fgai.training.faithful import FaithfulRecipe

WAYS = ("vanilla", "fgai", "layer", "attack", "evaluation")
DEGREE, WIDTH, CLASSES = 16, 64, 8


def synthetic(edges: int, device: str) -> Graph:
    """An undirected graph of about `edges` directed edges with self-loops, features, labels and masks."""
    generator = torch.Generator(device=device).manual_seed(0)
    nodes = max(64, edges // DEGREE)
    count = (edges - nodes) // 2
    # Squares of uniform numbers crowd at the low end: a few nodes get thousands of edges.
    ends = (torch.rand(2, count, generator=generator, device=device, dtype=torch.float64) ** 2 * nodes).long()
    loops = torch.arange(nodes, device=device).expand(2, nodes)
    both = torch.cat([ends, ends.flip(0), loops], 1)
    del ends
    keys = torch.unique(edge_keys(both[0], both[1]))
    del both
    adjacency = Adjacency.from_sorted(keys & 0xFFFFFFFF, keys >> 32, nodes)
    x = torch.randn(nodes, WIDTH, generator=generator, device=device)
    y = torch.arange(nodes, device=device) % CLASSES
    part = torch.arange(nodes, device=device) % 10
    graph = Graph(adjacency, Features.dense(x), y, part < 6, part == 6, part > 6, name=f"{edges:.0e} edges")
    graph.__dict__["has_loops"] = True
    return graph


def once(way: str, graph: Graph, model: GAT) -> Callable[[], object]:
    """Return a layer forward and backward, the attack of the threat `standard`, or its evaluation."""
    if way == "layer":
        layer, x = AttentionLayer(WIDTH, 8, 8).to(graph.device), graph.features.to_dense().requires_grad_()
        return lambda: layer(x, graph.adjacency).sum().backward()
    if way == "attack":
        return lambda: make_attack("standard").run(model, graph)
    return lambda: evaluate(model, graph, "standard", curves=False, nulls=False, explanation_attack=False)


def measure(way: str, graph: Graph, epochs: int, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = GAT(WIDTH, CLASSES, hidden_channels=8, heads=8).to(device)
    if way not in ("vanilla", "fgai"):
        step = once(way, graph, model.eval())
        with Peak(device) as memory:
            seconds = median_seconds(step, 5 if way == "layer" else 1, device, warm_up=1)
        return {"edges": graph.num_edges, "seconds": seconds, "bytes": memory.above}
    recipe: object = VanillaRecipe(graph)
    if way == "fgai":
        recipe = FaithfulRecipe(
            GAT(WIDTH, CLASSES, hidden_channels=8, heads=8).to(device).eval(), graph, FaithfulSettings()
        )
    # Captured epochs are read 32 at a time; on large graphs after each one, which costs nothing there.
    options = {"tracker": Tracker()} if graph.num_edges > 3e7 else {}
    return {"edges": graph.num_edges, **epoch_cost(model, recipe, epochs, device, **options)}


def slope(found: list[dict[str, float]], fit_from: float) -> float:
    """The slope of log seconds over log edges for sizes from `fit_from` on."""
    used = [one for one in found if one["edges"] >= 0.5 * fit_from]
    return growth([one["edges"] for one in used], [one["seconds"] for one in used])


def draw(results: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    """One panel per device: seconds over edges, a line of slope 1 beside."""
    with style.new_figure(3.4 * len(results) + 0.4, 2.9) as figure:
        panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
        for axes, (device, ways) in zip(panels, results.items(), strict=True):
            for index, way in enumerate(WAYS[:2]):
                found = ways[way]
                edges, seconds = [f["edges"] for f in found], [f["seconds"] for f in found]
                axes.plot(
                    edges,
                    seconds,
                    color=style.COLOURS[index],
                    linestyle=style.LINES[index],
                    marker=style.MARKERS[index],
                    label={"vanilla": "vanilla", "fgai": "FGAI"}[way],
                )
            last = ways["vanilla"][-1]
            line = [found["edges"] / last["edges"] * last["seconds"] for found in ways["vanilla"]]
            axes.plot([f["edges"] for f in ways["vanilla"]], line, color=style.FAINT, lw=0.8, label="linear")
            axes.set(xscale="log", yscale="log", xlabel="edges", title=device)
        panels[0].set_ylabel("seconds per epoch")
        panels[0].legend(loc="upper left")
        style.footnote(figure, "GAT, two layers, eight heads of eight; 16 neighbours a node, skewed degrees.")
    style.save(figure, path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--edges", nargs="+", type=float, default=[1e4, 1e5, 1e6, 1e7])
    parser.add_argument(
        "--fit-from", type=float, help="smallest size in the fit; default: 100th of the largest"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", type=Path, help="read what is there, add this device's results")
    parser.add_argument("--figure", type=Path, help="draw all results of --json, or these")
    parser.add_argument("--name", help="the device in the figure, e.g. 'H200' or 'two cores'")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing, draw --json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if not args.draw_only:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        for edges in sorted(args.edges):
            graph = synthetic(int(edges), args.device)
            for way in args.ways:
                found[way].append(measure(way, graph, args.epochs, args.device))
                gc.collect()
                results.setdefault(args.name or args.device, {}).update({way: found[way]})
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1) + "\n")
            del graph
        fit_from = args.fit_from or max(args.edges) / 100
        rows = [
            [f"{each[0]['edges']:.3g}"]
            + [f"{one['seconds'] * 1e3:.2f} ms, {one['bytes'] / 2**20:.0f} MiB" for one in each]
            for each in zip(*found.values(), strict=True)
        ]
        show(f"Cost growth, {args.device}", ["edges", *args.ways], rows)
        slopes = ", ".join(f"{way} {slope(found[way], fit_from):.2f}" for way in args.ways)
        print(f"slope of log time over log edges from {fit_from:.0e} edges on: {slopes}")
    if args.figure:
        draw(results, args.figure)


if __name__ == "__main__":
    main()
