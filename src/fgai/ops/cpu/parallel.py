"""Blocks of rows on torch's own threads.

A second pool of threads beside torch's would fight with it for the cores: both spin for milliseconds after
their work, waiting for more. So the kernels run on the very pool torch uses: its OpenMP runtime is asked to
run a function on n threads, and each thread takes the next block until none is left. Where torch has no such
runtime (Windows, macOS), plain Python threads do the same.

Blocks are taken in any order but each writes its own rows, so results do not depend on the threads.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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


def threads_for(blocks: int) -> int:
    """Return how many threads to use for `blocks` blocks: never more than torch does."""
    return min(torch.get_num_threads(), blocks)


@intrinsic
def run_blocks(typingctx: Any, body: Any, threads: Any, count: Any, arguments: Any) -> Any:
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
