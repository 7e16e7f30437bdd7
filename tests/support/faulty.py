"""A proxy before an S3 server that answers as an overloaded or broken one does."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

# slow_down: 503; error: 500; drop: the connection ends without an answer; cut: in the middle of
# one; slow: the answer comes late
Fault = Literal["slow_down", "error", "drop", "cut", "slow"]
SLOW_SECONDS = 1.0
SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""
# Of one connection only
HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Faulty:
    """The proxy. fault: of each request, by its number, method and path; None: it goes through.

    counts: requests, by what became of them.
    """

    def __init__(self, root: str, upstream: str) -> None:
        self.root = root
        self.upstream = upstream
        self.fault: Callable[[int, str, str], Fault | None] = lambda number, method, path: None
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def decide(self, method: str, path: str) -> Fault | None:
        with self._lock:
            fault = self.fault(sum(self.counts.values()), method, path)
            name = fault or "passed"
            self.counts[name] = self.counts.get(name, 0) + 1
        return fault


@contextmanager
def faulty_proxy(root: str) -> Iterator[Faulty]:
    """A proxy before the server of a root (tests/support/s3.py); `root` of what it gives goes
    through it."""
    address = root.partition("endpoint_override=")[2].partition("&")[0]
    proxy = Faulty("", address)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # in one piece and at once, or each answer waits 40 ms for the other side's receipt
        wbufsize = -1
        disable_nagle_algorithm = True

        def log_message(self, *arguments: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:  # whoever asked has given up
                self.close_connection = True

        def handle_expect_100(self) -> bool:
            found = super().handle_expect_100()
            self.wfile.flush()  # whoever writes waits a second for it
            return found

        def forward(self) -> None:
            body = self.body()
            fault = proxy.decide(self.command, self.path)
            if fault == "drop":
                self.close_connection = True
                return
            if fault in ("slow_down", "error"):
                self.answer(503 if fault == "slow_down" else 500, {}, SLOW_DOWN)
                return
            if fault == "slow":
                time.sleep(SLOW_SECONDS)
            connection = http.client.HTTPConnection(address, timeout=30)
            headers = {n: v for n, v in self.headers.items() if n.lower() not in HOP_BY_HOP}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            headers, data = dict(response.getheaders()), response.read()
            connection.close()
            if self.command == "HEAD" and "Content-Length" in headers:
                self.answer(response.status, headers, b"", int(headers["Content-Length"]))
            elif fault == "cut" and data:
                self.answer(response.status, headers, data[: len(data) // 2], len(data))
                self.close_connection = True
            else:
                self.answer(response.status, headers, data)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                return body if len(body) == length else self.gone()
            chunks = []
            while size := int(self.rfile.readline() or self.gone(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            return b"".join(chunks)

        def gone(self) -> bytes:
            raise ConnectionError("in the middle of a request")

        def answer(
            self, status: int, headers: dict[str, str], data: bytes, length: int | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy.root = root.replace(address, f"127.0.0.1:{server.server_port}")
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
