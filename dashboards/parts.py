"""Elements that several dashboards share: thresholds, variables, links along the drill path, and marks of alerts.

The drill path leads from the fleet to a run, its ranks, a host, a GPU and a port. Each link keeps the time range.
Every name in a query is a catalogue row or a recording rule. The recording rule `instance:host:info` adds `host` to a
series with `instance`. Panels show only the worst LINES lines, because a fleet may have thousands of hosts. Rankings
are tables of the newest values only. A line over time reads a recorded series, or belongs to one run, one host or one
GPU.
"""

from __future__ import annotations

import re

import dashboards as d
from alerts import AlertSettings, alerts
from alerts import recording as r
from flopwatch import catalogue as m

LINES = 16
ANY_BUCKET = 'bucket!=""'
PER_SECOND = "suffix:/s"  # Grafana's own unit for this shows "c/s"
BAND = ("5 % of all", "95 % of all")
RATE = f"[{d.RATE_INTERVAL}]"
SETTINGS = AlertSettings()
# VictoriaMetrics takes queries of 16 KiB, so names are grouped by their first word: Gpu(Hot|Missing)|NodeLost.
_SHIPPED = sorted({alert.name for alert in alerts(SETTINGS)})
_FIRST = {name: re.findall("[A-Z][a-z]+", name)[0] for name in _SHIPPED}
ALERTS = "|".join(
    f"{word}({'|'.join(name.removeprefix(word) for name in _SHIPPED if _FIRST[name] == word)})"
    for word in dict.fromkeys(_FIRST.values())
)

FLEET, RUN, STRAGGLERS, GOODPUT = (f"flopwatch-{name}" for name in ("fleet", "run", "stragglers", "goodput"))
GPUS, GPU, FABRIC, NODE = (f"flopwatch-{name}" for name in ("gpus", "gpu", "fabric", "node"))
RACK, MONITOR = "flopwatch-rack", "flopwatch-monitor"

UTILIZATION: list[d.Threshold] = [(None, "red"), (0.2, "orange"), (0.35, "green")]
SHARE: list[d.Threshold] = [(None, "red"), (0.8, "orange"), (0.9, "green")]
LATE: list[d.Threshold] = [
    (None, "green"),
    (SETTINGS.straggler_warning, "orange"),
    (SETTINGS.straggler_critical, "red"),
]
HOT: list[d.Threshold] = [(None, "green"), (80, "orange"), (87, "red")]
HELD_BACK: list[d.Threshold] = [(None, "green"), (0.05, "orange"), (0.2, "red")]
ERRORS: list[d.Threshold] = [(None, "green"), (1, "red")]
FEW: list[d.Threshold] = [(None, "green"), (1, "orange")]
HELD = 'reason!~"sw_power_cap|gpu_idle"'  # a power cap under full load is normal
ONE_IS_BAD: d.Mappings = {0: ("no", "green"), 1: ("yes", "red")}
PORT_STATES: d.Mappings = {
    1: ("down", "red"),
    2: ("initialising", "orange"),
    3: ("armed", "orange"),
    4: ("active", "green"),
    5: ("deferred", "orange"),
}

# Green is progress, red is lost, amber waits, blue saves or restores, purple prepares.
BUCKETS = {
    "productive": "green",
    "generation": "dark-green",
    "evaluation": "super-light-green",
    "lost": "red",
    "down": "dark-red",
    "queue": "yellow",
    "data_stall": "orange",
    "startup": "purple",
    "compile": "light-purple",
    "checkpoint_save": "light-blue",
    "checkpoint_restore": "blue",
    "other": "gray",
}

tenant = d.variable("tenant", "Tenant", f"label_values({m.RUN_STATE}, tenant)", everything=True)
run = d.variable("run", "Run", f'label_values({{__name__=~"{m.TRAINING_RANK_INFO}|{m.RUN_STATE}"}}, run)')
host = d.variable("host", "Node", f"label_values({r.HOST}, host)")
price = d.textbox("price", "$ per GPU-hour", "2.5")


def to_run(value: str) -> d.Json:
    """Return a link to the dashboard of a run."""
    return d.link("Run", RUN, run=value)


def to_node(value: str) -> d.Json:
    """Return a link to the dashboard of a host."""
    return d.link("Node", NODE, host=value)


def to_gpu(on: str, uuid: str) -> d.Json:
    """Return a link to the dashboard of a GPU on the host `on`."""
    return d.link("GPU", GPU, host=on, uuid=uuid)


def to_fabric(value: str) -> d.Json:
    """Return a link to the fabric dashboard with the ports of a host."""
    return d.link("Ports", FABRIC, host=value)


