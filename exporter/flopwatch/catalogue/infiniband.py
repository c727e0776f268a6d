"""Rows of InfiniBand, RoCE and EFA ports, read from sysfs.

The row of a counter has its files and the width of its register. PortCounters of the InfiniBand specification stick at
their highest value. 32-bit registers in hw_counters/ wrap (mlx5 driver, `counters.c`).
"""

from dataclasses import dataclass

from flopwatch.catalogue.row import PORT, Metric, counter, gauge, info, sparse


@dataclass(frozen=True, slots=True)
class PortCounter(Metric):
    """Row of a counter whose files are in the port's sysfs folder, or in the device's (`device/...`)."""

    files: tuple[str, ...] = ()  # names that different drivers use, or with a third label one file per series
    bits: int = 64  # width of the register
    sticks: bool = False  # at the highest value of the register, which else wraps
    quiet: bool = False  # no series before the first event, so that a healthy port stays within its series budget
    words: tuple[str, ...] = ()  # files that count 4-byte words
    legacy: tuple[str, ...] = ()  # files with 32 bits that stick without extended counters (mlx4, ConnectX-2 and older)
    roce: bool = True  # False: Ethernet has no such event, and mlx5 always returns 0 on a RoCE port


def port_counter(
    name: str,
    text: str,
    *files: str,
    sticks: int = 0,
    wraps: int = 0,
    quiet: bool = False,
    key: bool = False,
    label: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    legacy: tuple[str, ...] = (),
    roce: bool = True,
) -> PortCounter:
    """Return the row of a port's counter.

    Its register has `sticks` bits and sticks at its highest value, has `wraps` bits and wraps, or has 64 bits. HELP
    gets a sentence about the register, `quiet` and `roce`. The source lists the files.
    """
    if sticks:
        text += f" Sticks at {2**sticks - 1}."
    elif wraps:
        text += f" The register wraps at 2^{wraps}, the counter does not."
    if quiet:
        text += " Absent before the first event."
    if not roce:
        text += " Absent on RoCE."
    source = (", " if label else ", else ").join(files)
    bits = sticks or wraps or 64
    labels = (*PORT, *label)
    return PortCounter(
        name, text, labels, source, files, bits, sticks > 0, quiet, words, legacy, roce, type="counter", key=key
    )


# fmt: off
INFINIBAND_INFO = info("infiniband_info", "Identity of one port.",
    (*PORT, "host", "board_id", "firmware_version", "hca_type", "link_layer", "net_device", "role", "rail"),
    "/sys/class/infiniband/D/{board_id,fw_ver,hca_type}, ports/P/link_layer; role and rail from the PCI topology")
INFINIBAND_PORT_PRESENT = gauge("infiniband_port_present",
    "1 if the port is in /sys, 0 if it is in this host's inventory and is gone. Absent while its adapter belongs to a "
    "container or a virtual machine.", PORT, "/sys/class/infiniband and /sys/bus/pci against the persisted inventory")
INFINIBAND_PORT_STATE_ID = gauge("infiniband_port_state_id",
    "Logical state of the port: 0 none, 1 down, 2 init (no subnet manager), 3 armed, 4 active, 5 active-defer. On EFA "
    "4 if the net device is up, 1 if it is down.", PORT, "ports/P/state; net device operstate on EFA", key=True)
INFINIBAND_PORT_PHYSICAL_STATE_ID = gauge("infiniband_port_physical_state_id", "Physical state of the port: 1 sleep, 2 "
    "polling (no signal), 3 disabled, 4 training, 5 link up, 6 error recovery, 7 test.", PORT, "ports/P/phys_state")
INFINIBAND_PORT_RATE_BYTES_PER_SECOND = gauge("infiniband_port_rate_bytes_per_second",
    "Rate of the port in each direction: active speed times width.", PORT, "ports/P/rate, Gb/s", scale=1e9 / 8)
INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND = gauge("infiniband_port_expected_rate_bytes_per_second",
    "Highest rate that this port had while active, kept across restarts of the exporter.", PORT,
    "ports/P/rate over time, STATE/port_history.json, Gb/s", scale=1e9 / 8)
INFINIBAND_LINK_FLAPS_TOTAL = counter("infiniband_link_flaps_total",
    "Times the port's link was down for at least 25 s and came up again.", PORT, "ports/P/state over time")
