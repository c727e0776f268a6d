"""Class of a row of the catalogue, and the labels that identify one GPU, port, rank or run."""

from dataclasses import dataclass, replace
from typing import Literal

Type = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Row of the catalogue: the definition of one metric family."""

    name: str
    type: Type
    help: str
    labels: tuple[str, ...]
    source: str  # where the values are read; printed in HELP
    scale: float = 1.0  # a value of the source times this has the unit in the name
    key: bool = False  # README lists the row
    sparse: bool = False  # no series at 0 with --series core

    def __str__(self) -> str:
        return self.name

    @property
    def domain(self) -> str:
        """Return the first word of the name, which is also the name of a file in this package."""
        return self.name.partition("_")[0]


def counter(
    name: str, help: str, labels: tuple[str, ...], source: str, *, scale: float = 1.0, key: bool = False
) -> Metric:
    """Return the catalogue's row for a counter family."""
    return Metric(name, "counter", help, labels, source, scale, key)


def gauge(
    name: str, help: str, labels: tuple[str, ...], source: str, *, scale: float = 1.0, key: bool = False
) -> Metric:
    """Return the catalogue's row for a gauge family."""
    return Metric(name, "gauge", help, labels, source, scale, key)


def info(name: str, help: str, labels: tuple[str, ...], source: str, *, key: bool = False) -> Metric:
    """Return the catalogue's row for an info family: its value is 1 and its labels are the information."""
    return Metric(name, "info", help, labels, source, key=key)


def histogram(name: str, help: str, labels: tuple[str, ...], source: str) -> Metric:
    """Return the catalogue's row for a histogram family."""
    return Metric(name, "histogram", help, labels, source)


def sparse(row: Metric) -> Metric:
    """Return a row with a series per reason or code, which `--series core` serves only while they are not 0."""
    return replace(row, help=f"{row.help} With --series core, absent while it is 0.", sparse=True)


# One reading: row, label values in the row's order, and the source's own value, which Scrape multiplies by scale.
Sample = tuple[Metric, tuple[str, ...], float]

GPU = ("gpu", "uuid")
PORT = ("device", "port")
RANK = ("run", "rank")
RUN = ("tenant", "run")
