"""Rows of NVLink and NVSwitch, read from NVML, DCGM and the kernel log."""

from flopwatch.catalogue.row import GPU, counter, gauge, info

# fmt: off
NVLINK_LINKS = gauge("nvlink_links", "NVLinks of the GPU by state: active, inactive. sleep and disabled are absent "
    "without such links.", (*GPU, "state"), "NVML fields 91 and 165, nvmlDeviceGetNvLinkState")
NVLINK_INFO = info("nvlink_info", "NVLink generation of the GPU's links.", (*GPU, "version"), "NVML field 166")
NVLINK_SPEED_BYTES_PER_SECOND = gauge("nvlink_speed_bytes_per_second", "Rate of one NVLink in one direction, for the "
    "GPU's slowest active link.", GPU, "NVML fields 164 and 90, MB/s", scale=1e6)
NVLINK_TRANSMIT_BYTES_TOTAL = counter("nvlink_transmit_bytes_total", "Payload bytes sent over all NVLinks of the GPU.",
    GPU, "NVML field 138, KiB; NVLink 5 where there is none field 202; GPM metric 61")
NVLINK_RECEIVE_BYTES_TOTAL = counter("nvlink_receive_bytes_total", "Payload bytes received over all NVLinks of the "
    "GPU.", GPU, "NVML field 139, KiB; NVLink 5 where there is none field 204; GPM metric 60")
NVLINK_TRANSMIT_RAW_BYTES_TOTAL = counter("nvlink_transmit_raw_bytes_total", "Bytes sent over all NVLinks of the GPU, "
    "including the protocol.", GPU, "NVML field 140, KiB; DCGM field 1011", scale=1024)
NVLINK_RECEIVE_RAW_BYTES_TOTAL = counter("nvlink_receive_raw_bytes_total", "Bytes received over all NVLinks of the "
    "GPU, including the protocol.", GPU, "NVML field 141, KiB; DCGM field 1012", scale=1024)
NVLINK_ERRORS_TOTAL = counter("nvlink_errors_total", "NVLink errors by kind, over all links of the GPU. NVLink 4: "
    "replay, recovery, crc, before it also crc_data. NVLink 5: malformed_packet, buffer_overrun, receive, remote, "
    "general, local_integrity, transmit_discard, recovery, recovery_failed, effective, symbol.", (*GPU, "error"),
    "NVML fields 161-163; NVLink 5 fields 206-212, 214, 215, 219, 221; before NVLink 4 fields 38, 45, 52, 59")
NVLINK_LINK_ERRORS_TOTAL = counter("nvlink_link_errors_total",
    "Errors of one NVLink, by the kinds of nvlink_errors_total. Absent for links without an error.",
    (*GPU, "link", "error"), "NVML fields 161-163; NVLink 5 fields 206-212, 214, 215, 219, 221")
NVLINK_LINK_STATE_ID = gauge("nvlink_link_state_id", "State of an NVLink that was active before and was seen inactive "
    "or disabled since the exporter started: 0 inactive, 3 traffic disabled, or once it is up again 1 or 2 (asleep). "
    "Absent for other links.", (*GPU, "link"), "NVML field 165, nvmlDeviceGetNvLinkState")
NVLINK_TRANSMIT_BLOCKS_TOTAL = counter("nvlink_transmit_blocks_total", "Blocks sent over all NVLinks of the GPU, with "
    "physical layer retransmission (NVLink 5, newer drivers).", GPU, "NVML field 294")
NVLINK_TRANSMIT_RETRIED_BLOCKS_TOTAL = counter("nvlink_transmit_retried_blocks_total", "Blocks sent again over all "
    "NVLinks of the GPU (NVLink 5, newer drivers). A rising share means a bad link.", GPU, "NVML field 295")
NVLINK_RAW_BIT_ERROR_RATIO = gauge("nvlink_raw_bit_error_ratio", "Bit errors before any correction, relative to all "
    "bits, for the GPU's worst link (NVLink 5, newer drivers).", GPU, "NVML field 293")
