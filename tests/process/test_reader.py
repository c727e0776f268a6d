"""Test readers: real child processes with the simulated node, and with collectors that hang, die and misbehave."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flopwatch.catalogue import GPU_POWER_WATTS, GPU_PRESENT
from flopwatch.node.collectors import infiniband
from flopwatch.node.scrape.reader import RESIDENT_LIMIT, Reader, Reading, Spec, hardware, host_sources
from flopwatch.settings import ExporterSettings
from flopwatch.simulate.sources import host_sources as simulated
from simulator.host import SimulatedNode
from tests.support.machine import PATIENCE, shortest, until

LONG = PATIENCE  # seconds; only a broken build misses this deadline

# A collector as a third party might write it, in a module of its own that the child imports.
ODD = """
import os, signal, time
from pathlib import Path
from flopwatch.catalogue import GPU_PRESENT
from flopwatch.node.collectors import AccessLost, RestartReader, Unsupported

class Odd:
    name = "odd"
    def __init__(self, flag, before="", read="", close=""):
        self.flag, self.before, self.code, self.parting = Path(flag), before, read, close
        self.reads, self.value = 0, 1
        exec(before)
    def read(self):
        self.reads += 1
        samples = [(GPU_PRESENT, (str(os.getpid()), ""), self.value)]
        exec(self.code)
        return samples
    def close(self):
        exec(self.parting)
