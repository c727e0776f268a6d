"""Client of the Prometheus query API: https://prometheus.io/docs/prometheus/latest/querying/api/."""

from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import httpx

from flopwatch.http.client import client, client_tls
from flopwatch.settings import SettingsError

MAX_POINTS = 11_000  # of a series in one answer of Prometheus
NOT_SERIES = (ValueError, LookupError, TypeError, RecursionError)  # raised by an answer of another shape


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """Prometheus series: its labels and its points (Unix time, value)."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


class PrometheusClient:
    """Client of a Prometheus query API at `url`, also of Mimir, Thanos or VictoriaMetrics below a URL path."""

    def __init__(self, url: str, token_file: Path | None = None, timeout: float = 60.0) -> None:
        self._url, self._token_file, self._timeout = url.rstrip("/"), token_file, timeout
        self._tls = client_tls(None)

    def query(self, query: str, at: float) -> list[TimeSeries]:
        """Return the series of an instant query at the Unix time `at`. Raises SettingsError if it fails."""
        result = self._request("query", {"query": query, "time": f"{at:.3f}"})
        return [TimeSeries(one["metric"], _points([one["value"]])) for one in result]

    def query_range(self, query: str, start: float, end: float, step: float) -> list[TimeSeries]:
        """Return the series of a query from `start` to `end` (Unix time) every `step` seconds. Raises SettingsError."""
        step = max(step, (end - start) / MAX_POINTS + 1e-3)
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        result = self._request("query_range", {"query": query, **times})
        return [TimeSeries(one["metric"], _points(one["values"])) for one in result]

    def value(self, query: str, at: float) -> float | None:
        """Return the first value of an instant query at the Unix time `at`, None without one. Raises SettingsError."""
        return next((series.points[0][1] for series in self.query(query, at) if series.points), None)

    def _request(self, endpoint: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
        """Send a query and return the series in the answer as JSON objects. Raises SettingsError if it fails."""
        query, headers = parameters["query"], {}
        try:
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            with client(self._tls, timeout=self._timeout, headers=headers) as http:
                # POST, since a query may be longer than a URL.
                response = http.post(f"{self._url}/api/v1/{endpoint}", data=parameters)
            result = response.json()["data"]["result"] if response.is_success else None
        except (OSError, httpx.HTTPError, httpx.InvalidURL, *NOT_SERIES) as error:
            why = str(error) or type(error).__name__
            text = f"{self._url} does not answer as a Prometheus does: {why}; is --prometheus right?"
            raise SettingsError(text) from None
        if not response.is_success:
            raise SettingsError(f"{self._url} answers {response.status_code} to {query!r}: {response.text[:500]}")
        if not isinstance(result, list):
            raise SettingsError(f"{self._url} answers {query!r} with {type(result).__name__}, not series")
        return result


def _points(pairs: list[list[Any]]) -> list[tuple[float, float]]:
    points = [(float(time), float(value)) for time, value in pairs]
    return [(time, value) for time, value in points if not isnan(value)]
