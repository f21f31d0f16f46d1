"""The bars: what must come out, checked for every model and dataset under the searches of claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from experiments.certified import certified_share, features_alone
from experiments.claim_tables import ANY, BESIDE, CLAIM
from experiments.paper import published
from experiments.results import GRAPHS, MODELS, NODE_KINDS, SHARING, Results
from experiments.statistics import Estimate, estimate
from experiments.store import Store
from experiments.training_tables import memory_above
from fgai.records import Column, Table

SEEDS = 5
STABLER = {"GT": 3.0}
"""Least ratio of vanilla's instability to FGAI's; 10 for the others."""
CERTIFIED = {"coauthor-physics": 0.6, "amazon-photo": 0.3}
"""Least share of certified classes of GAT, one injected neighbour of every node."""
PAPER = "standard"
"""The threat that removal curves are measured under."""
WORDS = {True: "met", False: "missed", None: "no number"}


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
        held = [results.values(model, dataset, row, "f1.attacked", CLAIM) for row in ("vanilla", "fgai")]
        self.seeds = len(held[0].keys() & held[1].keys())

    def mean(self, path: str, row: str = "fgai", threat: str = CLAIM) -> float | None:
        """Mean over seeds, None where nothing is there."""
        return _mean(self.results.estimate(self.model, self.dataset, row, path, threat))

    def pair(self, path: str) -> tuple[float | None, float | None]:
        """FGAI's mean and vanilla's under `ensemble`, over the seeds and layers that both have."""
        ours, base = self.results.pair(self.model, self.dataset, path, CLAIM)
        return _mean(estimate(ours.values())), _mean(estimate(base.values()))

    @property
    def flat(self) -> str:
        """Names the layers that similarity and sharpness leave out, in brackets; empty without any."""
        layers = self.results.flat(self.model, self.dataset, CLAIM)
        return f" (layer {', '.join(map(str, layers))} is flat, left out)" if layers else ""

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
        form: str = "{:.3f}, {:.3f}",
        seeds: int | None = None,
    ) -> Bar:
        """Return a bar judged by its values; without one of them nothing is said."""
        known = [value for value in values if value is not None]
        whole = len(known) == len(values)
        return Bar(
            model=self.model,
            dataset=self.dataset,
            name=name,
            wanted=wanted,
            found=form.format(*known) if whole else "–",
            met=judge(*known) if whole else None,
            seeds=self.seeds if seeds is None else seeds,
        )


def check(store: Store) -> list[Bar]:
    """Check every bar on every model and dataset of the protocol.

    Nothing is rounded before it is judged, and only records of today's settings and searches count. Bars
    about speed and memory read the `cost` records, those about certificates the `inject` records.
    """
    return list(store.derived("bars", (*NODE_KINDS, "cost", "inject"), lambda: _checked(store)))


def _checked(store: Store) -> list[Bar]:
    tuned, others = Results.node(store), Results.node(store, SHARING)
    return [*judge(tuned, Results.current(store, "cost")), *_certified(store, tuned), *_shared(others)]


def judge(results: Results, costs: Results) -> list[Bar]:
    """Check every bar of the paper's graphs but certificates, given what was read."""
    found: list[Bar] = []
    for model in MODELS:
        for dataset in GRAPHS:
            case = Case(results, costs, model, dataset)
            found += [*_predictions(case), *_stability(case), *_explanations(case), *_slopes(case)]
            found += _cost(case)
    return found


def table(bars: list[Bar], *, every: bool = True) -> Table:
    """Return the bars as a table: all of them, or those not met only; counts below."""
    shown = bars if every else [bar for bar in bars if not bar.met]
    columns = [Column(name) for name in ("model", "dataset", "bar", "wanted", "found", "seeds", "")]
    rows = [[b.model, b.dataset, b.name, b.wanted, b.found, str(b.seeds), WORDS[b.met]] for b in shown]
    counts = {word: sum(b.met is state for b in bars) for state, word in WORDS.items()}
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    notes = [
        f"{said}, of {len(bars)}. FGAI and vanilla are compared over the seeds and layers that both have."
    ]
    if few := sum(0 < bar.seeds < SEEDS for bar in bars):
        notes.append(f"{few} are judged on fewer than {SEEDS} seeds.")
    return Table("Bars", columns, rows, notes)