"""
UNTIL_THE_FLAG = "while not self.flag.exists(): time.sleep(0.02)"
FROM_THE_SECOND_UNTIL_THE_FLAG = "while self.reads > 1 and not self.flag.exists(): time.sleep(0.02)"
# The second read waits for flag2, the third for flag3.
FROM_THE_SECOND_UNTIL_ITS_FLAG = (
    "while self.reads > 1 and not Path(f'{self.flag}{self.reads}').exists(): time.sleep(0.02)"
)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """Return a function that creates readers of the odd collector and closes them after the test."""
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    readers: list[Reader] = []

    def make(
        kill_after: float = 60.0,
        grace: float = 5.0,
        backoff: float = 0.1,
        stale_after: float = 30.0,
        resident_limit: int = RESIDENT_LIMIT,
        **arguments: str,
    ) -> Reader:
        spec = Spec("odd:Odd", {"flag": str(tmp_path / "flag"), **arguments})
        readers.append(
            Reader("odd", spec, kill_after, grace, backoff, stale_after=stale_after, resident_limit=resident_limit)
        )
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "state" / "simulated")
    node.create()
    return node


@pytest.fixture
def settings(tmp_path: Path) -> ExporterSettings:
    return ExporterSettings(state=tmp_path / "state", simulate="h100x8", host="node1")


@pytest.fixture
def readers(settings: ExporterSettings) -> Iterator[dict[str, Reader]]:
    made = {reader.name: reader for reader in hardware(settings, simulated(settings))}
    yield made
    for reader in made.values():
        reader.close()


def pid(reading: Reading) -> int:
    assert reading.ok, reading.reason
    return int(reading.samples[0][1][0])


def gone(process: int) -> bool:
    """Return whether a process ends soon. A zombie counts as ended."""

    def ended() -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    until(ended)
    return True


def eventually(reader: Reader, condition: Callable[[Reading], bool]) -> Reading:
    """Ask again until an answer is as expected, and return it."""
    end = time.monotonic() + PATIENCE
    while not condition(reading := reader.ask(0.1)):
        assert time.monotonic() < end, f"last: {reading}"
        time.sleep(0.05)
    return reading


def answered(reader: Reader) -> bool:
    """Return whether an answer is waiting in the pipe."""
    assert reader._child is not None
    assert reader._child.process.stdout is not None
    return bool(select.select([reader._child.process.stdout], [], [], 0)[0])


def test_a_child_reads_what_the_collector_reads(node: SimulatedNode, readers: dict[str, Reader]) -> None:
    before = time.time()
    reading = readers["infiniband"].ask(LONG)
    assert (reading.ok, reading.reason, reading.supported) == (True, "", True)
    assert before <= reading.at <= time.time()
    assert 0 < reading.duration < LONG
    assert reading.samples == infiniband.build(**readers["infiniband"].spec.arguments).read()


def test_every_source_of_the_simulated_node_answers(node: SimulatedNode, readers: dict[str, Reader]) -> None:
    assert [(name, reader.driver, reader.secondary) for name, reader in readers.items()] == [
        ("nvml", True, False),
        ("infiniband", False, False),
        ("xid", True, False),
        ("identity", False, False),
    ]
    for reader in readers.values():
        reading = reader.ask(LONG)
        assert (reading.ok, reading.reason) == (True, "")
        assert reading.samples


def test_a_hung_driver_call_costs_its_source_and_recovers_by_itself(
    node: SimulatedNode, readers: dict[str, Reader]
) -> None:
    assert all(reader.ask(LONG).ok for reader in readers.values())
    node.hang("nvmlDeviceGetPowerUsage")
    for _ in range(2):
        started = time.monotonic()
        hung = readers["nvml"].ask(0.3)
        assert 0.3 <= time.monotonic() - started < LONG / 2  # not for as long as the call hangs
        assert (hung.ok, hung.reason, hung.samples) == (False, "deadline", [])
        assert readers["infiniband"].ask(LONG).ok
        assert readers["xid"].ask(LONG).ok
    node.hang(None)
    recovered = readers["nvml"].ask(LONG)
    assert recovered.ok
    assert len([1 for row, _, _ in recovered.samples if row is GPU_POWER_WATTS]) == 8


def test_an_answer_that_came_after_its_deadline_is_replaced_by_a_new_one(
    node: SimulatedNode, readers: dict[str, Reader]
) -> None:
    assert readers["nvml"].ask(LONG).ok
    node.hang("nvmlDeviceGetCount")
    assert readers["nvml"].ask(0.1).reason == "deadline"
    node.hang(None)
    until(lambda: answered(readers["nvml"]))
    node.lose(2)
    samples = readers["nvml"].ask(LONG).samples
    assert [value for row, _, value in samples if row is GPU_PRESENT] == [1, 1, 0, 1, 1, 1, 1, 1]


def test_a_source_slower_than_its_deadline_is_served_from_the_answer_before(
    odd: Callable[..., Reader], tmp_path: Path
) -> None:
    reader = odd(read=FROM_THE_SECOND_UNTIL_ITS_FLAG)
    assert reader.ask(LONG).ok
    assert reader.ask(0.1).reason == "deadline"
    time.sleep(0.3)
    (tmp_path / "flag2").touch()
    late = eventually(reader, lambda reading: reading.ok)
    assert late.duration >= 0.3
    assert reader.ask(0.1).reason == "deadline"  # the third read has begun meanwhile


def test_a_read_of_sysfs_that_hangs_costs_the_ports_until_it_ends(
    node: SimulatedNode, readers: dict[str, Reader]
) -> None:
    assert readers["infiniband"].ask(LONG).ok
    file = node.sysfs / "class/infiniband/mlx5_0/ports/1/counters/symbol_error"
    file.unlink()
    os.mkfifo(file)  # opening it blocks until another process opens it for writing
    assert readers["infiniband"].ask(0.3).reason == "deadline"
    assert readers["nvml"].ask(LONG).ok
    with file.open("w") as pipe:
        file.unlink()
        file.write_text("3\n")
        pipe.write("2\n")
    assert ("infiniband_symbol_errors_total", ("mlx5_0", "1"), 3) in [
        (row.name, labels, value) for row, labels, value in readers["infiniband"].ask(LONG).samples
    ]


def test_a_killed_child_is_reported_as_exited_and_is_replaced_after_a_pause(odd: Callable[..., Reader]) -> None:
    reader = odd(backoff=1.0)
    first = pid(reader.ask(LONG))
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    killed = time.monotonic()
    assert reader.ask(LONG).reason == "exited"
    second = eventually(reader, lambda reading: reading.ok)
    assert time.monotonic() - killed >= 1
    assert pid(second) != first


def test_a_child_that_dies_at_every_start_is_started_less_and_less_often(
    odd: Callable[..., Reader], tmp_path: Path
) -> None:
    reader = odd(before="Path(f'{flag}.{time.monotonic()}').touch(); os._exit(1)", backoff=0.4)
    while len(list(tmp_path.glob("flag.*"))) < 3:
        assert reader.ask(LONG).reason == "exited"
        time.sleep(0.02)
    first, second, third = sorted(float(file.name.removeprefix("flag.")) for file in tmp_path.glob("flag.*"))
    assert second - first >= 0.4
    assert third - second >= 0.8


def test_a_child_that_hangs_for_long_is_ended_and_replaced(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(kill_after=0.3, grace=30.0, read=UNTIL_THE_FLAG)
    (tmp_path / "flag").touch()
    first = pid(reader.ask(LONG))
    (tmp_path / "flag").unlink()
    assert reader.ask(0.1).reason == "deadline"
    assert eventually(reader, lambda reading: reading.reason == "exited").restarts == ("hung",)
    assert gone(first)
    (tmp_path / "flag").touch()
    assert pid(eventually(reader, lambda reading: reading.ok)) != first


def test_a_hung_child_that_ignores_sigterm_is_killed(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(kill_after=0.2, grace=0.4, before="signal.signal(signal.SIGTERM, signal.SIG_IGN)", read=UNTIL_THE_FLAG)
    (tmp_path / "flag").touch()
    first = pid(reader.ask(LONG))
    (tmp_path / "flag").unlink()
    started = time.monotonic()
    eventually(reader, lambda reading: reading.reason == "exited")
    assert time.monotonic() - started >= 0.6
    assert gone(first)


def test_a_child_that_no_signal_has_ended_yet_is_abandoned_and_replaced(
    odd: Callable[..., Reader], tmp_path: Path
) -> None:
    # Without grace the reader abandons the child right after the SIGKILL, before that can take effect.
    reader = odd(kill_after=0.2, grace=0.0, read=UNTIL_THE_FLAG)
    (tmp_path / "flag").touch()
    first = pid(reader.ask(LONG))
    (tmp_path / "flag").unlink()
    assert eventually(reader, lambda reading: reading.restarts == ("hung",)).reason == "deadline"
    (tmp_path / "flag").touch()
    assert pid(eventually(reader, lambda reading: reading.ok)) != first


def parent(spec: str, ready: Path) -> subprocess.Popen[bytes]:
    """Start a process that has a reader, asks it once, writes its child's pid to `ready` and sleeps."""
    code = (
        f"import time\nfrom pathlib import Path\nfrom flopwatch.node.scrape.reader import Reader, Spec\n"
        f"reader = Reader('odd', {spec})\n"
        f"answer = reader.ask({LONG})\n"
        f"reader.ask(0.1)\n"
        f"Path({str(ready)!r}).write_text(answer.samples[0][1][0] if answer.ok else answer.reason)\n"
        f"time.sleep({PATIENCE})\n"
    )
    search = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=search))


