"""Test that the hook and its surroundings do not affect each other: imports, environment, forks, signals, exits."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.environment import HOSTILE
from tests.support.hook_server import HookServer, python
from tests.support.machine import shortest

LOOP = """
from flopwatch.training import Run
run = Run("llama", flops_per_token=10, peak_flops=1e12, push_interval=0.1)
for batch in run.batches(range(3)):
    run.step(tokens=64)
"""


@pytest.fixture
def server() -> Iterator[HookServer]:
    with HookServer() as running:
        yield running


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Yield the URL of a socket that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_importing_the_hook_imports_nothing_that_serves_measures_or_trains() -> None:
    answer = python("import sys, flopwatch.training; print(*sys.modules, sep='\\n')")
    heavy = {"fastapi", "uvicorn", "starlette", "pydantic", "pynvml", "prometheus_client", "torch", "numpy", "sqlite3"}
    assert answer.returncode == 0
    assert not heavy & set(answer.stdout.split())


def test_pushing_does_not_import_them_either(server: HookServer) -> None:
    answer = python(LOOP + "run.finish(); import sys; print(*sys.modules, sep='\\n')", FLOPWATCH_ENDPOINT=server.url)
    assert not {"fastapi", "uvicorn", "pynvml", "prometheus_client", "torch", "numpy"} & set(answer.stdout.split())
    assert server.pushes[-1].samples["training_steps_total"] == 3


# A disabled SDK would hide the effect of the other variables on an enabled one.
@pytest.mark.parametrize(
    "variables",
    [HOSTILE, {k: v for k, v in HOSTILE.items() if k != "OTEL_SDK_DISABLED"}],
    ids=["all", "all but OTEL_SDK_DISABLED"],
)
def test_no_variable_of_opentelemetry_and_no_proxy_has_an_effect(server: HookServer, variables: dict[str, str]) -> None:
    for environ in ({}, variables):
        answer = python(
            LOOP.replace('"llama"', '"llama", attempt="1"') + "run.finish()", FLOPWATCH_ENDPOINT=server.url, **environ
        )
        assert answer.returncode == 0
    plain, hostile = [push for push in server.pushes if "flopwatch.status" in push.resource]
    assert "hostile" not in hostile.body.decode(errors="replace")
    assert set(hostile.samples) == set(plain.samples)
    assert list(hostile.resource) == list(plain.resource)
    # No exemplars, no scope or family of the SDK's own, no delta temporality, unchanged headers.
    assert len(hostile.body) == pytest.approx(len(plain.body), abs=20)
    assert hostile.headers == {**plain.headers, "Content-Length": hostile.headers["Content-Length"]}
    for name in ("training_steps_total", "training_tokens_total", "training_model_flops_total"):
        assert hostile.samples[name] == plain.samples[name] > 0
    # The same metrics, of the same types and temporality.
    kinds = [
        {
            (metric.name, metric.WhichOneof("data"), metric.sum.aggregation_temporality)
            for metric in push.request.resource_metrics[0].scope_metrics[0].metrics
        }
        for push in (plain, hostile)
    ]
    assert kinds[0] == kinds[1]


def test_the_users_own_opentelemetry_signals_and_logging_are_left_as_they_were(server: HookServer) -> None:
    answer = python(
        """
import logging, signal, sys
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
loggers = logging.getLogger().handlers, logging.getLogger().level
"""
        + LOOP
        + """
run.finish()
assert not {"opentelemetry.sdk", "opentelemetry.metrics", "opentelemetry.trace"} & set(sys.modules)
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert loggers == (logging.getLogger().handlers, logging.getLogger().level)
""",
        FLOPWATCH_ENDPOINT=server.url,
    )
    assert answer.returncode == 0, answer.stderr


def test_a_broken_protobuf_costs_the_metrics_and_not_the_training(server: HookServer) -> None:
    answer = python(
        LOOP + "run.finish(); print('trained')",
        FLOPWATCH_ENDPOINT=server.url,
        PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="broken",
    )
    assert (answer.returncode, answer.stdout) == (0, "trained\n")
    assert server.pushes == []


def test_a_forked_child_pushes_nothing(server: HookServer) -> None:
    answer = python(
        LOOP
        + """
