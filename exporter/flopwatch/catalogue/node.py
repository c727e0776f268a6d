"""The node as a whole: its place and its verdict."""

from flopwatch.catalogue.row import Metric

NODE_TOPOLOGY_INFO = Metric(
    "node_topology_info", "info", "Place of the node: rack, leaf switch, NVLink domain; source is where that is told.",
    ("host", "rack", "leaf", "domain", "source"),
    "topograph's node labels, Slurm topology.conf, or a CSV file",
)
NODE_VERDICT = Metric(
    "node_verdict_id", "gauge", "Fitness for training: 0 ok, 1 degraded, 2 bad.", (),
    "flopwatch.node.verdict over everything read, against the expected shape",
)
NODE_VERDICT_REASON = Metric(
    "node_verdict_reason", "gauge",
    "1 for each reason why the node is not ok: the part it concerns, its weight and what to do.",
    ("reason", "part", "verdict", "action"), "flopwatch.node.verdict",
)
NODE_EXPECTED = Metric(
    "node_expected_parts", "gauge", "Parts this node ought to have: gpus, ports, nvlinks.", ("kind",),
    "--expect FILE, or learnt by flopwatch check --record",
)
