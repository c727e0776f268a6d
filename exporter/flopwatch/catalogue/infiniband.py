"""InfiniBand, RoCE and EFA ports: sysfs.

A counter's row names the files it is read from and how wide the register behind them is: PortCounters of the
InfiniBand specification stick at their highest value, the 32-bit ones in hw_counters/ wrap (mlx5 driver, `counters.c`).
Over budget the last rows of this file are left out first.
"""

from dataclasses import dataclass

from flopwatch.catalogue.row import PORT, Metric


@dataclass(frozen=True, slots=True)
class PortCounter(Metric):
    """A counter of a port, below its folder in sysfs, or below its device's for files that begin with `device/`.

    `files` are different drivers' names for one number; with a third label, each is a series of its own. A register of
    `bits` bits `sticks` at its highest value or wraps. A `quiet` one has no series before the first event, so that a
    healthy port stays within its budget.
    """

    files: tuple[str, ...] = ()
    bits: int = 64
    sticks: bool = False
    quiet: bool = False


INFINIBAND_INFO = Metric(
    "infiniband_info",
    "info",
    "Identity of one port.",
    (*PORT, "host", "board_id", "firmware_version", "hca_type", "link_layer", "net_device", "role", "rail"),
    "/sys/class/infiniband/D/{board_id,fw_ver,hca_type}, ports/P/link_layer; role and rail from the PCI topology",
)
INFINIBAND_PRESENT = Metric(
    "infiniband_port_present",
    "gauge",
    "1 if the port is in /sys, 0 if it is in this node's inventory and is gone. No series while its adapter serves a "
    "container or a virtual machine.",
    PORT,
    "/sys/class/infiniband and /sys/bus/pci against the persisted inventory",
)
INFINIBAND_STATE = Metric(
    "infiniband_port_state_id",
    "gauge",
    "Logical state: 0 none, 1 down, 2 init (no subnet manager), 3 armed, 4 active, 5 active-defer. On EFA the net "
    "device's: up is 4, down is 1.",
    PORT,
    "ports/P/state; net device operstate on EFA",
    key=True,
)
INFINIBAND_PHYSICAL_STATE = Metric(
    "infiniband_port_physical_state_id",
    "gauge",
    "Physical state: 1 sleep, 2 polling (no signal), 3 disabled, 4 training, 5 link up, 6 error recovery, 7 test.",
    PORT,
    "ports/P/phys_state",
)
INFINIBAND_RATE = Metric(
    "infiniband_port_rate_bytes_per_second",
    "gauge",
    "Active speed times width, in each direction.",
    PORT,
    "ports/P/rate, Gb/s",
    scale=1e9 / 8,
)
INFINIBAND_EXPECTED_RATE = Metric(
    "infiniband_port_expected_rate_bytes_per_second",
    "gauge",
    "Highest rate this port was seen to have while active, kept across restarts.",
    PORT,
    "ports/P/rate over time, STATE/port_history.json, Gb/s",
    scale=1e9 / 8,
)
INFINIBAND_FLAPS = Metric(
    "infiniband_link_flaps_total",
    "counter",
    "Times the link was down for at least 25 s and came back.",
    PORT,
    "ports/P/state over time",
)
INFINIBAND_DROPS = Metric(
    "infiniband_link_drops_total",
    "counter",
    "Times the link, active before, stayed down for 4 minutes.",
    PORT,
    "ports/P/state over time",
)
INFINIBAND_FLAPPING = Metric(
    "infiniband_link_flapping",
    "gauge",
    "1 from the third flap within 12 h until none came for an hour, or the file STATE/clear-flaps was made.",
    PORT,
    "ports/P/state over time",
)
INFINIBAND_GPU_AFFINITY = Metric(
    "infiniband_gpu_affinity_info",
    "info",
    "The ports nearest to a GPU: PIX one switch, PXB several switches, PHB host bridge, NODE one socket, SYS across.",
    (*PORT, "gpu", "uuid", "affinity"),
    "/sys/bus/pci paths of port and GPU",
)
INFINIBAND_REFUSED = Metric(
    "infiniband_port_refused_files",
    "gauge",
    "Files of the port that are left alone for up to an hour, since the firmware refused them (EINVAL, ENXIO), or the "
    "first three of their kind, and the kernel logs each try. Ports that the fabric manager owns refuse them all.",
    PORT,
    "errno of reading ports/P",
)
INFINIBAND_SATURATED = Metric(
    "infiniband_counter_saturated",
    "gauge",
    "1 for a counter stuck at its highest value: it counts no more until it is cleared (perfquery -R). Else no series. "
    "Of port_xmit_data and its like on adapters without 64-bit counters that is 4294967295.",
    (*PORT, "counter"),
    "counters/ files against the widths of the InfiniBand specification",
)
INFINIBAND_LID = Metric(
    "infiniband_port_lid",
    "gauge",
    "Address given by the subnet manager; 0 or 65535 on a port without one. Not RoCE.",
    PORT,
    "ports/P/lid",
)
INFINIBAND_SM_LID = Metric(
    "infiniband_port_subnet_manager_lid",
    "gauge",
    "Address of the subnet manager; another one after it failed over. Not RoCE.",
    PORT,
    "ports/P/sm_lid",
)
INFINIBAND_TEMPERATURE = Metric(
    "infiniband_temperature_celsius",
    "gauge",
    "Temperature of the adapter (asic) and of its transceiver (Module0). Above 70 the transceiver is at risk.",
    (*PORT, "sensor"),
    "device/hwmon/*/temp*_input, mlx5 from Linux 6.7, thousandths",
    scale=1e-3,
)
INFINIBAND_CARRIER_CHANGES = Metric(
    "infiniband_carrier_changes_total",
    "counter",
    "Times the port's net device lost or gained its carrier. Not InfiniBand.",
    PORT,
    "/sys/class/net/N/carrier_changes",
)


