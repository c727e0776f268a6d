"""Rows of the exporter and the ledger about themselves."""

from flopwatch.catalogue.row import GPU, counter, gauge, info, sparse

# fmt: off
FLOPWATCH_BUILD_INFO = info("flopwatch_build_info", "Version of this exporter.", ("version",), "flopwatch.__version__")
FLOPWATCH_COLLECTOR_SUPPORTED = gauge("flopwatch_collector_supported",
    "1 if the collector's source exists on this host, else 0.", ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_SUCCESS = gauge("flopwatch_collector_success", "1 if the last read of the collector's source "
    "succeeded within its deadline, else 0.", ("collector",), "flopwatch.node.scrape.scrape", key=True)
FLOPWATCH_COLLECTOR_LAST_SUCCESS_TIMESTAMP_SECONDS = gauge("flopwatch_collector_last_success_timestamp_seconds",
    "Time of the collector's last successful read, as Unix time. Its samples are served for --stale-after (30 s) "
    "longer.", ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_DURATION_SECONDS = gauge("flopwatch_collector_duration_seconds",
    "Duration of the collector's last read.", ("collector",), "flopwatch.node.scrape.scrape")
FLOPWATCH_COLLECTOR_FAILURES_TOTAL = sparse(counter("flopwatch_collector_failures_total",
    "Failed reads of the collector, by reason: deadline, exited (its reader process died), error, blind (no access to "
    "hardware that may be healthy).", ("collector", "reason"), "flopwatch.node.scrape.scrape"))
FLOPWATCH_COLLECTOR_RESTARTS_TOTAL = sparse(counter("flopwatch_collector_restarts_total",
    "Reader processes of the collector that were replaced, by reason: exited (died), hung, memory (above its cap), "
    "afresh (only a new process can read on, for instance after a driver upgrade).", ("collector", "reason"),
    "flopwatch.node.scrape.reader"))
FLOPWATCH_SERIES_DROPPED_TOTAL = sparse(counter("flopwatch_series_dropped_total",
    "Samples dropped because a scrape exceeded its series budget.", ("budget",), "flopwatch.node.scrape.scrape"))
FLOPWATCH_SERIES_DUPLICATE_TOTAL = sparse(counter("flopwatch_series_duplicate_total",
    "Samples of the collector dropped because their series existed already. Prometheus would refuse the whole scrape.",
    ("collector",), "flopwatch.node.scrape.scrape"))
FLOPWATCH_DRIVER_RELEASED = gauge("flopwatch_driver_released",
    "1 while the exporter keeps every driver handle closed on request, so that a GPU can be reset or its driver "
    "replaced.", (), "flopwatch exporter --release, SIGUSR1, or the file release in the state folder")
FLOPWATCH_DRIVER_RELEASED_UNTIL_TIMESTAMP_SECONDS = gauge("flopwatch_driver_released_until_timestamp_seconds",
    "Time at which the exporter opens the released driver again, as Unix time. Absent while the driver is not "
    "released.", (), "flopwatch.node.driver_release")
FLOPWATCH_DRIVER_RELEASED_SECONDS_TOTAL = counter("flopwatch_driver_released_seconds_total",
    "Time for which the exporter kept its driver handles closed on request. The GPUs' series have a planned gap then.",
    (), "flopwatch.node.driver_release")
FLOPWATCH_PROFILING_PAUSED = gauge("flopwatch_profiling_paused",
    "1 while DCGM reports no activity of the GPU because profiling is paused (Nsight, dcgmi profile --pause). "
    "gpu_profiled_seconds_total is constant meanwhile.", GPU, "DCGM fields 1001-1016: status -54, or blank")
FLOPWATCH_XID_SOURCE_UP = gauge("flopwatch_xid_source_up",
    "1 while this source reports Xids: kernel_log, nvml. Without kernel_log there is no text: no NVLink details, no "
    "SXid, no host_kernel_events_total.", ("source",), "flopwatch.node.collectors.xid")
FLOPWATCH_IDENTITY_SOURCE_UP = gauge("flopwatch_identity_source_up",
    "1 while this source of GPU owners or of the host's topology answers: kubelet, processes, job_mapping, topology. "
    "Absent for sources not in use.", ("source",), "flopwatch.node.collectors.identity")
FLOPWATCH_KERNEL_LOG_LOST_TOTAL = counter("flopwatch_kernel_log_lost_total", "Kernel log messages that were "
    "overwritten before the exporter read them.", (), "gaps in the /dev/kmsg record numbers")
FLOPWATCH_NVML_FIELD_LATENCY_SECONDS_TOTAL = counter("flopwatch_nvml_field_latency_seconds_total", "Time that the "
    "driver reports to have spent on NVML fields, by table: often, often_links (read at every scrape), seldom, links. "
    "Absent where it reports none.",
    ("table",), "latencyUsec in nvmlDeviceGetFieldValues", scale=1e-6)
FLOPWATCH_NVML_SLOW_GPU_SECONDS = gauge("flopwatch_nvml_slow_gpu_seconds", "Time that one complete read of a slow GPU "
    "through NVML takes, more than 0.25 s. Its values are then read less often, at most every 60 s. Absent for other "
    "GPUs.", GPU, "flopwatch.node.collectors.nvml")
FLOPWATCH_OTLP_PUSHES_TOTAL = counter("flopwatch_otlp_pushes_total",
    "Pushes from training processes, by outcome: accepted, partial (some points refused), foreign_gpu (claims a GPU "
    "that this host does not have). Refused as a whole: stale_process, invalid, limit, conflict, malformed, "
    "too_large, unauthorized, unsupported_type.", ("outcome",), "flopwatch.node.telemetry.ranks")
FLOPWATCH_NCCL_RAS_QUERIES_TOTAL = counter("flopwatch_nccl_ras_queries_total",
    "Questions to NCCL's RAS about overdue steps, by outcome: answered. Not asked: unreachable (no process listens), "
    "shared (the exporter does not see that each listening process is a known rank). Without a usable answer: old "
    "(NCCL before 2.29.2), initializing, foreign (another job's), malformed, deadline.", ("outcome",),
    "flopwatch.node.telemetry.ras")
FLOPWATCH_NCCL_INSPECTOR_OPERATIONS_TOTAL = counter("flopwatch_nccl_inspector_operations_total",
    "Operations that NCCL Inspector reported, by outcome: joined (counts as a wait of a rank), unjoined (its process "
    "or communicator is unknown), ignored (a kind that shows no wait), limit (beyond the bounds of a rank), malformed. "
    "Absent without --inspector.", ("outcome",), "flopwatch.node.telemetry.inspector")
FLOPWATCH_NCCL_INSPECTOR_SKIPPED_BYTES_TOTAL = counter("flopwatch_nccl_inspector_skipped_bytes_total",
    "Bytes in files of NCCL Inspector that were skipped, because more was written than the exporter reads. Absent "
    "without --inspector.", (), "flopwatch.node.telemetry.inspector_files")
FLOPWATCH_LEDGER_RECORDS_SENT_TOTAL = counter("flopwatch_ledger_records_sent_total",
    "Records that the exporter sent to the ledger, by outcome: sent, failed (will be sent again), refused.",
    ("outcome",), "flopwatch.node.telemetry.ledger_client")
FLOPWATCH_LEDGER_REQUESTS_TOTAL = counter("flopwatch_ledger_requests_total",
    "Requests to this ledger, by outcome: accepted, refused, failed.", ("outcome",), "flopwatch.ledger.app")
FLOPWATCH_LEDGER_RUNS = gauge("flopwatch_ledger_runs",
    "Number of runs in this ledger that have not ended over a day ago, by kind: exported, without_series. Beyond 500 "
    "runs, ended ones have no series, then those of unknown processes.", ("kind",), "flopwatch.ledger.ledger")
