"""`make versions`: compare the rules on the oldest and newest Prometheus and on VictoriaMetrics.

docs/compatibility.md lists the differences and their reasons. All of them scrape the same target, which serves the
series of all rule tests at once, five times as fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.parse
import urllib.request
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import AlertSettings, records, rules, rules_yaml
from demo.servers import NEWEST, ServersError, find, victoria_metrics
from demo.stack import Child, fetch, free_ports
from tests.support import ROOT
from tests.support.databases import PROMETHEUS, VICTORIA, Samples, prometheus, raw, server, victoria
from tests.support.live_series import Series, Target, named, of
from tests.support.reports import flopwatch as report_of
from tests.support.reports import prometheus as prometheus_with
from tests.support.reports import whole_world
from tests.support.rule_files import judged, rules_of, seconds

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("FLOPWATCH_VERSIONS"), reason="`make versions` runs it"),
]
RULE_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
# Those whose samples are further apart than the live comparison has patience for.
LONG = [path for path in RULE_TESTS if len(of([path], 60)) < len(of([path], 3600))]
PACE = 5.0
MINUTES = 25  # at pace 1
SETTINGS = AlertSettings(pace=PACE, teams=("speech",))
STALL = 1.0  # seconds a machine may stall
# Seconds after which VictoriaMetrics shows a sample, and a new series, at the latest, at any pace.
SAMPLE, NEW = 4.0, 10.0
SCRAPE = SETTINGS.scrape_interval / PACE

# Known differences, explained in docs/compatibility.md. VictoriaMetrics takes a counter that begins below ten, or so,
# for one that began at 0, and while a rank moves to another node counts it twice. Some means have the beginning of
# their series in the window all the time. What is read at full hours is here read once, if at all, and what that comes
# to is a matter of when each server had last evaluated it; it is held against its rule test, which lasts for days.
FROM_ZERO = {
    "GpuEccUncorrected",
    "GpuPcieErrors",
    "InfinibandLinkErrors",
    "FlopwatchSeriesDropped",
    "NvlinkErrors",
    "TrainingRestartStorm",
}
NOT_COMPARED = re.compile(r"run:training_straggler_lost:ratio_\d[hd]|run:run_straggler_lost_seconds:.+")
HOURLY = re.compile(rf"\[\w+:{SETTINGS.at_pace(3600)}\]")
# Runs with a rank that moves; the mean of an hour remembers the move.
MOVES = re.compile(r'run="recording_training0-lm"|"run:training_mfu:ratio_1h",run="recording0-lm"')
# A run that is large for two scrapes, six seconds here, one that hangs for almost as long as an alert waits, one that
# waits for data for two minutes, and a host that loses its port two scrapes before the last that counts to a leaf's
# fault. NodeLost2 has five minutes from the loss of a host, two of them before its run is down. VictoriaMetrics' delays
# from rule to rule, which are longer at this pace, take up the rest. An evaluation at another moment sees something
# else.
BRIEF = re.compile(
    r'run="(TrainingHang3-grown|NodeLost1-blip|TrainingDataStall0-short)"|host="(HostOnFaultyLeaf6-c|NodeLost2-node-a)"'
)

# One step of a counter in five minutes: Prometheus adds up to one scrape's share, 1/39 here, at the window's end.
ONE_STEP = re.compile(r'"instance:training_nonfinite:ratio_5m".*run="TrainingLossNotFinite0-small"')

ERRORS = re.compile(r"(prometheus_rule_evaluation_failures|vmalert_(recording|alerting)_rules_errors)_total.* [^0]\S*$")
# How long evaluations took, and how many a busy server left out.
TOOK = re.compile(
    r'(?:prometheus_rule_group|vmalert_iteration)_duration_seconds\{(?:.*,)?quantile="0.99"\} ([0-9.e+-]+)$',
    re.MULTILINE,
)
MISSED = re.compile(r'_(?:iterations|iteration)_missed_total\{(?:rule_group="[^"]*;|group=")([^"]+)".*\} (\S+)$', re.M)
Missed = frozenset[tuple[str, float]]


@dataclass(slots=True)
class Seen:
    """What one server made of the rules: samples by labels, and what its rules complained of."""

    name: str
    alerts: dict[str, Samples] = field(default_factory=dict)
    records: dict[str, Samples] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    rules: int = 0
    took: float = 0.0  # seconds of an evaluation of a group, at the 99th percentile
    missed: Missed = frozenset()  # evaluations that were left out, by group

    def fired(self) -> dict[str, tuple[float, float]]:
        """Return when each alert began to fire and how long it did at the longest, by its labels."""
        return {
            labels.replace('alertstate="firing",', ""): (samples[0][0], longest(samples))
            for labels, samples in self.alerts.items()
            if 'alertstate="firing"' in labels
        }

    def of_host(self, labels: str) -> dict[str, tuple[float, float]]:
        """Return the first and last time of all alerts and records of an alert's host, its causes among them."""
        host = re.search(r'host="[^"]*"', labels)
        series = self.alerts | self.records
        return {key: (ats[0][0], ats[-1][0]) for key, ats in series.items() if host and host[0] in key}

    def pending(self, labels: str) -> float:
        """Return how long an alert was pending at the longest, in seconds, and minus infinity if it was not."""
        found = self.alerts.get(re.sub(r'(alertname="[^"]*",)', r'\1alertstate="pending",', labels), [])
        return longest(found) if found else float("-inf")


