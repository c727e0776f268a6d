"""Totals of one training process: counters, positions and activities, added up from recorded events.

The loop appends events (method, mark, arguments) to a deque, and `Totals.take` calls the methods in order in the push
thread. A mark is seconds on the run's clock, or a Moment, which delays later events until the device has reached it.
Waits and phases of a step count only if no other activity interrupted it and it took at most twice the mean. Otherwise
a rank that saves a checkpoint alone would look like the straggler.
"""

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, Protocol

from flopwatch import catalogue
from flopwatch.catalogue import Metric
from flopwatch.training.timeline import Timeline

PERCENTILES = (50, 90, 99)
RECENT_SECONDS, RECENT_LEAST, RECENT_MOST = 300.0, 100, 1_000  # steps whose duration is kept for the percentiles
DURATION_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)  # seconds

WHOLE_JOB = "world"  # kind of the process group of all ranks
MAX_GROUPS = 16  # process groups of a rank whose waits are kept apart

# Seconds that a device may lag. Beyond that time goes on without it, so that a hang becomes visible.
MAX_LAG = 10.0

# A loss is a spike if it exceeds the mean by this many standard deviations and by this share of the mean.
SPIKE_DEVIATIONS = 6.0
SPIKE_SHARE = 0.1
SPIKE_AFTER = 20  # losses
SPIKE_MEMORY = 64  # about as many recent losses count in mean and variance


class Moment(Protocol):
    """Point in a device's work. Its time is known once the device has reached it."""

    recorded: float  # seconds on the run's clock when the host recorded it, which is not later than the moment

    def at(self) -> float | None:
        """Return the moment in seconds on the run's clock, None if the device has not reached it yet."""


class MissedMark(float):
    """Host's clock at a point in a device's work that has no moment, because no event was free.

    The device may be seconds behind, so no wait or phase of the open step counts, nor a step that begins or ends here.
    """

    __slots__ = ()


class CapturedMark(float):
    """Host's clock while a CUDA graph is captured, in which no time can be read from an event."""

    __slots__ = ()


Mark = float | Moment
Labels = tuple[tuple[str, str], ...]
Group = tuple[str, str]  # kind of a process group (tp, cp, ep, pp, dp, world, group), and its ranks as text
Event = tuple[Any, ...]  # a method of Totals, a Mark, and the method's other arguments


class PackedFlops(Protocol):
    """Formula for the FLOPs of packed samples, such as `flopwatch.flops.Transformer`."""

    def flops(self, tokens: int, sum_len_squared: int, convention: Any) -> float:
        """Return the FLOPs of samples with this number of tokens and this sum of their squared lengths."""


class Work(NamedTuple):
    """Arguments of one Run.step(), about this rank's model replica unless noted. None if not given."""

    tokens: float | None = None
    global_tokens: float | None = None  # of all ranks
    sum_len_squared: float | None = None
    flops: float | None = None
    samples: float | None = None
    loss: float | None = None
    grad_norm: float | None = None


class Spikes:
    """Counter of losses that are far above the running mean."""

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._mean = self._variance = 0.0

    def see(self, loss: float) -> None:
        """Count a finite loss if it is a spike. Then update mean and variance, with a spike cut to the limit."""
        limit = self._mean + max(SPIKE_DEVIATIONS * math.sqrt(self._variance), SPIKE_SHARE * abs(self._mean))
        if self._seen >= SPIKE_AFTER and loss > limit:
            self.count += 1
            loss = limit
        self._seen += 1
        weight = 1 / min(self._seen, SPIKE_MEMORY)
        change = loss - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change * change)


