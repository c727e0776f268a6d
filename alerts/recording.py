"""Recording rules.

From the training hook: MFU, step time, tokens, stragglers. From the ledger: goodput, ETTR, effective MFU.
Rates come before sums, and both sides of a ratio are summed before they are divided. Ledger families are read as
`max by (tenant, run, bucket)` first, so that a second ledger by mistake doubles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc

from alerts.settings import AlertSettings
from flopwatch import catalogue as m

RUN_MFU = "run:training_mfu:ratio_rate5m"
RANK_MFU = "rank:training_mfu:ratio_rate5m"
STEP_DURATION = "run:training_step_duration_seconds:mean5m"
TOKENS = "run:training_tokens:rate5m"
PAGES = "run:training_page:bool"
WAIT = "rank:training_collective_wait:ratio"
RANK_SCORE = "rank:training_straggler:score"
RUN_SCORE = "run:training_straggler:score"
LEADER = "rank:training_straggler:leader"
PORT_WAS_ACTIVE = "port:infiniband_was_active:bool"
GOODPUT = "run:run_goodput:ratio"
ETTR = "run:run_ettr:ratio"
EFFECTIVE_MFU = "run:run_effective_mfu:ratio"


@dataclass(frozen=True, slots=True)
class Record:
    """One recording rule; `str()` is the name of the series it makes."""

    group: str
    name: str
    expr: str
    help: str

    def __str__(self) -> str:
        return self.name

    def rule(self) -> dict[str, object]:
        """Return the rule as Prometheus reads it."""
        return {"record": self.name, "expr": self.expr}


def records(settings: AlertSettings) -> tuple[Record, ...]:
    """Return every recording rule, in the order in which they build on each other."""
    rate = settings.at_pace(settings.rate_window)
    window = settings.at_pace(settings.straggler_window)
    three_windows = settings.at_pace(3 * settings.straggler_window)
    progress = settings.at_pace(settings.progress_window)
    state = settings.at_pace(settings.state_window)
    memory = settings.at_pace(settings.memory)
    productive = f'max by (tenant, run, bucket) ({m.RUN_SECONDS}{{bucket=~"productive|generation"}})'

    forget = settings.at_pace(settings.xid_window)
    tokens = f"sum by (run, rank) (rate({m.TRAINING_TOKENS}[{window}]))"

    def leads(offset: str = "") -> str:
        return f"({RANK_SCORE}{offset} == on (run) group_left () {RUN_SCORE}{offset})"

    def record(group: str, name: str, help_text: str, expr: str) -> Record:
        return Record(group, name, cleandoc(expr), help_text)

    return (
        record("training", RUN_MFU, "Model FLOPs over dense peak, in steps. None unless every rank has a peak.", f"""
            sum by (run) (rate({m.TRAINING_MODEL_FLOPS}[{rate}]))
              /
            (sum by (run) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
              and on (run)
            (
              count by (run) (sum by (run, rank) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
                ==
              max by (run) (last_over_time({m.TRAINING_WORLD_SIZE}[{progress}]))
            )
              unless on (run)
            {m.TRAINING_MFU_UNAVAILABLE} == 1
        """),
        record("training", RANK_MFU, "The same for one rank, where its run has an MFU.", f"""
            sum by (run, rank) (rate({m.TRAINING_MODEL_FLOPS}[{rate}]))
              /
            (sum by (run, rank) (rate({m.TRAINING_CAPACITY_FLOPS}[{rate}])) > 0)
              and on (run)
            {RUN_MFU}
        """),
        record("training", STEP_DURATION, "Mean duration of an optimizer step.", f"""
            sum by (run) (rate({m.TRAINING_STEP_DURATION}_sum[{rate}]))
              /
            (sum by (run) (rate({m.TRAINING_STEP_DURATION}_count[{rate}])) > 0)
        """),
        record("training", TOKENS, "Tokens per second of the whole run.", f"""
            sum by (run) (rate({m.TRAINING_TOKENS}[{rate}]))
        """),
        record("training", PAGES, "1 for a run that may page: it is large, or it asks to.", f"""
            group by (tenant, run) (
              max by (tenant, run) (last_over_time({m.RUN_GPUS}[{state}])) >= {settings.page_min_gpus}
                or
              max by (tenant, run) (last_over_time({m.TRAINING_RUN_INFO}{{page="always"}}[{memory}]))
                or
              {PAGES} and on (tenant, run) last_over_time({m.RUN_STATE}{{state="down"}}[{state}]) == 1
            )
        """),
        record("training", WAIT, "Share of measured step time a rank waits for others; none for a stale rank.", f"""
            sum by (run, rank) (rate({m.TRAINING_COLLECTIVE_WAIT}[{window}]))
              /
            (
              sum by (run, rank) (rate({m.TRAINING_MEASURED_STEP_SECONDS}[{window}]))
                and
              sum by (run, rank) (increase({m.TRAINING_MEASURED_STEPS}[{window}])) >= {settings.straggler_steps}
            )
        """),
        # The least wait that is not below the median is the upper median, exactly; both passes are linear in ranks.
        record("training", RANK_SCORE, "Upper median of the run's waits minus this rank's: the share of a step it "
               "costs. None unless every rank is measured.", f"""
            (
              min by (run) (
                {WAIT} >= on (run) group_left () quantile by (run) (0.5, {WAIT})
              )
                - on (run) group_right ()
              {WAIT}
            )
              and on (run)
            (count by (run) ({WAIT}) == max by (run) ({m.TRAINING_WORLD_SIZE}))
        """),
        record("training", RUN_SCORE, "Score of the run's latest rank.", f"""
            max by (run) ({RANK_SCORE})
        """),
        # A restarted rank may be another machine: the windows before say nothing about it.
        record("training", LEADER, "Score of the rank that was latest in three windows in a row; none if that "
               "changed hands, if the rank restarted meanwhile, or if it has more tokens than the others.", f"""
            {leads()}
              and on (run, rank)
            {leads(f" offset {window}")}
              and on (run, rank)
            {leads(f" offset {settings.at_pace(2 * settings.straggler_window)}")}
              unless on (run, rank)
            (
              sum by (run, rank) (resets({m.TRAINING_MEASURED_STEPS}[{three_windows}])) > 0
                or
              count by (run, rank) (last_over_time({m.TRAINING_MEASURED_STEPS}[{three_windows}])) > 1
            )
              unless on (run, rank)
            (
              {tokens}
                /
              on (run) group_left () (avg by (run) ({tokens}) > 0)
                > {1 + settings.straggler_tokens:g}
            )
        """),
        record("ledger", GOODPUT, "Productive time over wall clock since the first process start.", f"""
            sum by (tenant, run) ({productive})
              /
            (sum by (tenant, run) (
              max by (tenant, run, bucket) ({m.RUN_SECONDS}{{bucket!="queue"}})
                or
              max by (tenant, run) ({m.RUN_OPEN_SECONDS})
            ) > 0)
        """),
        record("ledger", ETTR, "Productive time over wall clock since submission; none if that is unknown.", f"""
            sum by (tenant, run) ({productive})
              /
            (sum by (tenant, run) (
              max by (tenant, run, bucket) ({m.RUN_SECONDS})
                or
              max by (tenant, run) ({m.RUN_OPEN_SECONDS})
            ) > 0)
              and on (tenant, run)
            {m.RUN_SECONDS}{{bucket="queue"}}
        """),
        record("ledger", EFFECTIVE_MFU, "Model FLOPs of retained steps over the peak of the GPUs held, down time "
               "included.", f"""
            max by (tenant, run) ({m.RUN_MODEL_FLOPS})
              /
            (max by (tenant, run) ({m.RUN_CAPACITY_FLOPS}) > 0)
        """),
        record("hardware", PORT_WAS_ACTIVE, "1 for a port that has been active; one that never was is not in use.", f"""
            group by (instance, device, port) (
              {m.INFINIBAND_STATE} >= 4
                or
              {PORT_WAS_ACTIVE} and on (instance, device, port) last_over_time({m.INFINIBAND_STATE}[{forget}])
            )
        """),
    )
