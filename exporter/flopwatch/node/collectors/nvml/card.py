"""One GPU through NVML: its calls, their intervals, and what is remembered of their answers.

A call or field that the card, the driver or this user lacks is requested once per initialization. Every other error,
also one of pynvml itself, costs the values of that call in that read. The calls:
https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from flopwatch.catalogue import Metric, Sample
from flopwatch.node.collectors.nvml import fields, gpm
from flopwatch.node.collectors.nvml.fields import Key, Value
from flopwatch.node.collectors.nvml.library import Handle, NvmlLibrary

# nvmlReturn_t of a GPU that no longer answers: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED.
GONE = (15, 16)
# Of a session that has ended: NVML_ERROR_UNINITIALIZED, and NVML_ERROR_LIB_RM_VERSION_MISMATCH after a driver upgrade.
UNINITIALIZED, REPLACED = 1, 18
OVER = (UNINITIALIZED, REPLACED)
# Of a process without access: NVML_ERROR_NO_PERMISSION, and NVML_ERROR_OPERATING_SYSTEM or _UNKNOWN after the loss of a
# device file or of the cgroup's permission. A GPU off the bus returns _UNKNOWN as well.
BLIND = (4, 17, 999)
# Of a call that cannot succeed before the next initialization: NVML_ERROR_INVALID_ARGUMENT, _NOT_SUPPORTED,
# _NO_PERMISSION, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED.
LACKING = (2, 3, 4, 13, 25, 26)
INVALID_ARGUMENT, FUNCTION_NOT_FOUND = 2, 13

Values = Iterator[Value]


def code_of(nvml: NvmlLibrary, error: Exception | None) -> int | None:
    """Return the nvmlReturn_t of an error, or None if it is not NVML's."""
    return error.value if isinstance(error, nvml.NVMLError) else None


@dataclass
class Past:
    """State that outlives a session with the driver. `seen` are the series that had a value other than 0."""

    seen: set[tuple[Metric, tuple[str, ...]]] = field(default_factory=set)
    links: fields.Links = field(default_factory=fields.Links)
    activity: gpm.GpmActivity = field(default_factory=gpm.GpmActivity)
    instances: defaultdict[str, gpm.GpmActivity] = field(default_factory=lambda: defaultdict(gpm.GpmActivity))
    pids: list[int] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Read:
    """One call, the unit that a card may not support. An error costs only the values of this call.

    `every` is in seconds, 0 for each read. `needs` are further names that the library must have. `instead_of`: only on
    a card that has none of these fields and calls. `whole`: not in MIG mode.
    """

    name: str
    values: Callable[[NvmlCard], Values]
    every: float = 0.0
    needs: tuple[str, ...] = ()
    instead_of: tuple[Key | Read, ...] = ()
    whole: bool = False


