"""Test `flopwatch ledger list | show | close | export` against a running ledger, stand-alone and inside an exporter."""

from __future__ import annotations

import csv
import http.server
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from flopwatch.__main__ import main
from flopwatch.http.server import Unauthorized
from flopwatch.ledger.api import of_this_machine
from flopwatch.ledger.replay import replay
from tests.support.ledger_process import EXPORTER, HISTORIES, LOOP, WORKED, Ledger, serving

TWO_NODES = (HISTORIES / "two_nodes_then_one.jsonl").read_text()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with serving(tmp_path_factory.mktemp("ledger")) as running:
        for history in (WORKED, TWO_NODES, LOOP):
            assert running.post(history)[0] == 200
        yield running


def run_ledger(ledger: Ledger | int, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a `flopwatch ledger` command against this ledger or port, and return its status, output and errors."""
    port = ledger if isinstance(ledger, int) else ledger.port
    status = main(["ledger", *arguments, "--url", f"http://127.0.0.1:{port}"])
    output, errors = capsys.readouterr()
    return status, output, errors


def json_of(ledger: Ledger, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, output, errors = run_ledger(ledger, capsys, *arguments)
    assert (status, errors) == (0, "")
    return json.loads(output)


def test_list_has_a_line_per_run(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run_ledger(ledger, capsys, "list")
    lines = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    assert status == 0
    assert lines[0] == ["tenant", "run", "state", "attempts", "step", "goodput", "wall clock", "last report"]
    assert [line[:-1] for line in lines[1:]] == [
        ["loop", "stopped", "4", "23", "0.151", "2.5 min"],
        ["r", "completed", "2", "600", "0.760", "2.2 h"],
        ["research", "llm", "completed", "2", "14", "0.352", "3.0 min"],
    ]
    runs = json_of(ledger, capsys, "list", "--json")["runs"]
    assert {(run["tenant"], run["run"]): run["goodput"] for run in runs} == {
        ("", "loop"): 23 / 152,
        ("", "r"): 6000 / 7895,
        ("research", "llm"): pytest.approx(64 / 182),
    }
    assert [run["run"] for run in json_of(ledger, capsys, "list", "--json", "--tenant", "research")["runs"]] == ["llm"]


def test_show_prints_where_the_time_went_and_how_each_attempt_ended(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ledger(ledger, capsys, "show", "llm") == (
        0,
        """\
research/llm: completed, 2 attempts, wall 182.0 s
  goodput 0.352  ETTR 0.264  effective MFU 0.111
  productive                    64.0 s   35.2%
  lost                          40.0 s   22.0%
  startup                       40.0 s   22.0%
  checkpoint_save                6.0 s    3.3%
  down                          30.0 s   16.5%
  queue                         60.0 s
  other                          2.0 s    1.1%
  started: 1970-01-01 00:17:40Z
  step: 14
  last durable checkpoint: step 14, first reported 1970-01-01 00:20:42Z
  mean time to recovery: 1.6 min, of 1

attempt  begin                 lasted   ended      steps    GPUs  nodes  down after  cause
1 a1     1970-01-01 00:17:40Z  1.4 min  failed     0 to 12  16    2      30 s        unknown
2 a2     1970-01-01 00:19:32Z  1.2 min  completed  8 to 14  8     1      0 s

attempt 1 failed: unknown, 0.28 GPU-hours lost; nothing was seen that explains it
""",
        "",
    )


def test_export_holds_every_attempt_and_they_add_up_to_the_run(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json_of(ledger, capsys, "export", "loop", "--format", "csv", "--json")
    expected = replay(LOOP.splitlines())[0]["runs"]["loop"]
    assert (record["buckets"], record["gpu_seconds"]) == (expected["buckets"], expected["gpu_seconds"])
    assert {name: record["summary"][name] for name in ("goodput", "wall_seconds", "ends")} == {
        name: expected[name] for name in ("goodput", "wall_seconds", "ends")
    }
    attempts = record["attempts"]
    assert [(one["attempt"], one["begin"], one["end"], one["status"], one["down_seconds"]) for one in attempts] == [
        ("a1", 0, 20, "silent", 30),
        ("a2", 50, 60, "silent", 30),
        ("a3", 90, 100, "silent", 30),
        ("a4", 130, 152, "stopped", 0),
    ]
    assert [(one["first_step"], one["last_step"], one["committed_step"]) for one in attempts] == [
        (0, 15, 10),
        (10, 15, 10),
        (10, 15, 10),
        (10, 23, 20),
    ]
    # An end amid a recovery has no recovery time: it is in the first one's. The next new step is a4's step 16.
    assert [one["recovery_seconds"] for one in attempts] == [143 - 20, None, None, None]
    for kind in ("seconds", "gpu_seconds"):
        total = dict.fromkeys(expected["buckets"], 0.0)
        for one in attempts:
            for bucket, seconds in {**one[kind], "down": one[f"down_{kind}"]}.items():
                total[bucket] += seconds
        assert total == pytest.approx(record["buckets" if kind == "seconds" else kind])
    assert attempts == json_of(ledger, capsys, "show", "loop", "--json")["attempts"]
    # Each loss lasts from one end to the next, the last one until step 16.
    assert [(one["attempt_number"], one["seconds"], one["gpu_seconds"]) for one in record["incidents"]] == [
        (1, 40, 160),
        (2, 40, 160),
        (3, 42, 168),
    ]


def test_export_as_csv_is_a_row_per_attempt(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run_ledger(ledger, capsys, "export", "r", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(output)))
    assert (status, len(rows)) == (0, 2)
    first_row = {name: value for name, value in rows[0].items() if value not in ("", "0.0")}
    assert first_row == {
        "run": "r",
        "number": "1",
        "attempt": "a1",
        "begin": "600.0",
        "end": "2955.0",
        "status": "silent",
        "last_step": "199.0",
        "committed_step": "180.0",
        "gpus": "8.0",
        "nodes": "1",
        "productive_seconds": "1990.0",
        "lost_seconds": "5.0",
        "startup_seconds": "300.0",
        "checkpoint_save_seconds": "60.0",
        "gpu_seconds": "18840.0",
        "down_seconds": "900.0",
        "down_gpu_seconds": "7200.0",
        "recovery_seconds": "1400.0",
        "incident_cause": "host",
        "incident_confidence": "possible",
        "incident_host": "a1-host",
        "incident_gpu_seconds": "11160.0",
    }


def test_hostile_names_reach_neither_a_terminal_nor_a_spreadsheet(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "=cmd|' /C calc'!A1\x1b[2J\u202e,\n\""
    records = [
        {"t": 10, "tenant": evil, "run": "a/b:c@d", "attempt": evil, "source": evil, "event": "start"},
        {
            "t": 20,
            "tenant": evil,
            "run": "a/b:c@d",
            "attempt": evil,
            "source": evil,
            "event": "snapshot",
            "step": 1,
            "activity_seconds": {"step": 10},
            "evidence": [{"kind": "exception", "t": 20, "detail": evil}],
        },
        {
            "t": 21,
            "tenant": evil,
            "run": "a/b:c@d",
            "attempt": evil,
            "source": evil,
            "event": "finish",
            "status": "failed",
        },
        {"t": 90, "tenant": evil, "run": "a/b:c@d", "attempt": f"{evil}2", "source": "h", "event": "start"},
    ]
    assert ledger.post(json.dumps(records))[0] == 200
    for arguments in (["list"], ["show", "a/b:c@d"], ["export", "a/b:c@d", "--format", "csv"]):
        status, output, errors = run_ledger(ledger, capsys, *arguments)
        assert (status, errors) == (0, "")
        assert "=cmd|" in output
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", output)
    rows = list(csv.reader(io.StringIO(output)))
    assert len(rows) == 3
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)
    record = json_of(ledger, capsys, "show", "a/b:c@d", "--json", "--tenant", evil)
    assert (record["tenant"], record["attempts"][0]["attempt"]) == (evil, evil)
    status, output, errors = run_ledger(ledger, capsys, "show", "a/b:c@d", "--tenant", "\x1b[2J")
    assert (status, output, errors) == (1, "", "flopwatch: no run 'a/b:c@d' of tenant '\\x1b[2J'\n")


def test_a_run_of_several_tenants_is_asked_for_with_its_tenant(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    for tenant in ("blue", "red"):
        assert (
            ledger.post(
                json.dumps([{"t": 10, "tenant": tenant, "run": "shared", "attempt": tenant, "event": "start"}])
            )[0]
            == 200
        )
    for arguments in (["show", "shared"], ["export", "shared"], ["close", "shared"]):
        assert run_ledger(ledger, capsys, *arguments) == (
            1,
            "",
            "flopwatch: several tenants have a run 'shared': 'blue', 'red'; name the tenant with --tenant NAME\n",
        )
    assert json_of(ledger, capsys, "show", "shared", "--tenant", "red", "--json")["attempts"][0]["attempt"] == "red"
    assert run_ledger(ledger, capsys, "close", "shared", "--tenant", "red")[0] == 0
    assert {
        run["tenant"]: run["state"]
        for run in json_of(ledger, capsys, "list", "--json")["runs"]
        if run["run"] == "shared"
    } == {"blue": "down", "red": "stopped"}


@pytest.mark.parametrize("end", [None, "failed", "preempted"])
@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_a_run_is_closed_by_hand_however_its_attempt_ended(
    end: str | None, status: str, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    run, now, ago = f"close-{end}-{status}", time.time(), 5 if end is None else 400
    base = {"run": run, "attempt": "a1", "source": "h1", "gpus": 8}
    records: list[dict[str, Any]] = [
        {**base, "t": now - 500, "event": "start", "step": 0},
        {
            **base,
            "t": now - ago,
            "event": "snapshot",
            "step": 9,
            "activity_seconds": {"startup": 10, "step": 490 - ago},
        },
    ]
    if end is not None:
        records.append({**base, "t": now - ago + 10, "event": "finish", "status": end})
    assert ledger.post(json.dumps(records))[0] == 200
    assert run_ledger(ledger, capsys, "close", run, "--status", status) == (
        0,
        f"run {run} was {'queued' if end == 'preempted' else 'running' if end is None else 'down'} and is {status}\n"
        + ("records that its attempt still sends are ignored\n" if end is None else ""),
        "",
    )
    record = json_of(ledger, capsys, "show", run, "--json")
    assert record["summary"]["state"] == status
    assert record["buckets"]["down"] + record["buckets"]["other"] == pytest.approx(ago, abs=30)
    assert record["gpu_seconds"]["down"] == 0
    assert record["summary"]["wall_seconds"] == pytest.approx(500, abs=30)
    assert run_ledger(ledger, capsys, "close", run) == (1, "", f"flopwatch: run '{run}' has {status} already\n")


def test_a_submission_that_never_started_can_be_closed_too(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.post('{"t": 10, "run": "waiting", "event": "submitted"}')[0] == 200
    assert run_ledger(ledger, capsys, "close", "waiting")[:2] == (0, "run waiting was queued and is stopped\n")
    assert json_of(ledger, capsys, "show", "waiting", "--json")["summary"]["state"] == "stopped"
    assert run_ledger(ledger, capsys, "show", "waiting")[0] == 0


def test_a_missing_token_is_named_in_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "wrong").write_text("wrong")
    with serving(tmp_path / "state", "--token-file", str(tmp_path / "token")) as ledger:
        assert ledger.post(LOOP, Authorization="Bearer s3cret")[0] == 200
        url = f"http://127.0.0.1:{ledger.port}"
        for arguments in (["list"], ["show", "loop"], ["export", "loop"], ["close", "loop"]):
            assert run_ledger(ledger, capsys, *arguments) == (
                1,
                "",
                f"flopwatch: {url} requires a token: send Authorization: Bearer with the token of --token-file; "
                "set --token-file to the file with its token\n",
            )
            status, _, errors = run_ledger(ledger, capsys, *arguments, "--token-file", str(tmp_path / "wrong"))
            assert (status, errors.startswith(f"flopwatch: {url} rejects the token: ")) == (1, True)
        assert run_ledger(ledger, capsys, "show", "loop", "--token-file", str(tmp_path / "token"))[0] == 0
        assert run_ledger(ledger, capsys, "list", "--token-file", str(tmp_path / "none"))[0] == 1


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """Yield the port of a server that answers every request alike."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (200, b"<html>", "does not answer as a ledger does: JSON is malformed"),
        (200, b"[]", "does not answer as a ledger does"),
        (
            404,
            b'{"detail":"Not Found"}',
            "is not a ledger, or one of an older flopwatch; an exporter is one with --ledger",
        ),
        (500, b"\x1b[2J", "answers 500\n"),
    ],
)
def test_what_is_no_ledger_is_named(
    status: int, body: bytes, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as port:
        result = run_ledger(port, capsys, "list")
    assert result[:2] == (1, "")
    assert f"flopwatch: http://127.0.0.1:{port} {complaint}" in result[2]


def test_an_unreachable_ledger_is_reported_with_the_flag_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ledger(1, capsys, "list") == (
        1,
        "",
        "flopwatch: --url: cannot reach a ledger at http://127.0.0.1:1 ([Errno 111] Connection refused); set --url "
        "to http://HOST:PORT, with port 9451 for a ledger or 9450 for an exporter with --ledger embedded\n",
    )
    assert main(["ledger", "list", "--url", "ledger:9451"]) == 1
    assert capsys.readouterr().err == "flopwatch: --url 'ledger:9451': write http://HOST:PORT\n"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"run": 7}', 400),
        (b'{"run": "r", "status": "failed"}', 400),
        (b'{"run": "r", "tenant": []}', 400),
        (b'{"run": "unknown"}', 404),
        (b"[" * 100_000, 400),
    ],
)
def test_a_bad_request_to_close_is_refused(body: bytes, status: int, ledger: Ledger) -> None:
    assert ledger.ask("POST", "/v1/runs/close", body)[0] == status
    assert ledger.ask("GET", "/v1/runs/record")[0] == 422


