"""Test the hook with receivers of others: a collector (rotel), a database (VictoriaMetrics), a server behind TLS."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sysconfig
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import pytest

from demo.servers import victoria_metrics
from flopwatch.catalogue import TRAINING_STEP_DURATION_SECONDS, Metric, all_metrics
from flopwatch.training import Run
from flopwatch.training.push.otlp import Undelivered, Wire
from flopwatch.training.recorder import Snapshot
from flopwatch.training.totals import DURATION_BOUNDS
from tests.support import ROOT
from tests.support.hook_server import python
from tests.support.machine import PATIENCE, reserved_port, shortest, until

TRAINING = [metric for metric in all_metrics() if metric.domain == "training"]
Series = frozenset[tuple[str, str]]
Value = TypeVar("Value")


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server until the end of the block. It is up once its port accepts connections."""
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                connection = HTTPConnection("127.0.0.1", port, timeout=5)
                try:
                    connection.connect()
                    break
                except OSError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
                finally:
                    connection.close()
            yield
        finally:
            process.terminate()


@dataclass(frozen=True)
class Backend:
    """VictoriaMetrics, and a collector that forwards to it."""

    database: str
    collector: str

    @property
    def otlp(self) -> str:
        """Return VictoriaMetrics' OTLP endpoint, to which the hook appends /v1/metrics."""
        return f"{self.database}/opentelemetry"

    def _get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.database}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series of an instant query."""
        # Points can be searched within a second or so, or at once after this request.
        urllib.request.urlopen(f"{self.database}/internal/force_flush").close()
        return [(one["metric"], float(one["value"][1])) for one in self._get("query", query=promql)["result"]]

    def series(self, run: str) -> set[Series]:
        """Return name and labels of all series of a run."""
        return {frozenset(labels.items()) for labels, _ in self.query(f'{{__name__=~".+", run="{run}"}}')}


def eventually(read: Callable[[], Value], expected: Value) -> None:
    """Wait until `read()` returns what is expected, and show the difference if it never does."""
    deadline = time.monotonic() + PATIENCE / 4  # a second, on an idle machine
    while time.monotonic() < deadline:
        if read() == expected:
            return
        time.sleep(0.1)
    assert read() == expected


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("otlp")
    agent = Path(sysconfig.get_path("platlib"), "rotel", "rotel-agent")
    with (
        reserved_port() as database,
        reserved_port() as collector,
        reserved_port() as unused,
        running(
            [
                victoria_metrics(),
                f"-httpListenAddr=127.0.0.1:{database}",
                f"-storageDataPath={folder}/data",
                "-opentelemetry.usePrometheusNaming",
                "-search.latencyOffset=0s",
                "-search.disableCache",
            ],
            database,
            folder / "database.log",
        ),
        running(
            [
                str(agent),
                "start",
                "--otlp-http-endpoint",
                f"127.0.0.1:{collector}",
                "--otlp-grpc-endpoint",
                f"127.0.0.1:{unused}",
                "--exporter",
                "otlp",
                "--otlp-exporter-protocol",
                "http",
                "--otlp-exporter-endpoint",
                f"http://127.0.0.1:{database}/opentelemetry",
            ],
            collector,
            folder / "collector.log",
        ),
    ):
        yield Backend(f"http://127.0.0.1:{database}", f"http://127.0.0.1:{collector}")


def exposed(row: Metric, labels: dict[str, str], bounds: tuple[float, ...] = DURATION_BOUNDS) -> set[Series]:
    """Return the series that the exporter would serve for a row's point, with the labels that OTLP adds."""
    labels = {key: value for key, value in labels.items() if value} | {"service_name": "flopwatch"}
    if row.type != "histogram":
        return {frozenset({"__name__": row.name, **labels}.items())}
    buckets = [{"__name__": f"{row.name}_bucket", "le": f"{bound:g}", **labels} for bound in bounds]
    buckets += [{"__name__": f"{row.name}_{part}", **labels} for part in ("count", "sum")]
    return {frozenset(one.items()) for one in (*buckets, {**buckets[0], "le": "+Inf"})}


