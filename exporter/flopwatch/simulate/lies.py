"""Ways in which drivers mislead their readers. The simulated driver does so on request.

`lie` in simulator/host.py switches each one. `Simulation.sleep` takes the seconds of slow calls. A test can replace it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import pynvml as real

from flopwatch.node.collectors.nvml.fields import Key

ECC_FIELDS, UNWRITTEN = frozenset(range(3, 7)), frozenset((3, 4, 5, 6, 29, 30, 31))
DOUBLE = 0  # nvmlValueType_t
SECONDS_PER_VALUE, INIT_SECONDS = 0.001, 40.0
SLOW_GPU, SECONDS_PER_CALL = 7, 0.1
REFUSAL_PERIOD = 600.0  # seconds


def check_mixed(lies: Collection[str], keys: Sequence[Key]) -> None:
    """Raise NVMLError if a call's fields do not work together."""
    ecc = [field in ECC_FIELDS for field, _ in keys]
    if "mixed_fields" in lies and any(ecc) and not all(ecc):
        raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)


def check_gpm(lies: Collection[str], now: float) -> None:
    """Raise NVMLError if the driver refuses activity samples at the Unix time `now`."""
    if "gpm_refusals" in lies and now % REFUSAL_PERIOD >= REFUSAL_PERIOD / 2:
        raise real.NVMLError(real.NVML_ERROR_NO_PERMISSION)


def unwritten(lies: Collection[str], field: int) -> bool:
    """Return whether the driver leaves the entry of a field as it was: type DOUBLE, value, time and latency 0."""
    return field in UNWRITTEN and ("unwritten_fields" in lies or ("no_ecc" in lies and field in ECC_FIELDS))


def garbled(processes: list[Any]) -> list[Any]:
    """Return a list of processes with garbage after the first."""
    garbage = {"pid": 0xFFFFFFFF, "usedGpuMemory": 2**64 - 8, "gpuInstanceId": 17, "computeInstanceId": 0}
    return [*processes[:1], *(real.nvmlFriendlyObject(garbage | {"pid": pid}) for pid in (0xFFFFFFFF, 3_735_928_559))]
