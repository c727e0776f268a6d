"""Test both listeners over real sockets: what Prometheus scrapes and what a training process may push."""

from __future__ import annotations

import gc
import gzip
import http.client
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)

from flopwatch import catalogue as m
from flopwatch.http import server as http_server
from flopwatch.http.guard import LOOPBACK_NAMES
from flopwatch.http.server import listener
from flopwatch.node.app import small_pushes
from flopwatch.node.scrape.scrape import PAGE_SECONDS
from flopwatch.node.telemetry.otlp import JSON, MAX_BYTES, PROTOBUF
from flopwatch.settings import Address
from tests.support.machine import PATIENCE, until
from tests.support.node_app import Node, ask, running
from tests.support.otlp_by_hand import counter, process, request, training


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running() as node:
        yield node


def test_a_node_is_ready_when_every_source_was_tried_once() -> None:
    with running() as node:
        status, _, body = node.get("/readyz")
        assert (status, body) == (503, b"waiting for nvml, training\n")
        node.get("/metrics")
        assert node.get("/readyz")[0] == 200


def test_metrics_come_in_the_format_that_was_asked_for(node: Node) -> None:
    status, headers, text = node.get("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b'gpu_power_watts{gpu="0",uuid="GPU-a"} 310.5\n' in text
    status, headers, openmetrics = node.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert (status, headers["content-type"]) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert openmetrics.endswith(b"# EOF\n")
    assert headers["vary"] == "Accept, Accept-Encoding"


def test_metrics_are_gzipped_when_that_was_asked_for(node: Node) -> None:
    _, headers, body = node.get("/metrics", Accept_Encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    assert b"gpu_power_watts" in gzip.decompress(body)
    assert "content-encoding" not in node.get("/metrics", Accept_Encoding="identity")[1]


def test_the_scrapers_timeout_shortens_no_read() -> None:
    with running(deadline=2.0) as node:
        node.get("/metrics", X_Prometheus_Scrape_Timeout_Seconds="0.75")
        assert node.gpus.deadlines == [2.0]


def test_a_hung_driver_holds_up_neither_health_nor_pushes() -> None:
    with running() as node:
        node.gpus.hanging = True
        scrapes = [http.client.HTTPConnection("127.0.0.1", node.metrics, timeout=PATIENCE) for _ in range(50)]
        for scrape in scrapes:
            scrape.request("GET", "/metrics")
        until(lambda: node.gpus.deadlines)
        assert node.get("/healthz")[::2] == (200, b"ok\n")
        assert node.post(request(process(counter("training_tokens_total", 1.0))).SerializeToString())[0] == 200
        assert select.select([scrape.sock for scrape in scrapes], [], [], 0)[0] == []  # all requests still wait
        assert len(node.gpus.deadlines) == 1
        node.gpus.released.set()
        assert [scrape.getresponse().status for scrape in scrapes] == [200] * 50
        for scrape in scrapes:
            scrape.close()


def test_200_scrapes_at_the_same_time_get_one_answer_that_cost_the_driver_one_read() -> None:
    with running() as node:
        node.gpus.samples = [(m.GPU_POWER_WATTS, (str(gpu), f"GPU-{gpu}"), gpu) for gpu in range(2000)]
        answers: list[tuple[int, dict[str, str], bytes]] = []
        began = time.monotonic()
        threads = [threading.Thread(target=lambda: answers.append(node.get("/metrics"))) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [status for status, _, _ in answers] == [200] * 200
        assert all(body.count(b"\ngpu_power_watts{") == 2000 for _, _, body in answers)
        assert len(node.gpus.deadlines) <= time.monotonic() - began + 1
        assert len({body for _, _, body in answers}) <= (time.monotonic() - began) / PAGE_SECONDS + 1


@pytest.mark.parametrize("bytes_a_second", [0, 100])
def test_a_slow_client_is_cut_off_and_delays_no_other(bytes_a_second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.http.server.RESPONSE_TIMEOUT", 2.5)
    with running(send_buffer=4096) as node, socket.socket() as slow:
        node.gpus.samples = [(m.GPU_POWER_WATTS, (str(gpu), "x" * 1000), gpu) for gpu in range(40)]
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", node.metrics))
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(9) == b"HTTP/1.1 "
        (cut,) = node.connections
        assert len(node.get("/metrics")[2]) > 40_000
        taken = 0
        end = time.monotonic() + PATIENCE
        while cut in node.connections:
            assert time.monotonic() < end
            time.sleep(1 / bytes_a_second if bytes_a_second else 0.01)
            taken += len(slow.recv(1)) if bytes_a_second else 0
        with suppress(ConnectionResetError):
            while data := slow.recv(1 << 20):
                taken += len(data)
        assert taken < 40_000
        assert node.get("/healthz")[0] == 200


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
DRIP = b"GET /metrics HTTP/1.1\r\nX-Slow: " + b"y" * 200


@pytest.mark.parametrize(("first", "drip"), [(b"", b""), (b"", DRIP), (HEALTH, DRIP)])
def test_a_client_that_does_not_get_round_to_asking_is_cut_off(
    first: bytes, drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopwatch.http.server.HEADERS_TIMEOUT", 1.5)
    with running() as node, socket.create_connection(("127.0.0.1", node.metrics)) as slow:
        slow.sendall(first)
        received = b""
        while first and not received.endswith(b"ok\n"):
            received += (more := slow.recv(1000))
            assert more
        slow.settimeout(0.02)
        for sent in range(3000):
            with suppress(TimeoutError):
                try:
                    slow.sendall(drip[sent : sent + 1])
                    if slow.recv(1) == b"":
                        break
                except ConnectionError:
                    break
        else:
            pytest.fail("still connected")
        assert node.get("/healthz")[0] == 200


def test_a_client_that_comes_back_or_waits_for_a_slow_answer_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.http.server.HEADERS_TIMEOUT", 1.5)
    with running(deadline=1.8) as node:
        node.gpus.hanging = True
        connection = http.client.HTTPConnection("127.0.0.1", node.metrics, timeout=PATIENCE)
        for _ in range(2):
            connection.request("GET", "/metrics")
            assert b"flopwatch_build_info" in connection.getresponse().read()
            kept = connection.sock
            time.sleep(1.8)
        assert connection.sock is kept is not None
        connection.close()


@pytest.mark.parametrize("dual", [socket.has_dualstack_ipv6(), False])
def test_all_addresses_are_both_families_as_far_as_the_machine_has_them(
    dual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    with listener("--listen", Address("::", 0), backlog=8) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", *(["::1"] if dual else [])):
            with socket.create_connection((host, port), timeout=PATIENCE):
                listening.accept()[0].close()


def test_the_landing_page_escapes_what_it_shows() -> None:
    with running(host='<script>"') as node:
        node.get("/metrics")
        node.post(request(training(1, 1, time.time())).SerializeToString())
        status, headers, page = node.get("/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b"<script>" not in page
        assert b"on &lt;script&gt;&quot;</h1>" in page
        assert b"<tr><td>nvml</td><td>ok</td></tr>" in page
        assert b"<tr><td></td><td>lm</td><td>1</td></tr>" in page


@pytest.mark.parametrize("media", [PROTOBUF, JSON, f"{JSON}; charset=utf-8"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_push_is_served_by_the_next_scrape(media: str, zipped: bool) -> None:
    sent = request(training(40, 5, time.time()))
    body = MessageToJson(sent).encode() if JSON in media else sent.SerializeToString()
    with running() as node:
        coding = {"Content_Encoding": "gzip"} if zipped else {}
        status, headers, answer = node.post(gzip.compress(body) if zipped else body, media, **coding)
        assert (status, headers["content-type"]) == (200, media.partition(";")[0])
        assert answer == (b"{}" if JSON in media else b"")
        text = node.get("/metrics")[2].decode()
    assert 'training_position_steps{run="lm",rank="0"} 40.0\n' in text
    assert 'flopwatch_otlp_pushes_total{outcome="accepted"} 1.0\n' in text


def test_refused_points_are_a_partial_success(node: Node) -> None:
    body = request(process(counter("made_up_total", 1.0), counter("training_tokens_total", 1.0)))
    reason = "'made_up_total': not a training family of this release's catalogue"
    status, _, answer = node.post(body.SerializeToString())
    assert status == 200
    assert ExportMetricsServiceResponse.FromString(answer).partial_success == ExportMetricsPartialSuccess(
        rejected_data_points=1, error_message=reason
    )
    assert json.loads(node.post(MessageToJson(body).encode(), JSON)[2]) == {
        "partialSuccess": {"rejectedDataPoints": "1", "errorMessage": reason}
    }


BODY = request(process(counter("training_tokens_total", 1.0))).SerializeToString()


@pytest.mark.parametrize(
    ("body", "media", "coding", "status"),
    [
        (b"\xff\xff", PROTOBUF, "identity", 400),
        (b"{]", JSON, "identity", 400),
        (BODY, PROTOBUF, "gzip", 400),
        (BODY, "text/plain", "identity", 415),
        (BODY, "", "identity", 415),
        (BODY, PROTOBUF, "br", 415),
        (bytes(MAX_BYTES + 1), PROTOBUF, "identity", 413),
        (bytes(20 * MAX_BYTES), PROTOBUF, "identity", 413),
        (gzip.compress(bytes(50 * MAX_BYTES)), PROTOBUF, "gzip", 413),
    ],
)
def test_a_request_that_is_no_push_is_refused_with_a_reason(
    body: bytes, media: str, coding: str, status: int, node: Node
) -> None:
    try:
        answered, headers, answer = node.post(body, media, Content_Encoding=coding)
    except (ConnectionResetError, BrokenPipeError):
        # For a body far above the limit the answer may arrive while the client still sends.
        assert len(body) > 2 * MAX_BYTES
        return
    assert answered == status
    if headers["content-type"] == JSON:
        assert json.loads(answer)["message"]
    else:
        assert ExportMetricsPartialSuccess.FromString(answer).error_message  # a google.rpc.Status, same wire format


def test_a_body_that_never_arrives_leaves_the_intake_in_order(node: Node) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", node.otlp)) as client:
            client.sendall(
                b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
                b"Content-Length: 1000\r\n\r\nabc"
            )
    assert node.post(BODY)[0] == 200


def answers(port: int, *pieces: bytes, pause: float = 0.05) -> bytes:
    """Return the response to a request that is sent in these pieces, up to its end or the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause)
        received = b""
        while b"\r\n\r\n" not in received and (read := client.recv(65536)):
            received += read
        return received.lower()


HEAD = b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: %b\r\nContent-Length: %d\r\n" % (
    PROTOBUF.encode(),
    len(BODY),
)


@pytest.mark.parametrize(
    "pieces", [(HEAD + b"\r\n" + BODY,), (HEAD + b"\r\n", BODY), (HEAD + b"\r\n" + BODY[:9], BODY[9:])]
)
def test_a_small_push_is_answered_at_once_and_keeps_its_connection(pieces: tuple[bytes, ...], node: Node) -> None:
    answer = answers(node.otlp, *pieces)
    assert answer.startswith(b"http/1.1 200 ok\r\ndate: ")
    assert answer.endswith(b"\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")


def test_a_kept_connection_takes_any_number_of_pushes_and_closes_when_it_is_asked_to(node: Node) -> None:
    other = HEAD.replace(b"Host: x", b"Host: yy") + b"\r\n" + BODY
    last = HEAD + b"Connection: close\r\n\r\n" + BODY
    traced = HEAD + b"Traceparent: 00-1-2-01\r\n\r\n" + BODY  # left to the HTTP library
    before = sum(node.telemetry._pushes.values.values())
    with socket.create_connection(("127.0.0.1", node.otlp), timeout=PATIENCE) as client:
        for request in (HEAD + b"\r\n" + BODY, HEAD + b"\r\n" + BODY, other, traced, last):
            client.sendall(request[:-7])
            time.sleep(0.01)
            client.sendall(request[-7:])
            answer = client.recv(65536).lower()
            assert answer.startswith(b"http/1.1 200 ok\r\n")
            assert (b"connection: close" in answer) == (request is last)
        assert client.recv(1) == b""
    assert sum(node.telemetry._pushes.values.values()) == before + 5


def test_a_kept_connection_that_is_idle_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.http.server.KEEP_ALIVE", 0.5)
    with running(max_connections=9) as node, socket.create_connection(("127.0.0.1", node.otlp), PATIENCE) as client:
        for _ in range(3):
            client.sendall(HEAD + b"\r\n" + BODY)
            assert client.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
            time.sleep(0.3)
        assert client.recv(1) == b""


def test_a_connection_that_its_client_resets_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def left() -> int:
        gc.collect()
        return sum(type(one) is http_server._Protocol for one in gc.get_objects())

    monkeypatch.setattr("flopwatch.http.server.KEEP_ALIVE", 10 * PATIENCE)
    with running(max_connections=9) as node:
        before = left()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", node.otlp), timeout=PATIENCE) as client:
                client.sendall(HEAD + b"\r\n" + BODY)
                assert client.recv(65536)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: left() <= before + 1, 5.0)


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"Traceparent: 00-1-2-01\r\n\r\n" + BODY, b"200"),
        (HEAD + b"Accept: */*\r\nAccept: */*\r\n\r\n" + BODY, b"200"),
        (HEAD.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked") + b"\r\n" + CHUNKED, b"200"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED, b"200"),
        (HEAD + b"\r\n" + BODY + HEAD + b"\r\n" + BODY, b"200"),
        (HEAD.replace(b"Host: x\r\n", b"") + b"\r\n" + BODY, b"400"),
        (HEAD.replace(b"x\r\n", b"x\n") + b"\r\n" + BODY, b"200"),
        (HEAD + b"Bad name: 1\r\n\r\n" + BODY, b"400"),
    ],
)
def test_any_other_request_is_left_to_the_http_library(request_bytes: bytes, status: bytes, node: Node) -> None:
    answer = answers(node.otlp, request_bytes)
    assert answer.split()[1] == status
    assert (b"connection: close" in answer) == (status == b"400")


def test_a_body_that_arrives_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.http.server.HEADERS_TIMEOUT", 0.5)
    with running() as node, socket.create_connection(("127.0.0.1", node.otlp), timeout=PATIENCE) as slow:
        began = time.monotonic()
        slow.sendall(HEAD + b"\r\n" + BODY[:5])
        time.sleep(0.3)
        slow.sendall(BODY[5:6])
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        assert 0.4 < time.monotonic() - began < 5
        assert node.post(BODY)[0] == 200


@pytest.mark.parametrize("length", [1 << 16, 99_999, 100_000, 1 << 20])
def test_a_long_body_is_left_to_the_application(length: int, node: Node) -> None:
    head = HEAD.replace(b"Content-Length: %d" % len(BODY), b"Content-Length: %d" % length)
    answer = answers(node.otlp, head + b"\r\n" + b"\xff" * length)
    assert answer.split()[1] == b"400"
    assert b"connection: close" not in answer


@pytest.mark.parametrize(
    ("length", "body", "status"), [(b"1048577", b"\xff" * ((1 << 20) + 1), b"413"), (b"9" * 30, b"", b"400")]
)
def test_a_body_that_is_declared_too_long_is_refused(length: bytes, body: bytes, status: bytes, node: Node) -> None:
    head = HEAD.replace(b"Content-Length: %d" % len(BODY), b"Content-Length: " + length)
    assert answers(node.otlp, head + b"\r\n", body).split()[1] == status


@pytest.mark.parametrize(("size", "status"), [(60_000, b"200"), (1 << 20, b"400")])
def test_a_head_of_a_mebibyte_is_refused(size: int, status: bytes, node: Node) -> None:
    assert answers(node.otlp, HEAD + b"X-Long: " + b"y" * size + b"\r\n\r\n" + BODY).split()[1] == status


def test_an_error_in_the_short_way_leaves_the_push_to_the_application() -> None:
    failures = [RuntimeError("once")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    with running() as node:
        node.telemetry._gpus = fail_once
        assert node.post(BODY)[0] == 200
        assert failures == []
        failures += [RuntimeError("twice")] * 2
        assert node.post(BODY)[0] == 500


@pytest.mark.parametrize(("name", "value"), [("origin", "http://evil.example"), ("host", "evil.example")])
def test_a_push_of_another_sites_page_is_left_to_the_guard(name: str, value: str, node: Node) -> None:
    headers = {"host": "localhost:4318", "content-type": PROTOBUF, "content-length": str(len(BODY))}
    responder = small_pushes(node.telemetry, None, LOOPBACK_NAMES)
    answer = responder("POST", "/v1/metrics", headers)
    assert answer is not None
    assert answer(BODY) == (PROTOBUF, b"")
    assert responder("POST", "/v1/metrics", {**headers, name: value}) is None


def test_a_push_needs_the_token_if_there_is_one_and_the_token_can_be_rotated(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    with running(token_file=tmp_path / "token") as node:
        assert node.post(BODY)[0] == 401
        assert node.post(BODY, Authorization="Bearer wrong")[0] == 401
        assert node.post(BODY, Authorization="Bearer first")[0] == 200
        (tmp_path / "token").write_text("second")
        assert node.post(BODY, Authorization="Bearer first")[0] == 401
        assert node.post(BODY, Authorization="Bearer second")[0] == 200
        assert node.post(BODY, Authorization="bearer second")[0] == 200
        (tmp_path / "token").write_text("")
        assert node.post(BODY, Authorization="Bearer ")[0] == 401
        text = node.get("/metrics")[2].decode()
    assert 'flopwatch_otlp_pushes_total{outcome="unauthorized"} 4.0\n' in text


def test_each_listener_does_its_own_work_only(node: Node) -> None:
    assert ask(node.otlp, "GET", "/metrics")[0] == 404
    assert ask(node.otlp, "GET", "/v1/metrics")[0] == 405
    assert ask(node.metrics, "POST", "/v1/metrics", BODY, {"Content-Type": PROTOBUF})[0] == 404
    for port in (node.metrics, node.otlp):
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert ask(port, "GET", path)[0] == 404