import os, sys, time
time.sleep(0.3)
if (child := os.fork()) == 0:
    run.step(tokens=1_000_000)
    time.sleep(0.5)
    run.finish("failed")
    sys.exit()  # through atexit, other than multiprocessing's children
os.waitpid(child, 0)
print(os.getpid())
run.finish()
""",
        FLOPWATCH_ENDPOINT=server.url,
    )
    assert {push.resource["flopwatch.pid"] for push in server.pushes} == {int(answer.stdout)}
    assert [push.resource.get("flopwatch.status") for push in server.pushes if "flopwatch.status" in push.resource] == [
        "completed"
    ]
    assert all(push.samples["training_tokens_total"] <= 192 for push in server.pushes)


@pytest.mark.long
@pytest.mark.torch
def test_dataloader_workers_push_nothing(server: HookServer) -> None:
    answer = python(
        """
import os
from torch.utils.data import DataLoader
from flopwatch.training import Run
run = Run("llama", push_interval=0.1)
for epoch in range(2):
    for batch in run.batches(DataLoader(range(8), num_workers=2, multiprocessing_context="fork")):
        run.step(tokens=1)
print(os.getpid())
run.finish()
""",
        FLOPWATCH_ENDPOINT=server.url,
    )
    assert answer.returncode == 0, answer.stderr
    assert {push.resource["flopwatch.pid"] for push in server.pushes} == {int(answer.stdout)}
    assert server.pushes[-1].samples["training_steps_total"] == 16


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("run.finish()", "completed"),
        ("run.finish('preempted'); raise RuntimeError", "preempted"),
        ("raise RuntimeError", "failed"),
        ("raise KeyboardInterrupt", "stopped"),
        ("", "failed"),
        ("import sys; sys.exit(1)", "failed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", None),
        ("import os; os._exit(0)", None),
    ],
)
def test_how_a_process_ends_is_its_last_word(server: HookServer, end: str, status: str | None) -> None:
    python(LOOP + f"import time; time.sleep(0.05)\n{end}", FLOPWATCH_ENDPOINT=server.url)
    statuses = [push.resource["flopwatch.status"] for push in server.pushes if "flopwatch.status" in push.resource]
    assert statuses == ([] if status is None else [status])
    if status is not None:
        assert server.pushes[-1].samples["training_steps_total"] == 3


@pytest.mark.parametrize("end", ["run.finish()", ""])
def test_an_exporter_that_never_answers_delays_the_exit_by_at_most_two_and_a_half_seconds(
    black_hole: str, end: str
) -> None:
    def delay() -> float:
        # 1 s later, so that a push is already hanging.
        code = LOOP + f"import time; time.sleep(1); print(time.monotonic(), flush=True)\n{end}"
        answer = python(code, FLOPWATCH_ENDPOINT=black_hole)
        ended = time.monotonic()
        assert answer.returncode == 0
        return ended - float(answer.stdout)

    assert 1.0 < shortest(delay, 2.5) < 2.5


def test_a_step_does_not_wait_for_an_exporter_that_never_answers(black_hole: str) -> None:
    # A push hangs for 2 s and the next one begins 0.1 s later, so one is hanging in each of these seconds.
    answer = python(
        LOOP
        + """
import time
for second in range(4):
    began, slowest = time.monotonic(), 0.0
    while time.monotonic() - began < 1.0:
        before = time.monotonic()
        run.step(tokens=64)
        slowest = max(slowest, time.monotonic() - before)
        time.sleep(0.001)
    print(slowest)
    if slowest < 0.5:
        break  # else it was the push, or a stall of the machine
run.finish()
""",
        FLOPWATCH_ENDPOINT=black_hole,
    )
    assert min(map(float, answer.stdout.split())) < 0.5  # far below the 2 s of a push


def test_without_an_exporter_training_goes_on_and_ends_at_once() -> None:
    def delay() -> float:
        answer = python(LOOP + "import time; print(time.monotonic())", FLOPWATCH_ENDPOINT="http://127.0.0.1:9")
        ended = time.monotonic()
        assert answer.returncode == 0
        assert answer.stderr.count("\n") == 1  # one line, not one per push
        return ended - float(answer.stdout)

    assert shortest(delay, 1.5) < 1.5
