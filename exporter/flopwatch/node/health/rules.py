"""Rules of a host's fitness for training: each has a reason, its verdict, and what to do. docs/check.md has the table.

Actions follow the driver's own recovery action (NVML field 230), if there is one. Otherwise they follow NVIDIA's
guidelines (https://docs.nvidia.com/deploy/gpu-debug-guidelines/) and Xid catalogue
(https://docs.nvidia.com/deploy/xid-errors/). Ports are judged as in leptonai/gpud and NVIDIA/NVSentinel.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.node.health import searches as search
from flopwatch.node.health.facts import Facts, Found

OK, DEGRADED, BAD, UNKNOWN = "ok", "degraded", "bad", "unknown"

ACTIONS = {  # label of the series: what to do
    "reset_gpu": "reset the GPU (nvidia-smi --gpu-reset) once it is free",
    "reboot_node": "reboot the host",
    "reboot_then_reseat": "reboot the host; if the part is still missing, reseat it",
    "drain_peers": "drain the GPUs that exchange data with it",
    "drain_and_reset": "drain the host, then reset the GPU",
    "recover_imex": "recover the IMEX domain",
    "reset_bus": "reset the PCIe bus above the GPU",
    "reboot_system": "reboot the whole system",
    "replace_gpu": "drain the host and have the GPU replaced (RMA)",
    "reseat_gpu": "drain the host, power it off and reseat the GPU",
    "check_nvlink": "drain the host and test its NVLinks (fabric manager log, field diagnostics)",
    "restart_fabric_manager": "restart the fabric manager, then reset the GPUs",
    "check_cooling": "check fans, inlet temperature and heat sinks",
    "check_power": "check power supplies and the rack's power limit",
    "check_cable": "clean, reseat or replace the cable and its transceiver",
    "check_node": "compare the host with its expectations, and correct the wrong one",
    "load_driver": "load the NVIDIA driver, or finish its update; the GPUs are not at fault",
    "wait": "wait until the maintenance that requested it is over",
    "check_exporter": "run flopwatch doctor, which shows whether the driver hangs or denies access",
}

_RECOVERY = "reset_gpu reboot_node drain_peers drain_and_reset recover_imex reset_bus reboot_system"
RECOVERY_ACTIONS = dict(enumerate(_RECOVERY.split(), 1))  # nvmlDeviceGpuRecoveryAction_t


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for one reason: verdict, label of the action, text, the rows it reads, and the search for affected parts."""

    reason: str
    verdict: str
    action: str
    text: str
    rows: tuple[Metric, ...]
    find: Callable[[Facts], Iterator[Found]]


def _is(
    reason: str,
    verdict: str,
    action: str,
    text: str,
    row: Metric,
    *numbers: float,
    above: float = math.inf,
    last: str | None = None,
) -> Rule:
    """Return a rule for the series of `row` with one of `numbers` or above `above`, and with `last` as last label."""

    def find(facts: Facts) -> Iterator[Found]:
        for labels, number in facts.of(row).items():
            if (number in numbers or number > above) and last in (None, labels[-1]):
                yield facts.found(row, labels, f"{text} ({number:g})" if number > above else text)

    return Rule(reason, verdict, action, text, (row,), find)


