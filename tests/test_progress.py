"""Progress: a line that fits the terminal, with count and time left; plain lines where there is none."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fgai import progress
from fgai.attacks import Attack
from fgai.progress import current_stage, show_progress, stage
from support import attack_cases as cases

NOTE = "best 0.8123  total 1.234  closeness 0.123  similarity 0.0123  prediction stability 0.456"


def lines_at(width: int, label: str = "fgai", note: str = NOTE, steps: int = 99) -> list[str]:
    """What a terminal of that width shows, line by line, without control characters."""
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    with show_progress(True, console), stage(label, 400) as work:
        for _ in range(steps):
            work.advance(note=note)
        progress._display.get()._bar.refresh()  # type: ignore[union-attr]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_count_bar_and_time_left_fit_whatever_the_note(width: int) -> None:
    found = lines_at(width)
    assert max(map(len, found)) <= width
    assert any(re.search(r"fgai .*━.* +99/400 +(\d\d:\d\d|--:--)", line) for line in found)


def test_long_labels_give_way() -> None:
    found = lines_at(60, "a model with a name that goes on and on, 1/2 · explanation attack")
    assert max(map(len, found)) <= 60 and any(
        "99/400" in line and "explanation attack" in line for line in found
    )


def test_nothing_is_written_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(), stage("work", 3) as work:
        work.advance(note="loss 1.0")
    assert capfd.readouterr() == ("", "")


def test_long_work_writes_plain_lines_without_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with show_progress(), stage("outer"), stage("work", 3) as work:
        work.advance()
        work.advance()
    out, lines = capfd.readouterr()
    assert out == "" and "\x1b" not in lines
    assert "outer · work: 1 of 3, about " in lines and " s left" in lines and "2 of 3" in lines
    with (
        show_progress(False),
        show_progress(),
        show_progress(True),
        stage("work", 3) as work,
    ):  # inside it nothing is shown either
        work.advance()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("pace", "text"), [(0.5, "about 48 s"), (6.0, "about 10 min"), (0.001, None)])
def test_long_work_says_early_how_long_it_takes(
    pace: float, text: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "EVERY", 20.0)
    with show_progress(), stage("work", 100) as work:
        for _ in range(3):
            now[0] += pace
            work.advance()
            if work.done < 3:  # too little to tell
                assert capfd.readouterr().err == ""
    lines = capfd.readouterr().err
    assert (lines == "") if text is None else (f"work: 3 of 100, {text} left in this step" in lines)


class Watched:
    """Stands for the terminal: keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int | None]] = []

    def update(self, stages: tuple[progress.Bar, ...]) -> None:
        self.seen += (
            [(" · ".join(s.label for s in stages), stages[-1].done, stages[-1].total)] if stages else []
        )


@pytest.fixture
def watched() -> Any:
    display = Watched()
    token = progress._display.set(display)  # type: ignore[arg-type]
    yield display
    progress._display.reset(token)


def test_stages_lie_in_one_another(watched: Watched) -> None:
    with stage("outer"), stage("inner", 2):
        current_stage().advance()
    assert watched.seen == [
        ("outer", 0, None),
        ("outer · inner", 0, 2),
        ("outer · inner", 1, 2),
        ("outer", 0, None),
    ]
    current_stage().advance()  # nobody's stage
    assert len(watched.seen) == 4


def test_false_hides_what_was_shown(watched: Watched) -> None:
    with show_progress(False), stage("hidden", 2):
        current_stage().advance()
    assert watched.seen == []


@pytest.mark.parametrize("kind", [kind for kind in cases.BUDGETS if kind not in cases.UNSEARCHED], ids=str)
def test_attacks_count_their_steps(kind: type[Attack], watched: Watched) -> None:
    attack = cases.attack(kind)
    with cases.quiet():
        result = attack.run(cases.trained("gat", "vanilla"), cases.tiny_graph())
    label, done, total = watched.seen[-1]
    assert label == f"{attack.objective.name} attack" and total == attack.max_steps
    assert result.ledger.steps <= done
