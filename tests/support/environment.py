"""Environment variables that must have no effect on the hook."""

from __future__ import annotations

HOSTILE = {
    "OTEL_SDK_DISABLED": "true",
    "OTEL_RESOURCE_ATTRIBUTES": "service.name=hostile,flopwatch.run=hostile",
    "OTEL_SERVICE_NAME": "hostile",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9/hostile",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hostile",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "0",
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "DELTA",
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram",
    "OTEL_METRICS_EXPORTER": "hostile",
    "OTEL_METRICS_EXEMPLAR_FILTER": "hostile",
    "OTEL_METRIC_EXPORT_INTERVAL": "hostile",
    "OTEL_METRIC_EXPORT_TIMEOUT": "hostile",
    "OTEL_PYTHON_METER_PROVIDER": "hostile",
    "OTEL_PYTHON_CONTEXT": "hostile",
    "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": "true",
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "hostile",
    "OTEL_ATTRIBUTE_COUNT_LIMIT": "1",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "1",
    **{
        f"OTEL_{name}_COUNT_LIMIT": "hostile"
        for name in ("SPAN_ATTRIBUTE", "SPAN_EVENT", "SPAN_LINK", "EVENT_ATTRIBUTE", "LINK_ATTRIBUTE")
    },
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "hostile",
    "OTEL_PROPAGATORS": "hostile",
    "OTEL_LOG_LEVEL": "hostile",
    **{
        name: "http://127.0.0.1:9"
        for proxy in ("http_proxy", "https_proxy", "all_proxy")
        for name in (proxy, proxy.upper())
    },
    "no_proxy": "",
    "NO_PROXY": "",
}
