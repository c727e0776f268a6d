"""Stacks of the ranks of a hang, from real processes through real exporters to a ledger, and with hostile senders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from tests.support import ROOT, TESTS
from tests.support.exporter_process import exporter, flopwatch_command
from tests.support.hook_server import HookServer
from tests.support.ledger_process import serving
from tests.support.machine import until

WAIT = 60.0  # seconds: a step is overdue after 15 s


@contextmanager
def job(otlp: str, run: str, *roles: str) -> Iterator[None]:
    """Run a rank of each role, pushing twice a second."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))}
    inherited |= {"PYTHONPATH": str(ROOT / "exporter"), "WORLD_SIZE": str(len(roles)), "SLURM_JOB_ID": "1"}
    inherited |= {"FLOPWATCH_ENDPOINT": f"http://{otlp}", "FLOPWATCH_PUSH_INTERVAL": "0.5"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "scripts" / "stuck.py"), run, role],
            env={**inherited, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, role in enumerate(roles)
    ]
    try:
        yield
        assert [process.poll() for process in processes] == [None] * len(roles)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def at_once(text: str) -> bool:
    return text.startswith("thread MainThread (")


@pytest.mark.timeout(60)
def test_a_hook_answers_each_request_once_whatever_the_receiver_asks() -> None:
    asks = ExportMetricsServiceResponse()
    asks.partial_success.error_message = "flopwatch: send stacks"
    with HookServer(answer=asks.SerializeToString()) as server, job(server.url.removeprefix("http://"), "r", "peer"):
        until(lambda: len(server.pushes) >= 9 and at_once(server.pushes[-1].resource.get("flopwatch.stacks", "")), 40)
    texts = [push.resource.get("flopwatch.stacks", "") for push in server.pushes]
    assert [bool(text) for text in texts[:8]] == [False, True] * 4
    stacks = [text for text in texts if text]
    sampled = [text.partition("\n\n") for text in stacks if not at_once(text)]  # until its step is overdue
    assert all("\n  100% stuck.py:" in lines for lines, _, _ in sampled[1:])  # it hangs after two seconds
    assert all(rest.startswith("thread MainThread (") for _, _, rest in sampled)
    assert all("in main\n" in text and "thread flopwatch" not in text for text in stacks)
    assert len(sampled) > 1


def by_rank(text: str) -> dict[str, str]:
    """Return the stacks of each rank in the ledger's text."""
    parts = [part for part in f"\n{text}".split("\nrank ") if part.strip()]
    return {part.partition(",")[0]: part for part in parts}


def main_thread(stacks: str) -> str:
    return stacks.partition("thread MainThread")[2].split("\n\n")[0]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_stacks_of_the_suspect_and_of_a_peer_arrive_by_themselves(tmp_path: Path) -> None:
    with ExitStack() as opened:
        ledger = opened.enter_context(serving(tmp_path / "ledger"))
        remote = ("--ledger", f"http://127.0.0.1:{ledger.port}")
        far = opened.enter_context(exporter(tmp_path / "far", "--simulate", "h100x8", *remote))
        near = opened.enter_context(exporter(tmp_path / "near", "--simulate", "h100x8", "--ledger", "embedded"))
        for run, where in (("far", far), ("near", near)):
            opened.enter_context(job(where.otlp, run, "peer", "suspect", "peer"))
        opened.enter_context(job(near.otlp, "gil", "gil", "suspect"))

        def text(run: str) -> str:
            path = f"/v1/runs/stacks?run={run}"
            try:
                return ledger.ask("GET", path)[1] if run == "far" else near.get(path)
            except urllib.error.HTTPError:
                return ""  # before its first record

        until(lambda: all(by_rank(text(run)).keys() >= {"0", "1"} for run in ("near", "far")), WAIT)
        for run in ("near", "far"):
            found = by_rank(text(run))
            assert found.keys() == {"0", "1"}  # the third rank is not asked
            assert main_thread(found["1"]).rstrip().endswith("wait")
            assert "in read_from_a_dead_disk\n" in main_thread(found["1"])
            assert "in wait_for_the_suspect\n" in main_thread(found["0"])
            assert "\nthread ?[31m<b>loader</b> (" in found["1"]
            line = next(
                number
                for number, code in enumerate((TESTS / "scripts" / "stuck.py").read_text().splitlines(), 1)
                if code == "        read_from_a_dead_disk()"
            )
            assert f'stuck.py", line {line}, in batches\n' in main_thread(found["1"])
        # A rank that holds Python's lock sends none.
        until(lambda: by_rank(text("gil")).keys() == {"1"}, WAIT)
        assert (
            near.series()["run_hang_suspect_ratio{tenant=,run=gil,rank=1,host=node-7,group=,ranks=,signs=data}"] > 0.5
        )
        with urllib.request.urlopen(f"http://{near.metrics}/v1/runs/stacks?run=near") as answer:
            assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        shown = flopwatch_command("ledger", "show", "near", "--url", f"http://{near.metrics}")
        assert "in read_from_a_dead_disk\n" in shown.stdout
        time.sleep(3)  # nothing is asked twice
        assert [len(json.loads(near.get(f"/v1/runs/record?run={run}"))["stacks"]) for run in ("near", "gil")] == [2, 1]
        assert "Traceback" not in near.log + far.log
