"""One GPU through NVML: its calls, their intervals, and what is kept of their answers.

A call or field that the GPU, the driver or this user lacks is requested once per initialization. Any other error, also
of pynvml itself, costs one read the values of that call. https://docs.nvidia.com/deploy/nvml-api/.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from flopwatch.catalogue import Metric, Sample
from flopwatch.node.collectors.nvml import fields, gpm
from flopwatch.node.collectors.nvml.fields import Entry, Handle, Key, NvmlLibrary, Value

GONE = (15, 16)  # nvmlReturn_t of a GPU that no longer answers: GPU_IS_LOST, RESET_REQUIRED
UNINITIALIZED, REPLACED = 1, 18  # of a session that ended: UNINITIALIZED, LIB_RM_VERSION_MISMATCH (driver upgrade)
OVER = (UNINITIALIZED, REPLACED)
BLIND = (4, 17, 999)  # of a process without access: NO_PERMISSION, OPERATING_SYSTEM, UNKNOWN (also off the bus)
# Of a call that cannot succeed before the next initialization: NVML_ERROR_INVALID_ARGUMENT, _NOT_SUPPORTED,
# _NO_PERMISSION, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED.
LACKING = (2, 3, 4, 13, 25, 26)
NO_PERMISSION, FUNCTION_NOT_FOUND = 4, 13
# Seconds after which a read of all GPUs makes no further call, within a scrape's default deadline of 2.5 s. A third is
# for tables of seldom fields: on NVLink 5 each value of a link may be a register access through the GPU's firmware.
BUDGET, SELDOM_TABLES_SHARE = 1.5, 1 / 3
# Calls of a slow GPU, without these tables, take more than SLOW seconds together, a tenth of the deadline. It is read
# every PAUSE times these seconds, at most MAX_PAUSE. Values that are overdue by MAX_OVERDUE seconds are dropped.
SLOW, PAUSE, MAX_PAUSE, MAX_OVERDUE = 0.25, 20, 60.0, 120.0

Values = Iterator[Value]


def code_of(nvml: NvmlLibrary, error: Exception | None) -> int | None:
    """Return the nvmlReturn_t of an NVMLError, or None for any other error."""
    return error.value if isinstance(error, nvml.NVMLError) else None


@dataclass
class Past:
    """State of one GPU that outlives a session with the driver. `seen` are the series that were once not 0."""

    seen: set[tuple[Metric, tuple[str, ...]]] = field(default_factory=set)
    links: fields.Links = field(default_factory=fields.Links)
    activity: gpm.GpmActivity = field(default_factory=gpm.GpmActivity)
    instances: defaultdict[str, gpm.GpmActivity] = field(default_factory=lambda: defaultdict(gpm.GpmActivity))
    pids: list[int] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)


@dataclass
class Cost:
    """Time that calls cost: microseconds by table of fields as the driver reports them, and seconds of this read.

    A read of all GPUs makes no call after the time `until`, `budget` seconds after its begin. One GPU spends half of
    the rest. Of these seconds, `seldom` are those of tables of seldom fields.
    """

    latencies: Counter[str] = field(default_factory=Counter)
    seldom: float = 0.0
    budget: float = BUDGET
    until: float = inf

    def spent(self, begun: float, now: float, seldom_table: bool) -> bool:
        """Return whether the seconds for a call are spent. `begun` is when the calls about its GPU began."""
        seldom = self.budget * SELDOM_TABLES_SHARE if seldom_table else inf
        return now >= (begun + self.until) / 2 or self.seldom >= seldom


@dataclass(frozen=True, eq=False)
class Read:
    """NVML function `name`, which a GPU may lack, and the generator `values` that calls it and yields readings.

    `every` is the interval in seconds, 0 for every read. `needs` are further names that pynvml must have. `instead_of`:
    only on a GPU that lacks all these fields and calls. `whole`: not in MIG mode. `table` names a table of fields.
    Where such reads are slow, a seldom one waits for a later read of all GPUs.
    """

    name: str
    values: "Callable[[NvmlCard], Values]"
    every: float = 0.0
    needs: tuple[str, ...] = ()
    instead_of: "tuple[Key | Read, ...]" = ()
    whole: bool = False
    table: str = ""


class NvmlCard:
    """One GPU between nvmlInit and nvmlShutdown, with the calls and fields it lacks and its last readings."""

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
        cost: Cost,
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
        self.garbled = False  # whether the driver returned processes that cannot exist
        self.waits = False  # whether a call was not made because the budget of this read was spent
        self._clock, self._reads, self._cost = clock, reads, cost
        self._table = ""
        self._unaskable: dict[Key, int] = {}  # nvmlReturn_t of fields for which the whole call fails
        self._group: dict[Key, int] = {}  # fields of different groups are requested in different calls; default 0
        self._group_numbers = count(1)
        self._meters: dict[str, gpm.Meter] = {}
        self._held: dict[Read, list[Sample]] = {}
        self._due: dict[Read, float] = {}
        self._took: dict[Read, float] = {}  # seconds of each repeated read, without tables of seldom fields
        self._first = 0  # position of the call that a read begins with, because the last read ended before it
        self._worked = False

    def read(self) -> list[Sample]:
        """Return the GPU's samples. Raises NVMLError if GPU or session is lost, and any error if no call worked."""
        now = self._clock()
        samples: list[Sample] = []
        made: dict[Read, list[Sample]] = {}
        worked = False
        failure: Exception | None = None
        self.waits = False
        first, self._first = self._first, 0
        for position in (*range(first, len(self._reads)), *range(first)):
            read = self._reads[position]
            due = self._due.get(read, -inf)
            wanted = (now < due and not read.whole and not read.instead_of) or (
                read not in self.lacks
                and all(other in self.lacks for other in read.instead_of)
                and not (read.whole and self.mig is not None)
            )
            if now < due or not wanted:
                samples += self._held.get(read, ()) if wanted else ()
                continue
            seldom_table = read.table != "" and read.every > 0
            begun, self._table = self._clock(), read.table
            if self._cost.spent(now, begun, seldom_table):
                self.waits = True
                self._first = self._first or (0 if seldom_table else position)
                samples += self._held.get(read, ()) if now < due + MAX_OVERDUE else ()
                continue
            self._due.pop(read, None)
            self._held.pop(read, None)
            fresh: list[Sample] = []
            made[read] = fresh
            try:
                self.incomplete = self.unasked = False
                for row, extra, number in read.values(self):
                    fresh.append((row, (self.identity["gpu"], self.identity["uuid"], *extra), number))
                worked = worked or (bool(fresh) and not self.unasked)
                self._held[read], self._due[read] = fresh, now if self.incomplete else now + read.every
            except Exception as error:
                code = code_of(self.nvml, error)
                if code in (*GONE, *OVER):
                    raise
                if code is None:
                    self.report(read.name, error)
                elif code in LACKING:
                    self.lacks[read] = code
                failure = error
            took = self._clock() - begun
            if seldom_table:
                self._cost.seldom += took
            elif read.every < inf:
                self._took[read] = took
            samples += fresh
        if self.slow:  # a failed call is not repeated at once either
            for read, fresh in made.items():
                self._held[read], self._due[read] = fresh, max(self._due.get(read, 0.0), now + self.pause)
        # A GPU that never supported anything (Tegra) is present. One that stopped answering altogether is not readable.
        unsupported = not self._worked and code_of(self.nvml, failure) not in (None, *BLIND)
        if failure is not None and not worked and not unsupported:
            self.forget()
            raise failure
        self._worked = self._worked or worked
        return samples

    @property
    def slow(self) -> float:
        """Return the seconds that the calls of one complete read take if the GPU is slow, else 0."""
        seconds = sum(self._took.values())
        return seconds if seconds > SLOW else 0.0

    @property
    def pause(self) -> float:
        """Return the interval in seconds between two calls of a slow GPU."""
        return min(PAUSE * self.slow, MAX_PAUSE)

    def forget(self) -> None:
        """Make the next read request every call and field again, also those that the GPU lacked before."""
        self.lacks = {read: code for read, code in self.lacks.items() if code == FUNCTION_NOT_FOUND}
        self._due.clear()
        self._held.clear()
        self._unaskable.clear()
        self.latest.clear()

    def ask(self, keys: list[Key]) -> tuple[dict[Key, Entry], dict[Key, int]]:
        """Request fields. Return the entries of answered ones, and the nvmlReturn_t of refused ones."""
        refused = {key: self._unaskable[key] for key in keys if key in self._unaskable}
        groups: defaultdict[int, list[Key]] = defaultdict(list)
        for key in keys:
            if key not in refused:
                groups[self._group.get(key, 0)].append(key)
        answers: dict[Key, Entry] = {}
        for group in groups.values():
            try:
                answers |= self._call(group)
            except self.nvml.NVMLError as error:
                if error.value in (*GONE, *OVER):
                    raise
                parts, alone = self._split(group, error)
                answers |= parts
                refused |= alone
        refused |= {key: value[fields.RETURN] for key, value in answers.items() if value[fields.RETURN] != 0}
        if over := {*GONE, *OVER}.intersection(refused.values()):
            raise self.nvml.NVMLError(over.pop())
        return {key: value for key, value in answers.items() if value[fields.RETURN] == 0}, refused

    def _call(self, keys: list[Key]) -> dict[Key, Entry]:
        values = [*fields.ENTRY.iter_unpack(self.nvml.nvmlDeviceGetFieldValues(self.handle, keys))]
        self._cost.latencies[self._table] += sum(value[fields.LATENCY] for value in values)
        return dict(zip(keys, values, strict=True))

    def _split(self, keys: list[Key], error: Exception) -> tuple[dict[Key, Entry], dict[Key, int]]:
        """Request fields that NVML refuses together with `error` in smaller calls. Return answers and refused fields.

        Later reads request them in the calls that worked: on GB200, ECC fields and NVLink fields fail together and work
        alone (https://github.com/NVIDIA/DCGM/issues/265). Raises `error` if the first and last field fail alone.
        """
        if code_of(self.nvml, error) not in LACKING and len(keys) > 1:
            for key in (keys[0], keys[-1]):
                with suppress(self.nvml.NVMLError):
                    self._call([key])
                    break
            else:
                raise error
        answers: dict[Key, Entry] = {}
        refused: dict[Key, int] = {}
        worked: list[list[Key]] = []
        pending = [keys]
        while pending:
            part = pending.pop()
            try:
                answers |= self._call(part)
                worked.append(part)
            except self.nvml.NVMLError as failure:
                code = failure.value
                if code in (*GONE, *OVER):
                    raise
                if len(part) > 1:
                    middle = len(part) // 2
                    pending += [part[:middle], part[middle:]]
                    continue
                refused[part[0]] = code
                if code in LACKING:
                    self._unaskable[part[0]] = code
        # Fields refused alone explain the refusal of the whole. Without one, some fields do not work together.
        alone = [[key] for key in refused if key not in self._unaskable]
        for part in alone if refused else worked[1:]:
            self._group |= dict.fromkeys(part, next(self._group_numbers))
        return answers, refused

    def notable(self, row: Metric, labels: tuple[str, ...], number: float) -> bool:
        """Return whether to report `number`: it is not 0, or an earlier number of this series was not."""
        if number != 0:
            self.past.seen.add((row, labels))
        return (row, labels) in self.past.seen

    def meter(self, instance: str | None = None) -> gpm.Meter:
        """Return the GPM meter of the whole GPU, or of the GPU instance with this id."""
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
        """Add the activity up to now to the totals and free the meters' NVML samples."""
        for meter in self._meters.values():
            with suppress(self.nvml.NVMLError):
                meter.advance()
            meter.close()
        self._meters.clear()