def _counter(
    name: str,
    text: str,
    *files: str,
    bits: int = 64,
    sticks: bool = False,
    quiet: bool = False,
    key: bool = False,
    label: tuple[str, ...] = (),
) -> PortCounter:
    if sticks:
        text += f" Sticks at {2**bits - 1}."
    elif bits < 64:
        text += f" The register wraps at 2^{bits}; this does not."
    if quiet:
        text += " No series before the first."
    source = (", " if label else ", else ").join(files)
    return PortCounter(
        f"infiniband_{name}_total",
        "counter",
        text,
        (*PORT, *label),
        source,
        key=key,
        files=files,
        bits=bits,
        sticks=sticks,
        quiet=quiet,
    )


# Traffic.

INFINIBAND_TRANSMIT_DATA = _counter(
    "transmit_data_bytes",
    "Bytes sent; the file counts 4-byte words, EFA's bytes.",
    "counters/port_xmit_data",
    "counters_ext/port_xmit_data_64",
    "hw_counters/tx_bytes",
    key=True,
)
INFINIBAND_RECEIVE_DATA = _counter(
    "receive_data_bytes",
    "Bytes received; the file counts 4-byte words, EFA's bytes.",
    "counters/port_rcv_data",
    "counters_ext/port_rcv_data_64",
    "hw_counters/rx_bytes",
)
INFINIBAND_TRANSMIT_PACKETS = _counter(
    "transmit_packets",
    "Packets sent.",
    "counters/port_xmit_packets",
    "counters_ext/port_xmit_packets_64",
    "hw_counters/tx_pkts",
)
INFINIBAND_RECEIVE_PACKETS = _counter(
    "receive_packets",
    "Packets received.",
    "counters/port_rcv_packets",
    "counters_ext/port_rcv_packets_64",
    "hw_counters/rx_pkts",
)

# The link.

