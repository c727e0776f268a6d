"""Subset of libdcgm.so.4 that reads a running DCGM host engine: calls, structures, status codes, blank values.

Layouts and numbers are those of dcgm_agent.h and dcgm_structs.h of DCGM 4 (https://github.com/NVIDIA/DCGM, dcgmlib/). A
structure's version word is its size, with a release in the highest byte. No package index has DCGM's bindings.
"""

import ctypes
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from flopwatch.catalogue.xid import read_table

LIBRARY = "libdcgm.so.4"

GPU, SWITCH, LINK, CPU = 1, 3, 6, 7  # dcgm_field_entity_group_t

BADPARAM, TIMEOUT, VERSION_MISMATCH, CONNECTION_NOT_VALID, PAUSED = -1, -11, -12, -21, -54  # dcgmReturn_t
_MEANINGS = {int(row["code"]): row["meaning"] for row in read_table("dcgm_errors.csv")}
LOST = (TIMEOUT, CONNECTION_NOT_VALID)  # the connection is dead

_INT64_BLANK, _FP64_BLANK = 0x7FFFFFFFFFFFFFF0, float(1 << 47)
_MAX_ENTITIES, _MAX_GPUS, _MAX_FIELDS = 1024, 32, 128
_EMPTY_GROUP = 1
_VALUES_A_CALL = 1024  # requested at once, 4 KiB each


