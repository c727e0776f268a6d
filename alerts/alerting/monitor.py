"""Alerts on the monitoring itself, on hosts and leaves that are gone, and three that only inhibit others.

`up` and `prometheus_rule_evaluation_failures_total` are Prometheus' own. Which targets are exporters is not told by
their job, which every scrape configuration names as it likes, but by what they served while they were up; which host an
exporter is on, by the GPUs it served. Both are remembered in the pending alert itself (ALERTS), so that an outage
longer than any window goes on being the same alert.
"""

from __future__ import annotations

from textwrap import indent
from typing import Literal

from alerts import recording
from alerts.alert import Alert, each
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

# Alerts that say why every run with a rank on their host stands still. Those on a switch or port of it, or on a GPU, do
# while they are news: they may fire for days beside a run that is well.
HOST_CAUSES = ("NodeLost", "HostOnFaultyLeaf", "Maintenance")
PART_CAUSES = ("NvswitchSxid", "InfinibandPortDown")
GPU_CAUSES = (
    "GpuXidCritical",
    "GpuMemoryFailed",
    "GpuMissing",
    "GpuRecoveryNeeded",
    "NvlinkDown",
    "NvlinkFabricUnhealthy",
)
# What the two in between hold back: of a host, and of a run in as far as it pages.
OF_HOST = "NodeLost|Flopwatch.+|Infiniband.+|RailImbalance|EfaErrors|RoceMisconfigured"
STANDS_STILL = "TrainingDown|TrainingHang|TrainingRestartStorm|TrainingStalled"
OF_RUN = f"{STANDS_STILL}|TrainingStraggler"


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on the monitoring."""
    return (
        _exporter_down(settings),
        *_node_lost(settings),
        _collector_failing(settings),
        _exporter_blind(settings),
        _ledger_down(settings),
        _ledger_unreachable(settings),
        _ledger_refuses(settings),
        _push_refused(settings),
        _series_dropped(settings),
        _clock_wrong(settings),
        _rules_failing(settings),
        _leaf_down(settings),
        _maintenance(settings),
        _host_on_faulty_leaf(settings),
        _run_on_faulty_host(settings),
        _watchdog(),
    )


def _host(expr: str) -> str:
    """Return `expr`, of exporters, with the host of the exporter, or without one that has not told it yet."""
    return f"""({expr})