class NvmlCard:
    """One GPU between nvmlInit and nvmlShutdown: what it lacks, and its last readings."""

    def __init__(
        self,
        nvml: NvmlLibrary,
        handle: Handle,
        identity: dict[str, str],
        past: Past,
        clock: Callable[[], float],
        proc: Path,
        report: Callable[[str, Exception], None],
        reads: tuple[Read, ...],
    ) -> None:
        self.nvml, self.handle, self.identity = nvml, handle, identity
        self.past, self.proc, self.report = past, proc, report
        self.lacks: dict[Any, int] = {
            read: FUNCTION_NOT_FOUND
            for read in reads
            if not all(hasattr(nvml, name) for name in (read.name, *read.needs))
        }
        self.latest: dict[Key, float] = {}
        self.mig: list[dict[str, str]] | None = None
        self.incomplete = False  # set by a read whose values count and that must be repeated at once
        self.unasked = False  # set by a read that has values without a call of the driver
        self._clock, self._reads = clock, reads
        self._unaskable: dict[Key, int] = {}  # fields that make a whole call fail
        self._meters: dict[str, gpm.Meter] = {}
        self._held: dict[Read, list[Sample]] = {}
        self._due: dict[Read, float] = {}
        self._worked = False

    def read(self) -> list[Sample]:
        """Return the GPU's samples. Raises NVMLError if it is gone, or the last error if nothing could be read."""
        now = self._clock()
        samples: list[Sample] = []
        worked = False
        failure: Exception | None = None
        for read in self._reads:
            if not self._wants(read):
                continue
            if now < self._due.get(read, -inf):
                samples += self._held[read]
                continue
            self._due.pop(read, None)
            fresh: list[Sample] = []
            try:
                self.incomplete = self.unasked = False
                for row, extra, number in read.values(self):
                    fresh.append((row, (self.identity["gpu"], self.identity["uuid"], *extra), number))
                worked = worked or (bool(fresh) and not self.unasked)
                if read.every > 0 and not self.incomplete:
                    self._held[read], self._due[read] = fresh, now + read.every
            except Exception as error:
                code = code_of(self.nvml, error)
                if code in (*GONE, *OVER):
                    raise
                if code is None:
                    self.report(read.name, error)
                elif code in LACKING:
                    self.lacks[read] = code
                failure = error
            samples += fresh
        # A GPU that never supported anything (Tegra) is present. One that stopped answering altogether is not readable.
        unsupported = not self._worked and code_of(self.nvml, failure) not in (None, *BLIND)
        if failure is not None and not worked and not unsupported:
            self.forget()
            raise failure
        self._worked = self._worked or worked
        return samples

    def _wants(self, read: Read) -> bool:
        return (
            read not in self.lacks
            and all(other in self.lacks for other in read.instead_of)
            and not (read.whole and self.mig is not None)
        )

    def forget(self) -> None:
        """Request every call and field again, also those that the card lacked in its former mode."""
        self.lacks = {read: code for read, code in self.lacks.items() if code == FUNCTION_NOT_FOUND}
        self._due.clear()
        self._unaskable.clear()
        self.latest.clear()

    def ask(self, keys: list[Key]) -> tuple[dict[Key, Any], dict[Key, int]]:
        """Return the nvmlFieldValue_t of the fields that have one, and the nvmlReturn_t of the others."""
        answers = self._ask([key for key in keys if key not in self._unaskable])
        refused = {key: value.nvmlReturn for key, value in answers.items() if value.nvmlReturn != 0}
        for code in refused.values():
            if code in (*GONE, *OVER):
                raise self.nvml.NVMLError(code)
        refused |= {key: self._unaskable[key] for key in keys if key in self._unaskable}
        return {key: value for key, value in answers.items() if key not in refused}, refused

    def _ask(self, keys: list[Key]) -> dict[Key, Any]:
        """Return the answers. A call that is invalid as a whole, or too long, is repeated in two halves."""
        if not keys:
            return {}
        try:
            return dict(zip(keys, self.nvml.nvmlDeviceGetFieldValues(self.handle, keys), strict=True))
        except self.nvml.NVMLError as error:
            if error.value != INVALID_ARGUMENT:
                raise
        if len(keys) == 1:
            self._unaskable[keys[0]] = INVALID_ARGUMENT
            return {}
        middle = len(keys) // 2
        return self._ask(keys[:middle]) | self._ask(keys[middle:])

    def notable(self, row: Metric, labels: tuple[str, ...], number: float) -> bool:
        """Return whether a series that is left out until it is not 0 has a sample now."""
        if number != 0:
            self.past.seen.add((row, labels))
        return (row, labels) in self.past.seen

    def meter(self, instance: str | None = None) -> gpm.Meter:
        """Return the meter of the GPU's activity, or of one of its GPU instances."""
        name = "" if instance is None else instance
        if name not in self._meters:
            take = partial(self.nvml.nvmlGpmSampleGet, self.handle)
            metrics, activity = (*gpm.WHOLE_GPU, *gpm.PIPES, *gpm.TRAFFIC), self.past.activity
            if instance is not None:
                take = partial(self.nvml.nvmlGpmMigSampleGet, self.handle, int(instance))
                metrics, activity = tuple(gpm.MIG_INSTANCE), self.past.instances[instance]
            self._meters[name] = gpm.Meter(self.nvml, take, metrics, activity, self._clock)
        return self._meters[name]

    def stop_meters(self) -> None:
        """Count up to now and free NVML's samples. The counters continue from there."""
        for meter in self._meters.values():
            with suppress(self.nvml.NVMLError):
                meter.advance()
            meter.close()
        self._meters.clear()
