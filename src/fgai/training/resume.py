"""The history of a training, and its checkpoints: written atomically, resumed bit by bit."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import torch
from torch import Tensor, nn

from fgai.attention import model_name
from fgai.errors import CheckpointError, InputError
from fgai.files import check, check_items, pack, parse_json, read_metadata, unpack, write_atomic
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.training.capture import _Terms
from fgai.typed import typed

VERSION = 1
FILE = "training.safetensors"


class _About(TypedDict):
    """What a file says of the training in it."""

    version: int
    fingerprint: str
    epoch: int
    best_score: float
    history: dict[str, Any]


@dataclass
class _SavedState:
    """A training read back from disk."""

    epoch: int
    best_score: float
    best: dict[str, Tensor]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    recipe: dict[str, Tensor]
    history: dict[str, Any]

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any
    ) -> tuple[int, float, dict[str, Any]]:
        """Put everything back; return the next epoch, the best score and the history."""
        if not _shapes(self.model) == _shapes(self.best) == _shapes(model.state_dict()):
            raise CheckpointError("the saved training is of a model with other weights")
        model.load_state_dict(self.model)
        parameters = optimizer.param_groups[0]["params"]
        state = {}
        for index, parameter in enumerate(parameters):
            prefix = f"{index}."
            entry = {k[len(prefix) :]: v for k, v in self.optimizer.items() if k.startswith(prefix)}
            if any(v.shape != parameter.shape for k, v in entry.items() if k != "step"):
                raise CheckpointError("the saved training is of an optimiser of other weights")
            state[index] = {k: v.to(parameter.device) if k != "step" else v for k, v in entry.items()}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state if self.optimizer else {}, "param_groups": groups})
        if _shapes(self.recipe) != _shapes(recipe.state()):
            raise CheckpointError("the saved training is of another recipe")
        recipe.load_state(self.recipe)
        device = parameters[0].device
        self.best = {name: value.to(device) for name, value in self.best.items()}
        return self.epoch, self.best_score, self.history


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (value.dtype, value.shape) for name, value in tensors.items()}


def run_label(
    model: nn.Module, graph: Graph, *parts: object, weights: bool = False, data: str | None = None
) -> str:
    """Name what is trained on what: a saved training is resumed only under the same label.

    Args:
        model: its class and settings enter; its weights only if asked, so that a fresh copy may resume.
        graph: edges, features, labels and the training and validation nodes enter.
        *parts: settings; their text enters.
        weights: also the weights, where they are the target of the training.
        data: fingerprint of the data, where the graph at hand does not hold all of it.
    """
    digest = hashlib.sha256(f"{type(model).__name__} {getattr(model, 'config', '')} {parts}".encode())
    digest.update((fingerprint(graph) if data is None else data).encode())
    tensors = [mask for mask in (graph.train_mask, graph.val_mask) if mask is not None]
    for tensor in [*tensors, *(model.state_dict().values() if weights else ())]:
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _state_digest(model: nn.Module, recipe: Any) -> str:
    """Return what tells whether two trainings of one kind stand at the same place, bit by bit."""
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *recipe.state().values()):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _write_state(
    folder: Path,
    fingerprint: str,
    epoch: int,
    best_score: float,
    model: nn.Module,
    best: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    recipe: Any,
    history: Any,
) -> None:
    """Save the whole training in one file, replaced in one step."""
    tensors = {f"model/{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"best/{k}": v for k, v in best.items()}
    for index, entry in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}.{k}": torch.as_tensor(v) for k, v in entry.items()}
    tensors |= {f"recipe/{k}": v for k, v in recipe.state().items()}
    about = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "epoch": epoch,
        "best_score": best_score,
        "history": history.to_dict(),
    }
    write_atomic(folder / FILE, pack(tensors, {"about": json.dumps(about)}))


def _read_state(folder: Path, fingerprint: str) -> _SavedState | None:
    """Read a saved training, or None when the folder holds none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        about = parse_json(read_metadata(path).get("about", ""), finite=False)
        check(about, dict[str, Any], "the state")
        version = about.get("version")
        check(version, int, "version of the state")
        if version <= VERSION:
            check(about, _About, "the state")
        tensors = unpack(path)
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a saved training ({error}); delete it to start anew"
        ) from error
    if version > VERSION:
        raise CheckpointError(f"{path} was written by a newer fgai (version {version}); update fgai")
    if about["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} belongs to another training (model, data or settings differ);"
            " use another folder or delete it"
        )
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "optimizer": {}, "recipe": {}}
    for name, value in tensors.items():
        group, _, rest = name.partition("/")
        if group not in parts:
            raise CheckpointError(f"{path} holds {name}, unknown to this fgai; delete it to start anew")
        parts[group][rest] = value
    return _SavedState(about["epoch"], about["best_score"], history=about["history"], **parts)


@typed
@dataclass
class History:
    """What happened while training.

    Attributes:
        terms: per epoch, each loss term's value; one that an epoch did not compute keeps its last value.
        scores: per validation, (epoch, score).
        best_epoch: whose weights were kept, as an index of `terms`; see `kept_epoch`.
        seconds: wall-clock time of the epochs, validation included.
        epoch_seconds: time of each training step alone.
        stopped: why training ended: `epochs` or `patience`.
        attempts: trainings it took; see `make_faithful`.
    """

    terms: list[dict[str, float]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    best_epoch: int = 0
    seconds: float = 0.0
    epoch_seconds: list[float] = field(default_factory=list)
    stopped: str = "epochs"
    attempts: int = 1

    @property
    def kept_epoch(self) -> int:
        """The epoch whose weights were kept, counted from 1, as it is shown everywhere."""
        return self.best_epoch + 1

    @property
    def ending(self) -> str:
        """Why training ended, in words."""
        if self.stopped != "patience":
            return "all epochs"
        waited = len(self.terms) - self.kept_epoch
        return f"stopped early, no better validation score for {waited} epochs (`patience`)"

    def add(self, terms: _Terms) -> None:
        """Note one epoch."""
        self.epoch_seconds.append(terms.seconds)
        self.terms.append({**(self.terms[-1] if self.terms else {}), **terms.values})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return copy.deepcopy(self.__dict__)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: a field is unknown or of another type.
        """
        check_items(values, get_type_hints(cls), "the history", required=())
        history = cls(**values)
        history.scores = [(int(epoch), float(score)) for epoch, score in history.scores]
        return history


def set_history(model: nn.Module, history: History) -> None:
    """Attach the history as a plain attribute, outside the module's parameters."""
    object.__setattr__(model, "history", history)


@typed
def history_of(model: nn.Module) -> History:
    """Return the history of a model that was trained here.

    Raises:
        InputError: if it was not.
    """
    history = getattr(model, "history", None)
    if not isinstance(history, History):
        raise InputError(f"this {model_name(model)} has no history; it was not trained by fgai")
    return history
