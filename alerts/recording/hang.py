"""From the training hook: the step a run is in, whether it should long have ended, and for whom the others wait.

Times of ranks are compared with the clock of Prometheus: FlopwatchClockWrong tells where the two differ.
"""

from __future__ import annotations

from alerts.recording.fabric import PORT_RAIL, PORT_WAS_ACTIVE
from alerts.recording.record import Record, record
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

DECLARED = "run:training_declared_seconds:delta5m"
OPEN_STEP = "run:training_open_step_began_seconds:max"
OVERDUE_STEP = "run:training_overdue_step_began_seconds:max"
STEPPING = "run:training_step:max_rate1m"
COLLECTIVES = "run:training_collective_started:bool_1m"
TENSOR_MOST = "run:gpu_tensor_active:max_rate1m"
TENSOR_LEAST = "run:gpu_tensor_active:min_rate1m"
TENSOR_KNOWN = "run:gpu_tensor_active:known"
POWER_SHARE = "run:gpu_power:share_of_1h"
POWER_KNOWN = "run:gpu_power:known"
SENT = "run:infiniband_transmit_bytes:max_rate1m"
GONE = "rank:training_gone:bool"
SIGN = "rank:training_hang:sign"
CULPRIT_RANK = "rank:training_hang:culprit"
CULPRIT_HOST = "host:training_hang:culprit"
# What each sign says of a rank, in words that follow "is".
SIGNS = {
    "gone": "gone",
    "silent": "silent: its process is stopped, or holds the interpreter's lock",
    "blocked": "stopped, or stuck in the kernel, where storage or a driver keeps it",
    "data": "waiting for data",
    "sequence": "missing in the collective in which the others wait",
    "gpu": "on a GPU that is lost or reported a critical Xid",
    "idle": "on an idle GPU, while those of the others are busy",
    "computing": "on a GPU that goes on computing, while those of the others wait",
    "link": "behind a port that is down",
}


