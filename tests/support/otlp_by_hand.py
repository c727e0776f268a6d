"""OTLP requests as the hook sends them, made by hand, so that the receiver is not tested against its sender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

Value = str | int | float
START = 1_700_000_000.0


def attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    """Return OTLP attributes of the matching types."""

    def any_value(value: Value) -> AnyValue:
        if isinstance(value, str):
            return AnyValue(string_value=value)
        return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)

    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def counter(name: str, value: float, at: float = START + 10, **labels: str) -> Metric:
    """Return a cumulative monotonic sum with one point."""
    point = NumberDataPoint(as_double=value, time_unix_nano=int(at * 1e9), attributes=attributes(labels))
    return Metric(
        name=name,
        sum=Sum(data_points=[point], is_monotonic=True, aggregation_temporality=AGGREGATION_TEMPORALITY_CUMULATIVE),
    )


def gauge(name: str, value: float, at: float = START + 10, **labels: str) -> Metric:
    """Return a gauge with one point; an info is one with the value 1."""
    point = NumberDataPoint(as_double=value, time_unix_nano=int(at * 1e9), attributes=attributes(labels))
    return Metric(name=name, gauge=Gauge(data_points=[point]))


def histogram(name: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """Return a cumulative histogram with one point."""
    point = HistogramDataPoint(explicit_bounds=bounds, bucket_counts=counts, count=sum(counts), sum=total)
    return Metric(
        name=name, histogram=Histogram(data_points=[point], aggregation_temporality=AGGREGATION_TEMPORALITY_CUMULATIVE)
    )


def process(*metrics: Metric, rank: int = 0, run: str = "lm", **reported: Any) -> ResourceMetrics:
    """Return what one training process sends; keyword arguments are resource attributes without `flopwatch.`."""
    identity: dict[str, Value] = {
        "schema": 1,
        "run": run,
        "tenant": "",
        "attempt": "a1",
        "rank": rank,
        "host": "container",
        "start_unix": START,
    }
    resource = ResourceMetrics(
        resource=Resource(
            attributes=attributes({f"flopwatch.{key}": value for key, value in {**identity, **reported}.items()})
        )
    )
    resource.scope_metrics.add().metrics.extend(metrics)
    return resource


def request(*processes: ResourceMetrics) -> ExportMetricsServiceRequest:
    """Return one request of these processes."""
    return ExportMetricsServiceRequest(resource_metrics=processes)


def training(step: int, step_seconds: float, at: float, *, rank: int = 0, **reported: Any) -> ResourceMetrics:
    """Return the push of a rank that has done so many steps in so many seconds after one second of startup."""
    return process(
        counter("training_activity_seconds_total", 1.0, at, activity="startup"),
        counter("training_activity_seconds_total", step_seconds, at, activity="step"),
        counter("training_model_flops_total", step * 1e12, at),
        gauge("training_peak_flops_per_second", 1e15, at),
        gauge("training_position_steps", step, at),
        rank=rank,
        **reported,
    )
