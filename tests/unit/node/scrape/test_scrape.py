"""One scrape over sources that answer, fail, hang and overflow: what is served, and the health series about it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from gzip import decompress as gunzip
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from flopwatch import __version__
from flopwatch import catalogue as m
from flopwatch.catalogue import Sample, all_metrics
from flopwatch.node.scrape.reader import Reading, failure
from flopwatch.node.scrape.scrape import (
    ANSWER_MARGIN,
    BUDGETS,
    MIG,
    Registry,
    SampleSource,
    Scrape,
    _owner,
    over_budget,
    scrape_timeout,
    well_formed,
    without,
)
from flopwatch.settings import ExporterSettings
from tests.support.machine import PATIENCE

TEMPERATURE: Sample = (m.GPU_TEMPERATURE_CELSIUS, ("0", "GPU-a"), 41)
POWER: Sample = (m.GPU_POWER_WATTS, ("0", "GPU-a"), 310_500)
PORT: Sample = (m.INFINIBAND_PORT_STATE_ID, ("mlx5_0", "1"), 4)


class Scripted:
    """A source that does what the test sets next."""

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


def failing(kind: str, reason: str = "") -> Callable[[float], Reading]:
    return lambda deadline: failure(kind, reason)


def hung(deadline: float) -> Reading:
    time.sleep(deadline)
    return failure("deadline", duration=deadline)


def no_library(deadline: float) -> Reading:
    return Reading(ok=False, supported=False, reason="no NVML library")


def slowly(deadline: float) -> Reading:
    time.sleep(0.05)
    return Reading([TEMPERATURE])


def raising(deadline: float) -> Reading:
    raise OSError("an unexpected error")


def scraping(*sources: SampleSource, clock: Callable[[], float] = time.monotonic, deadline: float = PATIENCE) -> Scrape:
    settings = ExporterSettings(scrape_deadline=deadline, stale_after=30, series="full")
    return Scrape(sources, [], settings, Registry(), clock)


async def values(scrape: Scrape, timeout: float | None = None) -> dict[str, float]:
    """Return what a scrape serves, as series and number."""
    text = (await scrape.metrics(timeout)).decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_every_source_is_served_with_its_own_health_series() -> None:
    scrape = scraping(Scripted("nvml", good(TEMPERATURE, POWER)), Scripted("infiniband", good(PORT)))
    served = asyncio.run(values(scrape))
    assert served == {
        'gpu_temperature_celsius{gpu="0",uuid="GPU-a"}': 41,
        'gpu_power_watts{gpu="0",uuid="GPU-a"}': 310.5,
        'infiniband_port_state_id{device="mlx5_0",port="1"}': 4,
        **{
            f'flopwatch_collector_{what}{{collector="{name}"}}': value
            for name in ("nvml", "infiniband")
            for what, value in (
                ("supported", 1),
                ("success", 1),
                ("duration_seconds", 0.25),
                ("last_success_timestamp_seconds", 1_700_000_000.5),
            )
        },
        **{
            f'flopwatch_collector_failures_total{{collector="{name}",reason="{reason}"}}': 0
            for name in ("nvml", "infiniband")
            for reason in ("deadline", "exited", "error", "blind")
        },
        **{
            f'flopwatch_collector_restarts_total{{collector="{name}",reason="{reason}"}}': 0
            for name in ("nvml", "infiniband")
            for reason in ("exited", "hung", "memory", "afresh")
        },
        **{f'flopwatch_series_duplicate_total{{collector="{name}"}}': 0 for name in ("nvml", "infiniband")},
        **{
            f'flopwatch_series_dropped_total{{budget="{budget}"}}': 0
            for budget in ("gpu", "mig", "port", "rank", "run")
        },
        f'flopwatch_build_info{{version="{__version__}"}}': 1,
    }


@pytest.mark.parametrize(
    ("answer", "reason", "deadline"),
    [
        (failing("exited"), "exited", PATIENCE),
        (failing("error", "NVMLError_Unknown: 999"), "error", PATIENCE),
        (failing("blind", "AccessLost: /dev/nvidiactl"), "blind", PATIENCE),
        (raising, "error", PATIENCE),
        (hung, "deadline", 2.0),
    ],
)
def test_a_failing_source_costs_only_its_own_samples(
    answer: Callable[[float], Reading], reason: str, deadline: float
) -> None:
    scrape = scraping(Scripted("nvml", answer), Scripted("infiniband", good(PORT)), deadline=deadline)
    served = asyncio.run(values(scrape))
    assert served['infiniband_port_state_id{device="mlx5_0",port="1"}'] == 4
    assert served['flopwatch_collector_success{collector="infiniband"}'] == 1
    assert served['flopwatch_collector_success{collector="nvml"}'] == 0
    assert served[f'flopwatch_collector_failures_total{{collector="nvml",reason="{reason}"}}'] == 1
    assert not any(series.startswith("gpu_") for series in served)


def test_a_blind_source_serves_what_it_can_still_read_in_place_of_its_last_samples() -> None:
    readable: Sample = (m.GPU_READABLE, ("0", "GPU-a"), 0)

    def blind(deadline: float) -> Reading:
        return replace(failure("blind", "AccessLost: /dev/nvidiactl"), samples=[readable])

    async def story() -> None:
        clock = Clock()
        source = Scripted("nvml", good(TEMPERATURE))
        scrape = scraping(source, clock=clock)
        await values(scrape)
        source.answer = blind
        clock.now += 20
        for _ in range(3):
            served = await values(scrape)
            assert {name: value for name, value in served.items() if name.startswith("gpu_")} == {
                'gpu_readable{gpu="0",uuid="GPU-a"}': 0
            }
            assert served['flopwatch_collector_success{collector="nvml"}'] == 0
            assert served['flopwatch_collector_last_success_timestamp_seconds{collector="nvml"}'] == 1_700_000_000.5
            clock.now += 20

    asyncio.run(story())


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


def test_a_missing_nvml_library_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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
    meeting = threading.Barrier(3, timeout=PATIENCE)

    def answer(deadline: float) -> Reading:
        meeting.wait()
        return Reading([PORT])

    scrape = scraping(*(Scripted(name, answer) for name in ("nvml", "infiniband", "xid")))
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
        scrape = Scrape([], [source], ExporterSettings(), Registry())
        for _ in range(3):
            await scrape.collect()
        assert len(source.deadlines) == 3

    asyncio.run(story())


@pytest.mark.parametrize(("timeout", "deadline"), [(None, 2.5), (10, 2.5), (3, 2.5), (2, 1.5), (1, 0.5), (0.4, 0.2)])
def test_a_scrape_waits_until_half_a_second_before_its_timeout_and_the_read_has_its_own_deadline(
    timeout: float | None, deadline: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    wait = asyncio.wait

    async def noted(tasks: Any, timeout: float) -> Any:
        waits.append(timeout)
        return await wait(tasks, timeout=timeout)

    monkeypatch.setattr(asyncio, "wait", noted)
    source = Scripted("nvml", good())
    asyncio.run(scraping(source, deadline=2.5).collect(timeout))
    assert waits == [deadline + ANSWER_MARGIN]
    assert source.deadlines == [2.5]


def test_a_client_with_a_timeout_of_nothing_costs_other_clients_no_value() -> None:
    async def story() -> None:
        source = Scripted("nvml", slowly)
        scrape = scraping(source)
        for _ in range(5):
            hasty = asyncio.ensure_future(scrape.metrics(1e-9))
            await asyncio.sleep(0)
            served = await values(scrape, 10)
            await hasty
            assert served['gpu_temperature_celsius{gpu="0",uuid="GPU-a"}'] == 41
            assert served['flopwatch_collector_success{collector="nvml"}'] == 1
            assert not any(number for name, number in served.items() if "failures_total" in name)
            await asyncio.sleep(0.3)
        assert set(source.deadlines) == {PATIENCE}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("10", 10), ("0.5", 0.5), ("0", None), ("-1", None), ("nan", None), ("inf", None), ("soon", None)],
)
def test_a_timeout_header_that_is_no_time_is_ignored(header: str | None, seconds: float | None) -> None:
    assert scrape_timeout(header) == seconds


def test_a_source_that_ignores_its_deadline_is_not_waited_for() -> None:
    async def story() -> None:
        ended = threading.Event()
        source = Scripted("nvml", lambda deadline: (ended.wait(PATIENCE), Reading([TEMPERATURE]))[1])
        scrape = scraping(source, Scripted("infiniband", good(PORT)), deadline=2.0)
        began = time.monotonic()
        served = await values(scrape)
        assert time.monotonic() - began < PATIENCE / 2
        assert served['flopwatch_collector_success{collector="nvml"}'] == 0
        assert served['infiniband_port_state_id{device="mlx5_0",port="1"}'] == 4
        ended.set()
        assert await scrape.collect() == [TEMPERATURE, PORT]

    asyncio.run(story())


def test_scrapes_that_come_together_share_one_body() -> None:
    async def story() -> None:
        clock = Clock()
        source = Scripted("nvml", slowly)
        scrape = scraping(source, clock=clock)
        bodies = await asyncio.gather(*(scrape.metrics() for _ in range(20)))
        assert all(body is bodies[0] for body in bodies)
        zipped = await asyncio.gather(*(scrape.metrics(gzipped=True) for _ in range(20)))
        assert all(body is zipped[0] for body in zipped)
        assert gunzip(zipped[0]) == bodies[0]
        assert (await scrape.metrics(openmetrics=True)).endswith(b"# EOF\n")
        clock.now += 0.2
        assert await scrape.metrics() is bodies[0]
        clock.now += 0.1
        assert await scrape.metrics() is not bodies[0]

    asyncio.run(story())


def test_a_scraper_in_a_hurry_does_not_wait_for_another_ones_page() -> None:
    async def story() -> None:
        asked, ended = threading.Event(), threading.Event()

        def hanging(deadline: float) -> Reading:
            asked.set()
            ended.wait(deadline)
            return failure("deadline")

        scrape = scraping(Scripted("nvml", hanging), Scripted("infiniband", good(PORT)))
        patient = asyncio.create_task(scrape.metrics())
        while not asked.is_set() or scrape.statuses()["infiniband"] != "ok":
            await asyncio.sleep(0.01)
        assert b"infiniband_port_state_id" in await scrape.metrics(0.4)
        assert not patient.done()
        ended.set()
        await patient

    asyncio.run(story())


def test_a_scraper_that_goes_away_leaves_the_page_to_the_others() -> None:
    async def story() -> None:
        scrape = scraping(Scripted("nvml", slowly))
        leaver, stayer = (asyncio.create_task(scrape.metrics()) for _ in range(2))
        await asyncio.sleep(0.01)
        leaver.cancel()
        assert b"gpu_temperature_celsius" in await stayer

    asyncio.run(story())


class Secondary(Scripted):
    secondary = True


def test_a_secondary_source_fills_gaps_only() -> None:
    def nvml(deadline: float) -> Reading:
        return Reading([TEMPERATURE, (m.GPU_ECC_ERRORS_TOTAL, ("0", "GPU-a", "corrected"), 7)])

    dcgm = good(
        (m.GPU_TEMPERATURE_CELSIUS, ("0", "GPU-a"), 42),
        (m.GPU_TEMPERATURE_CELSIUS, ("1", "GPU-b"), 43),
        POWER,
        (m.GPU_ECC_ERRORS_TOTAL, ("0", "GPU-a", "uncorrected"), 9),
    )
    primary = Scripted("nvml", nvml)

    async def story() -> None:
        clock = Clock()
        scrape = scraping(primary, Secondary("dcgm", dcgm), clock=clock)
        assert await scrape.collect() == [*nvml(1).samples, (m.GPU_TEMPERATURE_CELSIUS, ("1", "GPU-b"), 43), POWER]
        primary.answer = failing("exited")
        clock.now += 31
        assert await scrape.collect() == dcgm(1).samples
        served = await values(scrape)
        assert served['flopwatch_series_duplicate_total{collector="dcgm"}'] == 0

    asyncio.run(story())


def test_a_series_that_two_sources_have_is_served_once_and_counted() -> None:
    """Prometheus refuses a whole page for one series that is on it twice."""
    first, second = Scripted("nvml", good(TEMPERATURE)), Scripted("xid", good((*TEMPERATURE[:2], 99), POWER, POWER))
    served = asyncio.run(values(scraping(first, second)))
    assert served['gpu_temperature_celsius{gpu="0",uuid="GPU-a"}'] == 41
    assert served['gpu_power_watts{gpu="0",uuid="GPU-a"}'] == 310.5
    assert served['flopwatch_series_duplicate_total{collector="xid"}'] == 2
    assert served['flopwatch_series_duplicate_total{collector="nvml"}'] == 0
    assert served['flopwatch_collector_success{collector="xid"}'] == 1


def test_a_released_source_serves_nothing_and_has_not_failed() -> None:
    async def story() -> None:
        clock = Clock()
        source = Scripted("nvml", good(TEMPERATURE))
        scrape = scraping(source, clock=clock)
        await scrape.metrics()
        source.answer = failing("released")
        clock.now += 1
        served = await values(scrape)
        assert not any(series.startswith("gpu_") for series in served)
        assert 'flopwatch_collector_success{collector="nvml"}' not in served
        assert served['flopwatch_collector_supported{collector="nvml"}'] == 1
        assert all(value == 0 for series, value in served.items() if series.startswith("flopwatch_collector_failures"))
        assert scrape.statuses() == {"nvml": "released"}
        source.answer = good(TEMPERATURE)
        clock.now += 1
        assert (await values(scrape))['flopwatch_collector_success{collector="nvml"}'] == 1

    asyncio.run(story())


def test_a_source_whose_children_were_replaced_reports_why() -> None:
    source = Scripted("nvml", lambda deadline: Reading([TEMPERATURE], restarts=("hung", "memory", "hung")))
    served = asyncio.run(values(scraping(source)))
    assert {series: value for series, value in served.items() if series.startswith("flopwatch_collector_restarts")} == {
        f'flopwatch_collector_restarts_total{{collector="nvml",reason="{reason}"}}': value
        for reason, value in {"exited": 0, "hung": 2, "memory": 1, "afresh": 0}.items()
    }


def test_an_answer_that_was_old_when_it_came_is_served_so_much_shorter() -> None:
    async def story() -> None:
        clock = Clock()
        source = Scripted("nvml", lambda deadline: Reading([TEMPERATURE], age=20))
        scrape = scraping(source, clock=clock)
        assert await scrape.collect() == [TEMPERATURE]
        source.answer = failing("deadline")
        clock.now += 10
        assert await scrape.collect() == [TEMPERATURE]
        clock.now += 1
        assert await scrape.collect() == []

    asyncio.run(story())


def test_what_follows_from_the_samples_is_served_with_them() -> None:
    verdict: Sample = (m.HOST_VERDICT_ID, (), 1)
    released: Sample = (m.FLOPWATCH_DRIVER_RELEASED, (), 0)
    seen: list[Sequence[Sample]] = []

    def derive(samples: Sequence[Sample]) -> list[Sample]:
        seen.append(samples)
        return [verdict]

    scrape = Scrape(
        [Scripted("nvml", good(TEMPERATURE))],
        [Scripted("training", good(PORT))],
        ExporterSettings(),
        Registry(),
        also=lambda: [released],
        derive=derive,
    )
    assert asyncio.run(scrape.collect()) == [TEMPERATURE, PORT, released, verdict]
    released_successes = [(m.FLOPWATCH_COLLECTOR_SUCCESS, (name,), True) for name in ("nvml", "training")]
    assert seen == [[TEMPERATURE, PORT, released, *released_successes]]
    assert asyncio.run(values(scrape))['flopwatch_collector_success{collector="verdict"}'] == 1


def test_a_mistake_in_what_follows_costs_only_that() -> None:
    def derive(samples: Sequence[Sample]) -> list[Sample]:
        raise ZeroDivisionError

    scrape = Scrape([Scripted("nvml", good(TEMPERATURE))], [], ExporterSettings(), Registry(), derive=derive)
    served = asyncio.run(values(scrape))
    assert served['gpu_temperature_celsius{gpu="0",uuid="GPU-a"}'] == 41
    assert served['flopwatch_collector_success{collector="verdict"}'] == 0
    assert served['flopwatch_collector_failures_total{collector="verdict",reason="error"}'] == 1


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.just(10**400), st.just("7"), st.lists(st.integers())
)
LABELS = st.one_of(st.just(("0", "GPU-a")), st.just(("0",)), st.just((0, "GPU-a")), st.just(("1", "\ud800")))


@given(
    st.lists(st.tuples(st.sampled_from([m.GPU_POWER_WATTS, m.GPU_ENERGY_JOULES_TOTAL]), LABELS, NUMBERS), max_size=6)
)
def test_whatever_a_source_answers_the_other_is_served_and_only_what_fits_is_added(samples: list[Any]) -> None:
    scrape = scraping(Scripted("nvml", good(*samples)), Scripted("infiniband", good(PORT)))

    async def story() -> None:
        body = (await scrape.metrics()).decode()
        assert 'infiniband_port_state_id{device="mlx5_0",port="1"} 4.0\n' in body
        served = [sample for sample in await scrape.collect() if sample[0].domain == "gpu"]
        expected: dict[Any, Any] = {}
        for row, labels, value in filter(well_formed, samples):
            expected.setdefault((row, labels), value)
        assert repr(served) == repr([(*key, value) for key, value in expected.items()])

    asyncio.run(story())
    scrape.close()


@pytest.mark.parametrize(
    "broken",
    [
        (m.GPU_TEMPERATURE_CELSIUS, ("0",), 41),
        (m.GPU_TEMPERATURE_CELSIUS, ("0", "GPU-a", "hot"), 41),
        (m.GPU_ENERGY_JOULES_TOTAL, ("0", "GPU-a"), float("nan")),
        (m.GPU_ENERGY_JOULES_TOTAL, ("0", "GPU-a"), -1),
        (m.GPU_ENERGY_JOULES_TOTAL, ("0", "GPU-a"), None),
        (m.GPU_TEMPERATURE_CELSIUS, ("0", "GPU-a"), 10**400),
        (m.GPU_TEMPERATURE_CELSIUS, ("0", "GPU-a"), "41"),
        (m.GPU_TEMPERATURE_CELSIUS, (0, "GPU-a"), 41),
    ],
)
def test_a_sample_that_does_not_fit_its_row_is_never_served_and_is_an_error(broken: Any) -> None:
    scrape = scraping(Scripted("nvml", good(POWER, broken)))
    served = asyncio.run(values(scrape))
    assert served['gpu_power_watts{gpu="0",uuid="GPU-a"}'] == 310.5
    assert not any(series.startswith(("gpu_temperature", "gpu_energy")) for series in served)
    assert served['flopwatch_collector_success{collector="nvml"}'] == 0
    assert served['flopwatch_collector_failures_total{collector="nvml",reason="error"}'] == 1


def within_budget(samples: list[Sample]) -> tuple[list[Sample], dict[str, int]]:
    """Return the samples that the budgets keep, and the number of dropped ones for each budget."""
    left_out, dropped = over_budget([(row, labels) for row, labels, _ in samples])
    return without(samples, left_out), dict(dropped)


def test_series_over_budget_are_dropped_in_the_declared_order_and_counted() -> None:
    per_gpu: list[Sample] = [
        (row, ("0", "GPU-a", *("x" for _ in row.labels[2:])), 1)
        for row in all_metrics()
        if row.labels[:2] == m.GPU and row.labels[:3] != MIG
    ]
    many_xids: list[Sample] = [(m.GPU_XID_ERRORS_TOTAL, ("0", "GPU-a", str(code)), 1) for code in range(200)]
    many_times: list[Sample] = [(m.GPU_XID_LAST_TIMESTAMP_SECONDS, ("0", "GPU-a", str(code)), 1) for code in range(60)]
    other_gpu: Sample = (m.GPU_TEMPERATURE_CELSIUS, ("1", "GPU-b"), 50)
    kept, dropped = within_budget([*per_gpu, *many_times, *many_xids, other_gpu])
    assert len([sample for sample in kept if sample[1][1] == "GPU-a"]) == 120
    assert dropped == {"gpu": len(per_gpu) + 260 - 120}
    assert other_gpu in kept
    # Rows that are not key went first, all of them here, and then of the last key row the last samples.
    assert {str(row) for row, _, _ in kept} == {str(row) for row, _, _ in per_gpu if row.key}
    assert many_xids[0] in kept
    assert many_xids[-1] not in kept


def test_a_histogram_over_budget_goes_whole() -> None:
    infos: list[Sample] = [(m.TRAINING_RUN_INFO, ("lm", str(n), *m.TRAINING_RUN_INFO.labels[2:]), 1) for n in range(28)]
    histogram: list[Sample] = [
        (m.TRAINING_STEP_DURATION_SECONDS, ("lm", part), 1) for part in (*map(str, range(12)), "+Inf", "count", "sum")
    ]
    kept, dropped = within_budget([*histogram, *infos])
    assert kept == infos
    assert dropped == {"run": len(histogram)}


@pytest.mark.parametrize(("owner", "limit"), [(m.GPU, 120), (MIG, 20), (m.PORT, 60), (m.RANK, 40), (("run",), 30)])
def test_a_budget_that_is_just_kept_drops_nothing(owner: tuple[str, ...], limit: int) -> None:
    row = next(row for row in all_metrics() if _owner(row, row.labels)[0] == owner)
    extra = ("",) * (len(row.labels) - 1)
    samples: list[Sample] = [(row, (str(n // limit), *extra), n) for n in range(3 * limit)]
    assert within_budget(samples) == (samples, {})
    assert BUDGETS[owner][1] == limit


def test_each_mig_instance_has_a_budget_of_its_own_which_takes_nothing_from_its_gpus() -> None:
    whole: list[Sample] = [(m.GPU_XID_ERRORS_TOTAL, ("0", "GPU-a", str(code)), 1) for code in range(120)]
    crowded: list[Sample] = [(m.GPU_MIG_INFO, ("0", "GPU-a", "7", str(n), f"MIG-{n}", "1c"), 1) for n in range(21)]
    seven: list[Sample] = [
        (row, ("0", "GPU-a", str(instance)), 1)
        for instance in range(8, 15)
        for row in all_metrics()
        if row.labels == MIG
    ]
    assert within_budget([*whole, *crowded, *seven]) == ([*whole, *crowded[:20], *seven], {"mig": 1})


def test_dropped_series_are_counted_in_metrics() -> None:
    many: list[Sample] = [(m.GPU_XID_ERRORS_TOTAL, ("0", "GPU-a", str(code)), 1) for code in range(123)]
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
