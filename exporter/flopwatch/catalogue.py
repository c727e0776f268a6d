"""Every metric family flopwatch publishes, once: name, type, help, labels, source and scale.

The exporter's families, the training hook's instruments, `docs/metrics.md`, recording rules, alerts and dashboards
are all derived from these rows; `str(row)` is the series name, so an f-string is a query. Standard library only.

Naming follows https://prometheus.io/docs/practices/naming/: base units, unit in the name, `_total` exactly on
counters, and never a label the scrape owns (`job, instance, namespace, pod, container, node, service`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Type = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    `source` is where the number is born and ends up in HELP; a source value times `scale` is in the unit of the name.
    `key` marks the rows the README shows.
    """

    name: str
    type: Type
    help: str
    labels: tuple[str, ...]
    source: str
    scale: float = 1.0
    key: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def domain(self) -> str:
        """Return the first word of the name: `gpu`, `infiniband`, `training`, `run` or `flopwatch`."""
        return self.name.partition("_")[0]


# One reading: the row, its label values in the row's order, and the source's own number (Scrape multiplies by scale).
Sample = tuple[Metric, tuple[str, ...], float]

GPU = ("gpu", "uuid")
PORT = ("device", "port")
RANK = ("run", "rank")
RUN = ("tenant", "run")

# GPU, NVML.

GPU_INFO = Metric(
    "gpu_info", "info", "Identity of one GPU; source is nvml, or simulated for a GPU that does not exist.",
    (*GPU, "host", "model", "pci_bus_id", "serial", "driver_version", "vbios_version", "source"),
    "nvmlDeviceGetName, GetUUID, GetPciInfo_v3, GetSerial, GetVbiosVersion, nvmlSystemGetDriverVersion", key=True,
)
GPU_PRESENT = Metric(
    "gpu_present", "gauge", "1 if the GPU answers, 0 if it is in this node's inventory and does not.", GPU,
    "nvmlDeviceGetHandleByIndex_v2 against the persisted inventory", key=True,
)
GPU_UTILIZATION = Metric(
    "gpu_utilization_ratio", "gauge",
    "Share of the driver's last sampling window (1/6 to 1 s) in which a kernel was resident. Busy, not efficient.", GPU,
    "nvmlDeviceGetUtilizationRates gpu", scale=0.01,
)
GPU_MEMORY_USED = Metric(
    "gpu_memory_used_bytes", "gauge", "Device memory allocated.", GPU, "nvmlDeviceGetMemoryInfo v2 used",
)
GPU_MEMORY_TOTAL = Metric(
    "gpu_memory_total_bytes", "gauge", "Device memory installed, the driver's reserve included.", GPU,
    "nvmlDeviceGetMemoryInfo v2 total",
)
GPU_TEMPERATURE = Metric(
    "gpu_temperature_celsius", "gauge", "Temperature of the GPU die.", GPU, "nvmlDeviceGetTemperature", key=True,
)
GPU_MEMORY_TEMPERATURE = Metric(
    "gpu_memory_temperature_celsius", "gauge", "Temperature of the device memory (HBM boards only).", GPU,
    "NVML field 82",
)
GPU_POWER = Metric(
    "gpu_power_watts", "gauge", "Power drawn, mean of about one second. Prefer the rate of gpu_energy_joules_total.",
    GPU, "nvmlDeviceGetPowerUsage, mW", scale=1e-3,
)
GPU_POWER_LIMIT = Metric(
    "gpu_power_limit_watts", "gauge", "Power limit in force.", GPU, "nvmlDeviceGetEnforcedPowerLimit, mW", scale=1e-3,
)
GPU_ENERGY = Metric(
    "gpu_energy_joules_total", "counter", "Energy drawn since the driver was loaded.", GPU,
    "NVML field 83, nvmlDeviceGetTotalEnergyConsumption, mJ", scale=1e-3, key=True,
)
GPU_SM_CLOCK = Metric(
    "gpu_sm_clock_hertz", "gauge", "Clock of the streaming multiprocessors.", GPU, "nvmlDeviceGetClockInfo SM, MHz",
    scale=1e6,
)
GPU_SM_CLOCK_MAX = Metric(
    "gpu_sm_clock_max_hertz", "gauge", "Highest clock the streaming multiprocessors can be set to.", GPU,
    "nvmlDeviceGetMaxClockInfo SM, MHz", scale=1e6,
)
GPU_MEMORY_CLOCK = Metric(
    "gpu_memory_clock_hertz", "gauge", "Clock of the device memory.", GPU, "nvmlDeviceGetClockInfo memory, MHz",
    scale=1e6,
)
GPU_CLOCK_EVENT = Metric(
    "gpu_clock_event_active", "gauge",
    "1 while the driver names this reason for a clock below the maximum. gpu_idle is normal on an idle GPU.",
    (*GPU, "reason"), "nvmlDeviceGetCurrentClocksEventReasons",
)
GPU_CLOCK_EVENT_SECONDS = Metric(
    "gpu_clock_event_seconds_total", "counter", "Time the clock was held back for this reason.", (*GPU, "reason"),
    "NVML fields 74, 76, 269, 270, 271, ns", scale=1e-9, key=True,
)
GPU_ECC_ERRORS = Metric(
    "gpu_ecc_errors_total", "counter",
    "Memory errors since the driver was loaded. Corrected ones cost nothing; uncorrected ones end the job.",
    (*GPU, "error"), "NVML fields 3 (corrected) and 4 (uncorrected)", key=True,
)
GPU_XID = Metric(
    "gpu_xid_errors_total", "counter",
    "Xid errors seen by this exporter, across its restarts. Critical codes start at 0. Meaning: docs/xid.md.",
    (*GPU, "xid"), "/dev/kmsg NVRM lines; pci bus id matched to the inventory", key=True,
)
GPU_XID_LAST = Metric(
    "gpu_xid_last_timestamp_seconds", "gauge", "When this Xid was last seen on this GPU, as Unix time.",
    (*GPU, "xid"), "/dev/kmsg record time",
)

