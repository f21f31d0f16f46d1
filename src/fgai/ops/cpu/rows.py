"""The pieces the kernels are made of, each on flat arrays: scale and add, inner product, softmax of a row."""

from __future__ import annotations

from numba import njit

from fgai.ops.cpu.lanes import LANES, exp_nonpositive, larger, load, prefetch, splat, store, total

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# The flags that assume NaN and infinity away (nnan, ninf) stay off: both must survive.
FAST = {"reassoc", "contract", "nsz", "arcp"}
# Kernels only read and write arrays they are given, so numba's reference counting is switched off: left on, it
# costs more than the arithmetic of a short row.
piece = njit(inline="always", fastmath=FAST, nogil=True, cache=True, _nrt=False)
kernel = njit(fastmath=FAST, nogil=True, cache=True, _nrt=False)
# How many edges ahead rows are asked for.
AHEAD = 6


@piece
def axpy(n, a, x, i, y, j):
    """y[j:j+n] += a · x[i:i+n]."""
    whole = n - n % LANES
    scale = splat(a)
    for c in range(0, whole, LANES):
        store(y, j + c, load(y, j + c) + scale * load(x, i + c))
    for c in range(whole, n):
        y[j + c] += a * x[i + c]


@piece
def dot(n, x, i, y, j):
    """Σ_c x[i+c] · y[j+c]."""
    whole = n - n % LANES
    result = x.dtype.type(0)
    if whole > 0:
        lanes = load(x, i) * load(y, j)
        for c in range(LANES, whole, LANES):
            lanes = lanes + load(x, i + c) * load(y, j + c)
        result = total(lanes)
    for c in range(whole, n):
        result += x[i + c] * y[j + c]
    return result


@piece
def dot_axpy(n, x, i, y, j, a, z, k):
    """z[k:k+n] += a · x[i:i+n], and return Σ_c x[i+c] · y[j+c]: x is read once."""
    whole = n - n % LANES
    result = x.dtype.type(0)
    scale = splat(a)
    if whole > 0:
        lanes = splat(result)
        for c in range(0, whole, LANES):
            here = load(x, i + c)
            lanes = lanes + here * load(y, j + c)
            store(z, k + c, load(z, k + c) + scale * here)
        result = total(lanes)
    for c in range(whole, n):
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
    """result[h] = Σ over the edges in first..last of weight · value, per head; `scratch` as in `normalise`."""
    if LANES % heads == 0:
        whole = last - (last - first) % LANES
        lanes = splat(weight.dtype.type(0))
        for k in range(first, whole, LANES):
            lanes = lanes + load(weight, k) * load(value, k)
        store(scratch, 0, lanes)
        for k in range(whole, last):
            scratch[k - whole] += weight[k] * value[k]
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

    The heads of an edge lie side by side. When their number divides 8, lane k holds head k mod H of every edge
    whatever its position, so the row is one flat run of vectors. `scratch`: see `plan.workspace`.
    """
    if LANES % heads == 0:
        _normalise_lanes(flat, first, last, heads, scratch)
    else:
        _normalise_heads(flat, first, last, heads, scratch)


@piece
def _normalise_lanes(flat, first, last, heads, scratch):
    whole = last - (last - first) % LANES
    if whole > first:
        lanes = load(flat, first)
        for k in range(first + LANES, whole, LANES):
            lanes = larger(load(flat, k), lanes)
        store(scratch, 0, lanes)
    else:
        for k in range(LANES):
            scratch[k] = flat[first + k % heads]
    for k in range(whole, last):
        scratch[k - whole] = max(scratch[k - whole], flat[k])
    for k in range(LANES - 1, heads - 1, -1):
        scratch[k - heads] = max(scratch[k - heads], scratch[k])
    for k in range(heads, LANES):
        scratch[k] = scratch[k - heads]
    top = load(scratch, 0)
    sums = splat(flat.dtype.type(0))
    for k in range(first, whole, LANES):
        lanes = exp_nonpositive(load(flat, k) - top)
        store(flat, k, lanes)
        sums = sums + lanes
    store(scratch, LANES, sums)
    for k in range(whole, last):
        flat[k] = exp_nonpositive(flat[k] - scratch[k - whole])
        scratch[LANES + k - whole] += flat[k]
    for k in range(LANES - 1, heads - 1, -1):
        scratch[LANES + k - heads] += scratch[LANES + k]
    for k in range(heads):
        scratch[LANES + k] = 1 / scratch[LANES + k]
    for k in range(heads, LANES):
        scratch[LANES + k] = scratch[LANES + k - heads]
    scale = load(scratch, LANES)
    for k in range(first, whole, LANES):
        store(flat, k, load(flat, k) * scale)
    for k in range(whole, last):
        flat[k] *= scratch[LANES + k - whole]


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
