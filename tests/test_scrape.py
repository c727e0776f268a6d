"""One scrape over sources that answer, fail, hang and overflow: what is served, and what is said about it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from flopwatch import __version__
from flopwatch import catalogue as m
from flopwatch.catalogue import Sample, all_metrics
from flopwatch.node.reader import Reading
from flopwatch.node.scrape import BUDGETS, Scrape, Source, scrape_timeout, within_budget
from flopwatch.settings import ExporterSettings

TEMPERATURE: Sample = (m.GPU_TEMPERATURE, ("0", "GPU-a"), 41)
POWER: Sample = (m.GPU_POWER, ("0", "GPU-a"), 310_500)
PORT: Sample = (m.INFINIBAND_STATE, ("mlx5_0", "1"), 4)


class Scripted:
    """A source that does what the test says next."""

    def __init__(self, name: str, answer: Callable[[float], Reading]) -> None:
        self.name = name
        self.answer = answer
        self.deadlines: list[float] = []

    def ask(self, deadline: float) -> Reading:
        self.deadlines.append(deadline)
        return self.answer(deadline)


class Clock:
    """A clock the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def good(*samples: Sample) -> Callable[[float], Reading]:
    return lambda deadline: Reading(list(samples), duration=0.25, at=1_700_000_000.5)


def failing(reason: str) -> Callable[[float], Reading]:
    return lambda deadline: Reading(ok=False, reason=reason)


def hung(deadline: float) -> Reading:
    time.sleep(deadline)
    return Reading(ok=False, reason="deadline", duration=deadline)


def no_library(deadline: float) -> Reading:
    return Reading(ok=False, supported=False, reason="no NVML library")


def slowly(deadline: float) -> Reading:
    time.sleep(0.05)
    return Reading([TEMPERATURE])


def raising(deadline: float) -> Reading:
    raise OSError("what nobody expected")


def scraping(*sources: Source, clock: Callable[[], float] = time.monotonic, deadline: float = 0.2) -> Scrape:
    return Scrape(sources, [], ExporterSettings(scrape_deadline=deadline, stale_after=30), CollectorRegistry(), clock)


async def values(scrape: Scrape, timeout: float | None = None) -> dict[str, float]:
    """Return what a scrape serves, as series and number."""
    text = (await scrape.metrics(timeout)).decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_every_source_is_served_with_what_is_to_be_said_about_it() -> None:
    scrape = scraping(Scripted("nvml", good(TEMPERATURE, POWER)), Scripted("infiniband", good(PORT)))
    served = asyncio.run(values(scrape))
    assert served == {
        'gpu_temperature_celsius{gpu="0",uuid="GPU-a"}': 41,
        'gpu_power_watts{gpu="0",uuid="GPU-a"}': 310.5,
        'infiniband_port_state_id{device="mlx5_0",port="1"}': 4,
        **{f'flopwatch_collector_{what}{{collector="{name}"}}': value
           for name in ("nvml", "infiniband")
           for what, value in (("supported", 1), ("success", 1), ("duration_seconds", 0.25),
                               ("last_success_timestamp_seconds", 1_700_000_000.5))},
        **{f'flopwatch_collector_failures_total{{collector="{name}",reason="{reason}"}}': 0
           for name in ("nvml", "infiniband") for reason in ("deadline", "exited", "error")},
        **{f'flopwatch_series_dropped_total{{budget="{budget}"}}': 0 for budget in ("gpu", "port", "rank")},
        f'flopwatch_build_info{{version="{__version__}"}}': 1,
    }


@pytest.mark.parametrize(("answer", "reason"), [
    (failing("exited"), "exited"),
    (failing("NVMLError_Unknown: 999"), "error"),
    (raising, "error"),
    (hung, "deadline"),
])
def test_a_failing_source_costs_only_its_own_samples(answer: Callable[[float], Reading], reason: str) -> None:
    scrape = scraping(Scripted("nvml", answer), Scripted("infiniband", good(PORT)))
    served = asyncio.run(values(scrape))
    assert served['infiniband_port_state_id{device="mlx5_0",port="1"}'] == 4
    assert served['flopwatch_collector_success{collector="infiniband"}'] == 1
    assert served['flopwatch_collector_success{collector="nvml"}'] == 0
    assert served[f'flopwatch_collector_failures_total{{collector="nvml",reason="{reason}"}}'] == 1
    assert not any(series.startswith("gpu_") for series in served)


