"""`Document`, the base of all records, with a schema and files; `TabledDocument` also prints tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from fgai.errors import CheckpointError
from fgai.files import add_checksum, check_items, parse_json, regular, take_checksum, write_atomic
from fgai.records.plain import check_arrays, plain, to_text
from fgai.records.table import Tabled
from fgai.typed import typed


@typed
@dataclass(frozen=True, kw_only=True)
class Document:
    """Base of all records: fields with a schema that are saved as JSON."""

    SCHEMA: ClassVar[int] = 1
    KIND: ClassVar[str] = "document"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the schema version first."""
        fields = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: another kind of record, a newer schema, or fields that do not fit `layout`.
        """
        kind = values.get("kind") if isinstance(values, Mapping) else type(values).__name__
        if not isinstance(values, Mapping) or kind != cls.KIND:
            raise CheckpointError(f"expected a record of kind {cls.KIND!r}, got {kind!r}")
        schema = values.get("schema")
        if type(schema) is not int or schema < 1:
            raise CheckpointError(f"the record's schema version is damaged: {schema!r}")
        if schema > cls.SCHEMA:
            raise CheckpointError(
                f"the record was written by a newer fgai (schema {schema}; this one reads up to"
                f" {cls.SCHEMA}); update fgai"
            )
        body = {key: value for key, value in values.items() if key not in ("kind", "schema")}
        fields = [f.name for f in dataclasses.fields(cls)]
        # Every field is written, empty ones too; older records have no provenance.
        required = [name for name in fields if name != "provenance"]
        check_items(body, cls.layout(), "the record", required=required)
        check_arrays(body)
        return cls._build({key: value for key, value in body.items() if key in fields})

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the keys of a file of this kind, and the types of their plain values."""
        hints = get_type_hints(cls)
        return {f.name: hints[f.name] for f in dataclasses.fields(cls)}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    def to_json(self) -> str:
        """Return the record as JSON text; see `fgai.records.to_text`."""
        return self._text(self.to_dict())

    def _text(self, values: dict[str, Any]) -> str:
        return to_text(values) + "\n"

    def save(self, path: Path | str) -> Path:
        """Write the record as JSON with a checksum, in one step; a crash leaves the old file as it was."""
        write_atomic(Path(path), self._text(add_checksum(self.to_dict())))
        return Path(path)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record.

        Raises:
            CheckpointError: the file is missing, damaged, changed, of another kind or from a newer fgai.
        """
        values = read_json(Path(path))
        try:
            return cls.from_dict(values)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


@typed
@dataclass(frozen=True, kw_only=True)
class TabledDocument(Document, Tabled):
    """A document that prints as tables."""

    def __str__(self) -> str:
        return self.to_markdown()


@typed
def read_json(path: Path) -> Any:
    """Return the values of a JSON file without its checksum, if it has one.

    Raises:
        CheckpointError: the file is missing, damaged, or does not match its checksum.
    """
    try:
        return take_checksum(parse_json(regular(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"there is no record at {path}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a record ({error})") from error
