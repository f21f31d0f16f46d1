"""Metrics of prediction, stability and explanation: functions, each declared by `@metric` in one place.

`METRICS` holds the declarations by name, in the order of tables; modules of this package are found by
themselves, and metrics from outside are declared the same way.

`w` and `w_other` hold one value per edge, [E], on matched edges in one order, with `rowptr` [N+1]:
heads averaged for distances, `LayerAttention.ranking` for rankings. `k` is the number of neighbours in an
explanation; `nodes`, bool [N] or indices, restricts a mean. `y` and `y_other` are logits [N, C] before and
after, `prediction` logits or class indices [N], `target` class indices [N], -1 where unknown. Most return a
Python float; what does not fit raises `InputError`.
"""

from importlib import import_module
from pkgutil import iter_modules

# Tables show metrics in the order of these lines.
# isort: off
from fgai.metrics.prediction import (
    accuracy,
    average_precision,
    balanced_accuracy,
    chance_score,
    error_weights,
    f1,
    macro_f1,
    recall,
    roc_auc,
    task_scores,
)
from fgai.metrics.ranking import (
    intruder_mass,
    intruder_nodes,
    intruder_places,
    lost,
    overlap,
    overlap_chance,
    overlap_graph,
    rank_correlation,
    same_class_changed,
    same_class_share,
    tied_share,
    touched_share,
)
from fgai.metrics.stability import changed_share, g_jsd, g_tvd, g_tvd_prob, g_tvd_rel
from fgai.metrics.sharpness import (
    UNIFORM_SHARPNESS,
    sharpest_layer,
    sharpness,
    sharpness_per_node,
    top_share,
    uniform_share,
)
from fgai.metrics.removal import (
    FRACTIONS,
    characterization,
    f_slope_gap,
    f_slope_minus,
    f_slope_plus,
    fidelity_minus,
    fidelity_plus,
)
from fgai.metrics.truth import truth_auc, truth_chance, truth_precision

# isort: on
from fgai.metrics.common import (
    mean_of_defined,
    mean_over,
    overlap_per_node,
    random_ranking,
    uniform_attention,
)
from fgai.metrics.spec import (
    METRICS,
    Quantity,
    Shown,
    chance_path,
    metric,
    metric_at,
    null_path,
    quantity,
    shown_numbers,
)
from fgai.metrics.views import NULLS, AttentionPair, Views

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = [
    "FRACTIONS",
    "METRICS",
    "NULLS",
    "UNIFORM_SHARPNESS",
    "AttentionPair",
    "Quantity",
    "Shown",
    "Views",
    "accuracy",
    "average_precision",
    "balanced_accuracy",
    "chance_path",
    "chance_score",
    "changed_share",
    "characterization",
    "error_weights",
    "f1",
    "f_slope_gap",
    "f_slope_minus",
    "f_slope_plus",
    "fidelity_minus",
    "fidelity_plus",
    "g_jsd",
    "g_tvd",
    "g_tvd_prob",
    "g_tvd_rel",
    "intruder_mass",
    "intruder_nodes",
    "intruder_places",
    "lost",
    "macro_f1",
    "mean_of_defined",
    "mean_over",
    "metric",
    "metric_at",
    "null_path",
    "overlap",
    "overlap_chance",
    "overlap_graph",
    "overlap_per_node",
    "quantity",
    "random_ranking",
    "rank_correlation",
    "recall",
    "roc_auc",
    "same_class_changed",
    "same_class_share",
    "sharpest_layer",
    "sharpness",
    "sharpness_per_node",
    "shown_numbers",
    "task_scores",
    "tied_share",
    "top_share",
    "touched_share",
    "truth_auc",
    "truth_chance",
    "truth_precision",
    "uniform_attention",
    "uniform_share",
]
