"""`report`: attack, measure and certify models, and write the page, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fgai.attacks import DEFAULT, AttackResult, Threat, threat_of
from fgai.attention import model_name
from fgai.attention.interface import originals
from fgai.certificates import CertificateRecord, certify_attention
from fgai.evaluation import Comparison, compare
from fgai.explanations.node import RADIUS, Names, check_counterfactual, check_node
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.reports.build import Report, make_report
from fgai.reports.page import check_page, write_report
from fgai.reports.results import certify_injections
from fgai.threads import with_gradients
from fgai.version import adding_facts


@with_gradients
@adding_facts(command="fgai.report")
def report(
    models: Mapping[str, nn.Module] | nn.Module,
    data: Any,
    path: Path | str | None = None,
    *,
    threat: str | Threat = DEFAULT,
    nodes: int | None = None,
    edges: int | None = None,
    k: int = 5,
    seed: int = 0,
    node: int | None = None,
    node_names: Names | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    reproduce: Sequence[str] = (),
    what_if: bool = True,
    counterfactual: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Attack, measure and certify models equally, write one page, and return the document it is made of.

    `models` are by name, the reference first, or one model. The page is written to `path`, and its document
    beside it; None writes nothing. `threat` is a name from `fgai.attacks.THREATS` or a `Threat` of your own;
    for small graphs, `nodes` and `edges` set how many nodes it injects, and the edges of each. An explanation
    is `k` neighbours, and `on_step` is called with a word or two before each long step. Other arguments are
    those of `make_report`; with `what_if` the page holds features and weights. `InputError` for no models, or
    a node the graph does not have, `MissingExtraError` if a page is asked for and plotly is not installed.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=3, progress=False)
        >>> fgai.report({"GAT": model}, data, threat="random").names
        ['GAT']
    """
    graph, threat = as_graph(data), threat_of(threat).sized(nodes, edges)
    models = {model_name(models): models} if isinstance(models, nn.Module) else models
    if isinstance(models, Mapping):  # anything else is refused by `compare`
        models = dict(zip(models, originals(*models.values()), strict=True))
    check_node(node, graph.num_nodes)
    check_counterfactual(graph, counterfactual)
    page = None if path is None else check_page(path)
    say = (lambda step: None) if on_step is None else on_step
    comparison, certificates, attacks = measure(models, graph, threat=threat, k=k, seed=seed, on_step=say)
    say("certifying against injection")
    injections = certify_injections(models, graph, k)
    say("making the page")
    document = make_report(
        comparison,
        models=models,
        data=graph,
        certificates=certificates,
        injections=injections,
        attacks=attacks,
        node=node,
        node_names=node_names,
        class_names=class_names,
        title=title,
        reproduce=reproduce,
        what_if=what_if,
        counterfactual=counterfactual,
    )
    if page is not None:
        write_report(document, page)
    return document


def measure(
    models: Mapping[str, nn.Module],
    graph: Graph,
    *,
    threat: str | Threat = DEFAULT,
    k: int = 5,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda step: None,
) -> tuple[Comparison, dict[str, CertificateRecord], dict[str, AttackResult]]:
    """Compare and certify models, the first as the vanilla one; also return the attacks on predictions."""
    results: dict[str, dict[str, AttackResult]] = {}
    on_step("comparing")
    comparison = compare(models, graph, threat, seed=seed, k=k, per_node=True, on_attack=results.__setitem__)
    on_step("certifying")
    first = next(iter(models.values()))
    certificates = {
        name: certify_attention(model, graph, vanilla=first, radius=RADIUS, k1=k, k2=k)
        for name, model in models.items()
    }
    return comparison, certificates, {name: result["prediction"] for name, result in results.items()}
