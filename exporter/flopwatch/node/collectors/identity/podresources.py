"""Devices that the kubelet assigned to containers, from its PodResources API, version 1.

One unary call, `v1.PodResourcesLister/List`
(https://github.com/kubernetes/kubelet/blob/master/pkg/apis/podresources/v1/api.proto), over plaintext gRPC
(https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md) on a unix socket, which requires root. gRPC's own
package costs 21 MiB of memory, h2 under 6. Protobuf is decoded by hand
(https://protobuf.dev/programming-guides/encoding/).
"""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from h2.events import Event
MAX_BYTES = 16 << 20  # bytes of a response, as in the kubelet's own clients
MAX_ASSIGNMENTS, MAX_FIELDS = 100_000, 1_000_000  # above any real node, against forged responses

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_PREFIX = 5  # length of a message's prefix: one byte for compression, four for the length


class PodResourcesError(Exception):
    """Error raised when the call to the kubelet fails or its response is not a list of pods."""


class Assignment(NamedTuple):
    """Device of a container. `resource` is its resource name, such as nvidia.com/gpu, or the DRA driver of a claim."""

    namespace: str
    pod: str
    container: str
    resource: str
    device: str


def decode(body: bytes) -> list[Assignment]:
    """Return the devices in an encoded v1.ListPodResourcesResponse. Raises ValueError for any other content."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes are more than {MAX_BYTES}")
    found = list(islice(_assignments(_Fields().of, memoryview(body)), MAX_ASSIGNMENTS + 1))
    if len(found) > MAX_ASSIGNMENTS:
        raise ValueError(f"more than {MAX_ASSIGNMENTS} devices")
    return found


def _assignments(of: Callable[[memoryview], Mapping[int, list[memoryview]]], body: memoryview) -> Iterator[Assignment]:
    """Yield the devices and claims of all containers. A claim without a device name has its CDI names."""
    for pod in map(of, of(body)[1]):
        place = _text(pod[2]), _text(pod[1])
        for container in map(of, pod[3]):
            owner = *place, _text(container[1])
            for group in map(of, container[2]):
                resource = _text(group[1])
                for device in group[2]:
                    yield Assignment(*owner, resource, _text([device]))
            for claim in [claim for group in map(of, container[5]) for claim in map(of, group[4])]:
                driver, name = _text(claim[2]), _text(claim[4])
                names = [_text([one]) for cdi in map(of, claim[1]) for one in cdi[1]]
                yield from (Assignment(*owner, driver, device) for device in ([name] if name else names))


class _Fields:
    """Decoder of protobuf messages into fields, with one limit on the number of fields in a whole response."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def of(self, message: memoryview) -> Mapping[int, list[memoryview]]:
        """Return the contents of a message's length-delimited fields by field number, no others. Raises ValueError."""
        found: defaultdict[int, list[memoryview]] = defaultdict(list)
        at = 0
        while at < len(message):
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {MAX_FIELDS} fields")
            key, at = _varint(message, at)
            number, wire = key >> 3, key & 7
            if number == 0:
                raise ValueError("a field with number 0")
            if wire == _VARINT:
                _, at = _varint(message, at)
                continue
            if wire == _LENGTH:
                length, at = _varint(message, at)
            elif wire in (_FIXED64, _FIXED32):
                length = 8 if wire == _FIXED64 else 4
            else:
                raise ValueError(f"a field of type {wire}")
            content, at = message[at : at + length], at + length
            if at > len(message):
                raise ValueError("a field longer than what it is in")
            if wire == _LENGTH:
                found[number].append(content)
        return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the protobuf varint at index `at`, and the index after it. Raises ValueError."""
    number = 0
    for index in range(10):
        if at + index >= len(message):
            raise ValueError("cut off within a number")
        byte = message[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if number >= 1 << 64:
                break
            return number, at + index + 1
    raise ValueError("a number of more than 64 bits")


def _text(contents: list[memoryview]) -> str:
    """Return a field's last occurrence as text, empty if it has none. Raises ValueError for invalid UTF-8."""
    return str(contents[-1], "utf-8") if contents else ""


