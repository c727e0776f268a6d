"""Receiver on loopback that replaces Slack, PagerDuty and a dead man's switch, with a strict check of each payload.

Shapes: https://api.slack.com/reference/messaging/attachments,
https://developer.pagerduty.com/docs/events-api-v2/trigger-events/ and
https://prometheus.io/docs/alerting/latest/configuration/#webhook_config (version 4). A payload of the wrong shape is
answered with 400, as by the real service, and recorded in `errors`.

`python -m demo.receiver HOST:PORT` runs the receiver alone and prints each message as a line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["slack", "pagerduty", "watchdog"]
Payload = dict[str, Any]
Types = Mapping[str, type]
PATHS: dict[str, Kind] = {"/slack": "slack", "/v2/enqueue": "pagerduty", "/watchdog": "watchdog"}


class WrongShape(ValueError):
    """Raised for a payload that the real service would reject. The message names the wrong field."""


@dataclass(frozen=True, slots=True)
class Message:
    """One notification from Alertmanager that arrived at Unix time `at`."""

    at: float
    kind: Kind
    payload: Payload


def _need(condition: object, message: str) -> None:
    if not condition:
        raise WrongShape(message)


def _fields(value: object, name: str, required: Types, optional: Types = MappingProxyType({})) -> Payload:
    """Return `value` if it is an object with these fields of these types, and no others. Else raises WrongShape."""
    if not isinstance(value, dict):
        raise WrongShape(f"{name} is not an object")
    types = {**required, **optional}
    for key in required:
        _need(key in value, f"{name}.{key} is missing")
    for key, field in value.items():
        _need(key in types, f"{name}.{key} is an unknown field")
        # In Python, unlike in JSON, True is an int.
        _need(
            isinstance(field, types[key]) and not (isinstance(field, bool) and types[key] is int),
            f"{name}.{key} is a {type(field).__name__}",
        )
    return value


def check_slack(payload: object) -> None:
    """Check a message to a Slack webhook, with attachments. Raises WrongShape if Slack would reject it."""
    message = _fields(
        payload,
        "message",
        {"attachments": list},
        {
            "channel": str,
            "username": str,
            "text": str,
            "icon_emoji": str,
            "icon_url": str,
            "link_names": bool,
            "mrkdwn": bool,
        },
    )
    _need(0 < len(message["attachments"]) <= 100, "message.attachments must hold 1 to 100 attachments")
    for attachment in message["attachments"]:
        _fields(
            attachment,
            "attachment",
            {"fallback": str, "title": str, "text": str, "color": str},
            {
                "title_link": str,
                "pretext": str,
                "footer": str,
                "callback_id": str,
                "image_url": str,
                "thumb_url": str,
                "fields": list,
                "actions": list,
                "mrkdwn_in": list,
            },
        )
        for field in ("fallback", "title", "text"):
            _need(attachment[field].strip(), f"attachment.{field} is empty")
        _need(
            re.fullmatch(r"good|warning|danger|#[0-9a-fA-F]{6}", attachment["color"]),
            f"attachment.color {attachment['color']!r} is not good, warning, danger or #rrggbb",
        )
        _need(len(attachment["text"]) <= 8000, "attachment.text is longer than 8000 characters")
        link = attachment.get("title_link", "http://")
        _need(link.startswith(("http://", "https://")), f"attachment.title_link {link!r} is not a link")
        for field in attachment.get("fields", []):
            _fields(field, "field", {"title": str, "value": str}, {"short": bool})
        _need(len(attachment.get("actions", [])) <= 5, "attachment.actions holds more than 5 actions")
        for action in attachment.get("actions", []):
            _fields(
                action,
                "action",
                {"type": str, "text": str},
                {"url": str, "name": str, "value": str, "style": str, "confirm": dict},
            )
        for name in attachment.get("mrkdwn_in", []):
            _need(name in ("pretext", "text", "fields", "fallback", "title"), f"attachment.mrkdwn_in: {name!r}")


def check_pagerduty(payload: object) -> None:
    """Check an event of PagerDuty's Events API v2. Raises WrongShape if PagerDuty would reject it."""
    event = _fields(
        payload,
        "event",
        {"routing_key": str, "event_action": str, "dedup_key": str},
        {"payload": dict, "client": str, "client_url": str, "links": list, "images": list},
    )
    _need(re.fullmatch(r"[A-Za-z0-9]{32}", event["routing_key"]), "event.routing_key is not 32 letters and digits")
    _need(event["event_action"] in ("trigger", "acknowledge", "resolve"), "event.event_action is unknown")
    _need(0 < len(event["dedup_key"]) <= 255, "event.dedup_key is not 1 to 255 characters")
    if event["event_action"] == "trigger" or "payload" in event:
        body = _fields(
            event.get("payload"),
            "payload",
            {"summary": str, "source": str, "severity": str},
            {"timestamp": str, "component": str, "group": str, "class": str, "custom_details": dict},
        )
        _need(0 < len(body["summary"]) <= 1024, "payload.summary is not 1 to 1024 characters")
        _need(body["source"], "payload.source is empty")
        _need(body["severity"] in ("critical", "error", "warning", "info"), "payload.severity is unknown")
    for link in event.get("links", []):
        _fields(link, "link", {"href": str}, {"text": str})
    for image in event.get("images", []):
        _fields(image, "image", {"src": str}, {"href": str, "alt": str})


