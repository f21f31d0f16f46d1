"""Values as a pandas `DataFrame`; pandas itself is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fgai.errors import MissingExtraError
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


@typed
def data_frame(
    values: Mapping[str, Any] | Sequence[Any], columns: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Return a `DataFrame`.

    Args:
        values: columns by name, or rows.
        columns: names, where rows are given.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("pandas", "pandas") from None
    return pandas.DataFrame(values, columns=columns)
