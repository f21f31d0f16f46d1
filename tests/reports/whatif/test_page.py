"""The page in a real browser: what it shows, saves and refuses, and that a saved change replays."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import torch

from fgai.datasets import load_dataset
from fgai.graph import ChangeRecord, InjectedNode
from fgai.hub import from_pretrained
from fgai.models import AttentionModel
from fgai.reports.template import whatif_script
from fgai.reports.whatif import Server, WhatIf
from fgai.training import limit, load_model, train, untrained_model
from support.cli_cases import here
from support.graph_cases import small_data
from support.report_cases import EVIL

NAMES = tuple(EVIL if node == 7 else f"paper {node}" for node in range(40))
GRAPH = small_data().replace(node_names=NAMES, class_names=("<i>first</i>", "second", "third"))


@cache
def models() -> dict[str, AttentionModel]:
    vanilla = train(
        untrained_model("GAT", GRAPH, hidden_channels=2, heads=2), GRAPH, epochs=8, progress=False
    )
    return {"GAT": vanilla, "<b>limited</b>": limit(vanilla, GRAPH)}


@cache
def answers() -> WhatIf:
    return WhatIf(models(), GRAPH, k=3)


def neighbour_of(node: int) -> int:
    row = slice(*GRAPH.adjacency.rowptr[node : node + 2].tolist())
    return int(GRAPH.adjacency.source[row][0])


NODE = neighbour_of(7)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    shown = {"<b>limited</b>": [2] * 40}
    with Server(answers(), answers().facts(node=NODE, certified=shown)) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield server.address
        server.stop()
        thread.join()


def request(
    address: str, path: str | None = None, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0)
    text = None if body is None else body if isinstance(body, str) else json.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, parts.path if path is None else path, text, names)
    answer = connection.getresponse()
    got = answer.status, answer.read(), answer.headers
    connection.close()
    return got


def plain(node: int = NODE, **parts: Any) -> dict[str, Any]:
    return {"node": node, "removed_edges": [], "added_edges": [], "injected": [], **parts}


def ask(address: str, body: Any, question: str = "view", **headers: str) -> tuple[int, Any]:
    kind = {"Content_Type": "application/json", **headers}
    status, text, _ = request(address, urlsplit(address).path + question, "POST", body, **kind)
    return status, json.loads(text)


class TestServer:
    def test_it_listens_here_alone_and_answers_only_with_the_token(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1" and len(parts.path) > 20
        status, text, headers = request(address)
        assert status == 200 and b"What if?" in text and headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'none'" in headers["Content-Security-Policy"] and "unsafe" not in str(headers)
        for path in (
            "/",
            "/facts.json",
            parts.path[:-2] + "x/",
            f"/x{parts.path}",
            "/é/",
            f"{parts.path[:-1]}?",
        ):
            assert request(address, quote(path, safe="/?"))[0] == 403
            assert request(address, quote(path, safe="/?"), "POST", "{}")[0] == 403
        assert request(address, f"{parts.path}../secret")[0] == 404
        assert request(address, method="PUT")[0] == 501

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", ""])
    def test_another_host_is_refused(self, address: str, host: str) -> None:
        port = urlsplit(address).port
        assert request(address, Host=host.format(port=port))[0] == 403
        assert request(address, Host=f"localhost:{port}")[0] == 200

    def test_questions_of_other_pages_and_damaged_ones_are_refused(self, address: str) -> None:
        assert ask(address, plain())[0] == 200
        assert ask(address, plain(), Origin="http://evil.example")[0] == 403
        assert ask(address, plain(), Content_Type="text/plain")[0] == 404
        assert ask(address, plain(), "facts.json")[0] == 404
        assert ask(address, plain(), Content_Length=str(10**9))[0] == 413
        for body in (
            "{",
            "[]",
            "1",
            plain(node=40),
            plain(node="3"),
            plain(added_edges=[[NODE, NODE]]),
            "[" * 10**5,
        ):
            status, said = ask(address, body)
            assert status == 400 and said["error"]
        assert "nothing was replayed" in ask(address, plain(node=40))[1]["error"]

    def test_it_answers_as_python_does(self, address: str) -> None:
        change = plain(injected=[{"typical": 1, "strength": 2.0, "edges": [NODE]}])
        status, views = ask(address, change)
        assert status == 200 and views == json.loads(json.dumps(answers().views(change)))
        status, features = ask(address, change, "worst-0")
        assert status == 200 and len(features) == GRAPH.num_features
        worse = plain(
            injected=[*change["injected"], {"features": features, "strength": 1.0, "edges": [NODE]}]
        )
        label = int(torch.tensor(views[0]["before"]["logits"]).argmax())
        before, after = (torch.tensor(answers().views(c)[0]["after"]["logits"]) for c in (change, worse))
        assert after[label] - after.sort().values[-1] <= before[label] - before.sort().values[-1]


def test_the_worst_node_goes_on_from_a_changed_class() -> None:
    planted = WhatIf(from_pretrained("planted-gat"), load_dataset("planted"))
    injected: list[dict[str, Any]] = []
    margins = []
    for _ in range(3):
        (view,) = planted.views(plain(24, injected=injected))
        before, after = (torch.tensor(view[when]["logits"]) for when in ("before", "after"))
        own = before.argmax()
        margins.append(float(after[own] - after[torch.arange(len(after)) != own].max()))
        features = planted.worst(plain(24, injected=injected))
        injected.append({"features": features, "strength": 1.0, "edges": [24]})
    assert margins[0] > 0 > margins[1] and margins[2] < margins[1] + 0.01


@pytest.mark.browser
class TestPage:
    @pytest.fixture()
    def page(self, browser: Any, address: str) -> Iterator[Any]:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda one: page.asked.append(one.url))
        page.goto(address)
        page.wait_for_selector("html[data-ready=true]")
        yield page
        assert page.said == []
        assert all(url.startswith((address, "blob:")) or url == "data:," for url in page.asked)
        context.close()

    def test_a_change_is_shown_saved_and_replayed(self, page: Any, tmp_path: Path) -> None:
        button = page.get_by_role("button", name="Inject", exact=True)
        page.get_by_label("Node whose features are copied").fill("paper 5")
        button.click()
        page.get_by_label("Features of the new node").select_option("typical 2")
        button.click()
        page.get_by_label("Strength of injected 2").fill("2.5")
        page.get_by_label("Edge to node").fill(NAMES[absent()])
        page.get_by_role("button", name="Add or remove").click()
        page.get_by_role("button", name="Remove the edge to paper").first.click()
        page.wait_for_selector(".changes li:nth-child(4)")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save for GAT").click()
        file = tmp_path / "change.json"
        saved.value.save_as(file)
        change = ChangeRecord.load(file)
        assert [one.get("copy", one.get("typical")) for one in change.injected] == [5, 2]
        assert change.injected[1]["strength"] == 2.5 and len(change.removed_edges) == 1
        _, after = answers().view("GAT", change)
        rows = "tbody:last-of-type tr:not(:first-child)"
        shown = page.evaluate(f"""() => [...document.querySelectorAll("{rows}")]
          .map((row) => [row.querySelector("th").innerText, row.querySelector(".number").innerText])""")
        by_name = dict(after.summary()["attention"])
        for name, text in shown:
            word = re.sub(r"^[+−]\s*", "", name).strip()
            number = (
                NODE
                if word == "itself"
                else 39 + int(word[-1])
                if word.startswith("injected")
                else NAMES.index(word)
            )
            share = by_name.get(number)
            assert (text == "gone") == (share is None)
            if share is not None and not text.startswith("<"):
                assert float(text.split()[0]) == pytest.approx(100 * share, abs=0.051)
        assert any("gone" in text for _, text in shown)
        assert (
            GRAPH.class_names[after.summary()["class"]]
            in page.locator("tbody tr:first-child td").first.inner_text()
        )

    def test_undo_links_and_refusals(self, page: Any, address: str) -> None:
        before = page.locator("table").inner_text()
        page.get_by_label("Edge to node").fill("paper 99")
        page.get_by_role("button", name="Add or remove").click()
        assert "no node called" in page.locator("[role=status]").inner_text()
        undo, reset = (page.get_by_role("button", name=name) for name in ("Undo", "Reset"))
        assert undo.is_disabled() and reset.is_disabled()
        page.get_by_role("button", name="Inject", exact=True).focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".changes li")
        slider = page.get_by_label("Strength of injected 1")
        slider.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        moved = page.locator("table").inner_text()
        link = page.evaluate("location.href")
        assert moved != before and "1.15" in page.locator("output").inner_text()
        undo.click()
        undo.click()
        page.wait_for_selector(".changes li", state="detached")
        assert page.locator("table").inner_text() == before and undo.is_disabled()
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_selector(".changes li")
        assert page.locator("table").inner_text() == moved
        page.goto("about:blank")
        page.goto(f"{address}#whatif={quote(json.dumps(plain(node=41)))}")
        page.wait_for_selector("html[data-ready=true]")
        assert "There is no node 41" in page.locator("[role=status]").inner_text()

    def test_names_are_text(self, page: Any) -> None:
        text = page.locator("body").inner_text()
        assert (
            EVIL in text
            and "<i>first</i>" in text
            and "<b>limited</b>" in text
            and "≤ 2 injected neighbours" in text
            and "not certified" in text
        )
        assert page.locator("#whatif script, #whatif i:not(.swatch), #whatif b").count() == 0
        assert page.title() == "What if? GAT and <b>limited</b> on small"


@pytest.mark.browser
def test_python_computes_what_the_script_does_not(browser: Any) -> None:
    transformer = WhatIf(untrained_model("GT", GRAPH), GRAPH, k=3)
    with Server(transformer, transformer.facts(node=NODE)) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("html[data-ready=true]")
        page.get_by_label("Features of the new node").select_option("worst 0")
        page.get_by_role("button", name="Inject", exact=True).click()
        page.locator(".changes li").wait_for()
        page.get_by_label("Edge to node").fill(NAMES[neighbour_of(NODE)])
        page.get_by_role("button", name="Add or remove").click()
        page.locator(".changes li:nth-child(2)").wait_for()
        assert "edge removed" in page.locator(".changes").inner_text()
        assert "injected 1" in page.locator("table").inner_text()
        page.close()
        server.stop()
        thread.join()


WIDGET = """async ([script, facts]) => {
  const module = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  let reply = null;
  const sent = [];
  const model = {
    get: () => facts,
    on: (event, act) => { reply = act; },
    send: (question) => { sent.push(question); reply({ id: question.id, error: "no gradient" }); },
  };
  module.default.render({ model, el: document.body });
  while (!document.body.dataset.shown) await new Promise((go) => setTimeout(go, 5));
  document.querySelector("select").value = "worst 0";
  [...document.querySelectorAll("button")].find((one) => one.textContent === "Inject").click();
  while (!sent.length) await new Promise((go) => setTimeout(go, 5));
  await new Promise((go) => setTimeout(go, 5));
  return [sent, document.querySelector("[role=status]").textContent, document.body.innerText, location.href];
}"""


@pytest.mark.browser
def test_a_notebook_shows_it_and_keeps_its_address(browser: Any) -> None:
    page = browser.new_page()
    sent, said, text, address = page.evaluate(WIDGET, [whatif_script(), answers().facts(node=NODE)])
    assert sent == [{"id": 1, "question": "worst-0", "change": plain()}] and said == "no gradient"
    assert "Probability" in text and "Copy link" not in text and address == "about:blank"
    page.close()


def absent() -> int:
    near = answers().views(plain())[0]["before"]["layers"][0]["neighbours"]
    return next(node for node in range(39) if node not in near)


class TestCommands:
    def test_explore_says_where_and_ends_with_ctrl_c(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def serve(server: Server) -> None:
            served.append(server.address)
            raise KeyboardInterrupt

        served: list[str] = []
        monkeypatch.setattr(Server, "serve", serve)
        done = here("explore", "GAT=planted-gat", "planted-fgai", "--node", "24", "--json", cwd=tmp_path)
        assert done.exit_code == 0 and json.loads(done.stdout)["address"] == served[0]
        done = here("explore", "planted-gat", "--node", "x", cwd=tmp_path)
        assert done.exit_code == 2 and "no node 'x'" in done.stderr

    def test_a_file_gives_the_class_and_attention_of_the_page(self, tmp_path: Path) -> None:
        graph, model = load_dataset("planted"), load_model("planted-gat")
        change = ChangeRecord.of(
            model, graph, 24, injected=[InjectedNode(typical=1, strength=3.0, edges=[24])]
        )
        change.save(tmp_path / "change.json")
        done = here(
            "evaluate", "planted-gat", "--change", "change.json", "--json", "-o", "out.json", cwd=tmp_path
        )
        values = json.loads(done.stdout)
        before, after = WhatIf({"GAT": model}, graph).view("GAT", change)
        assert (
            values["after"] == json.loads(json.dumps(after.summary()))
            and values["before"]["class"] == before.summary()["class"]
        )
        assert json.loads((tmp_path / "out.json").read_text())["after"] == values["after"]
        text = here("evaluate", "planted-gat", "--change", "change.json", cwd=tmp_path).stdout
        assert "injected 1" in text and "itself" in text and "margin" in text
        for edit, words in (
            ({"node": 2000}, "names node 2000"),
            ({"model": "0" * 64}, "another model"),
            ({"graph": "0" * 32}, "another graph"),
            ({"node": "x"}, "whole number"),
        ):
            (tmp_path / "bad.json").write_text(json.dumps({**change.to_dict(), **edit}))
            done = here("evaluate", "planted-gat", "--change", "bad.json", "--json", cwd=tmp_path)
            assert done.exit_code == 2 and words in json.loads(done.stdout)["error"]["message"]
        (tmp_path / "bad.json").write_text((tmp_path / "change.json").read_text().replace("3.0", "4.0"))
        done = here("evaluate", "planted-gat", "--change", "bad.json", cwd=tmp_path)
        assert done.exit_code == 2 and "damaged" in done.stderr
        done = here("evaluate", "planted-gat", "--change", "change.json", "--nodes", "3", cwd=tmp_path)
        assert done.exit_code == 2 and "runs no attack" in done.stderr
