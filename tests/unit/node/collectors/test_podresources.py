"""PodResources of the kubelet: the decoder against protobuf's encoder, the call against good and bad servers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch.node.collectors.identity import podresources
from flopwatch.node.collectors.identity.podresources import Assignment, Call, PodResourcesError, ask, decode
from tests.support.kubelet import assignments, encoded, kubelet, pod
from tests.support.machine import PATIENCE

TRAINING = pod("ml", "train-0", "worker", "GPU-a", "GPU-b")
CLAIMING = {
    "name": "claims",
    "namespace": "ml",
    "containers": [
        {
            "name": "main",
            "dynamic_resources": [
                {
                    "claim_name": "one-gpu",
                    "claim_namespace": "ml",
                    "claim_resources": [
                        {
                            "cdi_devices": [{"name": "k8s.gpu.nvidia.com/claim=0d7f-gpu-3"}],
                            "driver_name": "gpu.nvidia.com",
                            "pool_name": "node-7",
                            "device_name": "gpu-3",
                        },
                        {
                            "cdi_devices": [{"name": "k8s.gpu.nvidia.com/claim=0d7f-gpu-4"}],
                            "driver_name": "gpu.nvidia.com",
                        },
                    ],
                }
            ],
        }
    ],
}


def test_pods_with_devices_and_claims_and_without() -> None:
    pods = [TRAINING, {"name": "web", "namespace": "default", "containers": [{"name": "nginx"}]}, CLAIMING]
    assert decode(encoded(pods)) == [
        Assignment("ml", "train-0", "worker", "nvidia.com/gpu", "GPU-a"),
        Assignment("ml", "train-0", "worker", "nvidia.com/gpu", "GPU-b"),
        Assignment("ml", "claims", "main", "gpu.nvidia.com", "gpu-3"),
        Assignment("ml", "claims", "main", "gpu.nvidia.com", "k8s.gpu.nvidia.com/claim=0d7f-gpu-4"),
    ]
    assert decode(b"") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x0a", "cut off"),
        (b"\x0a\x05\x0a", "longer than"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "64 bits"),
        (b"\x0a" + b"\x80" * 11, "64 bits"),
        (b"\x0b", "type 3"),
        (b"\x02\x00", "number 0"),
        (b"\x0a\x03\x0a\x01\xff", "utf-8"),
        (b"\x11\x00\x00", "longer than"),
        (b"<html>not a list of pods</html>", "type"),
        (b"\x0a\x00" * podresources.MAX_FIELDS + b"\x0a\x00", "fields"),
        (bytes(podresources.MAX_BYTES + 1), "bytes"),
    ],
)
def test_what_is_no_list_of_pods_is_a_value_error(body: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(body)


def test_an_answer_with_more_devices_than_any_node_has_is_refused() -> None:
    with pytest.raises(ValueError, match="devices"):
        decode(encoded([pod("ml", "huge", "main", *[""] * (podresources.MAX_ASSIGNMENTS + 1))]))


WORDS = st.text(max_size=8)
DEVICES = st.fixed_dictionaries(
    {},
    optional={
        "resource_name": WORDS,
        "device_ids": st.lists(WORDS, max_size=3),
        "topology": st.just({"nodes": [{"ID": -1}]}),
    },
)
CLAIMS = st.fixed_dictionaries(
    {},
    optional={
        "cdi_devices": st.lists(st.fixed_dictionaries({"name": WORDS}), max_size=2),
        "driver_name": WORDS,
        "pool_name": WORDS,
        "device_name": WORDS,
    },
)
CONTAINERS = st.fixed_dictionaries(
    {},
    optional={
        "name": WORDS,
        "devices": st.lists(DEVICES, max_size=2),
        "cpu_ids": st.lists(st.integers(0, 2**63 - 1), max_size=3),
        "dynamic_resources": st.lists(
            st.fixed_dictionaries({"claim_name": WORDS, "claim_resources": st.lists(CLAIMS, max_size=2)}), max_size=2
        ),
    },
)
PODS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"name": WORDS, "namespace": WORDS, "containers": st.lists(CONTAINERS, max_size=2)}
    ),
    max_size=3,
)


@given(PODS)
@settings(deadline=None)
def test_the_decoder_reads_whatever_protobuf_writes(pods: list[dict[str, Any]]) -> None:
    assert decode(encoded(pods)) == assignments(pods)


@given(st.binary(max_size=200), PODS, st.data())
@settings(deadline=None)
def test_no_bytes_do_anything_but_raise_a_value_error(noise: bytes, pods: list[dict[str, Any]], data: Any) -> None:
    body = encoded(pods)
    at = data.draw(st.integers(0, len(body)))
    for damaged in (noise, body[:at], body[:at] + noise + body[at:], body[:at] + noise[:1] + body[at + 1 :]):
        try:
            found = decode(damaged)
        except ValueError:
            continue
        assert all(isinstance(word, str) for assignment in found for word in assignment)


def test_the_call_gets_what_a_grpc_server_sends(tmp_path: Path) -> None:
    with kubelet(tmp_path / "kubelet.sock", encoded([TRAINING])):
        assert ask(tmp_path / "kubelet.sock") == assignments([TRAINING])


def test_an_answer_of_many_frames_arrives_whole_and_one_over_the_limit_is_refused(tmp_path: Path) -> None:
    pods = [pod("ml", f"train-{index}", "worker", f"GPU-{index:040d}") for index in range(20_000)]
    with kubelet(tmp_path / "large.sock", encoded(pods)):
        assert ask(tmp_path / "large.sock") == assignments(pods)
    with (
        kubelet(tmp_path / "huge.sock", bytes(podresources.MAX_BYTES + 1)),
        pytest.raises(PodResourcesError, match="larger than 16777216 bytes"),
    ):
        ask(tmp_path / "huge.sock")


def test_without_a_socket_there_is_no_kubelet_and_behind_a_dead_one_no_answer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ask(tmp_path / "kubelet.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "kubelet.sock"))
    with pytest.raises(PodResourcesError, match="Connection refused"):
        ask(tmp_path / "kubelet.sock")


def test_a_status_of_the_server_is_the_error(tmp_path: Path) -> None:
    def refuse(context: Any) -> bytes:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit: 100 %")
        raise AssertionError

    with (
        kubelet(tmp_path / "kubelet.sock", refuse),
        pytest.raises(PodResourcesError, match="gRPC status 8: rejected by rate limit: 100 %"),
    ):
        ask(tmp_path / "kubelet.sock")


def test_a_kubelet_without_this_version_of_the_api_is_an_error_with_the_reason(tmp_path: Path) -> None:
    server = grpc.server(None)
    server.add_insecure_port(f"unix:{tmp_path / 'kubelet.sock'}")
    server.start()
    try:
        with pytest.raises(PodResourcesError, match="gRPC status 12: Method not found!"):
            ask(tmp_path / "kubelet.sock")
    finally:
        server.stop(None).wait()


def test_a_kubelet_that_takes_its_time_costs_the_deadline(tmp_path: Path) -> None:
    late = threading.Event()

    def wait(context: Any) -> bytes:
        late.wait(PATIENCE)
        return b""

    with kubelet(tmp_path / "kubelet.sock", wait):
        with pytest.raises(PodResourcesError, match=r"no answer within 0\.2 s|gRPC status 4"):
            ask(tmp_path / "kubelet.sock", deadline=0.2)
        late.set()


@contextmanager
def server(path: Path, serve: Callable[[socket.socket], object]) -> Iterator[None]:
    """Serve one connection after another on a unix socket with plain bytes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def dripping(connection: socket.socket) -> None:
    # An unknown frame that promises 16 KiB, a byte at a time: each byte alone comes within any timeout.
    try:
        for byte in b"\x00\x40\x00\xfa\x00\x00\x00\x00\x00" + bytes(1 << 14):
            connection.sendall(bytes([byte]))
            threading.Event().wait(0.01)
    except OSError:
        pass


