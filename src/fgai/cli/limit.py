"""`fgai limit`: a copy of a trained model in which no node can say what none has said."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fgai.cli import options
from fgai.cli.files import checked_output, open_model, scores, write_model
from fgai.cli.output import Output, command
from fgai.errors import InputError
from fgai.tasks import get_task
from fgai.training import clipped
from fgai.training import limit as with_limits


@command
def limit(
    model: options.ModelFile,
    *,
    cut: Annotated[
        str, typer.Option(help="Share of the nodes left out at either end of each range, or `auto`.")
    ] = "0",
    soften: Annotated[
        float, typer.Option(help="Share of the nodes, the loudest, drawn to the loudness of the rest.")
    ] = 0.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; limited-NAME by default.")
    ] = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Limit what nodes can say to a model to what they said on the graph it was made for; no training.

    With the defaults nothing changes on that graph. Nodes that are added later are heard no louder than
    honest ones.

    Examples:
    - `fgai limit gat.safetensors`
    - `fgai limit gat.safetensors --cut auto --soften 0.1 --output limited.safetensors`
    """
    out = Output(json, quiet)
    opened = open_model(model, None, root, device)
    path = checked_output(output or model.with_name(f"limited-{model.name}"))
    share = _share(cut)
    limited = with_limits(opened.model, opened.graph, share, soften=soften)
    moved = clipped(limited, opened.graph)
    about = {**opened.about, "settings": {"cut": share, "soften": soften}, "vanilla": str(model)}
    path = write_model(limited, path, opened.graph, about)
    found, before = scores(limited, opened.graph), scores(opened.model, opened.graph)
    measure = get_task(about.get("task", "node")).headline
    values = {
        "command": "limit",
        "output": str(path),
        "model": type(limited).__name__,
        **about,
        measure: found,
        f"{measure}_before": before,
        "clipped": moved.count,
        "clipped_share": moved.share,
    }

    def show(console: Console) -> None:
        for part, value in found.items():
            console.print(f"{measure} {part}: {before[part]:.3f} before, {value:.3f} behind limits")
        console.print(f"{moved.count} of {moved.total} numbers clipped on this graph ({moved.share:.2%})")
        console.print(f"written to {path}", markup=False, soft_wrap=True)

    out.result(values, show)


def _share(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`cut` must be a number or `auto`, got {text!r}") from None