INFINIBAND_LINK_OUTAGES_TOTAL = counter("infiniband_link_outages_total",
    "Times the port's link had been active and then stayed down for 4 minutes.", PORT, "ports/P/state over time")
INFINIBAND_LINK_FLAPPING = gauge("infiniband_link_flapping", "1 from the third flap of the port's link within 12 h, "
    "until an hour passes without a flap or the file STATE/clear-flaps is created.", PORT, "ports/P/state over time")
INFINIBAND_GPU_AFFINITY_INFO = info("infiniband_gpu_affinity_info",
    "Ports nearest to a GPU by their PCI path: PIX one switch, PXB several switches, PHB host bridge, NODE one socket, "
    "SYS across sockets.", (*PORT, "gpu", "uuid", "affinity"), "/sys/bus/pci paths of port and GPU")
INFINIBAND_PORT_UNREAD_FILES = gauge("infiniband_port_unread_files", "Counter files of the port that are not read, "
    "because the firmware refused them or three files of their kind (EINVAL, ENXIO) and the kernel logs each try. "
    "Retried within an hour. Ports that the fabric manager owns refuse all files.", PORT, "errno of reading ports/P")
INFINIBAND_COUNTER_SATURATED = gauge("infiniband_counter_saturated",
    "1 for a counter stuck at its highest value until it is cleared (perfquery -R). That value is 4294967295 for "
    "port_xmit_data and its like on adapters without 64-bit counters. Absent for other counters.", (*PORT, "counter"),
    "counters/ files against the widths of the InfiniBand specification")
INFINIBAND_PORT_LID = gauge("infiniband_port_lid", "Address of the port (LID) assigned by the subnet manager, 0 or "
    "65535 without one. Absent on RoCE.", PORT, "ports/P/lid")
INFINIBAND_PORT_SUBNET_MANAGER_LID = gauge("infiniband_port_subnet_manager_lid",
    "Address (LID) of the subnet manager. Changes when the subnet manager fails over. Absent on RoCE.", PORT,
    "ports/P/sm_lid")
INFINIBAND_TEMPERATURE_CELSIUS = gauge("infiniband_temperature_celsius",
    "Temperature of the adapter (asic) and of its transceiver (Module0). A transceiver above 70 degrees is at risk.",
    (*PORT, "sensor"), "device/hwmon/*/temp*_input, mlx5 from Linux 6.7, thousandths", scale=1e-3)
INFINIBAND_CARRIER_CHANGES_TOTAL = counter("infiniband_carrier_changes_total", "Times the port's net device lost or "
    "gained its carrier. Absent on InfiniBand.", PORT, "/sys/class/net/N/carrier_changes")
# Statistics of the driver, RoCE alone.
INFINIBAND_PAUSE_FRAMES_TOTAL = counter("infiniband_pause_frames_total", "Pause frames of priority flow control (PFC) "
    "received or sent. RoCE. Absent before the first one.", (*PORT, "priority", "direction"),
    "ethtool -S, rx_prio0_pause (mlx5), rx_pfc_ena_frames_pri0 (bnxt_en)")
INFINIBAND_PAUSE_SECONDS_TOTAL = counter("infiniband_pause_seconds_total", "Time for which pauses received kept the "
    "port from sending on this priority, or pauses sent kept the switch from it. RoCE. Absent before the first one.",
    (*PORT, "priority", "direction"), "ethtool -S, rx_prio0_pause_duration (mlx5), pfc_pri0_rx_duration_us (bnxt_en)",
    scale=1e-6)
INFINIBAND_RECEIVE_CAPACITY_BYTES_TOTAL = counter("infiniband_receive_capacity_bytes_total", "Bytes that the port "
    "could have received, with or without traffic. RoCE.", PORT,
    "ethtool -S, rx_bits_phy (mlx5), rx_bits (bnxt_en)", scale=1 / 8)
INFINIBAND_CORRECTED_BIT_ERRORS_TOTAL = counter("infiniband_corrected_bit_errors_total", "Bits that forward error "
    "correction (FEC) corrected. RoCE.", PORT, "ethtool -S, rx_corrected_bits_phy (mlx5), rx_corrected_bits (bnxt_en)")
INFINIBAND_PCS_SYMBOL_ERRORS_TOTAL = counter("infiniband_pcs_symbol_errors_total", "Symbol errors that forward error "
    "correction (FEC) did not correct: traffic is lost. RoCE.", PORT,
    "ethtool -S, rx_pcs_symbol_err_phy (mlx5), rx_pcs_symbol_err (bnxt_en)")
