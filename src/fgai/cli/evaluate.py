"""`fgai evaluate`: one model under one threat, measured as the protocol says."""

from __future__ import annotations

from typing import Annotated

import typer

from fgai.attacks import threat_of
from fgai.cli import options
from fgai.cli.files import checked_output, open_model
from fgai.cli.output import Output, command
from fgai.evaluation import evaluate as evaluate_model
from fgai.training import load_model

Curves = Annotated[
    bool, typer.Option("--curves/--no-curves", help="Remove edges by rank and measure F-slopes; slower.")
]
Nulls = Annotated[
    bool, typer.Option("--nulls/--no-nulls", help="Also measure attention that says nothing; slower.")
]
PerNode = Annotated[bool, typer.Option("--per-node", help="Keep the values of every node in the record.")]


@command
def evaluate(
    model: options.ModelFile,
    *,
    vanilla: options.VanillaFile = None,
    threat: options.Threat = "standard",
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    k: options.K = 5,
    seed: options.Seed = 0,
    curves: Curves = True,
    nulls: Nulls = True,
    per_node: PerNode = False,
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: options.Record = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack a model and measure how its predictions and its attention hold.

    Examples:
    - `fgai evaluate gat.safetensors`
    - `fgai evaluate faithful-gat.safetensors --vanilla gat.safetensors --threat ensemble -o claim.json`
    - `fgai evaluate club.safetensors --nodes 2 --edges 2`
    """
    out = Output(json, quiet)
    chosen = threat_of(threat).sized(nodes, edges)
    opened = open_model(model, dataset, root, device)
    plain = None if vanilla is None else load_model(vanilla).to(device)
    path = None if output is None else checked_output(output)
    out.say(f"evaluating {model} on {opened.graph!r}, threat {threat}")
    record = evaluate_model(
        opened.model,
        opened.graph,
        chosen,
        vanilla=plain,
        seed=seed,
        name=model.stem,
        k=k,
        curves=curves,
        nulls=nulls,
        per_node=per_node,
    )
    if path is not None:
        out.say(f"written to {record.save(path)}")
    out.result(record.to_dict(), record.show)
