"""When a CUDA device gets somewhere, on the host's clock, without ever waiting for it.

The host runs ahead of the device, so "now" there is a pooled CUDA event on the current stream, asked for much later,
in the thread that pushes: `Moments.mark()` records one, `Moment.at()` says when the device got there, or None.

CUDA tells only the time between two events. They are chained: a moment is the one known last plus the time between
the two, but never before the host recorded it or last found it not reached, nor after it was first found reached. So
where the device was idle the chain is set right to the launch latency, some microseconds, and a drift of the device's
clock is bounded by how often it is asked. The gap between two moments is the device's own, to about a microsecond
(events resolve half of one, and elapsed_time is a 32-bit float of milliseconds: 1 us after 10 s, 8 us after 100 s).
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__EVENT.html

What asks must not disturb. While a thread captures a CUDA graph in the default mode, another thread's event query
invalidates the capture (https://github.com/pytorch/pytorch/pull/104487), so the asking thread steps out of that rule
first, by cuThreadExchangeStreamCaptureMode; and it takes the event's device, or it would create a context on GPU 0.
While the current stream is captured, "now" is the host's clock: nothing runs on the device then.

Not on ROCm, where a query breaks a capture in any mode (https://github.com/pytorch/pytorch/pull/176251).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

# Events in use at most; beyond that, in a hang say, "now" is the host's clock. Some hundred bytes each.
MOST_EVENTS = 4096

# Seconds to wait for another thread that asks the device.
LONGEST_WAIT = 0.1

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Be reached once all that was asked of the stream so far is done."""

    def query(self) -> bool:
        """Return whether it is reached."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to the other, both reached."""


class Stream(Protocol):
    """What is used of torch.cuda.Stream."""

    device_index: int
    stream_id: int


class Cuda(Protocol):
    """What is used of CUDA: torch's, or a simulated device."""

    def capturing(self) -> bool:
        """Return whether this thread's current stream is being captured into a graph."""

    def stream(self) -> Stream:
        """Return this thread's current stream."""

    def in_use(self, device_index: int) -> bool:
        """Return whether this process has a context on that device."""

    def event(self) -> Event:
        """Return a new event that can be timed."""

    def asking(self, device_index: int) -> AbstractContextManager[None]:
        """Return a context in which this thread may ask for events of that device, whatever other threads do."""


class TorchCuda:
    """CUDA as torch has it; `driver` is libcuda. Raises OSError or AttributeError where that is missing or too old."""

    def __init__(self, driver: Any = None) -> None:
        self._exchange = (ctypes.CDLL("libcuda.so.1") if driver is None else driver).cuThreadExchangeStreamCaptureMode
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.stream: Callable[[], Stream] = torch.cuda.current_stream

    def in_use(self, device_index: int) -> bool:
        """Return whether this process has a context on that device."""
        core: Any = torch._C
        return bool(core._cuda_hasPrimaryContext(device_index))

    def event(self) -> Event:
        """Return a new event that can be timed."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def asking(self, device_index: int) -> Iterator[None]:
        """Return a context in which this thread may ask for events of that device, whatever other threads capture."""
        with torch.cuda.device(device_index):
            # It swaps this thread's mode with the one given.
            mode = ctypes.c_int(_THREAD_LOCAL)
            if result := self._exchange(ctypes.byref(mode)):
                raise RuntimeError(f"cuThreadExchangeStreamCaptureMode: CUDA error {result}")
            try:
                yield
            finally:
                self._exchange(ctypes.byref(mode))


class Moment:
    """When a device gets where it was told to as this was made."""

    __slots__ = ("_at", "_event", "_line", "_not_before", "recorded")

    def __init__(self, line: _Line, event: Event, recorded: float) -> None:
        self.recorded = recorded  # on the host's clock: the device is not there before that
        self._line = line
        self._event = event
        self._not_before = recorded
        self._at: float | None = None

    def at(self) -> float | None:
        """Return when that was in seconds of the host's clock; None if the device is not there yet."""
        if self._at is None:
            self._line.ask()
        return self._at


