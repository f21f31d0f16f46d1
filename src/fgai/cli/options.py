"""Options that several commands share, spelled and explained once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fgai.attacks import THREATS
from fgai.models import MODELS


def listed(names: Iterable[str]) -> str:
    """Return names as `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output instead of tables.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.")]
Dataset = Annotated[
    str,
    typer.Option("--dataset", "-d", help="Name of a dataset, see `fgai data list`, or a converted folder."),
]
Task = Annotated[
    str | None,
    typer.Option("--task", help="node, link or graph; what the dataset is made for by default."),
]
OtherDataset = Annotated[
    str | None, typer.Option("--dataset", "-d", help="Another dataset than the one the model was trained on.")
]
Root = Annotated[
    Path | None, typer.Option("--root", help="Folder with the datasets' files; $FGAI_DATA by default.")
]
Device = Annotated[
    str, typer.Option("--device", help="Where to compute: cpu, cuda, or cuda:1 for the second GPU.")
]
Model = Annotated[str, typer.Option("--model", "-m", help=f"Architecture: {listed(MODELS)}.")]
ModelFile = Annotated[
    Path,
    typer.Argument(
        help="A model written by `fgai train` or `fgai faithful`, or one that comes with fgai: planted-gat,"
        " planted-fgai, cora-gat, cora-fgai."
    ),
]
VanillaFile = Annotated[
    Path | None, typer.Option("--vanilla", help="The model it was made from, to measure similarity to.")
]
Seed = Annotated[int, typer.Option("--seed", "-s", min=0, help="Draws whatever is random.")]
Threat = Annotated[
    str,
    typer.Option(
        "--threat",
        "-t",
        help=f"{listed(THREATS)}. standard is fast and weak: a claim needs ensemble, minutes on a CPU.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="Nodes the attack injects; the threat's own number by default."),
]
Edges = Annotated[
    int | None,
    typer.Option(
        "--edges", min=1, help="Edges of each injected node, or in all where none is injected; likewise."
    ),
]
Box = Annotated[
    str | None,
    typer.Option(
        "--box",
        metavar="LOW,HIGH",
        help="Smallest and largest value that features of injected nodes may have, e.g. 0,1; by default what"
        " each feature has in the data, and a tenth of its range more on both sides.",
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page when done.")]
PageNode = Annotated[int | None, typer.Option("--node", "-n", min=0, help="Node the page opens with.")]
K = Annotated[int, typer.Option("--k", "-k", min=1, help="Neighbours in a node's explanation.")]
Epochs = Annotated[
    int | None, typer.Option("--epochs", min=1, help="Training epochs; the default of the method otherwise.")
]
Rate = Annotated[
    float | None, typer.Option("--lr", help="Learning rate; the default of the method otherwise.")
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Train in mini-batches of so many nodes; a converted folder is then never loaded whole.",
    ),
]
FanOut = Annotated[
    str | None,
    typer.Option(
        "--fan-out", help="Neighbours drawn of each node: one number or one per layer (10,5), -1 for all."
    ),
]
EpochSize = Annotated[
    int | None,
    typer.Option(
        "--epoch-size", min=1, help="Nodes of an epoch of mini-batches, drawn anew for each; all otherwise."
    ),
]
Log = Annotated[
    str | None,
    typer.Option(
        "--log",
        help="Also log every epoch: FILE.csv, FILE.jsonl, tensorboard:FOLDER, wandb:PROJECT or mlflow:NAME.",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any other setting as NAME=VALUE; may be repeated.")
]
Record = Annotated[
    Path | None, typer.Option("--output", "-o", help="Also write the record to this JSON file.")
]
