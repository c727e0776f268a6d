"""Signs of a hang, best first, with their texts in messages, to follow "rank N is"."""

HANG_SIGNS = {
    "gone": "gone and no longer reporting",
    "silent": "silent: the process is stopped, or holds Python's interpreter lock (GIL)",
    "blocked": "stopped, or stuck in the kernel (storage or a driver)",
    "data": "waiting for the next batch",
    "sequence": "missing in the collective that the others wait in",
    "ras": "behind the others in the collectives that NCCL counts (RAS), or its NCCL does not answer",
    "gpu": "on a GPU that is lost or reported a critical Xid",
    "idle": "on an idle GPU, while the GPUs of most other ranks are busy",
    "computing": "on a GPU that still computes, while the GPUs of the other ranks wait",
    "link": "on a host with a port that is down",
}
