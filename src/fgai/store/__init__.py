"""Graphs in a folder of memory-mapped arrays: larger than memory, read block by block."""

from fgai.store.size import GraphSize, graph_size
from fgai.store.stored import StoredGraph, open_store
from fgai.store.write import write_store

__all__ = ["GraphSize", "StoredGraph", "graph_size", "open_store", "write_store"]
