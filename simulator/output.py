"""Output of a simulation's result as JSON and as a table."""

from __future__ import annotations

from simulator.scenarios import Result, Scenario

HOUR = 3600.0


def to_json(scenario: Scenario, seed: int, result: Result) -> dict[str, object]:
    """Return the comparison of ledger and truth as a JSON object."""
    judgement = result.judgement
    return {
        "scenario": scenario.name,
        "seed": seed,
        "days": scenario.days,
        "records": result.records,
        "gpus": _gpus(scenario),
        "runs": {
            name: {
                figure.name.strip(): {
                    "unit": figure.unit,
                    "truth": figure.truth,
                    "ledger": figure.ledger,
                    "off": figure.off,
                }
                for figure in figures
            }
            for name, figures in judgement.figures.items()
        },
        "causes": {
            name: {
                "true": cause.true,
                "found": cause.found,
                "right": cause.right,
                "precision": cause.precision,
                "recall": cause.recall,
                "lost_gpu_hours": cause.true_gpu_seconds / HOUR,
                "found_lost_gpu_hours": cause.found_gpu_seconds / HOUR,
                "named_hosts": cause.placed,
                "right_hosts": cause.place_right,
            }
            for name, cause in sorted(judgement.causes.items())
        },
        "mistakes": [
            {"fault": kind, "found": found, "times": times} for (kind, found), times in judgement.mistakes.most_common()
        ],
        "missed_attempts": judgement.missed,
        "invented_attempts": judgement.invented,
        "not_judged": dict(judgement.not_judged),
    }


def table(scenario: Scenario, seed: int, result: Result) -> str:
    """Return the comparison of ledger and truth as text for a terminal."""
    judgement = result.judgement
    lines = [
        f"{scenario.name}: {scenario.text}",
        f"{scenario.days:g} days, {_gpus(scenario):,} GPUs, seed {seed}, {result.records:,} records",
    ]
    off = [figure for _, figure in judgement.off]
    for name, figures in judgement.figures.items():
        lines += ["", f"{name:<22}{'truth':>19}{'ledger':>19}{'off':>9}"]
        for figure in figures:
            lines.append(
                f"{figure.name:<22}{_number(figure.truth, figure.unit):>19}"
                f"{_number(figure.ledger, figure.unit):>19}{figure.off:>9.2%}{' !' if figure in off else ''}"
            )
    if judgement.causes:
        lines += [
            "",
            f"{'cause':<20}{'true':>6}{'found':>6}{'right':>6}{'precision':>11}{'recall':>8}"
            f"{'lost GPU-h':>13}{'found':>12}{'host right':>12}",
        ]
    for name, cause in sorted(judgement.causes.items(), key=lambda item: (": " in item[0], -item[1].true)):
        host = f"{cause.place_right}/{cause.placed}" if cause.placed else "-"
        lines.append(
            f"{name:<20}{cause.true:>6}{cause.found:>6}{cause.right:>6}{_share(cause.precision):>11}"
            f"{_share(cause.recall):>8}{cause.true_gpu_seconds / HOUR:>13,.0f}{cause.found_gpu_seconds / HOUR:>12,.0f}"
            f"{host:>12}"
        )
    lines += [f"  {times} x {kind}: found {found}" for (kind, found), times in judgement.mistakes.most_common()]
    lines += [
        f"  {times} x {kind}: too short, or part of another loss, and not judged"
        for kind, times in judgement.not_judged.items()
    ]
    lines += [f"  not in the ledger: {loss}" for loss in judgement.missed]
    lines += [f"  did not happen: {loss}" for loss in judgement.invented]
    return "\n".join(lines)


def _gpus(scenario: Scenario) -> int:
    return sum(job.nodes for job in scenario.jobs) * scenario.topology().gpus_per_node


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    whole = value == round(value) or abs(value) >= 1000
    return f"{value:,.0f} {unit}".rstrip() if whole else f"{value:.4g} {unit}".rstrip()


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
