"""What the loop recorded, added up: the hook's counters, positions and activities.

The loop appends entries (what happened, when, with what) to a deque; `Books.take` adds them up in order, in the thread
that pushes. "When" is a Mark: seconds on the run's clock or, where a device does the work and the host runs ahead of
it, a Moment, which is known once the device got there. An entry whose moment is not known yet holds back those behind
it, so the books follow the device, and each of them is of one instant.

The wait for other ranks and the phases count as measured in a step only if nothing but the step happened in it and it
took at most twice the running mean: when one rank stops for a checkpoint of its own the others wait for it in the next
all-reduce, and it must not be blamed for that. All ranks see that long step, and all leave it out.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from flopwatch import catalogue
from flopwatch.catalogue import Metric
from flopwatch.training.timeline import Timeline

DURATION_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)  # seconds

# How long, in seconds, a device may be behind until the open activity's age goes on without it: a hang is to be seen.
LONGEST_LAG = 10.0

# A loss is a spike if it is this many standard deviations and this share of the mean above the mean of those before.
SPIKE_DEVIATIONS = 6.0
SPIKE_SHARE = 0.1
SPIKE_AFTER = 20  # losses
SPIKE_MEMORY = 64  # losses whose mean and spread count, about


class Moment(Protocol):
    """When a device gets somewhere."""

    recorded: float  # on the run's clock: when the host asked for it, so it is not before that

    def at(self) -> float | None:
        """Return when on the run's clock that was; None if the device is not there yet."""


Mark = float | Moment
Labels = tuple[tuple[str, str], ...]
Entry = tuple[Any, ...]  # a method of Books, a Mark, and the method's other arguments


class PackedFlops(Protocol):
    """What `flops_per_token` must be for packed samples: `flopwatch.flops.Transformer` is one."""

    def flops(self, tokens: int, sum_len_squared: int, convention: Any) -> float:
        """Return the FLOPs of samples with so many tokens and such a sum of squared lengths."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step consumed and found, of this rank's model replica."""

    tokens: float | None = None
    global_tokens: float | None = None  # of all ranks
    sum_len_squared: float | None = None
    flops: float | None = None
    samples: float | None = None
    loss: float | None = None
    grad_norm: float | None = None


class Spikes:
    """Losses far above those before them."""

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._mean = self._variance = 0.0

    def see(self, loss: float) -> None:
        """Take a finite loss; one that is a spike moves mean and spread no further than the limit."""
        limit = self._mean + max(SPIKE_DEVIATIONS * math.sqrt(self._variance), SPIKE_SHARE * abs(self._mean))
        if self._seen >= SPIKE_AFTER and loss > limit:
            self.count += 1
            loss = limit
        self._seen += 1
        weight = 1 / min(self._seen, SPIKE_MEMORY)
        change = loss - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change * change)


