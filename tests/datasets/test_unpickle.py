"""The restricted unpickler reads what datasets hold and runs nothing."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, defaultdict
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from fgai.datasets import unpickle
from fgai.datasets.unpickle import load_pickle
from fgai.errors import DataError


def write(folder: Path, content: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


def python2_array(
    raw: bytes = np.arange(6, dtype="<i4").tobytes(), kind: bytes = b"i4", order: bytes = b"<"
) -> bytes:
    """A [2, 3] array as Python 2 pickled it: old module paths, contents as a byte string."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU" + bytes([len(kind)]) + kind + b"K\x00K\x01\x87R"
        b"(K\x03U\x01"
        + order
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U"
        + bytes([len(raw)])
        + raw
        + b"tb."
    )


def call(module: str, name: str, argument: bytes) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + argument + b"\x85R."


@pytest.mark.parametrize("kind", ["<i4", ">i8", "<f4", "|b1", "|u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_arrays(tmp_path: Path, kind: str, order: str) -> None:
    array = np.asarray(np.arange(15).reshape(3, 5) % 2, dtype=kind, order=order)  # type: ignore[call-overload]
    found = load_pickle(write(tmp_path, pickle.dumps(array, protocol=4)))
    np.testing.assert_array_equal(found, array)
    assert found.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")


def test_reads_python2_arrays(tmp_path: Path) -> None:
    np.testing.assert_array_equal(load_pickle(write(tmp_path, python2_array())), np.arange(6).reshape(2, 3))
    big = np.arange(6, dtype=">i4").tobytes()
    np.testing.assert_array_equal(
        load_pickle(write(tmp_path, python2_array(big, order=b">"))), np.arange(6).reshape(2, 3)
    )


def test_reads_sparse_matrices_and_dictionaries(tmp_path: Path) -> None:
    matrix = sp.random(7, 5, 0.4, format="csr", rng=np.random.default_rng(3))
    found = load_pickle(write(tmp_path, pickle.dumps(sp.csr_matrix(matrix), protocol=4)))
    np.testing.assert_array_equal(found.toarray(), matrix.toarray())
    graph = defaultdict(list, {3: [1, 2], 1: [3]})
    assert load_pickle(write(tmp_path, pickle.dumps(graph, protocol=4))) == {3: [1, 2], 1: [3]}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("builtins", "getattr"),
        ("numpy.testing", "runstring"),
        ("numpy.testing._private.utils", "runstring"),
        ("numpy", "load"),
        ("numpy", "ndarray.tofile"),
        ("numpy.core.multiarray", "fromfile"),
        ("scipy.sparse.csr", "csr_matrix.__init__"),
        ("scipy.sparse", "load_npz"),
        ("collections", "OrderedDict"),
        ("fgai.datasets.unpickle", "load_pickle"),
    ],
)
def test_other_names_are_refused(tmp_path: Path, module: str, name: str) -> None:
    target = tmp_path / "made"
    command = f"touch {target}" if "system" in name else f"open({str(target)!r}, 'w')"
    path = write(tmp_path, call(module, name, b"V" + command.encode() + b"\n"))
    with pytest.raises(DataError, match=f"names `{module}.{name}`"):
        load_pickle(path)
    assert not target.exists()


class Evil:
    """Runs a command when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", range(6))
def test_reduce_is_refused_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = write(tmp_path, pickle.dumps({1: [Evil(tmp_path / "made")]}, protocol=protocol))
    with pytest.raises(DataError, match="system"):
        load_pickle(path)
    assert not (tmp_path / "made").exists()


def test_a_pickle_cannot_alter_our_classes(tmp_path: Path) -> None:
    # BUILD with a slot state sets attributes of whatever is on the stack, here of the class itself.
    alter = b"\x80\x02cscipy.sparse.csr\ncsr_matrix\nN}U\x07resolvec__builtin__\nlist\ns\x86b."
    with pytest.raises(DataError):
        load_pickle(write(tmp_path, alter))
    assert sp.csr_matrix.__name__ == "csr_matrix" and not hasattr(sp.csr_matrix, "resolve")
    assert unpickle._Csr.resolve.__qualname__ == "_Csr.resolve"
    instance = b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}U\x07resolvec__builtin__\nlist\nsb."
    with pytest.raises(DataError, match="odd contents"):
        load_pickle(write(tmp_path, instance))


@pytest.mark.parametrize(
    "content",
    [
        python2_array(raw=b"\x00" * 16, kind=b"O8"),
        python2_array(raw=b"\x00" * 23),
        python2_array(kind=b"V4"),
        python2_array(kind=b"zz"),
        python2_array(order=b"?"),
        pickle.dumps(np.array([None, 1], dtype=object), protocol=4),
        pickle.dumps([1, 2], protocol=4),
        pickle.dumps(OrderedDict(), protocol=4),
        pickle.dumps(Fraction(1, 2), protocol=4),
        pickle.dumps(None),
        b"\x80\x02cnumpy\nndarray\n.",
        b"",
        b"not a pickle at all",
        b"\x80\x02U\xff",
        b"PK\x03\x04",
    ],
)
def test_foreign_contents_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="file"):
        load_pickle(write(tmp_path, content))


def test_damaged_sparse_matrices_are_refused(tmp_path: Path) -> None:
    for field, value in (("indices", np.array([0, 9], dtype=np.int32)), ("indptr", np.array([0, 2, 1, 2]))):
        matrix = sp.csr_matrix(np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
        setattr(matrix, field, value)
        with pytest.raises(DataError):
            load_pickle(write(tmp_path, pickle.dumps(matrix, protocol=4)))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = python2_array()
    for size in range(len(whole)):
        with pytest.raises(DataError):
            load_pickle(write(tmp_path, whole[:size]))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent"):
        load_pickle(tmp_path / "absent")


@given(content=st.binary(max_size=60))
def test_any_bytes_give_data_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = write(tmp_path_factory.mktemp("bytes"), content)
    with suppress(DataError):
        assert isinstance(load_pickle(path), dict | np.ndarray | sp.csr_matrix)
