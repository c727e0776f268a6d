"""Statistics of the driver of a RoCE port's network interface: PFC pauses and bit errors, as `ethtool -S` shows them.

No privilege is needed. Names of mlx5: Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst of
Linux. Names of bnxt_en: drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c. Calls: include/uapi/linux/ethtool.h.
"""

import fcntl
import socket
import struct
from array import array

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample
from flopwatch.node.collectors.infiniband.files import first_line_of

PERIOD = 10.0  # seconds between two reads: a call returns thousands of numbers, some of them from the firmware
SIOCGIFINDEX, SIOCETHTOOL = 0x8933, 0x8946
GSTRINGS, GSTATS, GSSET_INFO, STATISTICS = 0x1B, 0x1D, 0x37, 1
SPARE = 4096  # numbers for which there is room, because the kernel writes those of queues that were just added, too

STATISTICS_OF: dict[str, tuple[Metric, tuple[str, ...]]] = {
    **dict.fromkeys(("rx_bits_phy", "rx_bits"), (m.INFINIBAND_RECEIVE_CAPACITY_BYTES_TOTAL, ())),
    **dict.fromkeys(("rx_corrected_bits_phy", "rx_corrected_bits"), (m.INFINIBAND_CORRECTED_BIT_ERRORS_TOTAL, ())),
    **dict.fromkeys(("rx_pcs_symbol_err_phy", "rx_pcs_symbol_err"), (m.INFINIBAND_PCS_SYMBOL_ERRORS_TOTAL, ())),
}
for _side, _direction in (("rx", "received"), ("tx", "sent")):
    for _priority in "01234567":
        for _name in (f"{_side}_prio{_priority}_pause", f"{_side}_pfc_ena_frames_pri{_priority}"):
            STATISTICS_OF[_name] = m.INFINIBAND_PAUSE_FRAMES_TOTAL, (_priority, _direction)
        for _name in (f"{_side}_prio{_priority}_pause_duration", f"pfc_pri{_priority}_{_side}_duration_us"):
            STATISTICS_OF[_name] = m.INFINIBAND_PAUSE_SECONDS_TOTAL, (_priority, _direction)


class DriverStatistics:
    """Reader of the statistics of one network interface. A pause that never happened has no sample."""

    def __init__(self, folder: str, labels: tuple[str, ...]) -> None:
        self._name, self._folder, self._labels = folder.rpartition("/")[2].encode(), folder, labels
        self._count = 0  # of the driver's statistics, as their names were read
        self._known: list[tuple[int, Metric, tuple[str, ...]]] = []  # position in the driver's statistics, row, labels
        self._samples: list[Sample] = []
        self._read_at = 0.0

    def read(self, now: float) -> list[Sample]:
        """Return the samples, at most PERIOD seconds old. None for an interface of another namespace."""
        if now >= self._read_at:
            self._read_at = now + PERIOD
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                    self._samples = self._read(control.fileno())
            except OSError:
                self._samples = []
        return self._samples

    def _read(self, control: int) -> list[Sample]:
        request = fcntl.ioctl(control, SIOCGIFINDEX, struct.pack("16s24x", self._name))
        if str(struct.unpack_from("i", request, 16)[0]) != first_line_of(f"{self._folder}/ifindex"):
            return []
        answer = self._ask(control, struct.pack("IIQ", GSSET_INFO, 0, 1 << STATISTICS), 4)
        (count,) = struct.unpack_from("I", answer, 16)
        if count != self._count:
            answer = self._ask(control, struct.pack("III", GSTRINGS, STATISTICS, count), 32 * count)
            starts = range(12, 12 + 32 * count, 32)
            names = [answer[start : start + 32].partition(b"\0")[0].decode("ascii", "replace") for start in starts]
            known = [(index, *STATISTICS_OF[name]) for index, name in enumerate(names) if name in STATISTICS_OF]
            self._count, self._known = count, [(index, row, (*self._labels, *more)) for index, row, more in known]
        if not self._known:
            return []
        numbers = struct.unpack_from(f"{count}Q", self._ask(control, struct.pack("II", GSTATS, count), 8 * count), 8)
        read = [(row, labels, numbers[index]) for index, row, labels in self._known]
        return [sample for sample in read if sample[2] or sample[0].labels == m.PORT]

    def _ask(self, control: int, request: bytes, length: int) -> bytes:
        """Return request and answer of a call of ethtool, whose answer has `length` bytes."""
        memory = array("B", request + bytes(length + 32 * SPARE))
        fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP16x", self._name, memory.buffer_info()[0]))
        return memory[: len(request) + length].tobytes()
