"""Histories of runs, written by hand or generated, and the ledger's figures for them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from flopwatch.catalogue import Sample
from flopwatch.ledger import state, views
from flopwatch.ledger.buckets import BUCKETS
from flopwatch.ledger.ledger import Ledger
from flopwatch.ledger.run import RunLedger

Line = dict[str, Any]


def samples(ledger: Ledger, now: float) -> list[Sample]:
    """Return the samples of all runs with series, sorted by family."""
    return sorted(chain.from_iterable(ledger.families(now)), key=lambda sample: sample[0].name)


def submitted(t: float) -> Line:
    return {"t": t, "run": "r", "event": "submitted", "source": "scheduler"}


def start(t: float, attempt: str, step: float = 0, source: str = "h1", **more: Any) -> Line:
    return {"t": t, "run": "r", "attempt": attempt, "source": source, "event": "start", "step": step, "gpus": 8, **more}


def snapshot(
    t: float, attempt: str, step: float | None, source: str = "h1", /, *, more: Line | None = None, **activity: float
) -> Line:
    line = {"t": t, "run": "r", "attempt": attempt, "source": source, "event": "snapshot", "step": step, "gpus": 8}
    return line | {"activity_seconds": activity} | (more or {})


def finish(t: float, attempt: str, status: str = "completed", source: str = "h1") -> Line:
    return {"t": t, "run": "r", "attempt": attempt, "source": source, "event": "finish", "status": status}


def account(lines: Iterable[Line]) -> Ledger:
    ledger = Ledger()
    for line in lines:
        ledger.apply(line)
    return ledger


def figures(lines: Iterable[Line], run: str = "r", now: float | None = None) -> dict[str, Any]:
    summary: dict[str, Any] = account(lines).summary(now)["runs"][run]
    return summary


def buckets(lines: Iterable[Line]) -> dict[str, float]:
    """Return what is not zero, to a microsecond; queue apart the sum is the wall clock less what is open."""
    run = figures(lines)
    totals = {name: round(seconds, 6) for name, seconds in run["buckets"].items() if seconds}
    total = sum(totals.values()) - totals.get("queue", 0) + run["open_seconds"]
    assert total == pytest.approx(run["wall_seconds"], abs=1e-5)
    return totals | ({"open": round(run["open_seconds"], 6)} if run["open_seconds"] else {})


# Ten seconds a step, ten of startup; a1 has executed steps 1 to 3 and 4 s of the next at its last record.
A1 = [
    start(100, "a1"),
    snapshot(110, "a1", 0, startup=10, step=0),
    snapshot(130, "a1", 2, startup=10, step=20),
    snapshot(144, "a1", 3, startup=10, step=34),
]


@dataclass
class Process:
    """What one process of an attempt does, as seconds per activity in turn; "step" stands for one whole step."""

    began: float
    resumed: int
    phases: list[tuple[str, float]]

    def at(self, age: float) -> tuple[dict[str, float], int, float, int]:
        """Return activity seconds, position, age of the open step and committed step at an age."""
        seconds: dict[str, float] = {"step": 0.0}
        step, committed, left = self.resumed, self.resumed, age
        for name, duration in self.phases:
            spent = min(duration, left)
            seconds[name] = seconds.get(name, 0.0) + spent
            left -= spent
            if spent < duration or left <= 0:
                done = spent == duration
                return (
                    seconds,
                    step + (name == "step" and done),
                    spent if name == "step" and not done else 0.0,
                    step if name == "checkpoint_save" and done else committed,
                )
            step += name == "step"
            committed = step if name == "checkpoint_save" else committed
        return seconds, step, 0.0, committed

    @property
    def life(self) -> float:
        return sum(duration for _, duration in self.phases)


@dataclass
class Generated:
    lines: list[Line]
    truth: dict[str, float]  # for one node and nothing lost: seconds per bucket
    held: dict[str, float]  # the same, times GPUs
    steps: int  # executed for the first time
    skew: float


@st.composite
def histories(draw: st.DrawFn, *, clean: bool) -> Generated:
    """Draw a run of several attempts; a clean one has one node, exact clocks and no overlap."""
    whole = st.integers
    truth, held = dict.fromkeys(BUCKETS, 0.0), dict.fromkeys(BUCKETS, 0.0)
    lines: list[Line] = []
    now = float(draw(whole(1, 10**9)))
    if draw(st.booleans()):
        queue = float(draw(whole(0, 5000)))
        lines.append({"t": now - queue, "run": "r", "event": "submitted", "source": "scheduler"})
        truth["queue"] = queue
    mark = durable = steps = 0
    skews = 0.0
    count = draw(whole(1, 6))
    for number in range(count):
        resumed = draw(st.sampled_from([durable, mark, max(0, durable - draw(whole(0, 20)))])) if number else 0
        seconds = draw(whole(1, 30)) / 2
        every = draw(whole(2, 20))
        phases: list[tuple[str, float]] = [("startup", float(draw(whole(0, 60))))]
        stalls, save = draw(whole(2, 20)), float(draw(whole(1, 20)))
        for k in range(1, draw(whole(0, 60)) + 1):
            phases.append(("step", seconds))
            phases += [("data_stall", 3.0)] if k % stalls == 0 else []
            phases += [("checkpoint_save", save)] if k % every == 0 else []
        process = Process(now, resumed, phases)
        life = process.life if draw(st.booleans()) else process.life * draw(whole(0, 100)) / 100
        last = number == count - 1
        ends = ["crash", "gone", "failed", "preempted", "resized", *(["completed"] if last else [])]
        end = draw(st.sampled_from(ends))
        nodes = 1 if clean else draw(whole(1, 3))
        interval = draw(whole(4, 45))
        gpus, place = draw(st.sampled_from([8, 8, 4, 16])), draw(st.sampled_from(["h", "h", f"moved{number}-"]))
        last_seen = 0.0
        before = dict(truth)
        for node in range(nodes):
            skew = 0.0 if clean else float(draw(st.sampled_from([0, 0, 0, -3, 2, 15])))
            skews = max(skews, abs(skew))
            identity = {"run": "r", "attempt": f"a{number}", "source": f"{place}{node}", "rank": 8 * node, "gpus": gpus}
            if draw(st.booleans()) or clean:
                lines.append({**identity, "t": now + skew, "event": "start", "step": resumed})
            ages = [float(age) for age in range(draw(whole(1, interval)), int(life) + 1, interval)]
            if end == "completed":
                ages.append(life)
            for age in ages:
                activity, step, open_step, committed = process.at(age)
                lines.append(
                    {
                        **identity,
                        "t": now + age + skew,
                        "event": "snapshot",
                        "step": step,
                        "committed_step": committed,
                        "activity_seconds": activity,
                        "open_step_seconds": open_step,
                        "model_flops": (step - resumed) * 1e15,
                        "peak_flops": 8e14,
                    }
                )
                if draw(whole(0, 9)) == 0:
                    lines[-1]["evidence"] = [
                        {
                            "kind": draw(st.sampled_from(["xid", "link_down", "exception", "throttle", "strange"])),
                            "t": now + skew + draw(whole(0, int(age))),
                            "count": 1,
                            "detail": "79",
                        }
                    ]
                last_seen = max(last_seen, age)
            at = {**identity, "t": now + life + skew}
            if end == "gone" and ages:
                lines.append({**lines[-1], **at, "gone": True})
            elif end not in ("crash", "gone"):
                lines.append({**at, "event": "finish", "status": end})

        activity, step, open_step, committed = process.at(last_seen)
        cut_short = "other" if end == "completed" else "lost"
        truth[cut_short] += open_step
        truth["startup"] += activity.get("startup", 0.0)
        truth["data_stall"] += activity.get("data_stall", 0.0)
        truth["checkpoint_save"] += activity.get("checkpoint_save", 0.0)
        first_time = max(0, step - max(resumed, mark))
        steps += first_time
        truth["productive"] += seconds * first_time
        truth["lost"] += seconds * max(0, min(step, mark) - resumed)
        mark, durable = max(mark, step), max(durable, committed)
        attested = end not in ("crash", "gone") or (end == "gone" and last_seen > 0)
        if attested:
            truth["other" if end == "completed" else "lost"] += life - last_seen
        until = life if attested else last_seen
        pause = float(draw(whole(0, 600)))
        overlap = 0.0 if clean else float(draw(whole(0, 30)))
        for bucket, was in before.items():
            held[bucket] += gpus * (truth[bucket] - was)
        if not last:
            following = max(now + life + pause - overlap, now + 0.5)
            truth["down"] += following - now - until
            held["down"] += 0 if end == "preempted" else gpus * (following - now - until)
            now = following
        elif not attested:
            truth[cut_short] -= open_step  # nothing brackets it
            held[cut_short] -= gpus * open_step
    return Generated(lines if clean else sorted(lines, key=lambda line: line["t"]), truth, held, steps, skews)


def mangled(lines: list[Line], seed: int) -> Iterator[Line]:
    """Yield the lines as a bad network would: some missing, some twice, some late by up to twenty places."""
    chance = random.Random(seed)
    kept = [line for line in lines if chance.random() > 0.15]
    kept += [line for line in kept if chance.random() < 0.15]
    late = [place + (chance.uniform(0, 20) if chance.random() < 0.2 else 0) for place in range(len(kept))]
    yield from (kept[place] for place in sorted(range(len(kept)), key=late.__getitem__))


def check_attempts(run: RunLedger) -> None:
    """Assert that the attempts and the incidents account for the same seconds and GPU-seconds as the run does."""
    record = views.figures(run, run.reporters.last)
    attempts = record["attempts"]
    for bucket in set(BUCKETS) - {"queue"}:
        if bucket == "down":
            totals = [(one["down_seconds"], one["down_gpu_seconds"]) for one in attempts]
        else:
            totals = [(one["seconds"].get(bucket, 0.0), one["gpu_seconds"].get(bucket, 0.0)) for one in attempts]
        assert sum(seconds for seconds, _ in totals) == pytest.approx(record["buckets"][bucket], abs=1e-4)
        assert sum(held for _, held in totals) == pytest.approx(record["gpu_seconds"][bucket], abs=1e-3)
    # A line in time: each begins where the one before ended and the run was down.
    for one, other in pairwise(attempts):
        assert other["begin"] == pytest.approx(one["end"] + one["down_seconds"], abs=1e-4)
    for one in attempts:
        assert sum(one["gpu_seconds"].values()) <= one["gpus"] * sum(one["seconds"].values()) * (1 + 1e-9)
    badput = sum(
        seconds for bucket, seconds in run.buckets.gpu_seconds.items() if bucket not in ("productive", "generation")
    )
    lost = sum(incident["gpu_seconds"] for incident in record["incidents"] if incident["kind"] == "end")
    assert lost <= badput + 1e-3
    assert run.incidents.recovery_seconds <= run.wall(run.reporters.last) + 1e-4
    assert run.incidents.recoveries <= run.ends["failed"] + run.ends["silent"]
    for kind, settled in run.incidents.settled.items():
        assert sum(settled.values()) == sum(one["settled"] and one["kind"] == kind for one in record["incidents"])


def snapshot_of(run: RunLedger) -> list[Any]:
    """Return all that is written of a run, but for what goes by the newest stamp, which a late record may move too."""
    saved: list[Any] = json.loads(
        msgspec.json.encode(
            [
                {name: value for name, value in state.to_json(run).items() if name not in stamps_of(run)},
                run.reporters.nodes,
                [*run.history.items()],
                [*run.incidents.by_number.items()],
                {host: run.incidents.evidence.to_json(host) for host in run.incidents.evidence.hosts()},
            ]
        )
    )
    return saved


def stamps_of(run: RunLedger) -> dict[str, float]:
    return {"last": run.reporters.last, "clock": run.reporters.clock, "horizon": run.incidents.horizon}


def read_back(run: RunLedger) -> RunLedger:
    """Return the run as it comes back from the disk."""
    books, sources, history, incidents, evidence = snapshot_of(run)
    return state.from_json(books | stamps_of(run), sources, dict(history), dict(incidents), evidence)
