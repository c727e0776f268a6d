"""Dense peak FLOP/s of a card, by its exact NVML name and matmul dtype: the denominator of MFU.

The table is `flopwatch/data/peak_flops.csv`, in TFLOP/s (int8: TOP/s). Its column `basis` has each row's source. Peaks
that data sheets print "with sparsity" are halved. Names are compared whole, because "H20" is in "NVIDIA H200". No peak
is computed from a clock, because the boost clock of a data sheet is not NVML's maximum.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

from flopwatch.catalogue.xid import read_table

DTYPES = ("fp16", "bf16", "tf32", "fp8", "fp4", "int8")


class UnknownPeak(LookupError):
    """Error raised if no peak is known for a card and dtype. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peak of one card for one matmul dtype in FLOP/s (int8: OP/s), with its source."""

    flops_per_second: float
    source: str


@cache
def _table() -> dict[str, dict[str, str]]:
    return {row["nvml_name"]: row for row in read_table("peak_flops.csv")}


def names() -> tuple[str, ...]:
    """Return the names of the cards in the table."""
    return tuple(_table())


def peak(nvml_name: str, dtype: str) -> Peak:
    """Return the dense peak of a card by its exact NVML name, for one of DTYPES. Raises UnknownPeak."""
    if dtype not in DTYPES:
        raise UnknownPeak(f"no peaks are known for dtype {dtype!r}, only for {', '.join(DTYPES)}")
    if re.search(r" MIG \d+[cg]\.", nvml_name):
        raise UnknownPeak(f"{nvml_name!r} is a MIG slice, a fraction of a card")
    if nvml_name.startswith("GRID ") or re.search(r"-\d+[ABCQ]$", nvml_name):
        raise UnknownPeak(f"{nvml_name!r} is a virtual GPU, a share of a card")
    row = _table().get(nvml_name)
    if row is None:
        raise UnknownPeak(f"{nvml_name!r} is not in the table of peaks; give the name as nvidia-smi prints it")
    if not any(row[column] for column in DTYPES):
        raise UnknownPeak(f"{nvml_name!r} is ambiguous: {row['basis']}")
    if not row[dtype]:
        raise UnknownPeak(f"{nvml_name!r} has no {dtype} peak in the table")
    return Peak(float(Decimal(row[dtype]) * 10**12), row["basis"])
