"""Records, which are JSON documents with their provenance, and the tables they print."""

from fgai.records.document import Document, TabledDocument, read_json
from fgai.records.plain import PackedArray, check_arrays, look_up, pack_array, plain, to_text, unpack_array
from fgai.records.provenance import Meter, code_hash, provenance, provenance_line, weights_hash
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
    "check_arrays",
    "code_hash",
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
