"""Test the exporter under hostile input and failing parts: each fault, and exactly the series that result."""

from __future__ import annotations

import base64
import gzip
import json
import random
import resource
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from demo.servers import find
from flopwatch import catalogue as m
from flopwatch.node.scrape.scrape import SHARED_SECONDS
from flopwatch.node.telemetry.otlp import JSON, MAX_BYTES, PROTOBUF
from simulator.host import SimulatedNode
from tests.support.exporter_process import Exporter, Series, alive, exporter, flopwatch_command
from tests.support.machine import PATIENCE, until
from tests.support.node_app import Node, running
from tests.support.otlp_by_hand import counter, process, request, training

MIB = 1 << 20


def metrics(node: Node) -> dict[str, float]:
    """Return the series of a scrape with their values."""
    status, _, body = node.get("/metrics")
    assert status == 200
    lines = body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def outcomes(scraped: dict[str, float]) -> dict[str, float]:
    """Return the number of pushes by outcome, without the outcomes that have none."""
    begin, end = 'flopwatch_otlp_pushes_total{outcome="', '"}'
    return {
        series.removeprefix(begin).removesuffix(end): value
        for series, value in scraped.items()
        if series.startswith(begin) and value
    }


def training_series(scraped: dict[str, float]) -> dict[str, float]:
    return {series: value for series, value in scraped.items() if series.startswith("training_")}


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bomb(mebibytes: int) -> bytes:
    """Return a gzip body that inflates to this many MiB of zeros."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(deflater.compress(bytes(MIB)) for _ in range(mebibytes)), deflater.flush()])


BODY = request(training(40, 5, time.time())).SerializeToString()
GZIPPED = gzip.compress(BODY)
GOOD = counter("training_tokens_total", 8192.0)


def attributes(count: int) -> bytes:
    """Return a push whose resource has `count` empty attributes in addition to its own."""
    resource = process(GOOD)
    # Field 1 of ResourceMetrics is the resource, and its field 1 an attribute. A message that occurs twice is merged.
    extra = b"\x0a\x00" * count
    return request(
        ResourceMetrics.FromString(b"\x0a" + _varint(len(extra)) + extra + resource.SerializeToString())
    ).SerializeToString()


def _varint(number: int) -> bytes:
    head = b""
    while number > 127:
        head, number = head + bytes([number & 127 | 128]), number >> 7
    return head + bytes([number])


@pytest.mark.parametrize(
    ("body", "media", "coding", "status", "outcome"),
    [
        pytest.param(random.Random(7).randbytes(5000), PROTOBUF, "identity", 400, "malformed", id="random"),
        pytest.param(random.Random(7).randbytes(5000), JSON, "identity", 400, "malformed", id="random as JSON"),
        pytest.param(random.Random(7).randbytes(5000), PROTOBUF, "gzip", 400, "malformed", id="random as gzip"),
        pytest.param(BODY[:-1], PROTOBUF, "identity", 400, "malformed", id="truncated"),
        pytest.param(GZIPPED[:-1], PROTOBUF, "gzip", 400, "malformed", id="truncated gzip"),
        pytest.param(GZIPPED[:40] + b"\0" + GZIPPED[41:], PROTOBUF, "gzip", 400, "malformed", id="damaged gzip"),
        pytest.param(b'{"resourceMetrics": [', JSON, "identity", 400, "malformed", id="truncated JSON"),
        pytest.param(b'{"resourceMetrics": {"0": 1}}', JSON, "identity", 400, "malformed", id="an object for a list"),
        pytest.param(b'{"resourceMetrics": [7]}', JSON, "identity", 400, "malformed", id="a number for an object"),
        pytest.param(b'"text"', JSON, "identity", 400, "malformed", id="no object at all"),
        pytest.param(b"[" * 500_000, JSON, "identity", 400, "malformed", id="nested"),
        pytest.param(bomb(200), PROTOBUF, "gzip", 413, "too_large", id="gzip bomb"),
        pytest.param(attributes(1_000_000), PROTOBUF, "identity", 413, "too_large", id="1e6 attributes"),
        pytest.param(
            gzip.compress(attributes(1_000_000)), PROTOBUF, "gzip", 413, "too_large", id="1e6 attributes, gzip"
        ),
    ],
)
def test_a_body_that_is_no_push_is_refused_and_counted_and_costs_no_memory(
    body: bytes, media: str, coding: str, status: int, outcome: str
) -> None:
    with running() as node:
        before = peak_memory()
        answered, _, answer = node.post(body, media, Content_Encoding=coding)
        assert peak_memory() - before < 32 * MIB
        assert (answered, bool(answer)) == (status, True)
        scraped = metrics(node)
        assert scraped['gpu_power_watts{gpu="0",uuid="GPU-a"}'] == 310.5
        assert training_series(scraped) == {}
        assert outcomes(scraped) == {outcome: 1}
        assert node.post(BODY)[0] == 200


POST = b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"


def test_of_100_megabytes_nothing_is_kept() -> None:
    with running() as node:
        before, left = peak_memory(), 100_000_000
        with socket.create_connection(("127.0.0.1", node.otlp)) as client, suppress(ConnectionError):
            client.sendall(POST + b"Content-Length: 100000000\r\n\r\n")
            while left > 0:
                left -= client.send(bytes(min(left, MIB)))
        assert peak_memory() - before < 32 * MIB
        scraped = metrics(node)
        assert scraped['gpu_power_watts{gpu="0",uuid="GPU-a"}'] == 310.5
        assert outcomes(scraped) == {"too_large": 1}


def pour(client: socket.socket, seconds: float) -> None:
    """Send a body that does not end."""
    client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.sendall(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        time.sleep(0.01)


def test_a_body_without_an_end_is_cut_off() -> None:
    with running() as node:
        with socket.create_connection(("127.0.0.1", node.otlp)) as client, pytest.raises(ConnectionError):
            pour(client, seconds=PATIENCE)
        assert outcomes(metrics(node)) == {"too_large": 1}


@pytest.mark.long
def test_as_many_attributes_as_fit_are_looked_through_and_left_out() -> None:
    with running() as node:
        body = attributes((MAX_BYTES - 1000) // 2)
        assert MAX_BYTES - 2000 < len(body) <= MAX_BYTES
        assert node.post(body)[::2] == (200, b"")
        scraped = metrics(node)
        assert outcomes(scraped) == {"accepted": 1}
        assert training_series(scraped) == {'training_tokens_total{run="lm",rank="0"}': 8192.0}


@pytest.mark.parametrize(
    "overrides",
    [{"run": 5}, {"rank": "0"}, {"rank": 0.5}, {"start_unix": "yesterday"}, {"schema": 1.0}, {"attempt": 7}],
)
def test_an_attribute_of_another_type_is_no_identity(overrides: dict[str, Any]) -> None:
    with running() as node:
        status, _, answer = node.post(request(process(GOOD, **overrides)).SerializeToString())
        assert (status, bool(answer)) == (200, True)
        scraped = metrics(node)
        assert outcomes(scraped) == {"invalid": 1}
        assert training_series(scraped) == {}


def test_values_of_another_type_cost_their_points_only() -> None:
    text = json.dumps(
        {
            "resourceMetrics": [
                {
                    "resource": {
                        "attributes": [
                            {"key": f"flopwatch.{key}", "value": value}
                            for key, value in {
                                "schema": {"intValue": 1},
                                "run": {"stringValue": "lm"},
                                "attempt": {"stringValue": "a1"},
                                "rank": {"intValue": 0},
                                "start_unix": {"doubleValue": time.time() - 9},
                            }.items()
                        ]
                    },
                    "scopeMetrics": [
                        {
                            "metrics": [
                                {
                                    "name": "training_tokens_total",
                                    "sum": {
                                        "aggregationTemporality": 2,
                                        "isMonotonic": True,
                                        "dataPoints": [{"asDouble": "NaN"}, {"asInt": "7"}, {}],
                                    },
                                },
                                {
                                    "name": "training_position_steps",
                                    "gauge": {"dataPoints": [{"asDouble": "Infinity"}]},
                                },
                                {"name": "training_loss", "histogram": {"dataPoints": [{"sum": 1}]}},
                            ]
                        }
                    ],
                }
            ]
        }
    )
    with running() as node:
        status, _, answer = node.post(text.encode(), JSON)
        assert (status, json.loads(answer)["partialSuccess"]["rejectedDataPoints"]) == (200, "4")
        scraped = metrics(node)
        assert outcomes(scraped) == {"partial": 1}
        assert training_series(scraped) == {'training_tokens_total{run="lm",rank="0"}': 7.0}


def test_two_processes_that_are_the_same_rank_are_one() -> None:
    now = time.time()
    old = training(4, 2, now, pid=100, start_unix=now - 50)
    new = training(10, 5, now, pid=200, start_unix=now - 40, attempt="a2")
    with running() as node:
        status, _, answer = node.post(request(new, old, new).SerializeToString())
        assert (status, b"a newer process is rank 0" in answer) == (200, True)
        scraped = metrics(node)
        assert outcomes(scraped) == {"accepted": 2, "stale_process": 1}
        assert scraped['training_position_steps{run="lm",rank="0"}'] == 10
        assert len([series for series in scraped if series.startswith("training_position_steps")]) == 1
        assert not any(value for series, value in scraped.items() if series.startswith("flopwatch_series_duplicate"))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('"} 1\\n# EOF', '\\"} 1\\\\n# EOF'),
        ("{}=,", "{}=,"),
        ("\\", "\\\\"),
        ("é\U0001f525", "é\U0001f525"),
        ("<script>", "<script>"),
        ("x" * 256, "x" * 256),
    ],
)
def test_a_hostile_label_value_stays_inside_its_quotes(text: str, written: str) -> None:
    with running() as node:
        sent = request(process(counter("training_activity_seconds_total", 1.0, activity=text)))
        assert node.post(sent.SerializeToString())[::2] == (200, b"")
        body = node.get("/metrics")[2].decode()
        assert f'training_activity_seconds_total{{run="lm",rank="0",activity="{written}"}} 1.0\n' in body
        families = {family.name: family for family in text_string_to_metric_families(body)}
        assert families["training_activity_seconds"].samples[0].labels["activity"] == text


@pytest.mark.parametrize("text", ["line\nend", "\x00", "\u2028", "\u202eright to left", "x" * 257])
def test_a_label_value_that_would_deceive_a_reader_is_refused(text: str) -> None:
    with running() as node:
        sent = process(counter("training_activity_seconds_total", 1.0, activity=text), GOOD)
        assert node.post(request(sent).SerializeToString())[0] == 200
        scraped = metrics(node)
        assert outcomes(scraped) == {"partial": 1}
        assert training_series(scraped) == {'training_tokens_total{run="lm",rank="0"}': 8192.0}


# The whole exporter, as a process, with the simulated node.


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """Yield an exporter with a full simulated node, eight ranks, a ledger and an Xid."""
    state = tmp_path_factory.mktemp("faults") / "state"
    with exporter(state, "--simulate", "h100x8", "--ledger", "embedded") as node:
        node.wait_for_hardware()
        SimulatedNode(state / "simulated").xid(3, 94)
        now = time.time()
        node.push(*(training(40, 5, now, rank=rank, start_unix=now - 60) for rank in range(8)))
        node.wait_for(f"gpu_xid_errors_total{{gpu=3,uuid={SimulatedNode.uuid(3)},xid=94}}", 1)
        yield node


def test_prometheus_linter_is_silent(simulated: Exporter) -> None:
    checked = subprocess.run(
        [find().promtool, "check", "metrics"],
        input=simulated.get("/metrics"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_both_formats_of_a_whole_node_have_the_same_series(simulated: Exporter) -> None:
    def samples(parsed: Any) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        return {(sample.name, frozenset(sample.labels.items())) for family in parsed for sample in family.samples}

    url = f"http://{simulated.metrics}/metrics"
    asked = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
        openmetrics = response.read().decode()
    parsed = openmetrics_parser.text_string_to_metric_families(openmetrics)  # type: ignore[no-untyped-call]
    text = samples(text_string_to_metric_families(simulated.get("/metrics")))
    assert len(text) > 1000
    assert samples(parsed) == text


def domains(scraped: Series) -> set[str]:
    return {series.partition("_")[0] for series in scraped}


def handles(node: Exporter) -> set[str]:
    """Return the names of the collectors that have a process."""
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in node.children() if alive(pid)}


def released(scraped: Series, before: Series) -> dict[str, float]:
    """Return the series about the release without its times, and the failure counters that changed since `before`."""
    return {
        series: value
        for series, value in scraped.items()
        if series
        in (
            "flopwatch_driver_released{}",
            "flopwatch_collector_success{collector=nvml}",
            "flopwatch_collector_success{collector=infiniband}",
        )
        or (series.startswith("flopwatch_collector_failures") and value != before[series])
    }


def by_command(node: Exporter, state: Path) -> None:
    done = flopwatch_command("exporter", "--release", "10m", "--state", state)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the driver is released\n", "")


def by_signal(node: Exporter, state: Path) -> None:
    node.process.send_signal(signal.SIGUSR1)


def by_hand(node: Exporter, state: Path) -> None:
    (state / "release").write_text("10m\n")


@pytest.mark.long
@pytest.mark.parametrize("release", [by_command, by_signal, by_hand])
def test_a_released_driver_has_no_handle_and_its_gap_is_marked(
    release: Callable[[Exporter, Path], None], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with exporter(state, "--simulate", "h100x8") as node:
        before = node.wait_for_hardware()
        assert before["flopwatch_driver_released{}"] == 0
        assert handles(node) == {"nvml", "infiniband", "xid", "identity"}
        began = time.time()
        release(node, state)
        until((state / "released").exists)
        assert handles(node) == {"infiniband", "identity"}
        time.sleep(SHARED_SECONDS)  # the last read before the release is shared like any other
        scraped = node.wait_for("flopwatch_driver_released{}", 1)
        assert released(scraped, before) == {
            "flopwatch_driver_released{}": 1,
            "flopwatch_collector_success{collector=infiniband}": 1,
        }
        # Neither outdated values nor GPUs that seem to be missing.
        assert not [series for series in scraped if series.startswith("gpu_present")]
        assert not [series for series in scraped if series.startswith("gpu_power")]
        assert "infiniband" in domains(scraped)
        assert [series for series in scraped if series.startswith("host_verdict_reason")] == [
            "host_verdict_reason{reason=driver_released,part=driver,verdict=unknown,action=wait}"
        ]
        ends = scraped["flopwatch_driver_released_until_timestamp_seconds{}"]
        assert began + 599 < ends < time.time() + 601
        assert 0 <= scraped["flopwatch_driver_released_seconds_total{}"] < time.time() - began + 1

        done = flopwatch_command("exporter", "--release", "0", "--state", state)
        assert (done.returncode, done.stdout) == (0, "the driver is in use again\n")
        scraped = node.wait_for_hardware()
        assert released(scraped, scraped) == released(before, before)
        assert scraped["flopwatch_driver_released_seconds_total{}"] > 0
        assert sum(series.startswith("gpu_present") for series in scraped) == 8
        assert not {"release", "released"} & {file.name for file in state.iterdir()}


@pytest.mark.long
def test_an_exporter_that_is_restarted_within_a_release_opens_no_driver(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "release").write_text("10m")
    with exporter(state, "--simulate", "h100x8") as node:
        scraped = node.wait_for("flopwatch_collector_success{collector=infiniband}", 1)
        assert "flopwatch_collector_success{collector=nvml}" not in scraped
        assert handles(node) == {"infiniband", "identity"}
        until((state / "released").exists)
        (state / "release").write_text("3s")
        written = time.monotonic()
        # It ends by itself.
        scraped = node.wait_for("flopwatch_collector_success{collector=nvml}", 1)
        assert time.monotonic() - written > 2.9  # the file's timestamp may be a little earlier
        assert scraped["flopwatch_driver_released{}"] == 0


def test_a_release_that_is_not_possible_is_an_error(tmp_path: Path) -> None:
    done = flopwatch_command("exporter", "--release", "10m", "--state", tmp_path / "nowhere")
    assert (done.returncode, "cannot write" in done.stderr) == (1, True)
    done = flopwatch_command("exporter", "--release", "soon")
    assert (done.returncode, "soon is no time; write 90s, 10m or 1h, and 0 to end it" in done.stderr) == (2, True)


def limit_files(node: Exporter, size: int) -> None:
    """Limit the size of every file that the exporter's processes write, as a full disk would."""
    for pid in [node.process.pid, *node.children()]:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


