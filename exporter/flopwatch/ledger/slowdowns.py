"""Slow stretches and stalls of a run, compared with the run's own usual pace. docs/ledger.md defines both.

Snapshots are cumulative and arrive every few seconds or once an hour. Usual values are medians over the last 60 minutes
of steps and the last 16 checkpoints, without slow stretches of less than four hours and steps executed again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

SLOW, FAST_AGAIN = 1.2, 1.1  # times the usual step
MIN_SLOW_SECONDS, MIN_SLOW_STEPS = 300.0, 20
MAX_SLOW_SECONDS = 4 * 3600.0
MIN_STALL_SECONDS = 60.0
_STALL_STEPS, _STALL_SAVES = 5, 3  # a stall lasts as long as so many usual ones
_MIN_KNOWN_SECONDS, _MIN_KNOWN_MINUTES, _MIN_KNOWN_SAVES = 600.0, 3, 3  # before a value is usual
_MINUTE, _MAX_MINUTES = 60.0, 60
_MAX_SAVES = 16

WAITS = ("step", "data_stall", "checkpoint_save")  # activities that may hold an attempt up


@dataclass(slots=True)
class Slowdown:
    """Slow stretch (`kind` is `slow`), stall (`stall`), or stall during which the attempt ended (`end`)."""

    kind: str
    waited: str  # the activity that most of it was, empty if unknown
    began: float
    ended: float
    seconds: float
    gpu_seconds: float
    over: bool = True


@dataclass(slots=True)
class _Steps:
    """Consecutive steps: their number, their seconds with waits for data, and the fewest GPUs held."""

    began: float
    ended: float
    gpus: float  # the fewest
    steps: float = 0.0
    seconds: float = 0.0
    data: float = 0.0
    save: float = 0.0

    @property
    def pace(self) -> float:
        return self.seconds / self.steps

    def add(self, more: "_Steps") -> None:
        self.ended, self.gpus, self.steps = more.ended, min(self.gpus, more.gpus), self.steps + more.steps
        self.seconds, self.data = self.seconds + more.seconds, self.data + more.data


@dataclass(slots=True)
class _Stretch:
    """Consecutive minutes of slow steps, and the seconds they cost beyond the usual so far."""

    began: float
    usual: float
    usual_data: float
    ended: float
    steps: float = 0.0
    lasted: float = 0.0
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    data: float = 0.0
    minutes: list[list[float]] = field(default_factory=list)  # kept until the stretch counts, in case it does not
    counts: bool = False

    def slowdown(self, *, over: bool) -> Slowdown:
        waited = "data_stall" if self.data > self.seconds / 2 else ""
        return Slowdown("slow", waited, self.began, self.ended, self.seconds, self.gpu_seconds, over)


@dataclass(slots=True)
class Pace:
    """Pace of one attempt: the usual seconds of its steps and checkpoints, and the slowdowns found by comparison."""

    since: float  # when the last step was made
    gpus: float | None = None  # the fewest since then
    waits: dict[str, float] = field(default_factory=dict)  # seconds since then, per activity
    still: dict[str, float] = field(default_factory=dict)  # those of `waits` in which no step was made
    charged: bool = True  # whether `waits` are charged to the end of an attempt, or are before the first step
    # Of each minute: the seconds of a step, of its wait for data, and of the whole minute.
    minutes: list[list[float]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    before: list[float] | None = None  # usual values of the attempt before
    last: _Steps | None = None  # steps of the last report; the wait at their end may be the beginning of a stall
    minute: _Steps | None = None
    stretch: _Stretch | None = None

    def passed(self, seconds: Mapping[str, float], gpus: float, *, still: bool) -> None:
        """Add seconds per activity in which `gpus` GPUs were held. `still` is True if no step was made in them."""
        self.gpus = gpus if self.gpus is None else min(gpus, self.gpus)
        for name in WAITS:
            if name in seconds:
                self.waits[name] = self.waits.get(name, 0.0) + seconds[name]
                if still:
                    self.still[name] = self.still.get(name, 0.0) + seconds[name]

    def made(self, steps: float, seconds: float, at: float) -> Iterator[Slowdown]:
        """Add `steps` new steps that took `seconds` and ended at `at` (Unix time). Yield the slowdowns they show."""
        began, waits, still, charged, gpus = self.since, self.waits, self.still, self.charged, self.gpus or 0.0
        self.since, self.gpus, self.waits, self.still, self.charged = at, None, {}, {}, False
        if steps <= 0 or charged:
            return
        waits["step"] = seconds
        data, save = waits.get("data_stall", 0.0), waits.get("checkpoint_save", 0.0)
        lost, last = self._stalled(steps, waits, still), self.last
        if save > 0:
            self.saves = [*self.saves, round(save, 3)][-_MAX_SAVES:]
        stall = self._stall("stall", lost, began, gpus, at) if lost else None
        if last is not None:
            yield from self._take(last)
        self.last = None if lost else _Steps(began, at, gpus, steps, seconds + data, data, save)
        if stall is not None:
            yield stall

    def following(self, since: float) -> "Pace":
        """Return the pace of the next attempt, which starts at `since` (Unix time) and inherits the usual values."""
        usual = self._usual()
        return Pace(since, saves=list(self.saves), before=self.before if usual is None else list(usual))

    def close(self) -> Iterator[Slowdown]:
        """Yield the slowdowns that end with the attempt. A stall during which it ended has the kind `end`."""
        lost = {} if self.charged else self._stalled(0.0, {**self.waits, "step": 0.0}, self.still)
        if lost:
            yield self._stall("end", lost, self.since, self.gpus or 0.0)
        if self.last is not None:
            yield from self._take(self.last)
        if self.stretch is not None and self.stretch.counts:
            yield self.stretch.slowdown(over=True)
        self.last = self.minute = self.stretch = None

    def _stall(
        self, kind: str, lost: dict[str, float], began: float, gpus: float, ended: float | None = None
    ) -> Slowdown:
        """Return a stall of `lost` seconds by activity, to which the unusual waits of the steps before it are added.

        Waits for data are removed from those steps, so that they do not count twice.
        """
        last, usual, moved = self.last, self._usual() or self.before, 0.0
        if last is not None:
            if "data_stall" in lost and usual is not None:
                moved = max(0.0, last.data - last.steps * usual[1])
                lost["data_stall"] += moved
                last.data, last.seconds = last.data - moved, last.seconds - moved
            if "checkpoint_save" in lost:
                lost["checkpoint_save"] += last.save
                moved += last.save
            began, gpus = began - moved, min(gpus, last.gpus)
        total = sum(lost.values())
        ended = began + total if ended is None else ended
        return Slowdown(kind, max(lost, key=lost.__getitem__), began, ended, total, total * gpus)

    def _take(self, steps: _Steps) -> Iterator[Slowdown]:
        """Add steps to the current minute of steps. Yield the slowdowns that the minute shows once it is complete."""
        if self.minute is None:
            self.minute = steps
        else:
            self.minute.add(steps)
        if self.minute.seconds >= _MINUTE:
            minute, self.minute = self.minute, None
            yield from self._judge(minute)

    def _usual(self) -> tuple[float, float] | None:
        """Return the usual seconds of a step (with its wait for data) and of that wait, None if too few are known."""
        if sum(seconds for *_, seconds in self.minutes) < _MIN_KNOWN_SECONDS or len(self.minutes) < _MIN_KNOWN_MINUTES:
            return None
        return median(pace for pace, *_ in self.minutes), median(data for _, data, _ in self.minutes)

    def _stalled(self, steps: float, waits: Mapping[str, float], still: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds beyond the usual for each activity that stalled the attempt."""
        usual = self._usual() or self.before
        if usual is None:
            return {}
        pace, data = usual
        limit = max(MIN_STALL_SECONDS, _STALL_STEPS * pace)
        bounds = {"step": (steps, (pace - data) * steps, limit), "data_stall": (steps + 1, data * steps, limit)}
        if len(self.saves) >= _MIN_KNOWN_SAVES:
            save = median(self.saves)
            bounds["checkpoint_save"] = steps + 1, save, max(save + MIN_STALL_SECONDS, _STALL_SAVES * save)
        lost = {}
        for name, (gaps, expected, most) in bounds.items():
            seconds = waits.get(name, 0.0)
            # At least one of the gaps between steps was as long as their mean.
            if seconds >= most and max(still.get(name, 0.0), seconds / max(gaps, 1.0)) >= most and seconds > expected:
                lost[name] = seconds - expected
        return lost

    def _judge(self, minute: _Steps) -> Iterator[Slowdown]:
        """Add a minute of steps to the usual minutes or to a slow stretch. Yield the stretch once it is long enough."""
        seconds = [round(minute.pace, 6), round(minute.data / minute.steps, 6), round(minute.seconds, 1)]
        stretch = self.stretch
        if stretch is None:
            usual = self._usual()
            if usual is None or minute.pace <= SLOW * usual[0]:
                self.minutes = [*self.minutes, seconds][-_MAX_MINUTES:]
                return
            stretch = self.stretch = _Stretch(minute.began, *usual, ended=minute.began)
        elif minute.pace <= FAST_AGAIN * stretch.usual:
            if stretch.counts:
                yield stretch.slowdown(over=True)
            self.stretch = None
            self.minutes = [*self.minutes, *stretch.minutes, seconds][-_MAX_MINUTES:]
            return
        extra = minute.seconds - minute.steps * stretch.usual
        stretch.ended = minute.ended
        stretch.steps, stretch.lasted = stretch.steps + minute.steps, stretch.lasted + minute.seconds
        stretch.seconds, stretch.gpu_seconds = stretch.seconds + extra, stretch.gpu_seconds + extra * minute.gpus
        stretch.data += minute.data - minute.steps * stretch.usual_data
        long_enough = stretch.lasted >= MIN_SLOW_SECONDS and stretch.steps >= MIN_SLOW_STEPS
        if long_enough and stretch.lasted >= SLOW * stretch.usual * stretch.steps:
            stretch.counts = True
        if not stretch.counts:
            stretch.minutes = [*stretch.minutes, seconds][-_MAX_MINUTES:]
            return
        over = stretch.lasted >= MAX_SLOW_SECONDS
        yield stretch.slowdown(over=over)
        stretch.minutes = []
        if over:
            self.stretch, self.minutes = None, [seconds]
