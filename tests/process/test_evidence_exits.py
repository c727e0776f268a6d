"""Test how the end of a rank's process is recorded, and what survives an exporter's restart, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.ledger.store import Store
from flopwatch.node.collectors import StateFile
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import process_exit
from flopwatch.node.telemetry.admission import AttemptKey, own_pid_namespace
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.evidence import HOST_PIDS, MAX_HOST_ENTRIES, EventCount, EvidenceLog, RankEnd, of_ranks
from flopwatch.node.telemetry.ledger_client import Embedded, Forward, Outcomes, Remote
from flopwatch.node.telemetry.process_exit import ProcessWatch
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.machine import until
from tests.support.otlp_by_hand import START, request, training

ENDS = [
    ("import os; os.kill(os.getpid(), 9)", ("signal", "SIGKILL")),
    ("import os; os.kill(os.getpid(), 11)", ("signal", "SIGSEGV")),
    ("raise SystemExit(3)", ("exit", "3")),
    ("import os; os._exit(77)", ("exit", "77")),
    ("", ("", "")),
]


def ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@contextmanager
def waiting(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that runs `script` once a line is written to its stdin."""
    with subprocess.Popen([sys.executable, "-c", f"input()\n{script}"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def end_process(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


@pytest.mark.parametrize(("script", "expected"), ENDS)
def test_the_end_of_a_zombie_is_read(script: str, expected: tuple[str, str]) -> None:
    with waiting(script) as process:
        watch = ProcessWatch(process.pid, ticks(process.pid))
        assert watch.ended() == ("", "")
        end_process(process)
        until(lambda: not process_exit.process_alive(process.pid, 0))
        assert watch.ended() == expected


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 15),
    reason="a pidfd reports how a process ended only since Linux 6.15",
)
@pytest.mark.parametrize(("script", "expected"), ENDS)
def test_on_a_new_kernel_the_end_of_a_reaped_process_is_read(script: str, expected: tuple[str, str]) -> None:
    with waiting(script) as process:
        watch = ProcessWatch(process.pid, ticks(process.pid))
        end_process(process)
        process.wait()
        assert watch.ended() == expected


def test_a_watch_of_a_gone_or_reused_pid_knows_nothing_and_keeps_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with waiting("") as process:
        watches = [ProcessWatch(process.pid, 1), ProcessWatch(2**22 - 1, 0)]
        assert [watch.ended() for watch in watches] == [("", ""), ("", "")]
        watches.append(ProcessWatch(process.pid, ticks(process.pid)))
        del watches
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_of_another_namespace_is_found_by_its_pid_there_and_its_start(tmp_path: Path) -> None:
    def process(pid: int, start: int, names: str) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        fields = " ".join(["S", "1"] + ["0"] * 17 + [str(start)] + ["0"] * 30)
        (folder / "stat").write_text(f"{pid} (a ) b) {fields}\n")
        (folder / "status").write_text(f"Name:\tpython\nPid:\t{pid}\nNSpid:\t{names}\nThreads:\t1\n")

    process(4711, 500, "4711\t7")
    process(4712, 501, "4712\t7")  # of another container
    process(4713, 500, "4713\t8")
    process(7, 900, "7")
    (tmp_path / "self").mkdir()
    assert process_exit.pids({(7, 500), (8, 1)}, tmp_path) == {(7, 500): 4711}


def test_without_namespace_pids_in_proc_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (python) S {'0 ' * 18}500 {'0 ' * 30}")
    (tmp_path / "7" / "status").write_text("Name:\tpython\nPid:\t7\n")
    assert process_exit.pids({(7, 500)}, tmp_path) == {}
    assert process_exit.pids({(7, 500)}, tmp_path / "not mounted") == {}


def test_a_python_without_pidfds_still_learns_how_a_zombie_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with waiting("raise SystemExit(3)") as process:
        watch = ProcessWatch(process.pid, ticks(process.pid))
        end_process(process)
        until(lambda: not process_exit.process_alive(process.pid, 0))
        assert watch.ended() == ("exit", "3")


def test_a_pid_that_no_process_can_have_is_gone_and_keeps_no_other_rank_waiting() -> None:
    node = Node()
    node.push(rank=0, pid=2**40, pid_namespace=own_pid_namespace())
    node.push(rank=1)
    node.telemetry.check()
    assert node.telemetry.summary() == [("", "lm", 1)]


@pytest.mark.skipif(
    subprocess.run(["unshare", "-Upfr", "true"], capture_output=True).returncode != 0, reason="no pid namespaces here"
)
def test_a_killed_rank_in_a_container_is_gone_at_once_with_its_signal() -> None:
    # Its pid in its own namespace is 1.
    script = (
        "import os\nprint(os.stat('/proc/self/ns/pid').st_ino, "
        "open('/proc/self/stat').read().rpartition(')')[2].split()[19], os.getpid(), flush=True)\ninput()"
    )
    node = Node()
    command = ["unshare", "-Upfr", "--kill-child", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        namespace, start, pid = map(int, process.stdout.readline().split())
        assert pid == 1
        node.push(pid=pid, pid_namespace=namespace, pid_start_ticks=start)
        node.telemetry.check()
        assert not node.gone()
        [outside] = process_exit.pids({(pid, start)}).values()
        os.kill(outside, signal.SIGKILL)
        process.communicate()
    until(node.gone)
    [*_, record] = node.records()
    kinds = [(entry["kind"], entry.get("detail")) for entry in record["evidence"]]
    assert kinds in ([("signal", "SIGKILL"), ("pid_gone", None)], [("pid_gone", None)])  # the latter on older kernels


class Node:
    """Node whose ranks push only when a test calls `push`."""

    def __init__(self, now: float = START + 60) -> None:
        self.now = now
        self.evidence_log = EvidenceLog(lambda: self.now)
        self.telemetry = Telemetry(
            ExporterSettings(host="node-7"),
            Registry(),
            clock=lambda: self.now,
            now=lambda: self.now,
            evidence_log=self.evidence_log,
        )

    def push(self, rank: int = 0, **attributes: Any) -> None:
        assert self.telemetry.receive(
            request(training(40, 5.0, self.now, rank=rank, start_unix=START + 1, **attributes))
        ) == (0, "")

    def gone(self) -> bool:
        self.telemetry.check()
        return self.telemetry.summary() == []

    def due(self) -> dict[AttemptKey, tuple[int, list[Record]]]:
        return self.telemetry.due()

    def records(self) -> list[Record]:
        due = self.due()
        for key, (version, _) in due.items():
            self.telemetry.delivered(key, version)
        return [json.loads(json.dumps(record)) for _, records in due.values() for record in records]


def test_a_dead_ranks_signal_reaches_the_ledger_before_it_is_reaped() -> None:
    node = Node()
    with waiting("import os; os.kill(os.getpid(), 6)") as process:
        node.push(pid=process.pid, pid_namespace=own_pid_namespace(), pid_start_ticks=ticks(process.pid))
        node.telemetry.check()
        end_process(process)
        until(node.gone)
    [*_, record] = node.records()
    assert [(entry["kind"], entry.get("detail"), entry["rank"]) for entry in record["evidence"]] == [
        ("signal", "SIGABRT", 0),
        ("pid_gone", None, 0),
    ]


def test_the_end_of_a_rank_that_pushes_again_after_a_silence_is_recorded() -> None:
    node = Node()
    with waiting("import os; os.kill(os.getpid(), 6)") as process:
        identity = {"pid": process.pid, "pid_namespace": own_pid_namespace(), "pid_start_ticks": ticks(process.pid)}
        node.push(**identity)
        node.telemetry.check()
        node.now += 3600
        assert node.gone()  # as far as the exporter can know
        node.push(**identity)
        assert not node.gone()
        end_process(process)
        until(node.gone)
    [*_, record] = node.records()
    assert [(entry["kind"], entry.get("detail")) for entry in record["evidence"]] == [
        ("signal", "SIGABRT"),
        ("pid_gone", None),
    ]


def test_the_strongest_evidence_of_a_rank_comes_first() -> None:
    words = [
        RankEnd(1, 10.0, 90.0, 4711, "DistBackendError", EventCount(2, 80.0), 95.0, ("exit", "1")),
        RankEnd(0, 10.0, 91.0, 4712, gone_at=93.0, exited=("signal", "SIGKILL")),
    ]
    assert [(entry["kind"], entry["rank"]) for entry in of_ranks(words, {4712: 92.0})] == [
        ("host_oom", 0),
        ("exception", 1),
        ("signal", 0),
        ("exit", 1),
        ("oom", 1),
        ("pid_gone", 0),
        ("pid_gone", 1),
    ]


# Restarts of the exporter.


def restarted(node: Node, later: float = 20.0) -> Node:
    """Return the node `later` seconds on, after a restart of its exporter that loads the saved state."""
    written = json.loads(json.dumps(node.telemetry.state()))
    other = Node(node.now + later)
    other.telemetry.restore(written)
    return other


def link(state: float, downed: float) -> list[Sample]:
    return [
        (m.INFINIBAND_PORT_STATE_ID, ("mlx5_0", "1"), state),
        (m.INFINIBAND_LINK_DOWNED_TOTAL, ("mlx5_0", "1"), downed),
    ]


def newest_evidence(records: list[Record]) -> list[tuple[str, str]]:
    return [(entry["kind"], entry.get("port", "")) for entry in records[-1].get("evidence", [])] if records else []


def test_evidence_from_before_a_restart_is_sent_after_it() -> None:
    node = Node()
    node.evidence_log.observe(link(4, 0))
    node.push(pid=4711, pid_namespace=HOST_PIDS)
    node.push(pid=4711, pid_namespace=HOST_PIDS, status="failed", ended_by="DistBackendError")
    node.records()
    node.now += 15
    node.evidence_log.observe(link(1, 1))  # the exporter restarts before it sends this
    node = restarted(node)
    [record] = node.records()
    assert newest_evidence([record]) == [("link_down", "mlx5_0:1"), ("exception", "")]
    assert (record["run"], record["status"], record["source"]) == ("lm", "failed", "node-7")
    assert node.records() == [], "once"


def test_events_while_the_exporter_is_away_are_sent_after_it() -> None:
    node = Node()
    node.evidence_log.observe(link(4, 0))
    node.push()
    node.records()
    node = restarted(node)
    node.evidence_log.observe(link(1, 1))
    # The rank does not push its end.
    assert newest_evidence(node.records()) == [("link_down", "mlx5_0:1")]
    # Once the attempt's ranks push again, their records carry it.
    node.push(status="failed")
    assert newest_evidence(node.records()) == [("link_down", "mlx5_0:1")]


def after_power_cut(node: Node, **last_word: Any) -> Node:
    """Return the node after a power cut: its saved state is older than the final push of its rank."""
    node.evidence_log.observe(link(4, 0))
    node.push()
    node.records()
    other = restarted(node)
    node.now += 8
    node.push(**last_word)
    return other


def forward_once(node: Node, ledger: Embedded | Remote) -> None:
    forward = Forward(node.telemetry, ledger, tick=3600)
    forward.start()
    forward.stop()


def unreachable(spool: Path) -> Remote:
    return Remote("http://127.0.0.1:1", None, spool, Outcomes(Registry()))


def test_a_last_word_on_disk_outlives_what_was_written_down_before_it_and_gains_its_evidence(tmp_path: Path) -> None:
    def stored_record() -> Record:
        [file] = tmp_path.glob("*.json")
        [record] = json.loads(file.read_text())
        return {name: record.get(name) for name in ("t", "status", "evidence")}

    node = Node()
    before = after_power_cut(node, status="failed", ended_by="KeyError")
    forward_once(node, unreachable(tmp_path))
    exception = {"kind": "exception", "t": node.now, "count": 1, "rank": 0, "detail": "KeyError"}
    last_word = {"t": node.now, "status": "failed", "evidence": [exception]}
    assert stored_record() == last_word

    node = before
    ledger = unreachable(tmp_path)
    for state, downed in ((1, 1), (4, 1), (1, 2)):
        node.evidence_log.observe(link(state, downed))
        forward_once(node, ledger)
        down = {"kind": "link_down", "t": node.now, "count": downed, "port": "mlx5_0:1"}
        assert stored_record() == {**last_word, "evidence": [{**down, "t": node.now - 15 * (state == 4)}, exception]}
        node.now += 15

    # The push of a live rank is newer than any final record.
    node.push()
    forward_once(node, ledger)
    assert (stored_record()["t"], stored_record()["status"]) == (node.now, None)


def test_evidence_on_disk_is_bounded_and_the_newest_stays_and_the_last_word(tmp_path: Path) -> None:
    node = Node()
    before = after_power_cut(node, status="failed", ended_by="KeyError")
    for one, first in ((node, 101), (before, 1)):
        one.evidence_log.observe(
            [
                (m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("3", "GPU-a", str(code)), node.now - code)
                for code in range(first, first + 100)
            ]
        )
        forward_once(one, Remote("http://127.0.0.1:1", None, tmp_path, Outcomes(Registry())))
    [[record]] = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert [(entry["kind"], entry["detail"]) for entry in record["evidence"]] == [
        *(("xid", str(code)) for code in range(1, MAX_HOST_ENTRIES + 1)),
        ("exception", "KeyError"),
    ]


def test_a_ledger_that_has_the_last_word_takes_only_evidence_from_what_was_written_down_before_it(
    tmp_path: Path,
) -> None:
    node = Node()
    before = after_power_cut(node, status="completed")
    for one in (node, before):
        ledger = Embedded(Store(tmp_path / "ledger.sqlite"), Outcomes(Registry()), now=lambda: before.now)
        one.evidence_log.observe(link(1, 1))
        forward_once(one, ledger)
        states = [
            (row, labels, value)
            for row, labels, value in ledger.ask(1).samples
            if row in (m.RUN_STATE, m.RUN_INCIDENTS_TOTAL) and value
        ]
        assert states == [(m.RUN_STATE, ("", "lm", "completed"), 1.0)]
        ledger.close()


def test_after_five_minutes_nothing_is_left_of_it() -> None:
    node = Node()
    node.evidence_log.observe(link(4, 0))
    node.push()
    node.records()
    node = restarted(node, later=301)
    node.evidence_log.observe(link(1, 1))
    assert node.records() == []
    # Counters from long ago are not compared with current ones either.
    node = restarted(node, later=4000)
    node.evidence_log.observe(link(4, 9))
    assert node.evidence_log.entries(None, 0, node.now) == []


def test_the_state_folder_keeps_it_also_when_the_exporter_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopwatch.node.telemetry.ledger_client.SAVE_INTERVAL", 0.0)
    file = tmp_path / "evidence.json"
    now = time.time()
    node = Node(now)
    node.evidence_log.observe(link(4, 0))
    node.push()
    forward = Forward(node.telemetry, unreachable(tmp_path / "spool"), tick=0.01, memory=StateFile(file))
    forward.start()
    until(file.exists)
    again = Node(now + 5)
    other = Forward(again.telemetry, unreachable(tmp_path / "other"), tick=3600, memory=StateFile(file))
    other.start()
    again.evidence_log.observe(link(1, 1))
    assert newest_evidence(again.records()) == [("link_down", "mlx5_0:1")]
    for one in (forward, other):
        one.stop()


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"witness": 3}', '{"witness": {"events": [[1]], "killed": [], "looked": 0}}']
)
def test_a_file_that_is_not_understood_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "evidence.json").write_text(text)
    node = Node()
    forward = Forward(
        node.telemetry, unreachable(tmp_path / "spool"), tick=3600, memory=StateFile(tmp_path / "evidence.json")
    )
    forward.start()
    forward.stop()
    assert node.records() == []