# InfiniBand and RoCE, sysfs.

INFINIBAND_INFO = Metric(
    "infiniband_info", "info", "Identity of one port.",
    (*PORT, "host", "board_id", "firmware_version", "hca_type", "link_layer"),
    "/sys/class/infiniband/D/{board_id,fw_ver,hca_type}, ports/P/link_layer",
)
INFINIBAND_PRESENT = Metric(
    "infiniband_port_present", "gauge",
    "1 if the port is in /sys, 0 if it is in this node's inventory and is gone.", PORT,
    "/sys/class/infiniband against the persisted inventory",
)
INFINIBAND_STATE = Metric(
    "infiniband_port_state_id", "gauge",
    "Logical state: 0 none, 1 down, 2 init (no subnet manager), 3 armed, 4 active, 5 active-defer.", PORT,
    "ports/P/state", key=True,
)
INFINIBAND_PHYSICAL_STATE = Metric(
    "infiniband_port_physical_state_id", "gauge",
    "Physical state: 1 sleep, 2 polling (no signal), 3 disabled, 4 training, 5 link up, 6 error recovery, 7 test.",
    PORT, "ports/P/phys_state",
)
INFINIBAND_RATE = Metric(
    "infiniband_port_rate_bytes_per_second", "gauge", "Active speed times width, in each direction.", PORT,
    "ports/P/rate, Gb/s", scale=1e9 / 8,
)


def _port_counter(name: str, help_text: str, file: str, *, scale: float = 1.0, key: bool = False) -> Metric:
    return Metric(name, "counter", help_text, PORT, file, scale, key)


