"""The series of the rule tests as a real target serves them: all at once, at a chosen pace."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

SIZES = {"s": 1, "m": 60, "h": 3600}
# Their values name what belongs to one test, and are made to differ from those of another.
PLACES = ("run", "host", "instance", "uuid", "mig_uuid", "tenant", "leaf", "rack", "domain")
NUMBER = r"(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|NaN|Inf)"
VALUES = re.compile(rf"(?P<first>[+-]?{NUMBER})(?:(?P<sign>[+-])(?P<step>{NUMBER}))?(?:x(?P<times>\d+))?$")


def samples(notation: str) -> Iterator[float | None]:
    """Yield what a rule test's `values` stand for, None where there is no sample.

    https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/#series
    """
    for word in notation.split():
        if word == "stale" or word.startswith("_"):
            yield from [None] * (int(word[2:]) if word.startswith("_x") else 1)
            continue
        found = VALUES.match(word)
        assert found, f"{word!r} is no value of a rule test"
        first, step = float(found["first"]), float(f"{found['sign'] or ''}{found['step'] or 0}")
        yield from (first + number * step for number in range(int(found["times"] or 0) + 1))


@dataclass(frozen=True, slots=True)
class Series:
    """One series; `interval` seconds at pace 1 lie between its samples."""

    name: str
    labels: str
    interval: float
    values: tuple[float | None, ...]

    @classmethod
    def of(cls, series: Mapping[str, str], interval: float) -> Series:
        """Return one of a rule test's `input_series`."""
        name, _, labels = series["series"].partition("{")
        return cls(name, labels.rstrip("}"), interval, tuple(samples(series["values"])))

    def at(self, seconds: float) -> float | None:
        """Return its value so many seconds at pace 1 after the beginning: a counter's on a line between samples.

        The rate of a staircase differs with the end of the window. That is no difference between the engines. After
        the last sample before a gap, the line continues with the same slope. Otherwise a rate would depend on the time
        of the last scrape.
        """
        index, part = divmod(seconds / self.interval, 1)
        before, value, after = (
            self.values[i] if 0 <= i < len(self.values) else None for i in range(int(index) - 1, int(index) + 2)
        )
        if value is None or not self.name.endswith(("_total", "_sum", "_count", "_bucket")):
            return value
        step = after - value if after is not None else value - before if before is not None else 0.0
        return value + part * max(step, 0.0)


def seconds(text: str) -> float:
    """Return a duration of a rule test in seconds."""
    return sum(float(number) * SIZES[unit] for number, unit in re.findall(r"([\d.]+)([smh])", text))


def of(paths: list[Path], longest: float) -> list[Series]:
    """Return the series of rule tests whose samples are at most `longest` seconds apart; ALERTS a server has itself."""
    found = []
    for path in paths:
        tests: list[dict[str, Any]] = yaml.safe_load(path.read_text())["tests"]
        for number, test in enumerate(tests):
            interval = seconds(test["interval"])
            if interval > longest:
                continue
            for one in test["input_series"]:
                series = Series.of(one, interval)
                if series.name != "ALERTS":
                    labels, host = series.labels, re.search(r'\bhost="([^"]*)"', series.labels)
                    if "instance=" not in labels:  # or it would be the target's, the same in all tests
                        labels += f',instance="{host[1] if host else "none"}"'
                    labels = re.sub(rf'\b({"|".join(PLACES)})="(?!")', rf"\g<0>{path.stem}{number}-", labels)
                    found.append(replace(series, labels=labels.lstrip(",")))
    return found


class Target:
    """Serves series at /metrics on loopback from `began` on, in Unix time; use it as a context manager.

    A value that is a time is moved to where it is at the pace.
    """

    def __init__(self, series: list[Series], pace: float) -> None:
        self._series, self._pace, self.began = series, pace, float("inf")
        target = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = target.text(time.time()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"

    def text(self, now: float) -> str:
        """Return the exposition of a moment."""
        lines = []
        for series in self._series if now >= self.began else ():
            value = series.at((now - self.began) * self._pace)
            if value is not None:
                if series.name.endswith("_timestamp_seconds"):
                    value = self.began + value / self._pace
                lines.append(f"{series.name}{{{series.labels}}} {value!r}")
        return "\n".join([*lines, ""])

    def __enter__(self) -> Target:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def named(labels: Mapping[str, str]) -> str:
    """Return labels as one text, in their order."""
    return ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