def longest(samples: Samples) -> float:
    """Return the time of the longest part of a series that has no gap."""
    most, began = 0.0, 0.0
    for (before, _), (at, _) in pairwise([(float("-inf"), 0.0), *samples]):
        began = at if at - before > 5 * SCRAPE else began
        most = max(most, at - began)
    return most


def vmalert(suite: str, folder: Path, database: str) -> tuple[str, contextlib.AbstractContextManager[Child]]:
    """Return the URL of a suite's vmalert and its server, set up as docs/compatibility.md recommends."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    return url, server(
        f"vmalert-{suite}",
        [
            str(Path(victoria_metrics(suite=suite)).with_name("vmalert")),
            f"-rule={folder}/rules.yaml",
            f"-datasource.url={database}",
            f"-remoteWrite.url={database}",
            f"-remoteRead.url={database}",
            "-notifier.blackhole",
            f"-httpListenAddr=127.0.0.1:{port}",
            f"-rule.evalDelay={SAMPLE:g}s",
            "-disableAlertgroupLabel",
            "-remoteWrite.flushInterval=100ms",
        ],
        folder,
        f"{url}/health",
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Return what each server made of the same series."""
    folder = tmp_path_factory.mktemp("versions")
    (folder / "rules.yaml").write_text(rules_yaml(SETTINGS))
    try:
        for suite in PROMETHEUS:
            find(suite=suite)
        for suite in VICTORIA:
            victoria_metrics(suite=suite)
    except ServersError as error:
        pytest.skip(f"not every version can be had here: {error}")
    # Twice for each sample of a rule test, and for each evaluation: what is there for one of them, all have seen.
    every = SETTINGS.at_pace(SETTINGS.scrape_interval / 2)
    with contextlib.ExitStack() as stack, Target(of(RULE_TESTS, 60), PACE) as target:
        scrape = {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "scrape_configs": [
                {"job_name": "rules", "honor_labels": True, "static_configs": [{"targets": [target.address]}]}
            ],
        }
        (folder / "scrape.yml").write_text(json.dumps(scrape))
        (folder / "prometheus.yml").write_text(json.dumps({**scrape, "rule_files": [f"{folder}/rules.yaml"]}))
        urls: dict[str, tuple[str, str]] = {}
        for suite in PROMETHEUS:
            url, running = prometheus(suite, folder, f"--storage.tsdb.path={folder}/prometheus-{suite}")
            stack.enter_context(running)
            urls[f"prometheus-{suite}"] = (url, url)
        for suite in VICTORIA:
            url, running = victoria(suite, folder, f"-promscrape.config={folder}/scrape.yml")
            stack.enter_context(running)
            alerting, running = vmalert(suite, folder, url)
            stack.enter_context(running)
            urls[f"victoria-{suite}"] = (url, alerting)
        target.began = time.time()
        time.sleep(60 * MINUTES / PACE)
        found = {}
        for name, (url, alerting) in urls.items():
            groups = json.loads(fetch(f"{alerting}/api/v1/rules"))["data"]["groups"]
            every_rule = [rule for group in groups for rule in group["rules"]]
            window = time.time() - target.began
            failures = [f"{rule['name']}: {rule['lastError']}" for rule in every_rule if rule.get("lastError")]
            metrics = fetch(f"{alerting}/metrics").decode()
            failures += [line for line in metrics.splitlines() if ERRORS.match(line)]
            took, missed = max(map(float, TOOK.findall(metrics))), MISSED.findall(metrics)
            assert {group for group, _ in missed} == {group["name"] for group in groups}, metrics
            found[name] = Seen(
                name,
                raw(url, "ALERTS", window),
                raw(url, '{__name__=~".+:.+"}', window),
                failures,
                len(every_rule),
                took,
                frozenset((group, float(count)) for group, count in missed if float(count)),
            )
        return found


