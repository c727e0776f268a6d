"""Questions to NCCL's RAS: which rank a report names, when the exporter asks, and that nothing waits for an answer."""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from flopwatch.ledger.record import LedgerRecord, RecordError
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.ras import Question, Ras
from flopwatch.node.telemetry.ras_query import NoAnswer, ask, listeners, not_held
from flopwatch.settings import Address
from flopwatch.simulate import h100
from simulator.host import SimulatedNode
from tests.support import node_app
from tests.support.exporter_process import ENVIRONMENT, alive, exporter
from tests.support.nccl_ras import CAPTURES, HIDDEN, PER_HOST, PIDS, FakeRas, Job, Report, report, wait_for

DIALOGUE = ["CLIENT PROTOCOL 2", "SET FORMAT json", "MONITOR flopwatch", "TIMEOUT 3", "STATUS"]
OK = "ok_tp4pp2dp2"


def missing(rank: int, size: int, counts: int = 1) -> Report:
    """Return a report in which a rank has started fewer collectives in its communicator of this size that counts."""
    found = report(OK)
    for one in found["communicators"]:
        for member in one["ranks"]:
            numbers = member["collective_counts"]
            if one["size"] == size and member["pid"] == PIDS[rank] and numbers["AllReduce"]:
                numbers["AllReduce"] -= counts
    return found


def changed(change: Callable[[Report], object]) -> Report:
    """Return a report with a missing rank, and a change after which no rank may be named."""
    found = missing(5, 4)
    change(found)
    return found


def pipeline_with_one_broadcast() -> Report:
    """Return a report in which two neighbours of the pipeline have different numbers, one of them 0."""
    found = report(OK)
    found["communicators"][-1]["ranks"][0]["collective_counts"]["Broadcast"] = 2
    return found


def all_to_all_with_one_broadcast() -> Report:
    """Return a report in which a group has no counted operation but a broadcast, which one rank has not called."""
    found = report(OK)
    for member in found["communicators"][2]["ranks"]:
        counts = dict.fromkeys(member["collective_counts"], 0)
        member["collective_counts"] = counts | {"Broadcast": int(member["rank"] != 1)}
    return found


def destroyed_by_one(found: Report) -> None:
    group = found["communicators"][2]
    gone = group["ranks"].pop()
    group["missing_ranks"] = [gone | {"status": {"unresponsive": False, "considered_dead": False}}]


def other_job(found: Report) -> None:
    for one in found["communicators"]:
        for member in one["ranks"]:
            member["pid"] += 1000


def one_initializes(found: Report) -> None:
    found["communicators"][3]["ranks"][1]["status"]["init_state"] = 7


def being_destroyed(found: Report) -> None:
    for one in found["communicators"]:
        one["ranks"][0]["status"]["finalize_called"] = True


def zeroed(found: Report) -> None:
    found["communicators"] += report("zeroed_comms_init_race")["communicators"]


def of_rccl(found: Report) -> Report:
    """Return a report as RCCL writes it: with notes about fields, and RCCL's version in place of NCCL's."""
    notes = {"field_notes": {"cuda_dev": "HIP device index"}}
    for one in found["communicators"]:
        one |= notes
        one["ranks"] = [member | notes for member in one["ranks"]]
    return found | notes | {"nccl_version": "2.29.7"}


def huge(found: Report) -> None:
    found["communicators"][2]["size"] = 10**15


def no_numbers(found: Report) -> None:
    found["communicators"][2]["ranks"][0]["collective_counts"] = {"AllReduce": {}}


