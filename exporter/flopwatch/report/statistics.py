"""Statistics of a report: mean time to failure with its confidence interval, and the best checkpoint interval."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, fsum, lgamma, log, sqrt


@dataclass(frozen=True, slots=True)
class MeanTime:
    """Mean time in seconds between `count` failures, with its 95 % interval. Values that do not exist are None."""

    seconds: float | None
    low: float | None
    high: float | None
    count: int


def mean_time_between(seconds: float, count: int, confidence: float = 0.95) -> MeanTime:
    """Return the mean time to failure for `count` failures in `seconds`, with its exact Poisson interval.

    The mean is all time, including that since the last failure, divided by all failures. Without a failure there is
    only a lower bound. Interval: Garwood, Biometrika 28 (1936), 437-442.
    """
    if seconds <= 0:
        return MeanTime(None, None, None, count)
    tail = (1 - confidence) / 2
    most = _root(lambda rate: _poisson(count, rate) - tail)
    fewest = 0.0 if count == 0 else _root(lambda rate: tail - (1 - _poisson(count - 1, rate)))
    return MeanTime(seconds / count if count else None, seconds / most, seconds / fewest if fewest > 0 else None, count)


def _poisson(count: int, rate: float) -> float:
    """Return the probability of at most `count` events if `rate`, more than 0, are expected."""
    return fsum(exp(k * log(rate) - rate - lgamma(k + 1)) for k in range(count + 1))


def _root(falling: Callable[[float], float]) -> float:
    """Return the zero of a falling function that is positive at 0."""
    low, high = 0.0, 1.0
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """Actual and optimal checkpoint interval in seconds, with the share of time that each wastes."""

    actual: float
    optimum: float
    waste: float
    least_waste: float


def checkpoint_interval(actual: float, blocking: float, mttf: float, restart: float) -> CheckpointInterval | None:
    """Compare the actual interval with Daly's optimum, in seconds. Return None if a value is not positive.

    Daly, Future Generation Computer Systems 22 (2006), 303-312, eq. 37, whose first term is Young's sqrt(2 d M).
    `blocking` is how long a save stops training. `restart` may be 0. Waste is the share of time for saving, for
    repeated steps (half an interval per failure) and for restarting.
    """
    if min(actual, blocking, mttf) <= 0 or restart < 0:
        return None
    if blocking < 2 * mttf:
        share = blocking / (2 * mttf)
        optimum = sqrt(2 * blocking * mttf) * (1 + sqrt(share) / 3 + share / 9) - blocking
    else:
        optimum = mttf

    def waste(interval: float) -> float:
        return min(1.0, blocking / (interval + blocking) + ((interval + blocking) / 2 + restart) / mttf)

    return CheckpointInterval(actual, optimum, waste(actual), waste(optimum))