# Traffic.
INFINIBAND_TRANSMIT_DATA_BYTES_TOTAL = port_counter("infiniband_transmit_data_bytes_total",
    "Bytes sent. Converted from 4-byte words, except on EFA.", "counters/port_xmit_data",
    "counters_ext/port_xmit_data_64", "hw_counters/tx_bytes", key=True,
    words=("counters/port_xmit_data", "counters_ext/port_xmit_data_64"), legacy=("counters/port_xmit_data",))
INFINIBAND_RECEIVE_DATA_BYTES_TOTAL = port_counter("infiniband_receive_data_bytes_total",
    "Bytes received. Converted from 4-byte words, except on EFA.", "counters/port_rcv_data",
    "counters_ext/port_rcv_data_64", "hw_counters/rx_bytes",
    words=("counters/port_rcv_data", "counters_ext/port_rcv_data_64"), legacy=("counters/port_rcv_data",))
INFINIBAND_TRANSMIT_PACKETS_TOTAL = port_counter("infiniband_transmit_packets_total", "Packets sent.",
    "counters/port_xmit_packets", "counters_ext/port_xmit_packets_64", "hw_counters/tx_pkts",
    legacy=("counters/port_xmit_packets",))
INFINIBAND_RECEIVE_PACKETS_TOTAL = port_counter("infiniband_receive_packets_total", "Packets received.",
    "counters/port_rcv_packets", "counters_ext/port_rcv_packets_64", "hw_counters/rx_pkts",
    legacy=("counters/port_rcv_packets",))
# The link.
INFINIBAND_SYMBOL_ERRORS_TOTAL = port_counter("infiniband_symbol_errors_total", "Errors on the wire "
    "that the link code could not correct.", "counters/symbol_error", sticks=16, key=True, roce=False)
INFINIBAND_LINK_ERROR_RECOVERY_TOTAL = port_counter("infiniband_link_error_recovery_total",
    "Times the link retrained and came back.", "counters/link_error_recovery", sticks=8, roce=False)
INFINIBAND_LINK_DOWNED_TOTAL = port_counter("infiniband_link_downed_total",
    "Times the link failed to recover by itself.", "counters/link_downed", sticks=8, key=True, roce=False)
INFINIBAND_RECEIVE_ERRORS_TOTAL = port_counter("infiniband_receive_errors_total", "Packets received with errors.",
    "counters/port_rcv_errors", sticks=16)
INFINIBAND_RECEIVE_REMOTE_PHYSICAL_ERRORS_TOTAL = port_counter("infiniband_receive_remote_physical_errors_total",
    "Packets marked bad upstream: the fault is on another hop.", "counters/port_rcv_remote_physical_errors", sticks=16,
    roce=False)
INFINIBAND_LOCAL_LINK_INTEGRITY_ERRORS_TOTAL = sparse(port_counter("infiniband_local_link_integrity_errors_total",
    "Times local physical errors exceeded their limit.", "counters/local_link_integrity_errors", sticks=4, roce=False))
INFINIBAND_EXCESSIVE_BUFFER_OVERRUN_ERRORS_TOTAL = sparse(port_counter(
    "infiniband_excessive_buffer_overrun_errors_total", "Consecutive flow-control periods with an overrun.",
    "counters/excessive_buffer_overrun_errors", sticks=4, roce=False))
INFINIBAND_LOCAL_ACK_TIMEOUTS_TOTAL = port_counter("infiniband_local_ack_timeouts_total",
    "Acknowledgements that did not arrive: a dead path.", "hw_counters/local_ack_timeout_err", wraps=32)
INFINIBAND_TRANSPORT_RETRIES_EXCEEDED_TOTAL = port_counter("infiniband_transport_retries_exceeded_total",
    "Queue pairs given up after all retries. The job aborts (NCCL status 12).",
    "hw_counters/req_transport_retries_exceeded", wraps=32)
# Congestion, and the receiver.
INFINIBAND_TRANSMIT_WAIT_TICKS_TOTAL = port_counter("infiniband_transmit_wait_ticks_total",
    "Ticks in which the port had data to send and no credit. The tick is device specific: compare rails, never alert "
    "alone.", "counters/port_xmit_wait", sticks=32)
