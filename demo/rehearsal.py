"""Rehearse an incident in virtual time and count its pages: `python -m demo.rehearsal leaf_failure`.

A simulated cluster (`flopwatch simulate`) is scraped every 15 s. The shipped rules are evaluated over its series. The
alerts, with their texts, are sent to a real Alertmanager with the shipped routing and a receiver that counts.

`promtool test rules` evaluates the rules. It runs the code of Prometheus for `for`, `keep_firing_for`, ALERTS and
templates, at chosen times. Backfilling evaluates recording rules only, and a running Prometheus has a real clock only.
Two things are simpler than in production. Every group is evaluated at every step, even if its interval is longer, and
all groups at the same instant. tests/rules/test_routing.py covers the worst case of both. Recording rules that no alert
reads are left out.

Alertmanager has a real clock only. So virtual time passes faster by the factor `pace`, and periods without a change are
cut short. A busy machine could post an alert too late. The rehearsal is then repeated at a slower pace, and fails if
alerts are late at every pace.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path

from alerts import Alert, AlertSettings, alertmanager_yaml, alerts, records
from demo.receiver import Message, Receiver
from demo.servers import Servers, ServersError, find
from demo.stack import Child, StackError, fetch, free_ports
from flopwatch.settings import SettingsError
from simulator.faults import Fault, script
from simulator.metrics import Line, series
from simulator.nodes import EPOCH
from simulator.promtool import rule_test
from simulator.scenarios import SCENARIOS, Result, Scenario, simulate

BEFORE, AFTER = 900.0, 2400.0  # seconds scraped before the first fault and after the end of the last
PACE = 120.0  # group_wait is three eighths of a second
TRIES = 4
UNREAD = ("none", "info")  # severities of alerts that no receiver gets
LATE = 30.0  # virtual seconds: less than group_wait

Labels = tuple[tuple[str, str], ...]
Firing = dict[Labels, dict[str, str]]  # annotations by labels


class ScrapedSeries:
    """Scraped series in the notation of promtool. Times and `..._timestamp_seconds` values count from `begin`."""

    def __init__(self, begin: float, step: float) -> None:
        self.begin, self.step, self.last = begin, step, 0
        self._values: dict[tuple[str, Labels], list[tuple[int, str]]] = {}

    def __call__(self, t: float, lines: Iterable[Line]) -> None:
        """Add the samples of one scrape at virtual time `t`."""
        place = round((t - self.begin) / self.step)
        if place < 0:
            return
        self.last = place
        for name, labels, value in lines:
            if name.endswith("_timestamp_seconds"):
                value -= EPOCH + self.begin
            self._values.setdefault((name, tuple(labels.items())), []).append((place, f"{value:.12g}"))

    def inputs(self) -> list[dict[str, str]]:
        """Return all series with their values. A series is stale from its first missing scrape on, as in Prometheus."""
        return [
            {"series": series(name, dict(labels)), "values": " ".join(self._text(found))}
            for (name, labels), found in self._values.items()
        ]

    def _text(self, found: list[tuple[int, str]]) -> Iterable[str]:
        expected = 0
        # Group neighbours with the same value: position minus running number is constant.
        for (_, value), run in groupby(enumerate(found), key=lambda item: (item[1][0] - item[0], item[1][1])):
            places = [place for _, (place, _) in run]
            if places[0] > expected:
                if expected:
                    yield "stale"
                    expected += 1
                if places[0] > expected:
                    yield f"_x{places[0] - expected}"
            yield f"{value}x{len(places) - 1}"
            expected = places[-1] + 1
        if expected <= self.last:
            yield "stale"


def rule_groups(settings: AlertSettings) -> dict[str, object]:
    """Return the rule groups of the shipped alerts and of the recording rules that these read.

    Alerts that no receiver gets have no text here, because its queries take promtool most of the time.
    """
    every = alerts(settings)
    wanted, found = {record.name: record for record in records(settings)}, set[str]()
    pending = [alert.expr for alert in every] + [alert.description for alert in every if alert.severity not in UNREAD]
    while pending:
        text = pending.pop()
        new = {name for name in wanted.keys() - found if re.search(rf"(?<![\w:]){name}(?![\w:])", text)}
        found |= new
        pending += [wanted[name].expr for name in new]
    groups: dict[str, list[dict[str, object]]] = {}
    for record in wanted.values():
        if record.name in found:
            groups.setdefault(record.group, []).append(record.rule())
    for alert in every:
        rule = alert.rule(settings)
        groups.setdefault(alert.group, []).append(rule | {"annotations": {}} if alert.severity in UNREAD else rule)
    return {"groups": [{"name": name, "rules": group} for name, group in groups.items()]}


def evaluated(scraped: ScrapedSeries, promtool: str, settings: AlertSettings, folder: Path) -> list[Firing]:
    """Return the alerts that fire at each evaluation. Raises StackError if promtool fails.

    The tests for promtool expect no alerts, so promtool prints all alerts that fire.
    """
    names = {alert.name for alert in alerts(settings) if is_sent(alert)}
    (folder / "rules.yaml").write_text(json.dumps(rule_groups(settings)))
    (folder / "test.yaml").write_text(
        json.dumps(
            {
                "rule_files": ["rules.yaml"],
                "evaluation_interval": f"{scraped.step:g}s",
                "tests": [
                    {
                        "interval": f"{scraped.step:g}s",
                        "input_series": scraped.inputs(),
                        "alert_rule_test": [
                            {"alertname": name, "eval_time": f"{place * scraped.step:g}s", "exp_alerts": []}
                            for place in range(scraped.last + 1)
                            for name in sorted(names)
                        ],
                    }
                ],
            }
        )
    )
    done = rule_test(promtool, folder / "test.yaml")
    firing: list[Firing] = [{} for _ in range(scraped.last + 1)]
    parsed = "SUCCESS" in done.stdout
    for part in re.split(r"^ *alertname: ", done.stdout + done.stderr, flags=re.MULTILINE)[1:]:
        at = re.match(r"\w+, time: (?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?, ", part)
        found = re.findall(r"^ *Labels:(\{.*\})\n *Annotations:(\{.*\}),?$", part, flags=re.MULTILINE)
        if at is None or len(found) != len(re.findall(r"^ *Labels:", part, flags=re.MULTILINE)):
            raise StackError(f"promtool: {part[:2000]}")
        parsed = True
        weeks, days, hours, minutes, seconds = (int(number or 0) for number in at.groups())
        t = 604_800 * weeks + 86_400 * days + 3600 * hours + 60 * minutes + seconds
        for labels, texts in found:
            firing[round(t / scraped.step)][tuple(sorted(_pairs(labels).items()))] = _pairs(texts)
    if not parsed:
        raise StackError(f"promtool: {(done.stdout + done.stderr)[:2000]}")
    return firing


def is_sent(alert: Alert) -> bool:
    """Return whether an alert is sent to Alertmanager, to notify or to inhibit others. All but severity `info` are."""
    return alert.severity != "info"


def _pairs(text: str) -> dict[str, str]:
    return {name: json.loads(value) for name, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', text)}


@dataclass(frozen=True, slots=True)
class Notification:
    """One message of Alertmanager to a receiver, at virtual second `at`."""

    at: float
    to: str
    key: str
    resolved: bool
    title: str
    text: str


@dataclass
class PacedTimeline:
    """Mapping between virtual and real time. Virtual time passes `pace` times as fast.

    Periods without a change of the firing alerts are cut short.
    """

    changes: list[float]
    settings: AlertSettings
    pace: float
    _cuts: list[tuple[float, float]] = field(default_factory=list)  # virtual seconds, real seconds since the start

    def __post_init__(self) -> None:
        # In this time every group is flushed twice, so all notifications of a change are sent.
        quiet = self.settings.group_wait + 2 * self.settings.group_interval
        changes = self.changes if self.changes else [0.0]
        real, before = 0.0, changes[0]
        for change in (*changes, changes[-1] + quiet):
            real += min(change - before, quiet) / self.pace
            self._cuts.append((change, real))
            before = change

    def real(self, virtual: float) -> float:
        """Return the real seconds from the start to the first change of alerts at or after a virtual time."""
        return next(real for change, real in self._cuts if change >= virtual)

    def virtual(self, real: float) -> float:
        """Return the virtual time that is reached `real` seconds after the start."""
        change, then = [(change, then) for change, then in self._cuts if then <= real + 1e-9][-1]
        return change + (real - then) * self.pace

    @property
    def end(self) -> float:
        """Return the real seconds of the whole timeline."""
        return self._cuts[-1][1]


def delivered(
    firing: Sequence[Firing], step: float, begin: float, servers: Servers, folder: Path, pace: float = PACE
) -> list[Notification]:
    """Return the messages that a real Alertmanager sends, with their virtual times.

    Raises StackError if Alertmanager fails, or if alerts are posted late at every pace.
    """
    for attempt in range(TRIES):
        messages, late = _delivered(firing, step, begin, servers, folder / f"alertmanager-{attempt}", pace / 2**attempt)
        if late <= LATE:
            return messages
    raise StackError(
        f"in {TRIES} tries, alerts were posted more than {LATE:.0f} virtual seconds late (last: {late:.0f} s). "
        "This machine is too busy to count pages"
    )


def _delivered(
    firing: Sequence[Firing], step: float, begin: float, servers: Servers, folder: Path, pace: float
) -> tuple[list[Notification], float]:
    if not servers.alertmanager:
        raise StackError(f"Alertmanager cannot run: {servers.why}")
    folder.mkdir()
    settings = AlertSettings(pace=pace)
    changed = [
        place
        for place, now in enumerate(firing)
        if now.keys() != (firing[place - 1].keys() if place else set[Labels]())
    ]
    timeline = PacedTimeline([place * step for place in changed], settings, pace)
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        receiver = stack.enter_context(Receiver())
        (folder / "slack").write_text(f"{receiver.url}/slack")
        (folder / "key").write_text("0123456789abcdef" * 2)
        (folder / "alertmanager.yml").write_text(
            alertmanager_yaml(
                replace(
                    settings,
                    slack_url_file=folder / "slack",
                    pagerduty_key_file=folder / "key",
                    pagerduty_url=f"{receiver.url}/v2/enqueue",
                    watchdog_url=f"{receiver.url}/watchdog",
                )
            )
        )
        child = Child(
            "alertmanager",
            [
                *servers.alertmanager,
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            os.environ,
            folder / "log",
        )
        stack.callback(child.stop)
        _wait_for(child, f"{address}/-/ready")
        start, late, before = time.time(), 0.0, Firing()
        for place in changed:
            due = start + timeline.real(place * step)
            time.sleep(max(0.0, due - time.time()))
            _post(address, firing[place], before)
            late = max(late, (time.time() - due) * pace)
            before = firing[place]
        time.sleep(max(0.0, start + timeline.end - time.time()))
        child.check()
        if receiver.errors:
            raise StackError(receiver.errors[0])
        return [
            _notification(message, begin + timeline.virtual(max(0.0, message.at - start)))
            for message in receiver.messages
        ], late


def _wait_for(child: Child, url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        child.check()
        try:
            fetch(url)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise child.failure("does not answer") from None
            time.sleep(0.02)


def _post(address: str, now: Firing, before: Firing) -> None:
    """Post firing and resolved alerts to the Alertmanager at `address`, as Prometheus does."""
    moment = datetime.now(UTC)
    body = [
        {
            "labels": dict(labels),
            "annotations": annotations,
            "startsAt": moment.isoformat(),
            "endsAt": (moment + timedelta(hours=1 if labels in now else 0)).isoformat(),
        }
        for labels, annotations in {**before, **now}.items()
    ]
    for alert, labels in zip(body, {**before, **now}, strict=True):
        if labels in before:
            # The times must overlap, or Alertmanager does not merge it into the existing alert.
            alert["startsAt"] = (moment - timedelta(milliseconds=1)).isoformat()
    request = urllib.request.Request(
        f"{address}/api/v2/alerts", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30):
        pass


def _notification(message: Message, at: float) -> Notification:
    payload = message.payload
    if message.kind == "pagerduty":
        resolved = payload["event_action"] == "resolve"
        body = payload.get("payload", {})
        return Notification(
            at,
            "pagerduty",
            payload["dedup_key"],
            resolved,
            body.get("summary", ""),
            body.get("custom_details", {}).get("firing", ""),
        )
    attachment = payload["attachments"][0]
    return Notification(
        at,
        message.kind,
        attachment["title"].partition("] ")[2],
        attachment["color"] == "good",
        attachment["title"],
        attachment["text"],
    )


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal: the truth, the firing alerts at each evaluation, and the messages."""

    result: Result
    begin: float
    step: float
    firing: list[Firing]
    messages: list[Notification] = field(default_factory=list)

    @property
    def pages(self) -> dict[str, list[Notification]]:
        """Return the messages to PagerDuty by dedup_key. Each key is one page."""
        found: dict[str, list[Notification]] = {}
        for message in self.messages:
            if message.to == "pagerduty":
                found.setdefault(message.key, []).append(message)
        return found


