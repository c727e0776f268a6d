"""The whole chain on loopback: card and job, hook, exporter, Prometheus, rules, Alertmanager, Slack and PagerDuty.

One real training job of four ranks runs through the tests of this file in the order written: a quiet minute, faults in
hardware it does not use, a hung driver, a killed exporter, a slow rank, a killed rank, the end.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from dashboards import filled
from dashboards.__main__ import BOARDS
from dashboards.run import queries
from demo.receiver import Message
from demo.stack import DemoStack
from flopwatch import catalogue as c
from tests.support.exporter_process import flopwatch_command
from tests.support.job_log import JobLog
from tests.support.machine import PATIENCE, shortest
from tests.support.promql_labels import EXTERNAL

pytestmark = [pytest.mark.long, pytest.mark.paired, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(1000)]

RUN = "lm-e2e"
PACE = 15.0  # a minute of the shipped rules is four seconds here
PUSH = 1.0  # seconds between the hook's pushes
STEPS = 10_000  # more than there is time for: the last test stops the run
STEP_FLOOR = 0.4  # seconds a rank computes or sleeps in a step, most of it sleep: two busy cores suffice
CHECKPOINT_EVERY = 200  # after the quiet minute, and not long before the rank is killed
STALE_AFTER = 15.0  # seconds for which what was read last is served
SLOW_RANK, KILLED_RANK = 2, 1
SICK_GPU, SICK_PORT = 6, "mlx5_4"

# By hand, for examples/train_lm.py: d = 128, L = 2, f = 4d, V = 256, s = 128, causal.
#   weights  per layer 4d² + 2·d·4d = 12d² = 196,608; two layers 393,216; LM head V·d = 32,768; W = 425,984
#   FLOPs    6·W = 2,555,904; scores 6·L·d·s = 196,608; together 2,752,512 per token
FLOPS_PER_TOKEN = 2_752_512

Value = TypeVar("Value")

SLOWER = 4  # times that this machine may be


def wait_for(what: str, read: Callable[[], Value | None], seconds: float, stack: DemoStack) -> Value:
    """Return the first value that is not None, False or empty.

    Fail with `what` if none comes in the seconds that it may take on a machine that does nothing else, times SLOWER.
    """
    deadline = time.monotonic() + SLOWER * seconds
    while time.monotonic() < deadline:
        if value := read():
            return value
        stack.check()
        time.sleep(0.2)
    pytest.fail(f"{what} did not come within {SLOWER * seconds:.0f} s; receiver errors: {stack.receiver.errors}")


def alerts_in(message: Message) -> str:
    """Return all text of a message."""
    return str(message.payload)


def firing(stack: DemoStack, kind: str, alert: str) -> list[Message]:
    """Return the messages of one alert that say it fires."""
    found = []
    for message in stack.receiver.messages:
        if message.kind != kind or alert not in alerts_in(message):
            continue
        resolved = (
            message.payload.get("event_action") == "resolve"
            if kind == "pagerduty"
            else all(part["color"] == "good" for part in message.payload["attachments"])
        )
        if not resolved:
            found.append(message)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoStack]:
    """Run the chain with a job of somewhat more than two steps a second."""
    trainer = ("--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY), "--step-floor", str(STEP_FLOOR))
    with DemoStack(
        tmp_path_factory.mktemp("e2e"),
        pace=PACE,
        push_interval=PUSH,
        train="torch",
        trainer=trainer,
        exporter=("--stale-after", f"{STALE_AFTER:g}"),
        run=RUN,
    ) as running:
        assert running.servers.alertmanager, f"no Alertmanager here: {running.servers.why}"
        yield running


@pytest.fixture(scope="module")
def quiet_minute(stack: DemoStack) -> tuple[float, float]:
    """Return begin and end of a minute of plain training; the hardware tests inject their faults meanwhile."""
    wait_for("step 20", lambda: log(stack).step >= 20, 90, stack)
    begin = time.time()
    return begin, begin + 65


def log(stack: DemoStack) -> JobLog:
    return JobLog.read(stack.train_log)


Figure = Callable[[str], None]


def test_symbol_errors_on_one_port_deliver_one_slack_message_that_names_device_and_port(
    stack: DemoStack, quiet_minute: tuple[float, float], figure: Figure
) -> None:
    injected = time.time()
    stack.node.symbol_errors(SICK_PORT, per_second=20)
    message = wait_for("the link alert", lambda: firing(stack, "slack", "InfinibandLinkErrors"), 60, stack)[0]
    text = alerts_in(message)
    assert f"Port 1 of {SICK_PORT} on {socket.gethostname()}: " in text
    figure(f"symbol errors to Slack: {message.at - injected:.1f} s")


def test_xid_79_on_one_gpu_pages_pagerduty_and_nothing_else_does(
    stack: DemoStack, quiet_minute: tuple[float, float], figure: Figure
) -> None:
    injected = time.time()
    stack.node.xid(SICK_GPU, 79)
    page = wait_for("the page", lambda: firing(stack, "pagerduty", "GpuXidCritical"), 60, stack)[0]
    text = alerts_in(page)
    assert stack.node.uuid(SICK_GPU) in text
    assert "79" in page.payload["payload"]["summary"]
    figure(f"Xid 79 to PagerDuty: {page.at - injected:.1f} s")
    assert {message.payload["dedup_key"] for message in stack.receiver.of("pagerduty")} == {page.payload["dedup_key"]}


def test_a_lost_gpu_is_a_series_at_zero_and_keeps_its_identity(stack: DemoStack) -> None:
    uuid = stack.node.uuid(SICK_GPU)
    wait_for("gpu_present 0", lambda: stack.prometheus.value(f'{c.GPU_PRESENT}{{uuid="{uuid}"}} == 0') == 0, 30, stack)
    assert stack.prometheus.value(f'count({c.GPU_INFO}{{uuid="{uuid}", source="simulated"}})') == 1
    # In core, its count is served as 0 for a time, so that increase() sees the first one.
    xids = f'{c.GPU_XID_ERRORS_TOTAL}{{uuid="{uuid}", xid="79"}}'
    wait_for("Xid 79", lambda: stack.prometheus.value(xids) == 1, 30, stack)


def test_live_mfu_is_the_tokens_of_the_jobs_log_times_flops_derived_by_hand(
    stack: DemoStack, quiet_minute: tuple[float, float], figure: Figure
) -> None:
    begin, end = quiet_minute
    wait_for("the quiet minute's end", lambda: time.time() > end + 1, 90, stack)
    job = log(stack)
    assert job.pauses(begin, end) == []
    peak = job.of("start")[0]["peak_flops_per_second"] * stack.ranks
    truth = job.tokens_per_second(begin, end) * FLOPS_PER_TOKEN / peak
    steps = len([line for line in job.of("step") if begin <= line["start"] and line["end"] <= end])
    work, capacity = (
        f"sum by (run) (rate({counter}[{end - begin:.0f}s]))"
        for counter in (c.TRAINING_MODEL_FLOPS_TOTAL, c.TRAINING_CAPACITY_FLOPS_TOTAL)
    )
    live = stack.prometheus.value(f"{work} / {capacity}", at=end)
    assert live is not None
    figure(f"MFU: live {live:.4%}, from the job's log {truth:.4%}, difference {live / truth - 1:+.2%}")
    # A step is counted when it ends, so at either end of the window one may be in one of the two and not in the other.
    assert live == pytest.approx(truth, rel=max(0.02, 2 / steps))
    recorded = stack.prometheus.value("run:training_mfu:ratio_rate5m", at=end)
    window = 300 / PACE
    assert recorded == pytest.approx(job.tokens_per_second(end - window, end) * FLOPS_PER_TOKEN / peak, rel=0.15)


def test_every_panel_query_of_the_dashboard_returns_data(stack: DemoStack) -> None:
    rare = [row.name for row in c.all_metrics() if row.sparse and row is not c.TRAINING_ACTIVITY_SECONDS_TOTAL]
    empty = [(panel, query) for panel, query in queries(run=RUN) if not stack.prometheus.query(query)]
    # No rank is slow yet, and the table has a column of stragglers. Of errors there are no series before the first. No
    # exporter of another project is scraped.
    assert [panel for panel, query in empty if not any(name in query for name in (*rare, *EXTERNAL))] == [
        "Straggler",
        "Ranks and their GPUs",
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_of_every_dashboard_can_be_answered(stack: DemoStack, name: str) -> None:
    place = stack.prometheus.query(f'max by (host, uuid) ({c.TRAINING_RANK_INFO}{{rank="0"}})')[0][0]
    variables = {
        **place,
        "run": RUN,
        "tenant": ".*",
        "rack": ".*",
        "model": ".*",
        "source": ".*",
        "price": "2.5",
        "__rate_interval": "5s",
        "__range": "1m",
    }
    board, end = BOARDS[name], time.time()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = filled(target["expr"], variables)
            if target["instant"]:
                stack.prometheus.query(query)
            else:
                stack.prometheus.query_range(query, end - 60, end, 5)
    for mark in board["annotations"]["list"]:
        stack.prometheus.query_range(filled(mark["target"]["expr"], variables), end - 60, end, 5)


def test_metrics_answer_in_time_while_the_driver_hangs_and_recover(stack: DemoStack, figure: Figure) -> None:
    def metrics() -> str:
        with urllib.request.urlopen(f"http://{stack.exporter_address}/metrics", timeout=PATIENCE) as reply:
            return str(reply.read(), "utf-8")

    def sample(text: str, series: str) -> str | None:
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.M)
        return found and found[1]

    temperature = re.compile(rf"^{c.GPU_TEMPERATURE_CELSIUS}{{", re.M)
    nvml_success = f'{c.FLOPWATCH_COLLECTOR_SUCCESS}{{collector="nvml"}}'
    assert temperature.search(metrics())
    stack.node.hang("nvmlDeviceGetPowerUsage")
    time.sleep(1.2)  # a read younger than a second is shared
    while_hung = ""

    def scrape() -> float:
        nonlocal while_hung
        began = time.monotonic()
        while_hung = metrics()
        return time.monotonic() - began

    took = shortest(scrape, 3)
    figure(f"/metrics with the driver hung: {took:.2f} s")
    assert took < 3
    assert sample(while_hung, nvml_success) == "0.0"
    assert temperature.search(while_hung), "the last good samples are served for a while"
    assert f"{c.INFINIBAND_PORT_STATE_ID}{{" in while_hung
    assert f'{c.TRAINING_POSITION_STEPS}{{run="{RUN}",rank="0"}}' in while_hung
    last_success = sample(while_hung, f'{c.FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS}{{collector="nvml"}}')
    assert last_success is not None
    wait_for(
        "the end of the stale samples",
        lambda: not temperature.search(metrics()),
        float(last_success) + STALE_AFTER + 2 - time.time(),
        stack,
    )
    stack.node.hang(None)
    wait_for("recovery", lambda: sample(metrics(), nvml_success) == "1.0" and temperature.search(metrics()), 10, stack)


def test_killing_the_exporter_loses_no_ledger_second_and_does_not_disturb_the_job(
    stack: DemoStack, figure: Figure
) -> None:
    started, step = log(stack).of("start")[0]["process_started"], log(stack).step
    stack.restart_exporter(kill=True)
    restarted = time.time()
    sample_time = f'timestamp({c.RUN_OPEN_SECONDS}{{run="{RUN}"}})'
    at = restarted + 3 * PUSH

    def later() -> float | None:
        scraped = stack.prometheus.value(sample_time)
        return scraped if scraped is not None and scraped > at else None

    for _ in range(10):  # the page of one scrape may come late; seconds that were lost would be missing from each
        at = wait_for("the ledger after the restart", later, 30, stack)
        books = stack.prometheus.value(
            f'sum({c.RUN_SECONDS_TOTAL}{{run="{RUN}",bucket!="queue"}}) + sum({c.RUN_OPEN_SECONDS}{{run="{RUN}"}})', at
        )
        assert books is not None
        if books == pytest.approx(at - started, rel=0.005):
            break
    figure(f"exporter killed: wall less buckets and open {at - started - books:+.2f} s of {at - started:.0f} s")
    assert books == pytest.approx(at - started, rel=0.005)
    assert stack.prometheus.value(f'{c.RUN_SECONDS_TOTAL}{{run="{RUN}",bucket="down"}}') == 0, "the job was never down"
    assert len(log(stack).of("start")) == 1
    assert log(stack).step > step


def test_a_rank_slowed_by_30_percent_delivers_one_slack_message_that_names_run_rank_host_and_gpu(
    stack: DemoStack, figure: Figure
) -> None:
    assert firing(stack, "slack", "TrainingStraggler") == [], "a false alarm before the rank was slowed"
    slowed = time.time()
    stack.control(slow={str(SLOW_RANK): 0.3})
    message = wait_for("the straggler alert", lambda: firing(stack, "slack", "TrainingStraggler"), 90, stack)[0]
    text = alerts_in(message)
    host = stack.prometheus.query(f'{c.TRAINING_RANK_INFO}{{run="{RUN}",rank="{SLOW_RANK}"}}')[0][0]["host"]
    for named in (f"Rank {SLOW_RANK} of run {RUN}", host, stack.node.uuid(SLOW_RANK)):
        assert named in text
    figure(f"slow rank to Slack: {message.at - slowed:.1f} s")
    url = f"http://{stack.exporter_address}/metrics"
    table = flopwatch_command("top", "--url", url, "--prometheus", stack.prometheus.url)
    assert f"firing: TrainingStraggler run {RUN}" in table.stdout, table.stderr
    assert f"straggler: run {RUN} rank {SLOW_RANK} host {host}" in table.stdout
    assert re.search(rf"^ ?{RUN} +{SLOW_RANK} +[\d,]+ +[\d.]+ % +[\d.]+ % ", table.stdout, re.MULTILINE), table.stdout
    stack.control(slow={})


def test_goodput_after_a_killed_rank_agrees_with_the_jobs_log(stack: DemoStack, figure: Figure) -> None:
    wait_for("60 steps after the checkpoint", lambda: log(stack).step >= CHECKPOINT_EVERY + 60, 120, stack)
    killed_in = log(stack).step + 1
    os.kill(stack.rank_pid(KILLED_RANK), signal.SIGKILL)
    wait_for("the restart", lambda: log(stack).of("restored"), 60, stack)
    wait_for("new steps", lambda: log(stack).of("step")[-1]["step"] > killed_in + 15, 180, stack)
    stack.control(stop=True)
    wait_for("the end of the run", lambda: log(stack).of("finish"), 30, stack)
    ended = wait_for(
        "the ledger's word that it ended",
        lambda: stack.prometheus.value(f'timestamp({c.RUN_STATE}{{run="{RUN}",state="stopped"}} == 1)'),
        15,
        stack,
    )
    goodput = wait_for(
        "a goodput of the closed books",
        lambda: stack.prometheus.value(
            f'run:run_goodput:ratio{{run="{RUN}"}} and timestamp(run:run_goodput:ratio) > {ended}'
        ),
        15,
        stack,
    )

    truth = log(stack).attributed()
    seconds = {
        labels["bucket"]: value for labels, value in stack.prometheus.query(f'{c.RUN_SECONDS_TOTAL}{{run="{RUN}"}}')
    }
    opened = stack.prometheus.value(f'{c.RUN_OPEN_SECONDS}{{run="{RUN}"}}') or 0.0
    true_goodput = truth["productive"] / truth["wall"]
    figure(f"goodput: ledger {goodput:.4f}, job's log {true_goodput:.4f}")
    figure(f"lost: ledger {seconds['lost']:.2f} s, job's log {truth['lost']:.2f} s")
    wall = sum(seconds.values()) - seconds["queue"] + opened
    figure(f"wall: buckets + open {wall:.2f} s, job's log {truth['wall']:.2f} s")
    figure(f"buckets: { {bucket: round(value, 1) for bucket, value in seconds.items() if value} }")
    retained = stack.prometheus.value(f'{c.RUN_RETAINED_FLOPS_TOTAL}{{run="{RUN}"}}')
    work_done_once = log(stack).step * log(stack).of("start")[0]["tokens_per_step"] * FLOPS_PER_TOKEN
    figure(f"retained model FLOPs: ledger {retained:.4e}, job's log {work_done_once:.4e}")
    assert retained == pytest.approx(work_done_once, rel=0.02)
    assert goodput == pytest.approx(true_goodput, abs=0.01)
    assert seconds["lost"] == pytest.approx(truth["lost"], abs=0.05 * truth["lost"] + PUSH)
    assert wall == pytest.approx(truth["wall"], rel=0.005)


def test_in_the_end_each_fault_was_notified_once_and_nothing_else(stack: DemoStack) -> None:
    wait_for(
        "the straggler's all-clear",
        lambda: any(
            "TrainingStraggler" in alerts_in(message) and message not in firing(stack, "slack", "TrainingStraggler")
            for message in stack.receiver.of("slack")
        ),
        60,
        stack,
    )
    assert stack.receiver.errors == []
    assert len(firing(stack, "slack", "TrainingStraggler")) == 1
    assert len(firing(stack, "slack", "InfinibandLinkErrors")) == 1
    (page,) = firing(stack, "pagerduty", "GpuXidCritical")
    assert {message.payload["dedup_key"] for message in stack.receiver.of("pagerduty")} == {page.payload["dedup_key"]}
    expected = {"TrainingStraggler", "InfinibandLinkErrors", "GpuXidCritical"}
    others = [
        alerts_in(message)
        for message in stack.receiver.messages
        if message.kind != "watchdog" and not any(name in alerts_in(message) for name in expected)
    ]
    assert others == []
    assert stack.receiver.of("watchdog"), "the dead man's switch was never fed"


def test_nothing_is_left_when_the_stack_stops(stack: DemoStack) -> None:
    stack.stop()
    assert stack.processes() == []
    assert not Path(f"/proc/{stack.children['exporter'].process.pid}").exists()
