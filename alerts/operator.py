"""Alertmanager's configuration as the Prometheus Operator's AlertmanagerConfig.

`alertmanagerconfig` translates the output of alerts/routing.py, so that routes, messages and inhibitions are written
once. A secret that routing.py names by its mounted file, /etc/alertmanager/secrets/NAME/KEY, becomes
`{name: NAME, key: KEY}` here.
https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1alpha1.AlertmanagerConfig
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alerts.routing import alertmanager
from alerts.settings import AlertSettings

Json = dict[str, Any]
# Where camel case alone does not make the operator's name.
NAMES = {
    "api_url_file": "apiURL",
    "routing_key_file": "routingKey",
    "url_file": "urlSecret",
    "auth_password_file": "authPassword",
    "source_matchers": "sourceMatch",
    "target_matchers": "targetMatch",
}
MATCHER = re.compile(r'(\w+) (=~|!~|!=|=) "(.*)"')


def alertmanagerconfig(settings: AlertSettings) -> Json:
    """Return the spec of an AlertmanagerConfig equivalent to alertmanager.yml."""
    return {camel(key): translated(key, value) for key, value in alertmanager(settings).items()}


def translated(key: str, value: Any) -> Any:
    """Return a value of Alertmanager's configuration in the shape of the operator's field."""
    if key.endswith("_file"):
        path = Path(value)
        return {"name": path.parent.name, "key": path.name}
    if key.endswith("matchers"):
        return [matcher(text) for text in value]
    if key in ("details", "headers"):
        return [{"key": name, "value": text} for name, text in value.items()]
    if isinstance(value, Mapping):
        return {camel(name): translated(name, inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [translated("", one) for one in value]
    return value


def matcher(text: str) -> Json:
    """Return a matcher of Alertmanager in the operator's fields. Raises ValueError if it is not like name = "value"."""
    found = MATCHER.fullmatch(text)
    if found is None:
        raise ValueError(f'matcher {text}: write it as name = "value"')
    name, kind, value = found.groups()
    return {"name": name, "matchType": kind, "value": value}


def camel(name: str) -> str:
    """Return the operator's name for an option of Alertmanager's configuration."""
    first, *rest = name.split("_")
    return NAMES.get(name, first + "".join(word.capitalize() for word in rest))