TEXT = json.dumps(missing(5, 4), indent=2).encode()
NAMED: dict[str, tuple[Report, str, tuple[str, str, str]]] = {
    "missing in TP": (missing(5, 4), "tp", ("5", "tp", "4-7")),
    "missing in DP": (missing(9, 2), "tp", ("9", "dp", "9,13")),
    "missing in EP": (missing(10, 4), "ep", ("10", "ep", "8-11")),
    "missing in all": (missing(12, 16), "tp", ("12", "world", "0-15")),
    "dead peer": (report("rank_dead"), "tp", ("5", "tp", "4-7")),
    "unresponsive peer": (report("rank_unresponsive"), "tp", ("5", "tp", "4-7")),
    "captured": (report("counts_differ"), "tp", ("5", "tp", "4-7")),
    "RCCL": (of_rccl(report("counts_differ")), "tp", ("5", "tp", "4-7")),
}
UNNAMED: dict[str, tuple[Report | bytes, str]] = {
    "healthy": (report(OK), "answered"),
    "PP with zeros": (pipeline_with_one_broadcast(), "answered"),
    "EP with zeros": (all_to_all_with_one_broadcast(), "answered"),
    "destroyed by one": (changed(destroyed_by_one), "answered"),
    "error seen by a rank": (report("async_error"), "answered"),
    "being destroyed": (changed(being_destroyed), "answered"),
    "no communicators": (report("no_comms"), "foreign"),
    "torn down": (report("nocomm_teardown"), "foreign"),
    "another job on the port": (changed(other_job), "foreign"),
    "all still initialize": (report("init_in_progress"), "initializing"),
    "one initializes": (changed(one_initializes), "initializing"),
    "zeroed in a race": (changed(zeroed), "initializing"),
    "truncated": (TEXT[: len(TEXT) // 2], "malformed"),
    "empty": (b"", "malformed"),
    "hostile size": (changed(huge), "malformed"),
    "hostile numbers": (changed(no_numbers), "malformed"),
    "hostile nesting": (b'{"communicators":' + b"[" * 1_000_000, "malformed"),
    "hostile memory": (b"[" + b"{}," * 5_000_000, "malformed"),
    "hostile length": (TEXT + b" " * (17 << 20), "malformed"),
    "old RCCL": (of_rccl(missing(5, 4)) | {"nccl_version": "2.28.9"}, "old"),
    "old by its report": (changed(lambda found: found.update(nccl_version="2.29.1")), "old"),
}


def hung(fake: FakeRas, inner: str = "tp") -> Job:
    """Return a job that did 60 steps and then stood still until its step was overdue for some time."""
    job = Job(fake.port, inner)
    job.run(60)
    job.run(30, steps=False)
    return job


@pytest.mark.parametrize("case", NAMED)
def test_the_rank_behind_the_others_is_named_in_its_group(case: str) -> None:
    answer, inner, (rank, kind, ranks) = NAMED[case]
    with FakeRas(answer).running() as fake:
        job = hung(fake, inner)
    assert job.verdict() == (30, {(rank, f"h{int(rank) // PER_HOST}", kind, ranks, "ras")})
    assert (fake.connections, job.outcomes()) == ([DIALOGUE], {"answered": 1})


@pytest.mark.parametrize("case", UNNAMED)
def test_no_rank_is_named_by_a_report_that_does_not_show_one(case: str) -> None:
    answer, outcome = UNNAMED[case]
    with FakeRas(answer).running() as fake:
        job = hung(fake)
    assert job.verdict() == (30, set())
    assert (fake.connections, job.outcomes()) == ([DIALOGUE], {outcome: 1})


@pytest.mark.parametrize("version", [(2, 24, 3), (2, 27, 7), (2, 28, 7), (2, 29, 1)])
def test_an_old_version_is_not_asked_for_its_report(version: tuple[int, int, int]) -> None:
    with FakeRas(missing(5, 4), version).running() as fake:
        job = hung(fake)
    assert (job.verdict(), job.outcomes()) == ((30, set()), {"old": 1})
    assert [commands == DIALOGUE[: len(commands)] for commands in fake.connections] == [True]
    assert "STATUS" not in fake.connections[0]


@pytest.mark.parametrize("way", ["hang", "trickle"])
def test_a_slow_answer_is_given_up(way: str) -> None:
    fake = FakeRas(b"")
    fake._answer = getattr(fake, way)
    with fake.running():
        began = time.monotonic()
        job = hung(fake)
        assert time.monotonic() - began < 20
    assert (job.verdict(), job.outcomes()) == ((30, set()), {"deadline": 1})


# Situations in which the exporter must not ask.


def running_steps(job: Job) -> None:
    job.run(300)


def evaluating(job: Job) -> None:
    job.run(60)
    job.run(300, "evaluation", steps=False)


def saving_a_checkpoint(job: Job) -> None:
    job.run(60)
    job.run(300, "checkpoint_save", steps=False)


def late_but_not_overdue(job: Job) -> None:
    job.run(60)
    job.run(10, steps=False)
    job.run(60)


def starting(job: Job) -> None:
    job.run(300, "startup", steps=False)


def in_its_first_steps(job: Job) -> None:
    job.pace = 3
    job.run(15)
    job.run(300, steps=False)


def with_long_steps(job: Job) -> None:
    job.pace = 1  # so that a step is overdue after 25 s
    job.run(100)
    job.run(20, steps=False)
    job.run(60)


def making_a_communicator(job: Job) -> None:
    job.run(60)
    job.more_groups = [("cp", "0-15")]
    job.run(300, steps=False)


def next_to_a_job_that_starts(job: Job) -> None:
    job.run(60)
    for _ in range(20):
        job.push_of(0, "young", 3)
        job.run(5, steps=False)


def without_gpus(job: Job) -> None:
    job.gpus = [""] * len(job.gpus)
    job.run(60)
    job.run(300, steps=False)


@pytest.mark.parametrize(
    "situation",
    [
        running_steps,
        evaluating,
        saving_a_checkpoint,
        late_but_not_overdue,
        starting,
        in_its_first_steps,
        with_long_steps,
        making_a_communicator,
        next_to_a_job_that_starts,
        without_gpus,
    ],
)
def test_ras_is_not_asked_otherwise(situation: Callable[[Job], None]) -> None:
    with FakeRas(missing(5, 4)).running() as fake:
        job = Job(fake.port)
        situation(job)
    assert (fake.connections, job.outcomes()) == ([], {})


def test_one_host_asks_once_a_minute_and_less_often_after_failures() -> None:
    with FakeRas(missing(5, 4)).running() as fake, FakeRas(b"").running() as broken:
        job, other = Job(fake.port), Job(broken.port)
        for one in (job, other):
            one.run(60)
            one.run(15 + 55, steps=False)
        assert (len(fake.connections), len(broken.connections)) == (1, 1)
        for one in (job, other):
            one.run(240, steps=False)
        assert (len(fake.connections), len(broken.connections)) == (5, 2)
        job.run(60)
        assert job.verdict() == (0, set())
        job.run(10, steps=False)
        assert all("ras" not in str(records) for host in job.hosts for _, records in host.due().values())


@contextmanager
def stranger(port: int) -> Iterator[int]:
    """Have a process that is no rank listen on a port, too, and yield its pid."""
    code = (
        f"import socket; one = socket.create_server(('127.0.0.1', {port}), reuse_port=True); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def test_ras_is_not_asked_while_unknown_processes_share_its_port() -> None:
    with FakeRas(missing(5, 4)).running() as fake, stranger(fake.port):
        job = hung(fake)
    assert (fake.connections, job.outcomes(), job.verdict()[1]) == ([], {"shared": 1}, set())


def test_ras_is_not_asked_if_its_rank_is_unknown_here() -> None:
    with FakeRas(missing(5, 4)).running() as fake:
        job = Job(fake.port)
        job.seen = HIDDEN
        job.run(60)
        job.run(30, steps=False)
    assert (fake.connections, job.outcomes(), job.verdict()[1]) == ([], {"shared": 1}, set())


def test_a_process_that_begins_to_listen_during_the_question_ends_it() -> None:
    own = [os.getpid()]
    with FakeRas(missing(5, 4)).running() as fake:
        begin = fake.reply
        with ExitStack() as later:

            def reply(command: str) -> str:
                if command.startswith("TIMEOUT"):
                    later.enter_context(stranger(fake.port))
                return begin(command)

            fake.reply = reply  # type: ignore[method-assign]
            with pytest.raises(NoAnswer, match="begun to listen"):
                ask("127.0.0.1", fake.port, own, Path("/proc"))
        assert fake.connections == [DIALOGUE[:-1]]


def test_a_thread_that_cannot_start_leaves_the_next_question_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    now = 0.0
    with FakeRas(missing(5, 4)).running() as fake:
        ras = Ras(Address("127.0.0.1", fake.port), Registry(), clock=lambda: now)
        question = Question(16, dict(enumerate(PIDS[:PER_HOST])), [os.getpid()])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            ras.ask(("", "lm", "a"), question)
        now = 61.0
        ras.ask(("", "lm", "a"), question)
        assert wait_for(lambda: ras.behind(("", "lm", "a")) == [["4-7", "5"]])


def test_without_a_listener_no_process_is_started() -> None:
    with FakeRas(b"").running() as fake:
        pass
    job = hung(fake)
    assert (job.outcomes(), job.verdict()) == ({"unreachable": 1}, (30, set()))


def test_the_fake_answers_as_the_captured_dialogue() -> None:
    lines = (CAPTURES / "ras_dialogue_2.30.txt").read_text().splitlines()
    fake, old = FakeRas(b""), FakeRas(b"", (2, 27, 7))
    with fake.running(), old.running():
        pairs = [(line[3:], answer[3:]) for line, answer in itertools.pairwise(lines) if line.startswith(">>")]
        asked = [(command, answer) for command, answer in pairs if command != "STATUS"]
        for command, answer in asked:
            one = old if answer.startswith("ERROR: Unknown") else fake
            assert one.reply(command) == answer
    assert len(asked) == 7


def test_a_scrape_takes_no_longer_while_ras_hangs() -> None:
    fake = FakeRas(b"")
    fake._answer = fake.hang
    with fake.running(), node_app.running() as node:
        ras = Ras(Address("127.0.0.1", fake.port), Registry())
        node.telemetry._ras = ras

        def p99() -> float:
            durations = []
            for _ in range(300):
                began = time.perf_counter()
                assert node.get("/metrics")[0] == 200
                durations.append(time.perf_counter() - began)
            return statistics.quantiles(durations, n=100)[-1]

        alone = min(p99() for _ in range(2))
        question = Question(16, dict(enumerate(PIDS[:PER_HOST])), [os.getpid()])
        ras.ask(("", "lm", "a"), question)
        assert wait_for(lambda: fake.connections and fake.connections[0][-1:] == ["STATUS"])
        hanging = min(p99() for _ in range(2))
        assert ras._busy  # it hung for the whole time
        print(f"p99 of /metrics: {1000 * alone:.2f} ms, while RAS hangs {1000 * hanging:.2f} ms")
        assert hanging < 3 * alone + 0.005


def test_an_exporter_asks_about_its_run_and_serves_the_verdict(tmp_path: Path) -> None:
    state = tmp_path / "s"
    with (
        FakeRas(missing(5, 4)).running() as fake,
        exporter(state, "--simulate", "h100x8", "--ledger", "embedded", "--ras", f"127.0.0.1:{fake.port}") as running,
    ):
        assert wait_for(lambda: list(state.rglob("gpus.json")))
        node = SimulatedNode(next(state.rglob("gpus.json")).parent)
        for gpu in range(PER_HOST):
            node.load(gpu, 0.0)  # else they compute, and a run that computes does not hang
        job = Job(fake.port)
        job.gpus[:PER_HOST] = map(h100.uuid, range(PER_HOST))
        for steps, seconds in ((20, 20.0), (40, 40.0), (40, 60.0)):
            job.now, job.steps, job.seconds["step"] = time.time(), steps, seconds
            running.push(*job.processes(0))
        assert wait_for(lambda: "suspects=[(5" in running.log, 30), running.log
        found = running.series()
        assert [name for name in found if name.startswith("run_hang_suspect_ratio")] == [
            "run_hang_suspect_ratio{tenant=,run=lm,rank=5,host=node-7,group=tp,ranks=4-7,signs=ras}"
        ]
        assert found["flopwatch_nccl_ras_queries_total{outcome=answered}"] == 1
        assert fake.connections == [DIALOGUE]
        assert running.log.count("NCCL RAS asked") == 1
        assert json.loads(next(state.rglob("nccl_ras.json")).read_text())["outcome"] == "answered"


def test_a_killed_exporter_leaves_no_question_behind(tmp_path: Path) -> None:
    fake = FakeRas(b"")
    fake._answer = fake.hang
    command = (
        "import time; from flopwatch.node.scrape.scrape import Registry; from flopwatch.settings import Address;"
        "from flopwatch.node.telemetry.ras import Question, Ras;"
        f"ras, question = Ras(Address('127.0.0.1', {fake.port}), Registry()), Question(8, {{0: 1}}, [{os.getpid()}]);"
        "ras.ask(('', 'r', 'a'), question);"
        "time.sleep(60)"
    )
    with fake.running():
        process = subprocess.Popen([sys.executable, "-c", command], env=ENVIRONMENT)
        assert wait_for(lambda: fake.connections and fake.connections[0][-1:] == ["STATUS"])
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")
        [child] = [int(pid) for thread in threads for pid in thread.read_text().split()]
        assert alive(child)
        process.kill()
        process.wait()
        assert wait_for(lambda: not alive(child), 2)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_listeners_and_their_processes_are_found_in_both_families(address: str) -> None:
    proc, family = Path("/proc"), socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, reuse_port=True) as first:
        port = first.getsockname()[1]
        with socket.create_server((address, port), family=family, reuse_port=True) as second:
            with socket.create_connection((address, port)):  # an established connection is not a listener
                both = listeners(port, proc)
            assert both == {f"socket:[{os.fstat(one.fileno()).st_ino}]" for one in (first, second)}
            assert not_held(port, [os.getpid()], proc) == set()
            assert not_held(port, [os.getppid(), PIDS[1]], proc) == both
        assert len(listeners(port, proc)) == 1
    assert listeners(port, proc) == set()


def test_a_process_whose_sockets_cannot_be_read_holds_none(tmp_path: Path) -> None:
    row = "0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 {} 1 0 100 0 0 10 0\n"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("sl local_address\n" + row.format(12345) + row.format(67890))
    for pid, inode in ((7, 12345), (8, 67890)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (tmp_path / str(pid) / "fd" / "4").symlink_to(f"pipe:[xx{inode}]")
    (tmp_path / "8" / "fd").rename(tmp_path / "8" / "unreadable")
    assert not_held(28028, [7, 8], tmp_path) == {"socket:[67890]"}
    assert not_held(28029, [], tmp_path) == set()


def test_the_ledger_refuses_malformed_communicators() -> None:
    line: dict[str, Any] = {"t": 1.0, "run": "r", "attempt": "a", "event": "snapshot"}
    step = {"t": 1.0, "seconds": 20.0, "overdue_after": 15.0, "ranks": []}
    parsed = LedgerRecord.parse(line | {"open_step": step | {"ras": [["0-3", "2"]]}}).open_step
    assert parsed is not None
    assert parsed.ras == (("0-3", "2"),)
    for wrong in (7, [7], [["0-3"]], [["0-3", "x"]], [["0-3", ""]], [["0-3", 2, 3]], [["0", "0"]] * 65):
        with pytest.raises(RecordError, match=r"open_step\.ras"):
            LedgerRecord.parse(line | {"open_step": step | {"ras": wrong}})
