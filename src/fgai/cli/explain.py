"""`fgai explain`: one node's explanation, and how far it can be trusted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fgai.attacks import make_attack
from fgai.certify import PROMISE
from fgai.certify import certify as certify_model
from fgai.cli import options
from fgai.cli.files import checked_output, open_model
from fgai.cli.output import Output, command
from fgai.graph import Graph

if TYPE_CHECKING:
    from fgai.figures import NodeView

BAR = 24


@command
def explain(
    model: options.ModelFile,
    *,
    node: Annotated[int, typer.Option("--node", "-n", min=0, help="Number of the node to explain.")],
    k: options.K = 5,
    layer: Annotated[
        str, typer.Option(help="Attention shown: mean, last or max over layers, or a layer's number.")
    ] = "mean",
    threat: Annotated[
        str, typer.Option("--threat", "-t", help="Attack to try the explanation with; `none` for no attack.")
    ] = "standard",
    seed: options.Seed = 0,
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw a picture: .png, .pdf or .svg.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show whom a node attends to, whether that survives an attack, and what is certified about it.

    Examples:
    - `fgai explain gat.safetensors --node 24`
    - `fgai explain gat.safetensors --node 24 --output node-24.png --threat strong`
    """
    from fgai import figures  # matplotlib is slow to import, and few commands need it

    out = Output(json, quiet)
    chosen: str | int = int(layer) if layer.lstrip("-").isdigit() else layer
    opened = open_model(model, dataset, root)
    path = None if output is None else checked_output(output)
    view = figures.look(opened.model, opened.graph, layer=chosen).node(node)
    values = describe(view, k)
    if threat != "none":
        values["attacked"] = _under_attack(opened.model, opened.graph, view, threat, k, seed, chosen)
    values["certified"] = _certified(opened.model, opened.graph, node, k)
    if path is not None:
        figures.save(figures.node_attention(opened.model, opened.graph, node, layer=chosen), path)
        out.say(f"picture written to {path}")
    values = {
        "command": "explain",
        "model": str(model),
        "dataset": opened.graph.name,
        "layer": layer,
        **values,
    }
    out.result(values, lambda console: _show(console, values))


def describe(view: NodeView, k: int) -> dict[str, Any]:
    """What a view says of a node, as plain values."""
    neighbours = [
        {
            "node": neighbour,
            "attention": weight,
            "itself": neighbour == view.node,
            "injected": neighbour >= view.num_original,
            "informative": None if view.informative is None else view.informative[rank],
        }
        for rank, (neighbour, weight) in enumerate(zip(view.neighbours, view.weights, strict=True))
    ]
    return {
        "node": view.node,
        "predicted": view.predicted,
        "confidence": view.confidence,
        "label": view.label,
        "k": k,
        "neighbours": neighbours,
    }


def _under_attack(
    model: nn.Module, graph: Graph, clean: NodeView, threat: str, k: int, seed: int, layer: str | int
) -> dict[str, Any]:
    """The same node after the attack: prediction, and who is left of the top-k among the original edges."""
    from fgai.figures import look

    result = make_attack(threat, "prediction", k=k).run(model, graph, seed=seed)
    after = look(model, result.graph, layer=layer, original=graph.num_nodes).node(clean.node)
    kept = [n for n in after.neighbours if n < graph.num_nodes][:k]
    top = clean.neighbours[:k]
    return {
        "threat": threat,
        "predicted": after.predicted,
        "confidence": after.confidence,
        "kept": sorted(set(top) & set(kept)),
        "overlap": len(set(top) & set(kept)) / max(1, len(top)),
        "new_neighbours": sum(n >= graph.num_nodes for n in after.neighbours),
    }


def _certified(model: nn.Module, graph: Graph, node: int, k: int) -> dict[str, Any]:
    """Radii of one node, per layer; None where nothing is known or nothing can change."""
    record = certify_model(model, graph, radius=0.0, k1=k, k2=k)
    layers = [
        {
            "layer": layer.name,
            "topk_radius": _number(layer.topk_radius, node),
            "class_radius": _number(layer.prediction.class_radius, node),
            "class_status": layer.prediction.class_status,
        }
        for layer in record.layers
    ]
    return {"norm": record.norm, "k": k, "layers": layers, "promise": PROMISE}


def _number(values: Tensor | None, node: int) -> float | None:
    value = math.nan if values is None else float(values[node])
    return value if math.isfinite(value) else None


def _show(console: Console, values: dict[str, Any]) -> None:
    truth = "" if values["label"] < 0 else f" (truth: {values['label']})"
    console.print(
        f"[bold]node {values['node']}[/] of {values['dataset']}: class {values['predicted']},"
        f" {100 * values['confidence']:.0f} %{truth}"
    )
    attacked = values.get("attacked")
    kept = set(attacked["kept"]) if attacked else set()
    told = any(entry["informative"] is not None for entry in values["neighbours"])
    table = Table(box=None, padding=(0, 1))
    for heading in (
        "neighbour",
        "attention",
        "",
        *(["explains"] if told else []),
        *(["stays"] if attacked else []),
    ):
        table.add_column(heading, justify="right" if heading == "attention" else "left")
    most = max((entry["attention"] for entry in values["neighbours"]), default=1.0)
    for rank, entry in enumerate(values["neighbours"][: max(values["k"], 10)]):
        name = "itself" if entry["itself"] else str(entry["node"])
        cells = [name, f"{entry['attention']:.3f}", "█" * max(1, round(BAR * entry["attention"] / most))]
        if told:
            cells.append("yes" if entry["informative"] else "")
        if attacked:
            cells.append(("yes" if entry["node"] in kept else "no") if rank < values["k"] else "")
        table.add_row(*cells, style="" if rank < values["k"] else "dim")
    console.print(table)
    hidden = len(values["neighbours"]) - max(values["k"], 10)
    if hidden > 0:
        console.print(f"and {hidden} others", style="dim")
    if attacked:
        moved = "" if attacked["predicted"] == values["predicted"] else ", another one"
        console.print(
            f"under the {attacked['threat']} attack: class {attacked['predicted']}"
            f" ({100 * attacked['confidence']:.0f} %){moved}; {len(kept)} of the top"
            f" {min(values['k'], len(values['neighbours']))} stay"
        )
    _show_certified(console, values["certified"])


def _show_certified(console: Console, certified: dict[str, Any]) -> None:
    for layer in certified["layers"]:
        top, kind = layer["topk_radius"], layer["class_radius"]
        parts = [
            f"top-{certified['k']} cannot change below {top:.4f}"
            if top is not None
            else "top-k: nothing to lose",
            f"class below {kind:.4f} ({layer['class_status']})" if kind is not None else "class: unknown",
        ]
        console.print(f"{layer['layer']}, {certified['norm']} ball: {'; '.join(parts)}", markup=False)
    console.print(certified["promise"], style="dim", markup=False)
