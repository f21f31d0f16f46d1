"""The report in a real browser: it opens from disk, stays silent, and does what a reader asks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fgai.reports import Report, make_report, read_report, render, write_report
from fgai.reports.page import _trimmed
from support.report_cases import EVIL, GRAPH, comparison, whole_report

pytestmark = pytest.mark.browser
Visit = Callable[..., Any]

OVERFLOWING = """() => {
  const allowed = (node) => node.closest(".scroll, pre, nav, .plot, .skip, #js-plotly-tester");
  return [...document.querySelectorAll("body *")].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.width > 0 && (box.right > window.innerWidth + 1 || box.left < -1) && !allowed(node);
  }).map((node) => `${node.tagName}#${node.id}: ${(node.textContent || "").slice(0, 40)}`);
}"""
WIDE = """() => [...document.querySelectorAll(".plot")]
  .filter((plot) => plot.scrollWidth > plot.clientWidth + 1).map((plot) => plot.id)"""
PLACE = """([id, node]) => {
  const plot = document.getElementById(id);
  plot.scrollIntoView({ block: "center", behavior: "instant" });
  const trace = plot.data.find((each) => each.customdata && each.customdata.includes(node));
  const at = trace.customdata.indexOf(node);
  const { xaxis, yaxis } = plot._fullLayout;
  const box = plot.getBoundingClientRect();
  const [x, y] = [xaxis._offset + xaxis.d2p(trace.x[at]), yaxis._offset + yaxis.d2p(trace.y[at])];
  return [box.left + x, box.top + y];
}"""


@cache
def shown_report() -> Report:
    """The whole report with a long training and, at one node, fake nodes that only the first attack joins."""
    turns = {"total": [3.0, 0.3] * 100, "closeness": [0.5] * 200, "similarity": [0.2] * 200}
    history = {"terms": turns, "step": 1, "epochs": 200, "best_epoch": 199}
    report = deepcopy(whole_report())
    at, fakes = fake_neighbours(report)
    for n in fakes:
        report.explorer["models"][1]["after"][at][n] = None  # type: ignore[index]
    return dataclasses.replace(report, histories={**report.histories, "GAT": history})


def fake_neighbours(report: Report) -> tuple[int, list[int]]:
    """The position of the first node with injected neighbours, and their positions in its list."""
    assert report.explorer is not None
    original = report.explorer["total"]
    rows = [
        [n for n, one in enumerate(row) if one >= original] for row in report.explorer["nodes"]["neighbours"]
    ]
    return next((at, row) for at, row in enumerate(rows) if row)


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(shown_report(), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def desk(visit: Visit, report_page: Path) -> Any:
    """One open page, wide and light, that tests use in turn; each leaves it silent, wide and light."""
    return visit(report_page)


def neighbour_of_evil() -> int:
    """A node that has the one with the malicious name among its neighbours."""
    row = GRAPH.adjacency.source[GRAPH.adjacency.rowptr[7] : GRAPH.adjacency.rowptr[8]]
    return int(row[0])


def test_opens_silently_and_nothing_overflows(desk: Any) -> None:
    check_opened(desk, 1440, "light")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(375, False), (375, True), (1440, True)])
def test_opens_on_a_phone_and_in_the_dark(visit: Visit, report_page: Path, width: int, dark: bool) -> None:
    opened = visit(report_page, width=width, dark=dark)
    check_opened(opened, width, "dark" if dark else "light")
    check_columns(opened)
    assert len(opened.page.pdf()) > 10_000


def check_opened(opened: Any, width: int, theme: str) -> None:
    page = opened.page
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    for plot in page.locator(".plot").all():
        assert plot.locator("svg.main-svg").count() > 0
    assert page.locator(".plot").count() >= 16
    assert "could not be drawn" not in opened.text("body")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOWING) == []
    for selector in (".main-svg", ".ranks", "table"):
        assert page.locator(selector).first.is_visible()
    opened.check()


CUT = """(selector) => [...document.querySelectorAll(selector)].filter((node) => {
  const box = node.getBoundingClientRect();
  const inside = box.left >= 0 && box.right <= window.innerWidth && node.scrollWidth <= node.clientWidth + 1;
  return box.width > 0 && !inside;
}).map((node) => node.textContent)"""
TOUCHING = """() => [...document.querySelectorAll("#numbers tbody tr")].flatMap((row) => {
  const cells = [...row.querySelectorAll("td")].map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return range.getBoundingClientRect();
  });
  const touches = (box, at) => box.top === cells[at].top && box.left < cells[at].right + 2;
  return cells.slice(1).some(touches) ? [row.textContent] : [];
})"""


def test_every_column_and_link_is_seen(desk: Any) -> None:
    check_columns(desk)
    desk.page.set_viewport_size({"width": 768, "height": 900})
    check_columns(desk)
    desk.page.set_viewport_size({"width": 1440, "height": 900})


def check_columns(opened: Any) -> None:
    assert opened.page.evaluate(CUT, "nav a, #numbers tbody td") == []
    assert opened.page.evaluate(TOUCHING) == []
    shown = opened.page.evaluate("""() => [...document.querySelectorAll("#numbers tbody tr td:last-child")]
      .map((cell) => [cell.dataset.of, cell.getBoundingClientRect().right <= window.innerWidth])""")
    assert shown and all(name == "chance" and seen for name, seen in shown)


def test_losses_are_lines(desk: Any) -> None:
    total = desk.page.evaluate("() => document.getElementById('loss-0').data[0].y")
    assert len(total) == 200 and max(abs(a - b) for a, b in pairwise(total[10:-10])) < 0.3
    assert total[100] == pytest.approx(1.65, abs=0.2)
    assert "means over 11 epochs" in desk.text("#training")


def test_next_and_previous_update_every_view(desk: Any) -> None:
    page = desk.page
    views = ("#node-title", ".ranks ol", "#picked")
    first = [desk.text(view) for view in views]
    stars = page.locator("#star-0-before").inner_html()
    page.click("#next")
    second = [desk.text(view) for view in views]
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert page.locator("#star-0-before").inner_html() != stars
    assert desk.text("#status") == f"Showing {second[0]}."
    page.click("#previous")
    assert [desk.text(view) for view in views] == first
    desk.check()


def test_lists_say_what_the_document_says(desk: Any) -> None:
    explorer = shown_report().explorer
    assert explorer is not None
    desk.page.fill("#search", str(explorer["nodes"]["id"][0]))
    desk.page.keyboard.press("Enter")
    model, names = explorer["models"][0], explorer["nodes"]["name"]
    ids, weights = explorer["nodes"]["neighbours"][0], model["before"][0]
    order = sorted(range(len(ids)), key=lambda n: (-(weights[n] or 0), ids[n]))[: explorer["k"]]
    wanted = [
        "itself" if ids[n] == explorer["nodes"]["id"][0] else names[explorer["nodes"]["id"].index(ids[n])]
        for n in order
    ]
    shown = desk.page.locator(".side").first.locator(".ranks ol").first.locator("li > :first-child")
    assert shown.all_inner_texts() == wanted
    before, after = ({ids[n] for n in some} for some in (order, _after(explorer, model)))
    assert f"{len(before & after)} of {len(order)} stay" in desk.text(".side dl")
    desk.check()


def _after(explorer: dict[str, Any], model: dict[str, Any]) -> list[int]:
    ids, weights = explorer["nodes"]["neighbours"][0], model["after"][0]
    known = [n for n in range(len(ids)) if model["before"][0][n] is not None]
    return sorted(known, key=lambda n: (-weights[n], ids[n]))[: explorer["k"]]


def test_clicking_a_node_in_the_drawing_picks_it(desk: Any) -> None:
    drawn = shown_report().subgraph
    assert drawn is not None
    node = drawn["nodes"][3]
    desk.page.mouse.click(*desk.page.evaluate(PLACE, ["network-1-before", node]))
    desk.page.wait_for_function("node => location.hash === '#node=' + node", arg=node)
    assert desk.text("#node-title") == f"paper {node}" or node in (7, 8)
    desk.check()


def test_zoom_is_linked(desk: Any) -> None:
    width = "id => { const r = document.getElementById(id)._fullLayout.xaxis.range; return r[1] - r[0]; }"
    before = desk.page.evaluate(width, "network-0-before")
    desk.page.click("#zoom-in")
    ranges = [
        desk.page.evaluate(width, f"network-{i}-{when}") for i in (0, 1) for when in ("before", "after")
    ]
    assert all(value == pytest.approx(0.7 * before) for value in ranges)
    desk.page.click("#zoom-reset")
    assert desk.page.evaluate(width, "network-1-after") == pytest.approx(before)
    desk.check()


def test_search_by_number_and_by_name_with_the_keyboard(desk: Any) -> None:
    page = desk.page
    page.focus("#search")
    page.keyboard.type("23")
    assert page.locator("#found li").count() >= 1
    page.keyboard.press("Enter")
    assert desk.text("#node-title") == "paper 23" and page.locator("#found").is_hidden()
    page.keyboard.type("paper 1")
    options = page.locator("#found li")
    assert options.count() > 3
    assert max(one.bounding_box()["height"] for one in options.all()[1:4]) < 45  # one line each
    page.keyboard.press("ArrowDown")
    assert options.nth(1).get_attribute("aria-selected") == "true"
    wanted = options.nth(1).inner_text().split(" node")[0]
    page.keyboard.press("Enter")
    assert desk.text("#node-title") == wanted
    page.keyboard.type("no such node")
    assert "No such node on this page" in desk.text("#found")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert desk.text("#node-title") == wanted and page.locator("#found").is_hidden()
    desk.check()


def test_a_node_named_script_stays_text(desk: Any) -> None:
    page, scripts = desk.page, desk.page.locator("script").count()
    title = page.title()
    page.fill("#search", "<script>")
    assert EVIL in page.locator("#found li").first.inner_text()
    page.keyboard.press("Enter")
    assert desk.text("#node-title") == EVIL
    assert "<i>first</i>" in desk.text("#node") or "second" in desk.text("#node")
    page.fill("#search", str(neighbour_of_evil()))
    page.keyboard.press("Enter")
    labels = "id => [...document.querySelectorAll(`#${id} text`)].map((text) => text.textContent)"
    assert any(text.startswith("<script>") for text in page.evaluate(labels, "values-0"))
    x, y = page.evaluate(PLACE, ["star-0-before", 7])
    page.mouse.move(x, y)
    page.wait_for_selector("#star-0-before .hovertext")
    assert EVIL in "".join(page.evaluate(labels, "star-0-before"))
    assert page.locator("script").count() == scripts and page.title() == title
    assert page.locator("#node b, #node script").count() == 0
    desk.check()


def test_keyboard_alone_reaches_everything(desk: Any) -> None:
    page = desk.page
    reached = []
    page.focus(".skip")
    assert page.locator(".skip").bounding_box()["x"] >= 0
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if page.evaluate("!!document.activeElement.closest('.ranks')"):
            break
    for name in ("theme", "zoom-in", "zoom-reset", "group", "previous", "next", "search"):
        assert name in reached, reached
    wanted = page.evaluate("document.activeElement.title")
    page.keyboard.press("Enter")
    assert desk.text("#node-title") in wanted
    page.focus("#group")
    assert page.locator("#group option").count() >= 3
    page.select_option("#group", index=1)
    assert "fake node" in desk.text(".who")
    desk.check()


def test_attacks_that_chose_different_places(desk: Any) -> None:
    explorer = shown_report().explorer
    assert explorer is not None
    at, fakes = fake_neighbours(shown_report())
    desk.page.fill("#search", str(explorer["nodes"]["id"][at]))
    desk.page.keyboard.press("Enter")
    first, second = (model["name"] for model in explorer["models"])
    joined = f"{len(fakes)} fake node{'s' if len(fakes) > 1 else ''} to it in {first}"
    assert f"the attack joins {joined}, no fake nodes to it in {second}" in desk.text(".who")
    desk.check()


def test_theme_button_paper_and_memory(desk: Any) -> None:
    page = desk.page
    theme = "document.documentElement.dataset.theme"
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != light and desk.text("#theme") == "Light"
    lines = "document.querySelector('#curve-clean .xtick text').style.fill"
    assert page.evaluate(lines) == "rgb(233, 230, 223)"
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate(theme) == "light" and page.evaluate(WIDE) == []
    assert page.locator("#picker").is_hidden() and page.locator("nav").is_hidden()
    page.emulate_media(media="screen")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(theme) == "dark"
    page.reload()
    page.wait_for_selector("html[data-ready=true]")
    check_opened(desk, 1440, "dark")
    page.click("#theme")
    assert page.evaluate(colour) == light
    desk.check()


def test_turning_the_phone(desk: Any) -> None:
    page = desk.page
    for width, height in ((812, 375), (375, 812)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(250)  # drawings follow after 120 ms
    check_opened(desk, 375, "light")
    check_columns(desk)
    assert page.evaluate(WIDE) == []
    page.set_viewport_size({"width": 1440, "height": 900})
    page.wait_for_timeout(250)


def few_nodes() -> dict[str, Any]:
    """The explorer of a page that carries half of the nodes."""
    explorer = whole_report().explorer
    assert explorer is not None
    return _trimmed(explorer, len(explorer["nodes"]["id"]) // 2)


@pytest.mark.parametrize("kind", ["records", pytest.param("newer", marks=pytest.mark.slow), "odd"])
def test_pages_with_parts_missing_open_and_say_so(visit: Visit, tmp_path: Path, kind: str) -> None:
    report = make_report(comparison())
    if kind != "records":
        values = json.loads(whole_report().to_json())
        values["schema"] = 9
        if kind == "odd":
            values |= {"subgraph": {"nodes": 5}, "distribution": {"attacks": 4}, "certificates": {"GAT": {}}}
            values["explorer"] = few_nodes()
        (tmp_path / "new.json").write_text(json.dumps(values))
        report = read_report(tmp_path / "new.json")
    path = tmp_path / "page.html"
    path.write_text(render(report), encoding="utf-8")
    opened = visit(path, width=375, dark=True)
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    opened.check()
    assert "What this page cannot show" in opened.text("body")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 375
    if kind == "records":
        assert "Not in this record" in opened.text("#network")
        assert opened.text("#node-title").startswith("node ")
        opened.page.fill("#search", "12")
        opened.page.keyboard.press("Enter")
        assert opened.text("#node-title") == "node 12"
    else:
        assert "newer fgai (schema 9" in opened.text("#missing")
    if kind == "odd":
        check_search_among_few(opened)


def check_search_among_few(opened: Any) -> None:
    """The search finds the node asked for, or says that the page does not carry it."""
    carried = few_nodes()["nodes"]["id"]
    absent = next(n for n in range(10) if n not in carried and any(str(n) in str(m) for m in carried))
    page, before = opened.page, opened.text("#node-title")
    page.fill("#search", str(absent))
    assert opened.text("#found li") == f"Node {absent} is not on this page; use --node {absent}."
    page.keyboard.press("Enter")
    assert opened.text("#node-title") == before
    page.fill("#search", "4000")
    assert opened.text("#found li") == "There is no node 4000; the graph has 40."
    there = max(carried)
    for words in (f"node {there}", f"PAPER {there}"):
        page.fill("#search", str(carried[0]))
        page.keyboard.press("Enter")
        page.fill("#search", words)
        page.keyboard.press("Enter")
        assert opened.text("#node-title") == f"paper {there}"
    opened.check()


def test_data_can_be_saved(desk: Any, tmp_path: Path) -> None:
    with desk.page.expect_download() as saved:
        desk.page.click("#download")
    saved.value.save_as(tmp_path / "saved.json")
    assert read_report(tmp_path / "saved.json") == shown_report()
    desk.check()


def test_smallest_changes_are_said_of_the_node_that_was_searched(visit: Visit, tmp_path: Path) -> None:
    report = shown_report()
    explorer = {
        **report.explorer,
        "models": [{**one, "changes": [EVIL]} for one in report.explorer["models"]],
    }
    opened = visit(write_report(dataclasses.replace(report, explorer=explorer), tmp_path / "page.html"))
    said = opened.page.locator("dt", has_text="Smallest change")
    assert said.count() == len(report.names) and EVIL in opened.page.locator("#node").inner_text()
    opened.page.click("#next")
    assert said.count() == 0
    opened.check()


def test_what_if_is_computed_in_the_page(visit: Visit, report_page: Path) -> None:
    """Injected nodes move the tables, and names from data stay text there, too."""
    opened = visit(report_page)
    page, place = opened.page, opened.page.locator("#whatif-page")
    page.wait_for_selector("#whatif-page[data-ready=true]")
    page.locator("#node .who a").click()
    shown = shown_report().explorer["nodes"]["id"][0]  # type: ignore[index]
    assert page.get_by_label("Node, by number or name").input_value() == f"paper {shown}"
    before = place.locator("table").inner_text()
    place.get_by_label("Features of the new node").select_option("typical 0")
    place.get_by_role("button", name="Inject", exact=True).click()
    place.locator(".changes li").wait_for()
    assert place.locator("table").inner_text() != before and "<i>first</i>" in place.inner_text()
    place.get_by_label("Node, by number or name").fill(EVIL)
    place.get_by_role("button", name="Show").click()
    page.wait_for_function(
        "name => document.querySelector('#whatif-page thead').innerText.includes(name)", arg=EVIL
    )
    assert page.title() == shown_report().title and place.locator("script, b").count() == 0
    opened.check()
