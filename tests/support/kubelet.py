"""A kubelet's PodResources socket, served by grpcio, and its messages, encoded by protobuf's own runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from flopwatch.node.collectors.identity.podresources import Assignment

# The fields we read, from kubelet's api.proto, and some that we skip: message -> field -> number, type, repeated.
TEXT, NUMBER = "string", "int64"
MESSAGES: dict[str, dict[str, tuple[int, str, bool]]] = {
    "List": {"pod_resources": (1, "Pod", True)},
    "Pod": {
        "name": (1, TEXT, False),
        "namespace": (2, TEXT, False),
        "containers": (3, "Container", True),
        "cpu_ids": (4, NUMBER, True),
    },
    "Container": {
        "name": (1, TEXT, False),
        "devices": (2, "Devices", True),
        "cpu_ids": (3, NUMBER, True),
        "dynamic_resources": (5, "Dynamic", True),
    },
    "Devices": {"resource_name": (1, TEXT, False), "device_ids": (2, TEXT, True), "topology": (3, "Topology", False)},
    "Topology": {"nodes": (1, "Node", True)},
    "Node": {"ID": (1, NUMBER, False)},
    "Dynamic": {
        "claim_name": (2, TEXT, False),
        "claim_namespace": (3, TEXT, False),
        "claim_resources": (4, "Claim", True),
    },
    "Claim": {
        "cdi_devices": (1, "Cdi", True),
        "driver_name": (2, TEXT, False),
        "pool_name": (3, TEXT, False),
        "device_name": (4, TEXT, False),
    },
    "Cdi": {"name": (1, TEXT, False)},
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="flopwatch_test.proto", package="kubelet", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            message.field.add(
                name=field,
                number=number,
                type_name=f".kubelet.{kind}" if kind in MESSAGES else None,
                type=kinds.TYPE_STRING if kind == TEXT else kinds.TYPE_INT64 if kind == NUMBER else kinds.TYPE_MESSAGE,
                label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kubelet.{name}")) for name in MESSAGES}


_CLASS = _classes()


def encoded(pods: Sequence[dict[str, Any]]) -> bytes:
    """Return the bytes of a reply with these pods, given by the field names of the API."""
    return bytes(_CLASS["List"](pod_resources=list(pods)).SerializeToString())


def pod(namespace: str, name: str, container: str, *devices: str, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    """Return a pod of one container that was given these devices."""
    return {
        "name": name,
        "namespace": namespace,
        "cpu_ids": [1, 2, 300],
        "containers": [
            {
                "name": container,
                "cpu_ids": [7],
                "devices": [
                    {"resource_name": resource, "device_ids": list(devices), "topology": {"nodes": [{"ID": 1}]}}
                ],
            }
        ],
    }


def assignments(pods: Sequence[dict[str, Any]]) -> list[Assignment]:
    """Return the device assignments in a reply with these pods."""
    found = []
    for one in pods:
        for container in one.get("containers", ()):
            devices = [
                (group.get("resource_name", ""), device)
                for group in container.get("devices", ())
                for device in group.get("device_ids", ())
            ]
            devices += [
                (claim.get("driver_name", ""), name)
                for dynamic in container.get("dynamic_resources", ())
                for claim in dynamic.get("claim_resources", ())
                for name in (
                    [claim["device_name"]]
                    if claim.get("device_name")
                    else [cdi["name"] for cdi in claim.get("cdi_devices", ()) if cdi.get("name")]
                )
            ]
            found += [
                Assignment(one.get("namespace", ""), one.get("name", ""), container.get("name", ""), *device)
                for device in devices
            ]
    return found


@contextmanager
def kubelet(path: Path, reply: Callable[[Any], bytes] | bytes) -> Iterator[None]:
    """Serve List on a unix socket with these bytes, or with what the function makes of grpcio's call context."""

    def answer(request: bytes, context: Any) -> bytes:
        assert request == b""
        return reply if isinstance(reply, bytes) else reply(context)

    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "v1.PodResourcesLister", {"List": grpc.unary_unary_rpc_method_handler(answer)}
            ),
        )
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        stopped: threading.Event = server.stop(None)
        stopped.wait()
