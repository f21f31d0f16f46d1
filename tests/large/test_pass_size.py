"""What an exact pass writes is foretold to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fgai.errors import InputError
from fgai.large import observe_store, pass_size, write_store
from fgai.large.arrays import _ArrayFile
from fgai.large.streaming import _LayerPass
from fgai.models import GAT, GT, GATv2
from support.graph_cases import small_data
from support.store_cases import array_bytes, slow

HEADS = ("each", "mean")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", [GAT, GT, *slow((GATv2,))])
def test_of_a_pass(kind: Any, heads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data()
    options = {"encodings": 0, "heads": (3, 2, 1)} if kind is GT else {"heads": 3, "num_layers": 3}
    torch.manual_seed(0)
    model = kind.for_data(data, hidden_channels=6, **options)
    seen, remove, append = [], _LayerPass._remove, _ArrayFile.append

    def watched(self: _LayerPass, pattern: str) -> None:
        seen.append(array_bytes(self._folder))
        remove(self, pattern)

    def flushed(self: _ArrayFile, block: Any) -> None:
        append(self, block)
        self._file.flush()

    monkeypatch.setattr(_LayerPass, "_remove", watched)
    monkeypatch.setattr(_ArrayFile, "append", flushed)
    found = observe_store(model, write_store(data, tmp_path / "s"), tmp_path / "seen", heads=heads)
    edges = len(found.rows().source)
    size = pass_size(model, data.num_nodes, edges, data.num_features, heads=heads)
    manifest = (found.path / "observation.json").stat().st_size
    assert edges >= data.num_edges and array_bytes(found.path) - manifest == size.result
    assert max(seen) == size.peak


def test_a_model_that_mixes_nodes_elsewhere() -> None:
    class Other(nn.Module):
        pass

    with pytest.raises(InputError):
        pass_size(Other(), 5, 5, 5)
