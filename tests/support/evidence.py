"""Kinds of evidence that docs/causes.md explains."""

from __future__ import annotations

# In the record of a node.
NODE_KINDS = (
    *("xid", "sxid", "ecc", "row_remap", "gpu_missing", "nvlink", "link_down", "link_errors", "nic", "throttle"),
    *("oom", "host_oom", "exception", "signal", "exit", "pid_gone"),
)
LEDGER_KINDS = ("node_gone", "checkpoint_wait", "data_stall")