INFINIBAND_SYMBOL_ERRORS = _counter(
    "symbol_errors",
    "Errors on the wire that the code could not correct.",
    "counters/symbol_error",
    bits=16,
    sticks=True,
    key=True,
)
INFINIBAND_LINK_RECOVERY = _counter(
    "link_error_recovery",
    "Times the link retrained and came back.",
    "counters/link_error_recovery",
    bits=8,
    sticks=True,
)
INFINIBAND_LINK_DOWNED = _counter(
    "link_downed",
    "Times the link failed to come back by itself.",
    "counters/link_downed",
    bits=8,
    sticks=True,
    key=True,
)
INFINIBAND_RECEIVE_ERRORS = _counter(
    "receive_errors", "Packets received broken.", "counters/port_rcv_errors", bits=16, sticks=True
)
INFINIBAND_RECEIVE_REMOTE_ERRORS = _counter(
    "receive_remote_physical_errors",
    "Packets marked bad further up: the fault is on another hop.",
    "counters/port_rcv_remote_physical_errors",
    bits=16,
    sticks=True,
)
INFINIBAND_LINK_INTEGRITY = _counter(
    "local_link_integrity_errors",
    "Times local physical errors passed their limit.",
    "counters/local_link_integrity_errors",
    bits=4,
    sticks=True,
)
INFINIBAND_BUFFER_OVERRUN = _counter(
    "excessive_buffer_overrun_errors",
    "Consecutive flow-control periods with an overrun.",
    "counters/excessive_buffer_overrun_errors",
    bits=4,
    sticks=True,
)
INFINIBAND_ACK_TIMEOUTS = _counter(
    "local_ack_timeouts", "Acknowledgements that never came: a dead path.", "hw_counters/local_ack_timeout_err", bits=32
)
INFINIBAND_TRANSPORT_RETRIES_EXCEEDED = _counter(
    "transport_retries_exceeded",
    "Queue pairs given up after all retries; the job aborts (NCCL status 12).",
    "hw_counters/req_transport_retries_exceeded",
    bits=32,
)

# Congestion, and the receiver.

INFINIBAND_TRANSMIT_WAIT = _counter(
    "transmit_wait_ticks",
    "Ticks with data to send and no credit. The tick is device specific: compare rails, never alert alone.",
    "counters/port_xmit_wait",
    bits=32,
    sticks=True,
)
INFINIBAND_TRANSMIT_DISCARDS = _counter(
    "transmit_discards", "Packets dropped before sending.", "counters/port_xmit_discards", bits=16, sticks=True
)
INFINIBAND_RECEIVE_DISCARDS = _counter(
    "receive_discards",
    "Packets dropped on arrival: port down or congested (mlx4), or no room (EFA).",
    "counters/port_rcv_discards",
    "hw_counters/rx_drops",
)
INFINIBAND_OUT_OF_BUFFER = _counter(
    "out_of_buffer", "Packets dropped because the host posted no receive buffer.", "hw_counters/out_of_buffer", bits=32
)
INFINIBAND_OUT_OF_SEQUENCE = _counter(
    "out_of_sequence",
    "Packets received out of order: loss, or adaptive routing.",
    "hw_counters/out_of_sequence",
    bits=32,
)
INFINIBAND_PACKET_SEQUENCE_ERRORS = _counter(
    "packet_sequence_errors",
    "Negative acknowledgements received for lost packets.",
    "hw_counters/packet_seq_err",
    bits=32,
)
INFINIBAND_RNR_NAK_RETRIES = _counter(
    "rnr_nak_retries", "Retries because the peer was not ready to receive.", "hw_counters/rnr_nak_retry_err", bits=32
)
INFINIBAND_RNR_RETRIES_EXCEEDED = _counter(
    "rnr_retries_exceeded",
    "Queue pairs given up because the peer was never ready; look at the peer.",
    "hw_counters/req_rnr_retries_exceeded",
    bits=32,
)
INFINIBAND_CONGESTION_NOTIFICATIONS_HANDLED = _counter(
    "congestion_notifications_handled",
    "Congestion notifications this sender obeyed: it was slowed down. RoCE.",
    "hw_counters/rp_cnp_handled",
)
INFINIBAND_CONGESTION_NOTIFICATIONS_IGNORED = _counter(
    "congestion_notifications_ignored",
    "Congestion notifications ignored: DCQCN is off on this adapter. RoCE.",
    "hw_counters/rp_cnp_ignored",
)
INFINIBAND_CONGESTION_MARKED = _counter(
    "congestion_marked_packets",
    "Packets received with the congestion mark (ECN): switches are queueing. RoCE.",
    "hw_counters/np_ecn_marked_roce_packets",
)
INFINIBAND_CONGESTION_NOTIFICATIONS_SENT = _counter(
    "congestion_notifications_sent", "Congestion notifications this receiver sent. RoCE.", "hw_counters/np_cnp_sent"
)
INFINIBAND_IMPLIED_SEQUENCE_ERRORS = _counter(
    "implied_sequence_errors",
    "Acknowledgements beyond the expected number: packets were lost.",
    "hw_counters/implied_nak_seq_err",
    bits=32,
)
INFINIBAND_DUPLICATE_REQUESTS = _counter(
    "duplicate_requests", "Requests seen before: acknowledgements were lost.", "hw_counters/duplicate_request", bits=32
)
INFINIBAND_VL15_DROPPED = _counter(
    "vl15_dropped", "Management packets dropped for want of buffers.", "counters/VL15_dropped", bits=16, sticks=True
)

