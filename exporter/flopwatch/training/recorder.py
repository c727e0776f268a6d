"""Recorder of one training process: the loop and the hooks in PyTorch append events, and the push thread adds them up.

Recording an event (totals.py) reads a clock and appends to a deque: no lock, no device synchronisation, no system call.
On CUDA it also records a CUDA event, which takes some microseconds (torch/device.py).
Errors are counted in training_hook_errors_total, and the first few are logged.
"""

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from flopwatch.catalogue import Metric
from flopwatch.training.process.parallel import Parallel
from flopwatch.training.totals import Event, Group, Mark, PackedFlops, Totals, positive

log = logging.getLogger("flopwatch")


def _add_prefix(record: logging.LogRecord) -> bool:
    """Prefix the message with "flopwatch:" if the job has set up no logging, because it is then printed alone."""
    if not logging.getLogger().handlers and not log.handlers:
        record.msg = f"flopwatch: {record.msg}"
    return True


log.addFilter(_add_prefix)

# Events that may wait for the push thread. Beyond that the loop adds them up itself.
MAX_BACKLOG = 1 << 20  # some 100 MB, after hours without the push thread
SLICE = 1 << 13  # events the loop then adds up at a time, some 15 ms: more than it records between two checks
CHECK_BACKLOG = 1 << 10  # steps or batches between two checks of the backlog

# Seconds between two measured steps, to which hooks add some 50 us on the CPU, and 260 us of marks on an H100.
MEASURED_EVERY, MEASURED_EVERY_ON_DEVICE = 0.5, 2.0

STEP = Totals.step  # looked up once, because a lookup costs time in every step
MAX_LOGGED_ERRORS = 5  # different messages per method and type of error
_logged: dict[tuple[str, type[BaseException]], set[str]] = {}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Content of one push: resource attributes, (labels, value) by family, (bounds, counts, sum) of step durations."""

    resource: dict[str, str | int | float]
    points: dict[Metric, list[tuple[dict[str, str], float]]]
    step_durations: tuple[tuple[float, ...], list[int], float] | None  # bounds in seconds; None except on rank 0
    running: tuple[int | None, float] | None = None  # the loop's thread and mean step, unless a step is overdue


def ignore(_: Event) -> None:
    """Drop the event. Takes the place of `Recorder.record` while nothing is recorded."""


def text_of(value: object) -> str:
    """Return `str(value)`, or the name of the value's type if that raises."""
    try:
        return str(value)
    except BaseException:
        return type(value).__name__


