"""Decompression that stops: what comes out is bounded by what went in."""

from __future__ import annotations

import zlib

ALLOWANCE = 1 << 26
RATIO = 64
_GZIP = 31  # zlib's word for a gzip header and checksum


def most_bytes(size: int) -> int:
    """Return how much `size` compressed bytes may hold: 64 MiB, and 64 bytes for each.

    Deflate can reach a thousand to one, so five megabytes could fill five gigabytes. Graphs, scores and
    records stay below ten to one in all; a constant column of a small graph fits into the allowance.

    Example:
        >>> most_bytes(0), most_bytes(1000) - most_bytes(0)
        (67108864, 64000)
    """
    return ALLOWANCE + RATIO * size


def inflate(raw: bytes, size: int) -> bytes:
    """Return what zlib compressed, which must be exactly `size` bytes.

    Raises:
        ValueError: it is damaged, or of another size; no more than `size` bytes are ever made.
    """
    return _inflated(raw, zlib.MAX_WBITS, size, exactly=True)


def gunzip(raw: bytes) -> bytes:
    """Return what gzip compressed, in one member.

    Raises:
        ValueError: it is damaged, or holds more than `most_bytes`.
    """
    return _inflated(raw, _GZIP, most_bytes(len(raw)), exactly=False)


def _inflated(raw: bytes, window: int, most: int, *, exactly: bool) -> bytes:
    stream = zlib.decompressobj(window)
    try:
        found = stream.decompress(raw, most + 1)
    except zlib.error as error:
        raise ValueError(f"compressed data is damaged: {error}") from error
    if len(found) > most or (exactly and len(found) != most):
        raise ValueError(f"{len(raw)} compressed bytes do not hold {'' if exactly else 'at most '}{most}")
    if not stream.eof or stream.unused_data:
        raise ValueError("compressed data is cut off or followed by something else")
    return found