class Books:
    """The totals since the process started, and the positions; used by one thread at a time."""

    def __init__(self, start: float, failed: Callable[[str, Exception], None]) -> None:
        """Open the books at `start` on the run's clock; `failed` is told what was wrong with an entry."""
        self.timeline = Timeline(start)
        self.entries: deque[Entry] = deque()
        self._failed = failed
        self._now = start
        self.loop_thread: int | None = None
        # What is known of the run; set from outside whenever it becomes known.
        self.world_size = 1
        self.replica_ranks: float | None = None
        self.convention = "causal"
        self.flops_per_token: float | None = None
        self.packed_flops: PackedFlops | None = None
        self.hardware_flops_per_token: float | None = None
        self.uncountable = False  # the FLOPs, by counting
        self.measures_wait = False
        # The totals.
        self.steps = 0
        self.tokens = self.samples = self.flops = self.hardware_flops = 0.0
        self.tokens_known, self.samples_known = True, False
        self.no_flops_because: str | None = None
        self.position: int | None = None  # None until it is known
        self.lost = False  # it never will be
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
        self.phases: dict[str, float] = {}
        self.measured_seconds = 0.0
        self.measured_steps = 0
        self.durations = [0] * (len(DURATION_BOUNDS) + 1)
        self.duration_sum = 0.0
        self.others: dict[Metric, dict[Labels, float]] = {}
        # The open step's.
        self._wait: float | None = None  # None: not measured
        self._phases: dict[str, float] = {}
        self._found_flops: float | None = None
        self._refused = False  # by packed_flops
        self.step_seconds = 0.0  # of one step, the running mean

    def take(self, *, all_of_them: bool = False, most: int = sys.maxsize) -> None:
        """Add up what was recorded, up to the first moment not known yet or, with `all_of_them`, beyond it."""
        entries = self.entries
        for _ in range(min(len(entries), most)):  # no more than there are: a loop may record faster than this
            entry = entries[0]
            what, mark = entry[0], entry[1]
            try:
                now = mark if isinstance(mark, (int, float)) else mark.at()
                if now is None:
                    if not all_of_them:
                        return
                    now = mark.recorded
                now = max(now, self._now)
                # What lasted until `now` moves nothing: what is told late, of a moment before, still finds its place.
                if what is not Books.phase and what is not Books.waited:
                    self._now = now
                what(self, now, *entry[2:])
            except Exception as error:
                self._failed(getattr(what, "__name__", "digest"), error)
            entries.popleft()

    def instant(self, now: float) -> float:
        """Return which instant the books are of if the run's clock says `now`, and hold later entries to it."""
        if self.entries:
            # The next entry is not before it was recorded. A device that is far behind hangs, and time goes on.
            mark = self.entries[0][1]
            now = min(now, max(mark if isinstance(mark, (int, float)) else mark.recorded, now - LONGEST_LAG))
        self._now = max(self._now, now)
        return self._now

    # What can be recorded: called with the instant, which never falls, and the entry's arguments.

    def step(self, now: float, work: int | Work) -> None:
        """An optimizer step ended; a bare number is its tokens."""
        if isinstance(work, int):
            work = Work(work)
        self.steps += 1
        if self.position is None and not self.lost:
            self.position = self.restored_step = 0
        if self.position is not None:
            self.position += 1
        self.last_step = now
        timed = self.timeline.step(now)
        if timed is not None:
            self._time(*timed)
        self._wait = None
        self._phases.clear()
        found, self._found_flops = self._found_flops, None
        self._work(work, found, capacity=timed is not None)
        self.logged(now, work)

    def logged(self, _: float, work: Work) -> None:
        """The loss and grad_norm of the last step became known."""
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

    def _time(self, duration: float, disturbed: bool) -> None:
        mean = self.step_seconds
        self.durations[bisect_left(DURATION_BOUNDS, duration)] += 1
        self.duration_sum += duration
        measured = self._wait is not None if self.measures_wait else bool(self._phases)
        if measured and not disturbed and 0 < duration <= 2 * mean:
            self.wait += self._wait or 0.0
            for phase, seconds in self._phases.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds
            self.measured_seconds += duration
            self.measured_steps += 1
        # An outlier moves the mean a little, so that it follows when steps become longer for good.
        self.step_seconds += (min(duration, 2 * mean) - mean) / 8 if mean else duration

    def _work(self, work: Work, found: float | None, *, capacity: bool) -> None:
        """Count tokens, samples and, where the step's time is capacity, FLOPs: else they would flatter the MFU."""
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
        if self.position_tokens is not None:
            self.position_tokens = (
                None
                if tokens is None or among is None or replica is None
                else self.position_tokens + tokens / among * replica
            )
        flops = work.flops if work.flops is not None else found
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
        elif self.packed_flops is not None:
            if work.sum_len_squared is None:
                self.no_flops_because = "no_sum_len_squared"
            else:
                try:
                    amount = self.packed_flops.flops(int(tokens), int(work.sum_len_squared), self.convention) / among
                except ValueError as error:  # under a window each length counts, and not the sum of their squares
                    self.no_flops_because = "packed_under_a_window"
                    if not self._refused:
                        self._failed("step", error)
                    self._refused = True
        elif self.flops_per_token is None or work.sum_len_squared is not None:
            self.no_flops_because = "uncountable" if self.uncountable else "no_flops_per_token"
        else:
            amount = tokens * self.flops_per_token / among
        if capacity:
            self.flops += amount
            if self.hardware_flops_per_token is not None and tokens is not None and among is not None:
                self.hardware_flops += tokens * self.hardware_flops_per_token / among

    def restored(self, _: float, step: int | None, tokens: float | None) -> None:
        """A checkpoint of this step, and of so many tokens of the replica, was restored; None if that is unknown."""
        self.position = self.restored_step = step
        self.lost = step is None
        self.position_tokens = 0.0 if step == 0 and tokens is None else tokens

    def commit(self, _: float, step: int | None) -> None:
        """A checkpoint of this step, or of the last one, is durable."""
        step = self.position if step is None else step
        if step is not None:
            self.committed = step

    def saved_in_background(self, _: float, seconds: float) -> None:
        """A checkpoint was being written so long while training went on."""
        self.saves_in_background = True
        self.background += max(0.0, seconds)

    def waited(self, _: float, began: Mark, ended: Mark) -> None:
        """This rank waited for others between two marks; the open step is thereby measured."""
        if (seconds := _between(began, ended)) is not None:
            self._wait = (self._wait or 0.0) + seconds

    def phase(self, _: float, name: str, began: Mark, ended: Mark) -> None:
        """A phase of the open step lasted from one mark to another."""
        if name not in catalogue.PHASES:
            raise ValueError(f"{name!r} is no phase; the catalogue has {', '.join(catalogue.PHASES)}")
        if (seconds := _between(began, ended)) is not None:
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    def found_flops(self, _: float, flops: float) -> None:
        """A forward pass of the open step needs, with its backward pass, so many FLOPs of the whole replica."""
        self._found_flops = (self._found_flops or 0.0) + flops

    def add(self, _: float, row: Metric, labels: Labels, amount: float) -> None:
        """Add to a counter."""
        samples = self.others.setdefault(row, {})
        samples[labels] = samples.get(labels, 0.0) + amount

    def enter(self, now: float, name: str, thread: int) -> None:
        """A declared activity begins, on a thread."""
        if self._of_the_loop(thread, "activity"):
            self.timeline.enter(name, now)

    def leave(self, now: float, name: str, thread: int) -> None:
        """A declared activity ends, on a thread."""
        if self._of_the_loop(thread, "activity"):
            self.timeline.leave(name, now)

    def waits_for_batch(self, now: float, thread: int) -> None:
        """The loop asks for a batch."""
        if self._of_the_loop(thread, "batches"):
            self.timeline.wait_for_batch(now)

    def got_batch(self, now: float, thread: int) -> None:
        """The loop has its batch."""
        if self._of_the_loop(thread, "batches"):
            self.timeline.got_batch(now)

    def end_of_batches(self, now: float, thread: int) -> None:
        """The loop over batches is left."""
        if self._of_the_loop(thread, "batches"):
            self.timeline.end_of_batches(now)

    def _of_the_loop(self, thread: int, what: str) -> bool:
        if self.loop_thread in (None, thread):
            return True
        self._failed(what, RuntimeError(f"{what}() on another thread is not the training loop's time, and is ignored"))
        return False


def _between(began: Mark, ended: Mark) -> float | None:
    """Return the seconds from one mark to another, None if the device is not there yet.

    By the marks' own times: among those of a device that is behind, one of the host's clock is earlier than the books.
    """
    since = began if isinstance(began, (int, float)) else began.at()
    until = ended if isinstance(ended, (int, float)) else ended.at()
    return None if since is None or until is None else max(0.0, until - since)


def number(name: str, value: object) -> float:
    """Return a plain number as a float. Raises ValueError."""
    if isinstance(value, Real):
        return float(value)
    # Not the value itself: a tensor's repr would wait for the device.
    raise ValueError(
        f"{name}= takes a Python number, not a {type(value).__name__}; reading a tensor would stop the "
        "device, so pass what the CPU knows, such as numel()"
    )


def amount(name: str, value: object) -> float:
    """Return a finite number of at least 0 as a float. Raises ValueError."""
    checked = number(name, value)
    if not 0 <= checked < math.inf:
        raise ValueError(f"{name}={checked!r}: counters only rise; pass a finite number of at least 0")
    return checked
