"""Test `flopwatch ledger replay` on recorded histories whose figures are worked out by hand."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwatch.ledger.replay import replay
from flopwatch.ledger.store import Store
from tests.support import ROOT, TESTS

HISTORIES = TESTS / "captures" / "histories"
EXPORTER = ROOT / "exporter"

# Seconds in each bucket, worked out by hand. A bucket that is not listed is 0.
EXPECTED: dict[str, dict[str, Any]] = {
    # a1: 300 s startup, 199 steps of 10 s, 5 s of the next, 3 checkpoints of 20 s. Then 900 s down. a2 from step 180.
    "crash_and_move": {
        "run": "r",
        "attempts": 2,
        "ends": {"silent": 1, "completed": 1},
        "buckets": {"productive": 6000, "lost": 195, "startup": 600, "checkpoint_save": 200, "down": 900, "queue": 600},
        "gpu_seconds": {"productive": 48000, "lost": 1560, "startup": 4800, "checkpoint_save": 1600, "down": 7200},
        "goodput": 6000 / 7895,
        "ettr": 6000 / 8495,
        "effective_mfu": 600 * 3.2e16 / (7895 * 8 * 989.4e12),
        "provisional_seconds": 0,
    },
    # a1 on 16 GPUs: 20 s startup, 12 steps of 4 s, a checkpoint of 6 s (for h2 a part of its steps). 8 s are lost until
    # the second node is noticed as gone. a2 on 8 GPUs from step 8: 4 steps of 8 s again, 2 more, 2 s other. FLOPs: 12
    # steps on h1 and the 10 that h2 reported, then steps 13 and 14.
    "two_nodes_then_one": {
        "run": "research/llm",
        "attempts": 2,
        "ends": {"failed": 1, "completed": 1},
        "buckets": {
            "productive": 48 + 16,
            "lost": 8 + 32,
            "startup": 40,
            "checkpoint_save": 6,
            "other": 2,
            "down": 30,
            "queue": 60,
        },
        "gpu_seconds": {
            "productive": 48 * 16 + 16 * 8,
            "lost": 8 * 16 + 32 * 8,
            "startup": 20 * 16 + 20 * 8,
            "checkpoint_save": 6 * 16,
            "other": 2 * 8,
            "down": 30 * 16,
        },
        "goodput": 64 / 182,
        "ettr": 64 / 242,
        "effective_mfu": (22e16 + 4e16) / (112 * 16e15 + 70 * 8e15),
        "provisional_seconds": 0,
    },
    # Steps of 1 s. a1 executes 15, with a checkpoint at 10. a2 and a3 die at step 15 again. a4 executes 11 to 15 again
    # and reaches 23, with a checkpoint at 20. Lines are repeated and late, and the start of a3 is missing.
    "crash_loop": {
        "run": "loop",
        "attempts": 4,
        "ends": {"silent": 3, "stopped": 1},
        "buckets": {"productive": 15 + 8, "lost": 5 * 3, "startup": 20, "data_stall": 2, "down": 90, "other": 2},
        "gpu_seconds": {
            "productive": 4 * 23,
            "lost": 4 * 15,
            "startup": 4 * 20,
            "data_stall": 4 * 2,
            "down": 4 * 90,
            "other": 4 * 2,
        },
        "goodput": 23 / 152,
        "ettr": None,
        "effective_mfu": None,
        "provisional_seconds": 3,
    },
}


def lines_of(history: str) -> list[str]:
    return (HISTORIES / f"{history}.jsonl").read_text().splitlines()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flopwatch", "ledger", "replay", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(EXPORTER)},
    )


@pytest.mark.parametrize("history", EXPECTED)
def test_a_history_has_the_figures_worked_out_by_hand(history: str) -> None:
    summary, unreadable = replay(lines_of(history))
    expected = EXPECTED[history]
    assert unreadable == []
    assert list(summary["runs"]) == [expected["run"]]
    run = summary["runs"][expected["run"]]
    for figure in ("goodput", "ettr", "effective_mfu", "provisional_seconds"):
        assert run[figure] == pytest.approx(expected[figure])
    assert run["attempts"] == expected["attempts"]
    for table in ("buckets", "gpu_seconds", "ends"):
        assert {name: value for name, value in run[table].items() if value} == pytest.approx(expected[table])
    assert sum(run["buckets"].values()) - run["buckets"]["queue"] == pytest.approx(run["wall_seconds"])


@pytest.mark.parametrize("history", EXPECTED)
def test_lines_that_come_again_change_nothing(history: str) -> None:
    lines = lines_of(history)
    once, _ = replay(lines)
    assert replay([line for line in lines for _ in range(2)])[0] == once
    assert replay(lines + lines)[0] == once
    chance = random.Random(1)
    again = list(lines)
    for _ in range(len(lines)):
        place = chance.randrange(len(lines))
        again.insert(chance.randint(again.index(lines[place]) + 1, len(again)), lines[place])
    assert replay(again)[0] == once


@pytest.mark.parametrize("history", EXPECTED)
def test_replayed_and_live_give_the_same_figures(history: str, tmp_path: Path) -> None:
    lines = lines_of(history)
    store = Store(tmp_path / "ledger.sqlite")
    for line in lines:
        store.apply([json.loads(line)])
    assert store.summary() == replay(lines)[0]
    store.close()


def test_a_history_that_breaks_off_is_accounted_for_up_to_its_last_line() -> None:
    run = replay(lines_of("crash_and_move")[:100])[0]["runs"]["r"]
    assert (run["state"], run["wall_seconds"], run["open_seconds"]) == ("running", 1290, 0)
    run = replay(lines_of("crash_and_move")[:203])[0]["runs"]["r"]
    assert (run["wall_seconds"], run["open_seconds"], run["buckets"]["productive"]) == (2355, 5, 1990)


def test_the_command_prints_json() -> None:
    done = command(str(HISTORIES / "crash_and_move.jsonl"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    run = json.loads(done.stdout)["runs"]["r"]
    assert (f"{run['goodput']:.3f}", f"{run['ettr']:.3f}", run["attempts"]) == ("0.760", "0.706", 2)


def test_the_command_prints_a_table_for_people() -> None:
    done = command(str(HISTORIES / "two_nodes_then_one.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == """\
