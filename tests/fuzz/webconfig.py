"""The web configuration file: an administrator's mistake must be reported in one line, not raised."""

from __future__ import annotations

from flopwatch.http.web_config import MAX_COST, MIN_COST, WebConfig, parse
from flopwatch.settings import SettingsError


def target(data: bytes) -> None:
    """Parse it, or say in one line what to change."""
    try:
        config = parse(data.decode("utf-8", "replace"))
    except SettingsError as error:
        lines = str(error).splitlines()
    else:
        lines = ["fine"]
        _check(config)
    assert len(lines) == 1, lines


def _check(config: WebConfig) -> None:
    for name, value in config.http_server_config.headers.items():
        assert name.isascii()
        assert value.isascii()
        assert value.isprintable()
    for stored in config.basic_auth_users.values():
        assert MIN_COST <= int(stored.split("$")[2]) <= MAX_COST
