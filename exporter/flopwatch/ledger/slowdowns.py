"""How fast a run makes steps, by its own measure: stretches of slow steps, and times without one that came to an end.

Pure. It sees an attempt as its cumulative snapshots do, every few seconds or once an hour: so many steps, and the
seconds of them, of waits for data and of checkpoints that passed since the position moved last. What it finds is a part
of the buckets `productive`, `data_stall` and `checkpoint_save`, never anything beside them.

- What is usual is a median: of the seconds a step took, with its wait for data, in each of the attempt's last 60
  minutes of steps, and of its last 16 checkpoints. A minute that belongs to a slow stretch is not usual. Before ten
  minutes of steps, or three checkpoints, nothing is; but a stall is one also by what was usual in the attempt before.
- A stall is an open step, a wait for data or a checkpoint of a minute and five usual steps (a checkpoint: a minute more
  than, and three times, the usual), after which a step was made. It costs what it took beyond the usual.
- A slow stretch begins with a minute whose steps took 20 % longer than usual and ends with one in which they took less
  than 10 % longer. It counts if it lasted five minutes and twenty steps and took 20 % longer on the whole. After four
  hours that is how the run is.
- Steps made again after an end or a rollback are not looked at: what they cost is charged to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

SLOW, FAST_AGAIN = 1.2, 1.1  # times the usual step
SLOW_FOR, SLOW_STEPS = 300.0, 20
SLOW_AT_MOST = 4 * 3600.0
STALL = 60.0
_STALL_STEPS, _STALL_SAVES = 5, 3  # usual ones
_KNOWN_AFTER = 600.0
_MINUTE, _MINUTES = 60.0, 60
_SAVES = 16

WAITS = ("step", "data_stall", "checkpoint_save")  # where an attempt may be held up


@dataclass(slots=True)
class Found:
    """A slow stretch, a stall, or a stall that ended with its attempt; `waited` is what most of it was, if known."""

    kind: str
    waited: str
    began: float
    ended: float
    seconds: float
    gpu_seconds: float
    over: bool = True


@dataclass(slots=True)
class _Steps:
    """Some steps; seconds are theirs with their waits for data."""

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

    def add(self, more: _Steps) -> None:
        self.ended, self.gpus, self.steps = more.ended, min(self.gpus, more.gpus), self.steps + more.steps
        self.seconds, self.data = self.seconds + more.seconds, self.data + more.data


@dataclass(slots=True)
class _Stretch:
    """Minutes of slow steps, and what they cost so far."""

    began: float
    usual: float
    usual_data: float
    ended: float
    steps: float = 0.0
    lasted: float = 0.0
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    data: float = 0.0
    minutes: list[list[float]] = field(default_factory=list)  # as long as it may turn out to be nothing
    counts: bool = False

    def found(self, *, over: bool) -> Found:
        waited = "data_stall" if self.data > self.seconds / 2 else ""
        return Found("slow", waited, self.began, self.ended, self.seconds, self.gpu_seconds, over)


@dataclass(slots=True)
class Pace:
    """The pace of one attempt."""

    since: float  # when the last step was made
    gpus: float | None = None  # the fewest since
    waits: dict[str, float] = field(default_factory=dict)  # seconds since, per activity
    still: dict[str, float] = field(default_factory=dict)  # of them, those in which no step was made
    charged: bool = True  # whether some of them are charged to an end; those before the first step are
    minutes: list[list[float]] = field(default_factory=list)  # seconds a step took, and waited for data
    saves: list[float] = field(default_factory=list)
    before: list[float] | None = None  # what was usual in the attempt before
    last: _Steps | None = None  # those of the last time; the wait at their end may be the beginning of a stall
    minute: _Steps | None = None
    stretch: _Stretch | None = None

    def passed(self, seconds: Mapping[str, float], gpus: float, *, still: bool) -> None:
        """Note that so many seconds passed per activity; still: and no step was made."""
        self.gpus = gpus if self.gpus is None else min(gpus, self.gpus)
        for name in WAITS:
            if name in seconds:
                self.waits[name] = self.waits.get(name, 0.0) + seconds[name]
                if still:
                    self.still[name] = self.still.get(name, 0.0) + seconds[name]

    def made(self, steps: float, seconds: float, at: float) -> Iterator[Found]:
        """Note steps made for the first time, that took so long, the last one at that time; yield what comes to light.

        No steps: the position moved in another way.
        """
        began, waits, still, charged, gpus = self.since, self.waits, self.still, self.charged, self.gpus or 0.0
        self.since, self.gpus, self.waits, self.still, self.charged = at, None, {}, {}, False
        if steps <= 0 or charged:
            return
        waits["step"] = seconds
        data, save = waits.get("data_stall", 0.0), waits.get("checkpoint_save", 0.0)
        lost, last = self._stalled(steps, waits, still), self.last
        if save > 0:
            self.saves = [*self.saves, round(save, 3)][-_SAVES:]
        if lost and last is not None:
            began, gpus = began - self._begun(lost, last), min(gpus, last.gpus)
        if last is not None:
            yield from self._take(last)
        self.last = None if lost else _Steps(began, at, gpus, steps, seconds + data, data, save)
        if lost:
            total = sum(lost.values())
            yield Found("stall", max(lost, key=lost.__getitem__), began, at, total, total * gpus)

    def following(self, since: float) -> Pace:
        """Return the pace of an attempt that follows this one."""
        usual = self._usual()
        return Pace(since, saves=list(self.saves), before=self.before if usual is None else list(usual))

    def close(self) -> Iterator[Found]:
        """Yield what comes to its end with the attempt, and as an `end` the stall that it died in."""
        lost = {} if self.charged else self._stalled(0.0, {**self.waits, "step": 0.0}, self.still)
        if lost:
            began, gpus = self.since, self.gpus or 0.0
            if self.last is not None:
                began, gpus = began - self._begun(lost, self.last), min(gpus, self.last.gpus)
            total = sum(lost.values())
            yield Found("end", max(lost, key=lost.__getitem__), began, began + total, total, total * gpus)
        if self.last is not None:
            yield from self._take(self.last)
        if self.stretch is not None and self.stretch.counts:
            yield self.stretch.found(over=True)
        self.last = self.minute = self.stretch = None

    def _begun(self, lost: dict[str, float], last: _Steps) -> float:
        """Move what the steps before a stall waited for the same into it, beyond the usual; return the seconds."""
        moved, usual = 0.0, self._usual() or self.before
        if "data_stall" in lost and usual is not None:
            moved = max(0.0, last.data - last.steps * usual[1])
            lost["data_stall"] += moved
            last.data, last.seconds = last.data - moved, last.seconds - moved
        if "checkpoint_save" in lost:
            lost["checkpoint_save"] += last.save
            moved += last.save
        return moved

    def _take(self, steps: _Steps) -> Iterator[Found]:
        """Add steps to their minute, and judge it once it is one."""
        if self.minute is None:
            self.minute = steps
        else:
            self.minute.add(steps)
        if self.minute.seconds >= _MINUTE:
            minute, self.minute = self.minute, None
            yield from self._judge(minute)

    def _usual(self) -> tuple[float, float] | None:
        """Return the usual seconds of a step, its wait for data included, and of that wait."""
        if sum(seconds for *_, seconds in self.minutes) < _KNOWN_AFTER or len(self.minutes) < 3:
            return None
        return median(pace for pace, *_ in self.minutes), median(data for _, data, _ in self.minutes)

    def _stalled(self, steps: float, waits: Mapping[str, float], still: Mapping[str, float]) -> dict[str, float]:
        """Return what was lost per activity that held the attempt up; nothing if none did."""
        usual = self._usual() or self.before
        if usual is None:
            return {}
        pace, data = usual
        limit = max(STALL, _STALL_STEPS * pace)
        bounds = {"step": (steps, (pace - data) * steps, limit), "data_stall": (steps + 1, data * steps, limit)}
        if len(self.saves) >= 3:
            save = median(self.saves)
            bounds["checkpoint_save"] = steps + 1, save, max(save + STALL, _STALL_SAVES * save)
        lost = {}
        for name, (gaps, expected, most) in bounds.items():
            seconds = waits.get(name, 0.0)
            # Of so many gaps between steps one was at least as long as their mean.
            if seconds >= most and max(still.get(name, 0.0), seconds / max(gaps, 1.0)) >= most and seconds > expected:
                lost[name] = seconds - expected
        return lost

    def _judge(self, minute: _Steps) -> Iterator[Found]:
        """Take a minute of steps for usual, or for a part of a slow stretch."""
        told = [round(minute.pace, 6), round(minute.data / minute.steps, 6), round(minute.seconds, 1)]
        stretch = self.stretch
        if stretch is None:
            usual = self._usual()
            if usual is None or minute.pace <= SLOW * usual[0]:
                self.minutes = [*self.minutes, told][-_MINUTES:]
                return
            stretch = self.stretch = _Stretch(minute.began, *usual, ended=minute.began)
        elif minute.pace <= FAST_AGAIN * stretch.usual:
            if stretch.counts:
                yield stretch.found(over=True)
            self.stretch = None
            self.minutes = [*self.minutes, *stretch.minutes, told][-_MINUTES:]
            return
        extra = minute.seconds - minute.steps * stretch.usual
        stretch.ended = minute.ended
        stretch.steps, stretch.lasted = stretch.steps + minute.steps, stretch.lasted + minute.seconds
        stretch.seconds, stretch.gpu_seconds = stretch.seconds + extra, stretch.gpu_seconds + extra * minute.gpus
        stretch.data += minute.data - minute.steps * stretch.usual_data
        stretch.counts = stretch.counts or (
            stretch.lasted >= SLOW_FOR
            and stretch.steps >= SLOW_STEPS
            and stretch.lasted >= SLOW * stretch.usual * stretch.steps
        )
        if not stretch.counts:
            stretch.minutes = [*stretch.minutes, told][-_MINUTES:]
            return
        over = stretch.lasted >= SLOW_AT_MOST
        yield stretch.found(over=over)
        stretch.minutes = []
        if over:
            self.stretch, self.minutes = None, [told]

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Pace:
        """Return what `asdict` gave."""
        values = dict(state)
        for name, kind in (("last", _Steps), ("minute", _Steps), ("stretch", _Stretch)):
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        return cls(**values)
