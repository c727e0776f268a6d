"""Records of two hosts whose run hangs in a step."""

from __future__ import annotations

from typing import Any

from tests.support.histories import Line

HOSTS, PER_HOST, EVERY, P99 = ("h0", "h1"), 4, 15.0, 1.2
STOPPED = 60.0  # when the last step began
LIMIT = 15.0


def numbers(missing: int | None = None, kind: str = "") -> dict[int, dict[str, float]]:
    """Return the collectives that each of eight ranks has called by group, and in the default one, as TP2 x DP4.

    The missing rank has called one fewer in its group of this kind, and its peers there wait for it.
    """
    called = {}
    for rank in range(len(HOSTS) * PER_HOST):
        tp, dp = f"{rank // 2 * 2},{rank // 2 * 2 + 1}", f"{rank % 2}-{6 + rank % 2}:2"
        called[rank] = {f"tp {tp}": 40.0, f"dp {dp}": 10.0, "default": 3.0}
    if missing is not None:
        group = next((name for name in called[missing] if name.startswith(kind)), "")
        called[missing][group] -= 1
        if kind == "tp":  # neither it nor its peer comes to the end of the step
            for rank in (missing, missing ^ 1):
                called[rank] = {name: value - (name[:2] == "dp") for name, value in called[rank].items()}
    return called


def lines(called: dict[int, dict[str, float]], until: float, **change: Any) -> list[Line]:
    """Return the records of two hosts that stop in a step at STOPPED. `change` has signs, GPUs or silent hosts."""
    signs, silent, p99 = change.get("signs", {}), change.get("silent", ()), change.get("p99", P99)
    gpus, goes_on = change.get("gpus", {}), change.get("goes_on", 0.0)
    records: list[Line] = []
    for turn in range(1, int(until / EVERY) + 1):
        for number, host in enumerate(HOSTS):
            t = turn * EVERY + 5 * number
            ranks = range(number * PER_HOST, (number + 1) * PER_HOST)
            open_step = max(0.0, t - STOPPED)
            if host in silent and open_step > 0:
                continue
            line: Line = {"t": t, "run": "r", "attempt": "a", "source": host, "event": "snapshot", "started": 0.0}
            line |= {"rank": ranks[0], "gpus": PER_HOST, "step": int(min(t, STOPPED)), "activity_seconds": {"step": t}}
            line |= {"open_step_seconds": open_step, "step_p99": p99 if number == 0 else None}
            line["ranks"] = f"{ranks[0]}-{ranks[-1]}"
            if open_step >= 0.6 * LIMIT:
                rows = []
                for rank in ranks:
                    groups = dict(called[rank])
                    default = groups.pop("default", None)
                    calls = [[*name.split(), number + goes_on * t] for name, number in groups.items()]
                    rows.append([rank, default, calls, signs.get(rank, []), gpus.get(rank)])
                line["open_step"] = {"t": t, "seconds": open_step, "overdue_after": LIMIT, "ranks": rows}
            records.append(line)
    return records
