"""Tables about trainings: ablation, cost and the search for settings."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.again import ANOTHER
from experiments.build import about, label, name_of, sheet
from experiments.cells import Cell as GridCell
from experiments.cells import read_grid
from experiments.choose import CRITERION, NOISE, SEEDS, chosen, is_in_use, trials
from experiments.results import NODE_KINDS, ROWS, Results, RowKey, key_of
from experiments.sheet import Published, Sheet, estimated, published
from experiments.statistics import Estimate, estimate
from experiments.store import Store
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table

ABLATION_ROWS = (
    "vanilla", "fgai", "fgai[PE]", "fgai[SE]", "fgai[SP]", "fgai[E]", "fgai[P]", "fgai[S]",
    "fgai(not sharp)", "fgai(no cut)", "fgai(no limits)",
)  # fmt: skip
COST_ROWS = (*ROWS, "pro-gnn", "gnn-svd", "gnnguard")
TRIALS = 8


def _ablated(store: Store) -> Results:
    cells = read_grid("ablation")
    rows = {(cell.model, cell.dataset, cell.row) for cell in cells}
    records = (record for kind in NODE_KINDS for record in store.records(kind))
    keyed = ((key_of(GridCell.from_dict(record["cell"])), record) for record in records)
    return Results.newest((record for key, record in keyed if key[:3] in rows), cells)


def ablation(store: Store) -> list[Sheet | Table]:
    """All settings of the three terms, and the three adversaries, under the paper's attack."""
    metrics = [
        estimated("f1.clean", paper=("ablation", "f1")),
        estimated("f1.attacked", paper=("ablation", "f1_attacked")),
        estimated("g_jsd.last", paper=("ablation", "g_jsd")),
        estimated("g_tvd.logits", paper=("ablation", "g_tvd")),
        estimated("g_tvd.rel"),
        estimated("similarity.overlap.all", "as vanilla", own=False),
        estimated("overlap_touched.prediction.all", "kept under attack"),
    ]
    notes = (
        "In brackets the terms that are on: S similarity, P prediction stability, E explanation stability,"
        " which is trained by the margin (closeness and sharpness always). FGAI has all three and limits. In"
        " parentheses: without the term sharpness, with limits that neither clip nor shrink ordinary nodes,"
        " without limits.",
    )
    return [sheet(_ablated(store), "Ablation", metrics, notes, order=ABLATION_ROWS)]


def seeds(store: Store) -> list[Sheet | Table]:
    """How far two trainings that differ in their seed alone explain alike, vanilla and FGAI."""
    results = Results.read(store, "again", "seeds")
    metrics = [
        estimated("similarity.overlap.all", "top 5 shared", threat=ANOTHER),
        estimated("similarity.overlap.sharpest", "sharpest layer", threat=ANOTHER),
        estimated("overlap.chance.all", "by chance", threat=ANOTHER),
        estimated("similarity.rank_correlation.all", "rank correlation", threat=ANOTHER),
    ]
    note = (
        "Attention on the clean graph of two models trained alike with one seed and the next: another split,"
        " other weights, other draws. Mean over layers and nodes with more than 5 neighbours."
    )
    return [sheet(results, "Explanations of two seeds", metrics, (note,))]


def cost(store: Store) -> list[Sheet | Table]:
    """Median seconds per epoch and peak memory of the training, as multiples of vanilla's."""
    results = Results.read(store, "cost", "cost", defences=True)
    note = "Trainings alone, one at a time: the attempt that is returned, without the check (table `whole`)."
    shared = Results.read(store, "evaluate")
    if not results.records and shared.records:
        results = shared
        note = "From the trainings of the evaluation grid, which may have shared a device."
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns += [
        quantity("training.epoch_seconds", "ms per epoch", ".2f"),
        quantity("training.epoch_seconds", "time ÷ vanilla", ".2f"),
        Column("training s", ".1f"),
        quantity("training.peak_memory", "peak MiB", ".0f"),
        quantity("training.peak_memory", "memory ÷ vanilla", ".2f"),
        Column("paper s", ".0f"),
        Column("paper time ÷", ".1f"),
        Column("paper MiB", ".0f"),
        Column("paper memory ÷", ".2f"),
        Column("device"),
    ]
    rows: list[Sequence[Cell]] = []
    for model, dataset in results.pairs():
        known = {row for row in COST_ROWS if _paper((model, dataset, row), "seconds")}
        names = [r for r in COST_ROWS if r in known or r in results.rows(model, dataset)]
        rows += [_cost_row(results, (model, dataset, row)) for row in names]
    notes = (
        f"{note} Median over epochs, mean over seeds; pre-training of vanilla not counted. Memory above what"
        " data and parent hold; on a CPU, growth of the process. The paper: 200 epochs on a V100; its arXiv"
        " has 128 features per node, arxiv-tape 40.",
        *about(results)[1:2],
    )
    return [Table("Cost of training", columns, rows, notes)]


