"""Models of one's own in files: weights and a name, and nothing is imported that was not asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn

import fgai
from fgai.attention import limits_of
from fgai.errors import CheckpointError, FgaiError, InputError
from fgai.training import history_of, make_model, read_header
from support import own_cases as own
from support.training_cases import header_of

NAME = "support.own_cases:OwnNet"
DATA = own.own_data()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(DATA.x, DATA.edge_index, DATA.edge_attr)


def saved(folder: Path, **options: Any) -> Path:
    return fgai.save_model(own.own_model("GATConv"), folder / "mine", **options)


@pytest.mark.parametrize("factory", [own.OwnNet, NAME])
def test_save_and_load_are_inverse(factory: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, factory=factory, arguments={"conv": "GATConv"}, about={"note": "mine"})
    header = read_header(path)
    assert (header["class"], header["factory"], header["about"]) == ("OwnNet", NAME, {"note": "mine"})
    for given in (own.OwnNet, NAME):
        back = fgai.load_model(path, expect="OwnNet", factory=given)
        assert type(back) is own.OwnNet and not back.training
        assert torch.equal(logits(back), logits(own.own_model("GATConv")))


def test_limits_history_and_wrapping_come_back(tmp_path: Path) -> None:
    def call(m: nn.Module, g: Any) -> Tensor:
        return m(g.x, g.edge_index, g.edge_attr)

    wrapped = fgai.wrap(own.own_model(), call)
    faithful = fgai.make_faithful(wrapped, DATA, epochs=2, nodes=2, edges=3, progress=False)
    path = fgai.save_model(faithful, tmp_path / "mine", factory=own.OwnNet)
    with pytest.raises(CheckpointError, match="let `factory` return the wrapped model"):
        fgai.load_model(path, factory=own.OwnNet)
    back = fgai.load_model(path, factory=lambda: fgai.wrap(own.OwnNet(), call))
    assert len(limits_of(back)) == len(limits_of(faithful)) > 0
    assert torch.equal(back(DATA), faithful(DATA))
    assert history_of(back).terms == history_of(faithful).terms


def test_weights_of_another_program_are_read_into_what_the_factory_makes(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    path.write_bytes(pack_tensors(dict(own.own_model().state_dict())))
    assert torch.equal(logits(fgai.load_model(path, factory=own.own_net)), logits(own.own_model()))
    assert type(fgai.load_model(path, expect="OwnNet", factory=own.own_net)) is own.OwnNet
    with pytest.raises(CheckpointError, match=r"returned a OwnNet for .*, expected GAT"):
        fgai.load_model(path, expect="GAT", factory=own.own_net)
    with pytest.raises(
        CheckpointError, match=r"no fgai model.*give its class or function, `load_model\(path, factory"
    ):
        fgai.load_model(path)


def test_nothing_is_imported_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap_of_a_file.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = saved(tmp_path, factory="trap_of_a_file:make")
    words = r"holds a OwnNet made by 'trap_of_a_file:make', which is imported only if"
    with pytest.raises(CheckpointError, match=words):
        fgai.load_model(path)
    read_header(path)
    fgai.load_model(path, factory=lambda: own.OwnNet("GATConv"))
    assert "trap_of_a_file" not in sys.modules


def test_a_file_that_names_one_of_fgais_classes_and_a_factory_is_not_taken_for_it(tmp_path: Path) -> None:
    path = saved(tmp_path, factory=NAME)
    header = {**json.loads(header_of(path)["fgai"]), "class": "GAT"}
    path.write_bytes(pack_tensors({"w": torch.ones(2)}, {"fgai": json.dumps(header)}))
    with pytest.raises(CheckpointError, match="holds a GAT made by"):
        fgai.load_model(path)


def _fails() -> nn.Module:
    raise RuntimeError("out of luck")


REFUSED: dict[str, tuple[Any, type[FgaiError], str]] = {
    "no such module": ("no_such_module:make", InputError, "cannot import `no_such_module:make`"),
    "no such function": ("support.own_cases:missing", InputError, "has no attribute 'missing'"),
    "no function": ("support.own_cases:WIDTH", InputError, "must be a function or a class, got int"),
    "a number": (2, InputError, "must be a function, a class or a name, got int"),
    "no name": ("support.own_cases", InputError, "must be of the form package.module:name"),
    "a path": ("../own_cases.py:make", InputError, "must be of the form package.module:name"),
    "it fails": (_fails, InputError, "called with conv, failed"),
    "no model": (lambda conv: conv, InputError, "must return a torch.nn.Module, got str"),
    "other weights": (
        lambda conv: own.OwnNet(conv, width=9),
        CheckpointError,
        r"does not fit .* got \(8",
    ),
    "another layer": (lambda conv: own.OwnNet("GATv2Conv"), CheckpointError, "does not fit the model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_factories_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    factory, kind, words = REFUSED[case]
    path = saved(tmp_path, factory=NAME, arguments={"conv": "GATConv"})
    with pytest.raises(kind, match=words):
        fgai.load_model(path, factory=factory)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, factory=NAME, arguments={"conv": "GATConv"})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="truncated"):
        fgai.load_model(path, factory=NAME)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        fgai.load_model(tmp_path / "none.safetensors", factory=NAME)
    with pytest.raises(CheckpointError, match=r"expected GAT$"):
        fgai.load_model(saved(tmp_path, factory=NAME), expect="GAT", factory=NAME)


def test_a_file_cannot_make_a_trusted_factory_take_the_memory(tmp_path: Path) -> None:
    path = saved(tmp_path, factory=NAME, arguments={"conv": "GATConv", "width": 1 << 40})
    with pytest.raises(CheckpointError, match=r"does not fit the model .* must be \(8, 1099511627776\)"):
        fgai.load_model(path, factory=NAME)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got OwnNet; give one, e.g. `factory=OwnNet"):
        saved(tmp_path)
    with pytest.raises(CheckpointError, match="must be what JSON can hold"):
        saved(tmp_path, factory=NAME, arguments={"conv": object()})
    with pytest.raises(InputError, match="of the form"):
        saved(tmp_path, factory="nowhere")
    assert list(tmp_path.iterdir()) == []


def test_make_model() -> None:
    assert type(make_model("support.own_cases:own_net")) is own.OwnNet
    assert type(make_model(own.OwnNet, {"conv": "TransformerConv"})) is own.OwnNet
