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
_DATA = (
    "a name of `fgai data list`, a graph of your own (.npz, .pt, edges.csv), or a folder: with edges.csv and"
    " nodes.csv, or as `fgai data convert` leaves it."
)
Data = Annotated[str, typer.Option("--data", "-d", help=f"The graph: {_DATA}")]
Task = Annotated[
    str | None,
    typer.Option("--task", help="node, link or graph; what the dataset is made for by default."),
]
OtherData = Annotated[
    str | None,
    typer.Option("--data", "-d", help=f"Another graph than the one the model was trained on: {_DATA}"),
]
Root = Annotated[
    Path | None, typer.Option("--root", help="Folder with the datasets' files; $FGAI_DATA by default.")
]
Device = Annotated[
    str, typer.Option("--device", help="Where to compute: cpu, cuda, or cuda:1 for the second GPU.")
]
Model = Annotated[str, typer.Option("--model", "-m", help=f"Architecture: {listed(MODELS)}.")]
ModelFile = Annotated[
    Path | None,
    typer.Argument(
        help="A model written by `fgai train` or `fgai faithful`, or one that comes with fgai: planted-gat,"
        " planted-fgai, cora-gat, cora-fgai. For your own give --model, --weights and --data instead.",
        show_default=False,
    ),
]
Own = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODULE:NAME",
        help="What makes a PyG model of your own: a class or function without arguments, looked for here and"
        " on the Python path, imported and called.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        "-w",
        help="With --model: its weights, .safetensors or a .pt with its state_dict; it is as it was made"
        " without them.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there already.")]
All = Annotated[bool, typer.Option("--all", "-a", help="Print every number, not only the summary.")]
VanillaFile = Annotated[
    Path | None, typer.Option("--vanilla", help="The model it was made from, to measure similarity to.")
]
Seed = Annotated[int, typer.Option("--seed", "-s", min=0, help="Draws whatever is random.")]
Threat = Annotated[
    str,
    typer.Option(
        "--threat",
        "-t",
        help=f"{listed(THREATS)}. ensemble is the strongest and takes minutes on a CPU; standard is the"
        " paper's, fast and weak.",
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
PageNode = Annotated[
    str | None, typer.Option("--node", "-n", help="Node the page opens with: its number or name.")
]
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
