"""`fgai audit`: a model and a graph of your own, from files to the page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fgai.attacks import threat_of
from fgai.attention import model_name
from fgai.checks import device as checked_device
from fgai.cli import options
from fgai.cli.files import checked_output, parsed_box
from fgai.cli.output import Output, command
from fgai.cli.report import tell_page
from fgai.datasets import load_graph
from fgai.evaluation import EvaluationRecord
from fgai.training import load_model, make_model
from fgai.version import stating

UNTRAINED = "untrained weights: the model is as its function made it, no --weights were given"


@command
def audit(
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="What makes your model, package.module:function; imported and called.",
        ),
    ],
    data: Annotated[Path, typer.Option("--data", help="Your graph: .npz, .pt or an edge list as .csv.")],
    weights: Annotated[
        Path | None,
        typer.Option("--weights", "-w", help="Its weights, .safetensors; without them it is as it was made."),
    ] = None,
    node_table: Annotated[
        Path | None,
        typer.Option("--node-table", help="Features, classes and split of the nodes, with .csv."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--out", "--output", "-o", help="The page; the document it is made of is beside it."),
    ] = Path("audit.html"),
    open_: options.Open = False,
    node: options.PageNode = None,
    threat: options.Threat = "standard",
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    k: options.K = 5,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack, measure and certify a PyG model of your own on your own graph, and write one page.

    The model is made by a function or class of yours, looked for here and on the Python path; a call of its
    own it brings along with `fgai.wrap`. Nothing in the files is run: weights are safetensors, a `.pt` is
    read by PyTorch's restricted loader. `fgai.load_graph` tells how files are laid out.

    Examples:
    - `fgai audit --model mine.models:make --weights mine.safetensors --data mine.npz --out page.html`
    - `fgai audit --model mine.models:make --data edges.csv --node-table nodes.csv --nodes 2 --edges 3`
    """
    from fgai.reports import report
    from fgai.reports.page import checked_page

    out = Output(json, quiet)
    chosen = threat_of(threat).sized(nodes, edges, parsed_box(box))  # bad input first
    page = checked_output(checked_page(output))
    place = checked_device(device)
    graph = load_graph(data, node_table).to(place)
    _look_here()
    found = (make_model(model).eval() if weights is None else load_model(weights, factory=model)).to(place)
    name = model_name(found)
    out.say(f"auditing {name} on {graph!r}, threat {threat}")
    given: dict[str, Any] = {"model": model, "weights": weights, "data": data, "node-table": node_table}
    given |= {"threat": threat, "nodes": nodes, "edges": edges, "box": box, "k": k, "seed": seed}
    given |= {"node": node}
    facts = {} if weights is not None else {"note": UNTRAINED}
    for text in facts.values():
        out.warn(text)
    with stating(**facts):
        made = report(
            {name: found},
            graph,
            page,
            threat=chosen,
            k=k,
            seed=seed,
            node=node,
            reproduce=[_line(given, page)],
            on_step=out.say,
        )
    record = EvaluationRecord.from_dict({**made.records[0], "per_node": {}})  # which the page has elsewhere
    tell_page(
        out, made, page, open_=open_, command="audit", above=record.show, metrics=record.to_dict()["metrics"]
    )


def _look_here() -> None:
    """Let modules of the current folder be imported, after all others; `python -m fgai` does so anyway."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def _line(given: dict[str, Any], page: Path) -> str:
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["fgai", "audit", *words, "--out", str(page)])