def summary(bars: list[Bar]) -> Table:
    """Return one row per bar and one column per model: on how many datasets it was met."""
    names = list(dict.fromkeys(bar.name for bar in bars))
    columns = [Column("bar"), Column("wanted"), *(Column(model) for model in MODELS)]
    rows = []
    for name in names:
        mine = [bar for bar in bars if bar.name == name]
        cells = []
        for model in MODELS:
            held = [bar for bar in mine if bar.model == model]
            missed = [bar.dataset for bar in held if bar.met is False]
            unknown = sum(bar.met is None for bar in held)
            text = f"{sum(bar.met is True for bar in held)}/{len(held)}" if held else "–"
            text += f", {unknown} without a number" if unknown else ""
            cells.append(f"{text} (missed: {', '.join(missed)})" if missed else text)
        rows.append([name, mine[0].wanted, *cells])
    return Table("Bars met, of the datasets they are about", columns, rows)


def _predictions(case: Case) -> Iterator[Bar]:
    clean, base = case.pair("f1.clean")
    attacked, strong = case.mean("f1.attacked"), case.mean("f1.attacked", threat=BESIDE)
    random = case.mean("f1.attacked_random", threat=BESIDE)
    plain = [case.mean("f1.attacked", row, BESIDE) for row in ("ln", "at")]
    limited = case.mean("f1.attacked", "at-limits", BESIDE)
    yield case.bar("clean F1", "≥ vanilla − 0.005", lambda f, v: f >= v - 0.005, clean, base)
    yield case.bar("clean F1 vs paper", "≥ paper's FGAI", lambda f, p: f >= p, clean, case.paper("clean"))
    yield case.bar("`ensemble` F1", "≥ own clean − 0.02", lambda a, c: a >= c - 0.02, attacked, clean)
    yield case.bar(
        "`ensemble` F1 vs paper",
        "≥ paper's attacked FGAI",
        lambda a, p: a >= p,
        attacked,
        case.paper("attacked"),
    )
    yield case.bar("`ensemble-strong` F1", "≥ own clean − 0.10", lambda a, c: a >= c - 0.1, strong, clean)
    yield case.bar(
        "`ensemble-strong` F1, random endpoints",
        "≥ own clean − 0.06",
        lambda a, c: a >= c - 0.06,
        random,
        clean,
    )
    yield case.bar(
        "`ensemble-strong` F1 vs LN and AT",
        "> both without limits",
        lambda f, ln, at: f > max(ln, at),
        strong,
        *plain,
        form="{:.3f}; {:.3f}, {:.3f}",
    )
    yield case.bar(
        "`ensemble-strong` F1 vs AT + limits", "≥ its − 0.02", lambda f, a: f >= a - 0.02, strong, limited
    )
    anything = case.mean("f1.attacked", threat=ANY)
    yield case.bar("`values` F1", "≥ own clean − 0.04", lambda a, c: a >= c - 0.04, anything, clean)
    for name, threat, mean in (("worst seed", CLAIM, attacked), (f"worst seed, `{BESIDE}`", BESIDE, strong)):
        seeds = case.results.values(case.model, case.dataset, "fgai", "f1.attacked", threat).values()
        worst = min(seeds, default=None)
        yield case.bar(name, "≥ mean − 0.03", lambda w, m: w >= m - 0.03, worst, mean)


def _stability(case: Case) -> Iterator[Bar]:
    least = STABLER.get(case.model, 10.0)
    for name, path in (
        ("g-TVD rel", "g_tvd.rel"),
        ("g-TVD prob", "g_tvd.probs"),
        ("g-JSD last", "g_jsd.last"),
    ):
        ours, base = case.pair(path)
        ratio = None if base is None or ours is None else base / ours if ours else math.inf
        yield case.bar(name, "10× under vanilla (GT: 3×)", lambda r: r >= least, ratio, form="{:.1f}×")
    yield case.bar(
        "g-JSD all", "< vanilla", lambda f, v: f < v, *case.pair("g_jsd.all"), form="{:.2e}, {:.2e}"
    )


def _explanations(case: Case) -> Iterator[Bar]:
    yield from _similar(case)
    lost = case.pair("lost.explanation.cover")
    yield case.bar("top 5 lost, `cover`", "≤ a third of vanilla's", lambda f, v: f <= v / 3, *lost)
    if case.model != "GT":
        yield _first_layer(case)
    yield from _sharp(case)