def hang_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records that a hang and a lost node are told by."""
    recent, memory = settings.at_pace(settings.rate_window), settings.at_pace(settings.hang_memory)
    last_step = f"max by (run) ({m.TRAINING_LAST_STEP_TIMESTAMP})"
    others = f'sum by (run, rank) ({m.TRAINING_ACTIVITY_SECONDS}{{activity!~"step|data_stall"}}%s)'
    now, then = others % "", others % f" offset {recent}"
    buckets = f"sum by (run, le) (increase({m.TRAINING_STEP_DURATION}_bucket[{memory}]))"
    mean = (
        f"sum by (run) (increase({m.TRAINING_STEP_DURATION}_sum[{memory}]))"
        f" / sum by (run) (increase({m.TRAINING_STEP_DURATION}_count[{memory}]))"
    )
    return (
        # By two instants and not by increase(): there are seven such activities of each rank. All of a new one's count,
        # and all of one that begins anew.
        record(
            "training",
            DECLARED,
            "Seconds of the last five minutes that a rank of the run spent in anything but "
            "steps and waiting for data: the largest of its ranks'.",
            f"""
            max by (run) (
              {now} - {then} >= 0 or {now}
            )
        """,
        ),
        # What was declared lies in the open step for certain if the last step ended within the window, too.
        record(
            "training",
            OPEN_STEP,
            "When the run's open step began, as Unix time: its newest step's end, and later "
            "by what was declared since, a checkpoint for instance; none while that cannot be told.",
            f"""
            (
              {last_step} + on (run) {DECLARED}
            )
              unless on (run)
            (
              {DECLARED} > 0.5 and on (run) {last_step} < time() - {settings.seconds_at_pace(settings.rate_window)}
            )
        """,
        ),
        # The largest bucket ends at 180 s: of longer steps only the mean is known.
        record(
            "training",
            OVERDUE_STEP,
            "The same for a step that is older than 60 s and than three times the p99 of "
            "the last hour's steps, or, where there was none, than an hour.",
            f"""
            {OPEN_STEP} < time() - {settings.seconds_at_pace(settings.hang_after)}
              and on (run)
            (
              {OPEN_STEP} + on (run) {settings.hang_steps} * (
                histogram_quantile({settings.hang_quantile:g}, {buckets}) >= on (run) {mean}
                  or on (run)
                {mean}
              ) < time()
                or on (run)
              {OPEN_STEP} < time() - {settings.seconds_at_pace(settings.hang_memory)}
            )
        """,
        ),
        *_quiet(settings),
        *_verdict(settings),
    )


def _quiet(settings: AlertSettings) -> tuple[Record, ...]:
    """Return what a run does beside its steps, each on a clock of its own: alerts ask for them more than once."""
    window, memory = settings.at_pace(settings.hang_window), settings.at_pace(settings.hang_memory)
    ranks = f"count by (run) (group by (run, rank) ({m.TRAINING_RANK_INFO}))"

    def of_cards(expr: str) -> str:
        return f"(max by (run, uuid) ({m.TRAINING_RANK_INFO}) * on (uuid) group_left () max by (uuid) ({expr}))"

    # Of each rank that there is: one that was killed is why the others hang.
    def known(cards: str) -> str:
        return f"count by (run) {cards} / on (run) {ranks}"

    tensor = of_cards(f"rate({m.GPU_TENSOR_ACTIVE}[{window}])")
    power = of_cards(f"max_over_time({m.GPU_POWER}[{window}])")
    usual = of_cards(f"max_over_time({m.GPU_POWER}[{memory}:{settings.at_pace(settings.rate_window)}])")
    sent = f"max by (instance, device, port) (rate({m.INFINIBAND_TRANSMIT_DATA}[{window}]))"
    return (
        record(
            "training",
            STEPPING,
            "Share of the last minute that a rank of the run spent in steps: the largest of its ranks'.",
            f"""
            max by (run) (sum by (run, rank) (rate({m.TRAINING_ACTIVITY_SECONDS}{{activity="step"}}[{window}])))
        """,
        ),
        record(
            "training",
            COLLECTIVES,
            "1 if a rank of the run has started a collective in the last minute, 0 if none "
            "has, where they are counted.",
            f"max by (run) (changes({m.TRAINING_COLLECTIVE_SEQUENCE}[{window}]) > bool 0)",
        ),
        record(
            "training",
            TENSOR_MOST,
            "Share of the last minute that tensor cores of the run's cards were active: the busiest card's.",
            f"max by (run) {tensor}",
        ),
        record("training", TENSOR_LEAST, "The same of the idlest card.", f"min by (run) {tensor}"),
        record(
            "training", TENSOR_KNOWN, "Share of the run's ranks whose card tells of its tensor cores.", known(tensor)
        ),
        # Each card beside itself: a run that lost ranks draws less.
        record(
            "training",
            POWER_SHARE,
            "Power of the run's cards in the last minute over that of the last hour, the most of each card.",
            f"avg by (run) {power} / avg by (run) {usual}",
        ),
        record("training", POWER_KNOWN, "Share of the run's ranks whose card tells of its power.", known(power)),
        record(
            "training",
            SENT,
            "Bytes a second that a port of the run's rails sent in the last minute: the most.",
            f"max by (run) ({PORT_RAIL} * on (instance, device, port) group_left () {sent})",
        ),
    )


def _verdict(settings: AlertSettings) -> tuple[Record, ...]:
    """Return who keeps the others waiting. Each sign has one vote, which is split among the ranks it points at.

    A sign that points at more than half of the ranks says nothing of any, and casts doubt on the others.
    """
    window, recent = settings.at_pace(settings.hang_window), settings.at_pace(settings.rate_window)
    lately, before = settings.at_pace(3 * settings.hang_window), settings.at_pace(4 * settings.rate_window)
    info = m.TRAINING_RANK_INFO
    # Joins begin with the ranks of runs that hang: none, nearly always.
    hung, hung_cards = (f"({info}{some} and on (run) {OVERDUE_STEP})" for some in ("", '{uuid!=""}'))
    seconds = f"rate({m.TRAINING_ACTIVITY_SECONDS}{{activity%s}}[{window}]) and on (run) {OVERDUE_STEP}"
    numbers = f"max by (run, rank) ({m.TRAINING_COLLECTIVE_SEQUENCE} and on (run) {OVERDUE_STEP})"
    cards = f"max by (run, rank, uuid) {hung_cards} * on (uuid) group_left () max by (uuid) (%s)"
    fresh = settings.seconds_at_pace(2 * settings.rate_window)
    xid = (
        f"max by (instance, uuid, xid) ({m.GPU_XID_LAST}) > time() - {fresh}"
        f' and on (instance, xid) {m.GPU_XID_INFO}{{severity=~"critical|fatal"}}'
    )
    down = f"{m.INFINIBAND_STATE} < 4 and on (instance, device, port) {PORT_WAS_ACTIVE}"
    draws, limit = f"min_over_time({m.GPU_POWER}[{window}])", m.GPU_POWER_LIMIT
    # The node of the rank that tells it may be the one that is gone.
    world = (
        f"(max by (run) ({m.TRAINING_WORLD_SIZE})"
        f" or on (run) max by (run) (last_over_time({m.TRAINING_WORLD_SIZE}[{before}])))"
    )
    blocked = f"max by (run, rank) ({m.NODE_PROCESS_BLOCKED}) > {settings.seconds_at_pace(settings.hang_blocked)}"
    signs = {
        "gone": GONE,
        "silent": f"""sum by (run, rank) ({seconds % '=~"step|data_stall"'}) < {settings.hang_silent:g}
  unless on (run, rank)
{blocked}""",
        "data": f"""sum by (run, rank) ({seconds % '="data_stall"'}) > {settings.hang_busy:g}""",
        "sequence": f"""{numbers}
  == on (run) group_left ()