# Jobs that end.

INFINIBAND_REQUESTER_ERRORS = _counter(
    "requester_errors", "Requests that completed with an error: a failing job.", "hw_counters/req_cqe_error", bits=32
)
INFINIBAND_RESPONDER_ERRORS = _counter(
    "responder_errors", "Responses that completed with an error: a failing job.", "hw_counters/resp_cqe_error", bits=32
)
INFINIBAND_REQUESTER_FLUSHES = _counter(
    "requester_flushes",
    "Requests flushed when a queue pair was closed: normal at the end of a job.",
    "hw_counters/req_cqe_flush_error",
    bits=32,
)
INFINIBAND_RESPONDER_FLUSHES = _counter(
    "responder_flushes",
    "Responses flushed when a queue pair was closed: normal at the end of a job.",
    "hw_counters/resp_cqe_flush_error",
    bits=32,
)

# EFA.

INFINIBAND_RETRANSMITTED_DATA = _counter(
    "retransmitted_bytes", "Bytes sent again (EFA, Nitro v4 and later).", "hw_counters/retrans_bytes"
)
INFINIBAND_RETRANSMITTED_PACKETS = _counter(
    "retransmitted_packets", "Packets sent again (EFA, Nitro v4 and later).", "hw_counters/retrans_pkts"
)
INFINIBAND_RETRANSMIT_TIMEOUTS = _counter(
    "retransmit_timeouts",
    "Retransmissions for want of an acknowledgement: path loss (EFA).",
    "hw_counters/retrans_timeout_events",
)
INFINIBAND_IMPAIRED_CONNECTIONS = _counter(
    "impaired_connections", "Connections marked impaired (EFA).", "hw_counters/impaired_remote_conn_events"
)
INFINIBAND_UNRESPONSIVE_PEERS = _counter(
    "unresponsive_peers",
    "Peers that stopped answering (EFA): look at the peer.",
    "hw_counters/unresponsive_remote_events",
)
INFINIBAND_RDMA_READ_ERRORS = _counter(
    "rdma_read_errors", "RDMA reads that failed (EFA).", "hw_counters/rdma_read_wr_err"
)
INFINIBAND_RDMA_WRITE_ERRORS = _counter(
    "rdma_write_errors", "RDMA writes that failed (EFA).", "hw_counters/rdma_write_wr_err"
)
INFINIBAND_COMMANDS_SUBMITTED = _counter(
    "commands_submitted", "Commands given to the adapter (EFA).", "device/hw_counters/submitted_cmds"
)
INFINIBAND_COMMANDS_COMPLETED = _counter(
    "commands_completed", "Commands the adapter completed (EFA).", "device/hw_counters/completed_cmds"
)
INFINIBAND_COMMANDS_LOST = _counter(
    "commands_lost", "Commands the adapter never completed (EFA).", "device/hw_counters/no_completion_cmds"
)
INFINIBAND_COMMAND_ERRORS = _counter("command_errors", "Commands that failed (EFA).", "device/hw_counters/cmds_err")
INFINIBAND_KEEP_ALIVES = _counter(
    "keep_alives", "Signs of life of the adapter (EFA): it hangs if they stop.", "device/hw_counters/keep_alive_rcvd"
)
INFINIBAND_OPERATION_ERRORS = _counter(
    "operation_errors",
    "Resources the adapter did not give (EFA): a rise at a job's start explains a failed launch.",
    *(
        f"device/hw_counters/{operation}_err"
        for operation in ("alloc_pd", "alloc_ucontext", "create_ah", "create_cq", "create_qp", "mmap", "reg_mr")
    ),
    label=("operation",),
)
INFINIBAND_EFA_SENT = _counter("efa_sent_bytes", "Bytes by send requests (EFA).", "hw_counters/send_bytes")
INFINIBAND_EFA_RECEIVED = _counter("efa_received_bytes", "Bytes by receive requests (EFA).", "hw_counters/recv_bytes")
INFINIBAND_EFA_READ = _counter("efa_read_bytes", "Bytes fetched by RDMA reads (EFA).", "hw_counters/rdma_read_bytes")
INFINIBAND_EFA_READ_RESPONSE = _counter(
    "efa_read_response_bytes", "Bytes served to RDMA reads of peers (EFA).", "hw_counters/rdma_read_resp_bytes"
)
INFINIBAND_EFA_WRITTEN = _counter("efa_written_bytes", "Bytes written to peers (EFA).", "hw_counters/rdma_write_bytes")
INFINIBAND_EFA_WRITE_RECEIVED = _counter(
    "efa_write_received_bytes", "Bytes written here by peers (EFA).", "hw_counters/rdma_write_recv_bytes"
)
INFINIBAND_EFA_SEND_REQUESTS = _counter("efa_send_requests", "Send requests (EFA).", "hw_counters/send_wrs")
INFINIBAND_EFA_RECEIVE_REQUESTS = _counter("efa_receive_requests", "Receive requests (EFA).", "hw_counters/recv_wrs")
INFINIBAND_EFA_READ_REQUESTS = _counter("efa_read_requests", "RDMA read requests (EFA).", "hw_counters/rdma_read_wrs")
INFINIBAND_EFA_WRITE_REQUESTS = _counter(
    "efa_write_requests", "RDMA write requests (EFA).", "hw_counters/rdma_write_wrs"
)

