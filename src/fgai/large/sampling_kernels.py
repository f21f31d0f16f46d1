"""Random neighbours from a counter-based generator.

A random number is a 64-bit hash (the finaliser of SplitMix64, Steele et al., OOPSLA 2014) of seed, node, hop
and its index. There is no shared state, so the result depends neither on the order of draws nor on workers.
"""

from __future__ import annotations

import numpy as np

from fgai.compiled import compiled

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

FEW = 48  # draws of a node up to which earlier ones are searched one by one
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE, _TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@compiled
def _mix(x):
    """Scramble 64 bits; every input bit flips every output bit with probability close to ½."""
    x = (x ^ (x >> np.uint64(30))) * _ONE
    x = (x ^ (x >> np.uint64(27))) * _TWO
    return x ^ (x >> np.uint64(31))


@compiled
def _after(state, number):
    """The state that follows `state` when `number` is added to what it depends on."""
    return _mix((state + _GOLDEN) ^ _mix(np.uint64(number)))


@compiled
def _folded(state, numbers):
    """`_after` for several numbers, in order."""
    for number in numbers:
        state = _after(state, number)
    return state


@compiled
def _each_after(state, numbers):
    """`_after` for each of several numbers alone."""
    states = np.empty(len(numbers), np.uint64)
    for i in range(len(numbers)):
        states[i] = _after(state, numbers[i])
    return states


@compiled
def _below(state, draw, count):
    """Number `draw` of the whole numbers in 0..count-1; the bias is below count / 2⁶⁴."""
    return np.int64(_mix(state + np.uint64(draw + 1) * _GOLDEN) % np.uint64(count))


@compiled
def _offsets(rowptr, nodes, fan_out, replace):
    """Where the edges of each node begin among those drawn: [n + 1]."""
    offset = np.zeros(len(nodes) + 1, np.int64)
    for i in range(len(nodes)):
        degree = rowptr[nodes[i] + 1] - rowptr[nodes[i]]
        if fan_out < 0 or degree == 0 or (degree < fan_out and not replace):
            offset[i + 1] = offset[i] + degree
        else:
            offset[i + 1] = offset[i] + fan_out
    return offset


@compiled
def _draw(rowptr, nodes, trees, streams, hop, fan_out, replace, offset, edges):
    """Write the positions of the drawn edges to `edges` [e], those into each node together.

    Node `nodes[i]` draws from `streams[trees[i]]` (uint64) and has the edges from `offset[i]` on, see
    `_offsets`; hops count from 0, a `fan_out` of -1 takes all neighbours.
    """
    for i in range(len(nodes)):
        first, at, count = rowptr[nodes[i]], offset[i], offset[i + 1] - offset[i]
        degree = rowptr[nodes[i] + 1] - first
        if fan_out < 0 or (count == degree and not replace):
            for j in range(count):
                edges[at + j] = first + j
            continue
        state = _after(_after(streams[trees[i]], hop), nodes[i])
        if replace:
            for j in range(count):
                edges[at + j] = first + _below(state, j, degree)
        elif count <= FEW:
            _few(state, first, degree, edges[at : at + count])
        else:
            _many(state, first, degree, edges[at : at + count])


@compiled
def _few(state, first, degree, edges):
    """Use Floyd's algorithm: every set of distinct edges is as likely as any other, in O(count²)."""
    count = len(edges)
    for j in range(count):
        last = degree - count + j
        chosen = first + _below(state, j, last + 1)
        for k in range(j):
            if edges[k] == chosen:
                chosen = first + last
                break
        edges[j] = chosen


@compiled
def _many(state, first, degree, edges):
    """Go through the edges, and draw each with probability (draws left) / (edges left): O(degree)."""
    drawn, count = 0, len(edges)
    for j in range(degree):
        if _below(state, j, degree - j) < count - drawn:
            edges[drawn] = first + j
            drawn += 1


@compiled
def _find(table, key):
    """Where a key is in an open table, or the free slot (-1) where it belongs; its number is behind it."""
    last = np.uint64(len(table) - 1)  # unsigned: numba then spends nothing on indices from the end
    slot = (_mix(np.uint64(key)) << np.uint64(1)) & last
    while table[slot] != -1 and table[slot] != key:
        slot = (slot + np.uint64(2)) & last
    return slot


@compiled
def _with_room(table, room):
    """Return an open table (see `_find`) with room for `room` keys and the content of another one."""
    size = 32
    while size < 4 * room:
        size *= 2
    larger = np.full(size, -1, np.int64)
    for old in range(0, len(table), 2):
        if table[old] != -1:
            slot = _find(larger, table[old])
            larger[slot], larger[slot + np.uint64(1)] = table[old], table[old + 1]
    return larger


@compiled
def _number_seeds(table, keys):
    """Enter keys, each numbered by its position; one that comes again keeps its first number."""
    for i in range(len(keys)):
        slot = _find(table, keys[i])
        if table[slot] == -1:
            table[slot], table[slot + np.uint64(1)] = keys[i], i


@compiled
def _keys_of(source, edges, trees, offset, begin, keys, column):
    """Write the keys [e] of drawn edges' sources (trees above 2³²), and the numbers of destinations."""
    for i in range(len(offset) - 1):
        for e in range(offset[i], offset[i + 1]):
            keys[e] = (np.int64(trees[i]) << 32) | np.int64(source[edges[e]])
            column[e] = begin + i


@compiled
def _enter(table, keys):
    """Enter keys and return new ones in order of appearance; replace each by the slot of its number."""
    fresh, new = np.empty(len(keys), np.int64), 0
    for e in range(len(keys)):
        slot = _find(table, keys[e])
        if table[slot] == -1:
            table[slot] = fresh[new] = keys[e]
            new += 1
        keys[e] = np.int64(slot + np.uint64(1))
    return fresh[:new]


@compiled
def _number(table, fresh, count, slots):
    """Number new keys from `count` on, and replace each of the slots of `_enter` by its content."""
    for i in range(len(fresh)):
        table[_find(table, fresh[i]) + np.uint64(1)] = count + i
    for e in range(len(slots)):
        slots[e] = table[slots[e]]
