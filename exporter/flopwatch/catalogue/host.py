"""Rows of the host as a whole: topology, verdict, kernel log, power and maintenance."""

from flopwatch.catalogue.row import RANK, counter, gauge, info, sparse

# fmt: off
HOST_TOPOLOGY_INFO = info("host_topology_info", "Rack, leaf switch and NVLink domain of the host. source is where they "
    "were read: kubernetes, slurm or csv.", ("host", "rack", "leaf", "domain", "source"),
    "--topology: topograph's node labels (kubernetes), Slurm's topology.conf (slurm) or a CSV file (csv)")
HOST_VERDICT_ID = gauge("host_verdict_id", "Verdict on the host's fitness for training: 0 ok, 1 degraded or unknown, 2 "
    "bad.", (), "flopwatch.node.health.rules over everything read, against the expected shape")
HOST_VERDICT_REASON = gauge("host_verdict_reason", "1 for each reason why the host is not ok, with the GPU, port or "
    "other part it concerns, its verdict (degraded, bad, unknown) and what to do. Reasons and actions: docs/check.md.",
    ("reason", "part", "verdict", "action"), "flopwatch.node.health.rules")
HOST_EXPECTED_PARTS = gauge("host_expected_parts",
    "Parts that the host is expected to have, by kind: gpus, ports, nvlinks, pcie_lanes_per_gpu. Absent for a kind "
    "without an expected number.", ("kind",), "--expect FILE, or learnt by flopwatch check --record")
HOST_KERNEL_EVENTS_TOTAL = counter("host_kernel_events_total", "Kernel log lines that concern training: "
    "pcie_slot_power, module_high_temperature, cable_unplugged, nic_health_compromised, nic_transmit_timeout, "
    "nic_command_leak, oom_kill, nccl_segfault, peermem_error, gpu_initialization_failed.", ("event",), "/dev/kmsg")
HOST_OOM_KILLED_TIMESTAMP_SECONDS = gauge("host_oom_killed_timestamp_seconds",
    "Time the kernel killed this process for lack of memory, as Unix time, by its pid on the host. Absent except for "
    "the last 8 processes.", ("pid",), "/dev/kmsg oom-kill lines")
HOST_PROCESS_BLOCKED_SECONDS = sparse(gauge("host_process_blocked_seconds",
    "Time for which a rank's main thread has been stopped by a signal, or uninterruptible in the kernel, as in storage "
    "and drivers. With --series full, 0 while the thread is neither. Absent for a process that the exporter cannot "
    "see, or of a rank without a push for five minutes.", (*RANK, "state"), "/proc/PID/stat: T and D, every 1 to 5 s"))
HOST_CPU_POWER_WATTS = gauge("host_cpu_power_watts", "Power drawn by a CPU socket (Grace).", ("socket",),
    "DCGM field 1130")
HOST_MODULE_POWER_WATTS = gauge("host_module_power_watts", "Power drawn by a whole module, CPU and GPUs (Grace).",
    ("socket",), "DCGM field 1133")
HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS = gauge("host_maintenance_until_timestamp_seconds",
    "Time at which the host's maintenance ends or ended, as Unix time. Alerts of the host are inhibited until then. "
    "Present only within a day of that time.", ("host",),
    "flopwatch maintenance: the file maintenance in the exporter's state folder")
