"""The exporter and the ledger themselves."""

from flopwatch.catalogue.row import GPU, counter, gauge, info

# fmt: off
# A table: the formatter would print each argument of a row on a line of its own.

FLOPWATCH_BUILD_INFO = info("flopwatch_build_info", "Version of this exporter.", ("version",), "flopwatch.__version__")
FLOPWATCH_COLLECTOR_SUPPORTED = gauge("flopwatch_collector_supported", "0 if the source does not exist on this host.",
    ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_SUCCESS = gauge("flopwatch_collector_success",
    "1 if the last read of this source succeeded within its deadline.", ("collector",), "flopwatch.node.scrape.scrape",
    key=True)
FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS = gauge("flopwatch_collector_last_success_timestamp_seconds",
    "Time this source last answered, as Unix time. Its samples are served for --stale-after (30 s) longer.",
    ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_DURATION_SECONDS = gauge("flopwatch_collector_duration_seconds",
    "Duration of the last read of this source.", ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_FAILURES_TOTAL = counter("flopwatch_collector_failures_total",
    "Failed reads by reason: deadline, exited (the reader process died), error, blind (lost access; the "
    "hardware may be healthy).", ("collector", "reason"), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_RESTARTS_TOTAL = counter("flopwatch_collector_restarts_total",
    "Reader processes replaced, by reason: exited (died), hung, memory (above its cap), afresh (only a new process "
    "can go on, for instance after a driver upgrade).", ("collector", "reason"), "flopwatch.node.scrape.reader")
FLOPWATCH_SERIES_DROPPED_TOTAL = counter("flopwatch_series_dropped_total",
    "Samples dropped to stay within the series budget.", ("budget",), "flopwatch.node.scrape.scrape")
FLOPWATCH_SERIES_DUPLICATE_TOTAL = counter("flopwatch_series_duplicate_total",
    "Samples of this source dropped because the same series existed already: Prometheus would refuse the whole scrape.",
    ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_DRIVER_RELEASED = gauge("flopwatch_driver_released",
    "1 while every driver handle is closed on request, so that a GPU can be reset or its driver replaced.", (),
    "flopwatch exporter --release, SIGUSR1, or the file release in the state folder")
FLOPWATCH_DRIVER_RELEASED_UNTIL_TIMESTAMP_SECONDS = gauge("flopwatch_driver_released_until_timestamp_seconds",
    "Time at which the driver is opened again, as Unix time. Absent while it is not released.", (),
    "flopwatch.node.driver_release")
FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL = counter("flopwatch_driver_released_seconds_total",
    "Time without driver handles on request. The GPUs' series have a planned gap.", (), "flopwatch.node.driver_release")
FLOPWATCH_PROFILING_PAUSED = gauge("flopwatch_profiling_paused",
    "1 while DCGM reports no activity of the GPU because profiling is paused (Nsight, dcgmi profile --pause). "
    "gpu_profiled_seconds_total is constant meanwhile.", GPU, "DCGM fields 1001-1016: status -54, or blank")
FLOPWATCH_XID_SOURCE_UP = gauge("flopwatch_xid_source_up",
    "1 while this source reports Xids: kernel_log, nvml. Without kernel_log there is no text: no NVLink details, "
    "no SXid, no host_kernel_events_total.", ("source",), "flopwatch.node.collectors.xid")
FLOPWATCH_IDENTITY_SOURCE_UP = gauge("flopwatch_identity_source_up",
    "1 while this source of owners or of the host's place answers: kubelet, processes, job_mapping, topology. Only "
    "those in use.", ("source",), "flopwatch.node.collectors.identity")
FLOPWATCH_KERNEL_LOG_LOST_TOTAL = counter("flopwatch_kernel_log_lost_total",
    "Kernel log records that were overwritten before they were read.", (), "gaps in the /dev/kmsg record numbers")
FLOPWATCH_OTLP_PUSHES_TOTAL = counter("flopwatch_otlp_pushes_total",
    "Pushes from training processes, by outcome: accepted, partial (some points refused), foreign_gpu (claims a "
    "GPU of another host). Refused as a whole: stale_process, invalid, limit, conflict, malformed, too_large, "
    "unauthorized, unsupported_type.", ("outcome",), "flopwatch.node.telemetry.ranks")
FLOPWATCH_LEDGER_RECORDS_SENT_TOTAL = counter("flopwatch_ledger_records_sent_total",
    "Records sent to the ledger, by outcome: sent, failed (sent again), refused.", ("outcome",),
    "flopwatch.node.telemetry.ledger_client")
FLOPWATCH_LEDGER_REQUESTS_TOTAL = counter("flopwatch_ledger_requests_total",
    "Requests to this ledger, by outcome: accepted, refused, failed.", ("outcome",), "flopwatch.ledger.app")
