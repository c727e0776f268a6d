"""Templates of pushes: they give what decoding in full gives, whatever differs, and are used if only numbers differ."""

from __future__ import annotations

import math
import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry import otlp
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.node.telemetry.template import MAX_TEMPLATES, Templates
from flopwatch.settings import ExporterSettings
from tests.support.otlp_by_hand import START, histogram, request, training

NOW = START + 1e9
CAPTURE = Path(__file__).parents[3] / "captures" / "otlp" / "hook_0.2.0.bin"
NUMBERS = [0.0, -0.0, 1.0, -1.0, 2.5, 1e300, 5e-324, math.nan, math.inf, -math.inf, 1 << 62]


def captured() -> bytes:
    """Return a captured push of the hook, as if it were not the last one of its process."""
    sent = ExportMetricsServiceRequest.FromString(CAPTURE.read_bytes())
    attributes = sent.resource_metrics[0].resource.attributes
    attributes.remove(next(item for item in attributes if item.key == "flopwatch.status"))
    return sent.SerializeToString()


def by_hand(step: int = 3, **reported: Any) -> bytes:
    """Return a push with its identity in the metadata of a metric, integers and a number without a time."""
    sent = training(step, 2.0 * step, START + 10 + step, open_step_seconds=0.5 * step, **reported)
    metrics = sent.scope_metrics[0].metrics
    metrics.append(histogram("training_step_duration_seconds", [0.1, 1.0], [step, 2, 0], 4.5 * step))
    metrics[3].gauge.data_points[0].as_int = 5
    metrics[3].gauge.data_points[0].time_unix_nano = 0
    metrics[0].metadata.extend(sent.resource.attributes)
    del sent.resource.attributes[:]
    return request(sent).SerializeToString()


BODIES = {"captured": captured(), "by hand": by_hand()}


def in_full(body: bytes, gpus: dict[str, str] | None = None, now: float = NOW) -> otlp.Push | None:
    """Return the push in a body, None if it is refused."""
    try:
        [resource] = otlp.decode(body, otlp.PROTOBUF).resource_metrics
        return otlp.push(resource, host="node-7", gpus=gpus, now=now)
    except (otlp.Refused, ValueError):
        return None


def learned(body: bytes, gpus: dict[str, str] | None = None) -> Templates:
    push = in_full(body, gpus)
    assert push is not None
    templates = Templates()
    templates.learn(body, push, gpus, NOW)
    return templates


def found(templates: Templates, body: bytes, gpus: dict[str, str] | None, now: float) -> otlp.Push | None:
    """Return the push in a body by its template, None if it must be decoded in full."""
    push = templates.find(body, gpus, now)
    return push if push is None else push[1]()


def same(one: otlp.Push | None, other: otlp.Push | None) -> bool:
    """Return whether two pushes are equal, NaN being equal to itself, and 0 not to -0."""
    return one is other is None or (
        one is not None and other is not None and repr(astuple(one)) == repr(astuple(other))
    )


def with_other_numbers(body: bytes, rng: random.Random, allowed: bool) -> bytes:
    """Return a push with other numbers of its points, such that a catalogue row may have them if `allowed`."""
    sent = ExportMetricsServiceRequest.FromString(body)
    for metric in (metric for one in sent.resource_metrics for scope in one.scope_metrics for metric in scope.metrics):
        points = getattr(metric, metric.WhichOneof("data") or "").data_points
        for point in points:
            point.time_unix_nano += rng.randrange(10**12) * (point.time_unix_nano > 0)
            if metric.HasField("histogram"):
                point.bucket_counts[:] = [rng.randrange(100) for _ in point.bucket_counts]
                point.sum = rng.uniform(0, 100) if allowed else rng.choice(NUMBERS)
            elif not metric.name.endswith("_info"):
                value = rng.choice([rng.uniform(0, 1e18), 0.0, 7.0]) if allowed else rng.choice(NUMBERS)
                if point.WhichOneof("value") == "as_int":
                    point.as_int = int(value) if math.isfinite(value) and abs(value) < 1 << 63 else 3
                else:
                    point.as_double = value
    return sent.SerializeToString()


@pytest.mark.parametrize("name", BODIES)
def test_a_template_gives_what_decoding_in_full_gives(name: str) -> None:
    rng, body = random.Random(name), BODIES[name]
    templates, used = learned(body), 0
    for turn in range(400):
        allowed = turn % 2 == 0
        other = with_other_numbers(body, rng, allowed)
        push = found(templates, other, None, NOW)
        assert not allowed or push is not None
        if push is not None:
            used += 1
            assert same(push, in_full(other))
    assert used >= 200


@pytest.mark.parametrize("name", BODIES)
def test_no_change_of_any_byte_makes_a_template_give_anything_else(name: str) -> None:
    rng, body = random.Random(name), BODIES[name]
    templates = learned(body)
    for place in range(len(body)):
        other = bytearray(body)
        other[place] ^= 1 << rng.randrange(8)
        if place % 3 == 0:
            for _ in range(rng.randrange(9)):
                other[rng.randrange(len(body))] = rng.randrange(256)
        push = found(templates, bytes(other), None, NOW)
        assert push is None or same(push, in_full(bytes(other)))


def test_a_template_is_left_where_more_than_numbers_differ() -> None:
    gpus, last = {"GPU-1": "GPU-1"}, by_hand(status="completed")
    templates = learned(by_hand(), gpus)
    assert found(templates, by_hand(4), gpus, NOW + 1) is not None
    assert found(templates, by_hand(4), {"GPU-1": "GPU-2"}, NOW + 1) is None
    assert found(templates, by_hand(4), gpus, NOW - 1) is None
    assert found(templates, by_hand(4, attempt="b"), gpus, NOW + 1) is None
    assert found(templates, by_hand(4, tokens=1), gpus, NOW + 1) is None
    assert found(learned(last), last, None, NOW) is None


def test_an_age_of_the_open_step_is_taken_from_each_push() -> None:
    templates = learned(by_hand())
    pushes = [found(templates, by_hand(step), None, NOW) for step in (1, 8)]
    assert [(push.open_step_seconds, push.at) for push in pushes if push is not None] == [
        (0.5, START + 11),
        (4.0, START + 18),
    ]


def test_a_submission_in_the_future_is_decoded_in_full() -> None:
    body = by_hand(submitted_unix=NOW + 2 * 86400)
    assert found(learned(body), body, None, NOW + 3 * 86400) is None


def test_as_many_templates_are_kept_as_a_user_has_ranks_twice() -> None:
    templates = learned(by_hand(rank=0))
    for rank in range(1, MAX_TEMPLATES + 1):
        body = by_hand(rank=rank)
        push = in_full(body)
        assert push is not None
        templates.learn(body, push, None, NOW)
    assert found(templates, by_hand(rank=0), None, NOW) is None
    assert found(templates, by_hand(5, rank=1), None, NOW) is not None
    assert found(templates, by_hand(5, rank=MAX_TEMPLATES), None, NOW) is not None


def test_a_node_takes_a_push_by_a_template_as_any_other() -> None:
    short, full = (Telemetry(ExporterSettings(host="node-7"), Registry(), now=lambda: NOW) for _ in range(2))
    for step in range(1, 5):
        assert short.receive_body(by_hand(step), otlp.PROTOBUF) == (0, "")
        assert full.receive(otlp.decode(by_hand(step), otlp.PROTOBUF)) == (0, "")
        assert short.ask(1.0).samples == full.ask(1.0).samples != []
        assert [one for _, one in short.due().values()] == [one for _, one in full.due().values()]
        assert sorted(short._pushes.values.items()) == sorted(full._pushes.values.items())