@pytest.mark.parametrize("serve", [silent, dripping])
def test_a_server_that_never_gets_there_costs_the_deadline(
    tmp_path: Path, serve: Callable[[socket.socket], object]
) -> None:
    path = tmp_path / "kubelet.sock"
    with server(path, serve), pytest.raises(PodResourcesError, match=r"no answer within 0\.3 s"):
        ask(path, deadline=0.3)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "closed before the answer"),
        (lambda connection: connection.sendall(bytes(range(256)) * 8), "no HTTP/2"),
        (reset, "closed|reset|Broken pipe"),
        # Settings, then RST_STREAM (CANCEL) and GOAWAY of our stream.
        (
            lambda connection: connection.sendall(bytes.fromhex("00000004000000000000000403000000000100000008")),
            "refused",
        ),
        (
            lambda connection: connection.sendall(bytes.fromhex("000000040000000000000008070000000000" + "00" * 8)),
            "refused",
        ),
    ],
)
def test_garbage_and_resets_are_errors(tmp_path: Path, serve: Callable[[socket.socket], object], reason: str) -> None:
    def after_the_request(connection: socket.socket) -> None:
        connection.recv(4096)
        serve(connection)

    path = tmp_path / "kubelet.sock"
    with server(path, after_the_request), pytest.raises(PodResourcesError, match=reason):
        ask(path, deadline=PATIENCE)


FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 10),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3]),
    st.binary(max_size=40),
)


@given(st.lists(st.binary(max_size=60) | FRAMES, min_size=1, max_size=6))
@settings(deadline=None)
def test_no_bytes_break_the_call(chunks: list[bytes]) -> None:
    call = Call(1)
    try:
        for chunk in [*chunks, b""]:
            call.receive(chunk)
            call.data_to_send()
    except PodResourcesError:
        return
    assert call.done
