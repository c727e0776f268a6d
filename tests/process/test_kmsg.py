"""The kernel tier: `flopwatch kmsg` and the exporter that reads its socket."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flopwatch.catalogue import (
    FLOPWATCH_KERNEL_LOG_LOST_TOTAL,
    FLOPWATCH_XID_SOURCE_UP,
    GPU_INFO,
    GPU_XID_ERRORS_TOTAL,
    Metric,
    Sample,
)
from flopwatch.node import kmsg
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.xid import Xid, kernel_log
from flopwatch.node.kmsg import Server, listen
from flopwatch.settings import KmsgSettings, SettingsError
from tests.support import ROOT
from tests.support.machine import PATIENCE, until


def line(sequence: int, code: int = 79) -> str:
    return f"4,{sequence},{sequence}000,-;NVRM: Xid (PCI:0000:53:00): {code}, pid=1, name=x, text\n SUBSYSTEM=pci\n"


def noise(sequence: int) -> str:
    return f"6,{sequence},{sequence}000,-;audit: type=1400 audit(1700000000.1:{sequence}): apparmor=DENIED {'x' * 40}\n"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one read wait for all that there is, however long a slow machine takes to send it."""
    monkeypatch.setattr(kernel_log, "CONNECT", PATIENCE)
    monkeypatch.setattr(kernel_log, "SLICE", PATIENCE)


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """Return an inventory of one GPU, at 0000:53:00."""
    (tmp_path / "gpus.json").write_text(
        json.dumps(
            {
                "GPU-53": dict.fromkeys(GPU_INFO.labels, "")
                | {"gpu": "0", "uuid": "GPU-53", "pci_bus_id": "00000000:53:00.0"}
            }
        )
    )
    return tmp_path / "gpus.json"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Callable[[], None]]]:
    """Return what serves tmp_path/kmsg at tmp_path/sock, and itself returns what ends that."""
    running: list[tuple[threading.Event, threading.Thread]] = []

    def start() -> Callable[[], None]:
        listener, stop = listen(tmp_path / "sock"), threading.Event()
        server = Server(listener, tmp_path / "kmsg")

        def turn() -> None:
            while not stop.is_set():
                server.turn(0.02)
            server.close()
            listener.close()

        thread = threading.Thread(target=turn)
        thread.start()
        running.append((stop, thread))
        return end

    def end() -> None:
        for stop, thread in running:
            stop.set()
            thread.join()
        running.clear()

    yield start
    end()


def collector(tmp_path: Path, gpus: Path, boot_id: str = "boot1") -> Xid:
    return Xid(f"unix:{tmp_path / 'sock'}", gpus, tmp_path / "xid.json", boot_id, lambda: 1e9)


def counted(samples: list[Sample]) -> dict[str, float]:
    return {labels[2]: value for row, labels, value in samples if row is GPU_XID_ERRORS_TOTAL and value}


def value(samples: list[Sample], wanted: Metric) -> float:
    return next(value for row, _, value in samples if row is wanted)