def test_every_server_takes_and_evaluates_every_rule(seen: dict[str, Seen]) -> None:
    groups: Any = rules(SETTINGS)["groups"]
    count = sum(len(group["rules"]) for group in groups)
    assert {name: (one.rules, one.failures) for name, one in seen.items()} == dict.fromkeys(seen, (count, []))


@cache
def chain() -> dict[str, tuple[str, float, set[str]]]:
    """Return the group of each alert and record, its interval in seconds, and the alerts and records that it reads."""
    groups: Any = rules(SETTINGS)["groups"]
    where = {rule.get("alert") or rule["record"]: group for group in groups for rule in group["rules"]}
    found = {}
    for name, group in where.items():
        text = "\n".join(rule["expr"] for rule in group["rules"] if name in (rule.get("alert"), rule.get("record")))
        words = set(re.findall(r"[A-Za-z_:][\w:]*", text))
        for names in re.findall(r'\bALERTS\{[^}]*alertname=~?"([^"]*)"', text):
            words |= {other for other in where if re.fullmatch(names, other)}
        found[name] = group["name"], seconds(group["interval"]), (words & where.keys()) - {name}
    return found


@cache
def late(
    name: str,
    hidden: float | None,
    took: float = 0.0,
    missed: Missed = frozenset(),
    above: frozenset[str] = frozenset(),
) -> float:
    """Return how much later one server may evaluate an alert or record than another, in seconds at this pace.

    Its own group's interval, and that of each record or alert in the chain it reads, each with the seconds that an
    evaluation `took` and the evaluations that the group `missed`. Prometheus sees what stands before it in its group at
    once; vmalert sees nothing for `hidden` seconds.
    """
    group, interval, others = chain()[name]
    left_out = max((count for other, count in missed if other == group), default=0.0)
    own, read = interval * (1 + left_out) + took, 0.0
    for other in others - above:
        at_once = hidden is None and chain()[other][0] == group
        read = max(read, late(other, hidden, took, missed, above | {name}) - (own if at_once else 0))
    return own + (hidden or 0) + read


def longest_interval(name: str, above: frozenset[str] = frozenset()) -> float:
    """Return the longest interval of a group in the chain of what an alert reads, in seconds at this pace."""
    _, interval, others = chain()[name]
    return max([interval, *(longest_interval(other, above | {name}) for other in others - above)])