def _paper(row: RowKey, metric: str) -> Published | None:
    """The paper's cost; the cost, unlike the scores, of arXiv may be compared whatever its features."""
    model, dataset, name = row
    return published("cost", metric, (model, {"arxiv-tape": "ogbn-arxiv"}.get(dataset, dataset), name))


def memory_above(results: Results, row: RowKey) -> Estimate | None:
    """Peak bytes of a training above what lay on the device before it."""
    peak, base = (results.values(row, f"training.{name}_memory") for name in ("peak", "base"))
    return estimate(peak[seed] - base[seed] for seed in peak if seed in base)


def _cost_row(results: Results, row: RowKey) -> list[Cell]:
    def over(ours: float | None, base: float | None) -> float | None:
        return ours / base if ours is not None and base else None

    def numbers(key: RowKey) -> list[float | None]:
        epoch, whole = (results.estimate(key, f"training.{name}") for name in ("epoch_seconds", "seconds"))
        seconds, mib = (_paper(key, metric) for metric in ("seconds", "mib"))
        found = (epoch, whole, memory_above(results, key), seconds, mib)
        return [None if e is None else e.mean for e in found]

    epoch, whole, memory, seconds, mib = numbers(row)
    base = numbers((*row[:2], "vanilla"))
    return [
        *row[:2],
        label(results, row),
        None if epoch is None else 1e3 * epoch,
        over(epoch, base[0]),
        whole,
        None if memory is None else memory / 2**20,
        over(memory, base[2]),
        seconds,
        over(seconds, base[3]),
        mib,
        over(mib, base[4]),
        ", ".join(sorted({str(record["about"]["device"]) for record in results.held(row)})) or None,
    ]


def search(store: Store) -> list[Sheet | Table]:
    """The settings chosen on validation nodes, and how much the choice mattered."""
    columns = [Column(name) for name in ("method", "model", "dataset")]
    columns += [
        Column("trials", ".0f"),
        CRITERION,
        Column("clean", ".4f"),
        Column("attacked", ".4f"),
        Column("worst trial", ".4f"),
        Column("settings"),
    ]
    rows: list[Sequence[Cell]] = []
    few = waiting = 0
    for (method, model, dataset), held in trials(store).items():
        found = chosen((method, model, dataset), held)
        best = found or held[0]
        few += len(held) < TRIALS
        waiting += found is not None and not is_in_use((method, model, dataset), found)
        settings = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in sorted(best.settings.items()))  # fmt: skip
        scores = [float(len(held)), best.criterion, best.clean, best.attacked, held[-1].criterion]
        said = settings or "preset"
        if found is None:
            said += f" (does not ship: {best.reason or best.fell})"
        rows.append([name_of(method), model, dataset, *scores, said])
    notes = (
        f"{TRIALS} trials each on {SEEDS} seeds; criterion: mean of"
        " accuracy on validation nodes, clean and under a short ensemble whose endpoints are"
        " validation nodes. Chosen is the best setting that holds"
        f" on both seeds, or the preset in use within {NOISE:g} of it. Trials see no test nodes.",
        *([f"{few} searches do not have all of their {TRIALS} trials yet."] if few else []),
        *([f"{waiting} of these settings are not in use yet: no other record has them."] if waiting else []),
    )
    return [Table("Chosen settings", columns, rows or [[None] * len(columns)], notes)]
