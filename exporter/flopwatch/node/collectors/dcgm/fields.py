"""Tables of DCGM field ids and their series. Names changed in DCGM 4.6 and 4.7, the ids did not.

Ids, units and meaning: https://docs.nvidia.com/datacenter/dcgm/latest/reference/field-identifiers.html. Activities and
rates are means over the time between two samples of the host engine, ratios 0-1 and bytes per second. NVLink traffic
(1011, 1012) includes the protocol. If DCGM reads the NVSwitches through NVIDIA's nscq library, NVSwitch traffic (861,
862) is in Mibit as in nscq.h. Only then does DCGM report their temperature limits.
"""

from dataclasses import dataclass

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric


@dataclass(frozen=True, slots=True)
class DcgmField:
    """DCGM field and its series. `how` to use the number: as gauge, counter (until a reset) or mean (to integrate)."""

    id: int
    row: Metric
    labels: tuple[str, ...] = ()
    how: str = "gauge"


NVML_INDEX, UUID, COMPUTE_CAPABILITY = 52, 54, 63
GPU_IDENTITY = (NVML_INDEX, UUID, COMPUTE_CAPABILITY)
CHASSIS = (572, 573, 574, 575)  # serial number, slot, tray, node: the labels of gpu_chassis_info
SWITCH_PCI = (866, 867, 868, 869)  # domain, bus, device, function

GPU_STATE = (DcgmField(153, m.GPU_TEMPERATURE_MARGIN_CELSIUS),)

# fmt: off
PIPES = {1007: "fp32", 1008: "fp16", 1006: "fp64", 1014: "tensor_hmma", 1013: "tensor_imma", 1015: "tensor_dfma",
         1016: "integer"}
# fmt: on
PROFILING = (  # the most informative first, because some hardware cannot count all of them together
    DcgmField(1004, m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL, how="mean"),
    DcgmField(1002, m.GPU_SM_ACTIVE_SECONDS_TOTAL, how="mean"),
    DcgmField(1005, m.GPU_DRAM_ACTIVE_SECONDS_TOTAL, how="mean"),
    DcgmField(1001, m.GPU_GRAPHICS_ACTIVE_SECONDS_TOTAL, how="mean"),
    DcgmField(1003, m.GPU_SM_OCCUPANCY_SECONDS_TOTAL, how="mean"),
    DcgmField(1009, m.GPU_PCIE_TRANSMIT_BYTES_TOTAL, how="mean"),
    DcgmField(1010, m.GPU_PCIE_RECEIVE_BYTES_TOTAL, how="mean"),
    DcgmField(1011, m.NVLINK_TRANSMIT_RAW_BYTES_TOTAL, how="mean"),
    DcgmField(1012, m.NVLINK_RECEIVE_RAW_BYTES_TOTAL, how="mean"),
    *(DcgmField(id, m.GPU_PIPE_ACTIVE_SECONDS_TOTAL, (pipe,), how="mean") for id, pipe in PIPES.items()),
)
ALL_PROFILING = tuple(each.id for each in PROFILING)
TRAFFIC = frozenset({1009, 1010, 1011, 1012})
NVML_PROFILES_FROM = 9  # compute capability of Hopper, from which NVML reports activities itself (gpm.py)

SLOWDOWN_LIMIT = 859
SWITCH_STATE = (
    DcgmField(858, m.NVLINK_SWITCH_TEMPERATURE_CELSIUS),
    DcgmField(SLOWDOWN_LIMIT, m.NVLINK_SWITCH_TEMPERATURE_LIMIT_CELSIUS, ("slowdown",)),
    DcgmField(860, m.NVLINK_SWITCH_TEMPERATURE_LIMIT_CELSIUS, ("shutdown",)),
    DcgmField(861, m.NVLINK_SWITCH_TRANSMIT_BYTES_TOTAL, how="counter"),
    DcgmField(862, m.NVLINK_SWITCH_RECEIVE_BYTES_TOTAL, how="counter"),
    DcgmField(856, m.NVLINK_SWITCH_LAST_SXID_ID, ("fatal",)),
    DcgmField(857, m.NVLINK_SWITCH_LAST_SXID_ID, ("non_fatal",)),
    DcgmField(864, m.NVLINK_SWITCH_RESET_REQUIRED),
)
LINK_STATE = 870
LINK_STATES = {0: "off", 1: "safe", 2: "active", 3: "error"}
LINK_ERRORS = {784: "replay", 785: "recovery", 786: "flit", 787: "crc", 788: "ecc"}

CPU_STATE = (DcgmField(1130, m.HOST_CPU_POWER_WATTS), DcgmField(1133, m.HOST_MODULE_POWER_WATTS))
