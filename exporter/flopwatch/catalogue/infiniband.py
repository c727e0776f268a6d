"""InfiniBand, RoCE and EFA ports: sysfs."""

from flopwatch.catalogue.row import PORT, Metric

INFINIBAND_INFO = Metric(
    "infiniband_info", "info", "Identity of one port.",
    (*PORT, "host", "board_id", "firmware_version", "hca_type", "link_layer", "net_device", "role", "rail"),
    "/sys/class/infiniband/D/{board_id,fw_ver,hca_type}, ports/P/link_layer; role and rail from the PCI topology",
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
INFINIBAND_EXPECTED_RATE = Metric(
    "infiniband_port_expected_rate_bytes_per_second", "gauge",
    "Highest rate this port was seen to have, kept across restarts, or the rate expected of the node.", PORT,
    "persisted baseline, Gb/s", scale=1e9 / 8,
)
INFINIBAND_FLAPS = Metric(
    "infiniband_link_flaps_total", "counter", "Times the link was down for at least 25 s and came back.", PORT,
    "ports/P/state over time",
)
INFINIBAND_FLAPPING = Metric(
    "infiniband_link_flapping", "gauge",
    "1 from the third flap within 12 h until none came for the hold-down time or it was cleared by hand.", PORT,
    "ports/P/state over time",
)
INFINIBAND_GPU_AFFINITY = Metric(
    "infiniband_gpu_affinity_info", "info",
    "The ports nearest to a GPU: PIX one switch, PXB several switches, PHB host bridge, NODE one socket, SYS across.",
    (*PORT, "gpu", "uuid", "affinity"), "/sys/bus/pci paths of port and GPU",
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
