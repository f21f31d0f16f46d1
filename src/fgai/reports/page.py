"""The page: one HTML file that opens from disk, needs no network and runs nothing but its own script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fgai.errors import InputError, extra
from fgai.evaluation import Comparison, EvaluationRecord
from fgai.evaluation.summary import (
    RULE,
    Record,
    next_steps,
    number_at,
    percent,
    recall_by_class,
    score_at,
    score_of,
    score_phrase,
    signed,
    size_of,
)
from fgai.files import write_atomic
from fgai.records import provenance_line
from fgai.reports.build import Report, make_report
from fgai.reports.numbers import _code, _esc, _number_table
from fgai.reports.template import asset, fill, whatif_script
from fgai.reports.words import (
    DEFINITION_SHARE,
    TOPK_SHARE,
    _kind_of,
    attack_words,
    changes_in,
    headline,
    meaning,
    missing,
    output_share,
)
from fgai.typed import typed


def _header(report: Report) -> str:
    """Title, headline, its numbers, the data, the attack, and the provenance of each model."""
    lead = "".join(f"<p>{_esc(line)}</p>" for line in meaning(report))
    data: Mapping[str, Any] = report.records[0].get("data") or {}
    sizes = [
        f"{data[name]:,} {name}"
        for name in ("nodes", "edges", "features", "classes")
        if isinstance(data.get(name), int)
    ]
    about = f"{data.get('name', 'unnamed graph')}: {', '.join(sizes)}" if sizes else data.get("name", "")
    facts = [("Data.", about), ("Attack.", attack_words(report.records[0], len(report.records) > 1))]
    for name, record in zip(report.names, report.records, strict=True):
        block = record.get("provenance")
        if isinstance(block, Mapping) and (line := provenance_line(block)):
            facts.append((f"{name}.", line))
    listed = (f'<p class="facts"><strong>{_esc(name)}</strong> {_esc(text)}</p>' for name, text in facts)
    alone = ""
    if len(report.records) == 1:
        steps = "".join(f"<li>{_code(step)}</li>" for step in next_steps(report.records[0]))
        alone = f"{_risks(report)}<p><strong>What to do next</strong></p><ol>{steps}</ol>"
    return (
        f'<p class="kicker">{_esc(report.title)}</p><h1>{_esc(headline(report))}</h1>'
        f'{_warnings_box(report.records)}<div class="lead">{lead}</div>{alone}{"".join(listed)}'
    )


def _risks(report: Report) -> str:
    """The table of a single model's recall by class, without the attack and under it."""
    names, rows = (report.explorer or {}).get("classes") or [], ""
    for number, (count, clean, attacked) in enumerate(recall_by_class(report.records[0])):
        if count:
            label = names[number] if number < len(names) else number
            texts = (count, percent(clean), percent(attacked), round(count * (1 - attacked)))
            cells = "".join(f"<td>{_esc(text)}</td>" for text in texts)
            rows += f'<tr><th scope="row">{_esc(label)}</th>{cells}</tr>'
    heads = ("class", "tested", "found without attack", "found under attack", "missed under attack")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return rows and (
        '<details open><summary>Risk by class</summary><div class="scroll" tabindex="0" role="region"'
        f' aria-label="Risk by class"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def _missing_box(report: Report) -> str:
    """What the page cannot show; folded if the report has no notes."""
    listed = "".join(f"<li>{_code(line)}</li>" for line in missing(report))
    opened = " open" if report.notes else ""
    return listed and (
        f'<details class="notice" id="missing"{opened}><summary>What this page cannot show</summary>'
        f"<ul>{listed}</ul></details>"
    )


def _warnings_box(records: Sequence[Record]) -> str:
    """Each reliability warning once, with the models it concerns."""
    models: dict[str, list[str]] = {}
    for record in records:
        for entry in record.get("warnings") or []:
            message = str(entry.get("message", "")) if isinstance(entry, Mapping) else str(entry)
            models.setdefault(message, []).append(str(record.get("name")))
    listed = "".join(f"<li>{_esc(', '.join(who))}: {_code(what)}</li>" for what, who in models.items())
    return listed and (
        f'<div class="notice"><p><strong>Read these numbers with care.</strong></p><ul>{listed}</ul></div>'
    )


def _configuration(report: Report) -> str:
    """All settings, and how to get the same numbers again."""
    first = report.records[0]
    threat = first.get("threat") or {}
    budget = threat.get("budget")
    blocks = [
        _listing("Data", first.get("data")),
        _listing("Attack", {"name": threat.get("name"), **(budget if isinstance(budget, Mapping) else {})}),
        _listing("Evaluation", {**(first.get("config") or {}), "seed": first.get("seed")}),
        _listing("Versions", {**(first.get("version") or {}), "device": first.get("device")}),
    ]
    for record in report.records:
        model: Mapping[str, Any] = record.get("model") or {}
        settings = {"class": model.get("class"), **(model.get("config") or {})}
        settings["parameters"] = model.get("parameters")
        history = report.histories.get(str(record.get("name"))) or {}
        best = history.get("best_epoch")
        settings |= {
            "training epochs": history.get("epochs"),
            "training kept epoch": best + 1 if isinstance(best, int) else None,  # from 1, as the charts count
            "training ended": history.get("ending", history["stopped"]) if "stopped" in history else None,
            "training seconds": _rounded(history.get("seconds")),
            "evaluation seconds": _rounded((record.get("seconds") or {}).get("total")),
        }
        blocks.append(_listing(f"Model: {record.get('name')}", settings))
    commands = "\n".join(report.reproduce) or _snippet(report)
    return (
        f'<h3>Reproduce it</h3><pre tabindex="0"><code>{_esc(commands)}</code></pre>'
        f'<div class="listings">{"".join(blocks)}</div>'
    )


def _snippet(report: Report) -> str:
    first = report.records[0]
    config: Mapping[str, Any] = first.get("config") or {}
    name = (first.get("data") or {}).get("name", "planted")
    models = ", ".join(f"{json.dumps(name)}: …" for name in report.names)
    threat = (first.get("threat") or {}).get("name", "standard")
    return (
        "import fgai\n\n"
        f"data = fgai.load_dataset({json.dumps(name)}, seed={first.get('seed', 0)})\n"
        f"models = {{{models}}}\n"
        f'fgai.report(models, data, "report.html", threat={json.dumps(threat)}, k={config.get("k", 5)},'
        f" seed={first.get('seed', 0)})"
    )


def _rounded(value: Any) -> str | None:
    return f"{value:.1f}" if isinstance(value, int | float) else None


def _listing(title: str, values: Any) -> str:
    items = values.items() if isinstance(values, Mapping) else ()
    rows = "".join(
        f"<div><dt>{_esc(str(name).replace('_', ' '))}</dt><dd>{_esc(_words(value))}</dd></div>"
        for name, value in items
        if value is not None and not isinstance(value, Mapping)
    )
    return f"<section class='listing'><h4>{_esc(title)}</h4><dl>{rows}</dl></section>" if rows else ""


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


LIMIT = 9_500_000  # bytes of a page; nodes are dropped from the explorer until it fits
FEWEST = 50  # nodes in the explorer; below, it is left out
SCRIPTS = ("elements", "base", "charts", "network", "explorer", "node", "main")


@typed
def write_report(
    report: Report | Comparison | EvaluationRecord | Sequence[EvaluationRecord],
    path: Path | str,
    *,
    document: bool = True,
    **options: Any,
) -> Path:
    """Write the page, and the document it is made of beside it (`.json`); return the path of the page.

    Args:
        report: a document, or records to make one from.
        path: of the page; `.html` is added where it is missing.
        document: also write the document beside it.
        **options: of `make_report`, e.g. `models`, `data`, `certificates`.

    Raises:
        MissingExtraError: plotly is not installed.
        InputError: nothing to show, or options beside a document.

    Example:
        >>> import fgai
        >>> from fgai.reports import write_report
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> record = fgai.evaluate(model, data, "random", name="GAT", per_node=True, curves=False)
        >>> write_report(record, "report.html", models={"GAT": model}, data=data).name
        'report.html'
    """
    library, path = _plotly(), check_page(path)
    if isinstance(report, Report):
        if options:
            raise InputError(f"{', '.join(options)}: a finished document takes no further options")
    else:
        report = make_report(report, **options)
    write_atomic(path, render(report, library))
    if document:
        report.save(path.with_suffix(".json"))
    return path


def check_page(path: Path | str) -> Path:
    """Return the path of a page, with `.html` added where it is missing; raise if plotly is not installed."""
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
    data = _embedded(values)
    while len(data.encode()) > room and (values.get("explorer") or {}).get("nodes", {}).get("id"):
        explorer = values["explorer"]
        count = len(explorer["nodes"]["id"])
        values["explorer"] = None if count <= FEWEST else _trimmed(explorer, max(FEWEST, count // 2))
        data = _embedded(values)
    promises = (str(proof["promise"]) for proof in report.certificates.values() if proof.get("promise"))
    parts = {
        "title": _esc(report.title),
        "style": asset("style.css") + asset("whatif.css", "whatif"),
        "header": _header(report),
        "missing": _missing_box(report),
        "cards": _cards(report),
        "rule": f'<p class="caption">{_esc(RULE)}</p>' if len(report.records) > 1 else "",
        "words": _esc((values.get("explorer") or {}).get("words", "")),
        "definition": _definition_lists(report),
        "promise": _esc(next(promises, "")),
        "numbers": _number_table(report),
        "configuration": _configuration(report),
        "data": data,
        "plotly": script.replace("</script", "<\\/script"),
        "script": "\n".join(asset(f"{name}.js") for name in SCRIPTS),
        "whatif": whatif_script() + asset("whatif.js"),
        "version": _esc((report.records[0].get("version") or {}).get("fgai", "")),
    }
    return fill(asset("page.html"), parts)


def _embedded(values: Any) -> str:
    """JSON that cannot end the script element it stands in, nor be read as markup."""
    plain = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return plain


def _trimmed(explorer: dict[str, Any], count: int) -> dict[str, Any]:
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


def _definition_lists(report: Report) -> str:
    """Which properties of Definition 1 hold at each certified model's output layer, a sentence for each."""
    out = ""
    for name in report.names:
        layers = (report.certificates.get(name) or {}).get("layers") or [{}]
        last = layers[-1] if isinstance(layers, list | tuple) and layers else {}
        sentences = last.get("sentences") if isinstance(last, Mapping) else None
        listed = "".join(f"<li>{_esc(s)}</li>" for s in sentences) if isinstance(sentences, list) else ""
        out += listed and f"<h3>{_esc(name)}, {_esc(last.get('name'))}</h3><ul>{listed}</ul>"
    return out


def _plotly() -> str:
    return str(extra("plotly.offline").get_plotlyjs())


class _Bar(NamedTuple):
    """One model on a card; `length` and `tick` are positions from 0 to 1."""

    name: str
    length: float | None
    value: str
    tick: float | None = None


class _Card(NamedTuple):
    """One question with a bar per model; `key` names the measures whose change is marked."""

    key: str
    title: str
    about: str
    bars: list[_Bar]
    chance: str = ""


def _cards(report: Report) -> str:
    """All cards that have a value, as HTML."""
    changes = changes_in(report)
    shown = "".join(
        _html(card, report.names, [_kind_of(changes, key) for key in card.key.split()])
        for card in (
            _predictions(report),
            _explanations(report),
            _output_shift(report),
            _same(report),
            _decides(report),
            _certified(report, *_DEFINITION),
            _certified(report, *_TOPK),
            _injected(report),
        )
        if any(bar.length is not None for bar in card.bars)
    )
    return f'<div class="cards">{shown}</div>'


def _of_k(share: float | None, k: int) -> str:
    return "–" if share is None else f"{k * share:.1f} of {k}"


def _chance(report: Report, path: str, k: int | None = None) -> str:
    """What chance gets, as a percentage or out of `k`."""
    level = number_at(report.records[0], path)
    return "" if level is None else f"chance: {percent(level) if k is None else _of_k(level, k)}"


def _predictions(report: Report) -> _Card:
    first, bars = report.records[0], []
    for name, record in zip(report.names, report.records, strict=True):
        before, after = score_at(record, "clean"), score_at(record, "attacked")
        bars.append(_Bar(name, after, f"{percent(before)} → {percent(after)}", before))
    phrase = score_phrase(first)
    about = f"{phrase[0].upper()}{phrase[1:]}: before the attack (tick) and after it (bar)."
    chance = _chance(report, f"{score_of(first)}.chance")
    return _Card("attacked", "Predictions that survive", about, bars, chance)


def _explanations(report: Report) -> _Card:
    k, bars = size_of(report.records[0]), []
    for name, record in zip(report.names, report.records, strict=True):
        shares = [number_at(record, f"overlap_touched.{key}.all") for key in ("prediction", "explanation")]
        kept, aimed = shares
        texts = [f"{k * share:.1f}" for share in shares if share is not None]
        value = f"{' and '.join(texts)} of {k}" if texts else "–"
        bars.append(_Bar(name, kept if aimed is None else aimed, value, kept))
    about = (
        f"Of the {k} neighbours a node attends to most, how many stay: when the attack aims at predictions"
        " (tick), and when it aims at the explanation itself (bar). Nodes in its reach."
    )
    chance = _chance(report, "overlap_touched.chance.all", k)
    return _Card("kept aimed", "Explanations that survive", about, bars, chance)


def _output_shift(report: Report) -> _Card:
    values = [number_at(record, "g_tvd.rel") for record in report.records]
    most = max([1.0, *(v for v in values if v is not None)])
    tick = 1 / most if most > 1 else None
    about = (
        "Change of the outputs under attack, in units of their own spread: at 1"
        f" ({'tick' if most > 1 else 'a full bar'}) they move as far as classes differ. Shorter is better."
    )
    bars = [
        _Bar(name, None if v is None else v / most, signed(v, "#.2g").rstrip("."), tick)
        for name, v in zip(report.names, values, strict=True)
    ]
    return _Card("moved", "How far outputs move", about, bars)


def _same(report: Report) -> _Card:
    k, reference = size_of(report.records[0]), report.reference
    others = [pair for pair in zip(report.names, report.records, strict=True) if pair[0] != reference]
    shares = {name: number_at(record, "similarity.overlap.all") for name, record in others}
    bars = [_Bar(name, share, _of_k(share, k)) for name, share in shares.items()]
    about = (
        f"Of the {k} neighbours {reference} attends to most, how many are also among the"
        f" {k} strongest here, without any attack."
    )
    return _Card(
        "same", f"Same top {k} as {reference}", about, bars, _chance(report, "overlap.chance.all", k)
    )


def _decides(report: Report) -> _Card:
    whens = ("clean", "attacked")
    pairs = [[number_at(r, f"f_slope.node.{when}.gap") for when in whens] for r in report.records]
    most = max([1.0, *(v for pair in pairs for v in pair if v is not None)])
    bars = []
    for name, pair in zip(report.names, pairs, strict=True):
        tick, length = (None if v is None else max(0.0, v) / most for v in pair)
        bars.append(_Bar(name, length, " → ".join(signed(v, ".2f") for v in pair), tick))
    about = (
        "How much more it hurts to remove the strongest edges than the weakest (F-slope gap): before the"
        f" attack (tick) and after it (bar). A full bar is {signed(most, '.3g')}; a random order gets 0."
    )
    return _Card("slope_attacked", "Attention that decides", about, bars)


_DEFINITION = (
    "definition",
    "Nodes where Definition 1 holds",
    "Nodes with all four properties at the output layer: same and stable explanation, same and stable"
    " prediction, while its attention moves by at most {radius} ({norm}).",
    DEFINITION_SHARE,
)
_TOPK = (
    "proved",
    "Explanations that are proved",
    "Nodes whose top {k2} at the output layer cannot change while its explanation vector moves by at most"
    " {radius} ({norm}), its values fixed.",
    TOPK_SHARE,
)


def _certified(report: Report, key: str, title: str, about: str, path: str) -> _Card:
    """A share of the output layer of every certificate; `about` takes its settings."""
    shares = {name: output_share(report.certificates, name, path) for name in report.names}
    settings = [report.certificates[name] for name, share in shares.items() if share is not None][-1:]
    words = {name: (settings or [{}])[0].get(name) for name in ("k2", "radius", "norm")}
    bars = [_Bar(name, share, percent(share, 1)) for name, share in shares.items()]
    return _Card(key, title, about.format(**words), bars)


def _injected(report: Report) -> _Card:
    bars, count = [], None
    for name in report.names:
        proofs = {str(one.get("where")): one for one in report.injections.get(name) or [] if one.get("known")}
        shares = [proofs[where]["share"] if where in proofs else None for where in ("direct", "any")]
        texts = [percent(share, 1) for share in shares if share is not None]
        bars.append(_Bar(name, shares[1], " and ".join(texts) or "–", shares[0]))
        count = next((one.get("neighbours") for one in proofs.values()), count)
    about = (
        "Nodes whose class provably stays, whatever features new nodes have: if the node itself gains"
        f" {count} injected neighbour (tick), and if every node does (bar)."
    )
    return _Card("injected", "Classes no injected node can change", about, bars)


def _html(card: _Card, names: list[str], kinds: list[str | None]) -> str:
    rows = ""
    for bar in card.bars:
        length, tick = (100 * min(1.0, max(0.0, value or 0.0)) for value in (bar.length, bar.tick))
        mark = "" if bar.tick is None else f'<span class="tick" style="left:{tick:.1f}%"></span>'
        fill = f'<span class="fill m{names.index(bar.name) % 7}" style="width:{length:.1f}%"></span>'
        rows += (
            f'<div class="bar"><span class="bar-name">{_esc(bar.name)}</span>'
            f'<span class="bar-value">{_esc(bar.value)}</span>'
            f'<span class="track">{fill}{mark}</span></div>'
        )
    marks = "".join(
        f'<span class="mark {kind.partition(" ")[0]}">{kind}</span>'
        for kind in dict.fromkeys(kinds)
        if kind is not None
    )
    head = f'<h3>{_esc(card.title)}<span class="marks">{marks}</span></h3>'
    level = f'<p class="chance">{_esc(card.chance)}</p>' if card.chance else ""
    return f'<article class="card">{head}<p>{_esc(card.about)}</p>{rows}{level}</article>'
