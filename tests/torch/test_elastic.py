"""Test elastic jobs and preempted jobs, as node exporters and the ledger record them.

Torchrun, signals and Slurm's variables are real. Pushes pass through an exporter's telemetry and forwarding thread to
one ledger for two nodes. The scripts' own logs are the ground truth for the figures.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.ledger.store import Store
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.ledger_client import Embedded, Forward, Outcomes
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from flopwatch.training import Run
from flopwatch.training.push import pusher
from tests.support import ROOT
from tests.support.hook_server import HookServer, Push, python
from tests.support.machine import PATIENCE, reserved_port, shortest, until
from tests.support.training_host import outcomes

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(600)]

ELASTIC = ROOT / "tests" / "scripts" / "elastic.py"
LEAVING = ROOT / "tests" / "scripts" / "elastic_leaving.py"
FLOPS_PER_TOKEN = 6 * 8 * 8  # of elastic.py
ACTIVITY = "training_activity_seconds_total"
ENVIRON = {
    **{
        key: text
        for key, text in os.environ.items()
        if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_", "SLURM_", "OTEL_"))
    },
    "PYTHONPATH": str(ROOT / "exporter"),
    "OMP_NUM_THREADS": "1",
    "FLOPWATCH_PUSH_INTERVAL": "0.2",
}


class Node:
    """Exporter of one node: pushes to its own port go to its telemetry and on to the ledger."""

    def __init__(self, host: str, ledger: Store) -> None:
        self.host = host
        self.server = HookServer()
        self.registry = Registry()
        self.telemetry = Telemetry(ExporterSettings(host=host, rank_timeout=300), self.registry)
        self.served_twice: list[Any] = []  # series
        self._forward = Forward(self.telemetry, Embedded(ledger, Outcomes(self.registry)), tick=0.1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Node:
        self.server.__enter__()
        self._forward.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._forward.stop()
        self.server.__exit__()

    def _listen(self) -> None:
        received = 0
        while not self._stopping.is_set() or received < len(self.server.pushes):
            for push in self.server.pushes[received:]:
                received += 1
                self.telemetry.receive(push.request)
                series = Counter((row.name, labels) for row, labels, _ in self.telemetry.ask(1).samples)
                self.served_twice += [one for one, times in series.items() if times > 1]
            time.sleep(0.01)

    def counted(self) -> dict[str, float]:
        """Return the number of pushes by outcome."""
        return outcomes(self.registry)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Node, Node, Store]]:
    """Yield two nodes and their ledger."""
    with closing(Store(folder / "ledger.db")) as ledger, Node("node-a", ledger) as a, Node("node-b", ledger) as b:
        yield a, b, ledger


def figures(ledger: Store, run: str) -> dict[str, Any]:
    """Return a run's current figures. Check that its buckets and its open seconds add up to its wall clock."""
    run_figures: dict[str, Any] = ledger.summary(time.time())["runs"][run]
    assert bucket_seconds(run_figures) + run_figures["open_seconds"] == pytest.approx(
        run_figures["wall_seconds"], rel=1e-3
    )
    return run_figures


def state(ledger: Store, run: str) -> object:
    """Return the state of a run, None before the ledger has received a record of it."""
    return ledger.summary(time.time())["runs"].get(run, {}).get("state")


def wait_for_state(ledger: Store, run: str, wanted: str) -> None:
    """Wait until a run is in this state."""
    until(lambda: state(ledger, run) == wanted)


def bucket_seconds(figures: dict[str, Any]) -> float:
    """Return the seconds in all buckets except queue."""
    return float(sum(seconds for bucket, seconds in figures["buckets"].items() if bucket != "queue"))


