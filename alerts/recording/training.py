"""From the training hook: MFU, step time, tokens, waits, stragglers.

A rank that moved, or an exporter that restarted, leaves two series of one rank for a window: rates come before sums,
both sides of a ratio are summed over the same series before they are divided, and a join has the host on its one side,
where it is unique whatever overlaps.
"""

from __future__ import annotations

from alerts.recording.record import Record, record
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

HOST = "instance:host:info"
NODE_RUN = "instance:training_run:info"
RUN_MFU = "run:training_mfu:ratio_rate5m"
HOST_MFU = "host:training_mfu:ratio_rate5m"
RANK_MFU = "rank:training_mfu:ratio_rate5m"
RUN_HFU = "run:training_hfu:ratio_rate5m"
FLEET_MFU = "fleet:training_mfu:ratio_rate5m"
STEP_DURATION = "run:training_step_duration_seconds:mean5m"
STEP_P50 = "run:training_step_duration_seconds:p50_rate5m"
STEP_P90 = "run:training_step_duration_seconds:p90_rate5m"
STEP_P99 = "run:training_step_duration_seconds:p99_rate5m"
TOKENS = "run:training_tokens:rate5m"
PAGES = "run:training_page:bool"
WAIT = "rank:training_collective_wait:ratio"
COMMUNICATION = "run:training_collective_wait:ratio"
RANK_SCORE = "rank:training_straggler:score"
RUN_SCORE = "run:training_straggler:score"
LEADER = "rank:training_straggler:leader"
EXCUSED = "rank:training_straggler:excused"
CULPRIT = "rank:training_straggler:culprit"
HOST_SCORE = "host:training_straggler:score"
HOST_LEADER = "host:training_straggler:leader"
STRAGGLER_LOST = "run:training_straggler_lost:ratio"
STRAGGLER_LOST_1H = "run:training_straggler_lost:ratio_1h"
STRAGGLER_LOST_1D = "run:training_straggler_lost:ratio_1d"
STRAGGLER_LOST_7D = "run:training_straggler_lost:ratio_7d"