def test_the_ledger_inside_an_exporter_is_asked_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.exporter_process import exporter
    from tests.support.otlp_by_hand import training

    started = time.time() - 100
    with exporter(tmp_path, "--ledger", "embedded") as node:
        port = int(node.metrics.rpartition(":")[2])
        node.push(training(20, 40.0, started + 100, start_unix=started, attempt="a1"))
        node.wait_for("run_high_water_steps{tenant=,run=lm}", 20)
        # Series that are first served as 0 are exported with their full values.
        status, output, _ = run_ledger(port, capsys, "export", "lm")
        assert (status, json.loads(output)["buckets"]["productive"]) == (0, 40)
        assert run_ledger(port, capsys, "list")[0] == 0
        assert run_ledger(port, capsys, "close", "lm") == (
            0,
            "run lm was running and is stopped\nrecords that its attempt still sends are ignored\n",
            "",
        )
        node.wait_for("run_state{tenant=,run=lm,state=stopped}", 1)


def test_a_page_of_another_site_reads_and_ends_no_run_inside_an_exporter(tmp_path: Path) -> None:
    from flopwatch.node.telemetry.otlp import PROTOBUF
    from tests.support.exporter_process import exporter
    from tests.support.node_app import ask
    from tests.support.otlp_by_hand import request, training

    with exporter(tmp_path, "--ledger", "embedded") as node:
        port, otlp = (int(address.rpartition(":")[2]) for address in (node.metrics, node.otlp))
        node.push(training(20, 40.0, time.time(), attempt="a1"))
        node.wait_for("run_high_water_steps{tenant=,run=lm}", 20)
        embedded = Ledger(node.process, port)
        pages: tuple[tuple[dict[str, str], int], ...] = (
            ({"Host": "evil.example"}, 421),
            ({"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}, 421),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, 403),
        )
        for headers, status in pages:
            for path in ("/v1/runs", "/v1/runs/record?run=lm", "/metrics"):
                answered, text = embedded.ask("GET", path, headers=headers)
                assert (answered, "lm" in text) == (status, False), (path, headers)
            close = json.dumps({"run": "lm", "status": "stopped"})
            assert embedded.ask("POST", "/v1/runs/close", close, headers)[0] == status
            push = request(training(30, 60.0, time.time(), attempt="a1")).SerializeToString()
            assert ask(otlp, "POST", "/v1/metrics", push, {"Content-Type": PROTOBUF, **headers})[0] == status
        assert node.series()["run_high_water_steps{tenant=,run=lm}"] == 20
        assert states(embedded) == {"lm": "running"}


def request_from(address: str | None, host: bytes = b"127.0.0.1:9450") -> Request:
    client = None if address is None else (address, 4711)
    return Request({"type": "http", "client": client, "headers": [(b"host", host)]})


@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "testclient", None])
def test_a_run_inside_an_exporter_is_not_closed_from_elsewhere(address: str | None) -> None:
    with pytest.raises(Unauthorized, match="only processes on this machine"):
        of_this_machine(request_from(address))
    of_this_machine(request_from("127.0.0.1"))