@pytest.mark.parametrize("hung", [False, True])
def test_the_child_ends_when_its_parent_is_killed(odd: Callable[..., Reader], tmp_path: Path, hung: bool) -> None:
    read = "self.calls = getattr(self, 'calls', 0) + 1\nwhile self.calls == 2: time.sleep(0.02)" if hung else ""
    flag, ready = str(tmp_path / "flag"), tmp_path / "ready"
    process = parent(f"Spec('odd:Odd', {{'flag': {flag!r}, 'read': {read!r}}})", ready)
    try:
        while not ready.exists() or not ready.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        child = int(ready.read_text())
        assert Path(f"/proc/{child}").exists()
    finally:
        process.kill()
        process.wait()
    assert gone(child)


FORKED = """
import json, os, signal, socket, sys
from flopwatch.node.memory_tuning import fork
from flopwatch.node.scrape.reader import Reader, Spec
listener = socket.create_server(("127.0.0.1", 0))
signal.signal(signal.SIGCHLD, signal.Handlers[sys.argv[2]])
reader = Reader("odd", Spec("odd:Odd", {"flag": sys.argv[1]}), backoff=0.0)
fork([reader])
pid = reader._child.process._pid
first = reader.ask(30.0)
files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
os.kill(pid, signal.SIGKILL)
while not (second := reader.ask(30.0)).ok or second.samples == first.samples:
    pass
reader.close()
print(json.dumps([pid, first.samples[0][1][0], second.samples[0][1][0], files]))
"""