def pairs(seen: dict[str, Seen]) -> Iterator[tuple[Seen, Seen, bool]]:
    """Yield the newest Prometheus with each other server, and whether that is VictoriaMetrics."""
    newest = seen[f"prometheus-{NEWEST}"]
    for name, other in seen.items():
        if other is not newest:
            yield newest, other, name.startswith("victoria")


def test_the_same_alerts_fire_within_one_evaluation(seen: dict[str, Seen]) -> None:
    """Of each group in the chain of what an alert reads, as each server has its own phase.

    Nineteen of twenty within the longest interval of the chain.
    """
    groups: Any = rules(SETTINGS)["groups"]
    every = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    held = {rule["alert"]: seconds(rule["for"]) for rule in every}
    wrong = []
    for newest, other, chained in pairs(seen):
        in_time = []
        took, missed = max(newest.took, other.took), newest.missed | other.missed
        there, here = newest.fired(), other.fired()
        end = max(samples[-1][0] for samples in newest.alerts.values())
        for labels in sorted(there.keys() | here.keys()):
            found = re.search(r'alertname="(\w+)"', labels)
            assert found
            name = found[1]
            most = late(name, NEW if chained else None, took, missed) + SCRAPE + STALL
            if labels in there and labels in here:
                early = there[labels][0] - here[labels][0]
                in_time.append(abs(early) <= longest_interval(name) + SCRAPE)
                if abs(early) > most and not (chained and early > 0 and name in FROM_ZERO):
                    wrong.append(f"{other.name}: {-early:+.1f} s, {most:.1f} s at most: {labels}")
                continue
            if BRIEF.search(labels) or (chained and labels in here and name in FROM_ZERO):
                continue
            fired, missing = (there[labels], other) if labels in there else (here[labels], newest)
            pending = missing.pending(labels)
            # What holds as long as its `for`, or shorter than an evaluation, or has only begun, is seen by one of two.
            if fired[0] < end - most and fired[1] > most and pending < max(held[name] - most, 0):
                wrong.append(
                    f"{other.name}: not at {missing.name}, {pending:.1f} s pending of {held[name]:.1f} s, "
                    f"fired {fired[1]:.1f} s from {fired[0]:.1f}: {labels}; "
                    f"{took:.1f} s an evaluation, missed {missed}; its host there: {missing.of_host(labels)}"
                )
        if not chained:
            assert sum(in_time) >= 0.95 * len(in_time)
    assert not wrong, "\n".join(wrong)
    assert len({re.sub(r'.*alertname="(\w+)".*', r"\1", labels) for labels in newest.fired()}) >= 50


