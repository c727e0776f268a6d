"""Our rules on a real Prometheus, over the series of a whole cluster: how long does each group take of its interval?

    python bench/rules.py [--gpus 32768] [--minutes 10] [--interval SECONDS]

Nodes of eight GPUs, nine ports and eight ranks, 64 to a run, and one ledger are scraped over loopback, each at its own
instance, as an exporter would serve them: of all families in the catalogue those that the shipped rules read, and of
these the series that a healthy node has. Counters move, and one rank of each run is late. What this costs Prometheus
beside the rules, scraping, is part of what is measured, as it is anywhere.

Windows longer than the time measured are filled no further than that; --minutes says how long. A machine of fewer than
eight processors, which scrapes and serves such a cluster besides, is scraped every 60 s in place of 15, unless
--interval says otherwise: windows and intervals stretch along, so that a rule reads as many samples. Its time is
compared with the interval that the group has at 15 s all the same.

Ends with status 1 if a group took longer than that, if a rule failed, or if a scrape did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))

from alerts import AlertSettings, rules_yaml
from demo.servers import find
from demo.stack import Child, fetch, free_ports
from flopwatch import catalogue as m
from flopwatch.catalogue.infiniband import PortCounter
from flopwatch.training.totals import DURATION_BOUNDS

GPUS, PORTS, NODES_OF_A_RUN = 8, 9, 64
ENOUGH = 8  # processors
PATIENCE = 300.0  # seconds, for an answer beside rules that take minutes
LATE = 5  # the rank of each run that the others wait for

# What a body has in place of what changes: the seconds since long before the start, the time, and the node.
SECONDS, NOW, NODE = "\x01", "\x02", "\x03"
BEFORE = 1000.0  # seconds that had passed when the bench began, at pace 1

# Families that a healthy node, on InfiniBand, with NVLink and a known step, has no series of.
ABSENT = {
    m.GPU_FABRIC_FAULT,
    m.GPU_RETIRED_PAGES_PENDING,
    m.GPU_TEMPERATURE_LIMIT_CELSIUS,
    m.GPU_XID_LAST_TIMESTAMP_SECONDS,
    m.GPU_XID_INFO,
    m.GPU_XID_NVLINK_ERRORS_TOTAL,
    m.INFINIBAND_COUNTER_SATURATED,
    m.NVLINK_LINK_STATE_ID,
    m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS,
    m.NVLINK_SWITCH_SXID_INFO,
    m.TRAINING_MFU_UNAVAILABLE,
    m.TRAINING_STUCK_FRAME_INFO,
    m.HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS,
}
# Other labels than those of the GPU, port, rank or run, and their values on such a node.
VALUES: Mapping[str, Sequence[str]] = {
    "activity": (
        "startup",
        "step",
        "compile",
        "data_stall",
        "checkpoint_save",
        "checkpoint_restore",
        "evaluation",
        "other",
    ),
    "bucket": (
        "productive",
        "lost",
        "startup",
        "compile",
        "data_stall",
        "checkpoint_save",
        "checkpoint_restore",
        "evaluation",
        "generation",
        "down",
        "queue",
        "other",
    ),
    "cause": ("gpu", "network", "unknown"),
    "collector": ("nvml", "infiniband", "xid", "identity", "dcgm"),
    "error": ("corrected", "uncorrected"),
    "kind": ("gpus", "ports", "nvlinks"),
    "limit": ("shutdown", "slowdown", "memory_max", "gpu_max"),
    "outcome": ("accepted", "partial", "refused"),
    "part": ("channel", "tpc"),
    "reason": ("power_cap", "thermal", "sync_boost", "hardware_thermal", "hardware_power_brake"),
    "sensor": ("asic", "Module0"),
    "source": ("kubelet",),
    "state": ("active", "inactive"),
    "status": ("completed", "stopped", "preempted", "resized", "failed", "silent"),
    "value": ("loss", "grad_norm"),
}
STATES = ("queued", "running", "down", "completed", "stopped")
# Counters of these stand still unless they are here; gauges are 0 or 1 unless they are here.
MOVING: Mapping[m.Metric, str] = {
    m.GPU_ENERGY_JOULES_TOTAL: "e2",
    m.GPU_PROFILED_SECONDS_TOTAL: "",
    m.GPU_SM_ACTIVE_SECONDS_TOTAL: "",
    m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL: "e-1",
    m.INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL: "e9",
    m.INFINIBAND_RECEIVE_PACKETS_TOTAL: "e6",
    m.INFINIBAND_TRANSMIT_WAIT_TICKS_TOTAL: "e3",
    m.TRAINING_TOKENS_TOTAL: "e3",
    m.TRAINING_MODEL_FLOPS_TOTAL: "e14",
    m.TRAINING_HARDWARE_FLOPS_TOTAL: "e14",
    m.TRAINING_CAPACITY_FLOPS_TOTAL: "e15",
    m.TRAINING_STEPS_TOTAL: "",
    m.TRAINING_MEASURED_STEPS_TOTAL: "",
    m.TRAINING_MEASURED_STEP_SECONDS_TOTAL: "",
    m.TRAINING_COLLECTIVE_SEQUENCE_NUMBER: "",
    m.TRAINING_POSITION_STEPS: "",
    m.RUN_RETAINED_FLOPS_TOTAL: "e14",
    m.RUN_CAPACITY_FLOPS_TOTAL: "e15",
    m.RUN_HIGH_WATER_STEPS: "",
}
GAUGES: Mapping[m.Metric, str] = {
    m.FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS: NOW,
    m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS: NOW,
    m.RUN_COMMITTED_TIMESTAMP_SECONDS: NOW,
    m.GPU_FABRIC_STATE_ID: "3",
    m.GPU_FABRIC_STATUS_ID: "0",
    m.GPU_RECOVERY_ACTION_ID: "0",
    m.GPU_REPAIR_PENDING: "0",
    m.GPU_ROW_REMAP_FAILURE: "0",
    m.GPU_ROW_REMAP_PENDING: "0",
    m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED: "0",
    m.GPU_TEMPERATURE_CELSIUS: "60",
    m.GPU_TEMPERATURE_MARGIN_CELSIUS: "30",
    m.GPU_POWER_WATTS: "600",
    m.GPU_POWER_LIMIT_WATTS: "700",
    m.GPU_POWER_LIMIT_DEFAULT_WATTS: "700",
    m.INFINIBAND_PORT_STATE_ID: "4",
    m.INFINIBAND_LINK_FLAPPING: "0",
    m.INFINIBAND_TEMPERATURE_CELSIUS: "50",
    m.HOST_EXPECTED_PARTS: str(GPUS),
    m.NVLINK_EFFECTIVE_BIT_ERROR_RATIO: "0",
    m.TRAINING_PEAK_FLOPS_PER_SECOND: "1e15",
    m.RUN_COMMITTED_STEPS: "1000",
    m.RUN_ATTEMPT_CONFLICT: "0",
    m.RUN_OPEN_SECONDS: "1",
    m.RUN_PROVISIONAL_SECONDS: "1",
}


@dataclass(frozen=True, slots=True)
class Group:
    """A group of rules, its interval, and how long its evaluations took, in seconds."""

    name: str
    rules: int
    interval: float
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out: times, the slowest rules, what failed, and what it cost Prometheus."""

    groups: tuple[Group, ...]
    slowest: tuple[tuple[str, float], ...]  # every rule and its mean
    failures: tuple[str, ...]
    recorded: dict[str, int]  # series by record
    firing: int
    scraped_series: int
    head_series: int
    memory: int  # bytes resident, at most
    cores: float  # seconds of processor a second, while measured
    waited: float  # seconds a second that it had to wait for one, all threads together


