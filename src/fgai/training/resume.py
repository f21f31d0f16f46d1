"""The history of a training, and checkpoints: a resumed training ends with the same weights, bit for bit."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from fgai.attention import duplicate, model_name
from fgai.errors import CheckpointError, InputError
from fgai.files import check, check_items, pack, parse_json, read_metadata, unpack, write_atomic
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.typed import typed

VERSION = 1  # of the format of checkpoints
FILE = "training.safetensors"  # name of a checkpoint in its folder
GROUPS = ("model", "best", "optimizer", "recipe")  # first parts of the names of its tensors
M = TypeVar("M", bound=nn.Module)
Groups = dict[str, dict[str, Tensor]]


class _Header(TypedDict):
    version: int
    fingerprint: str
    epoch: int
    best_score: float
    history: dict[str, Any]


@typed
@dataclass
class History:
    """Losses, scores and times of a training.

    Attributes:
        terms: per epoch, the value of each loss term; the last value if the epoch did not compute it.
        scores: per validation, (epoch, score).
        best_epoch: epoch whose weights were kept, as an index of `terms`; see `kept_epoch`.
        seconds: wall-clock time of the epochs, validation included.
        epoch_seconds: time of each epoch without validation.
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
        """The epoch whose weights were kept, counted from 1."""
        return self.best_epoch + 1

    @property
    def ending(self) -> str:
        """Why training ended, in words."""
        if self.stopped != "patience":
            return "all epochs"
        waited = len(self.terms) - self.kept_epoch
        return f"stopped early, no better validation score for {waited} epochs (`patience`)"

    def add(self, terms: dict[str, float], seconds: float) -> None:
        """Add the terms and the time of one epoch."""
        self.epoch_seconds.append(seconds)
        self.terms.append({**(self.terms[-1] if self.terms else {}), **terms})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return copy.deepcopy(self.__dict__)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """Inverse of `to_dict`; `CheckpointError` if a field is unknown or of another type."""
        check_items(values, get_type_hints(cls), "the history", required=())
        history = cls(**values)
        history.scores = [(int(epoch), float(score)) for epoch, score in history.scores]
        return history


def set_history(model: nn.Module, history: History) -> None:
    """Set `model.history`, without registering it in the module."""
    object.__setattr__(model, "history", history)


def copy_model(model: M) -> M:
    """Return an independent copy of a model, without its history."""
    other = duplicate(model)
    if hasattr(other, "history"):
        del other.history
    return other


@typed
def history_of(model: nn.Module) -> History:
    """Return the history of a model that fgai trained; `InputError` for another one."""
    history = getattr(model, "history", None)
    if not isinstance(history, History):
        raise InputError(f"this {model_name(model)} has no history; train it with `fgai.train`")
    return history


class _TrainingState:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any) -> None:
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.history, self.best_score = History(), -math.inf
        self.best = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def add_score(self, score: float, epoch: int, patience: int) -> None:
        """Add a score; keep the weights if it is the best, or stop after `patience` epochs without one."""
        history = self.history
        history.scores.append((epoch, score))
        if score > self.best_score:
            self.best_score, self.best, history.best_epoch = score, self._weights(), epoch
        elif epoch - history.best_epoch >= patience:
            history.stopped = "patience"

    def finish(self) -> None:
        self.model.load_state_dict(self.best)
        self.model.eval()

    def digest(self) -> str:
        """Return a checksum of weights and recipe, to compare processes."""
        return _digest(b"", *self.model.state_dict().values(), *self.recipe.state().values())

    def save(self, folder: Path, fingerprint: str) -> None:
        """Write a checkpoint; an earlier one is replaced in one step."""
        entries = self.optimizer.state_dict()["state"].items()
        optimizer = {f"{index}.{k}": torch.as_tensor(v) for index, entry in entries for k, v in entry.items()}
        groups: Groups = {
            "model": self.model.state_dict(),
            "best": self.best,
            "optimizer": optimizer,
            "recipe": self.recipe.state(),
        }
        tensors = {f"{group}/{k}": v for group in GROUPS for k, v in groups[group].items()}
        header = {
            "version": VERSION,
            "fingerprint": fingerprint,
            "epoch": len(self.history.terms),
            "best_score": self.best_score,
            "history": self.history.to_dict(),
        }
        write_atomic(folder / FILE, pack(tensors, {"about": json.dumps(header)}))

    def restore(self, header: _Header, groups: Groups) -> None:
        if not _shapes(groups["model"]) == _shapes(groups["best"]) == _shapes(self.model.state_dict()):
            raise CheckpointError("the saved training is of a model with other weights; use another folder")
        if _shapes(groups["recipe"]) != _shapes(self.recipe.state()):
            raise CheckpointError("the saved training is of another recipe; use another folder")
        parameters = dict(enumerate(self.optimizer.param_groups[0]["params"]))
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in groups["optimizer"].items():
            index, _, entry = name.partition(".")
            parameter = parameters.get(int(index) if index.isdecimal() else -1)
            if parameter is None or (entry != "step" and value.shape != parameter.shape):
                raise CheckpointError("the saved optimizer is of other weights; use another folder")
            state.setdefault(int(index), {})[entry] = value if entry == "step" else value.to(parameter.device)
        self.model.load_state_dict(groups["model"])
        options = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": options})
        self.recipe.load_state(groups["recipe"])
        device = next(self.model.parameters()).device
        self.best = {name: value.to(device) for name, value in groups["best"].items()}
        self.best_score, self.history = header["best_score"], History.from_dict(header["history"])


def _read_checkpoint(folder: Path, fingerprint: str) -> tuple[_Header, Groups] | None:
    path = folder / FILE
    if not path.exists():
        return None
    try:
        header = parse_json(read_metadata(path).get("about", ""), finite=False)
        check(header, dict[str, Any], "the header")
        version = header.get("version")
        check(version, int, "version of the header")
        if version <= VERSION:
            check(header, _Header, "the header")
        tensors = unpack(path)
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a saved training ({error}); delete it to start anew"
        ) from error
    if version > VERSION:
        raise CheckpointError(f"{path} was written by a newer fgai (version {version}); update fgai")
    if header["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} belongs to another training (model, data or settings differ);"
            " use another folder or delete it"
        )
    groups: Groups = {group: {} for group in GROUPS}
    for name, value in tensors.items():
        group, _, rest = name.partition("/")
        if group not in groups:
            raise CheckpointError(f"{path} holds {name}, unknown to this fgai; delete it to start anew")
        groups[group][rest] = value
    return header, groups


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (value.dtype, value.shape) for name, value in tensors.items()}


def training_fingerprint(
    model: nn.Module, graph: Graph, *identity: object, weights: bool = False, data: str | None = None
) -> str:
    """Return a hash of all that decides a training; `data` is the graph's fingerprint if it is known."""
    head = f"{type(model).__name__} {getattr(model, 'config', '')} {identity}"
    head += fingerprint(graph) if data is None else data
    masks = [mask for mask in (graph.train_mask, graph.val_mask) if mask is not None]
    return _digest(head.encode(), *masks, *(model.state_dict().values() if weights else ()))


def _digest(head: bytes, *tensors: Tensor) -> str:
    digest = hashlib.sha256(head)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
