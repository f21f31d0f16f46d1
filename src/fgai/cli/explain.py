"""`fgai explain`: one node's explanation, and how far it can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fgai.attacks import make_attack, threat_of
from fgai.cli import options
from fgai.cli.files import checked_output, open_model, parsed_box
from fgai.cli.output import Output, command
from fgai.errors import InputError


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
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    seed: options.Seed = 0,
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw a picture: .png, .pdf or .svg.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show whom a node attends to, whether that survives an attack, and what is certified about it.

    The picture shows the same: attention before and after the attack, or alone with `--threat none`.

    Examples:
    - `fgai explain gat.safetensors --node 24`
    - `fgai explain gat.safetensors --node 24 --output node-24.png --threat strong`
    """
    from fgai.explanations import explain as explain_node
    from fgai.reports import figures  # matplotlib is slow to import, and few commands need it

    out = Output(json, quiet)
    chosen: str | int = int(layer) if layer.lstrip("-").isdigit() else layer
    sized = None if threat == "none" else threat_of(threat).sized(nodes, edges, parsed_box(box))
    if sized is None and any(given is not None for given in (nodes, edges, box)):
        raise InputError(
            "`nodes`, `edges` and `box` are those of an attack, and `--threat none` has none; leave them out"
        )
    opened = open_model(model, dataset, root, device)
    path = None if output is None else checked_output(output)
    out.say(f"explaining node {node} of {opened.graph!r}" + ("" if sized is None else f", threat {threat}"))
    common: dict[str, Any] = {"k": k, "layer": chosen, "seed": seed}
    explain_node(
        opened.model, opened.graph, node, **common, threat=None, certificate=False
    )  # bad input first
    attack = None
    if sized is not None:
        attack = make_attack(sized, k=k).run(opened.model, opened.graph, seed=seed)
    found = explain_node(opened.model, opened.graph, node, **common, threat=sized, attack=attack)
    if path is not None:
        if attack is None:
            picture = figures.node_attention(opened.model, opened.graph, node, layer=chosen)
        else:
            case = figures.Case(opened.kind, opened.model, attack)
            picture = figures.node_before_after([case], opened.graph, node, layer=chosen)
        figures.save(picture, path)
        out.say(f"picture written to {path}")
    out.result(found.to_dict(), found.show)
