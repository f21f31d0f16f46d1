"""`fgai certify`: what no perturbation of the attention within a radius can do."""

from __future__ import annotations

from typing import Annotated

import typer

from fgai.certificates import CertificateRecord, Injection, InjectionCertificate
from fgai.certificates import certify as certify_model
from fgai.cli import options
from fgai.cli.files import checked_output, open_model
from fgai.cli.output import Output, command
from fgai.training import load_model


@command
def certify(
    model: options.ModelFile,
    *,
    vanilla: options.VanillaFile = None,
    radius: Annotated[float, typer.Option("--radius", "-r", help="R, at least 0.")] = 0.01,
    k1: Annotated[int, typer.Option(min=1, help="Top-k compared with the vanilla model.")] = 5,
    k2: Annotated[int, typer.Option(min=1, help="Top-k certified.")] = 5,
    norm: Annotated[str, typer.Option(help="Ball around the attention: l1, l2 or linf.")] = "l1",
    alpha: Annotated[float | None, typer.Option(help="Largest change of prediction allowed.")] = None,
    beta: Annotated[float | None, typer.Option(help="Least overlap wanted, 0 to 1.")] = None,
    divergence: Annotated[str, typer.Option(help="Change of prediction on probabilities or logits.")] = (
        "probabilities"
    ),
    injected: Annotated[
        int | None,
        typer.Option(min=0, help="Instead of a ball: new neighbours of a node at most, with any features."),
    ] = None,
    where: Annotated[
        str, typer.Option(help="With --injected: any node gains them, or the certified one alone, direct.")
    ] = "any",
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: options.Record = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Prove, node by node, that explanation and prediction stay while a layer's attention moves a little.

    With --injected, that they stay whatever few new neighbours say; for models behind limits.

    Examples:
    - `fgai certify gat.safetensors --radius 0.01`
    - `fgai certify fgai.safetensors --vanilla gat.safetensors --alpha 0.1 --beta 0.8 --json`
    - `fgai certify fgai.safetensors --injected 1 --where direct`
    """
    out = Output(json, quiet)
    opened = open_model(model, dataset, root, device)
    plain = None if vanilla is None else load_model(vanilla).to(device)
    path = None if output is None else checked_output(output)
    out.say(f"certifying {model} on {opened.graph!r}")
    record: CertificateRecord | InjectionCertificate
    if injected is not None:
        record = certify_model(opened.model, opened.graph, threat=Injection(injected, where), k2=k2)
    else:
        record = certify_model(
            opened.model,
            opened.graph,
            vanilla=plain,
            radius=radius,
            k1=k1,
            k2=k2,
            norm=norm,
            alpha=alpha,
            beta=beta,
            divergence=divergence,
        )
    if path is not None:
        out.say(f"written to {record.save(path)}")
    out.result(record.to_dict(), record.show)
