"""Grids of experiments as records, and tables and figures from records only."""

from experiments.cells import PROTOCOL, Cell, grid_names, read_grid
from experiments.grid import Status, only, run_grid, shard, status
from experiments.run import run_cell
from experiments.store import Store, read_record

__all__ = [
    "PROTOCOL",
    "Cell",
    "Status",
    "Store",
    "grid_names",
    "only",
    "read_grid",
    "read_record",
    "run_cell",
    "run_grid",
    "shard",
    "status",
]
