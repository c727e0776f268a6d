"""Every time and threshold of the rules and of Alertmanager, in one object with one pace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SECRETS = Path("/etc/alertmanager/secrets/flopwatch")


def duration(seconds: float) -> str:
    """Return seconds as Prometheus writes them, to the millisecond: 90 is 1m30s, 0.75 is 750ms."""
    left = round(seconds * 1000)
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Times are seconds at pace 1; `at_pace` prints them at this pace. Thresholds do not change with the pace.

    Record names keep the window they have at pace 1 (`...:ratio_rate5m`), so that dashboards read the same at any pace.
    """

    pace: float = 1.0  # 20: every window, for, interval and wait is twenty times shorter
    scrape_interval: float = 15.0  # also the time between two evaluations of a rule

    rate_window: float = 300.0
    straggler_window: float = 120.0  # a verdict needs the same leader in three of these in a row
    link_window: float = 300.0
    xid_window: float = 1800.0  # an Xid is news for this long
    progress_window: float = 120.0  # a run with steps in it is not down, whatever a ledger that hears nothing says
    state_window: float = 300.0  # what a ledger or exporter said last holds this long while it restarts
    memory: float = 86_400.0  # a run asked to page within this time; a lost GPU's Xid is not forgotten before

    # A verdict has already seen three windows, a port one.
    straggler_for: float = 60.0
    straggler_keep: float = 600.0  # longer than a restart and three windows, so that one culprit is one message
    down_for: float = 300.0  # a restart by the launcher takes less
    link_for: float = 60.0
    link_keep: float = 600.0

    straggler_warning: float = 0.10  # share of every step lost to the late rank
    straggler_critical: float = 0.20
    straggler_steps: int = 5  # measured steps a window needs, or there is no score
    straggler_tokens: float = 0.05  # more tokens than the mean: the work is uneven, not the machine slow
    symbol_errors: int = 10  # in one link_window: the rate of 120 an hour, at which a link is to be replaced
    page_min_gpus: int = 64  # a smaller run only notifies, unless it asks with page="always"

    group_wait: float = 30.0
    group_interval: float = 120.0
    repeat_interval: float = 43_200.0
    watchdog_interval: float = 60.0

    slack_url_file: Path = SECRETS / "slack-url"
    pagerduty_key_file: Path = SECRETS / "pagerduty-key"
    pagerduty_url: str | None = None  # None: PagerDuty's own
    watchdog_url_file: Path = SECRETS / "watchdog-url"
    watchdog_url: str | None = None  # in place of the file: Alertmanager before 0.26 knows no url_file
    runbook_base_url: str = "alerts/runbooks"  # where the runbooks are published; else their place in the repository
    dashboard_base_url: str = ""  # Grafana's address; else links are relative to it

    def __post_init__(self) -> None:
        if self.pace <= 0:
            raise ValueError(f"pace {self.pace:g}: write a number above 0; 1 is production")
        for name in ("rate_window", "straggler_window", "link_window", "xid_window",
                     "progress_window", "state_window", "memory"):
            if getattr(self, name) < 4 * self.scrape_interval:
                raise ValueError(f"{name} {getattr(self, name):g} s is less than four scrapes of "
                                 f"{self.scrape_interval:g} s; make it longer or scrape more often")

    def seconds_at_pace(self, seconds: float) -> str:
        """Return a time of pace 1 at this pace as a number of seconds, to compare with time()."""
        return f"{seconds / self.pace:.3f}".rstrip("0").rstrip(".")

    def at_pace(self, seconds: float) -> str:
        """Return a time of pace 1 as Prometheus writes it at this pace."""
        return duration(seconds / self.pace)
