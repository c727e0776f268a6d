"""Stacks of ranks in the exporter: the ledger's request reaches the hook, and its answer reaches the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics

from flopwatch.catalogue.stacks import MAX_STACKS, SEND_STACKS
from flopwatch.node.telemetry import ledger_client, otlp
from flopwatch.node.telemetry.admission import MAX_RANKS
from flopwatch.node.telemetry.ranks import STACKS_KEPT
from flopwatch.node.telemetry.stacks import AGAIN
from tests.support.otlp_by_hand import counter, gauge, process, request
from tests.support.training_host import Host

TEXT = 'thread MainThread (1)\n  File "train.py", line 7, in load'


def push(host: Host, rank: int = 0, **reported: Any) -> tuple[int, str]:
    return host.push(of(host, rank, **reported))


def of(host: Host, rank: int, *, steps: int = 10, open_for: float = 20.0, **reported: Any) -> ResourceMetrics:
    """Return the push of a rank that has done ten steps in as many seconds, and whose step is open since then."""
    at = host.time
    return process(
        counter("training_activity_seconds_total", 10 + open_for, at, activity="step"),
        counter("training_steps_total", steps, at),
        gauge("training_position_steps", 10, at),
        rank=rank,
        **{"start_unix": at - 10 - open_for, "open_step_seconds": open_for, **reported},
    )


def test_a_request_reaches_the_hook_once_and_its_answer_the_ledger_while_the_step_is_open() -> None:
    host = Host()
    assert push(host) == push(host, 1) == (0, "")
    host.telemetry.stacks.add([("", "lm", 1)])
    assert push(host) == (0, "")
    assert push(host, 1) == (0, SEND_STACKS)
    assert push(host, 1, stacks=TEXT) == (0, "")
    host.passes()
    assert host.last["", "lm", "a1"]["stacks"] == [[1, host.time - 1, TEXT]]
    assert push(host, 1, open_for=25) == (0, "")
    host.passes()
    assert len(host.last["", "lm", "a1"]["stacks"]) == 1
    push(host, steps=11, open_for=0.0)
    host.passes()
    assert "stacks" not in host.last["", "lm", "a1"]


def test_a_push_that_is_not_decoded_in_full_is_asked_too() -> None:
    host = Host()
    one, answer = (request(push).SerializeToString() for push in (of(host, 0), of(host, 0, stacks=TEXT)))
    assert [host.telemetry.receive_body(one, otlp.PROTOBUF) for _ in range(3)] == [(0, "")] * 3
    for _ in range(2):
        host.telemetry.stacks.add([("", "lm", 0)])
        assert host.telemetry.receive_body(one, otlp.PROTOBUF) == (0, SEND_STACKS)
        assert host.telemetry.receive_body(answer, otlp.PROTOBUF) == (0, "")
    assert len(host.telemetry._templates._kept) == 1  # none of the text, which would stay in memory


def test_the_request_is_a_partial_success_without_a_rejection() -> None:
    """An older hook then takes its push for accepted: https://opentelemetry.io/docs/specs/otlp/#partial-success-1."""
    body = otlp.response(otlp.PROTOBUF, 0, SEND_STACKS)
    partial = ExportMetricsServiceResponse.FromString(body).partial_success
    assert (partial.rejected_data_points, partial.error_message) == (0, SEND_STACKS)


def test_stacks_that_were_not_requested_are_dropped() -> None:
    host = Host()
    push(host, stacks=TEXT)
    host.telemetry.stacks.add([("", "lm", 0), ("t", "lm", 1), ("", "other", 1)])
    push(host, 1, stacks=TEXT)
    push(host, 0, stacks=TEXT)  # before it was asked
    host.passes()
    assert "open_step" in host.last["", "lm", "a1"]
    assert "stacks" not in host.last["", "lm", "a1"]


@pytest.mark.parametrize("value", [7, 1.5, "x" * (1 << 20), "\x1b[31mred\x07\r\n\u202e<b>"])
def test_hostile_stacks_are_cut_and_printable(value: Any) -> None:
    host = Host()
    push(host)
    host.telemetry.stacks.add([("", "lm", 0)])
    push(host)
    push(host, stacks=value)
    host.passes()
    texts = [row[2] for row in host.last["", "lm", "a1"].get("stacks", [])]
    assert len(texts) == isinstance(value, str)
    for text in texts:
        assert len(text) <= MAX_STACKS
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_a_repeated_request_neither_drops_an_answer_nor_asks_again_at_once() -> None:
    host = Host()
    host.telemetry.stacks.add([("", "lm", 0)])
    assert push(host) == (0, SEND_STACKS)
    host.telemetry.stacks.add([("", "lm", 0)])
    assert push(host) == (0, "")
    push(host, stacks=TEXT)
    host.passes()
    assert host.last["", "lm", "a1"]["stacks"][0][2] == TEXT


def test_a_rank_that_did_not_answer_is_asked_again() -> None:
    host = Host()
    host.telemetry.stacks.add([("", "lm", 0)])
    assert push(host) == (0, SEND_STACKS)
    host.passes(AGAIN)
    host.telemetry.stacks.add([("", "lm", 0)])
    assert push(host) == (0, SEND_STACKS)


def test_requests_are_bounded_and_the_newest_stay() -> None:
    requests = Host().telemetry.stacks
    requests.add([("", "lm", rank) for rank in range(10_000)])
    assert len(requests._asked) == MAX_RANKS
    assert ("", "lm", 9_999) in requests._asked


def test_a_refused_push_is_not_asked() -> None:
    host = Host()
    host.telemetry.stacks.add([("", "lm", 0)])
    unknown = of(host, 0)
    unknown.scope_metrics[0].metrics.append(gauge("unknown_family", 1))
    refused, reason = host.push(unknown)
    assert (refused, SEND_STACKS in reason) == (1, False)
    assert push(host) == (0, SEND_STACKS)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"accepted": 1}', []),
        ('{"accepted": 2, "stacks": [["t", "lm", 3], ["", "lm", 4]]}', [("t", "lm", 3), ("", "lm", 4)]),
        ('{"accepted": 1, "stacks": 7}', None),
        ('{"accepted": 1, "stacks": [["lm", 3]]}', None),
        ('{"accepted": "1"}', None),
        ("[]", None),
        ("<html>", None),
    ],
)
def test_the_answer_of_a_ledger_has_the_ranks_that_it_wants(body: str, wanted: object) -> None:
    assert ledger_client._wanted(body) == wanted


def steps_on(host: Host, seconds: int) -> list[bool]:
    """Have a rank make a step a second and send its stacks after two, and return which records have them."""
    sent = []
    for second in range(seconds):
        if second == 1:
            host.telemetry.stacks.add([("", "lm", 0)])
        stacks: dict[str, Any] = {"stacks": TEXT} if second == 2 else {}
        push(host, steps=10 + second, open_for=second, open_step_seconds=0.1, **stacks)
        host.passes()
        sent.append("stacks" in host.last["", "lm", "a1"])
    return sent


def test_the_stacks_of_a_rank_that_runs_are_sent_for_half_a_minute() -> None:
    sent = steps_on(Host(), 60)
    assert (sent.index(True), sent.count(True)) == (2, STACKS_KEPT)
    assert all(sent[2:32])


def test_a_step_that_becomes_late_is_not_sent_with_earlier_stacks() -> None:
    host = Host()
    assert steps_on(host, 5)[-1]
    host.passes(24)
    push(host, steps=14, open_for=29, open_step_seconds=24.0)
    host.passes()
    assert "open_step" in host.last["", "lm", "a1"]
    assert "stacks" not in host.last["", "lm", "a1"]