def start(command: list[str | Path], **environ: str) -> subprocess.Popen[bytes]:
    """Start Python with this command line, in a session of its own as on a node of its own."""
    return subprocess.Popen(
        [sys.executable, *command],
        env={**ENVIRON, **environ},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def kill(folder: Path, pids: Iterable[int]) -> None:
    """Kill these processes and their sessions. Skip a pid whose command line does not contain the folder."""
    for pid in pids:
        with suppress(OSError):
            if str(folder) in Path(f"/proc/{pid}/cmdline").read_text():
                os.killpg(pid, signal.SIGKILL)


# Changing size.


@dataclass
class Process:
    """Log that a process of elastic.py wrote about itself."""

    pid: int
    rank: int
    world_size: int
    host: str
    started: float  # Unix time
    restored: int
    tokens: list[int]  # of each step
    drafts: list[int]  # steps of checkpoints that were written
    saved: list[int]  # steps of those that have replaced the last one
    ended: float | None  # set if it ended in order, as Unix time

    @property
    def step(self) -> int:
        """Return its last step."""
        return self.restored + len(self.tokens)


def processes(folder: Path) -> list[Process]:
    """Return all processes that have logged anything, in order of their start."""
    logged = []
    for path in (folder / "log").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            steps = [line for line in lines if "step" in line]
            assert [line["step"] for line in steps] == [lines[0]["restored"] + 1 + n for n in range(len(steps))]
            logged.append(
                Process(
                    int(path.name),
                    **lines[0],
                    tokens=[line["tokens"] for line in steps],
                    drafts=[line["draft"] for line in lines if "draft" in line],
                    saved=[line["saved"] for line in lines if "saved" in line],
                    ended=lines[-1].get("ended"),
                )
            )
    return sorted(logged, key=lambda process: process.started)


def agent(node: Node, address: str, port: int, folder: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start an imported torchrun for two ranks of a node. It waits for a line on stdin."""
    first = node.host == "node-a"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import torch.distributed.run as torchrun; print(flush=True); input(); torchrun.main()",
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "3",
            "--monitor-interval",
            "0.1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "elastic",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-conf",
            f"is_host={first},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5",
            "--local-addr",
            address,
            ELASTIC,
            folder,
        ],
        # With a store that outlives a round torchrun does not grow, and its ranks may connect to dead ones:
        # https://github.com/pytorch/pytorch/issues/135712
        env={
            **ENVIRON,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "FLOPWATCH_HOST": node.host,
            "FLOPWATCH_ENDPOINT": node.server.url,
            **environ,
        },
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def begin(process: subprocess.Popen[bytes]) -> None:
    """Make an agent start its ranks."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


@dataclass
class History:
    """Finished elastic job: its own logs, and what exporters and ledger recorded of it."""

    attempts: list[list[Process]]  # by rank
    pushes: dict[int, list[Push]]  # of each process
    figures: list[dict[str, Any]]  # the ledger's, twice in each attempt and at the end
    held: list[float]  # GPUs in each attempt, by the ledger
    counted: list[dict[str, float]]  # pushes by outcome, of each node
    served_twice: list[Any]
    refused: tuple[int, str]  # answer to a push of an earlier process, sent again at the end

    def last(self, process: Process) -> Push:
        """Return the last push of a process."""
        return self.pushes[process.pid][-1]

    def status(self, process: Process) -> object:
        """Return the status in a process's last push, None if it has none."""
        return self.last(process).resource.get("flopwatch.status")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Run a job whose size changes: 4 ranks, 2 as a node is preempted, 4 as one joins, 2 as that one dies."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "log").mkdir()
    pids: list[set[int]] = []  # of each attempt
    held: list[float] = []
    snapshots: list[dict[str, Any]] = []
    agents: list[subprocess.Popen[bytes]] = []
    with cluster(folder) as (a, b, ledger), reserved_port() as port:

        def trains(world_size: int) -> bool:
            """Return whether an attempt of that size has made some steps, and with them a checkpoint."""
            new = [process for process in processes(folder) if process.pid not in set().union(*pids)]
            if len(new) < world_size or min(len(process.tokens) for process in new) < 6:
                return False
            assert {process.world_size for process in new} == {world_size}
            pids.append({process.pid for process in new})
            return True

        def gpus() -> float:
            *_, samples = ledger.families(time.time())
            return sum(float(value) for row, _, value in samples if row is m.RUN_GPUS)

        def wait_for(world_size: int) -> None:
            until(lambda: trains(world_size))
            until(lambda: gpus() == world_size)
            held.append(gpus())
            snapshots.append(figures(ledger, "elastic"))
            until(lambda: bucket_seconds(figures(ledger, "elastic")) > bucket_seconds(snapshots[-1]) + 0.3)
            snapshots.append(figures(ledger, "elastic"))

        try:
            # The addresses order the nodes. With two nodes, rank 0 is on the one that leaves and joins.
            agents = [agent(a, "127.0.0.2", port, folder, ELASTIC_TELLS="1"), agent(b, "127.0.0.1", port, folder)]
            for one in agents:
                begin(one)
            wait_for(4)
            agents[1].terminate()
            agents.append(agent(b, "127.0.0.1", port, folder))
            wait_for(2)
            begin(agents[2])
            wait_for(4)
            kill(folder, [agents[2].pid, *(process.pid for process in processes(folder) if process.host == b.host)])
            wait_for(2)
            (folder / "stop").touch()
            assert agents[0].wait(PATIENCE) == 0
        finally:
            (folder / "stop").touch()  # for ranks without a push so far
            kill(folder, [one.pid for one in agents] + [process.pid for process in processes(folder)])
            for one in agents:
                one.communicate()
        wait_for_state(ledger, "elastic", "completed")
        snapshots.append(figures(ledger, "elastic"))
        pushes: dict[int, list[Push]] = {}
        for push in (*a.server.pushes, *b.server.pushes):
            pushes.setdefault(int(push.resource["flopwatch.pid"]), []).append(push)
        attempts = [
            sorted(
                (process for process in processes(folder) if process.pid in attempt), key=lambda process: process.rank
            )
            for attempt in pids
        ]
        counted = [a.counted(), b.counted()]
        refused = a.telemetry.receive(pushes[attempts[1][0].pid][-2].request)
    return History(attempts, pushes, snapshots, held, counted, a.served_twice + b.served_twice, refused)


def test_every_resize_is_a_new_attempt_that_all_its_ranks_name_alike(history: History) -> None:
    names = [
        {push.resource["flopwatch.attempt"] for process in attempt for push in history.pushes[process.pid]}
        for attempt in history.attempts
    ]
    assert [len(those) for those in names] == [1, 1, 1, 1]
    assert len(set().union(*names)) == 4
    assert sorted(history.pushes) == sorted(process.pid for attempt in history.attempts for process in attempt)


def test_ranks_report_their_place_in_a_world_of_the_right_size(history: History) -> None:
    places = [[(process.rank, process.host) for process in attempt] for attempt in history.attempts]
    both, alone = [(0, "node-b"), (1, "node-b"), (2, "node-a"), (3, "node-a")], [(0, "node-a"), (1, "node-a")]
    assert places == [both, alone, both, alone]
    for attempt in history.attempts:
        for process in attempt:
            local_rank = process.rank % 2
            for push in history.pushes[process.pid]:
                (info,) = (name for name in push.samples if name.startswith("training_rank_info{"))
                assert {
                    f"host={process.host}",
                    f"uuid=GPU-{process.host}-{local_rank}",
                    f"local_rank={local_rank}",
                    f"attempt={push.resource['flopwatch.attempt']}",
                } <= set(info[19:-1].split(","))
                assert push.resource["flopwatch.rank"] == process.rank
                assert push.samples.get("training_world_size") == (None if process.rank else len(attempt))


def test_every_push_has_what_the_job_had_logged_by_then(history: History) -> None:
    for attempt in history.attempts:
        for process in attempt:
            for push in history.pushes[process.pid]:
                steps = int(push.samples["training_steps_total"])
                tokens = sum(process.tokens[:steps])
                assert steps <= len(process.tokens)
                assert push.samples["training_tokens_total"] == tokens
                assert push.samples["training_model_flops_total"] == tokens * FLOPS_PER_TOKEN
                assert push.samples.get("training_position_steps", process.restored) == process.restored + steps
                assert push.samples.get("training_committed_steps") in (None, *process.saved)
                assert push.samples["training_hook_errors_total"] == 0


def test_the_pushes_of_an_attempts_ranks_add_up_to_the_jobs_log(history: History) -> None:
    for attempt in history.attempts:
        reporting = [process for process in attempt if history.status(process) is not None]
        # A signal may arrive between the line in the job's log and the step.
        missing = sum(
            process.tokens[-1]
            for process in reporting
            if len(process.tokens) > history.last(process).samples["training_steps_total"]
        )
        assert missing == 0 or {history.status(process) for process in reporting} & {"resized"}
        tokens = sum(sum(process.tokens) for process in reporting) - missing
        assert sum(history.last(process).samples["training_tokens_total"] for process in reporting) == tokens
        assert sum(history.last(process).samples["training_model_flops_total"] for process in reporting) == (
            tokens * FLOPS_PER_TOKEN
        )
        for process in attempt:
            if process not in reporting:  # it pushed until shortly before it was killed
                assert history.last(process).samples["training_steps_total"] > 0


def test_every_attempt_goes_on_from_the_checkpoint_without_a_hole(history: History) -> None:
    assert {process.restored for process in history.attempts[0]} == {0}
    for before, after in pairwise(history.attempts):
        (restored,) = {process.restored for process in after}
        saved = max(step for process in before for step in process.saved)
        draft = max(step for process in before for step in process.drafts)
        # A signal may arrive between the replacement of the checkpoint and its line in the job's log.
        assert restored in (saved, draft)
        assert 0 < restored <= max(process.step for process in before)
        for process in after:
            last = history.last(process)
            assert last.resource["flopwatch.restored_step"] == restored
            assert last.samples[f"{ACTIVITY}{{activity=checkpoint_restore}}"] > 0


def test_how_the_processes_of_each_attempt_ended(history: History) -> None:
    left, resized, died, completed = (
        {
            host: {history.status(process) for process in attempt if process.host == host}
            for host in {process.host for process in attempt}
        }
        for attempt in history.attempts
    )
    for ended in (left, died):
        # torchrun's SIGTERM ends these processes at once, without a status. The others fail without them, or torchrun
        # ends the second because the first has failed.
        assert ended["node-b"] == {None}
        assert {"failed"} <= ended["node-a"] <= {"failed", "resized"}
    # torchrun may take so long to notify the second rank that it fails without the first.
    assert {"resized"} <= resized["node-a"] <= {"failed", "resized"}
    assert completed == {"node-a": {"completed"}}


def test_no_exporter_takes_a_push_of_an_earlier_process_nor_serves_a_rank_twice(history: History) -> None:
    assert [set(counted) for counted in history.counted] == [{"accepted"}, {"accepted"}]
    assert sum(counted["accepted"] for counted in history.counted) == sum(map(len, history.pushes.values()))
    assert history.served_twice == []
    points, reason = history.refused
    assert points > 0
    assert reason == "a newer process is rank 0 of run 'elastic'"


def test_the_ledger_follows_a_job_that_changes_its_size(history: History) -> None:
    run, processes = history.figures[-1], [process for attempt in history.attempts for process in attempt]
    assert run["attempts"] == 4
    # A node that left and one that died look alike, because the ranks of neither sent a status.
    worst = min(str(history.status(process)) for process in history.attempts[1])
    assert {end: count for end, count in run["ends"].items() if count} == (
        Counter(failed=2, completed=1) + Counter([worst])
    )
    assert run["high_water_step"] == max(
        history.last(process).samples["training_position_steps"] for process in processes
    )
    assert run["committed_step"] == max(step for process in processes for step in process.saved)
    ended = history.attempts[-1][0].ended
    assert ended is not None
    assert run["wall_seconds"] == pytest.approx(ended - min(process.started for process in processes), abs=0.5)
    assert run["open_seconds"] == 0


def test_the_ledger_counts_the_gpus_that_each_attempt_held(history: History) -> None:
    def grown(before: dict[str, Any], after: dict[str, Any], *buckets: str) -> tuple[float, float]:
        """Return the growth of seconds and GPU seconds, summed over the given buckets or over all."""
        seconds, gpu_seconds = (
            sum(after[name][bucket] - before[name][bucket] for bucket in buckets or after[name])
            for name in ("buckets", "gpu_seconds")
        )
        assert seconds > 0, buckets
        return seconds, gpu_seconds

    sizes, snapshots = [4, 2, 4, 2], history.figures
    assert history.held == sizes
    for number, size in enumerate(sizes):
        seconds, gpu_seconds = grown(snapshots[2 * number], snapshots[2 * number + 1])
        assert gpu_seconds == pytest.approx(size * seconds)
        if number < 3:
            # Until the next attempt starts, its GPUs are held without being used.
            seconds, gpu_seconds = grown(snapshots[2 * number + 1], snapshots[2 * number + 2], "down")
            assert gpu_seconds == pytest.approx(size * seconds)


# Preemption.


def ready(folder: Path, count: int) -> list[int]:
    """Return the pids of `count` scripts once all of them train."""
    until(lambda: len(list(folder.glob("*.ready"))) >= count)
    return [int(path.stem) for path in folder.glob("*.ready")]


@contextmanager
def leaving(folder: Path, words: str, endpoint: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a script that trains and reacts to signals as its words define."""
    before = len(list(folder.glob("*.ready")))
    process = start([LEAVING, folder, words], FLOPWATCH_ENDPOINT=endpoint, **environ)
    try:
        ready(folder, before + 1)
        yield process
    finally:
        kill(folder, [process.pid])
        process.wait()


def last_words(server: HookServer) -> dict[str, Push]:
    """Return the last push of each run."""
    return {str(push.resource["flopwatch.run"]): push for push in server.pushes}


def test_what_ranks_make_of_the_sigterm_that_torchrun_passes_on(tmp_path: Path) -> None:
    words = ("finish", "exit-0", "exit-143", "nothing")
    with cluster(tmp_path) as (node, _, ledger):
        job = start(
            [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local-addr",
                "127.0.0.1",
                "--max-restarts",
                "3",
                "--nproc-per-node",
                "4",
                LEAVING,
                tmp_path,
                ",".join(words),
            ],
            FLOPWATCH_ENDPOINT=node.server.url,
        )
        pids = []
        try:
            pids = ready(tmp_path, len(words))
            job.terminate()
            assert job.wait(PATIENCE) != 0
        finally:
            kill(tmp_path, [job.pid, *pids])
            job.wait()
        until(lambda: node.telemetry.summary() == [])  # the missing status of one rank is noticed, too
        until(lambda: {state(ledger, word) for word in words} == {"queued", "down"})
        last = last_words(node.server)
        # A process that exits without `finish` has failed, whatever its exit status. Only a killed process has no final
        # push.
        assert {word: last[word].resource.get("flopwatch.status") for word in words} == {
            "finish": "preempted",
            "exit-0": "failed",
            "exit-143": "failed",
            "nothing": None,
        }
        for rank, word in enumerate(words):
            push = last[word]
            assert push.resource["flopwatch.rank"] == rank
            saved = tmp_path / f"{word}-{rank}.checkpoint"
            if word == "nothing":
                assert not saved.exists()
            else:
                # The checkpoint of the handler, after the last step.
                assert (
                    push.samples["training_committed_steps"]
                    == push.samples["training_position_steps"]
                    == int(saved.read_text())
                    > 10
                )
            assert push.samples["training_hook_errors_total"] == 0
        ends = {word: figures(ledger, word) for word in words}
        assert {word: run["state"] for word, run in ends.items()} == {
            "finish": "queued",
            "exit-0": "down",
            "exit-143": "down",
            "nothing": "down",
        }
        assert {word: {end for end, times in run["ends"].items() if times} for word, run in ends.items()} == {
            "finish": {"preempted"},
            "exit-0": {"failed"},
            "exit-143": {"failed"},
            "nothing": {"failed"},
        }


def test_a_second_signal_that_ends_the_process_amid_finish_leaves_its_last_word(tmp_path: Path) -> None:
    """Each rank gets the signal twice: from Slurm, which signals all processes of a step, and from torchrun."""
    with HookServer() as server, ExitStack() as stack:
        jobs = [
            stack.enter_context(leaving(tmp_path, "finish", server.url, LEAVE_AGAIN_AFTER=f"{0.00005 * 2**number}"))
            for number in range(6)
        ]
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.wait(PATIENCE)
        last = {push.resource["flopwatch.pid"]: push for push in server.pushes}
    assert {pid: push.resource.get("flopwatch.status") for pid, push in last.items()} == dict.fromkeys(
        (job.pid for job in jobs), "preempted"
    )


def test_an_exit_at_any_instruction_of_the_last_push_leaves_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit while a lock is being acquired must not leave it locked, or the interpreter's shutdown would hang."""
    left, lost = 0, dict[int, object]()

    def exit_in_time(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal left
        if frame.f_globals["__name__"] in (pusher.__name__, "threading", "queue", "contextlib"):
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left < 0:
                sys.settrace(None)
                raise SystemExit
        return exit_in_time

    with HookServer() as server:
        monkeypatch.setenv("FLOPWATCH_ENDPOINT", server.url)
        for instruction in range(10_000):
            run = Run(f"run-{instruction}", flops_per_token=10, peak_flops=1e9, replica_ranks=1)
            pushing, left, before = run._pusher, instruction, sys.gettrace()
            assert pushing is not None
            try:
                sys.settrace(exit_in_time)
                run.finish("preempted")
                break
            except SystemExit:
                atexit.unregister(pushing._at_exit)
                at_exit = threading.Thread(target=pushing._at_exit, daemon=True)
                at_exit.start()
                at_exit.join(10)
            finally:
                sys.settrace(before)
            if (
                at_exit.is_alive()
                or (status := last_words(server)[run.name].resource["flopwatch.status"]) != "preempted"
            ):
                lost[instruction] = "never ends" if at_exit.is_alive() else status
    assert not lost
    assert 40 < instruction < 10_000


def test_a_second_signal_amid_finish_does_not_keep_the_last_word_from_an_exporter_that_restarts(tmp_path: Path) -> None:
    statuses: list[object] = []
    # finish() waits for 1.5 s, and the machine may stall that long.
    while "preempted" not in statuses and len(statuses) < 4:
        with reserved_port() as port, ExitStack() as stack:
            with HookServer(port) as before:
                job = stack.enter_context(leaving(tmp_path, "finish", before.url, LEAVE_AGAIN_AFTER="0.3"))
                before.wait_for(lambda push: True)
            job.terminate()
            time.sleep(0.6)
            with HookServer(port) as after:
                job.wait(PATIENCE)
            statuses.append(after.pushes[-1].resource["flopwatch.status"] if after.pushes else None)
    assert statuses[-1] == "preempted"


@pytest.mark.parametrize("endpoint", ["no listener", "no answer"])
def test_leaving_is_delayed_by_at_most_two_seconds_by_an_exporter_that_is_not_there(
    tmp_path: Path, endpoint: str
) -> None:
    with reserved_port() as unused, socket.create_server(("127.0.0.1", 0)) as deaf:
        port = unused if endpoint == "no listener" else deaf.getsockname()[1]

        def longest() -> float:
            """Signal some scripts at the same time. Return the seconds until the last of them has ended."""
            with ExitStack() as stack:
                jobs = [
                    (number, stack.enter_context(leaving(tmp_path, word, f"http://127.0.0.1:{port}")))
                    for word, number in (
                        ("finish", signal.SIGTERM),
                        ("exit-143", signal.SIGTERM),
                        ("finish", signal.SIGUSR1),
                        ("nothing", signal.SIGTERM),
                    )
                ]
                began = time.monotonic()
                for number, job in jobs:
                    job.send_signal(number)
                assert [job.wait(PATIENCE) for _, job in jobs] == [0, 143, 0, -signal.SIGTERM]
                return time.monotonic() - began

        assert shortest(longest, 2.0) < 2.0


def test_a_job_that_slurm_preempts_warns_and_requeues_is_one_run_of_three_attempts(tmp_path: Path) -> None:
    with cluster(tmp_path) as (*nodes, ledger):
        restored = [0, 0]
        for count, (number, status, then) in enumerate(
            (
                (signal.SIGTERM, "preempted", "queued"),
                (signal.SIGUSR1, "preempted", "queued"),
                (None, "completed", "completed"),
            )
        ):
            with ExitStack() as stack:
                tasks = [
                    stack.enter_context(
                        leaving(
                            tmp_path,
                            "finish",
                            node.server.url,
                            FLOPWATCH_HOST=node.host,
                            SLURM_JOB_ID="4711",
                            SLURM_JOB_NAME="llama",
                            SLURM_STEP_ID="0",
                            SLURM_STEP_NUM_TASKS="2",
                            SLURM_STEP_NUM_NODES="2",
                            SLURM_PROCID=str(rank),
                            SLURM_LOCALID="0",
                            **({"SLURM_RESTART_COUNT": str(count)} if count else {}),
                        )
                    )
                    for rank, node in enumerate(nodes)
                ]
                wait_for_state(ledger, "llama-4711", "running")
                if number is None:
                    (tmp_path / "stop").touch()
                for task in tasks:
                    if number is not None:
                        task.send_signal(number)
                    assert task.wait(PATIENCE) == 0
            for rank, node in enumerate(nodes):
                last = node.server.pushes[-1]
                position = int((tmp_path / f"llama-4711-{rank}.checkpoint").read_text())
                assert {
                    key: last.resource[f"flopwatch.{key}"]
                    for key in ("run", "attempt", "rank", "restored_step", "status")
                } == {
                    "run": "llama-4711",
                    "attempt": f"slurm-4711.0-{count}-0",
                    "rank": rank,
                    "restored_step": restored[rank],
                    "status": status,
                }
                assert last.samples["training_position_steps"] == last.samples["training_committed_steps"] == position
                assert position == restored[rank] + last.samples["training_steps_total"] > restored[rank]
                assert last.samples["training_hook_errors_total"] == 0
                restored[rank] = position
            wait_for_state(ledger, "llama-4711", then)
        run = figures(ledger, "llama-4711")
    assert (run["attempts"], run["ends"]["preempted"], run["ends"]["completed"], sum(run["ends"].values())) == (
        3,
        2,
        1,
        3,
    )
    # Between two allocations no GPU is held.
    assert run["buckets"]["down"] > 0 == run["gpu_seconds"]["down"]


def test_no_signal_handler_is_installed_by_run() -> None:
    answer = python(
        """
import signal
def handlers():
    return {number: repr(signal.getsignal(number)) for number in signal.valid_signals()}, signal.set_wakeup_fd(-1)
before = handlers()
import torch
from flopwatch.training import Run
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
run = Run("quiet", model=model)
run.watch_checkpoints()
for _ in run.batches(range(3)):
    model(torch.ones(1)).backward()
    optimizer.step()
    run.step(tokens=1)
assert handlers() == before
run.finish()
assert handlers() == before
print(before[0][signal.SIGTERM])
""",
        FLOPWATCH_ENDPOINT="http://127.0.0.1:9",
    )
    assert (answer.returncode, answer.stdout) == (0, "<Handlers.SIG_DFL: 0>\n"), answer.stderr


PLAIN = """
import os, signal, sys, time
def handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals()}
before = handlers()
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
def leave(*_):
    torch.save({"model": model.state_dict()}, "saved.pt")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
for step in range(10_000):
    model(torch.ones(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if step == 5:
        assert handlers() == {**before, signal.SIGTERM: leave}
        open(f"{os.getpid()}.ready", "w").close()
"""


def test_an_unmodified_script_that_leaves_in_order_has_committed_what_its_handler_saved(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    with HookServer() as server:
        job = subprocess.Popen(
            [sys.executable, "-m", "flopwatch", "run", "--name", "plain", "plain.py"],
            cwd=tmp_path,
            env={**ENVIRON, "FLOPWATCH_ENDPOINT": server.url},
        )
        try:
            ready(tmp_path, 1)
            job.terminate()
            assert job.wait(PATIENCE) == 0
        finally:
            job.kill()
            job.wait()
        last = server.last_word()
    assert last.resource["flopwatch.status"] == "preempted"  # not "completed", though its exit status is 0
    assert last.samples["training_committed_steps"] == last.samples["training_position_steps"] > 5


def test_a_name_published_before_a_quick_restart_is_not_taken_for_the_attempts() -> None:
    """The store of torchrun outlives a restart, and rank 0 may be the last to create its Run."""
    answer = python("""
import threading, time
import torch.distributed as dist
from flopwatch.training import torch as hook
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
hook.agreed("the crashed one", 0, time.time())
restarted = time.time()
threading.Timer(0.5, hook.agreed, ("this one", 0, restarted)).start()
print(hook.agreed("mine", 1, restarted))
# Of a rank 0 whose clock is behind it is believed, but not at once.
hook.RANK_0_RENAMES, began = 1.0, time.monotonic()
print(hook.agreed("mine", 1, time.time() + hook.CLOCKS_DIFFER / 2))
print(time.monotonic() - began > 1)
dist.destroy_process_group()
""")
    assert answer.stdout.splitlines() == ["this one", "this one", "True"], answer.stderr