# Traffic by kind.

INFINIBAND_WRITE_REQUESTS = _counter(
    "received_write_requests", "RDMA writes received.", "hw_counters/rx_write_requests", bits=32
)
INFINIBAND_READ_REQUESTS = _counter(
    "received_read_requests", "RDMA reads received.", "hw_counters/rx_read_requests", bits=32
)
INFINIBAND_UNICAST_TRANSMIT = _counter(
    "transmit_unicast_packets",
    "Unicast packets sent.",
    "counters/unicast_xmit_packets",
    "counters_ext/port_unicast_xmit_packets",
)
INFINIBAND_UNICAST_RECEIVE = _counter(
    "receive_unicast_packets",
    "Unicast packets received.",
    "counters/unicast_rcv_packets",
    "counters_ext/port_unicast_rcv_packets",
)
INFINIBAND_MULTICAST_TRANSMIT = _counter(
    "transmit_multicast_packets",
    "Multicast packets sent.",
    "counters/multicast_xmit_packets",
    "counters_ext/port_multicast_xmit_packets",
)
INFINIBAND_MULTICAST_RECEIVE = _counter(
    "receive_multicast_packets",
    "Multicast packets received.",
    "counters/multicast_rcv_packets",
    "counters_ext/port_multicast_rcv_packets",
)

# What a healthy port never counts.

