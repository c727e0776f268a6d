"""The demo ends as it should, however it is ended, and leaves no process and no port behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from demo import summary
from demo.__main__ import emptied
from demo.servers import ROOT, find
from demo.stack import DemoStack, StackError, free_ports
from tests.support.machine import PATIENCE, until

pytestmark = pytest.mark.long

SUMMARY = summary.Summary(
    mfu=0.4149,
    effective_mfu=0.3622,
    goodput=0.9549,
    ettr=0.9312,
    step_seconds=0.2982,
    tokens_per_second=26432.4,
    steps=101.0,
    straggler=summary.Straggler("2", 0.2264, "node-7", "3", "GPU-51a7"),
    waits_measured=True,
    buckets={"productive": 955.0, "checkpoint_save": 44.9, "data_stall": 0.1},
    firing=["TrainingStraggler (warning)"],
)
NOTHING_YET = summary.Summary(None, None, None, None, None, None, None, None, False, {}, [])


class Demo:
    """A demo with the simulated job in a process of its own."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self.mark = f"DEMO_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.output = state.with_suffix(".out")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "demo", "--train", "simulated", "--state", str(state), *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "exporter"), name: value},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, text: str, seconds: float = 2 * PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def left(self) -> list[str]:
        """Return the command lines of all processes that inherited this demo's environment."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass
        return found

    def open_ports(self) -> list[int]:
        """Return which of the ports the demo printed still answer."""
        ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", self.output.read_text())}
        assert len(ports) >= 2
        found = []
        for port in ports:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(port)
        return found


@pytest.fixture(scope="module", autouse=True)
def servers() -> None:
    """Fetch Prometheus and Alertmanager first, so that no test has to wait for it."""
    find()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def start(*arguments: str) -> Demo:
        demos.append(Demo(tmp_path / "state", *arguments))
        return demos[-1]

    yield start
    for demo in demos:
        demo.process.kill()
        demo.process.wait()


@pytest.mark.e2e
def test_a_demo_of_some_seconds_ends_by_itself_on_a_table_and_leaves_nothing(start: Callable[..., Demo]) -> None:
    demo = start("--seconds", "10")
    assert demo.process.wait(2 * PATIENCE) == 0
    text = demo.output.read_text()
    for row in (
        r"\| MFU +\| +[1-4]\d\.\d % \|",
        r"\| Goodput +\| +\d\d\.\d % \|",
        r"\| Steps +\| +\d+ \|",
        r"\| Straggler +\| +(none|-|[0-3] \(\d+\.\d %\)) \| (no rank|on \S+, GPU [0-3] \(GPU-51a70000-\S+\))",
    ):
        assert re.search(row, text), text
    mfu, effective = re.findall(r"\| (?:Effective )?MFU +\| +([0-9.]+|-) ?%? ", text)
    assert effective == "-" or float(effective) <= float(mfu)
    assert "Rank 2 is now slowed by 30 %" in text
    assert demo.left() == []
    assert demo.open_ports() == []


@pytest.mark.e2e
def test_an_interrupted_demo_ends_in_order(start: Callable[..., Demo]) -> None:
    demo = start()
    demo.wait_for("0:00  The first step")
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(PATIENCE) == 0
    text = demo.output.read_text()
    assert "| Steps" in text
    assert "Traceback" not in text
    assert demo.left() == []
    assert demo.open_ports() == []


@pytest.mark.e2e
@pytest.mark.parametrize("pause", [0.01, 0.1], ids=["while the last summary is read", "while programs are stopped"])
def test_an_impatient_second_interrupt_leaves_no_orphan(start: Callable[..., Demo], pause: float) -> None:
    demo = start()
    demo.wait_for("0:00  MFU")
    for _ in range(3):
        demo.process.send_signal(signal.SIGINT)
        time.sleep(pause)
    assert demo.process.wait(PATIENCE) == 0, demo.output.read_text()
    assert "Traceback" not in demo.output.read_text()
    assert demo.left() == []


@pytest.mark.e2e
def test_a_killed_demo_takes_everything_with_it(start: Callable[..., Demo]) -> None:
    demo = start()
    demo.wait_for("0:00  The first step")
    assert len(demo.left()) >= 10  # demo, Prometheus, Alertmanager, exporter and its readers, launcher and ranks
    demo.process.kill()
    demo.process.wait()
    until(lambda: demo.left() == [])  # at once, but for a simulated rank that has just begun to wait for the others
    assert demo.open_ports() == []


@pytest.mark.e2e
def test_a_second_demo_in_the_same_folder_is_refused(start: Callable[..., Demo]) -> None:
    start().wait_for("Starting Prometheus")
    second = start()
    assert second.process.wait(PATIENCE) == 1
    assert "another demo runs in" in second.output.read_text()


@pytest.mark.e2e
def test_a_folder_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StackError, match="not from a demo"), emptied(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").exists()
    with emptied(tmp_path / "new"):
        (tmp_path / "new" / "old.log").touch()
    with emptied(tmp_path / "new"):
        assert not (tmp_path / "new" / "old.log").exists()


def test_a_program_that_fails_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with DemoStack(tmp_path, train="simulated", trainer=("--ranks", "none")) as stack:
        stack.children["training"].process.wait(PATIENCE)
        with pytest.raises(StackError, match=r"training ended with status 2(.|\n)*invalid int value: 'none'"):
            stack.check()
    stack.stop()  # once more changes nothing
    assert stack.processes() == []


@pytest.mark.e2e
def test_the_error_of_a_refused_query_has_the_query_and_the_reason(tmp_path: Path) -> None:
    with DemoStack(tmp_path, train=None) as stack:
        assert stack.prometheus.value("vector(7)") == 7
        assert stack.prometheus.query("1 + 1") == [({}, 2.0)]
        with pytest.raises(ValueError, match=r"sum\(: .*parse error"):
            stack.prometheus.query("sum(")
        assert stack.prometheus.query_range("vector(7)", 1000, 1002, 1) == [({}, [(1000, 7), (1001, 7), (1002, 7)])]


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(20))) == 20


def test_where_there_is_no_terminal_a_moment_is_a_line() -> None:
    assert summary.line(SUMMARY, 71.9) == (
        "1:11  MFU 41.5 %  goodput 95.5 %  step 101  298 ms  straggler 2 (22.6 %)  firing: TrainingStraggler (warning)"
    )
    assert summary.line(NOTHING_YET, 0) == "0:00  MFU -  goodput -  step -  -  straggler -  firing: nothing"


def test_the_table_shows_every_fact_and_leaves_out_what_is_unknown() -> None:
    assert summary.rows(SUMMARY) == [
        ("MFU", "41.5 %", "model FLOPs over peak FLOPs in steps, mean of the whole run"),
        ("Effective MFU", "36.2 %", "of the whole run, over all time the GPUs were held"),
        ("Goodput", "95.5 %", "share of the wall clock that advanced the model"),
        ("ETTR", "93.1 %", "the same since submission"),
        ("Steps", "101", "298 ms each"),
        ("Tokens/s", "26,432", ""),
        ("Straggler", "2 (22.6 %)", "on node-7, GPU 3 (GPU-51a7)"),
        ("Time went to", "", "productive 95.5 % · checkpoint save 4.5 %"),
    ]
    assert ("Straggler", "-", "no rank is measured yet") in summary.rows(NOTHING_YET)
    well = replace(SUMMARY, straggler=None)
    assert ("Straggler", "none", "no rank slows the run now") in summary.rows(well)
    assert "ETTR" not in {name for name, _, _ in summary.rows(NOTHING_YET)}


def test_the_screen_fits_a_terminal_of_100_by_30() -> None:
    story = [
        "0:00  The first step.",
        "0:35  Rank 2 is now slowed by 30 %.",
        "1:01  The Slack message has arrived.",
        "2:01  Rank 2 is at full speed again.\n      .venv/bin/python -m simulator.host " + "d" * 60,
    ]
    message = "[FIRING] TrainingStraggler: One rank makes all the others wait.\n" + "Rank 2 of run demo is late. " * 9
    urls = [
        ("MFU graph", "http://127.0.0.1:41234/graph?" + "x" * 70),
        ("Exporter", "http://127.0.0.1:4/metrics"),
        ("Alertmanager", "http://127.0.0.1:50000"),
    ]
    console = Console(width=100, height=30, force_terminal=True, color_system=None)
    lines = console.render_lines(summary.screen(SUMMARY, "demo", urls, story, message), pad=False)
    assert len(lines) <= 30
    assert "Rank 2 of run demo is late." in "".join(segment.text for line in lines for segment in line)
