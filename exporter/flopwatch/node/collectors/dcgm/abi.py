"""Subset of libdcgm.so.4 that reads a running DCGM host engine: calls, structures, status codes, blank values.

Layouts and numbers are those of dcgm_agent.h and dcgm_structs.h of DCGM 4 (https://github.com/NVIDIA/DCGM, dcgmlib/).
The version word of a structure is its size, with a release in the highest byte. The calls are made through ctypes,
because DCGM's Python bindings are on no package index. No host engine is started in this process.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

LIBRARY = "libdcgm.so.4"

# dcgm_field_entity_group_t
GPU, SWITCH, LINK, CPU = 1, 3, 6, 7

# dcgmReturn_t
BADPARAM, TIMEOUT, VERSION_MISMATCH, CONNECTION_NOT_VALID, PAUSED = -1, -11, -12, -21, -54
# fmt: off
# A table: the formatter would print one code a line.
_MEANINGS = {
    BADPARAM: "bad parameter", -3: "unspecified error", -4: "out of memory", -6: "not supported",
    -7: "initialisation failed", -8: "NVML error", TIMEOUT: "timed out",
    VERSION_MISMATCH: "libdcgm and the host engine are of different releases", -13: "unknown field", -14: "no data",
    -15: "stale data", -16: "not watched", -17: "no permission", -18: "GPU is lost", -19: "GPU needs a reset",
    CONNECTION_NOT_VALID: "the connection to the host engine is gone", -24: "limit reached", -29: "needs root",
    -33: "module not loaded", -36: "profiling is not supported", -37: "profiling library error",
    -38: "the hardware cannot count these fields together", PAUSED: "paused", -57: "driver time-out",
    -67: "GPUs are detached",
}
# fmt: on
# After one of these the connection is dead.
LOST = (TIMEOUT, CONNECTION_NOT_VALID)

_INT64_BLANK, _FP64_BLANK = 0x7FFFFFFFFFFFFFF0, float(1 << 47)
_MAX_ENTITIES, _MAX_GPUS, _MAX_FIELDS = 1024, 32, 128
_EMPTY_GROUP = 1
# Values requested in one call; each takes 4 KiB.
_VALUES_A_CALL = 1024


class DcgmError(Exception):
    """Failed call of libdcgm; `code` is its dcgmReturn_t."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {_MEANINGS.get(code, 'error')} ({code})")
        self.code = code


class Value(NamedTuple):
    """Value of one field of one entity: a number or text, or neither.

    `at` is its time in Unix seconds. `blank` is true for a value that is only missing now. A value that is unsupported,
    not permitted or failed (`status`) is not blank.
    """

    group: int
    entity: int
    field: int
    status: int
    at: float
    number: float | None = None
    text: str | None = None
    blank: bool = False


# fmt: off
# As in the header: the formatter would print one member a line.
class _ConnectV2Params(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("persistAfterDisconnect", ctypes.c_uint), ("timeoutMs", ctypes.c_uint),
                ("addressIsUnixSocket", ctypes.c_uint)]


class _Pair(ctypes.Structure):
    _fields_ = [("entityGroupId", ctypes.c_uint), ("entityId", ctypes.c_uint)]


class _Content(ctypes.Union):
    _fields_ = [("i64", ctypes.c_int64), ("dbl", ctypes.c_double), ("str", ctypes.c_char * 256),
                ("blob", ctypes.c_char * 4096)]


class FieldValue(ctypes.Structure):
    """dcgmFieldValue_v2."""

    _fields_ = [("version", ctypes.c_uint), ("entityGroupId", ctypes.c_uint), ("entityId", ctypes.c_uint),
                ("fieldId", ctypes.c_ushort), ("fieldType", ctypes.c_short), ("status", ctypes.c_int),
                ("unused", ctypes.c_uint), ("ts", ctypes.c_int64), ("value", _Content)]
# fmt: on


