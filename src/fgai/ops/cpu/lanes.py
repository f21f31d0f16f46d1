"""A vector type for the kernels: eight numbers at a time.

A head often has 8 channels and a layer 8 heads, too few for LLVM's automatic vectorisation. A value of
`_LanesType` is a vector in registers: 8 numbers ("lanes"), or a tile of 64, e.g. 8 heads × 8 channels. It
supports `+ - *` with another of the same size, and the functions below, all of which keep NaN and infinity.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 8
TILE = 64
_FLAGS = ("reassoc", "contract", "nsz", "arcp")
_WORD = ir.IntType(32)
_LONG = ir.IntType(64)
_PLACES = ir.Constant(ir.VectorType(_LONG, LANES), [ir.Constant(_LONG, k) for k in range(LANES)])


class _LanesType(types.Type):  # type: ignore[misc]
    def __init__(self, dtype: Any, count: int = LANES) -> None:
        self.dtype, self.count = dtype, count
        super().__init__(f"Lanes({dtype}, {count})")


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        scalar = ir.FloatType() if kind.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, kind, ir.VectorType(scalar, kind.count))


def _constant(kind: Any, value: float) -> Any:
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def _shuffle(builder: Any, one: Any, two: Any, places: Sequence[int]) -> Any:
    """The lanes `places` of `one` (0..n-1) and `two` (n..2n-1)."""
    mask = ir.Constant(ir.VectorType(_WORD, len(places)), [ir.Constant(_WORD, k) for k in places])
    return builder.shuffle_vector(one, two, mask)


def _broadcast(builder: Any, value: Any, count: int = LANES) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_WORD, 0))
    return _shuffle(builder, one, nothing, [0] * count)


def _codegen(sig: Any, build: Callable[..., Any]) -> Any:
    return sig, lambda context, builder, _, args: build(builder, *args)


def _call(builder: Any, name: str, result: Any, *arguments: Any, **options: Any) -> Any:
    kind = ir.FunctionType(result, [g.type for g in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **options)


def _operator(function: Callable[[Any, Any], Any], instruction: str) -> None:
    class _Typing(AbstractTemplate):  # type: ignore[misc]
        key = function

        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], _LanesType) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    infer_global(function)(_Typing)

    @lower_builtin(function, _LanesType, _LanesType)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args, flags=_FLAGS)


for _function, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operator(_function, _instruction)


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any, *, count: int = LANES) -> Any:
    """Pointer to the `count` numbers at `offset` of a flat array."""
    data = context.make_array(kind)(context, builder, value=array).data
    vector = ir.VectorType(context.get_value_type(kind.dtype), count)
    return builder.bitcast(cgutils.gep_inbounds(builder, data, offset), vector.as_pointer())


def _load_type(array: Any, count: int) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _address(context, builder, array, *args, count=count)
        return builder.load(at, align=array.dtype.bitwidth // 8)

    return _LanesType(array.dtype, count)(array, types.intp), generate


@intrinsic
def _load(typingctx: Any, array: Any, offset: Any) -> Any:
    """array[offset : offset + 8] as lanes; not checked."""
    return _load_type(array, LANES)


@intrinsic
def _load_tile(typingctx: Any, array: Any, offset: Any) -> Any:
    """array[offset : offset + 64] as a tile; not checked."""
    return _load_type(array, TILE)


@intrinsic
def _store(typingctx: Any, array: Any, offset: Any, lanes: Any) -> Any:
    """array[offset : offset + 8] = lanes, or 64 numbers for a tile; not checked."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _address(context, builder, array, *args[:2], count=lanes.count)
        builder.store(args[2], at, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


def _mask(builder: Any, count: Any) -> Any:
    """Lanes 0..count-1."""
    return builder.icmp_signed("<", _PLACES, _broadcast(builder, count))


@intrinsic
def _load_some(typingctx: Any, array: Any, offset: Any, count: Any) -> Any:
    """array[offset : offset + count] as lanes, the rest zero; nothing beyond is touched."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, bits = _address(context, builder, array, *args[:2]), array.dtype.bitwidth
        name, vector = f"llvm.masked.load.v{LANES}f{bits}.p0", at.type.pointee
        mask, rest = _mask(builder, args[2]), _constant(vector, 0.0)
        return _call(builder, name, vector, at, ir.Constant(_WORD, bits // 8), mask, rest)

    return _LanesType(array.dtype)(array, types.intp, types.intp), generate


@intrinsic
def _store_some(typingctx: Any, array: Any, offset: Any, count: Any, lanes: Any) -> Any:
    """array[offset : offset + count] = the first lanes; nothing beyond is touched."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, bits = _address(context, builder, array, *args[:2]), array.dtype.bitwidth
        name, hint = f"llvm.masked.store.v{LANES}f{bits}.p0", ir.Constant(_WORD, bits // 8)
        _call(builder, name, ir.VoidType(), args[3], at, hint, _mask(builder, args[2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), generate


@intrinsic
def _prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, value=args[0]).data
        at = builder.bitcast(cgutils.gep_inbounds(builder, data, args[1]), cgutils.voidptr_t)
        hints = [ir.Constant(_WORD, k) for k in (0, 3, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), at, *hints)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _splat_type(value: Any, count: int) -> Any:
    return _codegen(_LanesType(value, count)(value), lambda builder, x: _broadcast(builder, x, count))


@intrinsic
def _splat(typingctx: Any, value: Any) -> Any:
    return _splat_type(value, LANES)


@intrinsic
def _splat_tile(typingctx: Any, value: Any) -> Any:
    return _splat_type(value, TILE)


@intrinsic
def _expand_lanes(typingctx: Any, lanes: Any) -> Any:
    """A tile with lane k at the places 8 k to 8 k + 7."""
    places = [k // LANES for k in range(TILE)]
    return _codegen(_LanesType(lanes.dtype, TILE)(lanes), lambda builder, x: _shuffle(builder, x, x, places))


@intrinsic
def _total(typingctx: Any, lanes: Any) -> Any:
    name = f"llvm.vector.reduce.fadd.v{LANES}f{lanes.dtype.bitwidth}"

    def build(builder: Any, x: Any) -> Any:
        scalar = x.type.element
        return _call(builder, name, scalar, _constant(scalar, 0.0), x, fastmath=_FLAGS)

    return _codegen(lanes.dtype(lanes), build)


@intrinsic
def _tile_totals(typingctx: Any, tile: Any) -> Any:
    """Lanes whose number k is the sum of places 8 k to 8 k + 7 of a tile, in three rounds of shuffles."""
    rounds = (
        ([0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]),
        ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
        ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    )

    def build(builder: Any, vector: Any) -> Any:
        rows = [range(k, k + LANES) for k in range(0, TILE, LANES)]
        vectors = [_shuffle(builder, vector, vector, row) for row in rows]
        for first, second in rounds:
            vectors = [
                builder.fadd(_shuffle(builder, x, y, first), _shuffle(builder, x, y, second))
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    return _codegen(_LanesType(tile.dtype)(tile), build)


@intrinsic
def _maximum(typingctx: Any, a: Any, b: Any) -> Any:
    return _codegen(a(a, b), lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


@intrinsic
def _where_positive(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """Choose a where condition > 0, else b; for lanes and for single numbers."""

    def build(builder: Any, c: Any, x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", c, _constant(c.type, 0.0)), x, y)

    return _codegen(a(condition, a, b), build)


@intrinsic
def _hash_factors(typingctx: Any, position: Any, seed: Any, limit: Any, scale: Any) -> Any:
    """0 or `scale` for eight positions in a row: the draws of `fgai.ops.reference`, eight at a time."""

    def build(builder: Any, position: Any, seed: Any, limit: Any, scale: Any) -> Any:
        words, longs = ir.VectorType(_WORD, LANES), ir.VectorType(_LONG, LANES)

        def mix(x: Any) -> Any:
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                x = builder.xor(x, builder.lshr(x, _constant(words, shift)))
                x = builder.mul(x, _constant(words, factor))
            return builder.xor(x, builder.lshr(x, _constant(words, 16)))

        at = builder.add(_broadcast(builder, position), _PLACES)
        low = _broadcast(builder, builder.trunc(seed, _WORD))
        high = _broadcast(builder, builder.trunc(builder.lshr(seed, ir.Constant(_LONG, 32)), _WORD))
        x = mix(builder.add(builder.trunc(at, words), low))
        beyond = builder.trunc(builder.lshr(at, _constant(longs, 32)), words)
        spread = builder.mul(builder.add(low, beyond), _constant(words, 0x9E3779B9))
        x = mix(builder.xor(builder.xor(x, high), spread))
        stays, scales = builder.icmp_unsigned(">=", x, _broadcast(builder, limit)), _broadcast(builder, scale)
        return builder.select(stays, scales, _constant(scales.type, 0.0))

    return _codegen(_LanesType(scale)(types.int64, types.int64, types.uint32, scale), build)


@intrinsic
def _exp_nonpositive(typingctx: Any, x: Any) -> Any:
    """exp(x) for x ≤ 0, of lanes or of one number, to 2 units in the last place; NaN gives NaN.

    2ⁿ · exp(r) with n = round(x / ln 2), r = x - n ln 2 and a Taylor polynomial on |r| ≤ ln 2 / 2; 0 below
    the smallest normal number. ln 2 is split into two constants to keep the digits of r. Rounding and the two
    subtractions are intrinsics, because fast maths would simplify the usual operations away.
    """
    lanes = isinstance(x, _LanesType)
    dtype = x.dtype if lanes else x
    if dtype not in (types.float32, types.float64):
        raise TypingError("exp_nonpositive takes float32 or float64")
    single = dtype == types.float32
    bits, mantissa, bias, degree = (32, 23, 127, 7) if single else (64, 52, 1023, 13)
    high, low = (0.693359375, -2.12194440e-4) if single else (6.93145751953125e-1, 1.42860682030941723212e-6)
    lowest = -87.3 if single else -708.3
    kind = f"v{LANES}f{bits}" if lanes else f"f{bits}"

    def build(builder: Any, value: Any) -> Any:
        real, integer = value.type, ir.IntType(bits)
        if lanes:
            integer = ir.VectorType(integer, LANES)
        scaled = builder.fmul(value, _constant(real, 1.0 / math.log(2.0)))
        n = _call(builder, f"llvm.rint.{kind}", real, scaled)
        r = _call(builder, f"llvm.fma.{kind}", real, n, _constant(real, -high), value)
        r = _call(builder, f"llvm.fma.{kind}", real, n, _constant(real, -low), r)
        polynomial = _constant(real, 1.0 / math.factorial(degree))
        for k in range(degree - 1, -1, -1):
            product = builder.fmul(polynomial, r, flags=("contract",))
            polynomial = builder.fadd(product, _constant(real, 1.0 / math.factorial(k)), flags=("contract",))
        # Adding 1.5 · 2^mantissa leaves the integer n in the low bits; the shift drops the rest.
        power = builder.bitcast(builder.fadd(n, _constant(real, 1.5 * 2.0**mantissa)), integer)
        power = builder.add(
            builder.shl(power, _constant(integer, mantissa)), _constant(integer, bias << mantissa)
        )
        result = builder.fmul(polynomial, builder.bitcast(power, real))
        tiny = builder.fcmp_ordered("<", value, _constant(real, lowest))
        return builder.select(tiny, _constant(real, 0.0), result)

    return _codegen(x(x), build)