def training_records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return the records on runs and ranks, in the order in which they build on each other."""
    return (*_places(settings), *_speed(settings), *_stragglers(settings))


def _places(settings: AlertSettings) -> tuple[Record, ...]:
    """Return where things are: an exporter serves one node, so that a join on `instance` is as wide as there are nodes.

    Asked from the last `state_window`, as rates still have what an exporter counted that is no more.
    """
    state = settings.at_pace(settings.state_window)

    def hosts(info: m.Metric) -> str:
        return f"count by (instance, host) (last_over_time({info}[{state}]))"

    return (
        # topk, because a node that was renamed has two; two of them would break the joins for the whole cluster.
        record(
            "place",
            HOST,
            "Name of the node an exporter serves.",
            f"""
            group by (instance, host) (
              topk by (instance) (1,
                {hosts(m.GPU_INFO)}
                  or on (instance)
                {hosts(m.INFINIBAND_INFO)}
                  or on (instance)
                {hosts(m.TRAINING_RANK_INFO)}
              )
            )
        """,
        ),
        record(
            "place",
            NODE_RUN,
            "The runs that have ranks on an exporter's node.",
            f"""
            group by (instance, run) ({m.TRAINING_RANK_INFO})
        """,
        ),
    )


def _speed(settings: AlertSettings) -> tuple[Record, ...]:
    rate = settings.at_pace(settings.rate_window)
    progress = settings.at_pace(settings.progress_window)
    state = settings.at_pace(settings.state_window)
    memory = settings.at_pace(settings.memory)
    world = f"max by (run) (last_over_time({m.TRAINING_WORLD_SIZE}[{progress}]))"

    def per_host(counter: m.Metric) -> str:
        return (
            f"sum by (run, host) (\n"
            f"  sum by (instance, run) (rate({counter}[{rate}])) * on (instance) group_left (host) {HOST}\n)"
        )

    def step_quantile(name: str, quantile: float) -> Record:
        # A run without a step in the window gives NaN, which no comparison lets through.
        return record(
            "detail",
            name,
            f"Duration that {100 * quantile:g} % of the optimizer steps do not exceed, as "
            "far as the histogram's bounds tell.",
            f"""
            histogram_quantile({quantile:g}, sum by (run, le) (rate({m.TRAINING_STEP_DURATION}_bucket[{rate}]))) >= 0
        """,
        )

    return (
        record(
            "training",
            RUN_MFU,
            "Model FLOPs over dense peak, in steps. None unless every rank has a peak.",
            f"""
            sum by (run) (rate({m.TRAINING_MODEL_FLOPS}[{rate}]))
              /
            (sum by (run) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
              and on (run)
            (
              count by (run) (sum by (run, rank) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
                ==
              {world}
            )
              unless on (run)
            {m.TRAINING_MFU_UNAVAILABLE} == 1
        """,
        ),
        record(
            "detail",
            RANK_MFU,
            "Model FLOPs over dense peak of one rank, where its run has an MFU.",
            f"""
            sum by (run, rank) (rate({m.TRAINING_MODEL_FLOPS}[{rate}]))
              /
            (sum by (run, rank) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
              and on (run)
            {RUN_MFU}
        """,
        ),
        record(
            "detail",
            HOST_MFU,
            "Model FLOPs over dense peak of a run's ranks on a host, where it has an MFU.",
            f"""
            {per_host(m.TRAINING_MODEL_FLOPS)}
              /
            ({per_host(m.TRAINING_CAPACITY_FLOPS)} > 0)
              and on (run)
            {RUN_MFU}
        """,
        ),
        record(
            "detail",
            RUN_HFU,
            "FLOPs executed, recomputation included, over dense peak. None unless every rank "
            "declared its recomputation and the run has an MFU.",
            f"""
            sum by (run) (rate({m.TRAINING_HARDWARE_FLOPS}[{rate}]))
              /
            (sum by (run) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
              and on (run)
            (count by (run) (sum by (run, rank) (rate({m.TRAINING_HARDWARE_FLOPS}[{rate}])) > 0) == {world})
              and on (run)
            {RUN_MFU}
        """,
        ),
        record(
            "detail",
            FLEET_MFU,
            "MFU of the runs that have one, weighted by their ranks.",
            f"""
            sum({RUN_MFU} * on (run) {world})
              /
            sum({world} and on (run) {RUN_MFU})
        """,
        ),
        record(
            "training",
            STEP_DURATION,
            "Mean duration of an optimizer step.",
            f"""
            sum by (run) (rate({m.TRAINING_STEP_DURATION}_sum[{rate}]))
              /
            (sum by (run) (rate({m.TRAINING_STEP_DURATION}_count[{rate}])) > 0)
        """,
        ),
        step_quantile(STEP_P50, 0.5),
        step_quantile(STEP_P90, 0.9),
        step_quantile(STEP_P99, 0.99),
        record(
            "training",
            TOKENS,
            "Tokens per second of the whole run.",
            f"""
            sum by (run) (rate({m.TRAINING_TOKENS}[{rate}]))
        """,
        ),
        # Ranks say how large it is where no ledger does, so that an outage of the ledger makes no page a warning.
        record(
            "training",
            PAGES,
            "1 for a run that may page: it is large, or it asks to.",
            f"""
            group by (tenant, run) (
              max by (tenant, run) (last_over_time({m.RUN_GPUS}[{state}])) >= {settings.page_min_gpus}
                or
              max by (tenant, run) (last_over_time({m.TRAINING_RUN_INFO}{{page="always"}}[{memory}]))
                or
              {PAGES} and on (tenant, run) last_over_time({m.RUN_STATE}{{state="down"}}[{state}]) == 1
                or
              max by (tenant, run) (last_over_time({m.TRAINING_RUN_INFO}[{memory}]))
                and on (run)
              max by (run) (last_over_time({m.TRAINING_WORLD_SIZE}[{state}])) >= {settings.page_min_gpus}
                unless on (tenant, run)
              last_over_time({m.RUN_GPUS}[{state}])
            )
        """,
        ),
    )


def _stragglers(settings: AlertSettings) -> tuple[Record, ...]:
    window = settings.at_pace(settings.straggler_window)
    three_windows = settings.at_pace(3 * settings.straggler_window)
    hour, day, week = map(settings.at_pace, (settings.hour, settings.day, settings.week))
    # Of a step: by when they are scraped, ranks in the same step differ by one of the few long ones in a window.
    tokens = (
        f"(sum by (run, rank) (rate({m.TRAINING_TOKENS}[{window}])) / "
        f"(sum by (run, rank) (rate({m.TRAINING_STEPS}[{window}])) > 0))"
    )
    # A scrape that fails is not a rank's end, or a verdict would begin anew two and four minutes later, too.
    lately = settings.at_pace(4 * settings.scrape_interval)
    info, known, world = (
        f"last_over_time({family}[{lately}])"
        for family in (m.TRAINING_RANK_INFO, f'{m.TRAINING_RANK_INFO}{{host!=""}}', m.TRAINING_WORLD_SIZE)
    )
    places = f"topk by (run, rank) (1, max by (run, rank, host) ({known}))"
    confirmed = f"{LEADER} >= {settings.straggler_warning:g}"
    most_late = f"max by (run) ({HOST_SCORE})"

    def leads(score: str, offset: str = "") -> str:
        # Not RUN_SCORE: vmalert sees a record an evaluation after those it was made of, when they have other values.
        # Equal ones have 0, all of them, and which of them leads is a matter of rounding.
        return (
            f"({score}{offset} > {settings.straggler_least:g} == on (run) group_left () max by (run) ({score}{offset}))"
        )

    def rivals(score: str, most: str) -> str:
        """Return the runs in which more than one is as late as the latest, or nearly."""
        return f"(count by (run) ({score} > on (run) group_left () {settings.straggler_rival:g} * {most}) > 1)"

    before = (f" offset {window}", f" offset {settings.at_pace(2 * settings.straggler_window)}")
    return (
        record(
            "training",
            WAIT,
            "Share of measured step time a rank waits for others; none for a stale rank. With its "
            "coordinate in a pipeline, where there is one.",
            f"""
            (
              sum by (run, rank) (rate({m.TRAINING_COLLECTIVE_WAIT}[{window}]))
                /
              (
                sum by (run, rank) (rate({m.TRAINING_MEASURED_STEP_SECONDS}[{window}]))
                  and
                sum by (run, rank) (increase({m.TRAINING_MEASURED_STEPS}[{window}])) >= {settings.straggler_steps}
              )
            )
              * on (run, rank) group_left (pp)
            (
              topk by (run, rank) (1, max by (run, rank, pp) ({info}))
                or on (run, rank)
              group by (run, rank) (last_over_time({m.TRAINING_MEASURED_STEPS}[{lately}]))
            )
        """,
        ),
        # The least wait that is not below the median is the upper median, exactly; both passes are linear in ranks.
        record(
            "training",
            RANK_SCORE,
            "Upper median of the waits of the run's ranks at the same place in the pipeline "
            "minus this rank's: the share of a step it costs. None unless every rank is measured.",
            f"""
            sum by (run, rank) (
              min by (run, pp) (
                {WAIT} >= on (run, pp) group_left () quantile by (run, pp) (0.5, {WAIT})
              )
                - on (run, pp) group_right ()
              {WAIT}
            )
              and on (run)
            (count by (run) ({WAIT}) == max by (run) ({world}))
        """,
        ),
        record(
            "training",
            RUN_SCORE,
            "Score of the run's latest rank.",
            f"""
            max by (run) ({RANK_SCORE})
        """,
        ),
        # A restarted rank may be another machine: the windows before say nothing about it.
        record(
            "training",
            EXCUSED,
            "1 for a rank that is not to blame if it is late: it restarted within three "
            "windows, or its steps have more tokens than the others'.",
            f"""
            group by (run, rank) (
              sum by (run, rank) (resets({m.TRAINING_MEASURED_STEPS}[{three_windows}])) > 0
                or
              count by (run, rank) (last_over_time({m.TRAINING_MEASURED_STEPS}[{three_windows}])) > 1
                or
              {tokens}
                /
              on (run) group_left () (avg by (run) ({tokens}) > 0)
                > {1 + settings.straggler_tokens:g}
            )
        """,
        ),
        record(
            "training",
            LEADER,
            "Score of the rank that was latest in three windows in a row, by more than 1 % "
            "of a step; none if that changed hands, if another is nearly as late, or if the rank is excused.",
            f"""
            {leads(RANK_SCORE)}
              and on (run, rank)
            {leads(RANK_SCORE, before[0])}
              and on (run, rank)
            {leads(RANK_SCORE, before[1])}
              unless on (run, rank)
            {EXCUSED}
              unless on (run)
            {rivals(RANK_SCORE, RUN_SCORE)}
        """,
        ),
        record(
            "verdict",
            HOST_SCORE,
            "Mean score of a run's ranks on a host, where it has several hosts.",
            f"""
            avg by (run, host) ({RANK_SCORE} * on (run, rank) group_left (host) {places})
              and on (run)
            (count by (run) (count by (run, host) ({info})) > 1)
        """,
        ),
        record(
            "verdict",
            HOST_LEADER,
            "Score of the host whose ranks were the latest in three windows in a row, in a "
            "run without a single rank to blame; none on the same conditions.",
            f"""
            {leads(HOST_SCORE)}
              and on (run, host)
            {leads(HOST_SCORE, before[0])}
              and on (run, host)
            {leads(HOST_SCORE, before[1])}
              unless on (run, host)
            ({EXCUSED} * on (run, rank) group_left (host) {places})
              unless on (run)
            {rivals(HOST_SCORE, most_late)}
              unless on (run)
            {LEADER}
        """,
        ),
        record(
            "training",
            CULPRIT,
            f"Score of a leader that costs at least {100 * settings.straggler_warning:g} % of "
            "a step, with its host and GPU where they are known.",
            f"""
            ({confirmed})
              * on (run, rank) group_left (host, uuid)
            topk by (run, rank) (1, max by (run, rank, host, uuid) ({m.TRAINING_RANK_INFO} and on (run, rank) {LEADER}))
              or on (run, rank)
            ({confirmed})
        """,
        ),
        # A run whose waits are all measured and that has no culprit loses nothing, and that is known.
        record(
            "training",
            STRAGGLER_LOST,
            "Share of each step lost to the culprit; 0 if there is none, none if waits are not measured.",
            f"""
            max by (run) ({confirmed})
              or
            max by (run) ({HOST_LEADER} >= {settings.straggler_warning:g})
              or
            0 * {RUN_SCORE}
        """,
        ),
        *(
            record(
                "windows",
                name,
                f"Share of each step lost to a culprit, mean over the time of the last {text} in "
                "which waits were measured.",
                f"avg_over_time({STRAGGLER_LOST}[{window_}])",
            )
            for name, window_, text in (
                (STRAGGLER_LOST_1H, hour, "hour"),
                (STRAGGLER_LOST_1D, day, "day"),
                # Every tenth minute of a week, which is a thousand.
                (STRAGGLER_LOST_7D, f"{week}:{settings.at_pace(2 * settings.rate_window)}", "seven days"),
            )
        ),
        record(
            "detail",
            COMMUNICATION,
            "Share of step time that ranks wait in collectives, mean over all ranks: what "
            "communication and imbalance cost. None unless every rank is measured.",
            f"""
            avg by (run) ({WAIT})
              and on (run)
            (count by (run) ({WAIT}) == max by (run) ({world}))
        """,
        ),
    )