* on (instance) group_left (host)
(
  {recording.HOST}
    or on (instance)
  group by (instance) ({m.FLOPWATCH_INFO})
)"""


def _exporter_down(settings: AlertSettings) -> Alert:
    state, memory = settings.at_pace(settings.state_window), 'ALERTS{alertname="FlopwatchExporterDown"}'
    was = f"last_over_time({m.COLLECTOR_SUCCESS}[{state}])"
    known = f"(up == 0 and on (job, instance) ({was} or {memory}))"
    return Alert(
        "monitor",
        "FlopwatchExporterDown",
        "warning",
        ("host", "instance", "job"),
        f"""max by (host, instance, job) (
  {known} + on (instance) group_left (host) topk by (instance) (1, {memory} or on (instance) {recording.HOST})
    or on (job, instance)
  {known}
)""",
        # A rolling update of the DaemonSet, or a reboot's last minute, is over by then.
        settings.at_pace(settings.exporter_down_for),
        "An exporter does not answer.",
        "The exporter at {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} does not answer: nothing is "
        "known of that node's GPUs, ports and ranks."
        + each(
            f"group by (run) (last_over_time({m.TRAINING_RANK_INFO}{{host=%q}}[{state}]))",
            "$labels.host",
            " Run {{ .Labels.run }} has ranks there.",
        ),
    )


def _runs(settings: AlertSettings, ranks: str, argument: str) -> str:
    """Return a template that names the runs of `ranks`, how large they are, and how many of their ranks these are."""
    gpus = f"max(last_over_time({m.RUN_GPUS}{{run=%q}}[{settings.at_pace(settings.state_window)}]))"
    return each(
        f"count by (run) (count by (run, rank) ({ranks}))",
        argument,
        " Run {{ .Labels.run }}"
        + each(gpus, ".Labels.run", ' of {{ printf "%.0f" .Value }} GPUs')
        + ' has {{ printf "%.0f" .Value }} of its ranks there.',
    )


def _node_lost(settings: AlertSettings) -> tuple[Alert, ...]:
    state = settings.at_pace(settings.state_window)
    down = 'ALERTS{alertname="FlopwatchExporterDown"}'
    # Other ranks of the run are heard and wait, or the ledger hears none: an exporter that only crashed stops no run.
    stopped = f"""(
  (
    {recording.OVERDUE_STEP}
      or on (run)
    max by (run) (last_over_time({m.RUN_STATE}{{state="down"}}[{state}])) == 1
  )
    unless on (run)
  {m.RUN_STATE}{{state=~"completed|stopped"}} == 1
)"""
    ranks = f"last_over_time({m.TRAINING_RANK_INFO}[{state}])"
    place = f"group by (rack, leaf) (last_over_time({m.NODE_TOPOLOGY_INFO}{{host=%q}}[{state}]))"

    def alert(severity: Literal["critical", "warning"], condition: str = "") -> Alert:
        paged = ',severity="critical"' if severity == "critical" else ""
        same = f'ALERTS{{alertname="NodeLost",alertstate="firing"{paged}}}'
        return Alert(
            "monitor",
            "NodeLost",
            severity,
            ("host",),
            f"""group by (host) (
  {down}
    and on (host)
  (
    {ranks}
      and on (run)
    {stopped}{condition}
  )
    or
  {same} and on (host) {down}
)""",
            # A minute without a step and two failed scrapes are the evidence. Shorter than a hang's and a down run's.
            settings.at_pace(settings.node_lost_for),
            "A node is gone, and a run stands still without it.",
            "Host {{ $labels.host }}"
            + each(place, "$labels.host", " (rack {{ .Labels.rack }}, leaf {{ .Labels.leaf }})")
            + " does not answer."
            + _runs(
                settings,
                f"last_over_time({m.TRAINING_RANK_INFO}{{host=%q}}[{settings.at_pace(settings.hang_memory)}])",
                "$labels.host",
            ),
            keep_firing_for=settings.at_pace(settings.cause_keep),
        )

    return alert("critical", f"\n      and on (run)\n    group by (run) ({recording.PAGES})"), alert("warning")


def _began_within(matchers: str, seconds: float, settings: AlertSettings) -> str:
    """Return alerts that began so lately, pending or firing.

    A Prometheus that restarts has them begin anew, a few minutes later: what was there before is not news.
    """
    window = settings.at_pace(seconds + settings.bridge_window)
    first = f"min_over_time(ALERTS_FOR_STATE[{window}]) > time() - {settings.seconds_at_pace(seconds)}"
    return f"(ALERTS_FOR_STATE{{{matchers}}} and {first})"


def _cut_off(settings: AlertSettings) -> str:
    """Return hosts with a port that is down and was not ten minutes ago, and hosts lost since, with their leaf.

    It is empty where no topology is known. Who works on a host takes it down on purpose.
    """
    state, window = settings.at_pace(settings.state_window), settings.at_pace(settings.leaf_window)
    port = "instance, device, port"
    down = (
        f"max by ({port}) (last_over_time({m.INFINIBAND_STATE}[{state}])) < 4"
        f" and on ({port}) max by ({port}) (max_over_time({m.INFINIBAND_STATE}[{window}])) >= 4"
    )
    hosts = f"""(
  group by (host) ({recording.HOST} and on (instance) ({down}))
    or
  group by (host) ({_began_within('alertname="NodeLost"', settings.leaf_window, settings)})
)
  unless on (host)
ALERTS{{alertname="Maintenance"}}"""
    return f"""({hosts})