_XIDS = (m.GPU_XID_LAST_TIMESTAMP_SECONDS, m.GPU_RECOVERY_ACTION_ID)
_PORT_STATES = (m.INFINIBAND_PORT_PRESENT, m.INFINIBAND_PORT_STATE_ID, m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND)
_RATES = (m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, *reversed(_PORT_STATES[1:]))
_FABRIC_FAULTS = (
    ("degraded_bandwidth", DEGRADED, "check_nvlink", "has less NVLink bandwidth than it should"),
    ("route_recovery", DEGRADED, "check_nvlink", "waits for its NVLink routes to recover"),
    ("route_unhealthy", BAD, "check_nvlink", "has an unhealthy NVLink route"),
    ("access_timeout", BAD, "check_nvlink", "had a timeout across its NVLink fabric"),
    ("incorrect_configuration", BAD, "restart_fabric_manager", "has a wrong NVLink fabric configuration"),
    ("no_partition", DEGRADED, "restart_fabric_manager", "is in no partition of its NVLink fabric"),
    ("manager_disconnected", DEGRADED, "restart_fabric_manager", "has lost its fabric manager"),
)
EFFECTIVE_BER = 1e-12  # DCGM's limit of the NVLink bit error ratio after correction

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("gpu_missing", BAD, "reboot_then_reseat", "does not answer, and is in the inventory",
         (m.GPU_PRESENT, m.GPU_READABLE), search.missing_gpus),
    Rule("gpus_too_few", BAD, "reboot_then_reseat", "fewer GPUs than expected", (m.GPU_PRESENT,), search.too_few_gpus),
    Rule("gpus_unseen", UNKNOWN, "check_exporter", "no driver that answers, where GPUs are expected",
         (m.GPU_PRESENT,), search.unseen_gpus),
    Rule("gpu_other_model", DEGRADED, "check_node", "is not of the expected model", (m.GPU_INFO,), search.other_model),
    Rule("driver_not_loaded", DEGRADED, "load_driver", "no driver is loaded where the inventory has GPUs",
         (m.GPU_DRIVER_LOADED,), search.unloaded_driver),
    Rule("gpu_unreadable", UNKNOWN, "check_exporter", "cannot be read by the exporter; the GPU may be well",
         (m.GPU_READABLE, m.GPU_DRIVER_LOADED), search.unreadable_gpus),
    *(_is("recovery_action", BAD, action, "needs recovery according to the driver", m.GPU_RECOVERY_ACTION_ID, number)
      for number, action in RECOVERY_ACTIONS.items()),
    Rule("xid", BAD, "reset_gpu", "had a critical Xid within the last hour",
         _XIDS, partial(search.gpus_with_xids, nvidia={"RESET_GPU"})),
    Rule("xid", BAD, "reboot_node", "the same, where NVIDIA's action is a restart",
         _XIDS, partial(search.gpus_with_xids, nvidia={"RESTART_BM", "RESTART_VM"})),
    Rule("xid", BAD, "check_nvlink", "the same, where it is an NVLink",
         _XIDS, partial(search.gpus_with_xids, nvidia={"WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"})),
    Rule("xid", BAD, "reseat_gpu", "the same, where it is the board's power or seat",
         _XIDS, partial(search.gpus_with_xids, nvidia={"CHECK_MECHANICALS"})),
    Rule("xid", BAD, "replace_gpu", "the same, where NVIDIA's action is to contact its support",
         _XIDS, partial(search.gpus_with_xids, nvidia={"CONTACT_SUPPORT"})),
    Rule("xid_recovered", DEGRADED, "reset_gpu",
         "had a critical Xid within the last hour, and the driver requests no recovery",
         _XIDS, partial(search.gpus_with_xids, driver_content=True)),
    Rule("gpu_initialization_failed", BAD, "reboot_then_reseat",
         "could not be initialized by the driver within the last hour, and does not answer",
         (m.GPU_INITIALIZATION_FAILED_TIMESTAMP_SECONDS, m.GPU_PRESENT), search.uninitialized_gpus),
    _is("row_remap_failure", BAD, "replace_gpu", "has a memory row that cannot be replaced",
        m.GPU_ROW_REMAP_FAILURE, 1),
    _is("sram_errors", BAD, "replace_gpu", "had more SRAM errors than it may have",
        m.GPU_SRAM_ERROR_THRESHOLD_EXCEEDED, 1),
    _is("ecc_uncorrected", DEGRADED, "drain_and_reset", "had uncorrected memory errors since the driver was loaded",
        m.GPU_ECC_ERRORS_TOTAL, above=0, last="uncorrected"),
    _is("row_remap_pending", DEGRADED, "drain_and_reset", "has memory rows to replace at its next reset",
        m.GPU_ROW_REMAP_PENDING, 1),
    _is("retired_pages_pending", DEGRADED, "drain_and_reset", "has memory pages to retire at its next reset",
        m.GPU_RETIRED_PAGES_PENDING, 1),
    _is("repair_pending", DEGRADED, "drain_and_reset", "has a repair waiting for its next reset",
        m.GPU_REPAIR_PENDING, 1),
    _is("thermal_slowdown", DEGRADED, "check_cooling", "is too hot, and its hardware holds the clock back",
        m.GPU_CLOCK_EVENT_ACTIVE, 1, last="hw_thermal_slowdown"),
    _is("power_brake", DEGRADED, "check_power", "is braked from outside, by its power supply",
        m.GPU_CLOCK_EVENT_ACTIVE, 1, last="hw_power_brake_slowdown"),
    Rule("pcie_width", DEGRADED, "reseat_gpu",
         "has fewer PCIe lanes than expected or, without an expectation, than it could",
         (m.GPU_PCIE_WIDTH_LANES, m.GPU_PCIE_WIDTH_MAX_LANES), search.narrow_pcie),
    Rule("pcie_generation", DEGRADED, "check_node", "cannot have the expected PCIe generation",
         (m.GPU_PCIE_GENERATION_MAX,), search.slow_pcie),
    Rule("nvlink_down", BAD, "check_nvlink", "has fewer NVLinks up than expected, or than it had",
         (m.NVLINK_LINKS, m.NVLINK_LINK_STATE_ID), search.lost_nvlinks),
    _is("nvlink_bit_errors", BAD, "check_nvlink", f"has a bit error ratio above {EFFECTIVE_BER:g} on an NVLink",
        m.NVLINK_EFFECTIVE_BIT_ERROR_RATIO, above=EFFECTIVE_BER),
    _is("fabric_not_ready", BAD, "restart_fabric_manager", "has not joined its NVLink fabric",
        m.GPU_FABRIC_STATE_ID, 1, 2),
    _is("fabric_failed", BAD, "restart_fabric_manager", "failed to join its NVLink fabric, with this nvmlReturn_t",
        m.GPU_FABRIC_STATUS_ID, above=0),
    _is("fabric_unhealthy", BAD, "check_nvlink", "finds its NVLink fabric unhealthy", m.GPU_FABRIC_HEALTH_ID, 2),
    _is("fabric_limited", DEGRADED, "check_nvlink", "finds its NVLink fabric of limited capacity",
        m.GPU_FABRIC_HEALTH_ID, 3),
    *(_is(f"fabric_{fault.removeprefix('incorrect_')}", verdict, action, text, m.GPU_FABRIC_FAULT, 1, last=fault)
      for fault, verdict, action, text in _FABRIC_FAULTS),
    Rule("sxid", BAD, "check_nvlink", "an NVSwitch had a fatal SXid within the last hour",
         (m.NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS, m.NVLINK_SWITCH_SXID_INFO), search.fatal_sxids),
    # Ports. A port without a known role counts as compute.
    Rule("port_missing", BAD, "reboot_then_reseat", "a compute port of the inventory is missing in /sys",
         _PORT_STATES, partial(search.lost_ports, how="gone", spare=False)),
    Rule("port_missing", DEGRADED, "reboot_then_reseat", "the same of a storage or management port",
         _PORT_STATES, partial(search.lost_ports, how="gone", spare=True)),
    Rule("port_down", BAD, "check_cable", "a compute port that was active once is not",
         _PORT_STATES, partial(search.lost_ports, how="down", spare=False)),
    Rule("port_down", DEGRADED, "check_cable", "the same of a storage or management port",
         _PORT_STATES, partial(search.lost_ports, how="down", spare=True)),
    Rule("ports_too_few", BAD, "check_cable", "fewer active ports than expected", _PORT_STATES, search.too_few_ports),
    Rule("ports_unseen", UNKNOWN, "check_exporter", "no port can be read where some are expected",
         (m.INFINIBAND_PORT_PRESENT,), search.unseen_ports),
    Rule("port_slow", BAD, "check_cable", "a compute port runs below the rate it had, or that is expected",
         _RATES, partial(search.slow_ports, spare=False)),
    Rule("port_slow", DEGRADED, "check_cable", "the same of a storage or management port",
         _RATES, partial(search.slow_ports, spare=True)),
    _is("port_flapping", BAD, "check_cable", "went down and came back three times within 12 hours",
        m.INFINIBAND_LINK_FLAPPING, 1),
    Rule("transceiver_hot", DEGRADED, "check_cooling",
         f"has a transceiver above {search.HOT_TRANSCEIVER:g} degrees Celsius",
         (m.INFINIBAND_TEMPERATURE_CELSIUS,), search.hot_transceivers),
    Rule("source_failed", UNKNOWN, "check_exporter", "a source of these numbers cannot be read",
         (m.FLOPWATCH_COLLECTOR_SUCCESS,), search.failed_sources),
    Rule("driver_released", UNKNOWN, "wait", "the driver is released on request",
         (m.FLOPWATCH_DRIVER_RELEASED,), search.released_driver),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Rise:
    """Limit of an error counter: a rise of more than `per_second` between two looks is a reason for a verdict."""

    reason: str
    verdict: str
    action: str
    text: str
    row: Metric
    per_second: float = 0.0
    but: frozenset[str] = frozenset()  # values of the row's last label that are exempt


