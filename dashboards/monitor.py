"""Monitor dashboard: do exporters, hooks, ledger and rules work, or is what other dashboards show old or missing?"""

from __future__ import annotations

import dashboards as d
from dashboards import parts as p
from flopwatch import catalogue as m

EXPORTERS = (
    f"(up and on (instance) ({m.FLOPWATCH_BUILD_INFO} or on (instance) last_over_time({m.FLOPWATCH_BUILD_INFO}[1h])))"
)
TO_NODE = [p.to_node(d.LABEL % "host")]
SLOWEST = 8
SOURCE = '{collector=~"$source"}'

now = [
    d.stat(
        "Exporters up",
        "Exporters that answer. Expected: one per host.",
        d.Query(f"count({EXPORTERS} == 1)", instant=True),
        width=4,
    ),
    d.stat(
        "Exporters down",
        "Exporters of the last hour that do not answer. Expected: 0.",
        d.Query(f"count({EXPORTERS} == 0) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Failing collectors",
        "Collectors of all exporters whose last read failed. Expected: 0.",
        d.Query(
            f"count({m.FLOPWATCH_COLLECTOR_SUCCESS} == 0 and on (instance, collector) "
            f"{m.FLOPWATCH_COLLECTOR_SUPPORTED} == 1) or vector(0)",
            instant=True,
        ),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Runs without MFU",
        "Runs with a rank whose MFU is unknown. Expected: 0. The table has the reasons.",
        d.Query(f"count(max by (run) ({m.TRAINING_MFU_UNAVAILABLE} == 1)) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Failing rules",
        "Rule evaluations that failed in the last five minutes. Expected: 0.",
        d.Query("sum(increase(prometheus_rule_evaluation_failures_total[5m]))", instant=True),
        thresholds=p.ERRORS,
        width=4,
        no_data="Prometheus does not scrape itself.",
    ),
    d.stat(
        "Watchdog",
        "The alert that always fires, to prove that alerts arrive. Expected: fires.",
        d.Query('count(ALERTS{alertname="FlopwatchWatchdog", alertstate="firing"}) or vector(0)', instant=True),
        mappings={0: ("no", "red"), 1: ("fires", "green")},
        width=4,
    ),
]

sources = [
    d.bargauge(
        "Slowest reads",
        f"Duration of the last read, for the {SLOWEST} slowest collectors. Expected: well below 2.5 s, the deadline. "
        "Near it a driver hangs.",
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
        "Failed reads per second on all hosts, by collector and reason. Expected: none that last. `blind` is lost "
        "access, not broken hardware.",
        d.Query(
            f"sum by (collector, reason) (rate({m.FLOPWATCH_COLLECTOR_FAILURES_TOTAL}{SOURCE}{p.RATE})) > 0",
            "{{collector}} {{reason}}",
        ),
        unit="cps",
        width=12,
        no_data="No read failed.",
    ),
    d.label_table(
        "Collectors that fail now",
        "Host and collector of each failing read. Expected: no row.",
        p.with_host(
            f"({m.FLOPWATCH_COLLECTOR_SUCCESS}{SOURCE} == 0 and on (instance, collector) "
            f"{m.FLOPWATCH_COLLECTOR_SUPPORTED} == 1)"
        ),
        labels={"host": "Node", "collector": "Source"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=8,
        no_data="All collectors succeed.",
    ),
    d.label_table(
        "Runs without MFU, by reason",
        "Reasons are explained in docs/metrics.md. Expected: no row.",
        f"count by (run, reason) ({m.TRAINING_MFU_UNAVAILABLE} == 1)",
        labels={"run": "Run", "reason": "Reason"},
        links={"Run": [p.to_run(d.FIELD % "Run")]},
        width=8,
        height=8,
        no_data="Each run has an MFU.",
    ),
    d.timeseries(
        "Reader restarts",
        "Reader processes replaced per second, by reason. Expected: none that last. `memory` is a leak in a driver, "
        "`hung` a driver that does not answer.",
        d.Query(
            f"sum by (collector, reason) (rate({m.FLOPWATCH_COLLECTOR_RESTARTS_TOTAL}{SOURCE}{p.RATE})) > 0",
            "{{collector}} {{reason}}",
        ),
        unit="cps",
        width=8,
        no_data="No reader was replaced.",
    ),
]

flow = [
    d.timeseries(
        "Pushes by outcome",
        "Pushes per second from training processes, by outcome. Expected: accepted only. Outcomes are explained in "
        "docs/metrics.md.",
        d.Query(f"sum by (outcome) (rate({m.FLOPWATCH_OTLP_PUSHES_TOTAL}{p.RATE}))", "{{outcome}}"),
        unit="cps",
    ),
    d.timeseries(
        "Records to the ledger",
        "Records per second, by outcome. Expected: sent and accepted. Failed records are sent again, refused ones "
        "are lost.",
        d.Query(f"sum by (outcome) (rate({m.FLOPWATCH_LEDGER_RECORDS_SENT_TOTAL}{p.RATE}))", "sent: {{outcome}}"),
        d.Query(f"sum by (outcome) (rate({m.FLOPWATCH_LEDGER_REQUESTS_TOTAL}{p.RATE}))", "received: {{outcome}}"),
        unit="cps",
        no_data="There is no ledger.",
    ),
    d.timeseries(
        "Dropped samples",
        "Samples per second dropped for the series budget, or as duplicates of another collector. Expected: none.",
        d.Query(f"sum by (budget) (rate({m.FLOPWATCH_SERIES_DROPPED_TOTAL}{p.RATE})) > 0", "budget {{budget}}"),
        d.Query(f"sum by (collector) (rate({m.FLOPWATCH_SERIES_DUPLICATE_TOTAL}{p.RATE})) > 0", "twice: {{collector}}"),
        unit="cps",
        no_data="No sample was dropped.",
    ),
    d.timeseries(
        "Errors in hooks",
        "Errors per second in training hooks, by run. Expected: none. The hook logs each kind once in the job's log.",
        d.Query(f"topk({p.LINES}, sum by (run) (rate({m.TRAINING_HOOK_ERRORS_TOTAL}{p.RATE})) > 0)", "{{run}}"),
        unit="cps",
        links=[p.to_run(d.LABEL % "run")],
        width=12,
        no_data="No hook had an error.",
    ),
    d.timeseries(
        "Kernel log lines lost",
        "Kernel log records per second that were overwritten unread, on all hosts. Expected: none. An Xid may be "
        "among them.",
        d.Query(f"sum(rate({m.FLOPWATCH_KERNEL_LOG_LOST_TOTAL}{p.RATE}))", "lost"),
        unit="cps",
        width=12,
        no_data="No exporter reads the kernel log.",
    ),
]

rest = [
    d.bargauge(
        "Versions",
        "Exporters by version. Expected: one version. Several are an upgrade that stopped half way.",
        d.Query(f"sort_desc(count by (version) ({m.FLOPWATCH_BUILD_INFO}))", "{{version}}", instant=True),
        unit="none",
        width=8,
    ),
    d.label_table(
        "Released drivers",
        "Hosts whose exporter released the driver on request. Expected: no row after the work is done.",
        p.with_host(f"({m.FLOPWATCH_DRIVER_RELEASED} == 1)"),
        labels={"host": "Node"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=8,
        no_data="No driver is released.",
    ),
    p.firing(
        'ALERTS{alertstate="firing", alertname=~"Flopwatch.*", alertname!="FlopwatchWatchdog"}',
        "Firing alerts on the monitoring itself. Expected: none.",
        width=8,
    ),
]

BOARD = d.dashboard(
    p.MONITOR,
    "Monitor itself",
    "Is what the other dashboards show true and new?",
    [d.variable("source", "Source", f"label_values({m.FLOPWATCH_COLLECTOR_SUCCESS}, collector)", everything=True)],
    {"Now": now, "Sources": sources, "Flow": flow, "The rest": rest},
)
