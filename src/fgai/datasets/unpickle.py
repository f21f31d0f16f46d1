"""Read old pickles without running code: a few allowed names, replaced by classes that only keep values.

A pickle is a program. Allowing whole modules is not safe (`numpy.testing.runstring` runs code), and even an
allowed class can be altered by the program. So no numpy or scipy objects are constructed while the pickle
runs: it fills plain records, which are checked and turned into arrays afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from fgai.errors import DataError
from fgai.files import regular

_ARRAY_KINDS = "biuf"


class _Dtype:
    """Replaces `numpy.dtype`: keeps the type word and the byte order."""

    def __init__(self, word: object, *_: object) -> None:
        self.word = word
        self.order: object = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def resolve(self) -> np.dtype[Any]:
        if isinstance(self.word, str) and self.order in ("<", ">", "|", "="):
            dtype = np.dtype(self.word)
            if dtype.kind in _ARRAY_KINDS and dtype.fields is None:
                return dtype if self.order == "|" else dtype.newbyteorder(self.order)
        raise DataError(f"array type {self.word!r} is not a plain number")


class _Array:
    """Replaces an array made by numpy's `_reconstruct`: keeps shape, type and bytes."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def resolve(self) -> np.ndarray[Any, Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise DataError("an array without contents")
        _, shape, kind, by_columns, raw = self.state
        if isinstance(raw, str):  # written by Python 2 and decoded as latin1, byte for byte
            raw = raw.encode("latin1")
        sizes = isinstance(shape, tuple) and all(type(s) is int and s >= 0 for s in shape)
        if not sizes or not isinstance(kind, _Dtype) or not isinstance(raw, bytes):
            raise DataError("an array with odd contents")
        dtype = _Dtype.resolve(kind)
        if len(raw) != math.prod(shape) * dtype.itemsize:
            raise DataError(f"an array of shape {shape} with {len(raw)} bytes")
        values = np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if by_columns else "C")
        return values.astype(dtype.newbyteorder("="), order="C")


class _Csr:
    """Replaces scipy's `csr_matrix`: keeps its attributes as plain data."""

    def resolve(self) -> sp.csr_matrix:
        fields = vars(self)
        shape = fields.get("_shape", fields.get("shape"))
        parts = [fields.get(name) for name in ("data", "indices", "indptr")]
        if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(p, _Array) for p in parts):
            raise DataError("a sparse matrix with odd contents")
        data, indices, indptr = (_Array.resolve(part) for part in parts if isinstance(part, _Array))
        matrix = sp.csr_matrix((data, indices, indptr), shape=shape)
        matrix.check_format(full_check=True)
        return matrix


def _allowed_classes() -> dict[tuple[str, str], Any]:
    # Made again for every file: a pickle may write to the attributes of a class it names.
    array, matrix, dtype = (type(kind.__name__, (kind,), {}) for kind in (_Array, _Csr, _Dtype))
    return {
        ("numpy", "ndarray"): type("_Marker", (), {}),  # only an argument, never called
        ("numpy", "dtype"): dtype,
        ("numpy.core.multiarray", "_reconstruct"): array,
        ("numpy._core.multiarray", "_reconstruct"): array,
        ("scipy.sparse.csr", "csr_matrix"): matrix,
        ("scipy.sparse._csr", "csr_matrix"): matrix,
        ("collections", "defaultdict"): defaultdict,
        ("builtins", "list"): list,
        ("__builtin__", "list"): list,
    }


class _Unpickler(pickle.Unpickler):
    """An unpickler that looks up the allowed names and no others."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, encoding="latin1", fix_imports=False)
        self._names = _allowed_classes()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise DataError(f"it names `{module}.{name}`, which no dataset needs; do not trust it") from None


def _check_sizes(raw: bytes) -> None:
    """Raise if the memo has numbers beyond the file's size: the unpickler makes room for as many."""
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise DataError(f"it numbers an entry {argument} in {len(raw)} bytes; do not trust it")


def load_pickle(path: Path) -> Any:
    """Read a pickle of a numeric array, a sparse matrix, or a dictionary of lists; `DataError` for others."""
    try:
        raw = regular(path).read_bytes()
        _check_sizes(raw)
        result = _Unpickler(io.BytesIO(raw)).load()
        # Called on our own classes: what the pickle made may have attributes of these names.
        if isinstance(result, _Array):
            return _Array.resolve(result)
        if isinstance(result, _Csr):
            return _Csr.resolve(result)
        if isinstance(result, dict):
            return dict(result)
        raise DataError(f"it holds a {type(result).__name__}, not an array, a matrix or a dictionary")
    except DataError as error:
        raise DataError(f"{path} was refused: {error}") from None
    except Exception as error:  # a broken pickle can fail in any way
        raise DataError(f"{path} is truncated or not a pickle ({error}); fetch it again") from error
