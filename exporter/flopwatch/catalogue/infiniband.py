"""InfiniBand, RoCE and EFA ports, read from sysfs.

The rows of counters are in data/port_counters.csv, with their files and the width of the register. PortCounters of the
InfiniBand specification stick at their highest value, the 32-bit ones in hw_counters/ wrap (mlx5 driver, `counters.c`).
Over budget, the last rows are dropped first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flopwatch.catalogue.row import PORT, Metric, counter, gauge, info
from flopwatch.catalogue.xid import read_table


@dataclass(frozen=True, slots=True)
class PortCounter(Metric):
    """Counter of a port in sysfs, below the port's folder, or the device's for files that begin with `device/`.

    `files` are the names that different drivers use; with a third label each file is a series. A register of `bits`
    bits `sticks` at its highest value or wraps. A `quiet` counter has no series before its first event, so that a
    healthy port stays within its budget. Files in `words` count 4-byte words. Files in `legacy` have 32 bits that stick
    on an adapter without extended counters (mlx4, ConnectX-2 and older).
    """

    files: tuple[str, ...] = ()
    bits: int = 64
    sticks: bool = False
    quiet: bool = False
    words: tuple[str, ...] = ()
    legacy: tuple[str, ...] = ()


def _port_counter(fields: Mapping[str, str]) -> PortCounter:
    """Return the row of a port's counter from a row of the table.

    Its register has `sticks` bits and sticks at its highest value, or has `wraps` bits and wraps, or has 64. HELP gets
    a sentence about that and about `quiet`. The source is the list of files.
    """
    text, sticks, wraps = fields["help"], int(fields["sticks"] or 0), int(fields["wraps"] or 0)
    files, label, words, legacy = (tuple(fields[name].split()) for name in ("files", "label", "words", "legacy"))
    quiet, key = fields["quiet"] == "yes", fields["key"] == "yes"
    if sticks:
        text += f" Sticks at {2**sticks - 1}."
    elif wraps:
        text += f" The register wraps at 2^{wraps}, the counter does not."
    if quiet:
        text += " Absent before the first."
    labels, source, bits = (*PORT, *label), (", " if label else ", else ").join(files), sticks or wraps or 64
    own = files, bits, sticks > 0, quiet, words, legacy
    return PortCounter(fields["name"], "counter", text, labels, source, 1.0, key, *own)


# fmt: off
# A table: the formatter would print each argument of a row on a line of its own.

INFINIBAND_INFO = info("infiniband_info", "Identity of one port.",
    (*PORT, "host", "board_id", "firmware_version", "hca_type", "link_layer", "net_device", "role", "rail"),
    "/sys/class/infiniband/D/{board_id,fw_ver,hca_type}, ports/P/link_layer; role and rail from the PCI topology")
INFINIBAND_PORT_PRESENT = gauge("infiniband_port_present",
    "1 if the port is in /sys, 0 if it is in this host's inventory and is gone. Absent while its adapter belongs "
    "to a container or a virtual machine.", PORT,
    "/sys/class/infiniband and /sys/bus/pci against the persisted inventory")
INFINIBAND_PORT_STATE_ID = gauge("infiniband_port_state_id",
    "Logical state: 0 none, 1 down, 2 init (no subnet manager), 3 armed, 4 active, 5 active-defer. On EFA 4 if the "
    "net device is up, 1 if it is down.", PORT, "ports/P/state; net device operstate on EFA", key=True)
INFINIBAND_PORT_PHYSICAL_STATE_ID = gauge("infiniband_port_physical_state_id",
    "Physical state: 1 sleep, 2 polling (no signal), 3 disabled, 4 training, 5 link up, 6 error recovery, 7 test.",
    PORT, "ports/P/phys_state")
INFINIBAND_PORT_RATE_BYTES_PER_SECOND = gauge("infiniband_port_rate_bytes_per_second",
    "Active speed times width, in each direction.", PORT, "ports/P/rate, Gb/s", scale=1e9 / 8)
INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND = gauge("infiniband_port_expected_rate_bytes_per_second",
    "Highest rate of this port while active, kept across restarts.", PORT,
    "ports/P/rate over time, STATE/port_history.json, Gb/s", scale=1e9 / 8)
INFINIBAND_LINK_FLAPS_TOTAL = counter("infiniband_link_flaps_total",
    "Times the link was down for at least 25 s and came back.", PORT, "ports/P/state over time")
INFINIBAND_LINK_OUTAGES_TOTAL = counter("infiniband_link_outages_total",
    "Times the link, active before, stayed down for 4 minutes.", PORT, "ports/P/state over time")
INFINIBAND_LINK_FLAPPING = gauge("infiniband_link_flapping",
    "1 from the third flap within 12 h, until an hour passes without a flap or the file STATE/clear-flaps is created.",
    PORT, "ports/P/state over time")
INFINIBAND_GPU_AFFINITY_INFO = info("infiniband_gpu_affinity_info",
    "Ports nearest to a GPU: PIX one switch, PXB several switches, PHB host bridge, NODE one socket, SYS across.",
    (*PORT, "gpu", "uuid", "affinity"), "/sys/bus/pci paths of port and GPU")
INFINIBAND_PORT_UNREAD_FILES = gauge("infiniband_port_unread_files",
    "Counter files of the port that are not read, because the firmware refused them or three of their kind "
    "(EINVAL, ENXIO) and the kernel logs each try. Retried within an hour. Ports that the fabric manager owns "
    "refuse all files.", PORT, "errno of reading ports/P")
INFINIBAND_COUNTER_SATURATED = gauge("infiniband_counter_saturated",
    "1 for a counter stuck at its highest value until it is cleared (perfquery -R), which is 4294967295 for "
    "port_xmit_data and its like on adapters without 64-bit counters. Absent for others.", (*PORT, "counter"),
    "counters/ files against the widths of the InfiniBand specification")
INFINIBAND_PORT_LID = gauge("infiniband_port_lid",
    "Address assigned by the subnet manager, 0 or 65535 without one. Absent on RoCE.", PORT, "ports/P/lid")
INFINIBAND_PORT_SUBNET_MANAGER_LID = gauge("infiniband_port_subnet_manager_lid",
    "Address of the subnet manager. Changes when it fails over. Absent on RoCE.", PORT, "ports/P/sm_lid")
INFINIBAND_TEMPERATURE_CELSIUS = gauge("infiniband_temperature_celsius",
    "Temperature of the adapter (asic) and of its transceiver (Module0). A transceiver above 70 is at risk.",
    (*PORT, "sensor"), "device/hwmon/*/temp*_input, mlx5 from Linux 6.7, thousandths", scale=1e-3)
INFINIBAND_CARRIER_CHANGES_TOTAL = counter("infiniband_carrier_changes_total",
    "Times the port's net device lost or gained its carrier. Absent on InfiniBand.", PORT,
    "/sys/class/net/N/carrier_changes")
# fmt: on

# Rows of data/port_counters.csv, each under its name in capitals. The rows that other modules import are declared.
INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL: PortCounter
INFINIBAND_RECEIVE_DATA_BYTES_TOTAL: PortCounter
INFINIBAND_RECEIVE_PACKETS_TOTAL: PortCounter
INFINIBAND_SYMBOL_ERRORS_TOTAL: PortCounter
INFINIBAND_LINK_ERROR_RECOVERY_TOTAL: PortCounter
INFINIBAND_LINK_DOWNED_TOTAL: PortCounter
INFINIBAND_RECEIVE_ERRORS_TOTAL: PortCounter
INFINIBAND_LOCAL_LINK_INTEGRITY_ERRORS_TOTAL: PortCounter
INFINIBAND_TRANSMIT_WAIT_TICKS_TOTAL: PortCounter
INFINIBAND_TRANSMIT_DISCARDS_TOTAL: PortCounter
INFINIBAND_INVARIANT_CRC_ERRORS_TOTAL: PortCounter
globals().update({row.name.upper(): row for row in map(_port_counter, read_table("port_counters.csv"))})