def _first_layer(case: Case) -> Bar:
    """Nothing is lost at the first layer, on the seeds whose attack reaches a top 5 that could be."""
    where = (case.model, case.dataset, "fgai")
    kept = case.results.values(*where, "overlap_touched.explanation.layers.0", CLAIM)
    seeds = len(case.results.values(*where, "f1.attacked", CLAIM))
    found = _mean(estimate(kept.values()))
    bar = case.bar(
        "top 5 lost at the first layer",
        "0",
        lambda f: f == 0,
        None if found is None else 1 - found,
        form="{:.4f}",
        seeds=len(kept),
    )
    if len(kept) == seeds:
        return bar
    return replace(bar, found=f"{bar.found} (no top 5 in reach on {seeds - len(kept)} of {seeds} seeds)")


def _similar(case: Case) -> Iterator[Bar]:
    for name, path, least in (
        ("similarity", "similarity.overlap.all", 0.85),
        ("similarity, sharpest layer", "similarity.overlap.sharpest", 0.9),
    ):
        form = "{:.3f}" + case.flat * path.endswith(".all")
        yield case.bar(name, f"≥ {least}", lambda f, low=least: f >= low, case.mean(path), form=form)


def _sharp(case: Case) -> Iterator[Bar]:
    for name, part in (("sharpness", "all"), ("sharpness, sharpest layer", "sharpest")):
        pair, form = case.pair(f"sharpness.clean.{part}"), "{:.4f}, {:.4f}" + case.flat * (part == "all")
        yield case.bar(name, "≥ 0.9 × vanilla's", lambda f, v: f >= 0.9 * v, *pair, form=form)


def _slopes(case: Case) -> Iterator[Bar]:
    attacked = None
    for scope in ("graph", "node"):
        attacked = case.mean(f"f_slope.{scope}.attacked.gap", threat=PAPER)
        base = case.mean(f"f_slope.{scope}.clean.gap", "vanilla", PAPER)
        minus = case.mean(f"f_slope.{scope}.attacked.minus", threat=PAPER)
        yield case.bar(
            f"F-gap attacked, {scope}",
            "≥ 0.9 × vanilla's clean gap",
            lambda f, v: f >= 0.9 * v,
            attacked,
            base,
        )
        yield case.bar(f"f− attacked, {scope}", "≤ 0", lambda f: f <= 0, minus, form="{:.3f}")
    nulls = [
        case.mean(f"null.{kind}.f_slope.node.attacked.gap", threat=PAPER) for kind in ("uniform", "random")
    ]
    yield case.bar(
        "F-gap above null rows",
        "> uniform and random, node",
        lambda f, u, r: f > max(u, r),
        attacked,
        *nulls,
        form="{:.3f}; {:.3f}, {:.3f}",
    )


def _cost(case: Case) -> Iterator[Bar]:
    where = (case.model, case.dataset)
    epoch = [case.costs.estimate(*where, row, "training.epoch_seconds") for row in ("fgai", "vanilla")]
    memory = [memory_above(case.costs, *where, row) for row in ("fgai", "vanilla")]
    for name, most, (ours, base) in (("seconds per epoch", 1.6, epoch), ("peak memory", 1.2, memory)):
        ratio = ours.mean / base.mean if ours is not None and base is not None and base.mean else None
        seeds = 0 if ours is None else ours.seeds
        yield case.bar(
            name, f"≤ {most} × vanilla's", lambda r, high=most: r <= high, ratio, form="{:.2f}×", seeds=seeds
        )


def _certified(store: Store, results: Results) -> Iterator[Bar]:
    for dataset, least in CERTIFIED.items():
        case = Case(results, results, "GAT", dataset)
        share, alone = (read(store, "GAT", dataset) for read in (certified_share, features_alone))
        yield case.bar(
            "certified classes, t = 1",
            "≥ 0.6 (Physics), 0.3 (Photo)",
            lambda s, _, low=least: s >= low,
            _mean(share),
            _mean(alone),
            form="{:.3f} (features alone {:.3f})",
            seeds=0 if share is None else share.seeds,
        )


def _shared(results: Results) -> Iterator[Bar]:
    for model in MODELS:
        for dataset in SHARING:
            case = Case(results, results, model, dataset)
            pair = case.mean("f1.attacked"), case.mean("f1.clean")
            yield case.bar(
                "shared preset: `ensemble` F1", "≥ own clean − 0.03", lambda a, c: a >= c - 0.03, *pair
            )
            for bar in (*_similar(case), *_sharp(case)):
                yield replace(bar, name=f"shared preset: {bar.name}")


def _mean(found: Estimate | None) -> float | None:
    return None if found is None else found.mean
