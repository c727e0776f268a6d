"""Steps that do not end: for how long one is open, signs of ranks, and their GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.ledger.store import Store
from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import open_step
from flopwatch.node.telemetry.attempts import Record
from flopwatch.node.telemetry.evidence import EvidenceLog
from flopwatch.node.telemetry.ledger_client import Embedded, Forward, Outcomes
from flopwatch.node.telemetry.open_step import GpuActivity, HostParts, RankOfHost, StepClock
from flopwatch.node.telemetry.otlp import Push
from flopwatch.node.telemetry.process_exit import ProcessWatch
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import ExporterSettings
from tests.support.otlp_by_hand import START, counter, gauge, process, request


class Clock:
    """Clock that a test moves, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def push(
    steps: float | None, seconds: dict[str, float], called: float | None = None, opened: float | None = None
) -> Push:
    """Return the push of rank 3, which has so many steps and seconds in activities."""
    own = ("lm", "3")
    samples: list[Sample] = [
        (m.TRAINING_ACTIVITY_SECONDS_TOTAL, (*own, name), value) for name, value in seconds.items()
    ]
    samples += [(m.TRAINING_STEPS_TOTAL, own, steps)] if steps is not None else []
    samples += [(m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER, own, called)] if called is not None else []
    samples += [(m.TRAINING_GROUP_SEQUENCE_NUMBER, (*own, "tp", "2,3"), called)] if called is not None else []
    samples.append((m.TRAINING_RANK_INFO, ("lm", "3", "h", "GPU-3", "3", "a", "", "", "", "", ""), 1.0))
    return Push("", "lm", "a", 3, 0.0, sum(seconds.values()), open_step_seconds=opened, samples=tuple(samples))


def clock_of(*pushes: Push) -> StepClock:
    """Return the clock of a rank after these pushes."""
    found: StepClock | None = None
    for one in pushes:
        found = StepClock.of(one, found)
    assert found is not None
    return found


def rank(step: StepClock, received: float, end: str | None = None, blocked: float | None = None) -> RankOfHost:
    return RankOfHost(push(9, {"step": 20.0}, called=40.0), received, step, blocked, end)


def test_a_step_is_open_over_several_pushes_with_its_wait_for_data() -> None:
    begun = push(9, {"step": 20.0}, opened=2.0)
    working, waiting = push(9, {"step": 25.0}), push(9, {"step": 25.0, "data_stall": 5.0})
    assert clock_of(begun).seconds == 2
    assert clock_of(begun, working)[:3] == (7, True, False)
    assert clock_of(begun, working, waiting)[:3] == (12, True, True)
    assert clock_of(begun, working, push(10, {"step": 26.0}, opened=0.5)).seconds == 0.5


def test_a_checkpoint_within_a_step_is_no_open_step() -> None:
    begun, saving = push(9, {"step": 30.0}, opened=12.0), push(9, {"step": 30.0, "checkpoint_save": 5.0})
    assert rank(clock_of(begun, saving), 100).open_seconds(200) == 0
    again = push(9, {"step": 35.0, "checkpoint_save": 5.0})
    assert rank(clock_of(begun, saving, again), 100).open_seconds(103) == 20


def test_of_a_hook_that_counts_no_steps_its_own_clock_counts() -> None:
    assert clock_of(push(None, {"step": 30.0}, opened=12.0), push(None, {"step": 35.0}, opened=1.0)).seconds == 1


def test_a_push_that_came_twice_changes_nothing() -> None:
    begun, later = push(9, {"step": 20.0}, opened=2.0), push(9, {"step": 25.0})
    assert clock_of(begun, later, later) == clock_of(begun, later)


OPEN = StepClock(20.0, True, False, 9, 20.0, 0.0, 20.0, ended=9.0)
YOUNG = StepClock(1.0, True, False, 9, 20.0, 0.0, 20.0, ended=9.0)


def test_the_rank_that_began_its_step_last_counts_unless_it_is_silent_or_gone() -> None:
    assert open_step.seconds_open([rank(OPEN, 100), rank(YOUNG, 100)], 104) == 5
    assert open_step.seconds_open([rank(OPEN, 160), rank(YOUNG, 100)], 164) == 24
    assert open_step.seconds_open([rank(OPEN, 100), rank(YOUNG, 100)], 164) == 65  # all are silent
    assert open_step.seconds_open([rank(OPEN, 100), rank(YOUNG, 100, end="gone")], 104) == 24
    assert open_step.seconds_open([rank(YOUNG, 100, end="gone")], 104) == 0


@pytest.mark.parametrize(
    ("one", "signs"),
    [
        (rank(OPEN, 100), []),
        (rank(OPEN, 50), ["silent"]),
        (rank(OPEN, 51), []),
        (rank(OPEN, 50, blocked=91.0), ["blocked"]),
        (rank(OPEN, 100, blocked=91.5), []),
        (rank(OPEN._replace(for_data=True), 100), ["data"]),
        (rank(OPEN, 100, end="gone"), ["gone"]),
        (rank(OPEN, 100, end="finished"), ["gone"]),
        (rank(OPEN, 100, end="silent"), ["silent"]),
    ],
)
def test_signs_of_a_process_at_101_seconds(one: RankOfHost, signs: list[str]) -> None:
    assert list(one.signs(101.0)) == signs