* on (host) group_left (leaf)
(
  topk by (host) (1, group by (host, leaf) (last_over_time({m.NODE_TOPOLOGY_INFO}[{window}])))
    or on (host)
  group by (host) (last_over_time({recording.HOST}[{window}]))
)"""


def _still_cut_off(settings: AlertSettings) -> str:
    """Return hosts with a port that was active and is down, however long since, and hosts that are lost."""
    state, port = settings.at_pace(settings.state_window), "instance, device, port"
    return f"""on (host) (
  {recording.HOST}
    and on (instance)
  (
    max by ({port}) (last_over_time({m.INFINIBAND_STATE}[{state}])) < 4
      and on ({port})
    {recording.PORT_WAS_ACTIVE}
  )
    or
  ALERTS{{alertname="NodeLost"}}
)"""


def _leaf_down(settings: AlertSettings) -> Alert:
    itself = 'ALERTS{alertname="LeafDown",alertstate="firing"}'
    behind = 'ALERTS{alertname="HostOnFaultyLeaf",leaf=%q} and ' + " ".join(_still_cut_off(settings).split())
    ranks = f"last_over_time({m.TRAINING_RANK_INFO}[{settings.at_pace(settings.bridge_window)}])"
    return Alert(
        "monitor",
        "LeafDown",
        "critical",
        ("leaf",),
        f"""count by (leaf) (
{indent(_cut_off(settings), "  ")}
) >= {settings.leaf_hosts}
  or on (leaf)
