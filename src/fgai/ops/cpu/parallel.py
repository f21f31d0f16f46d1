"""How the work is divided: blocks of rows with about equal work, on torch's own threads.

A second pool of threads beside torch's would fight with it for the cores: both spin for milliseconds after
their work, waiting for more. So the kernels run on the very pool torch uses: its OpenMP runtime is asked to
run a function on n threads, and each thread takes the next block until none is left. Where torch has no such
runtime (Windows, macOS), plain Python threads do the same.

Blocks are taken in any order but each writes its own rows, so results do not depend on the threads.
`benchmarks/alternatives.py` compares this with numba's `prange`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from fgai.cache import cached_on
from fgai.sparse import Adjacency, SparseRows

Ints = NDArray[np.int32]
Reals = NDArray[Any]

# Work is counted in entries + rows. The division depends on the graph only, never on the number of threads,
# so results are the same on any machine width.
BLOCK_WORK = 2048
MAX_BLOCKS = 256
# Numbers of working space before those that depend on the number of heads.
SUMS = 16

_SYMBOL = "fgai_parallel"
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def _on_python_threads(work: int, frame: int, threads: int, flags: int) -> None:
    run = _WORK(work)
    others = [threading.Thread(target=run, args=(frame,)) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    run(frame)
    for thread in others:
        thread.join()


_fallback = _PARALLEL(_on_python_threads)


def _find_runtime() -> int:
    """Return the address of `GOMP_parallel` in the runtime torch is linked to, or of the fallback."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            found = ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        if found:
            return found
    address = ctypes.cast(_fallback, ctypes.c_void_p).value
    assert address is not None
    return address


binding.add_symbol(_SYMBOL, _find_runtime())


