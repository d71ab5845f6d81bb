"""The web page of a job: a small HTTP server in threads of its own that reads a board, and nothing else.

It only ever answers GET. Without the token that is in the URL it says nothing, so that other users of the machine see
nothing; a Host header with another name than this address is refused, so that no page in the user's browser can reach
it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvmpi.trace import http_server
from kvmpi.trace.board import Board

_WEB = Path(__file__).with_name("web")
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
#: What is served besides the data, read once: name, kind, contents.
_FILES = ("index.html", "app.js", "style.css", "icon.svg")


def serve(board: Board, host: str, port: int, token: str = "") -> tuple[str, Callable[[], None]]:
    """Serve ``board`` on ``host``; the URL, and what ends it.

    Args:
        port: 0 lets the system choose.
        token: who does not know it sees nothing; empty makes a random one.
    Raises:
        OSError: the port or the address cannot be had.
    """
    server = _Server((host, port), board, token or secrets.token_urlsafe(18))
    return server.start("kvmpi-web", f"?token={server.token}")


class _Server(http_server.Server):
    def __init__(self, address: tuple[str, int], board: Board, token: str) -> None:
        self.board, self.token = board, token
        self.files = {name: (_WEB / name).read_bytes() for name in _FILES}
        self._encoded = (0, b"")
        super().__init__(address, _Handler)

    def encoded(self, number: int, picture: dict[str, Any]) -> bytes:
        """The picture as JSON, made once however many look."""
        known, body = self._encoded
        if known != number:
            body = json.dumps(_finite(picture)).encode()
            self._encoded = (number, body)
        return body

    def knows_host(self, header: str) -> bool:
        """Whether a Host header is an address, or localhost: a name may be anybody's."""
        host, _, port = header.rpartition(":")
        if not port.isdigit():
            host, port = header, "80"
        if int(port[:6]) != self.server_port:
            return False
        if host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        here = ipaddress.ip_address(self.server_name)
        return here.is_unspecified or address == here or (here.is_loopback and address.is_loopback)


class _Handler(http_server.Handler):
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self.server.knows_host(self.headers.get("Host", "")):
            return self._say(403, "Open the page by the address that kvmpi run has printed.\n")
        given = parse_qs(url.query).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode()):
            return self._say(403, "The token is missing or wrong. Open the whole URL that kvmpi run has printed.\n")
        name = url.path.lstrip("/") or "index.html"
        if name == "data.json":
            return self._send_data()
        if name not in self.server.files:
            return self._say(404, "There is no such page.\n")
        body = self.server.files[name]
        if name == "index.html":
            body = body.replace(b"{{token}}", self.server.token.encode())
        self._send(200, body, _KINDS[Path(name).suffix])
        return None

    def _send_data(self) -> None:
        number, picture = self.server.board.read()
        if number == 0:
            return self._say(503, "The scheduler has not answered yet.\n")
        tag = f'"{number}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", "application/json", tag)
        else:
            self._send(200, self.server.encoded(number, picture), "application/json", tag)
        return None

    def _say(self, status: int, text: str) -> None:
        self._send(status, text.encode(), "text/plain")

    def _send(self, status: int, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'; base-uri 'none'")
        self.send_header("Referrer-Policy", "no-referrer")  # the token is part of the URL
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-cache" if tag else "no-store")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a number, or infinite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