def rehearse(
    scenario: Scenario,
    seed: int = 1,
    faults: Sequence[Fault] | None = None,
    step: float | None = None,
    after: float = AFTER,
    change: Callable[[Line], Line | None] = lambda line: line,
) -> Rehearsal:
    """Simulate a scenario and evaluate the rules over its series, without messages: `notified` adds them.

    `change` can replace a scraped sample, or drop it by returning None. Raises StackError if promtool fails.
    """
    settings = AlertSettings()
    step = settings.scrape_interval if step is None else step
    strikes = scenario.strikes(seed) if faults is None else list(faults)
    begin = max(0.0, min(fault.t for fault in strikes) - BEFORE) if strikes else 0.0
    begin -= begin % step
    if all(fault.lasts is not None for fault in strikes) and strikes:
        end = max(fault.t + (fault.lasts or 0.0) for fault in strikes) + after
        scenario = replace(scenario, days=min(scenario.days, end / 86400))
    scraped = ScrapedSeries(begin, step)
    result = simulate(
        scenario,
        seed,
        strikes,
        step=step,
        scraped=lambda t, lines: scraped(t, (changed for line in lines if (changed := change(line)) is not None)),
    )
    with tempfile.TemporaryDirectory(prefix="flopwatch-rehearsal-") as folder:
        return Rehearsal(result, begin, step, evaluated(scraped, find().promtool, settings, Path(folder)))


