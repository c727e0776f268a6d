"""Test `flopwatch top` against a running exporter of a simulated node, on a terminal and without one."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flopwatch.simulate import h100
from simulator.host import SimulatedNode
from tests.support.exporter_process import ENVIRONMENT, Exporter, exporter, flopwatch_command
from tests.support.otlp_by_hand import counter, gauge, process
from tests.support.terminal import HEIGHT, Terminal

STARTED = time.time() - 600


def push(node: Exporter, *, steps: int, stepping: float) -> None:
    """Push as two ranks of `lm` on GPUs 0 and 1. Rank 1 waits for a tenth of each step, and counts no FLOPs."""
    at = time.time()
    for rank in (0, 1):
        node.push(
            process(
                counter("training_activity_seconds_total", 10.0, at, activity="startup"),
                counter("training_activity_seconds_total", stepping - 1, at, activity="step"),
                counter("training_activity_seconds_total", 1.0, at, activity="data_stall"),
                counter("training_steps_total", steps, at),
                gauge("training_position_steps", 5000 + steps, at),
                counter("training_tokens_total", steps * 8192, at),
                *(
                    [
                        counter("training_model_flops_total", steps * 4e14, at),
                        counter("training_capacity_flops_total", stepping * 1e15, at),
                    ]
                    if rank == 0
                    else [
                        counter("training_collective_wait_seconds_total", stepping / 10, at),
                        counter("training_measured_step_seconds_total", stepping, at),
                    ]
                ),
                gauge("training_rank_info", 1, at, uuid=h100.uuid(rank), local_rank=str(rank), attempt="a1"),
                rank=rank,
                start_unix=STARTED,
            )
        )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    folder = tmp_path_factory.mktemp("top")
    with exporter(folder / "state", "--simulate", "h100x8", "--series=core") as running:
        running.wait_for_hardware()
        push(running, steps=100, stepping=90.0)
        yield running


def rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of the rows that begin with this word."""
    found = [re.split(r"  +|(?<=%) ", line.strip()) for line in text.splitlines() if line.strip().startswith(first)]
    assert found, text
    return found


def test_once_prints_the_means_since_the_start(node: Exporter) -> None:
    answer = flopwatch_command("top", "--once", "--url", f"http://{node.metrics}/metrics")
    assert answer.returncode == 0, answer.stderr
    assert "\x1b" not in answer.stdout
    first, second = rows(answer.stdout, "lm ")
    assert first == ["lm", "0", "5,100", "44.4 %", "89.0 %", "900 ms", "9,102", "1 %", "-"]
    assert second == ["lm", "1", "5,100", "-", "89.0 %", "900 ms", "9,102", "1 %", "10 %"]
    gpus = [line for line in answer.stdout.splitlines() if "H100" in line]
    assert len(gpus) == 8
    assert re.match(r" ?0 H100 80GB HBM3 +\d+ % +(\d+ %|-) +\d+ W +\d+ °C +[\d.]+/80 GiB +lm 0", gpus[0])
    assert re.search(r"host ok$", answer.stdout, re.MULTILINE)
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_on_a_terminal_it_is_live_and_keys_work(node: Exporter, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flopwatch", "top", "--interval", "0.5", "--url", f"http://{node.metrics}/metrics"]
    with Terminal(command, ENVIRONMENT, tmp_path) as terminal:
        screen = terminal.until(lambda lines: any("44.4 %" in line for line in lines))
        assert len([line for line in screen if "H100" in line]) == 8
        assert len(screen) == HEIGHT
        terminal.press("s")
        terminal.until(lambda lines: [row[1] for row in rows("\n".join(lines), "lm ")] == ["1", "0"])
        push(node, steps=110, stepping=94.0)  # 400 ms a step since the last push
        terminal.until(lambda lines: rows("\n".join(lines), "lm ")[1][2:6] == ["5,110", "100.0 %", "89.4 %", "400 ms"])
        assert not terminal.restored()
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.restored()
        # The alternate screen, which pyte does not draw, was left at the end.
        assert terminal.written.rindex(b"\x1b[?1049l") > terminal.written.rindex(b"\x1b[?1049h")


def test_a_restart_of_the_exporter_is_named_and_outlived(tmp_path: Path) -> None:
    with exporter(tmp_path / "state", "--simulate", "h100x8") as running:
        running.wait_for_hardware()
        url = f"http://{running.metrics}/metrics"
        command = [sys.executable, "-m", "flopwatch", "top", "--interval", "0.3", "--url", url]
        with Terminal(command, ENVIRONMENT, tmp_path) as terminal:
            terminal.until(lambda lines: any("H100" in line for line in lines))
            running.end()
            terminal.until(lambda lines: "it is tried again every" in "".join(lines))
            with exporter(tmp_path / "state", "--simulate", "h100x8", "--listen", running.metrics):
                terminal.until(lambda lines: any("H100" in line for line in lines))
            terminal.press("\x03")
            assert terminal.end() == 130
            assert terminal.restored()


def test_without_an_exporter_the_hardware_is_read(tmp_path: Path) -> None:
    state = tmp_path / "state"
    answer = flopwatch_command("top", "--simulate", "h100x8", "--state", state)
    assert answer.returncode == 0, answer.stderr
    assert "No rank has pushed to this exporter" in answer.stdout
    assert answer.stdout.count("H100 80GB HBM3") == 8
    SimulatedNode(state / "simulated").lose(5)
    answer = flopwatch_command("top", "--simulate", "h100x8", "--state", state)
    assert "host bad" in answer.stdout
    assert re.search(r"^bad: GPU 5 .*", answer.stdout, re.MULTILINE)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    answer = flopwatch_command("top", "--url", "http://127.0.0.1:9/metrics")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == "flopwatch: no exporter listens at http://127.0.0.1:9/metrics\n"
    answer = flopwatch_command("top", "--simulate", "h100x8", "--state", tmp_path, "--prometheus", "http://127.0.0.1:9")
    assert answer.returncode == 1
    assert answer.stderr.startswith("flopwatch: http://127.0.0.1:9 does not answer as a Prometheus does")