count by (leaf) (
  ALERTS{{alertname="HostOnFaultyLeaf"}} and {indent(_still_cut_off(settings), "  ").lstrip()}
) > 1
  and on (leaf)
{itself}""",
        # Ports of one leaf go down within a scrape; shorter than what is said of each of its hosts.
        settings.at_pace(settings.leaf_down_for),
        "A leaf switch is gone, or what feeds its hosts.",
        '{{ printf "%.0f" $value }} hosts{{ with $labels.leaf }} of leaf {{ . }}{{ end }} lost a port, or are gone, '
        "within "
        + settings.at_pace(settings.leaf_window)
        + "."
        + _runs(settings, f"{ranks} and on (host) ({behind})", "$labels.leaf")
        + " Among the hosts are"
        + each(f"topk(8, group by (host) ({behind}))", "$labels.leaf", " {{ .Labels.host }}", by="host")
        + ".",
    )


def _host_on_faulty_leaf(settings: AlertSettings) -> Alert:
    # Pending is enough: the page about the leaf tells of these hosts as it is sent. What goes on after was told.
    leaf = 'ALERTS{alertname="LeafDown",shadow=""%s}'
    # Where no topology is known only those are neighbours that are cut off together.
    together = _began_within('alertname="LeafDown",shadow=""', settings.leaf_window, settings)
    was = leaf % ',alertstate="firing"' + f"[{settings.at_pace(settings.aftermath)}]"
    return Alert(
        "monitor",
        "HostOnFaultyLeaf",
        "none",
        ("host", "leaf"),
        f"""group by (host, leaf) (
{indent(_cut_off(settings), "  ")}
    and on (leaf)
  ({leaf % ',leaf!=""'} or {together})
    or on (host)
  ALERTS{{alertname="HostOnFaultyLeaf"}}
    and on (leaf)
  last_over_time({was})
    and on (host)
  ALERTS{{alertname=~"{OF_HOST}"}}
)""",
        # It has to be there before what it inhibits.
        "0s",
        "A host is cut off by what its leaf switch does.",
        "Host {{ $labels.host }}{{ with $labels.leaf }} of leaf {{ . }}{{ end }} is cut off with its neighbours, of "
        "which another alert tells. This one holds back the host's own alerts: they are consequences.",
    )


def _collector_failing(settings: AlertSettings) -> Alert:
    late = settings.seconds_at_pace(settings.collector_for)
    # While a driver is released on request there is an old time, and no word about success.
    failing = f"{m.COLLECTOR_SUCCESS} == 0 or {m.COLLECTOR_LAST_SUCCESS} < time() - {late} and {m.COLLECTOR_SUCCESS}"
    return Alert(
        "monitor",
        "FlopwatchCollectorFailing",
        "warning",
        ("host", "instance", "collector"),
        f"max by (host, instance, collector) ({_host(failing)})",
        # A driver call that hangs may come back within four minutes.
        settings.at_pace(settings.collector_for),
        "A source of an exporter fails.",
        "The source {{ $labels.collector }} of the exporter {{ $labels.instance }}"
        "{{ with $labels.host }} on {{ . }}{{ end }} fails."
        + each(
            f"max by (reason) (increase({m.COLLECTOR_FAILURES}{{instance=%q,collector=%q}}"
            f"[{settings.at_pace(settings.refused_window)}])) >= 0.5",
            "$labels.instance $labels.collector",
            ' {{ printf "%.0f" .Value }} times: {{ .Labels.reason }}.',
        ),
    )


def _exporter_blind(settings: AlertSettings) -> Alert:
    blind = f"count by (instance) ({m.GPU_READABLE} == 0)"
    return Alert(
        "monitor",
        "FlopwatchExporterBlind",
        "warning",
        ("host", "instance"),
        f"max by (host, instance) ({_host(blind)})",
        # An exporter that started before the driver, or a container whose devices come late, sees them by then.
        settings.at_pace(settings.blind_for),
        "An exporter cannot see GPUs of its node.",
        "The exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} cannot see "
        '{{ printf "%.0f" $value }} GPUs. That says nothing of the GPUs themselves.',
    )


def _ledger_down(settings: AlertSettings) -> Alert:
    state, memory = settings.at_pace(settings.state_window), 'ALERTS{alertname="FlopwatchLedgerDown"}'
    day = settings.at_pace(settings.memory)

    def was(window: str) -> str:
        """Return ledgers; one embedded in an exporter is that exporter's business."""
        return f"""last_over_time({m.LEDGER_RECEIVED}[{window}])
      unless on (job, instance)
    last_over_time({m.COLLECTOR_SUCCESS}[{window}])"""

    return Alert(
        "monitor",
        "FlopwatchLedgerDown",
        "warning",
        ("instance", "job"),
        # A pod that finds no node is no target any more, and so has no `up`; nor has one that is another pod now.
        f"""max by (instance, job) (
  up == 0
    and on (job, instance)
  (
    {was(state)}
      or
    {memory}
  )
    or on (job, instance)
  (
    {was(day)}
  )
    unless on (job, instance)
  up
    unless on (job)
  {m.LEDGER_RECEIVED}
)""",
        # Exporters keep what they have to say meanwhile, so nothing is lost; but a run that goes down now pages nobody.
        settings.at_pace(settings.ledger_for),
        "The ledger does not answer.",
        "The ledger at {{ $labels.instance }} does not answer: goodput stands still, and a run that goes down is not "
        "noticed. Exporters keep their records until it is back.",
    )


def _ledger_unreachable(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.refused_window)
    failing = (
        f'sum by (instance) (increase({m.LEDGER_SENT}{{outcome="failed"}}[{window}])) > 0'
        f' unless on (instance) sum by (instance) (increase({m.LEDGER_SENT}{{outcome="sent"}}[{window}])) > 0'
    )
    return Alert(
        "monitor",
        "FlopwatchLedgerUnreachable",
        "warning",
        ("host", "instance"),
        f"max by (host, instance) ({_host(failing)})",
        # Nothing delivered in ten minutes already; longer than the ledger's own alert, which is then the cause.
        settings.at_pace(settings.ledger_for + settings.exporter_down_for),
        "An exporter cannot reach the ledger.",
        "The exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} has delivered nothing to the "
        f"ledger in {window}: the ledger will call its runs down.",
    )


