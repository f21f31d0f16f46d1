"""Real datasets by name, a built-in one, their splits and fingerprints."""

from fgai.datasets.fingerprint import fingerprint
from fgai.datasets.loader import load
from fgai.datasets.planted import planted
from fgai.datasets.registry import DatasetInfo, info, names
from fgai.datasets.splits import Split, random_split, stratified_split

__all__ = [
    "DatasetInfo",
    "Split",
    "fingerprint",
    "info",
    "load",
    "names",
    "planted",
    "random_split",
    "stratified_split",
]
