"""Samples of a healthy H100 host, to change one at a time."""

from __future__ import annotations

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric, Sample

Series = dict[tuple[Metric, tuple[str, ...]], float]


def gpu(index: int) -> tuple[str, str]:
    return str(index), f"GPU-{index}"


def port(index: int) -> tuple[str, str]:
    return f"mlx5_{index}", "1"


def info(row: Metric, **labels: str) -> tuple[Metric, tuple[str, ...]]:
    return row, tuple(labels.get(label, "") for label in row.labels)


def h100() -> Series:
    """Return the series of a healthy node, in the units of the catalogue."""
    series: Series = {}
    for index in range(8):
        identity = {
            "gpu": str(index),
            "uuid": f"GPU-{index}",
            "model": "NVIDIA H100 80GB HBM3",
            "pci_bus_id": f"0000:{index}3:00.0",
            "serial": f"165{index}",
        }
        series |= {
            info(m.GPU_INFO, **identity): 1,
            (m.GPU_PRESENT, gpu(index)): 1,
            (m.GPU_READABLE, gpu(index)): 1,
            (m.GPU_RECOVERY_ACTION_ID, gpu(index)): 0,
            (m.GPU_ECC_ERRORS_TOTAL, (*gpu(index), "corrected")): 12,
            (m.GPU_ECC_ERRORS_TOTAL, (*gpu(index), "uncorrected")): 0,
            (m.GPU_ROW_REMAP_PENDING, gpu(index)): 0,
            (m.GPU_ROW_REMAP_FAILURE, gpu(index)): 0,
            (m.GPU_PCIE_WIDTH_LANES, gpu(index)): 16,
            (m.GPU_PCIE_WIDTH_MAX_LANES, gpu(index)): 16,
            (m.GPU_PCIE_GENERATION_MAX, gpu(index)): 5,
            (m.GPU_PCIE_REPLAYS_TOTAL, gpu(index)): 3,
            (m.GPU_FABRIC_STATE_ID, gpu(index)): 3,
            (m.GPU_FABRIC_STATUS_ID, gpu(index)): 0,
            (m.GPU_FABRIC_HEALTH_ID, gpu(index)): 1,
            (m.GPU_CLOCK_EVENT_ACTIVE, (*gpu(index), "hw_thermal_slowdown")): 0,
            (m.NVLINK_LINKS, (*gpu(index), "active")): 18,
            (m.NVLINK_LINKS, (*gpu(index), "inactive")): 0,
            (m.NVLINK_ERRORS_TOTAL, (*gpu(index), "recovery")): 0,
            (m.NVLINK_ERRORS_TOTAL, (*gpu(index), "crc")): 0,
            (m.GPU_TEMPERATURE_CELSIUS, gpu(index)): 60,  # a row that no rule asks for
        }
    for index in range(9):
        compute = index < 8
        series |= {
            info(m.INFINIBAND_INFO, device=f"mlx5_{index}", port="1", role="compute" if compute else "storage"): 1,
            (m.INFINIBAND_PORT_PRESENT, port(index)): 1,
            (m.INFINIBAND_PORT_STATE_ID, port(index)): 4,
            (m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, port(index)): 50e9 if compute else 25e9,
            (m.INFINIBAND_PORT_EXPECTED_RATE_BYTES_PER_SECOND, port(index)): 50e9 if compute else 25e9,
            (m.INFINIBAND_LINK_FLAPPING, port(index)): 0,
            (m.INFINIBAND_SYMBOL_ERRORS_TOTAL, port(index)): 7,
            (m.INFINIBAND_TEMPERATURE_CELSIUS, (*port(index), "asic")): 75,
        }
    for source in ("nvml", "infiniband", "xid"):
        series[m.FLOPWATCH_COLLECTOR_SUCCESS, (source,)] = 1
    return series


def samples(series: Series) -> list[Sample]:
    """Return the series as sources give them, with the source's own numbers."""
    return [(row, labels, value / row.scale) for (row, labels), value in series.items()]
