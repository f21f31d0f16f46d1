"""Interface of graphs on disk; `fgai.large` writes and reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from fgai.graph.graph import Graph

MANIFEST = "graph.json"  # the text file of every stored graph


class GraphOnDisk(ABC):
    """A graph in a folder, see `fgai.large.StoredGraph`; has a name for messages and records."""

    name: str

    @abstractmethod
    def load(self) -> Graph:
        """Read the whole graph into memory."""

    @abstractmethod
    def nodes(self, seed: int) -> Graph:
        """Return the nodes without edges and features, with labels and masks (a random split if none)."""


def is_store(path: Path | str) -> bool:
    """Whether a folder holds a stored graph."""
    try:
        return (Path(path) / MANIFEST).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
