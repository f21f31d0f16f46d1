"""Small vectorised building blocks that LLVM would not find by itself when rows are short.

A head has often 8 channels: too few for an automatically vectorised loop, whose body handles 32 or more
numbers at a time. The blocks here emit vector instructions of 8 lanes directly; every processor maps them to
what it has.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

LANES = 8
# NaN and infinity must survive, so the flags that assume their absence (nnan, ninf) stay off.
FAST = {"reassoc", "contract", "nsz", "arcp"}
_FLAGS = ("reassoc", "contract")


def _lanes_at(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> tuple[Any, Any, int]:
    """Return (pointer to `LANES` numbers of the flat array from `offset`, vector type, bytes per number)."""
    data = context.make_array(array_type)(context, builder, value=array).data
    scalar = context.get_value_type(array_type.dtype)
    vector = ir.VectorType(scalar, LANES)
    here = cgutils.gep_inbounds(builder, data, offset)
    return builder.bitcast(here, vector.as_pointer()), vector, array_type.dtype.bitwidth // 8


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


@intrinsic
def _axpy_lanes(typingctx: Any, a: Any, x: Any, i: Any, y: Any, j: Any) -> Any:
    """y[j:j+8] += a · x[i:i+8]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scale, xs, i0, ys, j0 = args
        x_at, vector, size = _lanes_at(context, builder, x, xs, i0)
        y_at, _, _ = _lanes_at(context, builder, y, ys, j0)
        product = builder.fmul(_splat(builder, scale, vector), builder.load(x_at, align=size), flags=_FLAGS)
        total = builder.fadd(builder.load(y_at, align=size), product, flags=_FLAGS)
        builder.store(total, y_at, align=size)
        return context.get_dummy_value()

    return types.void(y.dtype, x, types.intp, y, types.intp), generate


@intrinsic
def _dot_lanes(typingctx: Any, x: Any, i: Any, y: Any, j: Any) -> Any:
    """Σ x[i:i+8] · y[j:j+8]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        xs, i0, ys, j0 = args
        x_at, vector, size = _lanes_at(context, builder, x, xs, i0)
        y_at, _, _ = _lanes_at(context, builder, y, ys, j0)
        product = builder.fmul(builder.load(x_at, align=size), builder.load(y_at, align=size), flags=_FLAGS)
        scalar = vector.element
        kind = "f32" if size == 4 else "f64"
        reduce_type = ir.FunctionType(scalar, [scalar, vector])
        reduce = cgutils.get_or_insert_function(
            builder.module, reduce_type, f"llvm.vector.reduce.fadd.v{LANES}{kind}"
        )
        return builder.call(reduce, [ir.Constant(scalar, 0.0), product], fastmath=_FLAGS)

    return x.dtype(x, types.intp, y, types.intp), generate


@intrinsic
def exp_nonpositive(typingctx: Any, x: Any) -> Any:
    """exp(x) for x ≤ 0, in plain arithmetic, so that a loop over it vectorises.

    2ⁿ · exp(r) with n = round(x / ln 2), r = x - n ln 2 and a Taylor polynomial on |r| ≤ ln 2 / 2. Below the
    smallest normal number the result is 0. NaN gives NaN. Accurate to 2 units in the last place. Rounding and
    the two steps of r are opaque calls, because fast maths would simplify the usual additions away.
    """
    if x not in (types.float32, types.float64):
        raise TypingError("exp takes float32 or float64")
    single = x == types.float32
    bits, mantissa, bias, degree = (32, 23, 127, 7) if single else (64, 52, 1023, 13)
    kind = f"f{bits}"
    high, low = (0.693359375, -2.12194440e-4) if single else (6.93145751953125e-1, 1.42860682030941723212e-6)
    lowest = -87.3 if single else -708.3

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        real, whole = context.get_value_type(x), ir.IntType(bits)

        def constant(number: float) -> Any:
            return ir.Constant(real, number)

        def call(name: str, result: Any, *given: Any) -> Any:
            kind_of = ir.FunctionType(result, [g.type for g in given])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind_of, name), given)

        n = call(f"llvm.rint.{kind}", real, builder.fmul(value, constant(1.0 / math.log(2.0))))
        r = call(f"llvm.fma.{kind}", real, n, constant(-high), value)
        r = call(f"llvm.fma.{kind}", real, n, constant(-low), r)
        polynomial = constant(1.0 / math.factorial(degree))
        for k in range(degree - 1, -1, -1):
            product = builder.fmul(polynomial, r, flags=("contract",))
            polynomial = builder.fadd(product, constant(1.0 / math.factorial(k)), flags=("contract",))
        power = call(f"llvm.fptosi.sat.i{bits}.{kind}", whole, n)
        power = builder.shl(builder.add(power, ir.Constant(whole, bias)), ir.Constant(whole, mantissa))
        result = builder.fmul(polynomial, builder.bitcast(power, real))
        tiny = builder.fcmp_ordered("<", value, constant(lowest))
        return builder.select(tiny, constant(0.0), result)

    return x(x), generate


@njit(inline="always", cache=True)
def axpy(n, a, x, i, y, j):  # type: ignore[no-untyped-def]
    """y[j:j+n] += a · x[i:i+n] for flat arrays."""
    whole = n - n % LANES
    for c in range(0, whole, LANES):
        _axpy_lanes(a, x, i + c, y, j + c)
    for c in range(whole, n):
        y[j + c] += a * x[i + c]


@njit(inline="always", cache=True)
def dot(n, x, i, y, j):  # type: ignore[no-untyped-def]
    """Σ_c x[i+c] · y[j+c] for flat arrays."""
    total = x.dtype.type(0)
    whole = n - n % LANES
    for c in range(0, whole, LANES):
        total += _dot_lanes(x, i + c, y, j + c)
    for c in range(whole, n):
        total += x[i + c] * y[j + c]
    return total
