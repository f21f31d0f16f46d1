"""Changes of a graph that share their edges."""

from __future__ import annotations

import pytest
import torch

from fgai.graph import GraphChange
from fgai.graph.change import ChangedEdges


def ends() -> torch.Tensor:
    return torch.tensor([[0, 1], [2, 3]])


class TestChangedEdges:
    def test_the_very_tensors_are_known_without_being_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        endpoints = ends()
        seen = ChangedEdges(GraphChange(endpoints=endpoints, features=torch.zeros(2, 3)))
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("read"))
        assert seen.match(GraphChange(endpoints=endpoints, features=torch.ones(2, 3)))

    def test_equal_ones_are_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen, endpoints = ChangedEdges(GraphChange(endpoints=ends())), ends()
        assert seen.match(GraphChange(endpoints=endpoints))
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("read"))
        assert seen.match(GraphChange(endpoints=endpoints))

    def test_others_are_compared(self) -> None:
        seen = ChangedEdges(GraphChange(endpoints=ends()))
        assert seen.match(GraphChange(endpoints=ends()))
        assert not seen.match(GraphChange(endpoints=ends() + 1))
        assert not seen.match(GraphChange(edges=ends()))
        assert not seen.match(GraphChange())
        assert not ChangedEdges(GraphChange()).match(GraphChange(rows=torch.tensor([1])))

    def test_writing_into_the_edges_is_noticed(self) -> None:
        endpoints = ends()
        seen = ChangedEdges(GraphChange(endpoints=endpoints))
        endpoints[0, 0] = 7
        assert not seen.match(GraphChange(endpoints=endpoints))

    def test_tensors_that_count_no_writes_are_read(self) -> None:
        with torch.inference_mode():
            endpoints = ends()
            seen = ChangedEdges(GraphChange(endpoints=endpoints))
            assert seen.match(GraphChange(endpoints=endpoints))
            endpoints[0, 0] = 7
            assert not seen.match(GraphChange(endpoints=endpoints))