INFINIBAND_TRANSMIT_CONSTRAINT = _counter(
    "transmit_constraint_errors",
    "Packets not sent because of a partition or raw filter.",
    "counters/port_xmit_constraint_errors",
    bits=8,
    sticks=True,
    quiet=True,
)
INFINIBAND_RECEIVE_CONSTRAINT = _counter(
    "receive_constraint_errors",
    "Packets refused by a partition or raw filter.",
    "counters/port_rcv_constraint_errors",
    bits=8,
    sticks=True,
    quiet=True,
)
INFINIBAND_ADAPTIVE_RETRANSMISSIONS = _counter(
    "adaptive_retransmissions", "Adaptive retransmissions. RoCE.", "hw_counters/roce_adp_retrans", bits=32, quiet=True
)
INFINIBAND_ADAPTIVE_RETRANSMISSION_TIMEOUTS = _counter(
    "adaptive_retransmission_timeouts",
    "Adaptive retransmissions after a timeout: loss. RoCE.",
    "hw_counters/roce_adp_retrans_to",
    bits=32,
    quiet=True,
)
INFINIBAND_SLOW_RESTARTS = _counter(
    "slow_restarts", "Slow restarts after loss. RoCE.", "hw_counters/roce_slow_restart", bits=32, quiet=True
)
INFINIBAND_SLOW_RESTART_TRANSITIONS = _counter(
    "slow_restart_transitions",
    "Transitions into slow restart. RoCE.",
    "hw_counters/roce_slow_restart_trans",
    bits=32,
    quiet=True,
)
INFINIBAND_SLOW_RESTART_NOTIFICATIONS = _counter(
    "slow_restart_notifications",
    "Congestion notifications caused by slow restart. RoCE.",
    "hw_counters/roce_slow_restart_cnps",
    bits=32,
    quiet=True,
)
INFINIBAND_CORRUPT_PACKETS = _counter(
    "invariant_crc_errors",
    "Packets with a bad invariant CRC: corruption on the path. RoCE.",
    "hw_counters/rx_icrc_encapsulated",
    quiet=True,
)
INFINIBAND_LENGTH_ERRORS = _counter(
    "responder_length_errors", "Requests of a wrong length.", "hw_counters/resp_local_length_error", bits=32, quiet=True
)
INFINIBAND_REMOTE_ACCESS_ERRORS = _counter(
    "requester_remote_access_errors",
    "Requests whose memory access the peer refused.",
    "hw_counters/req_remote_access_errors",
    bits=32,
    quiet=True,
)
INFINIBAND_ACCESS_ERRORS = _counter(
    "responder_remote_access_errors",
    "Memory accesses of peers that this host refused.",
    "hw_counters/resp_remote_access_errors",
    bits=32,
    quiet=True,
)
INFINIBAND_INVALID_REQUESTS = _counter(
    "requester_remote_invalid_requests",
    "Requests that the peer refused as invalid.",
    "hw_counters/req_remote_invalid_request",
    bits=32,
    quiet=True,
)
INFINIBAND_RELAY_ERRORS = _counter(
    "receive_switch_relay_errors",
    "Packets a switch could not forward; on hosts multicast heard again.",
    "counters/port_rcv_switch_relay_errors",
    bits=16,
    sticks=True,
    quiet=True,
)
INFINIBAND_ATOMIC_REQUESTS = _counter(
    "received_atomic_requests", "RDMA atomics received.", "hw_counters/rx_atomic_requests", bits=32, quiet=True
)
INFINIBAND_DYNAMIC_CONNECTS = _counter(
    "received_dynamic_connects",
    "Connection requests for dynamically connected targets.",
    "hw_counters/rx_dct_connect",
    bits=32,
    quiet=True,
)

# Optional counters, off unless `rdma statistic` turns them on; in sysfs only with some drivers.

INFINIBAND_OPTIONAL_MARKED = _counter(
    "optional_congestion_marked_packets",
    "Congestion-marked packets received, optional counter.",
    "hw_counters/cc_rx_ce_pkts",
    quiet=True,
)
INFINIBAND_OPTIONAL_NOTIFICATIONS_RECEIVED = _counter(
    "optional_congestion_notifications_received",
    "Congestion notifications received, optional counter.",
    "hw_counters/cc_rx_cnp_pkts",
    quiet=True,
)
INFINIBAND_OPTIONAL_NOTIFICATIONS_SENT = _counter(
    "optional_congestion_notifications_sent",
    "Congestion notifications sent, optional counter.",
    "hw_counters/cc_tx_cnp_pkts",
    quiet=True,
)
INFINIBAND_RDMA_TRANSMIT_PACKETS = _counter(
    "rdma_transmit_packets", "RDMA packets sent, optional counter.", "hw_counters/rdma_tx_packets", quiet=True
)
INFINIBAND_RDMA_TRANSMIT_DATA = _counter(
    "rdma_transmit_bytes", "RDMA bytes sent, optional counter.", "hw_counters/rdma_tx_bytes", quiet=True
)
INFINIBAND_RDMA_RECEIVE_PACKETS = _counter(
    "rdma_receive_packets", "RDMA packets received, optional counter.", "hw_counters/rdma_rx_packets", quiet=True
)
INFINIBAND_RDMA_RECEIVE_DATA = _counter(
    "rdma_receive_bytes", "RDMA bytes received, optional counter.", "hw_counters/rdma_rx_bytes", quiet=True
)