@intrinsic
def _run_blocks(typingctx: Any, body: Any, threads: Any, count: Any, arguments: Any) -> Any:
    """Call `body(b, *arguments)` for b = 0..count-1 on `threads` threads.

    `body` is a compiled function that returns nothing and raises nothing; `arguments` is a tuple.
    """
    call = body.get_call_type(typingctx, (types.intp, *arguments.types), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, thread_count, block_count, given = values
        compiled = body.dispatcher.get_compile_result(call)
        context.active_code_library.add_linking_library(compiled.library)
        index, void = context.get_value_type(types.intp), ir.VoidType()
        frame_type = ir.LiteralStructType([index, index, given.type])
        frame = cgutils.alloca_once(builder, frame_type)
        for k, value in enumerate((ir.Constant(index, 0), block_count, given)):
            builder.store(value, cgutils.gep_inbounds(builder, frame, 0, k))

        pointer = cgutils.voidptr_t
        name = f"{builder.function.name}.blocks"
        work = ir.Function(builder.module, ir.FunctionType(void, [pointer]), name)
        work.linkage = "internal"
        _fill(context, work, frame_type, compiled.fndesc, call)

        word = ir.IntType(32)
        start_type = ir.FunctionType(void, [pointer, pointer, word, word])
        start = cgutils.get_or_insert_function(builder.module, start_type, _SYMBOL)
        raw = builder.bitcast(frame, pointer)
        alone = builder.icmp_signed("<=", thread_count, ir.Constant(index, 1))
        with builder.if_else(alone) as (serial, parallel):
            with serial:
                builder.call(work, [raw])
            with parallel:
                wanted = builder.trunc(thread_count, word)
                builder.call(start, [builder.bitcast(work, pointer), raw, wanted, ir.Constant(word, 0)])
        return context.get_dummy_value()

    return types.void(body, types.intp, types.intp, arguments), generate


def _fill(context: Any, work: Any, frame_type: Any, described: Any, call: Any) -> None:
    """Write the function every thread runs: take the next block until none is left."""
    entry, check, inside, leave = (work.append_basic_block(n) for n in ("entry", "check", "inside", "leave"))
    builder = ir.IRBuilder(entry)
    frame = builder.bitcast(work.args[0], frame_type.as_pointer())
    counter = cgutils.gep_inbounds(builder, frame, 0, 0)
    count = builder.load(cgutils.gep_inbounds(builder, frame, 0, 1))
    given = builder.load(cgutils.gep_inbounds(builder, frame, 0, 2))
    builder.branch(check)
    builder.position_at_end(check)
    block = builder.atomic_rmw("add", counter, ir.Constant(frame_type.elements[0], 1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", block, count), inside, leave)
    builder.position_at_end(inside)
    unpacked = [builder.extract_value(given, k) for k in range(len(call.args) - 1)]
    context.call_internal_no_propagate(builder, described, call, [block, *unpacked])
    builder.branch(check)
    builder.position_at_end(leave)
    builder.ret_void()


class _Incoming(NamedTuple):
    """Edges by destination, in blocks of rows: the first arguments of every kernel over incoming edges."""

    blocks: Ints
    rowptr: Ints
    source: Ints


class _Outgoing(NamedTuple):
    """Edges by source, with position and destination: the first arguments of kernels over outgoing edges."""

    blocks: Ints
    colptr: Ints
    edge: Ints
    target: Ints


def blocks(pointers: Ints, most: int = MAX_BLOCKS) -> Ints:
    """Return the boundaries [B + 1] of at most `most` blocks of rows with about equal `entries + rows`."""
    rows = len(pointers) - 1
    work = pointers.astype(np.int64) + np.arange(rows + 1)
    count = int(np.clip(work[-1] // BLOCK_WORK, 1, most))
    targets = np.arange(1, count) * work[-1] // count
    inner = np.searchsorted(work, targets)
    return np.concatenate([[0], inner, [rows]]).astype(np.int32)


def _incoming(adjacency: Adjacency) -> _Incoming:
    """Return the incoming edges of `adjacency` as the kernels read them, made once and kept with it."""

    def make() -> _Incoming:
        adjacency.check_incoming()
        index = adjacency.index32
        rowptr = index.rowptr.numpy()
        return _Incoming(blocks(rowptr), rowptr, index.source.numpy())

    return cached_on(adjacency, "cpu incoming", make)


def _outgoing(adjacency: Adjacency) -> _Outgoing:
    """Return the outgoing edges of `adjacency` as the kernels read them, made once and kept with it."""

    def make() -> _Outgoing:
        adjacency.check_outgoing()
        index = adjacency.index32
        colptr = index.colptr.numpy()
        # The destinations in this order, so that no kernel has to look them up edge by edge.
        target = index.destination[adjacency.csc].numpy()
        return _Outgoing(blocks(colptr), colptr, index.csc.numpy(), target)

    return cached_on(adjacency, "cpu outgoing", make)


class _RowsPlan(NamedTuple):
    """A sparse matrix as the kernels read it, by rows."""

    blocks: Ints
    indptr: Ints
    indices: Ints


class _ColumnsPlan(NamedTuple):
    """The same entries ordered by column: pointers, row and position of each entry."""

    blocks: Ints
    colptr: Ints
    rows: Ints
    order: Ints


def _rows_plan(rows: SparseRows) -> _RowsPlan:
    """Return the row view of `rows`, made once for all matrices of its pattern."""

    def make() -> _RowsPlan:
        indptr, indices = (t.numpy() for t in rows.rows32)
        return _RowsPlan(blocks(indptr), indptr, indices)

    return cached_on(rows.pattern, "cpu rows", make)


def _columns_plan(rows: SparseRows) -> _ColumnsPlan:
    """Return the column view of `rows`, made once for all matrices of its pattern."""

    def make() -> _ColumnsPlan:
        colptr, row, order = (t.numpy() for t in rows.columns)
        return _ColumnsPlan(blocks(colptr), colptr, row, order)

    return cached_on(rows.pattern, "cpu columns", make)


def _array(tensor: Tensor) -> Reals:
    """Return a contiguous numpy view of `tensor` (a copy only when it is not contiguous)."""
    view: Reals = tensor.detach().contiguous().numpy()
    return view


def _flat(tensor: Tensor | Reals) -> Reals:
    """Return all numbers in a row, as the kernels read them."""
    return (_array(tensor) if isinstance(tensor, Tensor) else tensor).reshape(-1)


def workspace(blocks: Ints, scores: Reals, channels: int = 0) -> Reals:
    """Return room for each block of rows: `SUMS` + 3 H numbers, and behind them the sums of one row.

    The heads of the sums are padded to multiples of 8. The blocks lie far enough apart that threads do not
    share a cache line.
    """
    heads = scores.shape[1]
    size = SUMS + 3 * heads + heads * (channels + 7)
    return np.empty((len(blocks) - 1, size + 64 - size % 64), scores.dtype)


def _tensors(*arrays: Reals | None) -> tuple[Tensor | None, ...]:
    """Return tensors that share the memory of `arrays`."""
    return tuple(None if a is None else torch.from_numpy(a) for a in arrays)


def _launch(kernel: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run `count` blocks of a kernel `(threads, count, *arguments)`, on no more threads than torch uses."""
    kernel(min(torch.get_num_threads(), count), count, *arguments)


def _over(
    kernel: Callable[..., None], index: _Incoming | _Outgoing | _RowsPlan | _ColumnsPlan, *rest: Any
) -> None:
    """Run a kernel over the blocks of an index, which are its first arguments."""
    _launch(kernel, len(index.blocks) - 1, *index, *rest)
