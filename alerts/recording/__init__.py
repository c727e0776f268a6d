"""Recording rules, one module per domain. Each rule is a literal with name, expression and help text.

The prefix `rank:`, `run:`, `host:`, `rail:`, `port:` or `instance:` of a name is the subject of its series. A rule with
the prefix `fleet:` records a single series. A name keeps the window of pace 1. Rates are taken before sums, and both
sides of a ratio are summed before they are divided. docs/records.md lists the rules, and each has a rule test.
"""

from __future__ import annotations

from alerts.recording import fabric, fleet, gpu, ledger, training
from alerts.recording.fabric import *  # noqa: F403
from alerts.recording.fleet import *  # noqa: F403
from alerts.recording.gpu import *  # noqa: F403
from alerts.recording.ledger import *  # noqa: F403
from alerts.recording.record import EVERY as EVERY
from alerts.recording.record import Record as Record
from alerts.recording.training import *  # noqa: F403
from alerts.settings import AlertSettings

# In the order in which they build on each other.
DOMAINS = (training, gpu, fabric, ledger, fleet)


def records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return every recording rule, in the order in which they build on each other."""
    return tuple(record.at(settings) for domain in DOMAINS for record in domain.RECORDS)