def test_last_good_samples_are_served_for_thirty_seconds_and_then_none_until_it_recovers() -> None:
    async def story() -> None:
        clock = Clock()
        source = Scripted("nvml", good(TEMPERATURE))
        scrape = scraping(source, clock=clock)
        await scrape.metrics()
        source.answer = failing("exited")
        series = 'gpu_temperature_celsius{gpu="0",uuid="GPU-a"}'
        seen = []
        for later in (15, 30, 31, 300):
            clock.now = 1000 + later
            served = await values(scrape)
            seen.append((series in served, served['flopwatch_collector_success{collector="nvml"}']))
        assert seen == [(True, 0), (True, 0), (False, 0), (False, 0)]
        assert served['flopwatch_collector_last_success_timestamp_seconds{collector="nvml"}'] == 1_700_000_000.5
        source.answer = good(TEMPERATURE)
        clock.now += 15
        served = await values(scrape)
        assert (served[series], served['flopwatch_collector_success{collector="nvml"}']) == (41, 1)

    asyncio.run(story())


def test_an_unsupported_source_has_no_samples_and_no_success() -> None:
    scrape = scraping(Scripted("nvml", no_library))
    served = asyncio.run(values(scrape))
    assert served['flopwatch_collector_supported{collector="nvml"}'] == 0
    assert 'flopwatch_collector_success{collector="nvml"}' not in served
    assert scrape.statuses() == {"nvml": "not supported: no NVML library"}
    assert scrape.attempted


def test_no_nvml_library_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        clock = Clock()
        scrape = scraping(Scripted("nvml", no_library), clock=clock)
        for _ in range(5):
            await scrape.metrics()
            clock.now += 15

    with caplog.at_level("INFO", logger="flopwatch"):
        asyncio.run(story())
    assert len(caplog.records) == 1


def test_all_sources_are_asked_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=5)

    def answer(deadline: float) -> Reading:
        meeting.wait()
        return Reading([PORT])

    scrape = scraping(*(Scripted(name, answer) for name in ("nvml", "infiniband", "xid")), deadline=5)
    asyncio.run(scrape.metrics())
    assert set(scrape.statuses().values()) == {"ok"}


def test_scrapes_at_the_same_time_share_one_read_and_so_do_those_within_a_second() -> None:
    async def story() -> None:
        clock = Clock()
        source = Scripted("nvml", slowly)
        scrape = scraping(source, clock=clock)
        bodies = await asyncio.gather(*(scrape.collect() for _ in range(20)))
        assert bodies == [[TEMPERATURE]] * 20
        clock.now += 0.9
        await scrape.collect()
        assert len(source.deadlines) == 1
        clock.now += 0.2
        await scrape.collect()
        assert len(source.deadlines) == 2

    asyncio.run(story())


def test_what_is_in_memory_is_read_for_every_scrape() -> None:
    async def story() -> None:
        source = Scripted("training", good(TEMPERATURE))
        scrape = Scrape([], [source], ExporterSettings(), CollectorRegistry())
        for _ in range(3):
            await scrape.collect()
        assert len(source.deadlines) == 3

    asyncio.run(story())


@pytest.mark.parametrize(("timeout", "deadline"), [
    (None, 2.5), (10, 2.5), (3, 2.5), (2, 1.5), (1, 0.5), (0.4, 0.2),
])
def test_the_deadline_leaves_the_scraper_half_a_second(timeout: float | None, deadline: float) -> None:
    source = Scripted("nvml", good())
    asyncio.run(scraping(source, deadline=2.5).collect(timeout))
    assert source.deadlines == [deadline]


@pytest.mark.parametrize(("header", "seconds"), [
    (None, None), ("10", 10), ("0.5", 0.5), ("0", None), ("-1", None), ("nan", None), ("inf", None), ("soon", None),
])
def test_a_timeout_header_that_is_no_time_is_ignored(header: str | None, seconds: float | None) -> None:
    assert scrape_timeout(header) == seconds


def test_a_source_that_ignores_its_deadline_is_not_waited_for() -> None:
    async def story() -> None:
        ended = threading.Event()
        source = Scripted("nvml", lambda deadline: (ended.wait(10), Reading([TEMPERATURE]))[1])
        scrape = scraping(source, Scripted("infiniband", good(PORT)), deadline=0.1)
        began = time.monotonic()
        served = await values(scrape)
        assert time.monotonic() - began < 1
        assert served['flopwatch_collector_success{collector="nvml"}'] == 0
        assert served['infiniband_port_state_id{device="mlx5_0",port="1"}'] == 4
        ended.set()
        await asyncio.sleep(0.05)
        assert (await values(scrape))['gpu_temperature_celsius{gpu="0",uuid="GPU-a"}'] == 41

    asyncio.run(story())