INFINIBAND_TRANSMIT_DISCARDS_TOTAL = port_counter("infiniband_transmit_discards_total",
    "Packets dropped before sending.", "counters/port_xmit_discards", sticks=16)
INFINIBAND_RECEIVE_DISCARDS_TOTAL = port_counter("infiniband_receive_discards_total",
    "Packets dropped on arrival: port down or congested (mlx4), or no room (EFA).", "counters/port_rcv_discards",
    "hw_counters/rx_drops")
INFINIBAND_OUT_OF_BUFFER_TOTAL = port_counter("infiniband_out_of_buffer_total",
    "Packets dropped because the host posted no receive buffer.", "hw_counters/out_of_buffer", wraps=32)
INFINIBAND_OUT_OF_SEQUENCE_TOTAL = port_counter("infiniband_out_of_sequence_total",
    "Packets received out of order, because of loss or adaptive routing.", "hw_counters/out_of_sequence", wraps=32)
INFINIBAND_PACKET_SEQUENCE_ERRORS_TOTAL = port_counter("infiniband_packet_sequence_errors_total",
    "Negative acknowledgements received for lost packets.", "hw_counters/packet_seq_err", wraps=32)
INFINIBAND_RNR_NAK_RETRIES_TOTAL = port_counter("infiniband_rnr_nak_retries_total",
    "Retries because the peer was not ready to receive.", "hw_counters/rnr_nak_retry_err", wraps=32)
INFINIBAND_RNR_RETRIES_EXCEEDED_TOTAL = port_counter("infiniband_rnr_retries_exceeded_total", "Queue pairs given "
    "up because the peer was never ready: check the peer.", "hw_counters/req_rnr_retries_exceeded", wraps=32)
INFINIBAND_CONGESTION_NOTIFICATIONS_HANDLED_TOTAL = port_counter("infiniband_congestion_notifications_handled_total",
    "Congestion notifications this sender obeyed: it was slowed down. RoCE.", "hw_counters/rp_cnp_handled")
INFINIBAND_CONGESTION_NOTIFICATIONS_IGNORED_TOTAL = port_counter("infiniband_congestion_notifications_ignored_total",
    "Congestion notifications ignored: DCQCN is off on this adapter. RoCE.", "hw_counters/rp_cnp_ignored")
INFINIBAND_CONGESTION_MARKED_PACKETS_TOTAL = port_counter("infiniband_congestion_marked_packets_total",
    "Packets received with the congestion mark (ECN): switches are queueing. RoCE.",
    "hw_counters/np_ecn_marked_roce_packets")
INFINIBAND_CONGESTION_NOTIFICATIONS_SENT_TOTAL = port_counter("infiniband_congestion_notifications_sent_total",
    "Congestion notifications this receiver sent. RoCE.", "hw_counters/np_cnp_sent")
INFINIBAND_IMPLIED_SEQUENCE_ERRORS_TOTAL = port_counter("infiniband_implied_sequence_errors_total",
    "Acknowledgements beyond the expected number: packets were lost.", "hw_counters/implied_nak_seq_err", wraps=32)
INFINIBAND_DUPLICATE_REQUESTS_TOTAL = port_counter("infiniband_duplicate_requests_total",
    "Requests received a second time, because acknowledgements were lost.", "hw_counters/duplicate_request", wraps=32)
INFINIBAND_VL15_DROPPED_TOTAL = port_counter("infiniband_vl15_dropped_total",
    "Management packets dropped for lack of buffers.", "counters/VL15_dropped", sticks=16, roce=False)
# Errors that end jobs.
INFINIBAND_REQUESTER_ERRORS_TOTAL = port_counter("infiniband_requester_errors_total",
    "Requests that completed with an error: a failing job.", "hw_counters/req_cqe_error", wraps=32)
INFINIBAND_RESPONDER_ERRORS_TOTAL = port_counter("infiniband_responder_errors_total",
    "Responses that completed with an error: a failing job.", "hw_counters/resp_cqe_error", wraps=32)
INFINIBAND_REQUESTER_FLUSHES_TOTAL = port_counter("infiniband_requester_flushes_total", "Requests flushed when a "
    "queue pair was closed: normal at the end of a job.", "hw_counters/req_cqe_flush_error", wraps=32)
