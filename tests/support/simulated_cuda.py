"""CUDA streams and events with a clock that the test moves."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flopwatch.training.torch.device import Moments


@dataclass
class SimulatedStream:
    """A queue of work on one device."""

    cuda: SimulatedCuda
    device_index: int = 0
    stream_id: int = 0
    free_at: float = 0.0  # when all that was asked of it is done

    def work(self, seconds: float) -> None:
        """Ask for so much work; the host goes on at once."""
        self.free_at = max(self.free_at, self.cuda.now + self.cuda.latency) + seconds


@dataclass
class SimulatedEvent:
    """An event: reached when all that was asked of its stream before it is done."""

    cuda: SimulatedCuda
    reached: float | None = None
    device_index: int | None = None

    def record(self, stream: SimulatedStream) -> None:
        if self.cuda.failing:
            raise RuntimeError("CUDA error: device-side assert triggered")
        if self.device_index not in (None, stream.device_index):
            raise RuntimeError("the event's device does not match the stream's")
        self.device_index = stream.device_index
        stream.work(0.0)
        self.reached = stream.free_at

    def query(self) -> bool:
        if self.cuda.failing:
            raise RuntimeError("CUDA error: device-side assert triggered")
        if self.cuda.another_thread_captures and not self.cuda.steps_out:
            self.cuda.broken_captures += 1
        self.cuda.queries += 1
        self.cuda.now += self.cuda.query_seconds
        assert self.reached is not None
        return not self.cuda.hangs and self.reached <= self.cuda.now

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        assert self.device_index == end_event.device_index
        assert self.reached is not None
        assert end_event.reached is not None
        milliseconds = 1e3 * (end_event.reached - self.reached) * (1 + self.cuda.drift)
        return float(struct.unpack("f", struct.pack("f", milliseconds))[0])


@dataclass
class SimulatedCuda:
    """Streams, events and the host's clock."""

    latency: float = 0.0  # seconds from a launch until an idle device begins
    drift: float = 0.0  # how much faster the device's clock is than the host's
    now: float = 1000.0
    query_seconds: float = 0.0  # of the host's time that a query takes
    hangs: bool = False
    failing: bool = False
    is_capturing: bool = False
    another_thread_captures: bool = False
    steps_out: bool = False
    broken_captures: int = 0
    queries: int = 0
    events: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # from the thread that marks, without events
    untouched: tuple[int, ...] = ()
    current: SimulatedStream = field(init=False)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = SimulatedStream(self)

    def capturing(self) -> bool:
        self.calls["capturing"] += 1
        return self.is_capturing

    def key(self) -> tuple[int, int]:
        self.calls["key"] += 1
        return self.current.device_index, self.current.stream_id

    def stream(self) -> SimulatedStream:
        self.calls["stream"] += 1
        return self.current

    def in_use(self, device_index: int) -> bool:
        return device_index not in self.untouched

    def event(self) -> SimulatedEvent:
        self.events += 1
        return SimulatedEvent(self)

    @contextmanager
    def asking(self, device_index: int) -> Iterator[None]:
        assert device_index == self.current.device_index
        self.steps_out = True
        yield
        self.steps_out = False

    def moments(self, **arguments: Any) -> Moments:
        cuda: Any = self
        return Moments(cuda, lambda: self.now, lambda what, error: self.errors.append(f"{what}: {error}"), **arguments)

    def finish(self) -> None:
        """Let the host wait until all is done."""
        self.now = max(self.now, self.current.free_at)