def _stack(error: BaseException) -> str:
    """Return the lines of a traceback without the marks below them.

    For the marks, Python parses sources. Before Python 3.13, if two threads parse at a time, one may raise SystemError.
    That thread may be the job's (https://github.com/python/cpython/issues/106905).
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    return "\n".join(["", *lines, type(error).__name__])


class Recorder:
    """Events and gauges of one process that started at `start` on `clock`, in seconds. Drops events until `begin()`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, start: float = 0.0) -> None:
        self.clock = clock
        self.mark: Callable[[], Mark] = clock  # the host's clock, as in the next two, until follow()
        self.mark_after: Callable[[Mark], Mark] = lambda began: self.mark()
        self.step_mark: Callable[[], Mark] = clock
        self.record: Callable[[Event], None] = ignore
        self.totals = Totals(start, self.failed)
        self.start = start
        self.lock = threading.Lock()  # of the totals; the loop never waits for it
        self.errors = 0
        self.rank = 0
        self.parallel: Parallel | None = None  # this rank's coordinates
        self.process_groups: list[tuple[str, Any]] = []  # kinds and groups that the job named
        self.step_source, self.flops_source = "manual", "declared"
        self.pushing = self.finished = False
        self.watched = False  # a model's phases are measured, so step durations are needed even without pushes
        self.steps_taken = 0  # since the process started
        self.check_at = 1  # the next step at which the loop calls `schedule`
        self.measuring = True  # phases and waits of the open step
        self.waited_at = 0  # steps taken before the last wait
        self.no_wait_because: str | None = None  # reason why waits are not measured
        self.in_wait = False  # in the loop's thread, so that a wait inside another one counts once
        self.polls: list[Callable[[], None]] = []
        self.messages = Counter[Group]()  # that this rank began to send or receive in a pipeline
        self.gauges: dict[tuple[Metric, tuple[tuple[str, str], ...]], float] = {}
        self._origin: tuple[int | None, int] | None = None  # step restored, and steps taken before that
        self.measured_every = MEASURED_EVERY  # seconds
        self.measure_every = 1  # N: phases and waits are measured in every N-th step, on all ranks
        self.measures_by_time = True  # `choose_steps` sets N

    def follow(self, device: Any) -> None:
        """Take marks from a torch.device.Moments from now on, and measure steps less often: a mark there costs more."""
        self.mark, self.mark_after, self.step_mark = device.mark, device.mark_after, device.step_mark
        self.measured_every = MEASURED_EVERY_ON_DEVICE

    def begin(self) -> None:
        """Start recording."""
        self.record = self.totals.events.append

    def end(self) -> None:
        """Stop recording. From now on a step is not recorded, but counted and logged as an error."""
        self.finished = True

        def late(event: Event) -> None:
            if event[0] is STEP:
                self.failed("step", RuntimeError("a step after finish() is not counted; call finish() last"))

        self.record, self.measuring = late, False

    @property
    def alive(self) -> bool:
        """Return whether recorded events will still be pushed."""
        return self.pushing and not self.finished

    def failed(self, what: str, error: BaseException) -> None:
        """Count an error in `what`, a method or hook, and log its first few different messages. Never raises."""
        self.errors += 1
        try:
            text, logged = text_of(error), _logged.setdefault((what, type(error)), set())
            if text not in logged and len(logged) < MAX_LOGGED_ERRORS:
                logged.add(text)
                usage = isinstance(error, (TypeError, ValueError, RuntimeError))
                stack = "" if usage else _stack(error)
                log.warning("run.%s: %s (training goes on; this is logged once)%s", what, text, stack)
        except Exception:
            pass  # a log handler of the job fails; the error is counted

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Report an exception inside the `with` statement as one of `what`, and continue after it."""
        try:
            yield
        except Exception as error:
            self.failed(what, error)

    def note(self, what: str, kind: Callable[..., None], *arguments: object, at: Mark | None = None) -> None:
        """Record an event of `kind`, a method of Totals, at a mark or now. Errors are reported as those of `what`."""
        try:
            self.record((kind, self.mark() if at is None else at, *arguments))
        except Exception as error:
            self.failed(what, error)

    @property
    def position(self) -> int | None:
        """Return the run's completed steps, restored ones included. None if unknown, or before the first step."""
        if self._origin is None:
            return self.steps_taken or None
        restored, taken_before = self._origin
        return None if restored is None else restored + self.steps_taken - taken_before

    def restored(self, step: int | None, tokens: float | None) -> None:
        """Record that a checkpoint was restored: its step and the replica's tokens by then. None if unknown."""
        self._origin = step, self.steps_taken
        self.record((Totals.restored, 0.0, step, tokens))

    def committed(self, step: int) -> None:
        """Record that the checkpoint of this step is durable."""
        self.note("checkpoint", Totals.commit, step, at=0.0)

    def choose_steps(self, step_seconds: float) -> None:
        """Set N of `measure_every` to the highest power of 2 of steps that take at most `measured_every` seconds."""
        every = 1
        while step_seconds > 0 and 2 * every * step_seconds <= self.measured_every:
            every *= 2
        if self.measures_by_time and every != self.measure_every:
            self.measure_every, self.check_at = every, 0

    def sample(self, every: int) -> None:
        """Measure one step in `every` from now on, however long steps take."""
        self.measure_every, self.check_at, self.measures_by_time = every, 0, False

    def schedule(self, taken: int) -> None:
        """Decide after step `taken` whether to measure the next step, and at which step to decide again."""
        every = self.measure_every
        self.measuring = taken % every == 0 and not self.finished
        until = CHECK_BACKLOG
        if every > 1:
            until = 1 if self.measuring else every - taken % every
        self.check_at = taken + min(until, CHECK_BACKLOG)

    def check_backlog(self) -> None:
        """If too many events wait, add up SLICE of them on the loop's thread, or drop all if no total is needed."""
        # Without pushes only the step duration is needed, which decides what steps are measured.
        keep = self.pushing or self.watched
        if len(self.totals.events) <= (MAX_BACKLOG if self.pushing or not self.watched else CHECK_BACKLOG):
            return
        if self.lock.acquire(blocking=False):
            try:
                if keep:
                    self.totals.take(all_of_them=True, limit=SLICE)
                    self.choose_steps(self.totals.step_seconds)
                else:
                    self.totals.events.clear()
            finally:
                self.lock.release()

    def phase(self, name: str, began: Mark, ended: Mark) -> None:
        """Record that the phase `name`, one of catalogue.PHASES, of the open step lasted from one mark to the other."""
        self.record((Totals.phase, ended, name, began, ended))

    def waited(self, began: Mark, ended: Mark, group: Group | None = None) -> None:
        """Record that this rank waited for others of a process group. The open step then counts as measured."""
        self.waited_at = self.steps_taken
        self.record((Totals.waited, ended, began, ended, group))

    def measures_wait(self) -> None:
        """Declare that every measured step calls `waited`. Afterwards, a step without that call is not measured."""
        self.totals.measures_wait, self.no_wait_because = True, None

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add `amount` to the counter `metric` with these labels."""
        self.record((Totals.add, 0.0, metric, tuple(labels.items()), float(amount)))

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge or a counter's total, ahead of queued events, because in a hang the value is evidence."""
        self.gauges[metric, tuple(labels.items())] = float(value)

    def replace(self, metric: Metric, values: Mapping[tuple[tuple[str, str], ...], float]) -> None:
        """Set a gauge for these labels, and end it for all others."""
        for key in [key for key in self.gauges if key[0] is metric and key[1] not in values]:
            del self.gauges[key]
        self.gauges |= {(metric, labels): float(value) for labels, value in values.items()}

    def poll(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which the push thread calls before every snapshot except the last."""
        self.polls.append(callback)

    def enter(self, name: str, thread: int | None = None, at: Mark | None = None) -> None:
        """Begin an activity, one of timeline.DECLARED, on `thread` or this one, at the mark `at` or now."""
        self.note("activity", Totals.enter, name, get_ident() if thread is None else thread, at=at)

    def leave(self, name: str, thread: int | None = None, at: Mark | None = None) -> None:
        """End the innermost open activity of this name, and every activity begun inside it."""
        self.note("activity", Totals.leave, name, get_ident() if thread is None else thread, at=at)

    def waited_for_batch(self, began: Mark, ended: Mark) -> None:
        """Record that this thread waited for a training batch between two marks."""
        self.note("batches", Totals.waits_for_batch, get_ident(), at=began)
        self.note("batches", Totals.got_batch, get_ident(), at=ended)

    @property
    def has_flops(self) -> bool:
        """Return whether FLOPs per token, or a formula for packed samples, are set."""
        return self.totals.flops_per_token is not None or self.totals.packed_flops is not None

    def counted(self, flops: float) -> None:
        """Record FLOPs counted for the open step on this rank's pipeline stage, in place of declared FLOPs."""
        # Other stages are assumed to need as many, which is right in the sum over all stages.
        self.flops_source = "counted"
        stages = self.parallel.pp[1] if self.parallel is not None and self.parallel.pp is not None else 1
        self.record((Totals.counted_flops, 0.0, flops * stages))

    def uncountable(self, reason: str) -> None:
        """Log why FLOPs cannot be counted. The run then has no MFU, unless FLOPs are declared."""
        if not self.has_flops:
            by_command = self.step_source == "optimizer"
            advice = "--config or --flops-per-token" if by_command else "Run(flops_per_token=...)"
            log.warning("no MFU: FLOPs cannot be counted: %s; pass %s", reason, advice)
        self.totals.uncountable = True

    def set_flops(self, *, convention: str, source: str, per_token: float | PackedFlops | None = None) -> None:
        """Set convention and source of FLOPs and, if given, FLOPs per token, once they are known after the start."""
        self.totals.convention, self.flops_source = convention, source
        if hasattr(per_token, "flops"):
            self.totals.packed_flops = per_token
        elif per_token is not None:
            with self.reporting("set_flops"):
                self.totals.flops_per_token = positive("flops_per_token", per_token)
