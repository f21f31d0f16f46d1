"""Real datasets by name, a built-in one, their splits and fingerprints."""

from fgai.datasets.loader import load_dataset, with_degrees
from fgai.datasets.own import load_graph
from fgai.datasets.planted import planted
from fgai.datasets.registry import (
    DatasetInfo,
    Source,
    info,
    names,
    register_dataset,
    register_task_split,
)
from fgai.datasets.splits import Split, fold_split, link_split, random_split, stratified_split
from fgai.graph.fingerprint import fingerprint

__all__ = [
    "DatasetInfo", "Source", "Split", "fingerprint", "fold_split", "info", "link_split", "load_dataset",
    "load_graph", "names", "planted", "random_split", "register_dataset", "register_task_split",
    "stratified_split", "with_degrees",
]  # fmt: skip
