"""The receiver takes what Alertmanager sends to Slack, PagerDuty and a webhook, and nothing of another shape."""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.receiver import Receiver

# As Alertmanager 0.28 sends them.
SLACK: dict[str, Any] = {
    "channel": "#gpu",
    "username": "Alertmanager",
    "attachments": [
        {
            "title": "[FIRING] TrainingStraggler",
            "title_link": "http://127.0.0.1:9093/#/alerts?receiver=slack",
            "text": "Rank 2 of run demo is late.",
            "fallback": "[FIRING] TrainingStraggler",
            "callback_id": "",
            "footer": "",
            "color": "danger",
            "mrkdwn_in": ["fallback", "pretext", "text"],
        }
    ],
}
PAGERDUTY: dict[str, Any] = {
    "routing_key": "0123456789abcdef0123456789abcdef",
    "event_action": "trigger",
    "dedup_key": "cc9772a1ec901d26ef71dae861793e4d08979fa5030a3f0a5f3ba549f1f2d0b6",
    "payload": {
        "summary": "GpuXidCritical",
        "source": "Alertmanager",
        "severity": "critical",
        "custom_details": {"num_firing": "1"},
    },
    "client": "Alertmanager",
    "client_url": "http://127.0.0.1:9093/#/alerts?receiver=pagerduty",
}
WATCHDOG: dict[str, Any] = {
    "receiver": "watchdog",
    "status": "firing",
    "version": "4",
    "groupKey": '{}:{alertname="FlopwatchWatchdog"}',
    "groupLabels": {},
    "commonLabels": {"alertname": "FlopwatchWatchdog"},
    "commonAnnotations": {},
    "externalURL": "http://127.0.0.1:9093",
    "truncatedAlerts": 0,
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "FlopwatchWatchdog"},
            "annotations": {},
            "startsAt": "2026-01-02T03:04:05.00459112Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "",
            "fingerprint": "d27aefc3899d6aad",
        }
    ],
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def post(receiver: Receiver, path: str, payload: object) -> tuple[int, bytes]:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    request = urllib.request.Request(receiver.url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def changed(payload: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    made = copy.deepcopy(payload)
    change(made)
    return made


def test_each_service_answers_as_the_real_one_and_records_the_message(receiver: Receiver) -> None:
    assert post(receiver, "/slack", SLACK) == (200, b"ok")
    status, reply = post(receiver, "/v2/enqueue", PAGERDUTY)
    assert (status, json.loads(reply)) == (
        202,
        {"status": "success", "message": "Event processed", "dedup_key": PAGERDUTY["dedup_key"]},
    )
    assert post(receiver, "/watchdog", WATCHDOG) == (200, b"ok")
    assert [(message.kind, message.payload) for message in receiver.messages] == [
        ("slack", SLACK),
        ("pagerduty", PAGERDUTY),
        ("watchdog", WATCHDOG),
    ]
    assert [message.payload for message in receiver.of("pagerduty")] == [PAGERDUTY]
    assert receiver.errors == []


def test_a_resolve_needs_no_payload(receiver: Receiver) -> None:
    resolve = {key: PAGERDUTY[key] for key in ("routing_key", "dedup_key")} | {"event_action": "resolve"}
    assert post(receiver, "/v2/enqueue", resolve)[0] == 202


@pytest.mark.parametrize(
    ("path", "payload", "reason"),
    [
        ("/slack", b"not json", "Expecting value"),
        ("/slack", [], "message is not an object"),
        ("/slack", {"attachments": []}, "message.attachments must hold 1 to 100"),
        ("/slack", changed(SLACK, lambda p: p["attachments"][0].pop("fallback")), "attachment.fallback is missing"),
        ("/slack", changed(SLACK, lambda p: p["attachments"][0].update(text=" ")), "attachment.text is empty"),
        ("/slack", changed(SLACK, lambda p: p["attachments"][0].update(color="red")), "attachment.color 'red'"),
        (
            "/slack",
            changed(SLACK, lambda p: p["attachments"][0].update(level="x")),
            "attachment.level is an unknown field",
        ),
        ("/slack", changed(SLACK, lambda p: p.update(channel=7)), "message.channel is a int"),
        ("/v2/enqueue", changed(PAGERDUTY, lambda p: p.update(routing_key="short")), "event.routing_key is not 32"),
        ("/v2/enqueue", changed(PAGERDUTY, lambda p: p.pop("dedup_key")), "event.dedup_key is missing"),
        ("/v2/enqueue", changed(PAGERDUTY, lambda p: p.update(event_action="fire")), "event.event_action is unknown"),
        ("/v2/enqueue", changed(PAGERDUTY, lambda p: p.pop("payload")), "payload is not an object"),
        ("/v2/enqueue", changed(PAGERDUTY, lambda p: p["payload"].pop("source")), "payload.source is missing"),
        (
            "/v2/enqueue",
            changed(PAGERDUTY, lambda p: p["payload"].update(severity="page")),
            "payload.severity is unknown",
        ),
        (
            "/v2/enqueue",
            changed(PAGERDUTY, lambda p: p["payload"].update(summary="x" * 1025)),
            "payload.summary is not",
        ),
        ("/watchdog", changed(WATCHDOG, lambda p: p.update(version="3")), "message.version is not 4"),
        ("/watchdog", changed(WATCHDOG, lambda p: p.update(alerts=[])), "message.alerts is empty"),
        ("/watchdog", changed(WATCHDOG, lambda p: p.update(truncatedAlerts=True)), "message.truncatedAlerts is a bool"),
        ("/watchdog", changed(WATCHDOG, lambda p: p["alerts"][0].update(startsAt="now")), "alert.startsAt 'now'"),
    ],
)
def test_a_payload_of_the_wrong_shape_is_refused_and_recorded(
    receiver: Receiver, path: str, payload: object, reason: str
) -> None:
    assert post(receiver, path, payload)[0] == 400
    assert receiver.messages == []
    assert len(receiver.errors) == 1
    assert reason in receiver.errors[0]


def test_pagerduty_reports_what_is_wrong_with_an_event(receiver: Receiver) -> None:
    status, reply = post(receiver, "/v2/enqueue", {"routing_key": "0" * 32})
    assert (status, json.loads(reply)) == (
        400,
        {"status": "invalid event", "message": "Event object is invalid", "errors": ["event.event_action is missing"]},
    )


def test_an_unknown_path_is_an_error(receiver: Receiver) -> None:
    assert post(receiver, "/teams", SLACK)[0] == 404
    assert receiver.errors == ["nothing listens at /teams"]
