"""Pages through a real Alertmanager: their shape, once each, also when it restarts or the receiver fails for a while.

`make versions` runs this on the oldest and the newest Alertmanager there are, with a receiver that fails for a minute.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from alerts import AlertSettings, alertmanager_yaml
from demo.receiver import Kind, Receiver
from demo.servers import NEWEST, OLDEST, ServersError, find
from demo.stack import Child, fetch, free_ports
from tests.support.machine import until

pytestmark = pytest.mark.long

VERSIONS = bool(os.environ.get("FLOPWATCH_VERSIONS"))
SUITES = (OLDEST, NEWEST) if VERSIONS else (None,)
OUTAGE = 60.0 if VERSIONS else 3.0
SETTINGS = AlertSettings(pace=180)  # group_wait is a quarter of a second
QUIET = (SETTINGS.group_wait + 2 * SETTINGS.group_interval) / SETTINGS.pace  # after which nothing more comes

# One alert of an instance, and 32 that make one message, with what a label of a user's may hold.
DOWN = {"alertname": "TrainingDown", "severity": "critical", "tenant": "speech", "run": "lm"}
PORTS = [
    {"alertname": "InfinibandPortDown", "severity": "critical", "host": "node-1", "device": f"mlx5_{n}", "port": "1"}
    for n in range(32)
]
ODD = {
    "alertname": "TrainingStraggler",
    "severity": "warning",
    "run": '<!channel> <@U012AB3CD> &lt;!here&gt; "ü\\{{ 1 }}\n& 日本',
}


class Flaky(Receiver):
    """A receiver whose services answer 500 while `broken`, and what they were asked for meanwhile."""

    broken = False
    asked = 0

    def _accept(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self.broken:
            self.asked += 1
            return 500, b"try again later"
        return super()._accept(path, body)


class Chain:
    """Alertmanager with the shipped configuration, in a folder that stays when it restarts, and its receiver."""

    def __init__(self, folder: Path, suite: str | None) -> None:
        self.folder, self.receiver = folder, Flaky()
        servers = find() if suite is None else find(suite=suite)
        assert servers.alertmanager, servers.why
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        (folder / "slack").write_text(f"{self.receiver.url}/slack")
        (folder / "key").write_text("0123456789abcdef" * 2)
        (folder / "alertmanager.yml").write_text(
            alertmanager_yaml(
                AlertSettings(
                    pace=SETTINGS.pace,
                    slack_url_file=folder / "slack",
                    pagerduty_key_file=folder / "key",
                    pagerduty_url=f"{self.receiver.url}/v2/enqueue",
                    watchdog_url=f"{self.receiver.url}/watchdog",
                    runbook_base_url="https://example.com/runbooks",
                    dashboard_base_url="https://example.com",
                )
            )
        )
        self.alertmanager = Child(
            "alertmanager",
            [
                *servers.alertmanager,
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--cluster.listen-address=",
            ],
            os.environ,
            folder / "log",
        )
        self.wait()

    def wait(self) -> None:
        """Return once Alertmanager answers."""

        def ready() -> bool:
            self.alertmanager.check()
            try:
                fetch(f"{self.url}/-/ready")
            except OSError:
                return False
            return True

        until(ready)

    def restart(self, kill: bool = False) -> None:
        """End Alertmanager, in order or by SIGKILL, and start it again."""
        self.alertmanager.stop(kill=kill)
        self.alertmanager.start()
        self.wait()

    def post(self, *labels: dict[str, str], ended: bool = False, description: str = "Because.") -> None:
        """Send alerts as Prometheus does."""
        now = datetime.now(UTC)
        times = {"startsAt": now.isoformat(), "endsAt": (now + timedelta(seconds=0 if ended else 600)).isoformat()}
        self.api(
            "alerts",
            [
                {
                    "labels": one,
                    **times,
                    "annotations": {
                        "summary": "A summary.",
                        "description": f"{' '.join(one.values())}: {description}",
                        "runbook_url": f"https://example.com/runbooks/{one['alertname']}.md",
                        "dashboard_url": "https://example.com/d/flopwatch-run",
                    },
                }
                for one in labels
            ],
        )

    def api(self, path: str, body: object) -> None:
        """Post to Alertmanager's API."""
        urllib.request.urlopen(
            urllib.request.Request(
                f"{self.url}/api/v2/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
            ),
            timeout=30,
        ).close()

    def of(self, kind: Kind, text: str) -> list[dict[str, Any]]:
        """Return the payloads of a service in which a text is."""
        return [
            message.payload
            for message in self.receiver.of(kind)
            if text in json.dumps(message.payload, ensure_ascii=False)
        ]

    def actions(self, run: str) -> list[str]:
        """Return the actions of the events that PagerDuty received about a run."""
        return [payload["event_action"] for payload in self.of("pagerduty", f" {run}: ")]

    def colors(self, run: str) -> list[str]:
        """Return the colours of the messages that Slack received about a run."""
        return [payload["attachments"][0]["color"] for payload in self.of("slack", f" {run}: ")]


