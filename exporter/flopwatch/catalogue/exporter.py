"""The exporter and the ledger themselves."""

from flopwatch.catalogue.row import Metric

FLOPWATCH_INFO = Metric(
    "flopwatch_build_info", "info", "Version of this exporter.", ("version",), "flopwatch.__version__",
)
COLLECTOR_SUPPORTED = Metric(
    "flopwatch_collector_supported", "gauge", "0 if the source does not exist on this machine.", ("collector",),
    "flopwatch.node.scrape",
)
COLLECTOR_SUCCESS = Metric(
    "flopwatch_collector_success", "gauge", "1 if the last read of this source succeeded within its deadline.",
    ("collector",), "flopwatch.node.scrape", key=True,
)
COLLECTOR_LAST_SUCCESS = Metric(
    "flopwatch_collector_last_success_timestamp_seconds", "gauge",
    "When this source last answered, as Unix time. Its samples are served for at most 30 s after.", ("collector",),
    "flopwatch.node.scrape",
)
COLLECTOR_DURATION = Metric(
    "flopwatch_collector_duration_seconds", "gauge", "How long the last read of this source took.", ("collector",),
    "flopwatch.node.scrape",
)
COLLECTOR_FAILURES = Metric(
    "flopwatch_collector_failures_total", "counter",
    "Reads that failed, by reason: deadline, exited, error.", ("collector", "reason"), "flopwatch.node.scrape",
)
SERIES_DROPPED = Metric(
    "flopwatch_series_dropped_total", "counter", "Samples left out to stay within the series budget.", ("budget",),
    "flopwatch.node.scrape",
)
OTLP_ACCEPTED = Metric(
    "flopwatch_otlp_pushes_total", "counter",
    "Pushes from training processes, by outcome: accepted, partial (some points refused), foreign_gpu (claims a GPU of "
    "another node); refused whole: stale_process, invalid, limit, conflict, malformed, too_large, unauthorized, "
    "unsupported_type.", ("outcome",), "flopwatch.node.telemetry",
)
LEDGER_SENT = Metric(
    "flopwatch_ledger_records_total", "counter",
    "Snapshots handed to the ledger, by outcome: sent, failed (offered again), refused.", ("outcome",),
    "flopwatch.node.forward",
)
LEDGER_RECEIVED = Metric(
    "flopwatch_ledger_received_total", "counter", "Deliveries to this ledger, by outcome: accepted, refused, failed.",
    ("outcome",), "flopwatch.ledger.app",
)
