"""What a report reckons: how often a run fails, with how much confidence, and how often it should save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, fsum, inf, lgamma, log, sqrt


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean time over `count` events with its 95 % interval, in seconds; `high` is None where there is no bound."""

    seconds: float | None
    low: float | None
    high: float | None
    count: int


def mean_time_between(seconds: float, count: int, confidence: float = 0.95) -> Mean:
    """Return the mean time to failure of `seconds` in which `count` failures came, with its exact Poisson interval.

    The time since the last failure counts (it is censored, not left out): the maximum-likelihood estimate for
    exponential gaps is all time over all failures. Interval: Garwood, Biometrika 28 (1936), 437-442. Without a failure
    there is no mean, and the lower bound is all that can be said.
    """
    if seconds <= 0:
        return Mean(None, None, None, count)
    tail = (1 - confidence) / 2
    most = _root(lambda rate: _poisson(count, rate) - tail)  # so few are as improbable
    fewest = 0.0 if count == 0 else _root(lambda rate: tail - (1 - _poisson(count - 1, rate)))
    return Mean(seconds / count if count else None, seconds / most, seconds / fewest if fewest > 0 else None, count)


def _poisson(count: int, rate: float) -> float:
    """Return the probability of at most `count` events where `rate` are expected; it falls with the rate."""
    if rate == 0:
        return 1.0
    return fsum(exp(k * log(rate) - rate - lgamma(k + 1)) for k in range(count + 1))


def _root(falling: Callable[[float], float]) -> float:
    """Return where a function that falls from above to below zero does so."""
    low, high = 0.0, 1.0
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class Interval:
    """How often a run saves, how often it should, and what the difference costs as a share of its time."""

    actual: float
    optimum: float
    waste: float
    least_waste: float


def checkpoint_interval(actual: float, blocking: float, mttf: float, restart: float) -> Interval | None:
    """Return Daly's optimum beside the actual interval (all in seconds); None where the model says nothing.

    The higher-order optimum of Daly, Future Generation Computer Systems 22 (2006), 303-312, eq. 37; its first term is
    Young's sqrt(2 d M). `blocking` is what a save stops training for: of an asynchronous one only that part. Waste is
    the share of time that saving, executing again (half an interval a failure) and restarting take.
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

    return Interval(actual, optimum, waste(actual), waste(optimum))


def finite(value: float | None) -> float | None:
    """Return a number; None for none and for what is not finite."""
    return None if value is None or value != value or value in (inf, -inf) else value
