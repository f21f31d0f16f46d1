"""Saved models come back the same; damaged files are named."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as pack_tensors
from torch import nn

from fgai.datasets import planted
from fgai.errors import CheckpointError, FgaiError
from fgai.models import GAT, GCN, GT, GATv2
from fgai.sparse import Features
from fgai.training import load_model, read_header, save_model, train
from support.training_cases import GRAPH, SHORT, assert_same_weights, fresh, header_of

STORED = Path(__file__).parents[1] / "support" / "models"
"""Models that were saved before the code was made smaller; they must stay readable."""


class TestCheckpoint:
    @pytest.mark.parametrize("name", ["GAT", "GATv2", "GT", "GCN"])
    def test_saved_and_read_back_is_equal(self, name: str, tmp_path: Path) -> None:
        model = train(fresh(name), GRAPH, **SHORT)
        path = save_model(
            model, tmp_path / "deep" / "model", data_fingerprint="abc", about={"dataset": "small"}
        )
        assert path.suffix == ".safetensors"
        back = load_model(path)
        assert type(back) is type(model) and not back.training
        assert_same_weights(back, model)
        assert torch.equal(back(GRAPH), model(GRAPH))
        assert back.history.terms == model.history.terms
        header = read_header(path)
        assert header["data_fingerprint"] == "abc" and header["about"] == {"dataset": "small"}
        assert header["config"] == json.loads(json.dumps(model.config))

    @pytest.mark.parametrize(("name", "first"), [("limited", -0.14120677), ("faithful", -0.13199925)])
    def test_models_written_by_earlier_code_are_read(self, name: str, first: float) -> None:
        graph = planted(seed=1, num_nodes=60, num_classes=3)
        assert graph.features is not None
        graph = graph.replace(features=Features.dense(graph.features.to_dense()[:, :12].contiguous()))
        model = load_model(STORED / f"{name}.safetensors", expect="GAT")
        assert float(model(graph)[0, 0]) == pytest.approx(first, abs=1e-6)
        assert name == "limited" or model.history.attempts >= 1  # `fgai.limit` trains nothing: no history

    def test_double_precision_comes_back(self, tmp_path: Path) -> None:
        model = fresh().double()
        back = load_model(save_model(model, tmp_path / "model"))
        assert_same_weights(back, model)
        assert {value.dtype for value in back.state_dict().values()} == {torch.float64}

    def test_a_file_of_an_older_schema_is_refused(self, tmp_path: Path) -> None:
        path = save_model(fresh(), tmp_path / "model")
        header = json.loads(header_of(path)["fgai"]) | {"schema": 1}
        path.write_bytes(pack_tensors(dict(fresh().state_dict()), {"fgai": json.dumps(header)}))
        with pytest.raises(CheckpointError, match=r"before fgai was released \(schema 1\); train anew"):
            load_model(path)

    def test_numbered_names_keep_their_dots(self, tmp_path: Path) -> None:
        assert save_model(fresh(), tmp_path / "gat.v1").name == "gat.v1.safetensors"

    def test_another_architecture_is_refused(self, tmp_path: Path) -> None:
        path = save_model(fresh("GATv2"), tmp_path / "model")
        with pytest.raises(CheckpointError, match=r"holds a GATv2, expected GAT$"):
            load_model(path, expect="GAT")

    def test_foreign_model_is_not_saved(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="got Linear"):
            save_model(nn.Linear(2, 3), tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_missing_damaged_and_foreign_files(self, tmp_path: Path) -> None:
        path = save_model(fresh(), tmp_path / "model")
        whole = path.read_bytes()
        (size,) = struct.unpack("<Q", whole[:8])

        def edited(change: dict[str, Any]) -> bytes:
            header = json.loads(header_of(path)["fgai"])
            tensors = {k: v.contiguous() for k, v in fresh().state_dict().items()}
            return pack_tensors(tensors, {"fgai": json.dumps({**header, **change})})

        cases = {
            "no checkpoint at": None,
            "truncated": whole[:-30],
            "damaged or not a safetensors": whole[: size // 2],
            "not a safetensors file": b"\x80\x04 a pickle, perhaps",
            "but no fgai model": pack_tensors({"weight": torch.ones(2, 3)}),
            "newer fgai": edited({"schema": 99}),
            "expected GAT or GATv2 or GCN or GT": edited({"class": "GIN"}),
            "does not fit its own architecture": edited({"config": {"in_channels": 6, "out_channels": 4}}),
            "own architecture": edited({"config": {"wings": 2}}),
            "does not say what it holds": edited({"schema": None}),
        }
        for number, (message, content) in enumerate(cases.items()):
            file = tmp_path / f"case-{number}.safetensors"
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(CheckpointError, match=message):
                load_model(file)
        with pytest.raises(CheckpointError):
            load_model(tmp_path)

    def test_a_failed_write_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = save_model(fresh(), tmp_path / "model")
        old = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FgaiError, match="No space left on device; nothing was changed"):
            save_model(fresh(seed=5), path)
        assert path.read_bytes() == old
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    def test_class_names_cover_the_models(self) -> None:
        assert {type(fresh(n)) for n in ("GAT", "GATv2", "GT", "GCN")} == {GAT, GATv2, GT, GCN}
