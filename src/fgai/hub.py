"""Models and their cards as folders, in the layout of the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from fgai.errors import CheckpointError, DataError, InputError, extra
from fgai.files import write_atomic
from fgai.records import plain, to_text, weights_hash
from fgai.reports.cards import Card
from fgai.training import load_model, pretrained_names, save_model
from fgai.typed import typed
from fgai.version import __version__, versions

__all__ = ["from_pretrained", "save_pretrained"]

MODEL, CARD, CONFIG, PAGE = "model.safetensors", "card.json", "config.json", "README.md"
TAGS = ("graph-neural-networks", "explainability", "attention", "fgai")


@typed
def save_pretrained(
    model: nn.Module,
    folder: Path | str,
    *,
    card: Card | None = None,
    data_fingerprint: str = "",
    about: dict[str, Any] | None = None,
) -> Path:
    """Write weights, settings, card and the hub's page of a model to a folder; return the folder.

    Each file is written completely or not at all, the weights last; files of the same names are replaced.
    `hf upload owner/model FOLDER` (of huggingface_hub) uploads the folder. The card is that of this model,
    see `fgai.card`; other arguments are those of `fgai.save_model`.

    Raises:
        CheckpointError: the model's class is not registered.
        InputError: the card is of another model.
        FgaiError: the folder cannot be written to.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=3, progress=False)
        >>> folder = fgai.save_pretrained(model, "gat")
        >>> type(fgai.from_pretrained(folder)).__name__
        'GAT'
    """
    folder, kind = Path(folder), type(model).__name__
    config = plain(getattr(model, "config", None) or {})
    if card is not None and (card.model["class"], card.model.get("config")) != (kind, config):
        raise InputError(f"`card` must be of this {kind} and its settings, got that of {card.title}")
    if card is not None and card.provenance.get("weights") not in (None, weights_hash(model)):
        raise InputError(f"`card` must be of these weights, got that of others: {card.title}")
    settings = {"library_name": "fgai", "architectures": [kind], "config": config, "version": versions()}
    write_atomic(folder / PAGE, _page(kind, card))
    write_atomic(folder / CONFIG, to_text(settings) + "\n")
    if card is not None:
        card.save(folder / CARD)
    else:
        (folder / CARD).unlink(missing_ok=True)
    save_model(model, folder / MODEL, data_fingerprint=data_fingerprint, about=about)
    return folder


@typed
def from_pretrained(
    name: Path | str, *, revision: str | None = None, token: str | None = None, expect: str | None = None
) -> nn.Module:
    """Load a model that comes with fgai, from a folder, or from the Hugging Face Hub; in evaluation mode.

    The `name` is that of a model that comes with fgai (`fgai.training.pretrained_names`), else a folder, else
    `owner/model` on the hub, with `revision` and, for private models, `token`. `expect` is the class it must
    have.

    Raises:
        CheckpointError: the file is missing, damaged, foreign or from a newer fgai.
        DataError: the hub does not have it, or cannot be reached.
        MissingExtraError: it is no folder, and huggingface_hub is not installed.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> fgai.from_pretrained("planted-gat")(data).shape
        torch.Size([2000, 5])
    """
    comes_with_fgai = str(name) in pretrained_names()
    return load_model(name if comes_with_fgai else _file(name, revision, token), expect)


def _file(name: Path | str, revision: str | None, token: str | None) -> Path:
    """Return the file of the weights, in a folder or downloaded from the hub."""
    folder = Path(name)
    if folder.is_dir():
        return folder / MODEL
    if isinstance(name, Path) or str(name).count("/") != 1 or str(name).startswith((".", "/")):
        raise CheckpointError(f"`name` must be a folder or owner/model on the hub, got {str(name)!r}")
    fetch = extra("huggingface_hub").hf_hub_download
    try:
        return Path(fetch(str(name), MODEL, revision=revision, token=token))
    except Exception as error:  # network, access and the hub's own errors
        reason = " ".join(str(error).split())[:300]
        text = f"the hub did not answer for {str(name)!r} ({type(error).__name__}: {reason})"
        raise DataError(f"{text}; check name, network and token, or use a folder") from error


def _page(kind: str, card: Card | None) -> str:
    tags = "".join(f"- {tag}\n" for tag in TAGS)
    head = f"---\nlibrary_name: fgai\npipeline_tag: graph-ml\ntags:\n{tags}---\n\n"
    text = f"# {kind}\n\nNo card was given.\n" if card is None else card.to_markdown()
    use = f"\n## Use\n\nWith fgai {__version__}: `fgai.from_pretrained({json.dumps('owner/model')})`.\n"
    return head + text + use
