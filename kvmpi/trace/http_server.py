"""An HTTP server in threads that strangers cannot make grow: few connections at once, each for a short time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

_MOST_CONNECTIONS = 16
_SLOWEST_S = 5.0
#: Of a request's first line, and of all its headers.
_MOST_LINE_BYTES, _MOST_HEADERS = 2000, 60


class Handler(BaseHTTPRequestHandler):
    """Hangs up on who says nothing, or too much."""

    raw_requestline: bytes
    timeout = _SLOWEST_S
    server_version, sys_version = "kvmpi", ""

    def parse_request(self) -> bool:
        if len(self.raw_requestline) > _MOST_LINE_BYTES:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(414)
            return False
        return super().parse_request() and self._has_few_headers()

    def _has_few_headers(self) -> bool:
        if len(self.headers) <= _MOST_HEADERS:
            return True
        self.send_error(431)
        return False

    def log_message(self, *_: Any) -> None:
        """Nothing: a token may stand in every request."""


class Server(ThreadingMixIn, HTTPServer):
    """Threads for as many connections as there may be; who comes then is sent away, and asks again."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        host = address[0].strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, address[1]), handler)

    def start(self, name: str, query: str = "") -> tuple[str, Callable[[], None]]:
        """Serve in a thread called ``name``; the URL, with ``query`` behind it, and what ends it."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.5}, name=name, daemon=True)
        thread.start()

        def close() -> None:
            self.shutdown()
            self.server_close()
            thread.join(2.0)

        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/{query}", close

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)  # HTTPServer's own asks for names, which may take long
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no news."""
