"""The page: one HTML file that opens from disk, needs no network and runs nothing but its own script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fgai.errors import InputError
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.extras import extra
from fgai.files import write_atomic
from fgai.reports.balance import RULE
from fgai.reports.build import make_report
from fgai.reports.cards import cards
from fgai.reports.document import Report
from fgai.reports.sections import all_numbers, configuration, esc, header, missing_box, warnings_box
from fgai.typed import typed

LIMIT = 9_500_000
"""Bytes a page has at most; nodes are dropped from the explorer until it fits."""
FEWEST = 50
SCRIPTS = ("base", "charts", "network", "explorer", "node", "main")


@typed
def write_report(
    report: Report | Comparison | EvaluationRecord | Sequence[EvaluationRecord],
    path: Path | str,
    *,
    document: bool = True,
    **options: Any,
) -> Path:
    """Write the page, and the document it is made of beside it (`.json`), so that it can be made again.

    Args:
        report: a document, or records to make one from.
        path: of the page; `.html` is added where it is missing.
        document: also write the document beside it.
        **options: of `make_report`, e.g. `models`, `data`, `certificates`.

    Returns:
        The path of the page.

    Raises:
        MissingExtraError: plotly is not installed.
        InputError: nothing to show, or options beside a document.
        FgaiError: the folder cannot be written to.

    Example:
        >>> import fgai
        >>> from fgai.reports import write_report
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> found = fgai.evaluate(model, data, "random", name="GAT", per_node=True, curves=False)
        >>> write_report(found, "report.html", models={"GAT": model}, data=data).name
        'report.html'
    """
    library, path = _plotly(), checked_page(path)
    if isinstance(report, Report):
        if options:
            raise InputError(f"{', '.join(options)}: a finished document takes no further options")
    else:
        report = make_report(report, **options)
    write_atomic(path, render(report, library))
    if document:
        report.save(path.with_suffix(".json"))
    return path


def checked_page(path: Path | str) -> Path:
    """Return where a page is written: `.html` is added where it is missing.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    _plotly()
    path = Path(path)
    return path if path.suffix.lower() in (".html", ".htm") else path.with_name(f"{path.name}.html")


@typed
def render(report: Report, library: str | None = None) -> str:
    """Return the page as text.

    Args:
        report: the document.
        library: the script of plotly.js; that of the installed package by default.

    Raises:
        InputError: the document holds no evaluation.
        MissingExtraError: plotly is not installed.
    """
    if not report.records:
        raise InputError("the report holds no evaluation, so there is nothing to show")
    script = _plotly() if library is None else library
    values = report.to_dict()
    room = LIMIT - len(script.encode())
    data = embedded(values)
    while len(data.encode()) > room and (values.get("explorer") or {}).get("nodes", {}).get("id"):
        count = len(values["explorer"]["nodes"]["id"])
        if count <= FEWEST:
            values["explorer"] = None
        else:
            values["explorer"] = trimmed(values["explorer"], max(FEWEST, count // 2))
        data = embedded(values)
    parts = {
        "title": esc(report.title),
        "style": _asset("style.css"),
        "header": header(report),
        "missing": missing_box(report),
        "warnings": warnings_box(report.records),
        "cards": cards(report),
        "rule": f'<p class="caption">{esc(RULE)}</p>' if len(report.records) > 1 else "",
        "words": esc((values.get("explorer") or {}).get("words", "")),
        "promise": esc(_promise(report)),
        "numbers": all_numbers(report),
        "configuration": configuration(report),
        "data": data,
        "plotly": script.replace("</script", "<\\/script"),
        "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
        "version": esc((report.records[0].get("version") or {}).get("fgai", "")),
    }
    page = _asset("page.html")
    pieces = page.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name.strip()], rest]
    return "".join(out)


def embedded(values: Any) -> str:
    """JSON that cannot end the script element it stands in, nor be read as markup."""
    plain = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return plain


def trimmed(explorer: dict[str, Any], count: int) -> dict[str, Any]:
    """The explorer with its first `count` nodes only; they are in order of importance."""
    total = len(explorer["nodes"]["id"])

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            short = value[:count] if len(value) == total else value
            return [cut(item) if isinstance(item, dict) else item for item in short]
        return {key: cut(item) for key, item in value.items()} if isinstance(value, dict) else value

    out = {**explorer, "nodes": cut(explorer["nodes"]), "models": [cut(m) for m in explorer["models"]]}
    out["words"] = (
        f"This page carries {count:,} of {explorer.get('total', total):,} nodes, those that matter most, to"
        " stay small. The numbers and curves above count all nodes."
    )
    return out


def _promise(report: Report) -> str:
    for proof in report.certificates.values():
        if proof.get("promise"):
            return str(proof["promise"])
    return ""


def _asset(name: str) -> str:
    return (files("fgai.reports") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The script of plotly.js from the installed package."""
    return str(extra("plotly.offline").get_plotlyjs())