def field_of(one: RankOfHost, clock: float, p99: float | None = None, **parts: Any) -> dict[str, Any] | None:
    return open_step.field_of({3: one}, p99, clock, 1000.0, HostParts(GpuActivity(Clock()), **parts))


def test_a_record_tells_what_ranks_have_called_once_the_step_is_late() -> None:
    assert field_of(rank(YOUNG, 100), 107.9) is None
    assert field_of(rank(YOUNG, 100), 108) == {
        "t": 1000.0,
        "seconds": 9.0,
        "overdue_after": 15.0,
        "ranks": [[3, 40.0, [["tp", "2,3", 40.0]], [], None]],
    }
    assert field_of(rank(YOUNG, 100), 108, p99=4.0) is None
    assert field_of(rank(YOUNG._replace(steps=None), 100), 108) is None  # it has made none


def test_calls_of_a_rank_whose_push_may_be_lost_are_left_out() -> None:
    rows = {age: (field_of(rank(OPEN, 100), 100 + age) or {})["ranks"][0][1:4] for age in (12, 13, 50, 51)}
    assert rows[12] == [40.0, [["tp", "2,3", 40.0]], []]
    assert rows[13] == rows[50] == [None, [], []]
    assert rows[51] == [40.0, [["tp", "2,3", 40.0]], ["silent"]]


def test_a_broken_gpu_and_a_port_that_is_down_are_signs() -> None:
    found = field_of(rank(OPEN, 100), 101, broken={"GPU-3"}, link_down=True)
    assert found is not None
    assert found["ranks"][0][3] == ["gpu", "link"]


def gpu(utilization: float, watts: float, tensor: float, profiled: float = 0.0, present: float = 1.0) -> list[Sample]:
    """Return what a scrape reads of a GPU with a limit of 700 W."""
    values: dict[Metric, float] = {
        m.GPU_UTILIZATION_RATIO: utilization,
        m.GPU_POWER_WATTS: watts,
        m.GPU_POWER_LIMIT_WATTS: 700.0,
        m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL: tensor,
        m.GPU_PROFILED_SECONDS_TOTAL: profiled,
        m.GPU_PRESENT: present,
    }
    return [(row, ("3", "GPU-3"), value / row.scale) for row, value in values.items()]


def test_what_a_gpu_did_since_a_step_began_is_known_after_two_readings() -> None:
    clock = Clock()
    activity = GpuActivity(clock)
    for clock.now, (busy, watts, tensor) in {
        0: (1.0, 700.0, 10.0),
        15: (0.0, 280.0, 16.0),
        30: (0.5, 140.0, 17.5),
    }.items():
        activity.observe(gpu(busy, watts, tensor, clock.now))
    assert activity.since("GPU-3", 20.0) is None
    assert activity.since("GPU-4", 0.0) is None
    assert activity.since("GPU-3", 10.0) == [0.5, 0.2, 0.4, 0.1]
    activity.observe([sample for sample in gpu(0.5, 140.0, 17.5) if sample[0] is m.GPU_PRESENT])
    assert activity.since("GPU-3", 30.0) == [0.5, 0.2, 0.2, None]


def test_a_gpu_of_two_runs_or_one_that_is_lost_gives_no_reading() -> None:
    clock = Clock()
    activity = GpuActivity(clock)
    for clock.now in (100.0, 110.0):
        activity.observe(gpu(1.0, 700.0, 10.0, clock.now))
    one = {3: rank(OPEN, 110)}

    def row(parts: HostParts) -> Any:
        found: Any = open_step.field_of(one, None, 111.0, 0.0, parts)
        return found["ranks"][0]

    assert row(HostParts(activity))[3:] == [[], [1.0, 1.0, 1.0, 0.0]]
    assert row(HostParts(activity, shared={"GPU-3"}))[3:] == [[], None]
    activity.observe(gpu(0.0, 0.0, 10.0, present=0.0))
    assert activity.lost == {"GPU-3"}
    assert row(HostParts(activity))[3:] == [["gpu"], None]


@pytest.mark.parametrize(("busy", "silent_from"), [(0.0, 21), (0.02, 51)])
def test_a_rank_on_an_idle_gpu_is_silent_earlier(busy: float, silent_from: int) -> None:
    clock = Clock()
    activity = GpuActivity(clock)
    for clock.now in (110.0, 112.0):
        activity.observe(gpu(busy, 70.0, 10.0, clock.now))

    def signs(age: float) -> Any:
        found: Any = open_step.field_of({3: rank(OPEN, 100)}, None, 100 + age, 0.0, HostParts(activity))
        return found["ranks"][0][3]

    assert next(age for age in range(15, 60) if signs(age)) == silent_from
    assert signs(60) == ["silent"]