research/llm: completed, 2 attempts, wall 182.0 s
  goodput 0.352  ETTR 0.264  effective MFU 0.111
  productive                    64.0 s   35.2%
  lost                          40.0 s   22.0%
  startup                       40.0 s   22.0%
  checkpoint_save                6.0 s    3.3%
  down                          30.0 s   16.5%
  queue                         60.0 s
  other                          2.0 s    1.1%
"""
    )


def test_lines_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    lines = lines_of("crash_loop")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join([*lines[:3], '{"t": 21, "run": "loop"', "", '{"t": 22, "run": "loop"}', *lines[3:]]))
    done = command(str(damaged), "--json")
    assert json.loads(done.stdout) == replay(lines)[0]
    assert done.stderr.splitlines() == [
        f"flopwatch: {damaged}: line 4: Input data was truncated",
        f"flopwatch: {damaged}: line 6: Object missing required field event",
    ]
    assert done.returncode == 1


def test_a_history_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = command(str(tmp_path / "none.jsonl"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"flopwatch: {tmp_path / 'none.jsonl'}: No such file or directory\n"


def test_the_order_of_lines_does_not_matter_and_each_may_come_again() -> None:
    for name in ("crash_and_move", "two_nodes_then_one"):
        lines = (HISTORIES / f"{name}.jsonl").read_text().splitlines()
        expected = replay(lines)
        for seed in range(5):
            chance = random.Random(seed)
            shuffled = [*lines, *chance.sample(lines, len(lines) // 5)]
            chance.shuffle(shuffled)
            assert replay(shuffled) == expected
        assert replay(iter(shuffled)) == expected, "also of what can be read only once"


def test_lines_that_are_late_by_a_few_places_are_taken_by_their_stamps() -> None:
    lines = (HISTORIES / "crash_and_move.jsonl").read_text().splitlines()
    for seed in range(10):
        chance = random.Random(seed)
        late = [place + chance.choice((0, 0, 0, 20)) * chance.random() for place in range(len(lines))]
        assert replay([lines[place] for place in sorted(range(len(lines)), key=late.__getitem__)]) == replay(lines)


def record_line(event: str, t: float, attempt: object = "a", source: object = "h", /, **more: Any) -> str:
    return json.dumps({"t": t, "run": "r", "attempt": attempt, "source": source, "event": event, **more})


def figures(*lines: str) -> dict[str, Any]:
    summary, unreadable = replay(lines)
    assert unreadable == []
    run: dict[str, Any] = summary["runs"]["r"]
    return run | {
        name: {bucket: value for bucket, value in run[name].items() if value} for name in ("buckets", "gpu_seconds")
    }


def test_steps_up_to_the_restored_one_count_as_made_before() -> None:
    peak = {"gpus": 8, "peak_flops": 10.0}
    run = figures(
        record_line("start", 0, "a", step=50, **peak),
        record_line("start", 100, "b", step=35, **peak),
        record_line("snapshot", 260, "b", step=51, activity_seconds={"step": 160}, model_flops=1600, **peak),
    )
    # Steps of 10 s. Only step 51 is new, in seconds and in FLOPs.
    assert run["buckets"] == {"productive": 10, "lost": 150, "down": 100}
    assert run["effective_mfu"] == 100 / (10 * 260)


def test_a_process_that_reports_no_work_is_alive_and_its_time_is_not_down_time() -> None:
    idle = [record_line("snapshot", t, step=0, activity_seconds={"step": 0}) for t in range(10, 101, 10)]
    run = figures(
        record_line("start", 0, step=0), *idle, record_line("start", 200, "b", step=0), record_line("finish", 210, "b")
    )
    assert run["buckets"] == {"other": 110, "down": 100}


def test_one_source_may_report_the_position_of_all() -> None:
    peak = {"gpus": 4, "peak_flops": 10.0}
    lines = [record_line("start", 0, "a", source, step=0, **peak) for source in "xyz"]
    for t in range(10, 101, 10):
        lines += [
            record_line(
                "snapshot",
                t,
                "a",
                source,
                activity_seconds={"step": t},
                model_flops=10 * t,
                **peak,
                **({"step": t // 10} if source == "y" else {}),
            )
            for source in "xyz"
        ]
    run = figures(*lines)
    assert (run["goodput"], run["buckets"]) == (pytest.approx(1, abs=0.11), {"productive": pytest.approx(100, abs=11)})
    assert run["retained_flops"] == pytest.approx(3 * 1000, rel=0.11)


def test_gpus_that_an_attempt_is_given_while_it_runs_were_not_held_before() -> None:
    def at(t: float, gpus: int) -> str:
        return record_line(
            "snapshot",
            t,
            step=t // 10,
            activity_seconds={"step": t},
            gpus=gpus,
            peak_flops=gpus * 10.0,
            model_flops=gpus * 5.0 * t,
        )

    run = figures(
        record_line("start", 0, step=0, gpus=4, peak_flops=40.0),
        *(at(t, 4) for t in range(10, 201, 10)),
        *(at(t, 8) for t in range(210, 401, 10)),
    )
    assert run["gpu_seconds"] == {"productive": pytest.approx(200 * 4 + 200 * 8, rel=0.02)}


def test_names_may_be_numbers_and_a_file_may_begin_with_a_mark_or_come_from_a_pipe(tmp_path: Path) -> None:
    lines = [
        record_line("start", 0, 1, 7, step=0),
        record_line("snapshot", 20, 1, 7, step=2, activity_seconds={"step": 20}),
        record_line("finish", 20, 1, 7),
    ]
    assert figures(*lines)["buckets"] == {"productive": 20}
    path = tmp_path / "history.jsonl"
    path.write_text("\ufeff" + "\n".join(lines))
    for name, given in ((str(path), None), ("-", path.read_text())):
        done = subprocess.run(
            [sys.executable, "-m", "flopwatch", "ledger", "replay", name, "--json"],
            input=given,
            capture_output=True,
            text=True,
            cwd=EXPORTER,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["runs"]["r"]["state"] == "completed"


@pytest.mark.parametrize("line", ["[" * 100_000, '{"t": ' + "9" * 5000 + "}"])
def test_a_line_that_python_itself_refuses_is_named_too(line: str) -> None:
    summary, [message] = replay([line])
    assert summary == {"runs": {}}
    assert message.startswith("line 1: ")


@pytest.mark.parametrize(
    ("lines", "expected_errors"),
    [
        ([], ["no run in this history: a run begins with an event submitted, start or snapshot"]),
        (
            ["}"] * 30 + [record_line("start", 0)],
            [f"line {n}: JSON is malformed: invalid character (byte 0)" for n in range(1, 21)]
            + ["10 more lines that cannot be read"],
        ),
    ],
)
def test_errors_in_a_history_are_listed_up_to_twenty_times(
    lines: list[str], expected_errors: list[str], tmp_path: Path
) -> None:
    (tmp_path / "h").write_text("\n".join(lines))
    done = command(str(tmp_path / "h"), "--json")
    assert done.returncode == 1
    assert [text.partition(f"{tmp_path / 'h'}: ")[2] for text in done.stderr.splitlines()] == expected_errors
    assert list(json.loads(done.stdout)["runs"]) == (["r"] if lines else [])


def crash(*, source_of_b: str = "h") -> list[str]:
    """Return the records of a run that crashes after step 20 (last snapshot at 200) and resumes at 250 from step 10."""
    peak = {"gpus": 2, "peak_flops": 2e12}

    def step(t: float, attempt: str, source: str, made: int, first: int) -> str:
        seconds = 10 * (made - first)
        return record_line(
            "snapshot",
            t,
            attempt,
            source,
            step=made,
            activity_seconds={"step": seconds},
            model_flops=1e11 * seconds,
            **peak,
        )

    return [
        record_line("start", 0, "a", step=0, **peak),
        step(100, "a", "h", 10, 0),
        step(200, "a", "h", 20, 0),
        record_line("start", 250, "b", source_of_b, step=10, **peak),
        step(350, "b", source_of_b, 20, 10),
        step(450, "b", source_of_b, 30, 10),
        record_line("finish", 450, "b", source_of_b, status="completed"),
    ]


def test_a_line_that_comes_after_those_that_follow_it_is_put_where_it_was() -> None:
    lines = crash()
    expected = figures(*lines)
    assert expected["buckets"] == {"productive": 300, "lost": 100, "down": 50}
    for number, later in ((2, 3), (2, 4), (2, 6), (5, 6), (4, 5), (1, 3)):
        moved = lines[:number] + lines[number + 1 : later + 1] + [lines[number]] + lines[later + 1 :]
        assert figures(*moved) == expected, (number, later)
    assert figures(*lines[3:], *lines[:3]) == expected
    planned = record_line("finish", 200, "a", status="preempted")
    assert figures(*lines[:3], planned, *lines[3:]) == figures(*lines[:4], planned, *lines[4:])


def test_simultaneous_records_of_hosts_may_follow_one_another() -> None:
    def host(name: str, until: int) -> list[str]:
        return [
            record_line("start", 0, "a", name, step=0),
            *(
                record_line(
                    "snapshot", t, "a", name, step=t // 10 - 10, activity_seconds={"startup": 100, "step": t - 100}
                )
                for t in range(100, until + 1, 10)
            ),
        ]

    together = sorted(host("x", 200) + host("y", 400), key=lambda line: float(json.loads(line)["t"]))
    assert figures(*host("x", 200), *host("y", 400)) == figures(*together)
    assert figures(*together)["buckets"] == {"startup": 100, "productive": 300}


def test_late_lines_of_one_run_change_nothing_in_the_order_of_another() -> None:
    # The second node's clock is behind all the time.
    skewed = crash()[:3] + [json.dumps(json.loads(line) | {"t": json.loads(line)["t"] - 80}) for line in crash()[3:]]
    other = [json.dumps(json.loads(line) | {"run": "other"}) for line in crash()]
    mixed, _ = replay([*skewed, *other[:2], *other[3:], other[2]])
    assert mixed["runs"]["r"] == replay(skewed)[0]["runs"]["r"]
    assert mixed["runs"]["other"]["buckets"] == replay(other)[0]["runs"]["other"]["buckets"]
