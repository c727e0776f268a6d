"""What GPUs did in an open step, from the readings of scrapes."""

from __future__ import annotations

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.telemetry.open_step import USUAL, GpuActivity

GPU, OTHER = "GPU-a", "GPU-b"


class Host:
    """Host whose GPUs are read when the test has it."""

    def __init__(self) -> None:
        self.time = 10_000.0
        self.activity = GpuActivity(lambda: self.time)

    def scrape(self, *samples: Sample, at: float) -> None:
        self.time = at
        self.activity.observe(samples)


def read(row: Metric, value: float, uuid: str = GPU) -> Sample:
    """Return a sample as a collector makes it, in the unit of the driver."""
    return row, ("0", uuid), value / row.scale


def watts(value: float) -> Sample:
    return read(m.GPU_POWER_WATTS, value)


LIMIT = read(m.GPU_POWER_LIMIT_WATTS, 700.0)


def tensor(seconds: float, profiled: float) -> list[Sample]:
    return [read(m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, seconds), read(m.GPU_PROFILED_SECONDS_TOTAL, profiled)]


@pytest.mark.parametrize(
    ("first", "second", "numbers"),
    [
        ([read(m.GPU_UTILIZATION_RATIO, 0.25)], [read(m.GPU_UTILIZATION_RATIO, 0.1)], [0.25, None, None, None]),
        ([watts(350), LIMIT], [watts(210), LIMIT], [None, 0.3, 1.0, None]),
        ([watts(350)], [watts(210)], [None, None, 1.0, None]),
        ([watts(350), read(m.GPU_POWER_LIMIT_WATTS, 0.0)], [watts(0)], [None, None, 1.0, None]),
        (tensor(40, 90), tensor(43, 100), [None, None, None, 0.3]),
        (tensor(40, 90), tensor(40, 90), [None, None, None, None]),  # a profiler holds the counters
        (tensor(40, 90), tensor(1, 2), [None, None, None, None]),  # the driver was loaded again
        ([read(m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, 40)], [LIMIT], [None, None, None, None]),
    ],
    ids=["busy", "power", "no limit", "limit 0", "tensor", "profiler", "reset", "one tensor reading"],
)
def test_numbers_that_are_not_read_are_none(
    first: list[Sample], second: list[Sample], numbers: list[float | None]
) -> None:
    host = Host()
    host.scrape(*first, at=100)
    assert host.activity.since(GPU, 100) is None
    host.scrape(*second, at=110)
    assert host.activity.since(GPU, 100) == numbers
    assert host.activity.since(GPU, 100.1) is None


def test_a_gpu_lacks_readings_until_it_has_two_since_the_step_began() -> None:
    host = Host()
    assert not host.activity.lacks(0), "no GPU is read"
    busy = read(m.GPU_UTILIZATION_RATIO, 1.0)
    host.scrape(busy, at=10)
    host.scrape(busy, read(m.GPU_UTILIZATION_RATIO, 1.0, OTHER), at=20)
    assert host.activity.lacks(5), "the other GPU was read once"
    host.scrape(busy, read(m.GPU_UTILIZATION_RATIO, 1.0, OTHER), at=30)
    assert [host.activity.lacks(since) for since in (5, 20, 25)] == [False, False, True]


def test_power_is_compared_with_the_highest_of_the_hour_before_the_step() -> None:
    host = Host()
    began = 10_000.0
    for at, power in ((began - USUAL - 1, 700), (began - USUAL, 400), (began, 100), (began + 15, 80)):
        host.scrape(watts(power), at=at)
    assert host.activity.since(GPU, began) == [None, None, 0.25, None]


def test_gpus_are_apart_and_one_that_is_no_longer_read_is_forgotten() -> None:
    host = Host()
    busy, idle = read(m.GPU_UTILIZATION_RATIO, 1.0), read(m.GPU_UTILIZATION_RATIO, 0.0, OTHER)
    host.scrape(busy, idle, at=0)
    host.scrape(busy, idle, at=15)
    assert (host.activity.since(GPU, 0), host.activity.since(OTHER, 0)) == (
        [1.0, None, None, None],
        [0.0, None, None, None],
    )
    host.scrape(busy, at=30)
    host.scrape(busy, idle, at=45)
    assert host.activity.since(OTHER, 0) is None


def test_a_gpu_is_lost_until_it_answers_again() -> None:
    host = Host()
    here, gone = read(m.GPU_PRESENT, 1), read(m.GPU_PRESENT, 0)
    found = []
    for samples in ([here], [gone, read(m.GPU_PRESENT, 1, OTHER)], [here], []):
        host.scrape(*samples, at=0)
        found.append(host.activity.lost)
    assert found == [set(), {GPU}, set(), set()]
