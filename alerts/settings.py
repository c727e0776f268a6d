"""Every time and threshold of the rules and of Alertmanager, in one object with one pace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SECRETS = Path("/etc/alertmanager/secrets/flopwatch")


def duration(seconds: float) -> str:
    """Return seconds as Prometheus writes them, to the millisecond: 90 is 1m30s, 0.75 is 750ms."""
    left = round(seconds * 1000)
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Times are seconds at pace 1; `at_pace` prints them at this pace. Thresholds do not change with the pace.

    Record names keep the window they have at pace 1 (`...:ratio_rate5m`), so that dashboards read the same at any pace.
    """

    pace: float = 1.0  # 20: every window, for, interval and wait is twenty times shorter
    scrape_interval: float = 15.0  # also the time between two evaluations of a rule

    rate_window: float = 300.0
    straggler_window: float = 120.0  # a verdict needs the same leader in three of these in a row
    link_window: float = 300.0
    xid_window: float = 1800.0  # an Xid is news for this long
    progress_window: float = 120.0  # a run with steps in it is not down, whatever a ledger that hears nothing says
    state_window: float = 300.0  # what a ledger or exporter said last holds this long while it restarts
    memory: float = 86_400.0  # a run asked to page within this time; a lost GPU's Xid is not forgotten before

    # A verdict has already seen three windows, a port one.
    straggler_for: float = 60.0
    straggler_keep: float = 600.0  # longer than a restart and three windows, so that one culprit is one message
    down_for: float = 300.0  # a restart by the launcher takes less
    link_for: float = 60.0
    link_keep: float = 600.0

    straggler_warning: float = 0.10  # share of every step lost to the late rank
    straggler_critical: float = 0.20
    straggler_least: float = 0.01  # of a step: what ranks differ by that are equally fast
    straggler_steps: int = 5  # measured steps a window needs, or there is no score
    straggler_tokens: float = 0.05  # more tokens than the mean: the work is uneven, not the machine slow
    straggler_rival: float = 0.75  # of the latest's score: another one so late, and to mend the latest gains little
    symbol_errors: int = 10  # in one link_window: the rate of 120 an hour, at which a link is to be replaced
    page_min_gpus: int = 64  # a smaller run only notifies, unless it asks with page="always"

    # GPU.
    new_host: float = 120.0  # by then the host of a new exporter is recorded, which is done once a minute
    xid_hours: int = 3  # of a day's hours, with the same application Xid on one GPU alone: hardware, says NVIDIA
    ecc_window: float = 1800.0  # an uncorrected error is news for this long, whatever the counter does after
    remapped_rows: int = 512  # DCGM fails a board with so many rows remapped for uncorrected errors
    missing_for: float = 300.0  # beside a dead GPU the exporter initialises NVML at least every 240 s
    driver_for: float = 600.0  # an update of the driver takes less
    throttle_share: float = 0.10  # of the time: what TraceML lets a straggler cost before it warns
    power_cap_share: float = 0.50  # at the board's own limit the cap is normal; below it, half the time is too much
    power_limit_share: float = 0.95  # of the board's default limit: less is a limit that somebody set
    throttle_for: float = 300.0  # with rate_window ten minutes: fail-slow lasts from tens of seconds on (FALCON)
    temperature_margin: float = 3.0  # degrees above slowdown; a healthy H100 at full load keeps 15 and more
    pcie_busy: float = 0.50  # utilisation from which on a GPU has no reason to run its PCIe link slowly
    pcie_bit_errors: float = 1e-12  # replays a bit: DCGM's limit, 31 a minute at generation 5 with 16 lanes
    degraded_for: float = 600.0  # a link that trains narrow, or a limit that a script sets, may be put right at once
    nvlink_crc_rate: float = 100.0  # a second: DCGM's limit of errors that are corrected
    nvlink_bit_errors: float = 1e-12  # effective bit error ratio: DCGM's limit for NVLink 5
    nvlink_for: float = 120.0  # a GPU reset takes its links down for less
    fabric_for: float = 300.0  # registration with the fabric manager takes a minute or two after a boot
    repair_for: float = 300.0  # what waits for a reset may get it at once, between two jobs
    idle_share: float = 0.01  # of the time a multiprocessor has work: less is nobody
    idle_for: float = 1800.0  # loading, compiling and a slow file system are over by then

    # Fabric.
    port_down_for: float = 240.0  # leptonai/gpud's drop: a switch that restarts one port takes less
    rate_share: float = 0.99  # of the rate the port had once, which is printed rounded
    rate_for: float = 300.0  # a link may train slower at first and again right after
    bit_error_window: float = 720.0  # NVIDIA UFM counts for twelve minutes
    bit_errors: float = 1e-14  # symbol errors a bit, 2.88 in that window at 400 Gb/s: then it isolates the port
    error_for: float = 120.0  # by then InfinibandLinkErrors tells of what is worse
    recoveries: float = 5.0  # a minute: NVSentinel's limit, as the next five
    receive_errors: float = 10.0  # packets a second
    discards: float = 100.0  # packets a second
    ack_timeouts: float = 1.0  # a second
    slow_restarts: float = 10.0  # a second
    efa_peer_errors: float = 1.0  # a second: connections impaired, peers that do not respond
    efa_command_errors: float = 10.0  # a minute
    loss_for: float = 300.0  # a job that ends, or loses a peer, makes such errors for seconds
    marked_share: float = 0.05  # of received packets: ours; queues that mark one in twenty are there all the time
    wait_factor: float = 4.0  # times the median of the node's compute ports: ours, as the tick has no unit
    slow_rail_share: float = 0.90  # of the median rail's traffic: a port that waits and sends less is the slow one
    congestion_for: float = 900.0  # an incast of a checkpoint or of a job's start takes less
    rail_share: float = 0.50  # of the median rail's traffic: rails carry equal shares in a collective
    rail_busy: float = 1e8  # byte/s: below it a node's rails are not in a collective
    rail_for: float = 600.0  # a checkpoint goes over some rails only
    sequence_errors: float = 1.0  # a second: on a lossless fabric there are none
    roce_for: float = 600.0  # a wrong configuration stays
    transceiver_celsius: float = 70.0  # NVIDIA UFM's limit
    transceiver_for: float = 300.0  # its sensor follows slowly; less is a reading

    # Training.
    down_keep: float = 600.0  # a run that comes back and dies again within this is one message, not two
    hang_after: float = 60.0  # max(60 s, 3 x p99 step) of the open step: docs/adr/0018
    hang_steps: int = 3
    hang_quantile: float = 0.99
    hang_window: float = 60.0  # collectives and tensor cores stood still for this long: the second sign
    hang_memory: float = 3600.0  # steps of this time make the p99; without one in it, a hang is as old as this
    hang_idle: float = 0.01  # tensor activity of a card that waits in a collective
    hang_silent: float = 0.10  # of the time that a rank's clocks moved on: less, and its process does not push
    hang_busy: float = 0.50  # utilization of a card whose kernel waits in a collective; without work it is 0
    hang_blocked: float = 30.0  # that a process was stopped, or in the kernel: a disk may take some of it
    hang_draws: float = 0.50  # of its power limit, what a card draws that computes; one that waits in NCCL a third
    hang_above: float = 1.50  # and more than the others' median by so much
    hang_quiet: float = 0.10  # of what a rail carried: keep-alives go on in a hang
    hang_power: float = 0.60  # of what the run's cards drew: they spin in a collective, and do not compute
    hang_doubt: float = 0.20  # of a sign's vote: as much evidence points nowhere
    hang_named: float = 0.50  # share of the votes from which on somebody is named
    hang_keep: float = 900.0  # a job that hangs is ended then, and is down: one message, not two
    hang_for: float = 60.0  # longer than node_lost_for: the host that died is told first
    stalled_after: float = 1800.0  # without a step, whatever the ranks say they do: a checkpoint or evaluation is over
    stalled_for: float = 300.0  # as down_for and storm_for, which are then told in its place
    storm_window: float = 3600.0
    storm_attempts: int = 3  # starts in that window without a second of new progress
    storm_burst: float = 1800.0
    storm_ends: int = 4  # unplanned ends in that time, whatever the attempts made
    storm_for: float = 300.0  # as down_for, which is then told in its place
    mfu_drop: float = 0.85  # of the run's own median: ours; a late rank warns from 10 % on, and says who
    mfu_drop_window: float = 600.0
    mfu_baseline_window: float = 10_800.0
    mfu_baseline_offset: float = 1800.0  # the baseline ends this long ago, or the drop would drag it along
    mfu_drop_for: float = 900.0
    mfu_most: float = 1.0
    mfu_over_tensor: float = 1.1  # docs/adr/0005
    mfu_impossible_for: float = 600.0
    goodput_window: float = 86_400.0
    goodput_low: float = 0.80  # 90 % is typical, 96 to 98 % the best of the field: docs/adr/0006
    goodput_age: float = 21_600.0  # seconds a run has taken before its start-up stops deciding; no time of the rules
    goodput_for: float = 900.0
    stall_share: float = 0.10  # of the step time of the rank that waits most for data
    stall_for: float = 600.0
    checkpoint_stale: float = 7200.0  # productive seconds without a durable checkpoint; no time of the rules
    checkpoint_window: float = 21_600.0
    checkpoint_share: float = 0.05  # of the wall clock: at Young's optimum if a save takes 0.5 % of the time to failure
    risk_gpu_hours: float = 4096.0  # a quarter of an hour of 16,384 GPUs, whose mean time to failure is 2 to 3 h
    checkpoint_for: float = 600.0
    nonfinite_steps: float = 0.10  # share of steps with a gradient norm that is not finite: a loss scaler skips fewer
    nonfinite_critical: float = 0.50  # share of steps whose loss is not finite: this does not come back by itself
    nonfinite_for: float = 60.0
    spike_window: float = 1800.0
    spikes: int = 3  # in that window; one is what a bad batch makes
    info_for: float = 900.0

    # Recording rules.
    hour: float = 3600.0
    day: float = 86_400.0
    week: float = 604_800.0
    month: float = 2_592_000.0
    outage_window: float = 3600.0  # of a ledger that was away where a window begins: its last word before it counts
    end_window: float = 900.0  # a failure belongs to a sign 10 min before to 5 min after (arXiv:2410.21680)
    rail_least: float = 1e6  # bytes a second on the median rail, below which rails are not compared

    # Monitor.
    exporter_down_for: float = 180.0  # a pod's replacement takes less
    node_lost_for: float = 30.0  # shorter than hang_for: it is the cause
    leaf_hosts: int = 4  # hosts of a leaf that lose a port at once: no cable, and no node, is that unlucky
    leaf_window: float = 600.0  # at once: a port that was active in this time
    leaf_down_for: float = 15.0  # one evaluation more; shorter than node_lost_for
    aftermath: float = 1200.0  # a cause is remembered so long after its end: longer than any keep, and a restart
    cause_keep: float = 120.0  # what it holds back may be evaluated every minute only
    bridge_window: float = 600.0  # a run that had a rank on a host this long ago is touched by what the host does
    collector_for: float = 300.0  # --stale-after is 30 s, a hung driver's call may end in four minutes
    blind_for: float = 300.0
    ledger_for: float = 300.0  # exporters spool meanwhile; a restarted StatefulSet with its volume takes less
    refused_window: float = 600.0
    refused_share: float = 0.01  # of the pushes or deliveries; a replaced rank's last push is refused by design
    refused_for: float = 900.0  # longer than its window: only what goes on, not what happened once. Also the next
    dropped_for: float = 900.0
    clock_skew: float = 30.0  # seconds; of the same size as the windows' distance to each other. No time of the rules
    clock_for: float = 300.0
    rules_for: float = 660.0  # longer than refused_window, too: a query that met a restart of its storage fails once

    group_wait: float = 45.0  # a cause is told two evaluations later than its consequence, at worst: longer than these
    group_interval: float = 120.0
    repeat_interval: float = 43_200.0
    watchdog_interval: float = 60.0

    slack_url_file: Path = SECRETS / "slack-url"
    pagerduty_key_file: Path = SECRETS / "pagerduty-key"
    pagerduty_url: str | None = None  # None: PagerDuty's own
    teams: tuple[str, ...] = ()  # each has its own slack-url-TEAM and pagerduty-key-TEAM beside the files above
    webhook_url_file: Path | None = None  # gets every alert, for a system of one's own
    email_to: str | None = None  # gets every alert
    email_from: str = "flopwatch@localhost"
    email_smarthost: str = "localhost:25"
    email_password_file: Path | None = None  # of the user email_from
    shadow: tuple[str, ...] = ()  # alerts that are recorded and told to nobody, until they are trusted
    watchdog_url_file: Path = SECRETS / "watchdog-url"
    watchdog_url: str | None = None  # in place of the file: Alertmanager before 0.26 knows no url_file
    runbook_base_url: str = "alerts/runbooks"  # where the runbooks are published; else their place in the repository
    dashboard_base_url: str = ""  # Grafana's address; else links are relative to it

    def __post_init__(self) -> None:
        if self.pace <= 0:
            raise ValueError(f"pace {self.pace:g}: write a number above 0; 1 is production")
        for team in self.teams:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", team):
                raise ValueError(f"team {team!r}: write letters, digits, dots, underscores and dashes; it names files")
        for name in (
            "rate_window",
            "straggler_window",
            "link_window",
            "xid_window",
            "progress_window",
            "state_window",
            "memory",
            "hang_window",
            "leaf_window",
            "storm_window",
            "storm_burst",
            "mfu_drop_window",
            "mfu_baseline_window",
            "goodput_window",
            "checkpoint_window",
            "spike_window",
            "bridge_window",
            "aftermath",
            "refused_window",
            "ecc_window",
            "bit_error_window",
        ):
            if getattr(self, name) < 4 * self.scrape_interval:
                raise ValueError(
                    f"{name} {getattr(self, name):g} s is less than four scrapes of "
                    f"{self.scrape_interval:g} s; make it longer or scrape more often"
                )

    def seconds_at_pace(self, seconds: float) -> str:
        """Return a time of pace 1 at this pace as a number of seconds, to compare with time()."""
        return f"{seconds / self.pace:.3f}".rstrip("0").rstrip(".")

    def at_pace(self, seconds: float) -> str:
        """Return a time of pace 1 as Prometheus writes it at this pace."""
        return duration(seconds / self.pace)