INFINIBAND_TRANSMIT_DATA = _port_counter(
    "infiniband_transmit_data_bytes_total", "Bytes sent.", "counters/port_xmit_data, 4-byte words", scale=4, key=True)
INFINIBAND_RECEIVE_DATA = _port_counter(
    "infiniband_receive_data_bytes_total", "Bytes received.", "counters/port_rcv_data, 4-byte words", scale=4)
INFINIBAND_TRANSMIT_PACKETS = _port_counter(
    "infiniband_transmit_packets_total", "Packets sent.", "counters/port_xmit_packets")
INFINIBAND_RECEIVE_PACKETS = _port_counter(
    "infiniband_receive_packets_total", "Packets received.", "counters/port_rcv_packets")
INFINIBAND_SYMBOL_ERRORS = _port_counter(
    "infiniband_symbol_errors_total", "Errors on the wire that the code could not correct. Sticks at 65535.",
    "counters/symbol_error", key=True)
INFINIBAND_LINK_RECOVERY = _port_counter(
    "infiniband_link_error_recovery_total", "Times the link retrained and came back. Sticks at 255.",
    "counters/link_error_recovery")
INFINIBAND_LINK_DOWNED = _port_counter(
    "infiniband_link_downed_total", "Times the link failed to come back by itself. Sticks at 255.",
    "counters/link_downed", key=True)
INFINIBAND_RECEIVE_ERRORS = _port_counter(
    "infiniband_receive_errors_total", "Packets received broken. Sticks at 65535.", "counters/port_rcv_errors")
INFINIBAND_RECEIVE_REMOTE_ERRORS = _port_counter(
    "infiniband_receive_remote_physical_errors_total", "Packets marked bad further up. Sticks at 65535.",
    "counters/port_rcv_remote_physical_errors")
INFINIBAND_TRANSMIT_DISCARDS = _port_counter(
    "infiniband_transmit_discards_total", "Packets dropped before sending. Sticks at 65535.",
    "counters/port_xmit_discards")
INFINIBAND_LINK_INTEGRITY = _port_counter(
    "infiniband_local_link_integrity_errors_total", "Local physical errors above the threshold. Sticks at 15.",
    "counters/local_link_integrity_errors")
INFINIBAND_BUFFER_OVERRUN = _port_counter(
    "infiniband_excessive_buffer_overrun_errors_total", "Repeated buffer overruns. Sticks at 15.",
    "counters/excessive_buffer_overrun_errors")
INFINIBAND_VL15_DROPPED = _port_counter(
    "infiniband_vl15_dropped_total", "Management packets dropped for want of buffers. Sticks at 65535.",
    "counters/VL15_dropped")
INFINIBAND_TRANSMIT_WAIT = _port_counter(
    "infiniband_transmit_wait_ticks_total",
    "Ticks with data to send and no credit. The tick is device specific: compare rails, never alert alone.",
    "counters/port_xmit_wait")
INFINIBAND_OUT_OF_BUFFER = _port_counter(
    "infiniband_out_of_buffer_total", "Packets dropped because the host posted no receive buffer.",
    "hw_counters/out_of_buffer")
INFINIBAND_OUT_OF_SEQUENCE = _port_counter(
    "infiniband_out_of_sequence_total", "Packets received out of order: loss or re-routing in the fabric.",
    "hw_counters/out_of_sequence")
INFINIBAND_PACKET_SEQUENCE_ERRORS = _port_counter(
    "infiniband_packet_sequence_errors_total", "Negative acknowledgements for lost packets.",
    "hw_counters/packet_seq_err")
INFINIBAND_ACK_TIMEOUTS = _port_counter(
    "infiniband_local_ack_timeouts_total", "Acknowledgements that never came: a dead path.",
    "hw_counters/local_ack_timeout_err")
INFINIBAND_RNR_NAK_RETRIES = _port_counter(
    "infiniband_rnr_nak_retries_total", "Retries because the peer was not ready to receive.",
    "hw_counters/rnr_nak_retry_err")

