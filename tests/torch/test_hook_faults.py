"""Test that a job trains the same, ends the same and ends in time, whatever breaks in the hook or in its surroundings.

The job trains without the hook first. Its losses are compared to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from flopwatch.catalogue.stacks import SEND_STACKS
from tests.support import ROOT
from tests.support.environment import HOSTILE
from tests.support.hook_server import HookServer
from tests.support.machine import PATIENCE

pytestmark = pytest.mark.long

# Steps of a few milliseconds, so that the training is long enough for several pushes, which are 0.1 s apart.
JOB = """
import math, os, random, sys, time
clock, hooked = time.clock_gettime, os.environ.get("HOOK") == "1"
if hooked:
    from flopwatch.training import Run
    run = Run("job", flops_per_token=6e9, peak_flops=1e15, push_interval=0.1)
random.seed(7)
weights = [random.gauss(0.0, 1.0) for _ in range(32)]
loader = [[(point, 1.0 if sum(point) > 0 else 0.0) for point in [
    [random.gauss(0.0, 1.0) for _ in weights] for _ in range(200)]] for _ in range(4)]
if hooked:
    run.restored(step=10)

def train(batch):
    loss, gradient = 0.0, [0.0] * len(weights)
    for point, target in batch:
        guess = 1 / (1 + math.exp(-sum(w * x for w, x in zip(weights, point))))
        loss -= math.log(guess if target else 1 - guess) / len(batch)
        gradient = [g + (guess - target) * x / len(batch) for g, x in zip(gradient, point)]
    weights[:] = [w - 0.1 * g for w, g in zip(weights, gradient)]
    return loss

began = clock(time.CLOCK_MONOTONIC)
for step in range(400):
    for batch in run.batches(loader[step % 4:][:1]) if hooked else loader[step % 4:][:1]:
        loss = train(batch)
        print(loss.hex())
    if hooked:
        run.step(tokens=128, samples=128, loss=loss, grad_norm=1.0)
        if step % 50 == 49:
            with run.activity("evaluation"):
                pass
            with run.checkpoint():
                pass
            with run.background_save(), run.collective_wait():
                pass
            run.checkpoint_committed(step)
print("took", clock(time.CLOCK_MONOTONIC) - began)
while "AWAITED" in os.environ and not os.path.exists(os.environ["AWAITED"]):
    time.sleep(0.01)
ended = clock(time.CLOCK_MONOTONIC)
if hooked and sys.argv[1:] == ["finish"]:
    run.finish()
    print("finish", clock(time.CLOCK_MONOTONIC) - ended)
print("end", ended, flush=True)
sys.exit(7)
"""
MOST_DELAY = 2.0  # seconds the interpreter's end may be later than without the hook


@dataclass(frozen=True)
class Trained:
    """Result of a job."""

    losses: list[str]
    exit_code: int
    seconds: float  # of the training
    ending: float  # seconds from the last step to the end of the process
    stderr: str


def train(*arguments: str, stderr: str = "", **environ: str) -> Trained:
    """Run the job and return its result. If given, `stderr` is a file that receives its standard error.

    With a path AWAITED in its environment, the job only ends once this path exists.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "OTEL_"))}
    with ExitStack() as stack:
        errors = stack.enter_context(open(stderr, "w")) if stderr else subprocess.PIPE
        done = subprocess.run(
            [sys.executable, "-c", JOB, *arguments],
            env={**inherited, "PYTHONPATH": f"{ROOT}/exporter", **environ},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=PATIENCE,
        )
        ended = time.monotonic()
    lines = done.stdout.split("\n")
    output = dict(line.split() for line in lines if " " in line)
    assert {"took", "end"} <= output.keys(), done.stderr
    return Trained(
        [line for line in lines if line and " " not in line],
        done.returncode,
        float(output["took"]),
        ended - float(output["end"]),
        done.stderr or "",
    )


@pytest.fixture(scope="module")
def plain() -> Trained:
    trained = train()
    assert len(trained.losses) == 400
    assert float.fromhex(trained.losses[-1]) < float.fromhex(trained.losses[0]) / 2
    assert trained.exit_code == 7
    assert trained.stderr == ""
    return trained


