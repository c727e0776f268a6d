"""Real hangs of real jobs. Each job has four gloo ranks, one stops, and the page names it.

All jobs run side by side on one node with its exporter, under a real Prometheus and Alertmanager and the shipped rules
at a faster pace. Two more jobs must not be called hanging: one that saves a checkpoint all the while, and one that is
well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from demo.receiver import Message
from demo.stack import DemoStack
from flopwatch import catalogue as c
from tests.support import TESTS
from tests.support.machine import until

pytestmark = [pytest.mark.long, pytest.mark.paired, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(1000)]

SCRIPT = TESTS / "scripts" / "hangs.py"
PACE = 15.0
SUSPECT = 2
# Text of the page about the suspect, by the kind of its fault. A silent rank is named after 50 s, and at this pace
# its page is sent before.
KINDS = {
    "stopped": f"Rank {SUSPECT} on {{host}} is stopped, or stuck in the kernel",
    "endless_loop": f"Rank {SUSPECT} on {{host}} is missing in the collective",
    "skipped_collective": f"Rank {SUSPECT} on {{host}} is missing in the collective",
    "blocked_loader": f"Rank {SUSPECT} on {{host}} is waiting for the next batch",
    "gil_held": "Run gil_held has finished no step for ",
    "killed": f"Rank {SUSPECT} on {{host}} is gone",
}
FINE = ("saving", "healthy")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoStack]:
    with DemoStack(tmp_path_factory.mktemp("hangs"), pace=PACE, train=None) as running:
        assert running.servers.alertmanager, f"no Alertmanager here: {running.servers.why}"
        yield running


@pytest.fixture(scope="module")
def jobs(stack: DemoStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run all jobs until the tests are over."""
    folder = tmp_path_factory.mktemp("jobs")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))}
    environ |= {
        "PYTHONPATH": str(SCRIPT.parents[2] / "exporter"),
        "FLOPWATCH_PUSH_INTERVAL": "1",
        "FLOPWATCH_ENDPOINT": f"http://{stack.otlp_address}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *KINDS, *FINE],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def hanging(stack: DemoStack, run: str) -> list[Message]:
    return [
        message
        for message in stack.receiver.of("slack")
        if "TrainingHang" in str(message.payload) and f"Run {run} " in str(message.payload)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_is_notified_and_the_missing_rank_is_named(kind: str, stack: DemoStack, jobs: None) -> None:
    deadline = time.monotonic() + 800  # a minute or two, where the machine has nothing else to do
    while not hanging(stack, kind):
        assert time.monotonic() < deadline, f"no page of {kind}: {[str(m.payload) for m in stack.receiver.of('slack')]}"
        stack.check()
        time.sleep(0.2)
    # As of the last minutes, because the other ranks of a killed one end, too.
    host = stack.prometheus.query(f'last_over_time({c.TRAINING_RANK_INFO}{{run="{kind}",rank="0"}}[10m])')[0][0]["host"]
    assert KINDS[kind].format(host=host) in str(hanging(stack, kind)[0].payload)
    assert not any(f"Rank {rank} on" in str(hanging(stack, kind)[0].payload) for rank in range(4) if rank != SUSPECT)


def test_a_silent_rank_is_named_at_last(stack: DemoStack, jobs: None) -> None:
    silent = f'{c.RUN_HANG_SUSPECT_RATIO}{{run="gil_held",signs=~"silent.*"}}'
    until(lambda: [labels["rank"] for labels, _ in stack.prometheus.query(silent)] == [str(SUSPECT)], 300)


def test_the_stack_line_of_a_rank_and_a_stopped_process_are_reported(stack: DemoStack, jobs: None) -> None:
    looping = f'{c.TRAINING_STUCK_FRAME_INFO}{{run="endless_loop",rank="{SUSPECT}"}}'
    waiting = f'{c.TRAINING_STUCK_FRAME_INFO}{{run="endless_loop",rank!="{SUSPECT}"}}'
    stopped = f'{c.RUN_HANG_SUSPECT_RATIO}{{run="stopped",signs=~"blocked.*"}}'
    found: list[list[dict[str, str]]] = []

    def shown() -> bool:
        """Look for all three at once, because a series is absent while another line is sampled."""
        stack.check()
        time.sleep(0.2)
        found[:] = [[labels for labels, _ in stack.prometheus.query(expr)] for expr in (looping, waiting, stopped)]
        return bool(found[0]) and len(found[1]) == 3 and bool(found[2])

    until(shown, 300)  # a hang of 15 s shows the line, one of 2 s the state
    assert {labels["at"].split(":")[0].split()[0] for labels in found[0]} == {"hangs.py"}
    assert all(labels["at"].endswith(" in misbehave") for labels in found[0])
    lines = {labels["at"] for labels in found[1]}
    assert len(lines) == 1
    assert lines.pop().endswith(" in train")
    assert [labels["rank"] for labels in found[2]] == [str(SUSPECT)]


@pytest.mark.parametrize("kind", FINE)
def test_a_job_that_saves_or_is_well_is_not_called_hanging(kind: str, stack: DemoStack, jobs: None) -> None:
    rank = f'run="{kind}",rank="0"'

    def saving(kind: str) -> float:
        """Return for how many seconds a job has been saving, by what Prometheus has."""
        of = f'run="{kind}",rank="0",activity="checkpoint_save"'
        return stack.prometheus.value(f"{c.TRAINING_ACTIVITY_SECONDS_TOTAL}{{{of}}}") or 0.0

    # Both states have lasted longer than a hang does before its alert, and the earlier steps are out of the window.
    until(lambda: saving("saving") > 14)
    assert (saving(kind) > 0) == (kind == "saving")
    steps = stack.prometheus.value(f"increase({c.TRAINING_STEPS_TOTAL}{{{rank}}}[8s])")
    assert steps is not None
    assert (steps > 0) == (kind == "healthy")
    assert hanging(stack, kind) == []