# training hook, OTLP.

TRAINING_RUN_INFO = Metric(
    "training_run_info", "info",
    "What the run declared: FLOP convention, matmul dtype, where the peak comes from, owner, team and page policy. "
    "From one rank.",
    (*RANK, "tenant", "attempt", "convention", "dtype", "peak_source", "framework", "owner", "team", "page"),
    "flopwatch.training.Run arguments",
)
TRAINING_RANK_INFO = Metric(
    "training_rank_info", "info", "Where one rank runs: its host and the GPU it declared.",
    (*RANK, "host", "uuid", "local_rank", "attempt"), "flopwatch.training.Run, launcher environment", key=True,
)
TRAINING_WORLD_SIZE = Metric(
    "training_world_size", "gauge", "Ranks in the run. From one rank.", RANK, "launcher environment",
)
TRAINING_POSITION_STEPS = Metric(
    "training_position_steps", "gauge",
    "Optimizer steps of the run completed, restored ones included. A position: never put it under rate().", RANK,
    "run.restored, run.step", key=True,
)
TRAINING_POSITION_TOKENS = Metric(
    "training_position_tokens", "gauge",
    "Tokens of the run consumed by this rank's replica, restored ones included. A position.", RANK,
    "run.restored, run.step",
)
TRAINING_COMMITTED_STEPS = Metric(
    "training_committed_steps", "gauge", "Step of the last durable checkpoint.", RANK, "run.checkpoint_committed",
)
TRAINING_STEPS = Metric(
    "training_steps_total", "counter", "Optimizer steps since the process started, re-executed ones included.", RANK,
    "run.step",
)
TRAINING_TOKENS = Metric(
    "training_tokens_total", "counter",
    "This rank's share of the tokens since the process started (replica tokens / ranks per replica).", RANK,
    "run.step(tokens=...)", key=True,
)
TRAINING_MODEL_FLOPS = Metric(
    "training_model_flops_total", "counter",
    "FLOPs the model needs for this rank's share of the tokens; recomputation is never counted.", RANK,
    "tokens x flopwatch.training.flops per token", key=True,
)
TRAINING_CAPACITY_FLOPS = Metric(
    "training_capacity_flops_total", "counter",
    "Dense peak of this rank's card for the declared dtype x seconds in steps, data stall included.", RANK,
    "flopwatch.training.peaks x step seconds", key=True,
)
TRAINING_PEAK_FLOPS = Metric(
    "training_peak_flops_per_second", "gauge", "Dense peak FLOP/s of this rank's card for the declared dtype.", RANK,
    "flopwatch.training.peaks, or declared",
)
TRAINING_MFU_UNAVAILABLE = Metric(
    "training_mfu_unavailable", "gauge", "1 with the reason why this rank has no MFU.", (*RANK, "reason"),
    "flopwatch.training.hook",
)
TRAINING_ACTIVITY_SECONDS = Metric(
    "training_activity_seconds_total", "counter",
    "Wall clock of this process by activity: startup, step, compile, data_stall, checkpoint_save, "
    "checkpoint_restore, evaluation, other. Exclusive, and they sum to the process's age.",
    (*RANK, "activity"), "monotonic clock of the training process",
)
TRAINING_COLLECTIVE_WAIT = Metric(
    "training_collective_wait_seconds_total", "counter",
    "Time this rank waited for others in collectives, in measured steps. The late rank waits least.", RANK,
    "flopwatch.training.torch: autograd-engine callbacks around DDP's reducer",
)
TRAINING_MEASURED_STEP_SECONDS = Metric(
    "training_measured_step_seconds_total", "counter",
    "Step time of the steps in which the wait was measured. A step next to a checkpoint or evaluation is not.", RANK,
    "flopwatch.training.hook",
)
TRAINING_MEASURED_STEPS = Metric(
    "training_measured_steps_total", "counter", "Steps in which the wait was measured.", RANK,
    "flopwatch.training.hook",
)
TRAINING_STEP_DURATION = Metric(
    "training_step_duration_seconds", "histogram", "Duration of optimizer steps. From one rank.", RANK,
    "flopwatch.training.hook",
)
TRAINING_LOSS = Metric(
    "training_loss", "gauge", "Loss last reported.", RANK, "run.step(loss=...)",
)
TRAINING_HOOK_ERRORS = Metric(
    "training_hook_errors_total", "counter", "Errors the hook swallowed to keep the training loop running.", RANK,
    "flopwatch.training.hook",
)

