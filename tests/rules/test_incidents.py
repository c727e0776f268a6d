"""One incident, one page: what a simulated cluster goes through, to the messages of a real Alertmanager.

FLOPWATCH_REHEARSE=1 takes them in full: 64 nodes with a dead leaf, a driver upgrade that rolls over 64 nodes, 1,000
healthy node-hours for each of FLOPWATCH_SEEDS seeds, and more kinds of fault.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from alerts import AlertSettings
from demo.rehearsal import Firing, PacedTimeline, Rehearsal, ScrapedSeries, delivered, main, notified, rehearse, report
from demo.servers import Servers
from demo.stack import StackError
from simulator.faults import Fault
from simulator.jobs import TrainingJob
from simulator.metrics import Line
from simulator.nodes import EPOCH, Noise
from simulator.scenarios import SCENARIOS, Scenario

FULL = bool(os.environ.get("FLOPWATCH_REHEARSE"))
SEEDS = range(1, int(os.environ.get("FLOPWATCH_SEEDS", "1")) + 1) if FULL else (1,)
# A rehearsal is repeated at a slower pace where the machine is busy, which takes ten times as long.
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(7200 if FULL else 300)]
LONG = pytest.mark.skipif(not FULL, reason="minutes each, and a part of it is above: make simulate")
RUN = TrainingJob("lm", 8, mesh={"tp": 8, "dp": 8}, step_seconds=5.0)  # 64 GPUs: it pages
ALONE = Scenario(
    "alone", "a run with a spare node", 1.0, (RUN,), spares=1, noise=Noise(per_node_day=0.0, missing=0.0, late=0.0)
)


def fired(found: Rehearsal, severity: str) -> set[str]:
    """Return the names of the alerts of a severity that ever fired."""
    every = [dict(labels) for now in found.firing for labels in now]
    return {labels["alertname"] for labels in every if labels["severity"] == severity}


def notifications(found: Rehearsal) -> Counter[tuple[str, bool]]:
    """Return the number of messages by receiver and by whether they report an end."""
    return Counter((message.to, message.resolved) for message in found.messages)


def one_page(found: Rehearsal) -> str:
    """Return the text of the only page. It is over at the end; Slack had one message, and one that it is."""
    assert notifications(found) == {(to, resolved): 1 for to in ("pagerduty", "slack") for resolved in (False, True)}, (
        report(found)
    )
    (messages,) = found.pages.values()
    assert [message.resolved for message in messages] == [False, True]
    assert not any(dict(labels)["severity"] == "critical" for labels in found.firing[-1])
    return messages[0].title


def dead_leaf() -> Rehearsal:
    if FULL:
        return rehearse(SCENARIOS["leaf_failure"])
    return rehearse(
        replace(ALONE, spares=0, rails=False), faults=[Fault(600.0, "leaf", leaf="leaf-0", lasts=1200.0)], after=1500.0
    )


def upgrade() -> Rehearsal:
    step = 30.0  # an interval of scrapes that takes promtool half as long
    if FULL:
        return rehearse(SCENARIOS["rolling_maintenance"], step=step)
    return rehearse(
        replace(ALONE, spares=4),
        step=step,
        after=600.0,
        faults=[
            Fault(600.0 + 1500 * batch, "maintenance", nodes=tuple(range(4 * batch, 4 * batch + 4)), lasts=1600.0)
            for batch in range(2)
        ],
    )


def dead_host() -> Rehearsal:
    return rehearse(ALONE, faults=[Fault(600.0, "cpu", "lm", node=3, lasts=900.0)], after=900.0)


def healthy(seed: int) -> Rehearsal:
    scenario, noisy = SCENARIOS["healthy"], Noise(per_node_day=5.0 if FULL else 100.0)
    scenario = replace(scenario, noise=noisy, days=scenario.days if FULL else 0.5 / 24)
    return rehearse(scenario, seed, step=60.0 if FULL else None)


def broken_part(kind: str, seed: int = 1, change: Callable[[Line], Line | None] = lambda line: line) -> Rehearsal:
    return rehearse(ALONE, seed, [Fault(600.0, kind, "lm", node=3, part=2, lasts=1200.0)], change=change)


def without_xids(line: Line) -> Line | None:
    return None if line[0].startswith("gpu_xid_") else line


def hang() -> Rehearsal:
    return rehearse(ALONE, faults=[Fault(600.0, "nccl_watchdog", "lm", lasts=3600.0, by_hand=2400.0)])


LIVED: dict[str, Callable[[], Rehearsal]] = {  # the longest first
    **{f"seed {seed}": partial(healthy, seed) for seed in SEEDS},
    "upgrade": upgrade,
    "leaf": dead_leaf,
    "host": dead_host,
}
if FULL:
    LIVED |= {kind: partial(broken_part, kind) for kind in ("faulty_gpu", "cable")}
    LIVED |= {"silent": partial(broken_part, "faulty_gpu", 3, without_xids), "hang": hang}


def alerts_of(name: str) -> Rehearsal:
    return LIVED[name]()


@pytest.fixture(scope="module")
def lived() -> Iterator[dict[str, Future[Rehearsal]]]:
    """Give each rehearsed incident by name.

    Two are evaluated at a time, as one takes a core and up to 3.5 GiB. Those that wait for Alertmanager take neither.
    """
    spawn = get_context("spawn")  # a fork while other threads run may block
    with ProcessPoolExecutor(2, spawn) as evaluating, ThreadPoolExecutor(len(LIVED)) as waiting:
        evaluated = {name: evaluating.submit(alerts_of, name) for name in LIVED}
        yield {name: waiting.submit(lambda one: notified(one.result()), one) for name, one in evaluated.items()}
        evaluating.shutdown(cancel_futures=True)


def test_a_dead_leaf_is_one_page_with_its_runs_and_gpus_until_all_is_over(lived: dict[str, Future[Rehearsal]]) -> None:
    found = lived["leaf"].result()
    behind, run = (
        ("32 hosts of leaf leaf-0-0", "Run big of 256 GPUs has 256")
        if FULL
        else ("8 hosts of leaf leaf-0", "Run lm of 64 GPUs has 64")
    )
    assert one_page(found).startswith(
        f"LeafDown: {behind} lost a port, or are gone, within 10m. {run} of its ranks there."
    )
    assert fired(found, "critical") == {"InfinibandPortDown", "LeafDown", "TrainingDown", "TrainingHang"}
    # The run's pages outlast the leaf's by a quarter of an hour, and are held back as long.
    of_leaf, of_run, between = (
        max(place for place, now in enumerate(found.firing) if any(("alertname", name) in labels for labels in now))
        for name in ("LeafDown", "TrainingHang", "RunOnFaultyHost")
    )
    assert of_leaf + 900 / found.step <= of_run <= between


def test_a_dead_host_is_one_page_also_where_its_run_goes_on_elsewhere(lived: dict[str, Future[Rehearsal]]) -> None:
    found = lived["host"].result()
    assert one_page(found) == (
        "NodeLost: Host node-0003 (rack rack-0, leaf leaf-0-0) does not answer, and a run with ranks there "
        "makes no progress. Run lm of 64 GPUs has 8 of its ranks there."
    )
    assert fired(found, "critical") == {"NodeLost", "TrainingHang"}


@LONG
@pytest.mark.parametrize(("kind", "alert"), [("faulty_gpu", "GpuXidCritical"), ("cable", "InfinibandPortDown")])
def test_a_broken_part_is_one_page(lived: dict[str, Future[Rehearsal]], kind: str, alert: str) -> None:
    found = lived[kind].result()
    assert len(found.pages) == 1, report(found)
    ((first, *_),) = found.pages.values()
    assert first.title.startswith(f"{alert}: ")


@LONG
def test_a_gpu_that_is_gone_without_an_xid_is_one_page(lived: dict[str, Future[Rehearsal]]) -> None:
    found = lived["silent"].result()
    assert one_page(found).startswith("GpuMissing: ")


@LONG
def test_a_job_that_hangs_is_ended_and_stays_down_is_one_page(lived: dict[str, Future[Rehearsal]]) -> None:
    found = lived["hang"].result()
    assert one_page(found).startswith("TrainingHang: Run lm has finished no step for ")
    assert fired(found, "critical") == {"TrainingDown", "TrainingHang"}


def test_a_driver_upgrade_in_announced_maintenance_is_no_page(lived: dict[str, Future[Rehearsal]]) -> None:
    found = lived["upgrade"].result()
    assert found.pages == {}, report(found)
    assert notifications(found) == {}, report(found)
    # It would have been, and not only once.
    hosts = {dict(labels)["host"] for now in found.firing for labels in now if ("alertname", "GpuMissing") in labels}
    assert len(hosts) == (64 if FULL else 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_cluster_sends_no_page_whatever_its_nodes_see(seed: int, lived: dict[str, Future[Rehearsal]]) -> None:
    found = lived[f"seed {seed}"].result()
    hours = (len(found.firing) - 1) * found.step / 3600
    print(
        f"seed {seed}: {8 * hours:.0f} node-hours, pages {len(found.pages)}, messages {len(found.messages)}, "
        f"warnings {sorted(fired(found, 'warning'))}"
    )
    assert 8 * hours >= (1000 if FULL else 4)
    assert found.pages == {}, report(found)
    assert fired(found, "critical") == set()
    assert fired(found, "warning") >= {"InfinibandLinkErrors"}  # nodes did see this and that


def test_the_command_prints_what_happened_next_to_the_notifications(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["healthy", "--days", "0.002", "--pages", "1"]) == 1
    assert capsys.readouterr().out == (
        "healthy, seed 1\n\nwhat happened\n  nothing\n\nnotifications\n\n17 evaluations; fired: nothing\npages: 0\n"
    )


# In the place of an Alertmanager: ready at once, and slow to take an alert.
SLOW = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Slow(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        time.sleep(0.05)
        self.do_GET()

address = next(word for word in sys.argv if word.startswith("--web.listen-address=")).partition("=")[2]
HTTPServer(("127.0.0.1", int(address.rpartition(":")[2])), Slow).serve_forever()
"""


