"""Placeholders in the expressions and texts of rules: `<5m>` is five minutes at pace 1.

- `<5m>` is a duration and `<300_seconds>` a number of seconds. Both are divided by the pace.
- `<4_scrapes>` is a duration of four scrape intervals.
- `<straggler_warning>` is a field of AlertSettings.
- Any other `<name>` is a fragment of PromQL or of a Prometheus template.

PromQL has a space after each `<`, so that a comparison is never mistaken for a placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import dedent

from alerts.settings import AlertSettings, seconds

PLACEHOLDER = re.compile(r"<([a-z0-9][a-z0-9_.]*)>")
DURATION = re.compile(r"(\d+(?:ms|[wdhms]))+")


def fill(text: str, settings: AlertSettings, fragments: Mapping[str, str]) -> str:
    """Return an expression or text without indentation and with its placeholders filled in.

    A fragment of several lines is indented like the line that contains it. Raises AttributeError for a placeholder that
    is not a duration, a fragment or a field.
    """
    lines = [_fill_line(line, settings, fragments) for line in dedent(text).strip().split("\n")]
    return "\n".join(lines)


def _fill_line(line: str, settings: AlertSettings, fragments: Mapping[str, str]) -> str:
    indent = line[: len(line) - len(line.lstrip())]

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if DURATION.fullmatch(name):
            return settings.at_pace(seconds(name))
        if name.endswith("_seconds"):
            return settings.seconds_at_pace(float(name.removesuffix("_seconds")))
        if name.endswith("_scrapes"):
            return settings.at_pace(float(name.removesuffix("_scrapes")) * settings.scrape_interval)
        if name in fragments:
            return PLACEHOLDER.sub(value, fragments[name]).replace("\n", f"\n{indent}")
        return f"{getattr(settings, name):g}"

    return PLACEHOLDER.sub(value, line)
