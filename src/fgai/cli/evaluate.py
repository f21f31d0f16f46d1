"""`fgai evaluate`: one model under one threat, measured as the protocol says."""

from __future__ import annotations

from typing import Annotated

import typer

from fgai.attacks import threat_of
from fgai.cli import options
from fgai.cli.files import checked_output, open_model, parsed_box
from fgai.cli.output import Output, command
from fgai.cli.ranks import on_all_ranks
from fgai.errors import InputError
from fgai.evaluation import evaluate as evaluate_model
from fgai.large import StoredGraph, evaluate_store
from fgai.processes import current
from fgai.training import load_model

Curves = Annotated[
    bool, typer.Option("--curves/--no-curves", help="Remove edges by rank and measure F-slopes; slower.")
]
Nulls = Annotated[
    bool, typer.Option("--nulls/--no-nulls", help="Also measure attention that says nothing; slower.")
]
Stored = Annotated[
    bool,
    typer.Option(
        "--stored",
        help="Leave a converted folder on disk: exact values without an attack, and nothing is loaded whole.",
    ),
]
PerNode = Annotated[bool, typer.Option("--per-node", help="Keep the values of every node in the record.")]


@command
@on_all_ranks
def evaluate(
    model: options.ModelFile,
    *,
    vanilla: options.VanillaFile = None,
    threat: options.Threat = "standard",
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    k: options.K = 5,
    seed: options.Seed = 0,
    curves: Curves = True,
    nulls: Nulls = True,
    per_node: PerNode = False,
    stored: Stored = False,
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: options.Record = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack a model and measure how its predictions and its attention hold.

    With --stored there is no attack: F1, sharpness, and with --vanilla agreement, g-TVD and overlap; under
    torchrun several processes share the work.

    Examples:
    - `fgai evaluate gat.safetensors`
    - `fgai evaluate faithful-gat.safetensors --vanilla gat.safetensors --threat ensemble -o claim.json`
    - `fgai evaluate club.safetensors --nodes 2 --edges 2`
    - `fgai evaluate large.safetensors --stored --vanilla gat.safetensors`
    """
    out = Output(json, quiet)
    if current().several and not stored:
        raise InputError("an attack is the work of one process: leave torchrun out, or give `--stored`")
    chosen = threat_of(threat).sized(nodes, edges, parsed_box(box))
    opened = open_model(model, dataset, root, device, stored=stored)
    plain = None if vanilla is None else load_model(vanilla).to(device)
    path = None if output is None else checked_output(output)
    if stored:
        if not isinstance(opened.graph, StoredGraph):
            raise InputError(f"`--stored` is for converted folders, {opened.graph.name!r} is in memory")
        if path is not None or per_node or any(given is not None for given in (nodes, edges, box)):
            raise InputError(
                "`--stored` attacks nothing: leave out --output, --nodes, --edges, --box and --per-node"
            )
        found = evaluate_store(
            opened.model,
            opened.graph,
            vanilla=plain,
            k=k,
            seed=opened.about.get("split_seed", 0),
            together=True,
        )
        if current().leads:
            out.result({"command": "evaluate", **found.to_dict()}, found.show)
        return
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
