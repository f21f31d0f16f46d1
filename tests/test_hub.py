"""Models and cards in folders, offline, and the hub asked through a stand-in."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fgai
from fgai.errors import CheckpointError, DataError, FgaiError, InputError, MissingExtraError
from fgai.reports.cards import Card, card
from support.report_cases import EVIL, GRAPH, comparison, models


@pytest.fixture(scope="module")
def made() -> Card:
    return card(comparison(), name="GAT")


@pytest.fixture
def folder(made: Card, tmp_path: Path) -> Path:
    return fgai.save_pretrained(models()["GAT"], tmp_path / "gat", card=made, about={"dataset": "tiny"})


class TestFolder:
    def test_model_and_card_come_back_without_the_hub(
        self, folder: Path, made: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        read = fgai.from_pretrained(folder)
        with torch.no_grad():
            torch.testing.assert_close(read(GRAPH), models()["GAT"].eval()(GRAPH))
        assert Card.load(folder / "card.json") == made and not read.training
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["GAT"] and config["config"] == models()["GAT"].config
        page = (folder / "README.md").read_text(encoding="utf-8")
        assert page.startswith("---\nlibrary_name: fgai\n") and made.to_markdown() in page

    def test_without_a_card_an_older_one_does_not_stay(self, folder: Path) -> None:
        fgai.save_pretrained(models()["GAT"], folder)
        assert not (folder / "card.json").exists()
        assert "No card was given" in (folder / "README.md").read_text()

    def test_a_card_of_another_model_is_refused_before_anything_is_written(
        self, made: Card, tmp_path: Path
    ) -> None:
        with pytest.raises(InputError, match="`card` must be of this GATv2"):
            fgai.save_pretrained(models()["FGAI"], tmp_path / "other", card=made)
        assert not (tmp_path / "other").exists()

    def test_names_on_the_page_are_text(self, made: Card, tmp_path: Path) -> None:
        evil = dataclasses.replace(made, name=f"{EVIL}\n---\nlicense: mine")
        fgai.save_pretrained(models()["GAT"], tmp_path, card=evil)
        page = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert "<script" not in page and page.splitlines().count("---") == 2

    def test_what_cannot_be_read_is_said(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="holds a GAT, expected GT"):
            fgai.from_pretrained(folder, expect="GT")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-9])
        with pytest.raises(CheckpointError):
            fgai.from_pretrained(folder)
        weights.unlink()
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            fgai.from_pretrained(folder)

    def test_a_full_disk_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(FgaiError, match="No space left on device; nothing was changed"):
            fgai.save_pretrained(models()["GAT"], tmp_path / "gat")


class TestHub:
    @pytest.mark.parametrize("name", ["nowhere", "./nowhere/gat", "a/b/c", Path("owner/gat")])
    def test_names_of_no_model_are_refused(self, name: Any) -> None:
        with pytest.raises(CheckpointError, match="must be a folder or owner/model on the hub"):
            fgai.from_pretrained(name)

    def test_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'fgai\[hub\]'"):
            fgai.from_pretrained("owner/gat")

    def test_the_weights_are_fetched_by_name(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def download(name: str, file: str, revision: str | None, token: str | None) -> str:
            asked.append((name, file, revision, token))
            if name != "owner/gat":
                raise OSError("404 for <that> name")
            return str(folder / file)

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
        assert type(fgai.from_pretrained("owner/gat", revision="v1", token="t")).__name__ == "GAT"
        assert asked == [("owner/gat", "model.safetensors", "v1", "t")]
        with pytest.raises(DataError, match=r"404 for <that> name.*check name, network and token"):
            fgai.from_pretrained("owner/other")

    def test_the_real_package_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("huggingface_hub")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match="the hub did not answer for 'nobody/nothing-here'"):
            fgai.from_pretrained("nobody/nothing-here")
