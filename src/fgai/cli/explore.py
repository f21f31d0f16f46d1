"""`fgai explore`: the what-if page, served on this machine only."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from fgai.cli import options
from fgai.cli.files import _open_models
from fgai.cli.output import Output, command

CERTIFIED = 20_000
"""Nodes up to which models are certified before the page opens."""


@command
def explore(
    models: Annotated[
        list[str], "Models to look at, e.g. vanilla and faithful.", typer.Argument(metavar="[NAME=]MODEL...")
    ],
    *,
    node: options.PageNode = None,
    k: options.K = 5,
    open_: options.Open = False,
    own: options.OwnModel,
    out: Output,
) -> None:
    """Serve a page on which you change the graph around a node and see its attention and class change.

    It listens on 127.0.0.1 under a random address until Ctrl-C, and writes nothing.

    Examples:
    - `fgai explore GAT=planted-gat FGAI=planted-fgai --open`
    - `fgai explore weights.pt --model mine:Model --data graph`
    """
    from fgai.reports.whatif import Server, WhatIf

    _, networks, graph = _open_models(models, own)
    answers = WhatIf(networks, graph, k=k)
    start = None if node is None else graph.number_of(node)
    certified = {}
    if graph.num_nodes <= CERTIFIED:
        out.say("certifying against injected neighbours")
        certified = answers.certify()
    with Server(answers, answers.facts(node=start, certified=certified)) as server:
        out.result({"command": "explore", "address": server.address}, f"open {server.address}")
        out.say("Ctrl-C ends it")
        if open_:
            webbrowser.open(server.address)
        try:
            server.serve()
        except KeyboardInterrupt:
            out.say("ended")
