"""Lines and facts of one section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.node.collectors.nvml.card import LACKING

PASS, FAIL, INFO = "PASS", "FAIL", "INFO"


class Unavailable(Exception):
    """Error raised where this machine cannot run a check. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Line:
    """Result of one check: status, name such as `fields.types`, measured and expected values as text, and the GPU."""

    status: str
    name: str
    measured: str
    expected: str = ""
    gpu: str = ""

    def __str__(self) -> str:
        where = f"{self.name} gpu{self.gpu}" if self.gpu else self.name
        expected = f"   (expected: {self.expected})" if self.expected else ""
        return f"{self.status} {where:28} {self.measured}{expected}"

    def as_dict(self) -> dict[str, str]:
        """Return the line as JSON."""
        return asdict(self)


@dataclass
class Report:
    """Lines of a section and the facts behind them. Each line is also given to `written`.

    A section writes raw answers into `folder`, and is ended at the time `end` of the monotonic clock.
    """

    section: str
    gpu: str = ""
    written: Callable[[Line], object] = lambda line: None
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    end: float = math.inf

    def check(self, name: str, ok: bool | None, measured: object, expected: object = "") -> None:
        """Add a line: PASS if `ok`, FAIL if not, INFO if that is unknown (None)."""
        self._add(INFO if ok is None else PASS if ok else FAIL, name, str(measured), str(expected))

    def info(self, name: str, measured: object) -> None:
        """Add an INFO line."""
        self._add(INFO, name, str(measured))

    def within(self, name: str, measured: float | None, low: float, high: float, unit: str = "") -> None:
        """Add a line that passes if `low` <= measured <= `high`. An unknown number is INFO."""
        expected = f"{text(low)} to {text(high)}{unit}"
        if measured is None:
            self.check(name, None, "unknown", expected)
        else:
            self.check(name, low <= measured <= high, f"{text(measured)}{unit}", expected)

    def near(self, name: str, measured: float | None, expected: float | None, share: float, unit: str = "") -> None:
        """Add a line that passes if two numbers differ by at most this share of the expected one."""
        if measured is None or expected is None:
            self.check(name, None, f"{text(measured)}{unit}", f"{text(expected)}{unit}")
        else:
            ok = abs(measured - expected) <= share * abs(expected)
            self.check(name, ok, f"{text(measured)}{unit}", f"{text(expected)}{unit} +-{share:.2g}")

    def _add(self, status: str, name: str, measured: str, expected: str = "") -> None:
        line = Line(status, f"{self.section}.{name}", measured, expected, self.gpu)
        self.lines.append(line)
        self.written(line)


def text(number: float | None) -> str:
    """Return a number in at most six digits, or "unknown"."""
    return "unknown" if number is None else f"{number:.6g}"


def shortened(items: Iterable[object], most: int = 12) -> str:
    """Return at most `most` items as one text, and the number of others."""
    every = [str(item) for item in items]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return " ".join(every[:most]) + more


def run(section: Callable[..., None], report: Report, *arguments: Any) -> None:
    """Run a section. An exception is a FAIL line. Unavailable, and a call that the GPU lacks, is INFO."""
    try:
        section(*arguments, report)
    except Unavailable as why:
        report.info("unavailable", why)
    except Exception as error:
        if type(error).__name__.startswith("NVMLError") and getattr(error, "value", None) in LACKING:
            report.info("unavailable", error)
            return
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = "" if place is None else f" at {place.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{place.tb_lineno}"
        report.check("error", False, f"{type(error).__name__}: {error}{where}", "no exception")
