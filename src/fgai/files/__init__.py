"""Files: atomic writes, verified downloads, and bounded reading of files that may be damaged or hostile."""

from fgai.files.https import extract, fetch
from fgai.files.read import (
    Schema,
    add_checksum,
    check,
    check_items,
    check_sizes,
    digest_of,
    inflate,
    load_torch,
    most_bytes,
    parse_json,
    read_arrays,
    regular,
    require_whole,
    take_checksum,
)
from fgai.files.write import is_stream, pack, read_metadata, tensors_digest, unpack, write_atomic

__all__ = [
    "Schema", "add_checksum", "check", "check_items", "check_sizes", "digest_of", "extract", "fetch",
    "inflate", "is_stream", "load_torch", "most_bytes", "pack", "parse_json", "read_arrays", "read_metadata",
    "regular", "require_whole", "take_checksum", "tensors_digest", "unpack", "write_atomic",
]  # fmt: skip
