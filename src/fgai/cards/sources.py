"""`card_from_files`: a card from the files that `evaluate`, `compare` and `certify` wrote."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fgai.cards.card import Card, Proof, card
from fgai.certificates import CertificateRecord, InjectionCertificate
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.records import Document, read_json
from fgai.typed import typed

_RECORDS: tuple[type[EvaluationRecord] | type[Comparison], ...] = (EvaluationRecord, Comparison)
_PROOFS: tuple[type[Proof], ...] = (CertificateRecord, InjectionCertificate)
_KINDS: dict[str, type[Document]] = {kind.KIND: kind for kind in (*_RECORDS, *_PROOFS)}


@typed
def card_from_files(files: Iterable[Path | str], *, name: str | None = None) -> Card:
    """Make a card from one evaluation or comparison and any certificates of the same model.

    Args:
        files: in any order.
        name: see `fgai.card`.

    Raises:
        CheckpointError: a file is missing, damaged, from a newer fgai or of another kind.
        InputError: not exactly one evaluation or comparison, or certificates of something else.
    """
    found: list[Any] = [_read(Path(path)) for path in files]
    records = [entry for entry in found if isinstance(entry, _RECORDS)]
    if len(records) != 1:
        raise InputError(f"a card is made of one evaluation or comparison, got {len(records)}")
    return card(records[0], [entry for entry in found if isinstance(entry, _PROOFS)], name=name)


def _read(path: Path) -> Document:
    values = read_json(path)
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(f"{path} holds {kind!r}; a card is made of {', '.join(_KINDS)}")
    try:
        return _KINDS[kind].from_dict(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
