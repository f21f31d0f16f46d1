"""The bars: what must come out of the methods that have one setting for every graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.fingerprint import is_earlier, is_older
from experiments.one_setting import FAITHFUL, Methods, Pair, whole_seconds
from experiments.results import GRAPHS, LARGE, Results
from experiments.statistics import estimate
from experiments.store import Store
from experiments.threats import BESIDE
from experiments.training_tables import memory_above
from fgai.records import Cell, Column, Table

WHOLE = ("planted", "cora", "amazon-photo")
"""Graphs on which whole calls are timed."""
TIMED = ("amazon-photo", "coauthor-physics", "arxiv-tape")
"""Graphs whose epochs are timed."""
CERTIFIED = {"coauthor-physics": 0.66, "amazon-photo": 0.53}
"""Least share of certified classes of GAT, one injected neighbour of every node."""
WORDS = {True: "met", False: "missed", None: "no number"}


@dataclass(frozen=True)
class Bar:
    """One bar for one pair of model and graph, or for a mean or count over pairs."""

    name: str  # what is measured
    wanted: str  # what it must reach, in words
    pair: str  # model and graph, e.g. `GAT cora`, or the pairs a mean or count is over
    found: str  # the numbers, in words
    met: bool | None  # None while numbers are missing


def check(store: Store) -> list[Bar]:
    """Check every bar on the records of the methods with one setting, rounding nothing."""
    methods = Methods(store)
    main = [pair for pair in methods.asked if pair[1] in GRAPHS]
    small = [pair for pair in methods.asked if pair[1] not in (*GRAPHS, *LARGE)]
    found = [bar for pair in methods.asked for bar in _of_pair(methods, pair, small=pair in small)]
    found += [*_means(methods, main), *_definition(methods, main), *_cost(store)]
    found += _certified(store)
    order = list(dict.fromkeys(bar.name for bar in found))
    return sorted(found, key=lambda bar: order.index(bar.name))


def table(bars: Sequence[Bar], *, every: bool = True) -> Table:
    """Return the bars as a table: all of them, or those that are not met; their counts below."""
    rows = [[b.name, b.wanted, b.pair, b.found, WORDS[b.met]] for b in bars if every or not b.met]
    columns = [Column(name) for name in ("bar", "wanted", "model, graph", "found", "")]
    counts = (f"{sum(bar.met is state for bar in bars)} {word}" for state, word in WORDS.items())
    return Table("Bars", columns, rows, [f"{', '.join(counts)}, of {len(bars)}. Means over seeds."])


def summary(bars: Sequence[Bar]) -> Table:
    """Return one row for each bar: how often it is met, and where it is not."""
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(bar.name for bar in bars):
        mine = [bar for bar in bars if bar.name == name]
        missed = [f"{bar.pair} ({bar.found})" for bar in mine if bar.met is False]
        unknown = sum(bar.met is None for bar in mine)
        count = f"{sum(bar.met is True for bar in mine)} of {len(mine)}"
        count += f", {unknown} without a number" if unknown else ""
        single = mine[0].found if len(mine) == 1 and mine[0].met else ""
        rows.append([name, mine[0].wanted, count, "; ".join(missed) or single])
    return Table("Bars met", [Column(title) for title in ("bar", "wanted", "met", "missed, or found")], rows)


def _bar(name: str, wanted: str, pair: str, met: bool | None, *values: float | None) -> Bar:
    known = all(value is not None for value in values)
    found = ", ".join(f"{value:.3f}" for value in values) if known else "–"
    return Bar(name, wanted, pair, found, met if known else None)


def _of_pair(methods: Methods, pair: Pair, *, small: bool) -> Iterator[Bar]:
    where = " ".join(pair)
    clean, attacked = (methods.mean(pair, FAITHFUL, f"f1.{when}") for when in ("clean", "attacked"))
    base, hit = (methods.mean(pair, "vanilla", f"f1.{when}") for when in ("clean", "attacked"))
    limits = methods.mean(pair, "limits, one setting", "f1.attacked")

    def bar(name: str, wanted: str, least: float | None, *values: float | None) -> Bar:
        met = values[0] >= least if values[0] is not None and least is not None else None
        return _bar(name, wanted, where, met, *values)

    yield bar("clean F1", "≥ vanilla − 0.005", _plus(base, -0.005), clean, base)
    if small:
        least = None if limits is None or hit is None else max(limits - 0.01, hit + 0.1)
        wanted = "≥ limits − 0.01 and ≥ vanilla + 0.10"
        yield bar("`ensemble` F1, small graphs", wanted, least, attacked, limits, hit)
    else:
        yield bar("`ensemble` F1", "≥ own clean − 0.045", _plus(clean, -0.045), attacked, clean)
    every = methods.layers(pair, FAITHFUL, "similarity.overlap")
    sharpest = methods.mean(pair, FAITHFUL, "similarity.overlap.sharpest")
    yield bar("same top 5, every layer that is not flat", "≥ 0.85", 0.85, min(every, default=None))
    yield bar("same top 5, sharpest layer", "≥ 0.9", 0.9, sharpest)
    sharp = [methods.mean(pair, row, "sharpness.clean.all") for row in (FAITHFUL, "vanilla")]
    ratio = sharp[0] / sharp[1] if sharp[0] is not None and sharp[1] else None
    yield bar("sharpness", "≥ 0.95 × vanilla's", 0.95, ratio)


def _means(methods: Methods, pairs: Sequence[Pair]) -> Iterator[Bar]:
    where = f"mean of {len(pairs)} pairs"
    ours, harden = (methods.over(pairs, row, "f1.attacked") for row in (FAITHFUL, "harden"))
    strong = methods.over(pairs, FAITHFUL, "f1.attacked", BESIDE)
    yield _bar("mean `ensemble` F1", "≥ 0.90", where, ours is not None and ours >= 0.9, ours)
    met = ours is not None and harden is not None and ours >= harden - 0.005
    yield _bar("mean `ensemble` F1 beside harden", "≥ its − 0.005", where, met, ours, harden)
    yield _bar("mean `ensemble-strong` F1", "≥ 0.85", where, strong is not None and strong >= 0.85, strong)
    path = "endpoints.cover.explanation.overlap.last"
    kept = [[methods.mean(pair, row, path) for row in (FAITHFUL, "vanilla")] for pair in pairs]
    known = [[1 - share for share in both if share is not None] for both in kept if None not in both]
    yield _count(
        "top 5 lost, output layer, `cover`",
        "≤ a third of vanilla's on 10 of 12",
        [ours <= base / 3 for ours, base in known],
        len(pairs),
        10,
    )


def _count(name: str, wanted: str, held: Sequence[bool], pairs: int, least: int) -> Bar:
    """A bar met on enough pairs: unknown while the missing ones could decide it."""
    met = True if sum(held) >= least else None if sum(held) + pairs - len(held) >= least else False
    return Bar(name, wanted, f"{pairs} pairs", f"{sum(held)} of {len(held)}", met)


def _definition(methods: Methods, pairs: Sequence[Pair]) -> Iterator[Bar]:
    both = {pair: (methods.shares(pair, FAITHFUL), methods.shares(pair, "vanilla")) for pair in pairs}
    gains = [fmean(ours) - fmean(base) for ours, base in both.values() if ours and base]
    wanted = "more nodes than vanilla on 10 of 12"
    yield _count("Definition 1, output layer", wanted, [gain > 0 for gain in gains], len(pairs), 10)
    mean = fmean(gains) if gains else None
    met = mean is not None and mean >= 0.03
    yield _bar("Definition 1, output layer, mean gain", "≥ 0.03", f"mean of {len(gains)} pairs", met, mean)
    known = [pair for pair in pairs if pair[0] != "GT"]
    hidden = [[methods.shares(pair, row, "r001", 0) for row in (FAITHFUL, "vanilla")] for pair in known]
    better = [fmean(ours) >= fmean(base) for ours, base in hidden if ours and base]
    wanted = "not below vanilla on all 8 pairs of GAT and GATv2"
    yield _count("Definition 1, hidden layer, R = 0.001", wanted, better, len(known), len(known))
    whole = [[methods.whole(pair, row) for row in (FAITHFUL, "vanilla")] for pair in pairs]
    more = [fmean(ours) >= 1.5 * fmean(base) for ours, base in whole if ours and base]
    yield _count("whole top 5 certified", "≥ 1.5 × vanilla's share on 9 of 12", more, len(pairs), 9)


def _cost(store: Store) -> Iterator[Bar]:
    held = whole_seconds(store)
    for dataset in WHOLE:
        calls = held.get(dataset, {})
        ratio = calls["fgai"] / calls["vanilla"] if {"fgai", "vanilla"} <= calls.keys() else None
        met = ratio is not None and ratio <= 4
        yield _bar("whole call ÷ training, two CPU threads", "≤ 4", f"GAT {dataset}", met, ratio)
    now = (record for record in store.records("cost") if not (is_earlier(record) or is_older(record)))
    costs = Results(record for record in now if not record["cell"]["label"])
    for dataset in TIMED:
        rows = (("GAT", dataset, "fgai"), ("GAT", dataset, "vanilla"))
        epoch = [costs.estimate(row, "training.epoch_seconds") for row in rows]
        for name, most, pair in (
            ("seconds per epoch ÷ vanilla's", 2.0, epoch),
            ("peak memory ÷ vanilla's", 1.5, [memory_above(costs, row) for row in rows]),
        ):
            ratio = pair[0].mean / pair[1].mean if pair[0] and pair[1] and pair[1].mean else None
            yield _bar(name, f"≤ {most:g}", f"GAT {dataset}", ratio is not None and ratio <= most, ratio)


def _certified(store: Store) -> Iterator[Bar]:
    for dataset, least in CERTIFIED.items():
        certified = []
        for record in store.records("inject"):
            cell = record["cell"]
            if (cell["model"], cell["dataset"], cell["method"]) == ("GAT", dataset, "fgai-certified"):
                certified += [] if cell["label"] or is_older(record) else [record]
        shares = [
            one["share"]
            for record in certified
            for one in record["injection"]
            if one["known"] and (one["where"], one["neighbours"]) == ("any", 1)
        ]
        found = (estimate(shares), estimate(record["alone"] for record in certified))
        values = [None if one is None else one.mean for one in found]
        met = values[0] is not None and values[0] >= least
        wanted = f"≥ {CERTIFIED['amazon-photo']} (Photo), {CERTIFIED['coauthor-physics']} (Physics)"
        name = "certified classes, t = 1 (FGAI-certified; beside it a model without edges)"
        yield _bar(name, wanted, f"GAT {dataset}", met, *values)


def _plus(value: float | None, change: float) -> float | None:
    return None if value is None else value + change
