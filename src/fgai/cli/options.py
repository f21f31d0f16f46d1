"""Options of several commands, groups of options that a command takes as one argument, and checks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from fgai.attacks import DEFAULT, THREATS, Threat, threat_of
from fgai.cli.output import Output
from fgai.errors import FgaiError, InputError
from fgai.files import is_stream, write_atomic
from fgai.models import MODELS
from fgai.processes import current

__all__ = ["Epochs", "Seed", "check_folder", "check_output", "choices"]  # for commands outside the package

P = TypeVar("P", bound=Path | None)


def choices(names: Iterable[str]) -> str:
    """Return names as `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


_DATA = (
    "a name of `fgai data list`, a graph of your own (.npz, .pt, edges.csv), or a folder: with edges.csv and"
    " nodes.csv, or as `fgai data convert` leaves it."
)
Count = Annotated[int | None, typer.Option(min=1)]
Data = Annotated[str, f"The graph: {_DATA}", "-d"]
Root = Annotated[Path | None, "Folder with the datasets' files; $FGAI_DATA by default."]
Model = Annotated[str, f"Architecture: {choices(MODELS)}.", "-m"]
Force = Annotated[bool, "Replace existing files."]
All = Annotated[bool, "Print every number, not only the summary.", "-a"]
VanillaFile = Annotated[Path | None, "The model it was made from, to measure similarity to."]
Seed = Annotated[int, "Draws whatever is random.", "-s", typer.Option(min=0)]
K = Annotated[int, "Neighbours in a node's explanation.", "-k", typer.Option(min=1)]
Open = Annotated[bool, "Open the page when done."]
PageNode = Annotated[str | None, "Node the page opens with: its number or name.", "-n"]
Counterfactual = Annotated[
    bool, "Also search for few neighbours to remove, or to inject, so that the class of the node changes."
]
Epochs = Annotated[Count, "Training epochs; the default of the method otherwise."]
Box = Annotated[
    str | None,
    "Smallest and largest value that features of injected nodes may have, e.g. 0,1; by default what each"
    " feature has in the data, and a tenth of its range more on both sides.",
    typer.Option(metavar="LOW,HIGH"),
]
Log = Annotated[str | None, "Also log every epoch: FILE.csv or FILE.jsonl."]


def parse_box(text: str | None) -> tuple[float, float] | None:
    """Return the two numbers of `--box`."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = 0.0, 0.0
    if not -inf < low < high < inf:
        raise InputError(f"`--box` takes two numbers, the smaller first, like -1,1, got {text!r}")
    return low, high


def named_files(words: Iterable[str], kind: str) -> dict[str, Path]:
    """Return the files of `[NAME=]FILE` words by name, that of the file by default."""
    named: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.rpartition("=")
        name = name if equals else Path(path).stem.removeprefix("certificate-")
        if name in named:
            raise InputError(f"two {kind} are called {name!r}; tell them apart with NAME=FILE")
        named[name] = Path(path)
    return named


def check_output(path: P, force: bool = False) -> P:
    """Return `path`; raise `FgaiError`, before any long work, if a file cannot be written there.

    An existing file is only replaced with `force`.
    """
    if path is None or not current().is_main:  # nothing is written
        return path
    if path.is_dir():
        raise FgaiError(f"cannot write {path}: it is a folder; name a file in it")
    if is_stream(path):
        return path
    if path.exists() and not force:
        raise FgaiError(f"{path} exists; add --force to replace it, or name another file")
    check_folder(Path(os.path.realpath(path)).parent)
    return path


def check_folder(path: Path) -> Path:
    """Return a folder, made if needed; raise `FgaiError` if files cannot be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise FgaiError(f"cannot write to {path}: {error.strerror or error}; choose another place") from error
    return path


@dataclass(frozen=True)
class Location:
    """The folder of datasets and the device."""

    root: Root = None
    device: Annotated[str, "Where to compute: cpu, cuda, or cuda:1 for the second GPU."] = "cpu"


@dataclass(frozen=True)
class OwnModel(Location):
    """A model of the user's own and its graph; neither is needed if the file of a model names them."""

    own: Annotated[
        str | None,
        "A class or function without arguments that returns a PyG model of your own; imported from here or"
        " the Python path, and called.",
        typer.Option("--model", "-m", metavar="MODULE:NAME"),
    ] = None
    data: Annotated[str | None, f"Another graph than the one the model was trained on: {_DATA}", "-d"] = None


@dataclass(frozen=True)
class Source(OwnModel):
    """A model, from its file or made by the user's own code, and its graph."""

    model: Annotated[
        Path | None,
        "A model written by `fgai train` or `fgai faithful`, or one that comes with fgai: planted-gat,"
        " planted-fgai, cora-gat, cora-fgai. For your own give --model, --weights and --data instead.",
        typer.Argument(show_default=False),
    ] = None
    weights: Annotated[
        Path | None,
        "With --model: its weights, .safetensors or a .pt with its state_dict; without them the model keeps"
        " its initial weights.",
        "-w",
    ] = None


@dataclass(frozen=True)
class Attacker:
    """A threat with its size, the k of explanations, and the seed."""

    threat: Annotated[
        str,
        f"{choices(THREATS)}. ensemble is the strongest and takes minutes on a CPU; standard is the paper's,"
        " fast and weak.",
        "-t",
    ] = DEFAULT
    nodes: Annotated[Count, "Nodes the attack injects; the threat's own number by default."] = None
    edges: Annotated[Count, "Edges of each injected node, or in all where none is injected; likewise."] = None
    box: Box = None
    k: K = 5
    seed: Seed = 0

    def sized(self) -> Threat:
        """Return the threat with the size that the options set."""
        return threat_of(self.threat).sized(self.nodes, self.edges, parse_box(self.box))

    @property
    def is_sized(self) -> bool:
        """Whether any option changes the threat's size."""
        return (self.nodes, self.edges, self.box) != (None, None, None)


@dataclass(frozen=True)
class Evaluation(Attacker):
    """A threat, the slow parts of an evaluation, and how much of it is stored and printed."""

    curves: Annotated[bool, "Remove edges by rank and measure F-slopes; slower."] = True
    nulls: Annotated[bool, "Also measure random and uniform attention; slower."] = True
    per_node: Annotated[bool, "Keep the values of every node in the record."] = False
    all_: All = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `fgai.evaluate` besides models and threat."""
        return {name: getattr(self, name) for name in ("k", "seed", "curves", "nulls", "per_node")}


@dataclass(frozen=True)
class Record:
    """Where the record of a command is written."""

    output: Annotated[Path | None, "Also write the record to this JSON file.", "-o"] = None
    force: Force = False

    def check(self) -> None:
        """Raise if the record cannot be written."""
        check_output(self.output, self.force)

    def write(self, out: Output, record: Any, show: Callable[[Console], None] | None = None) -> None:
        """Print a record, or plain values that `show` prints, and write it if a file is named."""
        plain = isinstance(record, dict)
        if self.output is not None:
            if plain:
                write_atomic(self.output, json.dumps(record, indent=1) + "\n")
            else:
                record.save(self.output)
            out.say(f"written to {self.output}")
        out.result(record if plain else record.to_dict(), show or record.show)


@dataclass(frozen=True)
class Training:
    """Settings of a training, with its seed, batches, log and output."""

    output: Annotated[Path | None, "File to write; named after method and model by default.", "-o"] = None
    force: Force = False
    seed: Seed = 0
    epochs: Epochs = None
    lr: Annotated[float | None, "Learning rate; the default of the method otherwise."] = None
    box: Box = None
    batch_size: Annotated[
        Count, "Train in mini-batches of so many nodes; a converted folder is then never loaded whole."
    ] = None
    fan_out: Annotated[
        str | None, "Neighbours drawn of each node: one number or one per layer (10,5), -1 for all."
    ] = None
    set_: Annotated[list[str] | None, "Any other setting as NAME=VALUE; may be repeated."] = None
    log: Log = None

    @property
    def batches(self) -> dict[str, Any]:
        """The size of a batch and `--fan-out`, one number or one per layer, as arguments of trainings."""
        if self.fan_out is None:
            return {"batch_size": self.batch_size, "fan_out": None}
        try:
            first, *others = map(int, self.fan_out.split(","))
        except ValueError:
            raise InputError(
                f"`--fan-out` takes whole numbers like 10 or 10,5, got {self.fan_out!r}"
            ) from None
        return {"batch_size": self.batch_size, "fan_out": (first, *others) if others else first}


@dataclass(frozen=True)
class Retraining(Training):
    """Settings of a further training of a model against an adversary."""

    nodes: Annotated[Count, "Nodes the adversary injects; 60 by default."] = None
    edges: Annotated[Count, "Edges of each of them; 20 by default."] = None
    check: Annotated[bool, "Attack the result on validation nodes; train once more if it is not stable."] = (
        True
    )