def test_a_critical_xid_breaks_a_gpu_and_a_port_is_down_until_it_is_up_again() -> None:
    log = EvidenceLog(lambda: START)

    def scraped(state: float, *more: Sample) -> None:
        log.observe([(m.INFINIBAND_PORT_STATE_ID, ("mlx5_0", "1"), state), *more])

    scraped(4.0, (m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("3", "GPU-3", "79"), START - 5))
    assert (log.broken_gpus(START - 60), log.broken_gpus(START), log.link_down) == ({"GPU-3"}, set(), False)
    scraped(1.0, (m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("4", "GPU-4", "31"), START))
    assert (log.broken_gpus(START - 60), log.link_down) == ({"GPU-3"}, True)
    scraped(4.0)
    assert not log.link_down


def test_a_port_that_was_never_up_is_not_down() -> None:
    log = EvidenceLog(lambda: START)
    for _ in range(2):
        log.observe([(m.INFINIBAND_PORT_STATE_ID, ("mlx5_0", "1"), 1.0)])
    assert not log.link_down


class Node:
    """Exporter's telemetry of one rank, with a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.clock.now = START + 100
        settings = ExporterSettings(host="node-7", rank_timeout=300)
        self.telemetry = Telemetry(settings, Registry(), clock=self.clock, now=self.clock)

    def push(self, step_seconds: float, steps: float = 50) -> None:
        at = self.clock()
        metrics = (
            counter("training_activity_seconds_total", step_seconds, at, activity="step"),
            counter("training_steps_total", steps, at),
            gauge("training_collective_sequence_number", 7, at),
        )
        self.telemetry.receive(request(process(*metrics)))

    def due(self) -> list[Record]:
        """Return the records that are due, as if the ledger took them."""
        self.telemetry.check()
        due = self.telemetry.due()
        for key, (version, _) in due.items():
            self.telemetry.delivered(key, version)
        return [records[-1] for _, records in due.values()]


def test_a_late_step_is_reported_with_each_push_and_every_five_seconds_without_one() -> None:
    node = Node()
    node.push(100.0)
    assert "open_step" not in node.due()[0]
    node.clock.now += 10
    node.push(110.0)
    (record,) = node.due()
    assert (record["ranks"], record["open_step"]["seconds"]) == ("0", 10)
    assert node.due() == []
    node.clock.now += 5
    (record,) = node.due()
    assert record["open_step"]["seconds"] == 15
    assert record["open_step"]["t"] == START + 115


def test_the_gpus_are_read_twice_for_a_late_step_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = Node()
    ledger = Embedded(Store(tmp_path / "ledger.sqlite"), Outcomes(Registry()))
    activity = node.telemetry._evidence_log.activity
    monkeypatch.setattr(activity, "_clock", node.clock)
    forward = Forward(node.telemetry, ledger, clock=node.clock, read=lambda: activity.observe(gpu(1.0, 200.0, 0.0)))
    activity.observe(gpu(1.0, 200.0, 0.0))
    node.push(100.0)
    read = []
    for _ in range(30):
        node.clock.now += 1
        before = len(activity._gpus["GPU-3"].readings)
        forward._send_changes()
        read += [node.clock.now - START - 100] * (len(activity._gpus["GPU-3"].readings) - before)
    assert read == [9, 11]


def test_a_rank_that_falls_silent_or_is_blocked_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.push(100.0)
    node.due()
    [[attempt]] = [[*node.telemetry._attempts.values()]]
    watch = ProcessWatch(1, 0)
    monkeypatch.setattr(watch, "look", lambda now: True)
    attempt.ranks[0].watch = watch
    watch.state, watch.since = "T", node.clock.now
    for seconds, signs in ((4, []), (10, ["blocked"]), (60, ["blocked"])):
        node.clock.now = START + 100 + seconds
        node.telemetry.check()
        assert attempt.signs[0] == signs
    watch.state = "R"
    node.telemetry.check()
    assert attempt.signs[0] == ["silent"]


def test_the_mean_step_is_that_of_steps_that_have_ended() -> None:
    begun = push(10, {"step": 20.0}, opened=5.0)
    assert [clock_of(begun, push(10, {"step": seconds})).mean for seconds in (25.0, 4000.0)] == [1.5, 1.5]
    assert clock_of(push(1, {"step": 5.0}, opened=5.0)).mean is None  # the first counted as startup


def test_a_port_that_was_removed_is_down() -> None:
    log = EvidenceLog(lambda: START)
    for present in (1.0, 0.0):
        state = [(m.INFINIBAND_PORT_STATE_ID, ("mlx5_0", "1"), 4.0)] if present else []
        log.observe([(m.INFINIBAND_PORT_PRESENT, ("mlx5_0", "1"), present), *state])
    assert log.link_down