_HANDLE = ctypes.c_size_t  # uintptr_t, as for group ids
_OUT = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "dcgmInit": (),
    "dcgmConnect_v2": (ctypes.c_char_p, _OUT, _OUT),
    "dcgmDisconnect": (_HANDLE,),
    "dcgmGetAllDevices": (_HANDLE, _OUT, _OUT),
    "dcgmGetEntityGroupEntities": (_HANDLE, ctypes.c_int, _OUT, _OUT, ctypes.c_uint),
    "dcgmGroupCreate": (_HANDLE, ctypes.c_int, ctypes.c_char_p, _OUT),
    "dcgmGroupAddEntity": (_HANDLE, _HANDLE, ctypes.c_int, ctypes.c_uint),
    "dcgmGroupDestroy": (_HANDLE, _HANDLE),
    "dcgmFieldGroupCreate": (_HANDLE, ctypes.c_int, _OUT, ctypes.c_char_p, _OUT),
    "dcgmFieldGroupDestroy": (_HANDLE, _HANDLE),
    "dcgmWatchFields": (_HANDLE, _HANDLE, _HANDLE, ctypes.c_int64, ctypes.c_double, ctypes.c_int),
    "dcgmUnwatchFields": (_HANDLE, _HANDLE, _HANDLE),
    "dcgmUpdateAllFields": (_HANDLE, ctypes.c_int),
    "dcgmEntitiesGetLatestValues": (_HANDLE, _OUT, ctypes.c_uint, _OUT, ctypes.c_uint, ctypes.c_uint, _OUT),
}


class Library:
    """libdcgm through ctypes. Each method raises DcgmError, the constructor also OSError without libdcgm."""

    def __init__(self, path: str = LIBRARY) -> None:
        library = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._call("dcgmInit")

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code != 0:
            raise DcgmError(name, code)

    def connect(self, address: str, unix: bool, timeout: float) -> int:
        """Return a handle to the host engine at `address`; `timeout` is in seconds."""
        size = ctypes.sizeof(_ConnectV2Params)
        parameters = _ConnectV2Params(size | 2 << 24, 0, int(timeout * 1000), int(unix))
        handle = _HANDLE()
        self._call("dcgmConnect_v2", address.encode(), ctypes.byref(parameters), ctypes.byref(handle))
        return handle.value

    def disconnect(self, handle: int) -> None:
        """Disconnect. The host engine then removes the watches of this connection."""
        self._call("dcgmDisconnect", handle)

    def gpus(self, handle: int) -> list[int]:
        """Return DCGM's ids of the GPUs."""
        ids, count = (ctypes.c_uint * _MAX_GPUS)(), ctypes.c_int()
        self._call("dcgmGetAllDevices", handle, ids, ctypes.byref(count))
        return ids[: count.value]

    def entities(self, handle: int, group: int) -> list[int]:
        """Return the ids of all entities of a kind."""
        ids, count = (ctypes.c_uint * _MAX_ENTITIES)(), ctypes.c_int(_MAX_ENTITIES)
        self._call("dcgmGetEntityGroupEntities", handle, group, ids, ctypes.byref(count), 0)
        return ids[: count.value]

    def group(self, handle: int, name: str) -> int:
        """Return a new group without entities."""
        group = _HANDLE()
        self._call("dcgmGroupCreate", handle, _EMPTY_GROUP, name.encode(), ctypes.byref(group))
        return group.value

    def add(self, handle: int, group: int, kind: int, entity: int) -> None:
        """Add an entity to a group."""
        self._call("dcgmGroupAddEntity", handle, group, kind, entity)

    def field_group(self, handle: int, name: str, fields: Sequence[int]) -> int:
        """Return a new group of fields."""
        ids, group = (ctypes.c_ushort * len(fields))(*fields), _HANDLE()
        self._call("dcgmFieldGroupCreate", handle, len(fields), ids, name.encode(), ctypes.byref(group))
        return group.value

    def watch(self, handle: int, group: int, fields: int, every: float, keep: float) -> None:
        """Make the host engine sample fields of the group every `every` seconds, and keep them for `keep` seconds."""
        self._call("dcgmWatchFields", handle, group, fields, int(every * 1e6), keep, 0)

    def update(self, handle: int) -> None:
        """Make the host engine take due samples now, and wait for them."""
        self._call("dcgmUpdateAllFields", handle, 1)

    def unwatch(self, handle: int, group: int, fields: int) -> None:
        """Undo `watch`."""
        self._call("dcgmUnwatchFields", handle, group, fields)

    def drop_group(self, handle: int, group: int) -> None:
        """Undo `group`."""
        self._call("dcgmGroupDestroy", handle, group)

    def drop_fields(self, handle: int, fields: int) -> None:
        """Undo `field_group`."""
        self._call("dcgmFieldGroupDestroy", handle, fields)

    def latest(self, handle: int, pairs: Sequence[tuple[int, int]], fields: Sequence[int]) -> Sequence[Any]:
        """Return the last value of each field of each entity, in any order."""
        entities, ids = (_Pair * len(pairs))(), (ctypes.c_ushort * len(fields))(*fields)
        for place, pair in zip(entities, pairs, strict=True):
            place.entityGroupId, place.entityId = pair
        values = (FieldValue * (len(pairs) * len(fields)))()
        self._call("dcgmEntitiesGetLatestValues", handle, entities, len(pairs), ids, len(fields), 0, values)
        return list(values)


