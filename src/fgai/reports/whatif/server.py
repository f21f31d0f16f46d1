"""`Server` serves the what-if page on this machine only; `explore` shows it in a notebook."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from torch import nn

from fgai.errors import FgaiError, extra
from fgai.reports.template import asset, fill, whatif_script
from fgai.reports.whatif.answer import WhatIf
from fgai.typed import typed

LONGEST = 4_000_000  # bytes of a question
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@typed
class Server(AbstractContextManager["Server"]):
    """Serves a page of `WhatIf.facts` on 127.0.0.1 under a random path, and writes no files.

    Requests without the token in the path, or for another host, get 403.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> answers = WhatIf(fgai.GAT.for_data(data), data)
        >>> with Server(answers, answers.facts()) as server:
        ...     server.address.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, answers: WhatIf, facts: dict[str, Any], *, port: int = 0) -> None:
        token = secrets.token_urlsafe(24)
        title = f"{' and '.join(answers.models)} on {answers.graph.name}"
        files = {
            "": ("text/html", fill(asset("page.html", "whatif"), {"title": title})),
            "style.css": ("text/css", asset("style.css") + asset("whatif.css", "whatif")),
            "whatif.js": ("text/javascript", whatif_script() + asset("start.js", "whatif")),
            "facts.json": ("application/json", json.dumps(facts)),
        }
        contents = {name: (kind, text.encode()) for name, (kind, text) in files.items()}
        handler = partial(_Handler, f"/{token}/", contents, answers)
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.address: str = f"http://127.0.0.1:{self._server.server_port}/{token}/"

    def serve(self) -> None:
        """Answer until Ctrl-C, or `stop` in another thread."""
        self._server.serve_forever(0.2)

    def stop(self) -> None:
        """End `serve`."""
        self._server.shutdown()

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds of silence
    lock = Lock()  # one question at a time

    def __init__(self, home: str, files: dict[str, tuple[str, bytes]], answers: WhatIf, *rest: Any) -> None:
        self.home, self.files, self.questions = home, files, answers.questions
        super().__init__(*rest)

    def do_GET(self) -> None:
        if (name := self._name()) in self.files:
            self._send(200, *self.files[str(name)])
        elif name is not None:
            self._refuse(404, "there is no such file")

    def do_POST(self) -> None:
        name = self._name()
        if name is None:
            return
        size = self.headers.get("Content-Length", "")
        if name not in self.questions or self.headers.get_content_type() != "application/json":
            self._refuse(404, "there is no such question")
        elif not size.isdecimal() or int(size) > LONGEST:
            self._refuse(413, f"a question has at most {LONGEST} bytes")
        else:
            self._answer(name, self.rfile.read(int(size)))

    def _answer(self, name: str, body: bytes) -> None:
        try:
            values = json.loads(body)
            with self.lock:
                answer = self.questions[name](values if isinstance(values, dict) else {})
            self._send(200, "application/json", json.dumps(answer, allow_nan=False).encode())
        except (FgaiError, ValueError, RecursionError) as error:
            self._refuse(400, str(error))

    def _name(self) -> str | None:
        """The name behind the token; None after a refusal."""
        assert isinstance(self.server, ThreadingHTTPServer)
        hosts = {f"{host}:{self.server.server_port}" for host in ("127.0.0.1", "localhost")}
        origin = self.headers.get("Origin")
        own = self.headers.get("Host") in hosts and (
            origin is None or origin.removeprefix("http://") in hosts
        )
        begins = self.path[: len(self.home)].encode()
        if own and secrets.compare_digest(begins, self.home.encode()):
            return self.path[len(self.home) :].partition("?")[0]
        self._refuse(403, "this page is open to those who have its whole address")
        return None

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True  # what is left of the request is not read
        self._send(status, "application/json", json.dumps({"error": reason}).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "fgai"

    def log_message(self, *_: Any) -> None:
        """Log nothing: addresses hold the token."""


@typed
def explore(
    models: Mapping[str, nn.Module] | nn.Module, data: Any, *, node: int | None = None, k: int = 5
) -> Any:
    """Return a widget that shows how changed edges and injected nodes change one node's attention and class.

    GAT and GATv2 are computed in the browser, other models here. The extra `notebook` installs anywidget.
    `models` are node classifiers by name, or one; `node` is shown first, by default the first test node.
    `InputError` for no models, a node the graph does not have, or another task.
    """
    base = extra("anywidget").AnyWidget
    answers = WhatIf(models, data, k=k)
    facts = answers.facts(node=node, certified=answers.certify())
    parts = {"_esm": whatif_script(), "_css": asset("whatif.css", "whatif")}
    parts["facts"] = extra("traitlets").Dict().tag(sync=True)
    widget = type("WhatIfWidget", (base,), parts)(facts=facts)

    def reply(_: Any, content: dict[str, Any], buffers: Any) -> None:
        answer: dict[str, Any] = {"id": content.get("id")}
        try:
            answer["answer"] = answers.questions[str(content.get("question"))](content.get("change") or {})
        except (FgaiError, KeyError, ValueError) as error:
            answer["error"] = str(error)
        widget.send(answer)

    widget.on_msg(reply)
    return widget