@contextmanager
def started(folder: Path, suite: str | None) -> Iterator[Chain]:
    """Run a chain until the block ends. Raises ServersError."""
    found = Chain(folder, suite)
    try:
        yield found
    finally:
        found.alertmanager.stop()
        found.receiver.close()


@pytest.fixture(params=SUITES, ids=lambda suite: suite or "default")
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(started(tmp_path, request.param))
        except ServersError as error:
            if request.param is None:
                raise
            pytest.skip(f"this version cannot be had here: {error}")
        yield found


def run(name: str) -> dict[str, str]:
    return {**DOWN, "run": name}


def test_every_payload_has_the_shape_its_service_documents_and_ends_with_a_resolve(chain: Chain) -> None:
    """The receiver refuses any other shape, as the services do."""
    chain.post(DOWN, *PORTS, ODD, description="é" * 400)
    until(lambda: len(chain.receiver.of("pagerduty")) >= 2 and len(chain.receiver.of("slack")) >= 3)
    chain.post(DOWN, *PORTS, ODD, ended=True, description="é" * 400)
    until(lambda: len(chain.receiver.of("pagerduty")) >= 4 and len(chain.receiver.of("slack")) >= 6)
    assert chain.receiver.errors == []
    events = [message.payload for message in chain.receiver.of("pagerduty")]
    for text in (" lm", "node-1"):
        received = [event for event in events if text in event["payload"]["summary"]]
        assert [event["event_action"] for event in received] == ["trigger", "resolve"]
        assert len({event["dedup_key"] for event in received}) == 1
        assert {event["payload"]["severity"] for event in received} == {"critical"}
        assert all(event["payload"]["source"] and len(json.dumps(event)) < 512 * 1024 for event in received)
    attachments = [message.payload["attachments"] for message in chain.receiver.of("slack")]
    assert {len(one) for one in attachments} == {1}
    assert sorted(one[0]["color"] for one in attachments) == ["danger", "danger", "good", "good", "good", "warning"]
    for (one,) in attachments:
        assert one["title"].startswith("[RESOLVED] " if one["color"] == "good" else "[FIRING] ")
        assert one["title_link"] == "https://example.com/d/flopwatch-run"
        message = one["title"] + one["text"] + one["fallback"]
        assert not any(mention in message for mention in ("<!", "<@", " &lt;!here"))
        assert "<https://example.com/runbooks/" in one["text"]
    assert not any(one.get("link_names") for (one,) in attachments)  # or @here in a name would ring
    odd = [one["text"] for (one,) in attachments if "TrainingStraggler" in one["title"]]
    assert all("&lt;!channel&gt; &lt;@U012AB3CD&gt; &amp;lt;!here&amp;gt;" in text for text in odd)
    assert len(odd) == 2


