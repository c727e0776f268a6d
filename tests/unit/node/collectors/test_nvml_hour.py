"""Eight GPUs on a driver that lies in ways that change at random, for up to an hour of simulated time.

Every series is compared with that of a second collector on an honest driver of the same node. Every absence must be
explained by a line of the doctor, and no read may exceed the deadline of a scrape.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.node.collectors import StateFile
from flopwatch.node.collectors.nvml import Nvml
from flopwatch.node.health import driver_lines
from flopwatch.node.health.nvml_answers import RecordedNvml
from flopwatch.settings import ExporterSettings
from flopwatch.simulate.pynvml import Simulation
from simulator.host import LIES, SimulatedNode

START = 1_700_000_400.0  # a multiple of ten minutes
INTERVAL = 15  # seconds between two scrapes
DEADLINE = ExporterSettings(host="node1").scrape_deadline
PARTITIONED, SLOW = "2", "7"  # GPUs
SETTINGS = ("no_persistence", "no_ecc")  # lies that are the truth about the driver
SEEDS = range(2, 2 + int(os.environ.get("FLOPWATCH_SEEDS", "1")))  # of the hours
MEMORY = 210.0  # seconds for which a slow driver's values and absences may last: pause, wait, and one scrape

# Rows that are read at every scrape of a GPU that is not slow.
FRESH = {
    m.GPU_POWER_WATTS,
    m.GPU_TEMPERATURE_CELSIUS,
    m.GPU_MEMORY_TEMPERATURE_CELSIUS,
    m.GPU_UTILIZATION_RATIO,
    m.GPU_MEMORY_USED_BYTES,
    m.GPU_SM_CLOCK_HERTZ,
    m.GPU_ENERGY_JOULES_TOTAL,
    m.GPU_CLOCK_EVENT_SECONDS_TOTAL,
    m.GPU_ECC_ERRORS_TOTAL,
    m.GPU_RECOVERY_ACTION_ID,
    m.NVLINK_TRANSMIT_BYTES_TOTAL,
    m.NVLINK_RECEIVE_BYTES_TOTAL,
}
# Rows that are sums over time, with the row of the time that they cover.
SUMS = {
    row: m.GPU_MIG_PROFILED_SECONDS_TOTAL if row.name.startswith("gpu_mig_") else m.GPU_PROFILED_SECONDS_TOTAL
    for row in m.all_metrics()
    if row.name.startswith("gpu_") and ("GPM" in row.source or row.name.endswith("profiled_seconds_total"))
}

Labels = tuple[str, ...]
Series = tuple[Metric, Labels]


class Honest(Simulation):
    """A driver that never lies."""

    @property
    def lies(self) -> Mapping[str, object]:
        return {name: True for name in super().lies if name in SETTINGS}


class Hour:
    """A node, a collector on its lying driver, and one on an honest driver of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.node = SimulatedNode(folder / "simulated")
        self.node.create(START)
        self.node.mig(int(PARTITIONED), "on")
        self.folder = folder
        self.now = 0.0
        self.lies: set[str] = set()
        self.driver = Simulation(self.node.root)
        self.driver.sleep = self.sleep
        self.lying, self.honest = self.collector("lying", self.driver), self.collector("honest", Honest(self.node.root))
        self.truths: dict[Series, dict[float, float]] = defaultdict(dict)
        self.before: dict[Series, tuple[float, float]] = {}  # last time and value of each series
        self.lines: dict[frozenset[str], list[str]] = {}
        self.explained: dict[float, list[str]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def collector(self, name: str, library: Simulation) -> Nvml:
        proc, dev = self.node.root / "proc", self.node.root / "dev"
        file = self.folder / f"{name}.json"
        return Nvml(library, "node1", file, "nvml", lambda: self.now, sysfs=self.node.sysfs, proc=proc, dev=dev)

    def change(self) -> None:
        """Switch about one lie in two scrapes, and change the hardware about as often."""
        gpu = self.random.randrange(8)
        if self.random.random() < 0.5:
            lie = self.random.choice(sorted(LIES))
            self.lies ^= {lie}
            self.node.lie(lie, "on" if lie in self.lies else "off")
        change = self.random.randrange(14)
        if change == 0:
            self.node.ecc(gpu, corrected=self.random.randrange(5), uncorrected=1)
        elif change == 1:
            self.node.nvlink_errors(gpu, self.random.randrange(18), "crc", 3)
        elif change == 2:
            self.node.load(gpu, self.random.choice((0.0, 0.3, 1.0)))
        elif change == 3:
            self.node.remap(gpu, corrected=1, pending=True)
        elif change == 4:
            self.node.nvlink(gpu, self.random.randrange(18), self.random.choice(("up", "down")))
        elif change == 5:
            self.node.recovery(gpu, self.random.randrange(4))
        elif change == 6:
            self.node.throttle(gpu, self.random.choice(("sw_power_cap", None)))

    def doctor(self, time: float) -> list[str]:
        """Return the doctor's lines about the driver as it is at a time of the node."""
        refused = time % 600 >= 300
        key = frozenset({*self.lies, *(("refused",) if refused else ())})
        if key not in self.lines:
            now, notes = self.now, StateFile(self.folder / "notes.json")
            driver = Simulation(self.node.root)
            driver.sleep = self.sleep
            samples = RecordedNvml(self.collector("doctor", driver), notes).read()
            self.lines[key] = list(driver_lines.losses(samples, notes.load(), self.node.root / "proc"))
            self.now = now
        return self.lines[key]

    def scrape(self) -> None:
        self.change()
        began = self.now
        self.node.tick(START + began)
        truth = {(row, labels): value for row, labels, value in self.honest.read()}
        for series, value in truth.items():
            self.truths[series][began] = value
        initialized = self.lying._initialized_at is None
        seen = {(row, labels): value for row, labels, value in self.lying.read()}
        assert initialized or self.now - began < DEADLINE
        self.now = max(self.now, began + INTERVAL)
        self.explained[began] = self.doctor(began)
        for series, value in seen.items():
            self.check_value(series, value, began, seen)
        for row, labels in truth:
            if (row, labels) not in seen and self.lasting((row, labels), began):
                assert self.reason(row, labels, began), f"{row} {labels} is absent at {began}, with {sorted(self.lies)}"
        self.before |= {series: (began, value) for series, value in seen.items()}

    def lasting(self, series: Series, now: float) -> bool:
        """Return whether the honest driver has had the series for so long that a slow driver should have it too."""
        times = [time for time in self.truths[series] if time > now - MEMORY]
        return now > MEMORY and len(times) == sum(1 for time in self.explained if time > now - MEMORY)

    def check_value(self, series: Series, value: float, now: float, seen: Mapping[Series, float]) -> None:
        row, labels = series
        if row.name.startswith("flopwatch_"):
            return
        if row in SUMS:
            self.check_sum(series, value, now, seen)
            return
        age = MEMORY
        if row in FRESH and labels[0] != SLOW:
            age = 3 * INTERVAL if self.lies & {"slow_gpu", "slow_values"} else 0.0
        recent = {truth for time, truth in self.truths[series].items() if now - age <= time <= now}
        assert value in recent, f"{row} {labels} is {value} at {now}, and was one of {recent}, with {sorted(self.lies)}"

    def check_sum(self, series: Series, value: float, now: float, seen: Mapping[Series, float]) -> None:
        row, labels = series
        covered = SUMS[row], labels[:3] if row.name.startswith("gpu_mig_") else labels[:2]
        if series not in self.before or covered not in self.before:
            return
        since, last = self.before[series]
        assert value >= last, f"{row} {labels} falls"
        rise, seconds = value - last, seen[covered] - self.before[covered][1]
        assert 0 <= seconds <= MEMORY
        if row is SUMS[row] or seconds == 0:
            assert rise == seconds
            return
        recent = [time for time in sorted(self.truths[series]) if min(now, since) - MEMORY <= time <= now]
        truths, times = self.truths[series], self.truths[covered]
        ratios = [
            (truths[after] - truths[before]) / (times[after] - times[before])
            for before, after in pairwise(recent)
            if times[after] > times[before]
        ]
        if ratios:
            assert 0.99 * min(ratios) <= rise / seconds <= 1.01 * max(ratios), (
                f"{row} {labels} at {now}, with {sorted(self.lies)}"
            )

    def reason(self, row: Metric, labels: Labels, now: float) -> str:
        """Return the doctor's line that explains the absence of a series in the last minutes."""
        for time, lines in self.explained.items():
            for line in lines if time > now - MEMORY else ():
                about, _, text = line.partition(": ")
                names = [word.rstrip(",") for word in text.split()]
                named = any(fnmatch(row.name, name) for name in names if name.startswith(("gpu_", "nvlink_")))
                slow = "its NVML calls take" in text or ("read in turns" in text and row not in FRESH)
                if self.covers(about, labels[0]) and (named or slow):
                    return line
        return ""

    @staticmethod
    def covers(about: str, gpu: str) -> bool:
        ranges = [part.removeprefix("GPU ").split("-") for part in about.split(", ")]
        return about == "driver" or any(int(part[0]) <= int(gpu) <= int(part[-1]) for part in ranges)


def run(hour: Hour, seconds: float) -> int:
    scrapes = 0
    while hour.now < seconds:
        hour.scrape()
        scrapes += 1
    return scrapes


@pytest.mark.long
def test_eight_minutes_of_lies_cost_no_wrong_value(tmp_path: Path) -> None:
    assert run(Hour(tmp_path, 1), 480) > 25


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_hour_of_lies_costs_no_wrong_value(tmp_path: Path, seed: int) -> None:
    hour = Hour(tmp_path, seed)
    assert run(hour, 3600) > 230
    assert len(hour.lines) > 30, "many combinations of lies"


@pytest.mark.slow
def test_every_lie_at_once_costs_no_wrong_value(tmp_path: Path) -> None:
    hour = Hour(tmp_path, 6)
    hour.lies = set(LIES)
    for lie in LIES:
        hour.node.lie(lie)
    hour.sleep(300)
    hour.node.tick(START + 300)  # activity is refused in the second half of ten minutes
    assert len(hour.doctor(300)) == 7
    run(hour, 780)
