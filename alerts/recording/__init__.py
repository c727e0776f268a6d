"""Recording rules, a file per domain: each is one literal there, its name a constant at the top, and a promtool test.

`rank:`, `run:`, `host:`, `rail:`, `port:` and `instance:` say what a series is of; of `fleet:` there is one. A name
keeps the window it has at pace 1. Rates come before sums, and both sides of a ratio are summed before they are divided.
docs/records.md lists them.
"""

from __future__ import annotations

from alerts.recording.fabric import *  # noqa: F403
from alerts.recording.fabric import fabric_records
from alerts.recording.fleet import *  # noqa: F403
from alerts.recording.fleet import fleet_records
from alerts.recording.gpu import *  # noqa: F403
from alerts.recording.gpu import gpu_records
from alerts.recording.hang import *  # noqa: F403
from alerts.recording.hang import hang_records
from alerts.recording.ledger import *  # noqa: F403
from alerts.recording.ledger import ledger_records
from alerts.recording.record import EVERY as EVERY
from alerts.recording.record import Record as Record
from alerts.recording.training import *  # noqa: F403
from alerts.recording.training import training_records
from alerts.settings import AlertSettings


def records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return every recording rule, in the order in which they build on each other."""
    domains = (training_records, hang_records, gpu_records, fabric_records, ledger_records, fleet_records)
    return tuple(made for domain in domains for made in domain(settings))
