"""Numbers of records that no metric here computes: costs, certified shares, what chance gives, counts."""

from __future__ import annotations

from fgai.metrics.quantity import Quantity

ENDS = ("random", "cover", "defects", "weakest", "chosen")
"""Endpoints under an ensemble: of each rule, and `chosen` for all but the random ones."""
_CHANCE = (
    "overlap", "overlap_touched", "overlap_graph", "explanations", "truth", "truth_prediction",
    "truth_explanation",
)  # fmt: skip
_EVALUATION = (
    Quantity(path="same_class.*.changed", title="changed, same class", direction="lower"),
    Quantity(path="same_class.*.kept", title="same class"),
    Quantity(path="touched", title="touched nodes"),
    *(
        Quantity(path=f"lost.explanation.{ends}", title=f"lost, {ends} ends", direction="lower")
        for ends in ENDS
    ),
    Quantity(path="sharpest", title="sharpest layer", form="d"),
    Quantity(path="f_slope.*.*.curve_plus", title="still right"),
    Quantity(path="f_slope.*.*.curve_minus", title="still right"),
    *(Quantity(path=f"{name}.chance", title="chance") for name in _CHANCE),
)
_TRAINING = (
    Quantity(path="training.epoch_seconds", title="seconds per epoch", form=".3g", direction="lower"),
    Quantity(path="training.seconds", title="training s", form=".1f", direction="lower"),
    Quantity(path="training.peak_memory", title="peak memory", form=".3g", direction="lower"),
)
_CERTIFICATE = (
    Quantity(path="certificate.share", title="certified share", direction="higher"),
    Quantity(path="certificate.median_radius", title="median radius", direction="higher"),
    Quantity(path="certificate.class_share", title="certified class", direction="higher"),
    Quantity(path="certificate.sharpness", title="sharpness", direction="higher"),
    Quantity(path="injection.class_share", title="certified class, injection", direction="higher"),
    Quantity(path="injection.order_share", title="certified order, injection", direction="higher"),
)
QUANTITIES = (*_EVALUATION, *_TRAINING, *_CERTIFICATE)
"""`*` in a path stands for any one name, as in the paths of metrics."""
