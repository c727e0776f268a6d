"""Times of a CUDA device's progress on the host's clock, read without ever waiting for the device.

A mark is a pooled CUDA event on the current stream. The push thread asks later whether the device has reached it. CUDA
only reports the time between two events, so a mark's time is that of the last known mark plus the time between the two.
It is limited to the interval in which the host saw the device reach the event.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__EVENT.html

Another thread's event query invalidates a CUDA graph's capture in the default mode, so that thread first leaves that
mode (https://github.com/pytorch/pytorch/pull/104487). While the current stream is captured, marks are the host's clock.
Not on ROCm, where a query breaks a capture in any mode (https://github.com/pytorch/pytorch/pull/176251).
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from flopwatch.training.totals import CapturedMark, Mark, MissedMark

Clock = Callable[[], float]
Failed = Callable[[str, Exception], None]

# Events in use, some hundred bytes each: enough for 10 s of a model of 81 FSDP2 groups. Beyond that, for example in a
# hang, marks are missed. The last ones are kept for the ends of steps.
MAX_EVENTS, STEP_EVENTS = 65_536, 64
# Moments and seconds settled at a time, so that the loop's thread gets the interpreter's lock in between.
SLICE, SLICE_SECONDS, PAUSE = 200, 0.001, 0.001
MAX_WAIT = 0.1  # seconds, for another thread that queries the device
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class TorchCuda:
    """CUDA through torch and libcuda, `driver`. Raises OSError if libcuda is missing, AttributeError if too old."""

    def __init__(self, driver: Any = None) -> None:
        self._exchange = (ctypes.CDLL("libcuda.so.1") if driver is None else driver).cuThreadExchangeStreamCaptureMode
        # Both are about this thread's current stream.
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.stream: Callable[[], Any] = torch.cuda.current_stream
        core: Any = torch._C
        self._device = getattr(core, "_cuda_getDevice", torch.cuda.current_device)
        # The handle alone, because an object for the stream takes a microsecond.
        self._handle = getattr(core, "_cuda_getCurrentRawStream", lambda _: self.stream().cuda_stream)

    def key(self) -> tuple[int, int]:
        """Return the device's index and the handle of this thread's current stream."""
        device = self._device()
        return device, self._handle(device)

    def in_use(self, device_index: int) -> bool:
        """Return whether this process has a context on that device."""
        core: Any = torch._C
        return bool(core._cuda_hasPrimaryContext(device_index))

    def event(self) -> Any:
        """Return a new event with timing enabled."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def asking(self, device_index: int) -> Iterator[None]:
        """Return a context manager in which this thread may query events of a device during any graph capture."""
        with torch.cuda.device(device_index):
            # The call swaps this thread's mode with `mode`.
            mode = ctypes.c_int(_THREAD_LOCAL)
            if result := self._exchange(ctypes.byref(mode)):
                raise RuntimeError(f"cuThreadExchangeStreamCaptureMode: CUDA error {result}")
            try:
                yield
            finally:
                self._exchange(ctypes.byref(mode))


class Moment:
    """Time at which the device reaches `event`, which the host recorded at `recorded` on its clock."""

    __slots__ = ("_at", "_event", "_line", "_not_before", "recorded")

    def __init__(self, line: "_Line", event: Any, recorded: float) -> None:
        self.recorded = recorded  # seconds on the host's clock, before which the device cannot reach the event
        self._line = line
        self._event = event
        self._not_before = recorded
        self._at: float | None = None

    def at(self) -> float | None:
        """Return the time in seconds of the host's clock, None if the device has not reached the event yet."""
        if self._at is None:
            self._line.ask()
        return self._at