def check_watchdog(payload: object) -> None:
    """Check a request of Alertmanager's webhook receiver, version 4. Raises WrongShape for a wrong field."""
    strings = dict.fromkeys(("version", "groupKey", "receiver", "status", "externalURL"), str)
    maps = dict.fromkeys(("groupLabels", "commonLabels", "commonAnnotations"), dict)
    message = _fields(
        payload, "message", {**strings, **maps, "alerts": list, "truncatedAlerts": int}, {"notification_reason": str}
    )
    _need(message["version"] == "4", "message.version is not 4")
    _need(message["status"] in ("firing", "resolved"), "message.status is unknown")
    _need(message["alerts"], "message.alerts is empty")
    for alert in message["alerts"]:
        _fields(
            alert,
            "alert",
            {
                **dict.fromkeys(("labels", "annotations"), dict),
                **dict.fromkeys(("status", "startsAt", "endsAt", "generatorURL", "fingerprint"), str),
            },
        )
        _need("alertname" in alert["labels"], "alert.labels has no alertname")
        for key in ("startsAt", "endsAt"):
            try:
                datetime.fromisoformat(re.sub(r"(\.\d{1,6})\d*|Z$", r"\1", alert[key]))
            except ValueError as error:
                raise WrongShape(f"alert.{key} {alert[key]!r} is not a time") from error


CHECKS: dict[Kind, Callable[[object], None]] = {
    "slack": check_slack,
    "pagerduty": check_pagerduty,
    "watchdog": check_watchdog,
}


class Receiver:
    """HTTP server in a thread that checks and records notifications. Use it as a context manager."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, on_message: Callable[[Message], None] | None = None
    ) -> None:
        self.messages: list[Message] = []
        self.errors: list[str] = []
        receiver = self

        class _WebhookHandler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, reply = receiver._accept(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._on_message = on_message
        self._server = ThreadingHTTPServer((host, port), _WebhookHandler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def _accept(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Check and record one request, and return the status and body that the real service would send."""
        kind = PATHS.get(path)
        if kind is None:
            self.errors.append(f"nothing listens at {path}")
            return 404, b"not found"
        try:
            payload = json.loads(body)
            CHECKS[kind](payload)
        except ValueError as error:
            self.errors.append(f"{kind}: {error}: {body[:2000].decode(errors='replace')}")
            refusal = {"status": "invalid event", "message": "Event object is invalid", "errors": [str(error)]}
            return 400, json.dumps(refusal).encode() if kind == "pagerduty" else b"invalid_payload"
        message = Message(time.time(), kind, payload)
        self.messages.append(message)
        if self._on_message is not None:
            self._on_message(message)
        if kind == "pagerduty":
            accepted = {"status": "success", "message": "Event processed", "dedup_key": payload["dedup_key"]}
            return 202, json.dumps(accepted).encode()
        return 200, b"ok"

    @property
    def url(self) -> str:
        """Return the base URL of the server. The paths of the services are in PATHS."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def of(self, kind: Kind) -> list[Message]:
        """Return the messages of one kind, oldest first."""
        return [message for message in list(self.messages) if message.kind == kind]

    def close(self) -> None:
        """Stop the server. Recorded messages can still be read."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(arguments: Sequence[str]) -> int:
    """Receive notifications at the address in `arguments` until interrupted. Print each as a line of JSON."""
    host, _, port = (arguments[0] if arguments else "127.0.0.1:0").rpartition(":")
    with Receiver(host, int(port), lambda message: print(json.dumps(asdict(message)), flush=True)) as receiver:
        print(f"listening on {receiver.url} at {' '.join(PATHS)}", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