(min by (run) ({numbers}) < max by (run) ({numbers}))""",
        "blocked": blocked,
        "gpu": f"""max by (run, rank) ({hung_cards} and on (uuid) ({m.GPU_PRESENT} == 0 or {xid}))""",
        "idle": f"""{cards % f"max_over_time({m.GPU_UTILIZATION}[{window}])"} < {settings.hang_idle:g}
  and on (run)
quantile by (run) (0.5, {cards % m.GPU_UTILIZATION}) > {settings.hang_busy:g}""",
        # Not where somebody else computes on it.
        "computing": f"""(
  {cards % f"({draws} > {settings.hang_draws:g} * {limit})"}
    unless on (uuid)
  (count by (uuid) (group by (run, uuid) ({info} and on (uuid) {hung})) > 1)
)
  > on (run) group_left ()
{settings.hang_above:g} * quantile by (run) (0.5, {cards % f"max_over_time({m.GPU_POWER}[{window}])"})""",
        "link": f"""max by (run, rank) ({hung} and on (instance) ({down}))""",
    }
    union = "\n  or\n".join(
        f'label_replace(group by (run, rank) ({expr}), "sign", "{sign}", "", "")' for sign, expr in signs.items()
    )
    votes = f"""(
  {SIGN}%s
    / on (run, sign) group_left ()
  (count by (run, sign) ({SIGN}) <= on (run) group_left () 0.5 * {world})
)"""
    all_votes = f"(count by (run) (count by (run, sign) ({SIGN})) + {settings.hang_doubt:g})"
    hosts = f"(group by (run, host) {hung} or group by (run, host) ({SIGN}))"

    def most(by: str, of: str = "") -> str:
        return f"sum by (run, {by}) ({votes % of}) / on (run) group_left () {all_votes} > {settings.hang_named:g}"

    return (
        # A run may be young, and steps of minutes are overdue later than others: so one looks at three times. A scrape
        # that failed is not a node's end.
        record(
            "verdict",
            GONE,
            "1 for a rank that was there before the overdue step of its run and is not any more; "
            "none if the run has as many as it says.",
            f"""
            group by (run, rank, host) (
              (
                last_over_time({info}[{lately}])
                  or on (run, rank)
                last_over_time({GONE}[{recent}])
                  or on (run, rank)
                {info} offset {recent}
                  or on (run, rank)
                {info} offset {before}
              )
                unless on (run, rank)
              last_over_time({info}[{window}])
                and on (run)
              {OVERDUE_STEP}
                and on (run)
              (count by (run) (group by (run, rank) ({info})) < {world})
            )
        """,
        ),
        record(
            "verdict",
            SIGN,
            "1 for each sign that a rank of a run with an overdue step is the one that the others "
            f"wait for: {', '.join(SIGNS)}.",
            f"""
(
{union}
)
  * on (run, rank) group_left (host)
topk by (run, rank) (1, max by (run, rank, host) {hung} or on (run, rank) {GONE})
""",
        ),
        record(
            "verdict",
            CULPRIT_RANK,
            "Share of the signs that say it is this rank which the others wait for, if "
            "most do: each has one vote, split among the ranks it points at, and a fifth of one is doubt.",
            most("rank, host"),
        ),
        record(
            "verdict",
            CULPRIT_HOST,
            "The same for a host of several that a run has, where it is no single rank.",
            f"""
{most("host", '{host!=""}')}
  unless on (run)
{CULPRIT_RANK}
  and on (run)
(count by (run) ({hosts}) > 1)
""",
        ),
    )
