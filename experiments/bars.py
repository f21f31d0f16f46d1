"""The bars: what must come out of the reproduction, checked for every model and dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from experiments.paper import published
from experiments.results import DATASETS, MODELS, Results
from experiments.store import Store
from experiments.training_tables import memory_above
from fgai.metrics import quantity
from fgai.records import Column, Table

SEEDS = 5
LARGE = "arxiv-tape"
STABLER = {"GT": 3.0}
"""Least ratio of vanilla's instability to FGAI's; 10 for the others."""
WORDS = {True: "met", False: "missed", None: "open"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar in one cell of the grid.

    Attributes:
        model: e.g. `GAT`.
        dataset: e.g. `amazon-photo`.
        name: what is measured.
        wanted: what it must reach, in words.
        found: the numbers.
        met: None while numbers are missing.
        seeds: that vanilla and FGAI both have.
    """

    model: str
    dataset: str
    name: str
    wanted: str
    found: str
    met: bool | None
    seeds: int


class Case:
    """Vanilla and FGAI on one model and dataset.

    Args:
        results: of the evaluations.
        costs: of the trainings.
        model: e.g. `GAT`.
        dataset: e.g. `amazon-photo`.
    """

    def __init__(self, results: Results, costs: Results, model: str, dataset: str) -> None:
        self.results, self.costs, self.model, self.dataset = results, costs, model, dataset
        held = [results.values(model, dataset, row, "f1.clean") for row in ("vanilla", "fgai")]
        self.seeds = len(held[0].keys() & held[1].keys())

    def mean(self, path: str, row: str = "fgai", threat: str = "standard") -> float | None:
        """Mean over seeds, None where nothing is there."""
        found = self.results.estimate(self.model, self.dataset, row, path, threat)
        return None if found is None else found.mean

    def paper(self, metric: str) -> float | None:
        """F1 of the paper's FGAI."""
        found = published("f1", self.model, self.dataset, "fgai", metric)
        return None if found is None else found.mean

    def bar(
        self,
        name: str,
        wanted: str,
        judge: Callable[..., bool],
        *values: float | None,
        form: str = "{:.3f} ; {:.3f}",
    ) -> Bar:
        """Return a bar judged by its values, open if one of them is missing."""
        known = [value for value in values if value is not None]
        whole = len(known) == len(values)
        return Bar(
            model=self.model,
            dataset=self.dataset,
            name=name,
            wanted=wanted,
            found=form.format(*known) if whole else "–",
            met=judge(*known) if whole else None,
            seeds=self.seeds,
        )


def check(store: Store) -> list[Bar]:
    """Check every bar on every model and dataset of the protocol.

    Nothing is rounded before it is judged. `open`: a number is missing. Bars about speed and memory read the
    `cost` records, and those of the evaluations where there are none.
    """
    results, costs = Results.read(store, grid="node"), Results.read(store, "cost")
    return judge(results, costs if costs.records else results)


def judge(results: Results, costs: Results) -> list[Bar]:
    """Check every bar, given what was read."""
    found: list[Bar] = []
    for model in MODELS:
        for dataset in DATASETS:
            if dataset != LARGE:
                case = Case(results, costs, model, dataset)
                found += [*_predictions(case), *_stability(case), *_explanations(case), *_slopes(case)]
                found += [*_intervals(case), *_cost(case)]
    return [*found, *_large(results)]


def table(bars: list[Bar], *, every: bool = True) -> Table:
    """Return the bars as a table: all of them, or those missed and open only; counts below."""
    shown = bars if every else [bar for bar in bars if not bar.met]
    columns = [Column(name) for name in ("model", "dataset", "bar", "wanted", "found", "seeds", "")]
    rows = [[b.model, b.dataset, b.name, b.wanted, b.found, str(b.seeds), WORDS[b.met]] for b in shown]
    counts = {word: sum(b.met is state for b in bars) for state, word in WORDS.items()}
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    notes = [f"{said}, of {len(bars)}."]
    if few := sum(0 < bar.seeds < SEEDS for bar in bars):
        notes.append(f"{few} are judged on fewer than {SEEDS} seeds.")
    return Table("Bars", columns, rows, notes)


def summary(bars: list[Bar]) -> Table:
    """Return one row per bar and one column per model: in how many datasets it was met."""
    names = list(dict.fromkeys(bar.name for bar in bars))
    columns = [Column("bar"), Column("wanted"), *(Column(model) for model in MODELS)]
    rows = []
    for name in names:
        mine = [bar for bar in bars if bar.name == name]
        cells = []
        for model in MODELS:
            held = [bar for bar in mine if bar.model == model]
            missed = [bar.dataset for bar in held if bar.met is False]
            opened = sum(bar.met is None for bar in held)
            text = f"{sum(bar.met is True for bar in held)}/{len(held)}" if held else "–"
            text += f", {opened} open" if opened else ""
            cells.append(f"{text} (missed: {', '.join(missed)})" if missed else text)
        rows.append([name, mine[0].wanted, *cells])
    return Table("Bars met, of the four datasets", columns, rows)