@pytest.mark.parametrize("ended", ["SIG_DFL", "SIG_IGN"])  # of children whose parent was started with SIGCHLD ignored
def test_the_first_child_is_a_copy_without_the_files_of_its_parent_and_is_replaced(ended: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    search = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    command = [sys.executable, "-c", FORKED, str(tmp_path / "flag"), ended]
    done = subprocess.run(command, env=dict(os.environ, PYTHONPATH=search), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    forked, first, second, files = json.loads(done.stdout)
    assert first == str(forked)
    assert not any("socket" in file for file in files)
    assert gone(forked)
    assert gone(int(second))


def test_a_copy_that_fails_says_why(tmp_path: Path) -> None:
    script = "from flopwatch.node.scrape import reader; reader.answer_requests = None; "
    script += "made = reader.Reader('odd', reader.Spec('odd:Odd', {})); made.fork(); print(made.ask(30.0).kind)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "exited\n"
    assert "reader failed factory=odd:Odd" in done.stderr
    assert "'NoneType' object is not callable" in done.stderr


def test_a_source_that_does_not_exist_has_a_reason(tmp_path: Path) -> None:
    settings = ExporterSettings(state=tmp_path, sysfs=tmp_path / "sys", kmsg=tmp_path / "kmsg")
    reasons = {}
    for reader in hardware(settings, host_sources(settings))[1:]:
        reading = reader.ask(LONG)
        reader.close()
        assert (reading.ok, reading.supported, reading.samples) == (False, False, [])
        reasons[reader.name] = reading.reason
    assert str(tmp_path / "sys") in reasons["infiniband"]
    assert str(tmp_path / "kmsg") in reasons["xid"]
    assert "no GPU" in reasons["identity"]


def test_an_error_is_the_reason_and_the_child_goes_on(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(read="if not self.flag.exists(): raise ValueError('no sense in this')")
    failed = reader.ask(LONG)
    assert (failed.ok, failed.supported, failed.reason) == (False, True, "ValueError: no sense in this")
    (tmp_path / "flag").touch()
    assert reader.ask(LONG).ok


def test_a_collector_that_asks_to_start_afresh_gets_a_new_process(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(read="if not self.flag.exists(): raise RestartReader('the driver was replaced')")
    (tmp_path / "flag").touch()
    first = pid(reader.ask(LONG))
    (tmp_path / "flag").unlink()
    assert reader.ask(LONG).reason == "RestartReader: the driver was replaced"
    assert gone(first)
    (tmp_path / "flag").touch()
    assert pid(eventually(reader, lambda reading: reading.ok)) != first


def test_what_a_driver_prints_does_not_end_up_among_the_answers(odd: Callable[..., Reader]) -> None:
    assert odd(read="os.write(1, b'NVRM: hello\\n')").ask(LONG).ok


def test_threads_share_one_child(odd: Callable[..., Reader]) -> None:
    reader = odd(read="time.sleep(0.05)")
    answers: list[Reading] = []
    threads = [threading.Thread(target=lambda: answers.append(reader.ask(LONG))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pid(answer) for answer in answers}) == 1


ENDED = "open(f'{self.flag}.ended', 'a').write('x')"


def test_rows_and_labels_are_the_same_objects_until_they_change(odd: Callable[..., Reader]) -> None:
    reader = odd(
        read=("self.value = self.reads\nif self.reads > 2: samples.append((GPU_PRESENT, ('3', 'GPU-d'), self.reads))")
    )
    readings = [reader.ask(LONG).samples for _ in range(4)]
    child = readings[0][0][1][0]
    assert readings == [
        [(GPU_PRESENT, (child, ""), 1)],
        [(GPU_PRESENT, (child, ""), 1)],
        [(GPU_PRESENT, (child, ""), 2), (GPU_PRESENT, ("3", "GPU-d"), 3)],
        [(GPU_PRESENT, (child, ""), 3), (GPU_PRESENT, ("3", "GPU-d"), 4)],
    ]
    assert readings[0][0][1] is readings[1][0][1]
    assert readings[2][1][1] is readings[3][1][1]


def test_a_failed_read_between_two_good_ones_loses_no_label(odd: Callable[..., Reader]) -> None:
    reader = odd(read="if self.reads == 2: raise ValueError('no')")
    first, failed, third = (reader.ask(LONG) for _ in range(3))
    assert (failed.kind, failed.samples) == ("error", [])
    assert third.samples == first.samples != []


def test_the_child_that_replaces_another_sends_its_labels_again(odd: Callable[..., Reader]) -> None:
    reader = odd()
    first = pid(reader.ask(LONG))
    reader.ask(LONG)
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    assert reader.ask(LONG).restarts == ("exited",)
    second = eventually(reader, lambda reading: reading.ok)
    assert second.samples == [(GPU_PRESENT, (str(pid(second)), ""), 1)]
    assert pid(second) != first


@pytest.mark.parametrize(
    ("read", "kind", "reason"),
    [
        ("raise AccessLost('/dev/nvidiactl')", "blind", "AccessLost: /dev/nvidiactl"),
        ("raise OSError('unexpected')", "error", "OSError: unexpected"),
        (
            "samples[:] = [(GPU_PRESENT, ('0', ''), object())]",
            "error",
            "no samples: TypeError: Object of type object is not JSON serializable",
        ),
        (
            "samples[:] = [(GPU_PRESENT, 1)]",
            "error",
            "no samples: ValueError: not enough values to unpack (expected 3, got 2)",
        ),
        (
            "os.write(3, b'garbage\\n')",
            "exited",
            "the answer cannot be decoded: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            'os.write(3, b\'{"keys": [["of another release", []]]}\\n\')\ntime.sleep(60)',
            "exited",
            "the answer cannot be decoded: KeyError: 'of another release'",
        ),
    ],
)
def test_each_kind_of_failure_has_its_kind_and_reason(
    odd: Callable[..., Reader], read: str, kind: str, reason: str
) -> None:
    reading = odd(read=read).ask(LONG)
    assert (reading.ok, reading.supported, reading.kind, reading.reason) == (False, True, kind, reason)


def test_a_blind_source_has_the_samples_it_can_still_give(odd: Callable[..., Reader]) -> None:
    reader = odd(read="raise AccessLost('/dev/nvidia3', [(GPU_PRESENT, ('3', ''), 0)])")
    for _ in range(2):
        reading = reader.ask(LONG)
        assert (reading.kind, reading.reason) == ("blind", "AccessLost: /dev/nvidia3")
        assert reading.samples == [(GPU_PRESENT, ("3", ""), 0)]


def test_a_child_that_grows_is_replaced_but_not_at_every_read(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(resident_limit=1, close=ENDED)
    first = reader.ask(LONG)
    assert gone(pid(first))
    assert (tmp_path / "flag.ended").read_text() == "x"
    second, third = reader.ask(LONG), reader.ask(LONG)
    assert first.restarts == ("memory",)
    assert (second.restarts, third.restarts) == ((), ())
    assert pid(first) != pid(second) == pid(third)


def test_a_child_below_the_cap_stays(odd: Callable[..., Reader]) -> None:
    reader = odd(read="self.ballast = getattr(self, 'ballast', b'') + b'x' * (1 << 20)")
    assert len({pid(reader.ask(LONG)) for _ in range(5)}) == 1


def test_an_answer_that_was_not_fetched_for_long_is_discarded(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(stale_after=0.5, read=UNTIL_THE_FLAG)
    (tmp_path / "flag").touch()
    eventually(reader, lambda reading: reading.ok)
    (tmp_path / "flag").unlink()
    eventually(reader, lambda reading: reading.kind == "deadline")
    (tmp_path / "flag").touch()
    until(lambda: answered(reader))
    (tmp_path / "flag").unlink()
    time.sleep(1)
    assert reader.ask(0.1).kind == "deadline"
    (tmp_path / "flag").touch()
    eventually(reader, lambda reading: reading.ok)


def test_an_answer_has_its_age(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(read="time.sleep(0.3)")
    # The duration of the read does not count as age.
    assert shortest(lambda: reader.ask(LONG).age, 0.25) < 0.25
    reader = odd(read=FROM_THE_SECOND_UNTIL_ITS_FLAG)
    assert reader.ask(LONG).ok
    assert reader.ask(0.1).kind == "deadline"
    released = time.monotonic()
    (tmp_path / "flag2").touch()
    until(lambda: answered(reader))
    time.sleep(0.5)
    late = reader.ask(0.1)
    assert late.ok
    assert 0.5 <= late.age <= time.monotonic() - released


def test_a_collector_is_closed_when_its_reader_is(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(close=ENDED)
    child = pid(reader.ask(LONG))
    reader.close()
    assert not Path(f"/proc/{child}").exists()
    assert (tmp_path / "flag.ended").read_text() == "x"


def test_a_collector_is_closed_before_it_starts_afresh(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(read="raise RestartReader('the driver was replaced')", close=ENDED)
    reading = reader.ask(LONG)
    assert (reading.kind, reading.restarts) == ("error", ("afresh",))
    until((tmp_path / "flag.ended").exists)


def test_a_released_reader_has_no_process_until_it_resumes(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(close=ENDED)
    first = pid(reader.ask(LONG))
    assert reader.release()
    assert not Path(f"/proc/{first}").exists()
    assert (tmp_path / "flag.ended").read_text() == "x"
    for _ in range(3):
        released = reader.ask(LONG)
        assert (released.ok, released.kind, released.supported, released.samples) == (False, "released", True, [])
    reader.resume()
    assert pid(reader.ask(LONG)) != first


def test_a_hung_child_is_killed_to_release_the_driver(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)", read=FROM_THE_SECOND_UNTIL_THE_FLAG)
    child = pid(reader.ask(LONG))
    assert reader.ask(0.1).kind == "deadline"
    assert reader.release()
    assert not Path(f"/proc/{child}").exists()


# A call in uninterruptible sleep ignores every signal. A test cannot make one, so signals are dropped instead.


@pytest.fixture
def lost_kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "terminate", lambda process: None)
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        patch.setattr("flopwatch.node.scrape.reader.EXIT_GRACE", 0.0)
        yield


def test_a_driver_is_not_released_while_a_call_into_it_cannot_be_ended(
    odd: Callable[..., Reader], tmp_path: Path, lost_kills: None
) -> None:
    # Without this patch the child would end when its stdin closes. Uninterruptible sleep keeps every thread of a
    # process.
    stay = "os._exit = lambda status: time.sleep(60)"
    reader = odd(before=stay, read=FROM_THE_SECOND_UNTIL_THE_FLAG)
    child = pid(reader.ask(LONG))
    assert reader.ask(0.1).kind == "deadline"
    assert not reader.release()
    assert Path(f"/proc/{child}").exists()
    (tmp_path / "flag").touch()  # the call returns
    assert gone(child)
    assert reader.release()


def test_no_more_than_one_child_is_abandoned(odd: Callable[..., Reader], tmp_path: Path, lost_kills: None) -> None:
    started = f"Path(f'{tmp_path}/{{os.getpid()}}.pid').touch()"
    reader = odd(kill_after=0.1, grace=0.1, before=started, read=UNTIL_THE_FLAG)
    restarts = list[str]()

    def children() -> list[int]:
        reading = reader.ask(0.1)
        assert reading.kind == "deadline"
        restarts.extend(reading.restarts)
        return [int(file.stem) for file in tmp_path.glob("*.pid")]

    until(lambda: len(children()) == 2)
    for _ in range(20):  # 2 s; the first child was abandoned after a tenth of that
        assert len(children()) == 2
    assert all(Path(f"/proc/{child}").exists() for child in children())
    assert restarts == ["hung"]
    (tmp_path / "flag").touch()
    assert eventually(reader, lambda reading: reading.ok)


def test_a_thread_waits_for_another_no_longer_than_its_own_deadline(odd: Callable[..., Reader], tmp_path: Path) -> None:
    reader = odd(read=UNTIL_THE_FLAG)
    (tmp_path / "flag").touch()
    assert reader.ask(LONG).ok
    (tmp_path / "flag").unlink()
    first = threading.Thread(target=reader.ask, args=(LONG,))
    first.start()
    until(reader._lock.locked)
    started = time.monotonic()
    assert reader.ask(0.2).reason == "deadline"
    assert time.monotonic() - started < LONG / 2
    (tmp_path / "flag").touch()
    first.join()


@pytest.mark.parametrize("hung", [False, True])
def test_closing_a_reader_ends_its_child(odd: Callable[..., Reader], tmp_path: Path, hung: bool) -> None:
    reader = odd(read=UNTIL_THE_FLAG)
    (tmp_path / "flag").touch()
    child = pid(reader.ask(LONG))
    if hung:
        (tmp_path / "flag").unlink()
        assert reader.ask(0.1).reason == "deadline"
    reader.close()
    assert not Path(f"/proc/{child}").exists()


def test_a_child_imports_neither_the_web_server_nor_another_source(odd: Callable[..., Reader]) -> None:
    reader = odd(
        read=(
            "import sys\n"
            "heavy = {'fastapi', 'uvicorn', 'prometheus_client', 'opentelemetry', 'pynvml', 'torch'} & "
            "set(sys.modules)\n"
            "if heavy: raise ImportError(str(heavy))"
        )
    )
    assert reader.ask(LONG).reason == ""
