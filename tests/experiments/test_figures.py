"""Figures of the reproduction: from synthetic records, and from models trained for two epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import Store, read_grid
from experiments.figures import FIGURES, Choice, averaged, figure
from experiments.results import Results
from experiments.subjects import DEGREES, Source, attacked, telling_node
from fgai.cli import app
from fgai.errors import InputError
from support import bench_cases as cases


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Photo and Amazon-CS for GAT and GT, evaluated and certified."""
    made = Store(tmp_path_factory.mktemp("results"))
    for grid in ("node", "definition", "injection"):
        chosen = [cell for cell in read_grid(grid) if cell.model != "GATv2" and "amazon" in cell.dataset]
        cases.fill(made, chosen)
    return made


class TestFromRecords:
    def test_means_over_seeds(self, store: Store) -> None:
        record = averaged(Results.read(store), ("GAT", "amazon-photo", "fgai"))
        assert record is not None and record.name == "FGAI"
        assert record.value("f_slope.node.clean.curve_plus") == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
        assert averaged(Results.read(store), ("GATv2", "amazon-photo", "fgai")) is None

    @pytest.mark.parametrize(
        ("name", "count"),
        [("f-curves", 2 * 2 * 2), ("certified", 2 * 2), ("injection", 1)],
    )
    def test_one_figure_per_case(self, store: Store, name: str, count: int) -> None:
        drawn = dict(figure(name, store, Source()))
        assert len(drawn) == count
        for stem, made in drawn.items():
            assert stem.startswith(name) and "amazon" in made.get_suptitle()
        if name == "injection":
            return
        some = dict(figure(name, store, Source(), Choice(("amazon-cs",), ("GT",))))
        assert 1 <= len(some) <= 2 and all("amazon-cs" in stem for stem in some)

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        for name in ("f-curves", "injection"):
            with pytest.raises(InputError, match=r"there (are|is) no|has no certificates"):
                list(figure(name, Store(tmp_path), Source()))
        with pytest.raises(InputError, match="did you mean 'loss'"):
            figure("los", Store(tmp_path), Source())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Models trained for two epochs, once for all tests here."""
    return Source(cache=tmp_path_factory.mktemp("cache"), epochs=2)


class TestFromModels:
    @pytest.mark.many
    @pytest.mark.parametrize(
        "name", ["attention-subgraph", "topk-neighbours", "instability", "certified", "loss"]
    )
    def test_drawn(self, tmp_path: Path, source: Source, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two vanilla models: making one faithful takes its time and is tested elsewhere."""
        train = Source.trained
        monkeypatch.setattr(Source, "trained", lambda self, method, graph, *_: train(self, "vanilla", graph))
        (drawn,) = figure(name, Store(tmp_path), source)
        assert drawn[0] == f"{name}-planted-GAT" and "planted" in drawn[1].get_suptitle()

    def test_models_come_from_the_cache(self, source: Source) -> None:
        assert source.cache is not None
        graph = source.graph()
        first, kept = source.trained("vanilla", graph), sorted(source.cache.iterdir())
        second = source.trained("vanilla", graph)
        assert kept and sorted(source.cache.iterdir()) == kept
        for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert ours.equal(theirs)

    @pytest.mark.slow
    def test_faithful_model(self, tmp_path: Path, source: Source) -> None:
        models = source.pair(source.graph())
        assert list(models) == ["GAT", "FGAI"]
        assert list(figure("topk-neighbours", Store(tmp_path), source))

    def test_the_node_shown_was_attacked(self, source: Source) -> None:
        graph = source.graph()
        hit = attacked({"GAT": source.trained("vanilla", graph)}, graph, seed=0)
        node = telling_node(hit, graph)
        ends = hit[0].attack.change.endpoints
        assert ends is not None and node in ends.flatten().tolist()
        assert DEGREES[0] <= int(graph.adjacency.degree[node]) <= DEGREES[1]
        assert node == telling_node(hit, graph)

    def test_command_writes_pdf_and_png(self, tmp_path: Path, store: Store) -> None:
        words = ["figure", "f-curves", "--results", store.root, "-d", "amazon-cs", "-o", tmp_path, "--json"]
        done = CliRunner().invoke(app, ["bench", *map(str, words)])
        assert done.exit_code == 0, done.stderr
        files = [Path(name) for name in json.loads(done.stdout)["files"]]
        assert {file.suffix for file in files} == {".pdf", ".png"} and all(
            file.stat().st_size for file in files
        )
        assert set(FIGURES) >= {"f-curves", "loss", "attention-subgraph", "topk-neighbours", "certified"}