def _ledger_refuses(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.refused_window)

    def share(metric: m.Metric) -> str:
        refused = f'sum by (instance) (increase({metric}{{outcome="refused"}}[{window}]))'
        return f"{refused} / sum by (instance) (increase({metric}[{window}])) > {settings.refused_share:g}"

    return Alert(
        "monitor",
        "FlopwatchLedgerRefuses",
        "warning",
        ("host", "instance"),
        f"max by (host, instance) ({_host(f'{share(m.LEDGER_SENT)} or {share(m.LEDGER_RECEIVED)}')})",
        # A record that is wrong stays wrong; one release talking to another while both roll out does not.
        settings.at_pace(settings.refused_for),
        "The ledger refuses records.",
        "The ledger refused {{ $value | humanizePercentage }} of the records that {{ $labels.instance }}"
        "{{ with $labels.host }} on {{ . }}{{ end }} sent or took: they are in no goodput.",
    )


def _push_refused(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.refused_window)
    every = f"sum by (instance) (increase({m.OTLP_ACCEPTED}[{window}]))"
    refused = (
        f'sum by (instance, outcome) (increase({m.OTLP_ACCEPTED}{{outcome!~"accepted|partial|foreign_gpu"}}'
        f"[{window}])) / on (instance) group_left () {every} > {settings.refused_share:g}"
    )
    return Alert(
        "monitor",
        "FlopwatchPushRefused",
        "warning",
        ("host", "instance", "outcome"),
        f"max by (host, instance, outcome) ({_host(refused)})",
        # A replaced rank's last pushes are refused, too, and stay in the window for ten minutes.
        settings.at_pace(settings.refused_for),
        "An exporter refuses what training processes push.",
        "The exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} refused "
        "{{ $value | humanizePercentage }} of the pushes as {{ $labels.outcome }}: those ranks are not seen.",
    )


def _series_dropped(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.refused_window)
    dropped = f"sum by (instance, budget) (increase({m.SERIES_DROPPED}[{window}])) > 0"
    return Alert(
        "monitor",
        "FlopwatchSeriesDropped",
        "warning",
        ("host", "instance", "budget"),
        f"max by (host, instance, budget) ({_host(dropped)})",
        # Two generations of a rank's series overlap for a scrape when it is replaced: longer than the window.
        settings.at_pace(settings.dropped_for),
        "An exporter leaves series out to stay within its budget.",
        "The exporter {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} left out "
        '{{ printf "%.0f" $value }} samples in ' + window + " over the budget per {{ $labels.budget }}.",
    )


def _clock_wrong(settings: AlertSettings) -> Alert:
    # The newest of the sources was read at this very scrape; one that fails is older, and no matter of the clock.
    ahead = f"max by (instance) ({m.COLLECTOR_LAST_SUCCESS} - timestamp({m.COLLECTOR_LAST_SUCCESS}))"
    wrong = f"{ahead} > {settings.clock_skew:g} or {ahead} < -{settings.clock_skew:g}"
    answers = f"on (instance) max by (instance) ({m.COLLECTOR_SUCCESS}) == 1"
    return Alert(
        "monitor",
        "FlopwatchClockWrong",
        "warning",
        ("host", "instance"),
        f"max by (host, instance) ({_host(f'({wrong}) and {answers}')})",
        # A clock is stepped right after a boot.
        settings.at_pace(settings.clock_for),
        "A node's clock differs from Prometheus' clock.",
        "The clock of {{ $labels.instance }}{{ with $labels.host }} on {{ . }}{{ end }} differs by "
        '{{ printf "%.0f" $value }} s from that of Prometheus: steps, Xids and records of it are placed wrongly.',
    )


def _rules_failing(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.refused_window)
    failures = f'increase(prometheus_rule_evaluation_failures_total{{rule_group=~".*flopwatch.*"}}[{window}])'
    return Alert(
        "monitor",
        "FlopwatchRulesFailing",
        "warning",
        ("rule_group",),
        f"sum by (rule_group) ({failures}) > 0",
        # Longer than the window, which holds a single failure for ten minutes.
        settings.at_pace(settings.rules_for),
        "Prometheus fails to evaluate our rules.",
        'Rules of {{ $labels.rule_group }} failed {{ printf "%.0f" $value }} times in ' + window + ", and with "
        "them their alerts.",
    )