def unchanged(plain: Trained, *arguments: str, stderr: str = "", healthy: bool = False, **environ: str) -> Trained:
    """Run the job with the hook, check that its losses, exit code and duration are unchanged, and return its result.

    If it is too slow, run the job without the hook again as the new reference. Unless its exporter is `healthy`, also
    use a job with a healthy one: on a slow machine pushes take a larger share of the training, and the exit takes
    longer with more modules.
    """
    seconds, ending = plain.seconds, plain.ending
    for _ in range(5):
        hooked = train(*arguments, HOOK="1", stderr=stderr, **environ)
        assert hooked.losses == plain.losses
        assert hooked.exit_code == plain.exit_code
        if hooked.seconds <= 1.5 * seconds + 0.1 and hooked.ending <= ending + MOST_DELAY:
            return hooked
        # Or did the machine become slower?
        others = [train()]
        if not healthy:
            with HookServer() as server:
                others.append(train(*arguments, HOOK="1", FLOPWATCH_ENDPOINT=server.url))
        seconds, ending = (max(getattr(other, name) for other in others) for name in ("seconds", "ending"))
    raise AssertionError(
        f"the training took {hooked.seconds:.2f} s in place of {seconds:.2f} s, "
        f"and its end {hooked.ending:.2f} s in place of {ending:.2f} s"
    )


@pytest.mark.parametrize("end", ["finish", ""])
def test_with_an_exporter_that_answers_nothing_is_changed(plain: Trained, end: str) -> None:
    with HookServer() as server:
        hooked = unchanged(plain, end, healthy=True, FLOPWATCH_ENDPOINT=server.url)
    assert hooked.stderr == ""
    assert server.pushes[-1].samples["training_steps_total"] == 400
    assert server.pushes[-1].samples["training_hook_errors_total"] == 0


# Faults of the exporter.


@contextmanager
def closed_port() -> Iterator[str]:
    """Yield the URL of a port without a listener."""
    yield "http://127.0.0.1:9"


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the URL of a server with a full backlog. The kernel drops further connections, as a firewall would."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listening.getsockname())
            except TimeoutError:
                break
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a server that calls `answer` on each connection until that fails, and yield its URL."""
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                connection.recv(65536)
                while not stop.is_set():
                    answer(connection)
            except OSError:
                pass

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stop.set()
            accepting.join()
            for thread in threads:
                thread.join()


def once(content: bytes) -> Callable[[socket.socket], None]:
    """Return an answer that sends the content once and hangs up."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(content)
        raise ConnectionError

    return answer


def again(content: bytes, pause: float = 0.0) -> Callable[[socket.socket], None]:
    """Return an answer that sends the content over and over."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(content)
        time.sleep(pause)

    return answer


def then(content: bytes, more: bytes, pause: float = 0.0) -> Callable[[socket.socket], None]:
    """Return an answer that sends the content once, and then `more` over and over."""
    begun: set[int] = set()

    def answer(connection: socket.socket) -> None:
        if connection.fileno() in begun:
            connection.sendall(more)
            time.sleep(pause)
        else:
            begun.add(connection.fileno())
            connection.sendall(content)

    return answer


def protobuf(length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: {length}\r\n\r\n".encode()


NOISE = random.Random(7).randbytes(4096)
ANSWERS = {
    "random bytes": once(NOISE),
    "hanging up": once(b""),
    "random bytes as protobuf": once(protobuf(len(NOISE)) + NOISE),
    "less than its length": once(protobuf(1 << 40) + b"x"),
    "an endless body": then(protobuf(1 << 40), b"x" * 65536),
    "an endless header": then(b"HTTP/1.1 200 OK\r\n", b"x" * 65536),
    "endless headers": then(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 50),
    "endless interim answers": again(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "a slow drip": then(b"HTTP/1.1 200 OK\r\n", b"x", 0.1),
    "a wrong chunk": once(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"),
    "500": once(b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\n\xff\xfe\x00\x80"),
    "a redirect to itself": once(b"HTTP/1.1 307 There\r\nLocation: /v1/metrics\r\nContent-Length: 0\r\n\r\n"),
    "HTTP/9": once(b"HTTP/9.9 999999 \x00\r\n\r\n"),
}


@pytest.mark.parametrize(
    ("exporter", "end"),
    [
        pytest.param(exporter, end, id=f"{exporter.__name__}, {end or 'no finish'}")
        for exporter in (closed_port, black_hole, full_backlog)
        for end in ("finish", "")
    ],
)
def test_an_exporter_that_cannot_be_reached_changes_nothing(
    plain: Trained, exporter: Callable[[], AbstractContextManager[str]], end: str
) -> None:
    with exporter() as url:
        unchanged(plain, end, FLOPWATCH_ENDPOINT=url)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_exporter_that_answers_garbage_changes_nothing(plain: Trained, answer: str) -> None:
    with answering(ANSWERS[answer]) as url:
        unchanged(plain, "finish", FLOPWATCH_ENDPOINT=url)


# Faults of the machine. A sitecustomize module, which Python loads at its start, causes them.

DNS_HANGS = """
import socket, time
def hang(*_, **__):
    time.sleep(3600)