# NVIDIA UFM isolates a port after 3 symbol errors in 12 minutes at NDR. Within seconds, one is enough.
# fmt: off
RISES: tuple[Rise, ...] = (
    Rise("ecc_uncorrected_rising", BAD, "drain_and_reset", "counts uncorrected memory errors",
         m.GPU_ECC_ERRORS_TOTAL, but=frozenset({"corrected"})),
    # PCIe 5 x16 may replay 31 packets a minute: DCGM's limit of speed times lanes times 1e-12.
    Rise("pcie_replays", DEGRADED, "reseat_gpu", "replays PCIe packets", m.GPU_PCIE_REPLAYS_TOTAL, 31 / 60),
    # NVLink 4 corrects errors that its CRC finds. DCGM allows 100 a second.
    Rise("nvlink_errors_rising", DEGRADED, "check_nvlink", "counts NVLink errors",
         m.NVLINK_ERRORS_TOTAL, but=frozenset({"crc", "replay"})),
    Rise("symbol_errors", DEGRADED, "check_cable", "counts symbol errors", m.INFINIBAND_SYMBOL_ERRORS_TOTAL),
    Rise("link_downed", DEGRADED, "check_cable", "lost its link", m.INFINIBAND_LINK_DOWNED_TOTAL),
)
# fmt: on