def steady(samples: Samples, at: float, around: float) -> float | None:
    """Return a value around which a series does not change for a while, or None: windows have edges then."""
    first, last = bisect(samples, (at - around, 0.0)), bisect(samples, (at + around, 0.0))
    values = [value for _, value in samples[first:last]]
    if len(values) < 3 or samples[first][0] > at - around / 2 or samples[last - 1][0] < at + around / 2:
        return None
    middle = values[len(values) // 2]
    return middle if max(values) - min(values) <= 0.005 * abs(middle) + 1e-9 else None


def test_records_agree_within_two_percent(seen: dict[str, Seen]) -> None:
    hourly = {record.name for record in records(SETTINGS) if HOURLY.search(record.expr)}
    assert hourly <= set(re.findall(r"\w+:\w+:\w+", "".join(path.read_text() for path in LONG)))
    wrong: dict[str, list[str]] = {}
    for newest, other, chained in pairs(seen):
        compared = 0
        for labels, samples in newest.records.items():
            found = re.search(r'__name__="([^"]+)"', labels)
            assert found
            name = found[1]
            moved = chained and MOVES.search(labels)
            if NOT_COMPARED.fullmatch(name) or name in hourly or BRIEF.search(labels) or moved:
                continue
            most = 0.02 + (1 / 39 if ONE_STEP.search(labels) else 0.0)
            around = max(4 * SCRAPE, late(name, SAMPLE if chained else None))
            there = other.records.get(labels, [])
            for at, _ in samples[::3]:
                one, two = steady(samples, at, around), steady(there, at, around)
                if one is not None and two is not None:
                    compared += 1
                if (one is not None and there == []) or (
                    one is not None and two is not None and abs(one - two) > most * abs(one) + 1e-6
                ):
                    wrong.setdefault(f"{other.name} {labels}", []).append(f"{one:g} {two}")
        assert compared > 5000
    assert not wrong, "\n".join(f"{len(values)} {labels}: {values[:3]}" for labels, values in wrong.items())


@pytest.mark.parametrize("suite", VICTORIA)
@pytest.mark.parametrize("path", LONG, ids=lambda path: path.stem)
def test_rules_over_days_match_their_rule_test_on_victoria_metrics(path: Path, suite: str, tmp_path: Path) -> None:
    """A sample a minute, written at once; vmalert replays the rules over them, one after the other."""
    test = yaml.safe_load(path.read_text())
    (group,) = json.loads(rules_of(path.stem, test))["groups"]
    wrong, asked = [], 0
    try:
        url, running = victoria(suite, tmp_path, "-search.disableCache")
    except ServersError as error:
        pytest.skip(f"this version cannot be had here: {error}")
    with running:
        for number, one in enumerate(test["tests"]):
            cases = one["promql_expr_test"]
            began = (time.time() // 3600 - 60 * 24 * (number + 1)) * 3600.0  # windows of 30 days do not meet
            ended = began + max(seconds(case["eval_time"]) for case in cases)
            with Target([Series.of(each, seconds(one["interval"])) for each in one["input_series"]], 1.0) as target:
                target.began = began
                text = "\n".join(
                    f"{line} {at}000"
                    for at in range(int(began), int(ended) + 1, 60)
                    for line in target.text(at).splitlines()
                )
            urllib.request.urlopen(f"{url}/api/v1/import/prometheus", text.encode(), timeout=60).close()
            for rule in group["rules"]:
                fetch(f"{url}/internal/force_flush")
                replay(suite, url, rule, began, ended, tmp_path)
            fetch(f"{url}/internal/force_flush")
            for case in cases:
                query = urllib.parse.urlencode({"query": case["expr"], "time": began + seconds(case["eval_time"])})
                moved = began if "timestamp_seconds:" in case["expr"] else 0.0
                found = {
                    parsed(named(each["metric"])): float(each["value"][1]) - moved
                    for each in json.loads(fetch(f"{url}/api/v1/query?{query}"))["data"]["result"]
                }
                wanted = {parsed(each["labels"]): each["value"] for each in case["exp_samples"]}
                asked += len(wanted)
                if found != pytest.approx(wanted, rel=0.02):
                    wrong.append(f"{case['expr']} at {case['eval_time']}: {found} instead of {wanted}")
    assert not wrong, "\n".join(wrong)
    assert asked > 1


def replay(suite: str, url: str, rule: dict[str, object], began: float, ended: float, folder: Path) -> None:
    """Let vmalert evaluate a rule at every minute between two Unix times."""
    evaluated = {key: value for key, value in rule.items() if key != "annotations"}  # replayed ones ask for nothing
    (folder / "rule.yaml").write_text(json.dumps({"groups": [{"name": "one", "interval": "1m", "rules": [evaluated]}]}))
    first, last = (datetime.fromtimestamp(at, UTC).isoformat() for at in (began, ended))
    done = subprocess.run(
        [
            Path(victoria_metrics(suite=suite)).with_name("vmalert"),
            f"-rule={folder}/rule.yaml",
            f"-datasource.url={url}",
            f"-remoteWrite.url={url}",
            f"-remoteRead.url={url}",
            f"-replay.timeFrom={first}",
            f"-replay.timeTo={last}",
            "-replay.maxDatapointsPerQuery=100000",
            "-replay.disableProgressBar",
            "-replay.rulesDelay=0s",
            "-disableAlertgroupLabel",
            "-httpListenAddr=127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def parsed(labels: str) -> tuple[tuple[str, str], ...]:
    """Return labels in order, without the name, which VictoriaMetrics keeps where Prometheus does not."""
    return tuple(sorted(pair for pair in re.findall(r'(\w+)="([^"]*)"', labels) if pair[0] != "__name__"))


@pytest.mark.parametrize("suite", PROMETHEUS)
def test_every_rule_test_passes(suite: str, tmp_path: Path) -> None:
    try:
        promtool = find(suite=suite).promtool
    except ServersError as error:
        pytest.skip(f"this version cannot be had here: {error}")
    folders = {path: tmp_path / path.stem for path in RULE_TESTS}
    for folder in folders.values():
        folder.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda path: (path.stem, judged(promtool, folders[path], path)), RULE_TESTS)
        failed = [f"{name}: {one.stdout}{one.stderr}" for name, one in done if one.returncode]
    assert not failed, "\n".join(failed)


def test_the_report_of_a_run_is_the_same(tmp_path: Path) -> None:
    base = float(int(time.time()) - 12_000)
    world = whole_world(base)
    with contextlib.ExitStack() as stack:
        urls = {}
        try:
            for suite in PROMETHEUS:
                (tmp_path / suite).mkdir()
                urls[f"prometheus-{suite}"] = stack.enter_context(prometheus_with(world, tmp_path / suite, suite))
            for suite in VICTORIA:
                urls[f"victoria-{suite}"], running = victoria(suite, tmp_path)
                stack.enter_context(running)
        except ServersError as error:
            pytest.skip(f"not every version can be had here: {error}")
        # In VictoriaMetrics' import a time is in milliseconds.
        text = re.sub(r" (\d+)\.(\d{3})$", r" \1\2", world.text(), flags=re.MULTILINE).encode()
        for name, url in urls.items():
            if name.startswith("victoria"):
                urllib.request.urlopen(f"{url}/api/v1/import/prometheus", text, timeout=60).close()
                fetch(f"{url}/internal/force_flush")
        found = {}
        for name, url in urls.items():
            answer = report_of("r", "--prometheus", url, "--lookback", "4h", "--format", "json", "--price", "2.5")
            assert answer.stderr == ""
            found[name] = json.loads(answer.stdout)
    reference = found.pop(f"prometheus-{NEWEST}")
    assert reference["goodput"] == pytest.approx(6000 / 7895)
    for report in (reference, *found.values()):
        report["mfu_over_time"] = sorted({value for _, value in report["mfu_over_time"]})
        # Written series have no stale markers, so Prometheus repeats their last power for five minutes.
        report["energy"]["joules"] /= report["energy"].pop("seconds")
    wrong = [f"{name}{line}" for name, report in found.items() for line in differences(reference, report, 0.02)]
    assert not wrong, "\n".join(wrong)


def differences(one: Any, other: Any, most: float, place: str = "") -> list[str]:
    """Return where two reports differ, numbers by more than a share of them; they were not made at the same moment."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted(one.keys() | other.keys())
            if key != "made_at"
            for line in differences(one.get(key), other.get(key), most, f"{place}.{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for number, (here, there) in enumerate(zip(one, other, strict=True))
            for line in differences(here, there, most, f"{place}[{number}]")
        ]
    if isinstance(one, str) and isinstance(other, str):
        here, there = ([float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)] for text in (one, other))
        if re.sub(r"[\d.]+", "", one) == re.sub(r"[\d.]+", "", other):
            return differences(here, there, most, place)
    if isinstance(one, float) and isinstance(other, float):
        return [] if abs(one - other) <= most * abs(one) + 1e-6 else [f"{place}: {one} {other}"]
    return [] if one == other else [f"{place}: {str(one)[:200]} {str(other)[:200]}"]
