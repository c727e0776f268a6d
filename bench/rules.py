"""Benchmark of the shipped rules on a real Prometheus over the series of a whole cluster.

    python bench/rules.py [--gpus 32768] [--minutes 10] [--interval SECONDS]

Prometheus scrapes synthetic pages (bench/pages.py) of all nodes and of one ledger over loopback, each as its own
target. The measured times include the load of scraping.

Windows longer than --minutes only contain the samples since the start. On fewer than eight processors, the default
scrape interval is 60 s instead of 15 s, because the machine also serves the pages. All windows and intervals scale with
the scrape interval, so that a rule reads the same number of samples. The time of a group is compared with its interval
at 15 s.

The exit status is 1 if a group took longer than that interval, or if a rule or a scrape failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from alerts import AlertSettings, rules_yaml
from bench.pages import BEFORE, GPUS, families, serve
from demo.servers import find
from demo.stack import Child, fetch, free_ports

MIN_PROCESSORS = 8  # for a scrape interval of 15 s
ANSWER_TIMEOUT = 300.0  # seconds, for an answer while rules take minutes


@dataclass(frozen=True, slots=True)
class Group:
    """A group of rules. Times are in seconds. `mean` and `worst` are the times of one evaluation of the group."""

    name: str
    rules: int
    interval: float
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class RulesMeasurement:
    """Evaluation times of the rules, failures, and the load of Prometheus."""

    groups: tuple[Group, ...]
    slowest: tuple[tuple[str, float], ...]  # every rule and its mean
    failures: tuple[str, ...]
    recorded: dict[str, int]  # series by record
    firing: int
    scraped_series: int
    head_series: int
    memory: int  # peak resident bytes
    cores: float  # mean while measured
    waited: float  # seconds per second that threads waited for a processor, in total


def configuration(settings: AlertSettings, nodes: int, port: int) -> dict[str, object]:
    """Return the configuration of Prometheus: a target for each node, with its own instance, at one address."""
    interval = settings.at_pace(settings.scrape_interval)

    def target(path: str, instance: str) -> dict[str, object]:
        return {"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": path, "instance": instance}}

    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "flopwatch-exporter",
                "static_configs": [
                    target(f"/n/{index}", f"10.0.{index // 256}.{index % 256}:9450") for index in range(nodes)
                ],
            },
            {
                "job_name": "flopwatch-ledger",
                "scrape_interval": settings.at_pace(settings.ledger_interval),
                "static_configs": [target("/ledger", "ledger:9452")],
            },
        ],
    }


def ask(url: str, query: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each series of a query. The answer can take minutes while rules are evaluated."""
    address = f"{url}/api/v1/query?{urlencode({'query': query, 'timeout': '5m'})}"
    with build_opener(ProxyHandler({})).open(address, timeout=ANSWER_TIMEOUT) as reply:
        return [(series["metric"], float(series["value"][1])) for series in json.load(reply)["data"]["result"]]


