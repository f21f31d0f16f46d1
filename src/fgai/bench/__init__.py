"""Grids of experiments as records, and tables and figures from records only."""

from fgai.bench.cells import PROTOCOL, Cell, read_grid
from fgai.bench.grid import Status, run_grid, shard, status
from fgai.bench.run import run_cell
from fgai.bench.store import Store, read_record

__all__ = [
    "PROTOCOL",
    "Cell",
    "Status",
    "Store",
    "read_grid",
    "read_record",
    "run_cell",
    "run_grid",
    "shard",
    "status",
]