NVLINK_EFFECTIVE_BIT_ERROR_RATIO = gauge("nvlink_effective_bit_error_ratio", "Bit errors left after correction, "
    "relative to all bits, for the GPU's worst link (NVLink 5). A link above 1e-12 is bad.", GPU, "NVML field 220")
NVLINK_SYMBOL_BIT_ERROR_RATIO = gauge("nvlink_symbol_bit_error_ratio", "Symbol errors left after all correction, "
    "relative to all symbols, for the GPU's worst link (NVLink 5).", GPU, "NVML field 222")
NVLINK_SWITCH_SXID_ERRORS_TOTAL = counter("nvlink_switch_sxid_errors_total", "SXid errors of an NVSwitch, named by its "
    "PCI address. Meaning: docs/xid.md.", ("switch", "sxid"), "/dev/kmsg nvidia-nvswitch lines")
NVLINK_SWITCH_SXID_LAST_TIMESTAMP_SECONDS = gauge("nvlink_switch_sxid_last_timestamp_seconds",
    "Time this SXid of the NVSwitch was last seen, as Unix time.", ("switch", "sxid"), "/dev/kmsg record time")
NVLINK_SWITCH_SXID_INFO = info("nvlink_switch_sxid_info", "Meaning of an SXid, for the codes seen on this host.",
    ("sxid", "name", "class", "severity", "action"), "flopwatch/data/sxid.csv, from the Fabric Manager user guide")
NVLINK_SWITCH_LAST_SXID_ID = gauge("nvlink_switch_last_sxid_id", "Last SXid of an NVSwitch that DCGM saw, by class: "
    "fatal, non_fatal. 0 or absent before the first SXid.", ("switch", "class"), "DCGM fields 856 and 857")
NVLINK_SWITCH_RESET_REQUIRED = gauge("nvlink_switch_reset_required", "1 if the NVSwitch needs a reset to work again.",
    ("switch",), "DCGM field 864")
NVLINK_SWITCH_TEMPERATURE_CELSIUS = gauge("nvlink_switch_temperature_celsius", "Temperature of an NVSwitch.",
    ("switch",), "DCGM field 858")
NVLINK_SWITCH_TEMPERATURE_LIMIT_CELSIUS = gauge("nvlink_switch_temperature_limit_celsius",
    "Temperature of an NVSwitch at which a limit acts: slowdown, shutdown.", ("switch", "limit"),
    "DCGM fields 859 and 860")
NVLINK_SWITCH_TRANSMIT_BYTES_TOTAL = counter("nvlink_switch_transmit_bytes_total",
    "Payload bytes sent over all links of an NVSwitch (Ampere and Hopper; DCGM documents no unit for later ones).",
    ("switch",), "DCGM field 861, Mibit", scale=131072)
NVLINK_SWITCH_RECEIVE_BYTES_TOTAL = counter("nvlink_switch_receive_bytes_total",
    "Payload bytes received over all links of an NVSwitch (Ampere and Hopper).", ("switch",), "DCGM field 862, Mibit",
    scale=131072)
NVLINK_SWITCH_LINKS = gauge("nvlink_switch_links", "Links of an NVSwitch by state: off, safe, active, error.",
    ("switch", "state"), "DCGM field 870")
NVLINK_SWITCH_ERRORS_TOTAL = counter("nvlink_switch_errors_total", "Link errors of an NVSwitch by kind, over all its "
    "links: replay, recovery, flit, crc, ecc.", ("switch", "error"), "DCGM fields 784-788")
NVLINK_SWITCH_LINK_ERRORS_TOTAL = counter("nvlink_switch_link_errors_total",
    "Errors of one link of an NVSwitch, by the kinds of nvlink_switch_errors_total, at most 16 series per switch. "
    "Absent for links without an error.", ("switch", "link", "error"), "DCGM fields 784-788")