def processor(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def waited(pid: int) -> float:
    """Return the seconds that the live threads of a process have waited for a processor, in total.

    Source: https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat
    """
    return sum(int(path.read_text().split()[1]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def peak(pid: int) -> int:
    """Return the peak resident memory of a process in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(gpus: int, seconds: float, settings: AlertSettings, log: Callable[[str], None] = print) -> RulesMeasurement:
    """Run Prometheus over a cluster of `gpus` GPUs for `seconds`, and return what the second half measured.

    Raises StackError if a process fails.
    """
    nodes = -(-gpus // GPUS)
    rules = rules_yaml(settings)
    rows = families(rules)
    with ExitStack() as stack:
        stack.enter_context(many_files())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flopwatch-rules-")))
        port, web = free_ports(2)
        (folder / "rules.yaml").write_text(rules)
        (folder / "prometheus.yml").write_text(json.dumps(configuration(settings, nodes, port)))
        names, began = [row.name for row in rows], time.time() - BEFORE / settings.pace
        start_process(stack, serve, names, nodes, began, port)
        command = [
            *find(log=log).prometheus,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{web}",
            "--log.level=warn",
            "--query.max-samples=100000000",
            "--query.timeout=5m",
        ]
        prometheus = Child("prometheus", command, os.environ, folder / "log")
        stack.callback(prometheus.stop)
        log(f"{nodes:,} nodes, {len(rows)} families; warming up for {seconds / 2:.0f} s ...")
        time.sleep(seconds / 2)
        prometheus.check()
        pid, url = prometheus.process.pid, f"http://127.0.0.1:{web}"
        busy, idle, start = processor(pid), waited(pid), time.monotonic()
        groups, slowest, failures = _evaluations(url, seconds / 2, settings.scrape_interval / settings.pace / 3)
        prometheus.check()
        elapsed = time.monotonic() - start
        return _measurement(
            url, groups, slowest, failures, peak(pid), (processor(pid) - busy) / elapsed, (waited(pid) - idle) / elapsed
        )


@contextmanager
def many_files() -> Iterator[None]:
    """Raise the limit of open files to the hard limit until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_process(stack: ExitStack, target: Callable[..., None], *arguments: object) -> None:
    """Run `target` in a child process that ends with the stack."""
    process = multiprocessing.get_context("spawn").Process(daemon=True, target=target, args=arguments)
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)


def _evaluations(
    url: str, seconds: float, pause: float
) -> tuple[tuple[Group, ...], tuple[tuple[str, float], ...], list[str]]:
    """Poll the rules of Prometheus for `seconds`, and longer until each group has been evaluated three times.

    Return the groups, the mean of each rule, and the failures.
    """
    times: dict[str, dict[str, float]] = {}
    each: dict[tuple[str, int, str], dict[str, float]] = {}
    began = time.monotonic()
    while True:
        answer = json.loads(fetch(f"{url}/api/v1/rules", ANSWER_TIMEOUT))["data"]["groups"]
        for group in answer:
            times.setdefault(group["name"], {})[group["lastEvaluation"]] = group["evaluationTime"]
            for index, rule in enumerate(group["rules"]):
                taken = each.setdefault((group["name"], index, rule["name"]), {})
                taken[rule["lastEvaluation"]] = rule["evaluationTime"]
        # Rules of the fleet read records of runs, these read records of hosts: all are there after three rounds.
        # The first evaluation that is seen is from before.
        if time.monotonic() - began >= seconds and all(len(found) > 3 for found in times.values()):
            break
        time.sleep(pause)
    groups = tuple(
        Group(group["name"], len(group["rules"]), group["interval"], fmean(found.values()), max(found.values()))
        for group in answer
        if (found := times[group["name"]])
    )
    means = ((name, fmean(taken.values())) for (_, _, name), taken in each.items())
    failures = [
        f"{rule['name']}: {rule.get('lastError', rule['health'])}"
        for group in answer
        for rule in group["rules"]
        if rule["health"] != "ok"
    ]
    return groups, tuple(sorted(means, key=lambda item: -item[1])), failures


def _measurement(
    url: str,
    groups: tuple[Group, ...],
    slowest: tuple[tuple[str, float], ...],
    failures: list[str],
    memory: int,
    cores: float,
    idle: float,
) -> RulesMeasurement:
    """Return the measurement: the given evaluation times and load, and the series that Prometheus reports itself."""
    [(_, down)] = ask(url, "count(up == 0) or vector(0)")
    [(_, firing)] = ask(url, 'count(ALERTS{alertname!="FlopwatchWatchdog"}) or vector(0)')
    [(_, scraped)] = ask(url, "sum(scrape_samples_scraped)")
    own = fetch(f"{url}/metrics", ANSWER_TIMEOUT).decode()
    head = re.search(r"^prometheus_tsdb_head_series (\S+)$", own, re.MULTILINE)
    assert head is not None
    records = ask(url, 'count by (__name__) ({__name__=~"[a-z]+:.+:.+"})')
    return RulesMeasurement(
        groups=groups,
        slowest=slowest,
        failures=(*failures, *([f"{down:.0f} targets were not scraped"] if down else [])),
        recorded={labels["__name__"]: int(count) for labels, count in records},
        firing=int(firing),
        scraped_series=int(scraped),
        head_series=int(float(head[1])),
        memory=memory,
        cores=cores,
        waited=idle,
    )


def table(measured: RulesMeasurement, shown: int = 8, pace: float = 1.0) -> str:
    """Return the measurement as text. Groups are sorted by the share of the interval that the worst evaluation took."""
    rows = [f"{'group':24} {'rules':>5} {'interval':>8} {'mean':>8} {'worst':>8} {'of interval':>11}"]
    for group in sorted(measured.groups, key=lambda group: -group.worst / group.interval):
        interval = group.interval * pace
        rows.append(
            f"{group.name:24} {group.rules:5} {interval:6.0f} s {group.mean:6.2f} s "
            f"{group.worst:6.2f} s {group.worst / interval:11.1%}"
        )
    busy = sum(group.mean / (group.interval * pace) for group in measured.groups)
    rows += ["", f"all groups together: {busy:.2f} s of evaluation a second"]
    rows += ["slowest rules: " + ", ".join(f"{name} {took:.2f} s" for name, took in measured.slowest[:shown])]
    rows += [
        f"series scraped {measured.scraped_series:,}, recorded {sum(measured.recorded.values()):,}, "
        f"in the head {measured.head_series:,}; alerts pending or firing {measured.firing:,}",
        f"Prometheus: at most {measured.memory / 2**30:.1f} GiB resident, {measured.cores:.2f} cores, and "
        f"waited for one {measured.waited:.2f} s a second",
    ]
    return "\n".join([*rows, *measured.failures])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rules and print the table. Return 1 if a group exceeded its interval, or a rule or scrape failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=32_768)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration, half of it to warm up (default %(default)g)"
    )
    parser.add_argument("--rules", type=int, default=8, help="number of slowest rules to show (default %(default)s)")
    parser.add_argument(
        "--interval",
        type=float,
        default=15.0 if (os.cpu_count() or 1) >= MIN_PROCESSORS else 60.0,
        help="seconds between scrapes; the intervals of all rules scale with it",
    )
    given = parser.parse_args(arguments)
    settings = AlertSettings()
    settings = replace(settings, pace=settings.scrape_interval / given.interval)
    print(f"{os.cpu_count()} processors; a scrape every {given.interval:g} s", flush=True)
    measured = measure(given.gpus, 60 * given.minutes, settings)
    print(table(measured, given.rules, settings.pace))
    late = [group.name for group in measured.groups if group.worst > group.interval * settings.pace]
    return int(bool(late or measured.failures))


if __name__ == "__main__":
    sys.exit(main())