# The name of a catalogue row or a recording rule in a query, with its matchers and its window.
_NAMES = {row.name for row in m.all_metrics()} | {record.name for record in r.records(SETTINGS)}
_SELECTOR = re.compile(
    rf"(?<![\w:$.])(?:{'|'.join(sorted(_NAMES, key=len, reverse=True))})"
    r"(?:_bucket|_sum|_count)?(?![\w:])(?:\{[^{}]*\})?(?:\[[^\]]*\])?"
)


def most(expr: str, take: str = "topk", lines: int = LINES) -> str:
    """Return an expression for the series of `expr` that are highest (`bottomk`: lowest) at the end of the time range.

    A plain `topk` chooses again at each moment, so the panel has a line for each series that was ever chosen. If `expr`
    has no series at the end, as for a run that is over, this expression also chooses again at each moment. Do not use
    it for an `expr` whose series exist only while something is wrong.
    """
    at_end = _SELECTOR.sub(lambda found: f"{found[0]} @ end()", expr)
    return f"({expr}) and ({take}({lines}, {at_end}) or {take}({lines}, {expr}) unless on () ({at_end}))"


def buckets(selector: str, *, share: bool = False) -> list[d.Query]:
    """Return queries for the rate of seconds in each bucket that is not empty throughout, productive first.

    `selector` has %s for the matcher of the bucket. With `share`, the rates are divided by their sum.
    """

    def total(function: str, window: str, matcher: str, by: str = "by (bucket)") -> str:
        return f"sum {by} (max by (tenant, run, bucket) ({function}({selector % matcher}{window})))"

    every = f" / on () group_left () {total('rate', RATE, ANY_BUCKET, '')}" if share else ""
    return [
        d.Query(
            f"{total('rate', RATE, matcher)}{every} and on (bucket) "
            f"({total('increase', '[$__range] @ end()', matcher)} > 0)",
            "{{bucket}}",
        )
        for matcher in ('bucket="productive"', 'bucket!="productive"')
    ]


def outliers(expr: str, legend: str, take: str = "topk", lines: int = 3) -> list[d.Query]:
    """Return queries for a panel with the `band` BAND: the highest series, the median, and where 90 % of all are."""
    return [
        d.Query(most(expr, take, lines), legend),
        d.Query(f"quantile(0.5, {expr})", "median"),
        *(d.Query(f"quantile({share}, {expr})", edge) for share, edge in zip((0.05, 0.95), BAND, strict=True)),
    ]


def with_host(expr: str) -> str:
    """Return `expr`, whose series have `instance`, with the name of the exporter's host added as `host`."""
    return f"{expr} * on (instance) group_left (host) {r.HOST}"


def of_node_exporter(expr: str, hosts: str) -> str:
    """Return `expr`, whose series have the `instance` of a node_exporter, for the hosts of `hosts`, with `host` added.

    The exporters may name a host with and without its domain, so hosts are joined on the first part of their names.
    """

    def named(series: str, label: str) -> str:
        return f'label_replace({series}, "name", "$1", "{label}", "([0-9.]+|[^.]+)([.].*)?")'

    node = "topk by (instance) (1, max by (instance, nodename) (node_uname_info))"
    return (
        f"{named(f'{expr} * on (instance) group_left (nodename) {node}', 'nodename')} "
        f"* on (name) group_left (host) topk by (name) (1, {named(f'max by (host) ({hosts})', 'host')})"
    )


def throttled(label: str) -> str:
    """Return the highest share of five minutes in which a clock was throttled, by this label of a GPU and by instance.

    A rate of seconds may be above 1, since scrapes are never exactly an interval apart.
    """
    throttled = f"max by ({label}, instance) (rate({m.GPU_CLOCK_EVENT_SECONDS_TOTAL}{{{HELD}}}[5m]))"
    return f"clamp_max({throttled}, 1)"


def alert_marks(matchers: str) -> d.Json:
    """Return an annotation that marks the firing of alerts with these label matchers."""
    return d.annotation(
        "Alerts",
        f'ALERTS{{alertstate="firing", alertname!="FlopwatchWatchdog", {matchers}}}',
        "{{alertname}}",
        "red",
        "{{severity}}",
    )


def starts(matchers: str) -> d.Json:
    """Return an annotation that marks each start of an attempt of the run with these label matchers."""
    return d.annotation("Starts", f"max(changes({m.RUN_ATTEMPTS_TOTAL}{{{matchers}}}{RATE})) > 0", "start", "blue")