class DcgmError(Exception):
    """Error raised when a call of libdcgm fails. `code` is its dcgmReturn_t."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {_MEANINGS.get(code, 'error')} ({code})")
        self.code = code


class Value(NamedTuple):
    """Value of one field of one entity at a Unix time. `blank`: DCGM has none now, but `status` reports no failure."""

    group: int
    entity: int
    field: int
    status: int
    at: float
    number: float | None = None
    text: str | None = None
    blank: bool = False


# fmt: off
class _ConnectV2Params(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("persistAfterDisconnect", ctypes.c_uint), ("timeoutMs", ctypes.c_uint),
                ("addressIsUnixSocket", ctypes.c_uint)]


class _Pair(ctypes.Structure):
    _fields_ = [("entityGroupId", ctypes.c_uint), ("entityId", ctypes.c_uint)]


class _Content(ctypes.Union):
    _fields_ = [("i64", ctypes.c_int64), ("dbl", ctypes.c_double), ("str", ctypes.c_char * 256),
                ("blob", ctypes.c_char * 4096)]


class FieldValue(ctypes.Structure):
    """Structure dcgmFieldValue_v2: the value of one field of one entity."""

    _fields_ = [("version", ctypes.c_uint), ("entityGroupId", ctypes.c_uint), ("entityId", ctypes.c_uint),
                ("fieldId", ctypes.c_ushort), ("fieldType", ctypes.c_short), ("status", ctypes.c_int),
                ("unused", ctypes.c_uint), ("ts", ctypes.c_int64), ("value", _Content)]
class _MetricGroup(ctypes.Structure):
    _fields_ = [("majorId", ctypes.c_ushort), ("minorId", ctypes.c_ushort), ("numFieldIds", ctypes.c_uint),
                ("fieldIds", ctypes.c_ushort * 64)]


class _MetricGroups(ctypes.Structure):  # dcgmProfGetMetricGroups_v3
    _fields_ = [("version", ctypes.c_uint), ("unused", ctypes.c_uint), ("gpuId", ctypes.c_uint),
                ("numMetricGroups", ctypes.c_uint), ("metricGroups", _MetricGroup * 10)]
# fmt: on


_HANDLE = ctypes.c_size_t  # uintptr_t, as for group ids
# Of the arguments in `data/dcgm_functions.csv`. Each function returns a dcgmReturn_t.
_TYPES: dict[str, Any] = {"handle": _HANDLE, "out": ctypes.c_void_p, "text": ctypes.c_char_p, "int": ctypes.c_int}
_TYPES |= {"uint": ctypes.c_uint, "int64": ctypes.c_int64, "double": ctypes.c_double}


class Library:
    """libdcgm through ctypes. The constructor raises OSError without libdcgm, and DcgmError."""

    def __init__(self, path: str = LIBRARY) -> None:
        library = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        for row in read_table("dcgm_functions.csv"):
            function = self._functions[row["function"]] = getattr(library, row["function"])
            function.argtypes = [_TYPES[name] for name in row["arguments"].split()]
            function.restype = ctypes.c_int
        self.call("dcgmInit")

    def call(self, name: str, *arguments: Any) -> None:
        """Call the libdcgm function `name`. Raises DcgmError if it does not return 0."""
        code = self._functions[name](*arguments)
        if code != 0:
            raise DcgmError(name, code)


def decode(raw: Any) -> Value:
    """Return the value in a FieldValue. A failed status, or a blank value of DCGM, has no number and no text."""
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
    """Connection to a DCGM host engine, with its watches. `timeout` is in seconds. Methods raise DcgmError."""

    def __init__(self, library: Library, address: str, timeout: float) -> None:
        self._library = library
        self._name = f"flopwatch-{uuid.uuid4().hex[:12]}"  # names are unique in a host engine
        self._groups: list[int] = []
        self._watches: list[tuple[int, int]] = []
        self.refusal: DcgmError | None = None  # the last error of a field that is not watched
        path, handle = address.removeprefix("unix:"), _HANDLE()
        version = ctypes.sizeof(_ConnectV2Params) | 2 << 24
        parameters = _ConnectV2Params(version, 0, int(timeout * 1000), int(path.startswith("/")))
        library.call("dcgmConnect_v2", path.encode(), ctypes.byref(parameters), ctypes.byref(handle))
        self._handle = handle.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(name, self._handle, *arguments)

    def _unless_lost(self, name: str, *arguments: Any) -> bool:
        """Call a function. Return False if it fails, unless the error means that the connection is lost."""
        try:
            self._call(name, *arguments)
        except DcgmError as error:
            if error.code in LOST:
                raise
            return False
        return True

    def gpus(self) -> list[int]:
        """Return DCGM's ids of all GPUs of the host."""
        ids, count = (ctypes.c_uint * _MAX_GPUS)(), ctypes.c_int()
        self._call("dcgmGetAllDevices", ids, ctypes.byref(count))
        return ids[: count.value]

    def entities(self, group: int) -> list[int]:
        """Return the ids of all entities of kind `group`, empty if the host engine has no module for them."""
        ids, count = (ctypes.c_uint * _MAX_ENTITIES)(), ctypes.c_int(_MAX_ENTITIES)
        answered = self._unless_lost("dcgmGetEntityGroupEntities", group, ids, ctypes.byref(count), 0)
        return ids[: count.value] if answered else []

    def in_one_pass(self, gpu: int, fields: Sequence[int]) -> tuple[int, ...]:
        """Return those profiling fields that a GPU counts in one pass, the first ones first.

        Of the groups with the same `majorId` the hardware counts one at a time. All fields, if DCGM names no groups.
        """
        groups = _MetricGroups(version=ctypes.sizeof(_MetricGroups) | 3 << 24, gpuId=gpu)
        self._unless_lost("dcgmProfGetSupportedMetricGroups", ctypes.byref(groups))
        known = groups.metricGroups[: groups.numMetricGroups]
        of = {id: [group for group in known if id in group.fieldIds[: group.numFieldIds]] for id in fields}
        chosen: dict[int, int] = {}
        for id in fields:
            if not any(chosen.get(group.majorId) == group.minorId for group in of[id]):
                for group in of[id][:1]:
                    chosen.setdefault(group.majorId, group.minorId)
        return tuple(
            id for id in fields if not known or any(chosen.get(group.majorId) == group.minorId for group in of[id])
        )

    def watch(self, pairs: Sequence[tuple[int, int]], fields: Sequence[int], every: float) -> tuple[int, ...]:
        """Make the host engine sample `fields` of (kind, id) `pairs` every `every` s. Return the accepted fields."""
        group, name = _HANDLE(), f"{self._name}-{len(self._groups)}"
        self._call("dcgmGroupCreate", _EMPTY_GROUP, name.encode(), ctypes.byref(group))
        self._groups.append(group.value)
        for kind, entity in pairs:
            self._unless_lost("dcgmGroupAddEntity", group.value, kind, entity)
        return self._watched(group.value, tuple(fields), every)

    def _watched(self, group: int, fields: tuple[int, ...], every: float) -> tuple[int, ...]:
        name = f"{self._name}-{len(self._groups)}-{fields[0]}-{len(fields)}"
        ids, accepted = (ctypes.c_ushort * len(fields))(*fields), _HANDLE()
        try:
            self._call("dcgmFieldGroupCreate", len(fields), ids, name.encode(), ctypes.byref(accepted))
            try:
                self._call("dcgmWatchFields", group, accepted.value, int(every * 1e6), 4 * every, 0)
            except DcgmError:
                self._unless_lost("dcgmFieldGroupDestroy", accepted.value)
                raise
            self._watches.append((group, accepted.value))
            return fields
        except DcgmError as error:
            if error.code in LOST:
                raise
            self.refusal = error
        if len(fields) == 1:
            return ()
        middle = len(fields) // 2  # one field that this release, card or mode lacks must not cost the others
        return self._watched(group, fields[:middle], every) + self._watched(group, fields[middle:], every)

    def update(self) -> None:
        """Make the host engine sample the watched fields now, instead of in its next round."""
        self._unless_lost("dcgmUpdateAllFields", 1)

    def latest(self, pairs: Sequence[tuple[int, int]], fields: Sequence[int]) -> list[Value]:
        """Return the last value of each field of each (kind, id) in `pairs`, in any order."""
        values: list[Value] = []
        for first in range(0, len(fields), _MAX_FIELDS):
            some = fields[first : first + _MAX_FIELDS]
            step = max(1, _VALUES_A_CALL // len(some))
            for start in range(0, len(pairs), step):
                values += self._latest(pairs[start : start + step], some)
        return values

    def _latest(self, pairs: Sequence[tuple[int, int]], fields: Sequence[int]) -> Iterator[Value]:
        entities = (_Pair * len(pairs))(*(_Pair(*pair) for pair in pairs))
        ids = (ctypes.c_ushort * len(fields))(*fields)
        values = (FieldValue * (len(pairs) * len(fields)))()
        self._call("dcgmEntitiesGetLatestValues", entities, len(pairs), ids, len(fields), 0, values)
        return map(decode, values)

    def close(self) -> None:
        """Remove the watches and groups of this session from the host engine, and disconnect."""
        calls: list[tuple[str, tuple[int, ...]]] = []
        for group, fields in self._watches:
            calls += [("dcgmUnwatchFields", (group, fields)), ("dcgmFieldGroupDestroy", (fields,))]
        calls += [("dcgmGroupDestroy", (group,)) for group in self._groups]
        self._watches, self._groups = [], []
        with suppress(DcgmError):
            for name, arguments in calls:
                self._unless_lost(name, *arguments)
        with suppress(DcgmError):  # the host engine also removes the watches of a connection that ends
            self._call("dcgmDisconnect")