@pytest.mark.long
def test_a_full_disk_costs_only_what_would_be_kept_on_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    xid = f"gpu_xid_errors_total{{gpu=3,uuid={SimulatedNode.uuid(3)},xid=94}}"
    steps = "run_high_water_steps{tenant=,run=lm}"
    with exporter(state, "--simulate", "h100x8", "--ledger", "embedded") as node:
        node.wait_for(xid, 0)
        before = node.wait_for_hardware()
        files = {file.relative_to(state) for file in state.rglob("*")}
        limit_files(node, 0)
        SimulatedNode(state / "simulated").xid(3, 94)
        now = time.time()
        node.push(training(40, 5, now, start_unix=now - 60))
        node.wait_for(xid, 1)
        scraped = node.wait_for_hardware()
        assert (scraped[xid], scraped["training_position_steps{run=lm,rank=0}"]) == (1, 40)
        assert {
            series: value for series, value in scraped.items() if series.startswith("flopwatch_collector_success")
        } == {series: value for series, value in before.items() if series.startswith("flopwatch_collector_success")}
        assert domains(scraped) >= domains(before)
        assert steps not in scraped
        # A truncated file is worse than no file.
        left = {file.relative_to(state) for file in state.rglob("*")} - files
        assert {file for file in left if file.parts[0] not in ("simulated", "ledger.sqlite-journal")} == set()

        limit_files(node, resource.RLIM_INFINITY)
        assert node.wait_for(steps, 40)[xid] == 1
        time.sleep(1.1)
        node.series()  # a scrape saves the Xid
        assert node.end() == 0
    with exporter(state, "--simulate", "h100x8", "--ledger", "embedded") as node:
        scraped = node.wait_for(xid, 1)
        assert scraped[steps] == 40