def _predictions(case: Case) -> Iterator[Bar]:
    clean, base = case.mean("f1.clean"), case.mean("f1.clean", "vanilla")
    attacked = case.mean("f1.attacked")
    strong = [case.mean("f1.attacked", row, "strong") for row in ("fgai", "ln", "at")]
    two = "{:.3f}, {:.3f}"
    yield case.bar("clean F1", "≥ vanilla − 0.01", lambda f, v: f >= v - 0.01, clean, base, form=two)
    yield case.bar(
        "clean F1 vs paper", "≥ paper's FGAI", lambda f, p: f >= p, clean, case.paper("clean"), form=two
    )
    yield case.bar("attacked F1", "≥ own clean − 0.02", lambda a, c: a >= c - 0.02, attacked, clean, form=two)
    yield case.bar(
        "attacked F1 vs paper",
        "≥ paper's FGAI",
        lambda a, p: a >= p,
        attacked,
        case.paper("attacked"),
        form=two,
    )
    yield case.bar(
        "strong F1",
        "> LN's and AT's",
        lambda f, ln, at: f > max(ln, at),
        *strong,
        form="{:.3f}; {:.3f}, {:.3f}",
    )


def _stability(case: Case) -> Iterator[Bar]:
    least = STABLER.get(case.model, 10.0)
    for name, path in (
        ("g-TVD rel", "g_tvd.rel"),
        ("g-TVD prob", "g_tvd.probs"),
        ("g-JSD last", "g_jsd.last"),
    ):
        base, ours = case.mean(path, "vanilla"), case.mean(path)
        ratio = None if base is None or ours is None else base / ours if ours else math.inf
        yield case.bar(name, "10× under vanilla (GT: 3×)", lambda r: r >= least, ratio, form="{:.1f}×")
    yield case.bar(
        "g-JSD all",
        "< vanilla",
        lambda f, v: f < v,
        case.mean("g_jsd.all"),
        case.mean("g_jsd.all", "vanilla"),
        form="{:.2e}, {:.2e}",
    )


def _explanations(case: Case) -> Iterator[Bar]:
    for name, path, least in (
        ("top 5 as vanilla", "similarity.overlap.all", 0.85),
        ("top 5 as vanilla, sharpest layer", "similarity.overlap.sharpest", 0.9),
    ):
        yield case.bar(name, f"≥ {least}", lambda f, low=least: f >= low, case.mean(path), form="{:.3f}")
    for name, attack in (("top 5 lost", "prediction"), ("top 5 lost, explanation attack", "explanation")):
        path = f"overlap_touched.{attack}.all"
        lost = [None if kept is None else 1 - kept for kept in (case.mean(path), case.mean(path, "vanilla"))]
        yield case.bar(name, "≤ half of vanilla's", lambda f, v: f <= v / 2, *lost, form="{:.3f}, {:.3f}")
    for name, part in (("sharpness", "all"), ("sharpness, sharpest layer", "sharpest")):
        path = f"sharpness.clean.{part}"
        pair = (case.mean(path), case.mean(path, "vanilla"))
        yield case.bar(name, "≥ 0.9 × vanilla's", lambda f, v: f >= 0.9 * v, *pair, form="{:.4f}, {:.4f}")


def _slopes(case: Case) -> Iterator[Bar]:
    for scope in ("graph", "node"):
        attacked = case.mean(f"f_slope.{scope}.attacked.gap")
        base = case.mean(f"f_slope.{scope}.clean.gap", "vanilla")
        minus = case.mean(f"f_slope.{scope}.attacked.minus")
        yield case.bar(
            f"F-gap attacked, {scope}",
            "≥ 0.9 × vanilla's clean gap",
            lambda f, v: f >= 0.9 * v,
            attacked,
            base,
            form="{:.3f}, {:.3f}",
        )
        yield case.bar(f"f− attacked, {scope}", "≤ 0", lambda f: f <= 0, minus, form="{:.3f}")
    nulls = [case.mean(f"null.{kind}.f_slope.node.attacked.gap") for kind in ("uniform", "random")]
    yield case.bar(
        "F-gap above null rows",
        "> uniform and random, node",
        lambda f, u, r: f > max(u, r),
        attacked,
        *nulls,
        form="{:.3f}; {:.3f}, {:.3f}",
    )


def _intervals(case: Case) -> Iterator[Bar]:
    for name, path in (("attacked F1 gain", "f1.attacked"), ("g-TVD rel gain", "g_tvd.rel")):
        sign = quantity(path).sign
        found = case.results.interval(case.model, case.dataset, "fgai", path)
        ends = (None, None) if found is None or found.seeds < SEEDS else (found.low, found.high)
        yield case.bar(
            name,
            "95 % interval excludes zero",
            lambda low, high, s=sign: min(s * low, s * high) > 0,
            *ends,
            form="[{:+.3f}, {:+.3f}]",
        )


def _cost(case: Case) -> Iterator[Bar]:
    where = (case.model, case.dataset)
    epoch = [case.costs.estimate(*where, row, "training.epoch_seconds") for row in ("fgai", "vanilla")]
    memory = [memory_above(case.costs, *where, row) for row in ("fgai", "vanilla")]
    for name, most, pair in (("seconds per epoch", 1.8, epoch), ("peak memory", 1.2, memory)):
        ours, base = pair
        ratio = ours.mean / base.mean if ours is not None and base is not None and base.mean else None
        yield case.bar(name, f"≤ {most} × vanilla's", lambda r, high=most: r <= high, ratio, form="{:.2f}×")


def _large(results: Results) -> Iterator[Bar]:
    there = results.values("GT", LARGE, "fgai", "f1.clean")
    yield Bar(
        model="GT",
        dataset=LARGE,
        name="GT on the arXiv graph",
        wanted="runs",
        met=True if there else None,
        found=f"{len(there)} seeds" if there else "–",
        seeds=len(there),
    )