# run ledger.

RUN_SECONDS = Metric(
    "run_seconds_total", "counter",
    "Wall clock of the run by bucket: productive, lost, startup, compile, data_stall, checkpoint_save, "
    "checkpoint_restore, evaluation, generation, down, queue, other. Exclusive; nothing is ever reclassified.",
    (*RUN, "bucket"), "flopwatch.ledger.accounting", key=True,
)
RUN_GPU_SECONDS = Metric(
    "run_gpu_seconds_total", "counter", "The same, times the GPUs held.", (*RUN, "bucket"),
    "flopwatch.ledger.accounting",
)
RUN_OPEN_SECONDS = Metric(
    "run_open_seconds", "gauge",
    "Wall clock not yet booked, because no evidence brackets it. Buckets (queue apart) + open = wall clock.", RUN,
    "flopwatch.ledger.accounting", key=True,
)
RUN_PROVISIONAL_SECONDS = Metric(
    "run_provisional_seconds", "gauge", "Productive time not yet covered by a durable checkpoint.", RUN,
    "flopwatch.ledger.accounting",
)
RUN_GPUS = Metric(
    "run_gpus", "gauge", "GPUs the run holds (its last attempt's, while it is down).", RUN,
    "flopwatch.ledger.accounting",
)
RUN_STATE = Metric(
    "run_state", "gauge",
    "1 for the state the run is in: queued (also after a preemption), running, down, completed, stopped.",
    (*RUN, "state"), "flopwatch.ledger.accounting", key=True,
)
RUN_ATTEMPTS = Metric(
    "run_attempts_total", "counter", "Attempts started: first start, restarts, moves, resizes.", RUN,
    "flopwatch.ledger.accounting",
)
RUN_ENDS = Metric(
    "run_attempt_ends_total", "counter",
    "Attempts that ended, by how: completed, stopped, preempted, resized, failed, silent. "
    "failed and silent are unplanned.",
    (*RUN, "status"), "flopwatch.ledger.accounting",
)
RUN_POSITION_STEPS = Metric(
    "run_high_water_steps", "gauge", "The furthest step the run ever completed.", RUN, "flopwatch.ledger.accounting",
)
RUN_COMMITTED_STEPS = Metric(
    "run_committed_steps", "gauge", "Step of the run's last durable checkpoint.", RUN, "flopwatch.ledger.accounting",
)
RUN_MODEL_FLOPS = Metric(
    "run_retained_flops_total", "counter",
    "Model FLOPs above the high-water mark: work done once. Re-executed steps add nothing.", RUN,
    "flopwatch.ledger.accounting",
)
RUN_CAPACITY_FLOPS = Metric(
    "run_capacity_flops_total", "counter", "Peak FLOP/s of the allocated GPUs x seconds held.", RUN,
    "flopwatch.ledger.accounting",
)
RUN_START = Metric(
    "run_start_timestamp_seconds", "gauge", "First process start of the run, as Unix time.", RUN,
    "flopwatch.ledger.accounting",
)

# self-metrics.

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


def all_metrics() -> Iterator[Metric]:
    """Yield every row of this module in the order written."""
    yield from (value for value in globals().values() if isinstance(value, Metric))


BY_NAME: dict[str, Metric] = {row.name: row for row in all_metrics()}
