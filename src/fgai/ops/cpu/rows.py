"""The pieces the kernels are made of, each on flat arrays: scale and add, inner product, softmax of a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from numba import njit

from fgai.ops.cpu.lanes import LANES, exp_nonpositive, larger, load, prefetch, splat, store, total

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# The flags that assume NaN and infinity away (nnan, ninf) stay off: both must survive.
FAST = {"reassoc", "contract", "nsz", "arcp"}
# Kernels only read and write arrays they are given, so numba's reference counting is switched off (`_nrt`):
# left on, it costs more than the arithmetic of a short row.
_OPTIONS = {"fastmath": FAST, "nogil": True, "cache": True, "_nrt": False}
piece = njit(inline="always", **_OPTIONS)
# How many edges ahead rows are asked for.
AHEAD = 6
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_STAMP = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in _SOURCES)


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile `function` on first use and keep the machine code on disk.

    numba compiles again when the file of the function has changed; a kernel also has to be compiled again
    when a piece of it has, so the stamp of the stored code covers all files here.
    """
    made: Callable[..., None] = njit(**_OPTIONS)(function)
    stored = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if stored is not None and hasattr(stored, "_source_stamp"):
        stored._source_stamp = _STAMP
    return made


@piece
def axpy(n, a, x, i, y, j):
    """y[j:j+n] += a · x[i:i+n]."""
    scale = splat(a)
    if n == LANES:
        store(y, j, load(y, j) + scale * load(x, i))
    else:
        rest = n & (LANES - 1)
        whole = n - rest
        for c in range(0, whole, LANES):
            store(y, j + c, load(y, j + c) + scale * load(x, i + c))
        for c in range(whole, whole + rest):
            y[j + c] += a * x[i + c]


@piece
def dot(n, x, i, y, j):
    """Σ_c x[i+c] · y[j+c]."""
    rest = n & (LANES - 1)
    whole = n - rest
    result = x.dtype.type(0)
    if whole > 0:
        lanes = load(x, i) * load(y, j)
        for c in range(LANES, whole, LANES):
            lanes = lanes + load(x, i + c) * load(y, j + c)
        result = total(lanes)
    for c in range(whole, whole + rest):
        result += x[i + c] * y[j + c]
    return result


@piece
def lanes_dot_axpy(n, x, i, y, j, a, z, k):
    """z[k:k+n] += a · x[i:i+n] for n divisible by 8, and return lanes whose sum is Σ_c x[i+c] · y[j+c]."""
    scale, here = splat(a), load(x, i)
    lanes = here * load(y, j)
    store(z, k, load(z, k) + scale * here)
    for c in range(LANES, n, LANES):
        here = load(x, i + c)
        lanes = lanes + here * load(y, j + c)
        store(z, k + c, load(z, k + c) + scale * here)
    return lanes


@piece
def dot_axpy(n, x, i, y, j, a, z, k):
    """z[k:k+n] += a · x[i:i+n], and return Σ_c x[i+c] · y[j+c]: x is read once."""
    rest = n & (LANES - 1)
    whole = n - rest
    result = x.dtype.type(0)
    if whole > 0:
        result = total(lanes_dot_axpy(whole, x, i, y, j, a, z, k))
    for c in range(whole, whole + rest):
        result += x[i + c] * y[j + c]
        z[k + c] += a * x[i + c]
    return result


@piece
def fetch(array, offset, width):
    """Ask for array[offset : offset + width] ahead of its use."""
    for c in range(0, width, 64 // array.itemsize):
        prefetch(array, offset + c)


@kernel
def weighted_sum(weight, value, first, last, heads, result, scratch):
    """result[h] = Σ_e weight · value over the edges in first..last, per head; `scratch` as in `normalise`."""
    if heads <= LANES and heads & (heads - 1) == 0:
        rest = (last - first) & (LANES - 1)
        whole = last - rest
        lanes = splat(weight.dtype.type(0))
        for k in range(first, whole, LANES):
            lanes = lanes + load(weight, k) * load(value, k)
        store(scratch, 0, lanes)
        for k in range(rest):
            scratch[k] += weight[whole + k] * value[whole + k]
        for k in range(LANES - 1, heads - 1, -1):
            scratch[k - heads] += scratch[k]
        for h in range(heads):
            result[h] = scratch[h]
    else:
        for h in range(heads):
            result[h] = 0
        for e in range(first, last, heads):
            for h in range(heads):
                result[h] += weight[e + h] * value[e + h]


@kernel
def normalise(flat, first, last, heads, scratch):
    """Turn the scores flat[first:last] of one node into their softmax, in place.

    The heads of an edge lie side by side. When their number divides 8, lane k holds head k mod H of every
    edge whatever its position, so the row is one flat run of vectors. `scratch`: see `plan.workspace`.
    """
    if heads <= LANES and heads & (heads - 1) == 0:
        _normalise_lanes(flat, first, last, heads, scratch)
    else:
        _normalise_heads(flat, first, last, heads, scratch)


@piece
def _normalise_lanes(flat, first, last, heads, scratch):
    rest = (last - first) & (LANES - 1)
    whole = last - rest
    _top_lanes(flat, first, whole, rest, heads, scratch)
    top = load(scratch, 0)
    sums = splat(flat.dtype.type(0))
    for k in range(first, whole, LANES):
        lanes = exp_nonpositive(load(flat, k) - top)
        store(flat, k, lanes)
        sums = sums + lanes
    store(scratch, LANES, sums)
    for k in range(rest):
        flat[whole + k] = exp_nonpositive(flat[whole + k] - scratch[k])
        scratch[LANES + k] += flat[whole + k]
    for k in range(LANES - 1, heads - 1, -1):
        scratch[LANES + k - heads] += scratch[LANES + k]
    for k in range(heads):
        scratch[LANES + k] = 1 / scratch[LANES + k]
    for k in range(heads, LANES):
        scratch[LANES + k] = scratch[LANES + k - heads]
    scale = load(scratch, LANES)
    for k in range(first, whole, LANES):
        store(flat, k, load(flat, k) * scale)
    for k in range(rest):
        flat[whole + k] *= scratch[LANES + k]


@piece
def _top_lanes(flat, first, whole, rest, heads, scratch):
    """scratch[k] = the largest score of head k mod H, for the eight lanes k."""
    if whole > first:
        lanes = load(flat, first)
        for k in range(first + LANES, whole, LANES):
            lanes = larger(load(flat, k), lanes)
        store(scratch, 0, lanes)
    else:
        for k in range(LANES):
            scratch[k] = flat[first + k % heads]
    for k in range(rest):
        scratch[k] = max(scratch[k], flat[whole + k])
    for k in range(LANES - 1, heads - 1, -1):
        scratch[k - heads] = max(scratch[k - heads], scratch[k])
    for k in range(heads, LANES):
        scratch[k] = scratch[k - heads]


@piece
def _normalise_heads(flat, first, last, heads, scratch):
    for h in range(heads):
        scratch[h] = flat[first + h]
        scratch[heads + h] = 0
    for e in range(first, last, heads):
        for h in range(heads):
            scratch[h] = max(scratch[h], flat[e + h])
    for e in range(first, last, heads):
        for h in range(heads):
            value = exp_nonpositive(flat[e + h] - scratch[h])
            flat[e + h] = value
            scratch[heads + h] += value
    for h in range(heads):
        scratch[heads + h] = 1 / scratch[heads + h]
    for e in range(first, last, heads):
        for h in range(heads):
            flat[e + h] *= scratch[heads + h]
