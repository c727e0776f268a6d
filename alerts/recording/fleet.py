"""What needs a long memory: goodput of a week, time to failure and to recovery of a month, and hosts that fail again.

The ledger forgets a run a day after its end, so sums over runs that ended earlier are of what was recorded of them,
looked at once an hour. Until this much was recorded, it is of the time since.
"""

from __future__ import annotations

from alerts.recording.fabric import PORT_WAS_ACTIVE
from alerts.recording.ledger import GOOD
from alerts.recording.record import Record, record
from alerts.recording.training import CULPRIT, HOST, NODE_RUN
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

RUN_BEGAN = "run:run_start_timestamp_seconds:min"
RUN_DONE = "run:run_productive_gpu_seconds:sum"
RUN_HELD = "run:run_held_gpu_seconds:sum"
RUN_RUNNING = "run:run_running_gpu_seconds:sum"
RUN_FAILURES = "run:run_unplanned_ends:sum"
RUN_RECOVERIES = "run:run_recoveries:max"
RUN_RECOVERY = "run:run_recovery_seconds:max"
FLEET_GOODPUT_7D = "fleet:run_goodput:ratio_7d"
FLEET_MTTF = "fleet:run_gpu_seconds_to_failure:mean_30d"
FLEET_MTTR = "fleet:run_time_to_recovery_seconds:mean_30d"
HOST_SIGN = "host:sign_of_failure:bool"
HOST_ENDS = "host:run_unplanned_ends:sum"
LEMON = "host:lemon:score"


