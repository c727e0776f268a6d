"""Published MFU and goodput of large training runs, with sources, for comparison in a report."""

from typing import NamedTuple


class Reference(NamedTuple):
    """Published range of MFU or goodput, from 0 to 1, with a name and the URL of its source."""

    low: float
    high: float
    name: str
    source: str


_COREWEAVE_MFU = (
    "https://coreweave.com/blog/coreweave-leads-the-charge-in-ai-infrastructure-efficiency-with-up-to-20-"
    "higher-gpu-cluster-performance-than-alternative-solutions"
)
_COREWEAVE_GOODPUT = "https://coreweave.com/blog/achieve-ai-infrastructure-goodput-of-up-to-96-with-3-key-strategies"

MFU = (
    Reference(0.35, 0.45, "typical of public runs", _COREWEAVE_MFU),
    Reference(0.51, 0.52, "best: CoreWeave, a 30B model on 1,024 Hopper GPUs", _COREWEAVE_MFU),
)
GOODPUT = (
    Reference(0.90, 0.90, "typical: Llama 3 405B reports more than 90 %", "https://arxiv.org/abs/2407.21783"),
    Reference(0.96, 0.98, "best: CoreWeave, goodput 96 %, ETTR 97-98 %", _COREWEAVE_GOODPUT),
)