def test_a_restart_repeats_no_page_and_the_resolve_arrives(chain: Chain) -> None:
    chain.api(
        "silences",
        {
            "matchers": [{"name": "run", "value": "silenced", "isRegex": False, "isEqual": True}],
            "createdBy": "a test",
            "comment": "kept",
            "startsAt": datetime.now(UTC).isoformat(),
            "endsAt": (datetime.now(UTC) + timedelta(hours=1)).isoformat(),
        },
    )
    chain.post(run("stays"), run("ends"))
    until(
        lambda: (
            len(chain.actions("stays")) == len(chain.actions("ends")) == 1
            and len(chain.colors("stays")) == len(chain.colors("ends")) == 1
        )
    )
    time.sleep(QUIET)  # Alertmanager logs a notification after the receiver has answered
    chain.restart()
    # Prometheus sends what fires again, and what ended meanwhile for 15 minutes.
    chain.post(run("stays"), run("silenced"), run("new"))
    chain.post(run("ends"), ended=True)
    until(lambda: chain.actions("new") == ["trigger"] and chain.actions("ends") == ["trigger", "resolve"])
    time.sleep(QUIET)
    assert (chain.actions("stays"), chain.colors("stays")) == (["trigger"], ["danger"])
    assert chain.colors("ends") == ["danger", "good"]
    assert (chain.actions("silenced"), chain.colors("silenced")) == ([], [])
    chain.post(run("stays"), ended=True)
    until(lambda: chain.actions("stays") == ["trigger", "resolve"] and chain.colors("stays") == ["danger", "good"])
    assert chain.receiver.errors == []


def test_a_crash_forgets_sent_notifications_and_is_still_one_incident(chain: Chain) -> None:
    """Alertmanager saves its notification log every 15 minutes and at its end."""
    chain.post(run("lm"))
    until(lambda: chain.actions("lm") == ["trigger"] and chain.colors("lm") == ["danger"])
    chain.restart(kill=True)
    chain.post(run("lm"))
    until(lambda: len(chain.actions("lm")) == 2)
    chain.post(run("lm"), ended=True)
    until(lambda: chain.actions("lm")[-1] == "resolve")
    assert len({payload["dedup_key"] for payload in chain.of("pagerduty", " lm: ")}) == 1


def fail(chain: Chain, refused: bool) -> None:
    """Let a receiver fail after its first page, and send what it misses: a second page and the end of the first."""
    chain.post(run("before"))
    until(lambda: chain.actions("before") == ["trigger"] and chain.colors("before") == ["danger"])
    chain.receiver.broken = True
    if refused:
        chain.receiver.close()
    chain.post(run("during"))
    chain.post(run("before"), ended=True)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str | None, bool], Chain]]:
    """Give chains whose receivers fail and did so for OUTAGE, all at once, by suite and by whether they refuse."""
    with ExitStack() as stack:
        found = {}
        for suite, refused in product(SUITES, (False, True)):
            with nullcontext() if suite is None else suppress(ServersError):
                found[suite, refused] = stack.enter_context(started(tmp_path_factory.mktemp("failed"), suite))
        for (_, refused), one in found.items():
            fail(one, refused)
        time.sleep(OUTAGE)
        yield found


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite or "default")
@pytest.mark.parametrize("refused", [False, True], ids=["answers 500", "refuses connections"])
def test_what_a_receiver_that_fails_misses_comes_once_when_it_is_back(
    failed: dict[tuple[str | None, bool], Chain], suite: str | None, refused: bool
) -> None:
    if (suite, refused) not in failed:
        pytest.skip(f"the Alertmanager of {suite} cannot be had here")
    chain = failed[suite, refused]
    failing, port = chain.receiver, int(chain.receiver.url.rpartition(":")[2])
    assert (chain.actions("during"), chain.actions("before")) == ([], ["trigger"])
    failing.broken = False
    if refused:
        chain.receiver = Flaky(port=port)
        chain.receiver.messages.extend(failing.messages)
    else:
        assert failing.asked >= 4  # Slack and PagerDuty, of two runs
    until(
        lambda: (
            len(chain.actions("during")) == len(chain.colors("during")) == 1
            and len(chain.actions("before")) == len(chain.colors("before")) == 2
        )
    )
    time.sleep(QUIET)
    assert (chain.actions("during"), chain.colors("during")) == (["trigger"], ["danger"])
    assert (chain.actions("before"), chain.colors("before")) == (["trigger", "resolve"], ["danger", "good"])
    assert chain.receiver.errors == []
