"""Class of a row of the catalogue, and the labels that identify one GPU, port, rank or run."""

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Literal, TypeVar

Type = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Row of the catalogue: the definition of one metric family."""

    name: str
    help: str
    labels: tuple[str, ...]
    source: str  # where the values are read; printed in HELP
    _: KW_ONLY
    type: Type
    scale: float = 1.0  # a value of the source times this has the unit in the name
    key: bool = False  # README lists the row
    sparse: bool = False  # no series at 0 with --series core

    def __str__(self) -> str:
        return self.name

    @property
    def domain(self) -> str:
        """Return the first word of the name, which is also the name of a file in this package."""
        return self.name.partition("_")[0]


# The catalogue's rows by type. The value of an info family is 1, and its labels are the information.
counter = partial(Metric, type="counter")
gauge = partial(Metric, type="gauge")
info = partial(Metric, type="info")
histogram = partial(Metric, type="histogram")


M = TypeVar("M", bound=Metric)


def sparse(row: M) -> M:
    """Return a row whose series `--series core` serves only while they are not 0."""
    return replace(row, help=f"{row.help} With --series core, absent while it is 0.", sparse=True)


# One reading: row, label values in the row's order, and the source's own value, which Scrape multiplies by scale.
Sample = tuple[Metric, tuple[str, ...], float]

GPU = ("gpu", "uuid")
PORT = ("device", "port")
RANK = ("run", "rank")
RUN = ("tenant", "run")
