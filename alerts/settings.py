"""Settings of the generated rules and of Alertmanager: pace, scrape interval, routing and shared thresholds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SECRETS = Path("/etc/alertmanager/secrets/flopwatch")
MIN_WINDOW = 60.0  # seconds, of all ranges in the rules


def duration(seconds: float) -> str:
    """Format seconds as a Prometheus duration, rounded to milliseconds: 90 is 1m30s, 0.75 is 750ms."""
    left = round(seconds * 1000)
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def seconds(text: str) -> float:
    """Return the seconds of a Prometheus duration such as 1m30s."""
    sizes = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(count) * sizes[unit] for count, unit in re.findall(r"(\d+)(ms|[wdhms])", text))


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Settings of the rules and of Alertmanager. Times are in seconds at pace 1, which is production.

    At a higher pace, all times in the rules are shorter by that factor. Thresholds do not change with the pace. Names
    of recording rules keep the window of pace 1 (`...:ratio_rate5m`), so that dashboards work at any pace. Raises
    ValueError for a pace of 0 or less, a team that cannot be a file name, or a scrape interval above a quarter of
    MIN_WINDOW.
    """

    pace: float = 1.0  # 20: every window, for, interval and wait is twenty times shorter
    scrape_interval: float = 15.0  # also the time between two evaluations of a rule

    page_min_gpus: int = 64  # a run with fewer GPUs does not page, unless its hook sets page="always"

    gpu_hour_price: float = 0.0  # US dollars, for the cost of a straggler in its alert; 0: the alert has no cost

    # Thresholds that a dashboard or a recording rule shows, too.
    straggler_warning: float = 0.10  # share of every step that a straggler costs
    straggler_critical: float = 0.20
    rate_share: float = 0.99  # share of the port's highest rate, below 1 because reported rates are rounded
    transceiver_celsius: float = 70.0  # NVIDIA UFM's limit

    group_wait: float = 45.0  # longer than two evaluations, the largest delay of a cause after its consequence
    verdict_wait: float = (
        9.0  # shorter, because a verdict of the ledger takes longer than the evaluations of its causes
    )
    group_interval: float = 120.0
    repeat_interval: float = 43_200.0
    watchdog_interval: float = 60.0

    slack_url_file: Path = SECRETS / "slack-url"
    pagerduty_key_file: Path = SECRETS / "pagerduty-key"
    pagerduty_url: str | None = None  # None: PagerDuty's own
    teams: tuple[str, ...] = ()  # each has its own slack-url-TEAM and pagerduty-key-TEAM next to the files above
    webhook_url_file: Path | None = None  # receives every alert, for your own system
    email_to: str | None = None  # receives every alert
    email_from: str = "flopwatch@localhost"
    email_smarthost: str = "localhost:25"
    email_password_file: Path | None = None  # of the user email_from
    shadow: tuple[str, ...] = ()  # alerts that are recorded and sent to no receiver, until they are trusted
    watchdog_url_file: Path = SECRETS / "watchdog-url"
    watchdog_url: str | None = None  # in place of the file, because Alertmanager before 0.26 has no url_file
    runbook_base_url: str = "alerts/runbooks"  # URL of the published runbooks; by default the folder in the repository
    dashboard_base_url: str = ""  # Grafana's URL; by default links are relative

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

    @property
    def ledger_interval(self) -> float:
        """Seconds at pace 1 between scrapes of the ledger, and between evaluations of the alerts on its verdicts."""
        return self.scrape_interval / 5

    def seconds_at_pace(self, seconds: float) -> str:
        """Return seconds at pace 1, divided by the pace, as a number to compare with time()."""
        return f"{seconds / self.pace:.3f}".rstrip("0").rstrip(".")

    def at_pace(self, seconds: float) -> str:
        """Return seconds at pace 1, divided by the pace, as a Prometheus duration."""
        return duration(seconds / self.pace)
