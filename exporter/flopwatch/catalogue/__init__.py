"""Every metric family flopwatch publishes, as one row: name, type, help, labels, source and scale.

`str(row)` is the name of the family, so that an f-string is a query. Standard library only. Each file has the rows of
one domain, the first word of a name. The formatter is off, because it would give each argument of a row its own line.

Names follow https://prometheus.io/docs/practices/naming/: base units, unit in the name, `_total` on counters only. No
row has a label that the scrape owns (`job, instance, namespace, pod, container, node, service`).
"""

from collections.abc import Iterator

from flopwatch.catalogue import exporter, gpu, host, infiniband, nvlink, run, training
from flopwatch.catalogue.exporter import *
from flopwatch.catalogue.gpu import *
from flopwatch.catalogue.host import *
from flopwatch.catalogue.infiniband import *
from flopwatch.catalogue.nvlink import *
from flopwatch.catalogue.row import *
from flopwatch.catalogue.row import Metric as Metric
from flopwatch.catalogue.run import *
from flopwatch.catalogue.training import *

# In the order of docs/metrics.md. A scrape over its series budget drops the last rows first.
DOMAINS = (gpu, nvlink, infiniband, host, training, run, exporter)


def all_metrics() -> Iterator[Metric]:
    """Yield every row of the catalogue, in the order of DOMAINS and of the rows in their files."""
    for domain in DOMAINS:
        yield from (value for value in vars(domain).values() if isinstance(value, Metric))


BY_NAME: dict[str, Metric] = {row.name: row for row in all_metrics()}