def notified(rehearsal: Rehearsal) -> Rehearsal:
    """Return a rehearsal with the messages of a real Alertmanager. Raises StackError if this fails."""
    with tempfile.TemporaryDirectory(prefix="flopwatch-rehearsal-") as folder:
        messages = delivered(rehearsal.firing, rehearsal.step, rehearsal.begin, find(), Path(folder))
    return replace(rehearsal, messages=messages)


def report(rehearsal: Rehearsal) -> str:
    """Return the truth and the notifications as text for a terminal."""
    lines = ["what happened"]
    lines += [
        f"{_clock(loss.at - EPOCH):>9}  {loss.kind}: {truth.run} ({loss.effect}), "
        f"{loss.gpu_seconds / 3600:.0f} GPU-hours lost"
        for truth in rehearsal.result.truths
        for loss in truth.losses
    ] or ["  nothing"]
    lines += ["", "notifications"]
    names: dict[str, str] = {}
    for message in sorted(rehearsal.messages, key=lambda message: message.at):
        name = names.setdefault(message.key, message.title.rpartition("] ")[2].partition(":")[0])
        what = f"{name} is over" if message.resolved else message.title
        lines.append(f"{_clock(message.at):>9}  {message.to}: {what}")
    fired = {dict(labels)["alertname"] for now in rehearsal.firing for labels in now}
    lines += [
        "",
        f"{len(rehearsal.firing):,} evaluations; fired: {', '.join(sorted(fired)) or 'nothing'}",
        f"pages: {len(rehearsal.pages)}",
    ]
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse a scenario and print the report. Return 1 if the number of pages is not the expected one."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.rehearsal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, help="length of the simulation (default: the scenario's)")
    parser.add_argument("--faults", type=Path, help="file of faults that replace the scenario's")
    parser.add_argument("--step", type=float, help="seconds between scrapes (default 15)")
    parser.add_argument("--pages", type=int, help="expected number of pages")
    given = parser.parse_args(arguments)
    try:
        rehearsal = notified(
            rehearse(
                SCENARIOS[given.scenario].sized(given.days, None),
                given.seed,
                script(given.faults) if given.faults is not None else None,
                given.step,
            )
        )
    except (SettingsError, ServersError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.scenario}, seed {given.seed}\n\n{report(rehearsal)}")
    return int(given.pages is not None and given.pages != len(rehearsal.pages))


if __name__ == "__main__":
    sys.exit(main())
