"""Files: written whole or not at all, fetched from where they claim to be from, and never believed unread."""

from fgai.files.arrays import read_arrays, require_whole
from fgai.files.https import extract, fetch
from fgai.files.inflate import gunzip, inflate, most_bytes
from fgai.files.read import add_checksum, digest_of, regular, take_checksum
from fgai.files.schema import Schema, check, check_items
from fgai.files.tensors import pack, read_metadata, tensors_digest, unpack
from fgai.files.text import parse_json
from fgai.files.write import is_stream, write_atomic

__all__ = [
    "Schema",
    "add_checksum",
    "check",
    "check_items",
    "digest_of",
    "extract",
    "fetch",
    "gunzip",
    "inflate",
    "is_stream",
    "most_bytes",
    "pack",
    "parse_json",
    "read_arrays",
    "read_metadata",
    "regular",
    "require_whole",
    "take_checksum",
    "tensors_digest",
    "unpack",
    "write_atomic",
]
