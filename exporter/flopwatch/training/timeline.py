"""Seconds per activity: exactly one activity is open at any moment, whatever the order of the calls.

startup      from the process's start (as the kernel knows it) until run.batches() delivers its first batch. Without
             run.batches(), until the first run.step() returns, because that step compiles and connects
data_stall   inside run.batches(), waiting for the next batch
declared     inside `with run.activity(...)`, which may be nested: the innermost counts
step         the rest: the next step begins as run.step() returns
other        `with run.activity("other")`, and from the end of a run.batches() loop to its next batch or run.step()

So the activities sum to the process's age. A step's duration is its step and data_stall seconds.
"""

DECLARED: tuple[str, ...] = ("compile", "data_stall", "checkpoint_save", "checkpoint_restore", "evaluation")
DECLARED += ("generation", "other")
ACTIVITIES = ("startup", "step", *DECLARED)


class Timeline:
    """Seconds per activity since `start`. Methods take `now` in seconds of the same clock, which never falls."""

    def __init__(self, start: float) -> None:
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._open = self._base = "startup"
        self._since = start
        self._waiting = False  # for a batch
        self._declared: list[str] = []  # open ones, the innermost last
        self._step_end = self._duration_end = 0.0  # step, and step and data_stall seconds as of the last step's end
        self.disturbed = True  # something but step and data_stall happened since the last step's end

    def _resume(self, now: float) -> None:
        """Add the time until `now` to the open activity, and open the activity that the other fields imply."""
        self._seconds[self._open] += now - self._since
        self._since = now
        if self._declared:
            self._open = self._declared[-1]
        else:
            self._open = "data_stall" if self._waiting and self._base != "startup" else self._base
        if self._open != "step" and self._open != "data_stall":
            self.disturbed = True

    def enter(self, activity: str, now: float) -> None:
        """Open an activity inside the open one. Raises ValueError if it is not one of DECLARED."""
        if activity not in DECLARED:
            raise ValueError(f"{activity!r} is not an activity; write one of {', '.join(DECLARED)}")
        self._declared.append(activity)
        self._resume(now)

    def leave(self, activity: str, now: float) -> None:
        """Close the innermost open activity of this name and all activities inside it, if one is open."""
        if activity in self._declared:
            while self._declared.pop() != activity:
                pass
            self._resume(now)

    def wait_for_batch(self, now: float) -> None:
        """Begin to wait for a batch. Ignored inside a declared activity, such as an evaluation's loop."""
        if not self._declared:
            self._waiting = True
            self._resume(now)

    def got_batch(self, now: float) -> None:
        """End the wait for a batch: time counts as `step` from now on."""
        if not self._declared:
            self._waiting, self._base = False, "step"
            self._resume(now)

    def end_of_batches(self, now: float) -> None:
        """End the loop over batches: time counts as `other` until the next batch or step."""
        if not self._declared:
            self._waiting = False
            if self._base == "step":
                self._base = "other"
            self._resume(now)

    def step(self, now: float) -> tuple[float, bool] | None:
        """End a step. Return its seconds and whether another activity interrupted it, None if it counts as startup."""
        was_startup = self._base == "startup"
        self._base = "step"
        self._resume(now)
        self._step_end = self._seconds["step"]
        duration = self._step_end + self._seconds["data_stall"] - self._duration_end
        self._duration_end += duration
        was_disturbed, self.disturbed = self.disturbed, self._open != "step"
        return None if was_startup else (duration, was_disturbed)

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of every activity up to `now`."""
        # Parentheses as in _resume, or rounding could let a total fall.
        return {**self._seconds, self._open: self._seconds[self._open] + (now - self._since)}

    @property
    def open(self) -> tuple[str, float]:
        """Return the open activity and the clock's seconds at which it began."""
        return self._open, self._since

    def open_step_seconds(self, now: float) -> float:
        """Return the seconds of the activity `step` since the last step ended."""
        return self.seconds(now)["step"] - self._step_end
