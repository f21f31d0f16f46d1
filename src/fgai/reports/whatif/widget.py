"""`explore`: the what-if page as a widget in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fgai.errors import FgaiError, extra
from fgai.reports.template import asset, whatif_script
from fgai.reports.whatif.answer import WhatIf
from fgai.typed import typed


@typed
def explore(
    models: Mapping[str, nn.Module] | nn.Module, data: Any, *, node: int | None = None, k: int = 5
) -> Any:
    """Return a widget that shows how changed edges and injected nodes change one node's attention and class.

    GAT and GATv2 are computed in the browser, other models here. The extra `notebook` installs anywidget.

    Args:
        models: node classifiers by name, or one.
        data: a `Graph` or PyG `Data`.
        node: shown first; the first test node by default.
        k: neighbours in an explanation.

    Raises:
        InputError: no models, a node the graph does not have, or another task than node classification.
        MissingExtraError: anywidget is not installed.
    """
    base = extra("anywidget").AnyWidget
    answers = WhatIf(models, data, k=k)
    facts = answers.facts(node=node, certified=answers.certify())
    parts = {"_esm": whatif_script(), "_css": asset("whatif.css", "whatif")}
    parts["facts"] = extra("traitlets").Dict().tag(sync=True)
    widget = type("WhatIfWidget", (base,), parts)(facts=facts)

    def reply(_: Any, content: dict[str, Any], buffers: Any) -> None:
        answer: dict[str, Any] = {"id": content.get("id")}
        try:
            answer["answer"] = answers.questions[str(content.get("question"))](content.get("change") or {})
        except (FgaiError, KeyError, ValueError) as error:
            answer["error"] = str(error)
        widget.send(answer)

    widget.on_msg(reply)
    return widget
