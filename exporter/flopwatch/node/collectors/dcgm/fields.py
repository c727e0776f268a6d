"""Tables of DCGM field ids and their series: `data/dcgm_fields.csv`. DCGM 4.6 and 4.7 changed names, but no ids.

Ids, units and meaning: https://docs.nvidia.com/datacenter/dcgm/latest/reference/field-identifiers.html. Activities and
rates are means over the time between two samples of the host engine, ratios 0-1 and bytes per second. NVLink traffic
(1011, 1012) includes the protocol. If DCGM reads the NVSwitches through NVIDIA's nscq library, NVSwitch traffic (861,
862) is in Mibit as in nscq.h. Only then does DCGM report their temperature limits.
"""

from dataclasses import dataclass

from flopwatch.catalogue import BY_NAME, Metric
from flopwatch.catalogue.xid import read_table


@dataclass(frozen=True, slots=True)
class DcgmField:
    """DCGM field and its series. `how` to use the number: as gauge, counter (until a reset) or mean (to integrate)."""

    id: int
    row: Metric
    labels: tuple[str, ...]
    how: str


NVML_INDEX, UUID, COMPUTE_CAPABILITY = 52, 54, 63
GPU_IDENTITY = (NVML_INDEX, UUID, COMPUTE_CAPABILITY)
CHASSIS = (572, 573, 574, 575)  # serial number, slot, tray, node: the labels of gpu_chassis_info
SWITCH_PCI = (866, 867, 868, 869)  # domain, bus, device, function


def _table(name: str) -> tuple[DcgmField, ...]:
    """Return the fields of one table in `data/dcgm_fields.csv`, in its order."""
    rows = (row for row in read_table("dcgm_fields.csv") if row["table"] == name)
    return tuple(
        DcgmField(int(row["id"]), BY_NAME[row["family"]], tuple(row["label"].split()), row["how"]) for row in rows
    )


GPU_STATE, SWITCH_STATE, CPU_STATE = _table("gpu_state"), _table("switch_state"), _table("cpu_state")
PROFILING = _table("profiling")  # the most informative first, because some hardware cannot count all of them together
ALL_PROFILING = tuple(each.id for each in PROFILING)
TRAFFIC = frozenset({1009, 1010, 1011, 1012})
NVML_PROFILES_FROM = 9  # compute capability of Hopper, from which NVML reports activities itself (gpm.py)

SLOWDOWN_LIMIT = 859
LINK_STATE = 870
LINK_STATES = {0: "off", 1: "safe", 2: "active", 3: "error"}
LINK_ERRORS = {each.id: each.labels[0] for each in _table("link_errors")}
