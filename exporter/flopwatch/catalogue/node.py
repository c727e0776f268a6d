"""The node as a whole: its place and its verdict."""

from flopwatch.catalogue.row import RANK, counter, gauge, info

NODE_TOPOLOGY_INFO = info(
    "node_topology_info",
    "Place of the node: rack, leaf switch, NVLink domain; source is where that is told.",
    ("host", "rack", "leaf", "domain", "source"),
    "--topology: topograph's node labels (kubernetes), Slurm's topology.conf (slurm) or a CSV file (csv)",
)
NODE_VERDICT = gauge(
    "node_verdict_id",
    "Fitness for training: 0 ok, 1 degraded or not to be told, 2 bad.",
    (),
    "flopwatch.node.health.rules over everything read, against the expected shape",
)
NODE_VERDICT_REASON = gauge(
    "node_verdict_reason",
    "1 for each reason why the node is not ok: the part it concerns, its weight (degraded, bad, unknown) and what to "
    "do. Reasons and actions: docs/check.md.",
    ("reason", "part", "verdict", "action"),
    "flopwatch.node.health.rules",
)
NODE_EXPECTED = gauge(
    "node_expected_parts",
    "Parts this node ought to have: gpus, ports, nvlinks.",
    ("kind",),
    "--expect FILE, or learnt by flopwatch check --record",
)
NODE_KERNEL_EVENTS = counter(
    "node_kernel_events_total",
    "Lines of the kernel log that concern training: pcie_slot_power, module_high_temperature, cable_unplugged, "
    "nic_health_compromised, nic_transmit_timeout, nic_command_leak, oom_kill, nccl_segfault, peermem_error, "
    "gpu_initialization_failed.",
    ("event",),
    "/dev/kmsg",
)
NODE_OOM_KILLED = gauge(
    "node_oom_killed_timestamp_seconds",
    "When the kernel killed this process for want of memory, as Unix time, by its pid on the host; the last 8.",
    ("pid",),
    "/dev/kmsg oom-kill lines",
)
NODE_PROCESS_BLOCKED = gauge(
    "node_process_blocked_seconds",
    "How long a rank's main thread has been stopped by a signal, or uninterruptible: in the kernel, as storage and "
    "drivers keep it, where no signal reaches it; 0 while it is not. None for a process that the exporter cannot see, "
    "or of a rank that has not pushed for five minutes.",
    (*RANK, "state"),
    "/proc/PID/stat: T and D, once a second",
)
NODE_CPU_POWER = gauge("node_cpu_power_watts", "Power drawn by a CPU socket (Grace).", ("socket",), "DCGM field 1130")
NODE_MODULE_POWER = gauge(
    "node_module_power_watts", "Power drawn by a whole module, CPU and GPUs (Grace).", ("socket",), "DCGM field 1133"
)
NODE_MAINTENANCE_UNTIL = gauge(
    "node_maintenance_until_timestamp_seconds",
    "When the node's maintenance ends, or ended, as Unix time; only within a day of it. Alerts of the host are held "
    "back until then.",
    ("host",),
    "flopwatch maintenance: the file maintenance in the exporter's state folder",
)