def test_the_web_configuration_is_the_metrics_listeners_alone(tmp_path: Path) -> None:
    stored = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yaml").write_text(f"basic_auth_users:\n  prometheus: {stored}\n")
    with exporter(tmp_path / "state", "--web-config", tmp_path / "web.yaml") as node:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            node.get("/metrics")
        allowed = urllib.request.Request(
            f"http://{node.metrics}/metrics",
            headers={"Authorization": f"Basic {base64.b64encode(b'prometheus:secret').decode()}"},
        )
        with urllib.request.urlopen(allowed, timeout=PATIENCE) as response:
            assert b"flopwatch_build_info" in response.read()
        node.push(process(GOOD))


def test_every_family_of_the_exporter_itself_is_served(simulated: Exporter) -> None:
    names = {series.partition("{")[0] for series in simulated.series()}
    own = {row.name for row in m.all_metrics() if row.domain == "flopwatch"}
    assert own - names == {
        "flopwatch_driver_released_until_timestamp_seconds",  # only while it is released
        "flopwatch_kernel_log_lost_total",  # of a device
        "flopwatch_nvml_field_latency_seconds_total",  # of a driver that reports it
        "flopwatch_nvml_slow_gpu_seconds",  # while one is slow
        "flopwatch_nccl_inspector_operations_total",  # with --inspector
        "flopwatch_nccl_inspector_skipped_bytes_total",
        "flopwatch_profiling_paused",  # with DCGM
        "flopwatch_ledger_requests_total",  # of a ledger of its own
    }