def decode(raw: Any) -> Value:
    """Return one value of `Library.latest`; DCGM's blank values have neither number nor text."""
    head = raw.entityGroupId, raw.entityId, raw.fieldId, raw.status, raw.ts / 1e6
    if raw.status != 0:
        return Value(*head)
    kind = raw.fieldType
    if kind in (ord("i"), ord("t")):
        number = raw.value.i64
        return Value(*head, blank=number == _INT64_BLANK) if number >= _INT64_BLANK else Value(*head, float(number))
    if kind == ord("d"):
        real = raw.value.dbl
        return Value(*head, real) if real < _FP64_BLANK else Value(*head, blank=real == _FP64_BLANK)
    if kind == ord("s"):
        text = raw.value.str.decode(errors="replace")
        return Value(*head, blank=text == "<<<NULL>>>") if text.startswith("<<<") else Value(*head, text=text)
    return Value(*head)


class Session:
    """Connection to a host engine, and its watches. Every method raises DcgmError."""

    def __init__(self, engine: Library, address: str, timeout: float) -> None:
        self._engine = engine
        self._name = f"flopwatch-{uuid.uuid4().hex[:12]}"  # names are unique in a host engine
        self._groups: list[Any] = []
        self._watches: list[tuple[Any, Any]] = []
        self.refusal: DcgmError | None = None  # the last error of a field that is not watched
        path = address.removeprefix("unix:")
        self._handle = engine.connect(path, path.startswith("/"), timeout)

    def gpus(self) -> list[int]:
        """Return DCGM's ids of the GPUs."""
        return self._engine.gpus(self._handle)

    def entities(self, group: int) -> list[int]:
        """Return the ids of all entities of a kind, empty if the host engine has no module for them."""
        try:
            return self._engine.entities(self._handle, group)
        except DcgmError as error:
            if error.code in LOST:
                raise
            return []

    def watch(self, pairs: Sequence[tuple[int, int]], fields: Sequence[int], every: float) -> tuple[int, ...]:
        """Make the host engine sample fields of entities every `every` seconds. Return the accepted fields."""
        group = self._engine.group(self._handle, f"{self._name}-{len(self._groups)}")
        self._groups.append(group)
        for kind, entity in pairs:
            self._unless_lost(self._engine.add, self._handle, group, kind, entity)
        return self._watched(group, tuple(fields), every)

    def _watched(self, group: Any, fields: tuple[int, ...], every: float) -> tuple[int, ...]:
        name = f"{self._name}-{len(self._groups)}-{fields[0]}-{len(fields)}"
        try:
            ids = self._engine.field_group(self._handle, name, fields)
            try:
                self._engine.watch(self._handle, group, ids, every, 4 * every)
            except DcgmError:
                self._unless_lost(self._engine.drop_fields, self._handle, ids)
                raise
            self._watches.append((group, ids))
            return fields
        except DcgmError as error:
            if error.code in LOST:
                raise
            self.refusal = error
        if len(fields) == 1:
            return ()
        # One field that this release, card or mode lacks must not cost the others.
        middle = len(fields) // 2
        return self._watched(group, fields[:middle], every) + self._watched(group, fields[middle:], every)

    def update(self) -> None:
        """Make the host engine sample the watched fields now, instead of in its next round."""
        self._unless_lost(self._engine.update, self._handle)

    def _unless_lost(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except DcgmError as error:
            if error.code in LOST:
                raise

    def latest(self, pairs: Sequence[tuple[int, int]], fields: Sequence[int]) -> list[Value]:
        """Return the last value of each field of each entity."""
        values: list[Value] = []
        for first in range(0, len(fields), _MAX_FIELDS):
            some = fields[first : first + _MAX_FIELDS]
            step = max(1, _VALUES_A_CALL // len(some))
            for start in range(0, len(pairs), step):
                values += map(decode, self._engine.latest(self._handle, pairs[start : start + step], some))
        return values

    def close(self) -> None:
        """Remove all watches and groups, and disconnect."""
        calls: list[tuple[Callable[..., None], Any]] = []
        for group, fields in self._watches:
            calls += [(self._engine.unwatch, (group, fields)), (self._engine.drop_fields, (fields,))]
        calls += [(self._engine.drop_group, (group,)) for group in self._groups]
        self._watches, self._groups = [], []
        for call, arguments in calls:
            try:
                call(self._handle, *arguments)
            except DcgmError as error:
                if error.code in LOST:
                    break
        with suppress(DcgmError):
            self._engine.disconnect(self._handle)
