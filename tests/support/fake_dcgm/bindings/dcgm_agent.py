"""As much of DCGM's module of this name as the collector uses, with its arguments and results."""

from __future__ import annotations

from ctypes import byref, c_double, c_int32, c_int64, c_uint, c_uint16, c_uint32, c_void_p
from typing import Any

import dcgm_structs as structs

call = structs.call


def dcgmInit() -> None:
    call("dcgmInit")


def dcgmConnect_v2(ip_address: str, connectParams: Any, version: int = 0x02000010) -> c_void_p:
    connectParams.version = version
    handle = c_void_p()
    call("dcgmConnect_v2", ip_address.encode(), byref(connectParams), byref(handle))
    return handle


def dcgmDisconnect(dcgm_handle: c_void_p) -> None:
    call("dcgmDisconnect", dcgm_handle)


def dcgmGetAllDevices(dcgm_handle: c_void_p) -> list[int]:
    count, ids = c_uint(), (c_uint * 32)()
    call("dcgmGetAllDevices", dcgm_handle, ids, byref(count))
    return list(ids[: count.value])


def dcgmGetEntityGroupEntities(dcgm_handle: c_void_p, entityGroup: int, flags: int) -> list[int]:
    count, ids = c_int32(1024), (c_uint32 * 1024)()
    call("dcgmGetEntityGroupEntities", dcgm_handle, entityGroup, ids, byref(count), flags)
    return list(ids[: count.value])


def dcgmGroupCreate(dcgm_handle: c_void_p, type: int, groupName: str) -> c_void_p:
    group = c_void_p()
    call("dcgmGroupCreate", dcgm_handle, type, groupName.encode(), byref(group))
    return group


def dcgmGroupAddEntity(dcgm_handle: c_void_p, group_id: c_void_p, entityGroupId: int, entityId: int) -> None:
    call("dcgmGroupAddEntity", dcgm_handle, group_id, entityGroupId, entityId)


def dcgmGroupDestroy(dcgm_handle: c_void_p, group_id: c_void_p) -> None:
    call("dcgmGroupDestroy", dcgm_handle, group_id)


def dcgmFieldGroupCreate(dcgm_handle: c_void_p, fieldIds: list[int], fieldGroupName: str) -> c_void_p:
    group, ids = c_void_p(), (c_uint16 * len(fieldIds))(*fieldIds)
    call("dcgmFieldGroupCreate", dcgm_handle, c_int32(len(fieldIds)), byref(ids), fieldGroupName.encode(), byref(group))
    return group


def dcgmFieldGroupDestroy(dcgm_handle: c_void_p, fieldGroupId: c_void_p) -> None:
    call("dcgmFieldGroupDestroy", dcgm_handle, fieldGroupId)


def dcgmWatchFields(
    dcgm_handle: c_void_p,
    groupId: c_void_p,
    fieldGroupId: c_void_p,
    updateFreq: int,
    maxKeepAge: float,
    maxKeepSamples: int,
) -> None:
    call(
        "dcgmWatchFields",
        dcgm_handle,
        groupId,
        fieldGroupId,
        c_int64(updateFreq),
        c_double(maxKeepAge),
        c_int32(maxKeepSamples),
    )


def dcgmUnwatchFields(dcgm_handle: c_void_p, groupId: c_void_p, fieldGroupId: c_void_p) -> None:
    call("dcgmUnwatchFields", dcgm_handle, groupId, fieldGroupId)


def dcgmUpdateAllFields(dcgm_handle: c_void_p, waitForUpdate: int) -> None:
    call("dcgmUpdateAllFields", dcgm_handle, waitForUpdate)


def dcgmEntitiesGetLatestValues(dcgmHandle: c_void_p, entities: list[Any], fieldIds: list[int], flags: int) -> Any:
    values = (structs.c_dcgmFieldValue_v2 * (len(fieldIds) * len(entities)))()
    pairs = (structs.c_dcgmGroupEntityPair_t * len(entities))(*entities)
    ids = (c_uint16 * len(fieldIds))(*fieldIds)
    call(
        "dcgmEntitiesGetLatestValues",
        dcgmHandle,
        pairs,
        c_uint(len(entities)),
        ids,
        c_uint(len(fieldIds)),
        flags,
        values,
    )
    return values