INFINIBAND_RESPONDER_FLUSHES_TOTAL = port_counter("infiniband_responder_flushes_total", "Responses flushed when "
    "a queue pair was closed: normal at the end of a job.", "hw_counters/resp_cqe_flush_error", wraps=32)
# EFA.
INFINIBAND_RETRANSMITTED_BYTES_TOTAL = port_counter("infiniband_retransmitted_bytes_total",
    "Bytes retransmitted (EFA, Nitro v4 and later).", "hw_counters/retrans_bytes")
INFINIBAND_RETRANSMITTED_PACKETS_TOTAL = port_counter("infiniband_retransmitted_packets_total",
    "Packets retransmitted (EFA, Nitro v4 and later).", "hw_counters/retrans_pkts")
INFINIBAND_RETRANSMIT_TIMEOUTS_TOTAL = port_counter("infiniband_retransmit_timeouts_total",
    "Retransmissions after a missing acknowledgement: path loss (EFA).", "hw_counters/retrans_timeout_events")
INFINIBAND_IMPAIRED_CONNECTIONS_TOTAL = port_counter("infiniband_impaired_connections_total",
    "Connections marked impaired (EFA).", "hw_counters/impaired_remote_conn_events")
INFINIBAND_UNRESPONSIVE_PEERS_TOTAL = port_counter("infiniband_unresponsive_peers_total",
    "Peers that stopped answering (EFA): check the peer.", "hw_counters/unresponsive_remote_events")
INFINIBAND_RDMA_READ_ERRORS_TOTAL = port_counter("infiniband_rdma_read_errors_total", "RDMA reads that failed (EFA).",
    "hw_counters/rdma_read_wr_err")
INFINIBAND_RDMA_WRITE_ERRORS_TOTAL = port_counter("infiniband_rdma_write_errors_total",
    "RDMA writes that failed (EFA).", "hw_counters/rdma_write_wr_err")
INFINIBAND_COMMANDS_SUBMITTED_TOTAL = port_counter("infiniband_commands_submitted_total",
    "Commands given to the adapter (EFA).", "device/hw_counters/submitted_cmds")
INFINIBAND_COMMANDS_COMPLETED_TOTAL = port_counter("infiniband_commands_completed_total",
    "Commands the adapter completed (EFA).", "device/hw_counters/completed_cmds")
INFINIBAND_COMMANDS_LOST_TOTAL = port_counter("infiniband_commands_lost_total",
    "Commands the adapter never completed (EFA).", "device/hw_counters/no_completion_cmds")
INFINIBAND_COMMAND_ERRORS_TOTAL = port_counter("infiniband_command_errors_total", "Commands that failed (EFA).",
    "device/hw_counters/cmds_err")
INFINIBAND_KEEP_ALIVES_TOTAL = port_counter("infiniband_keep_alives_total",
    "Keep-alives of the adapter (EFA). The adapter hangs if they stop.", "device/hw_counters/keep_alive_rcvd")
INFINIBAND_OPERATION_ERRORS_TOTAL = port_counter("infiniband_operation_errors_total",
    "Resources the adapter did not grant (EFA). A rise at a job's start explains a failed launch.",
    *(f"device/hw_counters/{operation}_err" for operation in ("alloc_pd", "alloc_ucontext", "create_ah", "create_cq",
    "create_qp", "mmap", "reg_mr")), label=("operation",))
INFINIBAND_EFA_SENT_BYTES_TOTAL = port_counter("infiniband_efa_sent_bytes_total", "Bytes sent by send requests (EFA).",
    "hw_counters/send_bytes")
INFINIBAND_EFA_RECEIVED_BYTES_TOTAL = port_counter("infiniband_efa_received_bytes_total",
    "Bytes received by receive requests (EFA).", "hw_counters/recv_bytes")
INFINIBAND_EFA_READ_BYTES_TOTAL = port_counter("infiniband_efa_read_bytes_total", "Bytes fetched by RDMA reads (EFA).",
    "hw_counters/rdma_read_bytes")
INFINIBAND_EFA_READ_RESPONSE_BYTES_TOTAL = port_counter("infiniband_efa_read_response_bytes_total",
    "Bytes served to RDMA reads of peers (EFA).", "hw_counters/rdma_read_resp_bytes")
INFINIBAND_EFA_WRITTEN_BYTES_TOTAL = port_counter("infiniband_efa_written_bytes_total",
    "Bytes written to peers by RDMA writes (EFA).", "hw_counters/rdma_write_bytes")
