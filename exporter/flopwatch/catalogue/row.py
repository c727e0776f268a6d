"""A row of the catalogue, and the labels that identify one GPU, port, rank or run."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

__all__ = ["GPU", "PORT", "RANK", "RUN", "Metric", "Sample"]  # of the package too

Type = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    `source` is where the number comes from, and is printed in HELP. A value of the source times `scale` has the unit of
    the name. `key` marks the rows that README lists.
    """

    name: str
    type: Type
    help: str
    labels: tuple[str, ...]
    source: str
    scale: float = 1.0
    key: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def domain(self) -> str:
        """Return the first word of the name, which is also the name of a file in this package."""
        return self.name.partition("_")[0]


def _row(
    type: Type, name: str, help: str, labels: tuple[str, ...], source: str, *, scale: float = 1.0, key: bool = False
) -> Metric:
    """Return a row; the functions below are this one for each type."""
    return Metric(name, type, help, labels, source, scale, key)


counter, gauge, histogram = partial(_row, "counter"), partial(_row, "gauge"), partial(_row, "histogram")
info = partial(_row, "info")  # its value is 1, and its labels are the facts

# One reading: the row, its label values in the row's order, and the source's own number (Scrape multiplies by scale).
Sample = tuple[Metric, tuple[str, ...], float]

GPU = ("gpu", "uuid")
PORT = ("device", "port")
RANK = ("run", "rank")
RUN = ("tenant", "run")