class Totals:
    """Totals of one process since `start` on its clock, for one thread at a time. `failed` receives events' errors."""

    def __init__(self, start: float, failed: Callable[[str, Exception], None]) -> None:
        self.timeline = Timeline(start)
        self.events: deque[Event] = deque()
        self._failed = failed
        self._now = start
        self.loop_thread: int | None = None  # takes the steps; None before the first
        # Facts of the run, set from outside when they become known.
        self.world_size = 1
        self.replica_ranks: float | None = None
        self.convention = "causal"
        self.flops_per_token: float | None = None
        self.packed_flops: PackedFlops | None = None
        self.hardware_flops_per_token: float | None = None
        self.uncountable = False  # FLOPs cannot be counted
        self.measures_wait = False
        self.steps = 0
        self.tokens = self.samples = self.flops = self.hardware_flops = 0.0
        self.tokens_known, self.samples_known = True, False
        self.no_flops_because: str | None = None
        self.position: int | None = None  # None until it is known
        self.lost = False  # a checkpoint without a step was restored
        self.restored_step: int | None = None
        self.position_tokens: float | None = 0.0
        self.committed: int | None = None
        self.last_step: float | None = None  # on the run's clock
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.nonfinite: dict[str, int] = {}
        self.spikes: Spikes | None = None
        self.background = 0.0
        self.saves_in_background = False
        self.wait = 0.0
        self.group_waits: dict[Group, float] = {}
        self.phases: dict[str, float] = {}
        self.measured_seconds = 0.0
        self.measured_steps = 0
        self.measured_tokens = 0.0
        self.computing_squares = 0.0  # of the seconds of each measured step in which the rank did not wait
        self.durations = [0] * (len(DURATION_BOUNDS) + 1)
        self.duration_sum = 0.0
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT_MOST)  # end and duration of steps
        self.others: dict[Metric, dict[Labels, float]] = {}
        # The open step's.
        self._wait: float | None = None  # None: not measured
        self._group_waits: dict[Group, float] = {}
        self._phases: dict[str, float] = {}
        self._counted_flops: float | None = None
        self._missed = False  # a mark, so waits and phases are not known
        self._missed_end = self._missed_begin = False  # the mark of the last event, and the mark that began the step
        self._refused = False  # packed_flops raised
        self.step_seconds = 0.0  # of one step, the running mean

    def take(self, *, all_of_them: bool = False, limit: int = sys.maxsize) -> None:
        """Add up at most `limit` events. Stop at a moment that the device has not reached, unless `all_of_them`."""
        events = self.events
        for _ in range(min(len(events), limit)):  # not those recorded meanwhile, because a loop may record faster
            what, mark, *arguments = events[0]
            try:
                if type(mark) is float:  # the host's clock
                    now, self._missed_end = mark, False
                else:
                    now = mark if isinstance(mark, (int, float)) else mark.at()
                    if now is None and not all_of_them:
                        return
                    now = mark.recorded if now is None else now
                    self._missed_end = type(mark) is MissedMark
                    self._missed |= self._missed_end
                now = self._now if now < self._now else now
                # Phases and waits that ended at `now` do not move the time, because an earlier event may follow.
                if what is not Totals.phase and what is not Totals.waited:
                    self._now = now
                what(self, now, *arguments)
            except Exception as error:
                self._failed(getattr(what, "__name__", "digest"), error)
            events.popleft()

    def instant(self, now: float) -> float:
        """Return the time, at most `now`, up to which totals are complete. Later events count from that time."""
        if self.events:
            # The next event is not earlier than its recording. Time goes on if a device lags too far.
            mark = self.events[0][1]
            now = min(now, max(mark if isinstance(mark, (int, float)) else mark.recorded, now - MAX_LAG))
        self._now = max(self._now, now)
        return self._now

    def percentiles(self) -> dict[int, float]:
        """Return the percentiles of the last steps' durations in seconds; none before a step."""
        recent = self.recent
        while len(recent) > RECENT_LEAST and recent[0][0] < recent[-1][0] - RECENT_SECONDS:
            recent.popleft()
        ordered = sorted(duration for _, duration in recent)
        return {p: ordered[math.ceil(p * len(ordered) / 100) - 1] for p in PERCENTILES if ordered}

    # Methods for events: called with the event's instant, which never falls, and its arguments.

    def step(self, now: float, work: int | Work) -> None:
        """Count an optimizer step with its Work, or with its tokens alone."""
        if isinstance(work, int):
            work = Work(work)
        self.steps += 1
        if self.position is None and not self.lost:
            self.position = self.restored_step = 0
        if self.position is not None:
            self.position += 1
        self.last_step = now
        timed = self.timeline.step(now)
        tokens, measured = self.tokens, False
        if timed is not None and not (self._missed_begin or self._missed_end):
            self.recent.append((now, timed[0]))
            measured = self._time(*timed, self._missed)
        self._missed, self._missed_begin, self._wait = False, self._missed_end, None
        self._phases.clear()
        self._group_waits.clear()
        counted, self._counted_flops = self._counted_flops, None
        self._work(work, counted, capacity=timed is not None)
        if measured:
            self.measured_tokens += self.tokens - tokens
        self.logged(now, work)

    def logged(self, _: float, work: Work) -> None:
        """Set the last step's loss and gradient norm."""
        if work.loss is not None:
            self.loss = self._checked("loss", work.loss)
            if self.spikes is None:
                self.spikes = Spikes()
            if math.isfinite(work.loss):
                self.spikes.see(work.loss)
        if work.grad_norm is not None:
            self.grad_norm = self._checked("grad_norm", work.grad_norm)

    def _checked(self, name: str, value: float) -> float:
        self.nonfinite[name] = self.nonfinite.get(name, 0) + (not math.isfinite(value))
        return value

    def _time(self, duration: float, disturbed: bool, missed: bool) -> bool:
        """Add a step's duration and, if it is a measured one, its waits and phases. Return whether it is."""
        mean = self.step_seconds
        self.durations[bisect_left(DURATION_BOUNDS, duration)] += 1
        self.duration_sum += duration
        known = self._wait is not None if self.measures_wait else bool(self._phases)
        if measured := known and not disturbed and not missed and 0 < duration <= 2 * mean:
            self.wait += self._wait or 0.0
            for group, seconds in self._group_waits.items():
                if group in self.group_waits or len(self.group_waits) < MAX_GROUPS:
                    self.group_waits[group] = self.group_waits.get(group, 0.0) + seconds
            for phase, seconds in self._phases.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds
            self.measured_seconds += duration
            self.measured_steps += 1
            self.computing_squares += (duration - (self._wait or 0.0)) ** 2
        # An outlier moves the mean a little, so that it follows when steps become longer for good.
        self.step_seconds += (min(duration, 2 * mean) - mean) / 8 if mean else duration
        return measured

    def _work(self, work: Work, counted: float | None, *, capacity: bool) -> None:
        """Count tokens, samples and, if the step's time is `capacity`, FLOPs. Otherwise MFU would be too high."""
        tokens, replica = work.tokens, self.replica_ranks
        among: float | None = replica
        if work.global_tokens is not None:
            tokens, among = work.global_tokens, self.world_size
        self.tokens_known = tokens is not None and among is not None
        if tokens is not None and among is not None:
            self.tokens += tokens / among
        if work.samples is not None and replica is not None:
            self.samples += work.samples / replica
            self.samples_known = True
        if tokens is None or among is None or replica is None:
            self.position_tokens = None
        elif self.position_tokens is not None:
            self.position_tokens += tokens / among * replica
        flops = work.flops if work.flops is not None else counted
        self.no_flops_because, amount = None, 0.0
        if flops is not None:
            if replica is None:
                self.no_flops_because = "unknown_replica"
            else:
                amount = flops / replica
        elif tokens is None:
            self.no_flops_because = "uncountable" if self.uncountable else "no_tokens"
        elif among is None:
            self.no_flops_because = "unknown_replica"
        elif self.packed_flops is not None and work.sum_len_squared is not None:
            try:
                amount = self.packed_flops.flops(int(tokens), int(work.sum_len_squared), self.convention) / among
            except ValueError as error:  # under a window each length counts, and not the sum of their squares
                self.no_flops_because = "packed_under_a_window"
                if not self._refused:
                    self._failed("step", error)
                self._refused = True
        elif self.packed_flops is not None:
            self.no_flops_because = "no_sum_len_squared"
        elif self.flops_per_token is None or work.sum_len_squared is not None:
            self.no_flops_because = "uncountable" if self.uncountable else "no_flops_per_token"
        else:
            amount = tokens * self.flops_per_token / among
        if capacity:
            self.flops += amount
            if self.hardware_flops_per_token is not None and tokens is not None and among is not None:
                self.hardware_flops += tokens * self.hardware_flops_per_token / among

    def restored(self, _: float, step: int | None, tokens: float | None) -> None:
        """Set the position to a restored checkpoint's step and the replica's tokens by then. None if unknown."""
        self.position = self.restored_step = step
        self.lost = step is None
        self.position_tokens = 0.0 if step == 0 and tokens is None else tokens

    def commit(self, _: float, step: int | None) -> None:
        """Set the last durable checkpoint to `step`, or to the current position if None."""
        step = self.position if step is None else step
        if step is not None:
            self.committed = step

    def saved_in_background(self, _: float, seconds: float) -> None:
        """Add the seconds of a checkpoint save that ran while training went on."""
        self.saves_in_background = True
        self.background += max(0.0, seconds)

    def waited(self, _: float, began: Mark, ended: Mark, group: Group | None = None) -> None:
        """Add a wait for other ranks of a process group between two marks. The open step then counts as measured."""
        self._missed = self._missed or type(began) is MissedMark
        if (seconds := _between(began, ended)) is not None:
            self._wait = (self._wait or 0.0) + seconds
            if group is not None:
                self._group_waits[group] = self._group_waits.get(group, 0.0) + seconds

    def phase(self, _: float, name: str, began: Mark, ended: Mark) -> None:
        """Add the time between two marks to a phase of the open step. Raises ValueError if `name` is not a phase."""
        if name not in catalogue.PHASES:
            raise ValueError(f"{name!r} is not a phase; the catalogue has {', '.join(catalogue.PHASES)}")
        self._missed = self._missed or type(began) is MissedMark
        if (seconds := _between(began, ended)) is not None:
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    def counted_flops(self, _: float, flops: float) -> None:
        """Add FLOPs that were counted, and not declared, for the whole replica to the open step."""
        self._counted_flops = (self._counted_flops or 0.0) + flops

    def add(self, _: float, row: Metric, labels: Labels, amount: float) -> None:
        """Add `amount` to a counter with these labels."""
        samples = self.others.setdefault(row, {})
        samples[labels] = samples.get(labels, 0.0) + amount

    def enter(self, now: float, name: str, thread: int) -> None:
        """Begin the activity `name`, if `thread` is the training loop's."""
        if self._of_the_loop(thread, "activity"):
            self.timeline.enter(name, now)

    def leave(self, now: float, name: str, thread: int) -> None:
        """End the activity `name`, if `thread` is the training loop's."""
        if self._of_the_loop(thread, "activity"):
            self.timeline.leave(name, now)

    def waits_for_batch(self, now: float, thread: int) -> None:
        """Begin to wait for a batch, if `thread` is the training loop's."""
        if self._of_the_loop(thread, "batches"):
            self.timeline.wait_for_batch(now)

    def got_batch(self, now: float, thread: int) -> None:
        """End the wait for a batch, if `thread` is the training loop's."""
        if self._of_the_loop(thread, "batches"):
            self.timeline.got_batch(now)

    def end_of_batches(self, now: float, thread: int) -> None:
        """End the loop over batches, if `thread` is the training loop's."""
        if self._of_the_loop(thread, "batches"):
            self.timeline.end_of_batches(now)

    def _of_the_loop(self, thread: int, what: str) -> bool:
        if self.loop_thread == thread or self.loop_thread is None:
            return True
        self._failed(what, RuntimeError(f"{what}() is ignored on any thread but the training loop's"))
        return False


