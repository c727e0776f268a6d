"""GPU dashboard: clocks, heat, power, memory, links and errors of one GPU, and its owner."""

from __future__ import annotations

import dashboards as d
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

CARD = 'uuid="$uuid"'
FINDINGS = findings.on_gpu(CARD)
ONE = f"{{{CARD}}}"


def of(metric: object, labels: str = "") -> str:
    """Return an expression for a family of the chosen GPU, as one series even if two exporters briefly serve it."""
    return f"max by (uuid{labels and ', ' + labels}) ({metric}{ONE})"


def rate(metric: object, labels: str = "") -> str:
    """Return an expression for the rate of a counter of the chosen GPU."""
    return f"max by (uuid{labels and ', ' + labels}) (rate({metric}{ONE}{p.RATE}))"


EXPECTED_LANES = (
    f"max by (uuid) ({m.GPU_PRESENT}{ONE} * on (instance) group_left () "
    + f'{m.HOST_EXPECTED_PARTS}{{kind="pcie_lanes_per_gpu"}})'
)

owner = [
    findings.health(
        "Health",
        "Health of the GPU, of its driver and of its host's NVSwitches.",
        FINDINGS,
        f"0 * {m.GPU_INFO}{ONE}",
        width=4,
        height=6,
    ),
    findings.table(
        "Firing alerts on the GPU, its driver and the NVSwitches of its host, and reasons that concern these in the "
        "verdict on the host.",
        FINDINGS,
        "Xid",
        width=20,
        height=6,
    ),
    d.label_table(
        "GPU",
        "Model, PCI address and versions of the GPU. Expected: the same driver and VBIOS as the host's other GPUs.",
        f"{m.GPU_INFO}{ONE}",
        labels={
            "host": "Node",
            "gpu": "Index",
            "model": "Model",
            "serial": "Serial",
            "pci_bus_id": "PCI",
            "module_id": "Module",
            "driver_version": "Driver",
            "vbios_version": "VBIOS",
        },
        links={"Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")]},
        width=24,
        height=4,
    ),
    d.label_table(
        "Owner",
        "Pod, job or user that has the GPU, and the source of this information. Expected: an owner while runs are "
        "queued, and none whose job is over.",
        f"{m.GPU_OWNER_INFO}{ONE}",
        labels={
            "owner_namespace": "Namespace",
            "owner_pod": "Pod",
            "owner_job": "Job",
            "owner_user": "User",
            "source": "Source",
        },
        width=12,
        height=4,
    ),
    d.label_table(
        "Ranks",
        "Ranks that run on the GPU. Expected: ranks of one run only.",
        f"{m.TRAINING_RANK_INFO}{ONE}",
        labels={"run": "Run", "rank": "Rank"},
        links={"Run": [p.to_run(d.FIELD % "Run")]},
        width=12,
        height=4,
    ),
    d.stat(
        "Answers",
        "Whether the GPU answers. Expected: yes. Otherwise it fell off the bus or needs a reset. Drain the host and "
        "reboot it.",
        d.Query(of(m.GPU_PRESENT)),
        mappings={0: ("no", "red"), 1: ("yes", "green")},
        width=4,
    ),
    d.stat(
        "Row remap pending",
        "Whether memory rows wait to be remapped at the next reset. Expected: no. Otherwise drain the host and reset "
        "the GPU.",
        d.Query(of(m.GPU_ROW_REMAP_PENDING)),
        mappings=p.ONE_IS_BAD,
        width=4,
    ),
    d.stat(
        "Recovery action",
        "Action that the driver requests for the GPU. Expected: nothing. Otherwise drain the host and do what it "
        "requests.",
        d.Query(of(m.GPU_RECOVERY_ACTION_ID)),
        mappings={
            0: ("nothing", "green"),
            1: ("reset", "orange"),
            2: ("reboot", "red"),
            3: ("drain", "orange"),
            4: ("drain and reset", "orange"),
            5: ("IMEX recovery", "orange"),
            6: ("bus reset", "orange"),
            7: ("reboot", "red"),
        },
        width=4,
    ),
    d.stat(
        "Uncorrected errors",
        "Uncorrected memory errors since the driver was loaded. Expected: 0. Each can end a job. Drain the host and "
        "reset the GPU.",
        d.Query(f'max(max by (instance) ({m.GPU_ECC_ERRORS_TOTAL}{{{CARD}, error="uncorrected"}}))'),
        thresholds=p.ERRORS,
        width=4,
    ),
    d.stat(
        "PCIe lanes",
        "PCIe lanes in use over the lanes that are expected or, without an expectation, that GPU and slot support. "
        "Expected: 100 %. Otherwise reseat the GPU.",
        d.Query(f"{of(m.GPU_PCIE_WIDTH_LANES)} / ({EXPECTED_LANES} or {of(m.GPU_PCIE_WIDTH_MAX_LANES)})"),
        unit="percentunit",
        thresholds=[(None, "red"), (1, "green")],
        width=4,
    ),
    d.stat(
        "Active NVLinks",
        "Number of active NVLinks of the GPU. Expected: as many as the host's other GPUs have.",
        d.Query(f'max(max by (instance) ({m.NVLINK_LINKS}{{{CARD}, state="active"}}))'),
        width=4,
    ),
]