def ask(path: Path, deadline: float = 10.0) -> list[Assignment]:
    """Request all containers' devices from the kubelet's socket. Raises FileNotFoundError and PodResourcesError."""
    until = time.monotonic() + deadline
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline)
            connection.connect(str(path))
            return decode(_call(connection, until))
    except FileNotFoundError:
        raise
    except TimeoutError:
        raise PodResourcesError(f"no answer within {deadline:g} s") from None
    except OSError as error:
        raise PodResourcesError(error.strerror or str(error)) from error
    except ImportError as error:
        raise PodResourcesError("the package h2 is missing; pip install 'flopwatch[exporter]'") from error
    except ValueError as error:
        raise PodResourcesError(f"not a list of pods: {error}") from error


def _call(connection: socket.socket, until: float) -> bytes:
    call = Call(until - time.monotonic())
    while not call.done:
        connection.settimeout(_left(until))
        with suppress(BrokenPipeError):  # data from before the server closed can still be read
            connection.sendall(call.data_to_send())
        connection.settimeout(_left(until))
        call.receive(connection.recv(1 << 16))
    return call.body


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class Call:
    """Unary gRPC call with an empty request, without a socket. `body` is the response message once `done` is true."""

    def __init__(self, timeout: float, path: str = "/v1.PodResourcesLister/List") -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection
        from h2.settings import SettingCodes, Settings

        self.done = False
        self.body = b""
        self._data = bytearray()
        self._status: str | None = None
        self._message = ""
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        # The window covers the whole response, so that only acknowledgements remain to be sent.
        self._http.local_settings = Settings(
            client=True,
            initial_values={SettingCodes.INITIAL_WINDOW_SIZE: MAX_BYTES + _PREFIX, SettingCodes.ENABLE_PUSH: 0},
        )
        self._http.initiate_connection()
        self._http.increment_flow_control_window(MAX_BYTES)
        stream = self._http.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "flopwatch")]
        headers.append(("grpc-timeout", f"{max(1, int(timeout * 1000))}m"))
        self._http.send_headers(stream, headers)
        self._http.send_data(stream, bytes(_PREFIX), end_stream=True)

    def data_to_send(self) -> bytes:
        """Return the bytes that must now be sent to the server."""
        return bytes(self._http.data_to_send())

    def receive(self, data: bytes) -> None:
        """Process bytes received from the server, empty if it closed the connection. Raises PodResourcesError."""
        from h2.exceptions import H2Error

        if not data:
            raise PodResourcesError("the connection was closed before the answer")
        try:
            events = self._http.receive_data(data)
        except (H2Error, ValueError) as error:
            raise PodResourcesError(f"no HTTP/2: {str(error) or type(error).__name__}") from error
        for event in events:
            self._event(event)

    def _event(self, event: "Event") -> None:
        from h2 import events

        if isinstance(event, events.ResponseReceived):
            self._headers(event.headers, first=True)
        elif isinstance(event, events.TrailersReceived):
            self._headers(event.headers)
        elif isinstance(event, events.DataReceived):
            self._data += event.data
            if len(self._data) >= _PREFIX and self._length() > MAX_BYTES:
                raise PodResourcesError(f"the answer is larger than {MAX_BYTES} bytes")
        elif isinstance(event, events.StreamEnded):
            self._end()
        elif isinstance(event, events.StreamReset | events.ConnectionTerminated) and not self.done:
            raise PodResourcesError(f"the call was refused (HTTP/2 error {event.error_code})")

    def _headers(self, headers: Any, first: bool = False) -> None:
        found = {_word(name): _word(content) for name, content in headers}
        if first and found.get(":status") != "200":
            raise PodResourcesError(f"HTTP status {found.get(':status')}")
        self._status = found.get("grpc-status", self._status)
        self._message = found.get("grpc-message", self._message)

    def _end(self) -> None:
        if self._status != "0":
            raise PodResourcesError(f"gRPC status {self._status}: {unquote(self._message)[:200]}")
        if len(self._data) != _PREFIX + self._length() or self._data[0] != 0:
            raise PodResourcesError("the answer is not one uncompressed message")
        self.body, self.done = bytes(self._data[_PREFIX:]), True

    def _length(self) -> int:
        return int.from_bytes(self._data[1:_PREFIX], "big")


def _word(content: str | bytes) -> str:
    return content.decode("ascii", "replace") if isinstance(content, bytes) else content