def test_pages_that_were_posted_too_late_are_not_counted(tmp_path: Path) -> None:
    servers = Servers((), "", (sys.executable, "-c", SLOW), "", "")
    firing: list[Firing] = [{}, {(("alertname", "NodeLost"), ("severity", "critical")): {}}]
    # At the slowest of these paces 50 ms are 625 virtual seconds.
    with pytest.raises(StackError, match="virtual seconds late"):
        delivered(firing, 15.0, 0.0, servers, tmp_path, pace=100_000.0)


def test_series_are_written_as_promtool_reads_them_from_the_beginning_on() -> None:
    scraped = ScrapedSeries(100.0, 15.0)
    for t, values in (
        (85.0, {"up": 1.0, "some_timestamp_seconds": 0.0}),
        (100.0, {"up": 1.0, "some_timestamp_seconds": EPOCH + 90}),
        (115.0, {"up": 1.0, "some_timestamp_seconds": EPOCH + 110}),
        (145.0, {"up": 2.5}),
        (160.0, {"up": 2.5}),
        (175.0, {"some_timestamp_seconds": EPOCH + 175}),
    ):
        scraped(t, [(name, {"job": "a"}, value) for name, value in values.items()])
    assert scraped.inputs() == [
        {"series": 'up{job="a"}', "values": "1x1 stale 2.5x1 stale"},
        {"series": 'some_timestamp_seconds{job="a"}', "values": "-10x0 10x0 stale _x2 75x0"},
    ]


def test_time_is_cut_short_only_where_nothing_changes_for_long() -> None:
    settings = AlertSettings()  # every group has been flushed twice after 285 s
    timeline = PacedTimeline([1000.0, 1100.0, 9000.0], settings, 10.0)
    assert [timeline.real(change) for change in (1000.0, 1100.0, 9000.0)] == [0.0, 10.0, 38.5]
    assert timeline.end == 67.0
    assert [timeline.virtual(real) for real in (0.0, 4.0, 10.0, 38.5, 40.0)] == [1000.0, 1040.0, 1100.0, 9000.0, 9015.0]
    assert PacedTimeline([], settings, 10.0).end == 28.5