@pytest.mark.parametrize("broken", [
    (m.GPU_TEMPERATURE, ("0",), 41),
    (m.GPU_TEMPERATURE, ("0", "GPU-a", "hot"), 41),
    (m.GPU_ENERGY, ("0", "GPU-a"), float("nan")),
    (m.GPU_ENERGY, ("0", "GPU-a"), -1),
    (m.GPU_ENERGY, ("0", "GPU-a"), None),
])
def test_a_sample_that_does_not_fit_its_row_is_never_served_and_is_an_error(broken: Sample) -> None:
    scrape = scraping(Scripted("nvml", good(POWER, broken)))
    served = asyncio.run(values(scrape))
    assert served['gpu_power_watts{gpu="0",uuid="GPU-a"}'] == 310.5
    assert not any(series.startswith(("gpu_temperature", "gpu_energy")) for series in served)
    assert served['flopwatch_collector_success{collector="nvml"}'] == 0
    assert served['flopwatch_collector_failures_total{collector="nvml",reason="error"}'] == 1


def test_series_over_budget_are_dropped_in_the_declared_order_and_counted() -> None:
    per_gpu: list[Sample] = [
        (row, ("0", "GPU-a", *("x" for _ in row.labels[2:])), 1) for row in all_metrics() if row.labels[:2] == m.GPU]
    many_xids: list[Sample] = [(m.GPU_XID, ("0", "GPU-a", str(code)), 1) for code in range(200)]
    many_times: list[Sample] = [(m.GPU_XID_LAST, ("0", "GPU-a", str(code)), 1) for code in range(60)]
    other_gpu: Sample = (m.GPU_TEMPERATURE, ("1", "GPU-b"), 50)
    kept, dropped = within_budget([*per_gpu, *many_times, *many_xids, other_gpu])
    assert len([sample for sample in kept if sample[1][1] == "GPU-a"]) == 120
    assert dropped == {"gpu": len(per_gpu) + 260 - 120}
    assert other_gpu in kept
    # Rows that are not key went first, all of them here, and then of the last key row the last samples.
    assert {str(row) for row, _, _ in kept} == {str(row) for row, _, _ in per_gpu if row.key}
    assert many_xids[0] in kept
    assert many_xids[-1] not in kept


def test_a_histogram_over_budget_goes_whole() -> None:
    ranks: list[Sample] = [(m.TRAINING_ACTIVITY_SECONDS, ("lm", "0", str(n)), n) for n in range(28)]
    histogram: list[Sample] = [
        (m.TRAINING_STEP_DURATION, ("lm", "0", part), 1) for part in (*map(str, range(12)), "+Inf", "count", "sum")]
    kept, dropped = within_budget([*histogram, *ranks])
    assert kept == ranks
    assert dropped == {"rank": len(histogram)}


@pytest.mark.parametrize(("owner", "limit"), [(m.GPU, 120), (m.PORT, 60), (m.RANK, 40)])
def test_a_budget_that_is_just_kept_drops_nothing(owner: tuple[str, ...], limit: int) -> None:
    row = next(row for row in all_metrics() if row.labels[:2] == owner)
    extra = ("",) * (len(row.labels) - 2)
    samples: list[Sample] = [(row, (str(n // limit), "1", *extra), n) for n in range(3 * limit)]
    assert within_budget(samples) == (samples, {})
    assert BUDGETS[owner][1] == limit


def test_dropped_series_are_counted_in_metrics() -> None:
    many: list[Sample] = [(m.GPU_XID, ("0", "GPU-a", str(code)), 1) for code in range(123)]
    served = asyncio.run(values(scraping(Scripted("xid", good(*many)))))
    assert served['flopwatch_series_dropped_total{budget="gpu"}'] == 3
    assert sum(series.startswith("gpu_xid_errors_total") for series in served) == 120


def test_the_whole_body_is_one_valid_exposition_in_both_formats() -> None:
    scrape = scraping(Scripted("nvml", good(TEMPERATURE, POWER)), Scripted("xid", failing("exited")))

    async def both() -> tuple[str, str]:
        return (await scrape.metrics()).decode(), (await scrape.metrics(openmetrics=True)).decode()

    text, openmetrics = asyncio.run(both())
    parsed = list(openmetrics_parser.text_string_to_metric_families(openmetrics))  # type: ignore[no-untyped-call]
    names = [family.name for family in parse_text(text)]
    assert len(names) == len(set(names))
    assert {row for row in names if row.startswith("gpu")} == {"gpu_temperature_celsius", "gpu_power_watts"}
    assert openmetrics.endswith("# EOF\n")
    assert {s.name for f in parsed for s in f.samples} == {s.name for f in parse_text(text) for s in f.samples}
