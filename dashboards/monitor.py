"""Monitor: do exporters, hooks, ledger and rules do their work, or is what the others show old or missing?"""

from __future__ import annotations

import dashboards as d
from dashboards import parts as p
from flopwatch import catalogue as m

EXPORTERS = f"(up and on (instance) ({m.FLOPWATCH_INFO} or on (instance) last_over_time({m.FLOPWATCH_INFO}[1h])))"
TO_NODE = [p.to_node(d.LABEL % "host")]
SLOWEST = 8
SOURCE = '{collector=~"$source"}'

now = [
    d.stat(
        "Exporters that answer", "Bad: fewer than nodes.", d.Query(f"count({EXPORTERS} == 1)", instant=True), width=4
    ),
    d.stat(
        "Exporters that do not",
        "Seen within the last hour. Bad: any.",
        d.Query(f"count({EXPORTERS} == 0) or vector(0)", instant=True),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Sources that fail",
        "Of all exporters: their last read did not succeed. Bad: any.",
        d.Query(
            f"count({m.COLLECTOR_SUCCESS} == 0 and on (instance, collector) {m.COLLECTOR_SUPPORTED} == 1) or vector(0)",
            instant=True,
        ),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "Runs without MFU",
        "Runs with a rank whose MFU cannot be told. Bad: any; the table says why.",
        d.Query(f"count(max by (run) ({m.TRAINING_MFU_UNAVAILABLE} == 1)) or vector(0)", instant=True),
        thresholds=p.FEW,
        width=4,
    ),
    d.stat(
        "Rules that fail",
        "Evaluations of the last five minutes that failed. Bad: any. Nothing: Prometheus does not scrape itself.",
        d.Query("sum(increase(prometheus_rule_evaluation_failures_total[5m]))", instant=True),
        thresholds=p.ERRORS,
        width=4,
        no_data="Prometheus does not scrape itself.",
    ),
    d.stat(
        "Watchdog",
        "The alert that always fires, to prove that alerts arrive. Bad: no.",
        d.Query('count(ALERTS{alertname="FlopwatchWatchdog", alertstate="firing"}) or vector(0)', instant=True),
        mappings={0: ("no", "red"), 1: ("fires", "green")},
        width=4,
    ),
]