class Moments:
    """Makes moments, on any thread, of the host's `clock`.

    If CUDA fails, `failed` is told once, and "now" is the host's clock from then on. `short_of_events` counts the marks
    that were the host's clock because `most_events` were in use.
    """

    def __init__(
        self,
        cuda: Cuda,
        clock: Callable[[], float],
        failed: Callable[[str, Exception], None],
        most_events: int = MOST_EVENTS,
    ) -> None:
        self._cuda = cuda
        self._clock = clock
        self._failed = failed
        self._most_events = most_events
        self._devices: dict[int, _Device] = {}
        self._lines: dict[tuple[int, int], _Line] = {}
        self._making = threading.Lock()
        self.short_of_events = 0
        self.broken = False

    def mark(self) -> float | Moment:
        """Return "now" on this thread's current stream; seconds of the host's clock where that is all there is."""
        now = self._clock()
        try:
            if self.broken or self._cuda.capturing():
                return now
            stream = self._cuda.stream()
            line = self._lines.get((stream.device_index, stream.stream_id)) or self._new_line(stream)
            if line is None:
                return now
            device = line.device
            try:
                event = device.free.pop()
            except IndexError:
                if device.events >= self._most_events:
                    self.short_of_events += 1
                    return now
                device.events += 1
                event = self._cuda.event()
            event.record(stream)
            moment = Moment(line, event, now)
            line.pending.append(moment)
            return moment
        except Exception as error:
            self.give_up(error)
            return now

    def _new_line(self, stream: Stream) -> _Line | None:
        # A thread that never chose a device is on GPU 0, on which an event would make a context of hundreds of MB.
        if not self._cuda.in_use(stream.device_index):
            return None
        with self._making:
            device = self._devices.setdefault(stream.device_index, _Device(self._cuda, stream.device_index))
            return self._lines.setdefault(
                (stream.device_index, stream.stream_id), _Line(device, self._clock, self.give_up)
            )

    def give_up(self, error: Exception) -> None:
        """Use the host's clock from now on: the device failed, and so will the job."""
        if not self.broken:
            self.broken = True
            self._failed("mark", error)


class _Device:
    """Events of one device: time between those of different devices is not defined."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda = cuda
        self.index = index
        self.free: deque[Event] = deque()
        self.events = 0  # made so far
        self.asked = threading.Lock()
        self.reference: tuple[Event, float] | None = None  # the moment known last, which others are measured from


class _Line:
    """The moments of one stream, which are reached in the order they were recorded in."""

    def __init__(self, device: _Device, clock: Callable[[], float], give_up: Callable[[Exception], None]) -> None:
        self.device = device
        self.pending: deque[Moment] = deque()
        self._clock = clock
        self._give_up = give_up
        self._last = float("-inf")  # no moment is before the one before

    def ask(self) -> None:
        """Settle every moment the device has reached."""
        # Not for long: a thread that asks a wedged driver never comes back.
        if not self.device.asked.acquire(timeout=LONGEST_WAIT):
            return
        try:
            if self.pending:
                with self.device.cuda.asking(self.device.index):
                    while self.pending and self._settled(self.pending[0]):
                        self.pending.popleft()
        except Exception as error:
            self._give_up(error)
            while self.pending:
                moment = self.pending.popleft()
                self._last = moment._at = max(moment._not_before, self._last)
        finally:
            self.device.asked.release()

    def _settled(self, moment: Moment) -> bool:
        device, asked = self.device, self._clock()
        if not moment._event.query():
            moment._not_before = asked
            return False
        seen = self._clock()
        at = max(moment._not_before, self._last)
        if device.reference is not None:
            event, known = device.reference
            at = max(at, known + event.elapsed_time(moment._event) / 1e3)
        moment._at = self._last = at = min(at, seen)
        if device.reference is None or at >= device.reference[1]:
            if device.reference is not None:
                device.free.append(device.reference[0])
            device.reference = (moment._event, at)
        else:  # another stream was further
            device.free.append(moment._event)
        return True


def moments(clock: Callable[[], float], failed: Callable[[str, Exception], None]) -> Moments | None:
    """Return what makes moments on this process's CUDA devices; None if CUDA is not in use. Initialises nothing."""
    if torch.version.hip is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        return Moments(TorchCuda(), clock, failed)
    except Exception as error:
        failed("mark", error)
        return None
