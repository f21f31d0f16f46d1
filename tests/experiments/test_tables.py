"""Tables, bars and documents from synthetic records, against numbers worked out by hand or scipy."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from experiments import Cell, Store, grid_names, read_grid
from experiments.certificate_tables import promises
from experiments.choose import presets
from experiments.document import fill, update
from experiments.paper_claim import Wins, paper_claim, wins
from experiments.results import Results
from experiments.tables import TABLES, render, table, text_of
from fgai.certificates import ARITHMETIC, EXPLANATION, PROMISE
from fgai.cli import app
from fgai.errors import CheckpointError, DataError, InputError
from fgai.records import Table
from support import bench_cases as cases
from support.bench_cases import photo_results


class TestTables:
    def rows(self, store: Store, name: str, **wanted: str) -> list[dict[str, str]]:
        read = csv.DictReader(io.StringIO(render(name, store, "csv")))
        return [row for row in read if all(row[key] == value for key, value in wanted.items())]

    def test_numbers_by_hand(self, whole: Store) -> None:
        """FGAI scores .90 … .94 under attack, vanilla .40 … .44, on the same seeds: the difference is .5."""
        (row,) = self.rows(whole, "f1", model="GAT", dataset="amazon-photo", method="FGAI", metric="attacked")
        assert float(row["mean"]) == pytest.approx(0.92) and int(row["seeds"]) == 5
        assert float(row["std"]) == pytest.approx(0.0158113883)
        assert float(row["difference"]) == float(row["low"]) == pytest.approx(0.5)
        assert row["best"] == "1" and float(row["paper_mean"]) == 0.8637

    def test_ratio_is_of_the_means(self, whole: Store) -> None:
        (row,) = self.rows(
            whole, "stability", model="GAT", dataset="amazon-photo", method="AT", metric="g-TVD rel"
        )
        moved = [[(1 - base - 0.01 * seed) ** 4 for seed in range(5)] for base in (0.4, 0.7)]
        assert float(row["ratio_to_vanilla"]) == pytest.approx(np.mean(moved[0]) / np.mean(moved[1]))
        low, high = stats.ttest_rel(moved[1], moved[0]).confidence_interval(0.95)
        assert (float(row["low"]), float(row["high"])) == pytest.approx((low, high))

    def test_markdown(self, whole: Store) -> None:
        text = render("f1", whole)
        line = next(x for x in text.splitlines() if x.startswith("| amazon-photo | FGAI |"))
        assert "| **0.920±0.016** | 0.8637±0.01 |" in line
        assert "All 520 cells are there" in text and text.count("\n*GAT") == 2
        assert "the paper's attack" in text and "too weak for a claim" in text
        assert "uniform (null)" in (slopes := render("f-slope", whole)) and "random (null)" in slopes
        assert "FGAI[PE]" not in text and "FGAI[PE]" in render("ablation", whole)

    def test_missing_cells_are_counted_and_rows_without_records_left_out(self, tmp_path: Path) -> None:
        some = [c for c in read_grid("node") if c.model == "GAT" and c.dataset == "amazon-cs" and c.seed < 2]
        text = render("f1", cases.fill(Store(tmp_path), some))
        assert "502 of 520 cells are missing (–)" in text
        assert "**0.905±0.007 (n=2)**" in text
        assert "coauthor-cs" not in text and "*GATv2*" not in text
        for name in TABLES:
            assert "–" in render(name, Store(tmp_path / "nothing")) or name in ("search", "kernels")

    def test_without_records_words_say_so(self, tmp_path: Path) -> None:
        text = render("f1", Store(tmp_path))
        assert "none yet; " in text and "cells of its grid are missing" in text

    def test_outdated_records_leave_the_tables(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        for cell in read_grid("node"):
            if (cell.model, cell.dataset, cell.method) == ("GAT", "amazon-photo", "fgai"):
                body = cases.body_of(cell)
                if cell.seed == 0:
                    del body["fingerprint"]
                if cell.seed == 1:
                    body["fingerprint"]["attacks"] = dict.fromkeys(cell.threats, "of before")
                if cell.seed == 2:
                    body["training"]["settings"]["lr"] = 0.123
                store.write(cell, body)
        (row,) = self.rows(store, "f1", method="FGAI", metric="attacked")
        assert float(row["mean"]) == pytest.approx(0.9 + 0.01 * (3 + 4) / 2) and row["seeds"] == "2"
        assert "6 records of other settings or older searches are not shown" in render("f1", store)

    @pytest.mark.many
    @pytest.mark.parametrize("name", TABLES)
    def test_every_form_of_every_table(self, whole: Store, name: str) -> None:
        parts = table(name, whole)
        latex, markdown = text_of(parts, "latex"), text_of(parts, "markdown")
        assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") >= 1
        body = [line for line in latex.splitlines() if not line.startswith("%")]
        assert not any(sign in line for line in body for sign in "±×↑↓–")
        widths = {line.count("|") - line.count("\\|") for line in markdown.splitlines() if line[:1] == "|"}
        assert widths and list(csv.reader(io.StringIO(text_of(parts, "csv"))))

    def test_certificates(self, whole: Store) -> None:
        """Every radius, nodes with few neighbours apart, and the sentence of what is promised."""
        top, classes = TABLES["certificates"](whole)
        assert isinstance(top, Table) and isinstance(classes, Table)
        titles = [column.title for column in top.columns]
        assert titles[4:9] == ["R = 0.001", "R = 0.003", "R = 0.01", "R = 0.03", "R = 0.1"]
        assert titles[9:] == ["median radius", "trivial", "sharpness"]
        rows = {tuple(row[:4]): row[4:] for row in top.rows}
        expected = ["60.0 ± 0.0", "50.0 ± 0.0", "40.0 ± 0.0", "20.0 ± 0.0", "10.0 ± 0.0"]
        expected += ["0.002 ± 0", "25.0 ± 0.0", "0.125 ± 0.000"]
        assert list(rows["GATv2", "coauthor-cs", "2", "FGAI, one setting"]) == expected
        assert [row[3] for row in top.rows[:3]] == ["vanilla", "limits, one setting", "harden"]
        assert classes.rows[0][-1] == "unknown" and classes.rows[0][4] is None
        for form in ("markdown", "latex"):
            assert render("certificates", whole, form).count("with its values fixed") == 2
            assert render("certificates", whole, form).count(f"that of the {ARITHMETIC}") == 2

    def test_certificates_of_two_vectors_are_told_apart(self) -> None:
        older, newer = {"promise": "Moved by R."}, {"promise": PROMISE, "explanation": EXPLANATION}
        assert promises([older])[0].startswith("Moved by R. The top-k is that of the arithmetic mean")
        assert promises([newer]) == [PROMISE] and EXPLANATION in PROMISE
        both = promises([older, newer, newer])
        assert both[0].startswith("1 of 3 records: Moved") and both[1] == f"2 of 3 records: {PROMISE}"

    def test_a_row_means_one_thing(self, tmp_path: Path) -> None:
        store = cases.fill(Store(tmp_path), [cases.tiny(), cases.tiny(seed=1, settings={"epochs": 3})])
        with pytest.raises(CheckpointError, match="different settings"):
            Results.read(store)
        labelled = [cases.tiny(), cases.tiny(seed=1, settings={"epochs": 3}, label="longer")]
        assert len(Results.read(cases.fill(Store(tmp_path / "x"), labelled)).records) == 1

    def test_threats_of_a_row_are_laid_together(self, tmp_path: Path) -> None:
        every = [Cell(threats=("standard",)), Cell(threats=("ensemble-strong",))]
        results = Results.read(cases.fill(Store(tmp_path), every))
        found = results.values(("GAT", "planted", "vanilla"), "f1.attacked", "ensemble-strong")
        assert found == {0: pytest.approx(0.37)}
        assert results.values(("GAT", "planted", "vanilla"), "f1.attacked") == {0: pytest.approx(0.4)}

    def test_unknown_words(self, whole: Store) -> None:
        with pytest.raises(InputError, match="did you mean 'stability'"):
            render("stabilty", whole)
        with pytest.raises(InputError, match="format"):
            render("f1", whole, "html")


class TestDocument:
    TEXT = (
        "# Title\n\nprose | stays\n\n<!-- table: f1 -->\noutdated\n<!-- end -->\n\nmore\n\n"
        "<!-- table: bars -->\n<!-- end -->\n"
    )

    def test_only_tables_change(self, whole: Store, tmp_path: Path) -> None:
        path = tmp_path / "doc.md"
        path.write_text(self.TEXT)
        assert update(path, whole) and not update(path, whole)
        text = path.read_text()
        assert text.startswith("# Title\n\nprose | stays\n\n<!-- table: f1 -->") and "\n\nmore\n\n" in text
        assert "outdated" not in text and "Micro-F1" in text and "≥ own clean − 0.045" in text

    def test_bad_marks(self, whole: Store, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="2 tables begin and 1 end"):
            fill("<!-- table: f1 -->\n<!-- table: bars -->\n<!-- end -->\n", whole)
        with pytest.raises(InputError, match="did you mean 'search'"):
            fill("<!-- table: serch -->\n<!-- end -->\n", whole)
        with pytest.raises(DataError, match="cannot read"):
            update(tmp_path / "none.md", whole)
        assert fill("no marks\n", whole) == "no marks\n"

    def test_the_results_pages_can_be_filled(self, whole: Store) -> None:
        docs = Path(__file__).parents[2] / "docs"
        pages = [docs / "results.md", *(docs / "results").glob("*.md")]
        assert len(pages) == 9
        for page in pages:
            text = page.read_text().replace("<!-- site table: ", "<!-- table: ")
            assert fill(text, whole).count("<!-- end -->") == text.count("<!-- end -->"), page.name

    def test_the_first_page_fits_on_two_screens(self, whole: Store) -> None:
        page = Path(__file__).parents[2] / "docs" / "results.md"
        assert len(fill(page.read_text(), whole).splitlines()) < 100

    def test_sentences_count_wins_where_intervals_exclude_zero(self, whole: Store, tmp_path: Path) -> None:
        """FGAI is .5 above vanilla on every seed and pair."""
        results = Results.node(whole)
        assert wins(results, "fgai", "vanilla", "f1.attacked") == Wins(12, 0, 12)
        said = paper_claim(whole).splitlines()
        assert len(said) == 3 and all("over 12 pairs" in line for line in said), said
        assert "no records yet" in paper_claim(Store(tmp_path))
        assert wins(photo_results("f1.attacked", 0.42), "fgai", "vanilla", "f1.attacked") == Wins(0, 0, 1)


class TestCommands:
    def ask(self, *words: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["bench", *map(str, words)])
        assert done.exit_code == code, (done.stdout, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def test_table_bars_choose_status(self, tmp_path: Path) -> None:
        """Every command reads the folder anew, so a small one: GAT on Photo."""
        cells = [cell for grid in ("node", "cost", "definition") for cell in read_grid(grid)]
        cells += read_grid("search")
        some = [cell for cell in cells if (cell.model, cell.dataset) == ("GAT", "amazon-photo")]
        store = cases.fill(Store(tmp_path / "results"), some)
        place = ("--results", store.root)
        assert self.ask("table", "f1", *place, "--format", "markdown") == render("f1", store).rstrip() + "\n"
        rows = json.loads(self.ask("table", "f1", *place, "--json"))["rows"]
        assert len(rows) == 9 * 2
        notes = " ".join(json.loads(self.ask("table", "certificates", *place, "--json"))["notes"])
        assert PROMISE in notes and f"that of the {ARITHMETIC}" in notes  # records that name no vector
        assert "Micro-F1" in self.ask("table", "f1", *place)
        self.ask("table", "cost", *place, "-o", tmp_path / "cost.tex", "-f", "latex")
        assert "tabular" in (tmp_path / "cost.tex").read_text()
        assert len(json.loads(self.ask("bars", *place, "--json"))["bars"]) == 124
        assert "missed" in self.ask("bars", *place, "--missed")
        self.ask("choose", *place, "-o", tmp_path / "presets.toml")
        assert tomllib.loads((tmp_path / "presets.toml").read_text()) == tomllib.loads(presets(store))
        answer = json.loads(self.ask("status", "node", *place, "--json"))
        assert (answer["done"], answer["failed"], answer["open"]) == (70, 0, 820 - 70)

    def test_status_of_every_grid(self, tmp_path: Path) -> None:
        """Of five records one failed, and one was made with other settings and other code than today's."""
        cells = read_grid("seeds")
        store = cases.fill(Store(tmp_path), cells[:4])
        older = cases.body_of(cells[0])
        older["training"]["settings"]["lr"] = 7.0
        older["fingerprint"]["code"] = "of before"
        store.write(cells[0], older)
        store.write(cells[4], {"status": "failed", "error": "x", "seconds": 1.0})
        grids = json.loads(self.ask("status", "--results", tmp_path, "--json"))["grids"]
        assert {entry["grid"] for entry in grids} == set(grid_names())
        (found,) = [entry for entry in grids if entry["grid"] == "seeds"]
        assert found == {
            "grid": "seeds",
            "cells": 96,
            "done": 3,
            "earlier": 0,
            "outdated": 1,
            "failed": 1,
            "open": 91,
            "other code": 1,
        }
        said = self.ask("status", "--results", tmp_path)
        assert "bench status seeds" in said and "defences-search" in said
        assert "name one" in self.ask("status", "--only", "seed=0", code=2)

    def test_refusals(self, whole: Store, tmp_path: Path) -> None:
        assert "did you mean" in self.ask("table", "f-slop", "--results", whole.root, code=2)
        assert "there is no grid" in self.ask("run", "nodes", "--results", tmp_path, code=2)
        assert "`--shard`" in self.ask("run", "node", "--shard", "6/5", "--results", tmp_path, code=2)
        assert "no search records" in self.ask("choose", "--results", tmp_path, code=2)

    def test_a_run_that_ended_in_time_says_what_is_still_outdated(self, tmp_path: Path) -> None:
        grid = tmp_path / "grid.toml"
        grid.write_text('[[cells]]\nkind = "again"\nmethod = "vanilla"\ndataset = "planted"\nseed = [0, 1]\n')
        first, second = read_grid(grid)
        store, older = Store(tmp_path / "r"), cases.body_of(first)
        older["training"]["settings"]["lr"] = 7.0
        store.write(first, older)
        store.write(second, cases.body_of(second))
        said = self.ask("run", grid, "--results", store.root, "--redo", "--limit", "0")
        assert "1 done, 0 failed, 0 open, 1 outdated, of 2" in said

    def test_run_reports_failures(self, tmp_path: Path) -> None:
        grid = tmp_path / "grid.toml"
        grid.write_text('[[cells]]\ndataset = "nowhere"\nseed = [0, 1]\n')
        said = self.ask("run", grid, "--results", tmp_path / "r", code=1)
        assert "2/2 GAT vanilla nowhere seed 1 failed" in said and "0:00:00 left" in said
        assert "there is no dataset" in self.ask("status", grid, "--results", tmp_path / "r")
