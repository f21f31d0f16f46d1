"""Parts of the kernels, on flat arrays, 8 numbers at a time; the last 1 to 7 are masked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fgai.compiled import compiled
from fgai.ops.cpu.lanes import (
    LANES,
    _exp_nonpositive,
    _load,
    _load_some,
    _maximum,
    _prefetch,
    _splat,
    _store,
    _store_some,
    _total,
)

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

FAST = {"reassoc", "contract", "nsz", "arcp"}  # no flag that assumes there is no NaN or infinity (nnan, ninf)
# Kernels only read and write arrays they are given, so numba's reference counting is switched off (`_nrt`):
# left on, it costs more than the arithmetic of a short row.
_OPTIONS = {"fastmath": FAST, "_nrt": False}
_inline = compiled(inline="always", **_OPTIONS)
AHEAD = 6  # rows are prefetched so many edges ahead
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))


def _kernel(function: Callable[..., None], **options: Any) -> Callable[..., None]:
    """Compile `function` on first use and keep the code on disk, stamped by all files here and its own."""
    kernel: Callable[..., None] = compiled(**{**_OPTIONS, **options})(function)
    stored = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if stored is not None and hasattr(stored, "_source_stamp"):
        files = [*_SOURCES, Path(function.__code__.co_filename)]
        stored._source_stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return kernel


@_inline
def _axpy(n, a, x, i, y, j):
    """y[j:j+n] += a · x[i:i+n]."""
    scale = _splat(a)
    rest = n & (LANES - 1)
    full = n - rest
    for c in range(0, full, LANES):
        _store(y, j + c, _load(y, j + c) + scale * _load(x, i + c))
    if rest > 0:
        i, j = i + full, j + full
        _store_some(y, j, rest, _load_some(y, j, rest) + scale * _load_some(x, i, rest))


@_inline
def _dot(n, x, i, y, j):
    """Σ_c x[i+c] · y[j+c]."""
    rest = n & (LANES - 1)
    full = n - rest
    lanes = _splat(x.dtype.type(0))
    for c in range(0, full, LANES):
        lanes = lanes + _load(x, i + c) * _load(y, j + c)
    if rest > 0:
        lanes = lanes + _load_some(x, i + full, rest) * _load_some(y, j + full, rest)
    return _total(lanes)


@_inline
def _padded(n):
    return (n + LANES - 1) & ~(LANES - 1)


@_inline
def _add_scaled(n, a, x, i, sums, j):
    """sums[j:j+n] += a · x[i:i+n], `sums` padded: a masked store would delay the next load."""
    rest = n & (LANES - 1)
    full = n - rest
    _axpy(full, a, x, i, sums, j)
    if rest > 0:
        _store(sums, j + full, _load(sums, j + full) + _splat(a) * _load_some(x, i + full, rest))


@_inline
def _clear_sums(heads, channels, sums, offset):
    """Set the sums of one row, each head padded to a multiple of 8, to zero."""
    zero = _splat(sums.dtype.type(0))
    for k in range(0, heads * _padded(channels), LANES):
        _store(sums, offset + k, zero)


@_inline
def _copy_sums(heads, channels, sums, offset, out, here):
    """out[here:] = the sums of one row, without the padding."""
    rest = channels & (LANES - 1)
    full = channels - rest
    for h in range(heads):
        k, j = offset + h * _padded(channels), here + h * channels
        for c in range(0, full, LANES):
            _store(out, j + c, _load(sums, k + c))
        if rest > 0:
            _store_some(out, j + full, rest, _load(sums, k + full))


@_inline
def _dot_axpy(n, x, i, y, j, a, z, k):
    """z[k:k+n] += a · x[i:i+n], `z` padded to 8; return lanes whose sum is Σ_c x[i+c] · y[j+c]."""
    rest = n & (LANES - 1)
    full = n - rest
    scale, lanes = _splat(a), _splat(x.dtype.type(0))
    for c in range(0, full, LANES):
        here = _load(x, i + c)
        lanes = lanes + here * _load(y, j + c)
        _store(z, k + c, _load(z, k + c) + scale * here)
    if rest > 0:
        here = _load_some(x, i + full, rest)
        lanes = lanes + here * _load_some(y, j + full, rest)
        _store(z, k + full, _load(z, k + full) + scale * here)
    return lanes


@_inline
def _average(low, high, heads, attention, mean):
    """mean[e] = the mean of attention[e·H : (e+1)·H] for the edges low..high-1."""
    share = mean.dtype.type(1) / mean.dtype.type(heads)
    if heads == LANES:
        for e in range(low, high):
            mean[e] = share * _total(_load(attention, np.int64(e) * LANES))
        return
    for e in range(low, high):
        total = mean.dtype.type(0)
        for h in range(heads):
            total += attention[np.int64(e) * heads + h]
        mean[e] = share * total


@_inline
def _prefetch_row(array, offset, width):
    for c in range(0, width, 64 // array.itemsize):
        _prefetch(array, offset + c)


@_kernel
def _weighted_sum(weight, value, first, last, heads, result, scratch):
    """result[h] = Σ_e weight · value over first..last per head; weight None counts as 1."""
    if heads <= LANES and heads & (heads - 1) == 0:
        rest = (last - first) & (LANES - 1)
        full = last - rest
        lanes = _splat(value.dtype.type(0))
        for k in range(first, full, LANES):
            lanes = lanes + (_load(value, k) if weight is None else _load(weight, k) * _load(value, k))
        if rest > 0:
            if weight is None:
                lanes = lanes + _load_some(value, full, rest)
            else:
                lanes = lanes + _load_some(weight, full, rest) * _load_some(value, full, rest)
        _store(scratch, 0, lanes)
        for k in range(LANES - 1, heads - 1, -1):
            scratch[k - heads] += scratch[k]
        for h in range(heads):
            result[h] = scratch[h]
    else:
        for h in range(heads):
            result[h] = 0
        for e in range(first, last, heads):
            for h in range(heads):
                if weight is None:
                    result[h] += value[e + h]
                else:
                    result[h] += weight[e + h] * value[e + h]


@_kernel
def _normalise(flat, first, last, heads, scratch):
    """Turn the scores flat[first:last] of one node into their softmax, in place.

    If H divides 8, lane k holds head k mod H of every edge, so the row is one flat run of vectors. `scratch`:
    see `parallel._workspace`.
    """
    if heads <= LANES and heads & (heads - 1) == 0:
        _normalise_lanes(flat, first, last, heads, scratch)
    else:
        _normalise_heads(flat, first, last, heads, scratch)


@_inline
def _normalise_lanes(flat, first, last, heads, scratch):
    rest = (last - first) & (LANES - 1)
    full = last - rest
    _maxima(flat, first, full, rest, heads, scratch)
    top = _load(scratch, 0)
    sums = _splat(flat.dtype.type(0))
    for k in range(first, full, LANES):
        lanes = _exp_nonpositive(_load(flat, k) - top)
        _store(flat, k, lanes)
        sums = sums + lanes
    _store(scratch, LANES, sums)
    if rest > 0:
        lanes = _exp_nonpositive(_load_some(flat, full, rest) - top)
        _store_some(flat, full, rest, lanes)
        _store_some(scratch, LANES, rest, sums + lanes)
    for k in range(LANES - 1, heads - 1, -1):
        scratch[LANES + k - heads] += scratch[LANES + k]
    for k in range(heads):
        scratch[LANES + k] = 1 / scratch[LANES + k]
    for k in range(heads, LANES):
        scratch[LANES + k] = scratch[LANES + k - heads]
    scale = _load(scratch, LANES)
    for k in range(first, full, LANES):
        _store(flat, k, _load(flat, k) * scale)
    if rest > 0:
        _store_some(flat, full, rest, _load_some(flat, full, rest) * scale)


@_inline
def _maxima(flat, first, full, rest, heads, scratch):
    """scratch[k] = the largest score of head k mod H, for the eight lanes k."""
    if full > first:
        lanes = _load(flat, first)
        for k in range(first + LANES, full, LANES):
            lanes = _maximum(_load(flat, k), lanes)
        _store(scratch, 0, lanes)
        if rest > 0:
            _store_some(scratch, 0, rest, _maximum(_load_some(flat, full, rest), lanes))
    else:
        for k in range(LANES):
            scratch[k] = flat[first + k % heads]
        _store_some(scratch, 0, rest, _load_some(flat, full, rest))
    for k in range(LANES - 1, heads - 1, -1):
        scratch[k - heads] = max(scratch[k - heads], scratch[k])
    for k in range(heads, LANES):
        scratch[k] = scratch[k - heads]


@_inline
def _normalise_heads(flat, first, last, heads, scratch):
    for h in range(heads):
        scratch[h] = flat[first + h]
        scratch[heads + h] = 0
    for e in range(first, last, heads):
        for h in range(heads):
            scratch[h] = max(scratch[h], flat[e + h])
    for e in range(first, last, heads):
        for h in range(heads):
            value = _exp_nonpositive(flat[e + h] - scratch[h])
            flat[e + h] = value
            scratch[heads + h] += value
    for h in range(heads):
        scratch[heads + h] = 1 / scratch[heads + h]
    for e in range(first, last, heads):
        for h in range(heads):
            flat[e + h] *= scratch[heads + h]


@_inline
def _mix(x):
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@_inline
def _factor(position, seed, limit, scale):
    """0 or `scale` for the number at `position`, without a branch to mispredict; `limit` = p · 2³²."""
    low = np.uint32(seed)
    x = _mix(np.uint32(np.uint32(position) + low))
    spread = np.uint32(np.uint32(low + np.uint32(position >> 32)) * np.uint32(0x9E3779B9))
    x = _mix(np.uint32(x ^ np.uint32(seed >> 32) ^ spread))
    return scale if x >= limit else scale - scale