def families(rules: str) -> list[m.Metric]:
    """Return the families of the catalogue that a rule file reads, in the catalogue's order."""
    words = set(re.findall(r"[a-z_:0-9]+", rules))
    return [
        row
        for row in m.all_metrics()
        if words & {row.name, *(f"{row.name}_{part}" for part in ("bucket", "sum", "count"))}
    ]


def value(row: m.Metric, labels: Mapping[str, str]) -> str:
    """Return the value of a series as it stands in a body."""
    if row is m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL:
        return SECONDS + ("e-1" if labels["rank"] == str(LATE) else "")
    if row in (
        m.RUN_SECONDS_TOTAL,
        m.RUN_GPU_SECONDS_TOTAL,
        m.TRAINING_ACTIVITY_SECONDS_TOTAL,
        m.FLOPWATCH_OTLP_PUSHES_TOTAL,
        m.FLOPWATCH_LEDGER_REQUESTS_TOTAL,
    ):
        return SECONDS if {"productive", "step", "accepted"} & set(labels.values()) else "0"
    if row is m.RUN_STATE:
        return str(int(labels["state"] == "running"))
    if row in MOVING:
        return SECONDS + MOVING[row]
    if row.type == "counter":
        return "0"
    return GAUGES.get(row, "1")


def expanded(row: m.Metric, labels: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield `labels` with each combination of the values that the row's other labels have."""
    names = [name for name in row.labels if name not in labels]
    every: list[dict[str, str]] = [dict(labels)]
    for name in names:
        texts = STATES if row is m.RUN_STATE and name == "state" else VALUES.get(name, ("x",))
        every = [{**one, name: text} for one in every for text in texts]
    yield from every


def lines(row: m.Metric, labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the samples of a family in Prometheus' text format."""
    for each in expanded(row, {name: text for name, text in labels.items() if name in row.labels}):
        inside = ",".join(f'{name}="{text}"' for name, text in each.items())
        if row.type == "histogram":
            for bound in (*DURATION_BOUNDS, float("inf")):
                bucket = f'{inside},le="{"+Inf" if bound == float("inf") else bound}"'
                yield f"{row}_bucket{{{bucket}}} {SECONDS if bound >= 1 else 0}"
            yield f"{row}_sum{{{inside}}} {SECONDS}"
            yield f"{row}_count{{{inside}}} {SECONDS}"
        else:
            yield f"{row}{{{inside}}} {value(row, each)}"


def node(rows: Sequence[m.Metric], index: int, nodes: int) -> Iterator[str]:
    """Yield what the exporter of one node serves; the node's number stands as NODE where it names something."""
    run, place = divmod(index, NODES_OF_A_RUN)
    size = min(NODES_OF_A_RUN, nodes - run * NODES_OF_A_RUN) * GPUS
    host = {"host": f"node-{NODE}", "tenant": "", "run": f"run-{run}"}
    for row in rows:
        labels = set(row.labels)
        if (
            row.domain == "run"
            or row is m.FLOPWATCH_LEDGER_REQUESTS_TOTAL
            or row in ABSENT
            or (isinstance(row, PortCounter) and (row.quiet or row.files[0].startswith("device/")))
        ):
            continue
        if "rank" in labels:
            for local in range(GPUS):
                rank = str(place * GPUS + local)
                yield from lines(
                    row, {**host, "rank": rank, "uuid": f"GPU-{NODE}-{local}", "local_rank": str(local), "attempt": "1"}
                )
        elif "run" in labels:
            if place == 0:
                yield from (
                    line.removesuffix(" 1") + f" {size}" if row is m.TRAINING_WORLD_SIZE else line
                    for line in lines(row, {**host, "attempt": "1", "page": "default"})
                )
        elif "device" in labels:
            for port in range(PORTS):
                rail = {"role": "compute", "rail": str(port)} if port < GPUS else {"role": "storage", "rail": ""}
                yield from lines(row, {**host, **rail, "device": f"mlx5_{port}", "port": "1"})
        elif "uuid" in labels:
            for gpu in range(GPUS):
                yield from lines(row, {**host, "gpu": str(gpu), "uuid": f"GPU-{NODE}-{gpu}", "mig_uuid": ""})
        else:
            yield from lines(row, host)


def ledger(rows: Sequence[m.Metric], nodes: int, began: float) -> Iterator[str]:
    """Yield what the ledger serves: every run began when SECONDS was 0."""
    for run in range(-(-nodes // NODES_OF_A_RUN)):
        labels = {"tenant": "", "run": f"run-{run}"}
        for row in rows:
            if row is m.RUN_START_TIMESTAMP_SECONDS:
                yield f'{row}{{tenant="",run="run-{run}"}} {began:.0f}'
            elif row is m.RUN_GPUS:
                yield f'{row}{{tenant="",run="run-{run}"}} {NODES_OF_A_RUN * GPUS}'
            elif row.domain == "run":
                yield from lines(row, labels)
    for row in rows:
        if row is m.FLOPWATCH_LEDGER_REQUESTS_TOTAL:
            yield from lines(row, {})


def bodies(rows: Sequence[m.Metric], nodes: int, began: float) -> Callable[[str], bytes]:
    """Return a function from a path to the body served there at this moment: /n/17, or /ledger."""
    templates: dict[str, bytes] = {"ledger": "\n".join([*ledger(rows, nodes, began), ""]).encode()}

    def body(path: str) -> bytes:
        now = time.time()
        number = path.rpartition("/")[2]
        # Nodes differ in their number and in their place in the run, and its first one tells the run's own series.
        template = templates.get(number)
        if template is None:
            template = templates[number] = (
                "\n".join([*node(rows, int(number), nodes), ""]).replace(NODE, number).encode()
            )
        return template.replace(SECONDS.encode(), str(int(now - began)).encode()).replace(
            NOW.encode(), str(int(now)).encode()
        )

    return body


class Server(asyncio.Protocol):
    """Answers GET requests on a connection that stays open."""

    def __init__(self, body: Callable[[str], bytes]) -> None:
        self._body, self._data = body, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            request, _, self._data = self._data.partition(b"\r\n\r\n")
            body = self._body(request.split(b" ", 2)[1].decode())
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            assert isinstance(self._transport, asyncio.WriteTransport)
            self._transport.write(head + body)


def serve(names: Sequence[str], nodes: int, began: float, port: int) -> None:
    """Serve all nodes until the process is ended."""
    body = bodies([m.BY_NAME[name] for name in names], nodes, began)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Server(body), "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


def configuration(settings: AlertSettings, nodes: int, port: int) -> dict[str, object]:
    """Return Prometheus' configuration: every node a target of its own instance, all at one address."""
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
            {"job_name": "flopwatch-ledger", "static_configs": [target("/ledger", "ledger:9452")]},
        ],
    }


def ask(url: str, query: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each series of a query; it may take minutes beside rules that do."""
    address = f"{url}/api/v1/query?{urlencode({'query': query, 'timeout': '5m'})}"
    with build_opener(ProxyHandler({})).open(address, timeout=PATIENCE) as reply:
        return [(one["metric"], float(one["value"][1])) for one in json.load(reply)["data"]["result"]]


def processor(pid: int) -> float:
    """Return the seconds of processor a process has used."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def waited(pid: int) -> float:
    """Return the seconds that a process's threads were ready to run and had no processor, those that ended left out.

    https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat
    """
    return sum(int(path.read_text().split()[1]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def peak(pid: int) -> int:
    """Return the most memory a process had resident, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(gpus: int, seconds: float, settings: AlertSettings, log: Callable[[str], None] = print) -> Measured:
    """Scrape and evaluate for this long, and return the times of the second half."""
    nodes = -(-gpus // GPUS)
    rules = rules_yaml(settings)
    rows = families(rules)
    port, web = free_ports(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flopwatch-rules-")))
        (folder / "rules.yaml").write_text(rules)
        (folder / "prometheus.yml").write_text(json.dumps(configuration(settings, nodes, port)))
        server = multiprocessing.get_context("spawn").Process(
            daemon=True,
            target=serve,
            args=([row.name for row in rows], nodes, time.time() - BEFORE / settings.pace, port),
        )
        server.start()
        stack.callback(server.join)
        stack.callback(server.terminate)
        child = Child(
            "prometheus",
            [
                *find(log=log).prometheus,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{web}",
                "--log.level=warn",
                "--query.max-samples=100000000",
                "--query.timeout=5m",
            ],
            os.environ,
            folder / "log",
        )
        stack.callback(child.stop)
        log(f"{nodes:,} nodes, {len(rows)} families; warming up for {seconds / 2:.0f} s ...")
        time.sleep(seconds / 2)
        child.check()
        busy, idle, began = processor(child.process.pid), waited(child.process.pid), time.monotonic()
        times: dict[str, dict[str, float]] = {}
        each: dict[tuple[str, int, str], dict[str, float]] = {}
        url = f"http://127.0.0.1:{web}"
        while True:
            answer = json.loads(fetch(f"{url}/api/v1/rules", PATIENCE))["data"]["groups"]
            for group in answer:
                times.setdefault(group["name"], {})[group["lastEvaluation"]] = group["evaluationTime"]
                for index, rule in enumerate(group["rules"]):
                    taken = each.setdefault((group["name"], index, rule["name"]), {})
                    taken[rule["lastEvaluation"]] = rule["evaluationTime"]
            if time.monotonic() - began >= seconds / 2:
                break
            time.sleep(settings.scrape_interval / settings.pace / 3)
        child.check()
        cores = (processor(child.process.pid) - busy) / (time.monotonic() - began)
        idle = (waited(child.process.pid) - idle) / (time.monotonic() - began)
        [(_, down)] = ask(url, "count(up == 0) or vector(0)")
        [(_, firing)] = ask(url, 'count(ALERTS{alertname!="FlopwatchWatchdog"}) or vector(0)')
        [(_, scraped)] = ask(url, "sum(scrape_samples_scraped)")
        failures = [
            f"{rule['name']}: {rule.get('lastError', rule['health'])}"
            for group in answer
            for rule in group["rules"]
            if rule["health"] != "ok"
        ]
        failures += [f"{down:.0f} targets were not scraped"] if down else []
        own = fetch(f"{url}/metrics", PATIENCE).decode()
        head = re.search(r"^prometheus_tsdb_head_series (\S+)$", own, re.MULTILINE)
        assert head is not None
        return Measured(
            groups=tuple(
                Group(group["name"], len(group["rules"]), group["interval"], fmean(found.values()), max(found.values()))
                for group in answer
                if (found := times[group["name"]])
            ),
            slowest=tuple(
                sorted(((name, fmean(taken.values())) for (_, _, name), taken in each.items()), key=lambda one: -one[1])
            ),
            failures=tuple(failures),
            recorded={
                labels["__name__"]: int(count)
                for labels, count in ask(url, 'count by (__name__) ({__name__=~"[a-z]+:.+:.+"})')
            },
            firing=int(firing),
            scraped_series=int(scraped),
            head_series=int(float(head[1])),
            memory=peak(child.process.pid),
            cores=cores,
            waited=idle,
        )


def table(measured: Measured, shown: int = 8, pace: float = 1.0) -> str:
    """Return the figures as text, the groups that take most of their interval at pace 1 first."""
    rows = [f"{'group':24} {'rules':>5} {'interval':>8} {'mean':>8} {'worst':>8} {'of interval':>11}"]
    for group in sorted(measured.groups, key=lambda group: -group.worst / group.interval):
        interval = group.interval * pace
        rows.append(
            f"{group.name:24} {group.rules:5} {interval:6.0f} s {group.mean:6.2f} s "
            f"{group.worst:6.2f} s {group.worst / interval:11.1%}"
        )
    rows += ["", "slowest rules: " + ", ".join(f"{name} {took:.2f} s" for name, took in measured.slowest[:shown])]
    rows += [
        f"series scraped {measured.scraped_series:,}, recorded {sum(measured.recorded.values()):,}, "
        f"in the head {measured.head_series:,}; alerts pending or firing {measured.firing:,}",
        f"Prometheus: at most {measured.memory / 2**30:.1f} GiB resident, {measured.cores:.2f} cores, and "
        f"waited for one {measured.waited:.2f} s a second",
    ]
    return "\n".join([*rows, *measured.failures])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the status whether every group kept its interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=32_768)
    parser.add_argument("--minutes", type=float, default=10.0, help="warming up and measuring, half of it each")
    parser.add_argument("--rules", type=int, default=8, help="how many of the slowest rules to show")
    parser.add_argument(
        "--interval",
        type=float,
        default=15.0 if (os.cpu_count() or 1) >= ENOUGH else 60.0,
        help="seconds between scrapes; all rules follow",
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