socket.getaddrinfo = socket.gethostbyname = socket.getfqdn = hang
"""
CLOCKS_JUMP = """
import itertools, time
unix, jumps = time.time, itertools.cycle((0, 3600, -3600, 1e9, 0.5, -unix(), 2.0**60))
time.time = lambda: unix() + next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)
"""
# No Linux does that: "monotonic" is not allowed to fall.
EVERY_CLOCK_JUMPS = (
    CLOCKS_JUMP
    + """
steady, leaps = time.monotonic, itertools.cycle((0, 3600, -3600, float("nan"), 0.5, float("inf")))
time.monotonic = lambda: steady() + next(leaps)
"""
)
DISK_IS_FULL = """
import builtins, errno, io, os, pathlib, tempfile
def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")
real = io.open
def open_(file, mode="r", *rest, **named):
    return full() if set(mode) & set("wax+") else real(file, mode, *rest, **named)
builtins.open = io.open = pathlib.io.open = open_
os.mkdir = os.makedirs = os.replace = os.rename = tempfile.mkstemp = tempfile.mkdtemp = full
"""
NO_MORE_THREADS = """
import threading
def refuse(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
"""
NOTHING_CAN_BE_READ = """
import io, pathlib, socket
real = io.open
def refuse(*_, **__):
    raise PermissionError(13, "Permission denied")
def open_(file, *rest, **named):
    return refuse() if str(file).startswith(("/proc", "/sys", "/run", "/etc")) else real(file, *rest, **named)
import builtins
builtins.open = io.open = pathlib.io.open = open_
socket.gethostname = refuse
"""


@pytest.mark.parametrize(
    ("broken", "endpoint"),
    [
        pytest.param(DNS_HANGS, "http://exporter.example:4318", id="DNS hangs"),
        pytest.param(CLOCKS_JUMP, "", id="the wall clock jumps"),
        pytest.param(EVERY_CLOCK_JUMPS, "", id="every clock jumps"),
        pytest.param(DISK_IS_FULL, "", id="disk full"),
        pytest.param(NO_MORE_THREADS, "", id="no more threads"),
        pytest.param(NOTHING_CAN_BE_READ, "", id="nothing can be read"),
    ],
)
def test_a_broken_machine_changes_nothing(plain: Trained, tmp_path: Path, broken: str, endpoint: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(broken)
    with HookServer() as server:
        for end in ("finish", ""):
            unchanged(plain, end, FLOPWATCH_ENDPOINT=endpoint or server.url, PYTHONPATH=f"{tmp_path}:{ROOT}/exporter")


SAMPLED = """
import sys
frames = sys._current_frames
def looked_at():
    if sys._getframe(1).f_code.co_name == "samples":
        open({marker!r}, "w").close()
    return {found}
sys._current_frames = looked_at
"""


@pytest.mark.parametrize("end", ["finish", ""])
@pytest.mark.parametrize("found", ["frames()", "1 / 0"], ids=["they work", "they fail"])
def test_samples_for_an_exporter_that_always_requests_stacks_change_nothing(
    plain: Trained, tmp_path: Path, found: str, end: str
) -> None:
    marker = tmp_path / "sampled"
    (tmp_path / "sitecustomize.py").write_text(SAMPLED.format(marker=str(marker), found=found))
    answer = ExportMetricsServiceResponse()
    answer.partial_success.error_message = SEND_STACKS
    path = f"{tmp_path}:{ROOT}/exporter"
    with HookServer(answer=answer.SerializeToString()) as server:
        # Next to heavy work, a job this short may otherwise end before its third push, which has the first samples.
        unchanged(plain, end, FLOPWATCH_ENDPOINT=server.url, PYTHONPATH=path, AWAITED=str(marker))
    assert server.pushes[-1].samples["training_steps_total"] == 400


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff\xfe\x00", b"two\nlines", b"x" * 1_000_000],
    ids=["a folder", "empty", "no text", "two lines", "a megabyte"],
)
def test_an_invalid_token_file_changes_nothing(plain: Trained, tmp_path: Path, content: bytes | None) -> None:
    token = tmp_path / "token"
    if content is None:
        token.mkdir()
    else:
        token.write_bytes(content)
    with HookServer() as server:
        unchanged(plain, "finish", FLOPWATCH_ENDPOINT=server.url, FLOPWATCH_TOKEN_FILE=str(token))


def test_a_full_disk_under_the_log_changes_nothing(plain: Trained) -> None:
    with closed_port() as url:
        unchanged(plain, "finish", FLOPWATCH_ENDPOINT=url, stderr="/dev/full", TMPDIR="/dev/full", HOME="/dev/full")


@pytest.mark.parametrize("disabled", [True, False])
def test_no_variable_changes_anything(plain: Trained, disabled: bool) -> None:
    variables = {name: value for name, value in HOSTILE.items() if disabled or name != "OTEL_SDK_DISABLED"}
    with HookServer() as server:
        unchanged(plain, "finish", healthy=False, FLOPWATCH_ENDPOINT=server.url, **variables)
    assert server.pushes[-1].samples["training_steps_total"] == 400


@pytest.mark.parametrize(
    "variables",
    [
        {"FLOPWATCH_ENDPOINT": "gopher://[::1"},
        {"FLOPWATCH_PUSH_INTERVAL": "nan"},
        {"FLOPWATCH_PUSH_INTERVAL": "inf"},
        {"FLOPWATCH_PUSH_INTERVAL": "-1"},
        {"FLOPWATCH_HEADERS": "a=b%0d%0aHost: evil"},
        {"FLOPWATCH_HEADERS": "ü=ü"},
        {"FLOPWATCH_SUBMITTED_AT": "nan"},
        {"FLOPWATCH_RUN": "\n" * 500},
        {"RANK": "one", "WORLD_SIZE": "-2"},
        {"SLURM_PROCID": "x", "SLURM_JOB_ID": "y", "SLURM_NTASKS": "0"},
        {"FLOPWATCH_ENDPOINT": "http://127.0.0.1:99999"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_change_nothing(plain: Trained, variables: dict[str, str]) -> None:
    with closed_port() as url:
        unchanged(plain, "finish", healthy=False, **{"FLOPWATCH_ENDPOINT": url} | variables)


# Faults inside the hook.


@pytest.mark.parametrize(
    ("job", "some"),
    [
        pytest.param(
            "plain",
            {
                "totals.Totals.step",
                "run.Run.finish",
                "process.launcher.launch",
                "push.pusher.Pusher._push",
                "timeline.Timeline._resume",
                "push.otlp.Wire.send",
            },
            id="plain",
        ),
        pytest.param(
            "torch",
            {"totals.Totals.waited", "run.Run.watch", "torch.waits._watch", "push.otlp.Wire.encode"},
            id="torch",
            marks=pytest.mark.torch,
        ),
    ],
)
def test_no_function_of_the_hook_that_raises_is_felt_by_the_job(job: str, some: set[str]) -> None:
    with answering(once(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as url:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.hook_internals", job],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": f"{ROOT}/exporter", "FLOPWATCH_ENDPOINT": url, "OMP_NUM_THREADS": "1"},
        )
    own = [line for line in done.stderr.splitlines() if "non-finite value" not in line]
    assert done.returncode == 0, "\n".join(own[-40:])
    output = json.loads(done.stdout)
    assert output["felt"] == []
    assert some <= set(output["tried"])