work = [
    d.timeseries(
        "Activity",
        "Share of time in which a kernel ran (utilisation), and in which each part of the GPU worked. Expected: "
        "tensor cores well above 0. At 100 % utilisation with idle tensor cores a kernel waits, for instance in a "
        "collective. Before Hopper, only utilisation is available without DCGM.",
        d.Query(of(m.GPU_UTILIZATION_RATIO), "utilisation"),
        d.Query(rate(m.GPU_SM_ACTIVE_SECONDS_TOTAL), "SMs"),
        d.Query(rate(m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL), "tensor cores"),
        d.Query(rate(m.GPU_DRAM_ACTIVE_SECONDS_TOTAL), "memory"),
        unit="percentunit",
        top=1,
    ),
    d.timeseries(
        "Clocks",
        "SM clock and its maximum, and memory clock. Expected: the SM clock at its maximum under load, unless the GPU "
        "is throttled.",
        d.Query(of(m.GPU_SM_CLOCK_HERTZ), "SM"),
        d.Query(of(m.GPU_SM_CLOCK_MAX_HERTZ), "SM, maximum"),
        d.Query(of(m.GPU_MEMORY_CLOCK_HERTZ), "memory"),
        unit="hertz",
    ),
    d.timeseries(
        "Power",
        "Power drawn, the limit in force and the board's default limit. Expected: the limit in force equals the "
        "default limit, and the power is that of the host's other GPUs under the same load.",
        d.Query(of(m.GPU_POWER_WATTS), "drawn"),
        d.Query(of(m.GPU_POWER_LIMIT_WATTS), "limit"),
        d.Query(of(m.GPU_POWER_LIMIT_DEFAULT_WATTS), "default limit"),
        unit="watt",
    ),
    d.timeseries(
        "Temperature",
        "Temperature of the GPU and its memory, and of the limits that act on them. Expected: well below the slowdown "
        "limit. GPUs since Ada do not report limits as temperatures.",
        d.Query(of(m.GPU_TEMPERATURE_CELSIUS), "GPU"),
        d.Query(of(m.GPU_MEMORY_TEMPERATURE_CELSIUS), "memory"),
        d.Query(of(m.GPU_TEMPERATURE_LIMIT_CELSIUS, "limit"), "{{limit}}"),
        unit="celsius",
    ),
    d.timeseries(
        "Throttling by reason",
        "Share of time in which the clock was throttled, by reason. Expected: none, except sw_power_cap at full load.",
        d.Query(f"clamp_max({rate(m.GPU_CLOCK_EVENT_SECONDS_TOTAL, 'reason')}, 1) > 0", "{{reason}}"),
        unit="percentunit",
        top=1,
        no_data="The GPU was not throttled in the time shown.",
    ),
    d.timeseries(
        "Memory",
        "Device memory allocated, and the total. Expected: below the total. If it is full, the next allocation fails.",
        d.Query(of(m.GPU_MEMORY_USED_BYTES), "used"),
        d.Query(of(m.GPU_MEMORY_TOTAL_BYTES), "total"),
        unit="bytes",
    ),
]

links = [
    d.timeseries(
        "NVLink traffic",
        "Bytes per second that the GPU sends and receives over NVLink. Expected: the same as on the host's other GPUs "
        "in the same job.",
        d.Query(rate(m.NVLINK_TRANSMIT_BYTES_TOTAL), "sends"),
        d.Query(rate(m.NVLINK_RECEIVE_BYTES_TOTAL), "receives"),
        unit="Bps",
    ),
    d.timeseries(
        "PCIe traffic",
        "Bytes per second that the GPU sends and receives over PCIe. Expected: low if the GPUs exchange data over "
        "NVLink.",
        d.Query(rate(m.GPU_PCIE_TRANSMIT_BYTES_TOTAL), "sends"),
        d.Query(rate(m.GPU_PCIE_RECEIVE_BYTES_TOTAL), "receives"),
        unit="Bps",
    ),
    d.timeseries(
        "Link errors",
        "NVLink errors by kind, and PCIe packets retransmitted (replays), per second. Expected: none that last.",
        d.Query(rate(m.NVLINK_ERRORS_TOTAL, "error"), "NVLink {{error}}"),
        d.Query(rate(m.GPU_PCIE_REPLAYS_TOTAL), "PCIe replays"),
        unit=p.PER_SECOND,
    ),
    d.timeseries(
        "Memory errors",
        "Memory errors since the driver was loaded, and memory rows remapped over the life of the board. Expected: "
        "flat. A new uncorrected error can end a job.",
        d.Query(of(m.GPU_ECC_ERRORS_TOTAL, "error"), "{{error}}"),
        d.Query(of(m.GPU_REMAPPED_ROWS_TOTAL, "error"), "rows remapped: {{error}}"),
        unit="none",
        width=12,
    ),
    d.timeseries(
        "Xids",
        "Number of Xid errors by code, since the host was first monitored. Expected: flat. Only a rise is a new "
        "error. docs/xid.md explains the codes.",
        d.Query(f"{of(m.GPU_XID_ERRORS_TOTAL, 'xid')} > 0", "Xid {{xid}}"),
        unit="none",
        width=12,
        no_data="The GPU had no Xid.",
    ),
]

BOARD = d.dashboard(
    p.GPU,
    "GPU",
    "One GPU: its owner, its state, its work and its errors.",
    [p.host, d.variable("uuid", "GPU", f'label_values({m.GPU_INFO}{{host="$host"}}, uuid)')],
    {"Identity and state": owner, "Work": work, "Links and errors": links},
    [d.annotation("Alerts", f'ALERTS{{alertstate="firing", {CARD}}}', "{{alertname}}", "red", "{{severity}}")],
)