class Moments:
    """Source of marks for any thread, in seconds of the host's `clock`.

    If CUDA fails, `failed` is called once, and marks are the host's clock from then on. `missed` counts the marks for
    which no event was free, because `max_events` were in use.
    """

    def __init__(self, cuda: TorchCuda, clock: Clock, failed: Failed, max_events: int = MAX_EVENTS) -> None:
        self._cuda, self._clock, self._failed, self._max_events = cuda, clock, failed, max_events
        self._devices: dict[int, _EventPool] = {}
        self._lines: dict[tuple[int, int], _Line] = {}
        self._making = threading.Lock()
        self._reserved = min(STEP_EVENTS, max_events // 16)
        self.missed = 0
        self.broken = False

    def mark(self) -> float | Moment:
        """Return a Moment on this thread's current stream, or the host's clock in seconds if CUDA cannot be used.

        A MissedMark stands for a Moment for which no event is free, a CapturedMark for one in a CUDA graph's capture.
        """
        return self._mark(self._max_events - self._reserved)

    def mark_after(self, began: Mark) -> float | Moment:
        """Return a mark on the stream of the mark `began`, on which no capture can have begun since."""
        line = began._line if type(began) is Moment else None
        return self._mark(self._max_events - self._reserved, line)

    def step_mark(self) -> float | Moment:
        """Return the mark of a step's end, for which some events are reserved."""
        return self._mark(self._max_events)

    def _mark(self, limit: int, line: "_Line | None" = None) -> float | Moment:
        now = self._clock()
        try:
            if self.broken:
                return now
            if line is None:
                if self._cuda.capturing():
                    return CapturedMark(now)
                key = self._cuda.key()
                line = self._lines.get(key) or self._new_line(key)
            return now if line is None else self._record(line, now, limit)
        except Exception as error:
            self.give_up(error)
            return now

    def _record(self, line: "_Line", now: float, limit: int) -> float | Moment:
        device = line.device
        if (event := device.take(limit)) is None:
            for other in tuple(self._lines.values()):
                if other.device is device:
                    other.settle(wait=False)
            if (event := device.take(limit)) is None:
                self.missed += 1
                return MissedMark(now)
        event.record(line.stream)
        moment = Moment(line, event, now)
        line.pending.append(moment)
        return moment

    def _new_line(self, key: tuple[int, int]) -> "_Line | None":
        # A thread that never chose a device is on GPU 0, where an event would create a context of hundreds of MB.
        index = key[0]
        if not self._cuda.in_use(index):
            return None
        with self._making:
            device = self._devices.setdefault(index, _EventPool(self._cuda, index))
            return self._lines.setdefault(key, _Line(device, self._cuda.stream(), self._clock, self.give_up))

    def give_up(self, error: Exception) -> None:
        """Report an error of CUDA, and use only the host's clock from now on."""
        if not self.broken:
            self.broken = True
            self._failed("mark", error)


class _EventPool:
    """Events of one device. The time between events of two devices is undefined."""

    def __init__(self, cuda: TorchCuda, index: int) -> None:
        self.cuda, self.index = cuda, index
        self.free: deque[Any] = deque()
        self.events = 0  # made so far
        self.asked = threading.Lock()
        self.reference: tuple[Any, float] | None = None  # the last known moment, from which others are measured

    def take(self, limit: int) -> Any:
        """Return a free or a new event, or None if `limit` events are in use."""
        if self.events - len(self.free) >= limit:
            return None
        with suppress(IndexError):
            return self.free.pop()
        self.events += 1
        return self.cuda.event()


class _Line:
    """Moments of one stream, which the device reaches in the order of recording."""

    def __init__(self, device: _EventPool, stream: Any, clock: Clock, give_up: Callable[[Exception], None]) -> None:
        self.device, self.stream, self._clock, self._give_up = device, stream, clock, give_up
        self.pending: deque[Moment] = deque()
        self._last = float("-inf")  # time of the last moment reached: none is before it

    def ask(self) -> None:
        """Set the time of every moment the device has reached, with a pause after each slice."""
        while self.settle():
            time.sleep(PAUSE)

    def settle(self, wait: bool = True) -> bool:
        """Set the times of one slice of the moments that the device has reached. Return whether there may be more.

        Without `wait`, do nothing while another thread does this.
        """
        # With a timeout: a thread that queries a wedged driver never returns.
        if not self.device.asked.acquire(timeout=MAX_WAIT if wait else 0):
            return False
        try:
            if self.pending:
                until = self._clock() + SLICE_SECONDS
                with self.device.cuda.asking(self.device.index):
                    for _ in range(SLICE):
                        if not self.pending or not self._settled(self.pending[0]):
                            return False
                        self.pending.popleft()
                        if self._clock() >= until:
                            break
                    return True
        except Exception as error:
            self._give_up(error)
            while self.pending:
                moment = self.pending.popleft()
                self._last = moment._at = max(moment._not_before, self._last)
        finally:
            self.device.asked.release()
        return False

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
        else:  # another stream was ahead
            device.free.append(moment._event)
        return True


def moments(clock: Clock, failed: Failed) -> Moments | None:
    """Return the source of marks on this process's CUDA devices, None on ROCm or if CUDA is not in use or fails."""
    if torch.version.hip is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        return Moments(TorchCuda(), clock, failed)
    except Exception as error:
        failed("mark", error)
        return None
