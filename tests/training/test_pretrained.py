"""Models that come with fgai."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fgai
from fgai.attention import limits_of
from fgai.errors import CheckpointError
from fgai.graph.fingerprint import fingerprint
from fgai.training import load_model, pretrained_names, read_header
from fgai.training.model_file import PRETRAINED
from support.cli_cases import answer


def test_they_are_small_and_know_their_data() -> None:
    assert pretrained_names() == ["cora-fgai", "cora-gat", "planted-fgai", "planted-gat"]
    assert sum(path.stat().st_size for path in PRETRAINED.iterdir()) < 3 * 2**20
    data = fgai.load_dataset("planted")
    for name in ("planted-gat", "planted-fgai"):
        assert read_header(name)["data_fingerprint"] == fingerprint(data)


def test_they_predict_and_the_faithful_one_resists() -> None:
    data = fgai.load_dataset("planted")
    vanilla, faithful = (fgai.from_pretrained(name) for name in ("planted-gat", "planted-fgai"))
    assert not limits_of(vanilla) and limits_of(faithful)
    options = {"threat": "standard", "curves": False, "nulls": False, "explanation_attack": False}
    records = [fgai.evaluate(model, data, vanilla=vanilla, **options) for model in (vanilla, faithful)]
    clean, attacked = ([one.value(f"f1.{part}") for one in records] for part in ("clean", "attacked"))
    assert min(clean) > 0.8 and attacked[1] > attacked[0] + 0.3


def test_a_file_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = load_model("planted-gat")
    (tmp_path / "planted-gat").write_bytes(b"something else")
    with pytest.raises(CheckpointError):
        load_model("planted-gat")
    with pytest.raises(CheckpointError):
        load_model("planted-gcn")
    state = bundled.state_dict()
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.slow
def test_commands_take_their_names(tmp_path: Path) -> None:
    found = answer("attack", "planted-gat", "--threat", "random", cwd=tmp_path)
    assert found