def fleet_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records on the fleet over a week and a month, and on its hosts."""
    return (*_runs(settings), *_hosts(settings))


def _runs(settings: AlertSettings) -> tuple[Record, ...]:
    def total(name: str, text: str, metric: m.Metric, label: str, matcher: str) -> Record:
        return record(
            "fleet", name, text, f"sum by (tenant, run) (max by (tenant, run, {label}) ({metric}{{{matcher}}}))"
        )

    def added(name: str, length: float) -> str:
        """Return what a recorded sum grew by: from the first value of the window on, or all if the run began in it."""
        window = f"[{settings.at_pace(length)}:{settings.at_pace(settings.hour)}]"
        old = f"last_over_time({RUN_BEGAN}{window}) <= time() - {settings.seconds_at_pace(length)}"
        return f"""sum(
  last_over_time({name}{window}) - (min_over_time({name}{window}) and {old})
    or
  last_over_time({name}{window})
)"""

    return (
        record(
            "fleet", RUN_BEGAN, "First process start of a run, as Unix time.", f"min by (tenant, run) ({m.RUN_START})"
        ),
        total(RUN_DONE, "Productive GPU-seconds of a run.", m.RUN_GPU_SECONDS, "bucket", GOOD),
        record(
            "fleet",
            RUN_HELD,
            "GPU-seconds booked of a run that has a goodput.",
            f"""
            sum by (tenant, run) (max by (tenant, run, bucket) ({m.RUN_GPU_SECONDS}))
              and
            {RUN_DONE}
        """,
        ),
        total(
            RUN_RUNNING, "GPU-seconds in which a run was running.", m.RUN_GPU_SECONDS, "bucket", 'bucket!~"down|queue"'
        ),
        total(RUN_FAILURES, "Unplanned ends of a run.", m.RUN_ENDS, "status", 'status=~"failed|silent"'),
        record(
            "fleet",
            RUN_RECOVERIES,
            "Unplanned ends a run came back from.",
            f"max by (tenant, run) ({m.RUN_RECOVERIES})",
        ),
        record(
            "fleet",
            RUN_RECOVERY,
            "Seconds a run took to come back from its unplanned ends.",
            f"max by (tenant, run) ({m.RUN_RECOVERY_SECONDS})",
        ),
        record(
            "fleet",
            FLEET_GOODPUT_7D,
            "Productive GPU-seconds over those booked in the last seven days, of all runs with a goodput.",
            f"""
            {added(RUN_DONE, settings.week)}
              /
            ({added(RUN_HELD, settings.week)} > 0)
        """,
        ),
        record(
            "fleet",
            FLEET_MTTF,
            "GPU-seconds of running for each unplanned end of the last 30 days; over the GPUs "
            "of a run, its expected time to failure. None without an unplanned end.",
            f"""
            {added(RUN_RUNNING, settings.month)}
              /
            ({added(RUN_FAILURES, settings.month)} > 0)
        """,
        ),
        record(
            "fleet",
            FLEET_MTTR,
            "Time from an unplanned end to the first new step, mean of the last 30 days. None without one.",
            f"""
            {added(RUN_RECOVERY, settings.month)}
              /
            ({added(RUN_RECOVERIES, settings.month)} > 0)
        """,
        ),
    )


def _hosts(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the signs a host gives, the runs that ended on it meanwhile, and what both come to in seven days.

    Meta found the nodes that fail jobs again and again by what each did in 28 days: different Xids, jobs of one or more
    nodes that it failed, times out of service, repair tickets (arXiv:2410.21680, section IV). The first two are series
    here; the other two are a scheduler's. To them come ports that dropped and ranks that others waited for, which slow
    runs down without ending them. Each counts once, so that a storm of one error is one; an error that ended a run
    counts twice, as the error and as the end.
    """
    end, week = settings.at_pace(settings.end_window), settings.at_pace(settings.week)
    state = settings.at_pace(settings.state_window)
    named = f"* on (instance) group_left (host) {HOST}"

    def xids(seconds: float) -> str:
        return (
            f"max by (instance, uuid, xid) ({m.GPU_XID_LAST} > time() - {settings.seconds_at_pace(seconds)}\n"
            f'      and on (instance, xid) {m.GPU_XID_INFO}{{severity=~"critical|fatal"}})'
        )

    def count(text: str) -> str:
        return f"(\n{text}\n    or\n  0 * group by (host) ({HOST})\n)"

    drops = f"max by (instance, device, port) ({m.INFINIBAND_DROPS}%s)"
    late = f'last_over_time({CULPRIT}{{host!=""}}[{week}])'
    return (
        record(
            "fleet",
            HOST_SIGN,
            "1 for a host with a critical Xid in the last quarter of an hour, a GPU or a port "
            "that is gone, or an exporter that fell silent.",
            f"""
            group by (host) (
              {xids(settings.end_window)}
                {named}
            )
              or
            group by (host) (({m.GPU_PRESENT} == 0) {named})
              or
            group by (host) (
              (
                {m.INFINIBAND_STATE} < 4 and on (instance, device, port) {PORT_WAS_ACTIVE}
                  or
                {m.INFINIBAND_PRESENT} == 0
              )
                {named}
            )
              or
            group by (host) (last_over_time({HOST}[{end}]) unless on (host) {HOST})
        """,
        ),
        record(
            "fleet",
            HOST_ENDS,
            "Unplanned ends of a run with ranks on a host that gave a sign when the run ended, "
            "for a quarter of an hour.",
            f"""
            group by (run, host) (
              last_over_time({NODE_RUN}[{end}]) * on (instance) group_left (host)
                topk by (instance) (1, last_over_time({HOST}[{end}]))
            )
              * on (run) group_left ()
            (
              sum by (run) (last_over_time({RUN_FAILURES}[{state}]))
                >
              sum by (run) (last_over_time({RUN_FAILURES}[{state}] offset {end}))
            )
              and on (host)
            {HOST_SIGN}
        """,
        ),
        record(
            "fleet",
            LEMON,
            "Signs of the last seven days that a host makes runs fail: unplanned ends it gave a "
            "sign for, different critical Xids per GPU, ranks of runs that were late on it, ports that dropped.",
            count(f"  sum by (host) (changes({HOST_ENDS}[{week}]) + 1)")
            + "\n  +\n"
            + count(
                f"  count by (host) (\n    group by (host, uuid, xid) (\n      {xids(settings.week)}\n"
                f"        {named}\n    )\n  )"
            )
            + "\n  +\n"
            + count(f"  count by (host) (group by (host, run, rank) ({late}))")
            + "\n  +\n"
            + count(f"  count by (host) (\n    (({drops % ''} - {drops % f' offset {week}'}) > 0)\n      {named}\n  )"),
        ),
    )
