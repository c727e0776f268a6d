"""Test the diagnosis of a hang: the collective each rank has reached, and the stacks of its threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flopwatch.training.process import stacks
from tests.support import ROOT, ranks
from tests.support.hook_server import HookServer, Push
from tests.support.machine import PATIENCE, until

HANGING = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from flopwatch.training import Run

def stuck_in_the_loader():
    time.sleep(3600)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
run = Run("hangs", model=model, push_interval=0.1)
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        stuck_in_the_loader()
    model(torch.ones(1, 4)).sum().backward()
    run.step()
"""


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HookServer, list[subprocess.Popen[str]]]]:
    """Two ranks and the server that they push to. One of the ranks never reaches the fourth all-reduce."""
    temporary = str(tmp_path_factory.mktemp("tmp"))
    with HookServer() as server:
        processes = ranks.start(
            ["-c", HANGING], 2, FLOPWATCH_ENDPOINT=server.url, FLOPWATCH_DISABLE="0", TMPDIR=temporary
        )
        try:
            yield server, processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


STARTED = "training_collective_sequence_number"


def hang(server: HookServer) -> list[float]:
    """Wait until one rank waits and the other is stuck. Return how many collectives each of them has started."""

    def pushes_of(rank: int) -> list[Push]:
        return [
            push
            for push in list(server.pushes)
            if push.resource["flopwatch.rank"] == rank
            and push.samples.get("training_steps_total") == 3
            and STARTED in push.samples
        ]

    # The first such push may have read the collectives before the third step.
    until(lambda: len(pushes_of(1)) >= 3)
    stuck = pushes_of(1)[-1].samples[STARTED]
    server.wait_for(lambda push: push.resource["flopwatch.rank"] == 0 and push.samples.get(STARTED) == stuck + 1)
    return [stuck + 1, stuck]


def run_stacks(pid: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `flopwatch stacks` for a process and return the result."""
    return subprocess.run(
        [sys.executable, "-m", "flopwatch", "stacks", str(pid), *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "exporter")},
        timeout=PATIENCE,
    )


def main_thread(output: str) -> str:
    """Return the stack of the main thread."""
    (stack,) = (thread for thread in f"{output}\n".split("\nthread ") if thread.startswith("MainThread"))
    return stack.rstrip("\n") + "\n"


@pytest.mark.long
@pytest.mark.torch
def test_the_rank_that_hangs_has_started_the_fewest_collectives(
    hanging: tuple[HookServer, list[subprocess.Popen[str]]],
) -> None:
    server, _ = hanging
    waiting, stuck = hang(server)
    seen = len(server.pushes)
    server.wait_for(lambda _: {push.resource["flopwatch.rank"] for push in server.pushes[seen:]} == {0, 1})
    # The numbers stay the same.
    assert {(push.resource["flopwatch.rank"], push.samples[STARTED]) for push in server.pushes[seen:]} == {
        (0, waiting),
        (1, stuck),
    }


@pytest.mark.torch
def test_the_stacks_of_a_blocked_rank_are_written(hanging: tuple[HookServer, list[subprocess.Popen[str]]]) -> None:
    server, processes = hanging
    hang(server)
    waiting, stuck = (run_stacks(process.pid) for process in processes)
    assert (waiting.returncode, stuck.returncode) == (0, 0), waiting.stderr + stuck.stderr
    assert stuck.stdout.startswith("run hangs attempt ")
    assert main_thread(stuck.stdout).endswith("in stuck_in_the_loader\n")
    assert "in backward" in main_thread(waiting.stdout)  # DDP's reducer waits in backward's last callback
    # A process can be asked again, and keeps running.
    again = json.loads(run_stacks(processes[1].pid, "--json").stdout)
    assert (again["pid"], again["process"]) == (processes[1].pid, stuck.stdout.splitlines()[0])
    assert [len(thread["frames"]) > 0 for thread in again["threads"]] == [True] * stuck.stdout.count("\nthread ")
    (main,) = (thread for thread in again["threads"] if thread["thread"].startswith("thread MainThread ("))
    assert main["frames"][-1].endswith("in stuck_in_the_loader")
    assert [process.poll() for process in processes] == [None, None]


def test_a_process_without_a_hook_does_not_answer(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        time.sleep(0.1)
        answer = run_stacks(sleeper.pid, "--wait", "0.3")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert list(tmp_path.glob("*/*")) == []


def test_a_process_that_is_not_there_cannot_be_asked() -> None:
    answer = run_stacks(2**22 + 1)
    assert answer.returncode == 1
    assert answer.stderr == f"flopwatch: there is no process {2**22 + 1} here; give its number in this container\n"


def test_a_request_is_answered_once(tmp_path: Path) -> None:
    environ = {"FLOPWATCH_STACK_DIR": str(tmp_path)}
    answering = stacks.Stacks(lambda: "rank 7", environ)
    answering.poll()
    assert list(tmp_path.iterdir()) == []
    place, pid = stacks.folder(environ, os.geteuid()), os.getpid()
    asking, answer = stacks._files(place, pid)
    asking.touch()
    answering.poll()
    assert answer.read_text().startswith("rank 7\n\nthread ")
    assert answer.stat().st_mode & 0o777 == 0o600
    answer.unlink()
    answering.poll()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    place = stacks.folder(environ, os.geteuid())
    place.mkdir()
    place.chmod(0o777)
    stacks._files(place, os.getpid())[0].touch()
    with pytest.raises(PermissionError):
        stacks.Stacks(lambda: "", environ).poll()
    with pytest.raises(PermissionError):
        stacks.request(os.getpid(), 1, environ=environ, user=os.geteuid())
    assert [path.suffix for path in place.iterdir()] == [".request"]


def test_an_answer_does_not_follow_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    environ = {"FLOPWATCH_STACK_DIR": str(tmp_path)}
    asking, answer = stacks._files(tmp_path, os.getpid())
    asking.symlink_to(target)
    answer.with_suffix(".tmp").symlink_to(target)
    answer.symlink_to(target)
    stacks.Stacks(lambda: "rank 7", environ).poll()
    assert target.read_text() == "precious"
    assert answer.read_text().startswith("rank 7\n")
