"""As much of DCGM's module of this name as the collector uses, in its manner: errors are raised, text is decoded."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_library: Any = None


class DCGMError(Exception):
    """A call that failed; `value` is its dcgmReturn_t."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class c_dcgmConnectV2Params_v2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint) for name in ("version", "persistAfterDisconnect", "timeoutMs", "addressIsUnixSocket")
    ]


class c_dcgmGroupEntityPair_t(ctypes.Structure):
    _fields_ = [("entityGroupId", ctypes.c_uint32), ("entityId", ctypes.c_uint32)]


class _Union(ctypes.Union):
    _fields_ = [
        ("i64", ctypes.c_int64),
        ("dbl", ctypes.c_double),
        ("str", ctypes.c_char * 256),
        ("blob", ctypes.c_byte * 4096),
    ]

    def __getattribute__(self, key: str) -> Any:
        value = super().__getattribute__(key)
        return value.decode() if isinstance(value, bytes) else value


class c_dcgmFieldValue_v2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("entityGroupId", ctypes.c_uint),
        ("entityId", ctypes.c_uint),
        ("fieldId", ctypes.c_ushort),
        ("fieldType", ctypes.c_short),
        ("status", ctypes.c_int),
        ("unused", ctypes.c_uint),
        ("ts", ctypes.c_int64),
        ("value", _Union),
    ]


def _dcgmInit(libDcgmPath: str | None = None) -> None:
    global _library
    assert libDcgmPath is not None
    _library = ctypes.CDLL(str(Path(libDcgmPath) / "libdcgm.so.4"))


def call(name: str, *arguments: Any) -> None:
    """Call a function of libdcgm. Raises DCGMError."""
    code = getattr(_library, name)(*arguments)
    if code != 0:
        raise DCGMError(code)
