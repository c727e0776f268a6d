"""Short way from the body of a push to the push, for a body that differs from an earlier one only in its numbers.

OTLP has the numbers of a point in fields of eight bytes. So the pushes of a process have their numbers at the same
places until a series appears or a label changes. A template knows these places, and compares all other bytes. A body
that does not fit, or has a number that is not allowed, must be decoded in full. The samples of a body that fits are
made later, and only of the newest body that is needed.
https://protobuf.dev/programming-guides/encoding/#non-varints
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service

from flopwatch import catalogue as m
from flopwatch.node.telemetry import otlp
from flopwatch.node.telemetry.otlp import Push

MAX_TEMPLATES = 128  # two for each rank of a user, since a push between two steps has no age of the open step
MAX_BYTES = 1 << 15  # of a body; a template takes three times as much memory
MARK = struct.Struct("<H6s")  # of a number: its position among all, then bytes that make it positive in every code

Gpus = Mapping[str, str] | None
Found = tuple[Push, Callable[[], Push]]  # an earlier push of the process, and the function that decodes the new one


class Template:
    """Accepted push, and where its body has numbers. Raises ValueError or LookupError if that cannot be found out."""

    def __init__(self, body: bytes, push: Push, gpus: Gpus, now: float) -> None:
        self.earlier, self._gpus, self._now, self.size = push, gpus, now, len(body)
        request = service.ExportMetricsServiceRequest.FromString(body)
        # Code of struct, message, field, and whether its number is finite, and is not negative.
        self._fields: list[tuple[str, Any, str | int, bool, bool]] = []
        [resource] = request.resource_metrics
        metrics = [metric for scope in resource.scope_metrics for metric in scope.metrics]
        sent = [*resource.resource.attributes, *(item for metric in metrics for item in metric.metadata)]
        ages = [item.value for item in sent if item.key == otlp.OPEN_STEP]
        self._age = [self._field("d", age, "double_value") for age in ages if age.WhichOneof("value") == "double_value"]
        self._times: list[int] = []
        self._single: list[tuple[int, int]] = []  # place among the samples, position of the number
        self._histograms: list[tuple[int, list[float], list[int], int]] = []  # place, bounds, positions of the numbers
        place = 0
        for metric in metrics:
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points if kind is not None else ():
                place = self._point(place, point, histogram=kind == "histogram")
        early = push.submitted is None and any(item.key == otlp.SUBMITTED for item in sent)  # allowed later
        if place != len(push.samples) or len(ages) > 1 or early:
            raise ValueError("two samples with the same labels, two ages of the open step, or a time in the future")
        self._locate(body, request)

    def _field(self, code: str, message: Any, name: str | int, finite: bool = False, positive: bool = False) -> int:
        self._fields.append((code, message, name, finite, positive))
        return len(self._fields) - 1

    def _point(self, place: int, point: Any, *, histogram: bool) -> int:
        """Add the fields of a point whose first sample is at `place`. Return the place of the next point's."""
        if point.time_unix_nano:  # a field that is 0 is not sent
            self._times.append(self._field("Q", point, "time_unix_nano"))
        if not histogram:
            row, kind = self.earlier.samples[place][0], point.WhichOneof("value")
            if row.type != "info":  # else it is 1 for ever
                code, finite = "d" if kind == "as_double" else "q", row not in (m.TRAINING_LOSS, m.TRAINING_GRAD_NORM)
                self._single.append((place, self._field(code, point, kind, finite, row.type == "counter")))
            return place + 1
        if point.count:
            self._field("Q", point, "count")
        counts = [self._field("Q", point.bucket_counts, index) for index in range(len(point.bucket_counts))]
        total = self._field("d", point, "sum", finite=True, positive=True)
        self._histograms.append((place, list(point.explicit_bounds), counts, total))
        return place + len(counts) + 2

    def _locate(self, body: bytes, request: service.ExportMetricsServiceRequest) -> None:
        """Find each number by a mark in its place. All other bytes must be those of the body."""
        marks = [MARK.pack(position, b"\xa5flopA") for position in range(len(self._fields))]
        for mark, (code, message, name, *_) in zip(marks, self._fields, strict=True):
            [value] = struct.unpack(f"<{code}", mark)
            if isinstance(name, int):
                message[name] = value
            else:
                setattr(message, name, value)
        marked = request.SerializeToString()
        mask, layout, end, order = bytearray(b"\xff" * len(body)), "<", 0, []
        for start, position in sorted((marked.find(mark), position) for position, mark in enumerate(marks)):
            if start < end or marked.count(marks[position]) != 1:
                raise ValueError("a number whose place is unknown")
            mask[start : start + 8] = bytes(8)
            layout, end = f"{layout}{start - end}x{self._fields[position][0]}", start + 8
            order.append(position)
        self._layout = struct.Struct(f"{layout}{len(body) - end}x")
        self._order = sorted(range(len(order)), key=order.__getitem__)
        self._finites, self._positives = ([self._fields[position][check] for position in order] for check in (3, 4))
        self._mask = int.from_bytes(mask, "little")
        self._fixed = int.from_bytes(body, "little") & self._mask
        if len(marked) != len(body) or int.from_bytes(marked, "little") & self._mask != self._fixed:
            raise ValueError("a body that is not serialized as protobuf does")
        self._fields = []  # memory

    def numbers(self, body: bytes, content: int, gpus: Gpus, now: float) -> tuple[float, ...] | None:
        """Return the numbers in a body of `size` bytes, None if it must be decoded in full. `content` is an integer."""
        if content & self._mask != self._fixed or now < self._now or (gpus is not self._gpus and gpus != self._gpus):
            return None
        read = self._layout.unpack(body)
        finite = math.isfinite(sum(compress(read, self._finites)))
        return read if finite and min(compress(read, self._positives), default=0) >= 0 else None

    def push(self, read: tuple[float, ...], now: float) -> Push:
        """Return the push with these numbers, which arrived at the Unix time `now`."""
        numbers = [read[index] for index in self._order]
        samples = list(self.earlier.samples)
        for place, number in self._single:
            samples[place] = *samples[place][:2], float(numbers[number])
        for place, bounds, counts, total in self._histograms:
            values = otlp.histogram(bounds, [int(numbers[count]) for count in counts], numbers[total])
            for index, (_, value) in enumerate(values, place):
                samples[index] = *samples[index][:2], value
        newest = max((int(numbers[time]) for time in self._times), default=0)
        at, age = otlp.taken_at(self.earlier.started, newest, now), self.earlier.open_step_seconds
        for number in self._age:
            age = numbers[number] if math.isfinite(numbers[number]) and numbers[number] >= 0 else None
        return replace(self.earlier, at=at, samples=tuple(samples), open_step_seconds=age)


class Templates:
    """Templates of the pushes of this host's processes, the one whose turn is next first."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Template] = {}

    def find(self, body: bytes, gpus: Gpus, now: float) -> Found | None:
        """Return the push in a body, not decoded yet. None if it must be decoded in full."""
        content, size = int.from_bytes(body, "little"), len(body)
        for key, one in [*self._kept.items()]:
            if one.size == size and (numbers := one.numbers(body, content, gpus, now)) is not None:
                self._kept[key] = self._kept.pop(key, one)
                return one.earlier, partial(one.push, numbers, now)
        return None

    def learn(self, body: bytes, push: Push, gpus: Gpus, now: float) -> None:
        """Keep a template of the push of one process, unless it is long, its last, or was refused in part."""
        if len(body) > MAX_BYTES or push.refused or push.foreign_gpu or push.status is not None:
            return
        key = push.tenant, push.run, push.rank, len(body)
        self._kept.pop(key, None)
        try:
            self._kept[key] = Template(body, push, gpus, now)
        except (ValueError, LookupError):
            return
        while len(self._kept) > MAX_TEMPLATES:
            del self._kept[next(iter(self._kept))]