sources = [
    d.bargauge(
        "Slowest reads",
        f"Time the last read of a source took, the {SLOWEST} slowest. Bad: near 2.5 s, the "
        "longest wait: a driver hangs.",
        d.Query(
            p.with_host(f"topk({SLOWEST}, {m.COLLECTOR_DURATION}{SOURCE})"), "{{host}} {{collector}}", instant=True
        ),
        unit="s",
        thresholds=[(None, "green"), (1, "orange"), (2.4, "red")],
        links=TO_NODE,
        width=12,
    ),
    d.timeseries(
        "Failed reads",
        "A second, of all nodes, by source and reason. Bad: any that go on; blind means that "
        "access was lost, not the hardware. Nothing: none failed.",
        d.Query(
            f"sum by (collector, reason) (rate({m.COLLECTOR_FAILURES}{SOURCE}{p.RATE})) > 0", "{{collector}} {{reason}}"
        ),
        unit="cps",
        width=12,
        no_data="None failed.",
    ),
    d.label_table(
        "Sources that fail now",
        "Bad: any row. Nothing: all succeed.",
        p.with_host(f"({m.COLLECTOR_SUCCESS}{SOURCE} == 0 and on (instance, collector) {m.COLLECTOR_SUPPORTED} == 1)"),
        labels={"host": "Node", "collector": "Source"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=8,
        no_data="All succeed.",
    ),
    d.label_table(
        "Why a run has no MFU",
        "Reasons: docs/metrics.md. Bad: any row. Nothing: each has one.",
        f"count by (run, reason) ({m.TRAINING_MFU_UNAVAILABLE} == 1)",
        labels={"run": "Run", "reason": "Reason"},
        links={"Run": [p.to_run(d.FIELD % "Run")]},
        width=8,
        height=8,
        no_data="Each has one.",
    ),
    d.timeseries(
        "Reading processes replaced",
        "A second, by reason. Bad: any that go on: memory is a leak in a "
        "driver, hung a driver that does not answer. Nothing: none was.",
        d.Query(
            f"sum by (collector, reason) (rate({m.COLLECTOR_RESTARTS}{SOURCE}{p.RATE})) > 0", "{{collector}} {{reason}}"
        ),
        unit="cps",
        width=8,
        no_data="None was.",
    ),
]

flow = [
    d.timeseries(
        "Pushes by outcome",
        "A second, from training processes. Bad: anything but accepted; docs/metrics.md says what each means.",
        d.Query(f"sum by (outcome) (rate({m.OTLP_ACCEPTED}{p.RATE}))", "{{outcome}}"),
        unit="cps",
    ),
    d.timeseries(
        "Records to the ledger",
        "A second, by outcome. Bad: failed, which are offered again; refused. Nothing: there is no ledger.",
        d.Query(f"sum by (outcome) (rate({m.LEDGER_SENT}{p.RATE}))", "sent: {{outcome}}"),
        d.Query(f"sum by (outcome) (rate({m.LEDGER_RECEIVED}{p.RATE}))", "received: {{outcome}}"),
        unit="cps",
        no_data="There is no ledger.",
    ),
    d.timeseries(
        "Samples left out",
        "A second, for the series budget, or because two sources tell the same. Bad: any. Nothing: none was.",
        d.Query(f"sum by (budget) (rate({m.SERIES_DROPPED}{p.RATE})) > 0", "budget {{budget}}"),
        d.Query(f"sum by (collector) (rate({m.SERIES_DUPLICATE}{p.RATE})) > 0", "twice: {{collector}}"),
        unit="cps",
        no_data="None was.",
    ),
    d.timeseries(
        "Errors in hooks",
        "A second, by run. Bad: any: the hook says once in the job's log what it was. Nothing: there are none.",
        d.Query(f"topk({p.LINES}, sum by (run) (rate({m.TRAINING_HOOK_ERRORS}{p.RATE})) > 0)", "{{run}}"),
        unit="cps",
        links=[p.to_run(d.LABEL % "run")],
        width=12,
        no_data="There are none.",
    ),
    d.timeseries(
        "Kernel log lines lost",
        "A second, of all nodes. Bad: any: an Xid may be among them. Nothing: no exporter reads it.",
        d.Query(f"sum(rate({m.KERNEL_LOG_LOST}{p.RATE}))", "lost"),
        unit="cps",
        width=12,
        no_data="No exporter reads it.",
    ),
]

rest = [
    d.bargauge(
        "Versions",
        "Exporters by version. Bad: an upgrade that stopped half way.",
        d.Query(f"sort_desc(count by (version) ({m.FLOPWATCH_INFO}))", "{{version}}", instant=True),
        unit="none",
        width=8,
    ),
    d.label_table(
        "Drivers that are let go",
        "Nodes whose exporter does not use the driver, as somebody asked. Bad: "
        "a row whose work is done. Nothing: none is.",
        p.with_host(f"({m.DRIVER_RELEASED} == 1)"),
        labels={"host": "Node"},
        links={"Node": [p.to_node(d.FIELD % "Node")]},
        width=8,
        height=8,
        no_data="None is.",
    ),
    p.firing(
        'ALERTS{alertstate="firing", alertname=~"Flopwatch.*", alertname!="FlopwatchWatchdog"}',
        "Of the monitor itself. Bad: any.",
        width=8,
    ),
]

BOARD = d.dashboard(
    p.MONITOR,
    "Monitor itself",
    "Is what the other dashboards show true and new?",
    [d.variable("source", "Source", f"label_values({m.COLLECTOR_SUCCESS}, collector)", everything=True)],
    {"Now": now, "Sources": sources, "Flow": flow, "The rest": rest},
)
