"""Records, which are JSON documents with their provenance, and the tables they print."""

from fgai.records.document import (
    Document,
    PackedArray,
    TabledDocument,
    look_up,
    pack_array,
    plain,
    read_json,
    to_text,
    unpack_array,
)
from fgai.records.provenance import Meter, provenance, provenance_line, weights_hash
from fgai.records.table import ARROWS, MISSING, Cell, Column, Table, Tabled, data_frame

__all__ = [
    "ARROWS",
    "MISSING",
    "Cell",
    "Column",
    "Document",
    "Meter",
    "PackedArray",
    "Table",
    "Tabled",
    "TabledDocument",
    "data_frame",
    "look_up",
    "pack_array",
    "plain",
    "provenance",
    "provenance_line",
    "read_json",
    "to_text",
    "unpack_array",
    "weights_hash",
]
