"""NVLink and NVSwitch: NVML, DCGM and the kernel log."""

from flopwatch.catalogue.row import GPU, Metric

NVLINK_LINKS = Metric(
    "nvlink_links", "gauge", "NVLinks of the GPU by state: active, inactive, sleep, disabled.", (*GPU, "state"),
    "NVML fields 91 and 165",
)
NVLINK_INFO = Metric(
    "nvlink_info", "info", "NVLink generation of the GPU's links.", (*GPU, "version"), "NVML field 166",
)
NVLINK_SPEED = Metric(
    "nvlink_speed_bytes_per_second", "gauge", "Rate of one link in one direction; the slowest active link's.", GPU,
    "NVML field 164, MB/s", scale=1e6,
)
NVLINK_TRANSMIT = Metric(
    "nvlink_transmit_bytes_total", "counter", "Payload sent over all links.", GPU,
    "NVML field 138, KiB; NVLink 5 field 202; GPM metric 61; DCGM field 1011",
)
NVLINK_RECEIVE = Metric(
    "nvlink_receive_bytes_total", "counter", "Payload received over all links.", GPU,
    "NVML field 139, KiB; NVLink 5 field 204; GPM metric 60; DCGM field 1012",
)
NVLINK_TRANSMIT_RAW = Metric(
    "nvlink_transmit_raw_bytes_total", "counter", "Bytes sent over all links, protocol included.", GPU,
    "NVML field 140, KiB", scale=1024,
)
NVLINK_RECEIVE_RAW = Metric(
    "nvlink_receive_raw_bytes_total", "counter", "Bytes received over all links, protocol included.", GPU,
    "NVML field 141, KiB", scale=1024,
)
NVLINK_ERRORS = Metric(
    "nvlink_errors_total", "counter",
    "Link errors by kind, all links together. NVLink 4 and older: replay, recovery, crc. NVLink 5: malformed_packet, "
    "buffer_overrun, receive, remote, general, local_integrity, transmit_discard, recovery, recovery_failed, "
    "effective, symbol.", (*GPU, "error"), "NVML fields 161-163; NVLink 5 fields 206-215, 219, 221",
)
NVLINK_LINK_ERRORS = Metric(
    "nvlink_link_errors_total", "counter", "The same of one link; only links that had such an error.",
    (*GPU, "link", "error"), "NVML fields 161-163; NVLink 5 fields 206-215, 219, 221",
)
NVLINK_LINK_STATE = Metric(
    "nvlink_link_state_id", "gauge",
    "State of a link that is not active: 0 inactive, 2 sleep, 3 traffic disabled; 1 once it is active again.",
    (*GPU, "link"), "NVML field 165",
)
NVLINK_EFFECTIVE_BER = Metric(
    "nvlink_effective_bit_error_ratio", "gauge",
    "Bit errors left after correction, relative to all bits; the worst link's. Above 1e-12 the link is bad (NVLink 5).",
    GPU, "NVML field 220",
)
NVLINK_SYMBOL_BER = Metric(
    "nvlink_symbol_bit_error_ratio", "gauge",
    "Symbol errors left after all correction, relative to all symbols; the worst link's (NVLink 5).", GPU,
    "NVML field 222",
)
