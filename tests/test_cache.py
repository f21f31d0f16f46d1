"""Values kept with an object: made once, gone with it, and not in its copies."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

from fgai.cache import cached_on
from fgai.ops import project
from fgai.sparse import SparseRows
from support.task_cases import batch_of_graphs


@dataclass(frozen=True)
class Point:
    x: int


class Heavy:
    """Something a weak reference can watch."""


def test_made_once_for_each_object_and_key() -> None:
    one, other, calls = Point(1), Point(1), []

    def make() -> int:
        calls.append(1)
        return len(calls)

    assert [cached_on(one, "a", make) for _ in range(3)] == [1, 1, 1]
    assert cached_on(one, ("a", 2), make) == 2 and cached_on(other, "a", make) == 3
    assert one == other and repr(one) == "Point(x=1)"


def test_none_is_a_value_too() -> None:
    point = Point(1)
    assert cached_on(point, "nothing", lambda: None) is None
    assert cached_on(point, "nothing", lambda: 3) is None


def test_a_failure_is_not_kept() -> None:
    point = Point(1)
    with pytest.raises(ZeroDivisionError):
        cached_on(point, "a", lambda: 1 // 0)
    assert cached_on(point, "a", lambda: 2) == 2


def test_it_goes_with_the_object() -> None:
    tensor = torch.arange(3)
    watched = weakref.ref(cached_on(tensor, "heavy", Heavy))
    assert watched() is not None
    del tensor
    gc.collect()
    assert watched() is None


def test_copies_begin_without_it() -> None:
    point = Point(1)
    cached_on(point, "a", lambda: 1)
    for other in (copy.deepcopy(point), pickle.loads(pickle.dumps(point)), replace(point)):
        assert other == point and cached_on(other, "a", lambda: 2) == 2


def test_a_graph_that_was_worked_with_can_be_pickled() -> None:
    graph = batch_of_graphs(sparse=True)
    assert graph.features is not None and isinstance(graph.features.base, SparseRows)
    graph.features.range()
    project(graph.features, torch.ones(graph.num_features, 2))
    back = pickle.loads(pickle.dumps(graph))
    assert torch.equal(back.adjacency.keys, graph.adjacency.keys)
