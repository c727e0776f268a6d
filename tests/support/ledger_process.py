"""A `flopwatch ledger` in a process of its own, and recorded histories to send to it."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse_text

from flopwatch import catalogue as m
from tests.support import ROOT, TESTS
from tests.support.machine import PATIENCE

HISTORIES = TESTS / "captures" / "histories"


EXPORTER = ROOT / "exporter"


WORKED = (HISTORIES / "crash_and_move.jsonl").read_text()


LOOP = (HISTORIES / "crash_loop.jsonl").read_text()


Answer = tuple[int, str]


class Ledger:
    """A ledger process."""

    def __init__(self, process: subprocess.Popen[Any], port: int) -> None:
        self.process = process
        self.port = port

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def post(self, body: Any, **headers: str) -> Answer:
        return self.ask("POST", "/v1/snapshots", body, headers)

    def seconds(self, run: str) -> dict[str, float]:
        return {
            sample.labels["bucket"]: sample.value
            for family in parse_text(self.ask("GET", "/metrics")[1])
            for sample in family.samples
            if sample.name == m.RUN_SECONDS_TOTAL.name and sample.labels["run"] == run
        }


@contextmanager
def serving(state: Path, *flags: str) -> Iterator[Ledger]:
    command = [sys.executable, "-m", "flopwatch", "ledger", "serve", "--listen", "127.0.0.1:0", "--state", str(state)]
    process = subprocess.Popen(
        [*command, "--new-for", "0.001", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(EXPORTER), os.environ.get("PYTHONPATH"))))},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if port := re.search(r"listening ledger=127\.0\.0\.1:(\d+)$", line):
                yield Ledger(process, int(port[1]))
                return
        raise AssertionError("the ledger ended before it listened")
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
