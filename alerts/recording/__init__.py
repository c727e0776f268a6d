"""Recording rules, a table per domain. Each is one literal with a name, an expression, its meaning and a rule test.

`rank:`, `run:`, `host:`, `rail:`, `port:` and `instance:` name what a series is of; a `fleet:` record is one series.
A name keeps the window it has at pace 1. Rates come before sums, and both sides of a ratio are summed before they are
divided. docs/records.md lists them.
"""

from __future__ import annotations

from alerts.recording import fabric, fleet, gpu, hang, ledger, training
from alerts.recording.fabric import *  # noqa: F403
from alerts.recording.fleet import *  # noqa: F403
from alerts.recording.gpu import *  # noqa: F403
from alerts.recording.hang import *  # noqa: F403
from alerts.recording.ledger import *  # noqa: F403
from alerts.recording.record import EVERY as EVERY
from alerts.recording.record import Record as Record
from alerts.recording.training import *  # noqa: F403
from alerts.settings import AlertSettings

# In the order in which they build on each other.
DOMAINS = (training, hang, gpu, fabric, ledger, fleet)


def records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return every recording rule, in the order in which they build on each other."""
    return tuple(record.at(settings) for domain in DOMAINS for record in domain.RECORDS)
