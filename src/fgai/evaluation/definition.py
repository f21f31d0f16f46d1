"""Definition 1 as a measure: the share of nodes with each of the four properties."""

from __future__ import annotations

from math import nan
from typing import Any

from torch import nn

from fgai.certificates import ALL_FOUR, PROPERTIES, CertificateRecord
from fgai.certificates.attention import certify_radii
from fgai.errors import AttentionError, InputError, ReliabilityWarning, warn
from fgai.metrics import Shown, Views, metric
from fgai.typed import typed

RADII = {"r001": 0.001, "r01": 0.01}
"""Radii of the l1 balls, by record name: the digits are decimals, so `r001` is 0.001 and `r01` is 0.01."""
ALPHA, BETA = 0.1, 0.8
"""Largest change of probabilities and smallest overlap of the top k that count as the same."""
_ABOUT = {
    "same_explanation": f"At least {BETA:.0%} of the vanilla model's top k are among the model's top k.",
    "stable_explanation": (
        f"At least {BETA:.0%} of the top k provably stay while the explanation moves by at most 0.01."
    ),
    "same_prediction": (
        f"The probabilities differ from the vanilla model's by at most {ALPHA} in total variation."
    ),
    "stable_prediction": (
        f"The probabilities provably change by at most {ALPHA} while each head moves by at most 0.01."
    ),
}


@typed
def definition_shares(
    model: nn.Module, data: Any, vanilla: nn.Module | None = None, k: int = 5
) -> dict[str, dict[str, list[Any]]]:
    """Share of the nodes with each property and with all four: by name of the radius, property and layer.

    Without `vanilla`, the model it was made from, the two `same_` properties are None. Only nodes with more
    than k neighbours count; `counted` says how many.
    """
    settings = {"k1": k, "k2": k, "norm": "l1", "divergence": "probabilities", "alpha": ALPHA, "beta": BETA}
    records = certify_radii(model, data, vanilla, tuple(RADII.values()), settings)
    out: dict[str, dict[str, list[Any]]] = {}
    for name, record in zip(RADII, records, strict=True):
        shares = [record.shares(index) for index in range(len(record.layers))]
        out[name] = {part: [layer[part] for layer in shares] for part in (*PROPERTIES, ALL_FOUR)}
        out[name]["counted"] = [int(record.counted(index).sum()) for index in range(len(shares))]
    return out


def _definition(views: Views) -> dict[str, Any]:
    if views.model is None:
        return {}
    try:
        by_radius = definition_shares(views.model, views.graph, views.vanilla_model, views.k)
    except (AttentionError, InputError) as error:
        warn(ReliabilityWarning("certificate-unknown", f"Definition 1 cannot be measured: {error}"))
        return {}
    out: dict[str, dict[str, Any]] = {}
    for radius, parts in by_radius.items():
        out[radius] = {"counted": parts.pop("counted")}
        for name, values in parts.items():
            out[radius][name] = views.by_layer([nan if value is None else value for value in values])
    return {"definition": out}


@metric(
    direction="higher",
    title="faithful nodes",
    paths=("definition.*",),
    section="explanation",
    shown=(
        Shown(
            "definition.r01.all_four.last",
            "all four",
            "Nodes where Definition 1 holds",
            "Of the nodes with more than k neighbours: same and stable explanation, same and stable"
            " prediction, in the output layer, while attention moves by at most 0.01.",
        ),
        *(
            Shown(f"definition.r01.{name}.last", title, f"… {title}", about, table="")
            for name, about in _ABOUT.items()
            for title in [name.replace("_", " ")]
        ),
        Shown("definition.r001.all_four.all", table=""),
    ),
    measure=_definition,
)
def faithful_share(certificate: CertificateRecord, layer: int = -1) -> float:
    """Share of the nodes with all four properties of Definition 1 in a layer; NaN where one is unknown."""
    share = certificate.shares(layer)[ALL_FOUR]
    return nan if share is None else share
