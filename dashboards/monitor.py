"""Monitor dashboard: do exporters, hooks, ledger and rules work, or is what other dashboards show old or missing?"""

from __future__ import annotations

import dashboards as d
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

EXPORTERS = (
    f"(up and on (instance) ({m.FLOPWATCH_BUILD_INFO} or on (instance) last_over_time({m.FLOPWATCH_BUILD_INFO}[1h])))"
)
TO_NODE = [p.to_node(d.LABEL % "host")]
SLOWEST = 8
SOURCE = '{collector=~"$source"}'


def failing(collectors: str = "") -> str:
    """Return an expression for the collectors with these matchers that the alert FlopwatchCollectorFailing counts."""
    success, last = m.FLOPWATCH_COLLECTOR_SUCCESS, m.FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS
    return f"({success}{collectors} == 0 or {last}{collectors} < time() - 300 and {success})"


now = [
    d.stat(
        "Exporters up",
        "Number of exporters that answer Prometheus. A ledger that is not part of an exporter counts too. Expected: "
        "one per host, and one per such ledger.",
        d.Query(f"count({EXPORTERS} == 1)", instant=True),
        width=4,
    ),
    d.stat(
        "Exporters down",
        "Exporters that answered within the last hour and do not answer now. A ledger that is not part of an "
        "exporter counts too. Expected: 0. Otherwise check the host and the exporter on it. After an hour, an exporter "
        "no longer counts.",
        d.Query(f"count({EXPORTERS} == 0) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Failing collectors",
        "Collectors of all exporters whose last read failed or is over five minutes old. Expected: 0. The table of "
        "collectors lists them.",
        d.Query(f"count({failing()}) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Runs without MFU",
        "Runs with a rank whose MFU is unknown. Expected: 0. The table by reason lists them.",
        d.Query(f"count(max by (run) ({m.TRAINING_MFU_UNAVAILABLE} == 1)) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Failing rules",
        "Rule evaluations that failed in the last five minutes. Expected: 0. The log of Prometheus has the errors.",
        d.Query("sum(increase(prometheus_rule_evaluation_failures_total[5m]))", instant=True),
        thresholds=p.ERRORS,
        width=4,
        no_data="Prometheus does not scrape its own metrics.",
    ),
    d.stat(
        "Watchdog",
        "Whether FlopwatchWatchdog fires, the alert that always fires to prove that alerts are delivered. Expected: "
        "fires. Otherwise Prometheus does not evaluate the rules.",
        d.Query('count(ALERTS{alertname="FlopwatchWatchdog", alertstate="firing"}) or vector(0)', instant=True),
        mappings={0: ("no", "red"), 1: ("fires", "green")},
        width=4,
    ),
]

sources = [
    d.bargauge(
        "Slowest reads",
        f"Duration of the last read, for the {SLOWEST} slowest collectors. Expected: well below the deadline, 2.5 s "
        "by default. A read near the deadline usually waits for a driver that is slow or hangs.",
        d.Query(
            p.with_host(f"topk({SLOWEST}, {m.FLOPWATCH_COLLECTOR_DURATION_SECONDS}{SOURCE})"),
            "{{host}} {{collector}}",
            instant=True,
        ),
        unit="s",
        thresholds=[(None, "green"), (1, "orange"), (2.4, "red")],
        links=TO_NODE,
        width=12,
    ),
    d.timeseries(
        "Failed reads",
        "Failed reads per second on all hosts, by collector and reason. Expected: none that last. `blind` means lost "
        "access, not broken hardware.",
        d.Query(
            f"sum by (collector, reason) (rate({m.FLOPWATCH_COLLECTOR_FAILURES_TOTAL}{SOURCE}{p.RATE})) > 0",
            "{{collector}} {{reason}}",
        ),
        unit=p.PER_SECOND,
        width=12,
        height=8,
        no_data="No read failed in the time shown.",
    ),
    d.label_table(
        "Collectors that fail now",
        "Collectors whose last read failed or is over five minutes old, with their exporter and host. Expected: no "
        "row. Otherwise run `flopwatch doctor` on the host.",
        f"{p.with_host(failing(SOURCE))} or on (instance, collector) {failing(SOURCE)}",
        labels={"host": "Node", "instance": "Exporter", "collector": "Collector"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=6,
        no_data="No collector fails now.",
    ),
    d.label_table(
        "Runs without MFU, by reason",
        "Runs with a rank whose MFU is unknown, and the reason. Expected: no row. The runbook TrainingMfuUnavailable "
        "explains the reasons.",
        f"count by (run, reason) ({m.TRAINING_MFU_UNAVAILABLE} == 1)",
        labels={"run": "Run", "reason": "Reason"},
        links={"Run": [p.to_run(d.FIELD % "Run")]},
        width=8,
        height=6,
        no_data="No run lacks an MFU.",
    ),
    d.timeseries(
        "Reader restarts",
        "Reader processes of collectors that were replaced, per second, by reason. Expected: none that last. `memory` "
        "means a leak in a driver, `hung` a driver that does not answer.",
        d.Query(
            f"sum by (collector, reason) (rate({m.FLOPWATCH_COLLECTOR_RESTARTS_TOTAL}{SOURCE}{p.RATE})) > 0",
            "{{collector}} {{reason}}",
        ),
        unit=p.PER_SECOND,
        width=8,
        height=6,
        no_data="No reader process was replaced in the time shown.",
    ),
]

flow = [
    d.timeseries(
        "Pushes by outcome",
        "Pushes per second from training processes to exporters, by outcome. Expected: only `accepted`. "
        "docs/metrics.md explains the outcomes.",
        d.Query(f"sum by (outcome) (rate({m.FLOPWATCH_OTLP_PUSHES_TOTAL}{p.RATE}))", "{{outcome}}"),
        unit=p.PER_SECOND,
    ),
    d.timeseries(
        "Records to the ledger",
        "Records per second that exporters send (`sent`), and requests per second that the ledger receives "
        "(`received`), by outcome. Expected: only outcomes `sent` and `accepted`. Failed records are sent again, "
        "refused records are lost.",
        d.Query(f"sum by (outcome) (rate({m.FLOPWATCH_LEDGER_RECORDS_SENT_TOTAL}{p.RATE}))", "sent: {{outcome}}"),
        d.Query(f"sum by (outcome) (rate({m.FLOPWATCH_LEDGER_REQUESTS_TOTAL}{p.RATE}))", "received: {{outcome}}"),
        unit=p.PER_SECOND,
        height=6,
        no_data="No exporter sends records to a ledger.",
    ),
    d.timeseries(
        "Dropped samples",
        "Samples per second that exporters drop, because a budget of series is full or another collector has the same "
        "series. Expected: none.",
        d.Query(f"sum by (budget) (rate({m.FLOPWATCH_SERIES_DROPPED_TOTAL}{p.RATE})) > 0", "budget {{budget}}"),
        d.Query(
            f"sum by (collector) (rate({m.FLOPWATCH_SERIES_DUPLICATE_TOTAL}{p.RATE})) > 0", "duplicate: {{collector}}"
        ),
        unit=p.PER_SECOND,
        height=6,
        no_data="No sample was dropped in the time shown.",
    ),
    d.timeseries(
        "Errors in hooks",
        "Errors per second that the training hook caught, by run. Expected: none. The hook logs each kind of error "
        "once in the job's log.",
        d.Query(f"topk({p.LINES}, sum by (run) (rate({m.TRAINING_HOOK_ERRORS_TOTAL}{p.RATE})) > 0)", "{{run}}"),
        unit=p.PER_SECOND,
        links=[p.to_run(d.LABEL % "run")],
        width=12,
        height=6,
        no_data="No hook had an error in the time shown.",
    ),
    d.timeseries(
        "Kernel log lines lost",
        "Kernel log records per second that were overwritten before exporters read them, on all hosts. Expected: "
        "none. An Xid may be among them.",
        d.Query(f"sum(rate({m.FLOPWATCH_KERNEL_LOG_LOST_TOTAL}{p.RATE}))", "lost"),
        unit=p.PER_SECOND,
        width=12,
        height=6,
        no_data="No exporter reads the kernel log.",
    ),
]

rest = [
    d.bargauge(
        "Exporter versions",
        "Number of exporters by version. Expected: one version. Several mean an upgrade that is not finished.",
        d.Query(f"sort_desc(count by (version) ({m.FLOPWATCH_BUILD_INFO}))", "{{version}}", instant=True),
        unit="none",
        height=6,
        width=8,
    ),
    d.label_table(
        "Released drivers",
        "Hosts whose exporter closed the driver on request, so that a GPU can be reset or the driver replaced. "
        "Expected: no row after that work.",
        p.with_host(f"({m.FLOPWATCH_DRIVER_RELEASED} == 1)"),
        labels={"host": "Node"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=6,
        no_data="No driver is released.",
    ),
    findings.firing(
        "on the monitoring",
        "Firing alerts on the monitoring itself.",
        findings.of_alerts('alertname=~"Flopwatch.*"'),
        "Node",
        width=8,
        height=6,
    ),
]

BOARD = d.dashboard(
    p.MONITOR,
    "Monitor itself",
    "Are the values of the other dashboards correct and current?",
    [d.variable("source", "Collector", f"label_values({m.FLOPWATCH_COLLECTOR_SUCCESS}, collector)", everything=True)],
    {"Now": now, "Collectors": sources, "Pushes, records and samples": flow, "Versions, drivers and alerts": rest},
    [p.alert_marks('alertname=~"Flopwatch.+"')],
)