def _maintenance(settings: AlertSettings) -> Alert:
    memory = settings.at_pace(settings.memory)
    return Alert(
        "monitor",
        "Maintenance",
        "none",
        ("host",),
        # What was said last holds while the node reboots.
        f"max by (host) (last_over_time({m.NODE_MAINTENANCE_UNTIL}[{memory}])) > time()",
        # From the first word on, for its alerts have to be held back before they are sent.
        "0s",
        "Somebody works on this node.",
        "Host {{ $labels.host }} is in maintenance until {{ $value | humanizeTimestamp }}: no alert of it is sent.",
        keep_firing_for=settings.at_pace(settings.cause_keep),
    )


def _run_on_faulty_host(settings: AlertSettings) -> Alert:
    def named(*names: str) -> str:
        return f'alertname=~"{"|".join(names)}"'

    def news(names: tuple[str, ...], known: str = "") -> str:
        return _began_within(f'{named(*names)},severity="critical",shadow=""{known}', settings.xid_window, settings)

    def was(alert: str) -> str:
        return f"last_over_time(ALERTS{{{alert}}}[{settings.at_pace(settings.aftermath)}])"

    ranks = f"last_over_time({m.TRAINING_RANK_INFO}[{settings.at_pace(settings.bridge_window)}])"
    firing = 'alertstate="firing",shadow=""'
    others = named(*(cause for cause in HOST_CAUSES if cause != "HostOnFaultyLeaf"), *PART_CAUSES, *GPU_CAUSES)
    return Alert(
        "monitor",
        "RunOnFaultyHost",
        "none",
        ("host", "run"),
        # Of a GPU's faults pending is enough: they wait longer than a hang, to be told in its place. What goes on by
        # itself was told, a leaf as LeafDown, and is not over for the run as long as it stands still since then; but
        # beside a fault that goes on for days a run has other troubles, too. A GPU without a uuid is not the GPU of
        # each rank without one.
        f"""group by (host, run) (
  {ranks} and on (host) ALERTS{{{named(*HOST_CAUSES)},{firing}}}
    or on (host, run)
  {ranks} and on (host) {news(PART_CAUSES)}
    or on (host, run)
  {ranks} and on (uuid) {news(GPU_CAUSES, ',uuid!=""')}
    or on (host, run)
  (
    ALERTS_FOR_STATE{{alertname="RunOnFaultyHost"}}
      > on (run) group_left ()
    (min by (run) (ALERTS_FOR_STATE{{alertname=~"{STANDS_STILL}"}}) - {settings.seconds_at_pace(settings.xid_window)})
      or on (host, run)
    ALERTS{{alertname="RunOnFaultyHost"}}
      and on (run)
    ALERTS{{alertname=~"{OF_RUN}"}}
      unless on (host)
    ALERTS{{{named(*HOST_CAUSES, *PART_CAUSES, *GPU_CAUSES)},{firing}}}
  )
    and on (host)
  (
    {was(f"{others},{firing}")}
      or on (host)
    {was('alertname="HostOnFaultyLeaf"')} and on (leaf) {was(f'alertname="LeafDown",{firing}')}
  )
)""",
        # It has to be there before what it inhibits.
        "0s",
        "A host on which a run has, or had, ranks is at fault, or the GPU of one.",
        "Run {{ $labels.run }} has ranks on {{ $labels.host }}, of which another alert tells what is wrong. This one "
        "holds back the run's own alerts: they are consequences.",
    )


def _watchdog() -> Alert:
    return Alert(
        "watchdog",
        "FlopwatchWatchdog",
        "info",
        (),
        "vector(1)",
        "0s",
        "Always firing: when it stops arriving, Prometheus or Alertmanager is broken.",
        "Prometheus evaluates rules and Alertmanager delivers. Nobody is paged by this alert, but by its absence.",
    )