INFINIBAND_EFA_WRITE_RECEIVED_BYTES_TOTAL = port_counter("infiniband_efa_write_received_bytes_total",
    "Bytes written to this host by RDMA writes of peers (EFA).", "hw_counters/rdma_write_recv_bytes")
INFINIBAND_EFA_SEND_REQUESTS_TOTAL = port_counter("infiniband_efa_send_requests_total", "Send requests (EFA).",
    "hw_counters/send_wrs")
INFINIBAND_EFA_RECEIVE_REQUESTS_TOTAL = port_counter("infiniband_efa_receive_requests_total", "Receive requests (EFA).",
    "hw_counters/recv_wrs")
INFINIBAND_EFA_READ_REQUESTS_TOTAL = port_counter("infiniband_efa_read_requests_total", "RDMA read requests (EFA).",
    "hw_counters/rdma_read_wrs")
INFINIBAND_EFA_WRITE_REQUESTS_TOTAL = port_counter("infiniband_efa_write_requests_total", "RDMA write requests (EFA).",
    "hw_counters/rdma_write_wrs")
# Traffic by kind.
INFINIBAND_RECEIVED_WRITE_REQUESTS_TOTAL = port_counter("infiniband_received_write_requests_total",
    "RDMA writes received.", "hw_counters/rx_write_requests", wraps=32)
INFINIBAND_RECEIVED_READ_REQUESTS_TOTAL = port_counter("infiniband_received_read_requests_total",
    "RDMA reads received.", "hw_counters/rx_read_requests", wraps=32)
INFINIBAND_TRANSMIT_UNICAST_PACKETS_TOTAL = port_counter("infiniband_transmit_unicast_packets_total",
    "Unicast packets sent.", "counters/unicast_xmit_packets", "counters_ext/port_unicast_xmit_packets")
INFINIBAND_RECEIVE_UNICAST_PACKETS_TOTAL = port_counter("infiniband_receive_unicast_packets_total",
    "Unicast packets received.", "counters/unicast_rcv_packets", "counters_ext/port_unicast_rcv_packets")
INFINIBAND_TRANSMIT_MULTICAST_PACKETS_TOTAL = port_counter("infiniband_transmit_multicast_packets_total",
    "Multicast packets sent.", "counters/multicast_xmit_packets", "counters_ext/port_multicast_xmit_packets")
INFINIBAND_RECEIVE_MULTICAST_PACKETS_TOTAL = port_counter("infiniband_receive_multicast_packets_total",
    "Multicast packets received.", "counters/multicast_rcv_packets", "counters_ext/port_multicast_rcv_packets")
# What a healthy port never counts.
INFINIBAND_TRANSMIT_CONSTRAINT_ERRORS_TOTAL = port_counter("infiniband_transmit_constraint_errors_total",
    "Packets not sent because of a partition or raw filter.", "counters/port_xmit_constraint_errors", sticks=8,
    quiet=True)
INFINIBAND_RECEIVE_CONSTRAINT_ERRORS_TOTAL = port_counter("infiniband_receive_constraint_errors_total",
    "Packets refused by a partition or raw filter.", "counters/port_rcv_constraint_errors", sticks=8, quiet=True)
INFINIBAND_ADAPTIVE_RETRANSMISSIONS_TOTAL = port_counter("infiniband_adaptive_retransmissions_total",
    "Adaptive retransmissions. RoCE.", "hw_counters/roce_adp_retrans", wraps=32, quiet=True)
INFINIBAND_ADAPTIVE_RETRANSMISSION_TIMEOUTS_TOTAL = port_counter("infiniband_adaptive_retransmission_timeouts_total",
    "Adaptive retransmissions after a timeout: loss. RoCE.", "hw_counters/roce_adp_retrans_to", wraps=32, quiet=True)
INFINIBAND_SLOW_RESTARTS_TOTAL = port_counter("infiniband_slow_restarts_total", "Slow restarts after loss. RoCE.",
    "hw_counters/roce_slow_restart", wraps=32, quiet=True)
INFINIBAND_SLOW_RESTART_TRANSITIONS_TOTAL = port_counter("infiniband_slow_restart_transitions_total",
    "Transitions into slow restart. RoCE.", "hw_counters/roce_slow_restart_trans", wraps=32, quiet=True)
