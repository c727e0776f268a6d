"""Test `flopwatch ledger serve` as exporters and Prometheus use it: a real process on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from flopwatch import catalogue as m
from flopwatch.ledger.app import RunFamilies, SmallDeliveries
from flopwatch.ledger.buckets import BUCKETS
from flopwatch.ledger.replay import replay
from flopwatch.ledger.store import Delivery, Store
from tests.support.ledger_process import EXPORTER, LOOP, WORKED, Ledger, serving
from tests.support.machine import PATIENCE, shortest, until


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with serving(tmp_path_factory.mktemp("ledger")) as running:
        yield running


def renamed(history: str, run: str) -> str:
    return re.sub(r'"run": "\w+"', f'"run": "{run}"', history)


def as_list(history: str) -> str:
    return json.dumps([json.loads(line) for line in history.splitlines()])


@pytest.mark.parametrize("form", [str, as_list])
def test_a_list_and_lines_of_records_become_the_figures_of_the_run(form: Callable[[str], str], ledger: Ledger) -> None:
    run = f"form-{form.__name__}"
    body = form(renamed(WORKED, run))
    assert ledger.post(body) == (200, '{"accepted":627}')
    expected = replay(WORKED.splitlines())[0]["runs"]["r"]["buckets"]
    assert ledger.seconds(run) == expected
    assert ledger.post(body) == (200, '{"accepted":627}')
    assert ledger.seconds(run) == expected


@pytest.mark.parametrize(
    ("accept", "parse", "media"),
    [
        ("text/plain;version=0.0.4", parse_text, "text/plain"),
        ("application/openmetrics-text;version=1.0.0", parse_openmetrics, "application/openmetrics-text"),
    ],
)
def test_metrics_are_the_catalogues_families_in_the_format_asked_for(
    accept: str, parse: Any, media: str, ledger: Ledger
) -> None:
    assert ledger.post(renamed(WORKED, "format"))[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", ledger.port, timeout=PATIENCE)
    connection.request("GET", "/metrics", headers={"Accept": accept})
    response = connection.getresponse()
    assert str(response.getheader("Content-Type")).startswith(media)
    families = {family.name: family for family in parse(response.read().decode())}
    connection.close()
    # Waits and work that were never measured have no counter, and a run that ended has no verdict on its ranks.
    absent = ("run_straggler", "run_whatif", "run_hang")
    flops = (m.RUN_MODEL_FLOPS_TOTAL, m.RUN_HARDWARE_FLOPS_TOTAL, m.RUN_STEP_CAPACITY_FLOPS_TOTAL)
    work = (m.RUN_STEPS_TOTAL, m.RUN_STEP_SECONDS_TOTAL, m.RUN_TOKENS_TOTAL, *flops)
    served = (row for row in m.all_metrics() if row.domain == "run" and row not in work)
    rows = [row for row in served if not row.name.startswith(absent)]
    rows += [m.FLOPWATCH_LEDGER_REQUESTS_TOTAL, m.FLOPWATCH_LEDGER_RUNS, m.FLOPWATCH_BUILD_INFO]
    assert len(families) == len(rows)
    for row in rows:
        family = families.get(row.name) or families[row.name.removesuffix("_total").removesuffix("_info")]
        assert family.documentation == f"{row.help} Source: {row.source}."
        assert {sample.name for sample in family.samples} == {row.name}
        assert {tuple(sorted(sample.labels)) for sample in family.samples} == {tuple(sorted(row.labels))}
    buckets = {s.labels["bucket"]: s.value for s in families["run_seconds"].samples if s.labels["run"] == "format"}
    assert list(buckets) == list(BUCKETS)
    assert (buckets["productive"], buckets["lost"]) == (6000, 195)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 200, ""),
        (b"[]", 200, ""),
        (
            b'[{"t": 1, "run": "bad", "event": "submitted"}, {"t": 2, "event": "submitted"}]',
            400,
            "record 2: Object missing required field run",
        ),
        (b'{"t": 1, "run": "bad", "event": "submitted"}\n{"t": -1e31}', 400, "record 2: t: Expected float >= -1e+30"),
        (b'[{"t": NaN}]', 400, "not a JSON list, nor one JSON object per line: JSON is malformed: invalid character"),
        (b"[7]", 400, "record 1: Expected object, got int"),
        (b"[" * 100_000, 400, "not a JSON list, nor one JSON object per line"),
        (b'{"t": 1,', 400, "not a JSON list, nor one JSON object per line"),
        (b"\xff\xfe", 400, "not a JSON list, nor one JSON object per line"),
        (b" " * (1 << 20) + b"[]", 413, "the body is larger than 1048576 bytes"),
    ],
)
def test_a_bad_delivery_is_refused_as_a_whole_with_the_reason(
    body: bytes, status: int, reason: str, ledger: Ledger
) -> None:
    answer = ledger.post(body)
    assert answer[0] == status
    if reason:
        assert json.loads(answer[1])["detail"].startswith(reason)
    assert ledger.seconds("bad") == {}


def test_a_body_of_unknown_length_is_limited_too(ledger: Ledger) -> None:
    chunks = (b" " * 65536 for _ in range(17))
    assert ledger.post(chunks)[0] == 413


def test_health_is_served_and_other_paths_are_not_there(ledger: Ledger) -> None:
    assert ledger.ask("GET", "/healthz") == (200, "ok\n")
    assert ledger.ask("GET", "/v1/snapshots")[0] == 405
    assert ledger.ask("GET", "/docs")[0] == 404


def test_deliveries_need_the_token_where_there_is_one_and_it_can_be_rotated(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with serving(tmp_path / "state", "--token-file", str(token)) as ledger:
        for authorization in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer s3cret\xe9"},
        ):
            assert ledger.post(LOOP, **authorization)[0] == 401
        assert ledger.seconds("loop") == {}
        assert ledger.post(LOOP, Authorization="Bearer s3cret")[0] == 200
        token.write_text("n3w")
        assert ledger.post(LOOP, Authorization="Bearer s3cret")[0] == 401
        assert ledger.post(LOOP, Authorization="Bearer n3w")[0] == 200
        # The metrics for Prometheus need no token.
        assert ledger.seconds("loop")["productive"] == 23
        assert 'flopwatch_ledger_requests_total{outcome="refused"} 5.0' in ledger.ask("GET", "/metrics")[1]


def test_it_stops_cleanly_and_serves_the_same_after_a_restart_or_a_kill(tmp_path: Path) -> None:
    lines = WORKED.splitlines()
    with serving(tmp_path) as ledger:
        assert ledger.post("\n".join(lines[:300]))[0] == 200
        before = ledger.seconds("r")
        ledger.process.send_signal(signal.SIGTERM)
        assert ledger.process.wait(timeout=PATIENCE) == 0
    with serving(tmp_path) as ledger:
        assert ledger.seconds("r") == before
        assert ledger.post("\n".join(lines[300:500]))[0] == 200
        before = ledger.seconds("r")
        ledger.process.kill()
        ledger.process.wait()
    with serving(tmp_path) as ledger:
        assert ledger.seconds("r") == before
        assert ledger.post("\n".join(lines[500:]))[0] == 200
        assert ledger.seconds("r") == replay(lines)[0]["runs"]["r"]["buckets"]
        ledger.process.send_signal(signal.SIGINT)
        assert ledger.process.wait(timeout=PATIENCE) == 0


def test_a_delivery_that_cannot_be_written_is_to_be_sent_again(tmp_path: Path) -> None:
    lines = LOOP.splitlines()
    with serving(tmp_path) as ledger:
        assert ledger.post(lines[0])[0] == 200
        before = ledger.seconds("loop")
        limits = resource.prlimit(ledger.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(ledger.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        status, reason = ledger.post("\n".join(lines[1:]))
        assert status == 503
        assert json.loads(reason)["detail"].startswith("not written, send again: ")
        assert ledger.seconds("loop") == before
        assert 'flopwatch_ledger_requests_total{outcome="failed"} 1.0' in ledger.ask("GET", "/metrics")[1]
        resource.prlimit(ledger.process.pid, resource.RLIMIT_FSIZE, limits)
        assert ledger.post("\n".join(lines[1:]))[0] == 200
        assert ledger.seconds("loop") == {
            name: value for name, value in replay(lines)[0]["runs"]["loop"]["buckets"].items() if name != "queue"
        }


def test_a_new_run_is_served_from_zero_and_after_a_while_with_all_it_has(tmp_path: Path) -> None:
    with serving(tmp_path, "--new-for", "2") as ledger:
        posted = time.monotonic()
        assert ledger.post(WORKED)[0] == 200
        assert set(ledger.seconds("r").values()) == {0.0}
        assert 'run_open_seconds{tenant="",run="r"} 7895.0' in ledger.ask("GET", "/metrics")[1]
        expected = replay(WORKED.splitlines())[0]["runs"]["r"]["buckets"]
        while ledger.seconds("r") != expected:
            assert time.monotonic() < posted + 30
            time.sleep(0.1)
        assert time.monotonic() > posted + 1.9
        assert 'run_open_seconds{tenant="",run="r"} 0.0' in ledger.ask("GET", "/metrics")[1]


def test_a_run_whose_snapshots_stop_is_down_after_a_while(tmp_path: Path) -> None:
    with serving(tmp_path, "--silent-after", "3") as ledger:
        record = {"t": time.time(), "run": "r", "attempt": "a", "source": "h", "event": "start", "gpus": 1}
        assert ledger.post(json.dumps(record))[0] == 200
        assert 'run_state{tenant="",run="r",state="running"} 1.0' in ledger.ask("GET", "/metrics")[1]
        until(lambda: 'run_state{tenant="",run="r",state="down"} 1.0' in ledger.ask("GET", "/metrics")[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--token-file", "{folder}/none"], "flopwatch: --token-file {folder}/none: No such file or directory\n"),
        (
            ["--token-file", "{folder}/empty"],
            "flopwatch: --token-file {folder}/empty is empty; put the token on its first line\n",
        ),
        (
            ["--state", "{folder}/empty"],
            "flopwatch: the ledger cannot be kept in {folder}/empty/ledger.sqlite: "
            "[Errno 17] File exists: '{folder}/empty'\n",
        ),
        (
            ["--listen", "127.0.0.1:{taken}"],
            "flopwatch: cannot listen on 127.0.0.1:{taken}: Address already in use; choose another --listen "
            "HOST:PORT, or port 0 for a free one\n",
        ),
    ],
)
def test_what_cannot_work_is_one_line_at_start(flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    command = [sys.executable, "-m", "flopwatch", "ledger", "serve", "--listen", "127.0.0.1:0"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        names = {"folder": tmp_path, "taken": other.getsockname()[1]}
        flags = ["--state", str(tmp_path / "state"), *(flag.format(**names) for flag in flags)]
        done = subprocess.run(
            command + flags, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(EXPORTER)}
        )
    assert (done.returncode, done.stderr) == (1, message.format(**names))


def test_a_small_delivery_of_an_exporter_is_answered_without_the_application(ledger: Ledger) -> None:
    record = {"t": 100, "run": "small", "event": "start", "attempt": "a", "source": "n1"}
    reply = httpx.post(f"http://127.0.0.1:{ledger.port}/v1/snapshots", json=[record, record])
    assert (reply.status_code, reply.json()) == (200, {"accepted": 2})
    assert [*reply.headers] == ["date", "content-type", "content-length"]  # the application has another order
    assert "small" in ledger.ask("GET", "/v1/runs")[1]


def test_a_kept_connection_takes_deliveries_that_do_not_wait_for_an_answer(ledger: Ledger) -> None:
    def request(run: str, *, count: int = 1, line: str = "") -> bytes:
        record = {"t": 100, "run": run, "event": "start", "attempt": "a", "source": "n1"}
        body = json.dumps([record] * count).encode()
        head = f"Host: 127.0.0.1\r\n{line}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return b"POST /v1/snapshots HTTP/1.1\r\n" + head.encode() + body

    # The large one is left to the application, and so are all later ones of the connection.
    last = request("last", line="Connection: close\r\n")
    requests = [request("one"), request("two"), request("large", count=2000), last]
    with socket.create_connection(("127.0.0.1", ledger.port), timeout=PATIENCE) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = b""
        client.sendall(requests[0])
        time.sleep(0.001)
        client.sendall(requests[1])  # while the first is written
        while answers.count(b"accepted") < 2 and (part := client.recv(65536)):
            answers += part
        for left in requests[2:]:
            client.sendall(left)
        while part := client.recv(65536):
            answers += part
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * 4
    assert re.findall(rb'"accepted": ?(\d+)', answers) == [b"1", b"1", b"2000", b"1"]
    runs = json.loads(ledger.ask("GET", "/v1/runs")[1])["runs"]
    assert {"one", "two", "large", "last"} <= {run["run"] for run in runs}


def test_more_exporters_keep_a_connection_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        serving_it = serving(tmp_path / "ledger")
        ledger = serving_it.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        stack.push(serving_it)
        clients = [http.client.HTTPConnection("127.0.0.1", ledger.port, timeout=PATIENCE) for _ in range(few + 50)]
        for client in clients:
            stack.callback(client.close)
        for client in clients * 2:
            client.request("GET", "/healthz")
            assert client.getresponse().read() == b"ok\n"


def test_deliveries_are_answered_after_one_whose_write_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps([{"t": 100, "run": "small", "event": "start", "attempt": "a", "source": "n1"}]).encode()
    store = Store(tmp_path / "ledger.sqlite")
    small = SmallDeliveries(store, RunFamilies(store), None, ())
    write, failures = store.write, [RuntimeError("no thread can be started")]

    def fail_once(deliveries: list[Delivery]) -> None:
        if failures:
            raise failures.pop()
        write(deliveries)

    async def deliver() -> list[object]:
        answers = []
        respond = small.responder("POST", "/v1/snapshots", {"content-type": "application/json"})
        assert respond is not None
        for _ in range(2):
            answers.append(respond(body))
            await asyncio.sleep(0)  # the first is being written, and the second waits
        return [await asyncio.wait_for(answer, 5) for answer in answers if isinstance(answer, asyncio.Future)]

    monkeypatch.setattr(store, "write", fail_once)
    with contextlib.closing(store):
        assert asyncio.run(deliver()) == [None, ("application/json", b'{"accepted":1}')]


@pytest.mark.long
def test_five_thousand_run_names_bound_the_page_and_lose_no_accounting(tmp_path: Path) -> None:
    def records(run: str, **more: Any) -> list[dict[str, Any]]:
        start = {"t": 100, "run": run, "event": "start", "attempt": "a", "source": "n1", "gpus": 8}
        return [start, {**start, "t": 160, "event": "snapshot", "step": 50, "activity_seconds": {"step": 60}, **more}]

    with serving(tmp_path / "ledger") as ledger:
        known = [records("ended", pid=True, event="finish", status="completed"), records("mine", pid=True)]
        runs = [*known, *(records(f"run-{number}") for number in range(5000))]
        for first in range(0, len(runs), 1000):
            body = json.dumps([record for run in runs[first : first + 1000] for record in run])
            assert ledger.post(body)[0] == 200
        page = ledger.ask("GET", "/metrics")[1]
        series = [sample for family in parse_text(page) for sample in family.samples]
        served = {sample.labels["run"] for sample in series if sample.name == m.RUN_ATTEMPTS_TOTAL.name}
        assert len(served) == 500
        assert served & {"mine", "ended"} == {"mine"}
        counts = {s.labels["kind"]: s.value for s in series if s.name == m.FLOPWATCH_LEDGER_RUNS.name}
        assert counts == {"exported": 500, "without_series": 4502}
        assert len(page) < 6_000_000  # 5,000 runs had 40 MB

        def cpu_seconds() -> float:
            user, system = Path(f"/proc/{ledger.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

        def scrape() -> float:
            began = cpu_seconds()
            ledger.ask("GET", "/metrics")
            return cpu_seconds() - began

        assert shortest(scrape, 2) < 2  # 5,000 runs took 4.8
        listed = {row["run"]: row for row in json.loads(ledger.ask("GET", "/v1/runs")[1])["runs"]}
        assert len(listed) == 5002
        assert {(row["attempts"], row["high_water_step"]) for row in listed.values()} == {(1, 50)}
        hidden = next(name for name in listed if name not in served | {"ended"})
        for run in (hidden, "ended", "mine"):
            figures = json.loads(ledger.ask("GET", f"/v1/runs/record?run={run}")[1])
            assert figures["buckets"]["productive"] == 60


def test_a_second_ledger_on_the_same_state_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path), ExitStack() as stack, pytest.raises(AssertionError, match="ended before it listened"):
        stack.enter_context(serving(tmp_path))
