"""State files and outside input whose JSON is nested too deeply: set aside or refused, logged, and the rest goes on."""

from __future__ import annotations

import json
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from flopwatch.node.collectors import MAX_DEPTH, StateFile
from tests.support.exporter_process import exporter, flopwatch_command
from tests.support.ledger_process import serving
from tests.support.machine import PATIENCE

HARDWARE = ("gpus.json", "gpu_runtime.json", "gpu_owners.json", "ports.json", "port_history.json", "xid.json")
DEPTHS = (100_000, MAX_DEPTH + 1)


def nested(depth: int) -> str:
    return '{"a":' + "[" * depth + "]" * depth + "}"


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_state_file_of_an_exporter_is_set_aside_and_all_is_served(tmp_path: Path, depth: int) -> None:
    state = tmp_path / "state"
    files = [state / "evidence.json", *(state / "simulated" / name for name in (*HARDWARE, "expected.json"))]
    with exporter(state, "--simulate", "h100x8", "--ledger", "embedded") as node:
        node.wait_for_hardware()
        assert node.end() == 0
    assert {file.name for file in files if not file.exists()} <= {"expected.json", "gpu_owners.json"}
    for file in files:
        file.write_text(nested(depth))
    with exporter(state, "--simulate", "h100x8", "--ledger", "embedded") as node:
        scraped = node.wait_for_hardware()
        assert scraped["host_verdict_id{}"] == 0
        assert not [name for name in node.log.splitlines() if "Traceback" in name]
        for file in files:
            assert f"{file} is damaged" in node.log, file
            assert Path(f"{file}.damaged").read_text() == nested(depth), file
        assert node.end() == 0


@pytest.mark.parametrize("depth", [100_000, 900])
def test_a_ledger_with_nested_rows_is_set_aside_and_begins_again(tmp_path: Path, depth: int) -> None:
    state = tmp_path / "ledger"
    start = {"t": 1, "run": "r", "event": "start", "attempt": "a"}
    with serving(state) as ledger:
        assert ledger.post(json.dumps([start]))[0] == 200
    with closing(sqlite3.connect(state / "ledger.sqlite")) as db, db:
        db.execute("UPDATE runs SET state = ?", (nested(depth),))
    with serving(state) as ledger:
        assert ledger.post(json.dumps([{**start, "run": "s"}]))[0] == 200
        assert [run["run"] for run in json.loads(ledger.ask("GET", "/v1/runs")[1])["runs"]] == ["s"]
    assert [*state.glob("ledger.sqlite.corrupt-*")]


@pytest.mark.parametrize("depth", [100_000, 900])
def test_nested_requests_are_refused_and_the_ledger_goes_on(tmp_path: Path, depth: int) -> None:
    with serving(tmp_path / "ledger") as ledger:
        for path in ("/v1/snapshots", "/v1/runs/close"):
            for body in (nested(depth), f"[{nested(depth)}]", f'{{"run": {nested(depth)}}}'):
                assert ledger.ask("POST", path, body)[0] == 400, (path, body[:20])
        assert ledger.ask("GET", "/metrics")[0] == 200


def test_a_nested_push_and_a_spool_are_no_end_of_an_exporter(tmp_path: Path) -> None:
    spool = tmp_path / "state" / "spool"
    spool.mkdir(parents=True)
    for depth in DEPTHS:
        (spool / f"{depth}.json").write_text(f"[{nested(depth)}]")
    with exporter(tmp_path / "state", "--ledger", "http://127.0.0.1:9") as node:
        assert node.log.count("spool file ignored") == len(DEPTHS)
        # An AnyValue of OTLP may hold itself: ArrayValue.values, AnyValue.array_value, and around them KeyValue.value,
        # Resource.attributes, ResourceMetrics.resource and the request.
        push = b""
        for tag in (b"\x0a\x2a" * 1000) + b"\x12\x0a\x0a\x0a":
            push = bytes([tag]) + _varint(len(push)) + push
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(
                urllib.request.Request(
                    f"http://{node.otlp}/v1/metrics", push, {"Content-Type": "application/x-protobuf"}
                ),
                timeout=PATIENCE,
            )
        assert "flopwatch_build_info" in node.get("/metrics")


def _varint(number: int) -> bytes:
    low = bytes([number & 0x7F | (0x80 if number > 0x7F else 0)])
    return low if number <= 0x7F else low + _varint(number >> 7)


@pytest.mark.parametrize("depth", DEPTHS)
def test_nested_files_that_a_user_names_are_one_line(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "nested.json"
    file.write_text(nested(depth))
    for command in (
        ("check", "--simulate", "h100x8", "--state", tmp_path, "--expect", file),
        ("flops", file),
        ("run", "--config", file, "train.py"),
        ("ledger", "replay", file),
    ):
        done = flopwatch_command(*command)
        assert done.returncode != 0, command
        assert "Traceback" not in done.stderr, command


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1])
def test_the_depth_of_a_state_file_is_bounded(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "file.json"
    file.write_text(nested(depth))
    loaded = StateFile(file).load()
    assert (loaded != {}) == (depth < MAX_DEPTH)
    assert StateFile(file).save(loaded)
