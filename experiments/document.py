"""Documents whose tables are generated: text between two marks is replaced, everything else stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from experiments import bars
from experiments.paper_claim import paper_claim
from experiments.store import Store
from experiments.tables import TABLES, render
from fgai.checks import one_of
from fgai.errors import DataError, InputError
from fgai.files import regular, write_atomic

_OPEN = re.compile(r"<!-- table: (\S+) -->")
_BLOCK = re.compile(r"<!-- table: (\S+) -->\n(?:(?!<!-- table:).)*?<!-- end -->", re.DOTALL)

EXTRA: dict[str, Callable[[Store], str]] = {
    "bars": lambda store: bars.summary(bars.check(store)).to_markdown(),
    "bars-missed": lambda store: bars.table(bars.check(store), every=False).to_markdown(),
    "paper-claim": paper_claim,
}


def fill(text: str, store: Store) -> str:
    """Replace what stands between `<!-- table: NAME -->` and `<!-- end -->` by that table.

    NAME is one of the tables, or `bars`, `bars-missed`, `paper-claim`; another one, or a mark without an end,
    raises `InputError`. Equal records give equal text.
    """

    def replaced(found: re.Match[str]) -> str:
        name = one_of(found[1], "table", (*TABLES, *EXTRA))
        body = EXTRA[name](store) if name in EXTRA else render(name, store)
        return f"<!-- table: {name} -->\n\n{body}\n\n<!-- end -->"

    opened, closed = len(_OPEN.findall(text)), len(_BLOCK.findall(text))
    if opened != closed:
        raise InputError(f"{opened} tables begin and {closed} end; close each with a line `<!-- end -->`")
    return _BLOCK.sub(replaced, text)


def update(path: Path, store: Store) -> bool:
    """Fill the tables of a document in place, in one step; return whether anything changed."""
    try:
        text = regular(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    new = fill(text, store)
    if new != text:
        write_atomic(path, new)
    return new != text