@pytest.mark.parametrize("way", ["otlp", "collector"])
def test_every_training_family_arrives_under_its_own_name_and_labels(backend: Backend, way: str) -> None:
    run = f"all-{way}"
    text = {label: f"some {label}" for row in TRAINING for label in row.labels}
    labels_of = {row: {key: text[key] for key in row.labels if key not in ("run", "rank")} for row in TRAINING}
    wire = Wire(getattr(backend, way), time.time() - 60, None)
    for at in (1.0, 2.0):  # labels that change from push to push start no new series
        wire.send(
            wire.encode(
                Snapshot(
                    {
                        "flopwatch.schema": 1,
                        "flopwatch.run": run,
                        "flopwatch.rank": 3,
                        "flopwatch.open_step_seconds": at,
                    },
                    {row: [(labels, at)] for row, labels in labels_of.items() if row.type != "histogram"},
                    (DURATION_BOUNDS, [1] * (len(DURATION_BOUNDS) + 1), 9.5),
                )
            )
        )
    wire.connection.close()
    ids = {"run": run, "rank": "3"}
    expected = {one for row in TRAINING for one in exposed(row, {key: {**text, **ids}[key] for key in row.labels})}
    eventually(lambda: backend.series(run), expected)
    # Two cumulative snapshots are one counter, not their sum. All series are there after the first one.
    eventually(lambda: backend.query(f'training_tokens_total{{run="{run}"}}')[0][1], 2.0)
    count, total = (
        backend.query(f'{TRAINING_STEP_DURATION_SECONDS}_{part}{{run="{run}"}}')[0][1] for part in ("count", "sum")
    )
    assert (count, total) == (len(DURATION_BOUNDS) + 1, 9.5)