def _between(began: Mark, ended: Mark) -> float | None:
    """Return the seconds from one mark to another by the marks' own times, None if the device has not reached both."""
    since = began if isinstance(began, (int, float)) else began.at()
    until = ended if isinstance(ended, (int, float)) else ended.at()
    return None if since is None or until is None else max(0.0, until - since)


def number(name: str, value: object) -> float:
    """Return a Python number as a float. Raises ValueError for other types, such as tensors, naming `name`."""
    if isinstance(value, Real):
        return float(value)
    # Not the value itself: a tensor's repr would wait for the device.
    raise ValueError(
        f"{name}= takes a Python number, not a {type(value).__name__}; reading a tensor would stop the "
        "device, so pass what the CPU knows, such as numel()"
    )


def amount(name: str, value: object) -> float:
    """Return a finite number of at least 0 as a float. Raises ValueError for other values, naming `name`."""
    checked = number(name, value)
    if not 0 <= checked < math.inf:
        raise ValueError(f"{name}={checked!r}: counters only rise; pass a finite number of at least 0")
    return checked


def positive(name: str, value: object) -> float:
    """Return a finite number above 0 as a float. Raises ValueError for other values, naming `name`."""
    if not (checked := amount(name, value)):
        raise ValueError(f"{name}=0 is ignored; leave it out if it is unknown")
    return checked