def test_a_run_inside_an_exporter_is_not_closed_by_a_page_that_points_its_name_at_this_machine() -> None:
    of_this_machine(request_from("127.0.0.1", b"localhost:9450"))
    with pytest.raises(Unauthorized, match="only processes on this machine"):
        of_this_machine(request_from("127.0.0.1", b"evil.example:9450"))


def states(ledger: Ledger) -> dict[str, str]:
    return {run["run"]: run["state"] for run in json.loads(ledger.ask("GET", "/v1/runs")[1])["runs"]}


CLOSE = json.dumps({"run": "nightly", "status": "stopped"}).encode()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/runs/close", {"Content-Type": "text/plain"}, 415),
        ("/v1/snapshots", {"Content-Type": "text/plain"}, 415),
        ("/v1/snapshots", {"Content-Type": ""}, 415),
        ("/v1/runs/close", {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ("/v1/runs/close", {"Origin": "https://evil.example"}, 403),
        ("/v1/runs/close", {"Host": "evil.example"}, 421),
    ],
)
def test_a_page_of_another_site_changes_nothing_in_a_ledger(
    path: str, headers: dict[str, str], status: int, ledger: Ledger
) -> None:
    before = states(ledger)
    assert ledger.ask("POST", path, CLOSE, headers)[0] == status
    assert states(ledger) == before


def test_a_page_of_another_site_reads_nothing_of_a_ledger(ledger: Ledger) -> None:
    assert ledger.ask("GET", "/v1/runs", headers={"Host": "evil.example"})[0] == 421
    assert ledger.ask("GET", "/v1/runs", headers={"Sec-Fetch-Site": "same-site"})[0] == 403
    assert ledger.ask("GET", "/v1/runs")[0] == 200


def test_the_word_serve_may_be_left_out(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "flopwatch", "ledger", "--listen", "127.0.0.1:0", "--state", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(EXPORTER)},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listening ledger=127.0.0.1:" in line
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
