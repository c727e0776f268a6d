"""Write the rules for Prometheus and the configuration of Alertmanager: `python -m alerts OUT`.

OUT/rules/*.yaml has the rules, OUT/optional/dcgm.yaml those for hosts that only have dcgm-exporter, and
OUT/alertmanager.yml the routing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alerts import TIERS, AlertSettings, alertmanager_yaml, alerts, as_yaml, rules_yaml
from alerts.dcgm import dcgm_rules


def names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list."""
    return tuple(name for name in text.split(",") if name)


KNOBS: dict[str, tuple[Callable[[str], Any], str]] = {
    "pace": (float, "how many times faster than production everything runs"),
    "scrape_interval": (float, "seconds between scrapes of exporters at pace 1, five times those of the ledger"),
    "group_wait": (float, "seconds at pace 1 in which a cause must be sent before its consequence"),
    "verdict_wait": (float, "seconds at pace 1 in which a cause must be sent before TrainingHang or TrainingStraggler"),
    "page_min_gpus": (int, "number of GPUs from which on a run pages"),
    "gpu_hour_price": (
        float,
        "price of a GPU-hour in US dollars. TrainingStraggler then shows the cost of a straggler",
    ),
    "slack_url_file": (Path, "file with Slack's incoming-webhook URL"),
    "pagerduty_key_file": (Path, "file with PagerDuty's integration key (Events API v2)"),
    "pagerduty_url": (str, "where to send PagerDuty's events, if not to PagerDuty"),
    "teams": (
        names,
        "teams with their own Slack channel and PagerDuty service, as a,b: their secrets are in "
        "files of the same names with the suffix -TEAM",
    ),
    "webhook_url_file": (Path, "file with the URL of a webhook that receives every alert"),
    "email_to": (str, "address that receives every alert"),
    "email_from": (str, "the sender, and the user whose password is given"),
    "email_smarthost": (str, "mail server, as HOST:PORT"),
    "email_password_file": (Path, "file with the sender's password"),
    "shadow": (names, "alerts that are recorded but sent to no receiver, as A,B"),
    "watchdog_url_file": (Path, "file with the URL the watchdog reports to"),
    "watchdog_url": (str, "that URL itself, for Alertmanager before 0.26"),
    "runbook_base_url": (str, "where alerts/runbooks is published"),
    "dashboard_base_url": (str, "Grafana's address"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the flags and write the rules of each tier, the optional rules and alertmanager.yml."""
    parser = argparse.ArgumentParser(prog="python -m alerts", description=__doc__)
    parser.add_argument("out", type=Path)
    default = AlertSettings()
    for name, (kind, text) in KNOBS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(default, name), help=text)
    given = vars(parser.parse_args(arguments))
    out: Path = given.pop("out")
    try:
        settings = AlertSettings(**given)
        alerts(settings)
    except ValueError as error:
        parser.error(str(error))
    for folder in ("rules", "optional"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    files = {f"rules/{tier}.yaml": rules_yaml(settings, tier) for tier in TIERS}
    files |= {"optional/dcgm.yaml": as_yaml(dcgm_rules(settings)), "alertmanager.yml": alertmanager_yaml(settings)}
    for name, content in files.items():
        (out / name).write_text(content, encoding="utf-8")
        print(out / name)


if __name__ == "__main__":
    main()
