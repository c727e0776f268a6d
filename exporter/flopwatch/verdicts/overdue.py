"""When a step is overdue, and when a GPU is idle. An exporter knows it too, and has no numpy to import for that."""

OVERDUE_SECONDS, OVERDUE_STEPS = 15.0, 5.0
IDLE = 0.01  # utilization of a GPU below which it is idle
LATE = 0.6  # of these seconds: from then on, records show what each rank has called


def overdue_after(p99: float) -> float:
    """Return the seconds after which an open step is overdue. `p99` is the 99th percentile of its run's steps, in s."""
    return max(OVERDUE_SECONDS, OVERDUE_STEPS * p99)
