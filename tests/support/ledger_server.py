"""A ledger served in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flopwatch.node.telemetry.attempts import Record
from tests.support.machine import PATIENCE


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@contextmanager
def ledger_server(
    answer: int = 200, port: int = 0, most: int = 1000, page: bytes | None = None
) -> Iterator[tuple[str, list[tuple[str | None, list[Record]]]]]:
    """Give the URL of a ledger that answers so, 413 to more than `most` records, and what it is sent.

    With `page`, it is another server, which answers with this content.
    """
    received: list[tuple[str | None, list[Record]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/snapshots"
            received.append((self.headers["Authorization"], body))
            self.send_response(answer if len(body) <= most else 413)
            content = json.dumps({"accepted": len(body)}).encode() if page is None else page
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