def client(path: Path, request: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    connection.connect(str(path))
    if request:  # the server may have refused the connection already
        connection.sendall(request)
    return connection


def received(connection: socket.socket, end: bytes) -> bytes:
    """Return what has come when it ends like this, or when the other side has hung up."""
    data = b""
    while not data.endswith(end) or not end:
        more = connection.recv(1 << 16)
        if not more:
            break
        data += more
    return data


Serve = Callable[[], Callable[[], None]]


def test_a_client_gets_what_there_is_then_the_mark_then_what_comes(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "kmsg").write_text(line(0) + line(1))
    serve()
    with client(tmp_path / "sock", b"0\n") as connection:
        assert received(connection, b" caught up\n") == (line(0) + line(1)).encode() + b" caught up\n"
        with (tmp_path / "kmsg").open("a") as log:
            log.write(line(2))
        assert received(connection, b"pci\n") == line(2).encode()


def test_of_a_device_a_client_gets_the_records_from_the_one_it_wants() -> None:
    """The terminal that stands for /dev/kmsg gives a line a read."""
    master, slave = os.openpty()
    records = [line(number).splitlines(keepends=True)[0].encode() for number in (7, 8, 9)]
    os.write(master, b"".join(records))
    # The kernel passes them on when it gets round to it.
    until(lambda: fcntl.ioctl(slave, termios.FIONREAD, bytes(4)) == len(b"".join(records)).to_bytes(4, sys.byteorder))
    ours, theirs = socket.socketpair()
    served = kmsg._Client(theirs, Path(os.ttyname(slave)), time.monotonic())
    try:
        ours.sendall(b"8\n")
        served.turn(time.monotonic())
        assert ours.recv(1 << 16) == b"".join(records[1:]) + b" caught up\n"
    finally:
        served.close()
        ours.close()
        os.close(slave)
        os.close(master)


@pytest.mark.parametrize("request_", [b"x\n", b"-1\n", b"1" * 40, b"GET / HTTP/1.1\r\n\r\n", b"\n"])
def test_a_client_with_a_malformed_request_is_dropped(tmp_path: Path, serve: Serve, request_: bytes) -> None:
    (tmp_path / "kmsg").write_text(line(0))
    serve()
    with client(tmp_path / "sock", request_) as connection:
        assert received(connection, b"") == b""


def test_a_client_that_sends_nothing_or_never_reads_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("".join(map(line, range(20_000))))
    for request in (b"", b"0\n"):
        ours, theirs = socket.socketpair()
        served = kmsg._Client(theirs, tmp_path / "kmsg", 0.0)
        ours.sendall(request)
        for _ in range(100):
            served.turn(1.0)  # until the socket takes no more
        with pytest.raises(kmsg._Gone):
            served.turn(2.0 + max(kmsg.STUCK_SECONDS, kmsg.REQUEST_SECONDS))
        assert len(served._pending) <= 2 * kmsg.CHUNK_BYTES
        served.close()
        ours.close()


def test_more_clients_than_there_may_be_are_turned_away(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "kmsg").write_text(line(0))
    serve()
    clients = [client(tmp_path / "sock", b"0\n") for _ in range(kmsg.CLIENTS)]
    try:
        for connection in clients:
            assert received(connection, b" caught up\n")
        with client(tmp_path / "sock", b"") as refused:
            assert received(refused, b"") == b""
        clients.pop().close()

        def served() -> bool:
            with client(tmp_path / "sock", b"") as another:
                another.settimeout(0.2)
                try:
                    another.sendall(b"0\n")
                    return received(another, b" caught up\n") != b""
                except (BrokenPipeError, ConnectionResetError):
                    return False

        until(served)
    finally:
        for connection in clients:
            connection.close()


def test_only_the_user_and_the_group_may_connect(tmp_path: Path) -> None:
    with listen(tmp_path / "deep" / "sock", str(os.getgid())):
        status = (tmp_path / "deep" / "sock").stat()
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert status.st_gid == os.getgid()


def test_the_socket_of_a_dead_process_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    listen(tmp_path / "sock").close()  # as a killed process leaves it
    with listen(tmp_path / "sock"), pytest.raises(SettingsError, match="another process listens there"):
        listen(tmp_path / "sock")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(SettingsError, match="not a socket"):
        listen(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(SettingsError, match="no-such-group"):
        listen(tmp_path / "other", "no-such-group")
    with pytest.raises(SettingsError, match="at most 107 bytes"):
        KmsgSettings(listen=Path("/" + "x" * 120))


# The exporter's side.


def test_the_exporter_counts_what_the_socket_brings_and_a_restart_counts_nothing_twice(
    tmp_path: Path, gpus: Path, serve: Serve
) -> None:
    log = tmp_path / "kmsg"
    log.write_text(line(5) + noise(6) + line(7, 48))
    serve()
    reader = collector(tmp_path, gpus)
    samples = reader.read()
    assert counted(samples) == {"79": 1, "48": 1}
    assert value(samples, FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == 0
    reader.close()
    with log.open("a") as file:
        file.write(line(8))
    restarted = collector(tmp_path, gpus)
    assert counted(restarted.read()) == {"79": 2, "48": 1}
    assert counted(restarted.read()) == {"79": 2, "48": 1}
    restarted.close()
    log.write_text(line(0))  # record numbers start again at every boot
    rebooted = collector(tmp_path, gpus, "boot2")
    assert counted(rebooted.read()) == {"79": 3, "48": 1}
    rebooted.close()


def test_the_exporter_reads_on_when_the_kernel_tier_comes_back(tmp_path: Path, gpus: Path, serve: Serve) -> None:
    log = tmp_path / "kmsg"
    log.write_text(line(5))
    reader = collector(tmp_path, gpus)
    with pytest.raises(Unsupported, match="No such file"):
        reader.read()
    end = serve()
    assert counted(reader.read()) == {"79": 1}
    end()
    samples = reader.read()
    assert (counted(samples), value(samples, FLOPWATCH_XID_SOURCE_UP)) == ({"79": 1}, 0)
    with log.open("a") as file:
        file.write(line(9))
    serve()
    samples = reader.read()
    assert (
        counted(samples),
        value(samples, FLOPWATCH_XID_SOURCE_UP),
        value(samples, FLOPWATCH_KERNEL_LOG_LOST_TOTAL),
    ) == ({"79": 2}, 1, 3)
    reader.close()


def test_a_thread_reads_between_the_scrapes(tmp_path: Path, gpus: Path, serve: Serve) -> None:
    (tmp_path / "kmsg").write_text(line(5))
    serve()
    reader = Xid(f"unix:{tmp_path / 'sock'}", gpus, tmp_path / "xid.json", "boot1", lambda: 1e9, follow=True)
    assert counted(reader.read()) == {"79": 1}
    with (tmp_path / "kmsg").open("a") as file:
        file.write(line(6))
    until(lambda: len(reader._kernel._entries) == 1)
    assert counted(reader.read()) == {"79": 2}
    reader.close()


@pytest.mark.long
def test_a_flood_of_20_mb_costs_bounded_memory_and_no_xid(
    tmp_path: Path, gpus: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # what one read takes at most is what counts here
    xids, between = 500, 400
    with (tmp_path / "kmsg").open("w") as log:
        for block in range(xids):
            start = block * (between + 1)
            log.write(line(start, 13) + "".join(map(noise, range(start + 1, start + 1 + between))))
    assert (tmp_path / "kmsg").stat().st_size > 20e6
    serve()
    reader = collector(tmp_path, gpus)
    tracemalloc.start()
    try:
        assert counted(reader.read()).get("13", 0) < xids, "one read does not do it all"
        until(lambda: counted(reader.read()).get("13", 0) == xids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        reader.close()
    assert value(reader.read(), FLOPWATCH_KERNEL_LOG_LOST_TOTAL) == 0
    assert peak < 6 << 20


def test_more_xids_than_anybody_fetches_are_lost_and_counted_as_such(
    tmp_path: Path, gpus: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopwatch.node.collectors.xid.kernel_log.MAX_ENTRIES", 100)
    (tmp_path / "kmsg").write_text("".join(map(line, range(130))))
    serve()
    reader = collector(tmp_path, gpus)
    samples = reader.read()
    assert (counted(samples), value(samples, FLOPWATCH_KERNEL_LOG_LOST_TOTAL)) == ({"79": 100}, 30)
    reader.close()


@pytest.mark.parametrize(
    "garbage", [b"\0" * 300_000, b"x" * 200_000 + b"\n", b"4,3,x\n\xff\n4,,1\n", b" caught up\n" * 1000]
)
def test_garbage_on_the_socket_costs_nothing_but_itself(tmp_path: Path, gpus: Path, garbage: bytes) -> None:
    with listen(tmp_path / "sock") as listener:
        reader = collector(tmp_path, gpus)

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(100) == b"0\n"
                connection.sendall(garbage + b"\n" + line(5).encode() + b" caught up\n")
                done.wait(PATIENCE)

        done = threading.Event()
        thread = threading.Thread(target=send)
        thread.start()
        try:
            until(lambda: "79" in counted(reader.read()))
            assert counted(reader.read()) == {"79": 1}
        finally:
            done.set()
            thread.join()
            reader.close()


# The command.


def test_the_command_serves_until_sigterm_and_leaves_nothing_behind(tmp_path: Path, gpus: Path) -> None:
    (tmp_path / "kmsg").write_text(line(5))
    process = subprocess.Popen(
        [sys.executable, "-m", "flopwatch", "kmsg", "--listen", tmp_path / "sock", "--kmsg", tmp_path / "kmsg"],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "exporter")),
    )
    assert process.stderr is not None
    with process, process.stderr:
        assert process.stderr.readline() == f"streaming {tmp_path / 'kmsg'} at {tmp_path / 'sock'}\n"
        reader = collector(tmp_path, gpus)
        assert counted(reader.read()) == {"79": 1}
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
        reader.close()
    assert not (tmp_path / "sock").exists()


def test_the_error_of_the_command_names_what_it_needs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flopwatch", "kmsg", "--listen", tmp_path / "sock", "--kmsg", tmp_path / "none"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "exporter")),
    )
    assert run.returncode == 1
    assert run.stderr == (
        f"flopwatch: --kmsg {tmp_path / 'none'}: No such file or directory; the kernel log needs root or CAP_SYSLOG, "
        "and a device that the container may open (docs/privileges.md)\n"
    )


def test_the_process_loads_nothing_but_the_standard_library() -> None:
    code = "import sys; import flopwatch.__main__, flopwatch.node.kmsg; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "exporter")},
    )
    loaded = {name.partition(".")[0] for name in run.stdout.split()} - sys.stdlib_module_names
    assert loaded == {"flopwatch", "__main__"} - sys.stdlib_module_names


def test_a_group_that_is_none_leaves_no_socket(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--group nosuch: there is no such group"):
        listen(tmp_path / "kmsg.sock", "nosuch")
    assert list(tmp_path.iterdir()) == []


def test_the_exporters_spelling_of_the_socket_is_taken_and_a_folder_is_no_log(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flopwatch", "kmsg", "--listen", f"unix:{tmp_path}/kmsg.sock", "--kmsg", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    assert (run.returncode, run.stderr.partition(";")[0]) == (1, f"flopwatch: --kmsg {tmp_path}: Is a directory")
    assert list(tmp_path.iterdir()) == []