def test_the_series_of_a_training_process_are_found_with_promql_behind_a_collector(backend: Backend) -> None:
    answer = python(
        """
import json, time
from flopwatch.training import Run
run = Run("llama", flops_per_token=10, peak_flops=1e12, push_interval=0.1)
for batch in run.batches(range(5)):
    with run.activity("evaluation"):
        time.sleep(0.1)
    run.step(tokens=64, loss=2.5)
sent = run.snapshot()
print(json.dumps([[row.name, labels] for row, points in sent.points.items() for labels, _ in points]))
run.finish()
""",
        FLOPWATCH_ENDPOINT=backend.collector,
        FLOPWATCH_OWNER="ada",
    )
    assert answer.stderr == ""
    rows = {row.name: row for row in TRAINING}
    expected = exposed(TRAINING_STEP_DURATION_SECONDS, {"run": "llama"})
    for name, labels in json.loads(answer.stdout):
        ids = {key: text for key, text in {"run": "llama", "rank": "0"}.items() if key in rows[name].labels}
        expected |= exposed(rows[name], {**ids, **labels})
    eventually(lambda: backend.series("llama"), expected)
    eventually(lambda: [value for _, value in backend.query('training_steps_total{run="llama", rank="0"}')], [5.0])
    assert [value for _, value in backend.query('sum by (run) (training_tokens_total{run="llama"})')] == [320]
    [(mfu, value)] = backend.query(
        'sum by (run) (training_model_flops_total{run="llama"}) / '
        'sum by (run) (training_capacity_flops_total{run="llama"})'
    )
    assert mfu == {"run": "llama"}
    assert 0 < value < 1
    [(info, _)] = backend.query('training_run_info{run="llama"}')
    assert (info["owner"], info["convention"]) == ("ada", "causal")


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[str, Path, list[dict[str, str]]]]:
    """Receiver behind TLS: its URL, its certificate, and the headers of the requests it received."""
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    headers: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            headers.append({"path": self.path, **self.headers})
            self.send_response(202)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"taken")

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore errors of clients that do not trust the certificate."""

    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}", tmp_path / "cert.pem", headers
        finally:
            server.shutdown()
            thread.join()


LOOP = """
from flopwatch.training import Run
run = Run("llama", push_interval=60, peak_flops=1e12)
run.step()
run.finish()
"""


def test_a_foreign_receiver_behind_tls_gets_headers_of_its_own(
    secure: tuple[str, Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    url, certificate, headers = secure
    (tmp_path / "headers").write_text("Authorization=Basic%20dXNlcjprZXk=\n")
    answer = python(
        LOOP,
        FLOPWATCH_ENDPOINT=f"{url}/otlp/",
        SSL_CERT_FILE=str(certificate),
        FLOPWATCH_HEADERS="X-Scope-OrgID=team-1",
        FLOPWATCH_HEADERS_FILE=str(tmp_path / "headers"),
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert {(one["path"], one["Authorization"], one["X-Scope-OrgID"]) for one in headers} == {
        ("/otlp/v1/metrics", "Basic dXNlcjprZXk=", "team-1")
    }


def test_a_server_with_an_untrusted_certificate_gets_no_push(secure: tuple[str, Path, list[dict[str, str]]]) -> None:
    url, _, headers = secure
    answer = python(LOOP, FLOPWATCH_ENDPOINT=url)
    assert answer.returncode == 0
    assert "CERTIFICATE_VERIFY_FAILED" in answer.stderr
    assert headers == []


@pytest.mark.parametrize("text", ["token", "=value", "a=1,b"])
def test_invalid_headers_are_an_error_at_start(text: str) -> None:
    with pytest.raises(ValueError, match="FLOPWATCH_HEADERS: write name=value"):
        Wire("http://127.0.0.1:9", 0.0, None, text)


def test_a_port_is_optional_and_so_is_the_path_that_otlp_adds() -> None:
    urls = {
        "http://node": "http://node:4318/v1/metrics",
        "http://node:1/v1/metrics/": "http://node:1/v1/metrics",
        "https://mimir.example/otlp": "https://mimir.example:443/otlp/v1/metrics",
        "https://user:key@[::1]:1": "https://[::1]:1/v1/metrics",
    }
    assert {endpoint: Wire(endpoint, 0.0, None).url for endpoint in urls} == urls


def test_no_answer_within_two_seconds_is_no_delivery(secure: tuple[str, Path, list[dict[str, str]]]) -> None:
    url, _, _ = secure

    def send() -> float:
        began = time.monotonic()
        with pytest.raises(Undelivered):
            Wire(url.replace("https", "http"), 0.0, None).send(b"")  # a TLS client meets a server without TLS
        return time.monotonic() - began

    assert shortest(send, 4) < 4


def test_pushes_share_a_connection_until_the_server_closes_it() -> None:
    ports: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            ports.append(self.client_address[1])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            if len(ports) == 5:
                self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = len(ports) in (3, 5)  # after the third push without notice

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,)).start()
        wire = Wire(f"http://127.0.0.1:{server.server_port}", 0.0, None)
        for _ in range(6):
            assert not wire.send(b"push")
        wire.connection.close()
        server.shutdown()
    assert [ports.index(port) for port in ports] == [0, 0, 0, 3, 3, 5]


def test_the_last_push_does_not_wait_for_a_dead_connection() -> None:
    """As of an exporter whose place another one has taken, so that nothing answers on the old connection."""
    ports: list[int] = []
    ended = Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            ports.append(self.client_address[1])
            self.rfile.read(int(self.headers["Content-Length"]))
            if ports.count(ports[-1]) > 1:
                ended.wait(PATIENCE)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,)).start()
        run = Run("lm", endpoint=f"http://127.0.0.1:{server.server_port}", push_interval=3600, environ={})
        until(lambda: len(ports) == 1)
        run.finish()
        ended.set()
        server.shutdown()
    assert len(ports) == len(set(ports)) == 2


def test_the_documentation_starts_the_servers_as_they_are_started_here() -> None:
    root = ROOT
    here, there = Path(__file__).read_text(), (root / "docs" / "otlp.md").read_text()
    commands = re.search(r"```sh\n(victoria-metrics .*?)```", there, re.DOTALL)
    assert commands is not None
    flags = re.findall(r"(?<=\s)--?[a-zA-Z.-]{5,}", commands[1].partition("FLOPWATCH_ENDPOINT")[0])
    assert len(flags) == 9
    assert [flag for flag in flags if flag not in here] == []
