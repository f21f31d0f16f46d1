"""A server on 127.0.0.1 that speaks https and answers as badly as a test wants."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

Answer = Callable[[BaseHTTPRequestHandler], None]

# Made for these tests, valid for 127.0.0.1 and trusted by nobody: it protects nothing.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBXDCCAQKgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAkxMjcuMC4w
LjEwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CTEyNy4wLjAuMTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABFtVbrqJvkuoSahI
QH0VRktdvN6BXtjGdsRnX/Kk19y7b8nbVVUqG7GON96QACGnlgPZAIU/2u9kAIx5
UkvzNyyjQzBBMA8GA1UdEQQIMAaHBH8AAAEwDwYDVR0TAQH/BAUwAwEB/zAdBgNV
HQ4EFgQUzDcMGSPl4w4Zo35RLNqQBt3jq1cwCgYIKoZIzj0EAwIDSAAwRQIgYM8M
r2y7pQ/2b4nhP3Tumjy8n5KMYTCqCW+Bv5gMYrwCIQCPouKmyZZwz8gxovvpiivc
LHmrC86H8PAnOuomLQwcRQ==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgYzmc03CmgtLoEVDD
9yoYIksL0eRCj2k7nd3oYwTVjNmhRANCAARbVW66ib5LqEmoSEB9FUZLXbzegV7Y
xnbEZ1/ypNfcu2/J21VVKhuxjjfekAAhp5YD2QCFP9rvZACMeVJL8zcs
-----END PRIVATE KEY-----
"""


@dataclass
class Server:
    """Where it listens, what it answers by path, and what it was asked."""

    url: str
    answers: dict[str, bytes | Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(folder: Path, *, tls: bool = True) -> Iterator[Server]:
    """Run a server until the block ends."""
    server: Server

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            answer = server.answers.get(self.path)
            if answer is None:
                self.send_error(404)
            elif callable(answer):
                answer(self)
            else:
                send(self, answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    if tls:
        (folder / "key.pem").write_text(KEY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_file(folder), folder / "key.pem")
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
    server = Server(f"{'https' if tls else 'http'}://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def certificate_file(folder: Path) -> Path:
    path = folder / "certificate.pem"
    path.write_text(CERTIFICATE)
    return path


def trust(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process trust the server."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file(folder)))


def send(
    handler: BaseHTTPRequestHandler, content: bytes, *, told: int | None = None, status: int = 200
) -> None:
    """Answer with `content`, and say that it has `told` bytes."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if told is None else told))
    handler.end_headers()
    handler.wfile.write(content)


def redirect(target: str) -> Answer:
    """Send the client elsewhere."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer
