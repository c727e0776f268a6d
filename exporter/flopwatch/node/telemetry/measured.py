"""Fields of a record that merge what the ranks of a host measured: their waits for others, and their work."""

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.node.telemetry.otlp import Push

_DURATION = m.TRAINING_STEP_DURATION_SECONDS
# Fields of a record's `work`: the row, and the part of a histogram.
_WORK = {"tokens": (m.TRAINING_TOKENS_TOTAL, ""), "steps": (_DURATION, "count"), "step_seconds": (_DURATION, "sum")}
_WORK |= {"model_flops": (m.TRAINING_MODEL_FLOPS_TOTAL, ""), "hardware_flops": (m.TRAINING_HARDWARE_FLOPS_TOTAL, "")}
_WORK |= {"step_capacity_flops": (m.TRAINING_CAPACITY_FLOPS_TOTAL, "")}


def waits(pushes: list[Push]) -> list[list[object]] | None:
    """Return the field `waits` of a record (`flopwatch.ledger.record`). None unless all ranks measure their waits."""
    rows = (
        m.TRAINING_MEASURED_STEPS_TOTAL,
        m.TRAINING_MEASURED_STEP_SECONDS_TOTAL,
        m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL,
    )
    rows_of_ranks: list[list[object]] = []
    for push in pushes:
        if not all(push.of(row) for row in rows):
            return None
        [*_, (_, tokens)] = [((), 0.0), *push.of(m.TRAINING_TOKENS_TOTAL), *push.of(m.TRAINING_MEASURED_TOKENS_TOTAL)]
        totals = [round(push.of(row)[-1][1], 3) for row in rows]
        rows_of_ranks.append([push.rank, push.declared("pp"), push.started, *totals, tokens])
        groups = [[*labels[2:], round(value, 3)] for labels, value in push.of(m.TRAINING_GROUP_WAIT_SECONDS_TOTAL)]
        if groups:
            rows_of_ranks[-1].append(groups)
    return rows_of_ranks or None


def unmeasured(pushes: list[Push]) -> bool:
    """Return whether no rank can measure its waits itself."""
    return bool(pushes) and all(push.of(m.TRAINING_COLLECTIVE_WAIT_UNAVAILABLE) for push in pushes)


def work(pushes: list[Push]) -> dict[str, float]:
    """Return the field `work` of a record (`flopwatch.ledger.record`)."""
    totals = {name: values(pushes, *of) for name, of in _WORK.items()}
    ranks = 0 if values(pushes, m.TRAINING_MFU_UNAVAILABLE) else len(pushes)
    return {name: sum(of) for name, of in totals.items() if of and ("flops" not in name or len(of) == ranks)}


def values(pushes: list[Push], row: Metric, part: str = "") -> list[float]:
    """Return the values of a row, or of a histogram's `count` or `sum`."""
    return [value for push in pushes for labels, value in push.of(row) if not part or labels[-1] == part]
