"""`fgai faithful`: a faithful version of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fgai.cli import options
from fgai.cli.files import (
    check_split,
    checked_output,
    open_model,
    opened_log,
    parsed_box,
    parsed_fan_out,
    parsed_settings,
    resumable,
    scores,
    write_model,
)
from fgai.cli.output import Output, command
from fgai.cli.ranks import on_all_ranks
from fgai.cli.train import report
from fgai.processes import current
from fgai.training import make_faithful


@command
@on_all_ranks
def faithful(
    model: options.ModelFile,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; faithful-NAME by default.")
    ] = None,
    seed: options.Seed = 0,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Nodes its adversary injects; the preset's otherwise."),
    ] = None,
    edges: Annotated[
        int | None, typer.Option("--edges", min=1, help="Edges of each of them; the preset's otherwise.")
    ] = None,
    box: options.Box = None,
    batch_size: options.BatchSize = None,
    fan_out: options.FanOut = None,
    epoch_size: options.EpochSize = None,
    set_: options.Settings = None,
    log: options.Log = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a model faithful: attention that points at the same neighbours and stays put under attack.

    Labels are not used. Ctrl-C saves the training; the same command goes on with it. Under torchrun several
    processes share the mini-batches.

    Examples:
    - `fgai faithful gat.safetensors`
    - `fgai faithful gat.safetensors --epochs 100 --set similarity=4 --output fgai.safetensors`
    - `fgai faithful club.safetensors --nodes 2 --edges 2`
    - `fgai faithful large.safetensors --batch-size 1024 --fan-out 10,5 --epochs 20`
    """
    out = Output(json, quiet)
    neighbours = parsed_fan_out(fan_out)
    opened = open_model(model, None, root, device, stored=batch_size is not None)
    check_split(opened, seed)
    settings = parsed_settings(set_, opened.kind, "fgai")
    given = {"epochs": epochs, "lr": lr, "nodes": nodes, "edges": edges, "box": parsed_box(box)}
    settings |= {name: value for name, value in given.items() if value is not None}
    path = checked_output(output or model.with_name(f"faithful-{model.name}"))
    tracker = opened_log(log)
    out.say(f"making {model} faithful on {opened.graph!r}")
    with resumable(out, path) as folder:
        faithful = make_faithful(
            opened.model,
            opened.graph,
            seed=seed,
            progress=out.progress,
            checkpoint=folder,
            tracker=tracker,
            batch_size=batch_size,
            fan_out=neighbours,
            epoch_size=epoch_size,
            **settings,
        )
        about = {**opened.about, "method": "fgai", "seed": seed, "settings": settings, "vanilla": str(model)}
        sizes = {"batch_size": batch_size, "fan_out": fan_out, "epoch_size": epoch_size}
        about |= {} if batch_size is None else sizes
        path = write_model(faithful, path, opened.graph, about)
    if current().leads:
        report(out, "faithful", faithful, scores(faithful, opened.graph, seed), path, about)
