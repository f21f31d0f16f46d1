"""Tables on terminals of any width: nothing is cut and no number is broken."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from fgai.records import Column, Table

METRICS = (
    "F1 clean",
    "F1 attacked",
    "g-TVD rel",
    "overlap of touched nodes",
    "sharpness",
    "whole-graph F-gap attacked",
)
MODELS = {"GAT": 0.904, "FGAI": 0.924, "uniform (null)": 0.517, "random (null)": 0.507, "chance": 0.203}


def printed(width: int, models: int = 5) -> str:
    """A table of models in a terminal of that width."""
    rows = [[name, *(f"{value + i / 7:.3f} (1{i}.7×)" for i in range(6))] for name, value in MODELS.items()]
    text = StringIO()
    columns = [Column("model"), *(Column(name, better="higher") for name in METRICS)]
    Table("Results", columns, rows[:models]).show(Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [50, 60, 80, 200])
@pytest.mark.parametrize("models", [2, 5])
def test_every_number_is_whole(width: int, models: int) -> None:
    text = printed(width, models)
    assert max(map(len, text.splitlines())) <= width
    for value in list(MODELS.values())[:models]:
        for i in range(6):
            assert f"{value + i / 7:.3f}" in text and f"(1{i}.7×)" in text
    words = set(re.findall(r"[^\s│┃]+", text))
    assert {"touched", "sharpness", "attacked", "GAT"} <= words


def test_columns_of_very_different_widths_are_narrowed_not_cut() -> None:
    names = ("dataset", "method", "clean", "paper", "attacked", "paper's")
    row = ["coauthor-physics", "vanilla + limits", *["0.931 ± 0.005 [−0.010, −0.001]"] * 4]
    text = StringIO()
    Table("F1", [Column(name) for name in names], [row, row]).show(Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and all(line[-1] in "┓┃┩│┘" for line in lines[1:])
    assert text.getvalue().count("[−0.010,") == 8 and "paper's" in text.getvalue()


def test_a_list_where_no_table_fits() -> None:
    lines = [line.rstrip() for line in printed(40).splitlines()]
    at = lines.index("F1 attacked ↑")
    assert lines[at + 1] == "  GAT             1.047 (11.7×)" and lines[at + 5].split()[0] == "chance"


def test_wide_terminals_show_it_as_it_is() -> None:
    assert printed(200).splitlines()[2].split("┃")[1].strip() == "model"