INFINIBAND_SLOW_RESTART_NOTIFICATIONS_TOTAL = port_counter("infiniband_slow_restart_notifications_total",
    "Congestion notifications caused by slow restart. RoCE.", "hw_counters/roce_slow_restart_cnps", wraps=32,
    quiet=True)
INFINIBAND_INVARIANT_CRC_ERRORS_TOTAL = port_counter("infiniband_invariant_crc_errors_total",
    "Packets with a bad invariant CRC: corruption on the path. RoCE.", "hw_counters/rx_icrc_encapsulated", quiet=True)
INFINIBAND_RESPONDER_LENGTH_ERRORS_TOTAL = port_counter("infiniband_responder_length_errors_total",
    "Requests of a wrong length.", "hw_counters/resp_local_length_error", wraps=32, quiet=True)
INFINIBAND_REQUESTER_REMOTE_ACCESS_ERRORS_TOTAL = port_counter("infiniband_requester_remote_access_errors_total",
    "Requests whose memory access the peer refused.", "hw_counters/req_remote_access_errors", wraps=32, quiet=True)
INFINIBAND_RESPONDER_REMOTE_ACCESS_ERRORS_TOTAL = port_counter("infiniband_responder_remote_access_errors_total",
    "Memory accesses of peers that this host refused.", "hw_counters/resp_remote_access_errors", wraps=32, quiet=True)
INFINIBAND_REQUESTER_REMOTE_INVALID_REQUESTS_TOTAL = port_counter("infiniband_requester_remote_invalid_requests_total",
    "Requests that the peer refused as invalid.", "hw_counters/req_remote_invalid_request", wraps=32, quiet=True)
INFINIBAND_RECEIVE_SWITCH_RELAY_ERRORS_TOTAL = port_counter("infiniband_receive_switch_relay_errors_total",
    "Packets a switch could not forward. On hosts, packets of their own multicast received again.",
    "counters/port_rcv_switch_relay_errors", sticks=16, quiet=True)
INFINIBAND_RECEIVED_ATOMIC_REQUESTS_TOTAL = port_counter("infiniband_received_atomic_requests_total",
    "RDMA atomics received.", "hw_counters/rx_atomic_requests", wraps=32, quiet=True)
INFINIBAND_RECEIVED_DYNAMIC_CONNECTS_TOTAL = port_counter("infiniband_received_dynamic_connects_total",
    "Connection requests for dynamically connected targets.", "hw_counters/rx_dct_connect", wraps=32, quiet=True)
# Optional counters, off unless `rdma statistic` turns them on. Only some drivers have them in sysfs.
INFINIBAND_OPTIONAL_CONGESTION_MARKED_PACKETS_TOTAL = port_counter(
    "infiniband_optional_congestion_marked_packets_total", "Congestion-marked packets received, optional counter.",
    "hw_counters/cc_rx_ce_pkts", quiet=True)
INFINIBAND_OPTIONAL_CONGESTION_NOTIFICATIONS_RECEIVED_TOTAL = port_counter(
    "infiniband_optional_congestion_notifications_received_total",
    "Congestion notifications received, optional counter.", "hw_counters/cc_rx_cnp_pkts", quiet=True)
INFINIBAND_OPTIONAL_CONGESTION_NOTIFICATIONS_SENT_TOTAL = port_counter(
    "infiniband_optional_congestion_notifications_sent_total", "Congestion notifications sent, optional counter.",
    "hw_counters/cc_tx_cnp_pkts", quiet=True)
INFINIBAND_RDMA_TRANSMIT_PACKETS_TOTAL = port_counter("infiniband_rdma_transmit_packets_total",
    "RDMA packets sent, optional counter.", "hw_counters/rdma_tx_packets", quiet=True)
INFINIBAND_RDMA_TRANSMIT_BYTES_TOTAL = port_counter("infiniband_rdma_transmit_bytes_total",
    "RDMA bytes sent, optional counter.", "hw_counters/rdma_tx_bytes", quiet=True)
INFINIBAND_RDMA_RECEIVE_PACKETS_TOTAL = port_counter("infiniband_rdma_receive_packets_total",
    "RDMA packets received, optional counter.", "hw_counters/rdma_rx_packets", quiet=True)
INFINIBAND_RDMA_RECEIVE_BYTES_TOTAL = port_counter("infiniband_rdma_receive_bytes_total",
    "RDMA bytes received, optional counter.", "hw_counters/rdma_rx_bytes", quiet=True)
