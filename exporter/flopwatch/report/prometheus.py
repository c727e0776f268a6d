"""Asks a Prometheus: https://prometheus.io/docs/prometheus/latest/querying/api/."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from math import isnan
from pathlib import Path
from typing import Any

from flopwatch.settings import SettingsError

MOST_POINTS = 11_000  # of a series, that Prometheus answers with


@dataclass(frozen=True, slots=True)
class Series:
    """A series with its points: Unix time and value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


class Prometheus:
    """The query API at a URL, also that of Mimir, Thanos or VictoriaMetrics behind a path of their own."""

    def __init__(self, url: str, token_file: Path | None = None, timeout: float = 60.0) -> None:
        self._url, self._token_file, self._timeout = url.rstrip("/"), token_file, timeout

    def now(self, query: str, at: float) -> list[Series]:
        """Return what a query gives at a moment, one point a series. Raises SettingsError."""
        result = self._ask("query", {"query": query, "time": f"{at:.3f}"})
        return [Series(one["metric"], _points([one["value"]])) for one in result]

    def over(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Return what a query gives from one moment to another, every `step` seconds. Raises SettingsError."""
        step = max(step, (end - start) / MOST_POINTS + 1e-3)
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        return [
            Series(one["metric"], _points(one["values"])) for one in self._ask("query_range", {"query": query, **times})
        ]

    def value(self, query: str, at: float) -> float | None:
        """Return the only value a query gives at a moment, or None. Raises SettingsError."""
        found = [series.points[0][1] for series in self.now(query, at) if series.points]
        return found[0] if found else None

    def _ask(self, what: str, arguments: dict[str, str]) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode(arguments).encode()  # in the body: a query may be longer than a URL
        try:
            request = urllib.request.Request(f"{self._url}/api/v1/{what}", body)
            if self._token_file is not None:
                request.add_header("Authorization", f"Bearer {self._token_file.read_text().strip()}")
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(500).decode(errors="replace")
            raise SettingsError(f"{self._url} answers {error.code} to {arguments['query']!r}: {detail}") from None
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise SettingsError(
                f"{self._url} does not answer as a Prometheus does: {error}; is --prometheus right?"
            ) from None
        if not isinstance(result, list):
            raise SettingsError(f"{self._url} answers {arguments['query']!r} with {type(result).__name__}, not series")
        return result


def _points(pairs: list[list[Any]]) -> list[tuple[float, float]]:
    """Return points as numbers, without those that are none (NaN)."""
    points = [(float(time), float(value)) for time, value in pairs]
    return [(time, value) for time, value in points if not isnan(value)]
