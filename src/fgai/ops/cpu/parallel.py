"""Kernels over blocks of rows with about equal work, on torch's own threads.

A second pool of threads would compete with torch's for the cores, as both busy-wait after their work. So
torch's OpenMP runtime runs a function on n threads, and each takes the next block until none is left. Where
torch has no such runtime (Windows, macOS), Python threads do the same. Each block writes its own rows, so
results do not depend on the number of threads. `benchmarks/alternatives.py` compares with `prange`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
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
from fgai.ops.cpu.rows import _kernel
from fgai.sparse import Adjacency, SparseRows

Ints = NDArray[np.int32]
Reals = NDArray[Any]

BLOCK_WORK = 2048  # entries + rows in a block, at least; blocks do not depend on the number of threads
MAX_BLOCKS = 256
SUMS = 16  # numbers at the beginning of a block's working space: two vectors of 8 lanes

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


def _find_runtime() -> int | None:
    """The address of `GOMP_parallel` in the runtime torch is linked to, or of the fallback."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return ctypes.cast(_fallback, ctypes.c_void_p).value


binding.add_symbol(_SYMBOL, _find_runtime())


@intrinsic
def _run_blocks(typingctx: Any, body: Any, threads: Any, count: Any, arguments: Any) -> Any:
    """Call the compiled `body(b, *arguments)` for b = 0..count-1 on `threads` threads; it raises nothing."""
    call = body.get_call_type(typingctx, (types.intp, *arguments.types), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, thread_count, block_count, packed = values
        compiled = body.dispatcher.get_compile_result(call)
        context.active_code_library.add_linking_library(compiled.library)
        index, void = context.get_value_type(types.intp), ir.VoidType()
        frame_type = ir.LiteralStructType([index, index, packed.type])
        frame = cgutils.alloca_once(builder, frame_type)
        for k, value in enumerate((ir.Constant(index, 0), block_count, packed)):
            builder.store(value, cgutils.gep_inbounds(builder, frame, 0, k))

        pointer = cgutils.voidptr_t
        name = f"{builder.function.name}.blocks"
        work = ir.Function(builder.module, ir.FunctionType(void, [pointer]), name)
        work.linkage = "internal"
        _write_worker(context, work, frame_type, compiled.fndesc, call)

        word = ir.IntType(32)
        start_type = ir.FunctionType(void, [pointer, pointer, word, word])
        start = cgutils.get_or_insert_function(builder.module, start_type, _SYMBOL)
        raw = builder.bitcast(frame, pointer)
        alone = builder.icmp_signed("<=", thread_count, ir.Constant(index, 1))
        with builder.if_else(alone) as (serial, parallel):
            with serial:
                builder.call(work, [raw])
            with parallel:
                team = builder.trunc(thread_count, word)
                builder.call(start, [builder.bitcast(work, pointer), raw, team, ir.Constant(word, 0)])
        return context.get_dummy_value()

    return types.void(body, types.intp, types.intp, arguments), generate


def _write_worker(context: Any, work: Any, frame_type: Any, described: Any, call: Any) -> None:
    """Write the function of a thread, which takes the next block of the shared frame until none is left."""
    entry, check, inside, leave = (work.append_basic_block(n) for n in ("entry", "check", "inside", "leave"))
    builder = ir.IRBuilder(entry)
    frame = builder.bitcast(work.args[0], frame_type.as_pointer())
    counter = cgutils.gep_inbounds(builder, frame, 0, 0)
    count = builder.load(cgutils.gep_inbounds(builder, frame, 0, 1))
    packed = builder.load(cgutils.gep_inbounds(builder, frame, 0, 2))
    builder.branch(check)
    builder.position_at_end(check)
    block = builder.atomic_rmw("add", counter, ir.Constant(frame_type.elements[0], 1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", block, count), inside, leave)
    builder.position_at_end(inside)
    unpacked = [builder.extract_value(packed, k) for k in range(len(call.args) - 1)]
    context.call_internal_no_propagate(builder, described, call, [block, *unpacked])
    builder.branch(check)
    builder.position_at_end(leave)
    builder.ret_void()


class _Rows(NamedTuple):
    """Edges by destination, or a sparse matrix by row: the first arguments of a kernel."""

    blocks: Ints  # [B + 1] first row of each block
    pointer: Ints  # [N + 1] first entry of each row
    node: Ints  # [E] source, or column, of each entry


class _Columns(NamedTuple):
    """Edges by source, or a sparse matrix by column."""

    blocks: Ints
    pointer: Ints
    entry: Ints  # [E] position of each entry in `_Rows`
    node: Ints  # [E] destination, or row, of each entry


def _body() -> None:
    """Placeholder in `_run` for the compiled body, see `_by_block`."""


def _run(threads, count, *arguments):  # type: ignore[no-untyped-def]
    _run_blocks(_body, threads, count, arguments)


def _by_block(body: Callable[..., None], **options: Any) -> Any:
    """Compile `body(b, *arguments)` and return a kernel `(threads, count, *arguments)` that runs all blocks.

    The kernel is a copy of `_run` with a name and a file of its own, by which numba finds its code on disk.
    """
    name, own, block = f"{body.__name__}_blocks", body.__code__, _kernel(body, **options)
    code = _run.__code__.replace(co_name=name, co_filename=own.co_filename, co_firstlineno=own.co_firstlineno)
    run = FunctionType(code, {"_run_blocks": _run_blocks, "_body": block}, name)
    run.__module__, run.__qualname__ = body.__module__, name
    kernel: Any = _kernel(run)
    kernel.block = block
    return kernel


def blocks(pointers: Ints, most: int = MAX_BLOCKS) -> Ints:
    """Boundaries [B + 1] of at most `most` blocks of rows with about equal `entries + rows`."""
    rows = len(pointers) - 1
    work = pointers.astype(np.int64) + np.arange(rows + 1)
    count = int(np.clip(work[-1] // BLOCK_WORK, 1, most))
    inner = np.searchsorted(work, np.arange(1, count) * work[-1] // count)
    return np.concatenate([[0], inner, [rows]]).astype(np.int32)


def _with_blocks(pointer: Tensor, *entries: Tensor) -> tuple[Ints, ...]:
    starts = pointer.numpy()
    return blocks(starts), starts, *(t.numpy() for t in entries)


def _incoming(adjacency: Adjacency) -> _Rows:
    index = adjacency.index32
    return cached_on(adjacency, "cpu incoming", lambda: _Rows(*_with_blocks(index.rowptr, index.source)))


def _outgoing(adjacency: Adjacency) -> _Columns:
    """Edges by source; made once. Holds the destinations in this order, so that no kernel looks them up."""

    def make() -> _Columns:
        adjacency.check_outgoing()
        index = adjacency.index32
        return _Columns(*_with_blocks(index.colptr, index.csc, index.destination[adjacency.csc]))

    return cached_on(adjacency, "cpu outgoing", make)


def _matrix_rows(rows: SparseRows) -> _Rows:
    return cached_on(rows.pattern, "cpu rows", lambda: _Rows(*_with_blocks(*rows.rows32)))


def _matrix_columns(rows: SparseRows) -> _Columns:
    colptr, row, order = rows.columns
    return cached_on(rows.pattern, "cpu columns", lambda: _Columns(*_with_blocks(colptr, order, row)))


def _array(tensor: Tensor) -> Reals:
    """A contiguous numpy view of `tensor`; a copy only when it is not contiguous."""
    view: Reals = tensor.detach().contiguous().numpy()
    return view


def _flat(tensor: Tensor | Reals) -> Reals:
    return (_array(tensor) if isinstance(tensor, Tensor) else tensor).reshape(-1)


def _workspace(blocks: Ints, scores: Reals, channels: int = 0) -> Reals:
    """Working space for each block of rows: `SUMS` + 3 H numbers, then the sums of one row [H, C].

    Channels are padded to a multiple of 8, blocks to whole cache lines, which no two threads share.
    """
    heads = scores.shape[1]
    size = SUMS + 3 * heads + heads * (channels + 7)
    return np.empty((len(blocks) - 1, size + 64 - size % 64), scores.dtype)


def _tensors(*arrays: Reals | None) -> tuple[Tensor | None, ...]:
    return tuple(None if a is None else torch.from_numpy(a) for a in arrays)


def _launch(kernel: Callable[..., None], count: int, *arguments: Any) -> None:
    kernel(min(torch.get_num_threads(), count), count, *arguments)


def _over(kernel: Callable[..., None], index: _Rows | _Columns, *rest: Any) -> None:
    """Run a kernel over the blocks of an index, which are its first arguments."""
    _launch(kernel, len(index.blocks) - 1, *index, *rest)
