"""The host as a whole: its place, its verdict and its kernel log."""

from flopwatch.catalogue.row import RANK, counter, gauge, info

# fmt: off
# A table: the formatter would print each argument of a row on a line of its own.

HOST_TOPOLOGY_INFO = info("host_topology_info",
    "Place of the host: rack, leaf switch and NVLink domain. source is where it was read from.",
    ("host", "rack", "leaf", "domain", "source"),
    "--topology: topograph's node labels (kubernetes), Slurm's topology.conf (slurm) or a CSV file (csv)")
HOST_VERDICT_ID = gauge("host_verdict_id", "Fitness for training: 0 ok, 1 degraded or unknown, 2 bad.", (),
    "flopwatch.node.health.rules over everything read, against the expected shape")
HOST_VERDICT_REASON = gauge("host_verdict_reason",
    "1 for each reason why the host is not ok, with the part it concerns, its verdict (degraded, bad, unknown) and "
    "what to do. Reasons and actions: docs/check.md.", ("reason", "part", "verdict", "action"),
    "flopwatch.node.health.rules")
HOST_EXPECTED_PARTS = gauge("host_expected_parts", "Parts this host is expected to have: gpus, ports, nvlinks.",
    ("kind",), "--expect FILE, or learnt by flopwatch check --record")
HOST_KERNEL_EVENTS_TOTAL = counter("host_kernel_events_total",
    "Kernel log lines that concern training: pcie_slot_power, module_high_temperature, cable_unplugged, "
    "nic_health_compromised, nic_transmit_timeout, nic_command_leak, oom_kill, nccl_segfault, peermem_error, "
    "gpu_initialization_failed.", ("event",), "/dev/kmsg")
HOST_OOM_KILLED_TIMESTAMP_SECONDS = gauge("host_oom_killed_timestamp_seconds",
    "Time the kernel killed this process for lack of memory, as Unix time, by its pid on the host. Only the last 8.",
    ("pid",), "/dev/kmsg oom-kill lines")
HOST_PROCESS_BLOCKED_SECONDS = gauge("host_process_blocked_seconds",
    "Time for which a rank's main thread has been stopped by a signal, or uninterruptible in the kernel, as in "
    "storage and drivers. 0 while it is neither. Absent for a process that the exporter cannot see, or of a rank "
    "without a push for five minutes.", (*RANK, "state"), "/proc/PID/stat: T and D, once a second")
HOST_CPU_POWER_WATTS = gauge("host_cpu_power_watts", "Power drawn by a CPU socket (Grace).", ("socket",),
    "DCGM field 1130")
HOST_MODULE_POWER_WATTS = gauge("host_module_power_watts", "Power drawn by a whole module, CPU and GPUs (Grace).",
    ("socket",), "DCGM field 1133")
HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS = gauge("host_maintenance_until_timestamp_seconds",
    "Time at which the host's maintenance ends or ended, as Unix time. Alerts of the host are inhibited until "
    "then. Present only within a day of that time.", ("host",),
    "flopwatch maintenance: the file maintenance in the exporter's state folder")
