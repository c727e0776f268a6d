"""What the rules and Alertmanager are generated with: pace, scrape interval, routing and the few shared thresholds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SECRETS = Path("/etc/alertmanager/secrets/flopwatch")
MIN_WINDOW = 60.0  # seconds, of all ranges in the rules


def duration(seconds: float) -> str:
    """Return seconds as Prometheus writes them, to the millisecond: 90 is 1m30s, 0.75 is 750ms."""
    left = round(seconds * 1000)
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def seconds(text: str) -> float:
    """Return the seconds of a duration as Prometheus writes it."""
    sizes = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(count) * sizes[unit] for count, unit in re.findall(r"(\d+)(ms|[wdhms])", text))


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Times are seconds at pace 1; `at_pace` prints them at this pace. Thresholds do not change with the pace.

    Record names keep the window they have at pace 1 (`...:ratio_rate5m`), so that dashboards read the same at any pace.
    """

    pace: float = 1.0  # 20: every window, for, interval and wait is twenty times shorter
    scrape_interval: float = 15.0  # also the time between two evaluations of a rule

    page_min_gpus: int = 64  # a smaller run only notifies, unless it asks with page="always"

    # Thresholds that a dashboard or a recording rule shows, too.
    straggler_warning: float = 0.10  # share of every step that the straggler costs
    straggler_critical: float = 0.20
    rate_share: float = 0.99  # of the rate the port had once, which is printed rounded
    transceiver_celsius: float = 70.0  # NVIDIA UFM's limit

    group_wait: float = 45.0  # a cause is sent two evaluations later than its consequence, at worst: longer than these
    group_interval: float = 120.0
    repeat_interval: float = 43_200.0
    watchdog_interval: float = 60.0

    slack_url_file: Path = SECRETS / "slack-url"
    pagerduty_key_file: Path = SECRETS / "pagerduty-key"
    pagerduty_url: str | None = None  # None: PagerDuty's own
    teams: tuple[str, ...] = ()  # each has its own slack-url-TEAM and pagerduty-key-TEAM next to the files above
    webhook_url_file: Path | None = None  # gets every alert, for a system of one's own
    email_to: str | None = None  # gets every alert
    email_from: str = "flopwatch@localhost"
    email_smarthost: str = "localhost:25"
    email_password_file: Path | None = None  # of the user email_from
    shadow: tuple[str, ...] = ()  # alerts that are recorded and sent to no receiver, until they are trusted
    watchdog_url_file: Path = SECRETS / "watchdog-url"
    watchdog_url: str | None = None  # in place of the file: Alertmanager before 0.26 knows no url_file
    runbook_base_url: str = "alerts/runbooks"  # where the runbooks are published; else their place in the repository
    dashboard_base_url: str = ""  # Grafana's address; else links are relative to it

    def __post_init__(self) -> None:
        if self.pace <= 0:
            raise ValueError(f"pace {self.pace:g}: write a number above 0; 1 is production")
        for team in self.teams:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", team):
                raise ValueError(f"team {team!r}: write letters, digits, dots, underscores and dashes; it names files")
        if self.scrape_interval > MIN_WINDOW / 4:
            raise ValueError(
                f"scrape_interval {self.scrape_interval:g} s: write {MIN_WINDOW / 4:g} or less; the shortest window of "
                f"a rule, {MIN_WINDOW:g} s, has to hold four scrapes"
            )

    def seconds_at_pace(self, seconds: float) -> str:
        """Return a time of pace 1 at this pace as a number of seconds, to compare with time()."""
        return f"{seconds / self.pace:.3f}".rstrip("0").rstrip(".")

    def at_pace(self, seconds: float) -> str:
        """Return a time of pace 1 as Prometheus writes it at this pace."""
        return duration(seconds / self.pace)
